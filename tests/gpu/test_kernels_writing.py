"""Laws of append on a real GPU."""

import pytest
import torch

from tests.kernels import test_append
from tests.kernels.cases import BF16, FORMATS, FP16, FP32
from vmmkv_kernels.quantise import Kind

CASES: list[tuple[int, int, torch.dtype, Kind | None, str]] = [
    *((8, 128, BF16, kind, scale) for kind, scale in FORMATS),
    (3, 80, BF16, "int4", "token"),
    (3, 80, BF16, None, ""),
    (3, 64, FP16, "fp8", "token"),
    (2, 256, BF16, "int8", "token"),
    (5, 96, FP32, None, ""),
    (5, 96, FP32, "fp8", "token"),
]


@pytest.mark.parametrize(("kv_heads", "head_dim", "dtype", "kind", "scale"), CASES)
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_tokens_are_written_where_their_limit_allows_and_nowhere_else(
    kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str, rope: bool
) -> None:
    law = test_append.test_tokens_are_written_where_their_limit_allows_and_nowhere_else
    law(kv_heads, head_dim, dtype, kind, scale, rope)


@pytest.mark.parametrize("block", [5, 16])
@pytest.mark.parametrize(("kind", "scale"), [FORMATS[0], FORMATS[4]])
def test_blocks_hold_bit_for_bit_what_slots_do(block: int, kind: Kind | None, scale: str) -> None:
    test_append.test_blocks_hold_bit_for_bit_what_slots_do(block, kind, scale, True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_float_of_16_bits_rounds_to_fp8_as_torch_rounds_it(dtype: torch.dtype) -> None:
    test_append.test_every_float_of_16_bits_rounds_to_fp8_as_torch_rounds_it(dtype)
