"""Laws of who may ask: keys on every route, namespaces that nobody can guess, what is the administrator's alone."""

import base64
import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.support import Running, running_server
from vmmkv.server.config import FrontConfig, read_keys
from vmmkv.server.engine_client import EngineClient
from vmmkv.server.http.limits import ANYBODY, Keys
from vmmkv.server.protocol import Forget, Generate, Ready, Resize

ONE, TWO, ADMIN = "a-key-of-one", "a-key-of-two", "the-key-of-the-administrator"
ADMIN_ROUTES: dict[str, dict[str, Any]] = {"/kv/reset": {}, "/kv/resize": {"budget_bytes": 1 << 25}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'anybody:{key}'.encode()).decode()}"}


@pytest.fixture
def locked() -> Iterator[Running]:
    with running_server(front=FrontConfig(api_keys=(ONE, TWO), admin_key=ADMIN)) as server:
        yield server


class TestRoutes:
    @pytest.mark.parametrize("headers", [{}, bearer("no-such-key"), bearer(ONE[:-1]), bearer(ONE + "x"),
                                         {"Authorization": ONE}, basic("no-such-key"), {"Authorization": "Basic ?"},
                                         {"Authorization": "Bearer \xff\xfe"}])  # fmt: skip
    def test_without_a_key_every_route_but_the_health_is_a_401(self, locked: Running, headers: dict[str, str]) -> None:
        paths = {path for route in _routes(locked) if (path := route) != "/health"}
        assert {"/v1/completions", "/v1/models", "/metrics", "/version", "/tokenize", "/kv/reset", "/openapi.json"} <= paths
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        for path in sorted(paths | {"/no/such/route"}):
            for method in ("GET", "POST"):
                answer = locked.http.request(method, path, headers=raw)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert locked.http.get("/health", headers=raw).status_code == 200

    def test_openais_client_with_a_key_is_answered_and_with_another_told(self, locked: Running) -> None:
        assert locked.openai.with_options(api_key=TWO).completions.create(model="tiny", prompt="abc").choices[0].text == "abc"
        with pytest.raises(openai.AuthenticationError):
            locked.openai.completions.create(model="tiny", prompt="abc")

    def test_a_browser_may_send_a_key_as_password_but_not_the_administrators(self, locked: Running) -> None:
        wanted = locked.http.get("/v1/models").headers.get_list("WWW-Authenticate")
        assert wanted == ["Bearer", 'Basic realm="vmmkv"'], "a browser reads one scheme of each header"
        assert locked.http.get("/v1/models", headers=basic(ONE)).status_code == 200
        assert locked.http.post("/kv/reset", json={}, headers=basic(ADMIN)).status_code == 401

    def test_what_all_are_doing_is_the_administrators_to_see_and_a_scraper_sends_that_key(self, locked: Running) -> None:
        for path in ("/metrics", "/kv", "/events"):
            refused = locked.http.get(path, headers=bearer(ONE))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
        assert "vmmkv_engine_ready 1.0" in locked.http.get("/metrics", headers=bearer(ADMIN)).text
        with running_server(front=FrontConfig(api_keys=(ONE,))) as server:
            assert server.http.get("/metrics", headers=bearer(ONE)).status_code == 200, "there is nobody else"

    def test_without_keys_any_header_will_do(self, server: Running) -> None:
        for headers in ({}, bearer("whatever"), basic("whatever")):
            assert server.http.get("/v1/models", headers=headers).status_code == 200


class TestAdministrator:
    @pytest.mark.parametrize("path", ADMIN_ROUTES)
    def test_what_is_the_administrators_is_no_others(self, locked: Running, path: str) -> None:
        refused = locked.http.post(path, json=ADMIN_ROUTES[path], headers=bearer(ONE))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
        assert not any(isinstance(message, Forget | Resize) for message in locked.engine.received)
        assert locked.http.post(path, json=ADMIN_ROUTES[path], headers=bearer(ADMIN)).status_code == 200
        assert any(isinstance(message, Forget | Resize) for message in locked.engine.received)

    @pytest.mark.parametrize("path", ADMIN_ROUTES)
    def test_without_an_admin_key_there_are_no_such_routes(self, server: Running, path: str) -> None:
        assert server.http.post(path, json=ADMIN_ROUTES[path], headers=bearer(ADMIN)).status_code == 404

    def test_with_an_admin_key_alone_the_rest_is_open(self) -> None:
        with running_server(front=FrontConfig(admin_key=ADMIN)) as server:
            assert server.openai.completions.create(model="tiny", prompt="abc").choices
            assert server.http.post("/kv/reset", json={}).status_code == 403
            assert server.http.post("/kv/reset", json={}, headers=bearer(ADMIN)).json()["freed_bytes"] == 7

    def test_after_a_resize_requests_are_held_against_what_there_is_then(self, locked: Running) -> None:
        answer = locked.http.post("/kv/resize", json={"budget_bytes": 1 << 25}, headers=bearer(ADMIN))
        assert answer.json() == {"freed_bytes": 0, "budget_bytes": 1 << 25, "pool_tokens": 64}
        assert isinstance(phase := locked.client.phase, Ready) and phase.pool_tokens == 64
        refused = locked.http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 70}, headers=bearer(ONE))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")

    def test_what_the_engine_cannot_do_is_a_400_with_its_words(self, locked: Running) -> None:
        refused = locked.http.post("/kv/resize", json={"budget_bytes": 5}, headers=bearer(ADMIN))
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "that is too little")

    def test_a_page_of_another_site_cannot_have_a_browser_ask_for_it(self, locked: Running) -> None:
        for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            assert locked.http.post("/kv/reset", content="{}", headers={**bearer(ADMIN), **headers}).status_code == 400

    def test_an_engine_that_dies_answers_the_administrator_too(self, locked: Running) -> None:
        locked.engine_dies("exit code 3")
        assert locked.http.post("/kv/reset", json={}, headers=bearer(ADMIN)).status_code == 503


