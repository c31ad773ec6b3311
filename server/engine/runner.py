"""Launches steps: what a model computes for some sequences, what is sampled behind it, and how that comes back.

    decode   rows whose last token is on the device            graphs, nothing from the host   (decode_steps.py)
    mixed    the same rows, and chunks of prompts from the host   one upload a step             (mixed_steps.py)

Nothing here waits for the device.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.attention import Batch, Run
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.kv_backend import KV
from vmmkv.server.engine.models import Model
from vmmkv.server.engine.prefix_groups import Group, Sharers
from vmmkv.server.engine.prompt_logprobs import ScoredRows, States, scores
from vmmkv.server.engine.request import Slots, TokenIds
from vmmkv.server.engine.sampler import NOT_A_NUMBER, Entry, Sampler, likeliest, logprobs
from vmmkv.server.engine.uploads import ALIGNED_ELEMENTS, TokenMasks, Uploads, apply_masks
from vmmkv.server.protocol import Generate
from vmmkv.units import round_up

# -------- step state
# Where every sequence stands, on the device: what a decode step begins from and moves on, with nothing from the host.

IDLE = -2
"""In place of a token, for a row that had no room for one, or was nobody's: as in `vmmkv.kernels.step`."""


class StepState:
    """Of every slot its last token, which has no row yet, and the rows that it has; slot 0 is nobody's, and pads."""

    def __init__(self, cache: KV) -> None:
        self._limit = cache.limit
        self.tokens_S = torch.zeros_like(cache.limit)
        self.lengths_S = torch.zeros_like(cache.limit)

    def begin(self, slots_B: torch.Tensor, ids_B: torch.Tensor, positions_B: torch.Tensor, ends_B: torch.Tensor) -> None:
        """What the step computes: tokens, their rows, and the rows that there are then; 0 for rows of slot 0. One launch."""
        if slots_B.is_cuda:
            from vmmkv.kernels.step import begin_step

            begin_step(slots_B, self.tokens_S, self.lengths_S, ids_B, positions_B, ends_B)
        else:
            ids_B.copy_(self.tokens_S[slots_B])
            positions_B.copy_(self.lengths_S[slots_B])
            ends_B.copy_((positions_B + 1) * (slots_B > 0))

    def end(self, slots_B: torch.Tensor, sampled_B: torch.Tensor, ends_B: torch.Tensor, out_B: torch.Tensor) -> None:
        """The sampled tokens are the slots' last, behind `ends_B` rows; `out_B` is what the host reads. One launch.

        A row that its slot's limit does not allow stays where it was, and gives IDLE.
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


# -------- decode steps
# Decode steps that the device carries on by itself: a token for each row of a batch, two CUDA graphs a step.
#
#     forward: where each row stands ──> embed, append, attend ──> logits
#     sample:  logits ──> a token each ──> where each row stands, and what the host reads
#
# Between two steps nothing comes from the host but the launches, unless the batch has other rows than before. Batches are
# filled up to the next size that was captured. On a CPU the same is called without graphs.
#
# Legend: B rows of the batch, V vocabulary.

_LEAST_SHARERS: Final = 8
"""Rows of the smallest batch that is captured for shared prefixes too."""


def batch_sizes(max_rows: int) -> list[int]:
    """Rows of the steps that are captured: powers of two up to 32, then multiples of 32, from 256 on of 64.

    A step costs by its rows mostly where the device is busy with them; below it costs its weights.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, max_rows + 64, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class _Captured:
    logits_BV: torch.Tensor
    forward: Callable[[], None]
    samples: Mapping[bool, Callable[[], None]]
    """Of batches that are all greedy, and of others."""


