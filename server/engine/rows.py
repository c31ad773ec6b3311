"""How attention writes and reads the rows of a cache; and that of slots of addresses.

Legend: N tokens of the step, B sequences, H query heads, K key-value heads, D head dimension, T rows, S slots, R angles.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from vmmkv import KVLayout
from vmmkv.server.engine.batch import SharedPrefixes


@dataclass(frozen=True, slots=True)
class Rope:
    """float32 cosines and sines by position, for elements j and j + D / 2: [T, R]."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """What becomes of queries and keys on the way: each head is normed where weights [D] are given, then rotated."""

    q_NHD: torch.Tensor
    """Changed in place."""
    rope: Rope
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    norm_eps: float


class Rows(Protocol):
    """K and V of every layer. On a GPU attention is kernels, launched on the current stream, which read `slots_B` and the like
    on the device; on a CPU it goes run by run, and wants rows as tensors."""

    @property
    def on_gpu(self) -> bool:
        """Which of the two it is."""
        ...

    # on a GPU

    def append(
        self,
        layer: int,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        turning: Turning | None,
    ) -> None:
        """Write new rows; those at and past their slot's limit, and those of slot 0, are written nowhere."""
        ...

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
        """One query of each sequence. Returns [B, H, D]."""
        ...

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
        """The last queries of each sequence. Returns [N, H, D]."""
        ...

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
        """As decode, and to shared prefixes once."""
        ...

    # on a CPU

    def write(
        self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, slots_N: torch.Tensor, positions_N: torch.Tensor
    ) -> None:
        """As `append`, of rows that are turned already."""
        ...

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows [first, end): [T, K, D] each."""
        ...


class Views(Protocol):
    """Of a cache: a strided tensor of K and one of V for each layer, as `KVCache` has them."""

    @property
    def layout(self) -> KVLayout:
        """Its layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rows are."""
        ...

    @property
    def limit(self) -> torch.Tensor:
        """[1 + slots] int32: rows below it may be written."""
        ...

    def k(self, layer: int) -> torch.Tensor:
        """[1 + slots, T, K, D]"""
        ...

    def v(self, layer: int) -> torch.Tensor:
        """[1 + slots, T, K, D]"""
        ...


class RowsInSlots:
    """Rows at contiguous addresses: the views of a cache, which any kernel can read."""

    def __init__(self, cache: Views) -> None:
        self.on_gpu: Final = cache.device.type == "cuda"
        self._limit = cache.limit
        self.views: Final = {layer: (cache.k(layer), cache.v(layer)) for layer in cache.layout.group_of}

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
        from vmmkv.kernels.attention.append import append

        k_STKD, v_STKD = self.views[layer]
        if turning is None:
            append(k_NKD, v_NKD, k_STKD, v_STKD, slots_N, positions_N, self._limit)
        else:
            append(
                k_NKD, v_NKD, k_STKD, v_STKD, slots_N, positions_N, self._limit,
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
        from vmmkv.kernels.attention.decode import decode

        return decode(q_BHD, *self.views[layer], lengths_B, slots_B, scale=scale, window=window)

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
        from vmmkv.kernels.attention.prefill import prefill

        return prefill(q_NHD, *self.views[layer], query_starts, lengths_B, slots_B, scale=scale, window=window)

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
        from vmmkv.kernels.attention.cascade import cascade

        return cascade(
            q_BHD, *self.views[layer], lengths_B, slots_B, group_starts_G1=shared.starts_G1, leaders_G=shared.leaders_G,
            prefix_rows_G=shared.num_rows_G, firsts_B=shared.firsts_B, scale=scale,
        )  # fmt: skip

    def write(
        self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor, slots_N: torch.Tensor, positions_N: torch.Tensor
    ) -> None:
        """See Rows.write."""
        may_write_N = positions_N < self._limit[slots_N]
        slots_N, positions_N = slots_N[may_write_N], positions_N[may_write_N]
        for rows_STKD, values_NKD in zip(self.views[layer], (k_NKD, v_NKD), strict=True):
            rows_STKD[slots_N, positions_N] = values_NKD[may_write_N]

    def read(self, layer: int, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rows.read. Views."""
        k_STKD, v_STKD = self.views[layer]
        return k_STKD[slot, first:end], v_STKD[slot, first:end]
