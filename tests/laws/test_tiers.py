"""What every tier keeps, with and without faults under it; and that a disk tier survives SIGKILL.

A tier of a third party is tested by the same suite: add how it is made to `TIERS`.
Stores that engines share bound themselves: what else they keep is in store_laws.py.
"""

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.laws.faulty_tier import FaultyDisk, FaultyTier, index_entry
from tests.stores import Clock, mooncake_store, redis_server, until
from vmmkv import BudgetError, DiskTier, HostTier, TierUnavailable
from vmmkv.driver.pinned import host_memory
from vmmkv.tiers import Refusal, Transfer, answering, open_store
from vmmkv.tiers.disk import CALL_TIMEOUT_S
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.tiers.threaded import ThreadedTier

CPU = torch.device("cpu")
NUM_RECORDS = 8
ROOT = Path(__file__).parents[2]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int) -> bytes:
    """A record's bytes, all of which tell its number."""
    return number.to_bytes(8, "big") * (RECORD_BYTES // 8)


class Slow(ThreadedTier):
    """The least that a tier behind a network has to say: records in a dictionary that answers late."""

    name = "slow"

    def __init__(self):
        super().__init__(NUM_RECORDS * RECORD_BYTES)
        self.records: dict[bytes, bytes] = {}

    def write(self, key, data):
        time.sleep(0.002)
        while len(self.records) >= NUM_RECORDS:
            self.records.pop(next(iter(self.records)))
            self.counts["evicted_records"] += 1
        self.records[key] = bytes(data)

    def read(self, key, data):
        time.sleep(0.002)
        data[:] = self.records[key]

    def lookup(self, keys):
        return [key in self.records for key in keys]

    def held_bytes(self):
        return len(self.records) * RECORD_BYTES


class SharedDisk:
    """A disk tier that two have open: one stores, the other loads."""

    name, record_bytes = "shared disk", RECORD_BYTES

    def __init__(self, path):
        self.storing, self.loading = (DiskTier(path, NUM_RECORDS * RECORD_BYTES) for _ in range(2))

    def open(self, device):
        self.storing.open(device)
        self.loading.open(device)

    def lookup(self, keys):
        assert self.storing.lookup(keys) == self.loading.lookup(keys)
        return self.loading.lookup(keys)

    def store(self, key):
        return self.storing.store(key)

    def load(self, key):
        return self.loading.load(key)

    def finished(self, transfer):
        (self.storing if transfer.is_store else self.loading).finished(transfer)

    def drop(self, transfer):
        (self.storing if transfer.is_store else self.loading).drop(transfer)

    def flush(self, timeout_s):
        return self.storing.flush(timeout_s)

    def stats(self):
        stats, others = self.storing.stats(), self.loading.stats()
        assert stats.held_bytes == others.held_bytes
        return dataclasses.replace(stats, loaded_bytes=others.loaded_bytes, missed_records=others.missed_records)

    def close(self):
        self.storing.close()
        self.loading.close()


TIERS = {
    "host": lambda path: HostTier(NUM_RECORDS * RECORD_BYTES),
    "disk": lambda path: DiskTier(path, NUM_RECORDS * RECORD_BYTES),
    "shared disk": SharedDisk,
    "faulty disk": lambda path: FaultyDisk(path, NUM_RECORDS * RECORD_BYTES),
    "slow": lambda path: Slow(),
    "faulty host": lambda path: FaultyTier(HostTier(NUM_RECORDS * RECORD_BYTES), 0, ()),
}


STORES = {
    "redis": (redis_server, ()),
    "mooncake": (mooncake_store, pytest.mark.nightly),
}
"""How stores that engines share are started, and marks of their tests."""
KINDS_OF_STORES = [pytest.param(name, marks=marks) for name, (_, marks) in STORES.items()]


@pytest.fixture(scope="module")
def url_of():
    """The URL of an empty store, by name. Each store is started once."""
    with contextlib.ExitStack() as running:
        started = functools.cache(lambda name: running.enter_context(STORES[name][0]()))
        yield lambda name: (started(name).empty(), started(name).url)[1]


@pytest.fixture(params=[*TIERS, *KINDS_OF_STORES])
def tier(request, tmp_path, url_of):
    make = TIERS.get(request.param)
    tier = open_store(url_of(request.param)) if make is None else make(tmp_path / "tier")
    tier.open(CPU)
    yield tier
    tier.close()
    tier.close()


@pytest.fixture
def disk(tmp_path):
    tier = FaultyDisk(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    tier.open(CPU)
    yield tier
    tier.close()


def open_at(path: Path) -> int:
    """The descriptor by which this process has a file open."""
    (fd,) = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path.resolve())]
    return fd


