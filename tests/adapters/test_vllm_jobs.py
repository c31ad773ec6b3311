"""Jobs of chunks between an engine's host memory and tiers: what vLLM's secondary tier does in a thread, without vLLM."""

import random
import threading

import pytest
import torch

from tests.laws.faulty_tier import FaultyDisk, FaultyTier
from tests.stores import until
from vmmkv import Store
from vmmkv.adapters.vllm import jobs
from vmmkv.adapters.vllm.jobs import ChunkJobs
from vmmkv.tiers import HostTier, Refusal

NUM_CHUNKS, CHUNK_BYTES, RECORD_BYTES = 16, 5000, 8192
"""Chunks that are no multiple of 4 KiB, so that records are padded."""


def key_of(number):
    return number.to_bytes(32, "little")


class Engine:
    """Memory of chunks, and the jobs of one tier with it."""

    def __init__(self, tier):
        self.tier = tier
        self.memory = torch.zeros(NUM_CHUNKS, CHUNK_BYTES, dtype=torch.uint8)
        self.store = Store([tier])
        self.jobs = ChunkJobs(self.store, self.memory.data_ptr(), CHUNK_BYTES)
        self.number = 0
        self.ended = {}

    def submit(self, keys, chunks, *, is_load):
        self.number += 1
        self.jobs.submit(self.number, [key_of(key) for key in keys], chunks, is_load=is_load)
        return self.number

    def look(self):
        self.ended.update({job.number: list(job.found) for job in self.jobs.results()})

    def run(self, keys, chunks, *, is_load):
        number = self.submit(keys, chunks, is_load=is_load)
        self.jobs.drain()
        self.look()
        return self.ended[number]

    def close(self):
        self.jobs.close()
        self.tier.close()


@pytest.fixture
def engine_of():
    engines = []

    def make(tier):
        engines.append(Engine(tier))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def host(num_records=64):
    return HostTier(num_records * RECORD_BYTES, record_bytes=RECORD_BYTES)


def test_chunks_come_back_wherever_they_are_wanted_and_one_that_is_not_there_fails_alone(engine_of):
    engine = engine_of(host())
    for chunk in range(6):
        engine.memory[chunk] = 10 + chunk
    assert engine.run(range(6), range(6), is_load=False) == [True] * 6
    engine.memory.zero_()  # the engine uses them again
    assert engine.run([5, 99, 0, 3], [2, 7, 8, 15], is_load=True) == [True, False, True, True]
    held = {chunk: set(engine.memory[chunk].tolist()) for chunk in range(NUM_CHUNKS)}
    assert {chunk: each for chunk, each in held.items() if each != {0}} == {2: {15}, 8: {10}, 15: {13}}


def test_a_job_of_nothing_ends(engine_of):
    engine = engine_of(host())
    assert engine.run([], [], is_load=False) == engine.run([], [], is_load=True) == []


@pytest.mark.parametrize("seed", range(6))
def test_no_fault_of_a_tier_gives_wrong_bytes_or_touches_chunks_after_the_result(engine_of, seed, monkeypatch):
    chance = random.Random(seed)
    monkeypatch.setattr(jobs, "STORE_S", 0.05)
    monkeypatch.setattr(jobs, "LOAD_S", 0.05)
    tier = FaultyTier(host(24), seed)
    engine = engine_of(tier)
    poll = engine.store.poll
    engine.store.poll = lambda budget_us: (tier.advance(), poll(budget_us))[1]  # slow loads come, or not, as time passes
    used, loads = set(), {}  # chunks of jobs under way
    outcomes = []
    for _ in range(120):
        free = [chunk for chunk in range(NUM_CHUNKS) if chunk not in used]
        chunks = chance.sample(free, min(len(free), chance.randint(1, 5)))
        keys = chance.sample(range(32), len(chunks))
        if chunks:
            is_load = chance.random() < 0.5
            for key, chunk in zip(keys, chunks, strict=True):
                engine.memory[chunk] = 255 if is_load else key
            used.update(chunks)
            loads[engine.submit(keys, chunks, is_load=is_load)] = keys, chunks, is_load
        engine.look()
        for number in engine.ended.keys() & loads.keys():
            keys, chunks, is_load = loads.pop(number)
            for key, chunk, found in zip(keys, chunks, engine.ended[number], strict=True):
                outcomes.append((is_load, found))
                assert not (is_load and found) or set(engine.memory[chunk].tolist()) == {key}
                engine.memory[chunk] = 254  # what a late copy would read or write
                used.discard(chunk)
        for chunk in set(range(NUM_CHUNKS)) - used:
            assert set(engine.memory[chunk].tolist()) <= {0, 254}
        if not free:
            engine.jobs.drain()
    engine.close()
    engine.look()
    assert not loads.keys() - engine.ended.keys() and not tier.lent
    assert (True, True) in outcomes and (True, False) in outcomes


