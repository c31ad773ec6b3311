"""A signal handler that raises at any line of the library: books and driver agree behind it, and everything can be closed."""

import contextlib
import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import vmmkv
from tests.laws.faulty_tier import FaultyTier
from tests.laws.test_failures import OPERATIONS, PROMPT
from vmmkv import DriverError, KVCache, KVLayout, Pool, Reentered
from vmmkv.memory import transaction
from vmmkv.memory.slots import Slots
from vmmkv.saved import Offloaded
from vmmkv.testing.fake_driver import FakeDriver, Launch
from vmmkv.tiers import DiskTier, Get, HostTier, KeyChain, Put, Store, Tier, Transfer
from vmmkv.units import PAGE_BYTES

LIBRARY = str(Path(vmmkv.__file__).parent)
DEVICE = str(Path(LIBRARY, "testing"))
"""What a simulated device does is not interrupted: a real one runs beside the process."""
at_lines = pytest.mark.parametrize("samples", [8, pytest.param(None, marks=pytest.mark.nightly)])
"""Of so many lines in the default run; None for all."""


class Alarm(Exception):
    """Raised by the handler of SIGHUP, where that of SIGINT raises KeyboardInterrupt, which is no Exception.

    SIGALRM is pytest's own: it ends a test that takes too long.
    """


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGHUP, ring)
    yield
    signal.signal(signal.SIGHUP, before)


def run_with_interrupt(act: Callable[[], object], number: int | None, signal_number: int = signal.SIGINT) -> int:
    """Do it, with a signal at the line of that number among all that run in the library; how many did."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not (file := frame.f_code.co_filename).startswith(LIBRARY) or file.startswith(DEVICE):
            return None
        if event == "line":
            lines += 1
            if lines - 1 == number:
                signal.raise_signal(signal_number)
        return trace

    sys.settrace(trace)
    try:
        act()
    except (KeyboardInterrupt, Alarm):
        assert number is not None
    finally:
        sys.settrace(None)
    return lines


def interrupt_at_lines(interrupt: Callable[[int | None, int], int], samples: int | None) -> None:
    """Run what `run_with_interrupt` runs, without an interrupt and then at so many lines, or at all, by either signal in turn.

    At all lines, another night has the other signal at each.
    """
    lines, signals = interrupt(None, signal.SIGINT), [signal.SIGINT, signal.SIGHUP]
    if samples is None:
        random.SystemRandom().shuffle(signals)
    for number, signal_number in zip(range(0, lines, lines // (samples or lines)), itertools.cycle(signals), strict=False):
        interrupt(number, signal_number)


def interrupt(name: str, number: int | None, signal_number: int) -> int:
    """Interrupt an operation at one line, recount everything, and close: nothing is left. How many lines ran."""
    operation = OPERATIONS[name]
    with operation.prepared(operation.layouts[-1]) as world:
        before = signal.getsignal(signal_number)
        lines = run_with_interrupt(lambda: operation.act(world), number, signal_number)
        assert signal.getsignal(signal_number) is before
        for cache in list(world.pool.caches):
            cache.check()
        if not world.pool.closed:
            world.pool.check()
        world.pool.close()
    assert (world.driver.live_mappings, world.driver.live_handles, world.driver.used_bytes) == (0, 0, 0)
    return lines


@at_lines
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_a_line_leaves_books_and_driver_in_step(name: str, samples: int | None) -> None:
    interrupt_at_lines(partial(interrupt, name), samples)


@at_lines
@pytest.mark.parametrize("name", ["compact", "compact_aliased", "compact_inserted"])
def test_an_interrupted_compaction_has_been_whole_or_not_at_all(name: str, samples: int | None) -> None:
    operation, rows = OPERATIONS[name], [0, 1, 3, 4, 7, 9]

    def compact(number: int | None, signal_number: int) -> int:
        with operation.prepared("one_group") as world:
            live = world.known[-1]
            sequence, num_tokens = live.sequence, live.sequence.length
            lines = run_with_interrupt(lambda: sequence.compact(rows), number, signal_number)
            kept = [rows, list(range(num_tokens))][sequence.length == num_tokens]
            assert sequence.positions().tolist() == kept and sequence.position == num_tokens
            live.stamps, live.tokens = ([each[row] for row in kept if each] for each in (live.stamps, live.tokens))
            world.verify()
            assert sequence.park().length == len(kept)
            world.end()
        return lines

    interrupt_at_lines(compact, samples)


BEGINNINGS: dict[str, Callable[[Any], object]] = {
    "open": lambda world: world.cache.open(tenant="red"),
    "open_blank": OPERATIONS["open_blank"].act,
    "open_evicting": OPERATIONS["open_evicting"].act,
    "open_batch_evicting": OPERATIONS["open_batch_evicting"].act,
    "adopt": OPERATIONS["adopt"].act,
    "fork_twice": lambda world: world.cache.fork(world.known[-1].sequence, 2),
    "fork": lambda world: world.cache.fork_batch([world.known[-1].sequence]),
    "attach_adopt": lambda world: world.prefix.attach([*PROMPT, 7], namespace="red"),
    "alias_of_released": lambda world: world.prefix.attach([*PROMPT, 7], namespace="red"),
    "grow_one_page": lambda world: world.cache.restore("saved", tenant="red"),
}
"""Calls that give new sequences, by the operation for which they are prepared."""


@at_lines
@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_call_that_is_interrupted_before_it_gives_sequences_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, samples: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    operation = OPERATIONS[name]

    def begin(number: int | None, signal_number: int) -> int:
        with operation.prepared(operation.layouts[-1]) as world:
            for live in world.running()[:1]:
                live.sequence.save("saved")
            before, given = set(world.cache.slots.live_slots), list[object]()
            lines = run_with_interrupt(lambda: given.append(BEGINNINGS[name](world)), number, signal_number)
            assert given or set(world.cache.slots.live_slots) == before, "a sequence runs that nothing can close"
            world.check(strays=False)
            world.cache.check()
            world.cache.close()
            world.pool.close()
        return lines

    interrupt_at_lines(begin, samples)


@at_lines
def test_a_cache_that_is_interrupted_as_it_is_made_is_closed(samples: int | None) -> None:
    layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)

    def make(number: int | None, signal_number: int) -> int:
        with Pool("cpu", 16 * PAGE_BYTES, driver=FakeDriver()) as pool:
            made: list[Slots] = []
            lines = run_with_interrupt(
                lambda: made.append(Slots(layout, pool, num_slots=4, max_tokens=64, guard_tokens=0)), number, signal_number
            )
            assert made or not pool.caches
        return lines

    interrupt_at_lines(make, samples)


class Lender(FaultyTier):
    """A tier that counts what it gets back."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier, 0, ())
        self.returned: list[Transfer] = []

    def finished(self, transfer: Transfer) -> None:
        self.returned.append(transfer)
        super().finished(transfer)

    def drop(self, transfer: Transfer) -> None:
        self.returned.append(transfer)
        super().drop(transfer)


