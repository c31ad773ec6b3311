"""Which rows the policies keep, and what they refuse. What they cost in perplexity is in tests/adapters/test_eviction.py."""

import re

import pytest
import torch

from tests.unit.support import LAYOUT
from vmmkv import KVCache, Pool
from vmmkv.eviction import H2O, TOVA, KVPolicy, SnapKV, StreamingLLM
from vmmkv.kv_policy import scores_all
from vmmkv.units import PAGE_BYTES

SCORES = torch.tensor([9.0, 1.0, 5.0, 5.0, 0.0, 7.0, 2.0, 5.0, 0.0, 3.0])
"""Of 10 rows."""


@pytest.mark.parametrize(
    ("policy", "num_queries", "kept"),
    [
        (StreamingLLM(sinks=2, window=3), 0, [0, 1, 7, 8, 9]),
        (StreamingLLM(sinks=0, window=2), 0, [8, 9]),
        (StreamingLLM(sinks=4, window=6), 0, [*range(10)]),
        (H2O(budget=5, recent=2), 10, [0, 2, 5, 8, 9]),  # of rows 2, 3 and 7, which are equal, the first
        (H2O(budget=3, recent=3), 10, [7, 8, 9]),
        (H2O(budget=2, recent=0), 10, [0, 5]),
        (TOVA(budget=4), 1, [0, 2, 5, 9]),
        (TOVA(budget=99), 1, [*range(10)]),
        (SnapKV(budget=5, window=2, kernel=1), 2, [0, 2, 5, 8, 9]),
        (SnapKV(budget=4, window=2, kernel=3), 2, [1, 6, 8, 9]),  # sums of three: 10, 15, 11, 10, 12, 9, 14, 7
        (SnapKV(budget=32), 10, [*range(10)]),
    ],
)
def test_the_rows_that_are_kept(policy: KVPolicy, num_queries: int, kept: list[int]) -> None:
    before = SCORES.clone()
    assert policy.num_queries(10) == num_queries
    assert policy.keep(10, SCORES).tolist() == kept
    assert torch.equal(SCORES, before)


@pytest.mark.parametrize(
    "policy", [H2O(budget=7, recent=3), TOVA(budget=7), SnapKV(budget=7, window=3), StreamingLLM(window=3)]
)
def test_a_budget_is_kept_whatever_the_length(policy: KVPolicy) -> None:
    for num_rows in range(20):
        rows = policy.keep(num_rows, torch.rand(num_rows))
        assert len(rows) == min(policy.budget, num_rows) == min(7, num_rows)
        assert rows.tolist() == sorted(set(rows.tolist()))


@pytest.mark.parametrize("budget", [1, 2, 32, 33])
def test_h2o_alone_scores_all_queries(budget: int) -> None:
    others = TOVA(budget=budget), SnapKV(budget=budget, window=budget), StreamingLLM(sinks=0, window=budget)
    assert scores_all(H2O(budget=budget, recent=0)) and not any(map(scores_all, others))


def test_what_makes_no_sense_is_refused() -> None:
    for message, make in [
        ("sinks=-1: give 0 or more", lambda: StreamingLLM(sinks=-1, window=3)),
        ("window=0: give 1 or more", lambda: StreamingLLM(window=0)),
        ("budget=0: give 1 or more", lambda: TOVA(budget=0)),
        ("recent=9 is more than budget=8: give a budget of 9 or more, or a smaller recent", lambda: H2O(budget=8, recent=9)),
        (
            "window=32 (the default) is more than budget=8: give a budget of 32 or more, or a smaller window",
            lambda: SnapKV(budget=8),
        ),
        ("kernel=4: give an odd number", lambda: SnapKV(budget=64, kernel=4)),
        ("scores_T: none; wanted (10,)", lambda: H2O(budget=8, recent=4).keep(10)),
        ("scores_T: of shape (9,); wanted (10,)", lambda: TOVA(budget=8).keep(10, SCORES[1:])),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    with pytest.raises(TypeError, match=r"budget=2\.5 is not a whole number"):
        TOVA(budget=2.5)  # type: ignore[arg-type]


def test_a_stream_goes_on_for_ever_in_the_memory_of_its_window(driver) -> None:
    policy = StreamingLLM(sinks=4, window=60)
    with Pool("cpu", 5 * PAGE_BYTES, driver=driver) as pool, KVCache(LAYOUT, pool, slots=1, max_tokens=80) as cache:
        sequence = cache.open()
        for token in range(300):
            if sequence.length == 80:
                sequence.compact(policy.keep(80))
            sequence.grow(sequence.length + 1)
            sequence.k(0)[sequence.length] = token
            sequence.advance()
        assert sequence.position == 300
        positions = sequence.positions()
        assert positions[:4].tolist() == [0, 1, 2, 3] and positions[4:].tolist() == [*range(304 - len(positions), 300)]
        assert sequence.k(0)[: sequence.length, 0, 0].tolist() == positions.tolist()
        cache.check()
