"""A disk tier that several processes have open: what one stores all load, and none gives a wrong byte, whichever is killed."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.laws.faulty_tier import index_entry
from tests.laws.test_tiers import CPU, NUM_RECORDS, ROOT, found, key_of, load, payload, store
from tests.stores import until
from vmmkv import DiskTier, TierUnavailable
from vmmkv.tiers import Transfer, disk
from vmmkv.tiers.record import RECORD_BYTES, checksum_of


@pytest.fixture
def opened(tmp_path):
    """Opens the tier once more. Two tiers of one process know no more of each other than those of two."""
    with contextlib.ExitStack() as tiers:

        def another(num_records: int = NUM_RECORDS) -> DiskTier:
            tier = tiers.enter_context(contextlib.closing(DiskTier(tmp_path / "tier", num_records * RECORD_BYTES)))
            tier.open(CPU)
            return tier

        yield another


def test_what_one_stores_the_others_load_also_if_they_come_later(opened):
    one, other = opened(), opened()
    assert store(one, 1) and store(other, 2)
    later = opened()
    for tier in (one, other, later):
        assert found(tier, 1, 2, 3) == [True, True, False] and load(tier, 1) and load(tier, 2)
        assert tier.stats().held_bytes == 2 * RECORD_BYTES


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm cannot be written")
def test_in_shared_memory_it_is_host_memory_of_several_processes_that_outlives_them():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as tiers:
        opened = [DiskTier(folder, NUM_RECORDS * RECORD_BYTES) for _ in range(3)]
        for tier in opened:
            tiers.callback(tier.close)
        for number, tier in enumerate(opened):
            tier.open(CPU)
            assert store(tier, number) and all(load(tier, each) for each in range(number + 1))
        for tier in opened:
            tier.close()
        heir = tiers.enter_context(contextlib.closing(DiskTier(folder, NUM_RECORDS * RECORD_BYTES)))
        heir.open(CPU)
        assert all(load(heir, number) for number in range(3))


def test_what_nobody_has_used_for_the_longest_time_is_evicted_whoever_stores(opened):
    one, other = opened(), opened()
    for number in range(NUM_RECORDS):
        assert store(one if number % 2 else other, number)
    assert all(found(other, 0, 1)) and all(found(one, 2))
    assert store(one, 20) and store(other, 21)
    for tier in (one, other):
        assert [number for number in range(NUM_RECORDS) if found(tier, number) == [True]] == [0, 1, 2, 5, 6, 7]
    assert (one.stats().evicted_records, other.stats().evicted_records) == (1, 1)


def test_a_path_that_another_host_has_open_is_refused(tmp_path, monkeypatch):
    """Over a network file system, where locks hold and mappings do not."""
    with contextlib.closing(DiskTier(tmp_path, RECORD_BYTES)):
        DiskTier(tmp_path, RECORD_BYTES).close()
        monkeypatch.setattr(disk, "host_now", lambda: b"other".ljust(37))
        with pytest.raises(TierUnavailable, match=r"disk tier of another host, .* share a store such as redis"):
            DiskTier(tmp_path, RECORD_BYTES)
    DiskTier(tmp_path, RECORD_BYTES).close()
    monkeypatch.undo()
    DiskTier(tmp_path, RECORD_BYTES).close()


def test_the_last_that_closes_keeps_the_order_of_all_uses(opened):
    one, other = opened(), opened()
    for number in range(NUM_RECORDS):
        assert store(one, number)
    assert all(found(other, 0)) and all(found(one, 1))
    one.close()
    other.close()
    again = opened()
    assert store(again, 20) and store(again, 21)
    assert found(again, *range(4)) == [True, True, False, False]


def test_a_listener_hears_of_what_others_store_and_evict(opened):
    one, other = opened(), opened()
    assert store(one, 1)
    heard: list[tuple[list[int], bool]] = []
    other.listen(lambda keys, is_held: heard.append(([int.from_bytes(key, "big") for key in keys], is_held)))
    for number in range(2, 2 + NUM_RECORDS):
        assert store(one, number)
    assert found(other, 1) == [False]
    assert heard == [
        ([1], True),
        *(([number], True) for number in range(2, 1 + NUM_RECORDS)),
        ([1], False),
        ([1 + NUM_RECORDS], True),
    ]


def test_one_record_that_two_store_is_kept_once(opened, monkeypatch):
    one, other = opened(), opened()
    both = threading.Barrier(2, timeout=60)
    write_at = DiskTier.write_at

    def together(tier, fd, data, offset):
        if len(data) == RECORD_BYTES:
            both.wait()
        write_at(tier, fd, data, offset)

    monkeypatch.setattr(DiskTier, "write_at", together)
    for tier in (one, other):
        transfer = tier.store(key_of(1))
        assert isinstance(transfer, Transfer)
        ctypes.memmove(transfer.address, payload(1), RECORD_BYTES)
        tier.finished(transfer)
    assert one.flush(60) and other.flush(60)
    monkeypatch.undo()
    for tier in (one, other):
        assert load(tier, 1) and tier.stats().held_bytes == RECORD_BYTES and tier.stats().errors == 0
    assert all(store(one, number) for number in range(2, 1 + NUM_RECORDS))
    assert one.stats().evicted_records == 0


def test_what_one_reads_no_other_overwrites(opened, monkeypatch):
    one, other = opened(2), opened(2)
    assert store(one, 1) and store(one, 2)
    read_at, begun, ends = DiskTier.read_at, threading.Event(), threading.Event()

    def slowly(tier, *asked):
        begun.set()
        assert ends.wait(60)
        read_at(tier, *asked)

    monkeypatch.setattr(DiskTier, "read_at", slowly)
    transfer = one.load(key_of(1))
    assert transfer is not None and begun.wait(60)
    assert all(store(other, number) for number in range(10, 14))
    assert found(other, 1, 13) == [True, True]
    ends.set()
    until(lambda: transfer.ended)
    assert not transfer.missed and ctypes.string_at(transfer.address, RECORD_BYTES) == payload(1)
    one.finished(transfer)
    monkeypatch.undo()
    assert store(other, 20) and found(one, 13, 20) == [False, True], "the slot that was read can be written again"
    assert store(other, 21) and found(one, 1, 21) == [False, True]


def test_a_record_that_one_finds_damaged_is_gone_for_all_and_its_slot_is_used_again(opened):
    one, other = opened(), opened()
    assert store(one, 1) and load(other, 1)
    with open(one.path / "records", "r+b") as records:
        records.write(b"x")
    assert not load(other, 1)
    assert found(one, 1) == [False] and not load(one, 1)
    assert (one.stats().errors, other.stats().errors) == (0, 1)
    assert all(store(one, number) for number in range(NUM_RECORDS)) and one.stats().evicted_records == 0


def test_one_that_has_not_looked_for_many_changes_reads_all_entries(tmp_path):
    with contextlib.ExitStack() as tiers:
        one, other = (
            tiers.enter_context(contextlib.closing(DiskTier(tmp_path, 3 * 4096, record_bytes=4096))) for _ in range(2)
        )
        assert found(other, 0) == [False]
        data = memoryview(mmap.mmap(-1, 4096))
        for number in range(2500):
            data[:] = number.to_bytes(8, "big") * 512
            one.write(key_of(number), data)
            assert found(one, 0) == [True]
        assert found(other, 0, *range(2490, 2500)) == [True] + [False] * 8 + [True] * 2
        data[:] = bytes(4096)
        other.read(key_of(2499), data)
        assert data == (2499).to_bytes(8, "big") * 512


def test_a_record_that_moves_while_one_does_not_look_is_there_still(opened):
    one, other = opened(2), opened(2)
    assert store(one, 1) and store(one, 2) and found(other, 1, 2) == [True, True]
    heard = list[tuple[list[bytes], bool]]()
    other.listen(lambda keys, is_held: heard.append((list(keys), is_held)))
    with open(one.path / "records", "r+b") as records:
        for slot in range(2):
            records.seek(slot * RECORD_BYTES)
            records.write(b"x")
    assert not load(one, 1) and not load(one, 2)
    assert store(one, 1) and store(one, 2), "the slot that was freed last is taken first"
    assert found(other, 1, 2) == [True, True] and load(other, 1) and load(other, 2)
    assert ([key_of(2)], False) not in heard, "its new slot was known before its old one was looked at"


def test_an_entry_of_which_one_has_not_heard_is_no_record_that_it_knew(opened):
    """As of a process that was killed behind its entry, and before it was counted as a change."""
    one = opened()
    assert store(one, 1) and load(one, 1)
    at, entry = index_entry(0, 99, key_of(2), checksum_of(key_of(2), memoryview(payload(2))))
    for file, place, content in (("records", 0, payload(2)), ("index", at, entry)):
        with open(one.path / file, "r+b") as written:
            written.seek(place)
            written.write(content)
    assert not load(one, 1) and one.stats().errors == 0
    assert found(one, 1, 2) == [False, True] and load(one, 2)
    one.close()
    again = opened()
    assert load(again, 2)


def test_the_slot_of_a_write_that_failed_is_written_next_and_no_other_record_lost(opened, monkeypatch):
    one, write_at = opened(), DiskTier.write_at
    for number in range(NUM_RECORDS):
        assert store(one, number)

    def failing(tier, fd, data, offset):
        if len(data) == RECORD_BYTES:
            raise OSError(errno.EIO, "injected")
        write_at(tier, fd, data, offset)

    monkeypatch.setattr(DiskTier, "write_at", failing)
    for number in range(20, 24):
        store(one, number)
    monkeypatch.undo()
    assert store(one, 30) and one.stats().evicted_records == 1 and one.stats().held_bytes == one.stats().budget_bytes


def test_another_budget_is_refused_and_both_are_named(opened):
    opened()
    with pytest.raises(TierUnavailable, match=rf"budget_bytes={NUM_RECORDS * RECORD_BYTES}, and this one has {RECORD_BYTES};"):
        opened(1)


def test_a_path_whose_lock_is_an_older_versions_is_refused(opened, tmp_path):
    opened().close()
    with open(tmp_path / "tier" / "records", "rb") as records:
        fcntl.flock(records, fcntl.LOCK_EX)
        with pytest.raises(TierUnavailable, match="an older vmmkv"):
            opened()


USER = """
import ctypes, itertools, os, random, sys, torch
from tests.laws.test_tiers import NUM_RECORDS, Transfer, key_of, load, payload
from vmmkv import DiskTier
from vmmkv.tiers.record import RECORD_BYTES

