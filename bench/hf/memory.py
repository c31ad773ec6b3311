"""The peak of what a cache takes while a batch's rows come, over what these rows need."""

from collections.abc import Callable
from typing import Final

from bench.hf.caches import SYSTEMS, memory_of
from bench.hf.context import Context
from bench.hf.meter import meter_of
from bench.hf.rows import Rows, plan_of
from vmmkv.units import GIB, MIB

PEAK: Final = "peak memory"
TAKEN: Final = "peak memory, from the device"
WASTE: Final = "waste at the peak"
LAYER: Final = "peak of a layer that grows"


def num_steps(context: Context) -> int:
    """Each system at each length."""
    return len(SYSTEMS) * len(context.sizes.memory_contexts)


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Rows of all systems."""
    sizes, seed = context.sizes, context.settings.seed
    rows = Rows(context.rows_of, context.device, batch=sizes.memory_batch, pass_tokens=sizes.fill_tokens, seed=seed)
    for num_tokens in sizes.memory_contexts:
        workload = f"{context.rows_of.name} memory: {rows.batch} sequences of {num_tokens} + {sizes.single_tokens} tokens"
        for system in SYSTEMS:
            begin(f"{workload}, {system}")
            with context.guarded(f"{workload}, {system}"):
                _measure(context, workload, system, num_tokens + sizes.single_tokens, rows)


def _measure(context: Context, workload: str, system: str, num_tokens: int, rows: Rows) -> None:
    plan = plan_of(num_tokens, chunk_tokens=context.sizes.fill_tokens, steps=context.sizes.single_tokens)
    needed_bytes = num_tokens * rows.token_bytes
    layer_bytes = needed_bytes / rows.layers
    config = context.config_of(context.rows_of)
    # A budget that nothing here should come near: what is taken is measured, and not forced.
    with memory_of(system, config, context.device, 2 * needed_bytes) as memory:
        cache = memory.open(rows.batch, num_tokens)
        with meter_of(context.device) as meter:
            rows.write(cache, plan[:-1])
            peak_bytes, taken_bytes = meter.peak_bytes, meter.taken_bytes
            # The last token by hand: one layer is looked at alone.
            rows.draw(len(plan) - 1, 1)
            meter.restart()
            before_bytes = meter.live_bytes + memory.own_bytes
            cache.update(*rows.of_layer(0, 1), 0)
            added_bytes = meter.peak_bytes + memory.own_bytes - before_bytes
            for layer in range(1, rows.layers):
                cache.update(*rows.of_layer(layer, 1), layer)
            peak_bytes = max(peak_bytes, meter.peak_bytes) + memory.own_bytes
            taken_bytes = max(taken_bytes, meter.taken_bytes) + memory.own_bytes
        rows.check(cache, plan)
    context.add_figure(workload, system, PEAK, "GiB", peak_bytes / GIB, needed_bytes / GIB)
    if context.settings.on_gpu:
        context.add_figure(workload, system, TAKEN, "GiB", taken_bytes / GIB, needed_bytes / GIB)
    context.add_figure(workload, system, WASTE, "% of the rows' bytes", 100 * (peak_bytes / needed_bytes - 1), 0.0)
    context.add_figure(workload, system, LAYER, "MiB", (layer_bytes + added_bytes) / MIB, layer_bytes / MIB)
