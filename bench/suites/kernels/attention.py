"""What attends over a memory: our kernels, torch's SDPA, FlashAttention-3, and on a CPU the reference.

A system is bound to one copy of a batch, run once, held against the reference, and then timed for each layer. A system that
cannot do a case raises Inapplicable, which is no failure: SDPA knows no lengths, no slots and no blocks.

Memories of a case are measured one after the other: two large ones do not fit on a GPU together. The first is measured again at
the end, so that a drift would show.

Legend: B sequences, N queries, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a table, H query heads,
K kv heads, D head dim.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.baselines import fa3
from bench.harness import BF16_FLOPS, HBM_BYTES_PER_S, Settings, WrongNumbers
from bench.suites.kernels import Inapplicable, Measurer, Metric
from bench.suites.kernels.memories import (
    MEMORIES,
    Case,
    Format,
    KernelMemory,
    TimedLayer,
    memories,
    open_memory,
    rows_of,
)
from vmmkv.kernels import reference
from vmmkv.layout import KVType

AGAIN: Final = ", again"
"""Behind the name of the memory that is measured a second time."""

# a batch, and its check

TOLERANCE: Final = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""The length of the error over the length of what is wanted. Both shrink alike with the number of rows attended to."""

_CHECKED_SEQUENCES: Final = 4
_CHECKED_QUERIES: Final = 3

Pass = Callable[[], list[torch.Tensor]]
"""Attention of every layer of every copy of a batch. Returns its outputs, [N, H, D] each, copy by copy."""


