"""Laws of append and copy on a real GPU."""

import pytest
import torch

from tests.kernels import test_append
from tests.kernels.cases import BF16, DEVICE, FORMATS, FP16, FP32, index
from vmmkv.kernels import reference
from vmmkv.kernels.copy import copy_extents, copy_rows
from vmmkv.kernels.quantise import Kind

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


def test_rows_are_copied_between_many_slots_at_once() -> None:
    num_slots, num_rows, row_bytes, num_copies = 300, 100, 8192, 128
    generator = torch.Generator().manual_seed(0)
    ours = torch.randint(256, (num_slots, num_rows, row_bytes), generator=torch.Generator(DEVICE), device=DEVICE).byte()
    slots = torch.randperm(num_slots, generator=generator)
    starts_M, ends_M = torch.randint(-3, num_rows + 3, (2, num_copies), generator=generator)
    indices = [x.to(DEVICE) for x in (slots[:num_copies], slots[num_copies : 2 * num_copies], starts_M, ends_M)]
    expected = ours.clone()
    copy_rows(ours, *indices)
    reference.copy_rows(expected, *indices)
    assert torch.equal(ours, expected)


def test_rows_past_2_to_the_32_bytes_are_copied() -> None:
    rows_STE = torch.empty(2, 40_000, 131_072, dtype=torch.uint8, device=DEVICE)
    rows_STE[0, 39_990:] = torch.arange(10, dtype=torch.uint8, device=DEVICE)[:, None] + 1
    rows_STE[1, 39_980:] = 0
    index_M = [index(value) for value in (0, 1, 39_990, 39_999)]
    copy_rows(rows_STE, *index_M)
    assert torch.equal(rows_STE[1, 39_990:39_999], rows_STE[0, 39_990:39_999])
    assert rows_STE[1, 39_980:39_990].eq(0).all() and rows_STE[1, 39_999].eq(0).all()


def test_extents_are_copied_by_address() -> None:
    pages = torch.randint(256, (64, 2**21), generator=torch.Generator(DEVICE), device=DEVICE).byte()
    expected = pages.clone()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    expected[order[32:]] = expected[order[:32]]
    addresses = pages.data_ptr() + order * 2**21
    copy_extents(addresses[:32].to(DEVICE), addresses[32:].to(DEVICE), 2**21)
    assert torch.equal(pages, expected)
