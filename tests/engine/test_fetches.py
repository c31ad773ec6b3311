"""Tiers below the engine: what is evicted comes back, tokens are those without tiers, and no request waits in vain."""

import itertools
import logging
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

from tests.engine.conftest import Harness, MakeHarness, prompt_of, wide_rows
from tests.engine.decoder_models import model_of, small
from tests.laws.faulty_tier import FAULTS, FaultyTier
from vmmkv import MIB, PAGE_BYTES, DiskTier, HostTier, OutOfPages, Pool
from vmmkv.errors import BudgetError
from vmmkv.prefix import Borrowed, Fetch
from vmmkv.rate import Rate
from vmmkv.tiers import TierStats, Transfer, fetch_search, transfers
from vmmkv_server import LLM, RequestOutput, SamplingParams
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine import loading
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.features import fetches
from vmmkv_server.engine.features.fetches import Fetches
from vmmkv_server.engine.loading import ModelSource, weights_identity
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.step import Step
from vmmkv_server.protocol import Abort, Compacted, Generate, Snapshot


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is taken to be slow, so that every fetch is waited for."""
    monkeypatch.setattr(fetches, "FIRST_TOKENS_PER_S", 1.0)
    monkeypatch.setattr(fetches, "LEAST_MEASURED", 1 << 30)


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_budget_bytes": 32 * MIB, "max_tokens": 1024}
PROMPTS = [prompt_of(500 + 40 * seed, seed) for seed in range(6)]
"""Of 7 to 10 full pages, of 64 tokens each: two of them fill the device."""
PROMPT = PROMPTS[0]
WIDE = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "wide"
    wide_rows().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """The answers without tiers."""
    with LLM(directory, **OPTIONS) as llm:
        return answers(llm.generate(PROMPTS, GREEDY))


@pytest.fixture
def tier() -> Iterator[HostTier]:
    """Lends nothing in the end."""
    yield (tier := HostTier(64 * PAGE_BYTES))
    tier.close()


@pytest.fixture
def asks(tier: HostTier) -> FaultyTier:
    """A host tier that has to find out what it has while its `chance` is 1."""
    return FaultyTier(tier, 0, ["asks"], chance=0.0)


@pytest.fixture
def slow(tier: HostTier) -> Iterator[FaultyTier]:
    """A host tier whose loads come when it is told to hurry."""
    yield (slow := FaultyTier(tier, 0, ["slow"], chance=1.0))
    assert not slow.lent


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def serving(harness: MakeHarness, *tiers: Any, **options: Any) -> Harness:
    return harness(wide_rows(), ours=True, share=True, tiers=tiers, max_tokens=1024, **options)


def stored(one: Harness, prompt: list[int]) -> list[int]:
    """The answer to a prompt that then is in the tier and not on the device."""
    tokens = one.said(prompt)
    one.engine.store_all(30)
    one.engine.forget()
    assert not one.prefix.match(prompt)
    return tokens


def of_engine(one: Harness) -> Fetches:
    return one.engine.features.of(Fetches)


def ended(one: Harness) -> Counter[str]:
    return of_engine(one).counts.fetches


# tokens are those without tiers


def test_what_leaves_the_device_comes_back_from_the_host(directory: Path, expected: list[list[int]]) -> None:
    with LLM(directory, kv_host_budget_bytes=256 * MIB, **OPTIONS) as llm:
        assert answers(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS, GREEDY)
        assert answers(again) == expected
        assert sum(each.cached_tokens_details.get("host", 0) for each in again) > 1000
        assert all(sum(each.cached_tokens_details.values()) == each.cached_tokens for each in again)


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_next_turn_loads_the_rows_as_they_were_before_a_policy(harness: MakeHarness, tier: HostTier) -> None:
    one = serving(harness, tier)
    answer = one.said(PROMPT, 10, kv_policy={"type": "snapkv", "budget": 100})
    assert [(each.kept_rows, each.dropped_rows) for each in one.sent if isinstance(each, Compacted)] == [(100, 400)]
    one.engine.store_all(30)
    one.engine.forget()
    turn_two = [*PROMPT, *answer, *prompt_of(9, 1)]
    assert not one.prefix.match(turn_two)
    one.ask("next", turn_two)
    one.run()
    assert one.outputs("next")[0].cached == (("host", 448),)
    assert one.tokens("next") == one.expected(turn_two)


HYBRID = {"use_sliding_window": True, "sliding_window": 90, "max_window_layers": 1}
KINDS: dict[str, tuple[Callable[[], Any], bool]] = {
    "sliding": (lambda: random_model(small(MistralConfig, **WIDE, sliding_window=100)), True),
    "hybrid": (lambda: random_model(small(Qwen2Config, **WIDE, **HYBRID)), True),
    "dense, transformers' code": (lambda: random_model(small(LlamaConfig, **WIDE)), False),
    "hybrid, transformers' code": (lambda: model_of(small(Gemma3TextConfig, **WIDE, sliding_window=90)), False),
}
"""Models, and whether the engine's decoder runs them."""


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_say_the_same_from_a_tier(harness: MakeHarness, tier: HostTier, kind: str) -> None:
    make, ours = KINDS[kind]
    one = harness(make(), ours=ours, share=True, tiers=[tier], max_tokens=1024)
    tokens = stored(one, PROMPT)
    assert tokens == one.expected(PROMPT) and len(set(tokens)) > 2
    one.ask("again", PROMPT)
    one.run()
    assert one.tokens("again") == tokens
    ((source, num_tokens),) = one.outputs("again")[0].cached
    assert source == "host" and num_tokens > 300


