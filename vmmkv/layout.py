"""Layout of a token's bytes: groups of layers, planes in a row, rows in pages; and the capacity maths.

    slot    | row 0 | row 1 | row 2 | ...                                one sequence's addresses in one group
    pages   |    2 MiB    |    2 MiB    | ...                            rows may straddle pages
    row     | layer 0: k, v | layer 1: k, v | ... | padding to 128 B     one token
    plane   | head 0: dim | head 1: dim | ...                            one layer's k, or v, of one token

All layers of a token share a row, so that a 2 MiB page holds 16 tokens of Llama-3.1-8B and not 512 tokens of one of
its layers.

Quantised K and V with a scale for each token and head have one plane more in a layer, and it trails: it stands behind
all layers' payloads, which so keep their alignment. K's and V's scale of a head are a pair, which one load of 4 bytes gets.

    row     | 0: k, v | 1: k, v | ... | 0: scales | 1: scales | ... | padding
    scales  | head 0: of K, of V | head 1: of K, of V | ...              one layer's scales of one token
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

from vmmkv.arguments import check_num_layers, whole
from vmmkv.errors import LayoutError
from vmmkv.model_config import Attention, beside_rows, described, read
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes, round_up

if TYPE_CHECKING:
    import torch


_PAYLOAD_DTYPES: Final = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}

KV_KINDS: Final = tuple(_PAYLOAD_DTYPES)
KV_KIND_ALIASES: Final = {"fp8_e4m3": "fp8"}
"""vLLM's other names of kinds, for options of users."""
KV_SCALES: Final = ("token", "head")


