"""Tiers below the engine: what is evicted comes back, tokens are those without tiers, and no request waits in vain."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import prompt_of, wide_rows
from vmmkv import MIB
from vmmkv.server import LLM, RequestOutput, SamplingParams
from vmmkv.server.engine import fetches

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_budget_bytes": 32 * MIB, "max_tokens": 1024}
PROMPTS = [prompt_of(500 + 40 * seed, seed) for seed in range(6)]
"""Of seven to ten pages: two of them fill the device."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "wide"
    wide_rows().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """The answers without tiers."""
    with LLM(directory, **OPTIONS) as llm:
        return answers(llm.generate(PROMPTS, GREEDY))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is taken to be slow, so that every fetch is waited for."""
    monkeypatch.setattr(fetches, "_FIRST_TOKENS_PER_S", 1.0)
    monkeypatch.setattr(fetches, "_LEAST_MEASURED", 1 << 30)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.usefixtures("patient")
def test_what_leaves_the_device_comes_back_from_the_host(directory: Path, expected: list[list[int]]) -> None:
    with LLM(directory, kv_host_budget_bytes=256 * MIB, **OPTIONS) as llm:
        assert answers(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS, GREEDY)
        assert answers(again) == expected
        assert all(each.cached_tokens >= 448 for each in again)
        assert sum(each.cached_tokens_details.get("host", 0) for each in again) > 1000
