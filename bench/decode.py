"""What reading costs: attention of one new token over all layers, where K and V lie in vmmkv's memory and where not.

The same bytes, with the same strides, lie in a cache (all layers of a token in a page) and in one plain tensor. Over both
run the project's decode kernel and torch's SDPA, which takes a sequence at a time and knows of neither. On a CPU, SDPA alone.

Legend: B sequences, S slots or starts, T rows, H query heads, K kv heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.report import Report
from bench.rows import Row
from bench.settings import Settings, Shape
from bench.step_work import HBM_BYTES_PER_S
from bench.timing import WrongNumbers, summarize, time_in_turn
from vmmkv import KVCache, KVLayout, Pool
from vmmkv.kernels import reference
from vmmkv.units import PAGE_BYTES, round_up

SUITE: Final = "decode"

_SDPA_CALLS: Final = 256
"""SDPA is timed over as many layers as make this many launches, at least one: a batch of 256 in 32 layers would be 8192."""
_START_ROWS: Final = 16
"""In the plain tensor a sequence starts at a multiple of this."""
_TOLERANCE: Final = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_CHECKED: Final = 4
"""Sequences held against the reference, in the first and the last layer."""

Pass = Callable[[], None]
"""Attention of the whole batch over some layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch by the lengths of its sequences, in ascending order."""

    name: str
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert list(self.lengths) == sorted(self.lengths), "the plain tensor has room for the longest at its end only"


class Memory:
    """K and V of a batch: for each layer two views [S, T, K, D], and where in S each sequence is."""

    def __init__(self, name: str, views: list[tuple[torch.Tensor, torch.Tensor]], slots: list[int]) -> None:
        self.name = name
        self.views = views
        self.slots = slots


def run(settings: Settings, report: Report) -> None:
    """Every case. What fails, or gives wrong outputs, is not timed, and raised at the end: the rest is measured meanwhile.

    Raises: ExceptionGroup of WrongNumbers and whatever else a system raised.
    """
    cases = _cases(settings)
    layout = settings.shape.layout
    pages = max(sum(layout.pages_for(length) for length in case.lengths) for case in cases)
    pool = Pool(settings.device, pages * PAGE_BYTES)
    failures: list[Exception] = []
    try:
        with report.progress(SUITE, len(cases)) as begin:
            for case in cases:
                begin(case.name)
                with KVCache(layout, pool, slots=len(case.lengths), max_tokens=case.lengths[-1]) as cache:
                    report.add(*_measure(settings, case, cache, failures))
                if settings.on_gpu:
                    torch.cuda.empty_cache()
    finally:
        pool.close()
    if failures:
        raise ExceptionGroup(f"{len(failures)} of the systems were not timed", failures)


def _cases(settings: Settings) -> list[Case]:
    if not settings.on_gpu:
        return [
            Case(name="2 sequences of 96", lengths=(96, 96)),
            Case(name="skewed: 1 to 128, 4 sequences", lengths=(1, 17, 63, 128)),
        ]
    uniform = ((1, 8192), (8, 8192), (256, 512), (64, 2048))
    cases = [Case(name=f"{count} sequences of {length}", lengths=(length,) * count) for count, length in uniform]
    rng = np.random.default_rng(settings.seed)
    lengths = sorted(rng.integers(64, 1024, size=63, endpoint=True).tolist())
    cases.append(Case(name="skewed: 63 of 64 to 1024, one of 32768", lengths=(*lengths, 32768)))
    return cases[1:3] if settings.quick else cases


def _measure(settings: Settings, case: Case, cache: KVCache, failures: list[Exception]) -> Iterator[Row]:
    shape, device = settings.shape, settings.device
    mapped = _mapped(cache, case, shape)
    memories = (mapped, _plain(mapped, case, shape, settings))
    generator = torch.Generator(device).manual_seed(settings.seed)
    queries = torch.randn(len(case.lengths), shape.heads, shape.head_dim, device=device, generator=generator).to(shape.dtype)
    # By system: what makes one pass, and over how many layers.
    systems: dict[str, tuple[Callable[[Memory, Case, torch.Tensor, list[torch.Tensor]], Pass], int]] = {}
    if settings.on_gpu:
        systems["decode kernel"] = (_kernel_pass, shape.layers)
    systems["SDPA a sequence"] = (_sdpa_pass, max(1, min(shape.layers, _SDPA_CALLS // len(case.lengths))))
    for system, (make_pass, layers) in systems.items():
        try:
            passes: dict[str, Pass] = {}
            for memory in memories:
                outs = [torch.empty_like(queries) for _ in range(layers)]
                run_pass = make_pass(memory, case, queries, outs)
                run_pass()
                _check(f"{system} over {memory.name}", case, mapped, queries, outs)
                passes[f"{system}, {memory.name}"] = run_pass
            samples_us = time_in_turn(passes, device, 5 if settings.quick else 20)
        except Exception as error:
            error.add_note(f"{case.name}: {system}")
            failures.append(error)
        else:
            size_bytes = sum(case.lengths) * layers * shape.layout.groups[0].layer_bytes
            for name, times_us in samples_us.items():
                yield from _rows(case, name, layers, times_us, size_bytes, settings)


def _rows(case: Case, system: str, layers: int, times_us: list[float], size_bytes: int, settings: Settings) -> Iterator[Row]:
    metrics: tuple[tuple[str, str, list[float], float], ...] = (
        (f"pass, layers: {layers}", "us", times_us, size_bytes / HBM_BYTES_PER_S * 1e6),
        ("bandwidth", "GB/s", [size_bytes / time_us / 1e3 for time_us in times_us], HBM_BYTES_PER_S / 1e9),
    )
    for metric, unit, samples, bound in metrics:
        summary = summarize(samples)
        best = bound if settings.on_gpu else None  # the bound is an H200's
        yield Row(suite=SUITE, workload=case.name, system=system, metric=metric, unit=unit, summary=summary, bound=best)


def _mapped(cache: KVCache, case: Case, shape: Shape) -> Memory:
    """Random rows in a cache."""
    slots = []
    for length in case.lengths:
        sequence = cache.open()
        sequence.grow(length)
        sequence.advance(length)
        slots.append(sequence.slot)
        for layer in range(shape.layers):
            sequence.k(layer)[:length].normal_()
            sequence.v(layer)[:length].normal_()
    return Memory("vmmkv", [(cache.k(layer), cache.v(layer)) for layer in range(shape.layers)], slots)


def _plain(mapped: Memory, case: Case, shape: Shape, settings: Settings) -> Memory:
    """The same rows in one tensor, one sequence behind the other.

    Its slots are places where a sequence may start, and overlap: a kernel that keeps to the lengths does not notice, and
    a batch of unlike lengths needs no more memory than its rows.
    """
    layout: KVLayout = shape.layout
    row_elements = layout.groups[0].row_bytes // shape.dtype.itemsize
    starts = np.cumsum([0, *(round_up(length, _START_ROWS) for length in case.lengths)]).tolist()
    rows = torch.empty(starts[-1], row_elements, dtype=shape.dtype, device=settings.device)
    num_places = starts[-2] // _START_ROWS + 1
    views = []
    for layer in range(shape.layers):
        planes = []
        for index, plane in enumerate(("k", "v")):
            view = rows.as_strided(
                (num_places, case.lengths[-1], shape.kv_heads, shape.head_dim),
                (_START_ROWS * row_elements, row_elements, shape.head_dim, 1),
                layout.groups[0].offset_bytes(layer, plane) // shape.dtype.itemsize,
            )
            for start, slot, length in zip(starts[:-1], mapped.slots, case.lengths, strict=True):
                view[start // _START_ROWS, :length] = mapped.views[layer][index][slot, :length]
            planes.append(view)
        views.append((planes[0], planes[1]))
    return Memory("plain tensor", views, [start // _START_ROWS for start in starts[:-1]])


def _kernel_pass(memory: Memory, case: Case, queries: torch.Tensor, outs: list[torch.Tensor]) -> Pass:
    # Loaded here: Triton's kernels need a GPU, or its interpreter.
    from vmmkv.kernels.decode import decode, workspace_elements

    device = queries.device
    slots = torch.tensor(memory.slots, dtype=torch.int32, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    num_sequences, num_heads, head_dim = queries.shape
    num_kv_heads = memory.views[0][0].shape[2]
    elements = workspace_elements(num_sequences, num_heads, num_kv_heads, head_dim, queries.element_size())
    workspace = torch.empty(elements, dtype=torch.float32, device=device)

    def run_pass() -> None:
        for (k, v), out in zip(memory.views, outs, strict=True):
            decode(queries, k, v, lengths, slots, out=out, workspace=workspace)

    return run_pass


def _sdpa_pass(memory: Memory, case: Case, queries: torch.Tensor, outs: list[torch.Tensor]) -> Pass:
    def run_pass() -> None:
        for (k, v), out in zip(memory.views, outs, strict=False):
            for index, (slot, length) in enumerate(zip(memory.slots, case.lengths, strict=True)):
                keys, values = (plane[slot, :length].transpose(0, 1)[None] for plane in (k, v))  # [1, K, T, D]
                query = queries[index][None, :, None]  # [1, H, 1, D]
                out[index] = scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0]

    return run_pass


def _check(system: str, case: Case, mapped: Memory, queries: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """The shortest, the longest and some in between, in the first and the last layer that this system attended to."""
    picked = sorted({round(index) for index in np.linspace(0, len(case.lengths) - 1, _CHECKED)})
    slots = torch.tensor([mapped.slots[index] for index in picked])
    lengths = torch.tensor([case.lengths[index] for index in picked], device=queries.device)
    for layer in {0, len(outs) - 1}:
        wanted = reference.decode(queries[picked], *mapped.views[layer], lengths, slots)
        given = outs[layer][picked].float()
        error = (given - wanted).abs().max().item()
        if not error <= _TOLERANCE[queries.dtype]:  # NaN is not
            raise WrongNumbers(f"{case.name}: {system} is off by {error:.3g} in layer {layer}")


if __name__ == "__main__":
    from bench.run import main

    sys.exit(main([SUITE, *sys.argv[1:]]))
