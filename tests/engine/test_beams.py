"""The search finds what transformers' finds, and with beams enough for every sequence, the best there is."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine import conftest
from tests.engine.conftest import Harness, MakeHarness, prompt_of, tiny_model, windowed
from tests.engine.test_engine import PENALTIES
from tests.engine.test_lookahead import EOS, LOOKAHEADS, MIXTURE, answers, ask_all, read_at_once
from tests.engine.test_scheduler import running
from vmmkv import MIB, DriverError, KVCache
from vmmkv.layout import KV_KINDS
from vmmkv_kernels.quantise import Kind
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.features.beams import BeamSearch, Candidates
from vmmkv_server.protocol import Abort, Beam, Beams, decode_from_engine, encode

Model = Callable[[Sequence[int]], Candidates]
"""From a beam's tokens to all that may come next, the likeliest first."""


def search(
    model: Model, *, width: int, max_new_tokens: int, stop_ids: Sequence[int] = (), length_penalty: float = 1.0
) -> list[Beam]:
    """The answers of a whole search; on the way, that every beam is its parent's tokens and one more."""
    one = BeamSearch(width=width, max_new_tokens=max_new_tokens, stop_ids=frozenset(stop_ids), length_penalty=length_penalty)
    rows: list[list[int]] = [[]]  # as an engine would keep them
    while not one.done:
        assert rows == [beam.tokens() for beam in one.live]
        continuations = one.advance([model(tokens)[: one.num_candidates] for tokens in rows])
        rows = [[*rows[parent], token] for parent, token in continuations]
        assert len(rows) == len(one.live) <= width and not set(stop_ids) & {token for _, token in continuations}
        assert all(beam.num_tokens == len(own) for beam, own in zip(one.live, rows, strict=True))
        likelihoods = [beam.log_probability for beam in one.live]
        assert likelihoods == sorted(likelihoods, reverse=True)
    answers = one.best(width)
    assert [beam.score for beam in answers] == sorted((beam.score for beam in answers), reverse=True)
    assert one.best(1) == answers[:1]
    return answers


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("num_stops", [0, 1, 5])
@pytest.mark.parametrize("width", [2, 8])
def test_it_finds_what_transformers_finds(width: int, num_stops: int, length_penalty: float) -> None:
    llama, prompt = model_of(), prompt_of(11, 5)

    @torch.inference_mode()
    def model(tokens: Sequence[int]) -> Candidates:
        best = llama(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1).sort(descending=True)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    # Tokens that the search comes by: a stop in reach of some beams and not of others.
    seen = dict.fromkeys(token for beam in search(model, width=8, max_new_tokens=10) for token in beam.token_ids[2:])
    stops = list(seen)[:num_stops]
    found = search(model, width=width, max_new_tokens=10, stop_ids=stops, length_penalty=length_penalty)
    wanted = beams_of(llama, prompt, width=width, max_new_tokens=10, stops=stops, length_penalty=length_penalty)
    assert [beam.token_ids for beam in found] == [tokens for tokens, _ in wanted]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in wanted], rel=1e-4)
    if num_stops and length_penalty <= 1:  # above, the longest win here
        assert "stop" in {beam.finish_reason for beam in found}


def random_model(seed: int, vocabulary: int) -> Model:
    """Any log-probabilities, a function of the tokens alone."""

    def model(tokens: Sequence[int]) -> Candidates:
        weights = random.Random(f"{seed} {list(tokens)}")
        chances = [weights.random() ** 3 + 1e-6 for _ in range(vocabulary)]
        logprobs = [(token, math.log(chance / sum(chances))) for token, chance in enumerate(chances)]
        return sorted(logprobs, key=lambda each: -each[1])

    return model


@pytest.mark.parametrize("seed", range(6))
def test_beams_for_every_sequence_find_the_best_there_is(seed: int) -> None:
    model, stop, longest = random_model(seed, 3), 2, 4

    def endings(tokens: tuple[int, ...], log_probability: float) -> dict[tuple[int, ...], float]:
        ended = {}
        for token, chance in model(tokens):
            if token == stop:
                ended[tokens] = log_probability + chance
            elif len(tokens) + 1 == longest:
                ended[(*tokens, token)] = log_probability + chance
            else:
                ended |= endings((*tokens, token), log_probability + chance)
        return ended

    every = endings((), 0.0)
    ranked = sorted(every, key=lambda tokens: every[tokens], reverse=True)
    found = search(model, width=len(every), max_new_tokens=longest, stop_ids=[stop], length_penalty=0.0)
    assert [tuple(beam.token_ids) for beam in found] == ranked
    assert [beam.score for beam in found] == pytest.approx([every[tokens] for tokens in ranked])
    assert all(beam.finish_reason == ("length" if len(beam.token_ids) == longest else "stop") for beam in found)


