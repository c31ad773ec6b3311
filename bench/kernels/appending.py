"""Append: new rows of every layer into memory; against torch's copies of the same bytes, which know no slots and positions.

Legend: L layers, N tokens, H query heads, K kv heads, D head dim, R = D / 2 angles, T rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.kernels.cases import Case, uniform
from bench.kernels.formats import Format
from bench.kernels.measure import Measurer, Metric
from bench.kernels.memories import Memory, memories, open_memory, rows_of
from bench.settings import Settings, Shape
from bench.step_work import HBM_BYTES_PER_S
from bench.timing import WrongNumbers
from vmmkv.kernels import reference
from vmmkv.layout import KVType

_TOLERANCE = {"": 0.0, "rope": 1e-2, "fp8": 0.04, "int8": 0.02, "int4": 0.15}
"""The length of the error over that of the rows, by what was done to them."""

_ROPE_BASE = 10_000.0

_CASES = {"1": uniform(1, 1024), "256": uniform(256, 64), "8192": uniform(1, 8192)}
"""By tokens appended, where: at the end of a sequence, of each of 256, and as a whole one."""
_QUICK_CASES = {"16": uniform(16, 32)}


class NewRows:
    """What is appended: random rows and queries of every layer, so that none is in L2 when its turn comes."""

    def __init__(self, num_tokens: int, case: Case, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(heads: int) -> torch.Tensor:
            size = (shape.layers, num_tokens, heads, shape.head_dim)
            return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

        self.k_LNKD, self.v_LNKD, self.q_LNHD = random(shape.kv_heads), random(shape.kv_heads), random(shape.heads)
        each = num_tokens // len(case.lengths)
        sequences = torch.arange(num_tokens, device=device) // each
        self.sequences_N = sequences
        self.positions_N = (case.longest - each + torch.arange(num_tokens, device=device) % each).int()
        rates_R = _ROPE_BASE ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        angles_TR = torch.arange(case.longest, device=device)[:, None] * rates_R
        self.cos_TR, self.sin_TR = angles_TR.cos(), angles_TR.sin()

    def renew(self) -> None:
        """Other values: what an earlier append has left in memory is then wrong."""
        for new in (self.k_LNKD, self.v_LNKD, self.q_LNHD):
            new.normal_()

    def rotated(self, x_NHD: torch.Tensor) -> torch.Tensor:
        """By the angles of their positions, in float32."""
        return reference.rotate(x_NHD, self.positions_N, self.cos_TR, self.sin_TR)


@dataclass(frozen=True, slots=True)
class Append:
    """One append to every layer of a memory, and its check."""

    memory: Memory
    case: Case
    new: NewRows
    rope: bool

    def prepare(self) -> Callable[[], object]:
        """Run once and found right. The queries are rotated again by every pass, which keeps their lengths."""
        self.new.renew()
        before = self.new.q_LNHD[-1].clone()
        run_pass = self._pass()
        run_pass()
        quantised = self.memory.form.quantised
        kind = quantised.kind if quantised else "rope" if self.rope else ""
        for layer in (0, len(self.memory.layers) - 1):
            k_NKD = self.new.k_LNKD[layer]
            self._compare(layer, 0, self.new.rotated(k_NKD) if self.rope else k_NKD.float(), _TOLERANCE[kind])
            self._compare(layer, 1, self.new.v_LNKD[layer].float(), _TOLERANCE[kind])
        if self.rope:
            _check_near("the rotated queries", self.new.q_LNHD[-1].float(), self.new.rotated(before), _TOLERANCE["rope"])
        return run_pass

    def _compare(self, layer: int, plane: int, wanted_NKD: torch.Tensor, tolerance: float) -> None:
        """The first and the last sequence's rows, of K or of V."""
        for index in (0, len(self.case.lengths) - 1):
            rows_TKD = rows_of(self.memory, layer, index, self.case.longest)[plane]
            here = self.new.sequences_N == index
            given = rows_TKD[self.new.positions_N[here].long()]
            _check_near(f"layer {layer}, {'kv'[plane]}", given, wanted_NKD[here], tolerance)

    def _pass(self) -> Callable[[], object]:
        from vmmkv.kernels.attention.append import append

        new, memory = self.new, self.memory
        slots = torch.tensor(memory.slots, dtype=torch.int32, device=new.positions_N.device)
        slots_N = slots[new.sequences_N]
        num_slots = len(memory.layers[0].k if memory.tables_SC is None else memory.tables_SC)
        limit_S = slots.new_full((num_slots,), self.case.longest)

        def run_pass() -> None:
            for layer, planes in enumerate(memory.layers):
                append(
                    *(new.k_LNKD[layer], new.v_LNKD[layer], planes.k, planes.v, slots_N, new.positions_N),
                    limit_S=limit_S,
                    tables_SC=memory.tables_SC,
                    q_NHD=new.q_LNHD[layer] if self.rope else None,
                    cos_TR=new.cos_TR if self.rope else None,
                    sin_TR=new.sin_TR if self.rope else None,
                    k_scale=planes.k_scale,
                    v_scale=planes.v_scale,
                )

        return run_pass


