"""The parameters that slots sample with, on the device, where a captured graph reads them.

Legend: S slots, N sequences newly admitted, P parameters of 32 bits.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.kernels.reference import COLDEST
from vmmkv.server.engine.uploads import Uploads


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
