"""Launches steps: what a model computes for some sequences, what is sampled behind it, and how that comes back.

    decode   rows whose last token is on the device            graphs, nothing from the host   (decode_steps.py)
    mixed    the same rows, and chunks of prompts from the host   launched kernel by kernel

Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVCache
from vmmkv.server.engine.batch import Batch, Run
from vmmkv.server.engine.decode_steps import DecodeSteps
from vmmkv.server.engine.ledger import Slots, TokenIds
from vmmkv.server.engine.model import Model
from vmmkv.server.engine.readback import Readback
from vmmkv.server.engine.sampler import Entry, Sampler, likeliest, logprobs
from vmmkv.server.engine.sharers import Group
from vmmkv.server.engine.step_state import StepState
from vmmkv.server.engine.uploads import Uploads
from vmmkv.server.protocol import Generate

_LEAST_ROWS: Final = 16
_ROWS_FACTOR: Final = 4
"""Sequences of a mixed step are filled up to 16, 64, 256, ...: kernels are compiled for each number of them."""


def padded_rows(most: int) -> list[int]:
    """Sequences of mixed steps for which kernels are compiled, the last one at least `most`; others are filled up to these."""
    sizes = [_LEAST_ROWS]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * _ROWS_FACTOR)
    return sizes


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


@dataclass(slots=True)
class _Options:
    """Per slot, what decides how a batch is sampled."""

    is_greedy: npt.NDArray[np.bool_]
    adjusts: npt.NDArray[np.bool_]
    """Are there penalties or biases?"""
    num_logprobs: npt.NDArray[np.int64]
    """-1 if none are wanted."""


class Runner:
    """A model over a cache, with a sampler and the device's own state of every sequence."""

    def __init__(self, model: Model, cache: KVCache, *, max_rows: int) -> None:
        self.model: Final = model
        self.uploads: Final = Uploads(cache.device)
        self._device: Final = cache.device
        self._on_gpu: Final = cache.device.type == "cuda"
        num_slots = 1 + cache.num_slots
        self._state = StepState(cache)
        self._sampler = Sampler(num_slots, model.vocabulary_size, cache.device)
        self._options = _Options(np.ones(num_slots, np.bool_), np.zeros(num_slots, np.bool_), np.full(num_slots, -1))
        self.steps: Final = DecodeSteps(model, self._sampler, self._state, self.uploads, max_rows=max_rows)

    @torch.inference_mode()
    def capture(self) -> None:
        """Make the graphs of all decode steps, on a GPU, if the model's steps can be captured."""
        if self._on_gpu and self.model.capturable:
            self.steps.capture()

    def check(self, ask: Generate) -> None:
        """Raises: ValueError for options that this model cannot serve, in words for whoever asked."""
        self._sampler.check(ask)

    @torch.inference_mode()
    def assign(self, slot: int, ask: Generate, prompt: TokenIds, generated: TokenIds) -> None:
        """From now on the tokens in this slot are chosen as a request asked."""
        options = self._options
        self._sampler.assign([Entry(slot, ask, prompt, generated)])
        options.is_greedy[slot] = self._sampler.is_greedy(slot)
        options.adjusts[slot] = self._sampler.needs_adjusting(slot)
        options.num_logprobs[slot] = ask.num_logprobs if ask.want_logprobs else -1

    def release(self, slot: int) -> None:
        """The request in this slot is over."""
        self._sampler.release(slot)
        self._options.is_greedy[slot], self._options.adjusts[slot], self._options.num_logprobs[slot] = True, False, -1

    @property
    def shares(self) -> bool:
        """Can rows of a decode step attend to a common prefix as one problem?"""
        return self.steps.shares

    def share(self, slots: Slots, groups: Sequence[Group]) -> None:
        """Decode steps of these slots from now on: the first ones are the members of the groups, one behind the other."""
        self.steps.share(slots, groups)

    @torch.inference_mode()
    def decode(self, slots: Slots, lengths: Slots) -> Readback:
        """A step of one token for each of these slots, whose last token is on the device, behind `lengths` rows."""
        logits_BV = self.steps.forward(slots, lengths)
        num_rows, size = len(slots), len(logits_BV)
        greedy = bool(self._options.is_greedy[slots].all())
        if self._options.adjusts[slots].any():
            sampled_B = self._choose(logits_BV, self.steps.slots_B[:size], self.steps.ends_B[:size], slots)
            tokens_B = self.steps.finish(num_rows, sampled_B)
        else:
            tokens_B = self.steps.sample(num_rows, logits_BV, greedy=greedy)
        return self._read(tokens_B, logits_BV, slots, [])

    @torch.inference_mode()
    def mixed(self, slots: Slots, lengths: Slots, chunks: Sequence[Chunk]) -> Readback:
        """A step of one token for each of these slots, as `decode`, and of the chunks.

        It gives tokens for the slots, and then for the chunks that are the last ones of their sequences, in order.
        """
        step = _Packed.of(slots, lengths, chunks, self._padded(len(slots) + len(chunks)))
        (ids_N, slots_N, positions_N, slots_B, lengths_B, query_starts, last_R, slots_R, ends_R) = self.uploads.pack(step.parts)
        if len(slots):
            ids_N[: len(slots)] = self._state.tokens_S[slots_N[: len(slots)].long()]
        batch = Batch(
            slots_N=slots_N,
            positions_N=positions_N,
            slots_B=slots_B,
            lengths_B=lengths_B,
            query_starts=query_starts,
            runs=None if self._on_gpu else step.runs,
        )
        logits_RV = self.model.forward(ids_N, batch, last_R.long())
        if not len(step.speaking):
            return self._read(slots_R[:0], logits_RV, step.speaking, [])
        sampled_R = self._choose(logits_RV, slots_R, ends_R, step.speaking)
        out_R = torch.empty_like(sampled_R)
        self._state.end(slots_R, sampled_R, ends_R, out_R)
        return self._read(out_R, logits_RV, step.speaking, step.candidates)

    def _choose(self, logits_BV: torch.Tensor, slots_B: torch.Tensor, ends_B: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Sample for rows whose first ones are these slots, after what changes the logits of some."""
        adjusts = bool(self._options.adjusts[slots].any())
        adjusted_BV = logits_BV
        if adjusts:
            adjusted_BV = logits_BV.to(torch.float32, copy=True)  # log-probabilities are of the model's own
            self._sampler.adjust(adjusted_BV, slots_B)
        greedy = bool(self._options.is_greedy[slots].all())
        sampled_B = self._sampler.sample(adjusted_BV, slots_B, ends_B, greedy=greedy)
        if adjusts:
            self._sampler.count(slots_B, sampled_B)
        return sampled_B

    def _read(
        self, tokens_B: torch.Tensor, logits_BV: torch.Tensor, slots: Slots, candidates: list[tuple[int, int]]
    ) -> Readback:
        """The step's results on their way; candidates: rows, and how many each wants."""
        readback = Readback(tokens_B)
        wanted = self._options.num_logprobs[slots]
        if len(rows := np.flatnonzero(wanted >= 0)):
            top = int(wanted.max())
            found = logprobs(logits_BV, tokens_B, torch.from_numpy(rows).to(self._device), top)
            readback.add_logprobs(list(zip(rows.tolist(), wanted[rows].tolist(), strict=True)), *found)
        if candidates:
            rows_R = torch.tensor([row for row, _ in candidates], device=self._device)
            readback.add_candidates(candidates, *likeliest(logits_BV[rows_R], max(count for _, count in candidates)))
        readback.close()
        return readback

    def _padded(self, num_runs: int) -> int:
        return padded_rows(num_runs)[-1] if self._on_gpu else num_runs


@dataclass(frozen=True, slots=True)
class _Packed:
    """A mixed step as arrays for the device. Legend: N tokens, B runs, filled up, R rows that give a token."""

    runs: tuple[Run, ...]
    speaking: Slots
    """Slots that are given a token."""
    candidates: list[tuple[int, int]]
    """Of those rows, the ones that search, and how many candidates each wants."""
    parts: tuple[npt.NDArray[np.int32 | np.int64], ...]
    """Ids, slots, positions of N; slots and lengths of B, and where their queries start; of R the column, slot and length."""

    @classmethod
    def of(cls, slots: Slots, lengths: Slots, chunks: Sequence[Chunk], size: int) -> "_Packed":
        """The slots' tokens come first; their ids are the device's to fill in. As many runs as `size`, the last ones empty."""
        num_decoding, num_runs = len(slots), len(slots) + len(chunks)
        counts = np.ones(num_runs, np.int64)
        counts[num_decoding:] = [len(chunk.tokens) for chunk in chunks]
        starts = np.concatenate([lengths, np.array([chunk.start for chunk in chunks], np.int64)])
        slots_B = np.concatenate([slots, np.array([chunk.slot for chunk in chunks], np.int64)])
        columns = np.cumsum(counts) - counts
        num_tokens = int(counts.sum())
        which_N = np.repeat(np.arange(num_runs), counts)
        positions_N = starts[which_N] + np.arange(num_tokens) - columns[which_N]
        ids_N = np.concatenate([np.zeros(num_decoding, np.int32), *(chunk.tokens for chunk in chunks)])
        filling = np.zeros(size - num_runs, np.int64)
        query_starts = np.concatenate([columns, np.full(len(filling) + 1, num_tokens)])
        speaks = [*range(num_decoding), *(num_decoding + index for index, chunk in enumerate(chunks) if chunk.is_last)]
        rows_R = np.array(speaks, np.int64)
        read_R = rows_R if len(rows_R) else np.zeros(1, np.int64)  # a forward pass has at least one output
        return cls(
            runs=tuple(
                Run(slot=slot, start=start, count=count, column=column)
                for slot, start, count, column in zip(
                    *(each.tolist() for each in (slots_B, starts, counts, columns)), strict=True
                )
            ),
            speaking=slots_B[rows_R],
            candidates=[
                (row, chunks[index - num_decoding].num_candidates)
                for row, index in enumerate(speaks)
                if index >= num_decoding and chunks[index - num_decoding].num_candidates
            ],
            parts=(
                ids_N,
                slots_B[which_N],
                positions_N,
                np.concatenate([slots_B, filling]),
                np.concatenate([starts + counts, filling]),
                query_starts,
                (columns + counts - 1)[read_R],
                slots_B[read_R],
                (starts + counts)[read_R],
            ),
        )
