"""Laws of the column sums of attention's weights."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, FP32, SMALL, Case, make_case, some
from vmmkv.kernels import reference
from vmmkv.kernels.attention import column_sums as kernels
from vmmkv.kernels.attention.column_sums import column_sums
from vmmkv.kernels.attention.decode import decode


def log_sum_exp(case: Case, scale: float | None = None) -> torch.Tensor:
    """Of all queries, by the reference; NaN for those of no sequence."""
    lse_NH = torch.full(case.q_NHD.shape[:2], torch.nan, device=DEVICE)
    assert case.starts is not None
    places = zip(case.starts.tolist(), case.starts[1:].tolist(), case.lengths_B.tolist(), case.slots_B.tolist(), strict=False)
    for start, end, length, slot in places:
        positions_N = torch.arange(length - end + start, length, device=DEVICE)
        lse_NH[start:end] = reference.log_sum_exp(case.q_NHD[start:end], case.memory.k[slot, :length], positions_N, scale=scale)
    return lse_NH


def expected(case: Case, lse_NH: torch.Tensor, **options: Any) -> torch.Tensor:
    assert case.starts is not None
    rows = case.memory.values()[0], lse_NH, case.starts.diff(), case.lengths_B, case.slots_B
    return reference.column_sums(case.q_NHD, *rows, **options)


def summed(case: Case, lse_NH: torch.Tensor, **options: Any) -> torch.Tensor:
    assert case.starts is not None
    return column_sums(case.q_NHD, case.memory.k, lse_NH, case.starts, case.lengths_B, case.slots_B, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    some([(6, 2, 64, FP16), (3, 1, 80, FP32)], [(8, 8, 128, FP16), (4, 1, 256, FP16), (14, 2, 64, FP32)]),
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_they_are_those_of_the_reference(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([1, 70, 40, 33], [1, 32, 40, 5], **shape)
    lse_NH = log_sum_exp(case, scale)
    sums_BT = summed(case, lse_NH, scale=scale)
    torch.testing.assert_close(sums_BT, expected(case, lse_NH, scale=scale), atol=1e-4, rtol=1e-3)
    counts = torch.tensor([1, 32, 40, 5], device=DEVICE)
    torch.testing.assert_close(sums_BT.sum(1), heads * counts.float(), atol=1e-2, rtol=1e-4)


def test_the_rows_that_are_kept_are_those_of_the_reference() -> None:
    case = make_case([150], [32], **SMALL | {"dtype": FP32})
    lse_NH = log_sum_exp(case)
    ours, theirs = (sums.topk(40).indices.sort().values for sums in (summed(case, lse_NH)[0], expected(case, lse_NH)[0]))
    assert torch.equal(ours, theirs)


def test_they_are_added_and_nothing_else_is_touched() -> None:
    case = make_case([70, 40, 20], [5, 7, 3], **SMALL)
    lse_NH, truth = log_sum_exp(case), expected(case, log_sum_exp(case))
    case.slots_B[2] = case.num_slots
    out = torch.ones(3, 60, device=DEVICE)
    assert summed(case, lse_NH, out=out, limit_S=case.limits(100, 100, 33)) is out
    wanted = torch.ones(3, 60, device=DEVICE)
    wanted[0] += truth[0, :60]
    wanted[1, :33] += truth[1, :33]
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-3)
    again = summed(case, lse_NH, limit_S=case.limits(100, 100, 33))
    assert torch.equal(again, summed(case, lse_NH, limit_S=case.limits(100, 100, 33)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    some([(6, 2, 64, FP16), (3, 1, 80, FP32)], [(8, 8, 128, FP16), (4, 1, 256, FP16), (14, 2, 64, FP32)]),
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_log_sum_exp_is_that_of_the_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float
) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([1, 70, 40, 33], [1, 32, 40, 5], **shape)
    where = case.starts, case.lengths_B, case.slots_B
    lse_NH = kernels.log_sum_exp(case.q_NHD, case.memory.k, *where, scale=scale)
    torch.testing.assert_close(lse_NH, log_sum_exp(case, scale), atol=1e-4, rtol=1e-3, equal_nan=True)


def test_decode_gives_the_log_sum_exp_that_they_take() -> None:
    case = make_case([50, 17], [1, 1], **SMALL)
    lse_BH = torch.empty(2, SMALL["heads"], device=DEVICE)
    q_BHD = case.q_NHD[:2]
    decode(q_BHD, case.memory.k, case.memory.v, case.lengths_B, case.slots_B, lse_BH=lse_BH)
    sums_BT = column_sums(q_BHD, case.memory.k, lse_BH, case.starts, case.lengths_B, case.slots_B)
    torch.testing.assert_close(sums_BT, expected(case, log_sum_exp(case)), atol=1e-4, rtol=1e-3)
