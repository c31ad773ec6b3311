"""Laws of connections, over sockets: clients that end their side, HEAD, and a process without file descriptors."""

import asyncio
import errno
import logging
import socket
import time

import httpx
import pytest

from tests.server.fake_engine import SILENT_SEED
from tests.server.support import Running, eventually
from tests.server.test_app import HELLO
from vmmkv.server.launch import log_once_without_descriptors

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def ask(server: Running, body: bytes) -> socket.socket:
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port or 80), timeout=10)
    connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_ends_its_side_after_its_request_gets_its_answer(listening: Running, stream: str) -> None:
    listening.engine.step_s = 0.05
    with ask(listening, b'{"model": "tiny", "prompt": "abc", "stream": %s}' % stream.encode()) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason":"stop"' in answer


def test_a_client_that_is_gone_has_its_request_aborted(listening: Running) -> None:
    ask(listening, b'{"model": "tiny", "prompt": "abc", "seed": %d}' % SILENT_SEED).close()
    assert eventually(lambda: len(listening.engine.aborted()) == 1, within_s=8)


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics", "/v1/models", "/kv", "/events", "/openapi.json"])
def test_head_is_get_without_its_body(listening: Running, path: str) -> None:
    with listening.http as http:
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        if path != "/events":
            assert head.headers["content-type"] == http.get(path).headers["content-type"]


def test_headers_beyond_the_protocols_limit_end_the_connection(listening: Running) -> None:
    url = httpx.URL(listening.url)
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
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

    began_s = time.monotonic()
    with caplog.at_level(logging.ERROR):
        asyncio.run(shortage())
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "no connection can be accepted: Too many open files",
        "something else",
    ]
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "service_tier": "flex", "user": "z"},
        {"store": False, "skip_special_tokens": True},
        {"messages": [{"role": "user", "content": "hello", "name": "me"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [], "functions": None},
    ],
)
def test_parameters_that_change_nothing_are_taken(server: Running, extra: dict[str, object]) -> None:
    answer = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **extra})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "extra",
    [{"store": True}, {"skip_special_tokens": False}, {"tools": [{"type": "function"}]}, {"tool_choice": "auto"}],
)
def test_parameters_that_would_change_the_answer_are_refused(server: Running, extra: dict[str, object]) -> None:
    answer = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **extra})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
