"""Laws of the append kernel."""

import pytest
import torch

from tests.kernels.cases import NAN
from vmmkv.kernels import reference
from vmmkv.kernels.append import append

SLOTS, ROWS = 5, 40


def arena(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN for three layers, [S, T, layer, plane, K, D]."""
    return torch.full((SLOTS, ROWS, 3, 2, kv_heads, head_dim), NAN, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (3, 80), (1, 96), (40, 128), (1, 256)])
def test_tokens_are_written_where_their_limit_allows_and_nowhere_else(
    kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = 63
    cells = torch.randperm(SLOTS * ROWS, generator=generator)[:num_tokens].to(device)
    slots_N, positions_N = (cells // ROWS).int(), cells % ROWS
    # The last five tokens belong nowhere: before the slot, past it, past its limit by far, and in no slot at all.
    positions_N[-5:-2] = torch.tensor([-1, ROWS, 2**31 - 1], device=device)
    slots_N[-2:] = torch.tensor([-1, SLOTS], device=device)
    limit_S = torch.tensor([0, 1, 17, ROWS, ROWS + 9], dtype=torch.int32, device=device)
    qkv = torch.randn(num_tokens, 4 + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    k_NKD, v_NKD = qkv[:, 4 : 4 + kv_heads], qkv[:, 4 + kv_heads :]

    ours, expected = arena(kv_heads, head_dim, dtype, device), arena(kv_heads, head_dim, dtype, device)
    append(k_NKD, v_NKD, ours[:, :, 1, 0], ours[:, :, 1, 1], slots_N, positions_N, limit_S)
    reference.append(k_NKD, v_NKD, expected[:, :, 1, 0], expected[:, :, 1, 1], slots_N, positions_N, limit_S)
    assert 0 < expected.isfinite().sum() < num_tokens * 2 * kv_heads * head_dim
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_appending_nothing_launches_nothing(device: torch.device) -> None:
    memory = arena(2, 64, torch.float16, device)
    limit_S = torch.full((SLOTS,), ROWS, dtype=torch.int32, device=device)
    none_NKD = torch.empty(0, 2, 64, dtype=torch.float16, device=device)
    none_N = torch.empty(0, dtype=torch.int32, device=device)
    append(none_NKD, none_NKD, memory[:, :, 0, 0], memory[:, :, 0, 1], none_N, none_N, limit_S)
    assert memory.isnan().all()
