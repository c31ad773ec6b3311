"""Store: bytes of any engine in tiers, under keys.

    put(key, spans) ──waits for its turn in each tier──> copied ──> tiers       done: the spans may be written again
    get(key, spans) ──looked up, loaded by a tier──────> copied ──> spans       tiers that lack the record get it too

A record is as many bytes as the tiers' records have, in any number of spans: a block of one layer each, say.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from vmmkv.driver import Driver, open_driver
from vmmkv.driver.base import Fence
from vmmkv.memory.transaction import TransactionLock
from vmmkv.tier import Refusal, Tier, Transfer
from vmmkv.tiers.mover import Load, Move, Mover, Portion, Run, Source
from vmmkv.tiers.record import KEY_BYTES

if TYPE_CHECKING:
    import torch


Spans: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of an engine: addresses, of its device, of pinned host memory or of a tensor, and how many bytes from there on."""


class SpanCopier:
    """Copies between spans and tiers, on a stream of its own for each direction: links carry both at once."""

    def __init__(self, driver: Driver) -> None:
        self.driver: Final = driver
        self._streams = driver.new_stream(), driver.new_stream()

    def has_room(self, *, is_load: bool) -> bool:
        """Always: a copy between addresses takes nothing else."""
        return True

    def copy(self, buffer: Spans, runs: Sequence[Run], *, is_load: bool) -> Fence:
        """Launch copies of one record into the spans, or out of them. Returns a fence behind them. See Copier.copy."""
        with self.driver.on(self._streams[is_load]):
            ((_, lent, _),) = runs  # one record, which has as many bytes as the spans
            for address, size_bytes in buffer:
                target, source = (address, lent) if is_load else (lent, address)
                self.driver.copy(target, source, size_bytes)
                lent += size_bytes
            return self.driver.fence()

    def fence(self, *, is_load: bool) -> Fence:
        """A fence behind all copies that were launched in a direction."""
        with self.driver.on(self._streams[is_load]):
            return self.driver.fence()


class Put(Source[Spans]):
    """A record on its way from spans to tiers."""

    def __init__(self, store: "Store", tiers: list[Tier], key: bytes, spans: Spans, written: Fence, deadline_s: float) -> None:
        super().__init__()
        self.answers = {tier.name: Refusal.NOT_NOW for tier in tiers}
        """Last answer by tier: THERE if it has the record or was given it, and otherwise why not."""
        self.deadline_s = deadline_s
        self.keys = [key]
        self._store, self._spans, self._written = store, spans, written

    @property
    def done(self) -> bool:
        """May the spans be written again? Each tier has been given the record, has it, or was waited for long enough."""
        return not self.num_under_way

    def prepared(self) -> Iterator[bool]:
        """Wait for the work that was launched before the put. See Source.prepared."""
        while not self._written.done():
            yield False

    def portions(self, tier: Tier, has: set[bytes]) -> Iterator[Portion[Spans] | None]:
        """The put's one record, until the tier has it."""
        while not has.issuperset(self.keys):
            yield Portion(self._spans, self.keys)

    def answered(self, tier: Tier, answer: Refusal) -> None:
        """Keep the answer of a tier."""
        self.answers[tier.name] = answer

    def give_up(self) -> None:
        """Give the put up in tiers where it has not begun. It is done when the copies under way have ended."""
        with self._store.lock:
            self._store.withdraw(self)


class Get(Load[Spans]):
    """A record on its way into spans, from the first tier that has it."""

    def __init__(self, store: "Store", key: bytes, spans: Spans, free: Fence, deadline_s: float) -> None:
        super().__init__(spans, [])
        self.found: bool | None = None
        """Are its bytes in the spans? None until nothing is under way any more. If False, what the spans hold is undefined."""
        self.deadline_s = deadline_s
        self._store, self._key, self._free = store, key, free
        self._left = list(store.tiers)
        """Tiers that may have the record."""

    @property
    def done(self) -> bool:
        """May the spans be used?"""
        return self.found is not None

    def advance(self, may_go_on: Callable[[], bool]) -> bool:
        """Load the record from the first tier that has it. Tiers that have still to find out are asked again."""
        if self.deadline_s < time.monotonic():
            self._left = []
        for tier in list(self._left) if self._free.done() else ():
            answer = self._store.lookup_in(tier, [self._key])
            if answer is not None:
                self._left.remove(tier)
                if answer[0]:
                    self.sources, self.num_asked, self.failed = [(tier, self._key)], 0, False
                    self._store.load(self)
                    return False
        if not self._left:
            self.found = False
        return bool(self._left)

    def copied(self, move: Move) -> None:
        """Bring the record to the other tiers, if they have room at once."""
        for tier in self._store.tiers_worth_it():
            answer = self._store.ask(None, tier.store, self._key)
            if isinstance(answer, Transfer):
                ctypes.memmove(answer.address, move.transfer.address, self._store.record_bytes)
                self._store.ask(None, tier.finished, answer)

    def ended(self) -> None:
        """Ask the other tiers if the load was a miss; else note whether the record is in the spans."""
        if self.failed and self._left:
            self._store.search(self)
        else:
            self.found = not self.failed

    def give_up(self) -> None:
        """Give the get up. It is done at once, or when the copies under way have ended."""
        with self._store.lock:
            self._left = []
            self._store.drop(self)
            if self._store.end_search(self):
                self.found = False