def test_it_stops_when_nothing_live_can_win() -> None:
    one = BeamSearch(width=1, max_new_tokens=1000, stop_ids=frozenset([9]))
    assert one.advance([[(9, -0.1), (1, -2.0)]]) == []
    assert one.done
    assert one.best(5) == [Beam(token_ids=[], score=-0.1, finish_reason="stop")]


def test_long_beams_go_as_they_came() -> None:
    one = BeamSearch(width=2, max_new_tokens=50_000)
    while not one.done:
        one.advance([[(3, -0.5), (4, -1.0), (5, -1.5)]] * len(one.live))
    assert one.best(1)[0].token_ids == [3] * 50_000
    del one  # without recursing once a token


def model_of(seed: int = 3, **changes: Any) -> LlamaForCausalLM:
    return opinionated(tiny_model(seed, **changes))


def opinionated(model: Any) -> Any:
    """Not as indifferent as random weights are, so that beams end, win and lose."""
    with torch.no_grad():
        model.lm_head.weight *= 12.0
    return model


def wide_rows(**changes: Any) -> LlamaForCausalLM:
    """A row of 8 KiB, so that 256 tokens fill a page, and a search of some tokens crosses one."""
    return model_of(num_attention_heads=16, num_key_value_heads=16, **changes)


def answer(harness: Harness, request_id: str) -> Beams:
    """What the search of that name found: one message, and it is the last."""
    (found,) = (message for message in harness.sent if isinstance(message, Beams) and message.request_id == request_id)
    assert decode_from_engine(encode(found)) == found
    return found


def searched(harness: Harness, prompt: list[int], max_new_tokens: int, **options: Any) -> Beams:
    """What a search that is alone found."""
    harness.said(prompt, max_new_tokens, **options)
    return answer(harness, "alone")


def by_transformers(one: Harness, prompt: list[int], **options: Any) -> list[tuple[list[int], float]]:
    """`beams_of` the model, with the attention of transformers."""
    with one.by_transformers():
        return beams_of(one.model, prompt, **options)


