"""Launches steps: what a model computes for some sequences, what is sampled behind it, and how that comes back.

    decode   rows whose last token is on the device            graphs, nothing from the host   (decode_steps.py)
    mixed    the same rows, and chunks of prompts from the host   one upload a step             (mixed_steps.py)

Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.decode_steps import DecodeSteps
from vmmkv.server.engine.kv import KV
from vmmkv.server.engine.ledger import Slots
from vmmkv.server.engine.mixed_steps import Chunk, MixedSteps
from vmmkv.server.engine.model import Model
from vmmkv.server.engine.prompt_scores import States, scores
from vmmkv.server.engine.readback import Readback
from vmmkv.server.engine.sampler import NOT_A_NUMBER, Entry, Sampler, likeliest, logprobs
from vmmkv.server.engine.sharers import Group
from vmmkv.server.engine.step_state import StepState
from vmmkv.server.engine.uploads import TokenMasks, Uploads, apply_masks
from vmmkv.server.protocol import Generate

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
