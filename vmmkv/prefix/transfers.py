"""Copies between the extents of a prefix tree and tiers, on two streams, one in each direction.

    insert ──queued──> stored in slack ──> tiers                 evicting drops extents: tiers have their rows already
    fetch ──> fresh extents ──loaded──> tree ──> attach aliases it        one load for all that wait for it

Rows are stored when they are inserted, in slack, and not when they are evicted: then making room never waits for a copy. A
store goes along the whole path from the root. So each tier has all of a path that is used again, and evicts its end first.

An extent is mapped in a window while it is copied. The window holds it: nothing is given back to the pool before its copy has
ended. The caller holds the pool's lock.
"""

import functools
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vmmkv.driver.base import DONE, Fence
from vmmkv.errors import OutOfPages
from vmmkv.memory.extents import SIZE_CLASSES, Extent, largest_at
from vmmkv.memory.sharing import Windows
from vmmkv.memory.slots import Slots
from vmmkv.prefix.index import IndexFollower, Placed, PrefixIndex, end_token
from vmmkv.prefix.radix_tree import Lookup, Node, Piece, Tokens, TreeListener, piece_place
from vmmkv.tiers.keys import PageKeys
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.tiers.tier import ListenedTier, Refusal, Tier, TierStats, Transfer, missed
from vmmkv.units import PAGE_BYTES, ceil_div

T = TypeVar("T")

_SPARE_WINDOWS: Final = 16
"""Windows that stay free for attaching, which copies through them too and must not wait."""

_LOAD_WINDOWS: Final = 16
"""Windows that stores leave for loads: requests wait for these."""

_MOST_AHEAD: Final = 64
"""Extents whose records are requested at once, before any can be copied."""

_MOST_QUEUED: Final = 1024
"""Paths that wait to be stored in a tier. Beyond that the oldest is dropped."""

_MOST_KEYS: Final = 64
"""Keys of a path that are hashed, or looked up to be stored, between two looks at the clock."""

_PIECES_AT_ONCE: Final = 4
"""As many times `_MOST_KEYS` keys are hashed when a fetch begins: some 0.7 ms. Polls hash the others."""

_MOST_ASKED: Final = 1024
"""Keys of a fetch that a tier is asked about at once: it may take a round trip."""

_DEVICE, _TIER = 1, 2
"""Where a page is: 0 for nowhere, _DEVICE, _TIER in the first tier, one more in the second, and so on."""

_IS_ON_DEVICE: Final = bytes(place == _DEVICE for place in range(256))


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
        chain: PageKeys,
        *,
        known: int,
        num_tokens: int,
        least_tokens: int,
        room_pages: int,
        worth: "Callable[[Fetch], bool] | None",
    ) -> None:
        self.num_tokens = num_tokens
        """Tokens that `attach` finds when it is done; an upper bound until then."""
        self.done = False
        self.ended_s = math.inf
        """When it was done, of time.perf_counter: nothing looks at once."""
        self.bytes_by_tier: Counter[str] = Counter()
        """Bytes of its records by the name of the tier that has them. Empty until that is found, and for a fetch of none."""
        self.loaded_bytes: Counter[str] = Counter()
        """The same of the records that were loaded."""
        self.waiting = 1
        """Calls of `PrefixCache.fetch` that returned it, less those of `give_up`."""
        self._transfers = transfers
        self._chain = chain
        self._least_tokens = least_tokens
        self._room_pages = room_pages
        self._worth = worth
        self._finding: Generator[bool, None, Fetch | None] | None = transfers.find(self)
        """Finds what tiers have; None when that is done."""
        self._have: list[bytearray] = []
        """Where each page of each group is: see _TIER."""
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
        """Wait no longer. A fetch that nothing waits for ends: `attach` finds what has come of its beginning."""
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


