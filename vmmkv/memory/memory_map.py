"""Runs of mapped memory under slots: to draw the address space."""

from collections.abc import Mapping, Sequence

from vmmkv.memory.address_space import Span
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.memory.states import MappedRun, RunState, SlotMap, SlotState
from vmmkv.units import PAGE_BYTES

_STATES = tuple(SlotState)
_new = tuple.__new__
"""Constructor of a named tuple: a third of the time that calling its class takes, and there are three for each slot."""


def slot_maps(memory: SlotMemory, parked: Mapping[int, int], slots: Sequence[int]) -> list[SlotMap]:
    """Look at some slots; `parked` are the tokens of those that are parked. The pool's lock is held."""
    table = memory.table
    states, lengths = table.states[slots].tolist(), table.lengths[slots].tolist()
    arenas = [(arena.spans, arena.group.row_bytes) for arena in memory.arenas]
    found: list[SlotMap] = []
    for slot, state, num_tokens in zip(slots, states, lengths, strict=True):
        if state == SlotState.LIVE:
            # Rounded up: the page that the last row ends in is written.
            groups = [
                _runs(spans[slot], RunState.LIVE, -(num_tokens * row_bytes // -PAGE_BYTES)) for spans, row_bytes in arenas
            ]
        else:
            groups = [_runs(spans[slot], RunState.PARKED, spans[slot].end_page) for spans, _ in arenas]
            num_tokens = parked.get(slot, 0)
        found.append(_new(SlotMap, (slot, _STATES[state], num_tokens, groups)))
    return found


def _runs(span: Span, state: RunState, written_end_page: int) -> list[MappedRun]:
    """Live extents that begin at or past `written_end_page` are ahead. One pass, that does little for each extent."""
    runs: list[MappedRun] = []
    mappings, page, end_page = span.mappings, span.first_page, span.end_page
    first, num_live, num_holders, num_users, handle = page, 0, 0, -1, 0
    while page < end_page:
        extent = mappings[page].extent
        is_ahead = page >= written_end_page
        if extent.holders != num_holders or extent.users != num_users or is_ahead:
            if page > first:
                runs.append(_new(MappedRun, (first, page - first, state, num_holders, handle)))
                first = page
            num_holders, num_users, handle = extent.holders, extent.users, extent.handle
            if is_ahead:
                state, written_end_page = RunState.AHEAD, end_page
        num_live += 1
        page += extent.num_pages
    if page > first:
        runs.append(_new(MappedRun, (first, page - first, state, num_holders, handle)))
    if len(mappings) > num_live:
        runs += _pending(span)
    return runs


def _pending(span: Span) -> list[MappedRun]:
    runs: list[MappedRun] = []
    for page in sorted(span.mappings):
        mapping = span.mappings[page]
        if mapping.fence is None:
            continue
        extent, last = mapping.extent, runs[-1] if runs else None
        if last is not None and last.page + last.num_pages == page and last.num_holders == extent.holders:
            runs[-1] = last._replace(num_pages=last.num_pages + extent.num_pages)
        else:
            runs.append(MappedRun(page, extent.num_pages, RunState.PENDING_RECLAIM, extent.holders, extent.handle))
    return runs
