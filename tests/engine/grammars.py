"""Grammars for engines with a tiny model, whose tokens are bytes."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.attending import attending_by
from tests.engine.conftest import Harness, tiny_model
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.engine.constraints import Constraints
from vmmkv.server.grammar.asked import Grammar, of_schema
from vmmkv.server.grammar.compiling import Compilation
from vmmkv.server.grammar.vocabulary import Vocabulary

SIZE = 263
"""Of the model's logits: more than the tokenizer has."""
BIAS = dict.fromkeys(token_ids('"]}'), 4.0)
"""So that strings and lists of a model that knows nothing end."""


@functools.cache
def vocabulary() -> Vocabulary:
    tokenizer = byte_tokenizer()
    return Vocabulary(tokenizer, SIZE, [int(tokenizer.eos_token_id)])


@functools.cache
def compiled(grammar: Grammar) -> bytes:
    return Compilation(vocabulary()).compile(grammar.kind, grammar.source)


def of(schema: Any) -> bytes:
    return compiled(of_schema(schema))


def following(harness: Callable[..., Harness], model: Any = None, **options: Any) -> Harness:
    """An engine that follows grammars."""
    model = tiny_model(vocab_size=SIZE) if model is None else model
    one = harness(model, eos_ids=frozenset([int(byte_tokenizer().eos_token_id)]), **{"ours": True, **options})
    one.engine.follow_grammars(Constraints(vocabulary))
    return one


def text(one: Harness, name: str) -> str:
    return str(vocabulary().rust.decode(one.tokens(name)))


def assert_logprobs_are_the_models_own(one: Harness, name: str, prompt: list[int], within: float) -> None:
    """Of the tokens that were answered, by transformers, with no grammar."""
    ids = torch.tensor([[*prompt, *one.tokens(name)]], device=one.cache.device)
    with attending_by(one.model, "sdpa"), torch.no_grad():
        own_TV = torch.log_softmax(one.model(ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
    own_T = own_TV.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    ours = one.logprobs(name)[: len(own_T)]
    assert len(ours) == len(own_T) > 0
    assert max(abs(a - b) for a, b in zip(ours, own_T, strict=True)) < within
