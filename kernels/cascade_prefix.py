"""The prefixes of a batch: attention to each of them once, in parts, and the parts merged with a suffix. See cascade.py.

Legend: B sequences, S slots, T rows of a slot, C columns of a block table, H query heads, K kv heads, D head dim,
G groups (and G1 = G + 1).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv.kernels import checks
from vmmkv.kernels.cascade_merge import merge_groups
from vmmkv.kernels.cascade_tiles import attend_groups
from vmmkv.kernels.cascade_tiling import CascadeTiling, cascade_tiling
from vmmkv.kernels.decode import MAX_DESCRIPTOR_STRIDE_BYTES, MAX_GROUP, MAX_HEAD_DIM, MAX_SEQUENCES
from vmmkv.kernels.memory import KVMemory, kv_memory
from vmmkv.units import round_up

MAX_GROUPS = 4096
"""Every program sums up the tiles of all groups in its registers."""

ALIGNMENT_ELEMENTS = 32
"""What a workspace is divided into begins at multiples of 128 bytes."""

_INTERPRETED_LANES = 3


@functools.cache
def _num_lanes(device: torch.device, num_kv_heads: int, programs_per_sm: int) -> int:
    """As many lanes as are resident together; a lane is a program for each kv head."""
    if device.type == "cpu":
        return _INTERPRETED_LANES
    resident = torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm
    return max(1, resident // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the first launch leaves for the last, as outputs and log-sum-exps of query heads, in float32.

    There is one for every head of every sequence, and again for those of a problem in every lane (cascade_groups.py).
    """

    cut: CascadeTiling
    sharers: int
    """Sequences of a problem."""
    num_lanes: int
    num_heads: int
    head_dim: int
    count: int

    @classmethod
    def of(cls, q_BHD: torch.Tensor, num_kv_heads: int) -> "Parts":
        """Of queries like these."""
        num_sequences, num_heads, head_dim = q_BHD.shape
        group = num_heads // num_kv_heads
        cut = cascade_tiling(group, head_dim, q_BHD.element_size())
        sharers = cut.queries // group
        num_lanes = _num_lanes(q_BHD.device, num_kv_heads, cut.programs_per_sm)
        return cls(cut, sharers, num_lanes, num_heads, head_dim, (num_sequences + num_lanes * sharers) * num_heads)

    @property
    def elements(self) -> int:
        """Of all, whatever the groups."""
        return round_up(self.count * (self.head_dim + 1), ALIGNMENT_ELEMENTS)

    def split(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and log-sum-exps."""
        return elements, elements[self.count * self.head_dim :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Who shares which rows, checked, for two launches that have to agree on it."""

    memory: KVMemory
    starts_G1: torch.Tensor
    leaders_G: torch.Tensor
    rows_G: torch.Tensor
    limit_S: torch.Tensor | None
    num_sequences: int
    parts: Parts

    @classmethod
    def of(
        cls,
        q_BHD: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables_SC: torch.Tensor | None,
        group_starts_G1: torch.Tensor,
        leaders_G: torch.Tensor,
        prefix_rows_G: torch.Tensor,
        limit_S: torch.Tensor | None,
    ) -> "Prefixes":
        """Check the arguments of `cascade` or `paged_cascade`. Raises ValueError naming the argument."""
        device = q_BHD.device
        suffix = "STKD" if tables_SC is None else "PUKD"
        checks.runnable("q_BHD", device)
        if k.dtype not in checks.FLOAT_DTYPES:
            wanted = "float16, bfloat16 or float32: of quantised K and V prefixes are not shared yet, which `decode` reads"
            checks.refuse(f"k_{suffix}", f"of {k.dtype}", wanted)
        memory = kv_memory(k, v, None, None, tables_SC, q_BHD.dtype, device)
        if q_BHD.dim() != 3:
            checks.refuse("q_BHD", f"of shape {tuple(q_BHD.shape)}", "3 dimensions: [sequences, query heads, head dim]")
        num_sequences, num_heads, head_dim = q_BHD.shape
        memory.check_head_dim("q_BHD", head_dim)
        checks.vectors("q_BHD", q_BHD, (num_sequences, num_heads, head_dim), q_BHD.dtype, device)
        checks.heads("q_BHD", num_heads, memory.num_kv_heads, MAX_GROUP, head_dim, MAX_HEAD_DIM)
        if num_sequences > MAX_SEQUENCES:
            checks.refuse("q_BHD", f"of {num_sequences} sequences", f"at most {MAX_SEQUENCES} a launch")
        num_groups = prefix_rows_G.shape[0] if prefix_rows_G.dim() == 1 else 0
        if num_groups > MAX_GROUPS:
            checks.refuse("prefix_rows_G", f"of {num_groups} groups", f"at most {MAX_GROUPS} a launch")
        _check_groups("prefix_rows_G", prefix_rows_G, num_groups, device)
        _check_groups("leaders_G", leaders_G, num_groups, device)
        _check_groups("group_starts_G1", group_starts_G1, num_groups + 1, device)
        if limit_S is not None:
            checks.limits("limit_S", limit_S, memory.num_slots, device)
        parts = Parts.of(q_BHD, memory.num_kv_heads)
        checks.tile_offsets(f"k_{suffix}", memory.k, memory.block or parts.cut.tile_rows)
        checks.tile_offsets(f"v_{suffix}", memory.v, memory.block or parts.cut.tile_rows)
        return cls(
            memory=memory,
            starts_G1=group_starts_G1,
            leaders_G=leaders_G,
            rows_G=prefix_rows_G,
            limit_S=limit_S,
            num_sequences=num_sequences,
            parts=parts,
        )

    def attend(self, q_BHD: torch.Tensor, options: checks.AttentionOptions, elements: torch.Tensor) -> None:
        """Write the parts into so many `elements`. One launch."""
        memory, parts, cut = self.memory, self.parts, self.parts.cut
        by_tma = _can_describe(memory)
        # A table's entries are loaded a stage before the rows that they name, as in `decode`.
        num_stages = 2 * cut.num_stages - 1 if memory.block else cut.num_stages
        p_parts, p_lse = parts.split(elements)
        with checks.on_device(q_BHD.device):
            attend_groups[(parts.num_lanes * memory.num_kv_heads,)](
                q_BHD, _descriptor(memory.k, cut.tile_rows) if by_tma else memory.k,
                _descriptor(memory.v, cut.tile_rows) if by_tma else memory.v, memory.tables_SC,
                self.starts_G1, self.leaders_G, self.rows_G, self.limit_S, p_parts, p_lse,
                options.scale_log2, options.softcap_log2, self.rows_G.shape[0], self.num_sequences,
                memory.num_slots, memory.num_rows, q_BHD.stride(0), q_BHD.stride(1),
                memory.stride_table if memory.block else None, *memory.strides[:6],
                K=memory.num_kv_heads, G=parts.num_heads // memory.num_kv_heads, QUERIES=cut.queries, STAGES=num_stages,
                BLOCK=memory.block, TMA=by_tma, HAS_SOFTCAP=options.softcap_log2 > 0.0, num_warps=cut.num_warps,
                num_stages=num_stages, **self._common(q_BHD.device),
            )  # fmt: skip

    def merge(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_B: torch.Tensor,
        elements: torch.Tensor,
    ) -> None:
        """Merge the parts into what `decode` has made of the suffixes, in place. One launch."""
        memory, parts = self.memory, self.parts
        padded_dim = max(16, triton.next_power_of_2(parts.head_dim))
        heads = min(triton.next_power_of_2(parts.num_heads), max(1, parts.cut.merged_elements // padded_dim))
        p_parts, p_lse = parts.split(elements)
        with checks.on_device(out_BHD.device):
            merge_groups[(self.num_sequences, triton.cdiv(parts.num_heads, heads))](
                out_BHD, lse_BH, p_parts, p_lse, self.starts_G1, self.leaders_G, self.rows_G, self.limit_S, lengths_B, slots_B,
                self.rows_G.shape[0], self.num_sequences, memory.num_slots, memory.num_rows, parts.num_lanes,
                out_BHD.stride(0), out_BHD.stride(1),
                H=parts.num_heads, HEADS=heads, UNROLL=parts.cut.merged_parts, num_warps=4, **self._common(out_BHD.device),
            )  # fmt: skip

    def _common(self, device: torch.device) -> dict[str, Any]:
        """What both kernels are compiled for."""
        parts = self.parts
        return {
            "D": parts.head_dim, "D_PAD": max(16, triton.next_power_of_2(parts.head_dim)), "SHARERS": parts.sharers,
            "GROUPS_PAD": max(16, triton.next_power_of_2(self.rows_G.shape[0])), "TILE": parts.cut.tile_rows,
            "LEAST_TILES": parts.cut.least_tiles, "HAS_LIMIT": self.limit_S is not None, **checks.overlap(device),
        }  # fmt: skip


def _check_groups(argument: str, tensor: torch.Tensor, count: int, device: torch.device) -> None:
    checks.index(argument, tensor, count, device)
    if tensor.dtype != torch.int32:
        checks.refuse(argument, f"of {tensor.dtype}", "int32")


def _descriptor(plane: torch.Tensor, tile_rows: int) -> TensorDescriptor:
    """A plane of all slots for the tensor memory accelerator, as [S, K, T, D], in boxes of one tile of one kv head of one slot.

    In that order a box is a tile as it is, which the tensor cores then read from where it was loaded to.
    """
    unfollowed = checks.ALIGNMENT_BYTES  # the strides of dimensions of size 1 are made what a descriptor takes
    strides = [stride if size > 1 else unfollowed for size, stride in zip(plane.shape, plane.stride(), strict=True)]
    slots, rows, kv_heads, head_dim = plane.shape
    box = [1, 1, tile_rows, max(16, triton.next_power_of_2(head_dim))]
    return TensorDescriptor(plane, [slots, kv_heads, rows, head_dim], [strides[0], strides[2], strides[1], 1], box)


def _can_describe(memory: KVMemory) -> bool:
    """Can the tensor memory accelerator load the tiles? A prefix's last one is moved back, to end with it, see `decode`.

    Blocks are read by pointers.
    """
    widest_bytes = max(*memory.k.stride(), *memory.v.stride()) * memory.k.element_size()
    return not memory.block and widest_bytes < MAX_DESCRIPTOR_STRIDE_BYTES and checks.has_tma(memory.k.device)