class TestPriorities:
    def _asked(self, server: Running, key: str, priority: int) -> Any:
        body = {"model": "tiny", "prompt": "abc", "priority": priority}
        return server.http.post("/v1/completions", json=body, headers=bearer(key))

    def test_a_key_among_others_may_step_back_and_not_go_first(self, locked: Running) -> None:
        refused = self._asked(locked, ONE, -1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert not any(isinstance(message, Generate) for message in locked.engine.received)
        assert [self._asked(locked, ONE, priority).status_code for priority in (0, 7)] == [200, 200]
        assert self._asked(locked, ADMIN, -5).status_code == 200

    def test_who_is_alone_orders_as_wanted(self, server: Running) -> None:
        assert self._asked(server, "none", -5).status_code == 200


class TestNamespaces:
    def _sent(self, server: Running, key: str, **options: Any) -> str | None:
        body = {"model": "tiny", "prompt": "abc", **options}
        assert server.http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        return [message for message in server.engine.received if isinstance(message, Generate)][-1].cache_salt

    def test_prompts_of_one_key_share_and_those_of_others_or_other_salts_do_not(self, locked: Running) -> None:
        salts: list[dict[str, str]] = [{}, {"cache_salt": "s"}, {"cache_salt": "t"}]
        names = [self._sent(locked, key, **salt) for key in (ONE, TWO, ADMIN) for salt in salts]
        assert len(set(names)) == 9
        assert names[1] == self._sent(locked, ONE, cache_salt="s")
        assert not any(secret in (name or "") for name in names for secret in (ONE, TWO, ADMIN))

    def test_who_has_one_key_cannot_name_the_namespace_of_another(self, locked: Running) -> None:
        other = self._sent(locked, TWO)
        assert self._sent(locked, ONE, cache_salt=other) != other

    def test_another_server_has_others(self) -> None:
        one, two = Keys((ONE,)), Keys((ONE,))
        callers = [keys.identify(f"Bearer {ONE}".encode()) for keys in (one, two)]
        assert callers[0] is not None and callers[1] is not None
        assert one.namespace(callers[0], None) != two.namespace(callers[1], None)

    def test_without_keys_the_salt_is_the_namespace(self) -> None:
        assert [Keys().namespace(ANYBODY, salt) for salt in (None, "s")] == [None, "s"]


def test_every_key_is_compared_in_full_whichever_is_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare_digest = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare_digest(one, other)

    keys = Keys(("first-key", "second-key", "third-key"), "admin-key")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    names = []
    for key in (b"first-key", b"third-key", b"admin-key", b"f", b"x" * 10_000):
        caller = keys.identify(b"Bearer " + key)
        names.append(caller and caller.name)
        assert compared == [(32, 32)] * 4
        compared.clear()
    assert names == ["key 1", "key 3", "the administrator", None, None]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"api_keys": ("short",)}, "--api-key"),
            ({"api_keys": ("with a space",)}, "--api-key"),
            ({"admin_key": "ünicode-key"}, "--admin-key"),
            ({"api_keys": (ADMIN,), "admin_key": ADMIN}, "--admin-key"),
            ({"max_tokens_per_key": 10}, "--api-key"),
            ({"api_keys": (ONE,), "max_tokens_per_key": 1}, "--max-tokens-per-key"),
            ({"max_queued_requests": -1}, "--max-queued-requests"),
            ({"max_queued_tokens": 0}, "--max-queued-tokens"),
            ({"max_body_bytes": 100}, "--max-body-size"),
            ({"request_timeout_s": 0.0}, "--request-timeout"),
            ({"drain_timeout_s": -1.0}, "--drain-timeout"),
            ({"stuck_after_s": float("nan")}, "--stuck-after"),
        ],
    )
    def test_a_bad_one_is_named_and_no_key_is_told(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said) as caught:
            FrontConfig(**options)
        assert not any(key in str(caught.value) for key in (*options.get("api_keys", ()), ADMIN, "ünicode-key"))

    def test_a_file_has_a_key_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"# those who may\n\n{ONE}\n  {TWO}\t\n")
        assert read_keys("--api-key-file", path) == (ONE, TWO)
        path.write_text("# nobody\n")
        with pytest.raises(ValueError, match=r"--api-key-file .* no key"):
            read_keys("--api-key-file", path)
        with pytest.raises(ValueError, match=r"--admin-key-file .* cannot be read"):
            read_keys("--admin-key-file", tmp_path / "none")
        path.write_bytes(b"a-key-\xff")
        with pytest.raises(ValueError, match=r"--api-key-file .* is not UTF-8; write one key a line, of visible ASCII"):
            read_keys("--api-key-file", path)

    def test_keys_are_in_no_representation(self) -> None:
        assert ONE not in repr(FrontConfig(api_keys=(ONE,), admin_key=ADMIN)) + repr(Keys((ONE,))._callers)


def _routes(server: Running) -> set[str]:
    document = httpx.get(f"{server.url}/openapi.json", headers=bearer(ONE)).json()
    assert isinstance(server.client, EngineClient)
    return {*(path.replace("{name}", "tiny") for path in document["paths"]), "/openapi.json"}
