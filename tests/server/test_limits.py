"""Laws of admission: keys and namespaces, the ends of the queue, deadlines, and the limits on bodies, headers and names."""

import asyncio
import base64
import contextlib
import hmac
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx
import openai
import pytest
from starlette.responses import PlainTextResponse

from tests.server.conftest import Servers
from tests.server.fake_engine import READY, SILENT_SEED, SILENT_SEEDS
from tests.server.support import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Running,
    asking,
    bearer,
    eventually,
    running_server,
    without_deadlines,
)
from vmmkv_server.config import ServeConfig
from vmmkv_server.engine_client import EngineClient
from vmmkv_server.http.limits import ANONYMOUS, MAX_BODIES, MOST_RETRY_S, WINDOW_S, AdmissionQueue, Caller, Guard, Throughput
from vmmkv_server.launch import answered_hosts
from vmmkv_server.protocol import Abort, Forget, Loading, Ready, Resize, Sleep

SILENT: dict[str, Any] = {"model": "tiny", "prompt": "a", "seed": SILENT_SEED}
ONE, TWO, ADMIN = "a-key-of-one", "a-key-of-two", "the-key-of-the-administrator"


def basic(key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'anybody:{key}'.encode()).decode()}"}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@contextlib.contextmanager
def in_flight(server: Running, count: int, **body: Any) -> Iterator[None]:
    """Requests that get no answer, until the block ends."""
    wanted = len(server.generates) + count * body.get("n", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(asking(server, COMPLETIONS, SILENT | body))
        assert eventually(lambda: len(server.generates) == wanted)
        yield


def queue(*api_keys: str, **options: Any) -> AdmissionQueue:
    return AdmissionQueue(EngineClient("ipc://nowhere"), ServeConfig(api_keys=api_keys, **options))


def caller(keys: AdmissionQueue, key: str) -> Caller:
    found = keys.identify(f"Bearer {key}".encode())
    assert found is not None
    return found


@pytest.fixture
def narrow(servers: Servers) -> Running:
    """Four run, two may wait."""
    return servers.get(front=ServeConfig(max_queued_requests=2, max_queued_tokens=50))


@pytest.fixture
def locked(servers: Servers) -> Running:
    return servers.get(front=ServeConfig(api_keys=(ONE, TWO), admin_key=ADMIN))


class TestQueue:
    def test_a_full_queue_is_a_429_that_says_when_to_come_again(self, narrow: Running) -> None:
        with in_flight(narrow, READY.limits.max_sequences + 2):
            with pytest.raises(openai.RateLimitError) as caught:
                narrow.openai.completions.create(model="tiny", prompt="a")
            assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
            assert 1 <= int(caught.value.response.headers["Retry-After"]) <= MOST_RETRY_S
            assert len(narrow.generates) == READY.limits.max_sequences + 2
        assert eventually(lambda: narrow.service.queue.num_sequences == 0)
        assert narrow.complete().status_code == 200

    def test_each_sequence_counts_and_a_request_alone_is_let_in_however_wide(self, narrow: Running) -> None:
        assert len(narrow.complete(n=16).json()["choices"]) == 16
        with in_flight(narrow, 1, seed=SILENT_SEEDS[0], n=3):
            assert narrow.complete(prompt=["a", "b", "c"]).status_code == 200
            assert narrow.complete(n=4).status_code == 429

    def test_tokens_of_waiting_prompts_have_a_limit_and_those_that_began_do_not_count(self, narrow: Running) -> None:
        with in_flight(narrow, 1, prompt="a" * 40):
            refused = narrow.complete(prompt=[1] * 20)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
            assert "40 tokens wait" in refused.json()["error"]["message"]
            assert narrow.complete(prompt=[1] * 10).status_code == 200
            assert narrow.client.waiting_tokens == 40
        assert eventually(lambda: narrow.client.waiting_tokens == 0)
        narrow.never_ends()
        stream = narrow.openai.completions.create(model="tiny", prompt=[1] * 45, max_tokens=100, stream=True)
        next(iter(stream))
        assert narrow.client.waiting_tokens == 0
        assert narrow.complete(prompt=[1] * 45, max_tokens=1).status_code == 200
        stream.close()

    def test_a_request_that_is_refused_leaves_nothing_behind(self, narrow: Running) -> None:
        for body in ({"prompt": [1] * 300}, {"logit_bias": {"257": 1, "258": 1}}, {"prompt": [999]}):
            assert narrow.complete(**body).status_code == 400
        assert eventually(lambda: narrow.service.queue.num_sequences == 0)

    def test_how_long_to_wait_follows_from_throughput(self) -> None:
        now = 100.0
        throughput = Throughput(lambda: now)
        assert throughput.seconds_for(1) == WINDOW_S
        for _ in range(10):
            throughput.add(20)
            now += 1
        assert [throughput.seconds_for(amount) for amount in (100, 1, 1e9)] == [5, 1, MOST_RETRY_S]
        now += WINDOW_S + 1
        assert throughput.seconds_for(1) == WINDOW_S


class TestDeadlines:
    @pytest.mark.parametrize("of_server", [False, True])
    def test_a_late_answer_is_a_408_that_clients_do_not_repeat(self, of_server: bool) -> None:
        with running_server(front=ServeConfig(request_timeout_s=0.3 if of_server else 60)) as server:
            client = server.openai.with_options(max_retries=3)
            with pytest.raises(openai.APIStatusError, match=r"0\.3 s") as caught:
                client.completions.create(**SILENT, extra_body={"timeout": 60 if of_server else 0.3})
            assert (caught.value.status_code, caught.value.code) == (408, "request_timeout")
            assert eventually(lambda: server.engine.aborted() == {server.sent.request_id})
            assert eventually(lambda: server.service.queue.num_sequences == 0)

    def test_a_late_stream_has_the_text_so_far_and_ends_with_the_error(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.never_ends(step_s=0.1)
        end, texts = without_deadlines(server, monkeypatch), list[str]()
        body = {"timeout": 60}
        stream = server.openai.completions.create(model="tiny", prompt="a", max_tokens=250, stream=True, extra_body=body)
        with pytest.raises(openai.APIError, match="within 60 s"):
            for chunk in stream:
                texts.append(chunk.choices[0].text)
                if len(texts) == 2:
                    end()
        assert 1 < len("".join(texts)) < 250
        assert eventually(lambda: bool(server.engine.aborted()))

    def test_time_in_the_tokeniser_counts(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server.tokenizer, "encode", lambda prompt, **limits: time.sleep(1) or [97])
        assert server.complete(prompt="a" * 9999, timeout=0.1).status_code == 408
        assert not server.generates


class TestSizes:
    def test_a_body_that_is_too_large_is_a_413_with_and_without_its_length(self) -> None:
        with running_server(front=ServeConfig(max_body_bytes=10_000), sockets=True) as server, server.http as http:
            large = b'{"model": "tiny", "prompt": "' + b"a" * 20_000 + b'"}'
            for content in (large, iter([large[:5000], large[5000:15_000], large[15_000:]])):
                assert code(http.post(COMPLETIONS, content=content)) == (413, "body_too_large")
            assert server.complete(prompt="a" * 100).status_code == 200
            assert eventually(lambda: server.service.queue.held_bytes == 0)

    def test_all_bodies_together_have_a_limit(self) -> None:
        held = queue(max_body_bytes=4096)
        held.held_bytes = MAX_BODIES * 4096 - 10
        held.check_body(10, held_bytes=0)
        with pytest.raises(Exception, match="memory there is for bodies"):
            held.check_body(11, held_bytes=0)

    def test_headers_that_are_too_large_are_a_431(self, server: Running) -> None:
        assert code(server.http.get("/v1/models", headers={"X-Large": "a" * 20_000})) == (431, "headers_too_large")

    @pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 50_000, b"1" * 100_000, b"\xff\xfe", b""])
    def test_json_that_is_too_deep_or_none_is_a_400(self, server: Running, content: bytes) -> None:
        for path in (COMPLETIONS, "/tokenize"):
            answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