def found(tier, *numbers: int) -> list[bool]:
    """Which of these records it has, when it has found out."""
    keys = [key_of(number) for number in numbers]
    until(lambda: tier.lookup(keys) is not None)
    return tier.lookup(keys)


def store(tier, number: int) -> bool:
    """Store a record and wait until it is there, or is known not to be; had the tier room?"""
    found(tier, number)
    transfer = tier.store(key_of(number))
    if isinstance(transfer, Refusal):
        return False
    ctypes.memmove(transfer.address, payload(number), RECORD_BYTES)
    tier.finished(transfer)
    assert tier.flush(60)
    return True


def load(tier, number: int) -> bool:
    """Load a record: True if its bytes came, and then they are right; False for a miss."""
    transfer = tier.load(key_of(number))
    assert transfer is not None, "there is memory for one load"
    until(lambda: transfer.ended)
    if transfer.missed:
        tier.drop(transfer)
        return False
    right = ctypes.string_at(transfer.address, RECORD_BYTES) == payload(number)
    tier.finished(transfer)
    assert right, "a tier gave wrong bytes"
    return True


# what every tier keeps


def test_a_record_comes_back_as_it_was(tier):
    assert not load(tier, 1)
    assert found(tier, 1) == [False]
    assert store(tier, 1) and store(tier, 2)
    assert found(tier, 1, 3, 2) == [True, False, True]
    assert load(tier, 1) and load(tier, 2) and load(tier, 1)
    assert not load(tier, 3)
    stats = tier.stats()
    assert (stats.held_bytes, stats.stored_bytes, stats.loaded_bytes) == tuple(RECORD_BYTES * n for n in (2, 2, 3))
    assert stats.errors == 0 or isinstance(tier, Slow)


def test_a_tier_that_was_closed_can_be_opened_again(tier):
    """By the next cache that uses it."""
    keeps = not isinstance(getattr(tier, "tier", tier), HostTier)
    assert store(tier, 1)
    tier.close()
    tier.open(CPU)
    assert found(tier, 1) == [keeps] and load(tier, 1) == keeps
    assert store(tier, 2) and load(tier, 2)


def test_a_close_after_an_interrupted_one_waits_for_what_is_written(tmp_path, monkeypatch):
    """The threads would write to the files that have these numbers next."""
    disk, ends = DiskTier(tmp_path, NUM_RECORDS * RECORD_BYTES), threading.Event()
    disk.open(CPU)
    write = disk.write_at
    monkeypatch.setattr(disk, "write_at", lambda *args: ends.wait(60) and write(*args))
    transfer = disk.store(key_of(1))
    ctypes.memmove(transfer.address, payload(1), RECORD_BYTES)
    disk.finished(transfer)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ThreadPoolExecutor, "shutdown", Mock(side_effect=KeyboardInterrupt))
        disk.close()
    threading.Timer(0.05, ends.set).start()
    disk.close()
    disk.open(CPU)
    assert load(disk, 1)
    disk.close()


@pytest.mark.parametrize("tier", TIERS, indirect=True)
def test_a_tier_stays_within_its_budget_and_keeps_the_newest(tier):
    for number in range(3 * NUM_RECORDS):
        assert store(tier, number)
    stats = tier.stats()
    assert stats.held_bytes <= stats.budget_bytes
    assert stats.evicted_records >= 2 * NUM_RECORDS
    kept = found(tier, *range(3 * NUM_RECORDS))
    assert kept[-1] and not any(kept[: 2 * NUM_RECORDS])
    assert [load(tier, number) for number in range(3 * NUM_RECORDS)] == kept


def test_a_record_is_stored_once(tier):
    found(tier, 1)
    first = tier.store(key_of(1))
    assert tier.store(key_of(1)) is Refusal.THERE and found(tier, 1) == [False], "its bytes have still to come"
    assert not load(tier, 1)
    tier.drop(first)
    assert not load(tier, 1), "a store that was dropped leaves nothing"
    assert store(tier, 1) and load(tier, 1)
    assert tier.store(key_of(1)) is Refusal.THERE


