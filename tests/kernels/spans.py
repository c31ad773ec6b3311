"""Kernels at the edges of what they may touch, wherever that is: what the guards of host and CUDA memory have in common."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vmmkv.kernels import reference
from vmmkv.kernels.attention.append import append
from vmmkv.kernels.attention.decode import decode
from vmmkv.kernels.attention.prefill import prefill
from vmmkv.kernels.quantise import PAYLOAD_DTYPES, Kind, dequantise, payload_width, quantise
from vmmkv.units import ceil_div, round_up


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Rows of K and V of one token, or of payloads, scales and padding; and the rows of a page of memory."""

    rows: int
    row_bytes: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_rows: int
    block: int
    """Rows of a block."""


class Slot:
    """A slot of which only the pages of the rows [start, end) may be touched.

    It is slot 1 of the views, and of slot 0 its last rows may not be touched either: that is where rows below 0 would lie.
    Through a table it is the table's one slot, with its blocks in their order.
    """

    def __init__(self, memory_of: "MemoryOf", start: int, end: int, kind: Kind | None = None) -> None:
        self.memory_of = memory_of
        self.geometry = at = memory_of.geometry
        self.kind = kind
        first, last = start // at.page_rows * at.page_rows, round_up(end, at.page_rows)
        self.rows_STE = memory_of.rows(first, last)
        self.scales: dict[str, torch.Tensor] = {}
        width = payload_width(kind, at.head_dim)
        stored = at.dtype if kind is None else PAYLOAD_DTYPES[kind]
        plane_bytes = at.kv_heads * width * stored.itemsize

        def plane(first_byte: int, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
            return self.rows_STE[:, :, first_byte : first_byte + size_bytes].view(dtype)

        self.k, self.v = (plane(i * plane_bytes, plane_bytes, stored).unflatten(2, (at.kv_heads, width)) for i in range(2))
        if kind is not None:
            scale_bytes = 2 * at.kv_heads
            k_scale, v_scale = (plane(2 * plane_bytes + i * scale_bytes, scale_bytes, torch.float16) for i in range(2))
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        for view, name in ((self.k, "k_scale"), (self.v, "v_scale")):
            values_TKD = torch.randn(last - first, at.kv_heads, at.head_dim, device=view.device)
            if kind is None:
                view[1, first:last] = values_TKD
            else:
                view[1, first:last], self.scales[name][1, first:last] = quantise(values_TKD, kind)

    @property
    def device(self) -> torch.device:
        return self.rows_STE.device

    def index(self, *values: int) -> torch.Tensor:
        """An index tensor beside the slot."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """K, V and scales of the same memory as physical blocks."""

        def split(view: torch.Tensor) -> torch.Tensor:
            return view.unflatten(1, (-1, self.geometry.block)).flatten(0, 1)

        return split(self.k), split(self.v), {name: split(scale) for name, scale in self.scales.items()}

    def table(self, first: int, end: int) -> torch.Tensor:
        """The table of the slot's blocks, of which only the entries [first, end) may be used."""
        num_blocks = self.geometry.rows // self.geometry.block
        table = self.memory_of.entries(first, end, num_blocks)
        table[first:end] = torch.arange(first, end, dtype=torch.int32, device=table.device) + num_blocks
        return table.view(1, -1)

    def values(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows [start, end) of K and V mean, in float32."""
        rows = (1, slice(start, end))
        if self.kind is None:
            return self.k[rows].float(), self.v[rows].float()
        return dequantise(self.k[rows], self.scales["k_scale"][rows]), dequantise(self.v[rows], self.scales["v_scale"][rows])


class MemoryOf(ABC):
    """Where a guard takes memory from, of which only some may be touched."""

    geometry: Geometry

    @abstractmethod
    def rows(self, start: int, end: int) -> torch.Tensor:
        """uint8 [2, rows, row bytes], of which rows [start, end) of slot 1 may be touched."""

    @abstractmethod
    def entries(self, first: int, end: int, count: int) -> torch.Tensor:
        """int32 [count], garbage, of which nothing from `end` on may be touched."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The last `count` tokens of a slot attend to it: by `decode`, or by `prefill` if there is a count."""

    length: int
    window: int | None = None
    limit: int | None = None
    count: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Those that are read, [start, end)."""
        end = self.length if self.limit is None else min(self.length, self.limit)
        first_query = self.length - max(self.count, 1)
        return (0 if self.window is None else min(max(0, first_query + 1 - self.window), end)), end

    def query(self, slot: Slot) -> torch.Tensor:
        """Two query heads to a kv head."""
        at = slot.geometry
        return torch.randn(max(self.count, 1), 2 * at.kv_heads, at.head_dim, device=slot.device).to(at.dtype)

    def attend(self, slot: Slot, q_NHD: torch.Tensor | None = None, *, paged: bool = False) -> torch.Tensor:
        """Attend over the slot, or over its blocks under a table of which only the entries of the span may be read."""
        q_NHD = self.query(slot) if q_NHD is None else q_NHD
        limit_S = None if self.limit is None else slot.index(*[self.limit] * (1 if paged else 2))
        where: tuple[torch.Tensor, ...] = slot.index(self.length), slot.index(0 if paged else 1)
        if self.count:
            where = slot.index(0, self.count), *where
        options: dict[str, Any] = {"window": self.window, "limit_S": limit_S}
        if paged:
            start, end = self.rows
            k, v, scales = slot.blocks()
            options["tables_SC"] = slot.table(start // slot.geometry.block, ceil_div(end, slot.geometry.block))
            return (prefill if self.count else decode)(q_NHD, k, v, *where, **scales, **options)
        return (prefill if self.count else decode)(q_NHD, slot.k, slot.v, *where, **slot.scales, **options)

    def compare(self, memory_of: MemoryOf, kind: Kind | None = None, *, paged: bool = False) -> None:
        """Attend with nothing to touch around the pages of the span, and compare with plain torch."""
        start, end = self.rows
        slot = Slot(memory_of, start, end, kind)
        q_NHD = self.query(slot)
        out = self.attend(slot, q_NHD, paged=paged)
        if start == end:
            assert out.eq(0.0).all()
            return
        if self.limit is not None and self.window is not None:
            # It is to be dropped; what matters is that nothing was touched.
            assert out.isfinite().all()
            return
        positions_N = torch.arange(self.length - len(q_NHD), self.length, device=slot.device) - start
        truth = reference.attend(q_NHD, *slot.values(start, end), positions_N, window=self.window)
        torch.testing.assert_close(out.float(), truth, rtol=2e-2, atol=5e-3)


def spans_around(page: int) -> list[Span]:
    """Spans at the edges of a page of so many rows, or of some; in part shorter than any tile, in part longer."""
    return [
        *(Span(length=length) for length in (0, 1, page - 7, page, page + 1, 3 * page, 17 * page)),
        Span(length=5 * page, limit=3 * page),
        # The pages before a window may be gone: of a tile and more, of less, and of what a limit leaves of one.
        Span(length=27 * page, window=19 * page),
        Span(length=8 * page + 16, window=16),
        Span(length=8 * page + 23, window=23),
        Span(length=12 * page, window=4 * page, limit=8 * page + 16),
        Span(length=12 * page, window=16, limit=9 * page),
    ]


def write(slot: Slot, position: int, limit: int, table: torch.Tensor | None = None) -> None:
    """Append one token of sevens, through a table if there is one."""
    at = slot.geometry
    token_NKD = torch.full((1, at.kv_heads, at.head_dim), 7.0, dtype=at.dtype, device=slot.device)
    if table is None:
        where = (slot.index(1), slot.index(position), slot.index(0, limit))
        append(token_NKD, token_NKD, slot.k, slot.v, *where, **slot.scales)
    else:
        k, v, scales = slot.blocks()
        where = (slot.index(0), slot.index(position), slot.index(limit))
        append(token_NKD, token_NKD, k, v, *where, tables_SC=table, **scales)


def write_at_the_limit(memory_of: MemoryOf, limit: int, kind: Kind | None, *, paged: bool) -> None:
    """Append on both sides of the limit, at which memory and table end."""
    slot = Slot(memory_of, 0, limit, kind)
    for position in (limit - 1, limit):
        write(slot, position, limit, slot.table(0, limit // slot.geometry.block) if paged else None)
    for values in slot.values(limit - 1, limit):
        torch.testing.assert_close(values, torch.full_like(values, 7.0), rtol=1e-3, atol=0)


def attention_strays(memory_of: MemoryOf, page: int) -> dict[str, Callable[[], object]]:
    """Attention and appends that are told to touch the row past the memory's end or before its start, and nothing else is."""
    end = 3 * page
    window = Span(length=8 * page + 16, window=17)

    def slot(first: int, last: int, kind: Kind | None = None) -> Slot:
        return Slot(memory_of, first, last, kind)

    def past(count: int = 0, kind: Kind | None = None, *, paged: bool = False) -> Callable[[], object]:
        return lambda: Span(length=end + 1, count=count).attend(slot(0, end, kind), paged=paged)

    def past_the_table() -> torch.Tensor:
        one = slot(0, end + page)
        k, v, _ = one.blocks()
        query = Span(length=1).query(one)
        table = one.table(0, end // one.geometry.block)
        return decode(query, k, v, one.index(end + 1), one.index(0), tables_SC=table)

    def append_past(kind: Kind | None = None, *, entries: int = 0) -> Callable[[], object]:
        def run() -> None:
            one = slot(0, end, kind)
            write(one, end, end + 1, one.table(0, entries) if entries else None)

        return run

    return {
        "decode-past": past(),
        "decode-limit-past": lambda: Span(length=end + 9, limit=end + 1).attend(slot(0, end)),
        "decode-quantised-past": past(kind="fp8"),
        "decode-paged-past": past(paged=True),
        "decode-table-past": past_the_table,
        "window-before": lambda: Span(length=27 * page, window=19 * page + 1).attend(slot(8 * page, 27 * page)),
        "window-before-in-a-tile": lambda: window.attend(slot(8 * page, 9 * page)),
        "prefill-past": past(5),
        "prefill-quantised-past": past(5, "int8"),
        "prefill-paged-past": past(5, paged=True),
        "prefill-window-before": lambda: dataclasses.replace(window, count=5, window=13).attend(slot(8 * page, 9 * page)),
        "append-past": append_past(),
        "append-quantised-past": append_past("int4"),
        "append-paged-past": append_past(entries=end // memory_of.geometry.block + 1),
    }
