"""The part `map`: which memory is whose at one moment, of vmmkv and of blocks, after the same requests with shared prefixes.

It is written as JSON, for somebody to draw. Intervals are half-open, `request` is an index of `requests`:

    format 1; commit, date (of the run that made it); shape, workload, step; page_bytes, row_bytes, block_rows, budget_bytes
    prefix_tokens    of each group, how many tokens its prompts share
    requests         {group (None: shares nothing), num_prompt, num_out}
    vmmkv            budget_pages, held_pages, used_pages, free_pages (held by nobody), slot_pages (of one slot's addresses)
      slots          {slot, state (live, parked, closing, free), request, rows, extents}
        extents      {extent, start_page, num_pages, state, holders}, in the order of addresses
      tree           {extent, num_pages, holders}: what the prefix tree holds and no slot maps
    paged            num_blocks, block_bytes
      blocks         {block, state (free, live, cached), holders, slots}, all of them in physical order
      slots          {slot, request, rows, blocks}, of those that run, in the order of their tables

The same `extent` under several slots is one piece of memory at several addresses. It is `live` if the running sequence has a
row in it, `ahead` if it lies wholly past its rows, `parked`, or `retiring` until the next pump. Its holders are mappings and
the tree; a block's, tables and the tree. Blocks that the tree alone holds are `cached`.

Rows are copied where prompts part, so there is memory behind the addresses: the host's, for neither shows the device.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from bench import workloads
from bench.baselines.blocks import BLOCK_ROWS
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.paged import Paged
from bench.prefix.systems import System
from bench.settings import Shape
from bench.timing import WrongNumbers
from bench.waste.context import VOCABULARY, Context
from bench.waste.memories import open_paged, paged_blocks
from bench.waste.sizes import SLACK_SHARE
from bench.waste.slots import PAGE_US
from bench.workloads import Ask
from vmmkv.memory.address_space import Mapping
from vmmkv.memory.memory_map import SlotState
from vmmkv.memory.pool import Extent
from vmmkv.units import MIB, PAGE_BYTES, ceil_div

NAME: Final = "memory_map.json"

_MAX_TOKENS: Final = 1024
_SPARE_SLOTS: Final = 6
"""More than sequences that run: for parked ones."""
_STEP_US: Final = 3600.0
"""A decode step of few sequences: the weights of Llama-3.1-8B at 4.5 TB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    asks: tuple[Ask, ...]
    groups: tuple[int | None, ...]
    text: str


class _Replay:
    """Steps of one system: a row for each that runs, and one newcomer at most, whose prompt others can share from then on."""

    def __init__(self, system: System, asks: tuple[Ask, ...], most_running: int, *, seed: int) -> None:
        self.system = system
        self.requests: dict[int, int] = {}
        """By slot, whose rows it has: the request that runs in it, or ran last."""
        self.rows: dict[int, int] = {}
        """By slot, of those that run."""
        self._asks, self._most = asks, most_running
        self._num_begun = 0
        self._rng = np.random.default_rng(seed)

    def step(self) -> bool:
        """Has anybody ended in it?"""
        self.system.map_ahead(math.inf, SLACK_SHARE * _STEP_US)
        slots = np.array(sorted(self.rows), np.int64)
        lengths = np.array([self.rows[slot] for slot in slots.tolist()], np.int64)
        self.system.reserve(slots, lengths + 1)
        self.system.advance(slots, np.ones_like(lengths))
        over = []
        for slot in slots.tolist():
            self.rows[slot] += 1
            ask = self._asks[self.requests[slot]]
            if self.rows[slot] == len(ask.prompt) + ask.num_out - 1:
                over.append(slot)
        for slot in over:
            self._end(slot)
        if len(self.rows) < self._most:
            self._begin()
        return bool(over)

    def _begin(self) -> None:
        ask = self._asks[self._num_begun]
        attached = self.system.attach(ask.prompt, len(ask.prompt) + ask.num_out)
        slots, num_prompt = np.array([attached.slot]), len(ask.prompt)
        self.system.reserve(slots, np.array([num_prompt]))
        self.system.advance(slots, np.array([num_prompt - attached.num_tokens]))
        self.system.insert(attached.slot, ask.prompt)
        self.requests[attached.slot], self.rows[attached.slot] = self._num_begun, num_prompt
        self._num_begun += 1

    def _end(self, slot: int) -> None:
        """What it answered was never computed: tokens at random, for the tree."""
        ask, num_rows = self._asks[self.requests[slot]], self.rows.pop(slot)
        answer = self._rng.integers(0, VOCABULARY, num_rows - len(ask.prompt), dtype=np.int32)
        self.system.finish(slot, np.concatenate((ask.prompt, answer)))


