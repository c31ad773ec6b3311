"""An unmodified transformers model that reads and writes its keys and values in the cache's slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vmmkv import KVCache
from vmmkv.server.engine.attention import NAME, DecodeRows, Run, SlotAttention, Step, UnsupportedModel
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.requests import Strand
from vmmkv.server.engine.sampler import Choice, Sampled, likeliest, logprobs_of, sample


class CandidateRow(NamedTuple):
    """A row of a step that is asked for candidates, and how many."""

    row: int
    num_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed(Sampled):
    """What a step sampled, and the candidates of those rows that search; R of them, C for the one that wants most."""

    candidate_rows: Sequence[CandidateRow] = ()
    candidates_2RC: torch.Tensor | None = None
    """float64: log-probabilities, and their token ids, which a float64 holds exactly."""

    def candidates(self) -> dict[int, list[Candidate]]:
        """Those of each row, the likeliest first, read back from the device in one copy, which this waits for."""
        if self.candidates_2RC is None:
            return {}
        logprobs, ids = self.candidates_2RC.tolist()
        return {
            row: [Candidate(*each) for each in zip(logprobs[index][:count], map(int, ids[index][:count]), strict=True)]
            for index, (row, count) in enumerate(self.candidate_rows)
        }


class ModelRunner:
    """A causal language model, whose attention from now on is over the cache's slots."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model = model
        self._device = cache.device
        if not model._supports_attention_backend:
            raise UnsupportedModel(f"{type(model).__name__} has an attention of its own, which cannot use vmmkv's cache")
        self._attention = SlotAttention(cache)
        model.set_attn_implementation(NAME)

    @torch.inference_mode()
    def forward(self, work: Sequence[tuple[Strand, int]]) -> Computed:
        """Compute the next `count` tokens of each strand, and sample the one after each. Does not wait for a GPU.

        The rows must be mapped. What is sampled for a strand whose tokens are not all computed then means nothing, and it gets
        no candidates.
        """
        runs: list[Run] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for strand, count in work:
            start, slot = strand.num_computed, strand.memory.slot
            runs.append(Run(slot=slot, start=start, count=count, column=len(ids)))
            ids += strand.next_tokens(count)
            positions += range(start, start + count)
            slots += [slot] * count
        packed = torch.tensor([ids, positions, slots], device=self._device)
        self._attention.begin(Step(runs=tuple(runs), slots_N=packed[2], positions_N=packed[1], decode=self._decode_rows(runs)))
        last_B = torch.tensor([run.column + run.count - 1 for run in runs], device=self._device)
        output = self._model(input_ids=packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=last_B)
        logits_BV = output.logits[0]
        tokens_B = sample(logits_BV, [_choice_of(strand, run) for (strand, _), run in zip(work, runs, strict=True)])
        rows = [row for row, (strand, _) in enumerate(work) if strand.ask.want_logprobs]
        candidate_rows = [
            CandidateRow(row, strand.num_candidates)
            for row, (strand, count) in enumerate(work)
            if strand.num_candidates and count == strand.num_left
        ]
        return Computed(
            tokens_B=tokens_B,
            rows=rows,
            logprobs_R=logprobs_of(logits_BV, tokens_B, rows) if rows else None,
            candidate_rows=candidate_rows,
            candidates_2RC=_candidates(logits_BV, candidate_rows) if candidate_rows else None,
        )

    def check(self) -> None:
        """After a forward pass: is this a model that can be served at all? Raises UnsupportedModel."""
        self._attention.check()

    def _decode_rows(self, runs: Sequence[Run]) -> DecodeRows | None:
        single = [run for run in runs if run.count == 1]
        if self._device.type != "cuda" or not single:
            return None
        packed = torch.tensor([[run.slot for run in single], [run.start + 1 for run in single]], dtype=torch.int32)
        packed = packed.to(self._device)
        columns_B = torch.tensor([run.column for run in single], device=self._device)
        return DecodeRows(columns_B=columns_B, slots_B=packed[0], lengths_B=packed[1])


def _candidates(logits_BV: torch.Tensor, rows: Sequence[CandidateRow]) -> torch.Tensor:
    rows_R = torch.tensor([row for row, _ in rows], device=logits_BV.device)
    logprobs_RC, ids_RC = likeliest(logits_BV[rows_R], max(count for _, count in rows))
    return torch.stack((logprobs_RC.double(), ids_RC.double()))


def _choice_of(strand: Strand, run: Run) -> Choice:
    ask = strand.ask
    if ask.beam_width:
        return Choice(temperature=0.0, top_p=1.0, seed=0, position=0)  # for what is no number; a search draws nothing
    return Choice(ask.temperature, ask.top_p, ask.seed, position=run.start + run.count)