def test_memory_that_is_lent_comes_back_however_a_transfer_ends(tier):
    for number in range(200):
        transfer = tier.store(key_of(number))
        if isinstance(transfer, Transfer):
            ctypes.memmove(transfer.address, payload(number), RECORD_BYTES)
            (tier.drop if number % 3 else tier.finished)(transfer)
        transfer = tier.load(key_of(number % 7))
        if transfer is not None:
            tier.drop(transfer)  # whether or not it has ended
    assert tier.flush(60)
    assert all(store(tier, number) and load(tier, number) for number in range(100, 140))


@pytest.mark.parametrize("tier", ["slow", "disk"], indirect=True)
def test_a_store_for_which_no_buffer_is_free_is_refused_and_counts_once(tier):
    lent = [transfer for number in range(100) if isinstance(transfer := tier.store(key_of(number)), Transfer)]
    assert 0 < len(lent) < 100 and tier.stats().refused_records == 100 - len(lent)
    assert tier.store(key_of(99)) is Refusal.NOT_NOW and tier.store(lent[0].key) is Refusal.THERE
    assert tier.stats().refused_records == 100 - len(lent)
    loading = tier.load(key_of(99))
    assert loading is not None, "requests wait for loads: stores leave them buffers"
    for transfer in (*lent, loading):
        tier.drop(transfer)
    assert store(tier, 99) and tier.stats().refused_records == 100 - len(lent)


def test_what_is_being_loaded_is_not_overwritten(tier):
    for number in range(NUM_RECORDS):
        store(tier, number)
    lent = tier.load(key_of(0))
    for number in range(100, 100 + 2 * NUM_RECORDS):
        store(tier, number)
    until(lambda: lent.ended)
    if not lent.missed:
        assert ctypes.string_at(lent.address, RECORD_BYTES) == payload(0)
    tier.finished(lent)


def test_a_buffer_is_not_lent_again_while_a_thread_reads_into_it():
    tier, reads, ends = Slow(), threading.Event(), threading.Event()
    tier.open(CPU)
    tier.read = lambda key, data: (reads.set(), ends.wait(60))
    dropped = tier.load(key_of(1))
    assert reads.wait(60)
    tier.drop(dropped)
    lent = []
    while (transfer := tier.load(key_of(2))) is not None:
        lent.append(transfer)
    addresses = {transfer.address for transfer in lent}
    ends.set()  # also if this fails: nothing waits for the threads
    assert lent and dropped.address not in addresses
    until(lambda: lent.extend(filter(None, [tier.load(key_of(2))])) or dropped.address in {each.address for each in lent})
    for transfer in lent:
        tier.drop(transfer)
    tier.close()


def test_memory_that_is_lent_is_not_given_back_under_a_copy(tier):
    store(tier, 1)
    found(tier, 2)
    lent = [tier.store(key_of(2)), tier.load(key_of(1))]
    until(lambda: lent[1].ended)
    with pytest.raises(ValueError, match=r"[12] transfers? of the .* are under way; close the caches"):
        tier.close()
    assert load(tier, 1), "what may not be closed goes on"
    ctypes.memset(lent[0].address, 1, RECORD_BYTES)
    assert ctypes.string_at(lent[1].address, RECORD_BYTES) == payload(1)
    for transfer in lent:
        tier.finished(transfer)
    tier.close()
    again = tier.load(key_of(1))
    assert again.ended and again.missed, "a closed tier would be asked for ever"
    tier.drop(again)


def test_random_use_gives_right_bytes_or_misses(tier):
    chance = random.Random(5)
    for _ in range(150):
        number = chance.randrange(2 * NUM_RECORDS)
        chance.choice([store, load, load])(tier, number)
    stats = tier.stats()
    assert stats.held_bytes <= (stats.budget_bytes or 2 * NUM_RECORDS * RECORD_BYTES)


SIZED = {
    "host": lambda path, size: HostTier(5 * size, record_bytes=size),
    "disk": lambda path, size: DiskTier(path, 5 * size, record_bytes=size),
}


