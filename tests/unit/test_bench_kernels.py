"""The suite `kernels`: attention over each memory, checked against the reference."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.cli import main
from bench.harness import SHAPES, Shape, WrongNumbers
from bench.suites.kernels import Queries, memories
from bench.suites.kernels.memories import Case, Format, open_memory, rows_of
from tests.unit.recorded import SETTINGS, measured


def test_attention_is_checked_against_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "release_memory", lambda device: None)  # to collect takes a second each time
    narrow = Shape(name="narrow", layers=2, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, weight_bytes=0)
    rows = measured(tmp_path, "kernels", settings=replace(SETTINGS, shape=narrow))
    assert {row.workload for row in rows} == {
        f"narrow {case}" for case in ("decode 2x96", "decode skewed", "prefill 64", "prefill mixed")
    }
    over = ("malloc", "vmmkv, all layers a page", "paged 16", "paged 128", "malloc, again")
    assert {row.system for row in rows} >= {f"reference, {memory}" for memory in over}
    case = Case(name="2x96", lengths=(96, 96))
    memory = open_memory("tensor", case, 1, Format(shape=SHAPES["wide"]), torch.device("cpu"))
    batch = Queries(case, 1, memory, seed=0)
    wrong = [torch.zeros_like(batch.q_NHD) for _ in memory.layers]
    with pytest.raises(WrongNumbers, match="off by 1"):
        batch.check(wrong)
    memory.close()


@pytest.mark.parametrize("kind", ["vmmkv-aliased", "paged-shared"])
def test_sequences_of_a_shared_memory_have_the_same_rows(kind: str) -> None:
    case = Case(name="3x96", lengths=(96, 96, 96))
    memory = open_memory(kind, case, 1, Format(shape=SHAPES["wide"]), torch.device("cpu"))
    first, *others = [rows_of(memory, 0, index, 96) for index in range(3)]
    assert all(torch.equal(one, other) for rows in others for one, other in zip(first, rows, strict=True))
    memory.close()


def test_a_case_is_named_as_its_rows_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", "--device", "cpu", "--cases", "9x9"])
    assert "no case 9x9: decode has 2x96, skewed" in capsys.readouterr().err
