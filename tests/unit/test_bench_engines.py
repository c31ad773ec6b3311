"""The suite `engines`, over a system that stands in for vLLM: what it asks for, checks and measures."""

import contextlib
import pickle
from dataclasses import replace

import pytest

from bench.harness import WrongNumbers
from bench.suites import engines
from bench.systems.models import model_of
from bench.systems.runs import Served, ServedRun
from tests.unit.recorded import SETTINGS
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run
from vmmkv.adapters.vllm.elastic.options import ElasticOptions
from vmmkv.driver.host import HostDriver
from vmmkv.units import GIB, PAGE_BYTES

SMALL = replace(SETTINGS, sequences=4, repeat=1)
MODEL = model_of("llama-3.1-8b", tiny=True)


class StandIn:
    """Serves each token a millisecond behind the one before; knows prompts until it is asked to forget them."""

    def __init__(self, *, remembers=True, drifts=False):
        self.remembers, self.drifts = remembers, drifts
        self.asked = []

    def forget(self):
        self.asked.append("forgets")

    def connector_counts(self):
        return "what was counted"

    def run(self, workload, *, keep=False):
        self.asked.append((len(workload.asks), keep))
        is_known = self.remembers and (keep or len(self.asked) % 3 == 0)
        first = len(self.asked) if self.drifts else 7
        served = [
            Served(0.0, len(ask.prompt), [first] * ask.num_out, [1e-3 * (each + 1) for each in range(ask.num_out)])
            for ask in workload.asks
        ]
        cached = sum(len(ask.prompt) for ask in workload.asks) if is_known else 0
        return ServedRun(served, 1.0, cached_tokens=cached)


@pytest.fixture(autouse=True)
def flushed(monkeypatch):
    monkeypatch.setattr(engines, "flush_tiers", lambda: None)


def test_requests_without_reuse_are_other_ones_in_each_run_and_the_first_run_is_left_out():
    (measured,) = engines.measure_nano(StandIn(), MODEL, SMALL, False)
    assert measured.metric == "throughput" and len(measured.samples) == SMALL.repeat and "nano: 4 requests" in measured.workload


@pytest.mark.parametrize("part", [engines.measure_shared, engines.measure_first])
def test_a_prefix_is_computed_taken_from_the_cache_and_from_the_tiers(part):
    vllm = StandIn()
    assert [each.workload.rpartition(", ")[2] for each in part(vllm, MODEL, SMALL, True)] == [*engines.WAYS]
    assert [keep for _, keep in vllm.asked[:3]] == [False, True, False]
    assert [each.workload.rpartition(", ")[2] for each in part(StandIn(), MODEL, SMALL, False)] == [*engines.WAYS[:2]]


def test_a_prefix_that_was_computed_again_is_not_timed():
    with pytest.raises(WrongNumbers, match=r"0 tokens were cached, .* what was counted"):
        list(engines.measure_shared(StandIn(remembers=False), MODEL, SMALL, True))


def test_other_tokens_behind_a_loaded_prefix_are_seen():
    with pytest.raises(WrongNumbers, match="by two ways to have the same prefix"):
        list(engines.measure_first(StandIn(drifts=True), MODEL, SMALL, True))


def test_without_vllm_it_says_what_is_missing():
    with pytest.raises(ValueError, match="engines needs vLLM on a GPU: the package vllm"):
        engines.check(SETTINGS)


def test_processes_of_a_restart_share_a_directory_and_the_others_have_their_own():
    kinds = [*engines.processes_of(engines.TIERED, SMALL)]
    assert [len(processes) for processes in kinds] == [1, 2, 1] and all("kv_disk" in each.tiers for each in kinds[1])
    (alone,), _ = engines.processes_of(engines.ALONE, SMALL)
    assert alone == engines.Process((engines.measure_nano, engines.measure_shared, engines.measure_first), {})
    assert pickle.loads(pickle.dumps(kinds[0][0])) == kinds[0][0] and pickle.loads(pickle.dumps(alone)) == alone


def test_a_restart_over_a_holder_keeps_its_memory_and_needs_no_tiers():
    (both,) = engines.processes_of(engines.ELASTIC, replace(SMALL, parts=("restart",)))
    assert [each.parts for each in both] == [(engines.measure_before_restart,), (engines.measure_behind_restart,)]
    assert both[0].options == both[1].options and not both[0].tiers and not both[1].tiers
    vllm = StandIn()
    measured = [
        *engines.measure_before_restart(vllm, MODEL, SMALL, False),
        *engines.measure_behind_restart(vllm, MODEL, SMALL, False),
    ]
    assert [each.workload.rpartition(", ")[2] for each in measured[2:]] == ["memory of a holder"] * 2


def test_conversations_get_a_quarter_of_their_memory_in_each_system_and_one_uses_vllms_own_offloading():
    found = {
        system: [*engines.processes_of(system, SMALL)][-1] for system in (engines.ALONE, engines.TIERED, engines.OFFLOADING)
    }
    assert {len(processes) for processes in found.values()} == {1}
    options = {system: process.options for system, (process,) in found.items()}
    assert len({each["kv_cache_memory_bytes"] for each in options.values()}) == 1
    assert [system for system, each in options.items() if "kv_offloading_size" in each] == [engines.OFFLOADING]
    assert [system for system, (process,) in found.items() if process.tiers] == [engines.TIERED]