class TestDrain:
    def test_requests_get_503_while_those_in_flight_finish(self, fresh: Running) -> None:
        fresh.never_ends()
        stream = iter(fresh.openai.completions.create(model="tiny", prompt="a", max_tokens=40, stream=True))
        num_letters = len(next(stream).choices[0].text)
        draining = asyncio.run_coroutine_threadsafe(fresh.service.queue.drain(), fresh.loop)
        assert eventually(lambda: fresh.http.get("/health").json()["status"] == "draining")
        refused = fresh.complete()
        assert (fresh.http.get("/health").status_code, refused.status_code) == (503, 503)
        assert "shutting down" in refused.json()["error"]["message"] and 1 <= int(refused.headers["Retry-After"]) <= 25
        assert num_letters + sum(len(chunk.choices[0].text) for chunk in stream) == 40
        assert draining.result(60) is True

    def test_a_drain_ends_in_time_though_requests_do_not(self) -> None:
        with running_server(front=ServeConfig(drain_timeout_s=0.2)) as server, in_flight(server, 1):
            assert asyncio.run_coroutine_threadsafe(server.service.queue.drain(), server.loop).result(60) is False

    def test_an_engine_that_has_work_and_makes_no_step_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        with running_server(front=ServeConfig(stuck_after_s=0.3)) as server:
            watching = asyncio.run_coroutine_threadsafe(server.service.watchdog.watch(), server.loop)
            time.sleep(0.4)
            assert server.http.get("/health").json()["status"] == "ok"  # idle is not stuck
            with in_flight(server, 1):
                assert eventually(lambda: server.http.get("/health").json()["status"] == "stuck")
                assert eventually(lambda: "has made no step" in caplog.text)
                assert eventually(lambda: server.complete().is_success and server.http.get("/health").is_success)
            assert eventually(lambda: "makes steps again" in caplog.text)
            watching.cancel()