@pytest.mark.parametrize("size", [4096, 11 * 4096, 3 * RECORD_BYTES])
@pytest.mark.parametrize("kind", [*SIZED, *KINDS_OF_STORES])
def test_records_of_any_multiple_of_4_kib_come_back_as_they_were(kind, size, tmp_path, url_of):
    make, records = SIZED.get(kind), [bytes([number]) * size for number in range(5)]
    tier = open_store(url_of(kind), record_bytes=size) if make is None else make(tmp_path, size)
    tier.open(CPU)
    assert found(tier, *range(5)) == [False] * 5
    for number, record in enumerate(records):
        ctypes.memmove((lent := tier.store(key_of(number))).address, record, size)
        tier.finished(lent)
    assert tier.flush(60)
    if kind == "disk":
        tier.close()
        tier.open(CPU)
    for number, record in enumerate(records):
        lent = tier.load(key_of(number))
        until(lambda lent=lent: lent.ended)
        assert ctypes.string_at(lent.address, size) == record
        tier.finished(lent)
    stats = tier.stats()
    assert (stats.held_bytes, stats.stored_bytes, stats.loaded_bytes) == (5 * size,) * 3
    tier.close()


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED)
def test_a_record_size_that_no_disk_can_align_is_refused_by_one_that_works(make, tmp_path):
    for size, near in ((0, 4096), (-4096, 4096), (4097, 8192)):
        with pytest.raises(ValueError, match=f"record_bytes={size}: .*such as {near}"):
            make(tmp_path, size)


def test_a_disk_with_records_of_another_size_is_refused_and_keeps_them(tmp_path):
    disk = DiskTier(tmp_path, 4 * 8192, record_bytes=8192)
    disk.open(CPU)
    disk.finished(disk.store(key_of(1)))
    disk.close()
    for size in (4096, RECORD_BYTES):
        with pytest.raises(TierUnavailable, match=f"has records of 8192 bytes, and record_bytes={size}"):
            DiskTier(tmp_path, 4 * RECORD_BYTES, record_bytes=size)
    with contextlib.closing(DiskTier(tmp_path, 4 * 8192, record_bytes=8192)) as disk:
        assert found(disk, 1) == [True]


@pytest.mark.parametrize("tier", ["host", "faulty disk"], indirect=True)
def test_a_listener_hears_what_becomes_of_each_record(tier):
    def drop(tier, number):
        if isinstance(transfer := tier.store(key_of(number)), Transfer):
            tier.drop(transfer)
            assert heard[key_of(number)] is False

    chance, heard, numbers = random.Random(5), {}, range(2 * NUM_RECORDS)
    assert store(tier, 1)
    tier.listen(lambda keys, is_held: heard.update(dict.fromkeys(keys, is_held)))
    for _ in range(200):
        tier.fault = chance.choice([None, None, None, "error", "corrupted"])
        act, number = chance.choice([store, store, load, drop]), chance.choice(numbers)
        assert not (act(tier, number) and act is store) or key_of(number) in heard, "a store that fails is heard of too"
        assert [heard.get(key_of(number), False) for number in numbers] == found(tier, *numbers)
    assert False in heard.values() and True in heard.values()


# the disk


def test_a_slot_is_not_written_while_a_thread_reads_it(disk, monkeypatch):
    for number in range(NUM_RECORDS):
        store(disk, number)
    reads, goes_on, read = threading.Event(), threading.Event(), disk.read_at
    monkeypatch.setattr(disk, "read_at", lambda *args: (reads.set(), goes_on.wait(60), read(*args))[2])
    lent = disk.load(key_of(0))
    assert reads.wait(60)
    for number in range(100, 100 + 2 * NUM_RECORDS):
        store(disk, number)
    goes_on.set()
    until(lambda: lent.ended)
    assert not lent.missed and ctypes.string_at(lent.address, RECORD_BYTES) == payload(0)
    disk.finished(lent)


def test_a_disk_that_does_not_answer_is_left_alone_until_it_does(disk, monkeypatch, caplog):
    clock, asked, goes_on, read = Clock(), threading.Semaphore(0), threading.Event(), disk.read_at
    monkeypatch.setattr(answering, "time", clock)
    assert store(disk, 1)
    monkeypatch.setattr(disk, "read_at", lambda *args: (asked.release(), goes_on.wait(60), read(*args))[2])
    lent = disk.load(key_of(1))
    assert asked.acquire(timeout=60) and disk.lookup([key_of(1)]) == [True]
    clock.pass_for(CALL_TIMEOUT_S + 1)
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="does not answer"):
            disk.lookup([key_of(1)])
    assert disk.load(key_of(1)).missed and not lent.ended
    clock.pass_for(answering.FIRST_PAUSE_S)
    with pytest.raises(TierUnavailable):
        disk.lookup([key_of(1)])
    assert asked.acquire(timeout=60), "a thread asks whether it answers again"
    goes_on.set()

    def answers() -> bool:
        with contextlib.suppress(TierUnavailable):
            return disk.lookup([key_of(1)]) == [True]
        return False

    until(answers)
    until(lambda: lent.ended)
    assert not lent.missed
    disk.finished(lent)
    assert load(disk, 1)
    said = [record.getMessage() for record in caplog.records]
    assert [text.removeprefix(f"the disk tier at {disk.path} ") for text in said] == [
        "does not answer (TimeoutError); asked again in 1 s",
        "answers again",
    ]


