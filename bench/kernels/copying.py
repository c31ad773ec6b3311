"""Copies inside a GPU: many pages in one launch of ours, against torch's, one large or one for each page.

Legend: M pages copied, S slots of a page each, T rows of a slot, E bytes of a row.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import torch

from bench.kernels.measure import Measurer, Metric
from bench.settings import Settings, Shape
from bench.step_work import HBM_BYTES_PER_S
from bench.timing import WrongNumbers
from vmmkv import KVCache, Pool
from vmmkv.units import PAGE_BYTES

_PAGES: Final = 1024
_PAGES_QUICK: Final = 64

Copier = Callable[[torch.Tensor, list[int], list[int]], Callable[[], object]]
"""From the rows of all slots, the slots that are copied and those that they are copied to: what copies them."""

OpenRows = Callable[[Shape, torch.device, int], AbstractContextManager[torch.Tensor]]
"""The rows of so many slots of a page each."""


def pages_by_name(settings: Settings) -> dict[str, int]:
    """How many are copied, by the name of the case. None on a CPU."""
    num_pages = _PAGES_QUICK if settings.quick else _PAGES
    return {f"{num_pages}x2MiB": num_pages} if settings.on_gpu else {}


def run(measurer: Measurer) -> None:
    """Pages of a tensor, and of vmmkv's memory. Nothing on a CPU."""
    for name, num_pages in pages_by_name(measurer.settings).items():
        if not measurer.settings.cases or name in measurer.settings.cases:
            _measure(measurer, measurer.workload("copy", name), num_pages)


def _measure(measurer: Measurer, workload: str, num_pages: int) -> None:
    settings = measurer.settings
    slots = list(range(2 * num_pages))
    random.Random(settings.seed).shuffle(slots)
    sources, targets = slots[:num_pages], slots[num_pages:]
    kinds: dict[str, OpenRows] = {"cudaMalloc": tensor_rows, "vmmkv": vmmkv_rows}
    for name, open_rows in kinds.items():
        with (
            measurer.guarded(f"{workload}: {name} memory"),
            open_rows(measurer.shape, settings.device, 2 * num_pages) as rows_STE,
        ):
            for system, copier in COPIERS.items():
                prepare = partial(checked, rows_STE, copier, sources, targets)
                measurer.measure(workload, f"{system}, {name}", prepare, _metrics(rows_STE[:num_pages].numel()))
            if rows_STE.is_contiguous():
                halves = rows_STE.flatten().chunk(2)
                measurer.measure(workload, f"copy_ at once, {name}", partial(_at_once, *halves), _metrics(halves[0].numel()))


@contextmanager
def tensor_rows(shape: Shape, device: torch.device, num_slots: int) -> Iterator[torch.Tensor]:
    """[S, T, E] in one tensor."""
    row_bytes = shape.layout.groups[0].row_bytes
    yield torch.empty(num_slots, PAGE_BYTES // row_bytes, row_bytes, dtype=torch.uint8, device=device)


@contextmanager
def vmmkv_rows(shape: Shape, device: torch.device, num_slots: int) -> Iterator[torch.Tensor]:
    """[S, T, E] in slots of a cache with a page each, without its pad."""
    layout = shape.layout
    (group,) = layout.groups
    num_tokens = group.tokens_under(1)
    with Pool(device, (num_slots + 2) * PAGE_BYTES) as pool:
        cache = KVCache(layout, pool, slots=num_slots, max_tokens=num_tokens)
        sequences = cache.open_batch(num_slots)
        for sequence in sequences:
            sequence.grow(num_tokens)
        payload = cache.view(group.layers[0], group.planes[0].name)
        size = (*payload.shape[:2], group.row_bytes // payload.element_size())
        rows_STE = payload.as_strided(size, (*payload.stride()[:2], 1), 0).view(torch.uint8)
        yield rows_STE[sequences[0].slot :, :num_tokens]


def _extents(rows_STE: torch.Tensor, sources: list[int], targets: list[int]) -> Callable[[], object]:
    from vmmkv.kernels.copy import copy_extents

    sources_M, targets_M = (
        torch.tensor([rows_STE[slot].data_ptr() for slot in slots], dtype=torch.int64, device=rows_STE.device)
        for slots in (sources, targets)
    )
    return partial(copy_extents, sources_M, targets_M, rows_STE[0].numel())


def _rows(rows_STE: torch.Tensor, sources: list[int], targets: list[int]) -> Callable[[], object]:
    from vmmkv.kernels.copy import copy_rows

    sources_M, targets_M = (torch.tensor(slots, dtype=torch.int32, device=rows_STE.device) for slots in (sources, targets))
    starts_M = torch.zeros_like(sources_M)
    return partial(copy_rows, rows_STE, sources_M, targets_M, starts_M, torch.full_like(starts_M, rows_STE.shape[1]))


def _page_by_page(rows_STE: torch.Tensor, sources: list[int], targets: list[int]) -> Callable[[], object]:
    pairs = [(rows_STE[source], rows_STE[target]) for source, target in zip(sources, targets, strict=True)]

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source)

    return copy


COPIERS: Final[dict[str, Copier]] = {"copy_extents": _extents, "copy_rows": _rows, "copy_ a page": _page_by_page}


def checked(rows_STE: torch.Tensor, copier: Copier, sources: list[int], targets: list[int]) -> Callable[[], object]:
    """What copies other rows than were there, run once and found right. Raises WrongNumbers."""
    for source, target in zip(sources, targets, strict=True):
        rows_STE[source].random_()
        rows_STE[target].zero_()
    copy = copier(rows_STE, sources, targets)
    copy()
    if not all(torch.equal(rows_STE[source], rows_STE[target]) for source, target in zip(sources, targets, strict=True)):
        raise WrongNumbers("a page differs from what it was copied from")
    return copy


def _at_once(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return partial(target.copy_, source)


def _metrics(size_bytes: int) -> list[Metric]:
    """Of one pass: what is read and what is written."""
    moved_bytes = 2 * size_bytes
    floor_us = moved_bytes / HBM_BYTES_PER_S * 1e6
    return [
        Metric(name="pass", unit="us", amount=1, rate=False, bound=floor_us),
        Metric(name="moved", unit="GB/s", amount=moved_bytes / 1e3, rate=True, bound=HBM_BYTES_PER_S / 1e9),
    ]
