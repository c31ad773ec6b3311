"""Where K and V of a batch lie: in one tensor, in vmmkv's memory with all layers of a token in a page or one, in blocks.

A memory is filled when it is opened, and gives everything back to the device when it is closed: the next one needs the room.

Legend: S slots or places, T rows of a slot, P blocks, U rows of a block, C columns of a table, K kv heads, W width, E bytes.
"""

import gc
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from bench.kernels.cases import Case
from bench.kernels.fill import Filler
from bench.kernels.formats import Format
from bench.settings import Shape
from vmmkv import KVCache, Pool
from vmmkv.layout import SCALES
from vmmkv.units import PAGE_BYTES, ceil_div, round_up

GUARD_TOKENS: Final = 256
"""Rows behind each sequence that whole tiles may read: the largest tile of FlashAttention-3 has 192."""

_START_ROWS: Final = 16
"""In one tensor, sequences of unlike lengths start at multiples of this."""

BLOCK: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """One layer's K and V, [S, T, K, W] or [P, U, K, W]; and their scales, [S, T, K] or [K], where they are quantised."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class Memory(Protocol):
    """K and V of `copies` batches: sequence b of copy c is in slot `slots[c * B + b]`. `tables_SC` where they are blocks."""

    name: str
    form: Format
    slots: list[int]
    layers: list[Planes]
    tables_SC: torch.Tensor | None

    def close(self) -> None:
        """Give it back to the device. Idempotent; no view may be used any more."""
        ...


class _Tensor:
    """One tensor, with the strides of vmmkv's memory that has all layers of a token in a row.

    Sequences lie end to end, guard and all. Where their lengths differ, slots are places at which one may start, and overlap:
    a kernel that keeps to the lengths does not notice. The longest lies last, so that every place has T rows behind it.
    """

    def __init__(self, case: Case, copies: int, form: Format, device: torch.device) -> None:
        self.name = "cudaMalloc" if device.type == "cuda" else "malloc"
        self.form = form
        self.tables_SC: torch.Tensor | None = None
        lengths = case.lengths * copies
        padded = [round_up(length + GUARD_TOKENS, _START_ROWS) for length in lengths]
        unit_rows, longest = (padded[0] if case.is_uniform else _START_ROWS), max(padded)
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        starts, num_rows = [0] * len(lengths), 0
        for index in order:
            starts[index] = num_rows
            num_rows += padded[index]
        self.slots = [start // unit_rows for start in starts]
        group = form.whole_rows
        self._rows_TE = torch.empty(num_rows, group.row_bytes, dtype=torch.uint8, device=device)
        Filler(form, group, num_rows, device).fill(self._rows_TE, 0)

        def view(layer: int, name: str) -> torch.Tensor:
            plane = group.plane(name)
            itemsize = plane.dtype.itemsize
            row_elements = group.row_bytes // itemsize
            return self._rows_TE.view(plane.dtype).as_strided(
                (max(self.slots) + 1, longest, plane.heads, plane.dim),
                (unit_rows * row_elements, row_elements, plane.head_stride, 1),
                group.offset_bytes(layer, name) // itemsize,
            )

        self.layers = [_planes(form, layer, view, device) for layer in _layers(form)]

    def close(self) -> None:
        """See Memory.close."""
        self.layers = []
        self._rows_TE = torch.empty(0)
        _release()


class _Vmmkv:
    """A cache of slots that adjoin, mapped to the end of each sequence and its guard."""

    def __init__(self, case: Case, copies: int, form: Format, device: torch.device, layers_per_row: int) -> None:
        some = "all layers" if layers_per_row == form.shape.layers else "1 layer"
        self.name = f"vmmkv, {some} a page"
        self.form = form
        self.tables_SC: torch.Tensor | None = None
        layout = form.layout(layers_per_row)
        lengths = case.lengths * copies
        pages = sum(layout.pages_for(length, GUARD_TOKENS) for length in lengths)
        # Each group's pad is a page more, and one of the guard's may be.
        self._pool = Pool(device, (pages + 2 * len(layout.groups)) * PAGE_BYTES)
        try:
            self._cache = cache = KVCache(
                layout, self._pool, slots=len(lengths), max_tokens=case.longest, guard_tokens=GUARD_TOKENS
            )
            sequences = cache.open_batch(len(lengths))
            for sequence, length in zip(sequences, lengths, strict=True):
                sequence.grow(length)
            self.slots = [sequence.slot for sequence in sequences]
            filler = Filler(form, layout.groups[0], case.longest, device)  # the other groups are like it
            for group in layout.groups:
                payload = cache.view(group.layers[0], "k")
                row_elements = group.row_bytes // payload.element_size()
                # Whole rows, of which the first layer's K is the beginning.
                rows_STE = payload.as_strided((*payload.shape[:2], row_elements), (*payload.stride()[:2], 1), 0)
                for slot, length in zip(self.slots, lengths, strict=True):
                    filler.fill(rows_STE[slot, :length].view(torch.uint8), slot + group.layers[0] * len(rows_STE))
            self.layers = [_planes(form, layer, cache.view, device) for layer in _layers(form)]
        except BaseException:
            self._pool.close()
            raise

    def close(self) -> None:
        """See Memory.close."""
        self.layers = []
        self._pool.close()
        _release()


class _Paged:
    """Blocks `[blocks, 16, kv_heads, head_dim]` for K and for V of each layer, given to sequences in no order."""

    def __init__(self, case: Case, copies: int, form: Format, device: torch.device) -> None:
        if form.quantised is not None:
            raise ValueError(f"blocks are of plain K and V only, not {form.name}")
        self.name = f"paged {BLOCK}"
        self.form = form
        shape = form.shape
        counts = [ceil_div(length, BLOCK) for length in case.lengths * copies]
        num_blocks = sum(counts)
        shuffled = torch.randperm(num_blocks, dtype=torch.int32)
        tables_SC = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for table, blocks in zip(tables_SC, torch.split(shuffled, counts), strict=True):
            table[: len(blocks)] = blocks
        self.tables_SC: torch.Tensor | None = tables_SC.to(device)
        self.slots = list(range(len(counts)))
        size = (shape.layers, 2, num_blocks, BLOCK, shape.kv_heads, shape.head_dim)
        self._blocks = torch.empty(size, dtype=shape.dtype, device=device)
        layer = form.layout(1).groups[0]
        rows_TE = self._blocks.view(-1, 2 * shape.kv_heads * shape.head_dim).view(torch.uint8)
        Filler(form, layer, rows_TE.shape[0], device).fill(rows_TE, 0)
        self.layers = [Planes(k=self._blocks[layer, 0], v=self._blocks[layer, 1]) for layer in _layers(form)]

    def close(self) -> None:
        """See Memory.close."""
        self.layers = []
        self._blocks = torch.empty(0)
        _release()


MEMORIES: Final = ("tensor", "vmmkv", "vmmkv-1", "paged")


def memories(shape: Shape) -> tuple[str, ...]:
    """The kinds that differ for a shape: with a single layer, all layers are one layer."""
    return MEMORIES if shape.layers > 1 else tuple(kind for kind in MEMORIES if kind != "vmmkv-1")


def open_memory(kind: str, case: Case, copies: int, form: Format, device: torch.device) -> Memory:
    """Memory of a kind in MEMORIES, filled. Cost: on CUDA vmmkv's takes some 80 us a page, 3 s for 69 GB."""
    if kind == "tensor":
        return _Tensor(case, copies, form, device)
    if kind == "paged":
        return _Paged(case, copies, form, device)
    return _Vmmkv(case, copies, form, device, 1 if kind == "vmmkv-1" else form.shape.layers)


