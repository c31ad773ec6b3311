"""Laws of the kernels of RMS norm and activation."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN, some
from tests.kernels.test_checks import Refusal, assert_refused, meta, misaligned, odd_strides, spread
from vmmkv.kernels import reference
from vmmkv.kernels.activation import silu_mul
from vmmkv.kernels.norm import MAX_WIDTH, rms_norm
from vmmkv.units import round_up

EPS = 1e-5

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


def in_poison(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN, and within it rows of so many columns with at least 16 bytes before and behind each."""
    wide = torch.full((rows + 2, round_up(columns, 8) + 24), NAN, dtype=dtype, device=device)
    return wide, wide[1:-1, 8 : 8 + columns]


def make_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random rows in poison, each at a magnitude of its own, the last one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    _, x_NE = in_poison(rows, columns, dtype, device)
    magnitudes_N1 = 2.0 ** torch.arange(-8, rows - 8)[:, None].clamp(max=8)
    x_NE.copy_(torch.randn(rows, columns, generator=generator) * magnitudes_N1)
    if rows > 1:
        x_NE[-1] = 0.0
    return x_NE


def make_weight(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(columns, generator=torch.Generator().manual_seed(9)).to(device, dtype)


def assert_rounded_alike(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the two roundings, each of which may fall to the other side; the mean is summed in another order."""
    info = torch.finfo(expected.dtype)
    roundings = 2 if info.bits == 16 else 16
    torch.testing.assert_close(ours, expected, rtol=roundings * info.eps, atol=2 * info.smallest_normal * info.eps)


@dtypes
@pytest.mark.parametrize(
    ("columns", "rows", "has_residual"),
    some(
        [(1, 2, False), (63, 1, True), (576, 17, True), (5120, 2, False)],
        [(columns, rows, has) for columns in (64, 111, 576) for rows in (1, 2, 17) for has in (False, True)],
    ),
)
def test_rows_are_normed_and_nothing_beside_them_is_touched(
    columns: int, rows: int, has_residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x_NE, weight_E = make_rows(rows, columns, dtype, device), make_weight(columns, dtype, device)
    residual_NE = make_rows(rows, columns, dtype, device, seed=1) if has_residual else None
    given_NE = x_NE.clone()
    sum_NE = x_NE if residual_NE is None else residual_NE + x_NE
    wide, out_NE = in_poison(rows, columns, dtype, device)
    assert rms_norm(x_NE, weight_E, EPS, residual_NE=residual_NE, out=out_NE) is out_NE
    assert_rounded_alike(out_NE, reference.rms_norm(sum_NE, weight_E, EPS))
    assert torch.equal(x_NE, given_NE)
    assert residual_NE is None or torch.equal(residual_NE, sum_NE)
    out_NE.fill_(NAN)
    assert wide.isnan().all()


@dtypes
def test_norm_is_that_of_transformers(dtype: torch.dtype, device: torch.device) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x_NE = make_rows(5, 320, dtype, device)
    module = llama.LlamaRMSNorm(320, eps=EPS).to(device, dtype)
    with torch.no_grad():
        module.weight.copy_(make_weight(320, dtype, device))
        assert_rounded_alike(rms_norm(x_NE, module.weight, EPS), module(x_NE))


@dtypes
def test_a_row_is_the_same_bit_for_bit_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    x_NE, weight_E = make_rows(9, 576, dtype, device), make_weight(576, dtype, device)
    together_NE = rms_norm(x_NE, weight_E, EPS)
    assert together_NE.is_contiguous()
    for n in range(9):
        assert torch.equal(rms_norm(x_NE[n : n + 1], weight_E, EPS)[0], together_NE[n])


@dtypes
def test_a_row_may_be_normed_in_place(dtype: torch.dtype, device: torch.device) -> None:
    x_NE, weight_E = make_rows(3, 1000, dtype, device), make_weight(1000, dtype, device)
    expected_NE = rms_norm(x_NE, weight_E, EPS)
    rms_norm(x_NE, weight_E, EPS, out=x_NE)
    assert torch.equal(x_NE, expected_NE)


def test_the_sum_is_rounded_before_it_is_normed(device: torch.device) -> None:
    x_NE = torch.full((1, 64), 1.0, dtype=torch.float16, device=device)
    residual_NE = torch.full((1, 64), 2048.0, dtype=torch.float16, device=device)
    residual_NE[0, 0] = 0.0
    out_NE = rms_norm(x_NE, torch.ones_like(x_NE[0]), EPS, residual_NE=residual_NE)
    assert (residual_NE[0, 1:] == 2048.0).all()  # 2049 is no float16, and 2048 is the even one beside it
    assert_rounded_alike(out_NE, reference.rms_norm(residual_NE, torch.ones_like(x_NE[0]), EPS))


def test_norming_nothing_launches_nothing(device: torch.device) -> None:
    none_NE = torch.empty(0, 64, device=device)
    assert rms_norm(none_NE, torch.ones(64, device=device), EPS).shape == (0, 64)


REFUSALS: list[Refusal] = [
    ("x_NE", lambda x: x[0], "2 dimensions: [tokens, hidden size]"),
    ("x_NE", lambda x: x.double(), "float16, bfloat16 or float32"),
    ("x_NE", lambda x: x[:, :0], f"1 to {MAX_WIDTH}"),
    ("x_NE", lambda x: x.new_zeros(1, MAX_WIDTH + 8), f"1 to {MAX_WIDTH}"),
    ("x_NE", spread, "stride 1"),
    ("x_NE", odd_strides, "16 bytes"),
    ("x_NE", misaligned, "16 bytes"),
    ("x_NE", meta, "tensor"),
    ("weight_E", lambda weight: weight[:-8], "(64,)"),
    ("weight_E", lambda weight: weight.float(), "torch.float16"),
    ("weight_E", spread, "stride 1"),
    ("weight_E", misaligned, "16 bytes"),
    ("weight_E", meta, "where the others are"),
    ("eps", lambda _: 0.0, "positive"),
    ("eps", lambda _: NAN, "positive"),
    ("residual_NE", lambda residual: residual[:-1], "(3, 64)"),
    ("residual_NE", lambda residual: residual.float(), "torch.float16"),
    ("residual_NE", odd_strides, "16 bytes"),
    ("residual_NE", meta, "where the others are"),
    ("out", lambda out: out[:, :32], "(3, 64)"),
    ("out", spread, "stride 1"),
    ("out", lambda out: out.float(), "torch.float16"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[0])
def test_rms_norm_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        name: torch.zeros(3, 64, dtype=torch.float16, device=device) for name in ("x_NE", "residual_NE", "out")
    }
    weight_E = torch.ones(64, dtype=torch.float16, device=device)
    assert_refused(rms_norm, arguments | {"weight_E": weight_E, "eps": EPS}, refusal)


def test_the_interpreter_refuses_bfloat16(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the interpreter alone computes it wrongly")
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        rms_norm(torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16), EPS)


# Activation


def make_gate_up(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random gates and ups in poison, with gates so large that their exponentials are infinite."""
    generator = torch.Generator().manual_seed(0)
    _, gate_up_NG = in_poison(rows, 2 * width, dtype, device)
    gate_up_NG.copy_(torch.randn(rows, 2 * width, generator=generator) * 3)
    extremes = torch.tensor([0.0, -0.0, -90.0, 90.0, -1e4, 1e4], device=device, dtype=dtype)[:width]
    gate_up_NG[0, : len(extremes)] = extremes
    return gate_up_NG


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of numpy, in the interpreter
@dtypes
@pytest.mark.parametrize(("rows", "width"), some([(1, 1), (5, 63), (1, 2056)], [(5, 64), (5, 1111), (5, 2048)]))
def test_gates_open_and_nothing_beside_the_output_is_touched(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up_NG = make_gate_up(rows, width, dtype, device)
    given_NG = gate_up_NG.clone()
    wide, out_NF = in_poison(rows, width, dtype, device)
    assert silu_mul(gate_up_NG, out_NF) is out_NF
    assert_rounded_alike(out_NF, reference.silu_mul(gate_up_NG))
    assert torch.equal(gate_up_NG, given_NG)
    assert torch.equal(silu_mul(gate_up_NG), out_NF)
    out_NF.fill_(NAN)
    assert wide.isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@dtypes
def test_activation_is_that_of_transformers(dtype: torch.dtype, device: torch.device) -> None:
    activations = pytest.importorskip("transformers.activations")
    gate_up_NG = make_gate_up(3, 200, dtype, device)
    gate_NF, up_NF = gate_up_NG.split(200, dim=-1)
    assert_rounded_alike(silu_mul(gate_up_NG), activations.ACT2FN["silu"](gate_NF) * up_NF)


def test_activating_nothing_launches_nothing(device: torch.device) -> None:
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


SILU_REFUSALS: list[Refusal] = [
    ("gate_up_NG", lambda gate_up: gate_up[0], "2 dimensions: [tokens, 2 * MLP width]"),
    ("gate_up_NG", lambda gate_up: gate_up.int(), "float16, bfloat16 or float32"),
    ("gate_up_NG", lambda gate_up: gate_up[:, :63], "even number"),
    ("gate_up_NG", lambda gate_up: gate_up[:, :0], "even number"),
    ("gate_up_NG", spread, "stride 1"),
    ("gate_up_NG", odd_strides, "16 bytes"),
    ("gate_up_NG", misaligned, "16 bytes"),
    ("gate_up_NG", meta, "tensor"),
    ("gate_up_NG", lambda gate_up: gate_up[:1].expand(2**31, 64), "fewer than 2147483648 of this width"),
    ("out", lambda out: out[:-1], "(3, 32)"),
    ("out", lambda out: out.float(), "torch.float16"),
    ("out", odd_strides, "16 bytes"),
    ("out", meta, "where the others are"),
]


@pytest.mark.parametrize("refusal", SILU_REFUSALS, ids=lambda refusal: refusal[0])
def test_silu_mul_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        "gate_up_NG": torch.zeros(3, 64, dtype=torch.float16, device=device),
        "out": torch.zeros(3, 32, dtype=torch.float16, device=device),
    }
    if refusal[2].startswith("fewer than"):
        arguments["out"] = None  # of so many rows there is none
    assert_refused(silu_mul, arguments, refusal)
