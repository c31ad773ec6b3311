"""A launcher refuses what its kernel would misread, and names the argument.

What `checks` refuses is tried once in full, by decode. Of other launchers each argument is spoilt once or twice: is it checked?
"""

import re
from collections.abc import Callable
from operator import itemgetter, methodcaller
from typing import Any

import pytest
import torch

from tests.kernels.cases import BF16, DEVICE, FP16, NAN, index, make_case, make_memory
from vmmkv_kernels.activation import silu_mul
from vmmkv_kernels.attention.append import append
from vmmkv_kernels.attention.cascade import cascade
from vmmkv_kernels.attention.column_sums import column_sums
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.linear import MAX_ROWS, linear
from vmmkv_kernels.norm import MAX_WIDTH, rms_norm
from vmmkv_kernels.quantise import KINDS, PAYLOAD_DTYPES, Kind
from vmmkv_kernels.sampling.logits import apply_penalties, apply_token_mask
from vmmkv_kernels.sampling.sample import sample
from vmmkv_kernels.step import begin_step, end_step

Launch = Callable[..., object]
Arguments = dict[str, Any]
Refusal = tuple[str, Any, str]
"""The argument, what is given for it or done to it, and what the message says besides."""


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, one element off a 16-byte address."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)


def odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, rows one element further apart than 16 bytes allow."""
    return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)[..., :-1]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with every other element in its last dimension."""
    return tensor.new_empty(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]


first, shorter = itemgetter(0), itemgetter(slice(-1))
narrower = itemgetter((..., slice(-8)))
long, doubles, meta = torch.Tensor.long, torch.Tensor.double, methodcaller("to", "meta")


def attention(launch: Launch, kind: Any = None, scale: str = "token", block: int = 0) -> Arguments:
    """Arguments of decode, prefill or cascade over two sequences in slots, or in blocks."""
    case = make_case([5, 9], heads=4, kv_heads=2, head_dim=64, dtype=FP16, kind=kind, scale=scale)
    memory, tables = case.memory, {}
    if block:
        memory, tables_SC = memory.in_blocks(block)
        tables = {"tables_SC": tables_SC}
    arguments = {"q_NHD" if launch is prefill else "q_BHD": case.q_NHD, "k_STKW": memory.k, "v_STKW": memory.v}
    arguments |= {"lengths_B": case.lengths_B, "slots_B": case.slots_B, "limit_S": case.limits(9), **tables, **memory.scales}
    if launch is cascade:
        groups = {"group_starts_G1": index(0, 2), "leaders_G": case.slots_B[:1], "prefix_rows_G": index(4)}
        return arguments | groups | {"firsts_B": index(4, 4), "workspace": zeros(1_000_000)}
    if launch is prefill:
        return arguments | {"query_starts": index(0, 1, 2)}
    return arguments | {"workspace": zeros(100_000)}


def summing() -> Arguments:
    """Arguments of column_sums, of the queries of `attention`."""
    arguments = attention(prefill)
    new = {"q_LNHD": arguments["q_NHD"][None], "k_LSTKD": arguments["k_STKW"][None]}
    names = ("query_starts", "lengths_B", "slots_B")
    return new | {name: arguments[name] for name in names} | {"out": zeros(1, 2, 6)}


def writing(*names: str, block: int = 0) -> Arguments:
    """Arguments of append of three tokens: with "angles", "norms", or into blocks."""
    memory, new_NHD = make_memory((4, 8), 2, 64, FP16), zeros(3, 4, 64, dtype=FP16)
    arguments: Arguments = {"k_NKD": new_NHD[:, :2], "v_NKD": new_NHD[:, 2:]}
    if block:
        memory, arguments["tables_SC"] = memory.in_blocks(block)
    arguments |= {"k_STKW": memory.k, "v_STKW": memory.v, "limit_S": index(8, 8, 8, 8)}
    arguments |= {"slots_N": index(0, 1, 2), "rows_N": index(3, 4, 5)}
    if "angles" in names:
        arguments |= {"cos_TR": zeros(8, 32), "sin_TR": zeros(8, 32), "q_NHD": zeros(3, 4, 64, dtype=FP16)}
    if "norms" in names:
        arguments |= {"q_norm_D": zeros(64, dtype=FP16), "k_norm_D": zeros(64, dtype=FP16), "norm_eps": 1e-6}
    return arguments


