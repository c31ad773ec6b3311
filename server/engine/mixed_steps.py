"""Steps in which prompts are computed, beside a token for each sequence that decodes: one upload, then a graph if there is one.

    upload  | of each run: slot, length, where its queries start | of each token: id, slot, position |
            | of each run that is given a token: column, slot, length |

Tokens are filled up to the next size that was captured, where that takes less time than launching so many one by one. Rows that
decode have no id here: theirs is on the device.

Legend: N tokens of the step, B runs, R runs that are given a token, V vocabulary.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.batch import Batch, Run
from vmmkv.server.engine.decode_steps import capture
from vmmkv.server.engine.ledger import Slots, TokenIds
from vmmkv.server.engine.model import Model
from vmmkv.server.engine.prompt_scores import ScoredRows, States
from vmmkv.server.engine.sampler import Sampler
from vmmkv.server.engine.step_state import StepState
from vmmkv.server.engine.uploads import ALIGNED_ELEMENTS, Uploads
from vmmkv.units import round_up

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
class _Captured:
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
        self._graphs: dict[int, _Captured] = {}
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
            self._graphs[size] = _Captured(logits_RV, replay, samples, took_s)

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

    def _worthwhile(self, num_tokens: int) -> tuple[int, _Captured] | None:
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
