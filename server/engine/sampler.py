"""From logits to token ids, on whatever device the logits are.

    logits ── penalties, bias, min_tokens ──> temperature ──> top-k ──> top-p ──> min-p ──> token
              `adjust`, for those who ask     `sample`: all parameters are on the device

A row's random numbers depend on its request's seed and the token's position alone, never on who runs beside it; and the same
logits give the same token on every device, bit for bit (see `kernels/noise.py`). The logits themselves can differ in their
last bits with the size of the batch, and so, rarely, can the token.

Log-probabilities are the model's own: of the logits as they are, before all of this.

Legend: B rows, R rows that are asked about, V vocabulary, S slots.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.kernels import reference
from vmmkv.kernels.reference import COLDEST, NOT_A_NUMBER
from vmmkv.server.engine.uploads import Uploads

# -------- sampling state
# The parameters that slots sample with, on the device, where a captured graph reads them.
#
# Legend: S slots, N sequences newly admitted, P parameters of 32 bits.


class Asked(Protocol):
    """How one sequence samples; `protocol.Generate` is this. Ranges as in `SamplingParams`, and checked there."""

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def min_p(self) -> float: ...  # noqa: D102
    @property
    def presence_penalty(self) -> float: ...  # noqa: D102
    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102
    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102
    @property
    def logit_bias(self) -> Mapping[int, float]: ...  # noqa: D102
    @property
    def min_tokens(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def want_logprobs(self) -> bool: ...  # noqa: D102
    @property
    def num_logprobs(self) -> int: ...  # noqa: D102


class Entry(NamedTuple):
    """A sequence that begins, or begins anew, to sample in a slot."""

    slot: int
    asked: Asked
    prompt: npt.NDArray[np.int32]
    generated: npt.NDArray[np.int32]
    """What it had generated before it was preempted."""
    withheld: Collection[int] = ()
    """Tokens of the vocabulary that it may not have before `min_tokens` others."""

    @property
    def withheld_before(self) -> int:
        """Tokens, the prompt's among them, that must be there for those to come; 0 if none is withheld."""
        return len(self.prompt) + self.asked.min_tokens if self.asked.min_tokens and self.withheld else 0


_FLOATS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NUM_PLANES: Final = len(_FLOATS) + 3


class SamplingState:
    """A tensor of each parameter, one number a slot, all of which one upload writes."""

    def __init__(self, num_slots: int, vocabulary_size: int, device: torch.device) -> None:
        self._vocabulary_size = vocabulary_size
        # Planes of one tensor, so that one launch writes them all.
        self._planes_PS = torch.zeros((_NUM_PLANES, num_slots), dtype=torch.int32, device=device)
        floats = [plane_S.view(torch.float32) for plane_S in self._planes_PS[: len(_FLOATS)]]
        self.temperature_S, self.top_p_S, self.min_p_S, self.presence_S, self.frequency_S, self.repetition_S = floats
        self.top_k_S, self.state_row_S, self.withheld_before_S = self._planes_PS[len(_FLOATS) :]
        self.seed_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p_S.fill_(1.0)
        self.repetition_S.fill_(1.0)
        self._is_greedy = np.ones(num_slots, np.bool_)

    def assign(self, entries: Sequence[Entry], state_rows: Sequence[int], uploads: Uploads) -> None:
        """Give slots their parameters, and the rows of state that hold what penalties count; 0 for none.

        Cost: one copy to the device, two launches; waits for nothing.
        """
        planes_PN = np.empty((_NUM_PLANES, len(entries)), np.int32)
        for i, name in enumerate(_FLOATS):
            planes_PN[i] = np.array([getattr(entry.asked, name) for entry in entries], np.float32).view(np.int32)
        planes_PN[-3] = [min(entry.asked.top_k, self._vocabulary_size) for entry in entries]
        planes_PN[-2] = state_rows
        planes_PN[-1] = [entry.withheld_before for entry in entries]
        seeds = np.array([entry.asked.seed & (2**64 - 1) for entry in entries], np.uint64)
        slots = np.array([entry.slot for entry in entries], np.int32)
        slots_N, planes, seed_words = uploads.pack([slots, planes_PN.reshape(-1), seeds.view(np.int32)])
        slots_N = slots_N.long()
        self._planes_PS.index_copy_(1, slots_N, planes.view(_NUM_PLANES, len(entries)))
        self.seed_S.index_copy_(0, slots_N, seed_words.view(torch.int64))
        self._is_greedy[slots] = planes_PN[0].view(np.float32) < np.float32(COLDEST)

    def is_greedy(self, slot: int) -> bool:
        """Does this slot take the likeliest token? The host's knowledge."""
        return bool(self._is_greedy[slot])