@pytest.mark.parametrize("fault", ["full", "error", "torn", "silently torn", "index torn"])
def test_a_write_that_fails_is_a_miss_and_the_disk_goes_on(disk, tmp_path, fault):
    assert store(disk, 1)
    disk.fault = fault
    for number in range(2, 2 + NUM_RECORDS):
        store(disk, number)
    disk.fault = None
    assert not any(load(disk, number) for number in range(2, 2 + NUM_RECORDS))
    assert disk.stats().errors >= NUM_RECORDS
    assert all(store(disk, number) and load(disk, number) for number in range(20, 20 + NUM_RECORDS))
    assert disk.stats().held_bytes == NUM_RECORDS * RECORD_BYTES
    disk.close()
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    assert all(load(again, number) for number in range(20, 20 + NUM_RECORDS))
    again.close()


@pytest.mark.parametrize("fault", ["gone", "corrupted"])
def test_a_read_that_fails_is_a_miss_and_is_counted(disk, fault):
    assert store(disk, 1)
    disk.fault = fault
    assert not load(disk, 1)
    assert disk.stats().errors == 1
    disk.fault = None
    assert not load(disk, 1)
    assert store(disk, 1) and load(disk, 1)


@pytest.mark.parametrize(("most", "comes"), [(3 * 4096, True), (RECORD_BYTES - 4096, True), (100, False), (0, False)])
def test_short_reads_go_on_and_a_file_that_ends_is_a_miss(disk, monkeypatch, most, comes):
    assert store(disk, 1)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:most]], at) if most >= 4096 else most)
    assert load(disk, 1) == comes


@pytest.mark.parametrize(("most", "comes"), [(5 * 4096, True), (100, False), (0, False)])
def test_short_writes_go_on_and_a_disk_that_takes_no_more_is_a_miss(disk, monkeypatch, most, comes):
    pwrite, records = os.pwrite, open_at(disk.path / "records")
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most] if fd == records else data, at) if most >= 4096 else most
    )
    assert store(disk, 1)
    monkeypatch.undo()
    assert load(disk, 1) == comes


@pytest.mark.parametrize("at", [0, 1, RECORD_BYTES // 2, RECORD_BYTES - 1])
def test_a_changed_byte_on_the_disk_is_never_returned(tmp_path, at):
    with_one(tmp_path)
    with open(tmp_path / "tier" / "records", "r+b") as file:
        for slot in range(NUM_RECORDS):
            file.seek(slot * RECORD_BYTES + at)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    assert not load(again, 1)
    again.close()


@pytest.mark.parametrize("cut", range(0, 140, 9))
def test_an_index_cut_anywhere_gives_right_bytes_or_misses(tmp_path, cut):
    with_one(tmp_path)
    index = tmp_path / "tier" / "index"
    index.write_bytes(index.read_bytes()[:cut])
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    load(again, 1)
    assert (store(again, 1) or load(again, 1)) and load(again, 1)
    again.close()


@pytest.mark.parametrize("at", [0, 8, 30, 41, 44, 47])
def test_a_changed_entry_is_no_entry(tmp_path, at):
    with_one(tmp_path)
    index = tmp_path / "tier" / "index"
    content = bytearray(index.read_bytes())
    for entry in range(64, len(content), 64):
        content[entry + at] ^= 1
    index.write_bytes(content)
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    assert again.stats().held_bytes == 0
    again.close()


@pytest.mark.parametrize("generation", [0, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_entry_that_no_tier_has_written_is_a_miss_and_the_tier_goes_on(tmp_path, caplog, generation, is_whole):
    with_one(tmp_path)
    at, entry = index_entry(3, generation, key_of(2), 0, is_whole=is_whole)
    with open(tmp_path / "tier" / "index", "r+b") as index:
        index.seek(at)
        index.write(entry)
    for first in (20, 40):
        again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
        again.open(CPU)
        assert load(again, 1) or first == 40
        assert not load(again, 2)
        assert all(store(again, number) and load(again, number) for number in range(first, first + NUM_RECORDS))
        assert again.stats().errors == (is_whole and first == 20)
        again.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'tier'}: 1 entries of its index are damaged; their records are lost"
    ] * (not is_whole)


def test_an_index_of_something_else_is_said_once_and_begun_anew(tmp_path, caplog):
    with_one(tmp_path)
    index = tmp_path / "tier" / "index"
    index.write_bytes(b"x" + index.read_bytes()[1:])
    for _ in range(2):
        again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
        again.open(CPU)
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'tier'}: its index is damaged, or of another version: the tier begins empty"
        ]
        again.close()


