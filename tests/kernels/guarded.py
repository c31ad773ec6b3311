"""Kernels at the edges of what they may touch. Run as a child process: on host memory with unreadable pages around it.

    python -m tests.kernels.guarded (within|within-wide|strays)

A stray access is SIGSEGV. A row (K and V of one token, 1 head of 64, fp16; or payloads, scales and padding) is 256 bytes, so 16
rows are a page of 4 KiB, and a length that is a multiple of 16 ends where the readable memory ends. A block of a table is such
a page. tests/gpu/guarded_kernels.py does the same on CUDA addresses.
"""

import ctypes
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import interpreter
from vmmkv.units import ceil_div, round_up
from vmmkv_kernels import checks, reference
from vmmkv_kernels.attention.append import append
from vmmkv_kernels.attention.cascade import cascade
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.quantise import KINDS, PAYLOAD_DTYPES, Kind, dequantise, payload_width, quantise

Stray = Callable[[], object]
"""A kernel is told to touch what it may not, and nothing else is."""


class GuardedMemory(ABC):
    """Where a guard takes memory from, of which only some may be touched.

    A row is K and V of one token, or their payloads, scales and padding.
    """

    num_rows: int
    row_bytes: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_rows: int
    block: int
    """Rows of a block."""

    @abstractmethod
    def rows(self, start: int, end: int) -> torch.Tensor:
        """uint8 [2, rows, row bytes], of which rows [start, end) of slot 1 may be touched."""

    @abstractmethod
    def entries(self, first: int, end: int, count: int) -> torch.Tensor:
        """int32 [count], garbage, of which nothing from `end` on may be touched."""