def test_a_disk_hits_after_a_restart_what_it_hit_before_and_misses_what_cannot_be_read(
    directory: Path,
    tmp_path: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vmmkv_server")
    disk = OPTIONS | {"kv_disk": tmp_path / "kv", "kv_disk_budget_bytes": 256 * MIB}
    with LLM(directory, **(disk | {"kv_budget_bytes": 256 * MIB})) as llm:  # nothing is evicted before it is stored
        assert answers(llm.generate(PROMPTS, GREEDY)) == expected
        assert "KV tier disk: 256.0 MiB, 0 B of it held" in caplog.text
    for _ in range(2):
        caplog.clear()
        with LLM(directory, **disk) as llm:
            assert re.search(r"KV tier disk: 256.0 MiB, \d+\.\d MiB of it held", caplog.text)
            again = llm.generate(PROMPTS, GREEDY)
            assert answers(again) == expected
            hits = [each.cached_tokens_details for each in again]
            assert hits == [{"disk": len(prompt) // 64 * 64} for prompt in PROMPTS]
            assert llm.snapshot is not None
            assert llm.snapshot.scheduler.hit_tokens == {"disk": sum(each["disk"] for each in hits)}
    with monkeypatch.context() as patch, LLM(directory, **disk) as llm:
        patch.setattr(DiskTier, "read_at", lambda *_: os.pread(-1, 1, 0))  # raises OSError
        assert answers(llm.generate(PROMPTS, GREEDY)) == expected
        assert llm.snapshot is not None and llm.snapshot.tiers["disk"].errors and not llm.snapshot.scheduler.hit_tokens
    changed = wide_rows()
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight[3, 3] += 1
    changed.save_pretrained(tmp_path / "changed")
    with LLM(tmp_path / "changed", **disk) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].cached_tokens == 0


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault == "lies" else pytest.mark.nightly) for fault in FAULTS]
)
def test_a_tier_that_fails_is_counted_and_changes_no_token(harness: MakeHarness, fault: str) -> None:
    tier = FaultyTier(HostTier(64 * PAGE_BYTES), 1, [fault], chance=0.3)
    one = serving(harness, tier, budget_pages=20)
    for _ in range(3):
        for index, prompt in enumerate(PROMPTS[:3]):
            one.ask(f"{index}", prompt)
        while one.engine.has_work:
            one.step()
            tier.advance()
        one.engine.store_all(0.1)
        one.engine.forget()
    for index, prompt in enumerate(PROMPTS[:3]):
        assert one.tokens(f"{index}") == 3 * one.expected(prompt)
    assert not one.failures()
    if fault == "raises":
        assert one.prefix.stats().tier_errors
    if fault == "forgets":
        assert sum(output.cached_tokens for output in one.outputs()) < 2 * 64 * (7 + 8 + 9)


def test_a_tier_whose_stats_raise_is_left_out_of_the_metrics_and_used_all_the_same(harness: MakeHarness) -> None:
    class Mute(HostTier):
        def stats(self) -> TierStats:
            raise OSError("injected")

    tier = Mute(64 * PAGE_BYTES)
    one = serving(harness, tier)
    tokens = stored(one, PROMPT)
    assert one.said(PROMPT) == tokens and one.outputs("alone")[-8].cached == (("host", 448),)
    one.engine.report()
    (snapshot,) = one.sent[-1:]
    assert isinstance(snapshot, Snapshot) and snapshot.tiers == {} and snapshot.prefix.tier_call_errors
    assert one.prefix.has_tiers
    tier.close()


# waiting