LOGITS = {"logits_BV": zeros(2, 64), "slots_B": index(0, 1)}
PARAMETERS = {name: zeros(2) for name in ("temperature_S", "top_p_S", "min_p_S")}
PARAMETERS |= {"positions_B": index(0, 1), "top_k_S": index(0, 0), "seed_S": index(0, 0).long()}
MASKS = {"logits_BV": zeros(3, 40), "rows_G": index(0, 0), "words_GW": index(0, 0, 0, 0).view(2, 2)}
PENALTIES = {name: zeros(2) for name in ("repetition_S", "frequency_S", "presence_S")}
STATE = {"counts_RV": index(*[0] * 64).view(1, 64), "prompt_RV": zeros(1, 64, dtype=torch.uint8), "bias_RV": zeros(1, 64)}
BEGIN = ("slots_B", "tokens_S", "lengths_S", "shifts_S", "ids_B", "rows_B", "positions_B", "ends_B")
END = ("slots_B", "sampled_B", "ends_B", "limit_S", "tokens_S", "lengths_S", "out_B")

MEMORY: list[Refusal] = [
    ("k_STKW", first, "4 dimensions: [slots, rows, kv heads, head dim]"),
    ("k_STKW", long, "float16, bfloat16 or float32; or quantised: float8_e4m3fn (fp8), int8 (int8), uint8"),
    ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
    ("k_STKW", spread, "stride 1"),
    ("k_STKW", odd_strides, "16 bytes"),
    ("k_STKW", misaligned, "16 bytes"),
    ("k_STKW", meta, "where the others are"),
    ("v_STKW", lambda v: v[:, :-1], "(4, "),
    ("v_STKW", odd_strides, "16 bytes"),
    ("lengths_B", lambda lengths: lengths.float(), "int32 or int64"),
    ("slots_B", shorter, "(2,)"),
    ("slots_B", meta, "the host never reads it"),
    ("limit_S", long, "int32, as `cache.limit` is"),
    ("limit_S", shorter, "(4,)"),
    ("window", 0, "at least 1"),
    *((name, value, "positive, finite") for name in ("scale", "softcap") for value in (0.0, -1.0, float("inf"), NAN)),
]
"""Of decode and prefill."""

BLOCKS: list[Refusal] = [
    ("k_STKW", first, "[blocks, rows of a block, kv heads, head dim]"),
    ("v_STKW", shorter, "5, 2, 64)"),
    ("tables_SC", long, "int32"),
    ("tables_SC", first, "2 dimensions, [slots, blocks of each]"),
    ("tables_SC", spread, "the last contiguous"),
    ("tables_SC", meta, "where the others are"),
    ("limit_S", shorter, "(4,)"),
]

