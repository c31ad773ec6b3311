"""Prefixes that an earlier process left with the holder: each is parked in a slot, before a prompt wants it."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Final

from vmmkv.errors import OutOfPages
from vmmkv.memory import sharing
from vmmkv.memory.extents import Extent
from vmmkv.memory.slots import ParkedSlot, Slots
from vmmkv.memory.states import SlotState
from vmmkv.prefix.attach import Attacher
from vmmkv.prefix.index import Placed, PrefixIndex
from vmmkv.prefix.radix_tree import Match, Node, Piece

_PREPARED_AT_ONCE: Final = 8
"""Extents that are imported and mapped between two looks at the time: some 0.5 ms."""


class RestoredPrefixes:
    """The paths of `PrefixIndex.restored`. The caller holds the pool's lock."""

    def __init__(self, slots: Slots, index: PrefixIndex, attacher: Attacher) -> None:
        self._slots = slots
        self._memory = slots.memory
        self._index = index
        self._attacher = attacher
        self._preparing: Iterator[bool] | None = None
        """The path that `prepare` has begun, see `_prepare`; its slot until that has all rows."""
        self._begun: ParkedSlot | None = None

    def prepare(self, budget_us: float, free_slots: int) -> bool:
        """Park some of them, for about `budget_us`; False if there is nothing left. See `PrefixCache.prepare`."""
        end_ns, restored = time.perf_counter_ns() + min(budget_us, 1e12) * 1e3, self._index.restored
        has_worked = False
        while restored or self._preparing:
            self._preparing = self._preparing or self._prepare(restored.pop(), free_slots)
            has_worked, goes_on = True, False
            try:
                goes_on = next(self._preparing, False)
            finally:
                if not goes_on:
                    self._stop()
            if time.perf_counter_ns() > end_ns:
                break
        return has_worked

    def _stop(self) -> None:
        parked, self._preparing, self._begun = self._begun, None, None
        if parked is not None and self._slots.parked_slots.get(parked.slot) is parked:
            self._slots.evict(parked)

    def _prepare(self, node: Node[Placed], free_slots: int) -> Iterator[bool]:
        """Park the path of a node in a free slot. Yields after each few extents."""
        slots, memory, index = self._slots, self._memory, self._index
        hit = None if node.parent is None else self._attacher.hit(Match(node.path(), node.end), node.end)
        if hit is None or hit.resident is not None:
            return
        if memory.table.num(SlotState.FREE) <= free_slots:
            index.restored.clear()
            return
        namespace, slot = index.tree.namespace_of(node), slots.clear_run(1)
        parked = self._begun = slots.park_bare(slot, namespace, hit.starts, node.stamp)
        aliased = [(group, *each) for group, pages in enumerate(hit.extents.aliased) for each in pages.items()]
        known = _state_of(node)
        for first in range(0, len(aliased), _PREPARED_AT_ONCE):
            some = aliased[first : first + _PREPARED_AT_ONCE]
            if not self._could_import(extent for _, _, extent in some):
                return
            given = [{page: extent for at, page, extent in some if at == group} for group in range(len(memory.arenas))]
            with slots.mapping_under(parked):
                sharing.alias(memory, slot, given)
            yield True
            if slots.parked_slots.get(slot) is not parked or _state_of(node) != known:
                index.restored.append(node)  # begin again
                return
        aliased_before, hit = hit.extents.aliased, self._attacher.hit(Match(node.path(), node.end), node.end)
        if hit is None or hit.extents.aliased != aliased_before:  # what lies below the path can have gone
            index.restored.append(node)
            return
        if not self._could_import(hit.all_extents()):
            return
        memory.table.begin(slot, hit.starts, hit.extents.firsts)
        with contextlib.suppress(OutOfPages), self._attacher.reading(hit), slots.mapping_under(parked):
            sharing.take(memory, slot, hit.num_tokens, hit.extents.aliased, hit.copy)
            parked.length = hit.num_tokens
        if parked.length:
            end = hit.node
            if end.end > hit.num_tokens:
                end = index.tree.split(end, hit.num_tokens)
            for each in end.path():
                each.add_resident(slot)
            index.keep(slot, end)
            self._begun = None

    def _could_import(self, extents: Iterable[Extent]) -> bool:
        """False if rows were lost, or the process may open no more files: a prompt that attaches them makes room."""
        try:
            return self._index.import_extents(extents)
        except OutOfPages:
            return False


def _state_of(node: Node[Placed]) -> list[tuple[Node[Placed], tuple[Piece[Placed], ...], bool]]:
    """State of a node's path that decides a hit on it. Cost: a comparison of two is quick while they are the same."""
    return [(each, each.pieces, bool(each.residents)) for each in node.path()]
