"""Sums over ranks: how they meet, and that nothing waits for one that is gone. GPUs are in tests/gpu/test_ranks_cuda.py."""

import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from vmmkv_server.engine import ranks
from vmmkv_server.engine.collectives import Collectives, RenumberedStore, register
from vmmkv_server.engine.ranks import Op, Peer, RankFailed, Ranks

CPU = torch.device("cpu")


def each_rank(do: Callable[[Collectives], object], num_ranks: int = 2) -> list[object]:
    """What `do` gives on each rank, in threads."""
    store = HashStore()

    def run(rank: int) -> object:
        one = Collectives(rank, num_ranks)
        one.connect(store, CPU, 20.0)
        try:
            return do(one)
        finally:
            one.abort()

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def test_all_ranks_have_the_sum_and_the_first_ones_inputs() -> None:
    def both(one: Collectives) -> list[float]:
        own = torch.full((3,), 1.0 + one.rank)
        return [*one.sum(own.clone()).tolist(), *one.broadcast(own).tolist()]

    assert each_rank(both, 3) == [[6.0] * 3 + [1.0] * 3] * 3


def test_a_device_without_symmetric_memory_is_said_once_and_sums_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def without(one: Collectives) -> float:
        assert one.open_symmetric(HashStore(), CPU) is None
        return one.sum(torch.ones(1)).item()

    assert each_rank(without) == [2.0, 2.0]
    (line,) = caplog.messages
    assert "symmetric memory cannot be had" in line


def test_ranks_that_have_met_another_number_of_times_find_each_others_keys() -> None:
    store = HashStore()
    kept = [RenumberedStore(store) for _ in range(2)]
    stores = [PrefixStore("symmetric", each) for each in kept]
    for first, second in ((7, 0), (8, 1)):  # rank 0 has had other engines in its process
        stores[0].set(f"CUDASymmetricMemory/{first}/0", f"of {first}")
        stores[1].wait([f"CUDASymmetricMemory/{second}/0"])
        assert stores[1].get(f"CUDASymmetricMemory/{second}/0") == f"of {first}".encode()
    stores[0].set("name", "as it is")
    assert store.get("symmetric/name") == b"as it is"


def test_torch_finds_a_group_by_its_name_while_it_is_kept() -> None:
    def found(one: Collectives) -> tuple[int, int]:
        kept = register(one.rank, one.num_ranks, one.group, HashStore(), CPU)
        group = _resolve_process_group(kept.group_name)
        return group.rank(), group.size()

    assert each_rank(found) == [(0, 2), (1, 2)]


def opened(store: HashStore) -> tuple[Ranks, socket.socket]:
    """Rank 0, and the channel of a rank that says it is ready."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"[]")
    return Ranks([Peer(1, ours)], store, timeout_s=20.0), theirs


def test_rank_0_does_not_wait_to_meet_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LAST_WORDS_S", 0.1)
    several, theirs = opened(HashStore())
    threading.Timer(0.3, theirs.close).start()
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        several.connect(CPU)
    assert time.monotonic() - began_s < 10.0, "gloo waits for 20 s"


def test_collectives_are_ended_when_a_rank_ends_whatever_rank_0_does() -> None:
    store = HashStore()
    several, theirs = opened(store)
    other = Collectives(1, 2)
    with theirs, ThreadPoolExecutor(1) as threads:

        def meet() -> None:
            other.connect(store, CPU, 20.0)
            while array("q", theirs.recv(64))[0] != Op.MEMORY:
                pass
            theirs.send(b"[0, 0]")

        met = threads.submit(meet)
        several.connect(CPU)
        met.result()
    until_s = time.monotonic() + 10.0
    while several.collectives.group is not None:  # it may be in a call of the driver, and look at nothing
        assert time.monotonic() < until_s
        time.sleep(0.01)
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        several.check()
    other.abort()


BUSY = """
import socket, sys, threading, time
from vmmkv_server.engine import worker
worker._END_S = 0.1
channel = socket.socket(fileno=int(sys.argv[1]))
threading.Thread(target=worker.end_with, args=(channel,), daemon=True).start()
print("busy", flush=True)
time.sleep(60)
"""


@pytest.mark.nightly
def test_a_rank_that_is_in_a_call_ends_with_rank_0() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-c", BUSY, str(number)], pass_fds=[number], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"busy\n"
        ours.close()
        assert process.wait(20) == 1


LATE = """
import time
from vmmkv_server.engine.collectives import in_background
in_background("late", lambda: (time.sleep(0.5), print("done", flush=True)))
"""


@pytest.mark.nightly
def test_the_end_of_a_process_waits_for_what_works_in_the_background() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], capture_output=True, check=True, timeout=60).stdout == b"done\n"
