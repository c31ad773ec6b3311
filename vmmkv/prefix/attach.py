"""How a new sequence comes to what is known of its prompt: the ways there are, the cheapest, and that way gone.

    prompt ──> plan: what of it can be had, and from where ──> choose: adopt, alias, copy, recompute ──> Attached

Whoever calls holds the pool's lock.
"""

import contextlib
import enum
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv.cache import KVCache, ParkedSlot, Sequence
from vmmkv.errors import OutOfPages
from vmmkv.memory.pool import LARGE_PAGES
from vmmkv.memory.sharing import Pages, SlotRows, Windows
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.prefix.index import Placed, Plan, PrefixNodes, plan
from vmmkv.prefix.radix_tree import Match, Tokens
from vmmkv.units import MIB, PAGE_BYTES, ceil_div

# -------- prefix costs
# Which way to attach a matched prefix is the cheapest: adopt, alias, copy or compute it again.
#
#     adopt       a write of the limit, and what the parked slot has past the match, which goes: tokens * lose_us_per_token
#     alias       handles * alias_us, and the copy of the rest
#     copy        bytes * copy_us_per_byte, handles * map_us, and pages * map_us * (1 + the share of the budget that is held):
#                 what a page is worth, since somebody else will have to do without it
#     recompute   tokens * recompute_us_per_token
#
# An alias has a second use: rows that several sequences share are read from L2 by those that run side by side, so a step reads
# the prefix once and not once for each. 128 x 4096 tokens on an H200 take 1 / 1.25 of the time with our decode kernel; 1 / 1.9
# was seen with another. What a copy would lose of that is charged for as many steps as the caller expects.


class AttachMethod(enum.Enum):
    """The ways to attach a prefix, the cheapest first; what each costs decides."""

    ADOPT = "adopt"
    """A parked slot that has the rows becomes the sequence's."""
    ALIAS = "alias"
    """Extents of the tree are mapped under a new slot."""
    COPY = "copy"
    """The bytes are copied into pages of its own."""
    RECOMPUTE = "recompute"
    """Nothing is attached."""


_SAVED_BY_L2: Final = 0.5
"""Share of a prefix's time that a sharer saves in a step: half for a kernel that memory bounds; a fifth, measured, for ours."""