REFUSALS: dict[str, tuple[Launch, Arguments, list[Refusal]]] = {
    "decode": (decode, attention(decode), [
        *MEMORY,
        ("q_BHD", first, "3 dimensions"),
        ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("q_BHD", lambda q: q[:, :0], "multiple of the 2 kv heads"),
        ("q_BHD", lambda q: q.repeat(1, 40, 1), "at most 64 times as many"),
        ("q_BHD", lambda q: q[..., :32], "64, which K and V have"),
        ("q_BHD", odd_strides, "16 bytes"),
        ("slots_B", lambda slots: slots.repeat_interleave(2)[::2], "contiguous"),
        ("out", zeros(2, 4, 64), "float16"),
        ("out", zeros(1, 4, 64, dtype=FP16), "(2, 4, 64)"),
        ("out", zeros(2, 4, 128, dtype=FP16)[..., ::2], "stride 1"),
        ("workspace", zeros(5), "at least"),
        ("workspace", doubles, "float32"),
        ("workspace", meta, "where the others are"),
    ]),
    "token scales": (decode, attention(decode, "int8"), [
        ("k_scale", None, "both K and V"),
        ("v_scale", None, "both K and V"),
        ("k_scale", lambda scale: scale.float(), "float16 of shape (4, 14, 2)"),
        ("v_scale", first, "(4, 14, 2)"),
        ("v_scale", lambda scale: scale.contiguous(), "2, as k_scale is"),
        ("v_scale", meta, "where the others are"),
        ("k_scale", lambda scale: scale[0, 0].float(), "as int8 needs"),
        ("v_STKW", lambda v: v.view(torch.uint8), "int8"),
    ]),
    "head scales": (decode, attention(decode, "fp8", "head"), [
        ("k_scale", lambda scale: scale.half(), "float32 of shape (2,)"),
        ("v_scale", lambda scale: scale.repeat(2), "float32 of shape (2,)"),
        ("v_scale", spread, "contiguous"),
        ("v_scale", lambda scale: scale.half().expand(4, 14, 2), "1, as k_scale has"),
    ]),
    "int4": (decode, attention(decode, "int4"), [
        ("q_BHD", lambda q: q[..., :32], "64, which K and V have: two elements in each byte of int4"),
    ]),
    "decode over blocks": (decode, attention(decode, block=5), BLOCKS),
    "prefill over blocks": (prefill, attention(prefill, block=5), BLOCKS),
    "append to blocks": (append, writing(block=5), BLOCKS),
    "prefill": (prefill, attention(prefill), [
        *MEMORY,
        ("q_NHD", first, "3 dimensions"),
        ("q_NHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("query_starts", shorter, "(3,)"),
        ("query_starts", long, "int32"),
        ("out", zeros(2, 4, 64), "float16"),
        ("lse_NH", zeros(4, 2).T, "not contiguous; wanted contiguous torch.float32 of shape (2, 4)"),
    ]),
    "column sums": (column_sums, summing(), [
        ("q_LNHD", lambda q: q[:, :, :3], "multiple of the 2 kv heads"),
        ("q_LNHD", first, "4 dimensions"),
        ("k_LSTKD", first, "5 dimensions"),
        ("k_LSTKD", lambda k: k.repeat(2, 1, 1, 1, 1), "1 layers, as the queries have"),
        ("k_LSTKD", lambda k: k.view(torch.int8), "quantised rows are not ranked"),
        ("query_starts", shorter, "(3,)"),
        ("lengths_B", lambda lengths: lengths.float(), "int32"),
        ("slots_B", shorter, "(2,)"),
        ("scale", -1.0, "positive"),
        ("softcap", float("inf"), "positive"),
        ("out", zeros(1, 2, 6).to("meta"), "on meta; wanted"),
        ("out", zeros(1, 6, 2).mT, "not contiguous"),
        ("out", zeros(1, 2, 15), "contiguous torch.float32 of shape (1, 2, 14)"),
        ("out", zeros(1, 3, 4), "contiguous torch.float32 of shape (1, 2, 4)"),
        ("out", doubles, "contiguous torch.float32 of shape (1, 2, 6)"),
        ("lse_LNH", zeros(2, 4), "contiguous torch.float32 of shape (1, 2, 4)"),
    ]),
    "cascade": (cascade, attention(cascade), [
        ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
        ("lengths_B", lambda lengths: lengths.float(), "int32"),
        ("group_starts_G1", shorter, "(2,)"),
        ("group_starts_G1", long, "int32"),
        ("leaders_G", long, "int32"),
        ("leaders_G", meta, "the host never reads it"),
        ("prefix_rows_G", lambda rows: rows.float(), "int32"),
        ("prefix_rows_G", lambda rows: rows.repeat(5000), "at most 4096"),
        ("firsts_B", lambda firsts: firsts.repeat(2), "(2,)"),
        ("firsts_B", lambda firsts: firsts.float(), "int32 or int64"),
        ("limit_S", shorter, "(4,)"),
        ("softcap", float("inf"), "positive"),
        ("scale", -1.0, "positive"),
        ("out", zeros(2, 4, 64), "float16"),
        ("workspace", lambda workspace: workspace[:5], "at least"),
    ]),
    "append": (append, writing("angles", "norms"), [
        ("k_NKD", first, "(0, 2, 64)"),
        ("k_NKD", long, "float16, bfloat16 or float32"),
        ("v_NKD", shorter, "(3, 2, 64)"),
        ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
        ("v_STKW", misaligned, "16 bytes"),
        ("slots_N", shorter, "(3,)"),
        ("rows_N", meta, "where the others are"),
        ("positions_N", index(3, 4), "(3,)"),
        ("limit_S", long, "int32"),
        ("q_NHD", first, "3 dimensions"),
        ("q_NHD", shorter, "(3, 4, 64)"),
        ("cos_TR", None, "both cosines and sines"),
        ("cos_TR", first, "2 dimensions: [positions, head dim / 2]"),
        ("cos_TR", lambda cos: cos[:, :16], "(8, 32)"),
        ("cos_TR", zeros(8, 64), "(8, 32): one angle for elements j and j + D / 2; transformers' tables have each twice"),
        ("sin_TR", None, "both cosines and sines"),
        ("sin_TR", shorter, "(8, 32)"),
        ("sin_TR", doubles, "float32"),
        ("q_norm_D", narrower, "(64,)"),
        ("k_norm_D", spread, "stride 1"),
        ("norm_eps", 0.0, "positive"),
        ("norm_eps", NAN, "positive"),
    ]),
    "append without angles": (append, writing(), [
        ("q_NHD", zeros(3, 4, 64, dtype=FP16), "both, since rotation"),
        ("q_norm_D", zeros(64, dtype=FP16), "wanted both"),
    ]),
    "rms_norm": (rms_norm, {"x_NE": zeros(3, 64), "weight_E": zeros(64), "eps": 1e-5, "residual_NE": zeros(3, 64)}, [
        ("x_NE", first, "2 dimensions: [tokens, hidden size]"),
        ("x_NE", doubles, "float16, bfloat16 or float32"),
        ("x_NE", lambda x: x[:, :0], f"1 to {MAX_WIDTH}"),
        ("x_NE", zeros(1, MAX_WIDTH + 8), f"1 to {MAX_WIDTH}"),
        ("x_NE", odd_strides, "16 bytes"),
        ("weight_E", narrower, "(64,)"),
        ("weight_E", doubles, "torch.float32"),
        ("eps", 0.0, "positive"),
        ("residual_NE", shorter, "(3, 64)"),
        ("out", zeros(3, 32), "(3, 64)"),
    ]),
    "silu_mul": (silu_mul, {"gate_up_NG": zeros(3, 64)}, [
        ("gate_up_NG", first, "2 dimensions: [tokens, 2 * MLP width]"),
        ("gate_up_NG", lambda gate_up: gate_up[:, :63], "even number"),
        ("gate_up_NG", lambda gate_up: gate_up[:, :0], "even number"),
        ("gate_up_NG", misaligned, "16 bytes"),
        ("gate_up_NG", lambda gate_up: gate_up[:1].expand(2**31, 64), "fewer than 2147483648 of this width"),
        ("out", zeros(2, 32), "(3, 32)"),
    ]),
    "linear": (linear, {"x_MK": zeros(2, 64), "weight_NK": zeros(16, 64), "norm_weight_K": zeros(64), "norm_eps": 1e-5}, [
        ("x_MK", zeros(MAX_ROWS + 1, 64), f"at most {MAX_ROWS}"),
        ("x_MK", first, "2 dimensions"),
        ("x_MK", long, "float16, bfloat16 or float32"),
        ("x_MK", spread, "stride 1"),
        ("weight_NK", doubles, "torch.float32"),
        ("weight_NK", first, "2 dimensions: [outputs, inputs]"),
        ("weight_NK", zeros(16, 32), "(16, 64)"),
        ("weight_NK", zeros(64, 16).T, "stride 1"),
        ("bias_N", zeros(8), "(16,)"),
        ("norm_weight_K", zeros(16), "(64,)"),
        ("norm_eps", -1.0, "0 or more"),
        ("residual_MN", zeros(2, 8), "(2, 16)"),
        ("out", zeros(2, 8), "(2, 16)"),
    ]),
    "linear with an output": (linear, {"x_MK": zeros(2, 64), "weight_NK": zeros(16, 64), "out": zeros(2, 16)}, [
        ("residual_MN", zeros(2, 16), "one of them: the residual is the output"),
    ]),
    "gated linear": (linear, {"x_MK": zeros(2, 64), "weight_NK": zeros(16, 64), "gated": True}, [
        ("weight_NK", shorter, "an even number"),
        ("bias_N", zeros(8), "(16,)"),
        ("residual_MN", zeros(2, 8), "one of them: the residual is the output"),
    ]),
    "sample": (sample, LOGITS | PARAMETERS, [
        ("logits_BV", first, "2 dimensions"),
        ("logits_BV", long, "float16, bfloat16 or float32"),
        ("logits_BV", spread, "the last one contiguous"),
        ("logits_BV", zeros(1, 1).expand(2, 2**20 + 1).contiguous(), "1048576"),
        ("slots_B", shorter, "(2,)"),
        ("positions_B", lambda positions: positions.float(), "int32 or int64"),
        ("temperature_S", doubles, "torch.float32"),
        ("top_k_S", long, "torch.int32"),
        ("top_p_S", shorter, "of shape"),
        ("min_p_S", meta, "contiguous"),
        ("seed_S", spread, "contiguous"),
        ("out", index(0, 0).long(), "torch.int32"),
    ]),
    "apply_penalties": (apply_penalties, LOGITS | PENALTIES | STATE | {"state_row_S": index(0, 0)}, [
        ("logits_BV", long, "float16, bfloat16 or float32"),
        ("slots_B", shorter, "(2,)"),
        ("state_row_S", long, "torch.int32"),
        *((name, doubles, "torch.float32") for name in (*PENALTIES, "bias_RV")),
        ("counts_RV", narrower, "(1, 64)"),
        ("prompt_RV", long, "torch.uint8"),
    ]),
    "apply_token_mask": (apply_token_mask, MASKS, [
        ("logits_BV", first, "2 dimensions"),
        ("rows_G", lambda rows: rows.float(), "int32 or int64"),
        ("rows_G", first, "(0,)"),
        ("words_GW", long, "contiguous torch.int32"),
        ("words_GW", lambda words: words[:, :1], "(2, 2)"),
        ("words_GW", lambda words: words[:1], "(2, 2)"),
        ("words_GW", meta, "on meta; wanted"),
    ]),
    **{
        launch.__name__: (launch, {name: index(*[0] * (9 if name.endswith("_S") else 5)) for name in names}, [
            (name, spoil, "contiguous torch.int32 of shape") for name in names for spoil in (long, spread)
        ] + [(name, shorter, "contiguous torch.int32 of shape") for name in names if name not in ("slots_B", "tokens_S")])
        for launch, names in ((begin_step, BEGIN), (end_step, END))
    },
}  # fmt: skip
"""By name: a launcher, arguments that it takes, and what it refuses in place of one of them."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_launcher_names_the_argument_it_refuses(name: str) -> None:
    launch, arguments, refusals = REFUSALS[name]
    launch(**arguments)
    for argument, spoil, wanted in refusals:
        spoilt = spoil(arguments[argument]) if callable(spoil) else spoil
        with pytest.raises(ValueError, match=f"^{argument} is .*{re.escape(wanted)}"):
            launch(**arguments | {argument: spoilt})


def test_both_scales_of_quantised_rows_are_wanted() -> None:
    quantised, plain = attention(decode, "fp8"), attention(decode)
    scales = {name: quantised.pop(name) for name in ("k_scale", "v_scale")}
    with pytest.raises(ValueError, match=r"^k_scale is missing; wanted the scales of fp8 K and V"):
        decode(**quantised)
    with pytest.raises(ValueError, match=r"^k_scale is given; wanted none, since k_STKW is of torch.float16"):
        decode(**plain, **scales)


def test_an_int4_view_of_full_width_is_told_apart() -> None:
    full_STKW, scales = zeros(4, 14, 2, 64, dtype=torch.uint8), zeros(4, 14, 2, dtype=FP16)
    with pytest.raises(ValueError, match="q_BHD is of head dim 64; wanted 128, which K and V have: two elements in each byte"):
        decode(**attention(decode) | {"k_STKW": full_STKW, "v_STKW": full_STKW, "k_scale": scales, "v_scale": scales})


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_number_of_bytes_a_head_is_refused(kind: Kind) -> None:
    odd_STKW = zeros(4, 14, 2, 64, dtype=PAYLOAD_DTYPES[kind])[..., :63]
    with pytest.raises(ValueError, match=f"k_STKW is {kind} of 63 bytes a head; wanted an even number"):
        decode(**attention(decode, kind) | {"k_STKW": odd_STKW, "v_STKW": odd_STKW})


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter alone computes it wrongly")
def test_the_interpreter_refuses_bfloat16() -> None:
    case = make_case([5], heads=2, kv_heads=1, head_dim=16, dtype=BF16)
    for launch in (lambda: decode(*case.arguments), lambda: rms_norm(zeros(1, 64, dtype=BF16), zeros(64, dtype=BF16), 1e-5)):
        with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
            launch()


def test_rows_too_far_apart_for_32_bit_offsets_are_refused() -> None:
    far_STKW = zeros(1, 1, 2, 64, dtype=FP16).as_strided((1, 1, 2, 64), (2**31, 2**31 // 16, 64, 1))
    with pytest.raises(ValueError, match="k_STKW is strided by"):
        decode(zeros(1, 4, 64, dtype=FP16), far_STKW, far_STKW, index(1), index(0))
