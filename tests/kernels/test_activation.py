"""Laws of the activation kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN
from tests.kernels.compiling import assert_compiles
from tests.kernels.test_checks import Refusal, assert_refused, meta, misaligned, odd_strides, spread
from tests.kernels.test_norm import assert_rounded_alike, dtypes, in_poison
from vmmkv.kernels import reference
from vmmkv.kernels.activation import silu_mul


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
@pytest.mark.parametrize("width", [1, 63, 64, 1111, 2048, 2056])
@pytest.mark.parametrize("rows", [1, 5])
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


REFUSALS: list[Refusal] = [
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


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[0])
def test_silu_mul_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        "gate_up_NG": torch.zeros(3, 64, dtype=torch.float16, device=device),
        "out": torch.zeros(3, 32, dtype=torch.float16, device=device),
    }
    if refusal[2].startswith("fewer than"):
        arguments["out"] = None  # of so many rows there is none
    assert_refused(silu_mul, arguments, refusal)


def test_the_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    statements = """
for dtype, width, pitch in (
    (torch.bfloat16, 3072, 6144), (torch.bfloat16, 28_672, 57_600), (torch.float16, 1111, 2224), (torch.float32, 111, 224)
):
    activation.silu_mul(empty(16, pitch, dtype=dtype)[:, : 2 * width])
"""
    assert_compiles(statements, tmp_path)