class DecodeSteps:
    """All decode steps of one engine; `capture` makes its graphs once memory is there. One step is launched at a time."""

    def __init__(self, model: Model, sampler: Sampler, state: StepState, uploads: Uploads, *, max_rows: int) -> None:
        self._model, self._sampler, self._state, self._uploads = model, sampler, state, uploads
        device = state.tokens_S.device
        self._sizes = batch_sizes(max_rows)
        buffers = torch.zeros(5, round_up(max_rows, ALIGNED_ELEMENTS), dtype=torch.int32, device=device).unbind()
        self._slots_B, self._ids_B, self._positions_B, self._ends_B, self._out_B = buffers
        self._sharers = Sharers(max_rows, device)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._launched: _Captured | None = None
        """What the step that was launched last was replayed from."""
        self._shares = False
        """Are there groups of sharers among the rows?"""
        self._now: Slots | None = None
        """The rows' slots, as the device has them; None if it has others."""

    def capture(self, pool: Any) -> None:
        """Make the graphs in a pool of memory, the largest first, for the others use what it leaves. Compiles kernels at first.

        Cost: some 100 ms a size. The slots are nobody's meanwhile, so that no sequence is touched.
        """
        self._now = None
        self._slots_B.zero_()
        self._sharers.clear()
        for size in reversed(self._sizes):
            for shares in (False, True) if size >= _LEAST_SHARERS else (False,):
                self._graphs[size, shares] = self._captured(size, shares, pool)

    def _captured(self, size: int, shares: bool, pool: Any) -> _Captured:
        logits_BV = self._forward(size, None, shares)  # compiles what is not compiled yet

        def forward() -> None:
            nonlocal logits_BV
            logits_BV = self._forward(size, None, shares)

        replay = capture(forward, pool)
        samples = {}
        for greedy in (True, False):
            self._sample(size, logits_BV, greedy=greedy)
            samples[greedy] = capture(functools.partial(self._sample, size, logits_BV, greedy=greedy), pool)
        return _Captured(logits_BV, replay, samples)

    @property
    def shares(self) -> bool:
        """Are there steps for rows that share a prefix?"""
        return any(shares for _, shares in self._graphs)

    def share(self, slots: Slots, groups: Sequence[Group]) -> None:
        """From the next step on the first rows are the members of these groups, one behind the other."""
        self._shares = bool(groups)
        if groups:
            self._sharers.place(slots, groups, self._uploads)

    def forward(self, slots: Slots, lengths: Slots) -> torch.Tensor:
        """Launch the forward half for these slots, whose rows so far are `lengths`; [B, V] logits, padded rows among them.

        Which slots they are is uploaded if they are others than last time; nothing else ever is.
        """
        num_rows = len(slots)
        size = next(size for size in self._sizes if size >= num_rows) if self._graphs else num_rows
        self._place(slots, size)
        self._launched = self._graphs.get((size, self._shares and size >= _LEAST_SHARERS))
        if self._launched is None:
            return self._forward(size, (slots, lengths), False)
        self._launched.forward()
        return self._launched.logits_BV

    def sample(self, num_rows: int, logits_BV: torch.Tensor, *, greedy: bool) -> torch.Tensor:
        """Launch the other half of the step; [B] int32 tokens, to be copied before the next one is launched."""
        if self._launched is not None:
            self._launched.samples[greedy]()
        else:
            self._sample(len(logits_BV), logits_BV, greedy=greedy)
        return self._out_B[:num_rows]

    def finish(self, num_rows: int, sampled_B: torch.Tensor) -> torch.Tensor:
        """Instead of `sample`, if the tokens have been sampled by the caller."""
        self._state.end(self._slots_B[:num_rows], sampled_B[:num_rows], self._ends_B[:num_rows], self._out_B[:num_rows])
        return self._out_B[:num_rows]

    @property
    def slots_B(self) -> torch.Tensor:
        """int32: of the rows of the step that was launched last, on the device."""
        return self._slots_B

    @property
    def ends_B(self) -> torch.Tensor:
        """int32: the rows that each has behind it."""
        return self._ends_B

    def _place(self, slots: Slots, size: int) -> None:
        """Have the device know the rows, if it does not."""
        if self._now is not None and np.array_equal(self._now, slots):
            return
        padded = np.zeros(size, np.int32)
        padded[: len(slots)] = slots
        self._uploads.into(self._slots_B[:size], padded)
        self._now = slots.copy()

    def _forward(self, size: int, known: tuple[Slots, Slots] | None, shares: bool) -> torch.Tensor:
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
            shared=self._sharers.tensors(size) if shares else None,
        )  # fmt: skip
        return self._model.forward(ids_B, batch, None)

    def _sample(self, size: int, logits_BV: torch.Tensor, *, greedy: bool) -> None:
        slots_B, ends_B = self._slots_B[:size], self._ends_B[:size]
        sampled_B = self._sampler.sample(logits_BV, slots_B, ends_B, greedy=greedy)
        self._state.end(slots_B, sampled_B, ends_B, self._out_B[:size])