def with_one(tmp_path):
    tier = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    tier.open(CPU)
    assert store(tier, 1)
    tier.close()


def test_records_are_found_again_and_a_smaller_budget_keeps_what_fits(tmp_path):
    for num_records, first in ((NUM_RECORDS, 0), (2 * NUM_RECORDS, 100), (3, 200)):
        tier = DiskTier(tmp_path / "tier", num_records * RECORD_BYTES)
        tier.open(CPU)
        if first == 100:
            assert all(load(tier, number) for number in range(NUM_RECORDS))
        assert tier.stats().held_bytes <= tier.stats().budget_bytes
        for number in range(first, first + NUM_RECORDS):
            store(tier, number)
        assert os.stat(tmp_path / "tier" / "records").st_size == num_records * RECORD_BYTES
        tier.close()


@pytest.mark.parametrize("num_writes", range(7))
def test_a_tier_that_is_killed_while_it_shrinks_keeps_what_was_used_last(tmp_path, monkeypatch, num_writes):
    """Records 1, 3 and 6 were: one in a slot that stays and two that are moved, each by two writes."""
    tier = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    tier.open(CPU)
    assert all(store(tier, number) for number in range(NUM_RECORDS))
    assert all(found(tier, 6, 3, 1))
    tier.close()
    write_at, left = DiskTier.write_at, iter([True] * num_writes)

    def killed(tier, *written):
        if not next(left, False):
            raise KeyboardInterrupt
        write_at(tier, *written)

    shrunk = []
    monkeypatch.setattr(DiskTier, "write_at", killed)
    with contextlib.suppress(KeyboardInterrupt):
        shrunk.append(DiskTier(tmp_path / "tier", 3 * RECORD_BYTES))
    monkeypatch.undo()
    shutil.copytree(tmp_path / "tier", tmp_path / "left")
    for each in shrunk:
        each.close()
    again = DiskTier(tmp_path / "left", 3 * RECORD_BYTES)
    again.open(CPU)
    assert all(load(again, number) for number in (1, 3, 6)) and again.stats().held_bytes == 3 * RECORD_BYTES
    assert store(again, 20) and [load(again, number) for number in (1, 3, 6, 20)].count(True) == 3
    again.close()


