"""Laws of the column sums of attention's weights."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, FP32, SMALL, Case, make_case, some
from vmmkv.kernels import reference
from vmmkv.kernels.attention import column_sums as kernels
from vmmkv.kernels.attention.column_sums import column_sums


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
    if (out := options.pop("out", None)) is not None:
        options["out"] = out[None]
    where = case.starts, case.lengths_B, case.slots_B
    return column_sums(case.q_NHD[None], case.memory.k[None], lse_NH[None], *where, **options)[0]


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
    assert summed(case, lse_NH, out=out, limit_S=case.limits(100, 100, 33)).data_ptr() == out.data_ptr()
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
@pytest.mark.parametrize(("scale", "part_rows"), [(None, 2048), (0.3, 32)])
def test_the_log_sum_exp_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float, part_rows: int
) -> None:
    """In one part as in three."""
    monkeypatch.setattr(kernels, "_PART_ROWS", part_rows)
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([1, 70, 40, 33], [1, 32, 40, 5], **shape)
    where = case.starts, case.lengths_B, case.slots_B
    (lse_NH,) = kernels.log_sum_exp(case.q_NHD[None], case.memory.k[None], *where, scale=scale)
    torch.testing.assert_close(lse_NH, log_sum_exp(case, scale), atol=1e-4, rtol=1e-3, equal_nan=True)


def test_layers_in_one_launch_are_layers_one_by_one() -> None:
    """Over rows of three layers side by side, as a cache has them."""
    case = make_case([70, 40], [5, 1], **SMALL | {"dtype": FP32})
    shape, generator = case.memory.k.shape, torch.Generator().manual_seed(1)
    rows_STLKD = torch.randn(*shape[:2], 3, *shape[2:], generator=generator).to(DEVICE)
    k_LSTKD = rows_STLKD.permute(2, 0, 1, 3, 4)
    q_LNHD = torch.randn(3, *case.q_NHD.shape, generator=generator).to(DEVICE)
    where = case.starts, case.lengths_B, case.slots_B
    lse_LNH = kernels.log_sum_exp(q_LNHD, k_LSTKD, *where)
    sums_LBT = column_sums(q_LNHD, k_LSTKD, lse_LNH, *where)
    for layer in range(3):
        own = slice(layer, layer + 1)
        alone_LNH = kernels.log_sum_exp(q_LNHD[own], k_LSTKD[own], *where)
        assert torch.equal(lse_LNH[own].nan_to_num(), alone_LNH.nan_to_num())
        assert torch.equal(sums_LBT[own], column_sums(q_LNHD[own], k_LSTKD[own], lse_LNH[own], *where))
    assert not torch.equal(sums_LBT[0], sums_LBT[1])
