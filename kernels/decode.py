"""Decode attention: one new query for each sequence, over contiguous slots or over blocks.

Split-KV in two launches, after Flash-Decoding (Dao et al., 2023) and Stream-K (Osama et al., 2023). A sequence's rows are
cut into *tiles*. The tiles of all sequences, one behind the other, are dealt in equal runs to *lanes*, each of which is a
program for every kv head: so every program has the same work whatever the lengths are, the host reads none of them, and
one captured graph serves all. The first launch (decode_tiles.py) sums the tiles up, writes the output of a sequence
that lies in one lane, and leaves partials of the others; the second (decode_merge.py) merges those. What is summed up
with what, and in which order, follows from a sequence's own length (lanes.py): its result is bit for bit the same in any
batch and on any number of programs.

Legend: B sequences, N queries, S slots, T rows of a slot, H query heads, K kv heads, D head dim, W payload width (D, or
D / 2 bytes), P physical blocks, U rows of a block, C columns of a block table.
"""

import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv.kernels import checks
from vmmkv.kernels.decode_launches import Call, Workspace, launches_of
from vmmkv.kernels.decode_merge import merge_partials
from vmmkv.kernels.decode_tiles import attend_tiles
from vmmkv.kernels.memory import KVMemory, kv_memory
from vmmkv.kernels.tiling import Tiling, tiling

MAX_SEQUENCES = 4096
"""Every program sums up the tiles of all sequences in its registers."""

MAX_GROUP = 64
MAX_HEAD_DIM = 256

_INTERPRETED_PROGRAMS = 4
MAX_DESCRIPTOR_STRIDE_BYTES = 2**40


@functools.cache
def _num_lanes(device: torch.device, num_kv_heads: int, programs_per_sm: int) -> int:
    """As many lanes as are resident together; a lane is a program for each kv head."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    resident = torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm
    return max(1, resident // num_kv_heads)


def workspace_elements(q_BHD: torch.Tensor, k: torch.Tensor, *, tables_SC: torch.Tensor | None = None) -> int:
    """float32 elements that `decode` needs as its workspace for tensors like these, whatever the lengths.

    k: the views of all slots, or of all blocks with `tables_SC`, on the device that they will be used on.
    """
    num_sequences, num_heads, head_dim = q_BHD.shape
    cut = tiling(num_heads, k.shape[2], head_dim, q_BHD.element_size(), k.shape[3] * k.element_size())
    num_rows = k.shape[1] if tables_SC is None else tables_SC.shape[1] * k.shape[1]
    num_lanes = _num_lanes(q_BHD.device, k.shape[2], cut.programs_per_sm)
    return Workspace.of(cut, num_sequences, num_rows, num_lanes).elements(num_heads, head_dim)


def decode(
    q_BHD: torch.Tensor,
    k_STKW: torch.Tensor,
    v_STKW: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    firsts_B: torch.Tensor | None = None,
    lse_BH: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new query of each sequence to the rows of its slot. Returns [B, H, D] of q's dtype (`out` if given).

    Sequence b attends to the rows [max(0, lengths_B[b] - window), lengths_B[b]) of slot slots_B[b]; the length counts the
    new token's own row, appended before. No other row is loaded. A length of 0, or a slot outside [0, S), gives zeros. With
    `limit_S` rows at and past limit_S[slot] are not loaded either, nor ever those past T: a sequence that has passed its
    limit idles, and what comes out for it is to be dropped.

    With `firsts_B` sequence b attends to none of the rows before firsts_B[b], clamped to [0, length], either. Up to a tile of
    them may be touched, which are to be mapped and finite, and are not used. With `lse_BH` it writes by what the output merges
    with that of other rows: log2(sum(exp(score))) over the scaled and capped scores; -inf where there are no rows.

    q_BHD: fp16, bf16 or fp32. k_STKW, v_STKW: views of all slots as `cache.k(layer)` gives them, of the same dtype, or
    quantised (see quantise.py) with `k_scale` and `v_scale`: float16 [S, T, K], or for fp8 also float32 [K].
    lengths_B, slots_B: int32 or int64 on the device. limit_S: int32 on the device, one a slot. scale: 1 / sqrt(D) if None.
    softcap: scores become softcap * tanh(score / softcap). firsts_B: int32 or int64 on the device. lse_BH: float32 [B, H],
    contiguous. workspace: float32, at least `workspace_elements(...)`, not shared by launches that may overlap; if None it
    comes from torch's allocator, which is right under graph capture as well.

    Cost: two launches, no synchronisation; safe while a graph is captured, and the graph serves every length.
    Raises: ValueError naming the argument.
    """
    checks.runnable("q_BHD", q_BHD.device)
    memory = kv_memory(k_STKW, v_STKW, k_scale, v_scale, None, q_BHD.dtype, q_BHD.device)
    options = checks.attention_options(scale, window, softcap, memory.head_dim)
    return launch_decode(q_BHD, memory, lengths_B, slots_B, limit_S, options, out, workspace, firsts_B, lse_BH)


