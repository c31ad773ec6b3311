"""Engines over one store: each hits what another computed."""

from pathlib import Path

from tests.engine.test_fetches import GREEDY, OPTIONS, PROMPTS, answers, directory, expected, patient
from tests.stores import redis_server
from vmmkv import MIB
from vmmkv_server import LLM

__all__ = ["directory", "expected", "patient"]


def test_an_engine_hits_what_another_computed_over_one_store(directory: Path, expected: list[list[int]]) -> None:
    """When the store is gone, all is computed."""
    with redis_server() as server:
        shared = OPTIONS | {"kv_store": server.url}
        with LLM(directory, **(shared | {"kv_budget_bytes": 256 * MIB})) as first:
            assert answers(first.generate(PROMPTS, GREEDY)) == expected
        with LLM(directory, **shared) as second:
            again = second.generate(PROMPTS, GREEDY)
            assert answers(again) == expected
            assert [each.cached_tokens_details for each in again] == [{"redis": len(prompt) // 64 * 64} for prompt in PROMPTS]
            assert second.snapshot is not None and second.snapshot.tiers["redis"].loaded_bytes
            server.kill()
            assert answers(second.generate(PROMPTS, GREEDY)) == expected