def beams_of(
    model: Any, prompt: list[int], *, width: int, max_new_tokens: int, stops: Sequence[int] = (), length_penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """By transformers' own beam search: the sequences, without end tokens, and their scores."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, num_beams=width,
        num_return_sequences=width, length_penalty=length_penalty, eos_token_id=list(stops) or None, pad_token_id=0,
        do_sample=False, early_stopping=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    kept = [
        list(itertools.takewhile(lambda token: token not in stops, row)) for row in out.sequences[:, len(prompt) :].tolist()
    ]
    return list(zip(kept, out.sequences_scores.tolist(), strict=True))


def check(found: Beams, wanted: list[tuple[list[int], float]]) -> None:
    assert [beam.token_ids for beam in found.beams] == [tokens for tokens, _ in wanted]
    assert [beam.score for beam in found.beams] == pytest.approx([score for _, score in wanted], rel=1e-4)


def held_by_sequences(harness: Harness) -> int:
    stats = harness.cache.stats()
    return stats.mapped_bytes - stats.parked_bytes


@pytest.mark.parametrize(
    ("width", "length_penalty", "share"), [(1, 1.0, True), (2, 0.0, False), (5, 0.0, True), (5, 1.0, False), (5, 2.0, True)]
)
def test_over_the_cache_it_finds_what_transformers_finds(
    harness: MakeHarness, width: int, length_penalty: float, share: bool
) -> None:
    one = harness(model_of(), share=share)
    prompts = [prompt_of(11, 5), prompt_of(40, 6)]
    for index, prompt in enumerate(prompts):
        one.ask(str(index), prompt, 12, beam_width=width, length_penalty=length_penalty)
    one.run()
    assert not one.failures()
    for index, prompt in enumerate(prompts):
        if width > 1:
            wanted = by_transformers(one, prompt, width=width, max_new_tokens=12, length_penalty=length_penalty)
            check(answer(one, str(index)), wanted)
        else:
            assert answer(one, str(index)).beams[0].token_ids == one.expected(prompt, 12)
    assert held_by_sequences(one) == 0


def test_what_neighbours_ask_decides_no_tie(harness: MakeHarness) -> None:
    indifferent = tiny_model(vocab_size=20_000)
    with torch.no_grad():
        indifferent.lm_head.weight.zero_()
    one = harness(indifferent)
    alone = searched(one, prompt_of(9), 4, beam_width=3)
    one.ask("beams", prompt_of(9), 4, beam_width=3)
    one.ask("beside", prompt_of(8), 8, logprobs=20)
    one.run()
    assert answer(one, "beams").beams == alone.beams


@pytest.mark.parametrize(("as_eos", "length_penalty"), [(True, -1.0), (False, 1.0)])
def test_stop_tokens_end_beams(harness: MakeHarness, as_eos: bool, length_penalty: float) -> None:
    prompt = prompt_of(11, 5)
    free = searched(harness(model_of()), prompt, 10, beam_width=6)
    stops = list(dict.fromkeys(token for beam in free.beams for token in beam.token_ids[2:]))[:3]
    one = harness(model_of(), eos_ids=frozenset(stops) if as_eos else frozenset())
    own = [] if as_eos else stops
    found = searched(one, prompt, 10, stop_token_ids=own, beam_width=4, length_penalty=length_penalty)
    wanted = by_transformers(one, prompt, width=4, max_new_tokens=10, stops=stops, length_penalty=length_penalty)
    check(found, wanted)
    assert "stop" in {beam.finish_reason for beam in found.beams}


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_long_prompt_is_shared_and_pages_are_crossed(harness: MakeHarness, share: bool) -> None:
    one = harness(wide_rows(), share=share, step_tokens=2048)
    prompt = prompt_of(3 * 256 + 240)
    one.ask("a", prompt, 40, beam_width=4)
    for _ in range(20):
        one.engine.step()
        one.cache.check()
    assert one.pool.stats().held_bytes <= (3 + 4 * 2) * 2**21, "the prompt's full pages are there once"
    one.run()
    check(answer(one, "a"), by_transformers(one, prompt, width=4, max_new_tokens=40))
    again = searched(one, prompt, 40, beam_width=4)
    check(again, [(beam.token_ids, beam.score) for beam in answer(one, "a").beams])
    assert again.cached_tokens == (len(prompt) - 1 if share else 0)


def test_reordering_copies_what_differs_and_calls_no_driver(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = harness(model_of(), share=True)
    copied: list[int] = []
    copy_rows = KVCache.copy_rows

    def counted(cache: KVCache, pairs: Any, first: int, end: int) -> None:
        before = cache.pool.driver.calls.copy()
        copy_rows(cache, pairs, first, end)
        assert cache.pool.driver.calls == before
        copied.append(end - first)

    monkeypatch.setattr(KVCache, "copy_rows", counted)
    found = searched(one, prompt_of(500), 60, beam_width=4)
    check(found, by_transformers(one, prompt_of(500), width=4, max_new_tokens=60))
    assert copied[0] == 0 < max(copied) < 60
    assert sum(copied) < 60 * 60 / 4, "less than all that was written since the start, each time"


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_preempted_search_finds_the_same(harness: MakeHarness, share: bool) -> None:
    one = harness(wide_rows(), share=share, budget_pages=9, step_tokens=2048)
    older = {"first": prompt_of(250, 1), "second": prompt_of(240, 2)}
    for name, prompt in older.items():
        one.ask(name, prompt, 300)
    searches = {"search": prompt_of(230, 3), "another": prompt_of(20, 4)}
    one.serve(searches, 60, beam_width=4)
    assert not one.failures()
    assert 1 <= one.engine.scheduler.counts.preemptions < 10, "a preempted search waits until another request has ended"
    for name, prompt in searches.items():
        check(answer(one, name), by_transformers(one, prompt, width=4, max_new_tokens=60))
    one.assert_expected(older, 300)


@pytest.mark.parametrize(("num_steps", "share"), [(0, False), (1, True), (3, False), (9, True)])
def test_an_aborted_search_leaves_nothing_running(harness: MakeHarness, num_steps: int, share: bool) -> None:
    one = harness(model_of(), share=share, step_tokens=60)
    one.ask("gone", prompt_of(100), 50, beam_width=4)
    one.step(num_steps)
    one.engine.receive(Abort(request_id="gone"))
    one.cache.check()
    assert not one.engine.scheduler.has_work
    assert one.cache.stats().num_sequences == 0
    one.run(at_most=3)  # steps under way are read, and nothing else
    assert held_by_sequences(one) == 0
    assert one.sent and not any(isinstance(message, Beams) for message in one.sent)
    found = searched(one, prompt_of(100), 10, beam_width=4)
    check(found, by_transformers(one, prompt_of(100), width=4, max_new_tokens=10))


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("part", ["forward", "fork"])
def test_a_step_or_a_fork_that_fails_ends_a_search_once(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, part: str, lookahead: int
) -> None:
    one = harness(model_of(), lookahead=lookahead)
    one.ask("a", prompt_of(9), 20, beam_width=4)
    one.step(4 if part == "forward" else 0)
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=DriverError("not now", call="map", code="TEST"))
        patch.setattr(*((one.runner, "forward") if part == "forward" else (KVCache, "fork")), fail)
        one.run()
    assert one.failures().keys() == {"a"}
    assert ("the step failed: not now" if part == "forward" else "no memory could be mapped") in one.failures()["a"]
    assert sum(getattr(message, "request_id", None) == "a" for message in one.sent) == 1
    assert held_by_sequences(one) == 0


def test_no_numbers_end_a_search_once_and_alone(harness: MakeHarness) -> None:
    one = harness(model_of())
    one.ask("bad", prompt_of(9), 20, beam_width=3)
    one.ask("good", prompt_of(9, 1), 20, beam_width=3)
    one.step(4)
    (bad,) = (request for request in one.engine.scheduler.running if request.ask.request_id == "bad")
    for sequence in one.engine.scheduler.sequences(bad):
        one.poison(sequence, 5)
    one.run()
    assert one.failures().keys() == {"bad"} and "not numbers" in one.failures()["bad"]
    assert sum(getattr(message, "request_id", None) == "bad" for message in one.sent) == 1
    check(answer(one, "good"), by_transformers(one, prompt_of(9, 1), width=3, max_new_tokens=20))
    assert held_by_sequences(one) == 0


@pytest.mark.parametrize("share", [False, True])
def test_windows_move_with_the_beams(harness: MakeHarness, share: bool) -> None:
    model = windowed(100, head_dim=32, max_position_embeddings=8192)
    one = harness(opinionated(model), share=share, step_tokens=512)
    prompts = {"within": prompt_of(60), "past": prompt_of(700)}
    one.serve(prompts, 80, beam_width=3)
    for name, prompt in prompts.items():
        check(answer(one, name), by_transformers(one, prompt, width=3, max_new_tokens=80))
    assert held_by_sequences(one) == 0


def test_a_vocabulary_smaller_than_the_search(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beams become more from step to step, after their sequences were forked; the last of them behind a page's end."""
    one = harness(wide_rows(vocab_size=2), share=True)
    monkeypatch.setattr(one.cache, "map_ahead", lambda *args, **options: 0)
    prompt = [token % 2 for token in prompt_of(255)]
    found = searched(one, prompt, 5, beam_width=8, length_penalty=0.0).beams
    every = {tokens: _log_probability(one, prompt, tokens) for tokens in itertools.product(range(2), repeat=5)}
    ranked = sorted(every, key=lambda tokens: every[tokens], reverse=True)
    assert tuple(found[0].token_ids) == ranked[0]
    assert [beam.score for beam in found] == pytest.approx([every[tuple(beam.token_ids)] for beam in found], rel=1e-4)
    assert len({tuple(beam.token_ids) for beam in found}) == 8


def _log_probability(harness: Harness, prompt: list[int], tokens: Sequence[int]) -> float:
    with torch.inference_mode(), harness.by_transformers():
        logits_TV = harness.model(torch.tensor([[*prompt, *tokens]])).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], dim=-1)
    return sum(float(row[token]) for row, token in zip(logprobs_TV, tokens, strict=True))


