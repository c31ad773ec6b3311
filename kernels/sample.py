"""Sampling: from logits to token ids, with each sequence's own parameters, in two launches that need nothing from the host.

What is computed is said in `sample_reference.py`, which gives the same tokens; how, in `sample_draw.py` (the first launch)
and `sample_settle.py` (the second).

Legend: B rows of the batch, V vocabulary, S slots.
"""

import torch
import triton

from vmmkv.kernels import checks
from vmmkv.kernels.noise import GROUP
from vmmkv.kernels.sample_draw import draw_parts, likeliest_parts
from vmmkv.kernels.sample_settle import MAX_TILES, settle
from vmmkv.units import ceil_div

MAX_VOCABULARY = 2**20
"""The second launch keeps a number for each 1024 ids of it in registers."""

_PROGRAMS = 1024
"""Of the first launch, about: 8 for each multiprocessor of an H200."""
_DRAW_ROWS, _DRAW_WARPS = 4, 4
_LIKELIEST_TILE, _LIKELIEST_WARPS = 4096, 8
_SETTLE_ROWS, _SETTLE_WARPS = 8, 16

assert MAX_VOCABULARY <= MAX_TILES * _SETTLE_ROWS * GROUP


def likeliest(logits_BV: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[B] int32: the lowest id of each row's largest logit; NOT_A_NUMBER (-1) for a row with a NaN.

    logits_BV: fp16, bf16 or fp32; rows of any stride, elements contiguous.

    Cost: two launches, no synchronisation; allocates scratch; safe while a graph is captured.
    Raises: ValueError naming the argument.
    """
    num_rows, num_tokens, out = _check(logits_BV, out)
    if num_rows == 0:
        return out
    device = logits_BV.device
    # Small tiles for few rows, so that there are programs enough for the whole device.
    tile = GROUP if _PROGRAMS // num_rows * _LIKELIEST_TILE > num_tokens else _LIKELIEST_TILE
    part_tiles, num_parts = _parts(num_rows, ceil_div(num_tokens, tile))
    sums_BP = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    ids_BP = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    with checks.on_device(device):
        likeliest_parts[(num_parts, num_rows)](
            logits_BV, sums_BP, ids_BP, num_tokens, part_tiles, num_parts, logits_BV.stride(0),
            TILE=tile, num_warps=4 if tile == GROUP else _LIKELIEST_WARPS, **checks.overlap(device),
        )  # fmt: skip
        settle[(num_rows,)](
            None, None, None, None, None, None, None, None, None, sums_BP, ids_BP, None, out,
            0, num_tokens, 0, num_parts, 0,
            PARTS_PAD=_padded(num_parts), G_PAD=16, ROWS=1, FILTERS=False, num_warps=1, **checks.overlap(device),
        )  # fmt: skip
    return out


def sample(
    logits_BV: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B] int32 token ids: of row b with the parameters of slot slots_B[b], behind positions_B[b] tokens.

    Row by row the token of `sample_reference.sample`, whatever the other rows are. A row whose slot is not in [0, S) is
    greedy; one with a NaN gives NOT_A_NUMBER (-1).

    logits_BV: fp16, bf16 or fp32; rows of any stride, elements contiguous. slots_B, positions_B: int32 or int64.
    temperature_S: float32; below COLDEST the row is greedy. top_k_S: int32; 0, or V and more, keep all. top_p_S: float32; 1
    keeps all. min_p_S: float32; 0 keeps all. seed_S: int64. All of them contiguous and on the logits' device.

    Cost: two launches, no synchronisation; allocates scratch; safe while a graph is captured, and the graph serves whatever
    the parameters are when it is replayed. The first reads all logits; the second, in rows that are filtered, those groups
    of 1024 of them that may matter, some times over.
    Raises: ValueError naming the argument.
    """
    num_rows, num_tokens, out = _check(logits_BV, out)
    device = logits_BV.device
    checks.index("slots_B", slots_B, num_rows, device)
    checks.index("positions_B", positions_B, num_rows, device)
    num_slots = temperature_S.shape[0]
    for name, tensor, dtype in (
        ("temperature_S", temperature_S, torch.float32),
        ("top_k_S", top_k_S, torch.int32),
        ("top_p_S", top_p_S, torch.float32),
        ("min_p_S", min_p_S, torch.float32),
        ("seed_S", seed_S, torch.int64),
    ):
        _vector(name, tensor, num_slots, dtype, device)
    if num_rows == 0:
        return out
    num_groups = ceil_div(num_tokens, GROUP)
    part_groups, num_parts = _parts(num_rows, num_groups)
    maxima_BG = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    list_BG = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    sums_BP = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    ids_BP = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    # Each multiplication and addition is rounded alone, as in torch: then the noise has the same bits.
    options = {"enable_fp_fusion": False} | checks.overlap(device)
    sizes = (num_slots, num_tokens, num_groups)
    with checks.on_device(device):
        draw_parts[(num_parts, num_rows)](
            logits_BV, slots_B, positions_B, temperature_S, seed_S, maxima_BG, sums_BP, ids_BP,
            *sizes, part_groups, num_parts, logits_BV.stride(0),
            ROWS=min(triton.next_power_of_2(part_groups), _DRAW_ROWS), num_warps=_DRAW_WARPS, **options,
        )  # fmt: skip
        settle[(num_rows,)](
            logits_BV, slots_B, positions_B, temperature_S, top_k_S, top_p_S, min_p_S, seed_S,
            maxima_BG, sums_BP, ids_BP, list_BG, out, *sizes, num_parts, logits_BV.stride(0),
            # Parts are no more than groups: padded alike, the kernel is compiled once for all batch sizes.
            PARTS_PAD=_padded(num_groups), G_PAD=_padded(num_groups), ROWS=_SETTLE_ROWS, FILTERS=True,
            num_warps=_SETTLE_WARPS, **options,
        )  # fmt: skip
    return out


def _parts(num_rows: int, num_units: int) -> tuple[int, int]:
    """In how many units a program takes, and how many programs, a row is cut."""
    part_units = ceil_div(num_units, max(1, min(_PROGRAMS // num_rows, num_units)))
    return part_units, ceil_div(num_units, part_units)


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _check(logits_BV: torch.Tensor, out: torch.Tensor | None) -> tuple[int, int, torch.Tensor]:
    """Returns B, V and where the tokens go."""
    checks.runnable("logits_BV", logits_BV.device)
    if logits_BV.dtype not in checks.FLOAT_DTYPES:
        checks.refuse("logits_BV", f"of {logits_BV.dtype}", "float16, bfloat16 or float32")
    if checks.INTERPRETED and logits_BV.dtype == torch.bfloat16:
        checks.refuse(
            "logits_BV", f"of {logits_BV.dtype}", "float16 or float32: Triton's interpreter computes bfloat16 wrongly"
        )
    if logits_BV.dim() != 2 or not 0 < logits_BV.shape[1] <= MAX_VOCABULARY:
        wanted = f"2 dimensions, [rows, vocabulary], the second of 1 to {MAX_VOCABULARY}"
        checks.refuse("logits_BV", f"of shape {tuple(logits_BV.shape)}", wanted)
    num_rows, num_tokens = logits_BV.shape
    if num_tokens > 1 and logits_BV.stride(1) != 1:
        given = f"strided by {logits_BV.stride(1)} in its last dimension"
        checks.refuse("logits_BV", given, "a contiguous last dimension: stride 1")
    if out is None:
        return num_rows, num_tokens, torch.empty(num_rows, dtype=torch.int32, device=logits_BV.device)
    _vector("out", out, num_rows, torch.int32, logits_BV.device)
    return num_rows, num_tokens, out


def _vector(name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != (size,) or tensor.device != device or not tensor.is_contiguous():
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        checks.refuse(name, given, f"contiguous {dtype} of shape ({size},) on {device}")
