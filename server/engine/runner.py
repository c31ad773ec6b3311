"""An unmodified transformers model that reads and writes its keys and values in the cache's slots."""

from collections.abc import Sequence
from typing import Any

import torch

from vmmkv import KVCache
from vmmkv.server.engine.attention import NAME, DecodeRows, Run, SlotAttention, Step, UnsupportedModel
from vmmkv.server.engine.requests import Request
from vmmkv.server.engine.sampler import Choice, Sampled, logprobs_of, sample


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
    def forward(self, work: Sequence[tuple[Request, int]]) -> Sampled:
        """Compute the next `count` tokens of each request, and sample the one after each. Does not wait for a GPU.

        The rows must be mapped. What is sampled for a request whose tokens are not all computed then means nothing.
        """
        runs: list[Run] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for request, count in work:
            start, slot = request.num_computed, request.memory.slot
            runs.append(Run(slot=slot, start=start, count=count, column=len(ids)))
            ids += request.tokens[start : start + count]
            positions += range(start, start + count)
            slots += [slot] * count
        packed = torch.tensor([ids, positions, slots], device=self._device)
        self._attention.begin(Step(runs=tuple(runs), slots_N=packed[2], positions_N=packed[1], decode=self._decode_rows(runs)))
        last_B = torch.tensor([run.column + run.count - 1 for run in runs], device=self._device)
        output = self._model(input_ids=packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=last_B)
        logits_BV = output.logits[0]
        tokens_B = sample(logits_BV, [_choice_of(request, run) for (request, _), run in zip(work, runs, strict=True)])
        rows = [row for row, (request, _) in enumerate(work) if request.ask.want_logprobs]
        return Sampled(tokens_B=tokens_B, rows=rows, logprobs_R=logprobs_of(logits_BV, tokens_B, rows) if rows else None)

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


def _choice_of(request: Request, run: Run) -> Choice:
    ask = request.ask
    return Choice(ask.temperature, ask.top_p, ask.seed, position=run.start + run.count)