def rows_of(memory: Memory, layer: int, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence in float32, dequantised: [T, K, D] each."""
    planes, slot = memory.layers[layer], memory.slots[index]
    if memory.tables_SC is None:
        pairs = ((planes.k, planes.k_scale), (planes.v, planes.v_scale))
        k, v = (_values(payload[slot, :length], scale, slot, length) for payload, scale in pairs)
        return k, v
    blocks = memory.tables_SC[slot, : ceil_div(length, BLOCK)].long()
    k, v = (plane[blocks].flatten(0, 1)[:length].float() for plane in (planes.k, planes.v))
    return k, v


def _values(payload_TKW: torch.Tensor, scale: torch.Tensor | None, slot: int, length: int) -> torch.Tensor:
    if scale is None:
        return payload_TKW.float()
    from vmmkv.kernels.quantise import dequantise

    return dequantise(payload_TKW, scale if scale.dim() == 1 else scale[slot, :length])


def _layers(form: Format) -> range:
    return range(form.shape.layers)


class _View(Protocol):
    def __call__(self, layer: int, plane: str, /) -> torch.Tensor: ...


def _planes(form: Format, layer: int, view: _View, device: torch.device) -> Planes:
    k, v = view(layer, "k"), view(layer, "v")
    if form.quantised is None:
        return Planes(k=k, v=v)
    if form.quantised.scale == "token":
        scales = view(layer, SCALES)
        return Planes(k=k, v=v, k_scale=scales[..., 0], v_scale=scales[..., 1])
    k_scale, v_scale = form.usual_scale * (0.5 + torch.rand(2, form.shape.kv_heads, device=device))
    return Planes(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _release() -> None:
    """What torch's allocator keeps is not free for the driver's own calls, nor for a tensor of another size."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