class PrefixListener(TreeListener, Protocol):
    """Hears also which records tiers have, of those that know when they go (`ListenedTier`): keys, and what these stand for.

    It must return at once, from any thread, and must not use the tree.
    """

    def described(self, tier: ListenedTier, path: PageKeys, places: Sequence[tuple[int, int]] | None) -> None:
        """A tier is about to get the records at these groups and pages of a path. None: it may have any of them.

        No lock of the tier is held: a listener that has lost what it heard may call `tier.listen` again.
        """

    def held(self, tier: str, keys: Sequence[bytes], is_held: bool) -> None:
        """A tier, by name, has these records from now on, or has them no more. Either follows for what it was about to get.

        It must not use a tier.
        """


class Transfers(IndexFollower):
    """The stores and loads of one prefix cache."""

    def __init__(self, cache: Slots, index: PrefixIndex, windows: Windows, tiers: Sequence[Tier], fingerprint: str) -> None:
        self.cache: Final = cache
        self.tiers: Final = tuple(tiers)
        self.keys: Final = PageKeys(cache.layout, fingerprint)
        self.fetched_tokens = 0
        self.errors = 0
        """Calls of a tier that raised."""
        self._index = index
        self._windows = windows
        self._driver = cache.pool.driver
        self._load_stream = self._driver.new_stream()
        self._store_stream = self._driver.new_stream()
        """Another stream than that of loads: the link carries both directions at once."""
        self._stores: list[dict[PageKeys, Iterator[bool]]] = [{} for _ in self.tiers]
        """For each tier the paths to store there, the oldest first: see `_storing`."""
        self.worth: Callable[[str], bool] = lambda tier: True
        """Is it worth it to store a path in a tier of this engine alone? Asked when its first tokens are queued."""
        self._listener: PrefixListener | None = None
        self._newest: dict[int, tuple[PageKeys, Sequence[tuple[Tier, dict[PageKeys, Iterator[bool]]]]]] = {}
        """By slot of a running sequence: its inserted tokens with their hashes, so none is hashed twice, and where to store."""
        self._parts: dict[_Part, None] = {}
        """Extents that wait for records, in order."""
        self._copies: deque[_Copy] = deque()
        """The oldest first."""
        self._fetches: dict[Fetch, None] = {}
        self._loading: dict[bytes, Fetch] = {}
        """By key of a record that is being loaded: its fetch."""
        self._turns = [self._find_all, self._load, self._store]
        """Of the next poll, in order. They change places, so that none takes the time of all polls."""
        self._end_ns = 0.0
        """The end of this poll's time, of time.perf_counter_ns."""
        self._has_worked = False
        """Has this poll done a piece of work? It does one at least."""
        self._num_queued = self._num_written = 0
        """Paths that were ever queued; so many of them, the oldest, have been written by the device."""
        self._writing: tuple[int, Fence] | None = None
        """Behind the fence one more path, and all before it, are written."""
        self._unwritten: dict[Extent, int] = {}
        """Extents whose rows may be on their way, as copies are: the number of the path with which they are written."""

    # what the prefix cache asks

    def _queue(
        self, namespace: Hashable, tokens: npt.NDArray[np.int32], slot: int | None = None, extents: Iterable[Extent] = ()
    ) -> None:
        """Store inserted tokens, of the sequence in `slot` if it runs, when there is time.

        Cost: they are compared with those that were inserted before for the slot.
        """
        before, places = (None, None) if slot is None else self._newest.get(slot, (None, None))
        chain = None if before is None or before.namespace != namespace else before.grown(tokens)
        if chain is None or places is None:
            before, chain = None, self.keys.of(tokens, namespace)
            places = [
                (tier, stores)
                for tier, stores in zip(self.tiers, self._stores, strict=True)
                if not isinstance(tier, ListenedTier) or self.worth(tier.name)
            ]
        if slot is not None:
            self._newest[slot] = chain, places
        self._num_queued += 1
        if not any(self._stores):
            self._unwritten.clear()  # what is queued from now on waits for all of them
        self._unwritten.update(dict.fromkeys(extents, self._num_queued))
        for tier, stores in places:
            stores[chain] = self._storing(tier, chain, self._num_queued)
            first = next(iter(stores))
            if before is not None and before is not first:
                stores.pop(before, None)  # it is not begun, and a part of this one
            if len(stores) > _MOST_QUEUED:
                del stores[first]

    def extended(self, namespace: Hashable, tokens: Tokens, slot: int, extents: list[Extent]) -> None:
        """Store the tokens of a running sequence when there is time."""
        self._queue(namespace, np.asarray(tokens), slot, extents)

    def left(self, slot: int) -> None:
        """The sequence in a slot has ended."""
        self._newest.pop(slot, None)

    def listen(self, listener: PrefixListener) -> None:
        """See PrefixCache.listen."""
        self._listener = listener
        for tier in self.tiers:
            if isinstance(tier, ListenedTier):
                tier.listen(functools.partial(listener.held, tier.name))

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
        num_tokens = self._reach(most, len(tokens) - 1)
        if num_tokens - known < least_tokens:
            return None
        chain = self.keys.of(tokens, namespace)
        fetch = Fetch(
            self, chain, known=known, num_tokens=num_tokens, least_tokens=least_tokens, room_pages=room_pages, worth=worth
        )
        self._fetches[fetch] = None
        found = self._go_on(fetch, iter([True] * (_PIECES_AT_ONCE - 1) + [False]).__next__)
        if found is not None and found is not fetch:
            found.waiting += 1
        return found

    def poll(self, budget_us: float) -> None:
        """Go on with stores and loads for about `budget_us`, in turns; do one piece of work at least, if there is any."""
        self._end_ns = time.perf_counter_ns() + min(budget_us, 1e12) * 1e3
        self._has_worked = False
        self.finish()
        if self._windows.num_free <= _SPARE_WINDOWS + _LOAD_WINDOWS:
            self.cache.collect(budget_us)
        for work in self._turns:
            work()
        self._turns.append(self._turns.pop(0))
        self.finish()

    def drop(self, fetch: Fetch) -> None:
        """Give a fetch up. Copies under way go on, into extents that are free when these end."""
        for part in fetch._parts:
            part.failed = True
        for part in [part for part in fetch._parts if part in self._parts]:
            self._leave(part)
        if not fetch.done:
            self._conclude(fetch)

    def give_up(self) -> list[Fence]:
        """Give all stores and fetches up. The fences of the copies under way: when they have passed call `finish`."""
        for fetch in list(self._fetches):
            self.drop(fetch)
        for stores in self._stores:
            stores.clear()
        return [copy.fence for copy in self._copies]

    def flush(self, until_s: float) -> bool:
        """Wait for tiers to keep what they were given, until a time of time.monotonic() at most. The lock is not held."""
        return all(self._ask(True, tier.flush, max(0.0, until_s - time.monotonic())) for tier in self.tiers)

    def stats(self) -> tuple[TierStats, ...]:
        """The statistics of each tier, without those that raise."""
        found = (self._ask(None, tier.stats) for tier in self.tiers)
        return tuple(each for each in found if isinstance(each, TierStats))

    @property
    def is_idle(self) -> bool:
        """Is there nothing to go on with?"""
        return not (any(self._stores) or self._copies or self._fetches)

    def oldest_fence(self) -> Fence | None:
        """What is waited for: the oldest copies, or else the work that writes what is to be stored; None if that is nothing."""
        if self._copies:
            return self._copies[0].fence
        return None if self._writing is None else self._writing[1]

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
                    fewer = min(fewer, group.tokens_under(missing))
            if fewer == num_tokens:
                return num_tokens
            num_tokens = fewer

    def find(self, fetch: Fetch) -> Generator[bool, None, Fetch | None]:
        """Find what tiers have of a fetch, and begin to load it. Internal.

        Yields after each piece of work: may another one follow in this poll? The costs of those between the first and the last
        do not grow with the prompt.
        Returns the fetch; another one that loads the same already; or None if there is nothing to load, or no room.
        """
        chain, groups, tree = fetch._chain, self.cache.layout.groups, self._index.tree
        have = fetch._have = [bytearray(len(chain.tokens) * group.row_bytes // PAGE_BYTES) for group in groups]
        match = tree.match(chain.namespace, chain.tokens)
        known = itertools.chain.from_iterable(node.pieces for node in match.path)
        pieces = [piece for piece in known if piece.end_token <= match.num_tokens and not piece.value.first_token]
        for piece in pieces:
            first, end = piece.value.page, piece.value.end_page
            have[piece.group][first:end] = bytes([_DEVICE]) * (end - first)
        if pieces:  # making room must not evict what this goes on from, but may what others have behind that
            end_token = max(piece.end_token for piece in pieces)
            fetch._node = tree.insert(chain.namespace, chain.tokens[:end_token]).node
            tree.lock(fetch._node)
        firsts = [_first_lacking(pages, self._needed(index, fetch.known_tokens).start) for index, pages in enumerate(have)]
        whole = [index for index, group in enumerate(groups) if group.window is None]
        nexts = [chain.key(index, firsts[index]) for index in whole if firsts[index] < len(have[index])]
        while nexts:  # nearly no new prompt gets further
            answers = [answer for tier in self.tiers if (answer := self._lookup(tier, nexts)) is not None]
            if answers and all(map(any, zip(*answers, strict=False))):
                break
            if len(answers) == len(self.tiers):
                return None
            yield False
        if (other := self._loader_of(nexts)) is not None:
            return other

        chain.skip(firsts)
        is_more = True
        while is_more and all(len(chain.by_group[index]) <= _first_lacking(have[index]) for index in whole):
            new: list[tuple[int, int]] = []
            while is_more and len(new) < _MOST_ASKED:
                some = chain.hash_some(_MOST_KEYS)
                new += some
                if is_more := len(some) == _MOST_KEYS:
                    yield True
            for place, tier in enumerate(self.tiers, _TIER):
                lacking = [(index, page) for index, page in new if not have[index][page]]
                keys = [chain.by_group[index][page] for index, page in lacking]
                while (found := self._lookup(tier, keys)) is None:
                    yield False
                    while self._lookup(tier, keys[-1:]) is None:
                        yield False
                for index, page in itertools.compress(lacking, found):
                    have[index][page] = place

        while (num_tokens := self._reach(have, len(chain.tokens) - 1)) - fetch.known_tokens >= fetch._least_tokens:
            fetch.num_tokens, fetch.bytes_by_tier = num_tokens, Counter()
            places = [*self._places(have, firsts, num_tokens)]
            keys = [key for index, pages in places for key in chain.by_group[index][pages.start : pages.stop]]
            if (other := self._loader_of(keys)) is not None:
                return other
            last = 0
            for place, tier in enumerate(self.tiers, _TIER):
                if num_records := sum(have[index].count(place, pages.start, pages.stop) for index, pages in places):
                    fetch.bytes_by_tier[tier.name] += num_records * RECORD_BYTES
                    last = place
            if not last:
                break
            if fetch._worth is None or fetch._worth(fetch):
                return fetch if self._take(fetch, places) else None
            for pages in have:  # what is before the records of the slowest tier may be worth it
                pages[:] = pages.replace(bytes([last]), b"\0")
        return None

    def _go_on(self, fetch: Fetch, may_go_on: Callable[[], bool]) -> Fetch | None:
        """Do pieces of a fetch's `find`, one at least. The fetch while there are more, then what that returns."""
        assert fetch._finding is not None, "it is found already"
        found: Fetch | None = None
        try:
            while next(fetch._finding) and may_go_on():
                pass
            found = fetch
        except StopIteration as end:
            found, fetch._finding = end.value, None
        finally:
            if found is not fetch:
                fetch.bytes_by_tier = Counter()
                self._conclude(fetch)
        return found

    def _find_all(self) -> None:
        """Find what tiers have, of one fetch after the other. Where another loads it, another call of `fetch` gets that."""
        for fetch in [fetch for fetch in self._fetches if fetch._finding is not None]:
            if self._has_worked and self._is_over:
                break
            self._has_worked = True
            self._go_on(fetch, lambda: not self._is_over)

    def _loader_of(self, keys: Sequence[bytes]) -> Fetch | None:
        """A fetch that loads one of these records; None if there is none."""
        return next(filter(None, map(self._loading.get, keys)), None)

    def _places(self, have: list[bytearray], firsts: list[int], num_tokens: int) -> Iterator[tuple[int, range]]:
        """Group and pages of the extents to load: large ones where all their pages are needed."""
        for index, (group, pages, first) in enumerate(zip(self.cache.layout.groups, have, firsts, strict=True)):
            needed = self._needed(index, num_tokens)
            page = max(first, needed.start)
            while page < needed.stop:
                end = min(needed.stop, page + SIZE_CLASSES[0]) if group.window is None else page
                there = pages.find(_DEVICE, page, end)
                run = range(page, page + largest_at(page, end if there < 0 else there))
                if pages[page] != _DEVICE:
                    yield index, run
                page = run.stop

    def _take(self, fetch: Fetch, places: list[tuple[int, range]]) -> bool:
        """Take an extent for each place of a fetch. False if there is no room."""
        counts, pool = Counter(len(pages) for _, pages in places), self.cache.pool
        if pool.spare_pages + pool.kept_pages < fetch._room_pages:
            return False
        try:
            try:
                extents = pool.acquire_mixed(counts, wait=False)
            except OutOfPages:
                self.cache.collect()  # what the tree can give may be mapped still for a sequence that has ended
                extents = pool.acquire_mixed(counts, wait=not pool.used_bytes)  # if nothing runs, fences pass soon
        except OutOfPages:
            return False
        for index, pages in places:
            extent = extents[len(pages)].pop()
            extent.tenant, extent.zeroed = None, False  # until it is loaded, and if it never is, its bytes are some other's
            keys = fetch._chain.by_group[index][pages.start : pages.stop]
            tiers = [self.tiers[place - _TIER] for place in fetch._have[index][pages.start : pages.stop]]
            part = _Part(fetch, index, pages.start, extent, [*zip(tiers, keys, strict=True)])
            fetch._parts.append(part)
            self._parts[part] = None
            self._loading.update(dict.fromkeys(keys, fetch))
        fetch._num_left = len(fetch._parts)
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
        have = [pages.translate(_IS_ON_DEVICE) for pages in fetch._have]
        for part in fetch._parts:
            if part.loaded:
                have[part.group][part.page : part.page + part.extent.num_pages] = b"\1" * part.extent.num_pages
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
                    self._queue(fetch._chain.namespace, tokens)  # the others get it too
                self.fetched_tokens += num_tokens - fetch.known_tokens
        for part in fetch._parts:
            pool.unuse(part.extent)
            pool.drop(part.extent)
            for _, key in part.sources:
                del self._loading[key]
        if fetch._node is not None:
            index.tree.unlock(fetch._node)
        fetch._parts, fetch._node, fetch._worth, fetch._finding = [], None, None, None
        fetch.num_tokens, fetch.done, fetch.ended_s = max(num_tokens, fetch.known_tokens), True, time.perf_counter()
        del self._fetches[fetch]

    # storing

    def _store(self) -> None:
        """Store the paths that are queued and written, each tier at its own pace."""
        if self._writing is None and any(self._stores) and self._num_written < self._num_queued:
            self._writing = self._num_queued, self.cache.memory.fence()
        if self._writing is not None and self._writing[1].done():
            self._num_written, self._writing = self._writing[0], None
            self._unwritten = {extent: number for extent, number in self._unwritten.items() if number > self._num_written}
        for stores in self._stores:
            while stores and self._may_launch(left=_SPARE_WINDOWS + _LOAD_WINDOWS):
                chain, storing = next(iter(stores.items()))
                may_go_on = next(storing, None)
                self._has_worked = True
                if may_go_on is None:
                    del stores[chain]
                elif not may_go_on:
                    break

    def _storing(self, tier: Tier, chain: PageKeys, number: int) -> Iterator[bool]:
        """Store what the tree has of a path and the tier lacks, the end first: so it is evicted first.

        The host waits until the path is written. Copies that wait on the device would hold windows meanwhile, and may hold up
        copies of other streams.
        Yields after each piece of work, of a cost that does not grow with the path: may another one follow in this poll? An
        error ends it.
        """
        while number > self._num_written:
            yield False
        while len(chain.hash_some(_MOST_KEYS)) == _MOST_KEYS:
            yield True
        has = yield from self._held_of(tier, chain)
        stats = self._ask(None, tier.stats)
        if stats is not None and stats.budget_bytes and all(group.window is None for group in self.cache.layout.groups):
            has.update(chain.in_order[stats.budget_bytes // RECORD_BYTES :])  # storing that would evict what is before it
        num_held = len(has)
        described = None
        if self._listener is not None and isinstance(tier, ListenedTier):
            described = functools.partial(self._listener.described, tier, chain)
            described(None)
        lookup: Lookup[Placed] = Lookup(chain.namespace, chain.tokens)
        done: tuple[float, float] = (math.inf, 0)
        while len(has) < len(chain.in_order) and (piece := self._index.tree.last_piece(lookup, done)) is not None:
            placed = piece.value
            if placed.extent in self._unwritten:  # another sequence has brought it since
                yield False
                continue
            keys = [] if placed.first_token else chain.by_group[piece.group][placed.page : placed.end_page]
            try:
                if not has.issuperset(keys) and not self._index.import_extents([placed.extent]):
                    continue  # what an earlier engine left is lost, and in the tree no more
            except OutOfPages:
                return  # the process may open no more files: it is stored when a prompt has attached it
            moves: list[_Move] = []
            has_room = True
            for offset, key in reversed([*enumerate(keys)]):
                if key not in has and has_room:
                    refused: Transfer | Refusal = Refusal.THERE
                    answer = self._ask(refused, tier.store, key)
                    if isinstance(answer, Transfer):
                        moves.append(_Move(offset * RECORD_BYTES, tier, answer))
                    else:
                        has_room = answer is Refusal.THERE
            if moves and described is not None:
                pages = [placed.page + move.offset_bytes // RECORD_BYTES for move in moves]
                described([(piece.group, page) for page in pages])
            if moves:
                self._launch(placed.extent, moves)
                has.update(move.transfer.key for move in moves)
            if has_room:
                done = piece_place(piece)
            if moves or not has_room or self._is_over:
                yield has_room
        if 0 < num_held < len(has):
            yield from self._held_of(tier, chain)  # what was stored is behind what it had, and is evicted before it

    def _held_of(self, tier: Tier, chain: PageKeys) -> Generator[bool, None, set[bytes]]:
        """The records of a path that a tier has, looked up from the end: so that is evicted first. Yields as `_storing`."""
        has: set[bytes] = set()
        for end in range(len(chain.in_order), 0, -_MOST_KEYS):
            keys = chain.in_order[max(0, end - _MOST_KEYS) : end]
            while (found := self._lookup(tier, keys, otherwise=True)) is None:
                yield False
            has.update(itertools.compress(keys, found))
            if end > _MOST_KEYS:
                yield True
        return has

    # both

    def _launch(self, extent: Extent, moves: list[_Move], *, part: _Part | None = None) -> None:
        """Copy records between an extent and tiers; into the extent for a `part`."""
        driver = self._driver

        def copy_all(address: int) -> None:
            for run in _runs(moves):
                ends = address + run[0].offset_bytes, run[0].transfer.address
                target, source = ends if part is not None else reversed(ends)
                driver.copy(target, source, len(run) * RECORD_BYTES)

        self._has_worked = True
        copy = _Copy(DONE, moves, part, failed=True)
        with driver.on(self._store_stream if part is None else self._load_stream):
            if part is not None:
                part.num_copies += 1
            try:
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


def _runs(moves: list[_Move]) -> Iterator[list[_Move]]:
    """Records that one copy can move: neighbours in the extent and in the memory of their tier."""

    def begins(numbered: tuple[int, _Move]) -> tuple[Tier, int, int]:
        (number, (offset, tier, transfer)) = numbered
        return tier, offset - number * RECORD_BYTES, transfer.address - number * RECORD_BYTES

    for _, run in itertools.groupby(enumerate(sorted(moves, key=attrgetter("offset_bytes"))), begins):
        yield [move for _, move in run]


def _first_lacking(pages: bytearray, start: int = 0) -> int:
    """The first page from `start` on that is nowhere; their number if there is none."""
    page = pages.find(0, start)
    return len(pages) if page < 0 else page
