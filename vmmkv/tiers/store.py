"""Store: bytes of any engine in tiers, under keys.

    put(key, spans) ──waits for its turn in each tier──> copied ──> tiers       done: the spans may be written again
    get(key, spans) ──looked up, loaded by a tier──────> copied ──> spans       tiers that lack the record get it too

A record is as many bytes as the tiers' records have, in any number of spans: a block of one layer each, say. Several may be put
or got together, which costs the host little more than one. An engine whose bytes lie in many places may bring its own way to
copy them, as a `Buffer`.
"""

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias

from vmmkv.driver import Driver, open_driver
from vmmkv.driver.base import Fence
from vmmkv.memory.transaction import TransactionLock
from vmmkv.tier import Refusal, Tier, Transfer
from vmmkv.tiers.mover import Load, Move, Mover, Portion, Run, Source
from vmmkv.tiers.record import KEY_BYTES

if TYPE_CHECKING:
    import torch


_MOST_STORING_BYTES: Final = 64 << 20
"""Bytes of stores under way from which on no more are launched: what an engine copies to the host itself waits behind them."""

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of an engine: addresses, of its device, of pinned host memory or of a tensor, and how many bytes from there on."""


class Buffer(Protocol):
    """The bytes of records in an engine's memory, wherever they lie, as if one behind the other."""

    @property
    def size_bytes(self) -> int:
        """Number of its bytes."""

    def copy(self, driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        """Launch copies on the current stream, of whole records between the buffer and tiers: into the buffer for a load."""


class _SpanBuffer:
    """Spans as a buffer: a copy for each."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        sizes = [size_bytes for _, size_bytes in spans]
        self.size_bytes: Final = sum(sizes) if sizes and min(sizes) > 0 else 0

    def copy(self, driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        """Launch a copy for each span, or part of one, in a run. See Buffer.copy."""
        offset = 0
        for place, size_bytes in self._spans:
            for run in runs:
                start, end = max(offset, run.offset_bytes), min(offset + size_bytes, run.offset_bytes + run.size_bytes)
                if start < end:
                    ends = place + start - offset, run.address + start - run.offset_bytes
                    target, source = ends if is_load else reversed(ends)
                    driver.copy(target, source, end - start)
            offset += size_bytes


class BufferCopier:
    """Copies between buffers and tiers, on a stream of its own for each direction: links carry both at once."""

    def __init__(self, driver: Driver) -> None:
        self.driver: Final = driver
        self._streams = driver.new_stream(), driver.new_stream()
        self._stores = deque[tuple[Fence, int]]()
        """Fence and bytes of each store under way, the oldest first."""

    def has_room(self, *, is_load: bool) -> bool:
        """For a load always: requests wait for it. For a store while few bytes of others are under way."""
        while self._stores and self._stores[0][0].done():
            self._stores.popleft()
        return is_load or sum(size_bytes for _, size_bytes in self._stores) < _MOST_STORING_BYTES

    def copy(self, buffer: Buffer, runs: Sequence[Run], *, is_load: bool) -> Fence:
        """Launch copies of records into the buffer, or out of it. Returns a fence behind them. See Copier.copy."""
        with self.driver.on(self._streams[is_load]):
            buffer.copy(self.driver, runs, is_load=is_load)
            fence = self.driver.fence()
        if not is_load:
            self._stores.append((fence, sum(run.size_bytes for run in runs)))
        return fence

    def fence(self, *, is_load: bool) -> Fence:
        """A fence behind all copies that were launched in a direction."""
        with self.driver.on(self._streams[is_load]):
            return self.driver.fence()


class Put(Source[Buffer]):
    """Records on their way from a buffer to tiers."""

    def __init__(
        self, store: "Store", tiers: list[Tier], keys: Sequence[bytes], buffer: Buffer, written: Fence, deadline_s: float
    ) -> None:
        super().__init__()
        self.answers = {tier.name: Refusal.NOT_NOW for tier in tiers}
        """Last answer by tier: THERE if it has a record or was given it, and otherwise why not."""
        self.deadline_s = deadline_s
        self.keys = keys
        self._has: dict[str, set[bytes]] = {tier.name: set() for tier in tiers}
        """Keys of the records that each tier has or was given."""
        self._store, self._buffer, self._written = store, buffer, written

    @property
    def done(self) -> bool:
        """May the buffer be written again? Each tier has been given the records, has them, or was waited for long enough."""
        return not self.num_under_way

    @property
    def num_missing(self) -> int:
        """Number of records that some tier neither has nor was given."""
        return sum(any(key not in has for has in self._has.values()) for key in self.keys)

    def prepared(self) -> Iterator[bool]:
        """Wait for the work that was launched before the put. See Source.prepared."""
        while not self._written.done():
            yield False

    def portions(self, tier: Tier, has: set[bytes]) -> Iterator[Portion[Buffer] | None]:
        """All records of the put, until the tier has them."""
        self._has[tier.name] = has
        while not has.issuperset(self.keys):
            yield Portion(self._buffer, self.keys)

    def answered(self, tier: Tier, answer: Refusal) -> None:
        """Keep the answer of a tier."""
        self.answers[tier.name] = answer

    def give_up(self) -> None:
        """Give the put up in tiers where it has not begun. It is done when the copies under way have ended."""
        with self._store.lock:
            self._store.withdraw(self)


class Get(Load[Buffer]):
    """Records on their way into a buffer, each from the first tier that has it."""

    def __init__(self, store: "Store", keys: Sequence[bytes], buffer: Buffer, free: Fence, deadline_s: float) -> None:
        super().__init__(buffer, [])
        self.is_promoted = len(store.tiers) > 1
        self.found: bool | None = None
        """Are their bytes in the buffer, all of them? None until nothing is under way any more. If False, what it holds is
        undefined."""
        self.deadline_s = deadline_s
        self.keys: Final = keys
        self._store, self._free = store, free
        self._left = {key: list(store.tiers) for key in keys}
        """Tiers that may have a record, by its key."""
        self._tiers: dict[bytes, Tier] = {}
        """Tier that has a record, by its key."""

    @property
    def num_missing(self) -> int:
        """Number of records that no tier gave; all of those of a get that took too long."""
        return len(self.missed.union(key for key in self.keys if key not in self._tiers)) or len(self.keys)

    @property
    def done(self) -> bool:
        """May the buffer be used?"""
        return self.found is not None

    def advance(self, may_go_on: Callable[[], bool]) -> bool:
        """Load each record from the first tier that has it. Tiers that have still to find out are asked again."""
        if self.deadline_s < time.monotonic():
            self._left = {}
        for tier in self._store.tiers if self._free.done() else ():
            asked = [key for key, left in self._left.items() if tier in left and key not in self._tiers]
            answers = self._store.lookup_in(tier, asked) if asked else None
            for key, has in zip(asked, answers or (), strict=False):
                self._left[key].remove(tier)
                if has:
                    self._tiers[key] = tier
        if len(self._tiers) == len(self.keys):
            self.sources, self.num_asked, self.failed = [(self._tiers[key], key) for key in self.keys], 0, False
            self._store.load(self)
            return False
        if any(not self._left.get(key) for key in self.keys if key not in self._tiers):
            self.found = False
        return self.found is None

    def promote(self, move: Move) -> None:
        """Bring a record to the other tiers, if they have room at once. See Load.promote."""
        for tier in self._store.tiers_worth_it():
            answer = self._store.ask(None, tier.store, move.transfer.key)
            if isinstance(answer, Transfer):
                ctypes.memmove(answer.address, move.transfer.address, self._store.record_bytes)
                self._store.ask(None, tier.finished, answer)

    def ended(self) -> None:
        """Ask the other tiers for what was a miss; else note whether the records are in the buffer."""
        for key in self.missed:
            self._tiers.pop(key, None)
        if self.missed and all(self._left.get(key) for key in self.missed):
            self.missed.clear()
            self._store.search(self)
        else:
            self.found = not self.failed

    def give_up(self) -> None:
        """Give the get up. It is done at once, or when the copies under way have ended."""
        with self._store.lock:
            self._left = {}
            self._store.drop(self)
            if self._store.end_search(self):
                self.found = False


class Store(Mover[Buffer]):
    """Records of an engine in tiers, the fastest first: `put`, `get` and `lookup` by key, and `poll` in slack.

        store = Store([HostTier(...), DiskTier(...)], "cuda:0")
        put = store.put(key, [(address, size_bytes), ...])      when it is done the spans may be written again
        get = store.get(key, [(address, size_bytes), ...])      when it is done and found, the spans have the bytes
        put = store.put(keys, [(address, size_bytes), ...])     several records, one behind the other in the spans

    Keys have 32 bytes, as those of a `KeyChain`. Each tier takes what is put when it has room, the oldest first; of more than
    1,024 puts that wait for one, the oldest is given up. What one tier gives is copied to those that lack it when the get is
    done, a record at a time. `store.worth`, if set, is asked by a tier's name whether it is worth it to store a record there;
    not of tiers that other engines load from.
    Threads may share a store: every operation but `lookup` and `stats` takes its lock, behind which signal handlers wait, as
    behind a pool's (`vmmkv.memory.transaction`). The caller closes the tiers, after the store.
    Cost: opening the tiers.
    Raises: ValueError for no tier, or tiers with records of different sizes; as `Tier.open`; DriverUnavailable.
    """

    def __init__(self, tiers: Sequence[Tier], device: "str | torch.device" = "cpu") -> None:
        self._driver: Final = open_driver(device)
        self.lock: Final = TransactionLock("store", "puts and gets")
        super().__init__(tiers, BufferCopier(self._driver))
        for tier in tiers:
            tier.open(self._driver.device)

    def put(
        self,
        key: bytes | Sequence[bytes],
        record: Spans | Buffer,
        *,
        timeout_s: float = math.inf,
        written: Fence | None = None,
    ) -> Put:
        """Store a record, or several, in the tiers that lack it, in `poll`. Its bytes must not change until the put is done.

        They are read behind `written`, a `fence` that several puts may share; by default behind the work that is launched now
        on the current stream. `timeout_s`: how long to wait for tiers that have no room.
        Raises: ValueError for a key or a record of another size.
        """
        checked = self._checked(key, record)
        with self.lock:
            tiers = self.tiers_worth_it()
            put = Put(self, tiers, *checked, written or self._driver.fence(), time.monotonic() + timeout_s)
            self.queue(put, tiers)
            return put

    def get(
        self, key: bytes | Sequence[bytes], record: Spans | Buffer, *, timeout_s: float = math.inf, free: Fence | None = None
    ) -> Get:
        """Load a record, or several, in `poll`. Nothing that is launched later may use its bytes until the get is done.

        They are written behind `free`, a `fence` that several gets may share; by default behind the work that is launched now
        on the current stream. `timeout_s`: how long to wait for tiers. Where one misses a record that it was thought to have,
        the others are asked. Of several records all are found, or none.
        Raises: ValueError for a key or a record of another size.
        """
        checked = self._checked(key, record)
        with self.lock:
            get = Get(self, *checked, free or self._driver.fence(), time.monotonic() + timeout_s)
            self.search(get)
            return get

    def fence(self) -> Fence:
        """A fence behind the work that is launched now on the current stream, for many puts and gets at once."""
        with self.lock:
            return self._driver.fence()

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
            self.drop_promotions()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, key: bytes | Sequence[bytes], record: Spans | Buffer) -> tuple[Sequence[bytes], Buffer]:
        keys = [key] if isinstance(key, bytes) else key
        for each in keys:
            if not isinstance(each, bytes) or len(each) != KEY_BYTES:
                raise ValueError(f"key={each!r}: a key is {KEY_BYTES} bytes, as KeyChain gives them")
        if len(set(keys)) < len(keys):
            raise ValueError(f"a key of these {len(keys)} is there twice: records that are stored together differ")
        buffer = _SpanBuffer(record) if isinstance(record, Sequence) else record
        if (size_bytes := buffer.size_bytes) != self.record_bytes * len(keys) or not keys:
            count = f" for {len(keys)} records" if len(keys) != 1 else ""
            raise ValueError(
                f"spans of {size_bytes} bytes{count}: a record of this store has {self.record_bytes}; make its tiers with "
                f"record_bytes={size_bytes // max(1, len(keys))}, or fill the records up"
            )
        return keys, buffer
