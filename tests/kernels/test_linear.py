"""Laws of the linear layer of few rows."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, FP32, NAN, assert_close, some
from vmmkv_kernels import linear as module
from vmmkv_kernels.linear import MAX_ROWS, LinearTiling, linear, linear_tiling

EPS = 1e-5
Cut = Callable[[LinearTiling], None]

# [outputs, inputs]: of SmolLM2, of Qwen3 cut down, and sizes that no tile divides.
SHAPES = [(24, 576), (16, 1024), (40, 8), (24, 1544)]
REGISTERS = LinearTiling(dots=False, tile_n=4, tile_k=256, depth=2)
DOTS = LinearTiling(dots=True, tile_n=16, tile_k=128, depth=2)
ONE_ROW = LinearTiling(dots=False, tile_n=1, tile_k=2048, depth=9)
SPLITS = LinearTiling(dots=True, tile_n=32, tile_k=256, splits=4)


@pytest.fixture
def cut_as(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Every launch is cut so."""
    return lambda cut: monkeypatch.setattr(module, "linear_tiling", lambda *shape: cut)


def normed(x_MK: torch.Tensor, weight_K: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As transformers does it, rounded to `dtype` on the way."""
    x_32 = x_MK.float()
    return weight_K.to(dtype) * (x_32 * torch.rsqrt(x_32.square().mean(-1, keepdim=True) + EPS)).to(dtype)


def expected(problem: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """In plain torch, in that type."""
    x_MK = problem["x_MK"]
    norm_K, bias_N, residual_MN = (problem.get(name) for name in ("norm_weight_K", "bias_N", "residual_MN"))
    x_MK = x_MK.to(dtype) if norm_K is None else normed(x_MK, norm_K, dtype)
    bias = None if bias_N is None else bias_N.to(dtype)
    y_MN = torch.nn.functional.linear(x_MK, problem["weight_NK"].to(dtype), bias)
    if problem.get("gated"):
        gate_MN, up_MN = y_MN.chunk(2, dim=-1)
        y_MN = torch.nn.functional.silu(gate_MN) * up_MN
    return y_MN if residual_MN is None else residual_MN.to(dtype) + y_MN


def make(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, form: str) -> dict[str, Any]:
    """The arguments of a call. x, and what is written, are columns of wider tensors of NaN."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 16), NAN, dtype=dtype, device=DEVICE)
        wide[:, 8:-8] = tensor
        return wide[:, 8:-8]

    num_weight_rows = 2 * num_outputs if "gated" in form else num_outputs
    problem: dict[str, Any] = {
        "x_MK": inside(normal(num_rows, num_inputs)),
        "weight_NK": inside(normal(num_weight_rows, num_inputs) * num_inputs**-0.5),
    }
    if "norm" in form:
        problem |= {"norm_weight_K": 1.0 + 0.5 * normal(num_inputs), "norm_eps": EPS}
    if "bias" in form:
        problem["bias_N"] = normal(num_weight_rows)
    if "gated" in form:
        problem["gated"] = True
    if "residual" in form:
        problem["residual_MN"] = inside(normal(num_rows, num_outputs))
    else:
        problem["out"] = inside(torch.full((num_rows, num_outputs), NAN, dtype=dtype, device=DEVICE))
    return problem


def check(problem: dict[str, Any]) -> torch.Tensor:
    """Call, and hold the result to the rule: at most twice the error of torch in the same dtype, plus 1e-5."""
    dtype = problem["x_MK"].dtype
    truth_MN, torchs_MN = expected(problem, torch.float32), expected(problem, dtype)
    target_MN = problem.get("residual_MN", problem.get("out"))
    given_MN = linear(**problem)
    assert given_MN is target_MN
    wide_MN = target_MN._base
    assert wide_MN[:, :8].isnan().all() and wide_MN[:, -8:].isnan().all()
    assert_close(given_MN, truth_MN, torchs_MN)
    return given_MN


FORMS = ("plain", "norm bias residual", "gated norm bias")


@pytest.mark.parametrize(
    ("form", "num_rows", "num_outputs", "num_inputs", "dtype", "cut"),
    some(
        [("plain", 1, 24, 576, FP16, None), ("norm bias residual", 3, 40, 8, FP16, None),
         ("gated norm bias", MAX_ROWS, 16, 1024, FP16, None), ("gated norm bias", 1, 24, 1544, FP32, None),
         ("norm bias residual", 2, 40, 712, FP16, REGISTERS), ("gated norm", 1, 40, 712, FP16, ONE_ROW),
         ("gated norm", 2, 40, 712, FP32, DOTS), ("norm bias residual", 8, 40, 712, FP16, SPLITS)],
        [*((form, rows, *shape, dtype, None)
           for form in FORMS for rows in (1, 3, MAX_ROWS) for shape in SHAPES for dtype in (FP16, FP32)),
         *((form, rows, 40, 712, dtype, cut) for form in ("norm bias residual", "gated norm") for rows in (1, 2, 8)
           for cut in (REGISTERS, ONE_ROW, DOTS, SPLITS) for dtype in (FP16, FP32))],
    ),
)  # fmt: skip
def test_every_form_is_as_exact_as_torch_however_it_is_cut(
    form: str, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, cut: LinearTiling | None, cut_as: Cut
) -> None:
    if cut is not None:
        cut_as(cut)
    check(make(num_rows, num_outputs, num_inputs, dtype, form))


@pytest.mark.parametrize(
    ("form", "cut", "dtype"),
    some(
        [("norm bias residual", REGISTERS, FP32), ("gated norm", DOTS, FP16)],
        [("gated norm", REGISTERS, FP16), ("norm bias residual", DOTS, FP16), ("gated norm", DOTS, FP32)],
    ),
)
def test_a_row_depends_on_no_other(form: str, cut: LinearTiling, dtype: torch.dtype, cut_as: Cut) -> None:
    problem = make(5, 24, 712, dtype, form)
    other = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in problem.items()}
    # Neither on what the others are, nor on their number, nor on its place.
    other["x_MK"] = torch.cat([problem["x_MK"][[3]], torch.full_like(problem["x_MK"][:6], 7.0)])
    name = "residual_MN" if "residual" in form else "out"
    other[name] = torch.cat([other[name][[3]], other[name], other[name]])[: len(other["x_MK"])].contiguous()
    cut_as(cut)
    assert torch.equal(linear(**problem)[3], linear(**other)[0])


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_a_large_row_is_normed_without_overflow(num_rows: int) -> None:
    problem = make(num_rows, 16, 512, FP16, "norm")
    problem["x_MK"][:, 7] = 60_000.0
    problem["norm_weight_K"][7] = 30.0
    assert check(problem).isfinite().all()