@at_lines
def test_an_interrupted_store_gives_memory_of_tiers_back_once_and_goes_on(tmp_path: Path, samples: int | None) -> None:
    keys = KeyChain("model", every=1).of(range(4)).keys()
    folders = itertools.count()

    def use(number: int | None, signal_number: int) -> int:
        host = Lender(HostTier(2 * 4096, record_bytes=4096))
        disk = Lender(DiskTier(tmp_path / str(next(folders)), 8 * 4096, record_bytes=4096))
        store, buffers = Store([host, disk]), [torch.full((4096,), each, dtype=torch.uint8) for each in range(9)]

        def put(each: int) -> Put:
            return store.put(keys[each], [(buffers[each].data_ptr(), 4096)])

        def get(each: int) -> Get:
            return store.get(keys[each], [(buffers[4 + each].data_ptr(), 4096)])

        def act() -> None:
            _, two, three = put(1), put(2), put(3)
            two.give_up()
            store.flush()
            assert three.done
            _, one = get(0), get(1)
            store.poll()
            one.give_up()
            put(2)
            store.close()

        put(0)
        assert store.flush()
        lines = run_with_interrupt(act, number, signal_number)
        assert get(0) and store.flush() and torch.equal(buffers[0], buffers[4])
        store.close()
        for tier in (host, disk):
            assert not tier.lent and len({*tier.returned}) == len(tier.returned) > 0
            tier.close()
        assert not store.errors
        return lines

    interrupt_at_lines(use, samples)


