"""A mask leaves the logits that it allows as they are, and forbids the others, in the rows that follow a grammar alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.compiling import assert_compiles
from tests.kernels.test_checks import Refusal, assert_refused, meta, spread
from vmmkv.kernels import reference
from vmmkv.kernels.sampling.logits import apply_token_mask


def words_of(may_GV: torch.Tensor, num_words: int) -> torch.Tensor:
    """A bit for each token, the lowest of the first word for token 0; of what is no token, at random."""
    bits_GV = torch.randint(0, 2, (len(may_GV), 32 * num_words), generator=torch.Generator().manual_seed(9))
    bits_GV[:, : may_GV.shape[1]] = may_GV
    places = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int64)
    return (bits_GV.view(len(may_GV), num_words, 32) * places).sum(2).int()


@pytest.mark.parametrize("size, more_words", [(1, 0), (31, 0), (32, 1), (33, 0), (2049, 0), (5000, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_forbidding_has_the_bits_of_torch(device: torch.device, size: int, more_words: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_BV = torch.randn(6, size + 8, generator=generator).to(dtype)[:, :size]
    logits_BV[1, 0] = float("nan")
    may_GV = torch.rand(4, size, generator=generator) < torch.tensor([0.5, 0.0, 1.0, 0.01])[:, None]
    expected_BV, ours_BV = logits_BV.clone(), logits_BV.to(device)
    for row, may_V in ((4, may_GV[0]), (1, may_GV[1]), (0, may_GV[3])):
        expected_BV[row, ~may_V] = -torch.inf
    rows_G, words_GW = torch.tensor([4, 1, -1, 0], dtype=torch.int32), words_of(may_GV, -(-size // 32) + more_words)
    apply_token_mask(ours_BV, rows_G.to(device), words_GW.to(device))
    assert torch.equal(ours_BV.cpu().nan_to_num(7.0, neginf=-torch.inf), expected_BV.nan_to_num(7.0, neginf=-torch.inf))
    reference_BV = logits_BV.clone()
    reference.apply_token_mask(reference_BV, rows_G, words_GW)
    assert torch.equal(reference_BV.nan_to_num(7.0, neginf=-torch.inf), expected_BV.nan_to_num(7.0, neginf=-torch.inf))


def test_a_row_that_there_is_not_is_passed_over(device: torch.device) -> None:
    buffer_BV = torch.ones(4, 40, device=device)
    index = torch.tensor([2, 5, -9], device=device)
    apply_token_mask(buffer_BV[1:3], index, torch.zeros(3, 2, dtype=torch.int32, device=device))
    assert (buffer_BV == 1).all()


@pytest.mark.parametrize(
    "refusal",
    [
        ("logits_BV", lambda logits: logits[0], "2 dimensions"),
        ("logits_BV", lambda logits: logits.long(), "float16, bfloat16 or float32"),
        ("logits_BV", spread, "the last one contiguous"),
        ("rows_G", lambda rows: rows.float(), "int32 or int64"),
        ("rows_G", lambda rows: rows[0], "(0,)"),
        ("words_GW", lambda words: words.long(), "contiguous torch.int32"),
        ("words_GW", lambda words: words[:, :1], "(2, 2)"),
        ("words_GW", lambda words: words[:1], "(2, 2)"),
        ("words_GW", meta, "on meta; wanted"),
    ],
    ids=lambda refusal: refusal[0],
)
def test_forbid_names_what_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        "logits_BV": torch.zeros(3, 40, device=device),
        "rows_G": torch.zeros(2, dtype=torch.int32, device=device),
        "words_GW": torch.zeros(2, 2, dtype=torch.int32, device=device),
    }
    assert_refused(apply_token_mask, arguments, refusal)


def test_it_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    statements = """
from vmmkv.kernels.sampling import logits
for rows, vocabulary, dtype in ((1, 50_257, torch.float32), (64, 151_936, torch.bfloat16)):
    logits.apply_token_mask(empty(rows, vocabulary, dtype=dtype), empty(rows), empty(rows, -(-vocabulary // 32)))
"""
    assert_compiles(statements, tmp_path)