def test_conversations_are_forgotten_before_each_run_and_go_on_in_rounds():
    vllm = StandIn()
    measured = [*engines.measure_conversations(vllm, MODEL, SMALL, True)]
    assert [(each.metric, len(each.samples)) for each in measured] == [("throughput", 1), ("tokens cached", 1)]
    assert vllm.asked == ["forgets", (8, True), (8, True)] * 2


def test_behind_a_restart_the_same_prompts_are_served_again():
    before, behind = (
        [*part(StandIn(), MODEL, SMALL, True)] for part in (engines.measure_before_restart, engines.measure_behind_restart)
    )
    assert [each.metric for each in before] == [each.metric for each in behind] == ["total", "first token"]
    assert not {each.workload for each in before} & {each.workload for each in behind}


def test_elastic_memory_is_measured_beside_vllm_alone():
    settings = replace(SMALL, parts=("elastic",))
    ((elastic,),) = engines.processes_of(engines.ELASTIC, settings)
    assert elastic.options and elastic.parts == (engines.measure_nano, engines.measure_resizes)
    ((alone,),) = engines.processes_of(engines.ALONE, settings)
    assert not alone.options and alone.parts == (engines.measure_nano,)
    assert not [*engines.processes_of(engines.TIERED, settings)]


def test_two_engines_in_turn_have_half_of_the_memory_each_or_addresses_for_all_of_it():
    settings = replace(SMALL, parts=("turns",))
    total_bytes = engines.bytes_of_turns(settings)
    ((half, other),), (elastic,) = ([*engines.processes_of(system, settings)] for system in (engines.HALVES, engines.ELASTIC))
    assert half == other and half.in_turns and half.options["kv_cache_memory_bytes"] == total_bytes // 2
    assert elastic[0] == elastic[1] and elastic[0].options["kv_cache_memory_bytes"] == total_bytes
    options = ElasticOptions.of(elastic[0].options["additional_config"]["vmmkv_elastic"] | {"arbiter": "/a/socket"})
    burst_bytes = half.options["max_num_seqs"] * half.options["max_model_len"] * MODEL.row_bytes
    assert burst_bytes + options.floor_bytes < total_bytes
    assert not [*engines.processes_of(engines.ALONE, settings)] and not [*engines.processes_of(engines.TIERED, settings)]


@pytest.mark.parametrize(("shape", "count"), [("llama-3.1-8b", 112), ("qwen3-0.6b", 128)])
def test_a_burst_fills_seven_eighths_of_the_memory(shape, count):
    assert engines.requests_of_burst(24 * GIB, model_of(shape, tiny=False).row_bytes) == count


def test_goodput_counts_all_tokens_of_requests_whose_first_one_came_in_time():
    served = [Served(0.0, 8, [1, 2, 3], [first_s, first_s, 9.0]) for first_s in (0.5, 2.0, 2.1)]
    assert engines.goodput(ServedRun(served, 10.0), 2.0) == pytest.approx(0.6)


def test_a_burst_has_other_requests_than_those_before_and_the_first_one_is_not_measured():
    prompts = set()

    class Burst(StandIn):
        def run(self, workload, *, keep=False):
            prompts.update(tuple(ask.prompt.tolist()) for ask in workload.asks)
            return super().run(workload, keep=keep)

    vllm = Burst()
    measured = [*engines.measure_bursts(vllm, MODEL, SMALL, False)]
    ((count, keep), *_) = vllm.asked
    assert keep and len(vllm.asked) == SMALL.repeat + 1 and len(prompts) == count * len(vllm.asked)
    assert [(each.metric, len(each.samples)) for each in measured] == [
        *(("goodput", 0), ("throughput", 0), ("first token", 0)),
        *(("goodput", 1), ("throughput", 1), ("first token", count)),
    ]
    assert measured[3].samples == measured[4].samples, "all came in time"


def test_engines_in_turn_go_on_one_at_a_time_and_their_samples_come_together():
    done = []

    def process(name):
        for number in range(3):
            done.append((number, name))
            yield engines.Measured("work", "goodput", "tok/s", [number] if number else [])

    assert [*engines.in_turns([process("one"), process("other")])] == [
        engines.Measured("work", "goodput", "tok/s", [1, 1, 2, 2])
    ]
    assert done == [(number, name) for number in range(3) for name in ("one", "other")]


def test_an_engine_that_fails_ends_the_other_one():
    ended = []

    def waits():
        try:
            while True:
                yield engines.Measured("work", "goodput", "tok/s", [1.0])
        finally:
            ended.append(True)

    def fails():
        yield engines.Measured("work", "goodput", "tok/s", [1.0])
        raise WrongNumbers("it has failed")

    with pytest.raises(WrongNumbers, match="it has failed"):
        list(engines.in_turns([waits(), fails()]))
    assert ended == [True]


class Pool:
    """Stands in for vLLM's pool of blocks."""

    def __init__(self, memory):
        self.memory = memory
        self.prepare = memory.grow

    def settle(self):
        self.memory.settle()
        self.memory.reclaim()


def test_memory_is_given_back_and_taken_again():
    with contextlib.closing(HostDriver()) as driver:
        vllm = StandIn()
        vllm.forget, pool = lambda: None, Pool(ElasticBlocks(driver, [Run(0, PAGE_BYTES)], 16))
        vllm.block_pool = lambda: pool
        given, taken = engines.measure_resizes(vllm, MODEL, SMALL, False)
        assert len(given.samples) == len(taken.samples) == SMALL.repeat and "resize: 16.0 MiB" in given.workload
        assert driver.calls["map"] == 1 + 2 * 8
        pool.memory.close()
