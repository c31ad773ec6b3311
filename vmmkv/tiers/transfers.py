"""Copies between the extents of a prefix tree and tiers, on two streams, one in each direction.

    insert ──queued──> stored in slack ──> tiers                 evicting drops extents: tiers have their rows already
    fetch ──> fresh extents ──loaded──> tree ──> attach aliases it        one load for all that wait for it

Rows are stored when they are inserted, in slack, and not when they are evicted: then making room never waits for a copy. A
store goes along the whole path from the root. So each tier has all of a path that is used again, and evicts its end first.

An extent is mapped in a window while it is copied. The window holds it: nothing is given back to the pool before its copy has
ended. The caller holds the pool's lock. `vmmkv.tiers.mover` has the queues and the copies; `fetch_search` finds what to load.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vmmkv.driver.base import Driver, Fence
from vmmkv.errors import OutOfPages
from vmmkv.memory.extents import Extent
from vmmkv.memory.sharing import Windows
from vmmkv.memory.slots import Slots
from vmmkv.prefix.index import IndexFollower, Placed, PrefixIndex, end_token
from vmmkv.prefix.radix_tree import Lookup, Node, Piece, Tokens, piece_place
from vmmkv.prefix.tiered import Fetch, PrefixListener
from vmmkv.tier import ListenedTier, Tier, TierStats
from vmmkv.tiers.fetch_search import FetchSearch, needed, reach
from vmmkv.tiers.keys import PageKeys
from vmmkv.tiers.mover import MOST_KEYS, Load, Mover, Portion, Run, Source
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.units import PAGE_BYTES

_SPARE_WINDOWS: Final = 16
"""Windows that stay free for attaching, which copies through them too and must not wait."""

_LOAD_WINDOWS: Final = 16
"""Windows that stores leave for loads: requests wait for these."""

PIECES_AT_ONCE: Final = 4
"""Multiple of `MOST_KEYS` of keys that are hashed when a fetch begins: some 0.7 ms. Polls hash the others."""


class WindowCopier:
    """Copies between extents and tiers, through windows."""

    def __init__(self, driver: Driver, windows: Windows) -> None:
        self._driver, self._windows = driver, windows
        self._load_stream = driver.new_stream()
        self._store_stream = driver.new_stream()
        """Stream of stores, another than that of loads: the link carries both directions at once."""

    def has_room(self, *, is_load: bool) -> bool:
        """Is a window free, besides those that are left for others?"""
        return self._windows.num_free > (_SPARE_WINDOWS if is_load else _SPARE_WINDOWS + _LOAD_WINDOWS)

    def copy(self, buffer: Extent, runs: Sequence[Run], *, is_load: bool) -> Fence:
        """Launch copies into an extent, or out of it, through a window. Returns a fence behind them. See Copier.copy."""

        def copy_all(address: int) -> None:
            for run in runs:
                ends = address + run.offset_bytes, run.address
                target, source = ends if is_load else reversed(ends)
                self._driver.copy(target, source, run.size_bytes)

        with self._driver.on(self._load_stream if is_load else self._store_stream):
            return self._windows.run(buffer, copy_all)

    def fence(self, *, is_load: bool) -> Fence:
        """A fence behind all loads or all stores launched so far."""
        with self._driver.on(self._load_stream if is_load else self._store_stream):
            return self._driver.fence()


class _Part(Load[Extent]):
    """An extent of a fetch that is being loaded, from one record for each page."""

    def __init__(self, transfers: "Transfers", fetch: Fetch, place: tuple[int, int], extent: Extent) -> None:
        search = transfers.fetches[fetch]
        self.group, self.page = place
        sources = search.tiers_of(self.group, range(self.page, self.page + extent.num_pages))
        super().__init__(extent, [(transfers.mover.tiers[number], key) for number, key in sources])
        self.fetch, self.loaded = fetch, False
        self._transfers = transfers

    @property
    def pages(self) -> range:
        """Pages of a slot at which the extent will be mapped."""
        return range(self.page, self.page + self.buffer.num_pages)

    def ended(self) -> None:
        """Tell the transfers that nothing of this part is under way any more."""
        self._transfers.part_ended(self)


class TreePath(Source[Extent]):
    """The tokens of a prompt, all in the tree at some time, whose pages are stored."""

    def __init__(self, transfers: "Transfers", chain: PageKeys, number: int) -> None:
        super().__init__()
        self.chain: Final = chain
        self.keys = chain.in_order
        self.is_chain = all(group.window is None for group in chain.layout.groups)
        self._transfers, self._number = transfers, number

    def prepared(self) -> Iterator[bool]:
        """Wait until the rows are written, then hash the keys. See Source.prepared."""
        while not self._transfers.is_written(self._number):
            yield False
        while len(self.chain.hash_some(MOST_KEYS)) == MOST_KEYS:
            yield True

    def portions(self, tier: Tier, has: set[bytes]) -> Iterator[Portion[Extent] | None]:
        """Extents of the path in the tree now, the last first, for a tier that `has` some records. See Source.portions."""
        described = self._transfers.described(tier, self.chain)
        described(None)
        lookup: Lookup[Placed] = Lookup(self.chain.namespace, self.chain.tokens)
        done: tuple[float, float] = (math.inf, 0)
        while len(has) < len(self.keys) and (piece := self._transfers.index.tree.last_piece(lookup, done)) is not None:
            placed = piece.value
            if not self._transfers.is_written_in(placed.extent):  # another sequence has brought it since
                yield None
                continue
            keys = [] if placed.first_token else self.chain.by_group[piece.group][placed.page : placed.end_page]
            try:
                if not has.issuperset(keys) and not self._transfers.index.import_extents([placed.extent]):
                    continue  # what an earlier engine left is lost, and in the tree no more
            except OutOfPages:
                return  # the process may open no more files: it is stored when a prompt has attached it
            yield Portion(placed.extent, keys, functools.partial(_announce, described, piece))
            if has.issuperset(keys):
                done = piece_place(piece)


def follow_tree(cache: Slots, index: PrefixIndex, windows: Windows, tiers: Sequence[Tier], fingerprint: str) -> "Transfers":
    """Store in tiers what is inserted in a prefix tree from now on."""
    transfers = Transfers(cache, index, windows, tiers, fingerprint)
    index.followers.append(transfers)
    return transfers


class Transfers(IndexFollower):
    """The stores and loads of one prefix cache."""

    def __init__(self, cache: Slots, index: PrefixIndex, windows: Windows, tiers: Sequence[Tier], fingerprint: str) -> None:
        self.cache: Final = cache
        self.index: Final = index
        self.keys: Final = PageKeys(cache.layout, fingerprint)
        self.mover: Final = Mover(tiers, WindowCopier(cache.pool.driver, windows))
        self.fetched_tokens = 0
        self._windows = windows
        self._listener: PrefixListener | None = None
        self._newest: dict[int, tuple[TreePath, list[Tier]]] = {}
        """Path and tiers of a running sequence, by slot: its inserted tokens with their hashes, so none is hashed twice."""
        self.fetches: dict[Fetch, FetchSearch] = {}
        self._parts: dict[Fetch, list[_Part]] = {}
        """Extents that are loaded for a fetch."""
        self._num_left: dict[Fetch, int] = {}
        """Number of a fetch's parts that have still to come."""
        self._loading: dict[bytes, Fetch] = {}
        """Fetch that loads a record, by the record's key."""
        self._num_queued = self._num_written = 0
        """Paths that were ever queued; so many of them, the oldest, have been written by the device."""
        self._writing: tuple[int, Fence] | None = None
        """Number of a path, and the fence behind which it and all paths before it are written. None if nothing waits for it."""
        self._unwritten: dict[Extent, int] = {}
        """Extents whose rows may be on their way, as copies are: the number of the path with which they are written."""

    # storing

    def _queue(
        self, namespace: Hashable, tokens: npt.NDArray[np.int32], slot: int | None = None, extents: Iterable[Extent] = ()
    ) -> None:
        """Store inserted tokens, of the sequence in `slot` if it runs, when there is time.

        Cost: they are compared with those that were inserted before for the slot.
        """
        before, tiers = (None, None) if slot is None else self._newest.get(slot, (None, None))
        chain = None if before is None or before.chain.namespace != namespace else before.chain.grown(tokens)
        if chain is None or tiers is None:
            before, chain, tiers = None, self.keys.of(tokens, namespace), self.mover.tiers_worth_it()
        if not self.mover.is_storing:
            self._unwritten.clear()  # what is queued from now on waits for all of them
        self._num_queued += 1
        self._unwritten.update(dict.fromkeys(extents, self._num_queued))
        path = TreePath(self, chain, self._num_queued)
        if slot is not None:
            self._newest[slot] = path, tiers
        self.mover.queue(path, tiers, replaced=before)

    def is_written(self, number: int) -> bool:
        """Has the device written the rows of the path with this number, and of those before? If not, ask again."""
        if self._writing is None and self._num_written < self._num_queued:
            self._writing = self._num_queued, self.cache.memory.fence()
        if self._writing is not None and self._writing[1].done():
            self._num_written, self._writing = self._writing[0], None
            self._unwritten = {extent: number for extent, number in self._unwritten.items() if number > self._num_written}
        return number <= self._num_written

    def is_written_in(self, extent: Extent) -> bool:
        """Has the device written the rows in an extent? If not, ask again."""
        return self.is_written(self._unwritten.get(extent, 0))

    def described(self, tier: Tier, chain: PageKeys) -> Callable[[Sequence[tuple[int, int]] | None], object]:
        """Tells the listener which records of a path a tier is about to get: see PrefixListener.described."""
        if self._listener is None or not isinstance(tier, ListenedTier):
            return lambda places: None
        return functools.partial(self._listener.described, tier, chain)

    def extended(self, namespace: Hashable, tokens: Tokens, slot: int, extents: list[Extent]) -> None:
        """Store the tokens of a running sequence when there is time."""
        self._queue(namespace, np.asarray(tokens), slot, extents)

    def left(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        self._newest.pop(slot, None)

    # what the prefix cache asks

    def listen(self, listener: PrefixListener) -> None:
        """Tell a listener which records the tiers have, of those that know when they go. See PrefixCache.listen."""
        self._listener = listener
        for tier in self.mover.tiers:
            if isinstance(tier, ListenedTier):
                tier.listen(functools.partial(listener.held, tier.name))

    def store_if(self, worth: Callable[[str], bool]) -> None:
        """Ask, by a tier's name, whether to store a path there. See PrefixCache.store_if."""
        self.mover.worth = worth

    def stats(self) -> tuple[TierStats, ...]:
        """Counts of the tiers that answer."""
        return self.mover.stats()

    @property
    def errors(self) -> int:
        """Calls of tiers that raised."""
        return self.mover.errors

    @property
    def is_idle(self) -> bool:
        """Is there nothing to go on with?"""
        return self.mover.is_idle

    def flush(self, poll: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `poll` has nothing left to do, and tiers keep what they were given; False if the time is over first."""
        return self.mover.flush_by(self.cache.pool.lock, poll, self.oldest_fence, timeout_s)

    def poll(self, budget_us: float) -> None:
        """Go on with stores and loads for about `budget_us`, in turns; do one piece of work at least, if there is any."""
        began_ns = time.perf_counter_ns()
        if self._windows.num_free <= _SPARE_WINDOWS + _LOAD_WINDOWS:
            self.cache.collect(budget_us)
        self.mover.poll(budget_us - (time.perf_counter_ns() - began_ns) / 1e3)

    def oldest_fence(self) -> Fence | None:
        """Fence of the oldest copies, or else of the work that writes what is to be stored; None if nothing is waited for."""
        return self.mover.oldest_fence() or (None if self._writing is None else self._writing[1])

    def held(self) -> Counter[Extent]:
        """The extents that are being loaded: each is held and used once."""
        return Counter(part.buffer for parts in self._parts.values() for part in parts)

    def locks(self) -> Counter[Node[Placed]]:
        """Locks that fetches hold, counted by node."""
        return Counter(search.node for search in self.fetches.values() if search.node is not None)

    def give_up(self) -> list[Fence]:
        """Give all stores and fetches up. The fences of the copies under way: when they have passed call `finish`."""
        for fetch in list(self.fetches):
            self._drop(fetch)
        return self.mover.give_up()

    def finish(self) -> None:
        """Give back the memory of tiers behind copies that have ended."""
        self.mover.finish()

    # loading

    def fetch(
        self,
        namespace: Hashable,
        tokens: npt.NDArray[np.int32],
        known: int,
        least_tokens: int,
        room_pages: int,
        worth: Callable[[Fetch], bool] | None,
    ) -> Fetch | None:
        """Load what is needed to attach `least_tokens` more than are `known`. See PrefixCache.fetch."""
        most = [bytearray(b"\1" * (len(tokens) * group.row_bytes // PAGE_BYTES)) for group in self.cache.layout.groups]
        num_tokens = reach(self.cache.layout, most, len(tokens) - 1)
        if num_tokens - known < least_tokens:
            return None
        fetch = Fetch(self._wait_no_longer, known=known, num_tokens=num_tokens)
        search = self.fetches[fetch] = FetchSearch(
            fetch,
            self.keys.of(tokens, namespace),
            self.index,
            self.mover,
            self._loading,
            least_tokens=least_tokens,
            worth=worth,
            ended=lambda: self._begin(fetch, room_pages),
        )
        if search.advance(iter([True] * (PIECES_AT_ONCE - 1) + [False]).__next__):
            self.mover.search(search)
        if search.other is not None:
            search.other.waiting += 1
        return search.other if fetch.done else fetch

    def _wait_no_longer(self, fetch: Fetch) -> None:
        with self.cache.pool.lock:
            fetch.waiting -= 1
            if not fetch.waiting and not fetch.done:
                self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        """Give a fetch up. Copies under way go on, into extents that are free when these end."""
        for part in self._parts.get(fetch, [])[:]:
            self.mover.drop(part)
        if not fetch.done:
            self._conclude(fetch)

    def _begin(self, fetch: Fetch, room_pages: int) -> None:
        """Load what a search has found. Where another fetch loads it, another call of `fetch` gets that."""
        is_loading = False
        try:
            is_loading = self._take(fetch, room_pages)
        finally:
            if not is_loading:
                fetch.bytes_by_tier = Counter()
                self._conclude(fetch)

    def _take(self, fetch: Fetch, room_pages: int) -> bool:
        """Take an extent for each place that a search has found. False if there is no room, or no place."""
        search, pool = self.fetches[fetch], self.cache.pool
        counts = Counter(len(pages) for _, pages in search.places)
        if not counts or pool.spare_pages + pool.kept_pages < room_pages:
            return False
        try:
            try:
                extents = pool.acquire_mixed(counts, wait=False)
            except OutOfPages:
                self.cache.collect()  # what the tree can give may be mapped still for a sequence that has ended
                extents = pool.acquire_mixed(counts, wait=not pool.used_bytes)  # if nothing runs, fences pass soon
        except OutOfPages:
            return False
        parts = self._parts[fetch] = []
        for index, pages in search.places:
            extent = extents[len(pages)].pop()
            extent.tenant, extent.zeroed = None, False  # until it is loaded, and if it never is, its bytes are some other's
            part = _Part(self, fetch, (index, pages.start), extent)
            parts.append(part)
            self.mover.load(part)
            self._loading.update(dict.fromkeys((key for _, key in part.sources), fetch))
        self._num_left[fetch] = len(parts)
        return True

    def part_ended(self, part: _Part) -> None:
        """Count an extent of a fetch that has ended; the fetch ends with its last one."""
        fetch = part.fetch
        if fetch.done:
            return
        part.loaded = not part.failed
        if part.loaded:
            for tier, _ in part.sources:
                fetch.loaded_bytes[tier.name] += RECORD_BYTES
        self._num_left[fetch] -= 1
        if not self._num_left[fetch]:
            self._conclude(fetch)

    def _conclude(self, fetch: Fetch) -> None:
        """Put what was loaded into the tree, as far as it can be attached, and give the rest back."""
        layout, pool = self.cache.layout, self.cache.pool
        search, parts = self.fetches.pop(fetch), self._parts.pop(fetch, [])
        self._num_left.pop(fetch, None)
        self.mover.end_search(search)
        have = search.on_device()
        for part in parts:
            if part.loaded:
                have[part.group][part.page : part.pages.stop] = b"\1" * len(part.pages)
        num_tokens = reach(layout, have, len(search.chain.tokens) - 1)
        try:
            if num_tokens > fetch.known_tokens:
                pieces = [
                    Piece(end_token(layout.groups[part.group], part.pages.stop), Placed(part.page, part.buffer), part.group)
                    for part in parts
                    if part.loaded and part.page in needed(layout, part.group, num_tokens)
                ]
                if pieces:
                    pieces.sort(key=piece_place)
                    tokens = search.chain.tokens[: pieces[-1].end_token]
                    self.index.add(search.chain.namespace, tokens, pieces)
                    if len(self.mover.tiers) > 1:
                        self._queue(search.chain.namespace, tokens)  # the others get it too
                    self.fetched_tokens += num_tokens - fetch.known_tokens
        finally:
            for part in parts:
                pool.unuse(part.buffer)
                pool.drop(part.buffer)
                for _, key in part.sources:
                    del self._loading[key]
            if search.node is not None:
                self.index.tree.unlock(search.node)
            fetch.num_tokens, fetch.done, fetch.ended_s = max(num_tokens, fetch.known_tokens), True, time.perf_counter()


def _announce(
    described: Callable[[Sequence[tuple[int, int]] | None], object], piece: Piece[Placed], numbers: Sequence[int]
) -> None:
    """Describe some pages of a piece, by their numbers in its extent."""
    described([(piece.group, piece.value.page + number) for number in numbers])
