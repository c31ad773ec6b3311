"""What a request must be for this engine, whatever memory there is: else it never starts, and hears why."""

from typing import Final

from vmmkv.server.engine.runner import Runner
from vmmkv.server.protocol import Generate
from vmmkv.units import counted

MAX_LIKELIEST: Final = 1024
"""At each place of a prompt: a step of 8192 such places takes 100 MiB of the device, beside its logits."""


def why_refused(ask: Generate, runner: Runner, *, max_tokens: int, max_sequences: int) -> str | None:
    """What is wrong with a request, in words for whoever asked; None if it can be served."""
    return (
        _lengths(ask, max_tokens)
        or _prompt_logprobs(ask)
        or _beams(ask, max_sequences)
        or _prompt(ask, runner.model.vocabulary_size)
        or _sampling(ask, runner)
    )


def why_no_floor(ask: Generate, *, leaves_some: bool) -> str | None:
    """What is wrong with a request for `min_tokens`, if anything; does what is withheld until then leave any token?"""
    given = f"min_tokens={ask.min_tokens}"
    if not 0 < ask.min_tokens <= ask.max_new_tokens:
        return f"{given} of an answer of {ask.max_new_tokens} new tokens at most; wanted 0 to {ask.max_new_tokens}"
    if ask.beam_width:
        return f"{given} with a beam search: the search ends where its beams do; leave one of them out"
    if ask.grammar:
        return f"{given} with a grammar: the answer ends where the grammar does; leave one of them out"
    if not leaves_some:
        return f"{given} leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids"
    return None


def _lengths(ask: Generate, max_tokens: int) -> str | None:
    num_prompt, num_new = len(ask.prompt), ask.max_new_tokens
    only_scores = ask.num_prompt_logprobs is not None and not ask.grammar
    if num_prompt >= 1 and num_new >= (0 if only_scores else 1) and num_prompt + num_new <= max_tokens:
        return None
    both = f"a prompt of {counted(num_prompt, 'token')} and {num_new} new ones"
    return f"{both}; both must be at least 1, and at most {max_tokens} together"


def _prompt_logprobs(ask: Generate) -> str | None:
    if ask.num_prompt_logprobs is None or (0 <= ask.num_prompt_logprobs <= MAX_LIKELIEST and not ask.beam_width):
        return None
    return f"log-probabilities of a prompt are for sampling, and of 0 to {MAX_LIKELIEST} of the likeliest tokens"


def _beams(ask: Generate, max_sequences: int) -> str | None:
    if 0 <= ask.beam_width <= max_sequences:
        return None
    beams = f"a search of {counted(ask.beam_width, 'beam')}"
    return f"{beams}; each takes a slot, and there are {max_sequences}: lower the number of beams"


def _prompt(ask: Generate, size: int) -> str | None:
    if 0 <= min(ask.prompt) <= max(ask.prompt) < size:  # to look a stranger up would fail the whole step
        return None
    stranger = next(token for token in ask.prompt if not 0 <= token < size)
    return f"the prompt has token {stranger}; wanted ids of the model's vocabulary, 0 to {size - 1}"


def _sampling(ask: Generate, runner: Runner) -> str | None:
    try:
        runner.check(ask)
    except ValueError as error:
        return str(error)
    return None
