"""Run as a child process: kernels on host memory with unreadable pages around it, where a stray access is SIGSEGV.

    python -m tests.kernels.guarded (within|strays)

A row (K and V of one token, 1 head of 64, fp16; or payloads, scales and padding) is 256 bytes, so 16 rows are a page of
4 KiB, and a length that is a multiple of 16 ends where the readable memory ends. A block of a table is such a page.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import torch

from tests.kernels.spans import Geometry, MemoryOf, Slot, Span, attention_strays, spans_around, write, write_at_the_limit
from vmmkv.kernels import checks, reference
from vmmkv.kernels.copy import copy_extents, copy_rows
from vmmkv.kernels.quantise import KINDS, Kind, dequantise

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


class HostMemory(MemoryOf):
    """Guarded slots, of which nothing else may be touched; guarded tables, of which nothing outside [first, end) may be."""

    geometry = Geometry(
        rows=ROWS, row_bytes=ROW_BYTES, kv_heads=1, head_dim=64, dtype=torch.float16, page_rows=PAGE_ROWS, block=PAGE_ROWS
    )

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


class TwoSlots:
    """Slot 0, of which rows [start, end) may be read, and slot 1, of which rows [start, target_end) may be written."""

    def __init__(self, start: int, end: int, target_end: int) -> None:
        ranges = ((start, end), (ROWS + start, ROWS + target_end))
        self.guarded = Guarded(2 * ROWS * ROW_BYTES, *((first * ROW_BYTES, last * ROW_BYTES) for first, last in ranges))
        self.rows_STE = self.guarded.bytes_E.view(2, ROWS, ROW_BYTES)

    def copy_rows(self, start: int, end: int) -> None:
        """Rows [start, end); with copies of nothing before and after it, to and from what may not be touched."""
        first = max(start - PAGE_ROWS, 0)
        values = ([0, 0, 0, -1], [1, 1, 2, 1], [end, start, first, first], [end, end, end, end])
        copy_rows(self.rows_STE, *(torch.tensor(column) for column in values))

    def copy_extents(self, start: int, end: int) -> None:
        """The bytes of the same rows, and one copy without a source."""
        sources = [self.rows_STE[0, start].data_ptr(), 0]
        targets = [self.rows_STE[1, start].data_ptr(), self.rows_STE.data_ptr()]
        copy_extents(torch.tensor(sources), torch.tensor(targets), (end - start) * ROW_BYTES)

    def assert_copied(self, start: int, end: int) -> None:
        """Rows [start, end) are the same in both."""
        assert torch.equal(self.rows_STE[0, start:end], self.rows_STE[1, start:end])


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
    for start, end in ((0, 16), (48, 272)):
        for copy in (TwoSlots.copy_rows, TwoSlots.copy_extents):
            slots = TwoSlots(start, end, end)
            copy(slots, start, end)
            slots.assert_copied(start, end)
    load_by_pointers()
    for span in spans_around(PAGE_ROWS)[:: 1 if wide else 2]:
        span.compare(HOST)


def by_pointers(stray: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        load_by_pointers()
        stray()

    return run


def append_past_the_table() -> None:
    slot = Slot(HOST, 0, 64)
    write(slot, 48, 49, slot.table(0, 3))


ATTENTION_STRAYS = attention_strays(HOST, PAGE_ROWS)
STRAYS: dict[str, Callable[[], object]] = {
    **ATTENTION_STRAYS,
    "decode-past-by-pointers": by_pointers(ATTENTION_STRAYS["decode-past"]),
    "window-before-by-pointers": by_pointers(ATTENTION_STRAYS["window-before-in-a-tile"]),
    "append-table-past": append_past_the_table,
    "copy-source-past": lambda: TwoSlots(16, 48, 64).copy_rows(16, 49),
    "copy-target-past": lambda: TwoSlots(16, 64, 48).copy_rows(16, 49),
    "copy-before": lambda: TwoSlots(16, 48, 48).copy_rows(15, 48),
    "copy-extent-past": lambda: TwoSlots(16, 48, 64).copy_extents(16, 49),
}
"""A kernel is told to touch what it may not, and nothing else is."""


def signal_of(stray: Callable[[], object]) -> int:
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
    if what.startswith("within"):
        stay_within(what == "within-wide")
        print("done")
    else:
        for name, stray in STRAYS.items():
            print(name, signal_of(stray), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
