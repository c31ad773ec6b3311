"""Laws of what is let in: the queue's ends, keys' shares, deadlines, and the limits on bodies and headers."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import READY, SILENT_SEED, SILENT_SEEDS
from tests.server.support import Running, eventually, running_server
from vmmkv.server.config import FrontConfig
from vmmkv.server.http.limits import MOST_RETRY_S, WINDOW_S, Rate
from vmmkv.server.launch import PatientProtocol
from vmmkv.server.protocol import Abort, Generate

SILENT = {"model": "tiny", "prompt": "a", "seed": SILENT_SEED}
KEYS = ("a-key-of-one", "a-key-of-two")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def generates(server: Running) -> list[Generate]:
    return [message for message in server.engine.received if isinstance(message, Generate)]


class InFlight:
    """Requests that get no answer, until they are given up."""

    def __init__(self, server: Running, count: int, body: dict[str, Any] = SILENT, **options: Any) -> None:
        self._server, self._count, self._body, self._options = server, count, body, options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._client = httpx.AsyncClient(base_url=self._server.url, timeout=60, limits=httpx.Limits(max_connections=None))
        posts = [self._client.post("/v1/completions", json=self._body, **self._options) for _ in range(self._count)]
        self._all = self._loop.create_task(asyncio.wait([self._loop.create_task(post) for post in posts]))  # type: ignore[arg-type]
        try:
            self._loop.run_until_complete(self._all)
        except asyncio.CancelledError:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.run_until_complete(self._client.aclose())

    def __enter__(self) -> "InFlight":
        before = len(generates(self._server))
        self._thread.start()
        wanted = before + self._count * self._body.get("n", 1)
        assert eventually(lambda: len(generates(self._server)) == wanted)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._all.cancel)
        self._thread.join(20)


@pytest.fixture
def narrow() -> Iterator[Running]:
    """Four run, two may wait."""
    with running_server(front=FrontConfig(max_queued_requests=2, max_queued_tokens=50)) as server:
        yield server


def test_beyond_the_queue_is_a_429_that_says_when_to_come_again_and_the_engine_hears_nothing(narrow: Running) -> None:
    with InFlight(narrow, READY.max_sequences + 2):
        with pytest.raises(openai.RateLimitError) as caught:
            narrow.openai.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.type == "requests"
        assert 1 <= int(caught.value.response.headers["Retry-After"]) <= MOST_RETRY_S
        assert len(generates(narrow)) == READY.max_sequences + 2
    assert eventually(lambda: narrow.service.intake.num_sequences == 0)
    assert narrow.openai.completions.create(model="tiny", prompt="a").choices[0].text == "a"


def test_every_sequence_of_a_request_counts_and_a_request_alone_is_let_in_however_wide(narrow: Running) -> None:
    assert len(narrow.openai.completions.create(model="tiny", prompt="a", n=16).choices) == 16
    with InFlight(narrow, 1, {**SILENT, "seed": SILENT_SEEDS[0], "n": 3}):
        assert narrow.http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b", "c"]}).status_code == 200
        assert narrow.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 4}).status_code == 429


def test_tokens_of_prompts_that_wait_have_a_limit_of_their_own_and_those_that_began_do_not_count(narrow: Running) -> None:
    with InFlight(narrow, 1, {**SILENT, "prompt": "a" * 40}):
        refused = narrow.http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 20})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        assert "40 tokens wait" in refused.json()["error"]["message"]
        assert narrow.http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 10}).status_code == 200
        assert narrow.client.waiting_tokens == 40
    assert eventually(lambda: narrow.client.waiting_tokens == 0)
    narrow.engine.endless, narrow.engine.step_s = True, 0.02
    stream = narrow.openai.completions.create(model="tiny", prompt=[1] * 45, max_tokens=100, stream=True)
    next(iter(stream))
    assert narrow.client.waiting_tokens == 0
    assert narrow.http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 45, "max_tokens": 1}).status_code == 200


def test_a_request_that_is_refused_leaves_nothing_behind(narrow: Running) -> None:
    for body in ({"prompt": [1] * 300}, {"prompt": "a", "logit_bias": {"257": 1, "258": 1}}, {"prompt": [999]}):
        assert narrow.http.post("/v1/completions", json={"model": "tiny", **body}).status_code == 400
    assert eventually(lambda: narrow.service.intake.num_sequences == 0)


def test_how_long_to_wait_follows_from_what_came_through() -> None:
    now = 100.0
    rate = Rate(lambda: now)
    assert rate.seconds_for(1) == WINDOW_S
    for _ in range(10):
        rate.add(20)
        now += 1
    assert rate.seconds_for(100) == 5
    assert rate.seconds_for(1) == 1
    assert rate.seconds_for(1e9) == MOST_RETRY_S
    now += WINDOW_S + 1
    assert rate.seconds_for(1) == WINDOW_S


class TestDeadlines:
    @pytest.mark.parametrize("of_server", [False, True])
    def test_an_answer_that_is_late_is_a_408_that_clients_do_not_repeat_and_the_engine_is_told(self, of_server: bool) -> None:
        with running_server(front=FrontConfig(request_timeout_s=0.5 if of_server else 60)) as server:
            client = server.openai.with_options(max_retries=3)
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(**SILENT, extra_body={"timeout": 60 if of_server else 0.5})  # type: ignore[call-overload]
            assert (caught.value.status_code, caught.value.code) == (408, "request_timeout")
            assert "0.5 s" in str(caught.value)
            assert eventually(lambda: len(server.engine.aborted()) == 1)
            assert [request.request_id for request in generates(server)] == [*server.engine.aborted()]
            assert eventually(lambda: server.service.intake.num_sequences == 0)

    def test_a_stream_that_is_late_has_what_was_made_by_then_and_ends_with_the_error(self, server: Running) -> None:
        server.engine.endless, server.engine.step_s = True, 0.02
        texts, body = [], {"timeout": 0.5}
        stream = server.openai.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True, extra_body=body)
        with pytest.raises(openai.APIError, match=r"within 0\.5 s"):
            for chunk in stream:
                texts.append(chunk.choices[0].text)
        assert 1 < len("".join(texts)) < 200
        assert eventually(lambda: any(isinstance(message, Abort) for message in server.engine.received))

    def test_who_is_in_time_hears_nothing_of_it(self, server: Running) -> None:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "abc", "timeout": 20, "stream": stream}
            assert "timeout" not in server.http.post("/v1/completions", json=body).text


class TestSizes:
    def test_a_body_that_is_too_large_is_a_413_with_and_without_its_length(self) -> None:
        with running_server(front=FrontConfig(max_body_bytes=10_000)) as server:
            large = b'{"model": "tiny", "prompt": "' + b"a" * 20_000 + b'"}'
            for content in (large, iter([large[:5000], large[5000:15_000], large[15_000:]])):
                answer = httpx.post(
                    f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}
                )
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a" * 100}).status_code == 200

    def test_headers_that_are_too_large_are_a_431_and_larger_ones_end_the_connection(self, server: Running) -> None:
        answer = server.http.get("/v1/models", headers={"X-Large": "a" * 20_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            with contextlib.suppress(ConnectionError):  # it need not have read the last of it
                connection.sendall(b"GET /health HTTP/1.1\r\nX-Endless: " + b"a" * 70_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert server.http.get("/v1/models").status_code == 200

    @pytest.mark.parametrize("drips", [False, True])
    def test_headers_that_do_not_come_are_not_waited_for(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, drips: bool
    ) -> None:
        monkeypatch.setattr(PatientProtocol, "header_s", 0.5)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection, server.http as http:
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            for letter in "GET /health HTTP" if drips else "":
                with contextlib.suppress(OSError):
                    connection.send(letter.encode())
                time.sleep(0.05)
            with contextlib.suppress(ConnectionResetError):  # as it ends where a letter was on its way
                assert connection.recv(10) == b""
            assert time.monotonic() - began < 10
            assert http.get("/health").status_code == 200  # on the connection that it has

    def test_bodies_that_do_not_come_are_let_go_of(self, server: Running) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(10):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 200

    @pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 50_000, b"1" * 100_000, b"\xff\xfe", b""])
    def test_json_that_is_too_deep_or_none_is_a_400(self, server: Running, content: bytes) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"


class TestShares:
    @pytest.fixture
    def shared(self) -> Iterator[Running]:
        with running_server(front=FrontConfig(api_keys=KEYS, admin_key="the-admin-key", max_tokens_per_key=100)) as server:
            yield server

    def test_a_key_has_so_many_tokens_in_flight_and_others_have_theirs(self, shared: Running) -> None:
        body = {"model": "tiny", "prompt": [1] * 20, "max_tokens": 30}
        with InFlight(shared, 1, {**SILENT, "prompt": "a" * 20, "max_tokens": 40}, headers=bearer(KEYS[0])):
            refused = shared.http.post("/v1/completions", json=body, headers=bearer(KEYS[0]))
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
            assert "60 tokens in flight" in refused.json()["error"]["message"]
            assert int(refused.headers["Retry-After"]) >= 1
            assert shared.http.post("/v1/completions", json=body, headers=bearer(KEYS[1])).status_code == 200
            assert shared.http.post("/v1/completions", json=body, headers=bearer("the-admin-key")).status_code == 200
        assert eventually(lambda: shared.http.post("/v1/completions", json=body, headers=bearer(KEYS[0])).status_code == 200)

    def test_what_a_key_can_never_have_is_a_400_that_says_what_would_work(self, shared: Running) -> None:
        body = {"model": "tiny", "prompt": [1] * 20, "max_tokens": 30, "n": 2}
        assert shared.http.post("/v1/completions", json=body, headers=bearer(KEYS[0])).status_code == 200
        refused = shared.http.post("/v1/completions", json={**body, "max_tokens": 31}, headers=bearer(KEYS[0]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        assert "lower max_tokens to 30" in refused.json()["error"]["message"]

    def test_an_answer_of_no_given_length_fits_the_share(self, shared: Running) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert shared.http.post("/v1/chat/completions", json=body, headers=bearer(KEYS[0])).status_code == 200
        (request,) = generates(shared)
        assert len(request.prompt) + request.max_new_tokens == 100


class TestEnding:
    def test_while_draining_the_health_says_so_new_requests_get_503_and_running_ones_finish(self, server: Running) -> None:
        server.engine.endless, server.engine.step_s = True, 0.02
        stream = iter(server.openai.completions.create(model="tiny", prompt="a", max_tokens=40, stream=True))
        num_letters = len(next(stream).choices[0].text)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
        assert eventually(lambda: server.http.get("/health").json()["status"] == "draining")
        health, refused = server.http.get("/health"), server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert (health.status_code, refused.status_code) == (503, 503)
        assert "shutting down" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["Retry-After"]) <= 25
        assert num_letters + sum(len(chunk.choices[0].text) for chunk in stream) == 40
        assert draining.result(10) is True

    def test_a_request_whose_body_comes_after_the_drain_began_is_turned_away(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        intake, passed = server.service.intake, threading.Event()
        check_room = intake.check_room
        monkeypatch.setattr(intake, "check_room", lambda *few: (check_room(*few), passed.set()))
        body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=10) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body[:1])
            assert passed.wait(10)  # the check that requests without a body in sight have
            assert asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop).result(10) is True
            client.sendall(body[1:])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        assert not generates(server)

    def test_a_drain_ends_in_time_though_requests_do_not(self) -> None:
        with running_server(front=FrontConfig(drain_timeout_s=0.3)) as server, InFlight(server, 1):
            began = time.monotonic()
            assert asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop).result(10) is False
            assert time.monotonic() - began < 10

    def test_an_engine_that_has_work_and_makes_no_step_is_reported_until_it_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with running_server(front=FrontConfig(stuck_after_s=0.4)) as server:
            watching = asyncio.run_coroutine_threadsafe(server.service.watchdog.watch(), server.loop)
            time.sleep(0.6)
            assert server.http.get("/health").json()["status"] == "ok"  # idle is not stuck
            with InFlight(server, 1):
                assert eventually(lambda: server.http.get("/health").json()["status"] == "stuck")
                assert server.http.get("/health").status_code == 503
                assert eventually(lambda: "has made no step" in caplog.text)
                assert eventually(self._is_ok_after_a_step(server))
            assert eventually(lambda: "makes steps again" in caplog.text)
            watching.cancel()

    @staticmethod
    def _is_ok_after_a_step(server: Running) -> Callable[[], bool]:
        """The one that is silent makes it stuck again soon: whoever comes late to look has another step made."""
        body = {"model": "tiny", "prompt": "a"}
        return lambda: (
            server.http.post("/v1/completions", json=body).status_code == 200
            and server.http.get("/health").json()["status"] == "ok"
        )
