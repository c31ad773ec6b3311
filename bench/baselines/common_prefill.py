"""Prefill over slots by the kernel that blocks have too, so that two systems differ by where rows lie and by nothing else.

On Hopper slots in bf16 with heads of 128 have a kernel of their own (vmmkv/kernels/prefill_hopper.py), which has no twin.

Legend: N queries, B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

from typing import Self

import torch

from vmmkv.server.engine.attention import RowsInSlots
from vmmkv.server.engine.kv_backend import SlotsInPool, Wanted


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
    """`vmmkv.kernels.attention.prefill.prefill`, bit for bit what `paged_prefill` gives over the same rows."""
    from vmmkv.kernels import checks
    from vmmkv.kernels.attention.kv_memory import kv_memory
    from vmmkv.kernels.attention.prefill import launch_prefill, prefill_tiling

    memory = kv_memory(k_STKD, v_STKD, None, None, None, q_NHD.dtype, q_NHD.device)
    options = checks.attention_options(scale, window, None, memory.head_dim)
    cut = prefill_tiling(memory.head_dim, q_NHD.element_size(), "")
    return launch_prefill(q_NHD, memory, query_starts, lengths_B, slots_B, limit_S, options, out, workspace, cut=cut)


class CommonPrefillRows(RowsInSlots):
    """See engine.rows.Rows."""

    def prefill(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        query_starts: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_B: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See Rows.prefill."""
        k_STKD, v_STKD = self.views[layer]
        return prefill_as_over_blocks(q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B, scale=scale, window=window)


class SlotsWithCommonPrefill(SlotsInPool):
    """See engine.memory.EngineMemory: vmmkv, but for that kernel."""

    @classmethod
    def open(cls, wanted: Wanted) -> Self:
        """See SlotsInPool.open."""
        opened = super().open(wanted)
        opened.rows = CommonPrefillRows(opened.cache)
        return opened
