"""With several steps under way requests get the tokens that they get when each step is read at once."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import VOCABULARY, Harness, MakeHarness, prompt_of, tiny_model, wide_rows, windowed
from vmmkv.prefix import PrefixCache
from vmmkv_kernels.quantise import Kind
from vmmkv_server.engine.step import Readback

LOOKAHEADS = [2, *(pytest.param(steps, marks=pytest.mark.nightly) for steps in (0, 1, 3))]


class Ask(NamedTuple):
    prompt: list[int]
    max_new_tokens: int
    options: dict[str, Any] = {}  # noqa: RUF012 # never changed


def sampled(seed: int, **options: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed} | options


def first_new(tokens: list[int], among: range) -> int:
    """Where a token stands that did not come before: made a stop token, it ends the answer there."""
    return next(index for index in among if tokens[index] not in tokens[:index])


def ask_all(one: Harness, asks: dict[str, Ask], *, every: int = 1) -> None:
    """One more request before each `every`-th step, then until all is done."""
    for index, (name, ask) in enumerate(asks.items()):
        one.ask(name, ask.prompt, ask.max_new_tokens, **ask.options)
        if index % every == every - 1:
            one.step()
    one.run()


def answers(one: Harness) -> dict[str, tuple[list[int], list[str | None]]]:
    """The tokens and all finish reasons of each answered request."""
    names = dict.fromkeys(output.request_id for output in one.outputs())
    return {name: (one.tokens(name), one.finish_reasons(name)) for name in names}


def assert_answered_once(one: Harness, names: Sequence[str]) -> None:
    """One output a token, the last of which alone has a finish reason; what ended by a token has one without."""
    for name in names:
        outputs = one.outputs(name)
        assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [False], name
        assert [len(output.token_ids) for output in outputs[:-1]] == [1] * (len(outputs) - 1)
        assert len(outputs[-1].token_ids) == (outputs[-1].finish_reason == "length")


MIXTURE = {
    "one": Ask(prompt_of(1), 30),
    "at once": Ask(prompt_of(40, 1), 1),
    "two": Ask(prompt_of(41, 1), 2, sampled(1)),
    "long": Ask(prompt_of(150, 2), 50, sampled(2, top_p=0.9)),
    "stops": Ask(prompt_of(17, 3), 60, sampled(3, stop_token_ids=list(range(0, VOCABULARY, 9)))),
    "stops soon": Ask(prompt_of(18, 3), 60, sampled(4, stop_token_ids=list(range(0, VOCABULARY, 2)))),
    "ignores": Ask(prompt_of(18, 3), 40, sampled(5, ignore_eos=True)),
    "alike": Ask([*prompt_of(18, 3), 7], 40, sampled(6)),
    "again": Ask(prompt_of(150, 2), 50, sampled(2, top_p=0.9)),
    "penalised": Ask(prompt_of(30, 4), 40, sampled(7, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2)),
    "biased": Ask(prompt_of(31, 4), 40, {"logit_bias": {5: 4.0}}),
}
EOS = frozenset(range(3, VOCABULARY, 40))


@functools.cache
def read_at_once(share: bool, ours: bool, kv_kind: Kind | None) -> dict[str, tuple[list[int], list[str | None]]]:
    one = Harness(tiny_model(), kv_kind=kv_kind, share=share, ours=ours, eos_ids=EOS, step_tokens=30, lookahead=0)
    ask_all(one, MIXTURE)
    one.close()
    assert {reasons[-1] for _, reasons in answers(one).values()} == {"stop", "length"}
    return answers(one)


@pytest.mark.parametrize(("ours", "share"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_the_tokens_are_the_same(harness: MakeHarness, lookahead: int, share: bool, ours: bool) -> None:
    one = harness(share=share, ours=ours, eos_ids=EOS, step_tokens=30, lookahead=lookahead)
    ask_all(one, MIXTURE, every=1 + lookahead)
    assert not one.failures()
    assert answers(one) == read_at_once(share, ours, one.kv_kind) == read_at_once(False, False, one.kv_kind)
    assert_answered_once(one, list(MIXTURE))
    assert one.cache.stats().num_sequences == 0


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_so_many_steps_are_in_flight(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    one = harness(lookahead=lookahead)
    launched: list[Any] = []
    read: list[Any] = []
    launch, give = one.engine.launch, one.engine.answers.give
    monkeypatch.setattr(one.engine, "launch", lambda step: launched.append(step) or launch(step))
    monkeypatch.setattr(one.engine.answers, "give", lambda step, results: read.append(step) or give(step, results))
    one.ask("a", prompt_of(5), 20)
    for step in range(1, 20):
        one.step()
        assert len(one.engine.in_flight) == min(step, lookahead)
        assert len(one.tokens("a")) == max(0, step - lookahead)
    one.run()
    assert len(launched) == 20, "the prompt's step gives the first token, and none is decoded past the last one"
    assert read == launched, "in order, each once"


def test_a_step_that_the_device_has_ended_is_read_at_once(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "is_done", True)
    one = harness(lookahead=2)
    one.ask("a", prompt_of(5), 20)
    for step in range(1, 20):
        one.step()
        assert len(one.tokens("a")) == step and not one.engine.in_flight


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_request_that_ends_in_flight_frees_its_slot_at_once(harness: MakeHarness, lookahead: int, share: bool) -> None:
    """The steps in flight compute for an ended request, in a slot that another has."""
    asks = {
        "first": Ask(prompt_of(20), 30, sampled(1)),
        "second": Ask(prompt_of(21, 1), 30),
        "third": Ask(prompt_of(3, 2), 30, sampled(3)),
    }
    free = harness(lookahead=0, ours=True)
    ask_all(free, asks)
    tokens = free.tokens("first")
    at = first_new(tokens, range(6, 30))
    asks["first"].options["stop_token_ids"] = [tokens[at]]
    one = harness(slots=1, share=share, lookahead=lookahead, ours=True)
    for name, ask in asks.items():
        one.ask(name, ask.prompt, ask.max_new_tokens, **ask.options)
    while "stop" not in one.finish_reasons("first"):
        one.step()
    assert len(one.engine.in_flight) == lookahead, "these compute what follows the end"
    one.step()
    (second,) = one.engine.scheduler.running
    assert second.ask.request_id == "second" and second.memory.length == 21
    one.run()
    assert one.tokens("first") == tokens[:at]
    assert one.tokens("second") == free.tokens("second")
    assert one.tokens("third") == free.tokens("third")
    assert_answered_once(one, list(asks))


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_overrun_rows_are_never_shared(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    """Only rows that were read back enter the tree, never those that a request computed past its end."""
    one = harness(wide_rows(), share=True, lookahead=lookahead, step_tokens=64)
    prompt, free = prompt_of(90), one.expected(prompt_of(90), 60)
    at = first_new(free, range(36, 60))  # past row 128, with which a page begins
    told: list[int] = []

    def telling(call: Any, cache: PrefixCache, sequence: Any, tokens: Any = (), **options: Any) -> Any:
        confirmed = int(one.engine.scheduler.table.num_confirmed[sequence.slot])
        assert len(tokens) <= confirmed <= sequence.length
        told.append(sequence.length - len(tokens))
        return call(cache, sequence, tokens, **options)

    for name in ("insert", "park", "release"):
        call = getattr(PrefixCache, name)
        monkeypatch.setattr(PrefixCache, name, lambda *given, call=call, **options: telling(call, *given, **options))
    one.ask("ends", prompt, 60, stop_token_ids=[free[at]])
    one.run()
    assert one.tokens("ends") == free[:at]
    assert told[-1] == lookahead, "so many rows were computed past the end"
    one.ask("goes on", [*prompt, *free], 5)
    one.run()
    output = one.outputs("goes on")[0]
    assert output.cached_tokens == len(prompt) + at, "the last token that was kept has its row"
    assert one.tokens("goes on") == one.expected([*prompt, *free], 5)


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_window_that_moves_leaves_what_was_confirmed_usable(harness: MakeHarness, lookahead: int, share: bool) -> None:
    """It moves by the rows that are launched, and a request that ends then has fewer that count."""
    model = windowed()
    prompt = prompt_of(150)
    tokens = harness(model, lookahead=0, ours=True).said(prompt, 80, **sampled(1))
    ends = [index for index in range(77) if tokens[index] not in tokens[:index]]
    assert len(ends) > 40
    one = harness(model, share=share, lookahead=lookahead, slots=3, step_tokens=200, ours=True)
    for at in ends[::4]:
        one.ask(f"ends at {at}", prompt, 80, **sampled(1, stop_token_ids=[tokens[at]]))
        one.run()
        assert one.tokens(f"ends at {at}") == tokens[:at]
        one.ask(f"goes on from {at}", [*prompt, *tokens[: at + 1]], 3, **sampled(1))
        one.run()
        assert one.tokens(f"goes on from {at}") == tokens[at + 1 : at + 4], "random numbers go by position"
    assert not one.failures()


def test_log_probabilities_stay_with_their_tokens(harness: MakeHarness) -> None:
    """Some of a batch ask for them, and others end meanwhile: each output has those of its own token."""
    wanted: dict[str, list[float]] = {}
    for lookahead in (0, 1, 3):
        one = harness(slots=4, lookahead=lookahead, step_tokens=20, eos_ids=EOS)
        for index in range(8):
            asked = {} if index % 3 == 0 else {"logprobs": index % 3}
            one.ask(str(index), prompt_of(5 + 3 * index, index), 20, **sampled(index, **asked))
        one.run()
        for index in range(8):
            outputs = one.outputs(str(index))
            assert all(len(output.logprobs) == (index % 3 > 0) for output in outputs)
            assert all(len(top) == index % 3 for output in outputs for top in output.top_logprobs)
            numbers = [
                *one.logprobs(str(index)),
                *(n for output in outputs for top in output.top_logprobs for p in top for n in p),
            ]
            assert numbers == pytest.approx(wanted.setdefault(str(index), numbers), abs=1e-4)
