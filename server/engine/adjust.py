"""What penalties and biases have to know, for the sequences that asked for them: rows of state, made as they are needed.

    slot ── state_row_S ──> row of counts_RV (tokens generated), prompt_RV (tokens of the prompt), bias_RV

Row 0 is nobody's: slots that ask for nothing have it, so that a launch finds a row for every slot.

Legend: B rows of the batch, V vocabulary, S slots, R rows of state.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.kernels import reference
from vmmkv.server.engine.sampling_state import Asked, Entry, SamplingState
from vmmkv.server.engine.uploads import Uploads

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