def test_a_record_that_cannot_be_read_while_a_tier_shrinks_is_lost_and_no_other(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    tier.open(CPU)
    assert all(store(tier, number) for number in range(NUM_RECORDS))
    tier.close()
    with open(tmp_path / "tier" / "records", "rb") as records:
        records.seek(5 * RECORD_BYTES)
        assert records.read(RECORD_BYTES) == payload(5)
    read_at = DiskTier.read_at

    def damaged(tier, fd, data, offset):
        if offset == 5 * RECORD_BYTES:
            raise OSError(errno.EIO, "injected")
        read_at(tier, fd, data, offset)

    monkeypatch.setattr(DiskTier, "read_at", damaged)
    again = DiskTier(tmp_path / "tier", 4 * RECORD_BYTES)
    monkeypatch.undo()
    again.open(CPU)
    assert [number for number in range(NUM_RECORDS) if load(again, number)] == [4, 6, 7]
    assert store(again, 20) and load(again, 20) and load(again, 4)
    again.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_order_of_use_outlives_a_tier_that_is_closed(tmp_path, is_killed):
    tier = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    tier.open(CPU)
    assert all(store(tier, number) for number in range(NUM_RECORDS))
    found(tier, 0, 1)
    shutil.copytree(tmp_path / "tier", tmp_path / "left")
    tier.close()
    again = DiskTier(tmp_path / ("left" if is_killed else "tier"), NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    assert store(again, 20) and store(again, 21)
    assert found(again, *range(4)) == ([False, False, True, True] if is_killed else [True, True, False, False])
    again.close()


def test_the_newest_record_of_each_slot_is_found_again_and_the_files_never_grow(tmp_path):
    tier = DiskTier(tmp_path / "tier", 2 * RECORD_BYTES)
    tier.open(CPU)
    sizes = [(path.stat().st_size, path.stat().st_blocks) for path in (tmp_path / "tier").iterdir()]
    for number in range(30):
        assert store(tier, number)
    assert sizes == [(path.stat().st_size, path.stat().st_blocks) for path in (tmp_path / "tier").iterdir()]
    tier.close()
    again = DiskTier(tmp_path / "tier", 2 * RECORD_BYTES)
    again.open(CPU)
    assert load(again, 28) and load(again, 29) and not load(again, 27)
    again.close()


def test_a_restart_on_a_full_disk_finds_what_was_stored_and_goes_on(tmp_path, monkeypatch):
    with_one(tmp_path)
    pwrite = os.pwrite

    def to_a_full_disk(fd, data, at):
        blocks = os.fstat(fd).st_blocks
        count = pwrite(fd, data, at)
        if os.fstat(fd).st_blocks > blocks:
            raise OSError(errno.ENOSPC, "injected")
        return count

    monkeypatch.setattr(os, "pwrite", to_a_full_disk)
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    assert load(again, 1) and store(again, 2) and load(again, 2)
    again.close()


def test_a_budget_that_does_not_fit_leaves_the_records_there(tmp_path):
    with_one(tmp_path)
    with pytest.raises(BudgetError, match=r"at most budget_bytes=\d+ .* works"):
        DiskTier(tmp_path / "tier", 1 << 50)
    again = DiskTier(tmp_path / "tier", NUM_RECORDS * RECORD_BYTES)
    again.open(CPU)
    assert load(again, 1)
    again.close()


def test_a_child_made_by_fork_does_not_keep_the_path(tmp_path):
    read, write = os.pipe()
    tier = DiskTier(tmp_path / "tier", RECORD_BYTES)
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        with pytest.raises(TierUnavailable):  # nor does it let go of it
            DiskTier(tmp_path / "tier", 2 * RECORD_BYTES)
        tier.close()

        def is_let_go() -> bool:
            with contextlib.suppress(TierUnavailable):
                DiskTier(tmp_path / "tier", 2 * RECORD_BYTES).close()
                return True
            return False

        until(is_let_go)  # the child closes it when it first runs
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


class FakeCudart:
    """Pins as CUDA does, as far as a tier can tell."""

    def __init__(self, monkeypatch):
        self.pinned: dict[int, int] = {}
        self.has_room = True
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)

    def cudaHostRegister(self, address, size_bytes, flags):
        assert flags == 1 and not address % 4096 and address not in self.pinned
        self.pinned |= {address: size_bytes} if self.has_room else {}
        return not self.has_room

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, 1)  # it is mapped still
        del self.pinned[address]
        return 0

    def check(self, status):
        if status:
            raise RuntimeError("injected")


@pytest.mark.parametrize("name", ["host", "disk"])
def test_pinned_memory_is_given_back_to_the_machine(tmp_path, monkeypatch, name):
    cuda, cudart = torch.device("cuda"), FakeCudart(monkeypatch)
    tier = TIERS[name](tmp_path / "tier")
    cudart.has_room = False
    with pytest.raises(BudgetError, match="of host memory for cuda cannot be had: injected"):
        tier.open(cuda)
    cudart.has_room = True
    tier.open(cuda)
    assert sum(cudart.pinned.values()) >= NUM_RECORDS * RECORD_BYTES
    assert store(tier, 1) and load(tier, 1)
    tier.close()
    assert not cudart.pinned


def test_pinned_memory_goes_with_the_last_tensor_over_it(monkeypatch):
    cudart = FakeCudart(monkeypatch)
    part = host_memory(RECORD_BYTES, torch.device("cuda"))[100:200]
    assert cudart.pinned
    del part
    assert not cudart.pinned


