"""Append, against torch's copy of the same bytes.

Legend: L layers, N tokens, S slots, T rows of a slot, H query heads, K kv heads, D head dim, R = D / 2 angles.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from bench.harness import HBM_BYTES_PER_S, Shape, WrongNumbers
from bench.suites.kernels import Measurer, Metric
from bench.suites.kernels.memories import Case, Format, KernelMemory, memories, open_memory, rows_of
from vmmkv.kernels import reference
from vmmkv.layout import KVType

_TOLERANCE: Final = {"": 0.0, "rope": 1e-2, "fp8": 0.04, "int8": 0.02, "int4": 0.15}
"""The length of the error over that of the rows, by what was done to them."""
_ROPE_BASE: Final = 10_000.0


class AppendedRows:
    """What is appended: random rows and queries of every layer, so that none is in L2 when its turn comes."""

    def __init__(self, num_tokens: int, case: Case, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(heads: int) -> torch.Tensor:
            size = (shape.layers, num_tokens, heads, shape.head_dim)
            return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

        self.k_LNKD, self.v_LNKD, self.q_LNHD = random(shape.kv_heads), random(shape.kv_heads), random(shape.heads)
        each = num_tokens // len(case.lengths)
        self.sequences_N = torch.arange(num_tokens, device=device) // each
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


def prepare_append(memory: KernelMemory, case: Case, new: AppendedRows, rope: bool) -> Callable[[], object]:
    """An append to every layer of a memory, run once and found right.

    The queries are rotated again by every pass, which keeps their lengths.
    """
    from vmmkv.kernels.attention.append import append

    new.renew()
    queries_before = new.q_LNHD[-1].clone()
    slots_N = torch.tensor(memory.slots, dtype=torch.int32, device=new.positions_N.device)[new.sequences_N]
    num_slots = len(memory.layers[0].k if memory.tables_SC is None else memory.tables_SC)
    limit_S = slots_N.new_full((num_slots,), case.longest)

    def run_pass() -> None:
        for layer, planes in enumerate(memory.layers):
            append(
                *(new.k_LNKD[layer], new.v_LNKD[layer], planes.k, planes.v, slots_N, new.positions_N),
                limit_S=limit_S,
                tables_SC=memory.tables_SC,
                q_NHD=new.q_LNHD[layer] if rope else None,
                cos_TR=new.cos_TR if rope else None,
                sin_TR=new.sin_TR if rope else None,
                k_scale=planes.k_scale,
                v_scale=planes.v_scale,
            )

    run_pass()
    quantised = memory.form.quantised
    tolerance = _TOLERANCE[quantised.kind if quantised else "rope" if rope else ""]
    for layer in (0, len(memory.layers) - 1):
        k_NKD, v_NKD = new.k_LNKD[layer], new.v_LNKD[layer]
        wanted = (new.rotated(k_NKD) if rope else k_NKD.float(), v_NKD.float())
        for index in (0, len(case.lengths) - 1):  # the first and the last sequence's rows
            here = new.sequences_N == index
            rows = rows_of(memory, layer, index, case.longest)
            for name, rows_TKD, wanted_NKD in zip("kv", rows, wanted, strict=True):
                given = rows_TKD[new.positions_N[here].long()]
                _check_near(f"layer {layer}, {name}", given, wanted_NKD[here], tolerance)
    if rope:
        _check_near("the rotated queries", new.q_LNHD[-1].float(), new.rotated(queries_before), _TOLERANCE["rope"])
    return run_pass


def run_append(measurer: Measurer, case: Case) -> None:
    """Into each memory: plain, rotated, quantised; and torch's copy of as many bytes, which knows no slots and positions."""
    settings, shape, num_tokens = measurer.settings, measurer.shape, int(case.name)
    plain = Format(shape=shape)
    quantised = [Format(shape=shape, quantised=KVType(kind)) for kind in ("fp8", "int8", "int4")]
    new = AppendedRows(num_tokens, case, shape, settings.device, settings.seed)
    measurer.measure("copy_", partial(_checked_copy, new), _append_metrics(plain, num_tokens, rope=False))
    for kind in memories(shape):
        for form in (plain, *quantised) if kind in ("tensor", "vmmkv") else (plain,):
            with measurer.recorder.guarded(measurer.workload, f"{kind} memory of {form.name}"):
                memory = open_memory(kind, case, 1, form, settings.device)
                try:
                    for rope in (False, True) if form is plain else (False,):
                        what = "append" if form is plain and not rope else "append, rope" if rope else f"append {form.name}"
                        prepare = partial(prepare_append, memory, case, new, rope)
                        measurer.measure(f"{what}, {memory.name}", prepare, _append_metrics(form, num_tokens, rope=rope))
                finally:
                    memory.close()


def _append_metrics(form: Format, num_tokens: int, *, rope: bool) -> list[Metric]:
    """Of a pass over all layers. Every byte is counted where it is read and where it is written; indices are not."""
    shape = form.shape
    vector_bytes = shape.head_dim * shape.dtype.itemsize
    size_bytes = num_tokens * (2 * shape.kv_heads * vector_bytes + form.token_bytes)
    if rope:  # queries in place, and a cosine and a sine in float32 for each angle
        size_bytes += num_tokens * (2 * shape.heads * vector_bytes + 4 * shape.head_dim)
    amount = shape.layers * size_bytes / 1e3
    return [
        Metric(name="layer", unit="us", amount=shape.layers, rate=False, bound=size_bytes / HBM_BYTES_PER_S * 1e6),
        Metric(name="moved", unit="GB/s", amount=amount, rate=True, bound=HBM_BYTES_PER_S / 1e9),
    ]


def _checked_copy(new: AppendedRows) -> Callable[[], object]:
    """torch's copy of each layer's K and V in one launch, to where they stay together."""
    source_L = torch.stack([new.k_LNKD, new.v_LNKD], dim=1)
    target_L = torch.empty_like(source_L)

    def run_pass() -> None:
        for target, source in zip(target_L, source_L, strict=True):
            target.copy_(source)

    run_pass()
    if not torch.equal(target_L, source_L):
        raise WrongNumbers("a copy differs from its source")
    return run_pass


def _check_near(what: str, given: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = ((given - wanted).norm() / wanted.norm()).item()
    if not error <= tolerance:  # NaN is not
        raise WrongNumbers(f"{what}: off by {error:.3g} of its length")
