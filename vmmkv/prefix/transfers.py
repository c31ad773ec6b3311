"""Copies between the extents of a prefix tree and tiers, on two streams, one in each direction.

    insert ──queued──> stored in slack ──> tiers                 evicting drops extents: tiers have their rows already
    fetch ──> fresh extents ──loaded──> tree ──> attach aliases it        one load for all that wait for it

Rows are stored when they are inserted, in slack, and not when they are evicted: then making room never waits for a copy. A
store goes along the whole path from the root. So each tier has all of a path that is used again, and evicts its end first.

An extent is mapped in a window while it is copied. The window holds it: nothing is given back to the pool before its copy has
ended. The caller holds the pool's lock.
"""

import itertools
import math
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vmmkv.cache import KVCache
from vmmkv.driver.base import DONE, Fence
from vmmkv.errors import OutOfPages
from vmmkv.memory.pool import LARGE_PAGES, Extent
from vmmkv.memory.sharing import Windows
from vmmkv.prefix.index import Placed, PrefixIndex, end_token
from vmmkv.prefix.radix_tree import Lookup, Node, Piece, piece_place
from vmmkv.tiers.record import RECORD_BYTES, KeyChain, Keys
from vmmkv.tiers.tier import Tier, TierStats, Transfer, missed
from vmmkv.units import PAGE_BYTES, ceil_div

T = TypeVar("T")

_SPARE_WINDOWS: Final = 16
"""Windows that stay free for attaching, which copies through them too and must not wait."""

_LOAD_WINDOWS: Final = 16
"""Windows that stores leave for loads: stores may have to wait for running work."""

_MOST_AHEAD: Final = 64
"""Extents whose records are requested at once, before any can be copied."""

_MOST_QUEUED: Final = 1024
"""Paths that wait to be stored in a tier. Beyond that the oldest is dropped."""

_MOST_KEYS: Final = 64
"""Keys of a path that are hashed, or looked up, between two looks at the clock."""

_DEVICE, _TIER = 1, 2


@dataclass(eq=False, slots=True)
class _Part:
    """An extent that is being loaded, from one record for each page."""

    fetch: "Fetch"
    group: int
    page: int
    extent: Extent
    sources: list[tuple[Tier, bytes]]
    """The tier and the key of each page."""
    num_asked: int = 0
    """Sources that a load was begun from."""
    coming: list["_Move"] = field(default_factory=list)
    """Records whose loads were begun, and that are not being copied yet."""
    num_copies: int = 0
    """Copies that were launched and have not ended."""
    failed: bool = False
    loaded: bool = False

    @property
    def pages(self) -> range:
        """The pages of a slot that it will be mapped at."""
        return range(self.page, self.page + self.extent.num_pages)


