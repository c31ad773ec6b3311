"""Laws of the smaller routes: tokens, names of requests, models and metrics, the memory map, the stream, the page's files."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import vmmkv
from tests.server.fake_engine import FAIL_SEED, READY, SILENT_SEED
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
from tests.server.tiny import token_ids
from vmmkv.memory.states import MappedRun, RunState, SlotMap, SlotState
from vmmkv_server import engine_client
from vmmkv_server.config import ServeConfig
from vmmkv_server.engine_client import MapUnavailable, MemoryMaps
from vmmkv_server.http import page
from vmmkv_server.latencies import Times
from vmmkv_server.protocol import AskMap, KVEventSource, MemoryMap, Message, Outputs

ROOT = Path(__file__).parents[2]
GRAFANA: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
SCORED: Any = {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 0}
SECRET: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "seed": SILENT_SEED}


class TestTokens:
    @pytest.mark.parametrize("prompt", ["hello", "Grüße, €!", "a" * 10_000, ""])
    def test_a_text_becomes_tokens_and_again_a_text(self, server: Running, prompt: str) -> None:
        there = server.post("/tokenize", {"model": "tiny", "prompt": prompt}).json()
        wanted = token_ids(prompt)
        assert there == {"tokens": wanted, "count": len(wanted), "max_model_len": 256, "token_strs": None}
        assert server.post("/detokenize", {"tokens": wanted}).json() == {"prompt": prompt}

    def test_a_conversation_becomes_what_a_chat_would_send(self, server: Running) -> None:
        there = server.post("/tokenize", {"messages": HELLO, "return_token_strs": True}).json()
        assert server.chat().json()["usage"]["prompt_tokens"] == there["count"]
        assert "".join(there["token_strs"]) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert server.post("/detokenize", {"tokens": there["tokens"]}).json()["prompt"] == "".join(there["token_strs"])

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
            ("/tokenize", {"prompt": "\ud800"}, "prompt"),
            ("/tokenize", {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
            ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
            ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
            ("/detokenize", {"tokens": [1, 258]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [10**30]}, "tokens"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ],
    )
    def test_what_cannot_be_is_a_400_with_its_name(self, server: Running, path: str, body: Any, param: str) -> None:
        refused = server.post(path, body)
        assert (refused.status_code, refused.json()["error"]["param"].split(".")[0]) == (400, param)

    @pytest.mark.parametrize(
        ("path", "body", "worker"),
        [
            ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 500}, "render_chat"),
            ("/tokenize", {"prompt": "a" * 5000, "return_token_strs": True}, "text_of"),
            ("/detokenize", {"tokens": [97] * 5000}, "_known"),
            (COMPLETIONS, {"model": "tiny", "prompt": [[97] * 200] * 30, "max_tokens": 1, "echo": True}, "_known"),
            (COMPLETIONS, {**SCORED, "prompt": [[97] * 200] * 30}, "text_of"),
        ],
    )
    def test_long_work_is_not_done_on_the_event_loop(
        self, server: Running, path: str, body: Any, worker: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner: Any = server.tokenizer.texts if worker == "text_of" else server.tokenizer
        work, on_loop = getattr(owner, worker), list[bool]()

        def watched(*given: Any) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return work(*given)

        monkeypatch.setattr(owner, worker, watched)
        assert server.post(path, body).status_code == 200
        assert on_loop and not any(on_loop)


class TestRendering:
    def test_a_request_is_rendered_to_what_the_engine_would_get(self, server: Running) -> None:
        asked: dict[str, Any] = {
            "max_tokens": 7,
            "seed": 5,
            "stop": "x",
            "cache_salt": "s",
            "priority": 2,
            "logit_bias": {"97": 2},
        }
        for path in (COMPLETIONS, CHAT):
            body = {"model": "tiny", **asked, **({"messages": HELLO} if path == CHAT else {"prompt": "abc"})}
            rendered = server.post(f"{path}/render", body).json()
            one = rendered if path == CHAT else rendered[0]
            assert not server.generates, "it runs"
            assert server.post(path, body).status_code == 200
            assert one["token_ids"] == server.sent.prompt
            names = ("max_tokens", "seed", "temperature", "top_p")
            assert {name: one["sampling_params"][name] for name in names} == {n: getattr(server.sent.params, n) for n in names}
            assert one["sampling_params"]["logit_bias"] == {"97": 2.0} and one["sampling_params"]["stop"] == ["x"]
            assert (one["model"], one["cache_salt"], one["priority"], one["stream"]) == ("tiny", "s", 2, False)
            assert one["request_id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")
            server.reset()

    def test_each_prompt_is_rendered_and_no_beam_search_is(self, server: Running) -> None:
        prompts = [[97, 98], [99]]
        rendered = server.post(f"{COMPLETIONS}/render", {"model": "tiny", "prompt": prompts}).json()
        assert [one["token_ids"] for one in rendered] == prompts
        assert len({one["request_id"] for one in rendered}) == 2
        assert server.chat().status_code == 200
        wanted = server.sent.params.max_tokens
        assert (
            server.post(f"{CHAT}/render", {"model": "tiny", "messages": HELLO}).json()["sampling_params"]["max_tokens"]
            == wanted
        )
        for path, body in ((COMPLETIONS, {"prompt": "a", "use_beam_search": True}), (CHAT, {"messages": HELLO, "n": 0})):
            refused = server.post(f"{path}/render", {"model": "tiny", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, list(body)[1])
        assert server.post(f"{CHAT}/render", {"model": "other", "messages": HELLO}).status_code == 404

    def test_the_server_says_what_it_serves_by_vllms_names(self, server: Running) -> None:
        told = server.http.get("/server_info").json()
        assert told["vllm_config"]["cache_config"] == {"block_size": 16, "num_gpu_blocks": 64, "cache_dtype": "int8"}
        assert told["vllm_config"]["model_config"] == {"model": "tiny", "max_model_len": 256, "dtype": "float32"}
        assert told["vllm_config"]["parallel_config"] == {"tensor_parallel_size": 2, "data_parallel_size": 1}
        assert told["system_env"] == {"vmmkv_version": vmmkv.__version__}

    def test_a_router_finds_where_events_are_published_and_nothing_if_they_are_not(self, server: Running) -> None:
        assert server.http.get("/kv_event_sources").json() == {}
        source = KVEventSource(endpoint="tcp://0.0.0.0:5557", topic="kv")
        with running_server(ready=msgspec.structs.replace(READY, kv_events=source)) as publishing:
            assert publishing.http.get("/kv_event_sources").json() == {
                "0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://0.0.0.0:5557",
                      "replay_endpoint": None, "topic": "kv", "buffer_steps": 10_000, "hwm": 10_000,
                      "max_queue_size": 65_536}
            }  # fmt: skip


class TestNames:
    @pytest.mark.parametrize("given", [None, "", "with space", "a" * 129, "<script>"])
    def test_a_request_without_a_good_name_gets_one(self, server: Running, given: str | None) -> None:
        headers = {} if given is None else {"X-Request-Id": given}
        names = {server.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)}
        assert len(names) == 2 and all(re.fullmatch(r"req-[0-9a-f]{32}", name) for name in names)

    def test_answers_errors_and_the_log_have_the_clients_name(self, server: Running, caplog: pytest.LogCaptureFixture) -> None:
        with server.http as http:
            http.headers["X-Request-Id"] = "mine-2"
            body = {"model": "tiny", "prompt": "a"}
            answers = [http.get("/nowhere"), http.post(COMPLETIONS, json={})]
            answers += [http.post(COMPLETIONS, json={**body, "seed": seed, "stream": seed == 1}) for seed in (FAIL_SEED, 0, 1)]
            server.engine.answer = lambda _: [1 << 40]  # no tokenizer takes it
            with caplog.at_level(logging.ERROR):
                answers += [http.post(COMPLETIONS, json={**body, "stream": stream}) for stream in (False, True)]
        assert [answer.status_code for answer in answers] == [404, 400, 500, 200, 200, 500, 200]
        assert all(answer.headers["x-request-id"] == "mine-2" for answer in answers)
        assert caplog.text.count("request mine-2 failed") == 2


class TestMetrics:
    @pytest.fixture
    def exported(self, fresh: Running) -> dict[str, set[str]]:
        """By name of a sample, the labels that it has, after a request."""
        fresh.complete(prompt="abc", max_tokens=4)
        assert eventually(lambda: "vmmkv_requests_running" in fresh.http.get("/metrics").text)
        families = list(text_string_to_metric_families(fresh.http.get("/metrics").text))
        samples = [sample for family in families for sample in family.samples if sample.name.startswith("vmmkv_")]
        names = {sample.name: set(sample.labels) for sample in samples}
        # These have a sample for each method or call that there was.
        labelled = {"vmmkv_attaches_total": {"method"}, "vmmkv_attach_seconds_total": {"method"}}
        assert {name.removesuffix("_total") for name in labelled} <= {family.name for family in families}
        return names | labelled

    def test_the_grafana_dashboard_asks_for_all_metrics_and_no_others(self, exported: dict[str, set[str]]) -> None:
        asked = [target["expr"] for panel in GRAFANA["panels"] for target in panel.get("targets", ())]
        asked += [variable["definition"] for variable in GRAFANA["templating"]["list"] if "definition" in variable]
        for expression in asked:
            names = set(re.findall(r"vmmkv_\w+", expression))
            assert names and names <= exported.keys(), expression
            for label in re.findall(r"by \((\w+)\)", expression):
                assert all(label in exported[name] for name in names), expression
        shown = {re.sub("_(count|sum)$", "_bucket", name) for name in exported if not name.endswith("_created")}
        assert shown <= set(re.findall(r"vmmkv_\w+", " ".join(asked)))

    def test_they_show_the_engines_snapshot(self, fresh: Running) -> None:
        fresh.complete(prompt="abc")
        wanted = {
            "vmmkv_engine_ready 1.0", "vmmkv_requests_running 0.0", "vmmkv_requests_waiting 0.0",
            "vmmkv_kv_mapped_bytes 0.0", "vmmkv_kv_budget_bytes 6.7108864e+07", "vmmkv_kv_tokens 0.0",
            "vmmkv_stalls_total 2.0", "vmmkv_stall_seconds_total 0.0015", 'vmmkv_driver_calls_total{call="map"} 4.0',
            "vmmkv_preemptions_total 0.0", "vmmkv_prompt_tokens_total 0.0", "vmmkv_generation_tokens_total 3.0",
            "vmmkv_prefix_hit_tokens_total 5.0", "vmmkv_prefix_pages 6.0", "vmmkv_request_duration_seconds_count 1.0",
            'vmmkv_resumed_tokens_total{source="recomputed"} 3.0',
            'vmmkv_hit_tokens_total{source="host"} 4.0', 'vmmkv_fetches_total{outcome="done"} 2.0',
            "vmmkv_fetch_wait_seconds_total 0.003", 'vmmkv_tier_held_bytes{tier="host"} 2.097152e+06',
            'vmmkv_tier_evicted_records_total{tier="host"} 7.0', 'vmmkv_tier_errors_total{tier="host"} 7.0',
            "vmmkv_time_to_first_token_seconds_count 1.0", 'vmmkv_requests_total{outcome="finished"} 1.0',
        }  # fmt: skip
        # The engine's last account of itself comes behind its last token.
        eventually(lambda: wanted <= set(fresh.http.get("/metrics").text.splitlines()))
        assert not wanted - set(fresh.http.get("/metrics").text.splitlines())

    def test_routers_find_vllms_names_with_the_same_values(self, fresh: Running) -> None:
        fresh.complete(prompt="abc")
        assert eventually(lambda: "vmmkv_requests_running" in fresh.http.get("/metrics").text)
        families = text_string_to_metric_families(fresh.http.get("/metrics").text)
        samples = {(sample.name, sample.labels.get("le")): sample for family in families for sample in family.samples}
        value = {name: sample.value for (name, bound), sample in samples.items() if bound is None}
        both = {"num_requests_running": "requests_running", "num_requests_waiting": "requests_waiting",
                "kv_cache_usage_perc": "kv_usage_ratio", "prefix_cache_hits_total": "prefix_hit_tokens_total",
                "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
                "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum"}  # fmt: skip
        assert {theirs: value[f"vllm:{theirs}"] for theirs in both} == {a: value[f"vmmkv_{ours}"] for a, ours in both.items()}
        asked = value["vmmkv_prefix_hit_tokens_total"] + value["vmmkv_prefix_missed_tokens_total"]
        assert value["vllm:prefix_cache_queries_total"] == asked > 0
        blocks = samples["vllm:cache_config_info", None].labels
        assert blocks == {"block_size": "16", "num_gpu_blocks": "64", "engine": "0"}
        labelled = {name: sample.labels for (name, bound), sample in samples.items() if name.startswith("vllm:") and not bound}
        del labelled["vllm:cache_config_info"]
        assert all(labels == {"model_name": "tiny", "engine": "0"} for labels in labelled.values())
        guide = (ROOT / "docs" / "guides" / "server" / "metrics.md").read_text()
        bare = {re.sub("_(bucket|count|sum)$", "", name) for name, _ in samples if name.startswith("vllm:")}
        assert set(re.findall("`(vllm:[a-z_]+)`", guide)) == bare

    def test_a_histogram_counts_each_time_in_its_bucket_and_those_above(self) -> None:
        times = Times("waiting", "How long.", (0.1, 1.0))
        for time_s in (0.05, 0.1, 0.5, 7.0):
            times.observe(time_s)
        samples = {(each.name[14:], each.labels.get("le")): each.value for each in times.family().samples}
        buckets = {("seconds_bucket", bound): count for bound, count in (("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0))}
        assert samples == buckets | {("seconds_count", None): 4.0, ("seconds_sum", None): pytest.approx(7.65)}

    def test_times_between_tokens_and_in_the_queue_are_counted(self, fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        fresh.never_ends(step_s=0.01)
        steps, send = list[Outputs](), fresh.engine.send

        def sending(message: Message) -> None:
            if isinstance(message, Outputs):
                steps.append(message)
            send(message)

        monkeypatch.setattr(fresh.engine, "send", sending)
        fresh.complete(prompt="abc", max_tokens=8, n=2, seed=1)
        text = fresh.http.get("/metrics").text
        count = re.search(r"^vmmkv_inter_token_latency_seconds_count (\S+)$", text, re.MULTILINE)
        # Two choices come in the same messages, seven gaps between eight; the second may begin some steps later.
        assert count is not None and 7 <= float(count[1]) == len(steps) - 1
        assert "vmmkv_request_queue_time_seconds_count 0.0" in text  # this engine does not say

    def test_the_first_token_of_an_answer_that_comes_too_late_is_counted(
        self, fresh: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh.never_ends(step_s=0.1)
        end = without_deadlines(fresh, monkeypatch)
        with ThreadPoolExecutor(1) as clients:
            late = clients.submit(fresh.complete, max_tokens=250, timeout=60)
            assert eventually(lambda: fresh.client.first_token_times.totals()[0] == 1)
            end()
            assert late.result().status_code == 408
        assert "vmmkv_time_to_first_token_seconds_count 1.0" in fresh.http.get("/metrics").text

    def test_refusals_are_counted_by_status_and_ends_in_the_engine_apart(self) -> None:
        key = "some-key"
        front = ServeConfig(api_keys=(key,), admin_key="admin-key", max_queued_tokens=8)
        with running_server(front=front) as server:
            refused = [server.complete(key, temperature=-1), server.complete("another key"), server.post("/kv/reset", {}, key)]
            assert [answer.status_code for answer in refused] == [400, 401, 403]
            ended = [{"seed": FAIL_SEED}, {"seed": SILENT_SEED, "timeout": 0.1}, {}]
            assert [server.complete(key, **body).status_code for body in ended] == [500, 408, 200]
            with ThreadPoolExecutor(1) as clients:
                waiting = clients.submit(lambda: server.complete(key, prompt="a" * 9, seed=SILENT_SEED))
                assert eventually(lambda: server.client.waiting_tokens == 9)
                assert server.complete(key).status_code == 429
                server.engine_dies("it was a test")
                assert waiting.result().status_code == 503  # the engine had it: it has failed
            assert server.complete(key).status_code == server.http.get("/health").status_code == 503
            assert [server.http.get(path).status_code for path in ("/metrics", "/kv", "/favicon.ico")] == [401] * 3
            text = server.http.get("/metrics", headers=bearer("admin-key")).text
        counted = dict(re.findall(r'^vmmkv_requests_refused_total\{code="(\d+)"\} (\S+)$', text, re.MULTILINE))
        assert counted == dict.fromkeys(("400", "401", "403", "429", "503"), "1.0")
        assert 'vmmkv_requests_total{outcome="failed"} 3.0' in text


def test_the_guide_has_every_route(server: Running) -> None:
    document = server.http.get("/openapi.json").json()
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    table = re.findall(r"^\| `(?:GET|POST) .*", (ROOT / "docs/guides/server/api.md").read_text(), re.MULTILINE)
    told = {route for line in table for route in re.findall(r"`((?:GET|POST) [^`]+)`", line)}
    assert {route.replace("{name}", "NAME") for route in served} <= told


def test_the_version_and_the_model_are_told(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": vmmkv.__version__}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert server.http.get("/v1/models/tiny").json() == model
    assert (model["id"], model["owned_by"], model["max_model_len"], model["implementation"]) == ("tiny", "vmmkv", 256, "vmmkv")
    assert model["kv_cache_dtype"] == "int8"


def a_map(*slots: SlotMap, requests: dict[int, str] | None = None) -> MemoryMap:
    return MemoryMap(num_slots=8, slot_pages=[64], slots=list(slots), requests=requests or {}, took_us=12.3)


def live(slot: int, *runs: MappedRun) -> SlotMap:
    return SlotMap(slot, SlotState.LIVE, 100, [list(runs)])


def run(page: int, num_pages: int, num_holders: int, handle: int, state: RunState = RunState.LIVE) -> MappedRun:
    return MappedRun(page, num_pages, state, num_holders, handle)


def num_asked(server: Running) -> int:
    return sum(isinstance(message, AskMap) for message in server.engine.received)


class TestMap:
    def test_it_says_what_is_mapped_and_what_is_shared(self, server: Running) -> None:
        first = live(1, run(0, 4, 3, handle=70), run(4, 2, 2, handle=71), run(6, 1, 1, 72, RunState.AHEAD))
        second = live(3, run(0, 4, 3, handle=70), run(4, 1, 1, handle=73))
        server.engine.memory_map = a_map(first, second, requests={1: "cmpl-a-0"})
        found = server.http.get("/kv").json()
        assert (found["num_slots"], found["slot_pages"], found["page_bytes"]) == (8, [64], 2 << 20)
        assert found["memory"]["budget_bytes"] == 1 << 26
        assert found["memory"]["tiers"] == {"host": {"held": 1 << 21, "budget": 1 << 30, "loaded": 7, "hit_tokens": 4}}
        # What the tree alone holds too is not shared between slots.
        runs = [[0, 0, 4, "live", 2, 0], [0, 4, 2, "live", 1, None], [0, 6, 1, "ahead", 1, None]]
        others = [[0, 0, 4, "live", 2, 0], [0, 4, 1, "live", 1, None]]
        assert found["slots"] == [
            {"slot": 1, "state": "live", "tokens": 100, "request": "cmpl-a-0", "runs": runs},
            {"slot": 3, "state": "live", "tokens": 100, "request": None, "runs": others},
        ]

    def test_a_map_of_256_slots_is_some_tens_of_kilobytes(self, server: Running) -> None:
        slots = [live(slot, run(0, 9, 256, 7), run(9, 30, 2, slot + 100), run(39, 2, 1, slot + 500)) for slot in range(1, 257)]
        server.engine.memory_map = a_map(*slots, requests={slot: f"chatcmpl-{slot:032x}-0" for slot in range(1, 257)})
        assert len(server.http.get("/kv").content) < 64 << 10

    def test_however_many_ask_the_engine_is_asked_four_times_a_second_at_most(self, server: Running) -> None:
        began_s = time.monotonic()
        with ThreadPoolExecutor(16) as clients:
            assert set(clients.map(lambda _: server.http.get("/kv").status_code, range(16))) == {200}
        assert num_asked(server) <= 1 + (time.monotonic() - began_s) / engine_client.FRESH_S
        while num_asked(server) < 3:  # a map is of now, or of a moment ago: else this goes on for ever
            server.http.get("/kv")
        assert time.monotonic() - began_s >= 2 * engine_client.FRESH_S

    def test_a_dead_engine_is_503_at_once(self, fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MemoryMaps.get, "__kwdefaults__", {"within_s": 3600.0})
        fresh.engine.memory_map = None
        with ThreadPoolExecutor(1) as client:
            waits = client.submit(fresh.http.get, "/kv")
            assert eventually(lambda: num_asked(fresh) == 1)
            fresh.engine_dies("it was a test")
            assert waits.result(60).status_code == 503, "not when the time for a map is over"
        assert fresh.http.get("/kv").json()["error"]["message"] == "it was a test"

    def test_a_prefix_keeps_its_number_and_a_free_one_is_given_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_client, "FRESH_S", 60)

        def numbers(maps: MemoryMaps, *handles: int) -> list[int]:
            slots = [live(1 + index, run(0, 1, 2, handle)) for index, handle in enumerate(sorted((*handles, *handles)))]
            maps.take(a_map(*slots))
            return [slot["runs"][0][5] for slot in asyncio.run(maps.get())["slots"][::2]]

        maps = MemoryMaps(lambda message: None)
        assert [numbers(maps, *handles) for handles in ((10, 20, 30), (20, 30), (5, 20, 30))] == [[0, 1, 2], [1, 2], [0, 1, 2]]

    def test_an_engine_that_says_nothing_is_waited_for_no_longer_than_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_client, "FRESH_S", 60)

        async def ask() -> list[Message]:
            sent: list[Message] = []
            maps = MemoryMaps(sent.append)
            for _ in range(2):
                with pytest.raises(MapUnavailable, match="no map"):
                    await maps.get(within_s=0.01)
            maps.take(a_map())
            assert (await maps.get())["num_slots"] == 8
            return sent

        assert len(asyncio.run(ask())) == 1


@contextlib.contextmanager
def watching(server: Running) -> Iterator[Iterator[tuple[str, Any]]]:
    """The stream's events, by kind."""

    def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])

    with server.http as http, http.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events(response)


