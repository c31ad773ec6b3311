"""Run as a child process: kernels on CUDA addresses of which only some are mapped; a stray access loses the context.

    python -m tests.gpu.guarded_kernels (within|decode-past|...: see attention_strays)

A row (K and V of one token, 2 heads of 128, bf16; or payloads, scales and padding) is 1 KiB, so 2048 rows are a page. Exit
status 3 says that the context was lost.
"""

import sys

import torch

from tests.kernels.guarded import GuardedMemory, Span, attention_strays, spans_around, write_at_the_limit
from vmmkv.driver import open_driver
from vmmkv.driver.base import Access
from vmmkv.memory.address_space import wrap
from vmmkv.units import PAGE_BYTES
from vmmkv_kernels.quantise import Kind

NUM_PAGES, ROW_BYTES = 28, 1024
PAGE_ROWS = PAGE_BYTES // ROW_BYTES
DEVICE = torch.device("cuda", 0)
CONTEXT_LOST = 3
LOSSES = ("illegal memory access", "unspecified launch failure")
"""What CUDA says of an address that is not mapped."""


class DeviceMemory(GuardedMemory):
    """Slots and tables with some pages mapped. A tensor's own first page always is, as a cache's pad: Triton looks there."""

    num_rows, row_bytes, kv_heads, head_dim, dtype = NUM_PAGES * PAGE_ROWS, ROW_BYTES, 2, 128, torch.bfloat16
    page_rows, block = PAGE_ROWS, 16

    def __init__(self) -> None:
        self.driver = open_driver(DEVICE)

    def reserve(self, num_pages: int, mapped: set[int]) -> torch.Tensor:
        """Addresses of so many pages, of which some are mapped, and hold 0x7F: large numbers, entries and payloads."""
        base = self.driver.reserve(num_pages * PAGE_BYTES)
        bytes_E = wrap(base, num_pages * PAGE_BYTES, DEVICE)
        for page in sorted(mapped):
            address = base + page * PAGE_BYTES
            self.driver.map(address, self.driver.create(PAGE_BYTES), PAGE_BYTES)
            self.driver.set_access(address, PAGE_BYTES, Access.READ_WRITE)
            bytes_E[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].fill_(0x7F)
        torch.cuda.synchronize()
        return bytes_E

    def rows(self, start: int, end: int) -> torch.Tensor:
        pages = range(NUM_PAGES + start // PAGE_ROWS, NUM_PAGES + end // PAGE_ROWS)
        return self.reserve(2 * NUM_PAGES, {0, *pages}).view(2, NUM_PAGES * PAGE_ROWS, ROW_BYTES)

    def entries(self, first: int, end: int, count: int) -> torch.Tensor:
        words = self.reserve(4, {0, 1}).view(torch.int32)
        # Triton takes no pointer to where nothing is mapped: of no entries there is one.
        base = 2 * PAGE_BYTES // words.itemsize - max(end, 1)
        return words[base : base + count]


def stay_within(memory: DeviceMemory) -> None:
    """Every kernel up to the edge of what it may touch, and not over it."""
    short_window = Span(length=8 * PAGE_ROWS + 16, window=16)
    for paged in (False, True):
        for span in spans_around(PAGE_ROWS):
            span.compare(memory, paged=paged)
    formats: tuple[tuple[Kind, bool], ...] = (("fp8", False), ("int8", True), ("int4", False))
    for kind, paged in formats:
        for span in (Span(length=PAGE_ROWS), Span(length=PAGE_ROWS + 1), short_window):
            span.compare(memory, kind, paged=paged)
        write_at_the_limit(memory, PAGE_ROWS, kind, paged=paged)
    for paged in (False, True):
        write_at_the_limit(memory, 2 * PAGE_ROWS, None, paged=paged)
        for count, length, window in ((300, PAGE_ROWS, None), (40, 8 * PAGE_ROWS + 50, 11), (1, PAGE_ROWS, None)):
            Span(length=length, count=count, window=window).compare(memory, paged=paged)
        # A last tile of one row, of all but one, of a sequence shorter than it; and the ends that a limit makes.
        for count, length in ((300, 3 * PAGE_ROWS + 1), (2, PAGE_ROWS - 1), (3, 70), (5, 0)):
            Span(length=length, count=count).compare(memory, paged=paged)
        for limit in (3 * PAGE_ROWS, PAGE_ROWS, 0):
            Span(length=5 * PAGE_ROWS, count=300, limit=limit).compare(memory, paged=paged)
    Span(length=PAGE_ROWS, count=70).compare(memory, "int4")


def main(what: str) -> None:
    """`within` must end well, and nothing else."""
    memory = DeviceMemory()
    stay_within(memory) if what == "within" else attention_strays(memory, PAGE_ROWS)[what]()
    torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(CONTEXT_LOST if any(loss in str(error) for loss in LOSSES) else 1)
