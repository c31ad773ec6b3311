"""A memory map: what lies under each slot at one moment, over pages that the driver maps, and over blocks under a table.

    addresses   one column for each sequence, its first row at the bottom; a rectangle is an extent, or a block
    colour      whose it is: of rows, mapped ahead, parked, about to be unmapped, cache
    hatched     more than one holds it: other sequences, or the prefix tree

It is read from `memory_map.json`, which the suite `waste` leaves beside its rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.patches import Patch

from bench.page.drawing import COLOURS, INK, Figure, drawing, finished
from bench.rows import origin_of
from vmmkv.units import MIB

MAP: Final = "memory_map.json"
_FORMAT: Final = 1

_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "live": ("rows of running sequences", COLOURS[0]),
    "ahead": ("mapped ahead", COLOURS[6]),
    "parked": ("parked, to be adopted or evicted", COLOURS[3]),
    "retiring": ("retiring: unmapped at the next pump", COLOURS[8]),
    "cached": ("cache: held by the prefix tree alone", COLOURS[9]),
}
"""By state, what it is and its colour."""

_HATCH: Final = "////"
_TREE: Final = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """An extent or a block in a column."""

    column: str
    start_mib: float
    size_mib: float
    state: str
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """One memory at the moment."""

    heading: str
    pieces: Sequence[_Piece]
    rows_mib: Mapping[str, float]
    """By column, where the rows end."""
    said: str


def map_figures(record: Mapping[str, Any], where: str) -> list[Figure]:
    """Both frames. Raises: ValueError for what is no map of this format."""
    if record.get("format") != _FORMAT:
        raise ValueError(
            f"{where}: a memory map of format {record.get('format')}; this reads {_FORMAT}: run the suite waste again"
        )
    try:
        frames = [_vmmkv(record), _paged(record)]
        moment = f"{record['workload']}, {record['shape']}, behind {record['step']} decode steps"
        origin = origin_of(record["commit"], record["date"])
    except KeyError as error:
        raise ValueError(f"{where}: a memory map without {error}; run the suite waste again") from error
    return [_draw(frame, moment, origin, name) for frame, name in zip(frames, ("map-vmmkv", "map-paged"), strict=True)]


def _vmmkv(record: Mapping[str, Any]) -> _Frame:
    memory, page_mib = record["vmmkv"], record["page_bytes"] / MIB
    pieces = [
        _Piece(
            column=str(slot["slot"]),
            start_mib=extent["start_page"] * page_mib,
            size_mib=extent["num_pages"] * page_mib,
            state=extent["state"],
            shared=extent["holders"] > 1,
        )
        for slot in memory["slots"]
        for extent in slot["extents"]
    ]
    pieces += _stacked((extent["num_pages"] * page_mib, extent["holders"]) for extent in memory["tree"])
    return _Frame(
        heading="vmmkv: extents under the addresses of slots",
        pieces=pieces,
        rows_mib={
            str(slot["slot"]): slot["rows"] * record["row_bytes"] / MIB for slot in memory["slots"] if slot["state"] == "live"
        },
        said=f"Of {memory['budget_pages']:,} pages of 2 MiB {memory['held_pages']:,} are held, {memory['used_pages']:,} of "
        f"them by running sequences, and {memory['free_pages']:,} are free.",
    )


def _paged(record: Mapping[str, Any]) -> _Frame:
    memory = record["paged"]
    block_mib = memory["block_bytes"] / MIB
    blocks = {block["block"]: block for block in memory["blocks"]}
    pieces = [
        _Piece(
            column=str(slot["slot"]),
            start_mib=position * block_mib,
            size_mib=block_mib,
            state="live",
            shared=blocks[number]["holders"] > 1,
        )
        for slot in memory["slots"]
        for position, number in enumerate(slot["blocks"])
    ]
    pieces += _stacked((block_mib, block["holders"]) for block in memory["blocks"] if block["state"] == "cached")
    count = {state: sum(block["state"] == state for block in memory["blocks"]) for state in ("live", "cached", "free")}
    return _Frame(
        heading=f"paged {record['block_rows']}: blocks in the order of the tables",
        pieces=pieces,
        rows_mib={str(slot["slot"]): slot["rows"] * record["row_bytes"] / MIB for slot in memory["slots"]},
        said=f"Of {memory['num_blocks']:,} blocks {count['live']:,} are held by running sequences, {count['cached']:,} are "
        f"cache and {count['free']:,} are free. Where a block lies in memory the table says, and this does not show.",
    )


def _stacked(sizes: Iterator[tuple[float, int]]) -> Iterator[_Piece]:
    """What the prefix tree alone holds is under no address: one upon another."""
    start_mib = 0.0
    for size_mib, holders in sizes:
        yield _Piece(column=_TREE, start_mib=start_mib, size_mib=size_mib, state="cached", shared=holders > 1)
        start_mib += size_mib


def _draw(frame: _Frame, moment: str, origin: str, name: str) -> Figure:
    columns = list(dict.fromkeys(piece.column for piece in frame.pieces))
    top_mib = max((piece.start_mib + piece.size_mib for piece in frame.pieces), default=1.0)
    with drawing(4.6) as (figure, (axis,)):
        for shared in {piece.shared for piece in frame.pieces}:
            of_kind = [piece for piece in frame.pieces if piece.shared == shared]
            axis.bar(
                [columns.index(piece.column) for piece in of_kind],
                [piece.size_mib for piece in of_kind],
                bottom=[piece.start_mib for piece in of_kind],
                width=0.84,
                color=[_STATES[piece.state][1] for piece in of_kind],
                edgecolor=INK,
                linewidth=0.4,
                hatch=_HATCH if shared else None,
            )
        for column, rows_mib in frame.rows_mib.items():
            if column in columns:
                middle = columns.index(column)
                axis.plot([middle - 0.47, middle + 0.47], [rows_mib, rows_mib], color=INK, linewidth=1.8)
        axis.set(ylim=(0, top_mib * 1.03), xlim=(-0.7, len(columns) - 0.3), ylabel="addresses of a slot, MiB", xlabel="slots")
        axis.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90 if len(columns) > 24 else 0)
        axis.grid(axis="x", visible=False)
        present = {piece.state for piece in frame.pieces}
        handles = [
            Patch(facecolor=colour, edgecolor=INK, label=text) for state, (text, colour) in _STATES.items() if state in present
        ]
        handles.append(Patch(facecolor="none", edgecolor=INK, hatch=_HATCH, label="held by more than one"))
        figure.legend(handles=handles, loc="outside upper left", ncols=2)
        shares = sum(piece.shared for piece in frame.pieces)
        counted = f"{len(columns)} columns, {len(frame.pieces)} rectangles, {shares} of them shared"
        alt = f"{frame.heading}, {moment}: {counted}. {frame.said}"
        caption = f"{moment}. {frame.said} Thick lines: where a sequence's rows end. From {origin}."
        return finished(figure, name, frame.heading, alt, caption)
