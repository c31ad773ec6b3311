"""python vllm_secondary.py FOLDER RESULT: vmmkv's secondary tier in vLLM's own managers of tiers, as JSON.

Runs in an environment of its own, with vLLM and without what tests use. RESULT gets, for each of SCENARIOS, an empty text, or
how it failed.
"""

import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
CHUNK_BYTES, NUM_CHUNKS = 64 << 10, 8
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(32)]
REQUEST = ReqContext("a")


def spec_of(*tiers: dict[str, Any], dtype: str = "float16", num_chunks: int = NUM_CHUNKS) -> TieringOffloadingSpec:
    """vLLM's specification of a host tier of some chunks, and of other tiers behind it."""
    return TieringOffloadingSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": num_chunks * CHUNK_BYTES,
                "secondary_tiers": [
                    {"type": "VmmkvSecondaryTier", "module_path": "vmmkv.adapters.vllm.secondary"} | each for each in tiers
                ],
            },
            engine_id=f"vmmkv-{os.getpid()}",
            model=OffloadingModelConfig(name="org/model", dtype=dtype),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
                data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
            ),
        )
    )  # fmt: skip


class Engine:
    """A tier out of vLLM's factory, the memory in front of it, and the calls of vLLM's scheduler."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.memory = np.zeros((NUM_CHUNKS, CHUNK_BYTES), dtype=np.int8)
        spec = spec_of(dtype=options.pop("dtype", "float16"))
        config = {"type": "VmmkvSecondaryTier", "module_path": "vmmkv.adapters.vllm.secondary"}
        config |= {"kv_disk": str(folder), "kv_disk_budget": "1MiB"} | options
        self.tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(self.memory), spec)
        self.tier.on_new_request(REQUEST)
        self.number = 0

    def submit(self, keys: list[int], chunks: list[int], *, is_load: bool) -> int:
        self.number += 1
        job = TransferJob(self.number, [KEYS[key] for key in keys], np.array(chunks, dtype=np.int32), is_load, REQUEST)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return self.number

    def run(self, keys: list[int], chunks: list[int], *, is_load: bool) -> list[int] | None:
        """The keys that a job has stored or loaded, if they are not all."""
        number = self.submit(keys, chunks, is_load=is_load)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == number and result.transfer_time is not None
        if result.success:
            assert result.successful_keys is None and result.transfer_bytes == len(keys) * CHUNK_BYTES
            return None
        return [key for key in keys if KEYS[key] in result.successful_keys]

    def store(self, keys: list[int]) -> None:
        for chunk, key in enumerate(keys):
            self.memory[chunk] = key + 1
        assert self.run(keys, [*range(len(keys))], is_load=False) is None
        until(lambda: all(self.lookup(key) is HIT for key in keys[-1:]))

    def lookup(self, key: int, request: ReqContext = REQUEST) -> LookupResult:
        return self.tier.lookup(KEYS[key], request)


def until(done: Any) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it never comes true"
        time.sleep(0.002)


def refused(make: Any) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


# scenarios


def chunks_come_back_and_are_found_after_a_restart(folder: Path) -> None:
    engine = Engine(folder)
    assert engine.lookup(3) is MISS
    engine.store([0, 1, 2, 3])
    engine.memory[:] = 0
    assert engine.run([3, 1], [0, 7], is_load=True) is None
    engine.tier.shutdown()
    restarted = Engine(folder)
    assert [restarted.lookup(key) for key in (0, 1, 2, 3, 4)] == [HIT] * 4 + [MISS]
    assert restarted.run([3, 1], [0, 7], is_load=True) is None
    for each in (engine, restarted):
        assert [set(row.tolist()) for row in each.memory] == [{4}, *[{0}] * 6, {2}]
    restarted.tier.shutdown()


def another_model_type_or_set_of_weights_finds_nothing(folder: Path) -> None:
    engine = Engine(folder)
    engine.store([0])
    engine.tier.shutdown()
    for options, found in (({"dtype": "fp8"}, MISS), ({"fingerprint": "other"}, MISS), ({}, HIT)):
        other = Engine(folder, **options)
        assert other.lookup(0) is found, options
        other.tier.shutdown()


def a_damaged_record_fails_alone_and_is_tried_once(folder: Path) -> None:
    engine = Engine(folder)
    engine.store([0, 1, 2])
    engine.tier.shutdown()
    with open(folder / "records", "r+b") as records:
        place = records.read().index(bytes([2]) * CHUNK_BYTES)
        records.seek(place + 100)
        records.write(b"xxxx")
    engine = Engine(folder)
    assert engine.lookup(1) is HIT
    assert engine.run([0, 1, 2], [0, 1, 2], is_load=True) == [0, 2]
    assert set(engine.memory[0].tolist()) == {1} and set(engine.memory[2].tolist()) == {3}
    engine.memory[5] = 2
    assert engine.run([1], [5], is_load=False) is None  # computed again
    other = ReqContext("b")
    engine.tier.on_new_request(other)
    until(lambda: engine.lookup(1, other) is HIT)
    assert engine.lookup(1) is MISS
    engine.tier.on_request_finished(REQUEST)
    engine.tier.on_request_finished(other)
    assert engine.run([1], [6], is_load=True) is None and set(engine.memory[6].tolist()) == {2}
    engine.tier.shutdown()


def a_full_tier_evicts_what_was_used_longest_ago_and_the_end_of_a_prefix_first(folder: Path) -> None:
    engine = Engine(folder, kv_disk_budget="256KiB")  # four records
    engine.store([0, 1])
    engine.store([2, 3])
    engine.tier.on_request_finished(REQUEST)
    engine.tier.on_new_request(REQUEST)
    engine.store([4, 5])
    assert [engine.lookup(key) for key in range(6)] == [HIT, HIT, MISS, MISS, HIT, HIT]
    assert engine.run([0, 2, 4], [5, 6, 7], is_load=True) == [0, 4]
    engine.tier.shutdown()


def what_cannot_be_served_is_refused_in_a_sentence(folder: Path) -> None:
    assert "has no 'kv_disks'; there are" in refused(lambda: Engine(folder, kv_disks="/kv"))
    assert "needs both kv_disk" in refused(lambda: Engine(folder, kv_disk_budget=None))
    assert "budget" in refused(lambda: Engine(folder, kv_disk_budget="900TiB"))
    spec = spec_of({"kv_disk": str(folder), "kv_disk_budget": "1MiB"}, {"kv_disk": str(folder / "other"), "kv_host": "1GiB"})
    assert "has no 'kv_host'" in refused(spec.get_manager)
    engine = Engine(folder, locality="LOCAL")  # nothing is left of what was refused
    assert engine.tier.locality is not None and engine.tier.locality.value == "LOCAL"
    engine.tier.shutdown()


def a_store_that_has_to_be_asked_is_looked_up_again(folder: Path) -> None:
    engine = Engine(folder)
    (disk,) = engine.tier.store.tiers
    asked, lookup = [], disk.lookup
    disk.lookup = lambda keys: asked.append(keys) if len(asked) < 2 else lookup(keys)
    assert [engine.lookup(0) for _ in range(3)] == [RETRY, RETRY, MISS]
    engine.tier.shutdown()


def a_shutdown_ends_jobs_and_leaves_nothing(folder: Path) -> None:
    engine = Engine(folder)
    engine.memory[:] = 9
    numbers = [engine.submit([0, 1, 2], [0, 1, 2], is_load=False), engine.submit([0, 7], [6, 7], is_load=True)]
    engine.tier.shutdown()
    engine.tier.shutdown()
    assert sorted(result.job_id for result in engine.tier.get_finished_jobs()) == numbers
    assert engine.lookup(0) is MISS
    late = engine.submit([0], [0], is_load=True)
    engine.tier.drain_jobs()
    assert [(result.job_id, result.success) for result in engine.tier.get_finished_jobs()] == [(late, False)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("vmmkv")]
    restarted = Engine(folder)
    assert restarted.lookup(2) is HIT
    restarted.tier.shutdown()


def the_manager_cascades_promotes_and_lets_its_memory_go(folder: Path) -> None:
    options = {"kv_host_budget": "1MiB", "kv_disk": str(folder), "kv_disk_budget": "1MiB"}
    for is_restarted in (False, True):
        manager = spec_of(options).get_manager()
        manager.on_new_request(REQUEST)
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        if not is_restarted:
            for key, chunk in enumerate(manager.prepare_store(KEYS[:4], REQUEST).store_spec.chunk_ids):
                rows[chunk] = key + 1  # vLLM's worker copies it from the device
            manager.complete_store(KEYS[:4], REQUEST)
            assert manager.has_pending_work()
            manager.reset_cache()
            assert not manager.has_pending_work()
        else:
            assert [manager.lookup(key, REQUEST) for key in KEYS[:5]] == [LookupResult.HIT_PENDING] * 4 + [MISS]
            go_on(manager)
            assert [manager.lookup(key, REQUEST) for key in KEYS[:5]] == [HIT] * 4 + [MISS]
            chunks = manager.prepare_load(KEYS[:4], REQUEST).chunk_ids
            assert [set(rows[chunk].tolist()) for chunk in chunks] == [{1}, {2}, {3}, {4}]
            manager.complete_load(KEYS[:4], REQUEST)
        manager.on_request_finished(REQUEST)
        mapped = manager.primary_tier._mmap_region.mmap_obj
        del rows
        gc.collect()
        manager.shutdown()
        assert mapped.closed, "nothing has a view of its memory any more"


def go_on(manager: Any) -> None:
    """Take the steps that a scheduler takes while requests wait."""
    is_pending = True
    while is_pending:
        manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        is_pending = manager.has_pending_work()
        time.sleep(0.001)


SCENARIOS = (
    chunks_come_back_and_are_found_after_a_restart,
    another_model_type_or_set_of_weights_finds_nothing,
    a_damaged_record_fails_alone_and_is_tried_once,
    a_full_tier_evicts_what_was_used_longest_ago_and_the_end_of_a_prefix_first,
    what_cannot_be_served_is_refused_in_a_sentence,
    a_store_that_has_to_be_asked_is_looked_up_again,
    a_shutdown_ends_jobs_and_leaves_nothing,
    the_manager_cascades_promotes_and_lets_its_memory_go,
)


def main(folder: str, result: str) -> None:
    outcomes = {}
    for scenario in SCENARIOS:
        place = Path(folder) / scenario.__name__
        try:
            scenario(place)
            outcomes[scenario.__name__] = ""
        except Exception:
            outcomes[scenario.__name__] = traceback.format_exc()
        shutil.rmtree(place, ignore_errors=True)
    Path(result).write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