# -------- adjust
# What penalties and biases have to know, for the sequences that asked for them: rows of state, made as they are needed.
#
#     slot ── state_row_S ──> row of counts_RV (tokens generated), prompt_RV (tokens of the prompt), bias_RV
#
# Row 0 is nobody's: slots that ask for nothing have it, so that a launch finds a row for every slot.
#
# Legend: B rows of the batch, V vocabulary, S slots, R rows of state.

_FIRST_ROWS: Final = 4
"""Then twice as many, and so on."""


def asks_to_adjust(asked: Asked) -> bool:
    """Do these options change logits before anything is drawn?"""
    penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0) or bool(asked.logit_bias)


class Adjustments:
    """The rows of state of one device, and who has which. It has no memory until somebody asks."""

    def __init__(self, vocabulary_size: int, device: torch.device) -> None:
        self._vocabulary_size, self._device = vocabulary_size, device
        self._row_of_slot: dict[int, int] = {}
        self._free: list[int] = []
        self._counts_RV = torch.empty((0, vocabulary_size), dtype=torch.int32, device=device)
        self._prompt_RV = torch.empty((0, vocabulary_size), dtype=torch.uint8, device=device)
        self._bias_RV: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of state that there is memory for, used or not."""
        return len(self._counts_RV)

    def has(self, slot: int) -> bool:
        """Has this slot a row?"""
        return slot in self._row_of_slot

    def release(self, slot: int) -> None:
        """Its row is free. What has been launched before may still read it: whoever gets it writes it behind that."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def assign(self, entries: Sequence[Entry], uploads: Uploads) -> list[int]:
        """Rows for those entries that ask for one, filled with what they know; 0 for the others. Waits for nothing."""
        asking = [entry for entry in entries if asks_to_adjust(entry.asked)]
        if not asking:
            return [0] * len(entries)
        if len(self._free) < len(asking):
            self._grow(len(asking))
        if self._bias_RV is None and any(entry.asked.logit_bias for entry in asking):
            self._bias_RV = torch.zeros(self._counts_RV.shape, dtype=torch.float32, device=self._device)
        for entry in asking:
            self._row_of_slot[entry.slot] = self._free.pop()
        self._fill(asking, uploads)
        return [self._row_of_slot.get(entry.slot, 0) for entry in entries]

    def adjust(self, logits_BV: torch.Tensor, slots_B: torch.Tensor, state: SamplingState) -> None:
        """Change the logits, in place, of the rows that ask for it."""
        if not self.num_rows:
            return
        apply_penalties = reference.apply_penalties
        if logits_BV.is_cuda:
            from vmmkv.kernels.sampling.logits import apply_penalties
        apply_penalties(
            logits_BV, slots_B, state_row_S=state.state_row_S,
            repetition_S=state.repetition_S, frequency_S=state.frequency_S, presence_S=state.presence_S,
            counts_RV=self._counts_RV, prompt_RV=self._prompt_RV, bias_RV=self._bias_RV,
        )  # fmt: skip

    def count(self, slots_B: torch.Tensor, tokens_B: torch.Tensor, state: SamplingState) -> None:
        """These tokens have been generated; what is below 0 is none."""
        if not self.num_rows:
            return
        rows_B = torch.where(tokens_B >= 0, state.state_row_S[slots_B.long()], 0).long()
        # Whoever has no row counts in row 0, which nobody reads.
        places_B = rows_B * self._vocabulary_size + tokens_B.long().clamp(min=0)
        self._counts_RV.view(-1).scatter_add_(0, places_B, torch.ones_like(places_B, dtype=torch.int32))

    def _fill(self, asking: Sequence[Entry], uploads: Uploads) -> None:
        """Make their rows anew, whoever had them. One copy to the device."""
        rows = np.array([self._row_of_slot[entry.slot] for entry in asking], np.int64)
        firsts = rows * self._vocabulary_size
        prompts = [np.unique(entry.prompt) for entry in asking]
        counted = [np.unique(entry.generated, return_counts=True) for entry in asking]
        biased = [np.fromiter(entry.asked.logit_bias, np.int64) for entry in asking]
        biases = np.fromiter(chain.from_iterable(entry.asked.logit_bias.values() for entry in asking), np.float32)
        rows_A, prompt, generated, counts, biased_places, bias_bits = uploads.pack(
            [
                rows,
                _places(firsts, prompts),
                _places(firsts, [ids for ids, _ in counted]),
                np.concatenate([count for _, count in counted]),
                _places(firsts, biased),
                biases.view(np.int32),
            ]
        )
        for state_RV in (self._counts_RV, self._prompt_RV, self._bias_RV):
            if state_RV is not None:
                state_RV.index_fill_(0, rows_A.long(), 0)
        self._prompt_RV.view(-1).index_fill_(0, prompt.long(), 1)
        self._counts_RV.view(-1).index_copy_(0, generated.long(), counts)
        if self._bias_RV is not None:
            self._bias_RV.view(-1).index_copy_(0, biased_places.long(), bias_bits.view(torch.float32))

    def _grow(self, num_wanted: int) -> None:
        """Twice the rows, or as many as are wanted; those that there are keep their contents."""
        old = self.num_rows
        new = max(2 * old, max(old, 1) + num_wanted - len(self._free), 1 + _FIRST_ROWS)
        self._counts_RV = _grown(self._counts_RV, new)
        self._prompt_RV = _grown(self._prompt_RV, new)
        if self._bias_RV is not None:
            self._bias_RV = _grown(self._bias_RV, new)
        self._free += range(new - 1, max(old, 1) - 1, -1)