def capture(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A step as a graph: what replays it. `pool` is the memory of graphs of which one is replayed at a time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


# -------- mixed steps
# Steps in which prompts are computed, beside a token for each sequence that decodes: one upload, then a graph if there is one.
#
#     upload  | of each run: slot, length, where its queries start | of each token: id, slot, position |
#             | of each run that is given a token: column, slot, length |
#
# Tokens are filled up to the next size that was captured, where that is faster than launching so many one by one. Rows that
# decode have no id here: theirs is on the device.
#
# Legend: N tokens of the step, B runs, R runs that are given a token, V vocabulary.

ON_DEVICE: Final = -1
"""In place of a token that the host does not know."""

_LEAST_TOKENS: Final = 64


class Chunk(NamedTuple):
    """The next tokens of one sequence, known to the host."""

    slot: int
    start: int
    """Rows that it has."""
    tokens: TokenIds
    is_last: bool
    """Is a token wanted behind it: are these all of its tokens?"""
    num_candidates: int
    """How many of the likeliest are wanted there; 0 if one is sampled."""
    scored: ScoredRows | None = None
    """What is to be known of how likely these tokens were."""


class Spoken(NamedTuple):
    """What a step ends with: logits behind those of its runs that are given a token. Rows past `slots` fill up."""

    logits_RV: torch.Tensor
    slots_R: torch.Tensor
    ends_R: torch.Tensor
    slots: Slots
    """The same, on the host."""
    ends: Slots
    candidates: list[tuple[int, int]]
    """Of those rows, the ones that search, and how many candidates each wants."""
    states: States | None
    """For those who ask how likely their prompts are; None if nobody does."""
    samples: Mapping[bool, Callable[[], None]] | None
    """What samples from these logits where it was captured: if all of the rows are greedy, and if not."""


@dataclass(frozen=True, slots=True)
class _mixed_steps_Captured:
    logits_RV: torch.Tensor
    replay: Callable[[], None]
    samples: Mapping[bool, Callable[[], None]]
    took_s: float
    """The forward half."""


def token_sizes(most: int) -> list[int]:
    """Tokens of the steps that are captured: four sizes from each power of two to the next."""
    sizes, size = [], _LEAST_TOKENS
    while size < most:
        sizes.append(size)
        size += max(_LEAST_TOKENS, 1 << (size.bit_length() - 3))
    return [*sizes, most]


class MixedSteps:
    """All mixed steps of one engine; `capture` makes graphs of them. One is launched at a time."""

    def __init__(
        self, model: Model, sampler: Sampler, state: StepState, uploads: Uploads, *, max_rows: int, max_tokens: int
    ) -> None:
        self._model, self._sampler, self._state, self._uploads = model, sampler, state, uploads
        device = state.tokens_S.device
        self._on_gpu: Final = device.type == "cuda"
        self._max_rows: Final = max_rows
        self._max_tokens: Final = max_tokens
        self._packed = torch.zeros(_Places.of(max_rows, max_tokens).size, dtype=torch.int32, device=device)
        self._out_R = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[int, _mixed_steps_Captured] = {}
        self._launch_s = float("inf")
        """What launching a step one by one takes the host."""

    def capture(self, pool: Any) -> None:
        """Make the graphs, the largest first, for the others use its memory; nobody's rows are touched.

        Cost: a step of each size three times, and a few launches.
        """
        self._packed.zero_()
        for size in reversed(token_sizes(self._max_tokens)):
            places = _Places.of(self._max_rows, size)
            began_s = time.perf_counter()
            logits_RV = self._forward(places, None)
            self._launch_s = min(self._launch_s, time.perf_counter() - began_s)
            torch.cuda.synchronize()

            def forward(places: "_Places" = places) -> None:
                nonlocal logits_RV
                logits_RV = self._forward(places, None)

            replay = capture(forward, pool)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            replay()
            torch.cuda.synchronize()
            took_s = time.perf_counter() - began_s
            samples = {}
            for greedy in (True, False):
                sample = functools.partial(self._sample, logits_RV, places, greedy=greedy)
                sample()
                samples[greedy] = capture(sample, pool)
            self._graphs[size] = _mixed_steps_Captured(logits_RV, replay, samples, took_s)

    def forward(self, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> Spoken:
        """Launch a token for each of these slots, whose last one is on the device behind `lengths` rows, and the chunks."""
        step = _Step.of(slots, lengths, chunks)
        num_tokens = len(step.ids_N)
        # Graphs give logits of the rows that speak; of others there can be any number.
        captured = None if step.scored else self._worthwhile(num_tokens)
        size = num_tokens if captured is None else captured[0]
        places = _Places.of(self._max_rows if self._on_gpu else len(step.runs), size)
        self._uploads.into(self._packed[: places.size], step.packed(places))
        states = samples = None
        if step.scored:
            logits_RV, states = self._forward_scored(places, None if self._on_gpu else step.runs, step)
        elif captured is not None:
            captured[1].replay()
            logits_RV, samples = captured[1].logits_RV, captured[1].samples
        else:
            logits_RV = self._forward(places, None if self._on_gpu else step.runs)
        _, slots_R, ends_R = places.of_rows(self._packed)
        slots, ends = step.slots_B[step.speaking], (step.starts_B + step.counts_B)[step.speaking]
        return Spoken(logits_RV, slots_R, ends_R, slots, ends, step.candidates, states, samples)

    def sample(self, step: Spoken, *, greedy: bool) -> torch.Tensor:
        """Launch the other half of the step; int32 tokens of its slots, to be copied before the next one is launched."""
        if step.samples is not None:
            step.samples[greedy]()
            return self._out_R[: len(step.slots)]
        return self.finish(step, self._sampler.sample(step.logits_RV, step.slots_R, step.ends_R, greedy=greedy))

    def finish(self, step: Spoken, sampled_R: torch.Tensor) -> torch.Tensor:
        """Instead of `sample`, if the tokens have been sampled by the caller."""
        self._end(step.slots_R, step.ends_R, sampled_R)
        return self._out_R[: len(step.slots)]

    def _sample(self, logits_RV: torch.Tensor, places: "_Places", *, greedy: bool) -> None:
        _, slots_R, ends_R = places.of_rows(self._packed)
        self._end(slots_R, ends_R, self._sampler.sample(logits_RV, slots_R, ends_R, greedy=greedy))

    def _end(self, slots_R: torch.Tensor, ends_R: torch.Tensor, sampled_R: torch.Tensor) -> None:
        self._state.end(slots_R, sampled_R, ends_R, self._out_R[: len(sampled_R)])

    def _worthwhile(self, num_tokens: int) -> tuple[int, _mixed_steps_Captured] | None:
        """The graph for so many tokens, if it is done before the same, launched one by one, would be."""
        size = min((size for size in self._graphs if size >= num_tokens), default=None)
        if size is None:
            return None
        one = self._graphs[size]
        return (size, one) if one.took_s <= max(self._launch_s, one.took_s * num_tokens / size) else None

    def _forward(self, places: "_Places", runs: tuple[Run, ...] | None) -> torch.Tensor:
        return self._model.forward(*self._input(places, runs))

    def _forward_scored(self, places: "_Places", runs: tuple[Run, ...] | None, step: "_Step") -> tuple[torch.Tensor, States]:
        """As `_forward`, and the states of the rows that are asked about. A second upload says which they are."""
        columns_W = np.concatenate([np.arange(len(rows.tokens)) + column for column, _, rows in step.scored])
        columns, tokens_W = self._uploads.pack([columns_W, np.concatenate([rows.tokens for _, _, rows in step.scored])])
        ids_N, batch, last_R = self._input(places, runs)
        states_AE = self._model.states(ids_N, batch, torch.cat([last_R, columns.long()]))
        scored = [(index, rows) for _, index, rows in step.scored]
        return self._model.logits(states_AE[: len(last_R)]), States(states_AE[len(last_R) :], tokens_W, scored)

    def _input(self, places: "_Places", runs: tuple[Run, ...] | None) -> tuple[torch.Tensor, Batch, torch.Tensor]:
        """What a model computes, and behind which of its tokens the rows are that speak."""
        slots_B, lengths_B, query_starts = places.of_runs(self._packed)
        ids_N, slots_N, positions_N = places.of_tokens(self._packed)
        last_R, _, _ = places.of_rows(self._packed)
        ids_N = torch.where(ids_N == ON_DEVICE, self._state.tokens_S[slots_N.long()], ids_N)
        batch = Batch(
            slots_N=slots_N,
            positions_N=positions_N,
            slots_B=slots_B,
            lengths_B=lengths_B,
            query_starts=query_starts,
            runs=runs,
        )
        return ids_N, batch, last_R.long()


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the parts of a step lie in what is uploaded; each begins aligned."""

    num_runs: int
    num_tokens: int
    num_rows: int
    """Given a token; a forward pass has at least one output."""

    @classmethod
    def of(cls, num_runs: int, num_tokens: int) -> "_Places":
        return cls(num_runs, num_tokens, max(1, min(num_runs, num_tokens)))

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
class _Step:
    """A step on the host, in runs of tokens side by side: those that decode, then the chunks."""

    slots_B: Slots
    starts_B: Slots
    counts_B: Slots
    ids_N: TokenIds
    speaking: Slots
    """Runs that are given a token."""
    candidates: list[tuple[int, int]]
    scored: list[tuple[int, int, ScoredRows]]
    """Of chunks that ask: the column of their first token that counts, which chunk it is, and what it asks."""

    @classmethod
    def of(cls, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> "_Step":
        num_decoding = len(slots)
        speaking = [*range(num_decoding), *(num_decoding + index for index, chunk in enumerate(chunks) if chunk.is_last)]
        wants = [0] * num_decoding + [chunk.num_candidates for chunk in chunks]
        column, scored = num_decoding, list[tuple[int, int, ScoredRows]]()
        for index, chunk in enumerate(chunks):
            if chunk.scored is not None:
                scored.append((column + chunk.scored.first - chunk.start, index, chunk.scored))
            column += len(chunk.tokens)
        return cls(
            slots_B=np.concatenate([slots, np.array([chunk.slot for chunk in chunks], np.int64)]),
            starts_B=np.concatenate([lengths, np.array([chunk.start for chunk in chunks], np.int64)]),
            counts_B=np.array([1] * num_decoding + [len(chunk.tokens) for chunk in chunks], np.int64),
            ids_N=np.concatenate([np.full(num_decoding, ON_DEVICE, np.int32), *(chunk.tokens for chunk in chunks)]),
            speaking=np.array(speaking, np.int64),
            candidates=[(row, wants[run]) for row, run in enumerate(speaking) if wants[run]],
            scored=scored,
        )

    @property
    def runs(self) -> tuple[Run, ...]:
        """For attention that goes run by run."""
        columns = np.cumsum(self.counts_B) - self.counts_B
        table = np.stack((self.slots_B, self.starts_B, self.counts_B, columns), axis=1).tolist()
        return tuple(Run(slot=slot, start=start, count=count, column=column) for slot, start, count, column in table)

    def packed(self, places: _Places) -> npt.NDArray[np.int32]:
        """As it is uploaded. What fills up is nobody's: runs without queries, and tokens of slot 0, which are not written."""
        packed = np.zeros(places.size, np.int32)
        num_runs, num_tokens = len(self.slots_B), len(self.ids_N)
        columns_B = np.cumsum(self.counts_B) - self.counts_B
        ends_B = self.starts_B + self.counts_B
        which_N = np.repeat(np.arange(num_runs), self.counts_B)
        slots, lengths, query_starts = (part.numpy() for part in places.of_runs(torch.from_numpy(packed)))
        slots[:num_runs], lengths[:num_runs] = self.slots_B, ends_B
        query_starts[:num_runs], query_starts[num_runs:] = columns_B, num_tokens
        ids, slots_N, positions = (part.numpy() for part in places.of_tokens(torch.from_numpy(packed)))
        ids[:num_tokens], slots_N[:num_tokens] = self.ids_N, self.slots_B[which_N]
        positions[:num_tokens] = self.starts_B[which_N] + np.arange(num_tokens) - columns_B[which_N]
        last, slots_R, ends_R = (part.numpy() for part in places.of_rows(torch.from_numpy(packed)))
        speaking, num_rows = self.speaking, len(self.speaking)
        last[:num_rows] = columns_B[speaking] + self.counts_B[speaking] - 1
        slots_R[:num_rows], ends_R[:num_rows] = self.slots_B[speaking], ends_B[speaking]
        return packed


# -------- readback
# What a launched step gives the host, once it has run: tokens, candidates of beams, log-probabilities, also of prompts.


class Logprobs(NamedTuple):
    """Of one sampled token, under the model's own distribution."""

    chosen: float
    likeliest: list[tuple[int, float]]
    """Token ids and theirs, the highest first; as many as were asked for."""


class PromptScores(NamedTuple):
    """Of some tokens of a prompt, under the model's own distribution: W of them, each with its T likeliest."""

    first: int
    """As in `prompt_scores.ScoredRows`."""
    chosen_W: npt.NDArray[np.float32]
    values_WT: npt.NDArray[np.float32]
    ids_WT: npt.NDArray[np.int64]


class Readback:
    """The way of a step's results through pinned memory. `wait` blocks until they are there."""

    def __init__(self, tokens_B: torch.Tensor) -> None:
        self._tokens_B = _to_host(tokens_B)
        self._logprobs: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._candidates: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._prompt_scores: tuple[Sequence[tuple[int, ScoredRows]], tuple[torch.Tensor, ...]] | None = None
        self._done: torch.cuda.Event | None = None
        self._on_gpu: Final = tokens_B.is_cuda

    def add_logprobs(
        self, rows: Sequence[tuple[int, int]], chosen_R: torch.Tensor, values_RT: torch.Tensor, ids_RT: torch.Tensor
    ) -> None:
        """Rows of the step, with how many of the likeliest each asked for, and theirs; T at least that many."""
        self._logprobs = rows, tuple(map(_to_host, (chosen_R, values_RT, ids_RT)))

    def add_candidates(self, rows: Sequence[tuple[int, int]], values_RC: torch.Tensor, ids_RC: torch.Tensor) -> None:
        """Rows of the step, with how many candidates each asked for, and theirs."""
        self._candidates = rows, tuple(map(_to_host, (values_RC, ids_RC)))

    def add_prompt_scores(
        self, scored: Sequence[tuple[int, ScoredRows]], chosen_W: torch.Tensor, values_WT: torch.Tensor, ids_WT: torch.Tensor
    ) -> None:
        """Which chunks of the step asked about which rows, and theirs, side by side; T as many as anybody wants."""
        self._prompt_scores = scored, tuple(map(_to_host, (chosen_W, values_WT, ids_WT)))

    def close(self) -> None:
        """All has been added: mark the place in the stream behind which it can be read."""
        if self._on_gpu:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> npt.NDArray[np.int32]:
        """The tokens, by row. Blocks until the device is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tokens_B.numpy()

    def logprobs(self) -> dict[int, Logprobs]:
        """By row; after `wait`."""
        if self._logprobs is None:
            return {}
        rows, (chosen_R, values_RT, ids_RT) = self._logprobs
        chosen, values, ids = chosen_R.tolist(), values_RT.tolist(), ids_RT.tolist()
        return {
            row: Logprobs(chosen[index], list(zip(ids[index][:count], values[index][:count], strict=True)))
            for index, (row, count) in enumerate(rows)
        }

    def prompt_scores(self) -> dict[int, PromptScores]:
        """By chunk of the step; after `wait`. They are views."""
        if self._prompt_scores is None:
            return {}
        scored, (chosen_W, values_WT, ids_WT) = self._prompt_scores
        found, begin = dict[int, PromptScores](), 0
        for index, each in scored:
            rows, columns = slice(begin, begin + len(each.tokens)), slice(each.num_likeliest)
            begin = rows.stop
            found[index] = PromptScores(
                each.first, chosen_W[rows].numpy(), values_WT[rows, columns].numpy(), ids_WT[rows, columns].numpy()
            )
        return found

    def candidates(self) -> dict[int, list[Candidate]]:
        """By row, the likeliest first; after `wait`."""
        if self._candidates is None:
            return {}
        rows, (values_RC, ids_RC) = self._candidates
        values, ids = values_RC.tolist(), ids_RC.tolist()
        return {
            row: [Candidate(*each) for each in zip(values[index][:count], ids[index][:count], strict=True)]
            for index, (row, count) in enumerate(rows)
        }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host: pinned, and not there yet, if it comes from a GPU."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


# -------- runner

Masks: TypeAlias = Callable[[Slots, Uploads], TokenMasks | None]
"""Of a step's rows, by the slots of those, which tokens may come next; None if all may. The masks are blanks of the uploads."""

_ALWAYS: Final = np.iinfo(np.int64).max


@dataclass(slots=True)
class _Options:
    """Per slot, what decides how a batch is sampled."""

    is_greedy: npt.NDArray[np.bool_]
    adjusts_before: npt.NDArray[np.int64]
    """Logits are changed as long as fewer tokens than so many are behind: until `min_tokens` are there, or, with penalties or
    biases, always. 0 for never."""
    num_logprobs: npt.NDArray[np.int64]
    """-1 if none are wanted."""


class Runner:
    """A model over a cache, with a sampler and the device's own state of every sequence."""

    def __init__(self, model: Model, cache: KV, *, max_rows: int, max_tokens: int) -> None:
        """max_rows: sequences that run at once. max_tokens: of one step."""
        self.model: Final = model
        self.uploads: Final = Uploads(cache.device)
        self._device: Final = cache.device
        num_slots = 1 + cache.num_slots
        self._state = StepState(cache)
        self._sampler = Sampler(num_slots, model.vocabulary_size, cache.device)
        self._options = _Options(np.ones(num_slots, np.bool_), np.zeros(num_slots, np.int64), np.full(num_slots, -1))
        self.steps: Final = DecodeSteps(model, self._sampler, self._state, self.uploads, max_rows=max_rows)
        self.mixed_steps: Final = MixedSteps(
            model, self._sampler, self._state, self.uploads, max_rows=max_rows, max_tokens=max_tokens
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Make the graphs of all steps, on a GPU, if the model's can be captured."""
        if self._device.type == "cuda" and self.model.capturable:
            pool = torch.cuda.graph_pool_handle()
            self.mixed_steps.capture(pool)
            self.steps.capture(pool)

    def check(self, ask: Generate) -> None:
        """Raises: ValueError for options that this model cannot serve, in words for whoever asked."""
        self._sampler.check(ask)
        if ask.num_prompt_logprobs is not None and not self.model.has_states:
            raise ValueError("this model has no head of its own, and so no log-probabilities of its prompts: leave them out")

    @torch.inference_mode()
    def assign(self, entries: Sequence[Entry]) -> None:
        """From now on the tokens in these slots are chosen as their requests asked: one upload. Errors: Sampler.assign's."""
        self._sampler.assign(entries)
        options = self._options
        for entry in entries:
            slot, ask = entry.slot, entry.asked
            options.is_greedy[slot] = self._sampler.is_greedy(slot)
            options.adjusts_before[slot] = _ALWAYS if self._sampler.needs_adjusting(slot) else entry.withheld_before
            options.num_logprobs[slot] = ask.num_logprobs if ask.want_logprobs else -1

    def release(self, slot: int) -> None:
        """The request in this slot is over."""
        self._sampler.release(slot)
        self._options.is_greedy[slot], self._options.adjusts_before[slot], self._options.num_logprobs[slot] = True, 0, -1

    @property
    def shares(self) -> bool:
        """Can rows of a decode step attend to a common prefix as one problem?"""
        return self.steps.shares

    def share(self, slots: Slots, groups: Sequence[Group]) -> None:
        """Decode steps of these slots from now on: the first ones are the members of the groups, one behind the other."""
        self.steps.share(slots, groups)

    @torch.inference_mode()
    def decode(self, slots: Slots, lengths: Slots, masks: Masks | None = None) -> Readback:
        """A step of one token for each of these slots, whose last token is on the device, behind `lengths` rows.

        `masks` is called when the forward half is under way, and says which tokens may come next.
        """
        steps = self.steps
        logits_BV = steps.forward(slots, lengths)
        slots_B, ends_B = steps.slots_B[: len(logits_BV)], steps.ends_B[: len(logits_BV)]
        changed_BV = self._changed(logits_BV, slots_B, ends_B, slots, lengths + 1, masks)
        greedy = bool(self._options.is_greedy[slots].all())
        if changed_BV is logits_BV:
            tokens_B = steps.sample(len(slots), logits_BV, greedy=greedy)
        else:
            sampled_B = self._sampler.sample(changed_BV, slots_B, ends_B, greedy=greedy)
            self._count(slots_B, sampled_B, slots, lengths + 1)
            tokens_B = steps.finish(len(slots), sampled_B)
        return self._read(tokens_B, logits_BV, slots, [])

    @torch.inference_mode()
    def mixed(self, slots: Slots, lengths: Slots, chunks: Sequence[Chunk], masks: Masks | None = None) -> Readback:
        """A step of one token for each of these slots, as `decode`, and of the chunks.

        It gives tokens for the slots, and then for the chunks that are the last ones of their sequences, in order; `masks` is
        not called if there are none.
        """
        step = self.mixed_steps.forward(slots, lengths, chunks)
        if not len(step.slots):
            return self._read(step.slots_R[:0], step.logits_RV, step.slots, [], step.states)
        changed_RV = self._changed(step.logits_RV, step.slots_R, step.ends_R, step.slots, step.ends, masks)
        greedy = bool(self._options.is_greedy[step.slots].all())
        if changed_RV is step.logits_RV:
            tokens_R = self.mixed_steps.sample(step, greedy=greedy)
        else:
            sampled_R = self._sampler.sample(changed_RV, step.slots_R, step.ends_R, greedy=greedy)
            self._count(step.slots_R, sampled_R, step.slots, step.ends, searching=[row for row, _ in step.candidates])
            tokens_R = self.mixed_steps.finish(step, sampled_R)
        return self._read(tokens_R, step.logits_RV, step.slots, step.candidates, step.states)

    def _changed(
        self,
        logits_BV: torch.Tensor,
        slots_B: torch.Tensor,
        ends_B: torch.Tensor,
        slots: Slots,
        ends: Slots,
        masks: Masks | None,
    ) -> torch.Tensor:
        """What is sampled from, for rows whose first ones are these slots, behind `ends` tokens: the logits, or a copy that is
        changed, where log-probabilities are wanted of them as they are.
        """
        allowed = None if masks is None else masks(slots, self.uploads)
        adjusts = self._adjusts(slots, ends)
        adjusted_BV = logits_BV  # log-probabilities are of the model's own, and who searches follows no grammar
        if adjusts:
            adjusted_BV = logits_BV.to(torch.float32, copy=True)
            self._sampler.adjust(adjusted_BV, slots_B, ends_B)
        if allowed is not None:
            if not adjusts and (self._options.num_logprobs[slots[allowed.rows]] >= 0).any():
                adjusted_BV = logits_BV.clone()
            apply_masks(adjusted_BV, allowed, self.uploads)
        return adjusted_BV

    def _count(
        self, slots_B: torch.Tensor, sampled_B: torch.Tensor, slots: Slots, ends: Slots, *, searching: Sequence[int] = ()
    ) -> None:
        """Penalties of these slots know what was sampled.

        What is sampled for rows that search is nobody's: a beam's slot may have state left of who had it before.
        """
        if self._adjusts(slots, ends):
            counted_B = sampled_B.clone()
            for row in searching:
                counted_B[row] = NOT_A_NUMBER
            self._sampler.count(slots_B, counted_B)

    def _adjusts(self, slots: Slots, ends: Slots) -> bool:
        """Are logits changed of any of these slots, behind so many tokens?"""
        return bool((self._options.adjusts_before[slots] > ends).any())

    def _read(
        self,
        tokens_B: torch.Tensor,
        logits_BV: torch.Tensor,
        slots: Slots,
        candidates: list[tuple[int, int]],
        states: States | None = None,
    ) -> Readback:
        """The step's results on their way; candidates: rows, and how many each wants."""
        readback = Readback(tokens_B)
        wanted = self._options.num_logprobs[slots]
        if len(rows := np.flatnonzero(wanted >= 0)):
            top = int(wanted.max())
            (rows_R,) = self.uploads.pack([rows])
            found = logprobs(logits_BV, tokens_B, rows_R.long(), top)
            readback.add_logprobs(list(zip(rows.tolist(), wanted[rows].tolist(), strict=True)), *found)
        if candidates:
            (rows_R,) = self.uploads.pack([[row for row, _ in candidates]])
            readback.add_candidates(candidates, *likeliest(logits_BV[rows_R.long()], max(count for _, count in candidates)))
        if states is not None:
            readback.add_prompt_scores(states.scored, *scores(self.model, states))
        readback.close()
        return readback
