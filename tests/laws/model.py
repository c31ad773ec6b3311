"""A plain model of a cache: what each sequence wrote, as a stamp a token; and the bytes that these stamps stand for.

On a simulated device a row's bytes are labelled with owner, stamp and group. In real memory they are small integers, which
every type of the tests holds exactly. Every owner, that is a tenant of a cache, has numbers of its own, so that memory which
passed from another shows.

With prefixes, stamps come from a dictionary (`Texts`) by all tokens up to there and their namespace: equal texts have equal
rows, whichever sequence computed them.
"""

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch

from tests.laws.simulated_driver import ZERO, Run, SimulatedDriver
from vmmkv import Group, KVCache, KVLayout, ParkedSlot, Plane, Pool, Sequence
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

OWNER_SPAN = 60


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
# Rows that divide the page, four and eight to one: most matches end inside a page, some just at its end. The window is
# narrower than a page, so there are pages of which a sequence has the last rows only.
EVEN = KVLayout(
    groups=(
        Group(layers=(0,), planes=(plane("k", 2, 256, torch.float16), plane("v", 2, 256, torch.float16))),
        Group(layers=(1,), planes=(plane("k", 1, 128, torch.float32), plane("v", 1, 128, torch.float32)), window=3),
    )
)
PREFIX_LAYOUTS = {**LAYOUTS, "even": EVEN}
TENANTS = ("red", "blue")


@dataclass
class Live:
    """A sequence and what its slot should hold: of each group, the rows of its tokens from `starts[group]` on."""

    cache: KVCache
    sequence: Sequence
    owner: int
    stamps: list[int]
    """Of each token that was written."""
    starts: list[int]
    bases: list[int]
    """The address of row 0 in each group."""
    stream: torch.Stream | None = None
    """Where it was last worked on, on a simulated device."""
    tokens: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=lambda: [0])
    """The position of each token, and of the next one; see `number`."""
    inserted: int | None = None
    """How many of the tokens the prefix cache knows; None if it does not know the sequence."""
    parked: ParkedSlot | None = None
    """Its slot, once it has ended there."""
    is_cut: bool = False
    """Had it more tokens than were parked? Then the last page can be shared, and is exchanged when the slot is adopted."""

    def number(self) -> None:
        """Tokens that were appended follow one another; those that were cut, and all behind them, are to come again."""
        self.at = self.at[: len(self.stamps) + 1] if self.stamps else [0]
        while len(self.at) <= len(self.stamps):
            self.at.append(self.at[-1] + 1)

    @property
    def is_compacted(self) -> bool:
        """Has it seen tokens that it has no rows of?"""
        self.number()
        return self.at[-1] > len(self.stamps)

    def first_number(self) -> int:
        """The least number of this owner."""
        return 1 + self.owner * OWNER_SPAN


class Texts:
    """Stamps by namespace and tokens, and which texts were ever inserted."""

    def __init__(self) -> None:
        self._stamps: dict[tuple[object, tuple[int, ...]], int] = {}
        self._confirmed: set[tuple[object, tuple[int, ...]]] = set()

    def stamps(self, namespace: object, tokens: Seq[int]) -> list[int]:
        """What stands for each token behind those before it."""
        texts = ((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))
        return [self._stamps.setdefault(text, len(self._stamps)) for text in texts]

    def confirm(self, namespace: object, tokens: Seq[int]) -> None:
        """These tokens may be inserted, or have been."""
        self._confirmed.update((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))

    def num_confirmed(self, namespace: object, tokens: Seq[int]) -> int:
        """How many of the first tokens were ever inserted: no prompt can hit more."""
        texts = ((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))
        return sum(text in self._confirmed for text in texts)


def opened(cache: KVCache, sequence: Sequence, *, owner: int, stamps: Seq[int] = ()) -> Live:
    """What a new sequence should hold, whose first tokens have these stamps."""
    starts = [sequence.start(group) for group in range(len(cache.layout.groups))]
    return Live(cache, sequence, owner, list(stamps), starts, addresses(cache, sequence.slot))


def addresses(cache: KVCache, slot: int) -> list[int]:
    """Where row 0 of a slot is, in each group, as the arena views have it."""
    views = [cache.view(group.layers[0], group.planes[0].name) for group in cache.layout.groups]
    return [view.data_ptr() + slot * view.stride(0) * view.element_size() for view in views]


