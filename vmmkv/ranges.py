"""Arenas of addresses, the slots in them, and what is mapped under each slot.

    arena   | pad | slot 1            | slot 2          | ...   one reservation for each group of layers
    slot    |..RRRR|LLLLLLLLLL|RR|......................|       pages of one sequence
                   ^first     ^end
            L live, R retiring: still mapped, waiting for a fence; . nothing mapped

The live pages of a slot are one run [first, end), which borders of extents bound. Retiring ones lie anywhere else; when a
run grows over them again they are simply live once more, unless somebody else has come to hold what is mapped there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vmmkv.dlpack import wrap
from vmmkv.driver.base import Access, Driver, Fence
from vmmkv.extents import SIZE_CLASSES, Extent
from vmmkv.layout import Group
from vmmkv.units import PAGE_BYTES


@dataclass(eq=False, slots=True)
class Mapping:
    """One extent under the addresses of one slot, from `page` on. It is one holder of the extent.

    `fence` is None while it is live; else it is retiring, and is unmapped when the fence has passed (law 2).
    """

    span: "Span"
    page: int
    extent: Extent
    fence: Fence | None = None
    used: bool = False
    """Is it one of the extent's users? It is while it is live, or about to be, under a running sequence."""

    @property
    def end_page(self) -> int:
        """Behind its last page."""
        return self.page + self.extent.num_pages

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.span.address + self.page * PAGE_BYTES


@dataclass(eq=False, slots=True)
class Span:
    """The pages of one slot in one arena. Pages are counted from the slot's first address."""

    slot: int
    address: int
    first_page: int = 0
    """The first live page, and what a view starts behind."""
    end_page: int = 0
    """Behind the last live page."""
    mappings: dict[int, Mapping] = field(default_factory=dict)
    """Everything mapped here, live or retiring, by the first page of each."""

    def live(self) -> Iterator[Mapping]:
        """The live mappings in order."""
        return self.live_from(self.first_page)

    def live_from(self, page: int) -> Iterator[Mapping]:
        """The live mappings from a border of extents on."""
        while page < self.end_page:
            mapping = self.mappings[page]
            yield mapping
            page += mapping.extent.num_pages

    def at(self, page: int) -> Mapping:
        """The live mapping that has this page."""
        for num_pages in SIZE_CLASSES:  # extents stand at multiples of their size
            mapping = self.mappings.get(page // num_pages * num_pages)
            if mapping is not None and mapping.end_page > page:
                return mapping
        raise AssertionError(f"page {page} is not mapped in slot {self.slot}")

    def border_before(self, page: int) -> int:
        """The last border of live extents at or before a page of [first, end]."""
        return page if page >= self.end_page else self.at(page).page

    def border_after(self, page: int) -> int:
        """The first border of live extents at or behind it."""
        border = self.border_before(page)
        return page if border == page else self.at(page).end_page

    @property
    def num_live_pages(self) -> int:
        """Pages that are mapped and not retiring."""
        return self.end_page - self.first_page


class Arena:
    """The addresses of one group: the pad and `slots` spans of the same size, one after the other in one reservation.

    The reservation outlives everything: addresses are never given back (law 6), since a stale view must fault
    rather than read somebody else's bytes.
    Cost: one reserve, about 4 us on CUDA whatever the size.
    """

    def __init__(self, driver: Driver, index: int, group: Group, *, slots: int, max_rows: int) -> None:
        self.index = index
        self.group = group
        self.slot_tokens = group.slot_tokens(max_rows)
        self.slot_bytes = self.slot_tokens * group.row_bytes
        self.reserved_bytes = (1 + slots) * self.slot_bytes
        self.address = driver.reserve(self.reserved_bytes)
        self.spans = [Span(slot, self.address + slot * self.slot_bytes) for slot in range(1 + slots)]
        self._bytes = wrap(self.address, self.reserved_bytes, driver.device)
        self.device = driver.device
        self._driver = driver

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """All slots of one plane of one layer: [1 + slots, slot_tokens, heads, dim], strided, mapped or not."""
        known = self.group.plane(plane)
        itemsize = known.dtype.itemsize
        return self._bytes.view(known.dtype).as_strided(
            (len(self.spans), self.slot_tokens, known.heads, known.dim),
            (self.slot_bytes // itemsize, self.group.row_bytes // itemsize, known.head_stride, 1),
            self.group.offset_bytes(layer, plane) // itemsize,
        )

    def rows(self, slot: int, start_token: int, end_token: int) -> torch.Tensor:
        """The bytes of rows [start, end) of a slot, in a storage that ends with them: uint8 [(end - start) * row_bytes]."""
        if end_token <= start_token:
            return torch.empty(0, dtype=torch.uint8, device=self._driver.device)  # a storage that ends at once
        row_bytes = self.group.row_bytes
        size_bytes = (end_token - start_token) * row_bytes
        return wrap(self.spans[slot].address + start_token * row_bytes, size_bytes, self._driver.device)

    def view_rows(self, rows: torch.Tensor, layer: int, plane: str) -> torch.Tensor:
        """One plane of one layer of what `rows` gave: [tokens, heads, dim]."""
        known, row_bytes = self.group.plane(plane), self.group.row_bytes
        itemsize = known.dtype.itemsize
        return rows.view(known.dtype).as_strided(
            (rows.numel() // row_bytes, known.heads, known.dim),
            (row_bytes // itemsize, known.head_stride, 1),
            self.group.offset_bytes(layer, plane) // itemsize,
        )

    def map(self, span: Span, page: int, extent: Extent, access: Access = Access.READ_WRITE) -> Mapping:
        """Map an extent that the caller holds and uses; both become the mapping's. It is not in the live run yet.

        Cost: one map and one access call. On failure nothing is mapped; if even the undoing fails, the mapping
        stands in `span.mappings` and must be retired by the caller.
        """
        assert page % extent.num_pages == 0, "an extent stands at a multiple of its size"
        mapping = Mapping(span, page, extent, used=True)
        self._driver.map(mapping.address, extent.handle, extent.size_bytes)
        span.mappings[page] = mapping
        try:
            self._driver.set_access(mapping.address, extent.size_bytes, access)
        except BaseException:
            self.unmap(mapping)
            raise
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        """Unmap what no launch touches any more. The mapping's hold on its extent, and its use, are the caller's again.

        Cost: one unmap.
        """
        self._driver.unmap(mapping.address, mapping.extent.size_bytes)
        del mapping.span.mappings[mapping.page]
