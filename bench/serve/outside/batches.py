"""`model.generate` over one batch after the other: what people do who have transformers and no server."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from transformers import GenerationConfig, StaticCache

from bench.serve.checks import LogProbs
from bench.serve.drive import Outcome
from bench.serve.outside.weights import no_grad, release, row_bytes
from bench.serve.system import LIKELIEST, Limits
from bench.serve.turns import Turns
from bench.workloads import TokenIds, Workload
from vmmkv.units import format_bytes

_WARM_TOKENS: Final = 6
"""Of answers that nobody wants: torch compiles one step, runs the next, records the one behind it, and then replays that."""


class Batches:
    """Whoever is there is served together, in order, as many as fit, until the longest answer is done. See System.

    Prompts are padded on the left. A DynamicCache takes batch x (longest prompt + longest answer) rows, and that must fit into
    the budget. A StaticCache takes batch x max_tokens, and all batches of a run have one size, so that nothing is compiled or
    allocated between them: rows that nobody has are computed too. All else is as transformers has it by default: attention by
    SDPA, prompts in one piece, and on a GPU, over a StaticCache, decode steps that torch compiles; that is not timed.
    """

    def __init__(self, kind: Literal["DynamicCache", "StaticCache"], model: Any, limits: Limits) -> None:
        self.name: Final = f"transformers {kind}"
        self._model, self._limits = model, limits
        self._row_bytes: Final = row_bytes(model)
        self._is_static: Final = kind == "StaticCache"

    def run(self, workload: Workload) -> Outcome:
        """See System.run. Raises: ValueError for a request that does not fit into the budget alone."""
        turns = Turns(workload.asks)
        with no_grad(), self._cache() as cache:
            # Of a conversation, one turn at a time can be there.
            most = min(self._limits.max_num_seqs, sum(ask.after is None for ask in workload.asks))
            num_rows = min(most, self._most_of(self._limits.max_tokens, None)) if self._is_static else None
            if num_rows != 0:
                self._answer([[0, 0]] + [[0]] * ((num_rows or most) - 1), _WARM_TOKENS, cache)
            return self._serve(turns, num_rows, cache)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System.likeliest."""
        config = GenerationConfig(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_scores=True)
        with no_grad(), self._cache() as cache:
            padded = self._padded([prompt.tolist() for prompt in prompts])
            scores_BV = self._model.generate(**padded, generation_config=config, past_key_values=cache).scores[0]
            values, ids = torch.log_softmax(scores_BV, dim=-1).topk(LIKELIEST)
        return [dict(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]

    def close(self) -> None:
        """See System.close. The weights are the engine's."""
        self._model = None

    def _serve(self, turns: Turns, num_rows: int | None, cache: StaticCache | None) -> Outcome:
        waiting: deque[int] = deque()
        running: list[int] = []
        began_s = time.perf_counter()
        while turns.num_unfinished:
            now_s = time.perf_counter() - began_s
            waiting.extend(turns.arrived(now_s))
            if not waiting:
                assert turns.next_s is not None, "whoever waits for another has lost it"
                time.sleep(max(0.0, turns.next_s - now_s))
                continue
            batch = self._next_batch(turns, waiting, num_rows)
            outs = [turns.asks[index].num_out for index in batch]
            nobody = [[0]] * (0 if num_rows is None else num_rows - len(batch))
            steps = self._answer([turns.prompts[index] for index in batch] + nobody, max(outs), cache)
            for row, index in enumerate(batch):
                own = steps[: outs[row]]
                turns.served[index].tokens = [tokens[row] for _, tokens in own]
                turns.served[index].token_s = [at_s - began_s for at_s, _ in own]
                turns.end(index)
            running += [sum(step < out for out in outs) for step in range(max(outs))]
        return Outcome(turns.served, turns.seconds, running)

    def _next_batch(self, turns: Turns, waiting: deque[int], num_rows: int | None) -> list[int]:
        """Taken from those who wait, in order, until one does not fit. Raises: ValueError if that is the first."""
        batch: list[int] = []
        longest_prompt = longest_out = 0
        while waiting:
            longest_prompt = max(longest_prompt, len(turns.prompts[waiting[0]]))
            longest_out = max(longest_out, turns.asks[waiting[0]].num_out)
            if len(batch) + 1 > self._most_of(longest_prompt + longest_out, num_rows):
                break
            batch.append(waiting.popleft())
        if not batch:
            raise ValueError(
                f"{self.name}: request {waiting[0]} of {longest_prompt + longest_out} tokens does not fit into max_tokens="
                f"{self._limits.max_tokens} and a budget of {format_bytes(self._limits.budget_bytes)}; raise what is too small"
            )
        return batch

    def _most_of(self, num_tokens: int, num_rows: int | None) -> int:
        """Sequences of so many tokens, padding among them, that fit; `num_rows` are there if that is fixed."""
        if num_rows is not None:
            return num_rows if num_tokens <= self._limits.max_tokens else 0
        return min(self._limits.max_num_seqs, self._limits.budget_bytes // (num_tokens * self._row_bytes))

    def _answer(self, prompts: list[list[int]], num_out: int, cache: StaticCache | None) -> list[tuple[float, list[int]]]:
        """Of each step, when its tokens were there, and the tokens, one a prompt."""
        steps = _Steps()
        config = GenerationConfig(max_new_tokens=num_out, do_sample=False)
        self._model.generate(**self._padded(prompts), generation_config=config, past_key_values=cache, streamer=steps)
        if cache is not None:
            cache.reset()
        return steps.taken

    def _padded(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}

    @contextmanager
    def _cache(self) -> Iterator[StaticCache | None]:
        """A StaticCache, empty and without memory until its first use; None where `generate` makes its own DynamicCache."""
        cache = StaticCache(self._model.config, max_cache_len=self._limits.max_tokens) if self._is_static else None
        try:
            yield cache
        finally:
            if cache is not None:
                cache.layers.clear()
            release(self._model.device)


class _Steps:
    """A streamer of transformers."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, list[int]]] = []
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        """The prompts first, then one token of each sequence at a time. They are on the host."""
        if self._has_prompts:
            self.taken.append((time.perf_counter(), value.tolist()))
        self._has_prompts = True

    def end(self) -> None:
        """Nothing is left."""