def check_books(driver: FakeDriver, pool: Pool, caches: Iterable[KVCache], *, strays: bool = False) -> int:
    """Recount pool and caches. Returns the bytes that the driver has mapped beside null pages.

    strays: an undoing failed too, so there may be null pages of no cache, which go with the pool.
    """
    caches = [cache for cache in caches if not cache.closed]
    for cache in caches:
        cache.check()
    pool.check()
    null_page = pool.null_page.handle
    num_null = 0 if null_page is None else driver.mappings_of(null_page)
    # Under each group's null slot: what a row and the guard behind it touch.
    wanted = sum(group.pages_between(0, 1 + cache.guard_tokens) for cache in caches for group in cache.layout.groups)
    assert strays or num_null == wanted
    assert driver.used_bytes == pool.created_bytes + (null_page is not None) * PAGE_BYTES  # it is beyond the budget
    return driver.mapped_bytes - num_null * PAGE_BYTES


def mapped_bytes(caches: Iterable[KVCache]) -> int:
    """What caches say is mapped beside null pages; an alias counts too."""
    return sum(stats.mapped_bytes + stats.pending_reclaim_bytes for stats in (cache.stats() for cache in caches))


def check_addresses(driver: FakeDriver, live: Live) -> None:
    """Rows are where they were (law 6), and those that may be written are mapped, with the guard behind them."""
    sequence, guard = live.sequence, live.cache.guard_tokens
    assert addresses(live.cache, sequence.slot) == live.bases
    for index, (group, base, start) in enumerate(zip(live.cache.layout.groups, live.bases, live.starts, strict=True)):
        assert sequence.start(index) == start
        num_rows = sequence.limit + guard - start
        assert sequence.limit <= start or driver.is_accessible(base + start * group.row_bytes, num_rows * group.row_bytes)


def planes_of(layout: KVLayout) -> list[tuple[int, int, str]]:
    """Every plane: (group's index, layer, name)."""
    return [
        (index, layer, each.name)
        for index, group in enumerate(layout.groups)
        for layer in group.layers
        for each in group.planes
    ]