def test_requests_wait_for_the_answer_of_a_tier_and_then_for_one_load(harness: MakeHarness, asks: FaultyTier) -> None:
    one = serving(harness, asks)
    tokens = stored(one, PROMPT)
    asks.chance = 1.0
    for name, prompt in {"a": PROMPT, "b": PROMPT, "new": PROMPTS[1]}.items():
        one.ask(name, prompt)
    one.step(5)
    assert not any(one.outputs(name) for name in ("a", "b", "new"))
    asks.chance = 0.0
    one.run()
    assert [one.tokens(name) for name in "ab"] == [tokens] * 2 and one.tokens("new") == one.expected(PROMPTS[1])
    assert [one.outputs(name)[0].cached for name in ("a", "b", "new")] == [(("faulty host", 448),)] * 2 + [()]
    assert asks.stats().loaded_bytes == 7 * PAGE_BYTES
    assert ended(one) == {"unknown": 2, "done": 2}  # the second of the same prompt waits again, for the first one's load
    one.cache.close()


def test_requests_behind_one_that_waits_for_a_tier_begin(harness: MakeHarness, slow: FaultyTier) -> None:
    one = serving(harness, slow)
    tokens = stored(one, PROMPT)
    one.ask("known", PROMPT)
    one.ask("new", PROMPTS[1])
    one.step(30)
    assert one.finish_reasons("new")[-1] == "length" and not one.outputs("known")
    slow.hurry()
    one.run()
    assert one.tokens("known") == tokens and one.outputs("known")[0].cached == (("faulty host", 448),)
    assert one.tokens("new") == one.expected(PROMPTS[1])
    one.cache.close()


