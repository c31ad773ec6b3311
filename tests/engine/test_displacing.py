"""Who is less pressing gives way to a waiting request that finds no slot or no memory, and says the same afterwards."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import Harness, prompt_of
from tests.engine.test_beam_engine import answer, by_transformers, check
from tests.engine.test_core_bugs import windowed
from tests.engine.test_lookahead import wide_rows

LOOKAHEADS = pytest.mark.parametrize("lookahead", [0, 2])
SHARES = pytest.mark.parametrize("share", [False, True])


def running(one: Harness) -> list[str]:
    """Who runs, the oldest first."""
    return [request.ask.request_id for request in one.engine._scheduler.running]


@LOOKAHEADS
@SHARES
def test_the_newest_of_the_least_pressing_gives_its_slot(harness: Callable[..., Harness], lookahead: int, share: bool) -> None:
    one = harness(wide_rows(), ours=True, max_sequences=3, share=share, lookahead=lookahead)
    sampled = {"temperature": 1.0, "seed": 3}
    asked: dict[str, dict[str, Any]] = {"old": {"priority": 1}, "first": {"priority": 2}, "second": {"priority": 2, **sampled}}
    for index, (name, options) in enumerate(asked.items()):
        one.ask(name, prompt_of(40, index), 30, **options)
    for _ in range(10):
        one.step()
    one.ask("pressing", prompt_of(30, 7), 20, priority=-1)
    one.step()
    one.step()
    assert running(one) == ["old", "first", "pressing"]
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted == 1
    names = [output.request_id for output in one.outputs() if output.finish_reason]
    assert names.index("pressing") < names.index("second")

    alone = harness(wide_rows(), ours=True)
    alone.ask("second", prompt_of(40, 2), 30, **sampled)
    alone.run()
    assert one.tokens("second") == alone.tokens("second")
    for index, name in enumerate(("old", "first")):
        assert one.tokens(name) == one.expected(prompt_of(40, index), 30)
    assert one.tokens("pressing") == one.expected(prompt_of(30, 7), 20)


@LOOKAHEADS
@SHARES
@pytest.mark.parametrize("model", [wide_rows, windowed])
def test_as_many_of_the_less_pressing_give_their_memory_as_it_takes(
    harness: Callable[..., Harness], model: Callable[[], Any], lookahead: int, share: bool
) -> None:
    one = harness(model(), ours=True, budget_pages=4, step_tokens=512, share=share, lookahead=lookahead)
    for index in range(4):
        one.ask(str(index), prompt_of(40, index), 20, priority=index + 1)  # a page each
    for _ in range(4):
        one.step()
    one.ask("pressing", prompt_of(100, 7), 20)  # two pages
    one.step()
    assert running(one) == ["0", "1", "pressing"]
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted == 2
    for index in range(4):
        assert one.tokens(str(index)) == one.expected(prompt_of(40, index), 20)
    assert one.tokens("pressing") == one.expected(prompt_of(100, 7), 20)


@pytest.mark.parametrize("options", [{"max_sequences": 2}, {"budget_pages": 2}])
def test_nobody_gives_way_to_an_equal(harness: Callable[..., Harness], options: dict[str, int]) -> None:
    one = harness(wide_rows(), ours=True, **options)
    one.ask("a", prompt_of(30), 12)
    one.ask("b", prompt_of(30, 1), 12, priority=-1)
    one.step()
    one.ask("c", prompt_of(30, 2), 12)
    one.ask("d", prompt_of(30, 3), 12, priority=5)
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted == 0


def test_nobody_gives_way_whom_a_step_under_way_ends(harness: Callable[..., Harness]) -> None:
    one = harness(wide_rows(), ours=True, max_sequences=1, lookahead=2)
    one.ask("ends", prompt_of(30), 4, priority=1)
    for _ in range(4):
        one.step()
    assert running(one) == ["ends"], "its last token is on its way"
    one.ask("pressing", prompt_of(30, 1), 4)
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted == 0


@SHARES
def test_nobody_gives_way_whose_window_leaves_enough(harness: Callable[..., Harness], share: bool) -> None:
    one = harness(windowed(), ours=True, budget_pages=5, step_tokens=300, share=share)
    one.ask("long", prompt_of(250), 60, priority=1)
    one.step()
    one.ask("pressing", prompt_of(100, 1), 10)
    one.step()
    one.step()
    assert running(one) == ["long", "pressing"]
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted == 0


def test_nobody_gives_way_in_vain(harness: Callable[..., Harness]) -> None:
    one = harness(wide_rows(), slots=4)
    one.ask("equal", prompt_of(20), 12)
    one.ask("lesser", prompt_of(20, 1), 30, priority=1)
    one.step()
    one.step()
    one.ask("beams", prompt_of(20, 2), 4, beam_width=4)
    one.step()
    assert running(one) == ["equal", "lesser"], "with the slot of one of them there would still be too few"
    one.run()
    assert not one.failures()
    check(answer(one, "beams"), by_transformers(one, prompt_of(20, 2), width=4, max_new_tokens=4))


@LOOKAHEADS
def test_a_search_gives_way_with_all_its_beams_and_waits_for_who_displaced_it(
    harness: Callable[..., Harness], lookahead: int
) -> None:
    one = harness(wide_rows(), slots=4, share=True, lookahead=lookahead)
    one.ask("beams", prompt_of(20, 2), 12, beam_width=4, priority=1)
    for _ in range(6):
        one.step()
    one.ask("pressing", prompt_of(20), 25)
    one.step()
    one.step()
    assert running(one) == ["pressing"]
    one.run()
    assert one.engine._scheduler.num_preempted == 1
    assert one.tokens("pressing") == one.expected(prompt_of(20), 25)
    check(answer(one, "beams"), by_transformers(one, prompt_of(20, 2), width=4, max_new_tokens=12))


def test_a_search_takes_the_slots_of_the_less_pressing(harness: Callable[..., Harness]) -> None:
    one = harness(wide_rows(), slots=4)
    for index in range(4):
        one.ask(str(index), prompt_of(20, index), 30, priority=index)
    for _ in range(4):
        one.step()
    one.ask("beams", prompt_of(20, 9), 6, beam_width=3)
    one.step()
    assert running(one) == ["0", "beams"]
    one.run()
    check(answer(one, "beams"), by_transformers(one, prompt_of(20, 9), width=3, max_new_tokens=6))
    for index in range(4):
        assert one.tokens(str(index)) == one.expected(prompt_of(20, index), 30)


@SHARES
@pytest.mark.parametrize("seed", range(3))
def test_all_end_with_their_tokens_however_they_press(harness: Callable[..., Harness], share: bool, seed: int) -> None:
    chance = random.Random(seed)
    model = wide_rows() if seed else windowed()
    one = harness(model, ours=True, max_sequences=3, budget_pages=5, step_tokens=96, share=share)
    asked = {
        str(index): (prompt_of(chance.randint(5, 120), index % 5), chance.randint(1, 40), chance.randint(0, 3))
        for index in range(24)
    }
    for name, (prompt, num_new, priority) in asked.items():
        one.ask(name, prompt, num_new, priority=priority)
        for _ in range(chance.randint(0, 5)):
            one.step()
    one.run()
    assert not one.failures() and one.engine._scheduler.num_preempted > 2
    alone = harness(model, ours=True)
    for name, (prompt, num_new, _) in asked.items():
        alone.ask(name, prompt, num_new)
    alone.run()
    assert all(one.tokens(name) == alone.tokens(name) for name in asked)


def test_nobody_gives_way_to_who_cannot_fit_beside_its_equals(harness: Callable[..., Harness]) -> None:
    """Who cannot fit beside its equals waits for them; the less pressing run on meanwhile."""
    rows = 2**21 // 1024
    one = harness(ours=True, share=True, budget_pages=6, max_tokens=8192, step_tokens=512)
    one.ask("equal", prompt_of(3 * rows - 200, 1), 60)
    for index in range(2):
        one.ask(f"low {index}", prompt_of(rows - 100, 2 + index), 30, priority=5)
    for _ in range(25):
        one.step()
    one.ask("large", prompt_of(4 * rows - 300, 9), 5)
    for _ in range(6):
        one.step()
    assert one.engine._scheduler.num_preempted == 0 and sorted(running(one)) == ["equal", "low 0", "low 1"]
    one.run()
    assert not one.failures() and len(one.tokens("large")) == 5


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_prompt_logprobs": 0}], ids=["said", "scored"])
def test_who_wants_a_slot_and_could_not_have_the_memory_waits_and_the_loop_goes_on(
    harness: Callable[..., Harness], options: dict[str, int], share: bool
) -> None:
    one = harness(wide_rows(), budget_pages=6, step_tokens=512, share=share, ours=True, slots=2, max_sequences=2)
    most = one.cache.layout.tokens_in(6)
    one.ask("large", prompt_of(most * 2 // 3, 1), 20)
    one.ask("small", prompt_of(5, 2), 20, priority=1)
    for _ in range(4):
        one.step()
    one.ask("as large", prompt_of(most * 2 // 3, 3), 20, **options)
    one.step()
    assert running(one) == ["large", "small"]
    one.run()
    assert not one.failures() and {len(one.tokens(name)) for name in ("large", "small", "as large")} == {20}