def expected(live: Live, tokens: range, layer: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """What a plane should hold for these tokens: [tokens, heads, dim], different for each token, layer and plane."""
    heads, dim = like.shape[-2:]
    salt = 11 * layer + 5 * len(name) + ord(name[0])
    numbers = [live.first_number() + (live.stamps[token] * 7 + salt) % (OWNER_SPAN - 3) for token in tokens]
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
            start = live.starts[group]
            view = live.sequence.view(layer, name)[tokens.start - start : tokens.stop - start]
        view.copy_(expected(live, tokens, layer, name, view))


SAMPLE = 61
"""Memory changes hands in pages of 2 MiB: one number in 61 sees it as well as all, and a step stays cheap."""


def verify_written(live: Live, every: int = 1) -> None:
    """Every row that was written and is kept, also in a parked slot, is as it was; of each head, every so manieth number."""
    # A parked slot is cut where a leaf that it has rows of is evicted.
    slot, end = (live.sequence.slot, len(live.stamps)) if live.parked is None else (live.parked.slot, live.parked.length)
    for group, layer, name in planes_of(live.cache.layout):
        tokens = range(live.starts[group], end)
        if len(tokens):
            view = live.cache.view(layer, name)[slot, tokens.start : tokens.stop].cpu()
            assert torch.equal(view[..., ::every], expected(live, tokens, layer, name, view)[..., ::every]), (
                f"rows {tokens} of {name} of layer {layer}, owner {live.owner}, are not what was written"
            )


def verify_unwritten(live: Live) -> None:
    """What lies past the length is zero, or was written by the same owner (law 7)."""
    for group, layer, name in planes_of(live.cache.layout):
        view = live.sequence.view(layer, name)[len(live.stamps) - live.starts[group] :, :, ::SAMPLE].cpu()
        first = live.first_number()
        foreign = (view != 0) & ((view < first) | (view >= first + OWNER_SPAN))
        assert not foreign.any(), f"slot {live.sequence.slot} can read another owner's bytes in {name} of layer {layer}"


class Row(NamedTuple):
    """What a row holds on a simulated device: the label of its bytes."""

    owner: int
    stamp: int
    group: int


def append(driver: SimulatedDriver, live: Live, tokens: range) -> None:
    """Launch a kernel that appends rows: a row at or past the device's limit is dropped, as kernels do.

    Rows below the host's limit must not be: the launch counts on them.
    """
    slot, limit, host_limit = live.sequence.slot, live.cache.limit, live.sequence.limit
    groups, bases, owner = live.cache.layout.groups, live.bases, live.owner
    stamps = dict(zip(tokens, live.stamps[tokens.start :], strict=False))

    def act() -> None:
        device_limit = int(limit[slot])
        for token, stamp in stamps.items():
            if token < device_limit:
                for index, group in enumerate(groups):
                    row = Run(0, group.row_bytes, Row(owner, stamp, index), 0)
                    driver.write_bytes(bases[index] + token * group.row_bytes, group.row_bytes, [row])
            elif token < host_limit:
                raise driver.law_broken(f"row {token} of slot {slot} is lost: limit {host_limit}, on the device {device_limit}")

    end = min(tokens.stop, host_limit)
    driver.launch_kernel(act, [span for index in range(len(groups)) for span in _span(live, index, tokens.start, end)])


def attend(driver: SimulatedDriver, live: Live) -> None:
    """Launch a kernel that reads all rows of a sequence, which must be those that were written, and what lies behind them.

    Behind them nothing of another owner may be read (law 7), nor what was never written. Nor may the null page be written.
    """
    cache = live.cache
    end = live.sequence.limit + cache.guard_tokens if live.sequence.limit else 0
    stamps, starts, groups = list(live.stamps), list(live.starts), cache.layout.groups
    null_pages = addresses(cache, 0)

    def act() -> None:
        for index, group in enumerate(groups):
            start, row_bytes = starts[index], group.row_bytes
            if start < end:
                for run in driver.read(live.bases[index] + start * row_bytes, (end - start) * row_bytes):
                    token, at = start + run.start // row_bytes, run.start % row_bytes
                    if token < len(stamps):
                        is_right = run.label == Row(live.owner, stamps[token], index) and run.at == at
                        is_right = is_right and at + run.size_bytes <= row_bytes
                    else:
                        is_right = run.label == ZERO or _may_lie_behind(run, at, Row(live.owner, 0, index), groups)
                    if not is_right:
                        raise driver.law_broken(
                            f"row {token} of {len(stamps)}, group {index}, slot {live.sequence.slot}, owner {live.owner}: {run}"
                        )
            if any(run.label != ZERO for run in driver.read(null_pages[index], row_bytes)):
                raise driver.law_broken("the null page was written")

    spans = [span for index in range(len(groups)) for span in _span(live, index, starts[index], end)]
    driver.launch_kernel(act, spans)


def _span(live: Live, index: int, start: int, end: int) -> list[tuple[int, int]]:
    """The addresses of rows [start, end) of a group; none if there are none."""
    base, row_bytes = live.bases[index], live.cache.layout.groups[index].row_bytes
    return [(base + start * row_bytes, base + end * row_bytes)] if start < end else []


def _may_lie_behind(run: Run, at: int, own: Row, groups: tuple[Group, ...]) -> bool:
    """May old bytes lie behind a sequence's rows? They must be its owner's, and numbers of the same type."""
    if not isinstance(run.label, Row) or run.label.owner != own.owner:
        return False
    group, other = groups[own.group], groups[run.label.group]
    if group.mixes_dtypes or other.mixes_dtypes:
        return group is other and run.at == at
    return group.planes[0].dtype == other.planes[0].dtype


def check_limits(cache: KVCache) -> None:
    """The device's limits are those that the host knows, once all that was launched is done."""
    assert cache.limit.tolist() == cache.limits.tolist(), "the device's limits are not the host's"


def num_common(first: Seq[int], second: Seq[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@contextlib.contextmanager
def large_extents(num_pages: int) -> Iterator[None]:
    """Large extents of so few pages that short sequences have some; and adopting a slot may lose a page."""
    small = {"SIZE_CLASSES": tuple(dict.fromkeys((num_pages, num_pages // 2, 1))), "MOST_LOST_PAGES": 1}
    modules = [module for name, module in sys.modules.items() if name.startswith("vmmkv.")]
    with contextlib.ExitStack() as patches:
        for module in modules:
            for name in small.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, small[name]))
        yield