@pytest.fixture
def pool() -> Any:
    with Pool("cpu", 16 * PAGE_BYTES, driver=FakeDriver()) as pool:
        yield pool


@pytest.fixture
def cache(pool: Pool) -> KVCache:
    layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
    return KVCache(layout, pool, slots=4, max_tokens=64)


def during_a_driver_call(cache: KVCache, act: Callable[[], object]) -> None:
    """Grow a sequence, and do this in the midst of it."""
    driver = cache.pool.driver
    create = driver.create
    driver.create = lambda size_bytes: (act(), create(size_bytes))[1]  # type: ignore[method-assign]
    try:
        cache.open().grow(1)
    finally:
        del driver.create  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM])
def test_a_handler_that_closes_the_pool_runs_behind_the_operation(cache: KVCache, pool: Pool, number: int) -> None:
    before = signal.signal(number, lambda *_: pool.close())
    try:
        during_a_driver_call(cache, lambda: signal.raise_signal(number))
    finally:
        signal.signal(number, before)
    assert pool.closed and pool.driver.live_handles == pool.driver.live_mappings == 0


def test_a_call_from_within_an_operation_is_refused(cache: KVCache, pool: Pool) -> None:
    def reenter() -> None:
        for use in (pool.close, cache.close, cache.open, cache.stats, cache.map_ahead):
            with pytest.raises(Reentered, match="in the middle of another operation of the same thread"):
                use()

    during_a_driver_call(cache, reenter)
    cache.check()


def test_other_threads_and_ignored_signals_are_left_alone(cache: KVCache) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        during_a_driver_call(cache, lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=lambda: cache.open().grow(1))
    thread.start()
    thread.join()
    assert cache.stats().num_sequences == 2


def test_an_interrupted_failure_raises_the_interrupt(cache: KVCache) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        during_a_driver_call(cache, lambda: (signal.raise_signal(signal.SIGINT), 1 / 0))
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    cache.check()


@pytest.mark.parametrize("name", ["save", "restore", "offload"])
@pytest.mark.parametrize("is_interrupted", [True, False], ids=["interrupted", "with a fence that fails"])
def test_host_memory_goes_behind_the_copy_whatever_comes_after_its_launch(
    cache: KVCache, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_interrupted: bool
) -> None:
    sequence, path, copies, fence = cache.open(), tmp_path / "one", list[Launch](), pool.driver.fence
    sequence.grow(4)
    sequence.advance(4)
    sequence.save(path)

    def copy(*_: int) -> None:
        copies.append(pool.driver.launch([]))
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        else:
            failing = Mock(side_effect=[DriverError("it failed", call="fence", code="1"), DEFAULT], wraps=fence)
            monkeypatch.setattr(pool.driver, "fence", failing)

    monkeypatch.setattr(pool.driver, "copy", copy)
    acts: dict[str, Callable[[], object]] = {
        "save": lambda: sequence.save(path),
        "restore": lambda: cache.restore(path),
        "offload": lambda: Offloaded([[sequence.live]]),
    }
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        acts[name]()
    assert [copy.finished for copy in copies] == [True]


def run_with_call(act: Callable[[], object], number: int | None, call: Callable[[], object]) -> int:
    """Do it, with a call at the bytecode of that number among all that run in the lock's module; how many did."""
    opcodes = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal opcodes
        if frame.f_code.co_filename != transaction.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            opcodes += 1
            if opcodes - 1 == number:
                call()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return opcodes


def test_a_finalizer_that_uses_the_pool_may_run_anywhere_in_the_lock(cache: KVCache, pool: Pool) -> None:
    def use() -> None:
        with contextlib.suppress(Reentered):
            cache.stats()

    def hold() -> None:
        with pool.lock:
            signal.raise_signal(signal.SIGINT)
            assert len(arrived) == len(held), "the signal is not held back"
            held.append(number)

    before = signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGINT, lambda *_: arrived.append(number))
    try:
        number, held, arrived = -1, list[int](), list[int]()
        for number in range(run_with_call(hold, None, use)):
            now = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            run_with_call(hold, number, use)
            assert len(held) == len(arrived) == number + 2 and held[-1] == arrived[-1], "the signal is lost"
            assert now == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    cache.check()
