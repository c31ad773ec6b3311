"""Mover: records on their way between the buffers of an engine and tiers. `Store` is one, and a prefix cache has one.

    Source   records to store, in each tier when it has room     ──copied──> tiers
    Search   what is looked up, in tiers that may have to ask    ──> Load
    Load     records that tiers load, in order                   ──copied──> buffer

Nothing waits: `poll` goes on with what is queued, in turns, for as long as it is given. An error of a tier is a miss. A
`Copier` knows what a buffer is, and copies between it and the memory of tiers.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from vmmkv.driver.base import DONE, Fence, retried
from vmmkv.tier import ListenedTier, Refusal, Tier, TierStats, Transfer
from vmmkv.tiers.threaded import missed

T = TypeVar("T")
U = TypeVar("U")
B = TypeVar("B")
BufferT = TypeVar("BufferT", contravariant=True)

_MOST_AHEAD: Final = 64
"""Loads whose records are requested at once, before any can be copied."""

MOST_QUEUED: Final = 1024
"""Sources that wait to be stored in a tier. Beyond that the oldest is dropped."""

MOST_KEYS: Final = 64
"""Keys of a source that are hashed, or looked up to be stored, between two looks at the clock."""


class Run(NamedTuple):
    """Bytes that one copy moves: neighbours in a buffer and in the memory of a tier."""

    offset_bytes: int
    """Offset of the first byte in the buffer."""
    address: int
    """Address of the first byte in the memory of the tier."""
    size_bytes: int


class Copier(Protocol[BufferT]):
    """Copies between the buffers of an engine and the memory of tiers."""

    def has_room(self, *, is_load: bool) -> bool:
        """May copies from or into another buffer be launched now?"""

    def copy(self, buffer: BufferT, runs: Sequence[Run], *, is_load: bool) -> Fence:
        """Launch copies into a buffer, or out of it. The fence passes when they have ended."""

    def fence(self, *, is_load: bool) -> Fence:
        """A fence behind all copies that were launched in a direction."""


class Portion(NamedTuple, Generic[B]):
    """A buffer with records of a source that follow each other."""

    buffer: B
    keys: Sequence[bytes]
    announce: Callable[[list[int]], object] = lambda numbers: None
    """Callback for the numbers of the records that the tier is about to get."""


class Source(Generic[B]):
    """Records to store, as far as they are there when their turn comes. Each tier gets them at its own pace."""

    deadline_s = math.inf
    """Time of time.monotonic() from which on it is not worth storing."""
    is_chain = False
    """Is each record of use only with all records before it?"""
    keys: Sequence[bytes] = ()
    """Keys in the order of their use; known when the source is `prepared`."""

    def __init__(self) -> None:
        self.num_under_way = 0
        """Queues that the source is in, and copies of its bytes."""

    def prepared(self) -> Iterator[bool]:
        """Wait until the bytes are written and the keys known. Yields after each piece of work: may one more follow?"""
        return iter(())

    def portions(self, tier: Tier, has: set[bytes]) -> Iterator[Portion[B] | None]:
        """Portions for a tier that `has` some records, the last first. One is given again while the tier lacks records of it.

        None: not now. Each step has a cost that does not grow with the source.
        """
        raise NotImplementedError

    def answered(self, tier: Tier, answer: Refusal) -> None:
        """Hear that a tier has a record of the source or is given it, or lends no memory for it."""

    def copied(self, move: "Move") -> None:
        """Hear that a record of the source is in the memory that a tier has lent."""
        self.answered(move.tier, Refusal.THERE)


class Load(Generic[B]):
    """Records that are loaded into a buffer: one after the other, each from a tier that is thought to have it."""

    deadline_s = math.inf
    is_promoted = False
    """Are its records brought to other tiers, when they are in the buffer?"""

    def __init__(self, buffer: B, sources: list[tuple[Tier, bytes]]) -> None:
        self.buffer = buffer
        self.sources = sources
        """The tier and the key of each record."""
        self.num_asked = 0
        """Sources that a load was begun from."""
        self.coming: list[Move] = []
        """Records whose loads were begun, and that are not being copied yet."""
        self.num_under_way = 0
        """Copies that were launched and have not ended."""
        self.missed = set[bytes]()
        """Keys of records that their tier had not, when it was asked."""
        self.failed = False

    def promote(self, move: "Move") -> None:
        """Bring a record to other tiers, which is in the buffer, and still in the memory that a tier has lent."""

    def ended(self) -> None:
        """Hear that nothing of the load is under way any more. It may have failed."""


class Search(Protocol):
    """Finds out what tiers have, in bounded pieces of work."""

    def advance(self, may_go_on: Callable[[], bool]) -> bool:
        """Do one piece, and more while `may_go_on` says so. Is there anything left to find out?"""


class Move(NamedTuple):
    """A record that is copied, and its offset in a buffer."""

    offset_bytes: int
    tier: Tier
    transfer: Transfer


@dataclass(eq=False, slots=True)
class _Launched(Generic[B]):
    """Copies between a buffer and the memory of tiers that were launched together."""

    fence: Fence
    moves: list[Move]
    of: Source[B] | Load[B]
    failed: bool


class Mover(Generic[B]):
    """Stores sources in tiers, and loads records of theirs into buffers: the fastest tier first."""

    def __init__(self, tiers: Sequence[Tier], copier: Copier[B]) -> None:
        sizes = {tier.record_bytes: tier.name for tier in tiers}
        if len(sizes) != 1:
            given = " and ".join(f"{name} with record_bytes={size}" for size, name in sizes.items()) or "none"
            raise ValueError(f"tiers: {given}; give one at least, and all with records of one size")
        (self.record_bytes,) = sizes
        self.tiers: Final = tuple(tiers)
        self._are_shared = [not isinstance(tier, ListenedTier) for tier in tiers]
        """Do other engines load from it? For each tier."""
        self.worth: Callable[[str], bool] = lambda tier: True
        self.errors = 0
        """Calls of a tier that raised."""
        self._copier = copier
        self._stores: list[dict[Source[B], Iterator[bool]]] = [{} for _ in tiers]
        """Sources to store, by tier, the oldest first: see `_storing`."""
        self._searches: dict[Search, None] = {}
        self._loads: dict[Load[B], None] = {}
        """Loads that wait for records, in order."""
        self._copies: deque[_Launched[B]] = deque()
        """Copies under way, the oldest first."""
        self._promotions: deque[tuple[Load[B], Move]] = deque()
        """Records that are in their buffers, and that other tiers are to have too, in memory that a tier has lent."""
        self._turns = [self._search, self._load, self._store, self._promote]
        """Kinds of work of the next poll, in order. They change places, so that none takes the time of all polls."""
        self._end_ns = 0.0
        """The end of this poll's time, of time.perf_counter_ns."""
        self._has_worked = False
        """Has this poll done a piece of work? It does one at least."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Has any tier these records, each? A get can miss all the same. None while a tier finds that out: ask again.

        It is a use of them, and the last of them is evicted first.
        """
        answers = [self.lookup_in(tier, keys) for tier in self.tiers]
        known = [answer for answer in answers if answer is not None]
        found = [any(has) for has in zip(*known, strict=False)] if known else [False] * len(keys)
        return found if len(known) == len(answers) or all(found) else None

    def lookup_in(self, tier: Tier, keys: Sequence[bytes]) -> list[bool] | None:
        """Has a tier these records, each? None while it finds that out."""
        return self.ask([False] * len(keys), tier.lookup, keys)

    def ask(self, otherwise: U, call: Callable[..., T], *arguments: object) -> T | U:
        """A tier's answer; `otherwise` if it raises anything: a tier that fails has no record, and takes none."""
        try:
            return call(*arguments)
        except Exception:
            self.errors += 1
            return otherwise

    def stats(self) -> tuple[TierStats, ...]:
        """The statistics of each tier, without those that raise."""
        found = (self.ask(None, tier.stats) for tier in self.tiers)
        return tuple(each for each in found if isinstance(each, TierStats))

    # what is queued

    def tiers_worth_it(self) -> list[Tier]:
        """The tiers in which it is worth it to store: those that other engines may load from, and of others those asked for."""
        return [
            tier for tier, is_shared in zip(self.tiers, self._are_shared, strict=True) if is_shared or self.worth(tier.name)
        ]

    def queue(self, source: Source[B], tiers: Sequence[Tier], *, replaced: Source[B] | None = None) -> None:
        """Store a source in some tiers when there is time; `replaced`, of which it has all, no more where that is not begun."""
        for tier, stores in zip(self.tiers, self._stores, strict=True):
            if tier not in tiers:
                continue
            stores[source] = self._storing(tier, source)
            source.num_under_way += 1
            first = next(iter(stores))
            if replaced in stores and replaced is not first:
                self._forget(stores, replaced)
            if len(stores) > MOST_QUEUED:
                self._forget(stores, first)

    def search(self, search: Search) -> None:
        """Find out more when there is time."""
        self._searches[search] = None

    def load(self, load: Load[B]) -> None:
        """Load records when there is time."""
        self._loads[load] = None

    def withdraw(self, source: Source[B]) -> None:
        """Store a source no more. Copies under way go on."""
        for stores in self._stores:
            if source in stores:
                self._forget(stores, source)

    def drop(self, load: Load[B]) -> None:
        """Give a load up. Copies under way go on, and it has failed."""
        load.failed = True
        if load in self._loads:
            self._leave(load)

    def end_search(self, search: Search) -> bool:
        """End a search. Was it under way?"""
        is_under_way = search in self._searches
        self._searches.pop(search, None)
        return is_under_way

    def give_up(self) -> list[Fence]:
        """Give everything up. The fences of the copies under way: when they have passed call `finish`."""
        for load in list(self._loads):
            self.drop(load)
        self._searches.clear()
        for stores in self._stores:
            for source in list(stores):
                self._forget(stores, source)
        return [copy.fence for copy in self._copies]

    def drop_promotions(self) -> None:
        """Bring no more records to other tiers, and give back their memory."""
        while self._promotions:
            _, move = self._promotions.popleft()
            self.ask(None, move.tier.finished, move.transfer)

    @property
    def is_storing(self) -> bool:
        """Is anything queued to be stored?"""
        return any(self._stores)

    @property
    def is_idle(self) -> bool:
        """Is there nothing to go on with?"""
        return not (self.is_storing or self._copies or self._searches or self._loads or self._promotions)

    @property
    def is_kept(self) -> bool:
        """Have all tiers written what they were given, or failed to? Does not wait."""
        return all(self.ask(True, tier.flush, 0.0) for tier in self.tiers)

    def transfers_under_way(self) -> Iterator[Transfer]:
        """Transfers whose memory tiers have lent, and that will be finished or dropped."""
        for moves in (*(copy.moves for copy in self._copies), *(load.coming for load in self._loads)):
            yield from (move.transfer for move in moves)
        yield from (move.transfer for _, move in self._promotions)

    def oldest_fence(self) -> Fence | None:
        """Fence of the oldest copies; None if none are under way."""
        return self._copies[0].fence if self._copies else None

    # in slack

    def poll(self, budget_us: float = math.inf) -> bool:
        """Go on for about `budget_us`, in turns; do one piece of work at least, if there is any. False if there is none left.

        Cost: for each piece the launch of some copies, and a fence. Does not block.
        """
        self._end_ns = time.perf_counter_ns() + min(budget_us, 1e12) * 1e3
        self._has_worked = False
        self.finish()
        for work in self._turns:
            work()
        self._turns.append(self._turns.pop(0))
        self.finish()
        return not self.is_idle

    def flush_by(
        self,
        lock: AbstractContextManager[object],
        poll: Callable[[], bool],
        oldest_fence: Callable[[], Fence | None],
        timeout_s: float,
    ) -> bool:
        """Wait until `poll` has nothing left to do, and tiers keep what they were given; False if the time is over first.

        `poll` takes the owner's lock itself; `oldest_fence` is called with it. Tiers are asked under it, and do not wait: what
        a signal handler raises within `ask` would pass for a tier's error.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            is_more = poll()
            with lock:
                fence = oldest_fence()
                if not is_more and self.is_kept:
                    return True
            if time.monotonic() > until_s:
                return False
            if fence is None:
                time.sleep(1e-4)  # a tier is at work
            else:
                fence.wait()

    def finish(self) -> None:
        """Give back the memory of tiers behind copies that have ended."""
        for copy in [copy for copy in self._copies if copy.fence.done()]:
            self._copies.remove(copy)
            if isinstance(copy.of, Load):
                self._finish_load(copy, copy.of)
            else:
                self._finish_source(copy, copy.of)

    def _finish_load(self, copy: _Launched[B], load: Load[B]) -> None:
        for move in copy.moves:
            if load.is_promoted and not copy.failed:
                self._promotions.append((load, move))
            else:
                self.ask(None, move.tier.drop if copy.failed else move.tier.finished, move.transfer)
        load.num_under_way -= 1
        load.failed |= copy.failed
        self._end_if_over(load)

    def _finish_source(self, copy: _Launched[B], source: Source[B]) -> None:
        try:
            for move in copy.moves if not copy.failed else ():
                source.copied(move)
        finally:
            for move in copy.moves:
                self.ask(None, move.tier.drop if copy.failed else move.tier.finished, move.transfer)
            source.num_under_way -= 1

    @property
    def _is_over(self) -> bool:
        """Is the time of this poll over?"""
        return time.perf_counter_ns() > self._end_ns

    def _may_copy(self, *, is_load: bool) -> bool:
        """Is there time left, and room to copy?"""
        return not (self._has_worked and self._is_over) and self._copier.has_room(is_load=is_load)

    def _search(self) -> None:
        """Find out what tiers have, for one search after the other."""
        for search in list(self._searches):
            if self._has_worked and self._is_over:
                break
            self._has_worked = True
            is_more = False
            try:
                is_more = search.advance(lambda: not self._is_over)
            finally:
                if not is_more:
                    self.end_search(search)

    # loading

    def _load(self) -> None:
        """Ask for records, in order, and copy those that have come: all of a load together, unless a tier lends no more."""
        full: set[Tier] = set()
        for load in list(itertools.islice(self._loads, _MOST_AHEAD)):
            if not self._may_copy(is_load=True):
                break
            lends = True
            while lends and not load.failed and load.num_asked < len(load.sources):
                tier, key = load.sources[load.num_asked]
                transfer = None if tier in full else self.ask(missed(key), tier.load, key)
                if transfer is None:
                    full.add(tier)
                    lends = False
                else:
                    load.coming.append(Move(load.num_asked * self.record_bytes, tier, transfer))
                    load.num_asked += 1
            come = [move for move in load.coming if move.transfer.ended]  # first: a thread may end one while this looks
            load.missed.update(move.transfer.key for move in load.coming if move.transfer.missed)
            if load.failed or load.missed or load.deadline_s < time.monotonic():
                self.drop(load)
                continue
            if not come or (lends and len(come) < len(load.coming)):
                continue
            load.coming = [move for move in load.coming if move not in come]
            if lends and not load.coming:
                del self._loads[load]
            self._launch(load.buffer, come, load)

    def _leave(self, load: Load[B]) -> None:
        """Stop loading."""
        del self._loads[load]
        for move in load.coming:
            self.ask(None, move.tier.drop, move.transfer)
        load.coming = []
        self._end_if_over(load)

    def _end_if_over(self, load: Load[B]) -> None:
        if load not in self._loads and not load.num_under_way:
            load.ended()

    def _promote(self) -> None:
        """Bring records that were loaded to other tiers, one after the other."""
        while self._promotions and not (self._has_worked and self._is_over):
            self._has_worked = True
            load, move = self._promotions.popleft()
            try:
                load.promote(move)
            finally:
                self.ask(None, move.tier.finished, move.transfer)

    # storing

    def _store(self) -> None:
        """Store what is queued, in each tier at its own pace."""
        for stores in self._stores:
            while stores and self._may_copy(is_load=False):
                source, storing = next(iter(stores.items()))
                may_go_on = next(storing, None) if source.deadline_s >= time.monotonic() else None
                self._has_worked = True
                if may_go_on is None:
                    self._forget(stores, source)
                elif not may_go_on:
                    break

    def _forget(self, stores: dict[Source[B], Iterator[bool]], source: Source[B]) -> None:
        del stores[source]
        source.num_under_way -= 1

    def _storing(self, tier: Tier, source: Source[B]) -> Iterator[bool]:
        """Store what there is of a source and the tier lacks, the end first: so it is evicted first.

        The host waits until it is written. Copies that wait on the device would hold windows meanwhile, and may hold up copies
        of other streams.
        Yields after each piece of work, of a cost that does not grow with the source: may another one follow in this poll? An
        error ends it.
        """
        yield from source.prepared()
        has = yield from self._held_of(tier, source.keys)
        if has is None:
            return
        if has:
            source.answered(tier, Refusal.THERE)
        stats = self.ask(None, tier.stats) if source.is_chain else None
        if stats is not None and stats.budget_bytes:
            has.update(source.keys[stats.budget_bytes // self.record_bytes :])  # storing that would evict what is before it
        num_held = len(has)
        for portion in source.portions(tier, has):
            if portion is None:
                yield False
                continue
            moves: list[Move] = []
            has_room = True
            for number, key in reversed([*enumerate(portion.keys)]):
                if key not in has and has_room:
                    answer = self.ask(None, tier.store, key)
                    if isinstance(answer, Transfer):
                        moves.append(Move(number * self.record_bytes, tier, answer))
                    elif answer is not None:
                        source.answered(tier, answer)
                    has_room = answer not in (Refusal.NO_ROOM, Refusal.NOT_NOW)
                    has.update([key] if has_room else [])
            if moves:
                self._launch(portion.buffer, moves, source, portion.announce)
            if moves or not has_room or self._is_over:
                yield has_room
        if 0 < num_held < len(has):
            yield from self._held_of(tier, source.keys)  # what was stored is behind what it had, and is evicted before it

    def _held_of(self, tier: Tier, keys: Sequence[bytes]) -> Generator[bool, None, set[bytes] | None]:
        """Keys that a tier has, looked up from the end: so that is evicted first. Yields as `_storing`; None if it fails."""
        has: set[bytes] = set()
        for end in range(len(keys), 0, -MOST_KEYS):
            some = keys[max(0, end - MOST_KEYS) : end]
            while (found := self.ask((), tier.lookup, some)) is None:
                yield False
            if not found:
                return None
            has.update(itertools.compress(some, found))
            if end > MOST_KEYS:
                yield True
        return has

    # both

    def _launch(
        self,
        buffer: B,
        moves: list[Move],
        of: Source[B] | Load[B],
        announce: Callable[[list[int]], object] = lambda numbers: None,
    ) -> None:
        """Copy records between a buffer and tiers; into it for a load. If this raises, memory of tiers goes back behind it."""
        self._has_worked = True
        copy, is_load = _Launched(DONE, moves, of, failed=True), isinstance(of, Load)
        of.num_under_way += 1
        try:
            announce([move.offset_bytes // self.record_bytes for move in moves])
            copy.fence = self._copier.copy(buffer, _runs(moves, self.record_bytes), is_load=is_load)
            copy.failed = False
        except BaseException:
            copy.fence = retried(lambda: self._copier.fence(is_load=is_load))  # some may have been launched
            raise
        finally:
            self._copies.append(copy)


def _runs(moves: list[Move], record_bytes: int) -> list[Run]:
    """Runs that one copy each can move: records that are neighbours in the buffer and in the memory of their tier."""

    def begins(numbered: tuple[int, Move]) -> tuple[Tier, int, int]:
        number, (offset, tier, transfer) = numbered
        return tier, offset - number * record_bytes, transfer.address - number * record_bytes

    grouped = itertools.groupby(enumerate(sorted(moves, key=attrgetter("offset_bytes"))), begins)
    runs = [[move for _, move in run] for _, run in grouped]
    return [Run(run[0].offset_bytes, run[0].transfer.address, len(run) * record_bytes) for run in runs]
