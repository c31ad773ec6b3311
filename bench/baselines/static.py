"""The static cache: the longest sequence's rows are taken for every slot at once, as one plain tensor. It shares nothing.

It gives the engine what `KVCache` gives it. How many sequences run is how many slots the budget holds.
"""

from collections.abc import Hashable, Iterable
from typing import Any, Final, NoReturn

import numpy as np
import torch

from bench.baselines.slots import Planes, SlotNumbers, SlottedCache, planes_of
from vmmkv import KVLayout
from vmmkv.cache import CacheStats


class StaticSequence:
    """See engine.kv_backend.EngineCacheSequence."""

    def __init__(self, cache: "StaticCache", slot: int) -> None:
        self._cache = cache
        self.slot = slot
        self.closed = False

    @property
    def length(self) -> int:
        """Rows launched."""
        return int(self._cache.lengths[self.slot])

    def grow(self, num_tokens: int) -> None:
        """It has all that it may need."""
        assert num_tokens <= self._cache.max_tokens, f"a slot of {self._cache.max_tokens} rows is asked for {num_tokens}"

    def advance(self, num_tokens: int = 1) -> None:
        """So many more rows are launched."""
        self._cache.advance(self.slot, num_tokens)

    def start(self, group: int = 0) -> int:
        """All rows are kept."""
        return 0

    def advance_start(self, group: int) -> None:
        """No group has a window."""
        raise AssertionError("a static cache has no windows")

    def close(self) -> None:
        """The slot is the next one's. Idempotent."""
        if not self.closed:
            self.closed = True
            self._cache.numbers.give_back(self.slot)


class StaticCache(SlottedCache):
    """See engine.kv_backend.EngineCache. Raises: ValueError for a layout with windows, several groups or quantised rows."""

    def __init__(self, layout: KVLayout, device: torch.device, *, slots: int, max_tokens: int) -> None:
        super().__init__(layout, SlotNumbers(slots, device), max_tokens=max_tokens)
        self.planes: Final[Planes] = planes_of(layout, (1 + slots, max_tokens), device)

    def k(self, layer: int) -> torch.Tensor:
        """[1 + slots, max_tokens, kv_heads, head_dim]"""
        return self.planes[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        """[1 + slots, max_tokens, kv_heads, head_dim]"""
        return self.planes[layer][1]

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> StaticSequence:
        """A new sequence. Cost: an upload. Raises: OutOfPages if all slots run one."""
        slot = self.numbers.take()
        self.numbers.allow([slot], [max_tokens or self.max_tokens])
        return StaticSequence(self, slot)

    def fork(self, sequence: Any, count: int = 1, *, max_tokens: int | None = None) -> NoReturn:
        """Raises: ValueError."""
        raise ValueError("a static cache forks no sequences: beam searches are not for this baseline")

    def copy_rows(self, pairs: Iterable[tuple[Any, Any]], first: int, end: int) -> NoReturn:
        """Raises: ValueError."""
        raise ValueError("a static cache copies no rows: beam searches are not for this baseline")

    def lookahead_tokens(self, step_us: float) -> int:
        """All memory is there."""
        return 0

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int) -> int:
        """All memory is there."""
        return 0

    def stats(self) -> CacheStats:
        """In the words of a cache of pages."""
        live = np.flatnonzero(self.limits)
        slot_bytes = self.max_tokens * self.layout.row_bytes
        budget_bytes, used_bytes = self.num_slots * slot_bytes, len(live) * slot_bytes
        token_bytes = int(self.lengths[live].sum()) * self.layout.row_bytes
        return CacheStats(
            reserved_bytes=budget_bytes,
            mapped_bytes=used_bytes,
            pending_reclaim_bytes=0,
            parked_bytes=0,
            token_bytes=token_bytes,
            guard_bytes=0,
            waste_bytes=used_bytes - token_bytes,
            pool_created_bytes=budget_bytes,
            pool_held_bytes=budget_bytes,
            pool_used_bytes=used_bytes,
            pool_free_bytes=budget_bytes - used_bytes,
            pool_budget_bytes=budget_bytes,
            num_tokens=int(self.lengths[live].sum()),
            num_sequences=len(live),
            num_parked=0,
            num_slots=self.num_slots,
            blocked_steps=0,
            blocked_us=0.0,
            mapped_pages=0,
            mapped_ahead_pages=0,
            adopted_slots=0,
            driver_calls={},
        )

    def check(self) -> None:
        """No sequence has more rows than its slot."""
        assert (self.lengths <= self.limits).all() and (self.limits <= self.max_tokens).all()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.planes.clear()
