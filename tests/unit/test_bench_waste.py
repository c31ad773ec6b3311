"""The waste suite: three allocators under one loop, counts that agree, no report of what is wrong, the map, and the bars."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import run, workloads
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers, exact
from bench.waste import PARTS, check, memory_map
from bench.waste.bars import bars
from bench.waste.context import Context
from bench.waste.loop import Loop, Outcome, Request, simulate
from bench.waste.measures import ADMITTED, WASTE
from bench.waste.memories import Memory, Static, Tables
from bench.waste.sizes import MAX_TOKENS, SLACK_SHARE, Sizes, shapes_of
from bench.waste.slots import PAGE_US, Slots
from bench.workloads import Workload
from vmmkv.errors import OutOfPages
from vmmkv.units import MIB, PAGE_BYTES, ceil_div

LLAMA = SHAPES["llama-3.1-8b"]
QWEN = SHAPES["qwen3-0.6b"]
CPU = torch.device("cpu")
QUICK = Settings(device=CPU, shape=LLAMA, quick=True)
SIZES = replace(Sizes.of(QUICK), budget_bytes=1024 * MIB, slots=160, warm_steps=60, steps=120)

MAKERS: dict[str, Callable[[int], Memory]] = {
    "vmmkv": lambda budget_bytes: Slots(LLAMA, budget_bytes, slots=160),
    "paged": lambda budget_bytes: Tables(LLAMA, budget_bytes, slots=160),
    "static": lambda budget_bytes: Static(LLAMA, budget_bytes),
}
every_system = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
growing = pytest.mark.parametrize("make", [MAKERS["vmmkv"], MAKERS["paged"]], ids=["vmmkv", "paged"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def asking(prompt: tuple[int, int] = (20, 300), out: tuple[int, int] = (1, 120)) -> Workload:
    return workloads.uniform(seed=1, vocabulary=100, count=200, max_tokens=MAX_TOKENS, prompt=prompt, out=out)


def outcome_of(make: Callable[[int], Memory], workload: Workload | None = None) -> Outcome:
    return simulate(make(SIZES.budget_bytes), workload or asking(), LLAMA, SIZES, seed=0)


@every_system
def test_counts_agree_in_every_step_and_nothing_is_left_at_the_end(make: Callable[[int], Memory]) -> None:
    memory = make(SIZES.budget_bytes)
    loop = Loop(memory, asking(), LLAMA, SIZES.budget_bytes, seed=0)
    for _ in range(130):
        loop.step()
        loop.check()
        sample = loop.sample()
        assert sample.wasted_bytes >= 0
        assert sample.held.rows_bytes + sample.held.kept_bytes <= SIZES.budget_bytes
        loop.end_answered()
    assert loop.num_ended
    loop.close()


@every_system
def test_a_run_of_the_same_seed_is_the_same(make: Callable[[int], Memory]) -> None:
    assert outcome_of(make) == outcome_of(make)


def test_what_is_not_filled_is_half_of_a_page_or_block_for_each_sequence() -> None:
    for make in (MAKERS["vmmkv"], MAKERS["paged"]):
        outcome = outcome_of(make)
        last = sum(each.laid_bytes - each.needed_bytes for each in outcome.samples)
        assert last == pytest.approx(outcome.unfilled_bytes * sum(each.num_sequences for each in outcome.samples), rel=0.1)
    # Rows that do not divide a page: what lies behind the last is a multiple of the largest number that divides both.
    slots = Slots(QWEN, 64 * MIB, slots=4)
    every_length = np.arange(1, PAGE_BYTES // 2**14 + 1)
    last_bytes = slots.laid_bytes(every_length) - int(every_length.sum()) * QWEN.layout.row_bytes
    assert last_bytes / len(every_length) == slots.unfilled_bytes
    slots.close()


def test_blocks_and_pages_waste_little_and_static_rows_most() -> None:
    wasted = {
        name: sum(each.wasted_bytes for each in found.samples) / sum(each.needed_bytes for each in found.samples)
        for name, make in MAKERS.items()
        if (found := outcome_of(make))
    }
    assert wasted["paged"] < wasted["vmmkv"] < 0.12 < 5 < wasted["static"]


def test_memory_is_mapped_ahead_by_the_stated_times_alone() -> None:
    memory = Slots(LLAMA, SIZES.budget_bytes, slots=160)
    slots = [memory.begin(100) for _ in range(40)]
    step_us = 1000.0
    memory.idle(step_us)
    assert memory.lookahead_tokens == 1 + ceil_div(int(40 * PAGE_US), int(SLACK_SHARE * step_us))
    # 100 rows and the lead of 7 tokens are 7 pages of 16 each.
    assert memory.held().rows_bytes == 40 * 7 * PAGE_BYTES
    memory.idle(step_us / 3)
    assert memory.lookahead_tokens == 20
    assert memory.held().rows_bytes == 40 * 8 * PAGE_BYTES
    for slot in slots:
        memory.end(slot)
    assert memory.held().rows_bytes == 0 < memory.held().kept_bytes
    memory.close()


@growing
def test_who_came_last_gives_way_and_is_computed_again_with_what_it_had(make: Callable[[int], Memory]) -> None:
    budget_bytes = 12 * PAGE_BYTES
    loop = Loop(make(budget_bytes), asking((60, 60), (100, 100)), LLAMA, budget_bytes, seed=0)
    loop.step()
    assert loop.running.size == 2  # of four pages each, and a hundredth is spared
    while not loop.num_gave_way:
        loop.step()
        loop.end_answered()
        loop.check()
    # Each had 16 * 6 rows: there is no page for the seventh. The one that stays has written its next row since.
    assert loop._rows[loop.running].tolist() == [97]
    assert loop._first[0] == Request(97, 100 - 1 - 36)
    while loop.num_ended < 3:
        loop.step()
        loop.check()
        loop.end_answered()
    loop.close()


@growing
def test_a_sequence_that_does_not_fit_alone_is_an_error(make: Callable[[int], Memory]) -> None:
    workload = asking((60, 60), (100, 100))
    with pytest.raises(OutOfPages):
        simulate(make(6 * PAGE_BYTES), workload, LLAMA, replace(SIZES, budget_bytes=6 * PAGE_BYTES), seed=0)


@growing
def test_newcomers_leave_a_hundredth_free(make: Callable[[int], Memory]) -> None:
    budget_bytes = 100 * PAGE_BYTES
    loop = Loop(make(budget_bytes), asking((16, 16), (500, 500)), LLAMA, budget_bytes, seed=0)
    loop._let_in()
    assert loop.running.size == 99
    loop.close()


def test_what_is_miscounted_is_not_reported() -> None:
    tables = Tables(LLAMA, 64 * MIB, slots=4)
    slot = tables.begin(20)
    tables.check(np.array([slot]), np.array([20]))
    with pytest.raises(WrongNumbers, match="rows need 3"):
        tables.check(np.array([slot]), np.array([33]))
    tables._paged._pool.acquire(1)
    with pytest.raises(WrongNumbers, match="the allocator holds 3 blocks, tables 2"):
        tables.check(np.array([slot]), np.array([20]))
    tables.end(slot)
    with pytest.raises(WrongNumbers, match="1 blocks are held"):
        tables.close()

    slots = Slots(LLAMA, 64 * MIB, slots=4)
    slot = slots.begin(20)
    slots.check(np.array([slot]), np.array([20]))
    with pytest.raises(WrongNumbers, match="20 rows, not 21"):
        slots.check(np.array([slot]), np.array([21]))
    slots._sequences[slot].grow(40)
    with pytest.raises(WrongNumbers, match="were ever asked for"):
        slots.check(np.array([slot]), np.array([20]))
    with pytest.raises(WrongNumbers, match="were used and nobody ran"):
        slots.close()

    static = Static(LLAMA, 1024 * MIB)
    slot = static.begin(20)
    with pytest.raises(WrongNumbers, match="0 sequences run and 1 slots are free"):
        static.check(np.array([], np.int64), np.array([], np.int64))
    with pytest.raises(WrongNumbers, match="1 slots are taken"):
        static.close()


def test_what_fails_has_no_rows_and_the_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_in(tmp_path)
    monkeypatch.setattr(Tables, "laid_bytes", lambda self, num_rows: 0)
    monkeypatch.setattr(context, "sizes", SIZES)
    shape, workload = context.runs[0]
    assert [outcome.system for outcome in context.outcomes(shape, workload)] == ["vmmkv", f"static {MAX_TOKENS}"]
    assert [type(error) for error in context.failures] == [WrongNumbers]


# the map


def context_in(folder: Path) -> Context:
    provenance = Provenance.collect(CPU, seed=0, quick=True, commit="none")
    return Context(QUICK, Report(RowFile(folder, provenance)))


def test_the_map_has_every_page_and_every_block_once(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    memory_map.run(context, lambda name: None)
    assert not context.failures
    found: dict[str, Any] = json.loads((tmp_path / memory_map.NAME).read_text())
    assert (found["commit"], found["date"]) == ("none", context.report.file.provenance.date)
    slots, requests = found["vmmkv"]["slots"], found["requests"]
    pages: dict[int, int] = {}
    holders: dict[int, int] = {}
    seen: dict[int, int] = {}
    for extent in [extent for slot in slots for extent in slot["extents"]] + found["vmmkv"]["tree"]:
        pages[extent["extent"]] = extent["num_pages"]
        holders[extent["extent"]] = extent["holders"]
        seen[extent["extent"]] = seen.get(extent["extent"], 0) + 1
    assert sorted(pages) == list(range(len(pages)))
    assert sum(pages.values()) == found["vmmkv"]["held_pages"]
    assert found["vmmkv"]["held_pages"] + found["vmmkv"]["free_pages"] == found["vmmkv"]["budget_pages"]
    assert all(seen[extent] <= holders[extent] <= seen[extent] + 1 for extent in pages)
    assert max(seen.values()) > 1, "prompts share a prefix, and its pages stand in several slots"
    states = {"live": {"live", "ahead", "retiring"}, "parked": {"parked", "retiring"}, "closing": {"retiring"}, "free": set()}
    for slot in slots:
        assert {extent["state"] for extent in slot["extents"]} <= states[slot["state"]]
        ends = [extent["start_page"] + extent["num_pages"] for extent in slot["extents"]]
        assert all(extent["start_page"] >= end for extent, end in zip(slot["extents"][1:], ends, strict=False))
        lived = sum(extent["num_pages"] for extent in slot["extents"] if extent["state"] in ("live", "parked"))
        assert lived * found["page_bytes"] >= slot["rows"] * found["row_bytes"]
    paged = found["paged"]
    assert [block["block"] for block in paged["blocks"]] == list(range(paged["num_blocks"]))
    running = {slot["request"]: slot["rows"] for slot in slots if slot["state"] == "live"}
    assert running == {slot["request"]: slot["rows"] for slot in paged["slots"]}
    assert len(running) == context.sizes.map_running
    for slot in paged["slots"]:
        assert len(slot["blocks"]) == ceil_div(slot["rows"], found["block_rows"])
        assert all(slot["slot"] in paged["blocks"][block]["slots"] for block in slot["blocks"])
    for block in paged["blocks"]:
        assert (block["state"] == "live") == bool(block["slots"])
        assert (block["state"] == "free") == (not block["holders"])
    groups = {request["group"] for request in requests}
    assert groups == {None, 0, 1}


def test_a_map_that_does_not_add_up_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_in(tmp_path)
    whole = memory_map.Paged.insert

    def leaks(self: memory_map.Paged, slot: int, tokens: workloads.TokenIds) -> None:
        whole(self, slot, tokens)
        self._pool.hold([0])

    monkeypatch.setattr(memory_map.Paged, "insert", leaks)
    memory_map.run(context, lambda name: None)
    assert [type(error) for error in context.failures] == [WrongNumbers]
    assert not (tmp_path / memory_map.NAME).exists()


# the suite


def test_a_quick_run_has_rows_of_every_system_and_the_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "waste",
        "--quick",
        "--device",
        "cpu",
        "--model-shape",
        "llama-3.1-8b",
        "--commit",
        "x",
        "--out",
        str(tmp_path),
    ]
    assert run.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "waste.jsonl").read_text().splitlines()]
    assert {row["system"] for row in rows} == {"vmmkv", "paged 16", "static 4096"}
    simulated = {row["workload"] for row in rows if row["metric"] == WASTE}
    assert len(simulated) == 5
    for workload in simulated:
        of = {(row["system"], row["metric"]): row for row in rows if row["workload"] == workload}
        assert {system for system, metric in of if metric == ADMITTED} == {"vmmkv", "paged 16", "static 4096"}
        assert of["vmmkv", ADMITTED]["p50"] <= of["vmmkv", ADMITTED]["bound"]
        assert of["vmmkv", "waste"]["p20"] <= of["vmmkv", WASTE]["p50"] * 1.2
    said = capsys.readouterr().out
    assert "- [x] waste at chat's lengths" in said
    assert "- [x] sequences at once in the same budget, against blocks of 16" in said


def test_parts_and_shapes_are_those_that_were_named() -> None:
    check(replace(QUICK, parts=tuple(PARTS)))
    with pytest.raises(ValueError, match="no part held; waste has waste, admitted, map"):
        check(replace(QUICK, parts=("held",)))
    assert shapes_of(QUICK) == (LLAMA,)
    assert shapes_of(replace(QUICK, shape=SHAPES["wide"])) == (LLAMA, QWEN)
    assert shapes_of(replace(QUICK, shapes=(LLAMA, SHAPES["smollm2-135m"]))) == (LLAMA, QWEN)


def test_bars_are_computed_from_rows_and_hold_only_if_all_figures_do() -> None:
    def row(name: str, system: str, metric: str, figure: float) -> Row:
        workload = f"llama-3.1-8b {name}: words"
        return Row(suite="waste", workload=workload, system=system, metric=metric, unit="%", summary=exact(figure, 1))

    waste, paged, static = bars([])
    assert not (waste.figures or paged.figures or static.figures or waste.holds)
    rows = [
        row("chat", "vmmkv", WASTE, 4.1),
        row("uniform", "vmmkv", WASTE, 50.0),
        row("chat", "vmmkv", ADMITTED, 98.0),
        row("chat", "paged 16", ADMITTED, 100.0),
        row("chat", "static 4096", ADMITTED, 40.0),
        row("uniform", "vmmkv", ADMITTED, 97.0),
        row("uniform", "paged 16", ADMITTED, 100.0),
    ]
    waste, paged, static = bars(rows)
    assert (waste.figures, waste.holds) == ({"chat": 4.1}, False)
    assert (paged.figures, paged.holds) == ({"chat": 0.98, "uniform": 0.97}, False)
    assert (static.figures, static.holds) == ({"chat": 2.45}, False)
    waste, paged, static = bars([row("chat", "vmmkv", WASTE, 4.0), *rows[2:4]])
    assert waste.holds
    assert paged.holds
    assert not static.figures