class Queries:
    """The queries of a case, the same for every copy and layer, and where its sequences are in a memory."""

    def __init__(self, case: Case, copies: int, memory: KernelMemory, seed: int) -> None:
        self.case, self.copies, self.memory = case, copies, memory
        self.shape = shape = memory.form.shape
        self.device = device = memory.layers[0].k.device
        generator = torch.Generator(device).manual_seed(seed)
        size = (sum(case.queries), shape.heads, shape.head_dim)
        self.q_NHD = torch.randn(size, device=device, generator=generator, dtype=torch.float32).to(shape.dtype)
        self.lengths_B = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.starts = np.cumsum([0, *case.queries])
        """[B + 1] on the host: sequence b's queries are [starts[b], starts[b + 1])."""
        self.query_starts = torch.tensor(self.starts, dtype=torch.int32, device=device)

    def slots(self, copy: int) -> list[int]:
        """Slots of a copy, by sequence."""
        size = len(self.case.lengths)
        return self.memory.slots[copy * size : (copy + 1) * size]

    def slots_B(self, copy: int) -> torch.Tensor:
        """The same on the device, int32."""
        return torch.tensor(self.slots(copy), dtype=torch.int32, device=self.device)

    def passes(self, bind: "Callable[[Queries, int], Attend]") -> Pass:
        """A pass from what binds a system to one copy. Its outputs are allocated once, if the system writes to them."""
        attends = [bind(self, copy) for copy in range(self.copies)]
        outs = [torch.empty_like(self.q_NHD) for _ in range(self.copies * len(self.memory.layers))]

        def run_pass() -> list[torch.Tensor]:
            layers = [(attend, planes) for attend in attends for planes in self.memory.layers]
            return [attend(planes, out) for (attend, planes), out in zip(layers, outs, strict=True)]

        return run_pass

    def check(self, outputs: list[torch.Tensor]) -> None:
        """Hold some queries of the first and the last output against the reference. Raises WrongNumbers."""
        for index, picked_N, wanted in self._expected:
            given = outputs[index][picked_N].float()
            error = ((given - wanted).norm() / wanted.norm()).item()
            if not error <= TOLERANCE[self.shape.dtype]:  # NaN is not
                raise WrongNumbers(f"output {index} of {len(outputs)} is off by {error:.3g} of its length")

    @cached_property
    def _expected(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index of an output, queries, and what they should give; computed once, for all systems."""
        last = self.copies * len(self.memory.layers) - 1
        return [(index, *self._reference(index)) for index in sorted({0, last})]

    def _reference(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        copy, layer = divmod(index, len(self.memory.layers))
        picked_N, wanted = [], []
        for b in self._spread(len(self.case.lengths), _CHECKED_SEQUENCES) | {int(np.argmax(self.case.lengths))}:
            length, count = self.case.lengths[b], self.case.queries[b]
            k_TKD, v_TKD = rows_of(self.memory, layer, copy * len(self.case.lengths) + b, length)
            for query in self._spread(count, _CHECKED_QUERIES):
                row = int(self.starts[b]) + query
                position = torch.tensor([length - count + query], device=self.device)
                # Rows behind the query's own are masked: leave them out, for memory's sake.
                seen = length - count + query + 1
                picked_N.append(row)
                wanted.append(reference.attend(self.q_NHD[row : row + 1], k_TKD[:seen], v_TKD[:seen], position))
        return torch.tensor(picked_N, device=self.device), torch.cat(wanted)

    @staticmethod
    def _spread(count: int, picked: int) -> set[int]:
        return {round(index) for index in np.linspace(0, count - 1, picked)}


Attend = Callable[[TimedLayer, torch.Tensor], torch.Tensor]
"""One layer of one copy: given its planes and memory for the output; gives the output, there or elsewhere."""


# FlashAttention-3


def bind_fa3(batch: Queries, copy: int) -> Attend:
    """Over slots by their numbers, over blocks by their tables.

    A view of slots is cut to the longest sequence, since TMA must know where tensors end. How the batch is split is computed
    before, as an engine computes it once a step for all layers, and is not timed.
    """
    case, shape, memory = batch.case, batch.shape, batch.memory
    if memory.form.quantised is not None:
        raise Inapplicable("FlashAttention-3 quantises its queries too: not the same work")
    slots_B, is_paged = batch.slots_B(copy), memory.tables_SC is not None
    asked = fa3.Batch(
        query_starts=batch.query_starts,
        lengths_B=batch.lengths_B,
        max_queries=max(case.queries),
        max_rows=case.longest,
        tables_BC=None if memory.tables_SC is None else memory.tables_SC[slots_B.long()],
        slots_B=None if is_paged else slots_B,
    )
    planned = asked.plan(batch.q_NHD, shape.kv_heads, memory.block if is_paged else None)

    def attend(planes: TimedLayer, out: torch.Tensor) -> torch.Tensor:
        k, v = (plane if is_paged else plane[:, : case.longest] for plane in (planes.k, planes.v))
        return asked.attend(batch.q_NHD, k, v, planned, out, None)

    return attend


# our kernels, the reference and SDPA

Bind = Callable[[Queries, int], Attend]


def _systems(settings: Settings, name: str, ours: Bind) -> dict[str, Bind]:
    """By name, what attends here, ours first."""
    if not settings.on_gpu:
        return {"reference": bind_reference, "SDPA": lambda batch, copy: _bind_sdpa(batch, copy, None)}
    systems: dict[str, Bind] = {
        name: ours,
        "SDPA flash": lambda batch, copy: _bind_sdpa(batch, copy, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": lambda batch, copy: _bind_sdpa(batch, copy, SDPBackend.CUDNN_ATTENTION),
    }
    if fa3.why_absent(settings.fa3, settings.device) is None:
        systems["FA3"] = bind_fa3
    return systems


def bind_decode(batch: Queries, copy: int) -> Attend:
    """`decode`, over slots or over blocks."""
    from vmmkv.kernels.attention.decode import decode

    where, tables_SC = (batch.lengths_B, batch.slots_B(copy)), batch.memory.tables_SC
    return lambda planes, out: decode(
        batch.q_NHD, planes.k, planes.v, *where, tables_SC=tables_SC, out=out, k_scale=planes.k_scale, v_scale=planes.v_scale
    )


def bind_prefill(batch: Queries, copy: int) -> Attend:
    """`prefill`, over slots or over blocks."""
    from vmmkv.kernels.attention.prefill import prefill

    where, tables_SC = (batch.query_starts, batch.lengths_B, batch.slots_B(copy)), batch.memory.tables_SC
    return lambda planes, out: prefill(
        batch.q_NHD, planes.k, planes.v, *where, tables_SC=tables_SC, out=out, k_scale=planes.k_scale, v_scale=planes.v_scale
    )


def bind_reference(batch: Queries, copy: int) -> Attend:
    """Plain torch in float32, a sequence at a time: on a CPU, where the kernels cannot run."""
    case, size = batch.case, len(batch.case.lengths)
    layer_of = {id(planes): layer for layer, planes in enumerate(batch.memory.layers)}

    def attend(planes: TimedLayer, out: torch.Tensor) -> torch.Tensor:
        for b, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
            k_TKD, v_TKD = rows_of(batch.memory, layer_of[id(planes)], copy * size + b, length)
            rows = slice(int(batch.starts[b]), int(batch.starts[b + 1]))
            positions = torch.arange(length - count, length, device=batch.device)
            out[rows] = reference.attend(batch.q_NHD[rows], k_TKD, v_TKD, positions)
        return out

    return attend


def _bind_sdpa(batch: Queries, copy: int, backend: SDPBackend | None) -> Attend:
    """Over the batched view where all lengths are the same; for prefill over the view of a single sequence."""
    case, slots = batch.case, batch.slots(copy)
    if batch.memory.tables_SC is not None or batch.memory.form.quantised is not None:
        raise Inapplicable("SDPA takes neither block tables nor quantised K and V")
    if not case.is_uniform or slots != list(range(slots[0], slots[0] + len(slots))):
        raise Inapplicable("SDPA takes one tensor: sequences of one length, in slots that adjoin")
    if not case.is_decode and len(slots) > 1:
        raise Inapplicable("SDPA takes batches of one query each, or one sequence")
    whole = case.queries[0] == case.longest
    if not case.is_decode and not whole and backend is not SDPBackend.FLASH_ATTENTION:
        raise Inapplicable("only SDPA's flash backend has a causal mask for queries late in a sequence, without a tensor of it")
    # [B, H, 1, D], or [1, H, N, D].
    queries = batch.q_NHD[:, :, None] if case.is_decode else batch.q_NHD.transpose(0, 1)[None]

    def attend(planes: TimedLayer, out: torch.Tensor) -> torch.Tensor:
        keys, values = (
            plane[slots[0] : slots[0] + len(slots), : case.longest].transpose(1, 2) for plane in (planes.k, planes.v)
        )
        if case.is_decode or whole:
            given = scaled_dot_product_attention(queries, keys, values, is_causal=not case.is_decode, enable_gqa=True)
        else:
            mask = causal_lower_right(case.queries[0], case.longest)
            given = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return given[:, :, 0] if case.is_decode else given[0].transpose(0, 1)

    if backend is None:
        return attend

    def attend_by_backend(planes: TimedLayer, out: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(planes, out)

    return attend_by_backend


# parts


def run_decode(measurer: Measurer, case: Case) -> None:
    """Every system over every memory."""
    _over_all_memories(measurer, case, _systems(measurer.settings, "decode", bind_decode))


def run_prefill(measurer: Measurer, case: Case) -> None:
    """Every system over every memory."""
    _over_all_memories(measurer, case, _systems(measurer.settings, "prefill", bind_prefill))


def run_shared(measurer: Measurer, case: Case) -> None:
    """Our decode of sequences whose rows are all the same: each with rows of its own, aliased, and under shared tables.

    The kernel and the bytes it asks for are the same. But aliases are one memory, and L2, which is indexed by physical
    addresses, reads it once for many sequences; so it does under tables.
    """
    for memory in ("vmmkv", "vmmkv-aliased", "paged-shared"):
        over_memory(measurer, case, memory, Format(shape=measurer.shape), {"decode": bind_decode})


def run_quantised(measurer: Measurer, case: Case) -> None:
    """Our decode over quantised rows, and over plain ones beside them."""
    for memory in ("tensor", "vmmkv"):
        plain = Format(shape=measurer.shape)
        (plain_us,) = over_memory(measurer, case, memory, plain, {f"decode {plain.name}": bind_decode}).values() or (None,)
        for kv_type in (KVType("fp8", "head"), *(KVType(kind) for kind in ("fp8", "int8", "int4"))):
            form = Format(shape=measurer.shape, quantised=kv_type)
            for system, median_us in over_memory(measurer, case, memory, form, {f"decode {form.name}": bind_decode}).items():
                if plain_us is not None:
                    measurer.recorder.figure(measurer.workload, system, "speed-up", "x", plain_us / median_us)


def _over_all_memories(measurer: Measurer, case: Case, offered: dict[str, Bind]) -> None:
    form = Format(shape=measurer.shape)
    for memory in memories(measurer.shape):
        # What SDPA makes of vmmkv's memory one of the two layouts shows.
        some = {name: bind for name, bind in offered.items() if memory != "vmmkv-1" or not name.startswith("SDPA")}
        over_memory(measurer, case, memory, form, some)
    ours = next(iter(offered))
    over_memory(measurer, case, MEMORIES[0], form, {ours: offered[ours]}, suffix=AGAIN)


def over_memory(
    measurer: Measurer, case: Case, kind: str, form: Format, offered: Mapping[str, Bind], *, suffix: str = ""
) -> dict[str, float]:
    """Rows of the systems over one memory; `suffix` behind their names. Medians in us of a layer, by system."""
    medians_us: dict[str, float] = {}
    pass_bytes = sum(case.lengths) * form.token_bytes * form.shape.layers
    copies = case.copies(pass_bytes) if measurer.settings.on_gpu else 1
    with measurer.recorder.guarded(measurer.workload, f"{kind} memory of {form.name}"):
        memory = open_memory(kind, case, copies, form, measurer.settings.device)
        try:
            batch = Queries(case, copies, memory, measurer.settings.seed)
            calls = copies * len(memory.layers)
            for name, bind in offered.items():
                system = f"{name}, {memory.name}{suffix}"
                median_us = measurer.measure(system, partial(_checked, batch, bind), _metrics(case, form, calls))
                if median_us is not None:
                    medians_us[system] = median_us / calls
        finally:
            memory.close()
    return medians_us


def _checked(batch: Queries, bind: Bind) -> Pass:
    """A system's pass over a batch, run once and found right."""
    run_pass = batch.passes(bind)
    batch.check(run_pass())
    return run_pass


def _metrics(case: Case, form: Format, calls: int) -> list[Metric]:
    """Of a pass of so many calls, each over one layer.

    Decode is bounded by bytes; those of queries and outputs are not counted. Prefill is bounded by operations, of which masked
    ones are not counted.
    """
    if case.is_decode:
        amount, peak = float(sum(case.lengths) * form.token_bytes), HBM_BYTES_PER_S
        rate = Metric(name="bandwidth", unit="GB/s", amount=calls * amount / 1e3, rate=True, bound=peak / 1e9)
    else:
        amount, peak = case.flops_per_layer(form.shape), BF16_FLOPS
        rate = Metric(name="throughput", unit="TFLOP/s", amount=calls * amount / 1e6, rate=True, bound=peak / 1e12)
    return [Metric(name="layer", unit="us", amount=calls, rate=False, bound=amount / peak * 1e6), rate]
