"""Attention over a memory: opened for some systems, each checked and timed, and closed behind them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from bench.kernels.batch import Batch, Pass
from bench.kernels.cases import Case
from bench.kernels.formats import Format
from bench.kernels.measure import Measurer, Metric
from bench.kernels.memories import open_memory
from bench.kernels.systems import Bind
from bench.step_work import HBM_BYTES_PER_S

BF16_FLOPS: Final = 7.2e14
"""Dense bf16 operations a second that an H200 reaches at best: the bound of the design."""


def over_memory(
    measurer: Measurer,
    workload: str,
    case: Case,
    kind: str,
    form: Format,
    offered: Mapping[str, Bind],
    *,
    suffix: str = "",
) -> dict[str, float]:
    """Rows of the systems over one memory; `suffix` behind their names. Medians in us of a layer, by system."""
    medians_us: dict[str, float] = {}
    pass_bytes = case.bytes_per_layer(form.token_bytes) * form.shape.layers
    copies = case.copies(pass_bytes) if measurer.settings.on_gpu else 1
    with measurer.guarded(f"{workload}: {kind} memory of {form.name}"):
        memory = open_memory(kind, case, copies, form, measurer.settings.device)
        try:
            batch = Batch(case, copies, memory, measurer.settings.seed)
            medians_us = _medians(measurer, workload, batch, offered, suffix)
        finally:
            memory.close()
    return medians_us


def _medians(measurer: Measurer, workload: str, batch: Batch, offered: Mapping[str, Bind], suffix: str) -> dict[str, float]:
    calls = batch.copies * len(batch.memory.layers)
    metrics = (decode_metrics if batch.case.is_decode else prefill_metrics)(batch.case, batch.memory.form, calls)
    medians_us: dict[str, float] = {}
    for name, bind in offered.items():
        system = f"{name}, {batch.memory.name}{suffix}"
        median_us = measurer.measure(workload, system, partial(_checked, batch, bind), metrics)
        if median_us is not None:
            medians_us[system] = median_us / calls
    return medians_us


def _checked(batch: Batch, bind: Bind) -> Pass:
    """A system's pass over a batch, run once and found right."""
    run_pass = batch.passes(bind)
    batch.check(run_pass())
    return run_pass


def decode_metrics(case: Case, form: Format, calls: int) -> Sequence[Metric]:
    """Of a pass of so many calls, each over one layer. Bounded by bytes; those of queries and outputs are not counted."""
    size_bytes = case.bytes_per_layer(form.token_bytes)
    floor_us = size_bytes / HBM_BYTES_PER_S * 1e6
    return (
        Metric(name="layer", unit="us", amount=calls, rate=False, bound=floor_us),
        Metric(name="bandwidth", unit="GB/s", amount=calls * size_bytes / 1e3, rate=True, bound=HBM_BYTES_PER_S / 1e9),
    )


def prefill_metrics(case: Case, form: Format, calls: int) -> Sequence[Metric]:
    """Of a pass of so many calls, each over one layer. Bounded by operations, of which masked ones are not counted."""
    flops = case.flops_per_layer(form.shape)
    return (
        Metric(name="layer", unit="us", amount=calls, rate=False, bound=flops / BF16_FLOPS * 1e6),
        Metric(name="throughput", unit="TFLOP/s", amount=calls * flops / 1e6, rate=True, bound=BF16_FLOPS / 1e12),
    )
