"""Windows: addresses of nobody's slot, through which the bytes of an extent are read that is mapped nowhere else.

What a prefix tree holds need not be mapped under any slot. To copy a few rows from there its extent is mapped in a window, and
retires at once: it is unmapped when the copy is done, like everything else.
"""

from typing import Final

import torch

from vmmkv.dlpack import wrap
from vmmkv.extents import SIZE_CLASSES, Extent
from vmmkv.memory import SlotMemory
from vmmkv.ranges import Arena, Span
from vmmkv.units import PAGE_BYTES, ceil_div

_NUM_WINDOWS: Final = 64


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
        memory, pool, mapper = self._memory, self._memory.pool, self._memory.mapper
        span = self._free_span()
        pool.hold(extent)
        pool.use(extent)
        try:
            mapping = self._arena.map(span, 0, extent, mapper.alias_access)
        except BaseException:
            pool.unuse(extent)
            pool.drop(extent)
            raise
        try:
            target.copy_(wrap(mapping.address + first_byte, target.numel(), pool.device))
        finally:
            mapper.retire(self._arena, [mapping], memory.fence())

    def _free_span(self) -> Span:
        while True:
            for span in self._arena.spans:
                if not span.mappings:
                    return span
            fence = self._memory.mapper.oldest_fence()
            assert fence is not None, "every window is in use, and none retires"
            fence.wait()
            self._memory.mapper.collect()
