"""From logits to token ids, on whatever device the logits are.

    logits ── penalties, bias, min_tokens ──> temperature ──> top-k ──> top-p ──> min-p ──> token
              `adjust`, for those who ask     `sample`: all parameters are on the device

A row's random numbers depend on its request's seed and the token's position alone, never on who runs beside it; and the same
logits give the same token on every device, bit for bit (see `kernels/noise.py`). The logits themselves can differ in their
last bits with the size of the batch, and so, rarely, can the token.

Log-probabilities are the model's own: of the logits as they are, before all of this.

Legend: B rows, R rows that are asked about, V vocabulary, S slots.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from vmmkv.kernels import reference
from vmmkv.kernels.reference import COLDEST, NOT_A_NUMBER
from vmmkv.server.engine.adjust import Adjustments
from vmmkv.server.engine.sampling_state import Asked, Entry, SamplingState
from vmmkv.server.engine.uploads import Uploads
from vmmkv.server.engine.withheld import Withheld

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
