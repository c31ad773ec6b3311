"""Sampling: from logits to token ids, on whatever device the logits are.

    logits ── penalties, bias, min_tokens ──> temperature ──> top-k ──> top-p ──> min-p ──> token
              `adjust`, for slots that need it    `sample`: all parameters are on the device

A row's random numbers depend on its request's seed and the token's position alone, never on the rest of the batch. The same
logits give the same token on every device, bit for bit (see `sampling/noise.py`). The logits themselves can differ in
their last bits with the size of the batch, and so, rarely, can the token.

Log-probabilities are the model's own: of the logits as they are, before all of this.

Legend: B rows of the batch, R rows that are asked about, V vocabulary, S slots, N requests newly admitted.
"""

from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vmmkv_kernels import reference
from vmmkv_kernels.reference import COLDEST, NOT_A_NUMBER
from vmmkv_server.engine.uploads import Uploads
from vmmkv_server.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vmmkv_server.engine.request import Request

__all__ = ["NOT_A_NUMBER", "Sampler", "logprobs"]

_FLOATS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NUM_PLANES: Final = len(_FLOATS) + 3

_ALWAYS: Final = np.iinfo(np.int64).max

_MIN_STATES: Final = 4
"""Rows of penalties that are allocated first; later twice as many."""

_MIN_IDS: Final = 4
"""Suppressed ids of a slot that there is room for first; later twice as many."""


