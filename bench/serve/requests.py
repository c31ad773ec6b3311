"""What is asked of the engine: prompts of random token ids, and how many tokens each wants."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.serve import roofline
from bench.serve.models import ServedModel
from bench.serve.sizes import Sizes
from vmmkv.units import ceil_div

_IDS: Final = 10_001
"""Token ids of prompts are below it, whatever the model: those of the workload that vLLM's figures are of."""

_APART: Final = 16
"""Prompts of `steady` are up to so many tokens shorter than each other, as many as a page of Llama-3.1-8B has: their pages end
one after the other, as those of requests that came at any time do, and not all in one step."""

TokenIds = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are all there at once, greedy, with no end but their number of tokens."""

    name: str
    """The suite's part, and its state: `shared warm`."""
    text: str
    prompts: Sequence[TokenIds]
    outs: Sequence[int]
    bound_s: float
    own_tokens: int = field(default=16)
    """The last tokens of each prompt. With others before them, its answer must be another, or nothing would be checked."""

    @property
    def num_out(self) -> int:
        """Tokens of all answers."""
        return sum(self.outs)


def begins_alike(prompts: Sequence[TokenIds]) -> int:
    """Tokens at the beginnings of prompts that another one begins with too: the most that a prefix cache finds if it was empty.

    Of many random prompts some have a first token in common.
    """
    ordered = sorted(prompts)  # who has most in common adjoins
    commons = [_num_common(one, other) for one, other in itertools.pairwise(ordered)]
    return sum(map(max, [0, *commons], [*commons, 0]))


def _num_common(one: TokenIds, other: TokenIds) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Requests:
    """The workloads of one model; of the same seed the same."""

    def __init__(self, model: ServedModel, sizes: Sizes, seed: int) -> None:
        self._model, self._sizes, self._seed = model, sizes, seed
        self._ids = min(_IDS, model.vocabulary)

    def mixed(self) -> Workload:
        """Lengths in and out are drawn alike: a prompt's length, its tokens, its answer's length, and so on."""
        shortest, longest = self._sizes.mixed_lengths
        draws = random.Random(self._seed)
        prompts: list[TokenIds] = []
        outs: list[int] = []
        for _ in range(self._sizes.mixed):
            length = draws.randint(shortest, longest)
            prompts.append([draws.randint(0, self._ids - 1) for _ in range(length)])
            outs.append(draws.randint(shortest, longest))
        text = f"{len(prompts)} requests of {shortest}..{longest} tokens in, as many out"
        return self._workload("mixed", text, prompts, outs, own_tokens=shortest // 2)

    def single(self) -> Workload:
        """One request."""
        length, out = self._sizes.single
        return self._workload("single", f"{length} tokens in, {out} out", [self.tokens(length, 1)], [out])

    def first(self) -> Workload:
        """A long prompt, and one token."""
        length = self._sizes.first
        return self._workload("first", f"{length} tokens in, 1 out", [self.tokens(length, 2)], [1])

    def long(self) -> Workload:
        """Several long ones."""
        count, length, out = self._sizes.long
        prompts = [self.tokens(length, 3, index) for index in range(count)]
        return self._workload("long", f"{count} requests of {length} tokens in, {out} out", prompts, [out] * count)

    def shared(self, *, known: bool) -> Workload:
        """Prompts that begin alike. Of those whose beginning is known by then, the own tokens are others."""
        count, shared, own, out = self._sizes.shared
        prefix = self.tokens(shared, 4)
        prompts = [prefix + self.tokens(own, 5 + known, index) for index in range(count)]
        text = f"{count} requests of {shared} shared tokens and {own} own in, {out} out"
        name = "shared warm" if known else "shared cold"
        return self._workload(name, text, prompts, [out] * count, shared=shared, known=known, own_tokens=own)

    def steady(self, batch: int, context: int, window: int, step_tokens: int) -> tuple[list[TokenIds], int]:
        """Prompts and tokens out, so that all of them decode in the `window` steps in whose middle they have `context` rows.

        The first of many begins to decode while the last are computed, in steps of `step_tokens`: all have steps to spare.
        """
        spare = max(window // 2, ceil_div(batch * context, step_tokens))
        length = context - window // 2 - spare
        if length < _APART:
            raise ValueError(
                f"{batch} prompts of about {context} tokens take {spare} steps of {step_tokens} tokens: by then the first has "
                "left the context; raise --max-num-batched-tokens"
            )
        draws = random.Random(self._seed)
        lengths = [length - draws.randrange(_APART) for _ in range(batch)]
        prompts = [self.tokens(length, 7, batch, context, index) for index, length in enumerate(lengths)]
        return prompts, window + 2 * spare

    def tokens(self, count: int, *names: int) -> TokenIds:
        """Random ids; of the same names the same."""
        draws = random.Random(f"{self._seed}/{'/'.join(map(str, names))}")
        return draws.choices(range(self._ids), k=count)

    def _workload(
        self,
        name: str,
        text: str,
        prompts: list[TokenIds],
        outs: list[int],
        *,
        shared: int = 0,
        known: bool = False,
        own_tokens: int = 16,
    ) -> Workload:
        lengths = [len(prompt) for prompt in prompts]
        bound_s = roofline.requests_s(self._model, lengths, outs, shared=shared, known=known)
        return Workload(name=name, text=text, prompts=prompts, outs=outs, bound_s=bound_s, own_tokens=own_tokens)
