"""Which requests an engine can never serve: they are refused when they arrive, and the client is told why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.server.protocol import Generate
from vmmkv.units import counted, format_bytes

MAX_LIKELIEST: Final = 1024
"""At each place of a prompt. A step of 8192 such places takes 100 MiB of the device beside its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine can serve at most."""

    max_tokens: int
    """Of one request: its prompt and its answer."""
    max_sequences: int
    vocabulary_size: int
    eos_ids: frozenset[int]

    def suppressed_ids(self, ask: Generate) -> frozenset[int]:
        """Tokens that would end the answer, and are masked until it has `min_tokens`."""
        if not ask.min_tokens:
            return frozenset()
        return frozenset(token for token in (*ask.stop_token_ids, *self.eos_ids) if 0 <= token < self.vocabulary_size)

    def may_stop(self, ask: Generate) -> bool:
        """May a token end the answer early?"""
        return bool(ask.stop_token_ids) or (bool(self.eos_ids) and not ask.ignore_eos)


def why_refused(ask: Generate, limits: Limits, check: Callable[[Generate], None]) -> str | None:
    """What is wrong with a request, in words for the client; None if it can be served.

    `check` raises ValueError for sampling parameters that the model cannot serve.
    """
    num_prompt, num_new = len(ask.prompt), ask.max_new_tokens
    only_scores = ask.num_prompt_logprobs is not None and not ask.grammar
    if num_prompt < 1 or num_new < (0 if only_scores else 1) or num_prompt + num_new > limits.max_tokens:
        both = f"a prompt of {counted(num_prompt, 'token')} and {num_new} new ones"
        return f"{both}; both must be at least 1, and at most {limits.max_tokens} together"
    if ask.num_prompt_logprobs is not None and (not 0 <= ask.num_prompt_logprobs <= MAX_LIKELIEST or ask.beam_width):
        return f"log-probabilities of a prompt are for sampling, and of 0 to {MAX_LIKELIEST} of the likeliest tokens"
    if not 0 <= ask.beam_width <= limits.max_sequences:
        beams = f"a search of {counted(ask.beam_width, 'beam')}"
        return f"{beams}; each takes a slot, and there are {limits.max_sequences}: lower the number of beams"
    size = limits.vocabulary_size
    if not 0 <= min(ask.prompt) <= max(ask.prompt) < size:  # to embed another id would fail the whole step
        stranger = next(token for token in ask.prompt if not 0 <= token < size)
        return f"the prompt has token {stranger}; wanted ids of the model's vocabulary, 0 to {size - 1}"
    try:
        check(ask)
    except ValueError as error:
        return str(error)
    if ask.min_tokens and (reason := _min_tokens(ask, limits)):
        return reason
    return None


def _min_tokens(ask: Generate, limits: Limits) -> str | None:
    given = f"min_tokens={ask.min_tokens}"
    if not 0 < ask.min_tokens <= ask.max_new_tokens:
        return f"{given} of an answer of {ask.max_new_tokens} new tokens at most; wanted 0 to {ask.max_new_tokens}"
    if ask.beam_width:
        return f"{given} with a beam search: the search ends where its beams do; leave one of them out"
    if ask.grammar:
        return f"{given} with a grammar: the answer ends where the grammar does; leave one of them out"
    if len(limits.suppressed_ids(ask)) >= limits.vocabulary_size:
        return f"{given} leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids"
    return None


def least_bytes(layout: KVLayout, num_prompt: int, num_rows: int, *, num_beams: int, attaches: bool) -> int:
    """Bytes of the rows that a request has at the least when `num_rows` follow its prompt, in each of its beams.

    The beams share the prompt's rows. A prompt that is computed has all its rows at once; one that `attaches` may need no more
    of them than its windows still see. Pages that are not full, and rows that leave a window late, come on top.
    """
    num_tokens = num_prompt + num_rows
    size_bytes = 0
    for group in layout.groups:
        start = layout.start_for(group, num_tokens)
        num_own = num_tokens - max(start, num_prompt)
        size_bytes += (max(0, num_prompt - start) + num_beams * num_own) * group.row_bytes
    return size_bytes if attaches else max(size_bytes, num_prompt * layout.row_bytes)


def why_never_fits(ask: Generate, limits: Limits, layout: KVLayout, budget_bytes: int, *, attaches: bool) -> str | None:
    """What is wrong with a request whose least memory exceeds the budget; None if it may fit.

    Prompts with log-probabilities are computed as a whole. A request that may stop early counts as if it stopped as soon as it
    may. The last token has no row: nothing attends to it.
    """
    may_stop, attaches = limits.may_stop(ask), attaches and ask.num_prompt_logprobs is None
    num_rows = max(0, min(ask.min_tokens, ask.max_new_tokens - 1) if may_stop else ask.max_new_tokens - 1)
    num_beams = max(1, min(ask.beam_width, limits.vocabulary_size))  # of fewer tokens come fewer live beams
    wanted_bytes = least_bytes(layout, len(ask.prompt), num_rows, num_beams=num_beams, attaches=attaches)
    if wanted_bytes <= budget_bytes:
        return None
    given = f"a prompt of {counted(len(ask.prompt), 'token')}"
    if num_rows:
        given += f" and {ask.min_tokens if may_stop else ask.max_new_tokens} new ones" + (
            f" in each of {ask.beam_width} beams" if ask.beam_width else ""
        )
    num_tokens = layout.tokens_in(budget_bytes // PAGE_BYTES, sliding=False)
    fewer = "ask for fewer tokens or beams" if ask.beam_width > 1 else "ask for fewer tokens"
    return (
        f"this request can never fit: {given} take at least {format_bytes(wanted_bytes)}, and the whole KV budget is "
        f"{format_bytes(budget_bytes)}, {counted(num_tokens, 'token')} of one sequence: {fewer}, or raise the budget"
    )
