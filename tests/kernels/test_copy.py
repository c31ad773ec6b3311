"""Laws of the copy kernel."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import some
from vmmkv.kernels import copy, reference
from vmmkv.kernels.copy import copy_extents, copy_rows


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 256 bytes, so that small copies go through what large ones do."""
    monkeypatch.setattr(copy, "_PIECE_BYTES", 256)


def patterned(*shape: int, device: torch.device) -> torch.Tensor:
    """Random bytes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("row_bytes", "programs"), some([(16, 7), (48, 1), (1040, 3)], [(48, 100), (256, 1), (256, 7), (1040, 100)])
)
def test_ranges_are_copied_and_nothing_else(
    row_bytes: int, programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
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
    indices = [torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*copies, strict=True)]
    # Slots lie further apart than their rows need, and what lies between is not touched.
    ours = patterned(21, 32, row_bytes, device=device)
    expected = ours.clone()
    copy_rows(ours[:20, :25], *indices)
    reference.copy_rows(expected[:20, :25], *indices)
    assert torch.equal(ours, expected)
    assert torch.equal(ours[15, :25], ours[4, :25])


@pytest.mark.usefixtures("small_pieces")
def test_many_random_ranges(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(400, generator=generator)
    starts, ends = torch.randint(0, 40, (2, 200), generator=generator)
    indices = [tensor.to(device) for tensor in (slots[:200], slots[200:], starts, ends)]
    ours = patterned(400, 40, 32, device=device)
    expected = ours.clone()
    copy_rows(ours, *indices)
    reference.copy_rows(expected, *indices)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("size_bytes", [16, 16384, 16400, 100_000 // 16 * 16])
@pytest.mark.parametrize("num_copies", [1, 5, 17])
def test_extents_are_copied_by_address(size_bytes: int, num_copies: int, device: torch.device) -> None:
    memory = patterned(2 * num_copies + 2, size_bytes + 32, device=device)
    expected = memory.clone()
    order = torch.randperm(2 * num_copies, generator=torch.Generator().manual_seed(5)).tolist()
    sources, targets = order[:num_copies], order[num_copies:]
    expected[targets, 16:-16] = expected[sources, 16:-16]

    def addresses(rows: list[int]) -> torch.Tensor:
        # The last copies have no source, then no target.
        known = [memory[row, 16:].data_ptr() for row in rows]
        return torch.tensor([*known, 0, memory[-1].data_ptr()] if rows is sources else [*known, memory[-2].data_ptr(), 0])

    copy_extents(addresses(sources).to(device), addresses(targets).to(device), size_bytes)
    assert torch.equal(memory, expected)


def test_copying_nothing_launches_nothing(device: torch.device) -> None:
    none_M = torch.empty(0, dtype=torch.int64, device=device)
    rows_STE = patterned(2, 3, 16, device=device)
    copy_rows(rows_STE, none_M, none_M, none_M, none_M)
    copy_extents(none_M, none_M, 4096)
    copy_extents(torch.ones_like(none_M), none_M, 0)
    assert torch.equal(rows_STE, patterned(2, 3, 16, device=device))


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("rows_STE", torch.zeros(4, 8, 32, dtype=torch.int8), "uint8"),
        ("rows_STE", torch.zeros(8, 32, dtype=torch.uint8), "3 dimensions"),
        ("rows_STE", torch.zeros(4, 8, 24, dtype=torch.uint8), "multiple of 16"),
        ("rows_STE", torch.zeros(4, 8, 64, dtype=torch.uint8)[..., :32], "one after the other"),
        ("rows_STE", torch.zeros(4, 8, 33, dtype=torch.uint8)[..., :32], "16 bytes"),
        ("source_slots_M", torch.zeros(4097, dtype=torch.int32), "at most 4096"),
        ("target_slots_M", torch.zeros(1, dtype=torch.int32), "(2,)"),
        ("starts_M", torch.zeros(2), "int32 or int64"),
        ("ends_M", torch.zeros(4, dtype=torch.int32)[::2], "contiguous"),
    ],
)
def test_copy_rows_names_the_argument_it_refuses(name: str, given: torch.Tensor, wanted: str, device: torch.device) -> None:
    index_M = torch.zeros(2, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"rows_STE": torch.zeros(4, 8, 32, dtype=torch.uint8, device=device)}
    arguments |= dict.fromkeys(("source_slots_M", "target_slots_M", "starts_M", "ends_M"), index_M)
    copy_rows(**arguments)
    # Not `given.to(device)`, which would make it contiguous.
    moved = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=device)
    with pytest.raises(ValueError) as refusal:
        copy_rows(**(arguments | {name: moved}))
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)


def test_copy_extents_names_the_argument_it_refuses(device: torch.device) -> None:
    zeros_M = torch.zeros(2, dtype=torch.int64, device=device)
    for name, arguments in {
        "sources_M": (zeros_M.int(), zeros_M, 16),
        "targets_M": (zeros_M, zeros_M[:1], 16),
        "size_bytes": (zeros_M, zeros_M, 24),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is "):
            copy_extents(*arguments)