def test_a_search_of_one_new_token_needs_no_fork(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "fork", None)
    one = harness(model_of())
    found = searched(one, prompt_of(9), 1, beam_width=3)
    check(found, by_transformers(one, prompt_of(9), width=3, max_new_tokens=1))
    assert all(beam.finish_reason == "length" for beam in found.beams)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_search_is_preempted_whole_and_waits_for_the_request_that_did(harness: MakeHarness, lookahead: int) -> None:
    one = harness(wide_rows(), slots=4, share=True, lookahead=lookahead)
    one.ask("beams", prompt_of(20, 2), 12, beam_width=4, priority=1)
    one.step(6)
    one.ask("pressing", prompt_of(20), 25)
    one.step(2)
    assert running(one) == ["pressing"]
    one.run()
    assert one.engine.scheduler.counts.preemptions == 1
    assert one.tokens("pressing") == one.expected(prompt_of(20), 25)
    check(answer(one, "beams"), by_transformers(one, prompt_of(20, 2), width=4, max_new_tokens=12))


def test_beams_do_not_count_into_anothers_penalties(harness: MakeHarness) -> None:
    wanted = harness(slots=6, ours=True).said(prompt_of(12, 1), 30, **PENALTIES)
    one = harness(slots=6, ours=True, share=True)
    one.ask("plain", prompt_of(9, 5), 12)
    one.step()
    one.ask("A", prompt_of(10, 2), 6, **PENALTIES)
    one.ask("keeper", prompt_of(10, 7), 80)
    while "length" not in one.finish_reasons("plain"):
        one.step()
    one.step(5)
    one.ask("B", prompt_of(12, 1), 30, **PENALTIES)
    one.step()
    one.ask("beams", prompt_of(20, 3), 25, beam_width=4)
    one.run()
    assert one.tokens("B") == wanted


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_beams_beside_others(harness: MakeHarness, lookahead: int, share: bool) -> None:
    one = harness(share=share, lookahead=lookahead, slots=12, step_tokens=30, eos_ids=EOS)
    beams = {"wide": (prompt_of(50), 5), "narrow": (prompt_of(33, 1), 2), "late": (prompt_of(50)[:30], 3)}
    for name, (prompt, width) in beams.items():
        one.ask(name, prompt, 15, beam_width=width)
        one.step()
    ask_all(one, MIXTURE, every=3)
    assert not one.failures()
    assert answers(one) == read_at_once(share, False, one.kv_kind)
    found = {message.request_id: message.beams for message in one.sent if isinstance(message, Beams)}
    assert found.keys() == beams.keys()
    for name, (prompt, width) in beams.items():
        alone = harness(lookahead=0, eos_ids=EOS)
        alone.said(prompt, 15, beam_width=width)
        (message,) = (message for message in alone.sent if isinstance(message, Beams))
        assert [beam.token_ids for beam in found[name]] == [beam.token_ids for beam in message.beams]


