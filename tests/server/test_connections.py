"""Laws of connections, over sockets: clients that end their side, HEAD, and a process without file descriptors."""

import asyncio
import errno
import logging
import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tests.server.fake_engine import SILENT_SEED
from tests.server.support import Running, asking, eventually
from vmmkv_server.http import edge
from vmmkv_server.http.edge import log_once_without_descriptors


def connected(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 80), timeout=60)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_ends_its_side_after_its_request_gets_its_answer(listening: Running, stream: str) -> None:
    listening.engine.step_s = 0.05
    body = b'{"model": "tiny", "prompt": "abc", "stream": %s}' % stream.encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connected(listening) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason":"stop"' in answer


def test_a_client_that_is_gone_has_its_request_aborted(listening: Running) -> None:
    with asking(listening, "/v1/completions", {"model": "tiny", "prompt": "abc", "seed": SILENT_SEED}):
        pass
    assert eventually(lambda: len(listening.engine.aborted()) == 1)


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics", "/v1/models", "/kv", "/events", "/openapi.json"])
def test_head_is_get_without_its_body(listening: Running, path: str) -> None:
    with listening.http as http:
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        if path != "/events":
            assert head.headers["content-type"] == http.get(path).headers["content-type"]


def test_headers_beyond_the_protocols_limit_end_the_connection(listening: Running) -> None:
    with connected(listening) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Endless: " + b"a" * 70_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert listening.http.get("/health").status_code == 200


def test_a_shortage_of_descriptors_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def shortage() -> None:
        loop = asyncio.get_running_loop()
        log_once_without_descriptors(loop)
        for _ in range(500):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_exception_handler({"message": "something else"})

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(shortage(), 60))
    said = [record.message.partition(" (")[0] for record in caplog.records]
    assert said == ["no connection can be accepted: Too many open files", "something else"]


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "SEND_S", 0.05)

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/health", "raw_path": b"/health", "query_string": b"", "headers": []}
        await asyncio.wait_for(
            edge.Edge(PlainTextResponse("text"))(scope, asyncio.Event().wait, lambda message: asyncio.Event().wait()), 60
        )

    asyncio.run(ask())