class Store(Mover[Spans]):
    """Records of an engine in tiers, the fastest first: `put`, `get` and `lookup` by key, and `poll` in slack.

        store = Store([HostTier(...), DiskTier(...)], "cuda:0")
        put = store.put(key, [(address, size_bytes), ...])      when it is done the spans may be written again
        get = store.get(key, [(address, size_bytes), ...])      when it is done and found, the spans have the bytes

    Keys have 32 bytes, as those of a `KeyChain`. Each tier takes what is put when it has room, the oldest first; of more than
    1,024 puts that wait for one, the oldest is given up. What one tier gives is copied to those that lack it. `store.worth`, if
    set, is asked by a tier's name whether it is worth it to store a record there; not of tiers that other engines load from.
    Threads may share a store: every operation but `lookup` and `stats` takes its lock, behind which signal handlers wait, as
    behind a pool's (`vmmkv.memory.transaction`). The caller closes the tiers, after the store.
    Cost: opening the tiers.
    Raises: ValueError for no tier, or tiers with records of different sizes; as `Tier.open`; DriverUnavailable.
    """

    def __init__(self, tiers: Sequence[Tier], device: "str | torch.device" = "cpu") -> None:
        self._driver: Final = open_driver(device)
        self.lock: Final = TransactionLock("store", "puts and gets")
        super().__init__(tiers, SpanCopier(self._driver))
        for tier in tiers:
            tier.open(self._driver.device)

    def put(self, key: bytes, spans: Spans, *, timeout_s: float = math.inf) -> Put:
        """Store a record in the tiers that lack it, in `poll`. Its bytes must not change until the put is done.

        They are read behind the work that is launched now on the current stream. `timeout_s`: how long to wait for tiers that
        have no room.
        Raises: ValueError for a key or spans of another size.
        """
        checked = self._checked(key, spans)
        with self.lock:
            tiers = self.tiers_worth_it()
            put = Put(self, tiers, *checked, self._driver.fence(), time.monotonic() + timeout_s)
            self.queue(put, tiers)
            return put

    def get(self, key: bytes, spans: Spans, *, timeout_s: float = math.inf) -> Get:
        """Load a record into spans, in `poll`. Nothing that is launched later may use them until the get is done.

        `timeout_s`: how long to wait for tiers. Where one misses a record that it was thought to have, the others are asked.
        Raises: ValueError for a key or spans of another size.
        """
        checked = self._checked(key, spans)
        with self.lock:
            get = Get(self, *checked, self._driver.fence(), time.monotonic() + timeout_s)
            self.search(get)
            return get

    def poll(self, budget_us: float = math.inf) -> bool:
        """Go on for about `budget_us`, as Mover.poll. Any thread may; a signal handler that raises does so behind it.

        What `worth` raises comes out of it, and the memory that tiers have lent goes back.
        """
        with self.lock:
            return super().poll(budget_us)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that was put and asked for is done, and kept by the tiers; False if the time is over first."""
        return self.flush_by(self.lock, self.poll, self.oldest_fence, timeout_s)

    def close(self) -> None:
        """Give up what is under way, and wait for copies that were launched. Idempotent."""
        with self.lock:
            gets = [each for each in (*self._searches, *self._loads) if isinstance(each, Get)]
        for get in gets:
            get.give_up()
        with self.lock:
            fences = self.give_up()
        for fence in fences:
            fence.wait()
        with self.lock:
            self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, key: bytes, spans: Spans) -> tuple[bytes, Spans]:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"key={key!r}: a key is {KEY_BYTES} bytes, as KeyChain gives them")
        sizes = [size_bytes for _, size_bytes in spans]
        if (size_bytes := sum(sizes)) != self.record_bytes or min(sizes) <= 0:
            raise ValueError(
                f"spans of {size_bytes} bytes: a record of this store has {self.record_bytes}; make its tiers with "
                f"record_bytes={size_bytes}, or fill the record up"
            )
        return key, spans