def num_steps(context: Context) -> int:
    """Of the part's progress."""
    return 1


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Both systems, checks, the file, and a row of each."""
    shape = context.shapes[0]
    begin(f"map, {shape.name}")
    trace = _trace(context)
    name = f"{shape.name} map: {trace.text}"
    with context.guarded(name):
        made_by = context.report.file.provenance
        found = {"commit": made_by.commit, "date": made_by.date} | _both(context, shape, trace)
        path = context.report.file.folder / NAME
        path.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
        context.report.say(f"map: {path.name} has step {found['step']} of {name}")
        used = Counter(
            {
                "vmmkv": found["vmmkv"]["used_pages"] * PAGE_BYTES,
                f"paged {BLOCK_ROWS}": sum(block["state"] == "live" for block in found["paged"]["blocks"])
                * found["paged"]["block_bytes"],
            }
        )
        for system, used_bytes in used.items():
            context.add_figure(name, system, "memory, used", "MiB", used_bytes / MIB, 1)


def _trace(context: Context) -> _Trace:
    """Two groups of prompts that share a prefix, and some that share nothing, mixed."""
    sizes, seed = context.sizes, context.settings.seed
    # Each step lets in one at most.
    count = sizes.map_steps + sizes.map_running
    common: dict[str, Any] = {"vocabulary": VOCABULARY, "count": count, "max_tokens": _MAX_TOKENS}
    pools = [
        workloads.shared_prefix(seed=seed + group, prefix_tokens=prefix, own=(8, 80), out=(16, 80), **common)
        for group, prefix in enumerate(sizes.map_prefixes)
    ]
    pools.append(workloads.uniform(seed=seed, prompt=(16, 160), out=(16, 80), **common))
    which = np.random.default_rng(seed).choice(3, count, p=(0.45, 0.35, 0.2)).tolist()
    asks = tuple(pools[group].asks[index] for index, group in enumerate(which))
    text = (
        f"{sizes.map_running} at once, of which {sizes.map_prefixes[0]} or {sizes.map_prefixes[1]} tokens are shared, or none"
    )
    return _Trace(asks=asks, groups=tuple(None if group == 2 else group for group in which), text=text)


def _both(context: Context, shape: Shape, trace: _Trace) -> dict[str, Any]:
    sizes, row_bytes = context.sizes, shape.layout.row_bytes
    slots = sizes.map_running + _SPARE_SLOTS
    budget_bytes = sizes.map_pages * PAGE_BYTES
    found: dict[str, Any] = {
        "format": 1,
        "shape": shape.name,
        "workload": trace.text,
        "page_bytes": PAGE_BYTES,
        "row_bytes": row_bytes,
        "block_rows": BLOCK_ROWS,
        "budget_bytes": budget_bytes,
        "prefix_tokens": list(sizes.map_prefixes),
        "requests": [
            {"group": group, "num_prompt": len(ask.prompt), "num_out": ask.num_out}
            for group, ask in zip(trace.groups, trace.asks, strict=True)
        ],
    }
    vmmkv = Vmmkv(shape, torch.device("cpu"), Sharing.CHOOSER, num_pages=sizes.map_pages, slots=slots, max_tokens=_MAX_TOKENS)
    try:
        replay = _Replay(vmmkv, trace.asks, sizes.map_running, seed=context.settings.seed)
        found["step"] = _run_until_one_ends(replay, sizes.map_steps, lambda: _prepare(vmmkv))
        vmmkv.cache.check()
        found["vmmkv"] = _map_of_slots(vmmkv, replay)
    finally:
        vmmkv.close()
    block_bytes = BLOCK_ROWS * row_bytes
    paged = open_paged(num_blocks=budget_bytes // block_bytes, slots=slots, max_tokens=_MAX_TOKENS)
    replay = _Replay(paged, trace.asks, sizes.map_running, seed=context.settings.seed)
    if _run_until_one_ends(replay, sizes.map_steps, lambda: None) != found["step"]:
        raise WrongNumbers("both systems are given the same requests, and somebody ended at another step")
    found["paged"] = {"block_bytes": block_bytes} | _map_of_blocks(paged, replay)
    paged.close()
    return found


def _prepare(vmmkv: Vmmkv) -> None:
    """As the engine, a slot is kept free for who comes. The mapper goes by a GPU's times, not by the host's."""
    vmmkv.prefix_cache.free_slots(1)
    vmmkv.cache.memory.mapper.map_us = PAGE_US


def _run_until_one_ends(replay: _Replay, num_steps: int, prepare: Callable[[], None]) -> int:
    """At least so many steps, and then until one ends: the most to see is where something retires. The number of steps."""
    step = 0
    while True:
        step += 1
        has_ended = replay.step()
        prepare()
        if step >= num_steps and has_ended:
            return step


def _map_of_slots(vmmkv: Vmmkv, replay: _Replay) -> dict[str, Any]:
    """Raises: WrongNumbers if holders or pages are not those that the pool counts."""
    memory, pool = vmmkv.cache.memory, vmmkv.pool
    (arena,) = memory.arenas
    row_bytes = arena.group.row_bytes
    parked = {each.slot: each.length for each in vmmkv.cache.parked()}
    ids: dict[Extent, int] = {}
    holders: Counter[Extent] = Counter()
    slots = []
    for span in arena.spans[1:]:
        slot, state = span.slot, memory.table.state(span.slot)
        num_rows = replay.rows.get(slot, 0) if state is SlotState.LIVE else parked.get(slot, 0)

        def state_of(mapping: Mapping, state: SlotState = state, num_rows: int = num_rows) -> str:
            if mapping.fence is not None:
                return "retiring"
            if state is SlotState.PARKED:
                return "parked"
            return "live" if mapping.page * PAGE_BYTES < num_rows * row_bytes else "ahead"

        mappings = [span.mappings[page] for page in sorted(span.mappings)]
        holders.update(mapping.extent for mapping in mappings)
        extents = [
            {
                "extent": ids.setdefault(mapping.extent, len(ids)),
                "start_page": mapping.page,
                "num_pages": mapping.extent.num_pages,
                "state": state_of(mapping),
                "holders": mapping.extent.holders,
            }
            for mapping in mappings
        ]
        has_rows = state in (SlotState.LIVE, SlotState.PARKED)
        request = replay.requests.get(slot) if has_rows else None
        slots.append({"slot": slot, "state": state.name.lower(), "request": request, "rows": num_rows, "extents": extents})
    in_tree = vmmkv.prefix_cache._index.holders()
    unmapped = [extent for extent in in_tree if extent not in holders]
    holders.update(in_tree)
    if any(extent.holders != count for extent, count in holders.items()):
        raise WrongNumbers("map: an extent has not as many holders as slots and the tree hold it")
    if sum(extent.size_bytes for extent in holders) != pool.held_bytes:
        raise WrongNumbers(f"map: the pool holds {pool.held_bytes} bytes, and they are not those in slots and the tree")
    tree = [
        {"extent": ids.setdefault(extent, len(ids)), "num_pages": extent.num_pages, "holders": extent.holders}
        for extent in unmapped
    ]
    return {
        "budget_pages": pool.budget_bytes // PAGE_BYTES,
        "held_pages": pool.held_bytes // PAGE_BYTES,
        "used_pages": pool.used_bytes // PAGE_BYTES,
        "free_pages": (pool.budget_bytes - pool.held_bytes) // PAGE_BYTES,
        "slot_pages": arena.slot_bytes // PAGE_BYTES,
        "slots": slots,
        "tree": tree,
    }


def _map_of_blocks(paged: Paged, replay: _Replay) -> dict[str, Any]:
    """Raises: WrongNumbers if references are not those that the pool counts."""
    pool = paged._pool
    slots = []
    used_by: dict[int, list[int]] = {}
    for slot, num_rows in sorted(replay.rows.items()):
        blocks = paged.tables_SC[slot, : ceil_div(num_rows, BLOCK_ROWS)].tolist()
        slots.append({"slot": slot, "request": replay.requests[slot], "rows": num_rows, "blocks": blocks})
        for block in blocks:
            used_by.setdefault(block, []).append(slot)
    in_tree = Counter(piece.value for node in pool.tree.nodes() for piece in node.pieces)
    blocks = []
    for block, num_refs in enumerate(pool.num_refs.tolist()):
        users = used_by.get(block, [])
        if num_refs != len(users) + in_tree[block]:
            raise WrongNumbers(f"map: block {block} has {num_refs} references, {len(users)} of tables")
        state = "live" if users else "cached" if num_refs else "free"
        blocks.append({"block": block, "state": state, "holders": num_refs, "slots": users})
    if sum(block["state"] != "free" for block in blocks) != paged_blocks(paged):
        raise WrongNumbers(f"map: {paged_blocks(paged)} blocks are held, and they are not those of tables and the tree")
    return {"num_blocks": len(blocks), "blocks": blocks, "slots": slots}