def test_a_beam_search_gives_its_best_answers(directory: Path) -> None:
    with LLM(directory, device="cpu", kv_budget_bytes=64 * MIB) as llm:
        (found,) = llm.generate("abc", SamplingParams(beam_width=4, n=2, temperature=0.0, max_tokens=5))
    assert len(found.outputs) == 2 and found.error is None
    assert all(len(output.token_ids) == 5 and output.finish_reason == "length" for output in found.outputs)
    assert found.outputs[0].token_ids != found.outputs[1].token_ids


LAYERS = pytest.mark.parametrize("model", [conftest.wide_rows, windowed])
"""64 rows a page, of which the second attends to the last 30."""


def test_more_beams_than_slots_are_refused_with_what_works(harness: MakeHarness) -> None:
    one = harness(ours=True, slots=4)
    one.ask("beams", prompt_of(5), beam_width=5)
    reason = "A search of 5 beams needs as many slots, and this server has 4: lower beam_width to 4."
    assert one.failures() == {"beams": reason}


@LAYERS
def test_a_search_that_never_fits_is_refused(harness: MakeHarness, model: Callable[[], Any]) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512)
    one.ask("beams", prompt_of(20), 90, beam_width=4)
    assert bool(one.failures()) == (model is conftest.wide_rows), "a window of 30 rows needs a page or two"
    one.run()


def test_a_refusal_names_the_beams_and_what_would_work(harness: MakeHarness) -> None:
    one = harness(conftest.wide_rows(), budget_pages=5)
    one.ask("beams", prompt_of(64), 129, beam_width=3)
    reason = one.failures()["beams"]
    assert "129 new ones in each of 3 beams take at least 14.0 MiB" in reason and "fewer tokens or beams" in reason


@LAYERS
@pytest.mark.parametrize(("num_prompt", "num_new", "width"), [(64, 65, 4), (1, 128, 2)])
def test_a_search_that_fits_to_the_last_row_is_not_refused(
    harness: MakeHarness, model: Callable[[], Any], num_prompt: int, num_new: int, width: int
) -> None:
    one = harness(model(), ours=True, budget_pages=5, step_tokens=512)
    one.said(prompt_of(num_prompt), num_new, beam_width=width)
    assert not one.failures()


@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize("model", [conftest.wide_rows, windowed])
def test_over_quantised_rows_it_finds_what_transformers_finds(kind: Kind, model: Callable[[], Any]) -> None:
    with closing(Harness(model(), kv_kind=kind, ours=True, share=True, step_tokens=50, max_tokens=1024)) as one:
        prompt = prompt_of(150)
        one.said(prompt)
        check(searched(one, prompt, 8, beam_width=3), by_transformers(one, prompt, width=3, max_new_tokens=8))
