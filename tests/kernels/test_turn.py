"""Keys are turned in place, in all layers at once, as by torch."""

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16, FP32
from vmmkv_kernels import reference
from vmmkv_kernels.attention.turn import turn


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(2, 64, FP16), (3, 80, FP32), (8, 128, FP32)])
def test_they_are_turned_as_by_torch_and_nothing_else_is_touched(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rows_TLKD = torch.randn(9, 2, 2 * heads, head_dim, device=DEVICE).to(dtype)
    before, back_T = rows_TLKD.clone(), torch.tensor([0, 1, 1, 700, 9000, 9000, 120_000], device=DEVICE)
    inv_freq_R = 10_000.0 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2))
    turn(rows_TLKD[2:, :, :heads].transpose(0, 1), back_T, inv_freq_R)
    truth = before.clone()
    for layer in range(2):
        truth[2:, layer, :heads] = reference.turn(before[2:, layer, :heads], back_T, inv_freq_R)
    tolerance = 1e-5 if dtype is FP32 else 2e-3
    torch.testing.assert_close(rows_TLKD, truth, atol=tolerance, rtol=tolerance)
    assert torch.equal(rows_TLKD[:2], before[:2]) and torch.equal(rows_TLKD[:, :, heads:], before[:, :, heads:])


def test_what_would_be_turned_wrongly_is_refused() -> None:
    keys_LTKD, inv_freq_R = torch.zeros(2, 5, 2, 64, dtype=FP16, device=DEVICE), torch.ones(32, device=DEVICE)
    back_T = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    for wrong, named in [
        ((keys_LTKD, back_T[:4], inv_freq_R), "back_T"),
        ((keys_LTKD, back_T, inv_freq_R[:16]), "inv_freq_R"),
        ((keys_LTKD.transpose(2, 3), back_T, inv_freq_R), "inv_freq_R"),
        ((keys_LTKD.to(torch.int8), back_T, inv_freq_R), "keys_LTKD"),
    ]:
        with pytest.raises(ValueError, match=named):
            turn(*wrong)


def test_keys_are_turned_as_if_their_tokens_had_stood_elsewhere() -> None:
    inv_freq_R = 10_000.0 ** (-torch.arange(32) / 32)
    angles_TR = torch.arange(100)[:, None] * inv_freq_R
    keys_TKD, cos_TR, sin_TR = torch.randn(4, 2, 64), angles_TR.cos(), angles_TR.sin()
    at = torch.tensor([0, 7, 50, 99])
    rotated, wanted = (reference.rotate(keys_TKD, where, cos_TR, sin_TR) for where in (at, torch.arange(4)))
    torch.testing.assert_close(reference.turn(rotated, at - torch.arange(4), inv_freq_R), wanted, atol=1e-5, rtol=1e-5)
    assert reference.turn(rotated.half(), at, inv_freq_R).dtype is torch.float16
