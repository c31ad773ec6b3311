"""Whether a request could run if it had the whole memory for itself: who could not is refused before it waits for it."""

from vmmkv import PAGE_BYTES, KVLayout
from vmmkv.server.protocol import Generate
from vmmkv.units import counted, format_bytes


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