def _places(firsts: npt.NDArray[np.int64], ids: Sequence[npt.NDArray[np.int32 | np.int64]]) -> npt.NDArray[np.int64]:
    """Of token ids in the flattened state, whose rows begin at `firsts`."""
    return np.concatenate([first + each for first, each in zip(firsts, ids, strict=True)])


def _grown(state_RV: torch.Tensor, num_rows: int) -> torch.Tensor:
    grown_RV = torch.zeros((num_rows, state_RV.shape[1]), dtype=state_RV.dtype, device=state_RV.device)
    grown_RV[: len(state_RV)] = state_RV
    return grown_RV


# -------- withheld
# Tokens that may not come yet: those that would end an answer which is to have `min_tokens` first.
#
#     slot ── ids_SE ──> what it may not have      withheld_before_S ──> as long as fewer tokens than that are behind it
#
# How many are behind a token the device knows, so steps that are launched ahead need nothing from the host.
#
# Legend: B rows of the batch, V vocabulary, S slots, N sequences newly admitted, E ids.

_LEAST_IDS: Final = 4
"""Then twice as many, and so on."""


class Withheld:
    """The ids of every slot. It has no memory until somebody asks."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._ids_SE = torch.zeros((num_slots, 0), dtype=torch.int64, device=device)

    def assign(self, entries: Sequence[Entry], uploads: Uploads) -> None:
        """Those entries that ask for it have their ids from now on; what others had is nobody's. Waits for nothing."""
        asking = {entry.slot: sorted(entry.withheld) for entry in entries if entry.withheld_before}
        if not asking:
            return
        self._grow(max(map(len, asking.values())))
        num_ids = self._ids_SE.shape[1]
        # Filled up with an id that is among them: to withhold it twice is to withhold it.
        filled_NE = np.array([ids + ids[:1] * (num_ids - len(ids)) for ids in asking.values()], np.int32)
        slots_N, filled = uploads.pack([list(asking), filled_NE.reshape(-1)])
        self._ids_SE.index_copy_(0, slots_N.long(), filled.view(filled_NE.shape).long())

    def withhold(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, before_S: torch.Tensor
    ) -> None:
        """-inf, in place, for what the slots may not have behind positions_B tokens. A few launches; waits for nothing."""
        if not self._ids_SE.shape[1]:
            return
        slots_B = slots_B.long()
        ids_BE = self._ids_SE[slots_B]
        is_early_B1 = (positions_B < before_S[slots_B])[:, None]
        # Equal ids of a row are written the same.
        logits_BV.scatter_(1, ids_BE, logits_BV.gather(1, ids_BE).masked_fill(is_early_B1, -torch.inf))

    def _grow(self, num_ids: int) -> None:
        """Room for so many ids of a slot; those that there are stay, filled up with the first of them."""
        old = self._ids_SE.shape[1]
        if num_ids <= old:
            return
        grown_SE = torch.zeros((self._num_slots, max(num_ids, 2 * old, _LEAST_IDS)), dtype=torch.int64, device=self._device)
        if old:
            grown_SE.copy_(self._ids_SE[:, :1].expand_as(grown_SE))
            grown_SE[:, :old] = self._ids_SE
        self._ids_SE = grown_SE


# -------- sampler

__all__ = ["COLDEST", "NOT_A_NUMBER", "Asked", "Entry", "Sampler", "likeliest", "logprobs"]


