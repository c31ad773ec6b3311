"""Random rows by the hundred gigabytes: a chunk of them is made once and copied everywhere.

Legend: R rows of the chunk, T rows, E bytes of a row.
"""

from collections.abc import Iterator

import torch

from bench.kernels.formats import Format
from vmmkv import Group, Plane
from vmmkv.layout import SCALES
from vmmkv.units import MIB

_CHUNK_BYTES = 256 * MIB
_STRIDE_ROWS = 977
"""By how many rows the chunk is turned from one slot to the next: a prime, so that slots which are near differ."""


class Filler:
    """Rows of a group, all finite. They repeat after a chunk, and start elsewhere in it for each slot.

    So a kernel that reads another slot's rows, or another layer's, gives wrong numbers.
    """

    def __init__(self, form: Format, group: Group, most_rows: int, device: torch.device) -> None:
        # An odd number of rows, so that the rows of slots whose size is a power of two are not in step where they adjoin.
        num_rows = max(1, min(_CHUNK_BYTES // group.row_bytes, most_rows + _STRIDE_ROWS) - 1) | 1
        self._rows_RE = torch.zeros(num_rows, group.row_bytes, dtype=torch.uint8, device=device)
        for layer in group.layers:
            for plane in group.planes:
                start = group.offset_bytes(layer, plane.name)
                values = self._rows_RE[:, start : start + plane.size_bytes].view(plane.dtype)
                values.copy_(_random(form, plane, values))

    def fill(self, rows_TE: torch.Tensor, number: int) -> None:
        """Write the rows of slot `number`, uint8; slots of other groups have other numbers. Cost: a launch for each chunk."""
        for start, end, source in self._pieces(rows_TE.shape[0], number * _STRIDE_ROWS % len(self._rows_RE)):
            rows_TE[start:end].copy_(self._rows_RE[source : source + end - start])

    def _pieces(self, num_rows: int, source: int) -> Iterator[tuple[int, int, int]]:
        start = 0
        while start < num_rows:
            end = min(num_rows, start + len(self._rows_RE) - source)
            yield start, end, source
            start, source = end, 0


def _random(form: Format, plane: Plane, like: torch.Tensor) -> torch.Tensor:
    """Normal values; or payloads and scales of values near them."""
    device, kind = like.device, form.quantised.kind if form.quantised else None
    if plane.name == SCALES:
        return (torch.rand(like.shape, device=device) + 0.5).mul(form.usual_scale)
    if kind == "int8":
        return torch.randint(-127, 128, like.shape, dtype=torch.int8, device=device)
    if kind == "int4":  # the nibbles 1 .. 15 are -7 .. 7
        low, high = (torch.randint(1, 16, like.shape, dtype=torch.uint8, device=device) for _ in range(2))
        return low | (high << 4)
    return torch.randn(like.shape, dtype=form.shape.dtype, device=device)
