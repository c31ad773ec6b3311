"""Attention over blocks: by the kernels under a block table, or on a CPU rows gathered into a tensor for torch's own.

Legend: N tokens of the step, B sequences, H query heads, K kv heads, D head dimension, T rows, P blocks, U rows of a block.
"""

from typing import Final

import torch

from bench.baselines.blocks import BLOCK_ROWS
from bench.baselines.paged import PagedCache
from vmmkv.server.engine.attention import Batch, RotaryParams, SharedPrefixes
from vmmkv.units import ceil_div


class BlockRows:
    """See engine.attention.KVRows."""

    def __init__(self, cache: PagedCache) -> None:
        self.on_gpu: Final = cache.device.type == "cuda"
        self._planes = cache.planes
        self._tables_SC = cache.tables_SC
        self._host_tables_SC = cache.host_tables_SC
        self._limit = cache.limit

    def append(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch, rotary: RotaryParams | None) -> None:
        """See KVRows.append."""
        from vmmkv.kernels.attention.append import append

        k_PUKD, v_PUKD = self._planes[layer]
        places = batch.slots_N, batch.positions_N, self._limit
        if rotary is None:
            append(k_NKD, v_NKD, k_PUKD, v_PUKD, *places, tables_SC=self._tables_SC)
        else:
            append(
                k_NKD, v_NKD, k_PUKD, v_PUKD, *places, tables_SC=self._tables_SC,
                q_NHD=rotary.q_NHD, cos_TR=rotary.rope.cos_TR, sin_TR=rotary.rope.sin_TR,
                q_norm_D=rotary.q_norm_D, k_norm_D=rotary.k_norm_D, norm_eps=rotary.norm_eps,
            )  # fmt: skip

    def decode(self, layer: int, q_BHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None) -> torch.Tensor:
        """See KVRows.decode."""
        from vmmkv.kernels.attention.decode import decode

        where = *self._planes[layer], batch.lengths_B, batch.slots_B
        return decode(q_BHD, *where, tables_SC=self._tables_SC, scale=scale, window=window)

    def prefill(
        self, layer: int, q_NHD: torch.Tensor, batch: Batch, *, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """See KVRows.prefill."""
        from vmmkv.kernels.attention.prefill import prefill

        assert batch.query_starts is not None, "a decode step"
        runs = batch.query_starts, batch.lengths_B, batch.slots_B
        return prefill(q_NHD, *self._planes[layer], *runs, tables_SC=self._tables_SC, scale=scale, window=window)

    def cascade(
        self, layer: int, q_BHD: torch.Tensor, batch: Batch, shared: SharedPrefixes, *, scale: float | None
    ) -> torch.Tensor:
        """See KVRows.cascade."""
        from vmmkv.kernels.attention.cascade import cascade

        return cascade(
            q_BHD, *self._planes[layer], batch.lengths_B, batch.slots_B, tables_SC=self._tables_SC,
            group_starts_G1=shared.starts_G1, leaders_G=shared.leaders_G, prefix_rows_G=shared.num_rows_G,
            firsts_B=shared.firsts_B, scale=scale,
        )  # fmt: skip

    def write(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, batch: Batch) -> None:
        """See KVRows.write."""
        may_write_N = batch.positions_N < self._limit[batch.slots_N]
        slots_N, positions_N = batch.slots_N[may_write_N], batch.positions_N[may_write_N]
        blocks_N = self._tables_SC[slots_N, positions_N // BLOCK_ROWS]
        for plane_PUKD, values_NKD in zip(self._planes[layer], (k_NKD, v_NKD), strict=True):
            plane_PUKD[blocks_N, positions_N % BLOCK_ROWS] = values_NKD[may_write_N]

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVRows.read. Copies."""
        blocks = torch.from_numpy(self._host_tables_SC[slot, first // BLOCK_ROWS : ceil_div(end, BLOCK_ROWS)]).long()
        skipped = first // BLOCK_ROWS * BLOCK_ROWS
        k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[first - skipped : end - skipped] for plane in self._planes[layer])
        return k_TKD, v_TKD
