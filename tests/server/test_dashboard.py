"""deploy/grafana.json asks for what /metrics has, and for all of it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import FAIL_SEED, SILENT_SEED
from tests.server.support import Running, eventually, running_server
from vmmkv.server.config import FrontConfig
from vmmkv.server.metrics import Times
from vmmkv.server.protocol import Message, Outputs

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())


def expressions() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return asked + [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]


@pytest.fixture
def exported(fresh: Running) -> dict[str, set[str]]:
    """By name of a sample, the labels that it has, after a request."""
    fresh.openai.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert eventually(lambda: "vmmkv_requests_running" in fresh.http.get("/metrics").text)
    families = list(text_string_to_metric_families(fresh.http.get("/metrics").text))
    names = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # These have a sample for each method or call that there was.
    labelled = {"vmmkv_attaches_total": {"method"}, "vmmkv_attach_seconds_total": {"method"}}
    assert {name.removesuffix("_total") for name in labelled} <= {family.name for family in families}
    return names | labelled


def test_every_metric_that_is_asked_for_exists(exported: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = set(re.findall(r"vmmkv_\w+", expression))
        assert names and names <= exported.keys(), expression
        for label in re.findall(r"by \((\w+)\)", expression):
            assert all(label in exported[name] for name in names), expression


def test_every_metric_is_asked_for(exported: dict[str, set[str]]) -> None:
    asked = set(re.findall(r"vmmkv_\w+", " ".join(expressions())))
    shown = {re.sub("_(count|sum)$", "_bucket", name) for name in exported if not name.endswith("_created")}
    assert shown <= asked


def test_panels_stand_side_by_side_and_have_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


def test_a_histogram_counts_each_time_in_its_bucket_and_those_above() -> None:
    times = Times("waiting", "How long.", (0.1, 1.0))
    for time_s in (0.05, 0.1, 0.5, 7.0):
        times.observe(time_s)
    samples = {(each.name, each.labels.get("le")): each.value for each in times.family().samples}
    assert samples == {
        ("vmmkv_waiting_seconds_bucket", "0.1"): 2.0,
        ("vmmkv_waiting_seconds_bucket", "1.0"): 3.0,
        ("vmmkv_waiting_seconds_bucket", "+Inf"): 4.0,
        ("vmmkv_waiting_seconds_count", None): 4.0,
        ("vmmkv_waiting_seconds_sum", None): pytest.approx(7.65),
    }


def test_times_between_tokens_and_in_the_queue_are_counted(fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.engine.endless, fresh.engine.step_s = True, 0.01
    steps: list[Outputs] = []
    send = fresh.engine._send

    def sending(message: Message) -> None:
        if isinstance(message, Outputs):
            steps.append(message)
        send(message)

    monkeypatch.setattr(fresh.engine, "_send", sending)
    fresh.openai.completions.create(model="tiny", prompt="abc", max_tokens=8, n=2, seed=1)
    text = fresh.http.get("/metrics").text
    count = re.search(r"^vmmkv_inter_token_latency_seconds_count (\S+)$", text, re.MULTILINE)
    # Two choices come in the same messages, seven gaps between eight; the second may begin some steps later.
    assert count is not None and 7 <= float(count[1]) == len(steps) - 1
    assert "vmmkv_request_queue_time_seconds_count 0.0" in text  # this engine does not say


def test_the_first_token_of_an_answer_that_comes_too_late_is_counted(fresh: Running) -> None:
    fresh.engine.endless, fresh.engine.step_s = True, 0.02
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 240, "timeout": 0.5}
    assert fresh.http.post("/v1/completions", json=body).status_code == 408
    assert "vmmkv_time_to_first_token_seconds_count 1.0" in fresh.http.get("/metrics").text


def test_what_is_refused_is_counted_by_its_status_and_what_ends_in_the_engine_is_not() -> None:
    front = FrontConfig(api_keys=("some-key",), admin_key="admin-key", max_queued_tokens=8)
    with running_server(front=front) as server, server.http as http:

        def ask(path: str, key: str, **body: Any) -> int:
            return http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        def complete(**body: Any) -> int:
            return ask("/v1/completions", "some-key", model="tiny", **{"prompt": "a", **body})

        assert complete(temperature=-1) == 400
        assert ask("/v1/completions", "another key") == 401
        assert ask("/kv/reset", "some-key") == 403
        assert [complete(seed=FAIL_SEED), complete(seed=SILENT_SEED, timeout=0.1), complete()] == [500, 408, 200]
        silent = {"model": "tiny", "prompt": "a" * 9, "seed": SILENT_SEED}
        headers = {"Authorization": "Bearer some-key"}
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(http.post, "/v1/completions", json=silent, headers=headers)
            assert eventually(lambda: server.client.waiting_tokens == 9)
            assert complete() == 429
            server.engine_dies("it was a test")
            assert waiting.result().status_code == 503  # the engine had it: it has failed
        assert complete() == 503
        assert http.get("/health").status_code == 503
        assert [http.get(path).status_code for path in ("/metrics", "/kv", "/favicon.ico")] == [401] * 3
        assert http.get("/favicon.ico", headers=headers).status_code == 404
        text = http.get("/metrics", headers={"Authorization": "Bearer admin-key"}).text
    counted = dict(re.findall(r'^vmmkv_requests_refused_total\{code="(\d+)"\} (\S+)$', text, re.MULTILINE))
    assert counted == dict.fromkeys(("400", "401", "403", "429", "503"), "1.0")
    assert 'vmmkv_requests_total{outcome="failed"} 3.0' in text