@dataclass(slots=True)
class Costs:
    """What things take on the device at hand, in microseconds; running means where the work itself measures them."""

    alias_us: float = 60.0
    """Map and access of one more extent, and its unmap when the sequence ends."""
    map_us: float = 100.0
    """A page of one's own."""
    copy_us_per_byte: float = 1e-5
    """Device memory to device memory."""
    recompute_us_per_token: float = float("inf")
    """Of prefill; only the owner of the model knows. Never, if nobody says."""
    lose_us_per_token: float = 2.0
    """What a row is worth that is lost to others: computing it takes some 20 us (8 billion weights, an H200), and one in ten is
    wanted again. So a newcomer with the same system prompt does not take the slot of a long conversation."""

    def calibrate(self, device: torch.device) -> None:
        """Measure what a copy takes. Cost: some milliseconds and 32 MiB for that long; waits for the device."""
        source = torch.zeros(16 * MIB, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        for _ in range(2):  # the first one loads kernels and touches pages
            _wait(device)
            began_ns = time.perf_counter_ns()
            for _ in range(4):
                target.copy_(source)
            _wait(device)
            self.copy_us_per_byte = (time.perf_counter_ns() - began_ns) / 1e3 / 4 / source.numel()

    def of(self, method: AttachMethod, plan: Plan, row_bytes: int, *, scarcity: float, num_steps: int, num_lost: int) -> float:
        """What attaching takes by one method, in us.

        `scarcity`: the share of the budget that is held.
        `num_steps`: in how many steps the prefix will be read.
        `num_lost`: rows past the match that the slot has which would be adopted.
        """
        if method is AttachMethod.ADOPT:
            return num_lost * self.lose_us_per_token
        size_bytes = plan.num_tokens * row_bytes
        num_pages = ceil_div(size_bytes, PAGE_BYTES)
        num_handles = sum(divmod(num_pages, LARGE_PAGES))
        aliased_pages = sum(extent.num_pages for pages in plan.pages for extent in pages.values())
        if method is AttachMethod.ALIAS:
            rest_bytes = max(0, size_bytes - aliased_pages * PAGE_BYTES)
            return plan.num_handles * self.alias_us + self.map_us + rest_bytes * self.copy_us_per_byte
        if method is AttachMethod.COPY:
            missed = _SAVED_BY_L2 * num_steps * size_bytes * self.copy_us_per_byte / 2  # a copy reads and writes
            taken = num_pages * self.map_us * (1 + scarcity)
            return size_bytes * self.copy_us_per_byte + num_handles * self.map_us + taken + missed
        return plan.num_tokens * self.recompute_us_per_token


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------- prefix ladder


@dataclass(frozen=True, slots=True)
class Attached:
    """A new sequence, and how it came to its first tokens."""

    sequence: Sequence
    num_tokens: int
    """Rows [0, num_tokens) hold the first tokens of the prompt; the rest is to be computed."""
    method: AttachMethod
    """The way that was told or chosen: of a prefix shorter than a page nothing may have been there to alias."""
    num_aliased: int = 0
    """Extents that it shares with others."""

    @property
    def was(self) -> AttachMethod:
        """What became of it: an alias of nothing is a copy."""
        return AttachMethod.COPY if self.method is AttachMethod.ALIAS and not self.num_aliased else self.method


class Attacher:
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

    def attach(self, tokens: Tokens, namespace: Hashable, *, method: AttachMethod | None, num_steps: int, end: int) -> Attached:
        """By `method`, if it can be had at all, or the cheapest. See `PrefixCache.attach`, and for what it raises."""
        found = self.plan(namespace, tokens)
        taken, parked = self._choose(found, method, num_steps)
        attached: Attached | None = None
        # What has the rows cannot make room for the rest of them; it can for all of them, computed anew.
        with contextlib.suppress(OutOfPages):
            if found and taken is AttachMethod.ADOPT and parked is not None:
                attached = self._adopt(found[0], found[1], parked, end)
            elif taken in (AttachMethod.ALIAS, AttachMethod.COPY):
                attached = self._attach_new(namespace, tokens, taken, end)
        if attached is None:
            attached = Attached(self._cache.open(max_tokens=end, tenant=namespace), 0, AttachMethod.RECOMPUTE)
        return attached

    def plan(self, namespace: Hashable, tokens: Tokens) -> tuple[Match[Placed], Plan] | None:
        """What of a prompt, but for its last token, can be had; None if nothing. Changes nothing."""
        match = self._nodes.tree.match(namespace, tokens[: len(tokens) - 1])
        found = plan(self._memory, self._cache.layout, match)
        return None if found is None else (match, found)

    def _choose(
        self, found: tuple[Match[Placed], Plan] | None, method: AttachMethod | None, num_steps: int
    ) -> tuple[AttachMethod, ParkedSlot | None]:
        if found is None:
            return AttachMethod.RECOMPUTE, None
        match, best = found
        parked = self._adoptable(match, best) if method in (None, AttachMethod.ADOPT) else None
        possible = [AttachMethod.ALIAS, AttachMethod.RECOMPUTE]
        if parked is not None:
            possible.append(AttachMethod.ADOPT)
        if best.resident is not None:
            possible.append(AttachMethod.COPY)
        if method is not None:
            return (method if method in possible else AttachMethod.RECOMPUTE), parked
        pool = self._cache.pool
        scarcity = pool.held_bytes / pool.budget_bytes
        if self._is_measured:
            self.costs.map_us = self._memory.mapper.map_us
            # A page of one's own takes all that an alias takes, and more: a busy host's figures at start-up are not believed.
            self.costs.alias_us = min(self._alias_us, self.costs.map_us)
        num_lost = 0 if parked is None else parked.length - best.num_tokens

        def cost(each: AttachMethod) -> float:
            return self.costs.of(each, best, self._row_bytes, scarcity=scarcity, num_steps=num_steps, num_lost=num_lost)

        if parked is not None and cost(AttachMethod.ADOPT) <= self.costs.map_us:
            return AttachMethod.ADOPT, parked  # no alias is cheaper, and what could be aliased need not be looked up

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
        return Attached(sequence, num_tokens, AttachMethod.ADOPT)

    def _attach_new(self, namespace: Hashable, tokens: Tokens, method: AttachMethod, end: int) -> Attached | None:
        """By alias or copy, into a slot with nothing in it; None if the match has gone while one was cleared."""
        occupancy, memory = self._occupancy, self._memory
        slot = occupancy.clear_run(1)
        found = self.plan(namespace, tokens)
        if found is None or (method is AttachMethod.COPY and found[1].resident is None):
            return None
        match, best = found
        deepest = match.deepest
        assert deepest is not None
        pages: tuple[Pages, ...] = best.pages if method is AttachMethod.ALIAS else tuple({} for _ in best.pages)
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
        return Attached(sequence, best.num_tokens, method, num_aliased=sum(map(len, pages)))


@dataclass(frozen=True, slots=True)
class _Rest:
    """Where the rows of a plan are copied from that are not aliased: a resident's slot, or an extent of the tree."""

    memory: SlotMemory
    windows: Windows
    plan: Plan

    def copy(self, group: int, first_byte: int, size_bytes: int, target: int) -> None:
        """See sharing.Source."""
        if self.plan.resident is not None:
            SlotRows(self.memory, self.plan.resident).copy(group, first_byte, size_bytes, target)
        else:
            tail = self.plan.tails[group]
            assert tail is not None, "rows are missing and nobody has them"
            self.windows.copy(tail.extent, first_byte - tail.page * PAGE_BYTES, size_bytes, target)
