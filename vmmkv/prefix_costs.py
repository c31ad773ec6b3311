"""Which way to attach a matched prefix is the cheapest: adopt, alias, copy or compute it again.

    adopt       a write of the limit, and what the parked slot has past the match, which goes: tokens * lose_us_per_token
    alias       handles * alias_us, and the copy of the rest
    copy        bytes * copy_us_per_byte, handles * map_us, and pages * map_us * (1 + the share of the budget that is held):
                what a page is worth, since somebody else will have to do without it
    recompute   tokens * recompute_us_per_token

An alias has a second use: rows that several sequences share are read from L2 by those that run side by side, so a step reads
the prefix once and not once for each. 128 x 4096 tokens on an H200 take 1 / 1.25 of the time with our decode kernel; 1 / 1.9
was seen with another. What a copy would lose of that is charged for as many steps as the caller expects.
"""

import enum
import time
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv.extents import LARGE_PAGES
from vmmkv.prefix_plan import Plan
from vmmkv.units import MIB, PAGE_BYTES, ceil_div


class Rung(enum.Enum):
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

    def of(self, rung: Rung, plan: Plan, row_bytes: int, *, scarcity: float, num_steps: int, num_lost: int) -> float:
        """What attaching takes by one rung, in us.

        `scarcity`: the share of the budget that is held.
        `num_steps`: in how many steps the prefix will be read.
        `num_lost`: rows past the match that the slot has which would be adopted.
        """
        if rung is Rung.ADOPT:
            return num_lost * self.lose_us_per_token
        size_bytes = plan.num_tokens * row_bytes
        num_pages = ceil_div(size_bytes, PAGE_BYTES)
        num_handles = sum(divmod(num_pages, LARGE_PAGES))
        aliased_pages = sum(extent.num_pages for pages in plan.pages for extent in pages.values())
        if rung is Rung.ALIAS:
            rest_bytes = max(0, size_bytes - aliased_pages * PAGE_BYTES)
            return plan.num_handles * self.alias_us + self.map_us + rest_bytes * self.copy_us_per_byte
        if rung is Rung.COPY:
            missed = _SAVED_BY_L2 * num_steps * size_bytes * self.copy_us_per_byte / 2  # a copy reads and writes
            taken = num_pages * self.map_us * (1 + scarcity)
            return size_bytes * self.copy_us_per_byte + num_handles * self.map_us + taken + missed
        return plan.num_tokens * self.recompute_us_per_token


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