def launch_decode(
    q_BHD: torch.Tensor,
    memory: KVMemory,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    firsts_B: torch.Tensor | None = None,
    lse_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode` over any memory."""
    device = q_BHD.device
    if q_BHD.dim() != 3:
        checks.refuse("q_BHD", f"of shape {tuple(q_BHD.shape)}", "3 dimensions: [sequences, query heads, head dim]")
    num_sequences, num_heads, _ = q_BHD.shape
    memory.check_head_dim("q_BHD", q_BHD.shape[2])
    shape = (num_sequences, num_heads, memory.head_dim)
    checks.vectors("q_BHD", q_BHD, shape, q_BHD.dtype, device)
    if num_sequences > MAX_SEQUENCES:
        checks.refuse("q_BHD", f"of {num_sequences} sequences", f"at most {MAX_SEQUENCES} a launch")
    checks.index("lengths_B", lengths_B, num_sequences, device)
    checks.index("slots_B", slots_B, num_sequences, device)
    if limit_S is not None:
        checks.limits("limit_S", limit_S, memory.num_slots, device)
    if firsts_B is not None:
        checks.index("firsts_B", firsts_B, num_sequences, device)
    if lse_BH is not None:
        _check_lse(lse_BH, (num_sequences, num_heads), device)
    if out is None:
        out = torch.empty(shape, dtype=q_BHD.dtype, device=device)
    else:
        checks.vectors("out", out, shape, q_BHD.dtype, device)
    if num_sequences > 0:
        attend_singles(q_BHD, memory, lengths_B, slots_B, None, limit_S, options, out, workspace, firsts_B, lse_BH)
    return out


def _check_lse(lse_BH: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if lse_BH.device != device:
        checks.refuse("lse_BH", f"on {lse_BH.device}", f"a tensor on {device}, where the others are")
    if lse_BH.dtype != torch.float32 or lse_BH.shape != shape or not lse_BH.is_contiguous():
        contiguous = "contiguous" if lse_BH.is_contiguous() else "not contiguous"
        given = f"{lse_BH.dtype} of shape {tuple(lse_BH.shape)}, {contiguous}"
        checks.refuse("lse_BH", given, f"contiguous float32 of shape {shape}: a number for each query head")


def _descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """A tensor for the tensor memory accelerator, in such boxes.

    The strides of dimensions of size 1, which are never followed, are made what a descriptor takes.
    """
    shape = list(tensor.shape)
    strides = list(tensor.stride())
    if 1 in shape:
        unfollowed = checks.ALIGNMENT_BYTES
        strides = [stride if size > 1 else unfollowed for size, stride in zip(shape, strides, strict=True)]
        strides[-1] = 1
    return TensorDescriptor(tensor, shape, strides, box)


def attend_singles(
    q_NHD: torch.Tensor,
    memory: KVMemory,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    query_starts: torch.Tensor | None,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out_NHD: torch.Tensor,
    workspace: torch.Tensor | None,
    firsts_B: torch.Tensor | None = None,
    lse_BH: torch.Tensor | None = None,
) -> None:
    """The two launches, of checked arguments. With `query_starts` (B + 1) the sequences that have one query in `q_NHD`.

    Then there is no `lse_BH`: it has a row for each sequence, not for each query.
    """
    device, num_heads, head_dim = q_NHD.device, q_NHD.shape[1], memory.head_dim
    num_sequences, num_kv_heads, num_rows, block = lengths_B.shape[0], memory.num_kv_heads, memory.num_rows, memory.block
    checks.heads("q_BHD", num_heads, num_kv_heads, MAX_GROUP, head_dim, MAX_HEAD_DIM)
    cut = tiling(num_heads, num_kv_heads, head_dim, q_NHD.element_size(), memory.payload_bytes)
    checks.tile_offsets("k_PUKW" if block else "k_STKW", memory.k, block or cut.tile_rows)
    checks.tile_offsets("v_PUKW" if block else "v_STKW", memory.v, block or cut.tile_rows)
    num_lanes = _num_lanes(device, num_kv_heads, cut.programs_per_sm)
    by_tma = _can_describe(memory, cut, options.rows_seen)
    launches = launches_of(
        Call(
            cut, num_lanes, num_sequences, num_heads, num_kv_heads, head_dim, memory.k.shape[3], num_rows, block, memory.kind,
            memory.scale, memory.has_paired_scales, q_NHD.dtype == torch.float32, by_tma, checks.launches_dependents(device),
            options.softcap_log2 > 0.0, limit_S is not None, query_starts is not None, firsts_B is not None, lse_BH is not None,
        )
    )  # fmt: skip
    if workspace is None:
        workspace = torch.empty(launches.elements, dtype=torch.float32, device=device)
    else:
        checks.workspace("workspace", workspace, launches.elements, device)
    k, v, q, space = memory.k, memory.v, q_NHD, launches.space
    with checks.on_device(device):
        attend_tiles[launches.tiles_grid](
            q if launches.query_box is None else _descriptor(q, launches.query_box),
            _descriptor(k, launches.rows_box) if by_tma else k, _descriptor(v, launches.rows_box) if by_tma else v,
            memory.k_scale, memory.v_scale, memory.tables_SC,
            lengths_B, slots_B, limit_S, query_starts, firsts_B, out_NHD, lse_BH, workspace,
            options.scale_log2, options.softcap_log2, options.rows_seen, num_sequences, q.shape[0],
            memory.num_slots, num_rows, space.max_chunks, space.max_apart,
            q.stride(0), q.stride(1), out_NHD.stride(0), out_NHD.stride(1), memory.stride_table, *memory.strides,
            **launches.tiles,
        )  # fmt: skip
        merge_partials[launches.merge_grid](
            out_NHD, lse_BH, lengths_B, slots_B, limit_S, query_starts, firsts_B, memory.v_scale, workspace,
            options.rows_seen, num_sequences, q.shape[0], memory.num_slots, num_rows, num_lanes,
            space.max_chunks, space.max_apart, out_NHD.stride(0), out_NHD.stride(1), **launches.merge,
        )  # fmt: skip


def _can_describe(memory: KVMemory, cut: Tiling, rows_seen: int) -> bool:
    """Can the tensor memory accelerator load the tiles?

    It loads whole tiles. A sequence's last one is moved back to end where the sequence ends; rows before the slot's first
    are not touched by the hardware, but rows before a window would be, if the window is less than a tile. Those before a first
    row that is given are the sequence's own.
    """
    strides = (*memory.k.stride(), *memory.v.stride())
    widest_bytes = max(strides) * memory.k.element_size()
    fits = not memory.block and rows_seen >= cut.tile_rows and widest_bytes < MAX_DESCRIPTOR_STRIDE_BYTES
    return fits and checks.has_tma(memory.k.device)
