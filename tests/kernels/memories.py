"""Poisoned memory for K and V in vmmkv's geometry: rows of bytes, in slots or in the blocks of a table."""

from dataclasses import dataclass

import torch

from vmmkv.kernels.quantise import PAYLOAD_DTYPES, Kind, dequantise, payload_width
from vmmkv.units import ceil_div, round_up

POISON = 0xFF
"""NaN in every float type, scales and fp8 payloads among them, and a payload that is rarely written."""

SPARE_BLOCKS = 3
"""Physical blocks that no table names."""

Format = tuple[int, int, torch.dtype, Kind | None, str]
"""kv heads, head dim, the dtype of what is not quantised, kind, and where the scales are: "token", "head" or ""."""

FORMATS: list[tuple[Kind | None, str]] = [(None, ""), ("fp8", "token"), ("fp8", "head"), ("int8", "token"), ("int4", "token")]
"""All that K and V are kept as."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Rows of K and V payloads, then their token scales; each head begins at a multiple of 16 bytes."""

    bytes_STE: torch.Tensor
    """Also the one slot (or block) at the end that K and V do not have, and what lies around them in a row."""
    k: torch.Tensor
    v: torch.Tensor
    scales: dict[str, torch.Tensor]
    format: Format

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What K and V mean, in float32; zero for poison."""
        return self._values(self.k, "k_scale"), self._values(self.v, "v_scale")

    def _values(self, payload: torch.Tensor, scale: str) -> torch.Tensor:
        values = dequantise(payload, self.scales[scale]) if self.scales else payload.float()
        return values.nan_to_num(0.0)

    def in_blocks(self, block: int) -> tuple["Memory", torch.Tensor]:
        """The same rows in physical blocks of so many rows, shuffled. Returns them and the table of each slot."""
        num_slots, num_rows = self.k.shape[:2]
        columns = ceil_div(num_rows, block)
        num_blocks = num_slots * columns + SPARE_BLOCKS
        blocks = make_memory((num_blocks, block), *self.format, self.k.device)
        blocks.scales.update({name: scale for name, scale in self.scales.items() if scale.dim() == 1})
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block))[: num_slots * columns]
        tables_SC = order.to(self.k.device).view(num_slots, columns)
        padded = self.bytes_STE.new_full((num_slots, columns * block, self.bytes_STE.shape[2]), POISON)
        padded[:, :num_rows] = self.bytes_STE[:num_slots]
        blocks.bytes_STE[tables_SC.flatten()] = padded.view(-1, block, padded.shape[2])
        return blocks, tables_SC.int()


def make_memory(
    shape: tuple[int, int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kind: Kind | None,
    scale: str,
    device: torch.device,
) -> Memory:
    """A layer between two others, of [slots, rows] or [blocks, rows of a block], all poison but for head scales."""
    stored = PAYLOAD_DTYPES[kind] if kind else dtype
    width = payload_width(kind, head_dim)
    head_bytes = round_up(width * stored.itemsize, 16)
    plane_bytes = kv_heads * head_bytes
    scale_bytes = round_up(2 * kv_heads, 16)
    row_bytes = 64 + 2 * plane_bytes + 2 * scale_bytes + 64
    bytes_STE = torch.full((shape[0] + 1, shape[1], row_bytes), POISON, dtype=torch.uint8, device=device)
    own_STE = bytes_STE[:-1]

    def plane(i: int) -> torch.Tensor:
        start = 64 + i * plane_bytes
        return own_STE[:, :, start : start + plane_bytes].unflatten(-1, (kv_heads, head_bytes)).view(stored)[..., :width]

    def token_scales(i: int) -> torch.Tensor:
        if kv_heads % 2 == 0:  # in pairs, as a cache has them
            start = 64 + 2 * plane_bytes
            return own_STE[:, :, start : start + 4 * kv_heads].view(torch.float16)[:, :, i::2]
        start = 64 + 2 * plane_bytes + i * scale_bytes
        return own_STE[:, :, start : start + 2 * kv_heads].view(torch.float16)

    scales = {}
    if scale == "token":
        scales = {"k_scale": token_scales(0), "v_scale": token_scales(1)}
    elif scale == "head":
        scales = {
            "k_scale": torch.rand(kv_heads, generator=torch.Generator().manual_seed(1)).to(device) / 100,
            "v_scale": torch.rand(kv_heads, generator=torch.Generator().manual_seed(2)).to(device) / 100,
        }
    return Memory(bytes_STE=bytes_STE, k=plane(0), v=plane(1), scales=scales, format=(kv_heads, head_dim, dtype, kind, scale))
