"""Laws of sums over ranks. The ranks take turns here: what the others will write is written for them before."""

import itertools
import threading
from contextlib import nullcontext

import pytest
import torch

from tests.kernels.cases import DEVICE, dtypes
from vmmkv_kernels import reference
from vmmkv_kernels.sums import MAX_ROWS, Region, sum_ranks

EPS = 1e-5
SIZE_BYTES = 1 << 14


def regions(num_ranks: int) -> tuple[list[Region], list[torch.Tensor]]:
    """Of all ranks, and their memory [2, R, words]."""
    memory: list[torch.Tensor] = []

    def map_all(num_words: int) -> list[int]:
        while len(memory) < num_ranks:
            memory.append(torch.zeros(num_words, dtype=torch.int64, device=DEVICE))
        return [each.data_ptr() for each in memory]

    opened = [Region.open(rank, num_ranks, SIZE_BYTES, map_all, DEVICE) for rank in range(num_ranks)]
    return opened, [each.view(2, num_ranks, -1) for each in memory]


def words(x_NE: torch.Tensor, number: int) -> torch.Tensor:
    """What a rank writes for the others in the sum of this number."""
    return x_NE.view(torch.int32).flatten().long() & 0xFFFFFFFF | number << 32


def summed(
    parts: list[torch.Tensor], opened: list[Region], memory: list[torch.Tensor], number: int, **norm
) -> list[torch.Tensor]:
    """The sum as each rank has it; each finds what the others write, and writes what it should."""
    results = []
    for rank, region in enumerate(opened):
        for peer, x_NE in enumerate(parts):
            if peer != rank:
                memory[rank][number % 2, peer, : len(words(x_NE, number))] = words(x_NE, number)
        own = {name: given[rank].clone() if name == "residual_NE" else given for name, given in norm.items()}
        result = sum_ranks(parts[rank].clone(), region, **own)
        results.append((result, own["residual_NE"]) if own else result)
        for peer, of_peer in enumerate(memory):
            if peer != rank:
                wanted = words(parts[rank], number)
                assert torch.equal(of_peer[number % 2, rank, : len(wanted)], wanted)
    return results


@dtypes
@pytest.mark.parametrize(("num_ranks", "rows", "columns"), [(2, 1, 64), (2, 5, 576), (3, 2, 104)])
def test_all_ranks_have_the_same_sum_again_and_again(num_ranks, rows, columns, dtype):
    opened, memory = regions(num_ranks)
    for number in range(1, 4):
        parts = [torch.randn(rows, columns, generator=torch.Generator().manual_seed(9 * number + rank)).to(DEVICE, dtype)
                 for rank in range(num_ranks)]  # fmt: skip
        results = summed(parts, opened, memory, number)
        total = torch.stack(parts).float().cumsum(0)[-1]
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0], total.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@dtypes
@pytest.mark.parametrize(("num_ranks", "rows", "columns"), [(2, 3, 576), (3, 1, 104)])
def test_a_sum_is_added_to_the_residual_and_normed(num_ranks, rows, columns, dtype):
    opened, memory = regions(num_ranks)
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(rows, columns, generator=draw).to(DEVICE, dtype) for _ in range(num_ranks)]
    residual_NE, weight_E = (
        torch.randn(rows, columns, generator=draw).to(DEVICE, dtype),
        torch.randn(columns, generator=draw).to(DEVICE, dtype),
    )
    results = summed(parts, opened, memory, 1, residual_NE=[residual_NE] * num_ranks, weight_E=weight_E, eps=EPS)
    stream_NE = (residual_NE.float() + torch.stack(parts).float().cumsum(0)[-1]).to(dtype)
    for normed_NE, residual_NE in results:
        assert torch.equal(normed_NE, results[0][0]) and torch.equal(residual_NE, results[0][1])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0][1], stream_NE, rtol=eps, atol=1e-6)
    torch.testing.assert_close(results[0][0], reference.rms_norm(results[0][1], weight_E, EPS), rtol=4 * eps, atol=1e-6)


def test_sums_of_other_numbers_of_rows_follow_each_other():
    """Each row has its own number, and half of the places."""
    opened, memory = regions(2)
    for rows in (1, 4, 2, 4):
        parts = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rank)).to(DEVICE) for rank in range(2)]
        numbers_N = opened[0].counts_N[:rows].tolist()
        for rank, row in itertools.product(range(2), range(rows)):
            place = memory[rank][(numbers_N[row] + 1) % 2, 1 - rank, 64 * row : 64 * row + 64]
            place.copy_(words(parts[1 - rank][row], numbers_N[row] + 1))
        for part, region in zip(parts, opened, strict=True):
            assert torch.equal(sum_ranks(part.clone(), region), parts[0] + parts[1])
    assert opened[0].counts_N[:5].tolist() == [4, 3, 2, 2, 0]


def test_words_of_an_earlier_sum_are_not_taken():
    """The peer writes late, and until then the words of two sums before are in their place."""
    opened, memory = regions(2)
    x_NE = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    for number in (1, 2):
        summed([x_NE, x_NE], opened, memory, number)
    place, late = memory[0][1, 1, :32], words(3 * x_NE, 3)
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None  # the current one has the kernel that waits

    def write() -> None:
        with torch.cuda.stream(stream):
            place.copy_(late)

    timer = threading.Timer(0.2, write)
    timer.start()
    result = sum_ranks(x_NE.clone(), opened[0])
    timer.join()
    assert result.unique().item() == 4.0


def test_a_sum_waits_for_the_others_until_it_is_told_that_they_have_ended():
    (region, _), _ = regions(2)

    def wait() -> None:
        sum_ranks(torch.ones(2, 64, dtype=torch.bfloat16, device=DEVICE), region)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    with torch.cuda.stream(torch.cuda.Stream()) if DEVICE.type == "cuda" else nullcontext():
        region.ended_1.fill_(1)
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_does_not_fit_is_refused():
    (region, _), _ = regions(2)
    for x_NE in (
        torch.ones(1, 12, dtype=torch.bfloat16, device=DEVICE),
        torch.ones(MAX_ROWS + 1, 8, dtype=torch.bfloat16, device=DEVICE),
        torch.ones(3, 4096, dtype=torch.bfloat16, device=DEVICE),
        torch.ones(1, 64, dtype=torch.int32, device=DEVICE),
    ):
        assert not region.fits(x_NE)
        with pytest.raises(ValueError, match="fits the region"):
            sum_ranks(x_NE, region)
    with pytest.raises(ValueError, match="contiguous"):
        sum_ranks(torch.ones(64, 2, dtype=torch.bfloat16, device=DEVICE).T, region)
    with pytest.raises(ValueError, match="weight_E"):
        x_NE = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
        sum_ranks(x_NE, region, residual_NE=x_NE)
