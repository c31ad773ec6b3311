"""Each system as the engine's memory: what `loading.assemble` takes as `open_memory`.

Legend: N queries, B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Self

import torch

from bench.baselines import COMMON_PREFILL
from bench.baselines.paged import BLOCK_ROWS, BlockRows, PagedCache, PagedPrefixes
from bench.baselines.static import StaticCache
from vmmkv.errors import BudgetError
from vmmkv.server.engine.attention import Batch, SlotRows
from vmmkv.server.engine.kv_backend import BackendConfig, OpenBackend, SlotBackend
from vmmkv.units import format_bytes

# vmmkv with the prefill kernel that blocks have too: two systems then differ by where rows lie, and by nothing else. On Hopper
# slots in bf16 with heads of 128 have a kernel of their own (kernels/attention/prefill_hopper.py).


def prefill_as_over_blocks(
    q_NHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`vmmkv.kernels.attention.prefill.prefill`, bit for bit what it gives over blocks with the same rows."""
    from vmmkv.kernels import checks
    from vmmkv.kernels.attention.kv_memory import kv_memory
    from vmmkv.kernels.attention.prefill import launch_prefill, prefill_tiling

    memory = kv_memory(k_STKD, v_STKD, None, None, None, q_NHD.dtype, q_NHD.device)
    options = checks.attention_options(scale, window, None, memory.head_dim)
    cut = prefill_tiling(memory.head_dim, q_NHD.element_size(), "")
    return launch_prefill(q_NHD, memory, query_starts, lengths_B, slots_B, limit_S, options, out, workspace, cut=cut)


class CommonPrefillRows(SlotRows):
    """See engine.attention.KVRows."""

    def prefill(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        batch: Batch,
        *,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See KVRows.prefill."""
        assert batch.query_starts is not None, "a decode step"
        runs = batch.query_starts, batch.lengths_B, batch.slots_B
        return prefill_as_over_blocks(q_NHD, *self.views[layer], *runs, scale=scale, window=window)


class SlotsWithCommonPrefill(SlotBackend):
    """See engine.kv_backend.KVBackend: vmmkv, but for that kernel."""

    @classmethod
    def open(cls, wanted: BackendConfig) -> Self:
        """See SlotBackend.open."""
        opened = super().open(wanted)
        opened.rows = CommonPrefillRows(opened.cache)
        return opened


# blocks and static slots


class PagedMemory:
    """See engine.kv_backend.KVBackend: as many blocks as the budget holds."""

    def __init__(self, cache: PagedCache, *, shares_prefixes: bool) -> None:
        self.cache: Final = cache
        self.rows: Final = BlockRows(cache)
        self._shares_prefixes = shares_prefixes

    @classmethod
    def open(cls, wanted: BackendConfig) -> Self:
        """Raises: BudgetError if no budget was given, or it holds no block; ValueError for a layout that it does not keep."""
        block_bytes = BLOCK_ROWS * wanted.layout.row_bytes
        num_blocks = _budget_bytes(wanted, block_bytes) // block_bytes
        cache = PagedCache(
            wanted.layout, wanted.device, num_blocks=num_blocks, slots=wanted.max_sequences, max_tokens=wanted.max_tokens
        )
        return cls(cache, shares_prefixes=wanted.shares_prefixes)

    @property
    def budget_bytes(self) -> int:
        """Of all blocks."""
        return self.cache.blocks.num_blocks * self.cache.block_bytes

    @property
    def num_tokens(self) -> int:
        """Rows of all blocks."""
        return self.cache.blocks.num_blocks * BLOCK_ROWS

    def take_free(self) -> None:
        """The blocks are there from the start."""

    def open_prefixes(self) -> PagedPrefixes | None:
        """Over whole blocks."""
        return PagedPrefixes(self.cache) if self._shares_prefixes else None

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()
        _release(self.cache.device)


class StaticMemory:
    """See engine.kv_backend.KVBackend: as many slots as the budget holds, each of the longest sequence's rows."""

    def __init__(self, cache: StaticCache) -> None:
        self.cache: Final = cache
        self.rows: Final = SlotRows(cache)

    @classmethod
    def open(cls, wanted: BackendConfig) -> Self:
        """Raises: BudgetError if no budget was given, or it holds no slot; ValueError for a layout that it does not keep."""
        slot_bytes = wanted.max_tokens * wanted.layout.row_bytes
        slots = min(wanted.max_sequences, _budget_bytes(wanted, slot_bytes) // slot_bytes)
        return cls(StaticCache(wanted.layout, wanted.device, slots=slots, max_tokens=wanted.max_tokens))

    @property
    def budget_bytes(self) -> int:
        """Of all slots."""
        return self.cache.num_slots * self.cache.max_tokens * self.cache.layout.row_bytes

    @property
    def num_tokens(self) -> int:
        """Rows of one slot: more no request can have."""
        return self.cache.max_tokens

    def take_free(self) -> None:
        """The slots are there from the start."""

    def open_prefixes(self) -> None:
        """A row lies in one slot: nothing can be shared."""
        return None

    def close(self) -> None:
        """Give the memory back."""
        self.rows.views.clear()
        self.cache.close()
        _release(self.cache.device)


_SYSTEMS: Final[Mapping[str, OpenBackend]] = MappingProxyType(
    {"vmmkv": SlotBackend.open, f"paged {BLOCK_ROWS}": PagedMemory.open, "static": StaticMemory.open}
)


def systems_on(device: torch.device) -> Mapping[str, OpenBackend]:
    """By the name that rows have; `static` adds the tokens of a slot.

    On Hopper, where slots have a prefill kernel of their own, also vmmkv without that.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        return {**_SYSTEMS, COMMON_PREFILL: SlotsWithCommonPrefill.open}
    return _SYSTEMS


def _budget_bytes(wanted: BackendConfig, least_bytes: int) -> int:
    if wanted.budget_bytes is None or wanted.budget_bytes < least_bytes:
        given = "none" if wanted.budget_bytes is None else format_bytes(wanted.budget_bytes)
        least = f"a baseline takes its memory at once: give a budget of at least {format_bytes(least_bytes)}"
        raise BudgetError(f"{least}, not {given}")
    return wanted.budget_bytes


def _release(device: torch.device) -> None:
    """What torch's allocator keeps is not free for the driver's own calls."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