class Fetch:
    """A load of records into the tree, for all that wait for it. Made by `PrefixCache.fetch`, which counts who waits.

    When it is `done`, `attach` finds the loaded rows, up to the first record that was missed.
    """

    def __init__(
        self,
        transfers: "Transfers",
        chain: KeyChain,
        *,
        known: int,
        num_tokens: int,
        least_tokens: int,
        worth: "Callable[[Fetch], bool] | None",
    ) -> None:
        self.num_tokens = num_tokens
        """Tokens that `attach` finds when it is done; an upper bound until then."""
        self.done = False
        self.bytes_by_tier: Counter[str] = Counter()
        """Bytes of its records by the name of the tier that has them. Empty while a tier is asked, and for a fetch of none."""
        self.loaded_bytes: Counter[str] = Counter()
        """The same of the records that were loaded."""
        self.waiting = 1
        """Calls of `PrefixCache.fetch` that returned it, less those of `give_up`."""
        self._transfers = transfers
        self._chain = chain
        self._least_tokens = least_tokens
        self._worth = worth
        self._asked: tuple[Tier, bytes] | None = None
        """The tier that is asked which records it has, and one of the keys."""
        self._have: list[bytearray] = []
        """For each page of each group: _DEVICE, _TIER, or 0 for neither."""
        self.known_tokens = known
        """Tokens that were on the device when it began."""
        self._node: Node[Placed] | None = None
        """The locked node that its extents follow in the tree."""
        self._parts: list[_Part] = []
        self._num_left = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all its records."""
        return self.bytes_by_tier.total()

    def give_up(self) -> None:
        """Wait no longer. A fetch that nothing waits for is dropped, with the records that it has loaded."""
        with self._transfers.cache.pool.lock:
            self.waiting -= 1
            if not self.waiting and not self.done:
                self._transfers.drop(self)

    def __repr__(self) -> str:
        return f"<Fetch of {self.size_bytes} bytes for {self.num_tokens} tokens, {'done' if self.done else 'under way'}>"


class _Move(NamedTuple):
    """A record that is copied, and its offset in an extent."""

    offset_bytes: int
    tier: Tier
    transfer: Transfer


@dataclass(eq=False, slots=True)
class _Copy:
    """Copies between an extent and the memory of tiers that were launched together."""

    fence: Fence
    moves: list[_Move]
    part: _Part | None
    """The extent that they load; None for stores."""
    failed: bool


class Transfers:
    """The stores and loads of one prefix cache."""

    def __init__(self, cache: KVCache, index: PrefixIndex, windows: Windows, tiers: Sequence[Tier], fingerprint: str) -> None:
        self.cache: Final = cache
        self.tiers: Final = tuple(tiers)
        self.keys: Final = Keys(cache.layout, fingerprint)
        self.fetched_tokens = 0
        self.errors = 0
        """Calls of a tier that raised."""
        self._index = index
        self._windows = windows
        self._driver = cache.pool.driver
        self._load_stream = self._driver.new_stream()
        self._store_stream = self._driver.new_stream()
        """Another stream than that of loads: stores wait for running work, and loads must not wait behind them."""
        self._stores: list[dict[KeyChain, Iterator[bool]]] = [{} for _ in self.tiers]
        """For each tier the paths to store there, the oldest first: see `_storing`."""
        self._newest: dict[int, KeyChain] = {}
        """By slot of a running sequence: its inserted tokens with their hashes, so that none is hashed twice."""
        self._parts: dict[_Part, None] = {}
        """Extents that wait for records, in order."""
        self._copies: deque[_Copy] = deque()
        """The oldest first."""
        self._fetches: dict[Fetch, None] = {}
        self._loading: dict[bytes, Fetch] = {}
        """By key of a record that is being loaded: its fetch."""
        self._turns = [self._load, self._store]
        """Of the next poll, in order. They change places, so that neither takes the time of all polls."""
        self._end_ns = 0.0
        """The end of this poll's time, of time.perf_counter_ns."""
        self._has_worked = False
        """Has this poll done a piece of work? It does one at least."""
        self._behind: Fence | None = None
        """See `_behind_work`."""

    # what the prefix cache asks

    def queue(self, namespace: Hashable, tokens: npt.NDArray[np.int32], slot: int | None = None) -> None:
        """Store inserted tokens, of the sequence in `slot` if it runs, when there is time.

        Cost: they are compared with those that were inserted before for the slot.
        """
        before = None if slot is None else self._newest.get(slot)
        chain = None if before is None or before.namespace != namespace else before.grown(tokens)
        if chain is None:
            before, chain = None, self.keys.of(namespace, tokens)
        if slot is not None:
            self._newest[slot] = chain
        for tier, stores in zip(self.tiers, self._stores, strict=True):
            stores[chain] = self._storing(tier, chain)
            first = next(iter(stores))
            if before is not None and before is not first:
                stores.pop(before, None)  # it is not begun, and a part of this one
            if len(stores) > _MOST_QUEUED:
                del stores[first]

    def leave(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        self._newest.pop(slot, None)

    def fetch(
        self,
        namespace: Hashable,
        tokens: npt.NDArray[np.int32],
        known: int,
        least_tokens: int,
        worth: Callable[[Fetch], bool] | None,
    ) -> Fetch | None:
        """Load what is needed to attach `least_tokens` more than are `known`. See PrefixCache.fetch."""
        most = [bytearray(b"\1" * (len(tokens) * group.row_bytes // PAGE_BYTES)) for group in self.cache.layout.groups]
        num_tokens = self._reach(most, len(tokens) - 1)
        if num_tokens - known < least_tokens:
            return None
        chain = self.keys.of(namespace, tokens)
        fetch = Fetch(self, chain, known=known, num_tokens=num_tokens, least_tokens=least_tokens, worth=worth)
        started = self._start(fetch)
        if started is not None and started is not fetch:
            started.waiting += 1
        return started

    def poll(self, budget_us: float) -> None:
        """Go on with stores and loads for about `budget_us`, in turns; do one piece of work at least, if there is any."""
        self._end_ns = time.perf_counter_ns() + min(budget_us, 1e12) * 1e3
        self._has_worked, self._behind = False, None
        self.finish()
        for fetch in [fetch for fetch in self._fetches if self._is_answered(fetch)]:
            started = None
            try:
                started = self._start(fetch)
            finally:
                if started is not fetch:  # there is nothing, or it is on its way: another call of fetch gets that
                    fetch.bytes_by_tier = Counter()
                    self._conclude(fetch)
        if self._windows.num_free <= _SPARE_WINDOWS + _LOAD_WINDOWS:
            self.cache.collect(budget_us)
        for work in self._turns:
            work()
        self._turns.reverse()
        self.finish()

    def drop(self, fetch: Fetch) -> None:
        """Give a fetch up. Copies under way go on, into extents that are free when these end."""
        for part in fetch._parts:
            part.failed, part.loaded = True, False
        for part in [part for part in fetch._parts if part in self._parts]:
            self._leave(part)
        if not fetch.done:
            self._conclude(fetch)

    def give_up(self) -> list[Fence]:
        """Give all stores and fetches up. The fences of the copies under way: when they have passed call `finish`."""
        for stores in self._stores:
            stores.clear()
        for fetch in list(self._fetches):
            self.drop(fetch)
        return [copy.fence for copy in self._copies]

    def stats(self) -> tuple[TierStats, ...]:
        """The statistics of each tier, without those that raise."""
        found = (self._ask(None, tier.stats) for tier in self.tiers)
        return tuple(each for each in found if isinstance(each, TierStats))

    @property
    def is_idle(self) -> bool:
        """Is there nothing to go on with?"""
        return not (any(self._stores) or self._copies or self._fetches)

    def oldest_fence(self) -> Fence | None:
        """The fence of the oldest copies; None if there are none."""
        return self._copies[0].fence if self._copies else None

    def held(self) -> Counter[Extent]:
        """The extents that are being loaded: each is held and used once."""
        return Counter(part.extent for fetch in self._fetches for part in fetch._parts)

    def locks(self) -> Counter[Node[Placed]]:
        """How often fetches have locked each node."""
        return Counter(fetch._node for fetch in self._fetches if fetch._node is not None)

    # loading

    def _needed(self, index: int, num_tokens: int) -> range:
        """The pages of a group with the rows that a sequence of so many tokens needs for its next one."""
        group = self.cache.layout.groups[index]
        start = group.page_of(self.cache.layout.start_for(group, num_tokens))
        return range(start, ceil_div(num_tokens * group.row_bytes, PAGE_BYTES))

    def _reach(self, have: list[bytearray], most: int) -> int:
        """The largest number of tokens, up to `most`, for which each needed page is there."""
        num_tokens = most
        while True:
            fewer = num_tokens
            for index, (group, pages) in enumerate(zip(self.cache.layout.groups, have, strict=True)):
                needed = self._needed(index, num_tokens)
                missing = pages.find(0, needed.start, needed.stop)
                if missing < 0 and needed.stop > len(pages):
                    missing = max(len(pages), needed.start)
                if missing >= 0:
                    fewer = min(fewer, missing * PAGE_BYTES // group.row_bytes)
            if fewer == num_tokens:
                return num_tokens
            num_tokens = fewer

    def _start(self, fetch: Fetch) -> Fetch | None:
        """Begin to load what tiers have, or wait for their answer. None if there is nothing to load, or no room.

        Another fetch that loads the same already is returned in its place.
        """
        chain = fetch._chain
        match = self._index.tree.match(chain.namespace, chain.tokens)
        fetch._have = [bytearray(len(chain.tokens) * group.row_bytes // PAGE_BYTES) for group in self.cache.layout.groups]
        for node in match.path:
            for piece in node.pieces:
                if piece.end_token <= match.num_tokens and not piece.value.first_token:
                    for page in range(piece.value.page, piece.value.end_page):
                        fetch._have[piece.group][page] = _DEVICE
        sources = self._find(fetch) if self._goes_on(fetch) else None
        if fetch._asked is not None:
            self._fetches[fetch] = None
            return fetch
        if sources is None:
            return None
        num_tokens = self._reach(fetch._have, len(chain.tokens) - 1)
        if num_tokens - fetch.known_tokens < fetch._least_tokens:
            return None
        have, keys = fetch._have, chain.by_group
        needed = [
            [page for page in self._needed(index, num_tokens) if have[index][page] == _TIER] for index in range(len(have))
        ]
        under_way = (self._loading.get(keys[index][page]) for index, pages in enumerate(needed) for page in pages)
        if (other := next(filter(None, under_way), None)) is not None:
            return other
        wanted = Counter(sources[keys[index][page]].name for index, pages in enumerate(needed) for page in pages)
        fetch.num_tokens = num_tokens
        fetch.bytes_by_tier = Counter({name: num_records * RECORD_BYTES for name, num_records in wanted.items()})
        is_worth = wanted and (fetch._worth is None or fetch._worth(fetch))
        if is_worth and self._take(fetch, match.path[-1] if match.path else None, needed, sources):
            return fetch
        return None

    def _is_answered(self, fetch: Fetch) -> bool:
        """Has the tier that a fetch has asked found out what it has? Cost: does not grow with the prompt."""
        return fetch._asked is not None and self._lookup(fetch._asked[0], [fetch._asked[1]]) is not None

    def _goes_on(self, fetch: Fetch) -> bool:
        """Has a tier the first page that the device lacks of each group without a window? Nearly no new prompt gets further.

        False also while a tier finds that out.
        """
        nexts = [
            fetch._chain.key(index, page)
            for index, (group, pages) in enumerate(zip(self.cache.layout.groups, fetch._have, strict=True))
            if group.window is None and (page := pages.find(0)) >= 0
        ]
        fetch._asked = None
        has = [False] * len(nexts)
        for tier in self.tiers if nexts else ():
            if (found := self._lookup(tier, nexts)) is None:
                fetch._asked = tier, nexts[0]
            else:
                has = [*map(operator.or_, has, found)]
        if all(has):
            fetch._asked = None
        return all(has)

    def _find(self, fetch: Fetch) -> dict[bytes, Tier] | None:
        """The tier of each record that the device lacks, marked in `_have`. None while a tier finds out what it has."""
        have, keys = fetch._have, fetch._chain.by_group
        sources: dict[bytes, Tier] = {}
        lacking = [
            (keys[index][page], index, page)
            for index, pages in enumerate(have)
            for page in range(len(pages))
            if not pages[page]
        ]
        for tier in self.tiers:
            lacking = [each for each in lacking if each[0] not in sources]
            if not lacking:
                break
            found = self._lookup(tier, [key for key, _, _ in lacking])
            if found is None:
                fetch._asked = tier, lacking[-1][0]
                return None
            for (key, index, page), has in zip(lacking, found, strict=False):
                if has:
                    sources[key] = tier
                    have[index][page] = _TIER
        return sources

    def _take(self, fetch: Fetch, node: Node[Placed] | None, needed: list[list[int]], sources: dict[bytes, Tier]) -> bool:
        """Take extents for the pages of a fetch: large ones where all their pages are needed. False if there is no room."""
        places: list[tuple[int, int, int]] = []
        for index, pages in enumerate(needed):
            left = dict.fromkeys(pages)
            large = self.cache.layout.groups[index].window is None
            for page in pages:
                run = range(page, page + LARGE_PAGES)
                if large and page % LARGE_PAGES == 0 and all(each in left for each in run):
                    places.append((index, page, LARGE_PAGES))
                    for each in run:
                        del left[each]
                elif page in left:
                    places.append((index, page, 1))
        if node is not None:
            self._index.tree.lock(node)  # making room must not evict what this goes on from
        counts = Counter(num_pages for _, _, num_pages in places)
        try:
            try:
                extents = self.cache.pool.acquire_mixed(counts, wait=False)
            except OutOfPages:
                self.cache.collect()  # what the tree can give may be mapped still for a sequence that has ended
                extents = self.cache.pool.acquire_mixed(counts, wait=False)
        except BaseException as error:
            if node is not None:
                self._index.tree.unlock(node)
            if isinstance(error, OutOfPages):
                return False
            raise
        fetch._node = node
        for index, page, num_pages in places:
            extent = extents[num_pages].pop()
            extent.tenant, extent.zeroed = None, False  # until it is loaded, and if it never is, its bytes are some other's
            keys = fetch._chain.by_group[index][page : page + num_pages]
            part = _Part(fetch, index, page, extent, [(sources[key], key) for key in keys])
            fetch._parts.append(part)
            self._parts[part] = None
            self._loading.update(dict.fromkeys(keys, fetch))
        fetch._num_left = len(fetch._parts)
        self._fetches[fetch] = None
        return True

    def _may_launch(self, *, left: int = _SPARE_WINDOWS) -> bool:
        """Is there time left, and a window besides those that are left for others?"""
        return not (self._has_worked and self._is_over) and self._windows.num_free > left

    @property
    def _is_over(self) -> bool:
        """Is the time of this poll over?"""
        return time.perf_counter_ns() > self._end_ns

    def _load(self) -> None:
        """Ask for records, in order, and copy those that have come: all of an extent together, unless a tier lends no more."""
        full: set[Tier] = set()
        for part in list(itertools.islice(self._parts, _MOST_AHEAD)):
            if not self._may_launch():
                break
            lends = True
            while lends and not part.failed and part.num_asked < len(part.sources):
                tier, key = part.sources[part.num_asked]
                otherwise: Transfer | None = missed(key)
                transfer = None if tier in full else self._ask(otherwise, tier.load, key)
                if transfer is None:
                    full.add(tier)
                    lends = False
                else:
                    part.coming.append(_Move(part.num_asked * RECORD_BYTES, tier, transfer))
                    part.num_asked += 1
            come = [move for move in part.coming if move.transfer.ended]  # first: a thread may end one while this looks
            part.failed = part.failed or any(move.transfer.missed for move in part.coming)
            if part.failed:
                self._leave(part)
                continue
            if not come or (lends and len(come) < len(part.coming)):
                continue
            part.coming = [move for move in part.coming if move not in come]
            if lends and not part.coming:
                del self._parts[part]
            self._launch(part.extent, come, part=part)

    def _leave(self, part: _Part) -> None:
        """Stop loading an extent."""
        del self._parts[part]
        for move in part.coming:
            self._ask(None, move.tier.drop, move.transfer)
        part.coming = []
        self._end_if_over(part)

    def _end_if_over(self, part: _Part) -> None:
        fetch = part.fetch
        if fetch.done or part in self._parts or part.num_copies:
            return
        part.loaded = not part.failed
        if part.loaded:
            for tier, _ in part.sources:
                fetch.loaded_bytes[tier.name] += RECORD_BYTES
        fetch._num_left -= 1
        if not fetch._num_left:
            self._conclude(fetch)

    def _conclude(self, fetch: Fetch) -> None:
        """Put what was loaded into the tree, as far as it can be attached, and give the rest back."""
        index, pool, groups = self._index, self.cache.pool, self.cache.layout.groups
        have = [bytearray(page == _DEVICE for page in pages) for pages in fetch._have]
        for part in fetch._parts:
            if part.loaded:
                have[part.group][part.page : part.page + part.extent.num_pages] = bytes([_TIER]) * part.extent.num_pages
        num_tokens = self._reach(have, len(fetch._chain.tokens) - 1)
        if num_tokens > fetch.known_tokens:
            pieces = [
                Piece(end_token(groups[part.group], part.pages.stop), Placed(part.page, part.extent), part.group)
                for part in fetch._parts
                if part.loaded and part.page in self._needed(part.group, num_tokens)
            ]
            if pieces:
                pieces.sort(key=piece_place)
                tokens = fetch._chain.tokens[: pieces[-1].end_token]
                index.add(fetch._chain.namespace, tokens, pieces)
                if len(self.tiers) > 1:
                    self.queue(fetch._chain.namespace, tokens)  # the others get it too
                self.fetched_tokens += num_tokens - fetch.known_tokens
        for part in fetch._parts:
            pool.unuse(part.extent)
            pool.drop(part.extent)
            for _, key in part.sources:
                del self._loading[key]
        if fetch._node is not None:
            index.tree.unlock(fetch._node)
        fetch._parts, fetch._node, fetch._worth = [], None, None
        fetch.num_tokens, fetch.done = max(num_tokens, fetch.known_tokens), True
        del self._fetches[fetch]

    # storing

    def _store(self) -> None:
        """Store the paths that are queued, each tier at its own pace."""
        for stores in self._stores:
            while stores and self._may_launch(left=_SPARE_WINDOWS + _LOAD_WINDOWS):
                chain, storing = next(iter(stores.items()))
                may_go_on = next(storing, None)
                self._has_worked = True
                if may_go_on is None:
                    del stores[chain]
                elif not may_go_on:
                    break

    def _storing(self, tier: Tier, chain: KeyChain) -> Iterator[bool]:
        """Store what the tree has of a path and the tier lacks, the end first: so it is evicted first.

        Yields after each piece of work, of a cost that does not grow with the path: may another one follow in this poll? An
        error ends it.
        """
        while chain.hash_some(_MOST_KEYS):
            yield True
        has: set[bytes] = set()
        for end in range(len(chain.all), 0, -_MOST_KEYS):
            keys = chain.all[max(0, end - _MOST_KEYS) : end]
            while (found := self._lookup(tier, keys, otherwise=True)) is None:
                yield False
            has.update(itertools.compress(keys, found))
            if end > _MOST_KEYS:
                yield True
        lookup: Lookup[Placed] = Lookup(chain.namespace, chain.tokens)
        done: tuple[float, float] = (math.inf, 0)
        while len(has) < len(chain.all) and (piece := self._index.tree.last_piece(lookup, done)) is not None:
            placed = piece.value
            keys = [] if placed.first_token else chain.by_group[piece.group][placed.page : placed.end_page]
            if not has.issuperset(keys) and not self._index.import_extents([placed.extent]):
                continue  # what an earlier engine left is lost, and in the tree no more
            moves: list[_Move] = []
            has_room = True
            for offset, key in reversed([*enumerate(keys)]):
                if key not in has and has_room:
                    behind = self._behind_work()  # which can fail, and so comes before a tier lends memory
                    transfer = self._ask(None, tier.store, key)
                    if transfer is not None:
                        moves.append(_Move(offset * RECORD_BYTES, tier, transfer))
                    else:  # unless another path has brought it
                        has_room = (self._lookup(tier, [key], otherwise=True) or [False])[0]
            if moves:
                self._launch(placed.extent, moves, behind=behind)
                has.update(move.transfer.key for move in moves)
            if has_room:
                done = piece_place(piece)
            if moves or not has_room or self._is_over:
                yield has_room

    def _behind_work(self) -> Fence:
        """One for all stores of a poll: behind the work that has written the rows."""
        self._behind = self._behind or self.cache.memory.fence()
        return self._behind

    # both

    def _launch(self, extent: Extent, moves: list[_Move], *, part: _Part | None = None, behind: Fence | None = None) -> None:
        """Copy records between an extent and tiers, behind a fence; into the extent for a `part`."""
        driver = self._driver

        def copy_all(address: int) -> None:
            for offset, _, transfer in moves:
                if transfer.is_store:
                    driver.copy(transfer.address, address + offset, RECORD_BYTES)
                else:
                    driver.copy(address + offset, transfer.address, RECORD_BYTES)

        self._has_worked = True
        copy = _Copy(DONE, moves, part, failed=True)
        with driver.on(self._store_stream if part is None else self._load_stream):
            if part is not None:
                part.num_copies += 1
            try:
                if behind is not None:
                    behind.order()
                copy.fence = self._windows.run(extent, copy_all)
                copy.failed = False
            except BaseException:
                copy.fence = driver.fence()  # some may have been launched
                raise
            finally:
                self._copies.append(copy)

    def finish(self) -> None:
        """Give back the memory of tiers behind copies that have ended."""
        for copy in [copy for copy in self._copies if copy.fence.done()]:
            self._copies.remove(copy)
            for _, tier, transfer in copy.moves:
                self._ask(None, tier.drop if copy.failed else tier.finished, transfer)
            if copy.part is not None:
                copy.part.num_copies -= 1
                copy.part.failed = copy.part.failed or copy.failed
                self._end_if_over(copy.part)

    def _lookup(self, tier: Tier, keys: list[bytes], *, otherwise: bool = False) -> list[bool] | None:
        """See Tier.lookup; `otherwise` for each if it raises."""
        answer: list[bool] | None = [otherwise] * len(keys)
        return self._ask(answer, tier.lookup, keys)

    def _ask(self, otherwise: T, call: Callable[..., T], *arguments: object) -> T:
        """A tier's answer; `otherwise` if it raises anything: a tier that fails has no record, and takes none."""
        try:
            return call(*arguments)
        except Exception:
            self.errors += 1
            return otherwise