def test_what_has_come_of_a_fetch_that_is_later_than_computing_is_used(
    harness: MakeHarness, slow: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serving(harness, slow)
    tokens = stored(one, PROMPT)
    one.ask("known", PROMPT)
    one.step()
    one.prefix.poll()
    slow.come(4)
    one.prefix.poll()
    of_engine(one).prefill = Rate(math.inf)
    one.run()
    assert one.tokens("known") == tokens
    assert one.outputs("known")[0].cached == (("faulty host", 256),) and ended(one) == {"late": 1}
    assert one.said(PROMPTS[1][:100]) == one.expected(PROMPTS[1][:100])
    one.cache.close()


def test_a_client_that_goes_leaves_nothing_in_a_tier(harness: MakeHarness, slow: FaultyTier) -> None:
    one = serving(harness, slow)
    stored(one, PROMPT)
    for name in ("goes", "goes too"):
        one.ask(name, PROMPT)
    one.step(2)
    assert slow.lent and one.cache.stats().pool_used_bytes
    for name in ("goes", "goes too"):
        one.engine.receive(Abort(request_id=name))
    assert not one.engine.has_work and ended(one) == {"given_up": 2}
    one.engine.settle()
    one.cache.check()
    assert not slow.lent and not one.cache.stats().pool_used_bytes


def test_an_interrupt_as_a_client_goes_leaves_nothing_to_be_ended_again(
    harness: MakeHarness, slow: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, give_up = serving(harness, slow), Fetch.give_up
    stored(one, PROMPT)
    one.ask("goes", PROMPT)
    one.step(2)

    def interrupted(fetch: Fetch) -> None:
        give_up(fetch)
        raise KeyboardInterrupt

    monkeypatch.setattr(Fetch, "give_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.engine.receive(Abort(request_id="goes"))
    one.engine.receive(Abort(request_id="goes"))
    assert not one.engine.has_work and not slow.lent


def test_a_request_that_comes_waits_for_no_store(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = serving(harness, FaultyTier(HostTier(64 * PAGE_BYTES), 0, ["refuses"], chance=1.0))
    one.said(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(one.memory, "drain", lambda: pytest.fail("it waits for copies"))
        one.engine.store_all(wait=lambda: True)
    assert one.said(PROMPT) == one.expected(PROMPT)


def test_a_running_request_takes_the_memory_that_is_being_loaded_into(harness: MakeHarness, slow: FaultyTier) -> None:
    one = serving(harness, slow, budget_pages=14)
    tokens = stored(one, PROMPT)
    one.ask("running", prompt_of(300, 9), 200)
    one.step(2)
    one.ask("known", PROMPT)
    one.step(2)
    assert ended(one) == {} and slow.lent
    one.step(160)  # it needs an eighth page
    assert ended(one)["given_up"] and one.engine.scheduler.counts.preemptions == 0
    slow.hurry()
    slow.faults.clear()
    one.run()
    assert one.tokens("running") == one.expected(prompt_of(300, 9), 200)
    assert one.tokens("known") == tokens


def test_a_request_waits_for_room_to_load_rather_than_compute(harness: MakeHarness, tier: HostTier) -> None:
    one = serving(harness, tier, budget_pages=14)
    tokens = stored(one, PROMPT)
    for name in "ab":  # three pages each
        one.ask(name, prompt_of(140, ord(name)), 40)
        one.step(2)
    one.ask("known", PROMPT)
    one.step(10)
    assert one.engine.num_running == 2, "there is room for its eight pages, and none besides for those that run"
    one.run()
    assert one.tokens("known") == tokens and ended(one) == {"done": 1}
    assert tier.stats().loaded_bytes == 7 * PAGE_BYTES


def test_room_to_load_is_for_rows_that_no_running_request_has(harness: MakeHarness, tier: HostTier) -> None:
    prompt = PROMPTS[5]
    one = serving(harness, tier, budget_pages=14)
    tokens = stored(one, prompt)
    one.ask("running", prompt[:200], 60)  # four pages, three of which begin the other's eleven
    one.step(3)
    one.ask("known", prompt)
    one.step(10)
    assert one.engine.num_running == 2, "ten free pages are enough for the other eight, and one to spare"
    one.run()
    assert one.tokens("known") == tokens and ended(one) == {"done": 1}


@pytest.mark.parametrize(("num_shared", "num_loads"), [(24, 3), (256, 5)])
def test_rows_behind_a_common_beginning_give_way_to_a_load(
    harness: MakeHarness, tier: HostTier, num_shared: int, num_loads: int
) -> None:
    """Of less than a page, and of a large extent: only what the load goes on from is kept."""
    prompts = [[*PROMPT[:num_shared], *prompt[num_shared:]] for prompt in PROMPTS[:3]]
    one = serving(harness, tier, budget_pages=10)
    tokens = [stored(one, prompt) for prompt in prompts]
    assert [one.said(prompt) for prompt in prompts] == tokens
    assert ended(one) == {"done": num_loads}


def test_a_request_that_is_computed_for_want_of_room_is_counted_once(
    harness: MakeHarness, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serving(harness, tier)
    tokens = stored(one, PROMPT)
    acquire, fails = Pool.acquire_mixed, iter([True, True])

    def acquire_none(pool: Pool, *given: Any, **how: Any) -> Any:
        if next(fails, False):  # for the fetch, and again for it once all is collected
            raise OutOfPages("as if others had them")
        return acquire(pool, *given, **how)

    monkeypatch.setattr(Pool, "acquire_mixed", acquire_none)
    assert one.said(PROMPT) == tokens and ended(one) == {"no_room": 1}


def test_later_requests_do_not_take_the_room_that_one_waits_for(
    harness: MakeHarness, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiers take several steps to be searched, as over a network; others begin meanwhile."""
    monkeypatch.setattr(fetch_search, "MOST_KEYS", 1)
    monkeypatch.setattr(transfers, "PIECES_AT_ONCE", 1)
    one = serving(harness, tier, budget_pages=14)
    tokens = stored(one, PROMPT)
    for index in range(20):  # three pages each
        one.ask(f"{index}", prompt_of(140, index), 20 + 5 * index % 20)
        if index == 3:
            one.ask("known", PROMPT)
    one.run()
    assert one.tokens("known") == tokens
    begun = list(dict.fromkeys(output.request_id for output in one.outputs()))
    assert begun[1:].index("known") < 8, begun
    assert ended(one)["no_room"] < 4, "tiers are asked again when there may be room"


def test_a_preempted_request_comes_back_from_a_tier(harness: MakeHarness, tier: HostTier) -> None:
    one = serving(harness, tier, budget_pages=12, step_tokens=1024)
    one.ask("low", PROMPT, 30, priority=1)
    one.step(20)
    one.ask("pressing", PROMPTS[4], 4)
    one.run()
    assert one.engine.scheduler.counts.preemptions == 1
    assert ended(one) == {"done": 1} and tier.stats().loaded_bytes == 7 * PAGE_BYTES
    assert one.tokens("low") == one.expected(PROMPT, 30)
    assert one.tokens("pressing") == one.expected(PROMPTS[4], 4)


def test_a_more_urgent_request_takes_the_slot_of_one_that_waits_for_a_tier(harness: MakeHarness, slow: FaultyTier) -> None:
    one = serving(harness, slow, max_sequences=1)
    tokens = stored(one, PROMPT)
    one.ask("low", PROMPT, priority=1)
    one.step(2)
    assert slow.lent
    one.ask("urgent", PROMPTS[1])
    one.step(30)
    assert one.finish_reasons("urgent")[-1] == "length" and ended(one)["given_up"] == 1
    slow.faults.clear()
    slow.hurry()
    one.run()
    assert one.tokens("urgent") == one.expected(PROMPTS[1]) and one.tokens("low") == tokens
    one.cache.close()


def test_nothing_waits_for_the_longer_prompt_of_another_than_for_its_own(harness: MakeHarness, slow: FaultyTier) -> None:
    one = serving(harness, slow)
    stored(one, PROMPT)
    one.ask("long", PROMPT)
    one.ask("short", [*PROMPT[:320], 1, 2])
    one.step(2)
    waiting = of_engine(one)
    assert len({wait.fetch for wait in waiting.waiting.values()}) == 1
    assert [waiting.computing_s(wait.fetch, wait.num_tokens) for wait in waiting.waiting.values()] == [448, 322]
    one.cache.close()


def test_tokens_that_a_tier_has_lost_and_another_request_computes_are_the_devices(harness: MakeHarness) -> None:
    tier = FaultyTier(HostTier(64 * PAGE_BYTES), 0, ["forgets"], chance=0)
    one = serving(harness, tier)
    tokens = stored(one, PROMPT)
    tier.chance = 1
    for name in "ab":
        one.ask(name, PROMPT)
    one.run()
    assert [one.tokens(name) for name in "ab"] == [tokens] * 2 and ended(one)["done"]
    assert [dict(one.outputs(name)[0].cached).keys() for name in "ab"] == [set(), {"device"}]
    assert of_engine(one).loads["faulty host"].per_s == math.inf, "nothing came, and nothing was measured"


def test_a_request_that_finds_no_memory_asks_a_slow_tier_once(harness: MakeHarness, tier: HostTier) -> None:
    one = serving(harness, tier, budget_pages=12)
    tokens = stored(one, PROMPT)
    of_engine(one).prefill = Rate(math.inf)
    for index in range(3):
        one.ask(f"{index}", prompt_of(300, 20 + index), 20)
    one.step(2)
    one.ask("known", PROMPT)
    one.run()
    assert one.tokens("known") == tokens and ended(one) == {"declined": 1}


def test_a_fetch_that_is_declined_once_a_tier_has_answered_counts_once(
    harness: MakeHarness, asks: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serving(harness, asks)
    tokens = stored(one, PROMPT)
    monkeypatch.setattr(Fetches, "computing_s", lambda *_: 1e6)
    of_engine(one).loads["faulty host"].add(1, 0.0, 1.0)
    asks.chance = 1.0
    one.ask("known", PROMPT)
    one.step(2)
    asks.chance = 0.0
    one.run()
    assert one.tokens("known") == tokens and ended(one) == {"declined": 1}
    one.cache.close()


def test_what_is_before_the_records_of_a_slow_tier_is_loaded_and_those_are_computed(harness: MakeHarness) -> None:
    host, disk = HostTier(14 * PAGE_BYTES), FaultyTier(HostTier(64 * PAGE_BYTES), 0, ())
    one = serving(harness, host, disk, step_tokens=1024)
    prompt, other = PROMPTS[5], PROMPTS[1]  # with the answers of 11 and 8 pages: the end of the first leaves the host tier
    tokens, _ = stored(one, prompt), stored(one, other)
    rates = of_engine(one).loads
    rates["faulty host"].add(1, 0.0, 1e6)
    assert one.said(prompt) == tokens and one.outputs("alone")[-8].cached == (("host", 384),)
    assert disk.stats().loaded_bytes == 0 and ended(one) == {"done": 1, "declined": 1}
    assert rates["faulty host"].per_s == pytest.approx(1.01e-6), "once for one request"
    one.cache.close()
    host.close()
    disk.close()


@pytest.fixture
def prompt_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are stored and fetched page by page, all that is queued in the slack of one step."""
    monkeypatch.setattr(fetches, "LEAST_TOKENS", 16)
    poll_tiers = Engine.poll_tiers
    monkeypatch.setattr(Engine, "poll_tiers", lambda self, *_: poll_tiers(self, float("inf")))


CROWD = {str(seed): prompt_of(8, seed) for seed in range(4)}
"""16 tokens fill a page, and all need one in the same step."""


def crowded(harness: MakeHarness, tiers: Sequence[Any] = (), *, budget_pages: int = 16) -> Harness:
    """An engine that has answered them all."""
    model = wide_rows(num_hidden_layers=8)
    one = harness(model, ours=True, share=True, tiers=tiers, budget_pages=budget_pages, max_tokens=128)
    one.serve(CROWD, 84)
    assert not one.failures()
    return one


def test_what_preempted_requests_generated_comes_back_from_a_tier(
    harness: MakeHarness, tier: HostTier, prompt_stores: None
) -> None:
    roomy, plain, swapping = crowded(harness, budget_pages=64), crowded(harness), crowded(harness, [tier])
    for name in CROWD:
        assert plain.tokens(name) == swapping.tokens(name) == roomy.tokens(name)
    assert plain.engine.scheduler.counts.resumed_tokens.keys() == {"recomputed"}
    counts = swapping.engine.scheduler.counts
    num_lost, num_kept = counts.resumed_tokens["recomputed"], counts.resumed_tokens["host"]
    assert counts.preemptions and num_lost <= 16 * counts.preemptions < num_kept, "one page each was not stored yet"
    assert counts.hit_tokens == {}, "no prompt was known when its request first began"
    swapping.cache.close()


# break-even


def test_what_overlaps_counts_as_done_in_turn() -> None:
    rate = Rate(7.0)
    assert rate.per_s == 7.0
    rate.add(100, 0.0, 1.0)
    rate.add(100, 0.0, 2.0)
    rate.add(100, 1.5, 2.0)
    assert rate.per_s == pytest.approx(300 / 2, rel=0.1)


class FakeFetch(Fetch):
    """Of 50 tokens."""

    def __init__(self, bytes_by_tier: Counter[str]) -> None:
        self.bytes_by_tier, self.num_tokens, self.known_tokens = bytes_by_tier, 100, 50
        self.done, self.ended_s, self.loaded_bytes, self.waiting = False, float("inf"), Counter[str](), 1

    def end(self, ended_s: float) -> None:
        self.done, self.ended_s, self.loaded_bytes = True, ended_s, self.bytes_by_tier

    def give_up(self) -> None:
        self.waiting -= 1
        self.done = self.done or not self.waiting


class FakePrefix:
    """Has a fetch for each prompt, and may have no room to borrow some of its tokens."""

    def __init__(self, *fetches: FakeFetch, borrowed: Borrowed | None = None) -> None:
        self.fetches = [*fetches]
        self.borrowed = borrowed

    def store_if(self, worth: object) -> None:
        pass

    def borrow(self, tokens: object, **options: object) -> Borrowed | None:
        return self.borrowed

    def fetch(self, tokens: object, **options: object) -> FakeFetch:
        return self.fetches.pop(0)


def started(
    monkeypatch: pytest.MonkeyPatch, *fetches: FakeFetch, prefix: FakePrefix | None = None, running: Sequence[Request] = ()
) -> tuple[Fetches, list[Request], list[float]]:
    """Requests that wait for these, of which each could be computed in 0.5 s, and the time, which is 0 s."""
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    prefix = FakePrefix() if prefix is None else prefix
    prefix.fetches += fetches
    memory = {"memory.prefixes": prefix, "memory.layout.row_bytes": 1}
    one = Fetches(MagicMock(**memory, **{"scheduler.running": dict.fromkeys(running)}))
    one.prefill.add(100, 0.0, 1.0)
    params = [Generate(request_id=f"{index}", prompt=PROMPT, params=GREEDY) for index in range(len(fetches))]
    requests = [Request(each, frozenset()) for each in params]
    assert all(one.hold(request) for request in requests)
    return one, requests, now_s


@pytest.mark.parametrize(("num_tokens", "waits"), [(300, True), (255, False)])
def test_a_request_waits_for_room_to_borrow_what_takes_a_while_to_compute(
    num_tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, request = (Request(Generate(request_id=each, prompt=PROMPT, params=GREEDY), frozenset()) for each in ("runs", "lent"))
    prefix = FakePrefix(FakeFetch(Counter()), borrowed=Borrowed(0, num_tokens, Counter()))
    one, _, _ = started(monkeypatch, prefix=prefix, running=[runs])
    assert one.hold(request) is (None if waits else True)
    assert one.sources(request, 100) == {"device": 100} and (request in one.waiting) != waits


def test_a_load_that_nothing_looked_at_in_time_is_as_fast_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = FakeFetch(Counter(host=1000))
    one, requests, now_s = started(monkeypatch, fetch)
    fetch.end(0.1)
    now_s[0] = 3.0
    assert one.released() == requests and one.counts.fetches == {"done": 1}
    assert one.loads["host"].per_s == pytest.approx(10_000)


def test_each_fetch_has_the_time_of_computing_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = [FakeFetch(Counter(host=1000)) for _ in range(3)]
    one, requests, now_s = started(monkeypatch, *fetches)
    now_s[0] = 0.4
    fetches[0].end(0.4)
    assert one.released() == requests[:1]
    now_s[0] = 0.8
    assert not one.released(), "the second one is the oldest since 0.4 s"
    now_s[0] = 1.0
    assert one.released() == requests[1:2] and one.counts.fetches == {"done": 1, "late": 1}
    now_s[0] = 1.4
    assert not one.released()
    fetches[2].end(1.45)
    assert one.released() == requests[2:]
    assert not one.waiting and not one.under_way


@pytest.mark.parametrize(("come", "measured"), [(0, 1), (3, 3)])
def test_a_fetch_is_late_a_step_after_computing_and_its_tier_as_fast_as_what_came(
    monkeypatch: pytest.MonkeyPatch, come: int, measured: int
) -> None:
    """A tier that has given all is not measured; one that has given nothing is taken to have given a record."""
    fetch = FakeFetch(Counter(host=4 * PAGE_BYTES, disk=8 * PAGE_BYTES))
    one, requests, now_s = started(monkeypatch, fetch)
    one.prefilled(1, 0.0, 0.25)
    fetch.loaded_bytes = +Counter(host=4 * PAGE_BYTES, disk=come * PAGE_BYTES)
    now_s[0] = 0.74
    assert not one.released()
    now_s[0] = 0.76
    assert one.released() == requests and one.counts.fetches == {"late": 1}
    assert one.loads["disk"].per_s == pytest.approx(measured * PAGE_BYTES / 0.76)
    assert one.loads["host"].per_s == math.inf


def test_a_fetch_that_more_and_more_requests_wait_for_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other, prefix = FakeFetch(Counter(host=1000)), FakeFetch(Counter(host=1000)), FakePrefix()
    one, (_, behind), now_s = started(monkeypatch, stuck, other, prefix=prefix)
    while behind in one.waiting:
        now_s[0] += 0.4
        assert now_s[0] < 5.0
        stuck.waiting += 1
        prefix.fetches.append(stuck)
        assert one.hold(Request(Generate(request_id="more", prompt=PROMPT, params=GREEDY), frozenset()))
        one.released()
    assert now_s[0] > 4.0 and stuck in one.under_way


def test_requests_behind_many_fetches_wait_but_for_more_urgent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = FakePrefix()
    one, requests, _ = started(monkeypatch, *(FakeFetch(Counter(host=1000)) for _ in range(8)), prefix=prefix)
    assert one.is_full(0) and not one.is_full(-1)
    one.let_go(requests[3])
    assert not one.is_full(0)
    for may_start in (True, True, False):  # it was given up, and that counts for nothing
        prefix.fetches.append(fetch := FakeFetch(Counter(host=1000)))
        assert one.hold(requests[3]) is may_start
        fetch.end(0.0)
        assert one.released() == [requests[3]] * may_start


def test_a_tier_slower_than_computing_is_asked_again_now_and_then() -> None:
    """And by that each faster one is taken to be no faster."""
    one = Fetches(MagicMock(prefix=None))

    def is_worth(fetch: FakeFetch) -> bool:
        request = Request(Generate(request_id="one", prompt=PROMPT, params=GREEDY), frozenset())
        answers = {one.is_worth(request, fetch) for _ in range(3)}  # for one request it counts once
        return answers.pop()

    fetch = FakeFetch(Counter(host=1000, disk=1000))
    assert is_worth(fetch), "nothing is known of it"
    one.loads["host"].add(1000, 0.0, 0.01)
    one.loads["disk"].add(1000, 0.0, 1.0)
    one.prefill.add(100, 0.0, 1.0)
    declined = 0
    while not is_worth(fetch):
        declined += 1
    assert 50 < declined < 90
    one.loads["disk"].add(500, 1.0, 1.5)  # it took as long again
    assert not is_worth(fetch)
    assert one.loads["host"].per_s == pytest.approx(100_000)
    assert is_worth(FakeFetch(Counter()))


@pytest.mark.parametrize(("record_s", "num_loaded"), [(0.01, 512), (0.2, 0)])
def test_a_tier_is_loaded_from_if_it_is_measured_to_be_faster_than_computing(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, record_s: float, num_loaded: int
) -> None:
    """By a clock that prompts and loads alone move: computing the 64 tokens of a record takes 0.064 s."""
    now_s = 0.0

    class Throttled(HostTier):
        def load(self, key: bytes) -> Transfer:
            nonlocal now_s
            now_s += record_s
            return super().load(key)

    def forward(self: Runner, step: Step, real: Callable[..., Any] = Runner.forward) -> Any:
        nonlocal now_s
        now_s += 1e-3 * sum(len(chunk.tokens) for chunk in step.chunks)
        return real(self, step)

    monkeypatch.setattr(fetches, "LEAST_MEASURED", 256)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(Runner, "forward", forward)
    tier = Throttled(64 * PAGE_BYTES)
    one = serving(harness, tier, lookahead=0)
    tokens = [stored(one, prompt) for prompt in PROMPTS[:2]]
    assert one.said(PROMPTS[0]) == tokens[0] and tier.stats().loaded_bytes, "nothing is known of it yet"
    one.ask("second", PROMPTS[1])
    one.run()
    assert one.tokens("second") == tokens[1]
    assert dict(one.outputs("second")[0].cached).get("host", 0) == num_loaded
    assert ended(one)["declined"] == (num_loaded == 0)
    one.cache.close()
    tier.close()


def test_little_is_stored_in_a_tier_that_is_slower_than_computing(
    harness: MakeHarness, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "TRIAL", 3)
    one = serving(harness, tier)
    found = of_engine(one)
    request = Request(Generate(request_id="one", prompt=PROMPT, params=GREEDY), frozenset())
    fetch = FakeFetch(Counter(host=1000))
    found.loads["host"].add(10, 0.0, 1.0)
    while not found.is_worth(request, fetch):  # a load is tried now and then, but nothing is known of it yet
        found.finished(request)
    found.finished(request)
    held_bytes = [0]
    for prompt in PROMPTS:
        one.said(prompt, 70)  # inserted in many pieces: all or none are stored
        one.engine.store_all(30)
        held_bytes.append(tier.stats().held_bytes)
    pages = [(more - some) // PAGE_BYTES for some, more in itertools.pairwise(held_bytes)]
    assert pages == [0, 0, (len(PROMPTS[2]) + 70) // 64, 0, 0, (len(PROMPTS[5]) + 70) // 64]
    found.loads["host"].add(1e9, 1000.0, 1000.1)
    assert found.is_worth(request, fetch) and found.is_worth_storing("host") and found.is_worth_storing("host")


def test_a_step_that_computes_while_it_is_launched_counts_into_the_rate_of_prefill(
    harness: MakeHarness, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "LEAST_MEASURED", 1)
    monkeypatch.setattr(Runner, "forward", lambda *given, real=Runner.forward: (time.sleep(0.1), real(*given))[1])
    one = serving(harness, tier, lookahead=0)
    one.said(PROMPT)
    assert of_engine(one).prefill.per_s < len(PROMPT) / 0.1


def test_the_rate_of_prefill_is_measured_before_the_first_request(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fetch could be waited for where computing takes no time."""
    monkeypatch.setattr(fetches, "LEAST_MEASURED", 256)
    with LLM(directory, **OPTIONS) as llm:
        assert llm.loaded.engine.features.of(Fetches).prefill.per_s != 1.0, "it is as it was taken to be"


# options


def test_models_whose_rows_differ_have_other_fingerprints(directory: Path, tmp_path: Path) -> None:
    def fingerprint(dtype: torch.dtype = torch.float32, **options: Any) -> str:
        return ModelSource(EngineConfig(model=str(directory), **options), torch.device("cpu"), dtype).fingerprint

    dummies = [fingerprint(load_format="dummy", seed=seed) for seed in (0, 1)]
    prints = [fingerprint(), fingerprint(torch.bfloat16), fingerprint(model_impl="transformers"), *dummies]
    assert len(set(prints)) == len(prints)
    assert fingerprint() == fingerprint(max_num_seqs=3) == prints[0]
    copied = shutil.copytree(directory, tmp_path / "on another machine")
    assert ModelSource(EngineConfig(model=str(copied)), torch.device("cpu"), torch.float32).fingerprint == prints[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_change_of_the_weights_goes_unseen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle, at the ends, in a tensor of odd size, and an exchange of two words."""
    monkeypatch.setattr(loading, "HASHED_WORDS", 16)
    weights = {"large": torch.arange(999.0).to(dtype), "small": torch.ones(99).to(dtype)[3:6], "none": torch.ones(0)}
    prints = {weights_identity(weights)}
    for name, place in (("large", 0), ("large", 500), ("large", 998), ("small", 0), ("small", 2)):
        weights[name][place] += 100
        prints.add(weights_identity(weights))
    weights["large"][[8, 24]] = weights["large"][[24, 8]]
    prints.add(weights_identity(weights))
    assert len(prints) == 7
    assert weights_identity({name: tensor.clone() for name, tensor in weights.items()}) in prints


def test_a_tier_that_does_not_fit_is_refused_with_what_fits(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"at most kv_host_budget_bytes=\d+ .* works"):
        LLM(directory, kv_host_budget_bytes=1 << 50, **OPTIONS)
    with pytest.raises(BudgetError, match=r"at most kv_disk_budget_bytes=\d+ .* works"):
        LLM(directory, kv_disk=tmp_path, kv_disk_budget_bytes=1 << 60, **OPTIONS)
    for wrong in ({"kv_disk": tmp_path}, {"kv_disk_budget_bytes": MIB << 5}):
        with pytest.raises(ValueError, match="give both"):
            LLM(directory, **OPTIONS, **wrong)
    with pytest.raises(ValueError, match="the scheme 'cups'"):
        LLM(directory, kv_store="cups://", **OPTIONS)
    with pytest.raises(ValueError, match="shared prefixes"):
        LLM(directory, prefix_cache=False, kv_host_budget_bytes=64 * MIB, **OPTIONS)