def flights(events: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """The one request of each state that has any."""
    return (data["requests"][0] for kind, data in events if kind == "state" and data["requests"])


class TestStream:
    def test_it_begins_with_state_and_map_and_goes_on_with_news_without_any_text(self, server: Running) -> None:
        server.engine.memory_map = a_map(live(1, run(0, 2, 1, 5)))
        seen: dict[str, list[Any]] = {"state": [], "map": []}
        with contextlib.ExitStack() as stack:
            for kind, data in stack.enter_context(watching(server)):
                seen[kind].append(data)
                if len(seen["map"]) == 1 and len(seen["state"]) == 1:
                    server.engine.memory_map = a_map(live(1, run(0, 3, 1, 5)))
                    stack.enter_context(asking(server, CHAT, SECRET))
                if len(seen["map"]) == 2 and any(state["requests"] for state in seen["state"]):
                    break
        state = next(state for state in seen["state"] if state["requests"])
        assert state["health"]["status"] == "ok" and state["model"] == "tiny"
        (flight,) = state["requests"]
        assert flight["id"].startswith("chatcmpl-") and flight["prompt_tokens"] > 0 and flight["age_s"] >= 0
        assert seen["map"][1]["slots"][0]["runs"] == [[0, 0, 3, "live", 1, None]]
        assert "secret" not in json.dumps(seen)

    def test_an_answer_that_is_sent_whole_is_counted_as_it_comes(self, server: Running) -> None:
        server.never_ends()
        server.engine.cached = lambda _: 3
        with asking(server, COMPLETIONS, {"model": "tiny", "prompt": "abcd", "max_tokens": 240}), watching(server) as events:
            begun = (flight for flight in flights(events) if flight["has_begun"])
            first, second = next(begun), next(begun)
        assert 0 < first["generated_tokens"] < second["generated_tokens"] < 240
        assert first["cached_tokens"] == second["cached_tokens"] == 3

    def test_numbers_that_the_engine_has_not_said_are_null(self, server: Running) -> None:
        with asking(server, CHAT, SECRET), watching(server) as events:
            flight = next(flights(events))
        assert (flight["has_begun"], flight["cached_tokens"], flight["generated_tokens"]) == (False, None, None)

    def test_viewers_cost_the_engine_what_one_does_up_to_a_limit_and_none_nothing(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page, "MAX_VIEWERS", 3)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                next(stack.enter_context(watching(server)))
            assert server.http.get("/events").status_code == 503
            before, began_s = num_asked(server), time.monotonic()
            time.sleep(1.0)
            assert num_asked(server) - before <= 1 + (time.monotonic() - began_s) / engine_client.FRESH_S

        def is_quiet() -> bool:
            before = num_asked(server)
            time.sleep(2.5 * page.TICK_S)
            return num_asked(server) == before

        assert eventually(is_quiet)

    def test_it_ends_when_the_server_does(self, fresh: Running) -> None:
        with watching(fresh) as events:
            next(events)
            fresh.loop.call_soon_threadsafe(fresh.service.stop)
            for _ in events:
                pass


class TestPage:
    def test_it_is_served_with_a_policy_that_lets_nothing_in(self, server: Running) -> None:
        for path in ("/", *(f"/page/{name}" for name in page.FILES)):
            answer = server.http.get(path)
            assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy and "default-src 'none'" in policy
        for name in ("nothing.js", "..%2f..%2fapp.py", "%2e%2e/app.py"):
            assert server.http.get(f"/page/{name}").status_code == 404

    def test_whatever_it_names_is_there_and_nothing_of_others(self) -> None:
        texts = {name: content.decode() for name, (content, _) in page.FILES.items()}
        folder = ROOT / "server" / "vmmkv_server" / "http" / "page"
        assert set(texts) == {path.name for path in folder.iterdir() if path.suffix in {".css", ".html", ".js", ".svg"}}
        for name, text in texts.items():
            for link in filter(None, sum(re.findall(r'(?:src|href)="(?!#)([^"]+)"|from "\./([^"]+)"', text), ())):
                assert link.removeprefix("/page/") in texts, f"{name} names {link}"
            assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name
        html = texts["index.html"]
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html)
        assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
        for wanted in re.findall(r'find\("([^"]+)"\)', texts["main.js"] + texts["chat.js"]):
            assert f'id="{wanted}"' in html, wanted