@pytest.mark.parametrize("fault", ["full", "corrupted", "gone"])
def test_what_a_disk_fails_at_is_a_failed_chunk(engine_of, tmp_path, fault):
    disk = FaultyDisk(tmp_path, 8 * RECORD_BYTES, record_bytes=RECORD_BYTES)
    engine = engine_of(disk)
    disk.fault = fault if fault == "full" else None
    engine.run([0, 1], [0, 1], is_load=False)
    assert disk.flush(10.0)
    disk.fault = fault
    assert engine.run([0, 1], [2, 3], is_load=True) == [False, False]
    disk.fault = None
    assert engine.run([0, 1], [0, 1], is_load=False) == [True, True] and disk.flush(10.0)
    assert engine.run([0, 1], [2, 3], is_load=True) == [True, True]


class Shut(HostTier):
    """A tier that takes and gives nothing for now."""

    def store(self, key):
        return Refusal.NOT_NOW

    def lookup(self, keys):
        return None


@pytest.mark.parametrize("is_load", [False, True])
def test_jobs_that_a_tier_keeps_waiting_are_given_up(engine_of, monkeypatch, is_load):
    monkeypatch.setattr(jobs, "STORE_S", 0.01)
    monkeypatch.setattr(jobs, "LOAD_S", 0.01)
    assert engine_of(Shut(RECORD_BYTES, record_bytes=RECORD_BYTES)).run([0], [0], is_load=is_load) == [False]


def test_jobs_have_a_result_when_it_is_closed(engine_of, monkeypatch):
    monkeypatch.setattr(jobs, "CLOSE_S", 0.01)
    engine = engine_of(Shut(RECORD_BYTES, record_bytes=RECORD_BYTES))
    for is_load in (False, True):
        engine.submit([0], [0], is_load=is_load)
    engine.jobs.close()
    engine.submit([1], [1], is_load=True)
    engine.jobs.drain()
    engine.look()
    assert engine.ended == {1: [False], 2: [False], 3: [False]}
    assert "vmmkv-jobs" not in {thread.name for thread in threading.enumerate()}


def test_loads_under_way_are_given_up_when_it_is_closed(engine_of, monkeypatch):
    monkeypatch.setattr(jobs, "CLOSE_S", 0.01)
    tier = FaultyTier(host(), 0, ["slow"], chance=1.0)
    engine = engine_of(tier)
    assert engine.run([0], [0], is_load=False) == [True]
    engine.submit([0], [1], is_load=True)
    until(lambda: tier.lent)
    engine.close()
    engine.look()
    assert engine.ended[2] == [False] and not tier.lent


def test_chunks_that_were_stored_last_are_kept_when_it_is_closed(engine_of, tmp_path):
    def disk():
        return FaultyDisk(tmp_path, 64 * RECORD_BYTES, record_bytes=RECORD_BYTES)

    engine = engine_of(disk())
    engine.memory.fill_(7)
    engine.submit(range(16), range(16), is_load=False)
    engine.close()
    engine = engine_of(disk())
    assert engine.run(range(16), range(16), is_load=True) == [True] * 16
    assert set(engine.memory.flatten().tolist()) == {7}


def test_the_thread_sleeps_without_jobs(engine_of):
    engine = engine_of(host())
    polls = []
    poll = engine.store.poll
    engine.store.poll = lambda budget_us: (polls.append(budget_us), poll(budget_us))[1]
    assert engine.run([0], [0], is_load=False) == [True]
    done = len(polls)
    assert engine.run([], [], is_load=False) == []
    assert len(polls) == done + 1


def test_the_end_of_the_thread_is_logged_and_fails_all_jobs(engine_of, caplog):
    engine = engine_of(host())

    def poll(budget_us):
        raise MemoryError("no more")

    engine.store.poll = poll
    engine.submit([0, 1], [0, 1], is_load=True)
    until(lambda: not engine.jobs.takes_jobs)
    engine.submit([2], [2], is_load=False)
    engine.jobs.drain()
    engine.look()
    assert engine.ended == {1: [False, False], 2: [False]}
    assert "the thread that stores and loads chunks has ended" in caplog.text and "no more" in caplog.text
