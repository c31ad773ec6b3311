"""Each as the engine's memory: what `loading.assemble` takes as `open_memory`.

    paged 16                    our kernels, which find each row by the table: with the next but one, what addressing costs
    paged 16, FA3               FlashAttention-3's kernels, where its library is given
    paged 128                   our kernels, for which a block is a tile: loaded like a tile of a slot
    vmmkv, prefill of blocks    vmmkv without the prefill kernel for Hopper (attention/prefill_hopper.py), which blocks
                                of 16 do not have: it differs from `paged 16` by where rows lie, and by nothing else

Legend: N queries, B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from bench.baselines.paged import BlockRows, FA3Rows, PagedCache
from bench.baselines.slots import StaticCache
from vmmkv.errors import BudgetError
from vmmkv.units import format_bytes
from vmmkv_server.engine.attention import AttentionMetadata, KVRows
from vmmkv_server.engine.kv_backend import BackendConfig, OpenBackend, SlotBackend


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
    lse_NH: torch.Tensor | None = None,
    skips_singles: bool = False,
) -> torch.Tensor:
    """`vmmkv_kernels.attention.prefill.prefill`, bit for bit what it gives over blocks with the same rows."""
    from vmmkv_kernels import checks
    from vmmkv_kernels.attention.kv_memory import kv_memory
    from vmmkv_kernels.attention.prefill import launch_prefill, prefill_tiling

    memory = kv_memory(k_STKD, v_STKD, None, None, None, q_NHD.dtype, q_NHD.device)
    options = checks.attention_options(scale, window, None, memory.head_dim)
    cut = prefill_tiling(memory.head_dim, q_NHD.element_size(), "")
    batch = (query_starts, lengths_B, slots_B, limit_S)
    return launch_prefill(q_NHD, memory, *batch, options, out, None, lse_NH, skips_singles=skips_singles, cut=cut)


class CommonPrefillRows(KVRows):
    """See engine.attention.KVRows."""

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, step: AttentionMetadata, *, scale: float | None, window: int | None,
        softcap: float | None = None, out_NHD: torch.Tensor | None = None, lse_NH: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See KVRows.prefill."""
        assert step.query_starts is not None and softcap is None, "a decode step, or a model with soft caps"
        rows = *self.views[layer], step.query_starts, step.lengths_B, step.slots_B
        skips_singles = out_NHD is not None
        return prefill_as_over_blocks(
            q_NHD, *rows, scale=scale, window=window, out=out_NHD, lse_NH=lse_NH, skips_singles=skips_singles
        )


def open_common_prefill(wanted: BackendConfig) -> SlotBackend:
    """vmmkv, but for that kernel. See SlotBackend.open."""
    opened = SlotBackend.open(wanted)
    opened.rows = CommonPrefillRows(opened.cache)
    return opened


def open_paged(
    wanted: BackendConfig, *, block_rows: int = 16, rows_over: Callable[[PagedCache], BlockRows] = BlockRows
) -> PagedCache:
    """As many blocks as the budget holds. Raises: BudgetError, ValueError: see `_num_in_budget` and BaselineCache."""
    return PagedCache(
        wanted.layout,
        wanted.device,
        num_blocks=_num_in_budget(wanted, block_rows),
        block_rows=block_rows,
        slots=wanted.max_sequences,
        max_tokens=wanted.max_tokens,
        shares_prefixes=wanted.shares_prefixes,
        rows_over=rows_over,
    )


open_paged_fa3: Final[OpenBackend] = partial(open_paged, rows_over=FA3Rows)


def open_static(wanted: BackendConfig) -> StaticCache:
    """As many slots as the budget holds, each of the longest sequence's rows. Raises: as `open_paged`."""
    slots = min(wanted.max_sequences, _num_in_budget(wanted, wanted.max_tokens))
    return StaticCache(wanted.layout, wanted.device, slots=slots, max_tokens=wanted.max_tokens)


def _num_in_budget(wanted: BackendConfig, num_rows: int) -> int:
    """Pieces of so many rows that the budget holds. Raises: BudgetError if none was given, or it holds no piece."""
    least_bytes = num_rows * wanted.layout.row_bytes
    if wanted.budget_bytes is None or wanted.budget_bytes < least_bytes:
        given = "none" if wanted.budget_bytes is None else format_bytes(wanted.budget_bytes)
        least = f"a baseline takes its memory at once: give a budget of at least {format_bytes(least_bytes)}"
        raise BudgetError(f"{least}, not {given}")
    return wanted.budget_bytes // least_bytes
