"""Runs steps on the device: `forward` computes logits, `sample` chooses tokens, `Readback.wait` brings them to the host.

    decode step   one token for each row, all on the device      graphs, no upload in steady state
    mixed step    the same rows, and chunks of prompts           one upload a step, a graph if it is faster

    forward: where each row stands ──> embed, append, attend ──> logits
    sample:  logits ──> a token each ──> where each row stands, and what the host reads

Only `wait` waits for the device. On a CPU, and for models that cannot be captured, the same is called without graphs. One step
is launched at a time; the results of the last one must be on their way before the next is launched.

Legend: N tokens of the step, B sequences, R rows that are given a token, V vocabulary, S slots.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from vmmkv.memory.address_space import wrap
from vmmkv.units import round_up
from vmmkv_server.engine.attention import AttentionMetadata
from vmmkv_server.engine.group_tensors import GroupTensors, PrefixGroup
from vmmkv_server.engine.kv_backend import KVBackend, Slots, TokenIds
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.ranking import Ranking
from vmmkv_server.engine.sampler import NOT_A_NUMBER, Sampler, logprobs
from vmmkv_server.engine.step import Readback, Results, Step, WantedStates
from vmmkv_server.engine.uploads import (
    ALIGNED_ELEMENTS,
    Array,
    TokenMasks,
    Uploads,
    aligned_parts,
    apply_masks,
    packed_size,
    to_host,
)

if TYPE_CHECKING:
    from vmmkv_server.engine.ranks import Ranks

Result = TypeVar("Result")

ON_DEVICE: Final = -1
"""Token id of a row whose token only the device knows."""

IDLE: Final = -2
"""Result of a row that had no room for its token, or is in the null slot: as in `vmmkv_kernels.step`."""

NAP_S: Final = 1e-4
"""Pause between two polls of the tiers, whose threads need Python's lock."""

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


_ROUNDED_ANEW: Final = (
    "compacts as requests generate, and quantised keys would be rounded anew each time they are turned: use "
    '"positions": "original", or snapkv, or leave it out'
)
"""Why a policy that turns keys again and again is not for quantised rows. In fp8, turned 32 times, perplexity was 24.0 instead
of 15.6."""


def _refusal(memory: KVBackend, model: EngineModel, *, is_split: bool) -> str:
    """Reason that no request can have a policy with this model and memory; empty if it can. `is_split`: over devices."""
    groups = memory.layout.groups
    if is_split:
        return "is for a model on one device (tensor_parallel_size=1), and this one is split over several"
    if memory.cache is None:
        return "needs memory that can be compacted"
    if any(group.window is not None for group in groups):
        return "is for full attention, and this model has sliding windows, which give memory back by themselves"
    if len(groups) > 1:
        return "is for models of which a token's rows fit in a page"
    if model.keys is None:
        return (
            "needs a model whose rotary positions vmmkv knows, and this one runs by transformers' own code: "
            "model_impl='vmmkv' says what it lacks"
        )
    return ""


