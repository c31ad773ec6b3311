"""In which order the leaves of a radix tree are evicted: least recently used first, none that is locked or pinned.

Two heaps, and every leaf without locks has an entry in one of them:

    recency     (stamp, tick, node)     one entry a node at most; its stamp is not above the node's
    pins        (until, tick, node)     leaves that were found pinned, until the pin ends

Entries are corrected when they come to the top, not when something happens to their node: using a node, the most frequent
of all, then costs nothing here. What comes to the top and is used since goes back by its new stamp; what is no leaf, locked
or removed goes, and comes again when it is a leaf without locks again; what is pinned waits in `pins`. A leaf that is
pinned for ever is in neither heap.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from vmmkv.radix_node import Node

T = TypeVar("T")

_NOWHERE: Final = 0
_RECENCY: Final = 1
_PINS: Final = 2
_SLACK: Final = 64
"""Entries of no use, beyond twice those of use, before they are swept."""


class EvictionOrder(Generic[T]):
    """The leaves that may go, and when. `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._recency: list[tuple[int, int, Node[T]]] = []
        self._pins: list[tuple[float, int, Node[T]]] = []
        self._most_recency = self._most_pins = _SLACK
        # Nodes cannot be compared: the tick decides between equal stamps, the older entry first.
        self._ticks = itertools.count()

    def add(self, node: Node[T]) -> None:
        """It is a leaf without locks, or its pin has changed. Does nothing if it has its entry. O(log n)."""
        if node.queue != _RECENCY and node.below is None and not node.locks:
            node.queue = _RECENCY
            heappush(self._recency, (node.stamp, next(self._ticks), node))
            if len(self._recency) > self._most_recency:
                self._sweep_recency()

    def drop(self, node: Node[T], num_nodes: int) -> None:
        """It was removed from the tree, which has `num_nodes` left. O(1) amortised."""
        if self._recency and self._recency[0][2] is node:
            heappop(self._recency)
        node.queue = _NOWHERE
        if len(self._recency) > 2 * num_nodes + _SLACK:
            self._sweep_recency()

    def oldest(self) -> Node[T] | None:
        """The least recently used leaf without a lock or a live pin; None if there is none.

        O(log n) for each use, lock, pin and removal since the last call.
        """
        self._end_pins()
        while self._recency:
            stamp, tick, node = self._recency[0]
            if self._is_out(node):
                heappop(self._recency)
                node.queue = _NOWHERE
            elif self._is_pinned(node):
                heappop(self._recency)
                self._wait_for_pin(node)
            elif node.stamp != stamp:
                heapreplace(self._recency, (node.stamp, tick, node))
            else:
                return node
        return None

    def each(self) -> Iterator[Node[T]]:
        """What `oldest` would give if each that it gave were removed: parents too, when all of their children are gone.

        Nothing may change meanwhile. O(k log k) for the first k, however many there are: a heap's smallest entries stand
        near its top, and its children are looked at when an entry has come.
        """
        self._end_pins()
        recency = self._recency
        ahead: list[tuple[int, int, int | None, Node[T]]] = [(*entry[:2], 0, entry[2]) for entry in recency[:1]]
        left: dict[Node[T], int] = {}  # children that a parent would still have
        while ahead:
            stamp, tick, index, node = heappop(ahead)
            if index is not None:
                for child in range(2 * index + 1, min(2 * index + 3, len(recency))):
                    child_stamp, child_tick, child_node = recency[child]
                    heappush(ahead, (child_stamp, child_tick, child, child_node))
                if self._is_out(node) or self._is_pinned(node):
                    continue
                if node.stamp != stamp:
                    heappush(ahead, (node.stamp, tick, None, node))
                    continue
            yield node
            parent = node.parent
            assert parent is not None
            left[parent] = left.get(parent, parent.num_children) - 1
            if not left[parent] and parent.parent is not None and not parent.locks and not self._is_pinned(parent):
                # By its own stamp or this last child's: where its own is the lower one, it is next by either.
                heappush(ahead, (parent.stamp, next(self._ticks), None, parent))

    def _is_out(self, node: Node[T]) -> bool:
        """Is it removed, no leaf, or locked?"""
        return node.parent is None or node.below is not None or node.locks > 0

    def _is_pinned(self, node: Node[T]) -> bool:
        return node.pinned_until is not None and node.pinned_until > self._now()

    def _wait_for_pin(self, node: Node[T]) -> None:
        node.queue = _NOWHERE
        assert node.pinned_until is not None
        if node.pinned_until < math.inf:
            node.queue = _PINS
            heappush(self._pins, (node.pinned_until, next(self._ticks), node))
            if len(self._pins) > self._most_pins:
                self._sweep_pins()

    def _end_pins(self) -> None:
        """Leaves whose pin has ended, or whose entry has, are looked at again."""
        if not self._pins:
            return
        now = self._now()
        while self._pins and self._pins[0][0] <= now:
            node = heappop(self._pins)[2]
            if node.queue == _PINS:
                node.queue = _NOWHERE
                self.add(node)

    def _sweep_recency(self) -> None:
        """A conversation leaves an entry for each turn, and its last turn alone is a leaf."""
        live: list[tuple[int, int, Node[T]]] = []
        for entry in self._recency:
            if self._is_out(entry[2]):
                entry[2].queue = _NOWHERE
            else:
                live.append(entry)
        heapify(live)
        self._recency = live
        self._most_recency = 2 * len(live) + _SLACK

    def _sweep_pins(self) -> None:
        """A pin that is changed often leaves an entry each time: keep the first to end for each node that waits."""
        first: dict[Node[T], tuple[float, int, Node[T]]] = {}
        for entry in sorted(self._pins):
            if entry[2].queue == _PINS:
                first.setdefault(entry[2], entry)
        self._pins = list(first.values())  # sorted, and so a heap
        self._most_pins = 2 * len(self._pins) + _SLACK

    def check(self, leaves: set[Node[T]]) -> None:
        """Every leaf has the entries that it should; AssertionError says which does not."""
        assert all(self._recency[(i - 1) // 2] <= self._recency[i] for i in range(1, len(self._recency))), "recency: no heap"
        entries = Counter(node for _, _, node in self._recency if node.parent is not None)
        waiting = {node for _, _, node in self._pins}
        for stamp, _, node in self._recency:
            assert stamp <= node.stamp, f"{node}: its entry is of {stamp}, later than its last use at {node.stamp}"
            assert node.parent is None or node.queue == _RECENCY, f"{node}: has an entry, and says that it has none"
        for node, count in entries.items():
            assert count == 1, f"{node}: {count} entries"
        for node in leaves:
            for_ever = node.pinned_until == math.inf and node.queue == _NOWHERE
            queued = node in entries or (node.queue == _PINS and node in waiting)
            assert node.locks or for_ever or queued, f"{node}: would never be evicted"
