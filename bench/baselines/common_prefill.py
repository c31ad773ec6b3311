"""Prefill over slots by the kernel that blocks have too, so that two systems differ by where rows lie and by nothing else.

On Hopper slots in bf16 with heads of 128 have a kernel of their own (vmmkv/kernels/prefill_hopper.py), which has no twin.

Legend: N queries, B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

from typing import Self

import torch

from vmmkv.server.engine.attention import Batch, SlotRows
from vmmkv.server.engine.kv_backend import BackendConfig, SlotBackend


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
