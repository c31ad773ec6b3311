"""What a request must be for this engine, whatever memory there is: else it never starts, and hears why."""

from typing import Final

from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.server.engine.runner import Runner
from vmmkv.server.protocol import Generate
from vmmkv.units import counted, format_bytes

# -------- refusals

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


# -------- capacity
# Whether a request could run if it had the whole memory for itself: who could not is refused before it waits for it.


def least_bytes(layout: KVLayout, num_prompt: int, num_rows: int, *, num_beams: int, attaches: bool) -> int:
    """Bytes of the rows that a request has at the least when `num_rows` follow its prompt, in each of its beams.

    The prompt's are there once for all beams, those behind it for each (see BeamGroup). A prompt that is computed has all its
    rows at once; one that `attaches` may know all but what its windows still see. Whatever the memory, it takes no less: pages
    that are not full come on top, and rows that windows pass only after a while.
    """
    num_tokens = num_prompt + num_rows
    size_bytes = 0
    for group in layout.groups:
        start = layout.start_for(group, num_tokens)
        num_own = num_tokens - max(start, num_prompt)
        size_bytes += (max(0, num_prompt - start) + num_beams * num_own) * group.row_bytes
    return size_bytes if attaches else max(size_bytes, num_prompt * layout.row_bytes)


def why_never_fits(
    layout: KVLayout, budget_bytes: int, ask: Generate, *, may_stop: bool, attaches: bool, vocabulary_size: int
) -> str | None:
    """What is wrong with a request whose least memory is more than the budget; None if it may fit.

    Who asks how likely its prompt is computes all of it. Who may stop before its last token counts as if it stopped as soon as
    it may. The last token has no row: nothing attends to it.
    """
    attaches = attaches and ask.num_prompt_logprobs is None
    num_rows = max(0, min(ask.min_tokens, ask.max_new_tokens - 1) if may_stop else ask.max_new_tokens - 1)
    num_beams = max(1, min(ask.beam_width, vocabulary_size))  # of fewer tokens come fewer live beams
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
