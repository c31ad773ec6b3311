"""Runs steps on the device: `prepare` what is computed, `forward` it, `sample` from its logits, `Readback.wait` for the tokens.

    decode step   one token for each row, all on the device      graphs, no upload in steady state
    mixed step    the same rows, and chunks of prompts           one upload a step, a graph if it is faster

    forward: where each row stands ──> embed, append, attend ──> logits
    sample:  logits ──> a token each ──> where each row stands, and what the host reads

Nothing here waits for the device but `wait`. On a CPU, and for models that cannot be captured, the same is called without
graphs. One step is launched at a time; the results of the last one must be on their way before the next is launched.

Legend: N tokens of the step, B sequences (runs of tokens), R rows that are given a token, V vocabulary, S slots.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine import prompt_logprobs
from vmmkv.server.engine.attention import Batch, Run
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.kv_backend import EngineCache, Slots, TokenIds
from vmmkv.server.engine.models import Model
from vmmkv.server.engine.prefix_groups import Group, GroupTensors
from vmmkv.server.engine.prompt_logprobs import PromptLogprobs, ScoredRows, States
from vmmkv.server.engine.request import Chunk, Request
from vmmkv.server.engine.sampler import NOT_A_NUMBER, Sampler, likeliest, logprobs
from vmmkv.server.engine.uploads import ALIGNED_ELEMENTS, TokenMasks, Uploads, apply_masks
from vmmkv.server.protocol import Generate
from vmmkv.units import round_up

ON_DEVICE: Final = -1
"""Token id of a row whose token only the device knows."""

IDLE: Final = -2
"""Result of a row that had no room for its token, or is in the null slot: as in `vmmkv.kernels.step`."""

_ALWAYS: Final = np.iinfo(np.int64).max

_MIN_GROUPED_ROWS: Final = 8
"""Rows of the smallest batch that is captured for prefix groups too."""

_MIN_MIXED_TOKENS: Final = 64
"""Tokens of the smallest mixed step that is captured."""


def batch_sizes(max_rows: int) -> list[int]:
    """Rows of the decode steps that are captured: powers of two up to 32, multiples of 32 up to 256, then of 64.

    A small step costs its weights; a large one costs by its rows.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, max_rows + 64, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def token_sizes(max_tokens: int) -> list[int]:
    """Tokens of the mixed steps that are captured: four sizes from each power of two to the next."""
    sizes, size = [], _MIN_MIXED_TOKENS
    while size < max_tokens:
        sizes.append(size)
        size += max(_MIN_MIXED_TOKENS, 1 << (size.bit_length() - 3))
    return [*sizes, max_tokens]