class TestKeys:
    @pytest.mark.parametrize(
        "authorization",
        [None, "Bearer no-such-key", f"Bearer {ONE}x", ONE, "Basic ?", "Bearer \xff\xfe", basic("no")["Authorization"]],
    )
    def test_without_a_key_every_route_but_the_health_is_a_401(self, locked: Running, authorization: str | None) -> None:
        document = locked.http.get("/openapi.json", headers=bearer(ONE)).json()
        paths = {path.replace("{name}", "tiny") for path in document["paths"]} - {"/health"}
        assert {COMPLETIONS, "/v1/models", "/metrics", "/version", "/tokenize", "/kv/reset"} <= paths
        raw = [] if authorization is None else [(b"Authorization", authorization.encode("latin-1"))]
        for path in sorted(paths | {"/no/such/route", "/openapi.json"}):
            answer = locked.http.request("POST" if path.startswith("/kv") else "GET", path, headers=raw)
            assert code(answer) == (401, "invalid_api_key"), path
        assert locked.http.get("/health", headers=raw).status_code == 200

    def test_a_browser_may_send_a_key_as_password_but_not_the_administrators(self, locked: Running) -> None:
        wanted = locked.http.get("/v1/models").headers.get_list("WWW-Authenticate")
        assert wanted == ["Bearer", 'Basic realm="vmmkv"'], "a browser reads one scheme of each header"
        assert locked.http.get("/v1/models", headers=basic(ONE)).status_code == 200
        assert locked.http.post("/kv/reset", json={}, headers=basic(ADMIN)).status_code == 401

    def test_with_several_keys_only_the_administrator_sees_what_all_are_doing(self, locked: Running) -> None:
        for path in ("/metrics", "/kv", "/events"):
            assert code(locked.http.get(path, headers=bearer(ONE))) == (403, "insufficient_permissions")
        assert "vmmkv_engine_ready 1.0" in locked.http.get("/metrics", headers=bearer(ADMIN)).text
        alone = queue(ONE)
        assert alone.sees_all(caller(alone, ONE))

    def test_without_keys_any_header_will_do(self, server: Running) -> None:
        for headers in ({}, bearer("whatever"), basic("whatever")):
            assert server.http.get("/v1/models", headers=headers).status_code == 200

    def test_every_key_is_compared_in_full_whichever_is_the_right_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[int, int]] = []
        compare_digest = hmac.compare_digest

        def compare(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return compare_digest(one, other)

        keys = queue("first-key", "second-key", "third-key", admin_key="admin-key")
        monkeypatch.setattr(hmac, "compare_digest", compare)
        found = []
        for key in (b"first-key", b"third-key", b"admin-key", b"f", b"x" * 10_000):
            found.append(keys.identify(b"Bearer " + key))
            assert compared == [(32, 32)] * 4
            compared.clear()
        assert [each and each.is_admin for each in found] == [False, False, True, None, None]
        assert found[:3] == [caller(keys, key) for key in ("first-key", "third-key", "admin-key")] and found[0] != found[1]

    def test_a_key_among_others_may_step_back_and_not_go_first(self, locked: Running, server: Running) -> None:
        refused = locked.complete(ONE, priority=-1)
        assert (refused.status_code, refused.json()["error"]["param"], locked.generates) == (400, "priority", [])
        assert [locked.complete(ONE, priority=priority).status_code for priority in (0, 7)] == [200, 200]
        assert locked.complete(ADMIN, priority=-5).status_code == 200
        assert server.complete(priority=-5).status_code == 200, "without keys, requests order as they like"


class TestNamespaces:
    def test_prompts_of_one_key_share_and_those_of_others_or_other_salts_do_not(self, locked: Running) -> None:
        def sent(key: str, **salt: Any) -> str | None:
            assert locked.complete(key, **salt).status_code == 200
            return locked.generates[-1].cache_salt

        salts: list[dict[str, str]] = [{}, {"cache_salt": "s"}, {"cache_salt": "t"}]
        names = [sent(key, **salt) for key in (ONE, TWO, ADMIN) for salt in salts]
        assert len(set(names)) == 9 and names[1] == sent(ONE, cache_salt="s")
        assert not any(secret in (name or "") for name in names for secret in (ONE, TWO, ADMIN))
        other = sent(TWO)
        assert sent(ONE, cache_salt=other) != other, "a key cannot name the namespace of another"

    def test_they_are_the_same_in_every_server_for_tiers_outlive_it(self) -> None:
        servers = queue(ONE), queue(TWO, ONE), queue(admin_key=ONE)
        assert len({keys.namespace(caller(keys, ONE), "s") for keys in servers}) == 1

    def test_without_keys_it_is_the_salt_and_no_salt_names_that_of_a_key(self, server: Running) -> None:
        assert server.complete(n=2, cache_salt="tenant ä").is_success and server.chat().is_success
        assert [request.cache_salt for request in server.generates] == ["salt:tenant ä", "salt:tenant ä", None]
        of_key = queue(ONE).namespace(caller(queue(ONE), ONE), None)
        assert of_key is not None and queue().namespace(ANONYMOUS, of_key) != of_key
        assert queue().namespace(ANONYMOUS, "") is not None


class TestAdministrator:
    @pytest.mark.parametrize(("path", "body"), [("/kv/reset", {}), ("/kv/resize", {"budget_bytes": 1 << 25})])
    def test_its_routes_are_no_others_and_refused_without_its_key(
        self, locked: Running, server: Running, path: str, body: Any
    ) -> None:
        assert code(locked.post(path, body, ONE)) == (403, "insufficient_permissions")
        assert not any(isinstance(message, Forget | Resize) for message in locked.engine.received)
        assert locked.post(path, body, ADMIN).status_code == 200
        assert any(isinstance(message, Forget | Resize) for message in locked.engine.received)
        refused = server.post(path, body, ADMIN)
        assert refused.status_code == 403 and "--admin-key" in refused.json()["error"]["message"]
        for kind in ("text/plain", "application/x-www-form-urlencoded"):  # of a page of another site
            headers = {**bearer(ADMIN), "Content-Type": kind}
            assert locked.http.post(path, content="{}", headers=headers).status_code == 400

    def test_after_a_resize_requests_are_held_against_the_new_budget(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server:
            assert server.post("/kv/resize", {"budget_bytes": 1 << 25}).status_code == 403
            answer = server.post("/kv/resize", {"budget_bytes": 1 << 25}, ADMIN)
            assert answer.json() == {"freed_bytes": 0, "budget_bytes": 1 << 25, "pool_tokens": 64}
            assert isinstance(phase := server.client.phase, Ready) and phase.limits.pool_tokens == 64
            assert code(server.complete(prompt=[1] * 70)) == (400, "context_length_exceeded")
            refused = server.post("/kv/resize", {"budget_bytes": 5}, ADMIN)
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, "that is too little")
            server.engine_dies("exit code 3")
            assert server.post("/kv/reset", {}, ADMIN).status_code == 503

    def test_the_health_is_ok_with_a_warning_while_the_holder_is_gone(self, server: Running) -> None:
        assert "vmmkv_holder_up" not in server.http.get("/metrics").text
        for is_gone, up in ((False, "1.0"), (True, "0.0")):
            server.engine.holder_is_gone = is_gone
            server.complete()
            assert eventually(lambda: f"vmmkv_holder_up {up}" in server.http.get("/metrics").text)  # noqa: B023
            health = server.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            assert ("start a holder again" in (health.json()["reason"] or "")) == is_gone


class TestSleep:
    def test_asleep_it_takes_no_requests_and_says_so_until_it_is_woken_up(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server:
            for path in ("/sleep", "/wake_up"):
                assert code(server.http.post(path)) == (403, "insufficient_permissions")
            for _ in range(2):
                answer = server.http.post("/sleep", headers=bearer(ADMIN))
                limits = READY.limits
                assert answer.json() == {
                    "freed_bytes": 9, "budget_bytes": limits.budget_bytes, "pool_tokens": limits.pool_tokens
                }  # fmt: skip
                refused = server.complete()
                assert code(refused) == (503, "service_unavailable") and "POST /wake_up" in refused.json()["error"]["message"]
                assert int(refused.headers["Retry-After"]) == MOST_RETRY_S
                health = server.http.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "asleep")
                assert eventually(lambda: "vmmkv_asleep 1.0" in server.http.get("/metrics").text)
                assert server.post("/tokenize", {"prompt": "abc"}).json()["max_model_len"] == limits.max_tokens
            for _ in range(2):
                assert server.http.post("/wake_up", headers=bearer(ADMIN)).status_code == 200
                assert server.complete().status_code == 200
                assert server.http.get("/health").status_code == 200
                assert eventually(lambda: "vmmkv_asleep 0.0" in server.http.get("/metrics").text)

    def test_it_falls_asleep_when_requests_in_flight_have_ended_and_takes_no_others_meanwhile(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server, ThreadPoolExecutor() as threads:
            with in_flight(server, 1):
                asleep = threads.submit(server.http.post, "/sleep", headers=bearer(ADMIN))
                assert eventually(lambda: server.service.queue.is_asleep)
                assert server.complete().status_code == 503
                assert server.http.get("/health").json() == {"status": "asleep", "reason": "still in flight: 1 sequence"}
                assert not asleep.done() and not server.engine.is_asleep
            assert asleep.result(60).status_code == 200
            assert server.engine.is_asleep
            aborted, slept = (
                next(at for at, message in enumerate(server.engine.received) if isinstance(message, kind))
                for kind in (Abort, Sleep)
            )
            assert aborted < slept

    def test_woken_up_before_it_slept_it_goes_on(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server, ThreadPoolExecutor() as threads:
            with in_flight(server, 1):
                asleep = threads.submit(server.http.post, "/sleep", headers=bearer(ADMIN))
                assert eventually(lambda: server.service.queue.is_asleep)
                assert server.http.post("/wake_up", headers=bearer(ADMIN)).status_code == 200
                assert code(asleep.result(60)) == (409, "woken_up")
                assert server.complete().status_code == 200
            assert not any(isinstance(message, Sleep) for message in server.engine.received)

    def test_what_cannot_be_woken_up_stays_asleep(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server:
            assert server.http.post("/sleep", headers=bearer(ADMIN)).status_code == 200
            server.engine.fails_to_sleep = True
            assert code(server.http.post("/wake_up", headers=bearer(ADMIN))) == (409, "cannot_wake_up")
            assert server.http.get("/health").json()["status"] == "asleep"
            assert server.complete().status_code == 503

    def test_what_cannot_be_done_leaves_it_awake(self) -> None:
        with running_server(front=ServeConfig(admin_key=ADMIN)) as server:
            refused = server.http.post("/sleep?level=2", headers=bearer(ADMIN))
            assert code(refused) == (400, "invalid_value") and refused.json()["error"]["param"] == "level"
            server.engine.fails_to_sleep = True
            assert code(server.http.post("/sleep", headers=bearer(ADMIN))) == (409, "cannot_sleep")
            assert server.complete().status_code == 200
            ready, server.client.phase = server.client.phase, Loading(stage="weights", done=0, total=1)
            assert server.http.post("/sleep", headers=bearer(ADMIN)).status_code == 503
            server.client.phase = ready
            assert server.complete().status_code == 200
            server.engine_dies("exit code 3")
            assert server.http.post("/sleep", headers=bearer(ADMIN)).status_code == 503


class TestHosts:
    def test_a_server_on_this_machine_answers_to_its_own_names_alone(self) -> None:
        hosts = answered_hosts(ServeConfig(allowed_hosts=("LLM.example.org",), host="my-box"), here=True)
        own = ("localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:9", "[::1]:8", "10.0.0.7", "my-box", "llm.example.org:8")
        others = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "")
        with running_server(hosts=hosts) as server:
            for host in (*own, *others):
                for path in ("/", "/health", "/v1/models", "/metrics"):
                    answer = server.http.get(path, headers={"Host": host})
                    assert answer.status_code == 200 if host in own else code(answer) == (400, "unknown_host"), host

    def test_beyond_this_machine_any_name_will_do_until_one_is_given(self) -> None:
        assert answered_hosts(ServeConfig(host="0.0.0.0"), here=False) is None
        names = answered_hosts(ServeConfig(allowed_hosts=("one.example",), host="0.0.0.0"), here=False)
        assert names is not None and "one.example" in names and "any.example" not in names


class TestOrigins:
    PREFLIGHT: ClassVar[Any] = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    def ask(self, server: Running, origin: str, key: str | None = None) -> tuple[Any, Any]:
        """The answers to a browser: before it posts for a page of this origin, and then."""
        before = server.http.options(CHAT, headers={"Origin": origin, **self.PREFLIGHT})
        headers = {"Origin": origin} | ({} if key is None else bearer(key))
        return before, server.http.post(CHAT, json={"messages": HELLO}, headers=headers)

    def test_without_the_option_a_page_of_another_origin_gets_nothing(self, server: Running) -> None:
        before, then = self.ask(server, "http://localhost:5173")
        assert (before.status_code, then.status_code) == (400, 200)
        assert not [name for each in (before, then) for name in each.headers if name.startswith("access-control")]

    @pytest.mark.parametrize("allowed", [(), ("http://localhost:3000",)])
    def test_a_browser_is_told_what_would_allow_its_origin_and_the_log_once(
        self, allowed: tuple[str, ...], caplog: pytest.LogCaptureFixture
    ) -> None:
        with running_server(front=ServeConfig(allowed_origins=allowed, api_keys=(ONE,))) as server:
            said = [self.ask(server, origin)[0].json()["error"] for origin in ("http://localhost:5173", "null")]
        assert {error["code"] for error in said} == {"unknown_origin"}
        assert "'http://localhost:5173' may not" in said[0]["message"] and "'null' may not" in said[1]["message"]
        assert all("--allowed-origin" in error["message"] for error in said)
        assert all(f"allowed are {allowed[0]}" in error["message"] for error in said if allowed)
        logged = [record.getMessage() for record in caplog.records]
        assert [each for each in logged if "--allowed-origin" in each] == [said[0]["message"]]

    @pytest.mark.parametrize("allowed", ["http://localhost:5173", "*"])
    def test_an_origin_that_is_named_may_ask_and_read_errors_too(self, servers: Servers, allowed: str) -> None:
        server = servers.get(front=ServeConfig(allowed_origins=(allowed,), api_keys=(ONE,)))
        for key, status in ((None, 401), (ONE, 200)):
            before, then = self.ask(server, "http://localhost:5173", key)
            assert (before.status_code, then.status_code) == (200, status)
            assert {each.headers["access-control-allow-origin"] for each in (before, then)} == {allowed}
            assert {"authorization", "content-type"} <= set(before.headers["access-control-allow-headers"].split(","))
            assert "access-control-allow-credentials" not in then.headers, "a browser would send keys by itself"
            assert "x-request-id" in then.headers["access-control-expose-headers"].lower()

    def test_a_refused_question_of_a_browser_is_cached_for_its_origin_alone(self, server: Running) -> None:
        before, _ = self.ask(server, "http://localhost:5173")
        assert before.headers["vary"] == "Origin"

    def test_a_page_that_is_named_may_use_a_server_of_a_private_network(self, servers: Servers) -> None:
        server = servers.get(front=ServeConfig(allowed_origins=("http://localhost:5173",), api_keys=(ONE,)))
        asked = self.PREFLIGHT | {"Access-Control-Request-Private-Network": "true"}
        named = server.http.options(CHAT, headers=asked | {"Origin": "http://localhost:5173"})
        assert (named.status_code, named.headers["access-control-allow-private-network"]) == (200, "true")
        other = server.http.options(CHAT, headers=asked | {"Origin": "http://localhost:1"})
        assert code(other) == (400, "unknown_origin") and "access-control-allow-private-network" not in other.headers
        put = {"Origin": "http://localhost:5173", "Access-Control-Request-Method": "PUT"}
        assert code(server.http.options(CHAT, headers=put)) == (400, "unknown_method")

    def test_a_browser_asks_under_a_host_that_is_answered_as_for_all_else(self, servers: Servers) -> None:
        with running_server(front=ServeConfig(allowed_origins=("*",)), hosts=["localhost"]) as server:
            headers = {"Origin": "http://evil.example", "Host": "evil.example", **self.PREFLIGHT}
            refused = server.http.options(CHAT, headers=headers)
            assert code(refused) == (400, "unknown_host") and refused.headers["vary"] == "Origin"
            assert server.http.options(CHAT, headers=headers | {"Host": "localhost:8000"}).status_code == 200

    def test_any_other_origin_gets_nothing(self, servers: Servers) -> None:
        server = servers.get(front=ServeConfig(allowed_origins=("http://localhost:5173",), api_keys=(ONE,)))
        for origin in ("http://localhost", "https://localhost:5173", "http://localhost:5173.evil.example", "null"):
            for each in self.ask(server, origin, ONE):
                assert "access-control-allow-origin" not in each.headers


@pytest.mark.parametrize(
    ("path", "status", "is_counted"),
    [(COMPLETIONS, 408, True), (COMPLETIONS, 499, False), (COMPLETIONS, 200, False), ("/v1/models/another", 404, True),
     ("/tokenize", 429, True), ("/kv/resize", 400, True), ("/metrics", 401, False), ("/health", 503, False)],
)  # fmt: skip
def test_refusals_are_counted_on_routes_that_ask_for_something(path: str, status: int, is_counted: bool) -> None:
    counted = list[int]()

    async def ask() -> int:
        guard = Guard(PlainTextResponse("", status), queue=queue(), hosts=None, on_refused=counted.append)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask()) == status
    assert counted == [status] * is_counted


def test_keys_are_in_no_representation() -> None:
    assert ONE not in repr(ServeConfig(api_keys=(ONE,), admin_key=ADMIN)) + repr(caller(queue(ONE), ONE))
