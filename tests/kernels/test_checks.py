"""A launcher refuses what its kernel would misread, and names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN, Case, make_case, make_memory
from vmmkv.kernels.attention.append import append
from vmmkv.kernels.attention.cascade import cascade
from vmmkv.kernels.attention.decode import decode
from vmmkv.kernels.attention.prefill import prefill
from vmmkv.kernels.quantise import Kind

Spoil = Callable[[torch.Tensor], Any]
Refusal = tuple[str, Spoil, str]
"""The argument, what is done to it, and what the message says besides."""


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, one element off a 16-byte address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)


def odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, rows one element further apart than 16 bytes allow."""
    return torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)[..., :-1]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with every other element in its last dimension."""
    return torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)[..., ::2]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on another device."""
    return tensor.to("meta")


def missing(tensor: torch.Tensor) -> None:
    """No tensor."""


_LAUNCHED: set[object] = set()
"""Functions, and of what shapes and types their arguments were, when they worked: the interpreter takes half a second."""


def assert_refused(launch: Callable[..., object], arguments: dict[str, Any], refusal: Refusal) -> None:
    """The launch works, and with one argument spoilt it is refused in that argument's name."""
    name, spoil, wanted = refusal
    alike = (
        launch,
        *(
            (each, value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else (each, repr(value))
            for each, value in sorted(arguments.items())
        ),
    )
    if alike not in _LAUNCHED:
        launch(**arguments)
        _LAUNCHED.add(alike)
    with pytest.raises(ValueError) as raised:
        launch(**(arguments | {name: spoil(arguments[name])}))
    assert str(raised.value).startswith(f"{name} is ")
    assert wanted in str(raised.value)


def small_case(device: torch.device, kind: Kind | None = None, scale: str = "token") -> Case:
    return make_case([5, 9], heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, kind=kind, scale=scale, device=device)


def decode_arguments(case: Case) -> dict[str, Any]:
    names = ("q_BHD", "k_STKW", "v_STKW", "lengths_B", "slots_B")
    return dict(zip(names, case.arguments, strict=True)) | case.memory.scales


MEMORY: list[Refusal] = [
    ("k_STKW", lambda k: k[0], "4 dimensions: [slots, rows, kv heads, head dim]"),
    ("k_STKW", lambda k: k.long(), "float16, bfloat16 or float32; or quantised: float8_e4m3fn (fp8), int8 (int8), uint8"),
    ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
    ("k_STKW", spread, "stride 1"),
    ("k_STKW", odd_strides, "16 bytes"),
    ("k_STKW", misaligned, "16 bytes"),
    ("k_STKW", meta, "where the others are"),
    ("v_STKW", lambda v: v[:, :-1], "(4, "),
    ("v_STKW", lambda v: v.float(), "float16"),
    ("v_STKW", odd_strides, "16 bytes"),
    ("v_STKW", meta, "where the others are"),
]
"""Of K and V, whatever the kernel."""

DECODE: list[Refusal] = [
    *MEMORY,
    ("q_BHD", lambda q: q[0], "3 dimensions"),
    ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
    ("q_BHD", lambda q: q[:, :0], "multiple of the 2 kv heads"),
    ("q_BHD", lambda q: q.repeat(1, 40, 1), "at most 64 times as many"),
    ("q_BHD", lambda q: q[..., :32], "64, which K and V have"),
    ("q_BHD", spread, "stride 1"),
    ("q_BHD", odd_strides, "16 bytes"),
    ("q_BHD", misaligned, "16 bytes"),
    ("q_BHD", meta, "tensor"),
    ("lengths_B", lambda lengths: lengths[:1], "(2,)"),
    ("lengths_B", lambda lengths: lengths.float(), "int32 or int64"),
    ("lengths_B", meta, "the host never reads it"),
    ("slots_B", lambda slots: slots.repeat_interleave(2)[::2], "contiguous"),
    ("slots_B", meta, "the host never reads it"),
    ("limit_S", lambda limit: limit.long(), "int32"),
    ("limit_S", lambda limit: limit[:1], "(4,)"),
    ("limit_S", meta, "the host never reads it"),
    ("window", lambda _: 0, "at least 1"),
    ("softcap", lambda _: 0.0, "positive"),
    ("out", lambda out: out.float(), "float16"),
    ("out", lambda out: out[:1], "(2, 4, 64)"),
    ("out", spread, "stride 1"),
    ("workspace", lambda _: torch.empty(5), "at least"),
    ("workspace", lambda workspace: workspace.double(), "float32"),
    ("workspace", meta, "where the others are"),
    ("firsts_B", lambda firsts: firsts[:1], "(2,)"),
    ("firsts_B", lambda firsts: firsts.float(), "int32 or int64"),
    ("lse_BH", lambda lse: lse[:, :2], "contiguous torch.float32 of shape (2, 4)"),
    ("lse_BH", lambda lse: lse.half(), "contiguous torch.float32 of shape (2, 4)"),
    ("lse_BH", lambda lse: lse.new_empty(4, 2).T, "not contiguous"),
    ("lse_BH", meta, "on meta; wanted"),
]


@pytest.mark.parametrize("refusal", DECODE, ids=lambda refusal: refusal[0])
def test_decode_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    case = small_case(device)
    arguments = decode_arguments(case) | {
        "limit_S": torch.full((4,), 9, dtype=torch.int32, device=device),
        "window": None,
        "softcap": None,
        "out": torch.empty_like(case.q_NHD) if refusal[0] == "out" else None,
        "workspace": torch.empty(100_000, device=device),
        "firsts_B": torch.zeros(2, dtype=torch.int32, device=device),
        "lse_BH": torch.empty(2, 4, device=device) if refusal[0] == "lse_BH" else None,
    }
    assert_refused(decode, arguments, refusal)


@pytest.mark.parametrize(
    ("kind", "scale", "refusal"),
    [
        ("int8", "token", ("k_scale", missing, "both K and V")),
        ("int8", "token", ("v_scale", missing, "both K and V")),
        ("int8", "token", ("k_scale", lambda scale: scale.float(), "float16 of shape (4, 14, 2)")),
        ("int8", "token", ("k_scale", lambda scale: scale[:, :-1], "(4, 14, 2)")),
        ("int8", "token", ("v_scale", lambda scale: scale[0], "(4, 14, 2)")),
        ("int4", "token", ("v_scale", lambda scale: scale.contiguous(), "2, as k_scale is")),
        ("int4", "token", ("v_scale", meta, "where the others are")),
        ("int4", "token", ("k_scale", lambda scale: scale[0, 0].float(), "as int4 needs")),
        ("fp8", "head", ("k_scale", lambda scale: scale.half(), "float32 of shape (2,)")),
        ("fp8", "head", ("v_scale", lambda scale: scale.repeat(2), "float32 of shape (2,)")),
        ("fp8", "head", ("v_scale", spread, "contiguous")),
        ("fp8", "head", ("v_scale", lambda scale: scale.half().expand(4, 14, 2), "1, as k_scale has")),
        ("int4", "token", ("v_STKW", lambda v: v.view(torch.int8), "uint8")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_the_scales_of_quantised_rows_are_checked(kind: Kind, scale: str, refusal: Refusal, device: torch.device) -> None:
    case = small_case(device, kind, scale)
    assert_refused(decode, decode_arguments(case), refusal)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), NAN])
def test_a_scale_or_cap_that_gives_no_number_is_refused(name: str, value: float, device: torch.device) -> None:
    case = small_case(device)
    for attend in (decode, prefill):
        with pytest.raises(ValueError, match=f"^{name} is {value}; wanted a positive, finite number"):
            starts = (case.lengths_B.new_tensor([0, *range(1, len(case.lengths_B) + 1)]),) if attend is prefill else ()
            attend(case.q_NHD, case.memory.k, case.memory.v, *starts, case.lengths_B, case.slots_B, **{name: value})


def test_the_angles_of_transformers_are_told_apart(device: torch.device) -> None:
    case = small_case(device)
    tokens_NKD = torch.zeros(1, 2, 64, dtype=torch.float16, device=device)
    one_N, angles_TD = case.slots_B.new_zeros(1), torch.zeros(8, 64, device=device)
    limit_S = torch.ones(len(case.memory.k), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"cos_TR is of shape \(8, 64\); wanted \(8, 32\).*take \[:, :32\]"):
        append(
            tokens_NKD, tokens_NKD, case.memory.k, case.memory.v, one_N, one_N, limit_S, cos_TR=angles_TD, sin_TR=angles_TD
        )  # fmt: skip


def test_an_int4_view_of_full_width_is_told_apart(device: torch.device) -> None:
    case = small_case(device)
    full_STKW = torch.zeros(case.memory.k.shape, dtype=torch.uint8, device=device)
    scales = torch.ones(full_STKW.shape[:3], dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="q_BHD is of head dim 64; wanted 128, which K and V have: two elements in each byte"):
        decode(case.q_NHD, full_STKW, full_STKW, case.lengths_B, case.slots_B, k_scale=scales, v_scale=scales)


def test_the_interpreter_refuses_bfloat16(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the interpreter alone computes it wrongly")
    case = make_case([5], heads=2, kv_heads=1, head_dim=16, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        decode(*case.arguments)


def test_both_scales_of_quantised_rows_are_wanted(device: torch.device) -> None:
    case = small_case(device, "fp8")
    with pytest.raises(ValueError, match=r"^k_scale is missing; wanted the scales of fp8 K and V"):
        decode(*case.arguments)
    plain = small_case(device)
    with pytest.raises(ValueError, match=r"^k_scale is given; wanted none, since k_STKW is of torch.float16"):
        decode(*plain.arguments, **case.memory.scales)
    with pytest.raises(ValueError, match=r"^v_scale is missing; wanted a scale for both K and V, or for neither"):
        decode(*plain.arguments, k_scale=case.memory.scales["k_scale"])


def test_decode_refuses_rows_too_far_apart_for_32_bit_offsets(device: torch.device) -> None:
    case = make_case([1], heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, device=device)
    row_STKW = torch.empty(1, 1, 2, 64, dtype=torch.float16, device=device)
    far_STKW = row_STKW.as_strided((1, 1, 2, 64), (2**31, 2**31 // 16, 64, 1))
    with pytest.raises(ValueError, match="k_STKW is strided by"):
        decode(case.q_NHD, far_STKW, far_STKW, case.lengths_B, case.slots_B)


TABLES: list[Refusal] = [
    ("k_STKW", lambda k: k[0], "[blocks, rows of a block, kv heads, head dim]"),
    ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
    ("v_STKW", odd_strides, "16 bytes"),
    ("v_STKW", lambda v: v[1:], "(15, 5, 2, 64)"),
    ("tables_SC", lambda tables: tables.long(), "int32"),
    ("tables_SC", lambda tables: tables[0], "2 dimensions, [slots, blocks of each]"),
    ("tables_SC", spread, "the last contiguous"),
    ("tables_SC", meta, "where the others are"),
    ("limit_S", lambda limit: limit[:-1], "(4,)"),
]


@pytest.mark.parametrize("launch", [decode, append, prefill])
@pytest.mark.parametrize("refusal", TABLES, ids=lambda refusal: refusal[0])
def test_a_kernel_over_blocks_names_the_argument_it_refuses(
    refusal: Refusal, launch: Callable[..., object], device: torch.device
) -> None:
    case = small_case(device)
    blocks, tables_SC = case.memory.in_blocks(5)
    limit_S = torch.full((4,), 9, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"k_STKW": blocks.k, "v_STKW": blocks.v, "tables_SC": tables_SC, "limit_S": limit_S}
    if launch is append:
        new_NKD = torch.zeros(2, 2, 64, dtype=torch.float16, device=device)
        arguments |= {"k_NKD": new_NKD, "v_NKD": new_NKD, "slots_N": case.slots_B, "positions_N": case.lengths_B}
    else:
        name = "q_BHD" if launch is decode else "q_NHD"
        arguments |= {name: case.q_NHD, "lengths_B": case.lengths_B, "slots_B": case.slots_B}
        if launch is prefill:
            arguments["query_starts"] = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    assert_refused(launch, arguments, refusal)


PREFILL: list[Refusal] = [
    *MEMORY,
    ("q_NHD", lambda q: q[0], "3 dimensions"),
    ("q_NHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
    ("q_NHD", lambda q: q[..., :32], "64"),
    ("query_starts", lambda starts: starts[:-1], "(3,)"),
    ("query_starts", lambda starts: starts.float(), "int32"),
    ("query_starts", lambda starts: starts.long(), "int32"),
    ("lengths_B", meta, "the host never reads it"),
    ("slots_B", lambda slots: slots.repeat(2), "(2,)"),
    ("limit_S", lambda limit: limit[:2], "(4,)"),
    ("window", lambda _: 0, "at least 1"),
    ("out", lambda _: torch.zeros(2, 4, 64), "float16"),
]


@pytest.mark.parametrize("refusal", PREFILL, ids=lambda refusal: refusal[0])
def test_prefill_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments = decode_arguments(small_case(device)) | {
        "query_starts": torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        "limit_S": torch.full((4,), 9, dtype=torch.int32, device=device),
        "window": None,
        "out": None,
    }
    assert_refused(prefill, {"q_NHD": arguments.pop("q_BHD")} | arguments, refusal)


CASCADE: list[Refusal] = [
    ("q_BHD", lambda q: q[0], "3 dimensions"),
    ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
    ("k_STKD", lambda k: k.view(torch.int8), "quantised"),
    ("lengths_B", lambda lengths: lengths.float(), "int32"),
    ("group_starts_G1", lambda starts: starts[:-1], "(2,)"),
    ("group_starts_G1", lambda starts: starts.long(), "int32"),
    ("leaders_G", lambda leaders: leaders.long(), "int32"),
    ("leaders_G", meta, "the host never reads it"),
    ("prefix_rows_G", lambda rows: rows.float(), "int32"),
    ("prefix_rows_G", lambda rows: rows.repeat(5000), "at most 4096"),
    ("firsts_B", lambda firsts: firsts.repeat(2), "(2,)"),
    ("limit_S", lambda limit: limit[:2], "(4,)"),
    ("softcap", lambda _: float("inf"), "positive"),
    ("scale", lambda _: -1.0, "positive"),
    ("out", lambda _: torch.zeros(2, 4, 64), "float16"),
    ("workspace", lambda workspace: workspace[:5], "at least"),
]


@pytest.mark.parametrize("refusal", CASCADE, ids=lambda refusal: refusal[0])
def test_cascade_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    case = small_case(device)
    names = ("q_BHD", "k_STKD", "v_STKD", "lengths_B", "slots_B")
    arguments: dict[str, Any] = dict(zip(names, case.arguments, strict=True)) | {
        "group_starts_G1": index(0, 2), "leaders_G": case.slots_B[:1], "prefix_rows_G": index(4),
        "firsts_B": index(4, 4), "limit_S": index(9, 9, 9, 9), "scale": None, "softcap": None, "out": None,
        "workspace": torch.empty(1_000_000, device=device),
    }  # fmt: skip
    assert_refused(cascade, arguments, refusal)


APPEND: list[Refusal] = [
    ("k_NKD", lambda k: k[0], "(0, 2, 64)"),
    ("k_NKD", lambda k: k.long(), "float16, bfloat16 or float32"),
    ("k_NKD", meta, "tensor"),
    ("v_NKD", lambda v: v[:-1], "(3, 2, 64)"),
    ("v_NKD", lambda v: v.float(), "float16"),
    ("v_NKD", odd_strides, "16 bytes"),
    ("k_STKW", lambda k: k.float(), "wanted torch.float16"),
    ("v_STKW", misaligned, "16 bytes"),
    ("slots_N", lambda slots: slots[:1], "(3,)"),
    ("slots_N", lambda slots: slots.float(), "int32 or int64"),
    ("positions_N", meta, "where the others are"),
    ("limit_S", lambda limit: limit.long(), "int32"),
    ("q_NHD", lambda q: q[0], "3 dimensions"),
    ("q_NHD", lambda q: q[:-1], "(3, 4, 64)"),
    ("q_NHD", lambda q: q.float(), "float16"),
    ("q_NHD", odd_strides, "16 bytes"),
    ("cos_TR", missing, "both cosines and sines"),
    ("cos_TR", lambda cos: cos[0], "2 dimensions: [positions, head dim / 2]"),
    ("cos_TR", lambda cos: cos.half(), "float32"),
    ("cos_TR", lambda cos: cos[:, :16], "(8, 32)"),
    ("sin_TR", missing, "both cosines and sines"),
    ("sin_TR", lambda sin: sin[:-1], "(8, 32)"),
    ("sin_TR", spread, "stride 1"),
    ("sin_TR", meta, "where the others are"),
]


def append_arguments(device: torch.device) -> dict[str, Any]:
    memory = make_memory((4, 8), 2, 64, torch.float16, None, "", device)
    new_NHD = torch.zeros(3, 4, 64, dtype=torch.float16, device=device)
    return {
        "k_NKD": new_NHD[:, :2],
        "v_NKD": new_NHD[:, 2:],
        "k_STKW": memory.k,
        "v_STKW": memory.v,
        "slots_N": torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        "positions_N": torch.tensor([3, 4, 5], dtype=torch.int32, device=device),
        "limit_S": torch.full((4,), 8, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize("refusal", APPEND, ids=lambda refusal: refusal[0])
def test_append_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    angles = {name: torch.zeros(8, 32, device=device) for name in ("cos_TR", "sin_TR")}
    q_NHD = torch.zeros(3, 4, 64, dtype=torch.float16, device=device)
    assert_refused(append, append_arguments(device) | angles | {"q_NHD": q_NHD}, refusal)


def test_append_refuses_queries_that_it_has_no_angles_for(device: torch.device) -> None:
    q_NHD = torch.zeros(3, 4, 64, dtype=torch.float16, device=device)
    assert_refused(append, append_arguments(device) | {"q_NHD": None}, ("q_NHD", lambda _: q_NHD, "both, since rotation"))
