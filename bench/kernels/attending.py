"""The parts that attend: decode over plain rows and over quantised ones, and prefill.

The memories of a case are measured one after the other, for two large ones and the rest do not fit on a GPU together. The
first of them is measured again at the end, so that a drift would show.
"""

from collections.abc import Sequence
from typing import Final

from bench.kernels import cases, systems
from bench.kernels.attention import over_memory
from bench.kernels.cases import Case
from bench.kernels.formats import Format, Place
from bench.kernels.measure import Measurer
from bench.kernels.memories import MEMORIES, memories
from bench.kernels.systems import Bind
from bench.settings import Settings, Shape
from vmmkv.layout import KVType

AGAIN: Final = ", again"
"""Behind the name of the memory that is measured a second time."""

_QUANTISED: Final = (cases.uniform(64, 8192), cases.uniform(16, 4096))


def decode_cases(settings: Settings) -> Sequence[Case]:
    """All that this machine can decode."""
    return _for_device(settings, cases.DECODE, cases.QUICK_DECODE, cases.CPU_DECODE)


def prefill_cases(settings: Settings) -> Sequence[Case]:
    """All that this machine can prefill."""
    return _for_device(settings, cases.PREFILL, cases.QUICK_PREFILL, cases.CPU_PREFILL)


def quantised_cases(settings: Settings) -> Sequence[Case]:
    """None on a CPU."""
    return _for_device(settings, _QUANTISED, cases.QUICK_DECODE[1:], ())


def run_decode(measurer: Measurer) -> None:
    """Every decode case."""
    offered = systems.decode_systems(measurer.settings)
    for case in cases.chosen(decode_cases(measurer.settings), measurer.settings.cases):
        _over_all_memories(measurer, measurer.workload("decode", case.name), case, offered)


def run_prefill(measurer: Measurer) -> None:
    """Every prefill case."""
    offered = systems.prefill_systems(measurer.settings)
    for case in cases.chosen(prefill_cases(measurer.settings), measurer.settings.cases):
        _over_all_memories(measurer, measurer.workload("prefill", case.name), case, offered)


def run_quantised(measurer: Measurer) -> None:
    """Our decode over quantised rows, and over plain ones beside them; with the scales in either place. Nothing on a CPU."""
    settings, shape = measurer.settings, measurer.shape
    for case in cases.chosen(quantised_cases(settings), settings.cases):
        workload = measurer.workload("quantised", case.name)
        for memory in ("tensor", "vmmkv"):
            plain = Format(shape=shape)
            plain_us = over_memory(measurer, workload, case, memory, plain, {f"decode {plain.name}": systems.bind_decode})
            # Where scales are is a question of the strides: one memory answers it.
            for form in _quantised(shape, ("end", "layer") if memory == "tensor" else ("end",)):
                medians_us = over_memory(measurer, workload, case, memory, form, {f"decode {form.name}": systems.bind_decode})
                for system, median_us in medians_us.items():
                    for of_plain_us in plain_us.values():
                        measurer.add_ratio(workload, system, "speed-up", of_plain_us / median_us)


def _quantised(shape: Shape, places: Sequence[Place]) -> list[Format]:
    token_scales = [
        Format(shape=shape, quantised=KVType(kind), scales_at=place) for kind in ("fp8", "int8", "int4") for place in places
    ]
    return [Format(shape=shape, quantised=KVType("fp8", "head")), *token_scales]


def _over_all_memories(measurer: Measurer, workload: str, case: Case, offered: dict[str, Bind]) -> None:
    form = Format(shape=measurer.shape)
    for memory in memories(measurer.shape):
        # What SDPA makes of vmmkv's memory one of the two layouts shows.
        some = {name: bind for name, bind in offered.items() if memory != "vmmkv-1" or not name.startswith("SDPA")}
        over_memory(measurer, workload, case, memory, form, some)
    ours = next(iter(offered))
    over_memory(measurer, workload, case, MEMORIES[0], form, {ours: offered[ours]}, suffix=AGAIN)


def _for_device(settings: Settings, full: Sequence[Case], quick: Sequence[Case], cpu: Sequence[Case]) -> Sequence[Case]:
    return cpu if not settings.on_gpu else quick if settings.quick else full