class Slot:
    """A slot of which only the pages of the rows [start, end) may be touched.

    It is slot 1 of the views, and of slot 0 its last rows may not be touched either: that is where rows below 0 would lie.
    Through a table it is the table's one slot, with its blocks in their order.
    """

    def __init__(self, memory_of: GuardedMemory, start: int, end: int, kind: Kind | None = None) -> None:
        self.memory_of = at = memory_of
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
            return view.unflatten(1, (-1, self.memory_of.block)).flatten(0, 1)

        return split(self.k), split(self.v), {name: split(scale) for name, scale in self.scales.items()}

    def table(self, first: int, end: int) -> torch.Tensor:
        """The table of the slot's blocks, of which only the entries [first, end) may be used."""
        num_blocks = self.memory_of.num_rows // self.memory_of.block
        table = self.memory_of.entries(first, end, num_blocks)
        table[first:end] = torch.arange(first, end, dtype=torch.int32, device=table.device) + num_blocks
        return table.view(1, -1)

    def values(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows [start, end) of K and V mean, in float32."""
        rows = (1, slice(start, end))
        if self.kind is None:
            return self.k[rows].float(), self.v[rows].float()
        return dequantise(self.k[rows], self.scales["k_scale"][rows]), dequantise(self.v[rows], self.scales["v_scale"][rows])


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
        at = slot.memory_of
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
            options["tables_SC"] = slot.table(start // slot.memory_of.block, ceil_div(end, slot.memory_of.block))
            return (prefill if self.count else decode)(q_NHD, k, v, *where, **scales, **options)
        return (prefill if self.count else decode)(q_NHD, slot.k, slot.v, *where, **slot.scales, **options)

    def compare(self, memory_of: GuardedMemory, kind: Kind | None = None, *, paged: bool = False) -> None:
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
    at = slot.memory_of
    token_NKD = torch.full((1, at.kv_heads, at.head_dim), 7.0, dtype=at.dtype, device=slot.device)
    if table is None:
        where = (slot.index(1), slot.index(position), slot.index(0, limit))
        append(token_NKD, token_NKD, slot.k, slot.v, *where, **slot.scales)
    else:
        k, v, scales = slot.blocks()
        where = (slot.index(0), slot.index(position), slot.index(limit))
        append(token_NKD, token_NKD, k, v, *where, tables_SC=table, **scales)


def write_at_the_limit(memory_of: GuardedMemory, limit: int, kind: Kind | None, *, paged: bool) -> None:
    """Append on both sides of the limit, at which memory and table end."""
    slot = Slot(memory_of, 0, limit, kind)
    for position in (limit - 1, limit):
        write(slot, position, limit, slot.table(0, limit // slot.memory_of.block) if paged else None)
    for values in slot.values(limit - 1, limit):
        torch.testing.assert_close(values, torch.full_like(values, 7.0), rtol=1e-3, atol=0)


def attention_strays(memory_of: GuardedMemory, page: int) -> dict[str, Stray]:
    """Attention and appends that are told to touch the row past the memory's end or before its start, and nothing else is."""
    end = 3 * page
    window, window_of_many = Span(length=8 * page + 16, window=17), Span(length=8 * page + 16, window=13, count=5)

    def past(count: int = 0, *, paged: bool = False) -> Stray:
        return lambda: Span(length=end + 1, count=count).attend(Slot(memory_of, 0, end), paged=paged)

    def past_the_table() -> torch.Tensor:
        one = Slot(memory_of, 0, end + page)
        k, v, _ = one.blocks()
        query = Span(length=1).query(one)
        table = one.table(0, end // one.memory_of.block)
        return decode(query, k, v, one.index(end + 1), one.index(0), tables_SC=table)

    def append_past(entries: int = 0) -> None:
        one = Slot(memory_of, 0, end)
        write(one, end, end + 1, one.table(0, entries) if entries else None)

    return {
        "decode-past": past(),
        "decode-paged-past": past(paged=True),
        "decode-table-past": past_the_table,
        "decode-window-before": lambda: window.attend(Slot(memory_of, 8 * page, 9 * page)),
        "prefill-past": past(5),
        "prefill-paged-past": past(5, paged=True),
        "prefill-window-before": lambda: window_of_many.attend(Slot(memory_of, 8 * page, 9 * page)),
        "append-past": append_past,
        "append-paged-past": lambda: append_past(end // memory_of.block + 1),
    }


ROWS, ROW_BYTES = 1024, 256
PAGE_ROWS = mmap.PAGESIZE // ROW_BYTES
PROT_NONE = 0

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Random bytes of which only the given ranges [start, end), in order and of whole pages, may be touched."""

    def __init__(self, size_bytes: int, *ranges: tuple[int, int]) -> None:
        self.memory = mmap.mmap(-1, size_bytes)
        self.bytes_E = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.bytes_E.copy_(torch.randint(256, (size_bytes,)))
        firsts, lasts = (0, *(end for _, end in ranges)), (*(start for start, _ in ranges), size_bytes)
        for first, last in zip(firsts, lasts, strict=True):
            if first < last and libc.mprotect(self.bytes_E.data_ptr() + first, last - first, PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect refused")


class HostMemory(GuardedMemory):
    """Guarded slots, of which nothing else may be touched; guarded tables, of which nothing outside [first, end) may be."""

    num_rows, row_bytes, kv_heads, head_dim, dtype = ROWS, ROW_BYTES, 1, 64, torch.float16
    page_rows = block = PAGE_ROWS

    def rows(self, start: int, end: int) -> torch.Tensor:
        guarded = Guarded(2 * ROWS * ROW_BYTES, ((ROWS + start) * ROW_BYTES, (ROWS + end) * ROW_BYTES))
        return guarded.bytes_E.view(2, ROWS, ROW_BYTES)

    def entries(self, first: int, end: int, count: int) -> torch.Tensor:
        # One end of what may be read is at the border of a page: the first entry's if there is something before it.
        words = Guarded(4 * mmap.PAGESIZE, (mmap.PAGESIZE, 2 * mmap.PAGESIZE)).bytes_E.view(torch.int32)
        page_entries = mmap.PAGESIZE // words.itemsize
        base = page_entries - first if first else 2 * page_entries - end
        return words[base : base + count]


HOST = HostMemory()


class PrefixTable:
    """Cascade under a table of which only some entries are readable: a follower, and the leader of its prefix.

    The blocks of the prefix are the leader's, and the others the follower's. `border` is the column that begins a page: of the
    leader's entries those from there on are unreadable, and of the follower's those before. With border 0 it is what is before
    the leader's first.
    """

    LENGTH, COLUMNS = 90, 6

    def __init__(self, prefix_rows: int, border: int) -> None:
        pages = (0, 5) if border else (1, 5)
        guarded = Guarded(7 * mmap.PAGESIZE, *((page * mmap.PAGESIZE, (page + 1) * mmap.PAGESIZE) for page in pages))
        words, page_entries = guarded.bytes_E.view(torch.int32), mmap.PAGESIZE // 4
        self.tables_SC = words.as_strided((2, self.COLUMNS), (4 * page_entries, 1), page_entries - border)
        prefix_blocks = prefix_rows // PAGE_ROWS
        self.tables_SC[0, :prefix_blocks] = torch.arange(prefix_blocks)
        self.tables_SC[1, prefix_blocks:] = torch.arange(prefix_blocks, self.COLUMNS)
        self.q_BHD = torch.randn(1, 2, 64).half()
        self.kv = torch.randn(2, self.COLUMNS, PAGE_ROWS, 1, 64).half().unbind()

    def attend(self, prefix_rows: int, first: int) -> torch.Tensor:
        """By the kernels, told that so many rows are the leader's, and that the follower's own begin at `first`."""
        where = (torch.tensor(values, dtype=torch.int32) for values in ([self.LENGTH], [1], [0, 1], [0], [prefix_rows]))
        firsts_B = torch.tensor([first], dtype=torch.int32)
        return cascade(self.q_BHD, *self.kv, *where, tables_SC=self.tables_SC, firsts_B=firsts_B)

    def stay_within(self, prefix_rows: int) -> None:
        """Up to the edge of what may be read, and not over it."""
        rows = (plane.flatten(0, 1)[: self.LENGTH].float() for plane in self.kv)
        truth = reference.attend(self.q_BHD, *rows, torch.tensor([self.LENGTH - 1]))
        torch.testing.assert_close(self.attend(prefix_rows, prefix_rows).float(), truth, rtol=2e-2, atol=5e-3)


def load_by_pointers() -> None:
    """From now on, as on a GPU without a tensor memory accelerator."""
    checks.has_tma = lambda device: False  # type: ignore[assignment]


def attend_within(wide: bool) -> None:
    """Decode over every span, quantised and prefill over some; fewer of each unless `wide`."""
    spans = spans_around(PAGE_ROWS)
    for paged in (False, True):
        for span in spans if wide or not paged else spans[1::3]:
            span.compare(HOST, paged=paged)
        for kind in KINDS if wide else ("int4",):
            for span in (Span(length=41), Span(length=48), Span(length=144, window=16))[: 3 if wide else 1]:
                span.compare(HOST, kind, paged=paged)
    formats: tuple[tuple[Kind | None, bool], ...] = ((None, False), (None, True), ("int4", False), ("fp8", True))
    for kind, paged in formats if wide else formats[:2]:
        for span in (Span(length=48, count=48), Span(length=144, count=5, window=12), Span(length=272, count=3)):
            span.compare(HOST, kind, paged=paged)


def attend_with_head_scales() -> None:
    """Decode and prefill with scales that end where the readable memory ends."""
    words = Guarded(2 * mmap.PAGESIZE, (0, mmap.PAGESIZE)).bytes_E.view(torch.float32)
    scale_K = words[mmap.PAGESIZE // 4 - 1 :][:1]
    scale_K.fill_(0.01)
    slot = Slot(HOST, 0, 48, "fp8")
    slot.scales = {"k_scale": scale_K, "v_scale": scale_K}
    for span in (Span(length=41), Span(length=48, count=3)):
        q_NHD = span.query(slot)
        values = (dequantise(view[1, : span.length], scale_K) for view in (slot.k, slot.v))
        truth = reference.attend(q_NHD, *values, torch.arange(span.length - len(q_NHD), span.length))
        torch.testing.assert_close(span.attend(slot, q_NHD).float(), truth, rtol=2e-2, atol=5e-3)


def stay_within(wide: bool) -> None:
    """Every kernel up to the edge of what it may touch, and not over it."""
    attend_within(wide)
    attend_with_head_scales()
    for limit in (16, 48) if wide else (48,):
        for kind in (None, *KINDS) if wide else (None, "int4"):
            for paged in (False, True):
                write_at_the_limit(HOST, limit, kind, paged=paged)
    PrefixTable(16, border=0).stay_within(16)  # less than a tile, which is moved back to end with it
    PrefixTable(80, border=5).stay_within(80)
    load_by_pointers()
    for span in spans_around(PAGE_ROWS)[:: 1 if wide else 2]:
        span.compare(HOST)


STRAYS: dict[str, Stray] = {
    **attention_strays(HOST, PAGE_ROWS),
    "cascade-table-past": lambda: PrefixTable(80, border=5).attend(81, 80),
    "cascade-table-before": lambda: PrefixTable(80, border=5).attend(80, 79),
    "append-table-past": lambda: write(slot := Slot(HOST, 0, 64), 48, 49, slot.table(0, 3)),
}


def signal_of(stray: Stray) -> int:
    """The signal that ends a process which does that; 0 if none does."""
    child = os.fork()
    if child == 0:
        stray()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(what: str) -> None:
    """`within` and `within-wide` must end well; of `strays` it prints how each ends."""
    torch.set_num_threads(1)
    interpreter.hasten()
    if what.startswith("within"):
        stay_within(what == "within-wide")
        print("done")
    else:
        for name, stray in STRAYS.items():
            print(name, signal_of(stray), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