class Sampler:
    """Chooses tokens for the sequences in the slots of a cache, each as it asked.

    num_slots: with slot 0, which is nobody's and pads batches; it is greedy. vocabulary_size: V of the logits.
    """

    def __init__(self, num_slots: int, vocabulary_size: int, device: torch.device) -> None:
        self._vocabulary_size = vocabulary_size
        self._uploads = Uploads(device)
        self._state = SamplingState(num_slots, vocabulary_size, device)
        self._adjustments = Adjustments(vocabulary_size, device)
        self._withheld = Withheld(num_slots, device)

    def check(self, asked: Asked) -> None:
        """Raises: ValueError for options that this model cannot serve, in words for whoever asked."""
        stranger = next((token for token in asked.logit_bias if not 0 <= token < self._vocabulary_size), None)
        if stranger is not None:
            wanted = f"ids of the model's vocabulary, 0 to {self._vocabulary_size - 1}"
            raise ValueError(f"logit_bias has token {stranger}; wanted {wanted}")

    def assign(self, entries: Sequence[Entry]) -> None:
        """From now on the tokens of these slots are chosen as their sequences asked.

        Cost: one copy to the device, in order behind what has been launched; another one if any asks for penalties or
        biases, or for `min_tokens`, and memory for their state. Waits for nothing. Not under graph capture.
        Raises: ValueError as `check`, before anything has changed.
        """
        for entry in entries:
            self.check(entry.asked)
        if not entries:
            return
        for entry in entries:
            self._adjustments.release(entry.slot)
        state_rows = self._adjustments.assign(entries, self._uploads)
        self._withheld.assign(entries, self._uploads)
        self._state.assign(entries, state_rows, self._uploads)

    def release(self, slot: int) -> None:
        """The sequence in this slot samples no more. The host's books only: steps that were launched before run as they are."""
        self._adjustments.release(slot)

    def is_greedy(self, slot: int) -> bool:
        """Does this slot take the likeliest token?"""
        return self._state.is_greedy(slot)

    def needs_adjusting(self, slot: int) -> bool:
        """Must logits for this slot go through `adjust`, and its tokens through `count`?"""
        return self._adjustments.has(slot)

    def sample(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, *, greedy: bool
    ) -> torch.Tensor:
        """[B] int32 token ids, or NOT_A_NUMBER for rows with a NaN; of slots_B, behind positions_B tokens (int32 or int64).

        `greedy`: all of the slots are greedy, as the host knows, and their parameters need not be looked at.

        Cost: two launches on a GPU. Waits for nothing there; safe while a graph is captured, and the graph serves whatever
        the slots' parameters are when it is replayed.
        """
        operations: ModuleType = reference
        if logits_BV.is_cuda:
            from vmmkv.kernels.sampling import sample as operations
        if greedy:
            tokens_B: torch.Tensor = operations.argmax(logits_BV)
            return tokens_B
        state = self._state
        tokens_B = operations.sample(
            logits_BV, slots_B, positions_B,
            temperature_S=state.temperature_S, top_k_S=state.top_k_S, top_p_S=state.top_p_S, min_p_S=state.min_p_S,
            seed_S=state.seed_S,
        )  # fmt: skip
        return tokens_B

    def adjust(self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Penalties and biases of the slots that have them, in place, then -inf for what may not come before `min_tokens`.

        Rows of other slots stay as they are; positions as in `sample`. Give it a float32 copy: a penalty of 0.1 is lost on a
        bfloat16 logit of 20. Cost: one launch on a GPU, a few more once somebody has asked for `min_tokens`; no waiting.
        """
        self._adjustments.adjust(logits_BV, slots_B, self._state)
        self._withheld.withhold(logits_BV, slots_B, positions_B, self._state.withheld_before_S)

    def count(self, slots_B: torch.Tensor, tokens_B: torch.Tensor) -> None:
        """These tokens have been sampled for these slots, for penalties to know. Tokens below 0 are none. Waits for nothing."""
        self._adjustments.count(slots_B, tokens_B, self._state)


def likeliest(logits_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, count] float32 log-probabilities, the highest first, and their int64 token ids; at most V of them."""
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1, dtype=torch.float32)
    best = logprobs_BV.topk(min(count, logits_BV.shape[-1]), dim=-1)
    return best.values, best.indices


def logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, rows_R: torch.Tensor | slice, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of these rows: [R] float32, the token's log-probability, and [R, top] those of the likeliest and their int64 ids.

    They are of the logits as they are. Where the token is below 0 the first is that of token 0, which means nothing, or is no
    number. At most V of the likeliest. Waits for nothing if rows_R is on the logits' device.
    """
    logprobs_RV = torch.log_softmax(logits_BV[rows_R], dim=-1, dtype=torch.float32)
    chosen_R = logprobs_RV.gather(1, tokens_B[rows_R].long().clamp(min=0)[:, None])[:, 0]
    best = logprobs_RV.topk(min(top, logits_BV.shape[-1]), dim=-1)
    return chosen_R, best.values, best.indices
