"""Attention over blocks: the block-table twins of the kernels, or on a CPU rows gathered into a tensor for torch's own.

Legend: N tokens of the step, B sequences, H query heads, K kv heads, D head dimension, T rows, P blocks, U rows of a block.
"""

from typing import Final

import torch

from bench.baselines.blocks import BLOCK_ROWS
from bench.baselines.paged import PagedCache
from vmmkv.server.engine.attention import SharedPrefixes, Turning
from vmmkv.units import ceil_div


class RowsInBlocks:
    """See engine.rows.Rows."""

    def __init__(self, cache: PagedCache) -> None:
        self.on_gpu: Final = cache.device.type == "cuda"
        self._planes = cache.planes
        self._tables_SC = cache.tables_SC
        self._host_tables_SC = cache.host_tables_SC
        self._limit = cache.limit

    def append(
        self,
        layer: int,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        turning: Turning | None,
    ) -> None:
        """See Rows.append."""
        from vmmkv.kernels.attention.paged import paged_append

        k_PUKD, v_PUKD = self._planes[layer]
        if turning is None:
            paged_append(k_NKD, v_NKD, k_PUKD, v_PUKD, slots_N, positions_N, self._tables_SC, self._limit)
        else:
            paged_append(
                k_NKD, v_NKD, k_PUKD, v_PUKD, slots_N, positions_N, self._tables_SC, self._limit,
                q_NHD=turning.q_NHD, cos_TR=turning.rope.cos_TR, sin_TR=turning.rope.sin_TR,
                q_norm_D=turning.q_norm_D, k_norm_D=turning.k_norm_D, norm_eps=turning.norm_eps,
            )  # fmt: skip

    def decode(
        self,
        layer: int,
        q_BHD: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_B: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See Rows.decode."""
        from vmmkv.kernels.attention.paged import paged_decode

        k_PUKD, v_PUKD = self._planes[layer]
        return paged_decode(q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, self._tables_SC, scale=scale, window=window)

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
        from vmmkv.kernels.attention.paged import paged_prefill

        k_PUKD, v_PUKD = self._planes[layer]
        return paged_prefill(
            q_NHD, k_PUKD, v_PUKD, query_starts, lengths_B, slots_B, self._tables_SC, scale=scale, window=window
        )

    def cascade(
        self,
        layer: int,
        q_BHD: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_B: torch.Tensor,
        shared: SharedPrefixes,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        """See Rows.cascade."""
        from vmmkv.kernels.attention.paged import paged_cascade

        k_PUKD, v_PUKD = self._planes[layer]
        return paged_cascade(
            q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, self._tables_SC, group_starts_G1=shared.starts_G1,
            leaders_G=shared.leaders_G, prefix_rows_G=shared.num_rows_G, firsts_B=shared.firsts_B, scale=scale,
        )  # fmt: skip

    def write(
        self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, slots_N: torch.Tensor, positions_N: torch.Tensor
    ) -> None:
        """See Rows.write."""
        may_write_N = positions_N < self._limit[slots_N]
        slots_N, positions_N = slots_N[may_write_N], positions_N[may_write_N]
        blocks_N = self._tables_SC[slots_N, positions_N // BLOCK_ROWS]
        for plane_PUKD, values_NKD in zip(self._planes[layer], (k_NKD, v_NKD), strict=True):
            plane_PUKD[blocks_N, positions_N % BLOCK_ROWS] = values_NKD[may_write_N]

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rows.read. Copies."""
        blocks = torch.from_numpy(self._host_tables_SC[slot, first // BLOCK_ROWS : ceil_div(end, BLOCK_ROWS)]).long()
        skipped = first // BLOCK_ROWS * BLOCK_ROWS
        k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[first - skipped : end - skipped] for plane in self._planes[layer])
        return k_TKD, v_TKD
