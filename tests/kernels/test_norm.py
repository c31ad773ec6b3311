"""Laws of the kernels of RMS norm and activation."""

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, NAN, dtypes, some
from vmmkv.units import round_up
from vmmkv_kernels import reference
from vmmkv_kernels.activation import silu_mul
from vmmkv_kernels.norm import rms_norm

EPS = 1e-5


def in_poison(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN, and within it rows of so many columns with at least 16 bytes before and behind each."""
    wide = torch.full((rows + 2, round_up(columns, 8) + 24), NAN, dtype=dtype, device=DEVICE)
    return wide, wide[1:-1, 8 : 8 + columns]


def make_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random rows in poison, each at a magnitude of its own, the last one of zeros."""
    _, x_NE = in_poison(rows, columns, dtype)
    magnitudes_N1 = 2.0 ** torch.arange(-8, rows - 8)[:, None].clamp(max=8)
    x_NE.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitudes_N1)
    if rows > 1:
        x_NE[-1] = 0.0
    return x_NE


def make_weight(columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(columns, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)


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
    columns: int, rows: int, has_residual: bool, dtype: torch.dtype
) -> None:
    x_NE, weight_E = make_rows(rows, columns, dtype), make_weight(columns, dtype)
    residual_NE = make_rows(rows, columns, dtype, seed=1) if has_residual else None
    given_NE = x_NE.clone()
    sum_NE = x_NE if residual_NE is None else residual_NE + x_NE
    wide, out_NE = in_poison(rows, columns, dtype)
    assert rms_norm(x_NE, weight_E, EPS, residual_NE=residual_NE, out=out_NE) is out_NE
    assert_rounded_alike(out_NE, reference.rms_norm(sum_NE, weight_E, EPS))
    assert torch.equal(x_NE, given_NE)
    assert residual_NE is None or torch.equal(residual_NE, sum_NE)
    if residual_NE is None:
        rms_norm(x_NE, weight_E, EPS, out=x_NE)
        assert torch.equal(x_NE, out_NE), "in place"
    out_NE.fill_(NAN)
    assert wide.isnan().all()


@dtypes
def test_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x_NE = make_rows(5, 320, dtype)
    module = llama.LlamaRMSNorm(320, eps=EPS).to(DEVICE, dtype)
    with torch.no_grad():
        module.weight.copy_(make_weight(320, dtype))
        assert_rounded_alike(rms_norm(x_NE, module.weight, EPS), module(x_NE))


@dtypes
def test_a_row_is_the_same_bit_for_bit_in_any_batch(dtype: torch.dtype) -> None:
    x_NE, weight_E = make_rows(9, 576, dtype), make_weight(576, dtype)
    together_NE = rms_norm(x_NE, weight_E, EPS)
    assert together_NE.is_contiguous()
    for n in range(9):
        assert torch.equal(rms_norm(x_NE[n : n + 1], weight_E, EPS)[0], together_NE[n])


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    x_NE = torch.full((1, 64), 1.0, dtype=FP16, device=DEVICE)
    residual_NE = torch.full((1, 64), 2048.0, dtype=FP16, device=DEVICE)
    residual_NE[0, 0] = 0.0
    out_NE = rms_norm(x_NE, torch.ones_like(x_NE[0]), EPS, residual_NE=residual_NE)
    assert (residual_NE[0, 1:] == 2048.0).all()  # 2049 is no float16, and 2048 is the even one beside it
    assert_rounded_alike(out_NE, reference.rms_norm(residual_NE, torch.ones_like(x_NE[0]), EPS))


def test_no_rows_launch_nothing() -> None:
    none_NE = torch.empty(0, 64, device=DEVICE)
    assert rms_norm(none_NE, torch.ones(64, device=DEVICE), EPS).shape == (0, 64)
    assert silu_mul(none_NE).shape == (0, 32)


def make_gate_up(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random gates and ups in poison, with gates so large that their exponentials are infinite."""
    _, gate_up_NG = in_poison(rows, 2 * width, dtype)
    gate_up_NG.copy_(torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)) * 3)
    extremes = torch.tensor([0.0, -0.0, -90.0, 90.0, -1e4, 1e4], device=DEVICE, dtype=dtype)[:width]
    gate_up_NG[0, : len(extremes)] = extremes
    return gate_up_NG


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of numpy, in the interpreter
@dtypes
@pytest.mark.parametrize(("rows", "width"), some([(1, 1), (5, 63), (1, 2056)], [(5, 64), (5, 1111), (5, 2048)]))
def test_gates_open_and_nothing_beside_the_output_is_touched(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up_NG = make_gate_up(rows, width, dtype)
    given_NG = gate_up_NG.clone()
    wide, out_NF = in_poison(rows, width, dtype)
    assert silu_mul(gate_up_NG, out_NF) is out_NF
    assert_rounded_alike(out_NF, reference.silu_mul(gate_up_NG))
    assert torch.equal(gate_up_NG, given_NG)
    assert torch.equal(silu_mul(gate_up_NG), out_NF)
    out_NF.fill_(NAN)
    assert wide.isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@dtypes
def test_activation_is_that_of_transformers(dtype: torch.dtype) -> None:
    activations = pytest.importorskip("transformers.activations")
    gate_up_NG = make_gate_up(3, 200, dtype)
    gate_NF, up_NF = gate_up_NG.split(200, dim=-1)
    assert_rounded_alike(silu_mul(gate_up_NG), activations.ACT2FN["silu"](gate_NF) * up_NF)