@pytest.mark.parametrize("name", ["host", "disk"])
def test_nothing_waits_for_a_tier_that_is_being_closed(tmp_path, monkeypatch, name):
    """Neither for its last write nor for its memory to be given back."""
    tier, cudart, asked, ended, ends = TIERS[name](tmp_path / "tier"), FakeCudart(monkeypatch), [], [], threading.Event()
    unpin, shutdown = cudart.cudaHostUnregister, ThreadPoolExecutor.shutdown
    tier.open(torch.device("cuda"))
    cudart.cudaHostUnregister = lambda address: (asked.append(None), ended.append(ends.wait(60)), unpin(address))[2]
    if name == "disk":
        monkeypatch.setattr(DiskTier, "write", lambda *_: ended.append(ends.wait(60)))
        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", lambda *given, **how: (asked.append(None), shutdown(*given, **how)))
    transfer = tier.store(key_of(1))
    tier.finished(transfer)
    closing = threading.Thread(target=tier.close)
    closing.start()
    until(lambda: asked)
    assert tier.lookup([key_of(2)]) == [False] and tier.store(key_of(2)) is Refusal.NO_ROOM and tier.load(key_of(2)).missed
    assert tier.stats().budget_bytes
    assert not ended
    ends.set()
    closing.join()


def test_only_the_owner_can_read_its_files(tmp_path):
    with contextlib.closing(DiskTier(tmp_path / "tier", RECORD_BYTES)):
        assert not [file for file in (tmp_path / "tier").iterdir() if file.stat().st_mode & 0o077]


@pytest.mark.parametrize("path", ["/proc/tier", "/sys", __file__])
def test_a_path_where_no_file_can_be_written_is_refused_and_named(path):
    with pytest.raises(TierUnavailable, match=f"no disk tier can be in {path}: .*; name a directory"):
        DiskTier(path, RECORD_BYTES)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_page_cache_is_passed_by_where_the_file_system_takes_that(tmp_path, monkeypatch, refuses):
    if refuses:
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "injected")))
    tier = DiskTier(tmp_path / "tier", RECORD_BYTES)
    monkeypatch.undo()
    assert refuses <= (not fcntl.fcntl(open_at(tier.path / "records"), fcntl.F_GETFL) & os.O_DIRECT)
    tier.open(CPU)
    assert store(tier, 1) and load(tier, 1)
    tier.close()


def test_budgets_that_do_not_fit_name_what_does(tmp_path):
    for make in (HostTier, lambda budget: DiskTier(tmp_path / "tier", budget)):
        with pytest.raises(BudgetError, match="below one record"):
            make(RECORD_BYTES - 1)
    with pytest.raises(BudgetError, match=r"at most budget_bytes=\d+ .* works"):
        HostTier(1 << 50).open(CPU)


WRITER = """
import ctypes, itertools, os, sys, torch
from tests.laws.test_tiers import NUM_RECORDS, Transfer, key_of, payload
from vmmkv import DiskTier
from vmmkv.tiers.record import RECORD_BYTES

def write(first):
    tier = DiskTier(sys.argv[1], NUM_RECORDS * RECORD_BYTES)
    tier.open(torch.device("cpu"))
    for number in itertools.count(first):
        while not isinstance(transfer := tier.store(key_of(number)), Transfer):
            pass
        ctypes.memmove(transfer.address, payload(number), RECORD_BYTES)
        tier.finished(transfer)
        if number % 4 == 0:
            tier.flush()
            say(number)

def say(text):  # whole lines: `print` may write a line's end by itself, and two processes write here
    os.write(1, f"{text}\\n".encode())

for line in sys.stdin:  # torch is imported once for all that are killed
    if (process := os.fork()) == 0:
        say(os.getpid())
        write(int(line))
    os.waitpid(process, 0)
    say("killed")
"""


def test_killed_twenty_times_while_it_writes_it_never_gives_a_wrong_byte(tmp_path):
    """What was written before the last flush is there, but for what was evicted; all else is right or a miss."""
    path, first, chance = tmp_path / "tier", 0, random.Random(11)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for _ in range(20):
            print(first, file=writers.stdin, flush=True)
            writer = int(writers.stdout.readline())
            reported = [int(writers.stdout.readline()) for _ in range(chance.randint(1, 6))][-1]
            time.sleep(chance.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
            while (line := writers.stdout.readline()) != "killed\n":
                reported = int(line)
            tier = DiskTier(path, NUM_RECORDS * RECORD_BYTES)
            tier.open(CPU)
            known = [number for number in range(reported + 100) if tier.lookup([key_of(number)])[0]]
            right = [number for number in known if load(tier, number)]
            assert len(known) - len(right) <= 4, "more is lost than the four threads were writing"
            assert max(right) >= reported, "what had been written is lost"
            assert len(known) >= min(NUM_RECORDS - 4, reported - first)
            tier.close()
            first = max(known) + 1
        writers.stdin.close()
