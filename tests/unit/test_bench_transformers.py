"""The suite `transformers`: all caches decode the same, and others are seen."""

from pathlib import Path

import pytest
import torch

from bench.harness import WrongNumbers
from bench.suites import transformers
from tests.unit.recorded import SETTINGS, found, measured


def test_all_caches_of_transformers_decode_the_same(tmp_path: Path) -> None:
    rows = measured(tmp_path, "transformers", "decode")
    assert {system for _, system in found(rows, "time per token")} == set(transformers.SYSTEMS)
    assert list(transformers.absent(SETTINGS)) == ["memory", "mixed"]


def test_logits_and_rows_of_another_token_are_seen() -> None:
    expected, logits = transformers.Expected(torch.float32), torch.randn(2, 8)
    expected.check("first", 0, logits)
    with pytest.raises(WrongNumbers, match="logits are off by"):
        expected.check("other", 0, logits + 0.1 * torch.randn(2, 8))
