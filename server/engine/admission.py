"""Which requests an engine can never serve: they are refused when they arrive, and the client is told why."""

from collections.abc import Callable

from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.server.protocol import Generate
from vmmkv.server.sampling_params import Limits
from vmmkv.units import counted, format_bytes


def suppressed_ids(ask: Generate, limits: Limits, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that would end the answer, and are masked until it has `min_tokens`."""
    if not ask.params.min_tokens:
        return frozenset()
    return frozenset(token for token in (*ask.params.stop_token_ids, *eos_ids) if 0 <= token < limits.vocabulary_size)


def why_refused(ask: Generate, limits: Limits, eos_ids: frozenset[int], check: Callable[[Generate], None]) -> str | None:
    """What is wrong with a request, in words for the client; None if it can be served.

    `check` raises ValueError for sampling parameters that the model cannot serve.
    """
    try:
        limits.check(ask.prompt, ask.params, follows_grammar=bool(ask.grammar))
        check(ask)
    except ValueError as error:
        return str(error)
    if len(suppressed_ids(ask, limits, eos_ids)) >= limits.vocabulary_size:
        given = f"min_tokens={ask.params.min_tokens}"
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


def why_never_fits(
    ask: Generate, limits: Limits, eos_ids: frozenset[int], layout: KVLayout, budget_bytes: int, *, attaches: bool
) -> str | None:
    """What is wrong with a request whose least memory exceeds the budget; None if it may fit.

    Prompts with log-probabilities are computed as a whole. A request that may stop early counts as if it stopped as soon as it
    may. The last token has no row: nothing attends to it.
    """
    may_stop = bool(ask.params.stop_token_ids) or (bool(eos_ids) and not ask.params.ignore_eos)
    attaches = attaches and ask.params.prompt_logprobs is None
    num_rows = max(0, min(ask.params.min_tokens, ask.params.max_tokens - 1) if may_stop else ask.params.max_tokens - 1)
    num_beams = max(1, min(ask.params.beam_width, limits.vocabulary_size))  # of fewer tokens come fewer live beams
    wanted_bytes = least_bytes(layout, len(ask.prompt), num_rows, num_beams=num_beams, attaches=attaches)
    if wanted_bytes <= budget_bytes:
        return None
    given = f"a prompt of {counted(len(ask.prompt), 'token')}"
    if num_rows:
        given += f" and {ask.params.min_tokens if may_stop else ask.params.max_tokens} new ones" + (
            f" in each of {ask.params.beam_width} beams" if ask.params.beam_width else ""
        )
    num_tokens = layout.tokens_in(budget_bytes // PAGE_BYTES, sliding=False)
    fewer = "ask for fewer tokens or beams" if ask.params.beam_width > 1 else "ask for fewer tokens"
    return (
        f"this request can never fit: {given} take at least {format_bytes(wanted_bytes)}, and the whole KV budget is "
        f"{format_bytes(budget_bytes)}, {counted(num_tokens, 'token')} of one sequence: {fewer}, or raise the budget"
    )
