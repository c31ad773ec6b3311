"""Laws of the prefill kernel, over slots and over blocks."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.baselines.backend import prefill_as_over_blocks
from tests.kernels.cases import DEVICE, NAN, SMALL, make_case
from vmmkv_kernels.attention.decode import decode, workspace_elements
from vmmkv_kernels.attention.prefill import hopper_kernels
from vmmkv_kernels.quantise import Kind

pytestmark = pytest.mark.usefixtures("cut_prefill")


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products are the interpreter's tl.dot, and round a row by its place in the tile. In float64 they do not."""
    matmul = np.matmul

    def rounded_once(a: Any, b: Any, dtype: Any = np.float32) -> Any:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", rounded_once)


def test_the_tiling_of_the_library_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = make_case([300, 1000], [300, 5], **SMALL | {"head_dim": 128})
    case.assert_right(case.attend())


def test_rows_at_and_past_the_limit_are_not_read() -> None:
    case = make_case([100, 17, 64], [40, 5, 33], **SMALL)
    expected, limit_S = case.attend(), case.limits(1000, 77, 0)
    for slot, limit in zip(case.slots_B.tolist(), (77, 0), strict=False):
        case.memory.k[slot, limit:] = case.memory.v[slot, limit:] = NAN
    out = case.attend(limit_S=limit_S)
    assert torch.equal(out[:17], expected[:17])
    assert out[17:40].isfinite().all()
    assert torch.equal(out[40:45], torch.zeros_like(out[40:45]))
    assert torch.equal(out[45:78], expected[45:78])


def test_nothing_outside_the_arena_is_read() -> None:
    case = make_case([50] * 5, [5, 33, 2, 3, 2], **SMALL)
    case.slots_B[0], case.slots_B[1] = -1, case.num_slots
    case.lengths_B[2] = -(2**31)
    case.lengths_B[4] = 2**31 - 1  # with a window past the last row
    out = case.attend(window=40)
    assert torch.equal(out[:38], torch.zeros_like(out[:38]))
    assert out[40:43].isfinite().all()
    assert torch.equal(out[43:], torch.zeros_like(out[43:]))


@pytest.mark.usefixtures("exact_dots")
@pytest.mark.parametrize("window", [None, 40])
def test_a_query_rounds_the_same_in_any_chunk_and_batch(window: int | None) -> None:
    case = make_case([20, 111, 90], [13, 100, 1], **SMALL)
    together = case.attend(window=window)
    for first, stop in ((0, 2), (2, 35), (35, 100)):
        alone = case.only(1, first, stop).attend(window=window)
        assert torch.equal(alone, together[13 + first : 13 + stop])


def test_prefill_over_slots_by_the_kernel_of_blocks_is_prefill() -> None:
    case = make_case([20, 33], [9, 5], **SMALL)
    for options in ({"limit_S": case.limits(40)}, {"window": 7, "scale": 0.3}):
        assert torch.equal(prefill_as_over_blocks(*case.arguments, **options)[:14], case.attend(**options))


@pytest.mark.parametrize(
    ("kind", "options"), [("fp8", {}), (None, {"window": 40, "softcap": 20.0, "scale": 0.2})], ids=["fp8", "window and cap"]
)
def test_a_single_query_has_the_bits_of_decode(kind: Kind | None, options: dict[str, Any]) -> None:
    case = make_case([9, 33, 150, 12, 1, 70], [1, 33, 1, 0, 1, 2], kind=kind, **SMALL)
    singles, rows = torch.tensor([0, 2, 4], device=DEVICE), torch.tensor([0, 34, 35], device=DEVICE)
    where = (case.lengths_B[singles], case.slots_B[singles])
    expected = decode(case.q_NHD[rows], case.memory.k, case.memory.v, *where, **case.memory.scales, **options)
    out = case.attend(limit_S=case.limits(1000), **options)
    assert torch.equal(out[rows], expected)
    case.assert_right(out, **options)
    assert torch.equal(case.attend_in_blocks(7, **options)[rows], expected)
    assert torch.equal(case.only(2).attend(**options), expected[1:2])


@pytest.mark.parametrize(
    ("kind", "options"), [("fp8", {}), (None, {"window": 40, "softcap": 20.0, "scale": 0.2})], ids=["fp8", "window and cap"]
)
def test_log_sum_exps_are_those_of_torch_and_change_no_bit(kind: Kind | None, options: dict[str, Any]) -> None:
    case = make_case([9, 33, 150, 12, 70], [1, 33, 100, 0, 2], kind=kind, **SMALL)
    lse_NH = torch.full(case.q_NHD.shape[:2], NAN, device=DEVICE)
    assert torch.equal(case.attend(lse_NH=lse_NH, **options), case.attend(**options))
    expected = case.log_sum_exps(**options)
    expected[0] = NAN  # a sequence of one query
    torch.testing.assert_close(lse_NH, expected, atol=2e-3, rtol=1e-3, equal_nan=True)
    case.attend(lse_NH=lse_NH, limit_S=case.limits(0))
    assert torch.equal(lse_NH[1 : case.num_queries], torch.full_like(lse_NH[1 : case.num_queries], float("-inf")))


def test_the_workspace_is_that_of_decode() -> None:
    case = make_case([9, 33, 50], [1, 33, 1], **SMALL)
    elements = workspace_elements(case.q_NHD[:3], case.memory.k)
    workspace = torch.full((elements,), NAN, device=DEVICE)
    assert torch.equal(case.attend(workspace=workspace), case.attend())
    with pytest.raises(ValueError, match=f"workspace is {elements - 1} elements"):
        case.attend(workspace=workspace[1:])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU it may be imported")
def test_the_interpreter_never_imports_gluon() -> None:
    assert hopper_kernels(DEVICE) is None