def cases_by_name(settings: Settings) -> dict[str, Case]:
    """None on a CPU."""
    return {} if not settings.on_gpu else _QUICK_CASES if settings.quick else _CASES


def run(measurer: Measurer) -> None:
    """Every number of tokens, into each memory; plain, rotated and quantised. Nothing on a CPU."""
    settings, shape = measurer.settings, measurer.shape
    plain = Format(shape=shape)
    quantised = [Format(shape=shape, quantised=KVType(kind)) for kind in ("fp8", "int8", "int4")]
    for name, case in cases_by_name(settings).items():
        if settings.cases and name not in settings.cases:
            continue
        workload, num_tokens = measurer.workload("append", name), int(name)
        new = NewRows(num_tokens, case, shape, settings.device, settings.seed)
        _measure_copies(measurer, workload, new)
        for kind in memories(shape):
            for form in (plain, *quantised) if kind in ("tensor", "vmmkv") else (plain,):
                with measurer.guarded(f"{workload}: {kind} memory of {form.name}"):
                    memory = open_memory(kind, case, 1, form, settings.device)
                    try:
                        for rope in (False, True) if form is plain else (False,):
                            what = "append" if form is plain and not rope else "append, rope" if rope else f"append {form.name}"
                            metrics = _metrics(shape, num_tokens, form, rope)
                            prepare = Append(memory, case, new, rope).prepare
                            measurer.measure(workload, f"{what}, {memory.name}", prepare, metrics)
                    finally:
                        memory.close()


def _metrics(shape: Shape, num_tokens: int, form: Format, rope: bool) -> list[Metric]:
    """Of one pass. Every byte is counted where it is read and where it is written; indices are not."""
    vector_bytes = shape.head_dim * shape.dtype.itemsize
    size_bytes = num_tokens * (2 * shape.kv_heads * vector_bytes + form.token_bytes)
    if rope:  # queries in place, and a cosine and a sine in float32 for each angle
        size_bytes += num_tokens * (2 * shape.heads * vector_bytes + 4 * shape.head_dim)
    floor_us = size_bytes / HBM_BYTES_PER_S * 1e6
    return [
        Metric(name="layer", unit="us", amount=shape.layers, rate=False, bound=floor_us),
        Metric(name="moved", unit="GB/s", amount=shape.layers * size_bytes / 1e3, rate=True, bound=HBM_BYTES_PER_S / 1e9),
    ]


def _measure_copies(measurer: Measurer, workload: str, new: NewRows) -> None:
    """torch's copy of the same bytes of each layer, K and V in one launch, to where they stay together."""
    source_L = torch.stack([new.k_LNKD, new.v_LNKD], dim=1)

    def prepare() -> Callable[[], object]:
        target_L = torch.empty_like(source_L)

        def run_pass() -> None:
            for target, source in zip(target_L, source_L, strict=True):
                target.copy_(source)

        run_pass()
        if not torch.equal(target_L, source_L):
            raise WrongNumbers("a copy differs from its source")
        return run_pass

    num_tokens = source_L.shape[2]
    metrics = _metrics(measurer.shape, num_tokens, Format(shape=measurer.shape), rope=False)
    measurer.measure(workload, "copy_", prepare, metrics)


def _check_near(what: str, given: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = ((given - wanted).norm() / wanted.norm()).item()
    if not error <= tolerance:  # NaN is not
        raise WrongNumbers(f"{what}: off by {error:.3g} of its length")
