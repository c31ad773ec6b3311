"""Shares of one budget: how much memory each of several engines may map. Plain data; the holder process keeps it.

An engine *needs* memory for the requests that it has, and *wants* more for prefixes that it would keep. Needs come first: the
busiest engine gets what is free, and then what others can spare, of those that have been idle longest first. Wants get what is
free. No engine is left with less than its floor, or than it needs. What an engine has to give up is granted to another one
when it is no more mapped.
"""

from collections.abc import Collection
from dataclasses import dataclass

from vmmkv.errors import BudgetError
from vmmkv.units import format_bytes


@dataclass(eq=False, slots=True)
class Share:
    """The share of one engine, in bytes."""

    floor_bytes: int
    """Bytes that are never taken away for others."""
    most_bytes: int
    """All that it has reserved."""
    budget_bytes: int = 0
    mapped_bytes: int = 0
    needed_bytes: int = 0
    wanted_bytes: int = 0
    busy_s: float = 0.0
    """Time at which the engine last had requests."""

    @property
    def held_bytes(self) -> int:
        """Bytes that no other engine can have now."""
        return max(self.budget_bytes, self.mapped_bytes)

    @property
    def claim_bytes(self) -> int:
        """Bytes that are not taken away for others."""
        return min(max(self.floor_bytes, self.needed_bytes), self.most_bytes)

    @property
    def short_bytes(self) -> int:
        """Bytes that its budget lacks of its claim."""
        return max(0, self.claim_bytes - self.budget_bytes)


def check_floor(shares: Collection[Share], floor_bytes: int, total_bytes: int) -> None:
    """Check that an engine with this floor may join. Raises: BudgetError."""
    others_bytes = sum(share.floor_bytes for share in shares)
    if others_bytes + floor_bytes > total_bytes:
        raise BudgetError(
            f"a floor of {format_bytes(floor_bytes)} does not fit beside those of {len(shares)} other engines, "
            f"{format_bytes(others_bytes)}, in {format_bytes(total_bytes)}"
        )


def settle(shares: Collection[Share], total_bytes: int) -> None:
    """Set the budgets, whose sum, with what is mapped above them, is at most the total."""
    _grant(shares, total_bytes)
    on_its_way = sum(max(0, share.mapped_bytes - share.budget_bytes) for share in shares)
    short_bytes = sum(share.short_bytes for share in shares) - on_its_way
    for share in sorted(shares, key=lambda share: share.busy_s):
        taken = max(0, min(short_bytes, share.budget_bytes - share.claim_bytes))
        share.budget_bytes -= taken
        short_bytes -= taken
    _grant(shares, total_bytes)
    if not any(share.short_bytes for share in shares):
        for share in shares:
            more = min(share.wanted_bytes, share.most_bytes) - share.budget_bytes
            share.budget_bytes += max(0, min(more, free_bytes(shares, total_bytes)))


def free_bytes(shares: Collection[Share], total_bytes: int) -> int:
    """Bytes that no engine holds; below 0 if the total was lowered."""
    return total_bytes - sum(share.held_bytes for share in shares)


def _grant(shares: Collection[Share], total_bytes: int) -> None:
    """Give what is free to engines that need it, the busiest first."""
    for share in sorted(shares, key=lambda share: -share.needed_bytes):
        # What it still has mapped above its budget is its own again first.
        own = min(share.short_bytes, max(0, share.mapped_bytes - share.budget_bytes))
        share.budget_bytes += own
        share.budget_bytes += max(0, min(share.short_bytes, free_bytes(shares, total_bytes)))
