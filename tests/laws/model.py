"""A plain model of a cache: what each sequence wrote, as a stamp a token; and the bytes that these stamps stand for.

Every owner, that is a tenant of a cache, has numbers of its own, so that memory which passed from another shows. All
are small integers, which every type of the tests holds exactly.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from vmmkv import Group, KVCache, KVLayout, ParkedSlot, Plane, Sequence

OWNER_SPAN = 60
NUM_OWNERS = 4


def plane(name: str, heads: int, kib: int, dtype: torch.dtype) -> Plane:
    """A plane of `kib` KiB a layer."""
    return Plane(name=name, heads=heads, dim=kib * 1024 // heads // dtype.itemsize, dtype=dtype)


# Rows of some hundred KiB, that straddle pages at every phase: a page holds about three tokens.
ONE_GROUP = KVLayout(
    groups=(Group(layers=(0, 1), planes=(plane("k", 2, 172, torch.float16), plane("v", 2, 172, torch.float16))),)
)
TWO_GROUPS = KVLayout(
    groups=(
        Group(layers=(0, 2), planes=(plane("k", 2, 200, torch.float32), plane("v", 1, 90, torch.float32))),
        Group(layers=(1,), planes=(plane("k", 2, 400, torch.bfloat16), plane("v", 2, 524, torch.bfloat16)), window=3),
    )
)
MIXED_DTYPES = KVLayout(
    groups=(
        Group(layers=(3,), planes=(plane("latent", 1, 600, torch.bfloat16),), window=4),
        Group(
            layers=(7,),
            planes=(plane("k", 1, 300, torch.uint8), plane("v", 1, 300, torch.uint8), plane("scale", 1, 66, torch.float32)),
        ),
    )
)
LAYOUTS = {"one_group": ONE_GROUP, "two_groups": TWO_GROUPS, "mixed_dtypes": MIXED_DTYPES}


@dataclass
class Rows:
    """What one slot should hold: `stamps[token]` for the tokens written; of each group, rows from `starts[group]` on."""

    owner: int
    stamps: list[int]
    starts: list[int]
    bases: list[int]
    """The address of row 0 in each group."""

    def first_number(self) -> int:
        """The least number of this owner."""
        return 1 + self.owner * OWNER_SPAN


@dataclass
class Live:
    """A running sequence and what it should hold."""

    cache: KVCache
    sequence: Sequence
    rows: Rows
    batch: list[int] = field(default_factory=list)


@dataclass
class Kept:
    """A parked slot and what it should hold."""

    cache: KVCache
    parked: ParkedSlot
    rows: Rows


def addresses(cache: KVCache, slot: int) -> list[int]:
    """Where row 0 of a slot is, in each group, as the arena views have it."""
    views = [cache.view(group.layers[0], group.planes[0].name) for group in cache.layout.groups]
    return [view.data_ptr() + slot * view.stride(0) * view.element_size() for view in views]


def num_pads(caches: Iterable[KVCache]) -> int:
    """Mappings of the pad: for each group of every cache that is open, what a row and the guard behind it touch."""
    opened = [cache for cache in caches if not cache.closed]
    return sum(group.pages_between(0, 1 + cache.guard_tokens) for cache in opened for group in cache.layout.groups)


def planes_of(layout: KVLayout) -> list[tuple[int, int, str]]:
    """Every plane: (group's index, layer, name)."""
    return [
        (index, layer, each.name)
        for index, group in enumerate(layout.groups)
        for layer in group.layers
        for each in group.planes
    ]


def expected(rows: Rows, tokens: range, layer: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """What a plane should hold for these tokens: [tokens, heads, dim], different for each token, layer and plane."""
    heads, dim = like.shape[-2:]
    salt = 11 * layer + 5 * len(name) + ord(name[0])
    numbers = [rows.first_number() + (rows.stamps[token] * 7 + salt) % (OWNER_SPAN - 3) for token in tokens]
    return torch.tensor(numbers, dtype=like.dtype).view(-1, 1, 1) + pattern(heads, dim, like.dtype)


@functools.cache
def pattern(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, 2, 0, ... over the heads and dims of a token, so that no two neighbours are alike."""
    return torch.arange(heads * dim, dtype=torch.int32).remainder_(3).view(heads, dim).to(dtype)


def write(live: Live, tokens: range, *, through_arena: bool) -> None:
    """Write what is expected of these tokens into every plane, through the sequence's views or the cache's."""
    for group, layer, name in planes_of(live.cache.layout):
        if through_arena:
            view = live.cache.view(layer, name)[live.sequence.slot, tokens.start : tokens.stop]
        else:
            start = live.rows.starts[group]
            view = live.sequence.view(layer, name)[tokens.start - start : tokens.stop - start]
        view.copy_(expected(live.rows, tokens, layer, name, view))


SAMPLE = 61
"""Memory changes hands in pages of 2 MiB: one number in 61 sees it as well as all, and a step stays cheap."""


def verify_written(live: Live, every: int = 1) -> None:
    """Every row that was written and is kept reads as it was written; of each head, every so manieth number."""
    for group, layer, name in planes_of(live.cache.layout):
        start, length = live.rows.starts[group], len(live.rows.stamps)
        view = live.sequence.view(layer, name)[: length - start].cpu()
        wanted = expected(live.rows, range(start, length), layer, name, view)
        assert torch.equal(view[..., ::every], wanted[..., ::every]), (
            f"rows [{start}, {length}) of {name} of layer {layer} in slot {live.sequence.slot} are not what was written"
        )


def verify_unwritten(live: Live) -> None:
    """What lies past the length is zero, or was written by the same owner (law 7)."""
    for group, layer, name in planes_of(live.cache.layout):
        view = live.sequence.view(layer, name)[len(live.rows.stamps) - live.rows.starts[group] :, :, ::SAMPLE].cpu()
        first = live.rows.first_number()
        foreign = (view != 0) & ((view < first) | (view >= first + OWNER_SPAN))
        assert not foreign.any(), f"slot {live.sequence.slot} can read another owner's bytes in {name} of layer {layer}"
