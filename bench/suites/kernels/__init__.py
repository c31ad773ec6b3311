"""What attention costs over each kind of memory, by our kernels, torch's SDPA, FlashAttention-3, FlashInfer, and on a CPU
the reference.

Workloads are three words: shape, part, case, as in `llama-3.1-8b decode 64x8K`. Systems are named *what, over which memory*. A
system is bound to one copy of a batch, run once, held against the reference, and then timed for each layer. One that cannot do
a case raises Inapplicable, which is no failure: SDPA knows no lengths, no slots and no blocks. On a CPU the parts `shared` and
`quantised` are absent.

Memories of a case (see memories) are measured one after the other: two large ones do not fit on a GPU together. The first is
measured again at the end, so that a drift would show.

Legend: B sequences, N queries, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a table, H query heads,
K kv heads, D head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib import import_module
from typing import Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.baselines import fa3
from bench.figures import Drawing, Question
from bench.harness import BF16_FLOPS, HBM_BYTES_PER_S, Recorder, Settings, Shape, WrongNumbers, time_for
from bench.rows import summarize
from bench.suites.kernels.memories import (
    MEMORIES,
    SKEWED,
    TWIN,
    Case,
    Format,
    KernelMemory,
    TimedLayer,
    open_memory,
    rows_of,
    uniform,
)
from vmmkv.layout import KVType
from vmmkv.units import KIB, MIB, ceil_div
from vmmkv_kernels import reference

QUESTIONS: Final = tuple(
    Question(text, "layer", other, ours=f"{kernel}, vmmkv, all layers a page")
    for kernel, text in (("decode", "Decode attention"), ("prefill", "Prefill attention"))
    for other in (f"{kernel}, cudaMalloc", "*, paged *[0-9]")  # not those whose sequences share all rows
)
FIGURES: Final = (
    Drawing("decode", "Decode attention, by memory", ("bandwidth",), r"(?P<by>\S+) decode (?P<group>.+)"),
    Drawing("prefill", "Prefill attention, by memory", ("throughput",), r"(?P<by>\S+) prefill (?P<group>.+)"),
)

PARTS: Final = ("decode", "prefill", "shared", "quantised")
"""Each a method of `Measurer`."""


def _chunk(name: str, length: int, count: int) -> Case:
    return Case(name=name, lengths=(length,), counts=(count,))


_SECONDS: Final = 0.2
"""For how long a system is replayed in one row."""
_SECONDS_QUICK: Final = 0.02
_MIXED: Final = Case(
    name="mixed",
    lengths=(2048, 8192, 3000, 129, *range(1024, 1024 + 60 * 37, 37)),
    counts=(2048, 1024, 777, 129, *(1,) * 60),
)
"""Four chunks of several lengths beside sixty rows that decode."""
_FULL: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (
        *(uniform(1, 1 * KIB), uniform(1, 8 * KIB), uniform(1, 128 * KIB), uniform(16, 4 * KIB), uniform(64, 8 * KIB)),
        *(uniform(256, 2 * KIB), uniform(8, 64 * KIB), SKEWED, TWIN),
    ),
    "prefill": (_chunk("8192", 8192, 8192), _chunk("2048-of-32768", 32768, 2048), _MIXED),
    "shared": (uniform(128, 4 * KIB),),
    "quantised": (uniform(64, 8 * KIB), uniform(16, 4 * KIB)),
}
_QUICK: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (uniform(1, 1 * KIB), uniform(16, 1 * KIB)),
    "prefill": (_chunk("512", 512, 512), Case(name="mixed", lengths=(300, 700), counts=(40, 1))),
    "shared": (uniform(16, 1 * KIB),),
    "quantised": (uniform(16, 1 * KIB),),
}
_CPU: Final[Mapping[str, Sequence[Case]]] = {
    "decode": (Case(name="2x96", lengths=(96, 96)), Case(name="skewed", lengths=(1, 17, 128, 63))),
    "prefill": (_chunk("64", 64, 64), Case(name="mixed", lengths=(48, 64, 7), counts=(5, 64, 1))),
}
_ONCE: Final = ("quantised", "shared")
"""Parts that are measured for the first shape only: their question is not one of shapes."""


def cases_of(settings: Settings) -> dict[str, list[str]]:
    """All that this machine can run, by part."""
    return {part: [case.name for case in _cases(settings, part)] for part in PARTS if settings.wants(part)}


def _cases(settings: Settings, part: str) -> Sequence[Case]:
    return (_CPU if not settings.on_gpu else _QUICK if settings.quick else _FULL).get(part, ())


def absent(settings: Settings) -> dict[str, str]:
    """Systems that are left out, and why."""
    why = {fa3.NAME: fa3.why_absent(settings.fa3, settings.device), "FlashInfer": why_no_flashinfer(settings.device)}
    return {name: reason for name, reason in why.items() if reason is not None}


def run(recorder: Recorder) -> None:
    """Every part for every shape. What fails, or gives wrong outputs, is not timed."""
    settings = recorder.settings
    shapes = settings.shapes or (settings.shape,)
    fa3.load(settings.fa3, settings.device)
    steps = [
        (shape, part, case)
        for shape in shapes
        for part in PARTS
        if settings.wants(part) and (shape is shapes[0] or part not in _ONCE)
        for case in _cases(settings, part)
        if settings.wants_case(case.name)
    ]
    for shape, part, case in recorder.track(steps, lambda step: f"{step[0].name} {step[1]} {step[2].name}"):
        getattr(Measurer(recorder, shape, case, f"{shape.name} {part} {case.name}"), part)()


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


# FlashInfer

_WORKSPACE_BYTES: Final = 128 * MIB
"""As its documentation recommends."""


def why_no_flashinfer(device: torch.device) -> str | None:
    """Why it cannot be measured; None if it can."""
    if device.type != "cuda":
        return "its kernels do not run on a CPU"
    try:
        import_module("flashinfer")
    except ImportError as error:
        return str(error)
    return None


def bind_flashinfer(batch: Queries, copy: int) -> Attend:
    """Over blocks, by its wrappers: on Hopper its FA2 kernel for decode, by tensor cores, and its FA3 kernel for prefill.

    `plan`, which an engine calls once a step for all layers, is called before and is not timed. It plans for these lengths
    alone: with `use_cuda_graph`, by which a captured step serves other lengths too, it would pad the batch.
    """
    case, shape, memory = batch.case, batch.shape, batch.memory
    if memory.tables_SC is None:
        raise Inapplicable("FlashInfer's batches are of block tables")
    flashinfer = import_module("flashinfer")
    counts = [ceil_div(length, memory.block) for length in case.lengths]
    in_last_block = [(length - 1) % memory.block + 1 for length in case.lengths]
    tables_BC = memory.tables_SC[batch.slots(copy)]
    planned = (
        torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        torch.cat([blocks_C[:count] for blocks_C, count in zip(tables_BC, counts, strict=True)]),
        torch.tensor(in_last_block, dtype=torch.int32),
        *(shape.heads, shape.kv_heads, shape.head_dim, memory.block),
    )
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.device)
    if case.is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        wrapper.plan(*planned, q_data_type=shape.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(batch.query_starts, *planned, causal=True, q_data_type=shape.dtype)
    return lambda planes, out: wrapper.run(batch.q_NHD, (planes.k, planes.v), out=out)


# our kernels, the reference and SDPA

Bind = Callable[[Queries, int], Attend]


def _systems(settings: Settings, name: str, ours: Bind) -> dict[str, Bind]:
    """By name, what attends here, ours first."""
    if not settings.on_gpu:
        return {"reference": bind_reference, "SDPA": partial(_bind_sdpa, backend=None)}
    systems: dict[str, Bind] = {
        name: ours,
        "SDPA flash": partial(_bind_sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(_bind_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    }
    if fa3.why_absent(settings.fa3, settings.device) is None:
        systems["FA3"] = bind_fa3
    if why_no_flashinfer(settings.device) is None:
        systems["FlashInfer"] = bind_flashinfer
    return systems


def bind_decode(batch: Queries, copy: int) -> Attend:
    """`decode`, over slots or over blocks."""
    from vmmkv_kernels.attention.decode import decode

    return _bind_ours(decode, batch, batch.lengths_B, batch.slots_B(copy))


def bind_prefill(batch: Queries, copy: int) -> Attend:
    """`prefill`, over slots or over blocks."""
    from vmmkv_kernels.attention.prefill import prefill

    return _bind_ours(prefill, batch, batch.query_starts, batch.lengths_B, batch.slots_B(copy))


def _bind_ours(kernel: Callable[..., torch.Tensor], batch: Queries, *where: torch.Tensor) -> Attend:
    return lambda planes, out: kernel(
        *(batch.q_NHD, planes.k, planes.v, *where),
        tables_SC=batch.memory.tables_SC,
        out=out,
        k_scale=planes.k_scale,
        v_scale=planes.v_scale,
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


# measuring: prepare, run once, check, capture, replay for a while, report


class Inapplicable(Exception):
    """This system cannot do this. No failure."""


class Measurer:
    """Measures systems on one case, over one memory after the other."""

    def __init__(self, recorder: Recorder, shape: Shape, case: Case, workload: str) -> None:
        self._recorder, self._settings, self._case, self._workload = recorder, recorder.settings, case, workload
        self._plain = Format(shape=shape)

    def decode(self) -> None:
        """Every system over every memory."""
        self._over_all(_systems(self._settings, "decode", bind_decode))

    def prefill(self) -> None:
        """Every system over every memory."""
        self._over_all(_systems(self._settings, "prefill", bind_prefill))

    def shared(self) -> None:
        """Our decode of sequences whose rows are all the same: each with rows of its own, aliased, and under shared tables.

        The kernel and the bytes it asks for are the same. But aliases are one memory, and L2, which is indexed by physical
        addresses, reads it once for many sequences; so it does under tables.
        """
        for memory in ("vmmkv", "vmmkv-aliased", "paged-shared"):
            self._over(memory, self._plain, {"decode": bind_decode})

    def quantised(self) -> None:
        """Our decode over quantised rows, and over plain ones beside them."""
        for memory in ("tensor", "vmmkv"):
            (plain_us,) = self._over(memory, self._plain, {f"decode {self._plain.name}": bind_decode}).values() or (None,)
            for kv_type in (KVType("fp8", "head"), *(KVType(kind) for kind in ("fp8", "int8", "int4"))):
                form = Format(shape=self._plain.shape, quantised=kv_type)
                for system, median_us in self._over(memory, form, {f"decode {form.name}": bind_decode}).items():
                    if plain_us is not None:
                        self._recorder.figure(self._workload, system, "speed-up", "x", plain_us / median_us)

    def _over_all(self, offered: dict[str, Bind]) -> None:
        for memory in MEMORIES:
            self._over(memory, self._plain, offered)
        ours = next(iter(offered))
        self._over(MEMORIES[0], self._plain, {ours: offered[ours]}, suffix=", again")

    def _over(self, kind: str, form: Format, offered: Mapping[str, Bind], *, suffix: str = "") -> dict[str, float]:
        """Rows of the systems over one memory; `suffix` behind their names. Medians in us of a layer, by system."""
        case, settings = self._case, self._settings
        medians_us: dict[str, float] = {}
        copies = case.copies(sum(case.lengths) * form.token_bytes * form.shape.layers) if settings.on_gpu else 1
        with self._recorder.guarded(self._workload, f"{kind} memory of {form.name}"):
            memory = open_memory(kind, case, copies, form, settings.device)
            try:
                batch = Queries(case, copies, memory, settings.seed)
                for name, bind in offered.items():
                    system = f"{name}, {memory.name}{suffix}"
                    with self._recorder.guarded(self._workload, system), suppress(Inapplicable):
                        run_pass = batch.passes(bind)
                        batch.check(run_pass())
                        times_us = time_for(run_pass, settings.device, _SECONDS_QUICK if settings.quick else _SECONDS)
                        layers_us = [time_us / copies / len(memory.layers) for time_us in times_us]
                        self._add_rows(system, form, layers_us)
                        medians_us[system] = summarize(layers_us).p50
            finally:
                memory.close()
        return medians_us

    def _add_rows(self, system: str, form: Format, layers_us: list[float]) -> None:
        """Of one layer. Decode is bounded by bytes; those of queries and outputs are not counted. Prefill is bounded by
        operations, of which masked ones are not counted."""
        if self._case.is_decode:
            metric, unit, per_us = "bandwidth", "GB/s", 1e3
            amount, peak = float(sum(self._case.lengths) * form.token_bytes), HBM_BYTES_PER_S
        else:
            metric, unit, per_us = "throughput", "TFLOP/s", 1e6
            amount, peak = self._case.flops_per_layer(form.shape), BF16_FLOPS
        add = self._recorder.samples
        add(self._workload, system, "layer", "us", layers_us, amount / peak * 1e6)
        add(self._workload, system, metric, unit, [amount / per_us / each for each in layers_us], peak / per_us / 1e6)
