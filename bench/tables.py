"""Tables of README.md and docs/performance.md, from rows: `python -m bench report --docs .` writes them.

A document marks where a table stands:

    <!-- rows: NAME -->
    <!-- end of rows -->

Machines drift, so the figures of one line are of one commit: the newest of those that have most of its cells.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from bench.rows import Recorded, Row, figure

DOCUMENTS: Final = ("README.md", "docs/performance.md")
LOSSES: Final = "losses"
"""The mark of the table that the others give."""
_MARKED: Final = re.compile(r"(<!-- rows: (\S+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


class Column(NamedTuple):
    """Which rows a column shows, as far as the line leaves it open."""

    system: str = ""
    """A pattern of the shell's."""
    metric: str = ""
    bound: bool = False
    """Shows what the hardware allows instead of what was measured."""
    is_ours: bool = False
    """Shows vmmkv: the table of losses has its figures where another column is better."""


class Line(NamedTuple):
    """Which rows a line shows. `workload` is a pattern of the shell's."""

    suite: str
    workload: str
    metric: str = ""
    systems: tuple[str, ...] = ()
    """Patterns by column, where they are others than the columns say."""


class Table(NamedTuple):
    """Medians by line and column."""

    head: str
    columns: Mapping[str, Column]
    lines: Mapping[str, Line]
    is_contest: bool = True
    """Whether the best figure of a line is bold."""