class Runner:
    """A model over a cache, with a sampler and the state of every sequence on the device."""

    def __init__(self, model: Model, cache: EngineCache, *, max_rows: int, max_tokens: int) -> None:
        """max_rows: sequences that run at once. max_tokens: of one step."""
        num_slots = 1 + cache.num_slots
        self.model: Final = model
        self.uploads: Final = Uploads(cache.device)
        self._device: Final = cache.device
        self._state = DeviceState(cache)
        self._sampler = Sampler(num_slots, model.vocabulary_size, cache.device)
        self._decode = _DecodeSteps(model, self._state, self.uploads, self._sample_and_end, max_rows)
        self._mixed = _MixedSteps(model, self._state, self.uploads, self._sample_and_end, max_rows, max_tokens)
        self._is_greedy = np.ones(num_slots, np.bool_)
        self._adjusted_until = np.zeros(num_slots, np.int64)
        """By slot: logits are adjusted while fewer tokens than so many are there. 0 for never; _ALWAYS with penalties."""
        self._num_logprobs = np.full(num_slots, -1)
        """By slot; -1 if none are wanted."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Make the graphs of all steps, on a GPU, if the model can be captured.

        Cost: some 100 ms for each size; compiles kernels at first. Only the null slot is touched.
        """
        if self._device.type == "cuda" and self.model.capturable:
            pool = torch.cuda.graph_pool_handle()
            self._mixed.capture(pool)
            self._decode.capture(pool)

    def check(self, ask: Generate) -> None:
        """Raises: ValueError for parameters that this model cannot serve, in words for the client."""
        self._sampler.check(ask)
        if ask.params.prompt_logprobs is not None and not self.model.has_states:
            raise ValueError("this model has no head of its own, and so no log-probabilities of its prompts: leave them out")

    @torch.inference_mode()
    def assign(self, requests: Sequence[Request]) -> None:
        """Sample by these requests' parameters in their slots from now on: one upload. Errors: see `Sampler.assign`."""
        self._sampler.assign(requests)
        for request in requests:
            slot, ask = request.memory.slot, request.ask
            self._is_greedy[slot] = self._sampler.is_greedy(slot)
            self._adjusted_until[slot] = _ALWAYS if self._sampler.has_penalties(slot) else request.min_length
            self._num_logprobs[slot] = -1 if ask.params.logprobs is None else ask.params.logprobs

    def release(self, slot: int) -> None:
        """The request in this slot is over."""
        self._sampler.release(slot)
        self._is_greedy[slot], self._adjusted_until[slot], self._num_logprobs[slot] = True, 0, -1

    @property
    def has_prefix_groups(self) -> bool:
        """Can rows of a decode step attend to a common prefix as one problem?"""
        return self._decode.has_groups

    def set_prefix_groups(self, slots: Slots, groups: Sequence[Group]) -> None:
        """The next decode steps are of these slots; the first ones are the members of the groups, one group after another."""
        self._decode.set_groups(slots, groups)

    @torch.inference_mode()
    def forward(self, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> "Step":
        """Launch the forward half: a token for each slot, which is on the device behind `lengths` rows, and the chunks.

        The step gives tokens for the slots, and then for the chunks that are the last ones of their sequences, in order.
        """
        return self._mixed.forward(slots, lengths, chunks) if chunks else self._decode.forward(slots, lengths)

    @torch.inference_mode()
    def sample(self, step: "Step", masks: TokenMasks | None = None) -> "Readback":
        """Launch the other half of the step that was launched last; `masks` says which tokens some of its rows may have."""
        if not len(step.slots):
            return self._read(step, step.out_R[:0])
        greedy = bool(self._is_greedy[step.slots].all())
        logits_RV = self._adjusted(step, masks)
        if logits_RV is not step.logits_RV:
            sampled_R = self._sampler.sample(logits_RV, step.slots_R, step.ends_R, greedy=greedy)
            self._count(step, sampled_R)
            self._state.end(step.slots_R, sampled_R, step.ends_R, step.out_R)
        elif step.graph is not None:
            step.graph.sample[greedy]()
        else:
            self._sample_and_end(step.logits_RV, step.slots_R, step.ends_R, step.out_R, greedy=greedy)
        return self._read(step, step.out_R[: len(step.slots)])

    def _sample_and_end(
        self, logits_RV: torch.Tensor, slots_R: torch.Tensor, ends_R: torch.Tensor, out_R: torch.Tensor, *, greedy: bool
    ) -> None:
        sampled_R = self._sampler.sample(logits_RV, slots_R, ends_R, greedy=greedy)
        self._state.end(slots_R, sampled_R, ends_R, out_R)

    def _adjusted(self, step: "Step", masks: TokenMasks | None) -> torch.Tensor:
        """The logits to sample from: those of the step, or an adjusted copy where log-probabilities need them as they are.

        A beam search follows no grammar, so masks may be applied in place where no log-probabilities are wanted.
        """
        adjusts = self._needs_adjusting(step)
        logits_RV = step.logits_RV
        if adjusts:
            logits_RV = step.logits_RV.to(torch.float32, copy=True)
            self._sampler.adjust(logits_RV, step.slots_R, step.ends_R)
        if masks is not None:
            if not adjusts and (self._num_logprobs[step.slots[masks.rows]] >= 0).any():
                logits_RV = step.logits_RV.clone()
            apply_masks(logits_RV, masks, self.uploads)
        return logits_RV

    def _count(self, step: "Step", sampled_R: torch.Tensor) -> None:
        """Penalties count what was sampled; not for beams, whose slots may have state of a request before."""
        if self._needs_adjusting(step):
            counted_R = sampled_R.clone()
            for row, _ in step.candidates:
                counted_R[row] = NOT_A_NUMBER
            self._sampler.count(step.slots_R, counted_R)

    def _needs_adjusting(self, step: "Step") -> bool:
        return bool((self._adjusted_until[step.slots] > step.ends).any())

    def _read(self, step: "Step", tokens_R: torch.Tensor) -> "Readback":
        """Copy the results to the host."""
        readback = Readback(tokens_R)
        wanted = self._num_logprobs[step.slots]
        if len(rows := np.flatnonzero(wanted >= 0)):
            (rows_R,) = self.uploads.pack([rows])
            found = logprobs(step.logits_RV, tokens_R, rows_R.long(), int(wanted.max()))
            readback.add_logprobs(list(zip(rows.tolist(), wanted[rows].tolist(), strict=True)), *found)
        if step.candidates:
            (rows_R,) = self.uploads.pack([[row for row, _ in step.candidates]])
            best = likeliest(step.logits_RV[rows_R.long()], max(count for _, count in step.candidates))
            readback.add_candidates(step.candidates, *best)
        if step.states is not None:
            readback.add_prompt_logprobs(step.states.scored, *prompt_logprobs.scores(self.model, step.states))
        readback.close()
        return readback


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step whose forward half is launched. The tensors have rows of the null slot behind those of `slots`."""

    logits_RV: torch.Tensor
    slots_R: torch.Tensor
    """int32"""
    ends_R: torch.Tensor
    """int32: rows of the sequence, the new ones included."""
    out_R: torch.Tensor
    """int32: where the tokens are written."""
    slots: Slots
    """`slots_R` on the host."""
    ends: Slots
    """`ends_R` on the host."""
    graph: "_Graph | None"
    """What it was replayed from, which can sample too."""
    candidates: list[tuple[int, int]]
    """Rows of beam searches, and how many candidates each wants."""
    states: States | None
    """For log-probabilities of prompts; None if none are wanted."""


class Logprobs(NamedTuple):
    """Of one sampled token, under the model's own distribution."""

    chosen: float
    likeliest: list[tuple[int, float]]
    """Token ids and log-probabilities, the highest first; as many as were asked for."""


class Results(NamedTuple):
    """What a step gave."""

    tokens: TokenIds
    """By row."""
    logprobs: dict[int, Logprobs]
    """By row, where they are wanted."""
    candidates: dict[int, list[Candidate]]
    """By row of a beam search, the likeliest first."""
    prompt_logprobs: dict[int, PromptLogprobs]
    """By chunk of the step, where they are wanted."""


class Readback:
    """The results of a step on their way to the host, through pinned memory."""

    def __init__(self, tokens_R: torch.Tensor) -> None:
        self._tokens_R = _to_host(tokens_R)
        self._logprobs: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._candidates: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._prompt_logprobs: tuple[Sequence[tuple[int, ScoredRows]], tuple[torch.Tensor, ...]] | None = None
        self._done: torch.cuda.Event | None = None
        self._on_gpu: Final = tokens_R.is_cuda

    def add_logprobs(
        self, rows: Sequence[tuple[int, int]], chosen_R: torch.Tensor, values_RT: torch.Tensor, ids_RT: torch.Tensor
    ) -> None:
        """Rows, with how many of the T likeliest each wants, and the log-probabilities."""
        self._logprobs = rows, tuple(map(_to_host, (chosen_R, values_RT, ids_RT)))

    def add_candidates(self, rows: Sequence[tuple[int, int]], values_RC: torch.Tensor, ids_RC: torch.Tensor) -> None:
        """Rows, with how many candidates each wants, and the candidates."""
        self._candidates = rows, tuple(map(_to_host, (values_RC, ids_RC)))

    def add_prompt_logprobs(
        self, scored: Sequence[tuple[int, ScoredRows]], chosen_W: torch.Tensor, values_WT: torch.Tensor, ids_WT: torch.Tensor
    ) -> None:
        """Chunks, with the rows of each that are scored, and their scores side by side."""
        self._prompt_logprobs = scored, tuple(map(_to_host, (chosen_W, values_WT, ids_WT)))

    def close(self) -> None:
        """All has been added: record the event to wait for."""
        if self._on_gpu:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> Results:
        """The results. Blocks until the device is done with the step. It can be called again."""
        if self._done is not None:
            self._done.synchronize()
        logprobs, candidates = dict[int, Logprobs](), dict[int, list[Candidate]]()
        if self._logprobs is not None:
            rows, tensors = self._logprobs
            chosen, values, ids = (tensor.tolist() for tensor in tensors)
            for index, (row, count) in enumerate(rows):
                pairs = list(zip(ids[index][:count], values[index][:count], strict=True))
                logprobs[row] = Logprobs(chosen[index], pairs)
        if self._candidates is not None:
            rows, tensors = self._candidates
            values, ids = (tensor.tolist() for tensor in tensors)
            for index, (row, count) in enumerate(rows):
                candidates[row] = [Candidate(*each) for each in zip(values[index][:count], ids[index][:count], strict=True)]
        scored = (
            {} if self._prompt_logprobs is None else prompt_logprobs.read(self._prompt_logprobs[0], *self._prompt_logprobs[1])
        )
        return Results(self._tokens_R.numpy(), logprobs, candidates, scored)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host; from a GPU it is pinned, and not there yet."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class DeviceState:
    """The last token of every slot, which has no row yet, and its rows. A decode step reads and advances it on the device."""

    def __init__(self, cache: EngineCache) -> None:
        self._limit = cache.limit
        self.tokens_S = torch.zeros_like(cache.limit)
        self.lengths_S = torch.zeros_like(cache.limit)

    def begin(self, slots_B: torch.Tensor, ids_B: torch.Tensor, positions_B: torch.Tensor, ends_B: torch.Tensor) -> None:
        """Write the tokens to compute, their positions, and the rows behind them; 0 for the null slot. One launch."""
        if slots_B.is_cuda:
            from vmmkv.kernels.step import begin_step

            begin_step(slots_B, self.tokens_S, self.lengths_S, ids_B, positions_B, ends_B)
        else:
            ids_B.copy_(self.tokens_S[slots_B])
            positions_B.copy_(self.lengths_S[slots_B])
            ends_B.copy_((positions_B + 1) * (slots_B > 0))

    def end(self, slots_B: torch.Tensor, sampled_B: torch.Tensor, ends_B: torch.Tensor, out_B: torch.Tensor) -> None:
        """The sampled tokens are the slots' last, behind `ends_B` rows; `out_B` is what the host reads. One launch.

        A row beyond its slot's limit stays where it was, and gives IDLE.
        """
        if slots_B.is_cuda:
            from vmmkv.kernels.step import end_step

            end_step(slots_B, sampled_B, ends_B, self._limit, self.tokens_S, self.lengths_S, out_B)
        else:
            moves = (slots_B > 0) & (ends_B <= self._limit[slots_B])
            moved = slots_B[moves].long()
            self.tokens_S[moved] = sampled_B[moves].clamp(min=0)
            self.lengths_S[moved] = ends_B[moves]
            out_B.copy_(torch.where(moves, sampled_B, IDLE))


_SampleAndEnd = Callable[..., None]
"""`Runner._sample_and_end`."""


@dataclass(slots=True)
class _Graph:
    """The two halves of a step as CUDA graphs."""

    logits_RV: torch.Tensor
    forward: Callable[[], None]
    sample: Mapping[bool, Callable[[], None]]
    """If all rows are greedy, and if not."""
    launch_s: float
    """What it takes the host to launch the forward half without a graph."""
    took_s: float = 0.0
    """What the forward half takes; of mixed steps."""

    @classmethod
    def capture(cls, forward: Callable[[], torch.Tensor], sample: Callable[..., None], pool: Any) -> "_Graph":
        """`pool` is the memory of graphs of which one is replayed at a time: the largest is made first, the others fit into it.

        Cost: the forward half twice, the sampling half four times.
        """
        began_s = time.perf_counter()
        logits_RV = forward()  # compiles what is not compiled yet
        launch_s = time.perf_counter() - began_s

        def again() -> None:
            nonlocal logits_RV
            logits_RV = forward()

        replay, samples = _captured(again, pool), {}
        for greedy in (True, False):
            one = functools.partial(sample, logits_RV, greedy=greedy)
            one()
            samples[greedy] = _captured(one, pool)
        return cls(logits_RV, replay, samples, launch_s)


def _captured(launch: Callable[[], None], pool: Any) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        launch()
    return graph.replay


class _DecodeSteps:
    """Steps of one token for each row, which the device carries on by itself: two CUDA graphs a step.

    Nothing comes from the host unless the batch has other rows than before. Batches are filled up with rows of the null slot to
    the next size that was captured.
    """

    def __init__(self, model: Model, state: DeviceState, uploads: Uploads, sample: _SampleAndEnd, max_rows: int) -> None:
        self._model, self._state, self._uploads, self._sample = model, state, uploads, sample
        device = state.tokens_S.device
        self._sizes = batch_sizes(max_rows)
        buffers = torch.zeros(5, round_up(max_rows, ALIGNED_ELEMENTS), dtype=torch.int32, device=device).unbind()
        self._slots_B, self._ids_B, self._positions_B, self._ends_B, self._out_B = buffers
        self._groups = GroupTensors(max_rows, device)
        self._is_grouped = False
        """Are there prefix groups among the rows?"""
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._uploaded: Slots | None = None
        """The rows' slots, as the device has them."""

    @property
    def has_groups(self) -> bool:
        """Are there graphs for rows that share a prefix?"""
        return any(is_grouped for _, is_grouped in self._graphs)

    def capture(self, pool: Any) -> None:
        """Make the graphs."""
        self._uploaded = None
        self._slots_B.zero_()
        self._groups.clear()
        for size in reversed(self._sizes):
            sample = functools.partial(self._sample_rows, size)
            for is_grouped in (False, True) if size >= _MIN_GROUPED_ROWS else (False,):
                forward = functools.partial(self._forward, size, None, is_grouped)
                self._graphs[size, is_grouped] = _Graph.capture(forward, sample, pool)

    def set_groups(self, slots: Slots, groups: Sequence[Group]) -> None:
        """See Runner.set_prefix_groups."""
        self._is_grouped = bool(groups)
        if groups:
            self._groups.upload(slots, groups, self._uploads)

    def forward(self, slots: Slots, lengths: Slots) -> Step:
        """Launch the forward half. The slots are uploaded if they are others than last time."""
        num_rows = len(slots)
        size = next(size for size in self._sizes if size >= num_rows) if self._graphs else num_rows
        if self._uploaded is None or not np.array_equal(self._uploaded, slots):
            padded = np.zeros(size, np.int32)
            padded[:num_rows] = slots
            self._uploads.into(self._slots_B[:size], padded)
            self._uploaded = slots.copy()
        graph = self._graphs.get((size, self._is_grouped and size >= _MIN_GROUPED_ROWS))
        if graph is None:
            logits_BV = self._forward(size, (slots, lengths), False)
        else:
            graph.forward()
            logits_BV = graph.logits_RV
        return Step(
            logits_RV=logits_BV, slots_R=self._slots_B[:size], ends_R=self._ends_B[:size], out_R=self._out_B[:size],
            slots=slots, ends=lengths + 1, graph=graph, candidates=[], states=None,
        )  # fmt: skip

    def _forward(self, size: int, known: tuple[Slots, Slots] | None, is_grouped: bool) -> torch.Tensor:
        slots_B, ids_B, positions_B, ends_B = (
            tensor[:size] for tensor in (self._slots_B, self._ids_B, self._positions_B, self._ends_B)
        )
        self._state.begin(slots_B, ids_B, positions_B, ends_B)
        runs = None
        if known is not None and not slots_B.is_cuda:
            runs = tuple(
                Run(slot=slot, start=start, count=1, column=row)
                for row, (slot, start) in enumerate(zip(known[0].tolist(), known[1].tolist(), strict=True))
            )
        batch = Batch(
            slots_N=slots_B, positions_N=positions_B, slots_B=slots_B, lengths_B=ends_B, query_starts=None, runs=runs,
            shared=self._groups.tensors(size) if is_grouped else None,
        )  # fmt: skip
        return self._model.forward(ids_B, batch, None)

    def _sample_rows(self, size: int, logits_BV: torch.Tensor, *, greedy: bool) -> None:
        self._sample(logits_BV, self._slots_B[:size], self._ends_B[:size], self._out_B[:size], greedy=greedy)


class _MixedSteps:
    """Steps that compute chunks of prompts beside the rows that decode, whose tokens are on the device.

        upload  | of each run: slot, length, where its queries start | of each token: id, slot, position |
                | of each run that is given a token: column, slot, length |

    Tokens are filled up to the next size that was captured, where that is faster than launching so many one by one.
    """

    def __init__(
        self, model: Model, state: DeviceState, uploads: Uploads, sample: _SampleAndEnd, max_rows: int, max_tokens: int
    ) -> None:
        self._model, self._state, self._uploads, self._sample = model, state, uploads, sample
        device = state.tokens_S.device
        self._on_gpu: Final = device.type == "cuda"
        self._max_rows: Final = max_rows
        self._max_tokens: Final = max_tokens
        self._packed = torch.zeros(_Places(max_rows, max_tokens).size, dtype=torch.int32, device=device)
        self._out_R = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[int, _Graph] = {}
        self._launch_s = float("inf")
        """What launching a step without a graph takes the host."""

    def capture(self, pool: Any) -> None:
        """Make the graphs, and time them."""
        self._packed.zero_()
        for size in reversed(token_sizes(self._max_tokens)):
            places = _Places(self._max_rows, size)

            def forward(places: "_Places" = places) -> torch.Tensor:
                return self._model.forward(*self._input(places, None))

            def sample(logits_RV: torch.Tensor, places: "_Places" = places, *, greedy: bool) -> None:
                _, slots_R, ends_R = places.of_rows(self._packed)
                self._sample(logits_RV, slots_R, ends_R, self._out_R[: len(logits_RV)], greedy=greedy)

            graph = self._graphs[size] = _Graph.capture(forward, sample, pool)
            self._launch_s = min(self._launch_s, graph.launch_s)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            graph.forward()
            torch.cuda.synchronize()
            graph.took_s = time.perf_counter() - began_s

    def forward(self, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> Step:
        """Launch the forward half."""
        step = _MixedInput.of(slots, lengths, chunks)
        num_tokens = len(step.ids_N)
        # Graphs give logits of the rows that are given a token; any number of others may be scored.
        size, graph = (num_tokens, None) if step.scored else self._graph_for(num_tokens)
        places = _Places(self._max_rows if self._on_gpu else len(step.slots_B), size)
        self._uploads.into(self._packed[: places.size], step.packed(places))
        states = None
        if graph is not None:
            graph.forward()
            logits_RV = graph.logits_RV
        elif step.scored:
            logits_RV, states = self._forward_scored(places, step)
        else:
            logits_RV = self._model.forward(*self._input(places, None if self._on_gpu else step.runs()))
        _, slots_R, ends_R = places.of_rows(self._packed)
        return Step(
            logits_RV=logits_RV, slots_R=slots_R, ends_R=ends_R, out_R=self._out_R[: len(logits_RV)],
            slots=step.slots_B[step.sampled], ends=step.ends_B[step.sampled],
            graph=graph, candidates=step.candidates, states=states,
        )  # fmt: skip

    def _graph_for(self, num_tokens: int) -> tuple[int, _Graph | None]:
        """The graph for so many tokens and its size, if it is done before the same, launched one by one, would be."""
        size = min((size for size in self._graphs if size >= num_tokens), default=None)
        if size is None:
            return num_tokens, None
        graph = self._graphs[size]
        is_faster = graph.took_s <= max(self._launch_s, graph.took_s * num_tokens / size)
        return (size, graph) if is_faster else (num_tokens, None)

    def _forward_scored(self, places: "_Places", step: "_MixedInput") -> tuple[torch.Tensor, States]:
        """The logits, and the states of the rows that are scored. A second upload says which they are."""
        columns_W = np.concatenate([np.arange(len(rows.tokens)) + column for column, _, rows in step.scored])
        columns, tokens_W = self._uploads.pack([columns_W, np.concatenate([rows.tokens for _, _, rows in step.scored])])
        ids_N, batch, last_R = self._input(places, None if self._on_gpu else step.runs())
        states_AE = self._model.states(ids_N, batch, torch.cat([last_R, columns.long()]))
        scored = [(index, rows) for _, index, rows in step.scored]
        return self._model.logits(states_AE[: len(last_R)]), States(states_AE[len(last_R) :], tokens_W, scored)

    def _input(self, places: "_Places", runs: tuple[Run, ...] | None) -> tuple[torch.Tensor, Batch, torch.Tensor]:
        """Token ids, what attention needs of them, and the columns behind which tokens are wanted."""
        slots_B, lengths_B, query_starts = places.of_runs(self._packed)
        ids_N, slots_N, positions_N = places.of_tokens(self._packed)
        last_R, _, _ = places.of_rows(self._packed)
        ids_N = torch.where(ids_N == ON_DEVICE, self._state.tokens_S[slots_N.long()], ids_N)
        batch = Batch(
            slots_N=slots_N, positions_N=positions_N, slots_B=slots_B, lengths_B=lengths_B, query_starts=query_starts, runs=runs
        )
        return ids_N, batch, last_R.long()


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the parts of a mixed step lie in what is uploaded; each begins aligned."""

    num_runs: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows that are given a token; a forward pass has at least one output."""
        return max(1, min(self.num_runs, self.num_tokens))

    @property
    def size(self) -> int:
        """Elements in all."""
        runs, rows = (round_up(count + 1, ALIGNED_ELEMENTS) for count in (self.num_runs, self.num_rows))
        return 3 * runs + 3 * rows + 3 * round_up(self.num_tokens, ALIGNED_ELEMENTS)

    def of_runs(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Slots and lengths [B], and starts of queries [B + 1]."""
        slots, lengths, starts = _parts(packed, 0, self.num_runs + 1)
        return [slots[:-1], lengths[:-1], starts]

    def of_rows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Columns, slots and lengths [R]."""
        begin = 3 * round_up(self.num_runs + 1, ALIGNED_ELEMENTS)
        return [part[:-1] for part in _parts(packed, begin, self.num_rows + 1)]

    def of_tokens(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Ids, slots and positions [N]."""
        runs, rows = (round_up(count + 1, ALIGNED_ELEMENTS) for count in (self.num_runs, self.num_rows))
        return _parts(packed, 3 * runs + 3 * rows, self.num_tokens)


def _parts(packed: torch.Tensor, begin: int, count: int) -> list[torch.Tensor]:
    stride = round_up(count, ALIGNED_ELEMENTS)
    return [packed[first : first + count] for first in range(begin, begin + 3 * stride, stride)]


@dataclass(frozen=True, slots=True)
class _MixedInput:
    """A mixed step on the host, as runs of tokens side by side: those that decode, then the chunks."""

    slots_B: Slots
    starts_B: Slots
    counts_B: Slots
    ids_N: TokenIds
    sampled: Slots
    """Runs that are given a token."""
    candidates: list[tuple[int, int]]
    scored: list[tuple[int, int, ScoredRows]]
    """Of chunks with scored rows: the column of the first one, the index of the chunk, and the rows."""

    @classmethod
    def of(cls, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> "_MixedInput":
        num_decoding = len(slots)
        sampled = [*range(num_decoding), *(num_decoding + index for index, chunk in enumerate(chunks) if chunk.is_last)]
        wanted = [0] * num_decoding + [chunk.num_candidates for chunk in chunks]
        column, scored = num_decoding, list[tuple[int, int, ScoredRows]]()
        for index, chunk in enumerate(chunks):
            rows = chunk.request.scored_rows(chunk.start, chunk.end)
            if rows is not None:
                scored.append((column + rows.first - chunk.start, index, rows))
            column += len(chunk.tokens)
        return cls(
            slots_B=np.concatenate([slots, np.array([chunk.slot for chunk in chunks], np.int64)]),
            starts_B=np.concatenate([lengths, np.array([chunk.start for chunk in chunks], np.int64)]),
            counts_B=np.array([1] * num_decoding + [len(chunk.tokens) for chunk in chunks], np.int64),
            ids_N=np.concatenate([np.full(num_decoding, ON_DEVICE, np.int32), *(chunk.tokens for chunk in chunks)]),
            sampled=np.array(sampled, np.int64),
            candidates=[(row, wanted[run]) for row, run in enumerate(sampled) if wanted[run]],
            scored=scored,
        )

    @property
    def ends_B(self) -> Slots:
        """Rows of each sequence, the new ones included."""
        return self.starts_B + self.counts_B

    @property
    def columns_B(self) -> Slots:
        """Where the tokens of each run begin."""
        columns: Slots = np.cumsum(self.counts_B) - self.counts_B
        return columns

    def runs(self) -> tuple[Run, ...]:
        """For attention that goes run by run."""
        table = np.stack((self.slots_B, self.starts_B, self.counts_B, self.columns_B), axis=1).tolist()
        return tuple(Run(slot=slot, start=start, count=count, column=column) for slot, start, count, column in table)

    def packed(self, places: _Places) -> npt.NDArray[np.int32]:
        """As it is uploaded. It is filled up with runs without queries, and tokens of the null slot, which are not written."""
        packed = np.zeros(places.size, np.int32)
        num_runs, num_tokens, columns_B, ends_B = len(self.slots_B), len(self.ids_N), self.columns_B, self.ends_B
        which_N = np.repeat(np.arange(num_runs), self.counts_B)
        slots, lengths, query_starts = (part.numpy() for part in places.of_runs(torch.from_numpy(packed)))
        slots[:num_runs], lengths[:num_runs] = self.slots_B, ends_B
        query_starts[:num_runs], query_starts[num_runs:] = columns_B, num_tokens
        ids, slots_N, positions = (part.numpy() for part in places.of_tokens(torch.from_numpy(packed)))
        ids[:num_tokens], slots_N[:num_tokens] = self.ids_N, self.slots_B[which_N]
        positions[:num_tokens] = self.starts_B[which_N] + np.arange(num_tokens) - columns_B[which_N]
        last, slots_R, ends_R = (part.numpy() for part in places.of_rows(torch.from_numpy(packed)))
        num_rows = len(self.sampled)
        last[:num_rows] = columns_B[self.sampled] + self.counts_B[self.sampled] - 1
        slots_R[:num_rows], ends_R[:num_rows] = self.slots_B[self.sampled], ends_B[self.sampled]
        return packed