class Runner:
    """A model over its memory, with a sampler and the state of every sequence on the device."""

    def __init__(
        self, model: EngineModel, memory: KVBackend, *, max_rows: int, max_tokens: int, ranks: "Ranks | None" = None
    ) -> None:
        """max_rows: sequences that run at once. max_tokens: of one step. ranks: the others, of a model in parts."""
        self.model: Final = model
        self.ranks: Final = ranks
        self.kv_policy_refusal: Final = _refusal(memory, model, is_split=ranks is not None)
        """Reason that no request can have a `kv_policy`; empty if it can."""
        self.keys: Final = None if self.kv_policy_refusal else model.keys
        """Keys of requests that can have a `kv_policy`; None if none can."""
        self.kv_policy_again_refusal: Final = _ROUNDED_ANEW if self.keys is not None and self.keys.are_quantised else ""
        """Reason that none can have one that turns keys more than once; empty if it can."""
        self.uploads: Final = Uploads(memory.device)
        self.sampler: Final = Sampler(1 + memory.num_slots, model.vocabulary_size, self.uploads)
        self.state: Final = DeviceState(memory.limit)
        self.groups: Final = GroupTensors(max_rows, memory.device)
        self.has_prefix_groups = False
        """Can rows that decode attend to a common prefix as one problem?"""
        self.cuda_graphs: list[torch.cuda.CUDAGraph] = []
        """All that were captured."""
        self._decode = _DecodeSteps(self, max_rows)
        self.mixed = _MixedSteps(self, max_rows, max_tokens)

    @torch.inference_mode()
    def capture(self) -> None:
        """Make the graphs of all steps, on a GPU, if the model can be captured.

        Cost: some 100 ms for each size; compiles kernels at first. Only the null slot is touched.
        """
        if self.uploads.device.type == "cuda" and self.model.capturable:
            pool = torch.cuda.graph_pool_handle()
            with _without_collections():
                self.mixed.capture(pool)
                self.has_prefix_groups = self._decode.capture(pool)

    def captured(self, launch: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
        """Capture launches in a graph. Returns its replay, which works until `close`, and what the launches returned."""
        self.cuda_graphs.append(graph := torch.cuda.CUDAGraph())
        return graph.replay, capture_graph(graph, launch, pool)

    def close(self) -> None:
        """Reset all graphs: NCCL ends when those that call it are destroyed, and a traceback or a cycle may keep one."""
        for graph in self.cuda_graphs:
            graph.reset()

    def settle(self) -> None:
        """Wait for the device, if it may wait for other ranks, before a call that would wait for it without end."""
        if self.ranks is not None:
            self.ranks.settle()

    def wait(self, readback: "Readback", poll: Callable[[], bool] = lambda: False) -> "Results":
        """The results of a step. Blocks until the device is done with it; meanwhile `poll` works, until it has nothing left.

        Raises: RankFailed.
        """

        def is_over() -> bool:
            return readback.is_done or not poll()

        if readback.done is not None and self.ranks is not None:
            self.ranks.wait_for(is_over)
            self.ranks.wait_for(readback.done.query)
        elif readback.done is not None:
            while not is_over():
                time.sleep(NAP_S)
        return readback.wait()

    @torch.inference_mode()
    def set_prefix_groups(self, slots: Slots, groups: Sequence[PrefixGroup]) -> None:
        """Set the slots that decode in the next steps. The first are the members of the groups, one group after another."""
        self.groups.upload(slots, groups, self.uploads)

    @torch.inference_mode()
    def forward(self, step: Step) -> "Forwarded":
        """Launch the forward half: the token of each slot, which is on the device, and the chunks.

        The step gives tokens for the slots, and then for the chunks that are the last ones of their sequences, in order.
        """
        return self.mixed.forward(step) if step.chunks else self._decode.forward(step)

    @torch.inference_mode()
    def sample(self, forwarded: "Forwarded", masks: TokenMasks | None = None) -> "Readback":
        """Launch the other half of the step that was launched last; `masks` says which tokens some of its rows may have."""
        slots, rows, sampler = forwarded.slots, forwarded.rows, self.sampler
        if len(slots):
            greedy = bool(sampler.is_greedy[slots].all())
            adjusts = bool((sampler.adjusted_until[slots] > forwarded.ends).any())
            logits_RV = self._adjusted(forwarded, masks, adjusts=adjusts)
            if logits_RV is forwarded.logits_RV and forwarded.graph is not None:
                forwarded.graph.sample[greedy]()
            else:
                sampled_R = sampler.sample(logits_RV, rows.slots_R, rows.ends_R, greedy=greedy)
                if adjusts:
                    counted_R = sampled_R.clone()
                    for row, _ in forwarded.candidates:  # a beam's slot may have state of an earlier request
                        counted_R[row] = NOT_A_NUMBER
                    sampler.count(rows.slots_R, counted_R)
                self.state.end(sampled_R, rows)
        return self._readback(forwarded)

    def sample_and_end(self, logits_RV: torch.Tensor, rows: "SampledRows", *, greedy: bool) -> None:
        """The other half of a step as it is captured."""
        self.state.end(self.sampler.sample(logits_RV, rows.slots_R, rows.ends_R, greedy=greedy), rows)

    def _adjusted(self, forwarded: "Forwarded", masks: TokenMasks | None, *, adjusts: bool) -> torch.Tensor:
        """The logits to sample from: those of the step, or an adjusted copy where log-probabilities need them as they are.

        A beam search follows no grammar, so masks may be applied in place where no log-probabilities are wanted.
        """
        logits_RV = forwarded.logits_RV
        if adjusts:
            logits_RV = logits_RV.to(torch.float32, copy=True)
            self.sampler.adjust(logits_RV, forwarded.rows.slots_R, forwarded.rows.ends_R)
        if masks is not None:
            if not adjusts and (self.sampler.num_logprobs[forwarded.slots[masks.rows]] >= 0).any():
                logits_RV = logits_RV.clone()
            apply_masks(logits_RV, masks, self.uploads)
        return logits_RV

    def _readback(self, forwarded: "Forwarded") -> "Readback":
        """Copy the results to the host."""
        tokens_R = forwarded.rows.out_R[: len(forwarded.slots)]
        readback = Readback(to_host(tokens_R))
        num_wanted = self.sampler.num_logprobs[forwarded.slots]
        asked = [(row, int(num_wanted[row])) for row in np.flatnonzero(num_wanted >= 0).tolist()]
        # Beams apart: how many are asked for decides between equals, and no beam depends on what its neighbours ask.
        for rows in filter(None, (asked, forwarded.candidates)):
            (rows_R,) = self.uploads.pack([[row for row, _ in rows]])
            found = logprobs(forwarded.logits_RV, tokens_R, rows_R.long(), max(count for _, count in rows))
            readback.logprobs.append((rows, [to_host(tensor) for tensor in found]))
        if forwarded.states is not None:
            wanted, states_WE = forwarded.states
            readback.of_states = [to_host(tensor) for tensor in wanted.read(states_WE)]
        if tokens_R.is_cuda:
            readback.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            readback.done.record()
        return readback


class SampledRows(NamedTuple):
    """The rows of a step that are given a token, on the device, int32. Rows of the null slot pad them."""

    slots_R: torch.Tensor
    ends_R: torch.Tensor
    """Rows of the sequence, the new ones included."""
    out_R: torch.Tensor
    """Output of the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """A step whose forward half is launched."""

    logits_RV: torch.Tensor
    rows: SampledRows
    slots: Slots
    """`rows.slots_R` on the host, without padding."""
    ends: Slots
    """`rows.ends_R` on the host."""
    graph: "_Graph | None" = None
    """Graph that the step was replayed from, which can sample too; None if it was launched without."""
    candidates: Sequence[tuple[int, int]] = ()
    """Rows of beam searches, and how many candidates each wants."""
    states: tuple[WantedStates, torch.Tensor] | None = None
    """Rows whose last states are wanted, and the states; None if none are wanted."""


class DeviceState:
    """The last token of every slot, which has no row yet, and its rows. A decode step reads and advances it on the device."""

    def __init__(self, limit_S: torch.Tensor) -> None:
        self._limit = limit_S
        self.tokens_S = torch.zeros_like(limit_S)
        self.lengths_S = torch.zeros_like(limit_S)
        self.shifts_S = torch.zeros_like(limit_S)
        """Difference of the position of a row's token to the row, by slot."""

    def begin(
        self, slots_B: torch.Tensor, ids_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, ends_B: torch.Tensor
    ) -> None:
        """Write the tokens to compute, their rows and positions, and the rows behind them; 0 for the null slot. One launch."""
        if slots_B.is_cuda:
            from vmmkv_kernels.step import begin_step

            begin_step(slots_B, self.tokens_S, self.lengths_S, self.shifts_S, ids_B, rows_B, positions_B, ends_B)
        else:
            ids_B.copy_(self.tokens_S[slots_B])
            rows_B.copy_(self.lengths_S[slots_B])
            positions_B.copy_(rows_B + self.shifts_S[slots_B])
            ends_B.copy_((rows_B + 1) * (slots_B > 0))

    def end(self, sampled_R: torch.Tensor, rows: SampledRows) -> None:
        """The sampled tokens are the slots' last, behind `ends_R` rows; `out_R` is what the host reads. One launch.

        A row beyond its slot's limit stays where it was, and gives IDLE.
        """
        slots_R, ends_R, out_R = rows
        if slots_R.is_cuda:
            from vmmkv_kernels.step import end_step

            end_step(slots_R, sampled_R, ends_R, self._limit, self.tokens_S, self.lengths_S, out_R)
        else:
            moves = (slots_R > 0) & (ends_R <= self._limit[slots_R])
            moved = slots_R[moves].long()
            self.tokens_S[moved] = sampled_R[moves].clamp(min=0)
            self.lengths_S[moved] = ends_R[moves]
            out_R.copy_(torch.where(moves, sampled_R, IDLE))


@dataclass(slots=True)
class _Graph:
    """The two halves of a step as CUDA graphs."""

    logits_RV: torch.Tensor
    forward: Callable[[], None]
    sample: Mapping[bool, Callable[[], None]]
    """Sampling half of the graph: True if all rows are greedy, False if not."""
    launch_s: float
    """Time that the host takes to launch the forward half without a graph."""
    took_s: float = 0.0
    """Time that the forward half takes; only of mixed steps."""

    @classmethod
    def capture(cls, runner: Runner, forward: Callable[[], torch.Tensor], rows: SampledRows, pool: Any) -> "_Graph":
        """`pool` is the memory of graphs of which one is replayed at a time: the largest is made first, the others fit into it.

        Cost: the forward half twice, the sampling half four times.
        """
        began_s = time.perf_counter()
        forward()  # compiles what is not compiled yet
        launch_s = time.perf_counter() - began_s
        runner.settle()
        (replay, logits_RV), samples = runner.captured(forward, pool), {}
        if runner.ranks is not None:
            replay = runner.ranks.replaying(replay)
        for greedy in (True, False):
            sample = functools.partial(runner.sample_and_end, logits_RV, rows, greedy=greedy)
            sample()
            samples[greedy], _ = runner.captured(sample, pool)
        assert logits_RV.is_contiguous(), "its address and shape name it"
        # The logits' memory is left to the graphs after it, too: they are sampled from before another one is replayed.
        logits = wrap(logits_RV.data_ptr(), logits_RV.nbytes, logits_RV.device)
        return cls(logits.view(logits_RV.dtype).view(logits_RV.shape), replay, samples, launch_s)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Prevent garbage collections: one that frees graphs of an engine that was not closed ends the capture by an error."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """One for each GPU, since graphs of one pool share memory by stream. torch's own is on the GPU that captured first."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def capture_graph(graph: torch.cuda.CUDAGraph, launch: Callable[[], Result], pool: Any) -> Result:
    """Capture launches in a graph. Returns what they returned."""
    stream = capture_stream(torch.cuda.current_device())
    # Twice: where a capture cannot begin or end, torch's own context leaves its stream the current one, and fences are of that.
    with torch.cuda.stream(stream), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        return launch()


class _DecodeSteps:
    """Steps of one token for each row, which the device carries on by itself: two CUDA graphs a step.

    Nothing comes from the host unless the batch has other rows than before. Batches are filled up with rows of the null slot to
    the next size that was captured.
    """

    def __init__(self, runner: Runner, max_rows: int) -> None:
        self._runner = runner
        device = runner.uploads.device
        self._sizes = batch_sizes(max_rows)
        buffers = torch.zeros(6, round_up(max_rows, ALIGNED_ELEMENTS), dtype=torch.int32, device=device).unbind()
        self._slots_B, self._ids_B, self._rows_B, self._positions_B, self._ends_B, self._out_B = buffers
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """Graphs by number of rows, and by whether there are prefix groups among them."""
        self._queries_LBHD = None if runner.keys is None else runner.keys.new_queries(max_rows)
        """Queries of the last step, if rows may be ranked by them."""
        self._uploaded: Slots | None = None
        """The rows' slots, as the device has them."""

    def capture(self, pool: Any) -> bool:
        """Make the graphs. Are there any for rows that share a prefix?"""
        self._uploaded = None
        self._slots_B.zero_()
        for size in reversed(self._sizes):
            for is_grouped in (False, True) if size >= _MIN_GROUPED_ROWS else (False,):
                forward = functools.partial(self._forward, size, is_grouped=is_grouped)
                self._graphs[size, is_grouped] = _Graph.capture(self._runner, forward, self._rows(size), pool)
        return self._sizes[-1] >= _MIN_GROUPED_ROWS

    def forward(self, step: Step) -> Forwarded:
        """Launch the forward half. The slots are uploaded if they are others than last time."""
        slots, num_rows = step.slots, len(step.slots)
        size = next(size for size in self._sizes if size >= num_rows) if self._graphs else num_rows
        if self._uploaded is None or not np.array_equal(self._uploaded, slots):
            padded = np.zeros(size, np.int32)
            padded[:num_rows] = slots
            self._uploaded = None  # if the copy fails
            self._runner.uploads.into(self._slots_B[:size], padded)
            self._uploaded = slots.copy()
        graph = self._graphs.get((size, self._runner.groups.are_any and size >= _MIN_GROUPED_ROWS))
        if graph is None:
            logits_BV = self._forward(size, is_grouped=False)
        else:
            graph.forward()
            logits_BV = graph.logits_RV
        if step.ranked:
            self._rank(step)
        return Forwarded(logits_RV=logits_BV, rows=self._rows(size), slots=slots, ends=step.ends, graph=graph)

    def _rank(self, step: Step) -> None:
        keys, queries_LBHD = self._runner.keys, self._queries_LBHD
        assert keys is not None and queries_LBHD is not None, "no request has a policy"
        ranking = Ranking(step.ranked, {slot: 1 + row for row, slot in enumerate(step.slots.tolist())}, self._runner.uploads)
        keys.rank(ranking, queries_LBHD)
        ranking.finish()

    def _rows(self, size: int) -> SampledRows:
        return SampledRows(self._slots_B[:size], self._ends_B[:size], self._out_B[:size])

    def _forward(self, size: int, *, is_grouped: bool) -> torch.Tensor:
        buffers = self._slots_B, self._ids_B, self._rows_B, self._positions_B, self._ends_B
        slots_B, ids_B, rows_B, positions_B, ends_B = (tensor[:size] for tensor in buffers)
        self._runner.state.begin(slots_B, ids_B, rows_B, positions_B, ends_B)
        attention = AttentionMetadata(
            slots_N=slots_B, rows_N=rows_B, positions_N=positions_B, slots_B=slots_B, lengths_B=ends_B, query_starts=None,
            shared=self._runner.groups.tensors(size) if is_grouped else None,
            queries_LBHD=None if self._queries_LBHD is None else self._queries_LBHD[:, :size],
        )  # fmt: skip
        return self._runner.model.forward(ids_B, attention, None)


class _MixedSteps:
    """Steps that compute chunks of prompts beside the rows that decode, whose tokens are on the device.

    Tokens are filled up to the next size that was captured, where that is faster than launching so many one by one.
    """

    def __init__(self, runner: Runner, max_rows: int, max_tokens: int) -> None:
        self._runner = runner
        device = runner.uploads.device
        self._on_gpu: Final = device.type == "cuda"
        self._max_rows: Final = max_rows
        self._max_tokens: Final = max_tokens
        self._packed = torch.zeros(packed_size(_MixedInput.sizes(max_rows, max_tokens)), dtype=torch.int32, device=device)
        self._out_R = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """Graphs by number of tokens, and by whether there are prefix groups among the rows that decode."""
        self.launch_s = float("inf")
        """Time that the host takes to launch a step without a graph."""

    def capture(self, pool: Any) -> None:
        """Make the graphs, and time them; for prefix groups too where launching takes longer than the step."""
        self._packed.zero_()
        sizes = token_sizes(self._max_tokens)[::-1]
        for size in sizes:
            self._capture(size, is_grouped=False, pool=pool)
        for size in sizes if self._max_rows >= _MIN_GROUPED_ROWS else ():
            if self._graphs[size, False].took_s < self.launch_s:
                self._capture(size, is_grouped=True, pool=pool)

    def _capture(self, size: int, *, is_grouped: bool, pool: Any) -> None:
        uploaded = _MixedInput(*aligned_parts(self._packed, _MixedInput.sizes(self._max_rows, size)))
        forward = functools.partial(self._forward, uploaded, is_grouped=is_grouped)
        graph = self._graphs[size, is_grouped] = _Graph.capture(self._runner, forward, self._rows(uploaded), pool)
        self.launch_s = min(self.launch_s, graph.launch_s)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        graph.forward()
        self._runner.settle()
        torch.cuda.synchronize()
        graph.took_s = time.perf_counter() - began_s

    def forward(self, step: Step) -> Forwarded:
        """Launch the forward half."""
        spans, num_decoding = _Spans.of(step), len(step.slots)
        is_grouped = self._runner.groups.are_any and num_decoding > 0
        # Graphs give logits of the rows that are given a token; any number of others may be wanted, and queries ranked by.
        by_graph, num_tokens = step.wanted is None and not step.ranked, len(spans.ids_N)
        size, graph = self.graph_for(num_tokens, is_grouped=is_grouped) if by_graph else (num_tokens, None)
        uploaded, ranking, states = self._upload(spans, size), None, None
        if step.ranked:
            ranking = Ranking(step.ranked, spans.query_ends(), self._runner.uploads)
        if graph is not None:
            graph.forward()
            logits_RV = graph.logits_RV
        else:
            inputs = self._input(uploaded, is_grouped=is_grouped, ranking=ranking)
            if step.wanted is None:
                logits_RV = self._runner.model.forward(*inputs)
            else:
                logits_RV, states_WE = self._with_states(inputs, spans.columns(num_decoding, step.wanted))
                states = step.wanted, states_WE
        if ranking is not None:
            ranking.finish()
        last = [chunk for chunk in step.chunks if chunk.is_last]
        return Forwarded(
            logits_RV=logits_RV, rows=self._rows(uploaded), slots=spans.slots_B[spans.sampled_R], graph=graph, states=states,
            ends=spans.ends_B[spans.sampled_R],
            candidates=[(row, each.num_candidates) for row, each in enumerate(last, num_decoding) if each.num_candidates],
        )  # fmt: skip

    def _upload(self, spans: "_Spans", size: int) -> "_MixedInput[torch.Tensor]":
        """Upload the input of a step, filled up to `size` tokens. One copy."""
        slots_B, ends_B, counts_B, begins_B, ids_N, sampled_R = spans
        num_runs, num_tokens, num_rows = len(slots_B), len(ids_N), len(sampled_R)
        sizes = _MixedInput.sizes(self._max_rows if self._on_gpu else num_runs, size)
        packed = np.zeros(packed_size(sizes), np.int32)
        filled = _MixedInput(*aligned_parts(packed, sizes))
        which_N = np.repeat(np.arange(num_runs), counts_B)
        filled.slots_B[:num_runs], filled.lengths_B[:num_runs] = slots_B, ends_B
        filled.query_starts[:num_runs], filled.query_starts[num_runs:] = begins_B, num_tokens
        filled.ids_N[:num_tokens], filled.slots_N[:num_tokens] = ids_N, slots_B[which_N]
        filled.rows_N[:num_tokens] = np.arange(num_tokens) + (ends_B - counts_B - begins_B)[which_N]
        filled.last_R[:num_rows] = (begins_B + counts_B - 1)[sampled_R]
        filled.slots_R[:num_rows], filled.ends_R[:num_rows] = slots_B[sampled_R], ends_B[sampled_R]
        self._runner.uploads.into(self._packed[: len(packed)], packed)
        return _MixedInput(*aligned_parts(self._packed, sizes))

    def _with_states(self, inputs: "_ModelInputs", columns: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows that are given a token, and the states of other columns, in one pass."""
        (columns_W,), (ids_N, attention, last_R) = self._runner.uploads.pack([columns]), inputs
        states_AE = self._runner.model.states(ids_N, attention, torch.cat([last_R, columns_W.long()]))
        return self._runner.model.logits(states_AE[: len(last_R)]), states_AE[len(last_R) :]

    def graph_for(self, num_tokens: int, *, is_grouped: bool) -> tuple[int, _Graph | None]:
        """The graph for so many tokens and its size, if it is done before the same, launched one by one, would be."""
        sizes = (size for size, groups in self._graphs if groups == is_grouped and size >= num_tokens)
        size = min(sizes, default=None)
        if size is None:
            return num_tokens, None
        graph = self._graphs[size, is_grouped]
        is_faster = graph.took_s <= max(self.launch_s, graph.took_s * num_tokens / size)
        return (size, graph) if is_faster else (num_tokens, None)

    def _rows(self, uploaded: "_MixedInput[torch.Tensor]") -> SampledRows:
        return SampledRows(uploaded.slots_R, uploaded.ends_R, self._out_R[: len(uploaded.slots_R)])

    def _forward(self, uploaded: "_MixedInput[torch.Tensor]", *, is_grouped: bool) -> torch.Tensor:
        return self._runner.model.forward(*self._input(uploaded, is_grouped=is_grouped, ranking=None))

    def _input(self, uploaded: "_MixedInput[torch.Tensor]", *, is_grouped: bool, ranking: Ranking | None) -> "_ModelInputs":
        """Token ids, what attention needs of them, and the columns behind which tokens are wanted."""
        state, slots_N = self._runner.state, uploaded.slots_N.long()
        ids_N = torch.where(uploaded.ids_N == ON_DEVICE, state.tokens_S[slots_N], uploaded.ids_N)
        attention = AttentionMetadata(
            slots_N=uploaded.slots_N, rows_N=uploaded.rows_N, positions_N=uploaded.rows_N + state.shifts_S[slots_N],
            slots_B=uploaded.slots_B, lengths_B=uploaded.lengths_B, query_starts=uploaded.query_starts,
            shared=self._runner.groups.tensors(len(uploaded.slots_B)) if is_grouped else None, ranking=ranking,
        )  # fmt: skip
        return ids_N, attention, uploaded.last_R.long()


_ModelInputs: TypeAlias = tuple[torch.Tensor, AttentionMetadata, torch.Tensor]
"""Token ids, what attention needs of them, and the columns behind which tokens are wanted."""


class _Spans(NamedTuple):
    """New tokens of each sequence of a mixed step, side by side, on the host: one of each that decodes, then the chunks."""

    slots_B: Slots
    ends_B: Slots
    """Rows behind the step."""
    counts_B: Slots
    begins_B: Slots
    """Column of the first new token."""
    ids_N: TokenIds
    sampled_R: Slots
    """Sequences that are given a token."""

    @classmethod
    def of(cls, step: Step) -> "_Spans":
        """The tokens of a step."""
        chunks, num_decoding = step.chunks, len(step.slots)
        counts_B = np.array([1] * num_decoding + [len(chunk.tokens) for chunk in chunks], np.int64)
        last = (index for index, chunk in enumerate(chunks, num_decoding) if chunk.is_last)
        return cls(
            slots_B=np.concatenate([step.slots, np.array([chunk.slot for chunk in chunks], np.int64)]),
            ends_B=np.concatenate([step.ends, np.array([chunk.end for chunk in chunks], np.int64)]),
            counts_B=counts_B,
            begins_B=np.cumsum(counts_B) - counts_B,
            ids_N=np.concatenate([np.full(num_decoding, ON_DEVICE, np.int32), *(chunk.tokens for chunk in chunks)]),
            sampled_R=np.array([*range(num_decoding), *last], np.int64),
        )

    def query_ends(self) -> dict[int, int]:
        """Column behind the last new token, by slot."""
        return dict(zip(self.slots_B.tolist(), (self.begins_B + self.counts_B).tolist(), strict=True))

    def columns(self, num_decoding: int, wanted: WantedStates) -> Slots:
        """Columns of the rows whose states are wanted."""
        firsts = ((self.begins_B[num_decoding + index] + start, count) for index, start, count in wanted.rows)
        return np.concatenate([np.arange(first, first + count) for first, count in firsts])


class _MixedInput(NamedTuple, Generic[Array]):
    """Input of a mixed step, on the host or on the device.

    Padding is sequences without tokens, tokens of the null slot, which are not written, and rows of the null slot.
    """

    slots_B: Array
    lengths_B: Array
    query_starts: Array
    """[B + 1]"""
    last_R: Array
    """Column of the last token of each row that is given a token."""
    slots_R: Array
    ends_R: Array
    ids_N: Array
    slots_N: Array
    rows_N: Array

    @staticmethod
    def sizes(num_sequences: int, num_tokens: int) -> list[int]:
        """Elements of each."""
        num_sampled: int = max(1, min(num_sequences, num_tokens))  # a forward pass has at least one output
        return [num_sequences, num_sequences, num_sequences + 1, *[num_sampled] * 3, *[num_tokens] * 3]
