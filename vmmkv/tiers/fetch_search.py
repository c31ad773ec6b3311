"""Fetches: what tiers have of a prompt past what the device has, found out piece by piece.

    start ──> ask_next ──> hash <──> ask ──> choose ──> ended
                  │ none has the next records   │ not worth it, or another fetch loads them
                  └─────────────────────────────┴─────> ended, with nothing to load

No step waits for a tier, and the cost of those between the first and the last does not grow with the prompt.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from vmmkv.layout import KVLayout
from vmmkv.memory.extents import SIZE_CLASSES, Extent, largest_at
from vmmkv.prefix.index import Placed, PrefixIndex
from vmmkv.prefix.radix_tree import Node
from vmmkv.prefix.tiered import Fetch
from vmmkv.tiers.keys import PageKeys
from vmmkv.tiers.mover import MOST_KEYS, Mover
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.units import PAGE_BYTES, ceil_div

_MOST_ASKED: Final = 1024
"""Keys of a fetch that a tier is asked about at once: it may take a round trip."""

_DEVICE, _TIER = 1, 2
"""Places of a page: 0 for nowhere, _DEVICE, _TIER in the first tier, one more in the second, and so on."""

_IS_ON_DEVICE: Final = bytes(place == _DEVICE for place in range(256))


class FetchSearch:
    """The search of a fetch: which records to load, and from which tiers. At its end `places`, `other` or neither say that."""

    def __init__(
        self,
        fetch: Fetch,
        chain: PageKeys,
        index: PrefixIndex,
        mover: Mover[Extent],
        loading: Mapping[bytes, Fetch],
        *,
        least_tokens: int,
        worth: Callable[[Fetch], bool] | None,
        ended: Callable[[], object],
    ) -> None:
        self.fetch: Final = fetch
        self.chain: Final = chain
        self._step: Callable[[Callable[[], bool]], bool] | None = self._start
        """The next step. It returns whether another one may follow in this poll. None when the search has ended."""
        self.places: list[tuple[int, range]] = []
        """Group and pages of the extents to load, when it has ended."""
        self.other: Fetch | None = None
        """A fetch that loads the same records already."""
        self.node: Node[Placed] | None = None
        """The locked node that the extents follow in the tree."""
        self._layout: Final = chain.layout
        self._index, self._mover, self._loading = index, mover, loading
        self._least_tokens, self._worth, self._ended = least_tokens, worth, ended
        self._have = [bytearray(len(chain.tokens) * group.row_bytes // PAGE_BYTES) for group in self._layout.groups]
        """Place of each page of each group: see _TIER."""
        self._firsts: list[int] = []
        """The first page of each group that is needed and not there."""
        self._whole = [index for index, group in enumerate(self._layout.groups) if group.window is None]
        """The groups without a window, of which every page is needed."""
        self._nexts: list[bytes] = []
        """The keys of the first pages that they lack."""
        self._new: list[tuple[int, int]] = []
        """Pages that are hashed, and that tiers are still to be asked about."""
        self._is_more = True
        """Are there keys left to hash?"""
        self._num_asked = 0
        """Tiers that have answered about them."""
        self._lacking: list[tuple[int, int]] = []
        """Pages that no tier asked so far has."""
        self._keys: list[bytes] = []
        """Keys of those pages, which the next tier is asked about."""
        self._is_waiting = False
        """Has the next tier still to find out?"""

    def advance(self, may_go_on: Callable[[], bool]) -> bool:
        """Do a step, and more while `may_go_on` says so. Is there more to find? An error ends the search without places."""
        try:
            while self._step is not None and self._step(may_go_on):
                pass
        except BaseException:
            self._end([])
            self._ended()
            raise
        if self._step is None:
            self._ended()
        return self._step is not None

    def tiers_of(self, index: int, pages: range) -> list[tuple[int, bytes]]:
        """The number of the tier that has each of these pages of a group, and its key."""
        return [(self._have[index][page] - _TIER, self.chain.by_group[index][page]) for page in pages]

    def on_device(self) -> list[bytearray]:
        """Flags of the pages that were on the device, by group and page: 1 or 0."""
        return [pages.translate(_IS_ON_DEVICE) for pages in self._have]

    # the steps

    def _start(self, may_go_on: Callable[[], bool]) -> bool:
        """Match the prompt in the tree, and lock what the fetch goes on from."""
        chain, tree = self.chain, self._index.tree
        match = tree.match(chain.namespace, chain.tokens)
        known = itertools.chain.from_iterable(node.pieces for node in match.path)
        pieces = [piece for piece in known if piece.end_token <= match.num_tokens and not piece.value.first_token]
        for piece in pieces:
            first, end = piece.value.page, piece.value.end_page
            self._have[piece.group][first:end] = bytes([_DEVICE]) * (end - first)
        if pieces:  # making room must not evict what this goes on from, but may what others have behind that
            end_token = max(piece.end_token for piece in pieces)
            self.node = tree.insert(chain.namespace, chain.tokens[:end_token]).node
            tree.lock(self.node)
        self._firsts = [
            _first_lacking(pages, needed(self._layout, index, self.fetch.known_tokens).start)
            for index, pages in enumerate(self._have)
        ]
        self._nexts = [
            chain.key(index, self._firsts[index]) for index in self._whole if self._firsts[index] < len(self._have[index])
        ]
        self._step = self._ask_next
        return True

    def _ask_next(self, may_go_on: Callable[[], bool]) -> bool:
        """Ask whether tiers have the first records that the device lacks. Nearly no new prompt gets further."""
        found = self._mover.lookup(self._nexts) if self._nexts else []
        if found is None:
            return False
        if not all(found) or self._is_loaded_by_other(self._nexts):
            return self._end([])
        self.chain.skip(self._firsts)
        self._step = self._hash
        return True

    def _hash(self, may_go_on: Callable[[], bool]) -> bool:
        """Hash some keys."""
        some = self.chain.hash_some(MOST_KEYS)
        self._new += some
        self._is_more = len(some) == MOST_KEYS
        if not self._is_more or len(self._new) >= _MOST_ASKED:
            self._step = self._ask
        return not self._is_more or may_go_on()

    def _ask(self, may_go_on: Callable[[], bool]) -> bool:
        """Ask one tier about them."""
        tier, place = self._mover.tiers[self._num_asked], self._num_asked + _TIER
        if not self._is_waiting:
            self._lacking = [(index, page) for index, page in self._new if not self._have[index][page]]
            self._keys = [self.chain.by_group[index][page] for index, page in self._lacking]
        elif self._mover.lookup_in(tier, self._keys[-1:]) is None:
            return False
        found = self._mover.lookup_in(tier, self._keys)
        self._is_waiting = found is None
        if found is None:
            return False
        for index, page in itertools.compress(self._lacking, found):
            self._have[index][page] = place
        self._num_asked += 1
        if self._num_asked == len(self._mover.tiers):
            self._num_asked, self._new = 0, []
            all_there = all(len(self.chain.by_group[index]) <= _first_lacking(self._have[index]) for index in self._whole)
            self._step = self._hash if self._is_more and all_there else self._choose
        return True

    def _choose(self, may_go_on: Callable[[], bool]) -> bool:
        """Take as much as is worth it."""
        fetch, have = self.fetch, self._have
        while (num_tokens := reach(self._layout, have, len(self.chain.tokens) - 1)) - fetch.known_tokens >= self._least_tokens:
            fetch.num_tokens, fetch.bytes_by_tier = num_tokens, Counter()
            places = [*self._places(num_tokens)]
            if self._is_loaded_by_other(
                [key for index, pages in places for key in self.chain.by_group[index][pages.start : pages.stop]]
            ):
                break
            last = 0
            for place, tier in enumerate(self._mover.tiers, _TIER):
                if num_records := sum(have[index].count(place, pages.start, pages.stop) for index, pages in places):
                    fetch.bytes_by_tier[tier.name] += num_records * RECORD_BYTES
                    last = place
            if not last:
                break
            if self._worth is None or self._worth(fetch):
                return self._end(places)
            for pages in have:  # what is before the records of the slowest tier may be worth it
                pages[:] = pages.replace(bytes([last]), b"\0")
        return self._end([])

    def _end(self, places: list[tuple[int, range]]) -> bool:
        self._step, self.places, self._worth = None, places, None
        return False

    def _is_loaded_by_other(self, keys: Sequence[bytes]) -> bool:
        """Does another fetch load one of these records?"""
        self.other = next(filter(None, map(self._loading.get, keys)), None)
        return self.other is not None

    def _places(self, num_tokens: int) -> Iterator[tuple[int, range]]:
        """Group and pages of the extents to load: large ones where all their pages are needed."""
        for index, (group, pages, first) in enumerate(zip(self._layout.groups, self._have, self._firsts, strict=True)):
            wanted = needed(self._layout, index, num_tokens)
            page = max(first, wanted.start)
            while page < wanted.stop:
                end = min(wanted.stop, page + SIZE_CLASSES[0]) if group.window is None else page
                there = pages.find(_DEVICE, page, end)
                run = range(page, page + largest_at(page, end if there < 0 else there))
                if pages[page] != _DEVICE:
                    yield index, run
                page = run.stop


def needed(layout: KVLayout, index: int, num_tokens: int) -> range:
    """The pages of a group with the rows that a sequence of so many tokens needs for its next one."""
    group = layout.groups[index]
    start = group.page_of(layout.start_for(group, num_tokens))
    return range(start, ceil_div(num_tokens * group.row_bytes, PAGE_BYTES))


def reach(layout: KVLayout, have: list[bytearray], most: int) -> int:
    """The largest number of tokens, up to `most`, for which each needed page is there."""
    num_tokens = most
    while True:
        fewer = num_tokens
        for index, (group, pages) in enumerate(zip(layout.groups, have, strict=True)):
            wanted = needed(layout, index, num_tokens)
            missing = pages.find(0, wanted.start, wanted.stop)
            if missing < 0 and wanted.stop > len(pages):
                missing = max(len(pages), wanted.start)
            if missing >= 0:
                fewer = min(fewer, group.tokens_under(missing))
        if fewer == num_tokens:
            return num_tokens
        num_tokens = fewer


def _first_lacking(pages: bytearray, start: int = 0) -> int:
    """The first page from `start` on that is nowhere; their number if there is none."""
    page = pages.find(0, start)
    return len(pages) if page < 0 else page
