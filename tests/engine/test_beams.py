"""The search finds what transformers' finds, and with beams enough for every sequence, the best there is."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.conftest import prompt_of, tiny_model
from vmmkv.server.engine.beams import BeamSearch, Candidate
from vmmkv.server.engine.sampler import likeliest
from vmmkv.server.protocol import Beam

Model = Callable[[Sequence[int]], list[Candidate]]
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


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """Not as indifferent as random weights are, so that stop tokens have their turn."""
    model = tiny_model(3)
    with torch.no_grad():
        model.lm_head.weight *= 12.0
    return model


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("num_stops", [0, 1, 5])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_it_finds_what_transformers_finds(llama: LlamaForCausalLM, width: int, num_stops: int, length_penalty: float) -> None:
    prompt = prompt_of(11, 5)

    @torch.inference_mode()
    def model(tokens: Sequence[int]) -> list[Candidate]:
        logprobs, ids = likeliest(llama(torch.tensor([[*prompt, *tokens]])).logits[:, -1], llama.config.vocab_size)
        return [Candidate(*pair) for pair in zip(logprobs[0].tolist(), ids[0].tolist(), strict=True)]

    # Tokens that the search comes by: a stop in reach of some beams and not of others.
    seen = dict.fromkeys(token for beam in search(model, width=8, max_new_tokens=10) for token in beam.token_ids[2:])
    stops = list(seen)[:num_stops]
    found = search(model, width=width, max_new_tokens=10, stop_ids=stops, length_penalty=length_penalty)
    ids = torch.tensor([prompt])
    out = llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        eos_token_id=stops or None,
        pad_token_id=0,
        do_sample=False,
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    wanted = [
        list(itertools.takewhile(lambda token: token not in stops, row)) for row in out.sequences[:, len(prompt) :].tolist()
    ]
    assert [beam.token_ids for beam in found] == wanted
    assert [beam.score for beam in found] == pytest.approx(out.sequences_scores.tolist(), rel=1e-4)
    if num_stops and length_penalty <= 1:  # above, the longest win here
        assert "stop" in {beam.finish_reason for beam in found}


def random_model(seed: int, vocabulary: int) -> Model:
    """Any log-probabilities, a function of the tokens alone."""

    def model(tokens: Sequence[int]) -> list[Candidate]:
        weights = random.Random(f"{seed} {list(tokens)}")
        chances = [weights.random() ** 3 + 1e-6 for _ in range(vocabulary)]
        logprobs = [Candidate(math.log(chance / sum(chances)), token) for token, chance in enumerate(chances)]
        return sorted(logprobs, reverse=True)

    return model


@pytest.mark.parametrize("seed", range(6))
def test_beams_for_every_sequence_find_the_best_there_is(seed: int) -> None:
    model, stop, longest = random_model(seed, 3), 2, 4

    def endings(tokens: tuple[int, ...], log_probability: float) -> dict[tuple[int, ...], float]:
        ended = {}
        for chance, token in model(tokens):
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


def test_one_beam_is_greedy() -> None:
    model = random_model(7, 20)
    tokens: list[int] = []
    for _ in range(12):
        tokens.append(model(tokens)[0].token)
    assert [beam.token_ids for beam in search(model, width=1, max_new_tokens=12)] == [tokens]


def test_the_candidates_it_asks_for_are_enough() -> None:
    for seed in range(30):
        options = {"width": 4, "max_new_tokens": 8, "stop_ids": [0, 1, 2], "length_penalty": 0.5}
        whole = random_model(seed, 25)
        few = BeamSearch(width=4, max_new_tokens=8, stop_ids=frozenset([0, 1, 2])).num_candidates
        assert few == 7
        assert search(whole, **options) == search(lambda tokens, whole=whole, few=few: whole(tokens)[:few], **options)


def test_it_stops_when_nothing_live_can_win() -> None:
    one = BeamSearch(width=1, max_new_tokens=1000, stop_ids=frozenset([9]))
    assert one.advance([[Candidate(-0.1, 9), Candidate(-2.0, 1)]]) == []
    assert one.done
    assert one.best(5) == [Beam(token_ids=[], score=-0.1, finish_reason="stop")]


def test_a_vocabulary_smaller_than_the_search_gives_what_there_is() -> None:
    found = search(random_model(0, 2), width=8, max_new_tokens=2, length_penalty=0.0)
    assert sorted(beam.token_ids for beam in found) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_long_beams_go_as_they_came() -> None:
    one = BeamSearch(width=2, max_new_tokens=50_000)
    while not one.done:
        one.advance([[Candidate(-0.5, 3), Candidate(-1.0, 4), Candidate(-1.5, 5)]] * len(one.live))
    assert one.best(1)[0].token_ids == [3] * 50_000
    del one  # without recursing once a token


@pytest.mark.parametrize("changed", [{"width": 0}, {"max_new_tokens": 0}])
def test_no_beams_and_no_tokens_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BeamSearch(**({"width": 2, "max_new_tokens": 2} | changed))
