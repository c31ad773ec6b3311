"""Per-slot lengths and limits, on the host and on the device: what a cache tells the engine, whatever its rows lie in."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVLayout
from vmmkv.errors import OutOfPages, RowsUnmapped
from vmmkv.layout import Plane
from vmmkv.server.engine.uploads import Uploads


class SlotNumbers:
    """Rows and limits by slot, and which slots are free. Slot 0 is the null slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots: Final = num_slots
        self.device: Final = device
        self.lengths: Final[npt.NDArray[np.int64]] = np.zeros(1 + num_slots, np.int64)
        self.limits: Final[npt.NDArray[np.int32]] = np.zeros(1 + num_slots, np.int32)
        self.limit: Final = torch.zeros(1 + num_slots, dtype=torch.int32, device=device)
        self.uploads: Final = Uploads(device)
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_live(self) -> int:
        """Slots in which a sequence runs."""
        return self.num_slots - len(self._free)

    def take(self) -> int:
        """A free slot, with no rows. Raises: OutOfPages: a missing slot is handled as missing memory."""
        if not self._free:
            raise OutOfPages(f"all {self.num_slots} slots run a sequence")
        slot = self._free.pop()
        self.lengths[slot] = self.limits[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """Free it. The device's limit stays until the next sequence's: nothing is launched there before."""
        self.lengths[slot] = self.limits[slot] = 0
        self._free.append(slot)

    def allow(self, slots: Sequence[int], limits: Sequence[int]) -> None:
        """So many rows of these slots may be written, on the host and, in order on the current stream, on the device."""
        self.limits[slots] = limits
        slots_N, limits_N = self.uploads.pack([slots, limits])
        self.limit.index_copy_(0, slots_N.long(), limits_N)

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """See EngineCache.advance. Raises: RowsUnmapped, and then none has advanced."""
        indices = np.atleast_1d(np.asarray(slots, np.int64))
        after = self.lengths[indices] + np.asarray(num_tokens, np.int64)
        if (beyond := after > self.limits[indices]).any():
            slot = int(indices[beyond][0])
            raise RowsUnmapped(f"slot {slot} cannot have {int(after[beyond][0])} rows: its limit is {self.limits[slot]}")
        self.lengths[indices] = after


class SlottedCache:
    """What all caches whose slots are numbers tell the engine alike: see engine.kv_backend.EngineCache."""

    def __init__(self, layout: KVLayout, numbers: SlotNumbers, *, max_tokens: int) -> None:
        self.layout: Final = layout
        self.numbers: Final = numbers
        self.max_tokens: Final = max_tokens

    @property
    def device(self) -> torch.device:
        """Where rows are."""
        return self.numbers.device

    @property
    def num_slots(self) -> int:
        """Numbered from 1."""
        return self.numbers.num_slots

    @property
    def limit(self) -> torch.Tensor:
        """See EngineCache.limit."""
        return self.numbers.limit

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """See EngineCache.lengths."""
        return self.numbers.lengths

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """See EngineCache.limits."""
        return self.numbers.limits

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """See EngineCache.advance."""
        self.numbers.advance(slots, num_tokens)

    def drain(self) -> None:
        """Nothing waits to be given back."""


Planes = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer."""


def planes_of(layout: KVLayout, size: tuple[int, int], device: torch.device) -> Planes:
    """Zeroes [*size, kv_heads, head_dim] for each layer: memory for so many blocks, or slots, of so many rows.

    Raises: ValueError for windows, several groups of layers, and quantised rows.
    """
    group = layout.groups[0]
    if len(layout.groups) > 1 or group.window is not None or [plane.name for plane in group.planes] != ["k", "v"]:
        raise ValueError("a baseline keeps K and V as they are, of all layers alike, without windows: this model has others")

    def zeroes(plane: Plane) -> torch.Tensor:
        return torch.zeros(*size, plane.heads, plane.dim, dtype=plane.dtype, device=device)

    k, v = group.planes
    return {layer: (zeroes(k), zeroes(v)) for layer in layout.group_of}
