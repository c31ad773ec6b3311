"""The engine that is measured: opened from a configuration alone, asked for greedy tokens, and timed from outside."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch

from bench.serve.models import ServedModel
from bench.serve.requests import TokenIds
from bench.serve.sizes import Sizes
from bench.settings import Settings
from bench.timing import WrongNumbers, now_us
from vmmkv.server import Engine, SamplingParams
from vmmkv.server.engine import engine as loop
from vmmkv.server.engine.loading import STEP_TOKENS
from vmmkv.server.llm import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """To one call, in the order of its prompts."""

    tokens: list[TokenIds]
    seconds: float
    """From the call until all were there."""
    first_s: list[float]
    """Until the first token of each was there."""
    cached_tokens: int
    """Of all prompts, what was not computed because the prefix cache had it."""
    likeliest: list[dict[int, float]]
    """For those that were asked for it, the likeliest first tokens, with their log-probabilities; in their order."""


class ServedEngine:
    """An `Engine` with the options of a run. Close it, or use it in a `with` block."""

    def __init__(self, model: ServedModel, settings: Settings, sizes: Sizes) -> None:
        self.step_tokens = settings.max_num_batched_tokens or STEP_TOKENS[settings.device.type]
        self._device = settings.device
        with ExitStack() as stack:
            self._engine = Engine(
                stack.enter_context(model.directory()),
                device=str(settings.device),
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                load_format="dummy",
                seed=settings.seed,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def core(self) -> loop.Engine:
        """The loop's body, to be timed from inside."""
        return self._engine._open().engine

    @property
    def implementation(self) -> str:
        """Whose code computes the model, and in which type."""
        return f"{self._engine.ready.implementation}, {self._engine.ready.dtype}"

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, K and V."""
        dtype: torch.dtype = getattr(torch, self._engine.ready.dtype)
        return dtype

    def forget(self) -> None:
        """Empty the prefix cache. Memory stays with the engine, as with one that has run for a while."""
        self.core.forget()

    def ask(self, prompts: Sequence[TokenIds], outs: Sequence[int], *, scored: Sequence[int] = (), top: int = 20) -> Answers:
        """Greedy tokens, as many as `outs` says for each prompt. Of prompts in `scored`, the `top` likeliest first tokens too.

        Raises: WrongNumbers if one has failed, or has not exactly its number of tokens.
        """
        params = [
            SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True, logprobs=top if index in scored else None)
            for index, out in enumerate(outs)
        ]
        if not scored:  # else it is not timed
            gc.collect()
        self._synchronize()
        began_us = now_us()
        completions = self._engine.generate(list(prompts), params, progress=False)
        seconds = (now_us() - began_us) / 1e6
        for index, (completion, out) in enumerate(zip(completions, outs, strict=True)):
            _check(index, completion, out)
        return Answers(
            tokens=[completion.outputs[0].token_ids for completion in completions],
            seconds=seconds,
            first_s=[completion.first_token_s or 0.0 for completion in completions],
            cached_tokens=sum(completion.cached_tokens for completion in completions),
            likeliest=[(completions[index].outputs[0].top_logprobs or [{}])[0] for index in scored],
        )

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        self._engine.close()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _check(index: int, completion: Completion, out: int) -> None:
    if completion.error is not None:
        raise WrongNumbers(f"request {index} failed: {completion.error}")
    answer = completion.outputs[0]
    if len(answer.token_ids) != out or answer.finish_reason != "length":
        raise WrongNumbers(f"request {index} has {len(answer.token_ids)} tokens of {out}, and ended by {answer.finish_reason}")