MODELS: Final = {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-0.6b": "Qwen3-0.6B"}
_LLAMA, _QWEN = MODELS
_BLOCKS: Final = Column("paged 16, FA3")
_VLLM: Final = Column("vLLM [0-9.]*[0-9]")
_OFFLOADING: Final = "vLLM *, offloading to the host"
_OURS: Final = Column("vmmkv", is_ours=True)
_SLOTS: Final = "vmmkv, all layers a page"


def _served(model: str) -> dict[str, Line]:
    """Workloads that engines run as users open them."""
    return {
        "256 requests, 100 to 1,024 tokens in and out, tok/s": Line("serve", f"{model} mixed: *", "throughput"),
        "the same, sampled at temperature 0.8, tok/s": Line("serve", f"{model} sampled: *", "throughput"),
        "one request, 1,024 in, 256 out, tok/s": Line("serve", f"{model} single: *", "throughput"),
        "first token of 8,192, ms": Line("serve", f"{model} first: *", "first token"),
        "8 requests of 32,768 in, 256 out, s": Line("serve", f"{model} long: *", "total"),
        "128 requests that share 4,096 tokens, s": Line("serve", f"{model} shared cold: *", "total"),
        "128 new requests after them, with the same 4,096, s": Line("serve", f"{model} shared warm: *", "total"),
    }


def _closed(model: str, part: str, metric: str = "") -> Line:
    """Requests that all come at once, over slots and over blocks."""
    return Line("serve", f"{model} closed: {part}: *16.0 GiB of rows", metric)


def _turns(model: str, *systems: str) -> Line:
    """Conversations that need four times the device's memory."""
    return Line("tiers", f"{model} working_set: *", "throughput", systems)


TABLES: Final[Mapping[str, Table]] = {
    "readme": Table(
        "Llama-3.1-8B",
        {"vLLM 0.25.1": _VLLM, "blocks": _BLOCKS, "vmmkv": _OURS},
        _served(_LLAMA)
        | {
            "64 conversations, a quarter fits on the GPU, tok/s": _turns(_LLAMA, _OFFLOADING, "", "host tier"),
            "128 requests in 16 GiB of KV, tok/s": _closed(_LLAMA, "uniform", "throughput"),
            "128 that share 2,048 tokens in 16 GiB, tok/s": _closed(_LLAMA, "shared prefix", "throughput"),
        },
    ),
    "growing": Table(
        "memory is mapped",
        {"step, us": Column(metric="step"), "steps of 400 that waited": Column(metric="stalled")},
        {
            name: Line("append", "256 sequences, coming and going", systems=(system, system))
            for name, system in (
                ("in advance, all of it (the floor)", "static"),
                ("ahead, while the device works", "slack"),
                ("by adopting finished slots, and ahead", "adopted"),
                ("when a row is missing", "off"),
            )
        },
        is_contest=False,
    ),
    "attention": Table(
        "decode, us a layer",
        {
            "floor": Column(f"decode, {_SLOTS}", bound=True),
            "ours": Column(f"decode, {_SLOTS}", is_ours=True),
            "FA3": Column(f"FA3, {_SLOTS}"),
            "cuDNN": Column(f"SDPA cuDNN, {_SLOTS}"),
            "ours, cudaMalloc": Column("decode, cudaMalloc"),
            "FA3, blocks": Column("FA3, paged 16"),
            "ours, blocks": Column("decode, paged 16"),
        },
        {
            name: Line("kernels", f"{model} decode {shape}", "layer")
            for name, model, shape in (
                ("1 sequence of 8,192 tokens", _LLAMA, "1x8K"),
                ("16 of 4,096", _LLAMA, "16x4K"),
                ("64 of 2,032", _LLAMA, "64x2032"),
                ("64 of 8,192", _LLAMA, "64x8K"),
                ("256 of 2,048", _LLAMA, "256x2K"),
                ("1 of 65,536 among 63 of 1,024", _LLAMA, "skewed"),
                ("SmolLM2-135M, 1 of 8,192", "smollm2-135m", "1x8K"),
            )
        },
    ),
    "prefill": Table(
        "prefill, TFLOP/s",
        {
            "bound": Column(f"prefill, {_SLOTS}", bound=True),
            "ours": Column(f"prefill, {_SLOTS}", is_ours=True),
            "FA3": Column(f"FA3, {_SLOTS}"),
            "FA3, blocks": Column("FA3, paged 16"),
            "ours, blocks": Column("prefill, paged 16"),
        },
        {
            name: Line("kernels", f"{model} prefill 2048-of-32768", "throughput")
            for model, name in (MODELS | {"smollm2-135m": "SmolLM2-135M"}).items()
        },
    ),
    "quantised": Table(
        "KV in",
        {
            name: Column(f"decode {kv}, {_SLOTS}")
            for name, kv in (
                ("bf16", "bfloat16"),
                ("fp8", "fp8 token scales at the end"),
                ("int8", "int8 token scales at the end"),
                ("int4", "int4 token scales at the end"),
            )
        },
        {
            "Llama-3.1-8B, decode of 16 x 4,096, us a layer": Line("kernels", f"{_LLAMA} quantised 16x4K", "layer"),
            "Llama-3.1-8B, decode of 64 x 8,192, us a layer": Line("kernels", f"{_LLAMA} quantised 64x8K", "layer"),
            "SmolLM2-135M, perplexity above that with bf16, %": Line(
                *("quality", "smollm2-135m in bfloat16, *", "perplexity above exact"),
                ("", *(f"{kv}, scales by token" for kv in ("fp8", "int8", "int4"))),
            ),
        },
        is_contest=False,
    ),
    "memory": Table(
        "memory, by lengths",
        {
            f"{name}: {system}": column._replace(metric=metric)
            for name, metric in (("waste, %", "waste, averaged"), ("sequences", "admitted sequences, averaged"))
            for system, column in (("vmmkv", _OURS), ("blocks", Column("paged 16")), ("static", Column("static 4096")))
        },
        {
            name: Line("memory_efficiency", f"{_LLAMA} {part}: *")
            for name, part in (
                ("uniform", "uniform"),
                ("chat", "chat"),
                ("long documents", "long documents"),
                ("few long among many short", "skewed"),
            )
        },
    ),
    "prefixes": Table(
        "128 requests, s",
        {"no sharing": Column("none"), "blocks": Column("paged 16"), "vmmkv": _OURS},
        {
            f"{tokens:,} tokens shared, {state}": Line(
                "prefix", f"* requests of {tokens} + 128 tokens, 64 out, {state}", "total"
            )
            for tokens in (200, 4096)
            for state in ("cold", "warm")
        },
    ),
    "attach": Table(
        "driver time, us",
        {"adopt": Column("adopt"), "alias of 32 MiB": Column("alias, promoted"), "alias of 2 MiB": Column("alias, first hit")},
        {f"{tokens:,} tokens": Line("prefix", f"attach {tokens} tokens", "in the driver") for tokens in (1024, 16384, 131072)},
        is_contest=False,
    ),
    **{
        f"vllm-{model}": Table(
            name, {"bound": Column("vmmkv", bound=True), "vLLM 0.25.1": _VLLM, "vmmkv": _OURS}, _served(model)
        )
        for model, name in MODELS.items()
    },
    "gpus": Table(
        "Llama-3.1-8B",
        {"one GPU": Column("vmmkv"), "two": Column("vmmkv, TP 2")},
        {f"tensor parallel: {label}": line for label, line in list(_served(_LLAMA).items())[:4:2]}
        | {"tensor parallel: first token of 8,192, ms": Line("serve", f"{_LLAMA} first: *", "first token")}
        | {
            "replicas: 256 requests for each GPU, twice, tok/s": Line(
                *("serve", f"{_LLAMA} replicas: *, for each replica", "throughput"),
                ("vmmkv, replicas: 1", "vmmkv, replicas: 2"),
            )
        },
        is_contest=False,
    ),
    **{
        f"blocks-{model}": Table(
            name,
            {
                f"{unit}: {system}": column._replace(metric=metric)
                for unit, metric in (("tok/s", "throughput"), ("first token, ms", "first token"))
                for system, column in (("blocks", _BLOCKS), ("vmmkv", _OURS))
            },
            {
                label: _closed(model, part)
                for label, part in (
                    ("128 requests, uniform lengths", "uniform"),
                    ("96 chats", "chat"),
                    ("48 long documents", "long documents"),
                    ("128 that share 2,048 tokens", "shared prefix"),
                    ("32 conversations of 4 turns", "multi turn"),
                    ("few long among many short", "skewed"),
                    ("ragged outputs", "ragged"),
                )
            },
        )
        for model, name in MODELS.items()
    },
    "rates": Table(
        "chats that arrive one by one",
        {"arrive, requests/s": Column("vmmkv", "rate")}
        | {
            f"{unit}: {system}": column._replace(metric=metric)
            for unit, metric in (("in time, requests/s", "goodput"), ("first token, ms", "first token"))
            for system, column in (("blocks", _BLOCKS), ("vmmkv", _OURS))
        },
        {
            f"{MODELS[model]}, {offered} offered": Line(
                "serve", f"{model} rates: chat, {offered} requests/s, Poisson, 16.0 GiB of rows"
            )
            for model, offered in ((_LLAMA, 2), (_LLAMA, 8), (_LLAMA, 16), (_QWEN, 8), (_QWEN, 16))
        },
    ),
    "first-tokens": Table(
        "Llama-3.1-8B, first token in ms",
        {
            "computed": Column("computed"),
            "on the device": Column("device", is_ours=True),
            "host tier": Column("host tier", is_ours=True),
            "disk": Column("disk tier, loaded", is_ours=True),
            "Redis": Column("redis tier, loaded", is_ours=True),
        },
        {
            f"{tokens:,} tokens": Line("tiers", f"{_LLAMA} first: {tokens} tokens *", "first token")
            for tokens in (4096, 8192, 32768)
        },
    ),
    "conversations": Table(
        "64 conversations, tok/s",
        {"no tier": Column("no tier"), "vLLM, offloading": Column(_OFFLOADING), "host tier": Column("host tier", is_ours=True)},
        {name: _turns(model) for model, name in MODELS.items()},
    ),
    "transformers": Table(
        "transformers, ms a token",
        {
            "DynamicCache": Column("transformers DynamicCache"),
            "StaticCache": Column("transformers StaticCache"),
            "VmmCache": Column("vmmkv VmmCache", is_ours=True),
            "DynamicCache, ours": Column("transformers DynamicCache, vmmkv attention"),
            "VmmCache, ours": Column("vmmkv VmmCache, vmmkv attention", is_ours=True),
        },
        {
            f"{tokens:,} tokens": Line("transformers", f"{_LLAMA} decode: {tokens} tokens, batch 8", "time per token")
            for tokens in (1024, 8192, 32768)
        },
    ),
}
"""By the name in a mark."""


def write(root: Path, rows: Sequence[Recorded]) -> None:
    """Fill the tables of the documents in a checkout. Raises: ValueError for a line that no row fills."""
    for name in DOCUMENTS:
        document = root / name
        document.write_text(filled(document.read_text(encoding="utf-8"), rows), encoding="utf-8")


def filled(text: str, rows: Sequence[Recorded]) -> str:
    """A document with the tables that these rows give."""

    def table(name: str) -> str:
        return losses(TABLES.values(), rows) if name == LOSSES else markdown(TABLES[name], rows)

    return _MARKED.sub(lambda mark: f"{mark[1]}\n{table(mark[2])}\n{mark[3]}", text)


def markdown(table: Table, rows: Sequence[Recorded]) -> str:
    """The table in Markdown."""
    text = f"| {' | '.join([table.head, *table.columns])} |\n|---{'|---:' * len(table.columns)}|\n"
    for label, line in table.lines.items():
        found = measured(table.columns, line, rows)
        text += f"| {' | '.join([label, *(_shown(column, found, table) for column in table.columns)])} |\n"
    return text


def losses(tables: Iterable[Table], rows: Sequence[Recorded]) -> str:
    """Figures of vmmkv that another column of their line beats, each beside the best of the others, in Markdown.

    The greatest loss comes first. A figure that two tables show is named as in the later one.
    """
    lost: dict[Row, tuple[float, str]] = {}
    for table in tables:
        for label, line in table.lines.items() if table.is_contest else ():
            found = measured(table.columns, line, rows)
            for column, ours in found.items():
                others = [name for name in _rivals(column, found, table) if not table.columns[name].is_ours]
                if not table.columns[column].is_ours or not others:
                    continue
                best = max(others, key=lambda name: better(found[name], ours))
                if not _is_level(ours, found[best]) and (times := better(ours, found[best])) < 1:
                    metric, _, system = column.rpartition(": ")
                    cells = (
                        f"{table.head}: {label}" + (f"; {metric}" if metric else ""),
                        f"{_text(ours.summary.median)} ({system})",
                        f"{_text(found[best].summary.median)} ({best.rpartition(': ')[2]})",
                        f"{times:.2f}",
                    )
                    lost[ours] = (times, f"| {' | '.join(cells)} |\n")
    return "| what | vmmkv | the best other | times as good |\n|---|---:|---:|---:|\n" + "".join(
        text for _, text in sorted(lost.values())
    )


def better(ours: Row, theirs: Row) -> float:
    """How many times as good the first figure is as the second."""
    ratio = ours.summary.median / theirs.summary.median
    return ratio if ours.higher_is_better else 1 / ratio


def measured(columns: Mapping[str, Column], line: Line, rows: Sequence[Recorded]) -> dict[str, Row]:
    """The rows of a line by column, all of one commit; a column that it has no row of is absent.

    Raises: ValueError if there is no row at all.
    """
    systems = dict(zip(columns, line.systems, strict=True)) if line.systems else {}
    sessions: defaultdict[str, dict[str, Recorded]] = defaultdict(dict)
    for one in rows:
        row, made = one.row, one.provenance
        if row.suite != line.suite or made.quick or "H100" in made.device or not fnmatchcase(row.workload, line.workload):
            continue
        for name, column in columns.items():
            is_shown = row.metric == (line.metric or column.metric) and fnmatchcase(
                row.system, systems.get(name) or column.system
            )
            last = sessions[made.commit].get(name)
            if is_shown and (last is None or last.provenance.date <= made.date):
                sessions[made.commit][name] = one
    if not any(sessions.values()):
        raise ValueError(f"no row of {line}; measure it, or take the line out of bench/tables.py")
    found = max(
        sessions.values(), key=lambda each: (len(each), max((one.provenance.date for one in each.values()), default=""))
    )
    return {name: found[name].row for name in columns if name in found}


def _text(value: float) -> str:
    """Three significant digits, zeros too: 13.0 beside 13.3."""
    return figure(value) if abs(value) >= 100 or value == int(value) else f"{value:#.3g}"


def _is_level(one: Row, other: Row) -> bool:
    """Whether both figures are printed alike."""
    return _text(one.summary.median) == _text(other.summary.median)


def _rivals(column: str, found: Mapping[str, Row], table: Table) -> dict[str, Row]:
    """Measured figures of the line that are compared with this one."""
    return {
        name: row
        for name, row in found.items()
        if name != column and row.metric == found[column].metric and not table.columns[name].bound
    }


def _shown(column: str, found: Mapping[str, Row], table: Table) -> str:
    row = found.get(column)
    if row is None or table.columns[column].bound:
        return "" if row is None or row.bound is None else _text(row.bound)
    text = _text(row.summary.median)
    rivals = _rivals(column, found, table).values()
    is_best = rivals and all(better(row, other) >= 1 or _is_level(row, other) for other in rivals)
    return f"**{text}**" if table.is_contest and is_best else text