class Sampler:
    """Samples the next tokens of the requests in the slots of a cache, each by its own parameters.

    num_slots: with slot 0, the null slot, which pads batches; it is greedy. vocabulary_size: V of the logits.
    """

    def __init__(self, num_slots: int, vocabulary_size: int, uploads: Uploads) -> None:
        device = uploads.device
        self._vocabulary_size = vocabulary_size
        self._uploads = uploads
        # Planes of one tensor, so that one launch writes all parameters of a slot.
        self._planes_PS = torch.zeros((_NUM_PLANES, num_slots), dtype=torch.int32, device=device)
        floats = [plane_S.view(torch.float32) for plane_S in self._planes_PS[: len(_FLOATS)]]
        self._temperature_S, self._top_p_S, self._min_p_S, self._presence_S, self._frequency_S, self._repetition_S = floats
        self._top_k_S, self._penalty_row_S, self._min_length_S = self._planes_PS[len(_FLOATS) :]
        self._seed_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._top_p_S.fill_(1.0)
        self._repetition_S.fill_(1.0)
        self.penalties: Final = Penalties(vocabulary_size, uploads)
        self._min_tokens = MinTokens(num_slots, uploads)
        # By slot, on the host.
        self.is_greedy: Final = np.ones(num_slots, np.bool_)
        """Does the slot take the likeliest token?"""
        self.adjusted_until: Final = np.zeros(num_slots, np.int64)
        """Tokens of a sequence up to which its logits go through `adjust`, and its tokens through `count`."""
        self.num_logprobs: Final = np.full(num_slots, -1)
        """Likeliest tokens that come with each of its tokens; -1 if no log-probabilities are wanted."""

    @torch.inference_mode()
    def assign(self, requests: Sequence["Request"]) -> None:
        """Sample by these requests' parameters in their slots from now on.

        Cost: one copy to the device, in order behind what has been launched; another one for penalties or biases, and for
        `min_tokens`, and memory for their state. Waits for nothing. Not under graph capture.
        """
        for request in requests:
            self.penalties.release(request.memory.slot)
        every = [request.ask.params for request in requests]
        slots = np.array([request.memory.slot for request in requests], np.int32)
        planes_PN = np.empty((_NUM_PLANES, len(requests)), np.int32)
        for i, name in enumerate(_FLOATS):
            planes_PN[i] = np.array([getattr(params, name) for params in every], np.float32).view(np.int32)
        planes_PN[-3] = [min(params.top_k, self._vocabulary_size) for params in every]
        planes_PN[-2] = self.penalties.assign(requests)
        planes_PN[-1] = min_lengths = [request.min_length for request in requests]
        self._min_tokens.assign(requests)
        seeds = np.array([request.seed for request in requests], np.uint64)
        slots_N, planes, seed_words = self._uploads.pack([slots, planes_PN.reshape(-1), seeds.view(np.int32)])
        slots_N = slots_N.long()
        self._planes_PS.index_copy_(1, slots_N, planes.view(_NUM_PLANES, len(requests)))
        self._seed_S.index_copy_(0, slots_N, seed_words.view(torch.int64))
        self.is_greedy[slots] = planes_PN[0].view(np.float32) < np.float32(COLDEST)
        self.adjusted_until[slots] = np.where(planes_PN[-2] > 0, _ALWAYS, min_lengths)
        self.num_logprobs[slots] = [-1 if params.logprobs is None else params.logprobs for params in every]

    def counts(self, slot: int) -> bool:
        """Are the tokens that are sampled for this slot counted? Then it is assigned again where some are dropped."""
        return bool(self.adjusted_until[slot] == _ALWAYS)

    def release(self, slot: int) -> None:
        """The request in this slot samples no more. Changes host state only: launched steps run as they are."""
        self.penalties.release(slot)
        self.is_greedy[slot], self.adjusted_until[slot], self.num_logprobs[slot] = True, 0, -1

    def sample(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, *, greedy: bool
    ) -> torch.Tensor:
        """[B] int32 token ids, or NOT_A_NUMBER for rows with a NaN; of slots_B, behind positions_B tokens (int32 or int64).

        `greedy`: all of the slots are greedy, as the host knows, and their parameters need not be read.

        Cost: two launches on a GPU. Waits for nothing. It may be captured: the graph uses the slots' parameters as they are
        when it is replayed.
        """
        operations: ModuleType = reference
        if logits_BV.is_cuda:
            from vmmkv_kernels.sampling import sample as operations
        tokens_B: torch.Tensor = operations.argmax(logits_BV) if greedy else operations.sample(
            logits_BV, slots_B, positions_B,
            temperature_S=self._temperature_S, top_k_S=self._top_k_S, top_p_S=self._top_p_S, min_p_S=self._min_p_S,
            seed_S=self._seed_S,
        )  # fmt: skip
        return tokens_B

    def adjust(self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Apply penalties and biases in place, then set suppressed tokens to -inf where `min_tokens` are not there yet.

        Rows of other slots stay as they are; positions as in `sample`. Give it a float32 copy: a penalty of 0.1 is lost on a
        bfloat16 logit of 20. Cost: one launch on a GPU, a few more once a request had `min_tokens`. Waits for nothing.
        """
        self.penalties.apply(
            logits_BV, slots_B, state_row_S=self._penalty_row_S,
            repetition_S=self._repetition_S, frequency_S=self._frequency_S, presence_S=self._presence_S,
        )  # fmt: skip
        self._min_tokens.suppress(logits_BV, slots_B, positions_B, self._min_length_S)

    def count(self, slots_B: torch.Tensor, tokens_B: torch.Tensor) -> None:
        """Penalties count these sampled tokens; tokens below 0 are none. Waits for nothing."""
        self.penalties.count(slots_B, tokens_B, self._penalty_row_S)


class Penalties:
    """State of penalties and biases, for the slots whose requests have them: rows that are allocated on demand.

        slot ── penalty_row_S ──> row of counts_RV (generated tokens), prompt_RV (tokens of the prompt), bias_RV

    Row 0 is for slots without penalties, so that a kernel finds a row for every slot. Legend: R rows of state.
    """

    def __init__(self, vocabulary_size: int, uploads: Uploads) -> None:
        self._vocabulary_size, self._uploads = vocabulary_size, uploads
        self._row_of_slot: dict[int, int] = {}
        self._free: list[int] = []
        self._counts_RV = torch.empty((0, vocabulary_size), dtype=torch.int32, device=uploads.device)
        self._prompt_RV = torch.empty((0, vocabulary_size), dtype=torch.uint8, device=uploads.device)
        self._bias_RV: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of state that there is memory for, used or not."""
        return len(self._counts_RV)

    def release(self, slot: int) -> None:
        """Free the row of a slot. Launched steps may still read it: the next owner writes it behind them."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def assign(self, requests: Sequence["Request"]) -> list[int]:
        """Fill a row for each request that needs one, and return the rows; 0 for the others. Waits for nothing."""
        penalised = [request for request in requests if _has_penalties(request.ask.params)]
        if penalised:
            if len(self._free) < len(penalised):
                self._grow(len(penalised))
            if self._bias_RV is None and any(request.ask.params.logit_bias for request in penalised):
                self._bias_RV = torch.zeros(self._counts_RV.shape, dtype=torch.float32, device=self._uploads.device)
            for request in penalised:
                self._row_of_slot[request.memory.slot] = self._free.pop()
            self._fill(penalised)
        return [self._row_of_slot.get(request.memory.slot, 0) for request in requests]

    def apply(self, logits_BV: torch.Tensor, slots_B: torch.Tensor, **parameters: torch.Tensor) -> None:
        """Change the logits of the slots that have a row, in place."""
        if not self.num_rows:
            return
        apply_penalties = reference.apply_penalties
        if logits_BV.is_cuda:
            from vmmkv_kernels.sampling.logits import apply_penalties
        apply_penalties(
            logits_BV, slots_B, counts_RV=self._counts_RV, prompt_RV=self._prompt_RV, bias_RV=self._bias_RV, **parameters
        )

    def count(self, slots_B: torch.Tensor, tokens_B: torch.Tensor, penalty_row_S: torch.Tensor) -> None:
        """Count tokens as generated; those below 0 are none."""
        if not self.num_rows:
            return
        rows_B = torch.where(tokens_B >= 0, penalty_row_S[slots_B.long()], 0).long()
        # Tokens of slots without a row are counted in row 0, which is never read.
        places_B = rows_B * self._vocabulary_size + tokens_B.long().clamp(min=0)
        self._counts_RV.view(-1).scatter_add_(0, places_B, torch.ones_like(places_B, dtype=torch.int32))

    def _fill(self, requests: Sequence["Request"]) -> None:
        """Overwrite the rows of these requests. One copy to the device."""
        rows = np.array([self._row_of_slot[request.memory.slot] for request in requests], np.int64)
        firsts = rows * self._vocabulary_size
        prompts = [np.unique(request.prompt) for request in requests]
        counted = [np.unique(request.tokens[len(request.prompt) :], return_counts=True) for request in requests]
        biased = [np.fromiter(request.ask.params.logit_bias, np.int64) for request in requests]
        biases = np.fromiter(chain.from_iterable(request.ask.params.logit_bias.values() for request in requests), np.float32)
        rows_A, prompt, generated, counts, biased_places, bias_bits = self._uploads.pack(
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
        """Double the rows, or have as many as are wanted; contents stay. If there is no memory nothing changes."""
        old = self.num_rows
        new = max(2 * old, max(old, 1) + num_wanted - len(self._free), 1 + _MIN_STATES)
        more = (0, 0, 0, new - old)
        bias_RV = None if self._bias_RV is None else F.pad(self._bias_RV, more)
        self._counts_RV, self._prompt_RV, self._bias_RV = F.pad(self._counts_RV, more), F.pad(self._prompt_RV, more), bias_RV
        self._free += range(new - 1, max(old, 1) - 1, -1)


class MinTokens:
    """`min_tokens`: masks the tokens that would end an answer until the answer is long enough.

        slot ── ids_SE ──> suppressed ids      min_length_S ──> as long as fewer tokens than that are behind it

    The device knows how many tokens there are, so steps in flight need nothing from the host. Memory is allocated on demand.

    Legend: E ids. A slot with fewer ids repeats one of them: to suppress it twice is to suppress it.
    """

    def __init__(self, num_slots: int, uploads: Uploads) -> None:
        self._uploads = uploads
        self._ids_SE = torch.zeros((num_slots, 0), dtype=torch.int64, device=uploads.device)

    def assign(self, requests: Sequence["Request"]) -> None:
        """Upload the suppressed ids of the requests that have `min_tokens`. Waits for nothing."""
        ids_of = {request.memory.slot: sorted(request.suppressed_ids) for request in requests if request.min_length}
        if not ids_of:
            return
        num_slots, old = self._ids_SE.shape
        if (wanted := max(map(len, ids_of.values()))) > old:
            more = max(wanted, 2 * old, _MIN_IDS) - old
            fill_S1 = self._ids_SE[:, :1] if old else self._ids_SE.new_zeros((num_slots, 1))
            self._ids_SE = torch.cat([self._ids_SE, fill_S1.expand(-1, more)], dim=1)
        num_ids = self._ids_SE.shape[1]
        filled_NE = np.array([ids + ids[:1] * (num_ids - len(ids)) for ids in ids_of.values()], np.int32)
        slots_N, filled = self._uploads.pack([list(ids_of), filled_NE.reshape(-1)])
        self._ids_SE.index_copy_(0, slots_N.long(), filled.view(filled_NE.shape).long())

    def suppress(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, min_length_S: torch.Tensor
    ) -> None:
        """Set the suppressed tokens of slots with fewer than `min_length_S` tokens to -inf, in place. Waits for nothing."""
        if not self._ids_SE.shape[1]:
            return
        slots_B = slots_B.long()
        ids_BE = self._ids_SE[slots_B]
        is_early_B1 = (positions_B < min_length_S[slots_B])[:, None]
        # Equal ids of a row are written the same.
        logits_BV.scatter_(1, ids_BE, logits_BV.gather(1, ids_BE).masked_fill(is_early_B1, -torch.inf))


def logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, rows_R: torch.Tensor | slice, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of rows: [R] float32 of the token, and [R, top] of the likeliest, with their int64 ids.

    They are of the logits as they are. Where the token is below 0 the first is that of token 0, and means nothing. There are at
    most V of the likeliest. Waits for nothing if rows_R is on the logits' device.
    """
    logprobs_RV = torch.log_softmax(logits_BV[rows_R], dim=-1, dtype=torch.float32)
    chosen_R = logprobs_RV.gather(1, tokens_B[rows_R].long().clamp(min=0)[:, None])[:, 0]
    best = logprobs_RV.topk(min(top, logits_BV.shape[-1]), dim=-1)
    return chosen_R, best.values, best.indices


def _has_penalties(params: SamplingParams) -> bool:
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0) or bool(params.logit_bias)


def _places(firsts: npt.NDArray[np.int64], ids: Sequence[npt.NDArray[np.int32 | np.int64]]) -> npt.NDArray[np.int64]:
    """Indices of token ids in the flattened state, whose rows begin at `firsts`."""
    return np.concatenate([first + each for first, each in zip(firsts, ids, strict=True)])