@dataclass(frozen=True, slots=True)
class KVType:
    """K and V that are kept quantised: a *payload* of few bits an element, times a scale. `KVType("int4")`.

    `kind`: "fp8" is float8_e4m3fn; "int8"; "int4" is uint8 of half the width, two elements in a byte.
    `scale`: "token" is a float16 for each head of each token, kept in the row; "head" is static, one for each head of a
    layer, kept beside the kernels and in no row (fp8 alone: it has the range for that).

    Raises: LayoutError for any other kind or scale.
    """

    kind: str
    scale: str = "token"

    def __post_init__(self) -> None:
        if self.kind not in KV_KINDS:
            raise LayoutError(f"kind={self.kind!r}: K and V are quantised to {', '.join(KV_KINDS)}")
        if self.scale not in KV_SCALES:
            raise LayoutError(f"scale={self.scale!r}: a scale belongs to a {' or to a '.join(KV_SCALES)}")
        if self.scale == "head" and self.kind != "fp8":
            raise LayoutError(
                f"{self.kind} has no range for a static scale of a whole head; scale='token' works, or kind='fp8'"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the payload's elements."""
        import torch  # the command line knows the kinds without it

        dtype: torch.dtype = getattr(torch, _PAYLOAD_DTYPES[self.kind])
        return dtype

    def width(self, dim: int) -> int:
        """Payload elements of a vector of `dim`. Raises LayoutError for an odd one in int4."""
        if self.kind == "int4" and dim % 2:
            raise LayoutError(f"int4 keeps two elements in a byte, and head size {dim} is odd; int8 works, or an even size")
        return dim // 2 if self.kind == "int4" else dim

    def __str__(self) -> str:
        return f"{self.kind}, scales by {self.scale}"


ROW_ALIGNMENT_BYTES = 128
"""A row is padded to this, a GPU's cache line."""

PLANE_ALIGNMENT_BYTES = 16
"""A plane starts on this: the widest load of a GPU thread, and what the attention kernels ask of strides."""

SECTOR_BYTES = 32
"""Smallest read of a GPU's memory: no trailing part of a layer lies in more of these than it must."""

SCALES: Final = "scales"
"""The plane of the scales of quantised K and V: [heads, 2], K's first."""

_PAYLOADS: Final = ("torch.int8", "torch.uint8")
"""Types of planes beside the floating-point ones: what something is quantised to, or bytes."""

_WHAT_WORKS: Final = (
    "keys and values are torch.bfloat16, torch.float16, torch.float32 or another floating-point type of torch's; "
    f"{' and '.join(_PAYLOADS)} are for those that are quantised, by dtype="
    f"{' or '.join(f'KVType({kind!r})' for kind in KV_KINDS)}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A named part of a layer's row: `heads` vectors of `dim` elements of `dtype`.

    Elements of one byte begin each head on PLANE_ALIGNMENT_BYTES, as all others do by themselves in the sizes that models have.

    K and V are planes; a latent (MLA) model has a single one; quantised K and V have a plane of scales beside them.
    A `trailing` plane stands behind all layers' other planes, at the row's end.
    """

    name: str
    heads: int
    dim: int
    dtype: torch.dtype
    trailing: bool = False
    head_stride: int = field(init=False, repr=False, compare=False)
    """Elements from one head to the next."""

    def __post_init__(self) -> None:
        for name in ("heads", "dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name), error=LayoutError))
        if self.heads < 1 or self.dim < 1:
            raise LayoutError(f"plane {self.name!r} has heads={self.heads}, dim={self.dim}; both must be at least 1")
        import torch

        if not isinstance(self.dtype, torch.dtype):
            raise LayoutError(f"dtype={self.dtype!r}: {_WHAT_WORKS}")
        if not self.dtype.is_floating_point and str(self.dtype) not in _PAYLOADS:
            raise LayoutError(f"dtype={self.dtype}: {_WHAT_WORKS}")
        if not self.name.isidentifier():
            raise LayoutError(f"a plane's name must be an identifier such as 'k', not {self.name!r}")
        head_stride = round_up(self.dim, PLANE_ALIGNMENT_BYTES) if self.dtype.itemsize == 1 else self.dim
        object.__setattr__(self, "head_stride", head_stride)

    @property
    def size_bytes(self) -> int:
        """Bytes of this plane in one layer of one token."""
        return self.heads * self.head_stride * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a row: the same planes, the same window.

    `layers` are the model's own layer numbers. `window` is the number of last tokens that these layers attend to, or
    None for all: rows that lie wholly before it can be given back with `Sequence.advance_start`.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("a group needs at least one layer")
        for layer in self.layers:
            whole("layers", layer, error=LayoutError)
        if len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise LayoutError(f"a group's layers must be different numbers from 0, not {self.layers}")
        if not self.planes:
            raise LayoutError("a group needs at least one plane")
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise LayoutError(f"two planes of a group have one name: {[plane.name for plane in self.planes]}")
        if self.window is not None and whole("window", self.window, error=LayoutError) < 1:
            raise LayoutError(f"window={self.window}: a window has at least 1 token; None means all")
        if self.row_bytes > PAGE_BYTES:
            fitting = PAGE_BYTES // self.layer_bytes
            remedy = f"put at most {fitting} layers in a group" if fitting else "use a smaller head count, head size or dtype"
            raise LayoutError(
                f"a row of {len(self.layers)} layers is {format_bytes(self.row_bytes)}, more than a page of "
                f"{format_bytes(PAGE_BYTES)}; {remedy}"
            )

    @functools.cached_property
    def plane_offsets(self) -> Mapping[str, int]:
        """Offset of each plane in its layer's part of the row, in bytes; of a trailing one in the layer's trailing part."""
        offsets, leading_bytes, trailing_bytes = {}, 0, 0
        for plane in self.planes:
            if plane.trailing:
                offsets[plane.name] = round_up(trailing_bytes, plane.dtype.itemsize)
                trailing_bytes = offsets[plane.name] + plane.size_bytes
            else:
                offsets[plane.name] = leading_bytes
                leading_bytes += round_up(plane.size_bytes, PLANE_ALIGNMENT_BYTES)
        return offsets

    @functools.cached_property
    def leading_bytes(self) -> int:
        """Distance in bytes from one layer's planes to the next one's, without the trailing planes."""
        size_bytes = self._end_bytes(trailing=False)
        # Trailing planes begin on a sector; K and V of one width are a multiple of it anyhow.
        return round_up(size_bytes, SECTOR_BYTES if self.trailing_bytes else PLANE_ALIGNMENT_BYTES)

    @functools.cached_property
    def trailing_bytes(self) -> int:
        """Distance in bytes from one layer's trailing planes to the next one's; 0 if there are none.

        A power of two up to 16, then a multiple of 16: so that they cross no more borders of sectors than their size asks.
        """
        size_bytes = self._end_bytes(trailing=True)
        if size_bytes <= PLANE_ALIGNMENT_BYTES:
            return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
        return round_up(size_bytes, PLANE_ALIGNMENT_BYTES)

    def _end_bytes(self, *, trailing: bool) -> int:
        ends = (self.plane_offsets[plane.name] + plane.size_bytes for plane in self.planes if plane.trailing == trailing)
        return max(ends, default=0)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a row, scales and all."""
        return self.leading_bytes + self.trailing_bytes

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one token: `layers * layer_bytes`, padded to ROW_ALIGNMENT_BYTES."""
        return round_up(len(self.layers) * self.layer_bytes, ROW_ALIGNMENT_BYTES)

    @property
    def mixes_dtypes(self) -> bool:
        """Do the planes differ in type? Then bytes left by another row can be NaN under a new phase."""
        return len({plane.dtype for plane in self.planes}) > 1

    def offset_bytes(self, layer: int, plane: str) -> int:
        """Offset of a layer's plane in the row. Raises: LayoutError naming the layers and planes there are."""
        trailing = self.plane(plane).trailing
        if layer not in self.layers:
            raise LayoutError(f"no layer {layer} in this group; it has {', '.join(map(str, self.layers))}")
        index = self.layers.index(layer)
        if trailing:
            return len(self.layers) * self.leading_bytes + index * self.trailing_bytes + self.plane_offsets[plane]
        return index * self.leading_bytes + self.plane_offsets[plane]

    def plane(self, name: str) -> Plane:
        """The plane of that name. Raises LayoutError naming those there are."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise LayoutError(f"no plane {name!r} in this group; it has {', '.join(self.plane_offsets)}")

    def page_of(self, token: int) -> int:
        """The page of a slot in which the row of a token begins."""
        return token * self.row_bytes // PAGE_BYTES

    def pages_between(self, start_token: int, end_token: int) -> int:
        """Pages that the rows [start_token, end_token) of a slot touch."""
        if end_token <= start_token:
            return 0
        return ceil_div(end_token * self.row_bytes, PAGE_BYTES) - self.page_of(start_token)

    def peak_pages(self, num_tokens: int, guard_tokens: int, *, sliding: bool) -> int:
        """Pages that a sequence holds at most on its way to `num_tokens`.

        The next row is mapped before the one that it makes superfluous goes, so a window keeps `window` rows; these
        stand at every phase in time, and touch at most one page more than at the best.
        """
        whole = self.pages_between(0, num_tokens + guard_tokens if num_tokens else 0)
        if self.window is None or not sliding:
            return whole
        kept_bytes = min(num_tokens, self.window) * self.row_bytes + guard_tokens * self.row_bytes
        return min(whole, ceil_div(kept_bytes, PAGE_BYTES) + 1)

    def tokens_under(self, num_pages: int) -> int:
        """Rows that lie wholly in the first `num_pages` of a slot."""
        return num_pages * PAGE_BYTES // self.row_bytes

    def slot_tokens(self, num_tokens: int) -> int:
        """Rows of a slot that has addresses for `num_tokens`: a slot is a whole number of pages and of rows.

        At most 2 MiB / 128 B = 16,384 rows more than asked for: addresses, not memory.
        """
        stride_bytes = math.lcm(PAGE_BYTES, self.row_bytes)
        return round_up(num_tokens * self.row_bytes, stride_bytes) // self.row_bytes


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The groups of a model. Most models have one; hybrid and sliding-window models have several."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        layers = [layer for group in self.groups for layer in group.layers]
        if len(set(layers)) != len(layers):
            raise LayoutError(f"a layer is in two groups: {sorted(layer for layer in set(layers) if layers.count(layer) > 1)}")

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | KVType,
        value_dim: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> KVLayout:
        """K and V of the same heads in every layer; `windows` gives each layer's window, and layers of one window a group.

        A `dtype` such as KVType("int4") keeps them quantised: planes k and v are the payload, and a plane of scales
        behind them holds two float16 for each head, K's and V's, unless the scales are static.
        """
        layers = whole("layers", layers, error=LayoutError)
        check_num_layers(layers)
        if windows is not None and len(windows) != layers:
            raise LayoutError(f"{counted(len(windows), 'window')} for {counted(layers, 'layer')}")
        kv_heads, head_dim = whole("kv_heads", kv_heads, error=LayoutError), whole("head_dim", head_dim, error=LayoutError)
        planes = kv_planes(kv_heads, head_dim, head_dim if value_dim is None else value_dim, dtype)
        return cls.of_rows({layer: (planes, windows[layer] if windows else None) for layer in range(layers)})

    @classmethod
    def of_rows(cls, rows: Mapping[int, tuple[tuple[Plane, ...], int | None]]) -> KVLayout:
        """The layout of layers by their planes and their window. Layers that are alike in both are a group.

        They are several groups of about equal size where a row of them all would be more than a page.
        """
        alike: dict[tuple[tuple[Plane, ...], int | None], list[int]] = {}
        for layer, shape in rows.items():
            alike.setdefault(shape, []).append(layer)
        groups = []
        for (planes, window), layers in alike.items():
            fitting = max(1, PAGE_BYTES // Group(layers=(layers[0],), planes=planes).layer_bytes)
            size = ceil_div(len(layers), ceil_div(len(layers), fitting))
            parts = (tuple(layers[first : first + size]) for first in range(0, len(layers), size))
            groups += [Group(layers=part, planes=planes, window=window) for part in parts]
        return cls(groups=tuple(groups))

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype | KVType) -> KVLayout:
        """The layout of a transformers configuration: an object such as `model.config`, or the dict of a config.json.

        Layers that read another layer's rows are in no group. `dtype` is that of K and V, as in `uniform`; what type the
        weights have does not matter here.
        Cost: see `vmmkv.model_config.read`.
        Raises: LayoutError for what `read` refuses, and for layers that keep anything else than keys and values by token.
        """
        rows: dict[int, tuple[tuple[Plane, ...], int | None]] = {}
        model = read(config)
        if others := beside_rows(model.layers):
            raise LayoutError(
                f"the configuration ({model.family}) is of a model that keeps {described(others)}; only keys and values of all "
                f"tokens or of a window are rows of a KVLayout yet; give KVLayout(groups=...) for other planes of your own"
            )
        for layer, parts in enumerate(model.layers):
            for part in parts:
                if isinstance(part, Attention):
                    rows[layer] = kv_planes(part.heads, part.key_dim, part.value_dim, dtype), part.window
        return cls.of_rows(rows)

    @functools.cached_property
    def group_of(self) -> Mapping[int, int]:
        """The group's index, by layer."""
        return {layer: index for index, group in enumerate(self.groups) for layer in group.layers}

    def of_rank(self, num_ranks: int) -> Self:
        """The layout of one of several ranks that share the heads: the same on each.

        Heads that cannot be shared evenly are filled up; a head that there are more ranks than is on several.
        """
        groups = [
            replace(group, planes=tuple(replace(each, heads=ceil_div(each.heads, num_ranks)) for each in group.planes))
            for group in self.groups
        ]
        return replace(self, groups=tuple(groups))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all groups."""
        return sum(group.row_bytes for group in self.groups)

    def start_for(self, group: Group, num_tokens: int) -> int:
        """The first row that a sequence of `num_tokens` tokens still needs in a group when the next token comes."""
        return 0 if group.window is None else max(0, num_tokens - group.window + 1)

    def token_bytes(self, num_tokens: int) -> int:
        """Bytes that the rows of one sequence need, without what lies before its windows."""
        return sum(group.row_bytes * (num_tokens - self.start_for(group, num_tokens)) for group in self.groups)

    def pages_for(self, num_tokens: int, guard_tokens: int = 0) -> int:
        """Pages that one sequence of `num_tokens` tokens holds, over all groups, with a guard of mapped rows past its end."""
        return sum(group.pages_between(self.start_for(group, num_tokens), num_tokens + guard_tokens) for group in self.groups)

    def peak_pages(self, num_tokens: int, guard_tokens: int = 0, *, sliding: bool = True) -> int:
        """Pages that one sequence holds at most on its way to `num_tokens`: never less for more tokens.

        `sliding`: windowed groups give their rows back as soon as they can; else they keep them all, as while a whole
        prompt is computed.
        """
        return sum(group.peak_pages(num_tokens, guard_tokens, sliding=sliding) for group in self.groups)

    def tokens_in(self, num_pages: int, guard_tokens: int = 0, *, sliding: bool = True) -> int:
        """The longest single sequence that `num_pages` can hold, all the way from its first token (see `peak_pages`).

        A windowed group stops growing at its window, so a layout of windowed groups alone can hold any length; that
        is reported as 2**31 - 1, the most that a length can be.
        """
        peak_pages = functools.partial(self.peak_pages, guard_tokens=guard_tokens, sliding=sliding)
        return bisect_right(range(2**31), num_pages, key=peak_pages) - 1

    def identity(self, fingerprint: str) -> bytes:
        """32 bytes that differ between layouts and between models: rows of another identity are never taken for these.

        `fingerprint` tells models apart whose layouts are alike: weights, rotary settings, static scales.
        """
        groups = [
            (
                group.layers,
                group.window,
                group.row_bytes,
                [(plane.name, plane.heads, plane.dim, str(plane.dtype), plane.trailing) for plane in group.planes],
            )
            for group in self.groups
        ]
        return hashlib.blake2b(repr((groups, fingerprint)).encode(), digest_size=32).digest()


def kv_planes(heads: int, k_dim: int, v_dim: int, dtype: torch.dtype | KVType) -> tuple[Plane, ...]:
    """Planes of K and V, and of their scales if these are in the row."""
    import torch  # the command line reads this module without it

    dims = {"k": k_dim, "v": v_dim}
    if not isinstance(dtype, KVType):
        return tuple(Plane(name=name, heads=heads, dim=dim, dtype=dtype) for name, dim in dims.items())
    payloads = tuple(Plane(name=name, heads=heads, dim=dtype.width(dim), dtype=dtype.dtype) for name, dim in dims.items())
    if dtype.scale == "head":
        return payloads
    return *payloads, Plane(name=SCALES, heads=heads, dim=len(dims), dtype=torch.float16, trailing=True)
