"""What kernels read: batches by their lengths, what a row holds, and where K and V of a batch lie.

    tensor           one torch tensor with the strides of vmmkv's rows of all layers
    vmmkv            a cache whose layout has one group: all layers of a token are in one row
    paged            blocks of 16 rows for each layer, given to sequences in no order, and tables
    paged-128        the same of 128 rows: a block is a tile of our kernels
    vmmkv-aliased    as vmmkv, but all sequences are forks of one: the same memory at many addresses
    paged-shared     as paged, but all tables name the same blocks

A memory is filled when it is opened, and gives everything back to the device when it is closed: the next one needs the room.

Legend: S slots or places, T rows of a slot, P blocks, U rows of a block, C columns of a table, K kv heads, W width, E bytes,
R rows of a chunk.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import torch

from bench.harness import Shape, release_memory
from vmmkv import Group, KVCache, KVLayout, Plane, Pool
from vmmkv.layout import SCALES, KVType
from vmmkv.units import KIB, MIB, PAGE_BYTES, ceil_div, round_up
from vmmkv_kernels.quantise import dequantise

# cases

COLD_BYTES: Final = 256 * MIB
"""A pass reads at least so much, five times an H200's L2 cache, so that nothing of it is there when the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch: of each sequence its length, and how many of its last tokens ask (None: one each, a decode step)."""

    name: str
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None = None

    @property
    def queries(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        queries = self.counts or (1,) * len(self.lengths)
        assert all(1 <= count <= length for count, length in zip(queries, self.lengths, strict=True)), self.name
        return queries

    @property
    def is_decode(self) -> bool:
        """One query of each sequence?"""
        return self.counts is None

    @property
    def is_uniform(self) -> bool:
        """Are all sequences of one length?"""
        return len(set(self.lengths)) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def copies(self, pass_bytes: int) -> int:
        """How many such batches a pass goes over, by turns, so that none of it is found in L2; 1 for a large one."""
        return ceil_div(COLD_BYTES, pass_bytes) if self.is_decode else 1

    def flops_per_layer(self, shape: Shape) -> float:
        """Multiplications and additions of both products: 4 D for each query head, query and row that it sees."""
        seen = sum(
            count * (length - count) + count * (count + 1) // 2
            for count, length in zip(self.queries, self.lengths, strict=True)
        )
        return 4.0 * shape.heads * shape.head_dim * seen


def uniform(count: int, length: int) -> Case:
    """`count` sequences of one length, named as in 64x8K."""
    name = f"{length // KIB}K" if length % KIB == 0 else str(length)
    return Case(name=f"{count}x{name}", lengths=(length,) * count)


SKEWED: Final = Case(name="skewed", lengths=(*(KIB,) * 40, 64 * KIB, *(KIB,) * 23))
"""One of 64K among 63 of 1K; not the last, nor the first."""

TWIN: Final = Case(name="64x2032", lengths=(math.ceil(sum(SKEWED.lengths) / 64),) * 64)
"""The same bytes as SKEWED in sequences of one length: 127 K rows / 64 = 2032."""


# formats


@dataclass(frozen=True, kw_only=True)
class Format:
    """Rows of a model's shape. `quantised` None: K and V in the shape's own dtype."""

    shape: Shape
    quantised: KVType | None = None

    @property
    def name(self) -> str:
        """As rows name it."""
        if self.quantised is None:
            return str(self.shape.dtype).removeprefix("torch.")
        at_end = " at the end" if self.quantised.scale == "token" else ""
        return f"{self.quantised.kind} {self.quantised.scale} scales{at_end}"

    @property
    def planes(self) -> tuple[Plane, ...]:
        """k and v; and their scales, if these are in the row."""
        shape, quantised = self.shape, self.quantised
        dtype = shape.dtype if quantised is None else quantised.dtype
        width = shape.head_dim if quantised is None else quantised.width(shape.head_dim)
        payloads = tuple(Plane(name=name, heads=shape.kv_heads, dim=width, dtype=dtype) for name in ("k", "v"))
        if quantised is None or quantised.scale == "head":
            return payloads
        return (*payloads, Plane(name=SCALES, heads=shape.kv_heads, dim=2, dtype=torch.float16, trailing=True))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, without padding: what reading it costs at least."""
        return sum(plane.size_bytes for plane in self.planes)

    @property
    def usual_scale(self) -> float:
        """By which random payloads have a deviation of about 1."""
        return 1.0 if self.quantised is None else {"fp8": 1.0, "int8": 1 / 73, "int4": 1 / 4.3}[self.quantised.kind]

    def group(self, num_layers: int) -> Group:
        """Rows of so many layers."""
        return Group(layers=tuple(range(num_layers)), planes=self.planes)


# filling

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
        """Write the rows of slot `number`, uint8. Cost: a launch for each chunk."""
        source = number * _STRIDE_ROWS % len(self._rows_RE)
        start = 0
        while start < len(rows_TE):
            chunk_RE = self._rows_RE[source : source + len(rows_TE) - start]
            rows_TE[start : start + len(chunk_RE)].copy_(chunk_RE)
            start, source = start + len(chunk_RE), 0


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


# memories

GUARD_TOKENS: Final = 256
"""Rows behind each sequence that whole tiles may read: the largest tile of FlashAttention-3 has 192."""

_START_ROWS: Final = 16
"""In one tensor, sequences of unlike lengths start at multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLayer:
    """One layer's K and V, [S, T, K, W] or [P, U, K, W]; and their scales, [S, T, K] or [K], where they are quantised."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class KernelMemory:
    """K and V of `copies` batches: sequence b of copy c is in slot `slots[c * B + b]`. `tables_SC` where they are blocks."""

    name: str
    slots: list[int]
    tables_SC: torch.Tensor | None = None
    block: int = 0
    """Rows of a block."""

    def __init__(self, form: Format, device: torch.device) -> None:
        self.form: Final = form
        self.device: Final = device
        self.layers: list[TimedLayer] = []
        self._stack = ExitStack()
        """Closes what is not a view in `layers`."""

    def close(self) -> None:
        """Give it back to the device. Idempotent; no view may be used any more."""
        self.layers = []
        self._stack.close()
        release_memory(self.device)

    def _add_layers(self, view: Callable[[int, str], torch.Tensor]) -> None:
        """All layers, by the views of their planes."""
        for layer in range(self.form.shape.layers):
            k, v = view(layer, "k"), view(layer, "v")
            k_scale, v_scale = None, None
            if self.form.quantised is not None and self.form.quantised.scale == "token":
                k_scale, v_scale = view(layer, SCALES).unbind(-1)
            elif self.form.quantised is not None:
                k_scale, v_scale = self.form.usual_scale * (0.5 + torch.rand(2, self.form.shape.kv_heads, device=self.device))
            self.layers.append(TimedLayer(k=k, v=v, k_scale=k_scale, v_scale=v_scale))


class _TensorMemory(KernelMemory):
    """One tensor, with the strides of vmmkv's memory that has all layers of a token in a row.

    Sequences lie end to end, guard and all. Where their lengths differ, slots are places at which one may start, and overlap:
    a kernel that keeps to the lengths does not notice. The longest lies last, so that every place has T rows behind it.
    """

    def __init__(self, kind: str, case: Case, copies: int, form: Format, device: torch.device) -> None:
        super().__init__(form, device)
        self.name = "cudaMalloc" if device.type == "cuda" else "malloc"
        lengths = case.lengths * copies
        padded = [round_up(length + GUARD_TOKENS, _START_ROWS) for length in lengths]
        unit_rows, longest = (padded[0] if case.is_uniform else _START_ROWS), max(padded)
        starts, num_rows = [0] * len(lengths), 0
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            starts[index] = num_rows
            num_rows += padded[index]
        self.slots = [start // unit_rows for start in starts]
        group = form.group(form.shape.layers)
        rows_TE = torch.empty(num_rows, group.row_bytes, dtype=torch.uint8, device=device)
        Filler(form, group, num_rows, device).fill(rows_TE, 0)

        def view(layer: int, name: str) -> torch.Tensor:
            plane = group.plane(name)
            itemsize = plane.dtype.itemsize
            row_elements = group.row_bytes // itemsize
            return rows_TE.view(plane.dtype).as_strided(
                (max(self.slots) + 1, longest, plane.heads, plane.dim),
                (unit_rows * row_elements, row_elements, plane.head_stride, 1),
                group.offset_bytes(layer, name) // itemsize,
            )

        self._add_layers(view)


class _VmmkvMemory(KernelMemory):
    """A cache of slots that adjoin, mapped to the end of each sequence and its guard."""

    def __init__(self, kind: str, case: Case, copies: int, form: Format, device: torch.device) -> None:
        super().__init__(form, device)
        aliased, group = kind == "vmmkv-aliased", form.group(form.shape.layers)
        self.name = "vmmkv, aliased" if aliased else "vmmkv, all layers a page"
        layout = KVLayout(groups=(group,))
        lengths = case.lengths * copies
        pages = sum(layout.pages_for(length, GUARD_TOKENS) for length in lengths)
        pool = Pool(device, (pages + 2) * PAGE_BYTES)  # one for the null slot, and one of the guard's may be more
        with ExitStack() as stack:
            stack.callback(pool.close)
            sizes = {"slots": len(lengths), "max_tokens": case.longest, "guard_tokens": GUARD_TOKENS}
            cache = KVCache(layout, pool, **sizes)
            if aliased:
                source = cache.open()
                source.grow(case.longest)
                source.advance(case.longest)
                sequences = [source, *cache.fork(source, len(lengths) - 1)]
            else:
                sequences = cache.open_batch(len(lengths))
                for sequence, length in zip(sequences, lengths, strict=True):
                    sequence.grow(length)
            self.slots = [sequence.slot for sequence in sequences]
            filler = Filler(form, group, case.longest, device)
            payload = cache.view(0, "k")
            row_elements = group.row_bytes // payload.element_size()
            # Whole rows, of which the first layer's K is the beginning.
            rows_STE = payload.as_strided((*payload.shape[:2], row_elements), (*payload.stride()[:2], 1), 0)
            for slot, length in zip(self.slots[:1] if aliased else self.slots, lengths, strict=not aliased):
                filler.fill(rows_STE[slot, :length].view(torch.uint8), slot)
            self._add_layers(cache.view)
            self._stack = stack.pop_all()


class _PagedMemory(KernelMemory):
    """Blocks `[blocks, rows, kv_heads, head_dim]` for K and for V of each layer, given to sequences in no order."""

    def __init__(self, kind: str, case: Case, copies: int, form: Format, device: torch.device) -> None:
        assert form.quantised is None, "blocks are of plain K and V only"
        super().__init__(form, device)
        shared = kind == "paged-shared"
        self.block = block = 128 if kind == "paged-128" else 16
        self.name = f"paged {block}, shared" if shared else f"paged {block}"
        shape = form.shape
        counts = [ceil_div(length, block) for length in case.lengths * copies]
        num_blocks = max(counts) if shared else sum(counts)
        shuffled = torch.randperm(num_blocks, dtype=torch.int32)
        tables_SC = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for table, blocks in zip(tables_SC, [shuffled] * len(counts) if shared else torch.split(shuffled, counts), strict=True):
            table[: len(blocks)] = blocks
        self.tables_SC = tables_SC.to(device)
        self.slots = list(range(len(counts)))
        size = (shape.layers, 2, num_blocks, block, shape.kv_heads, shape.head_dim)
        planes = torch.empty(size, dtype=shape.dtype, device=device)
        rows_TE = planes.view(-1, 2 * shape.kv_heads * shape.head_dim).view(torch.uint8)
        Filler(form, form.group(1), rows_TE.shape[0], device).fill(rows_TE, 0)
        self._add_layers(lambda layer, name: planes[layer, "kv".index(name)])


MEMORIES: Final = ("tensor", "vmmkv", "paged", "paged-128")


def open_memory(kind: str, case: Case, copies: int, form: Format, device: torch.device) -> KernelMemory:
    """Memory of a kind, filled. Cost: on CUDA vmmkv's takes some 80 us a page, 3 s for 69 GB."""
    opened = {"tensor": _TensorMemory, "paged": _PagedMemory, "vmmkv": _VmmkvMemory}[kind.partition("-")[0]]
    return opened(kind, case, copies, form, device)


def rows_of(memory: KernelMemory, layer: int, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence in float32, dequantised: [T, K, D] each."""
    planes, slot = memory.layers[layer], memory.slots[index]

    def values(payload: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if memory.tables_SC is not None:
            blocks = memory.tables_SC[slot, : ceil_div(length, memory.block)].long()
            return payload[blocks].flatten(0, 1)[:length].float()
        if scale is None:
            return payload[slot, :length].float()
        return dequantise(payload[slot, :length], scale if scale.dim() == 1 else scale[slot, :length])

    return values(planes.k, planes.k_scale), values(planes.v, planes.v_scale)
