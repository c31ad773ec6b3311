"""Laws of the column sums of attention's weights."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, FP32, NAN, SMALL, Case, make_case, some
from vmmkv_kernels import reference
from vmmkv_kernels.attention import column_sums as kernels
from vmmkv_kernels.attention.column_sums import column_sums


def expected(case: Case, **options: Any) -> torch.Tensor:
    return reference.column_sums(case.q_NHD[None], case.memory.k[None], *where(case), **options)[0]


def summed(case: Case, **options: Any) -> torch.Tensor:
    return column_sums(case.q_NHD[None], case.memory.k[None], *where(case), **options)[0]


def where(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert case.starts is not None
    return case.starts, case.lengths_B, case.slots_B


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    some([(6, 2, 64, FP16), (3, 1, 80, FP32)], [(8, 8, 128, FP16), (4, 1, 256, FP16), (14, 2, 64, FP32)]),
)
@pytest.mark.parametrize(("options", "part_rows"), [({}, 2048), ({"scale": 0.3, "softcap": 2.0}, 32)])
def test_they_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: Any, part_rows: int
) -> None:
    """Each query's log-sum-exp in one part as in three."""
    monkeypatch.setattr(kernels, "PART_ROWS", part_rows)
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([1, 70, 40, 33], [1, 32, 40, 5], **shape)
    sums_BT = summed(case, **options)
    torch.testing.assert_close(sums_BT, expected(case, **options), atol=1e-4, rtol=1e-3)
    counts = torch.tensor([1, 32, 40, 5], device=DEVICE)
    torch.testing.assert_close(sums_BT.sum(1), heads * counts.float(), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 2.0}])
def test_by_the_log_sum_exps_of_prefill_they_are_the_same(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """And nothing is computed anew."""
    case = make_case([70, 40, 33], [32, 40, 2], **SMALL)
    expected_BT = summed(case, **options)
    lse_NH = torch.full(case.q_NHD.shape[:2], NAN, device=DEVICE)
    case.attend(lse_NH=lse_NH, **options)
    monkeypatch.setattr(kernels, "log_sum_exp", None)
    torch.testing.assert_close(summed(case, lse_LNH=lse_NH[None], **options), expected_BT, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (5, 0.5), (40, None)])
def test_the_reference_adds_up_what_attention_gives_each_row(
    monkeypatch: pytest.MonkeyPatch, queries: int, softcap: float | None
) -> None:
    """In parts of 7 queries, where each row has a value of its own."""
    monkeypatch.setattr(reference, "MOST_WEIGHTS", 7 * 6 * 40)
    q_NHD, k_TKD, eye_TKD = torch.randn(queries, 6, 16), torch.randn(40, 3, 16), torch.eye(40)[:, None].expand(-1, 3, -1)
    place = (torch.tensor(each) for each in ([0, queries], [40], [0]))
    sums_LBT = reference.column_sums(q_NHD[None], k_TKD[None, None], *place, scale=0.4, softcap=softcap)
    given_NHT = reference.attend(q_NHD, k_TKD, eye_TKD, torch.arange(40 - queries, 40), scale=0.4, softcap=softcap)
    torch.testing.assert_close(sums_LBT[0, 0], given_NHT.sum((0, 1)), atol=1e-5, rtol=1e-5)


def test_the_rows_that_are_kept_are_those_of_the_reference() -> None:
    case = make_case([150], [32], **SMALL | {"dtype": FP32})
    ours, theirs = (sums_BT[0].topk(40).indices.sort().values for sums_BT in (summed(case), expected(case)))
    assert torch.equal(ours, theirs)


def test_they_are_added_and_nothing_else_is_touched() -> None:
    case = make_case([70, 40, 20], [5, 7, 3], **SMALL)
    truth = expected(case)
    case.slots_B[2] = case.num_slots
    out = torch.ones(1, 3, 60, device=DEVICE)
    assert summed(case, out=out).data_ptr() == out.data_ptr()
    wanted = torch.ones(3, 60, device=DEVICE)
    wanted[:2] += truth[:2, :60]
    torch.testing.assert_close(out[0], wanted, atol=1e-4, rtol=1e-3)
    assert torch.equal(summed(case), summed(case))


def test_layers_in_one_launch_are_layers_one_by_one() -> None:
    """Over rows of three layers side by side, as a cache has them."""
    case = make_case([70, 40], [5, 1], **SMALL | {"dtype": FP32})
    shape, generator = case.memory.k.shape, torch.Generator().manual_seed(1)
    rows_STLKD = torch.randn(*shape[:2], 3, *shape[2:], generator=generator).to(DEVICE)
    k_LSTKD = rows_STLKD.permute(2, 0, 1, 3, 4)
    q_LNHD = torch.randn(3, *case.q_NHD.shape, generator=generator).to(DEVICE)
    sums_LBT = column_sums(q_LNHD, k_LSTKD, *where(case))
    for layer in range(3):
        own = slice(layer, layer + 1)
        assert torch.equal(sums_LBT[own], column_sums(q_LNHD[own], k_LSTKD[own], *where(case)))
    assert not torch.equal(sums_LBT[0], sums_LBT[1])
