"""How a new sequence comes to what is known of its prompt: the ways there are, the cheapest, and that way gone.

    prompt ──> plan: what of it can be had, and from where ──> choose: adopt, alias, copy, recompute ──> Attached

Whoever calls holds the pool's lock.
"""

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from vmmkv.cache import KVCache
from vmmkv.errors import OutOfPages
from vmmkv.memory import SlotMemory
from vmmkv.prefix_costs import Costs, Rung
from vmmkv.prefix_nodes import PrefixNodes
from vmmkv.prefix_plan import Placed, Plan, plan
from vmmkv.radix import Match, Tokens
from vmmkv.scratch import Windows
from vmmkv.sequence import ParkedSlot, Sequence
from vmmkv.sharing import Pages, SlotRows
from vmmkv.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Attached:
    """A new sequence, and how it came to its first tokens."""

    sequence: Sequence
    num_tokens: int
    """Rows [0, num_tokens) hold the first tokens of the prompt; the rest is to be computed."""
    rung: Rung
    """The way that was told or chosen: of a prefix shorter than a page nothing may have been there to alias."""
    num_aliased: int = 0
    """Extents that it shares with others."""

    @property
    def was(self) -> Rung:
        """What became of it: an alias of nothing is a copy."""
        return Rung.COPY if self.rung is Rung.ALIAS and not self.num_aliased else self.rung


