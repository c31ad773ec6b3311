"""Laws of the copy kernel."""

import pytest
import torch

from tests.kernels.cases import DEVICE, index, some
from vmmkv.kernels import copy, reference
from vmmkv.kernels.copy import copy_extents, copy_rows


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 256 bytes, so that small copies go through what large ones do."""
    monkeypatch.setattr(copy, "_PIECE_BYTES", 256)


def patterned(*shape: int) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("row_bytes", "programs"), some([(16, 7), (48, 1), (1040, 3)], [(48, 100), (256, 1), (256, 7), (1040, 100)])
)
def test_ranges_are_copied_and_nothing_else(row_bytes: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_num_programs", lambda _: programs)
    copies = [
        (0, 10, 0, 25),
        (1, 11, 0, 1),
        (2, 12, 24, 25),
        (3, 13, 7, 7),  # empty
        (3, 14, 9, 3),  # reversed
        (4, 15, -5, 2**31 - 1),  # past both ends of the slot
        (-1, 16, 0, 25),
        (20, 17, 0, 25),
        (2**31 - 1, 18, 0, 25),
        (6, -1, 0, 25),
        (6, 20, 0, 25),
        (5, 5, 3, 9),  # onto itself
    ]
    indices = [index(*column) for column in zip(*copies, strict=True)]
    # Slots lie further apart than their rows need, and what lies between is not touched.
    ours = patterned(21, 32, row_bytes)
    expected = ours.clone()
    copy_rows(ours[:20, :25], *indices)
    reference.copy_rows(expected[:20, :25], *indices)
    assert torch.equal(ours, expected)
    assert torch.equal(ours[15, :25], ours[4, :25])


@pytest.mark.usefixtures("small_pieces")
def test_many_random_ranges() -> None:
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(400, generator=generator)
    starts, ends = torch.randint(0, 40, (2, 200), generator=generator)
    indices = [tensor.to(DEVICE) for tensor in (slots[:200], slots[200:], starts, ends)]
    ours = patterned(400, 40, 32)
    expected = ours.clone()
    copy_rows(ours, *indices)
    reference.copy_rows(expected, *indices)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(("size_bytes", "num_copies"), [(16, 17), (16384, 5), (16400, 1), (100_000 // 16 * 16, 5)])
def test_extents_are_copied_by_address(size_bytes: int, num_copies: int) -> None:
    memory = patterned(2 * num_copies + 2, size_bytes + 32)
    expected = memory.clone()
    order = torch.randperm(2 * num_copies, generator=torch.Generator().manual_seed(5)).tolist()
    sources, targets = order[:num_copies], order[num_copies:]
    expected[targets, 16:-16] = expected[sources, 16:-16]
    addresses = [row[16:].data_ptr() for row in memory]
    # The last copies have no source, then no target.
    from_M = index(*(addresses[row] for row in sources), 0, addresses[-1], dtype=torch.int64)
    to_M = index(*(addresses[row] for row in targets), addresses[-2], 0, dtype=torch.int64)
    copy_extents(from_M, to_M, size_bytes)
    assert torch.equal(memory, expected)


def test_copying_nothing_launches_nothing() -> None:
    none_M, rows_STE = index(dtype=torch.int64), patterned(2, 3, 16)
    copy_rows(rows_STE, none_M, none_M, none_M, none_M)
    copy_extents(none_M, none_M, 4096)
    copy_extents(none_M + 1, none_M, 0)
    assert torch.equal(rows_STE, patterned(2, 3, 16))