def test_rows_of_zeros_are_normed_to_zeros() -> None:
    problem = make(2, 16, 512, FP16, "norm")
    problem["x_MK"].zero_()
    assert (check(problem) == 0.0).all()


def test_no_rows_and_no_outputs_launch_nothing() -> None:
    x_MK, weight_NK = torch.zeros(0, 64, device=DEVICE), torch.zeros(8, 64, device=DEVICE)
    assert linear(x_MK, weight_NK).shape == (0, 8)
    assert linear(torch.zeros(3, 64, device=DEVICE), weight_NK[:0]).shape == (3, 0)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(6144, 4096), (4096, 14336), (128_256, 4096), (1024, 2048), (151_936, 1024), (960, 576), (576, 1536), (8, 8)],
)
def test_every_shape_has_a_tiling_that_fits(num_outputs: int, num_inputs: int) -> None:
    for gated, itemsize, num_rows in itertools.product((False, True), (2, 4), (1, 2, 4, MAX_ROWS)):
        cut = linear_tiling(num_rows, num_outputs, num_inputs, itemsize, gated)
        assert cut.dots == (num_rows > 1 and itemsize == 2)
        tile_bytes = cut.tile_n * cut.tile_k * itemsize * (2 if gated else 1)
        x_bytes = max(8, num_rows) * cut.tile_k * itemsize
        if cut.dots:
            assert (cut.depth + 1) * (tile_bytes + x_bytes) <= 227 * 1024
        else:
            assert cut.depth * tile_bytes <= 128 * 4 * 128, "half of the registers of 128 threads"