class Ladder:
    """Attaches sequences of one cache to what its tree has. `costs` decides between the ways, measured if there are none.

    Cost: measuring a copy and an alias, some milliseconds.
    """

    def __init__(self, cache: KVCache, nodes: PrefixNodes, windows: Windows, costs: Costs | None) -> None:
        self.costs = costs or Costs()
        self._cache = cache
        self._occupancy = cache._occupancy
        self._memory = cache._occupancy.memory
        self._nodes = nodes
        self._windows = windows
        self._is_measured = costs is None
        self._row_bytes = sum(group.row_bytes for group in cache.layout.groups)
        if self._is_measured:
            self.costs.calibrate(cache.device)
            self.costs.alias_us = windows.measure_us() or self.costs.alias_us
        self._alias_us = self.costs.alias_us

    def attach(self, tokens: Tokens, namespace: Hashable, *, rung: Rung | None, num_steps: int, end: int) -> Attached:
        """By `rung`, if it can be had at all, or the cheapest. See `PrefixCache.attach`, and for what it raises."""
        found = self.plan(namespace, tokens)
        taken, parked = self._choose(found, rung, num_steps)
        attached: Attached | None = None
        # What has the rows cannot make room for the rest of them; it can for all of them, computed anew.
        with contextlib.suppress(OutOfPages):
            if found and taken is Rung.ADOPT and parked is not None:
                attached = self._adopt(found[0], found[1], parked, end)
            elif taken in (Rung.ALIAS, Rung.COPY):
                attached = self._attach_new(namespace, tokens, taken, end)
        if attached is None:
            attached = Attached(self._cache.open(max_tokens=end, tenant=namespace), 0, Rung.RECOMPUTE)
        return attached

    def plan(self, namespace: Hashable, tokens: Tokens) -> tuple[Match[Placed], Plan] | None:
        """What of a prompt, but for its last token, can be had; None if nothing. Changes nothing."""
        match = self._nodes.tree.match(namespace, tokens[: len(tokens) - 1])
        found = plan(self._memory, self._cache.layout, match)
        return None if found is None else (match, found)

    def _choose(
        self, found: tuple[Match[Placed], Plan] | None, rung: Rung | None, num_steps: int
    ) -> tuple[Rung, ParkedSlot | None]:
        if found is None:
            return Rung.RECOMPUTE, None
        match, best = found
        parked = self._adoptable(match, best) if rung in (None, Rung.ADOPT) else None
        possible = [Rung.ALIAS, Rung.RECOMPUTE]
        if parked is not None:
            possible.append(Rung.ADOPT)
        if best.resident is not None:
            possible.append(Rung.COPY)
        if rung is not None:
            return (rung if rung in possible else Rung.RECOMPUTE), parked
        pool = self._cache.pool
        scarcity = pool.held_bytes / pool.budget_bytes
        if self._is_measured:
            self.costs.map_us = self._memory.mapper.map_us
            # A page of one's own takes all that an alias takes, and more: a busy host's figures at start-up are not believed.
            self.costs.alias_us = min(self._alias_us, self.costs.map_us)
        num_lost = 0 if parked is None else parked.length - best.num_tokens

        def cost(each: Rung) -> float:
            return self.costs.of(each, best, self._row_bytes, scarcity=scarcity, num_steps=num_steps, num_lost=num_lost)

        if parked is not None and cost(Rung.ADOPT) <= self.costs.map_us:
            return Rung.ADOPT, parked  # no alias is cheaper, and what could be aliased need not be looked up

        return min(possible, key=cost), parked

    def _adoptable(self, match: Match[Placed], best: Plan) -> ParkedSlot | None:
        """A parked slot with these rows, of which nothing that others need would be written over; the shortest."""
        deepest = match.deepest
        assert deepest is not None
        slots = [slot for slot in deepest.residents if slot in self._nodes.kept] if deepest.has_residents else []
        parked = [self._occupancy.parked[slot] for slot in slots if isinstance(slot, int)]
        starts = [self._cache.layout.start_for(group, best.num_tokens) for group in self._cache.layout.groups]
        fitting = [
            each
            for each in parked
            if all(self._memory.table.starts[index, each.slot] <= start for index, start in enumerate(starts))
            and self._nodes.is_free_past(each.slot, best.num_tokens)
        ]
        return min(fitting, key=lambda each: (each.length, -each.stamp), default=None)

    def _adopt(self, match: Match[Placed], best: Plan, parked: ParkedSlot, end: int) -> Attached:
        """The nodes past the match go, for their rows will be written over; what they held is the slot's alone."""
        slot, num_tokens = parked.slot, best.num_tokens
        self._nodes.shorten(slot, num_tokens, discard=True)
        parked.length = num_tokens
        node = self._nodes.kept.pop(slot)
        self._nodes.tree.lock(node)  # making room does not evict what is being adopted
        try:
            sequence = self._occupancy.take_over(parked, num_tokens, end)
        except BaseException:
            self._nodes.kept[slot] = node
            raise
        finally:
            self._nodes.tree.unlock(node)
        return Attached(sequence, num_tokens, Rung.ADOPT)

    def _attach_new(self, namespace: Hashable, tokens: Tokens, rung: Rung, end: int) -> Attached | None:
        """By alias or copy, into a slot with nothing in it; None if the match has gone while one was cleared."""
        occupancy, memory = self._occupancy, self._memory
        slot = occupancy.clear_run(1)
        found = self.plan(namespace, tokens)
        if found is None or (rung is Rung.COPY and found[1].resident is None):
            return None
        match, best = found
        deepest = match.deepest
        assert deepest is not None
        pages: tuple[Pages, ...] = best.pages if rung is Rung.ALIAS else tuple({} for _ in best.pages)
        for index, group in enumerate(self._cache.layout.groups):
            memory.table.starts[index, slot] = self._cache.layout.start_for(group, best.num_tokens)
        tails = [tail.extent for tail in best.tails if tail is not None]
        self._nodes.tree.lock(deepest)  # making room evicts nothing that is about to be read: no slot with these rows,
        for extent in tails:  # nor extents of nodes below
            self._cache.pool.hold(extent)
        self._nodes.source = best.resident
        try:
            sequence = occupancy.open_with(
                slot, end, namespace, best.num_tokens, pages, _Rest(self._memory, self._windows, best)
            )
            if best.resident in occupancy.parked:
                try:
                    occupancy.parked[best.resident].fence = memory.fence()
                except BaseException:
                    sequence.close()
                    raise
        finally:
            self._nodes.source = None
            self._nodes.tree.unlock(deepest)
            for extent in tails:
                self._cache.pool.drop(extent)
        return Attached(sequence, best.num_tokens, rung, num_aliased=sum(map(len, pages)))


@dataclass(frozen=True, slots=True)
class _Rest:
    """Where the rows of a plan are copied from that are not aliased: a resident's slot, or an extent of the tree."""

    memory: SlotMemory
    windows: Windows
    plan: Plan

    def copy(self, group: int, first_byte: int, target: torch.Tensor) -> None:
        """See sharing.Source."""
        if self.plan.resident is not None:
            SlotRows(self.memory, self.plan.resident).copy(group, first_byte, target)
        else:
            tail = self.plan.tails[group]
            assert tail is not None, "rows are missing and nobody has them"
            self.windows.copy(tail.extent, first_byte - tail.page * PAGE_BYTES, target)