def use(seed):
    chance, parent = random.Random(seed), os.getppid()
    tier = DiskTier(sys.argv[1], NUM_RECORDS * RECORD_BYTES)
    tier.open(torch.device("cpu"))
    for turn in itertools.count():
        if os.getppid() != parent:  # a test that fails leaves no process behind
            os._exit(0)
        number = chance.randrange(3 * NUM_RECORDS)
        if chance.random() < 0.5:
            load(tier, number)
        elif isinstance(transfer := tier.store(key_of(number)), Transfer):
            ctypes.memmove(transfer.address, payload(number), RECORD_BYTES)
            tier.finished(transfer)
        if turn == 20:
            os.write(1, b"busy\\n")

for line in sys.stdin:  # torch is imported once for all that are killed
    if (process := os.fork()) == 0:
        try:
            use(int(line))
        except BaseException as error:
            os.write(1, f"{error!r}\\n".encode())
        os._exit(1)
    os.write(1, f"{process}\\n".encode())
"""


def test_users_that_are_killed_leave_the_others_right_bytes_and_all_slots(opened, tmp_path):
    stays, chance, users = opened(), random.Random(5), list[int]()
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(tmp_path / "tier")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def begin(seed: int) -> int:
            print(seed, file=parent.stdin, flush=True)
            said = [parent.stdout.readline(), parent.stdout.readline()]
            assert "busy\n" in said, said
            said.remove("busy\n")
            return int(said[0])

        for seed in range(8):
            users.append(begin(seed))
            if len(users) == 3:
                time.sleep(chance.random() * 0.05)
                os.kill(users.pop(chance.randrange(3)), signal.SIGKILL)
            for number in range(3 * NUM_RECORDS):
                load(stays, number)
                store(stays, number)
        for user in users:
            os.kill(user, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{user}/maps").exists() and Path(f"/proc/{user}/maps").read_text() for user in users))
        parent.stdin.close()
    assert all(store(stays, number) for number in range(100, 100 + NUM_RECORDS))
    assert all(load(stays, number) for number in range(100, 100 + NUM_RECORDS))
    assert stays.stats().held_bytes == NUM_RECORDS * RECORD_BYTES
    assert stays.stats().errors == stays.stats().refused_records, "it fails where all slots are being read or written"
    stays.close()
    again = opened()
    assert all(load(again, number) for number in range(100, 100 + NUM_RECORDS))
