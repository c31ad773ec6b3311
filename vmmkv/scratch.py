"""Windows: addresses of nobody's slot, through which the bytes of an extent are read that is mapped nowhere else.

What a prefix tree holds need not be mapped under any slot. To copy a few rows from there its extent is mapped in a window, and
retires at once: it is unmapped when the copy is done, like everything else.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import torch

from vmmkv.dlpack import wrap
from vmmkv.driver.base import Access
from vmmkv.errors import DriverError, OutOfPages
from vmmkv.extents import SIZE_CLASSES, Extent
from vmmkv.memory import SlotMemory
from vmmkv.ranges import Arena, Span
from vmmkv.units import PAGE_BYTES, ceil_div

_NUM_WINDOWS: Final = 64
_NUM_TRIALS: Final = 8


class Windows:
    """Some windows of one cache, each as wide as the largest extent. Every call comes with the pool's lock held."""

    def __init__(self, memory: SlotMemory) -> None:
        group = memory.arenas[0].group
        rows = ceil_div(max(SIZE_CLASSES) * PAGE_BYTES, group.row_bytes)
        self._memory = memory
        self._arena = Arena(memory.pool.driver, -1, group, slots=_NUM_WINDOWS, max_rows=rows)
        memory.windows = self._arena.spans

    def copy(self, extent: Extent, first_byte: int, target: torch.Tensor) -> None:
        """Copy bytes from `first_byte` of an extent on into `target`, as many as it has, on the caller's current stream.

        Cost: a map, an access call, a copy and a fence; an unmap later. Waits for an earlier copy if all windows are in use.
        """
        with self._mapped(extent, self._memory.mapper.alias_access) as address:
            target.copy_(wrap(address + first_byte, target.numel(), self._memory.pool.device))

    def measure_us(self) -> float | None:
        """What it takes to map a page and to unmap it again, in us; None if there is no page to try it with."""
        memory, pool = self._memory, self._memory.pool
        try:
            (extent,) = pool.acquire(1, wait=False)
        except OutOfPages:
            return None
        try:
            began_ns = time.perf_counter_ns()
            for _ in range(_NUM_TRIALS):
                with self._mapped(extent, Access.READ_WRITE):
                    pass
            memory.fence().wait()
            memory.mapper.collect()
            return (time.perf_counter_ns() - began_ns) / 1e3 / _NUM_TRIALS
        finally:
            pool.unuse(extent)
            pool.drop(extent)

    def fill(self, extent: Extent, source: torch.Tensor) -> None:
        """Copy as many bytes as an extent has into it. Cost: as `copy`. The extent is nobody's yet."""
        with self._mapped(extent, Access.READ_WRITE) as address, self._memory.copying():
            wrap(address, extent.size_bytes, self._memory.pool.device).copy_(source)

    @contextlib.contextmanager
    def _mapped(self, extent: Extent, access: Access) -> Iterator[int]:
        """The address of an extent in a window, which retires behind what is launched meanwhile."""
        memory, pool = self._memory, self._memory.pool
        span = self._free_span()
        pool.hold(extent)
        pool.use(extent)
        try:
            mapping = self._arena.map(span, 0, extent, access)
        except BaseException:
            if span.mappings:  # not even the undoing succeeded
                memory.mapper.retire(self._arena, list(span.mappings.values()), memory.fence())
            else:
                pool.unuse(extent)
                pool.drop(extent)
            raise
        try:
            yield mapping.address
        finally:
            try:
                fence = memory.fence()
            except DriverError:
                fence = memory.fence()  # a second failure is a device that is lost
            memory.mapper.retire(self._arena, [mapping], fence)

    def _free_span(self) -> Span:
        while True:
            for span in self._arena.spans:
                if not span.mappings:
                    return span
            fence = self._memory.mapper.oldest_fence()
            assert fence is not None, "every window is in use, and none retires"
            fence.wait()
            self._memory.mapper.collect()
