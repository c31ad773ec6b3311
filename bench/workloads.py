"""Workloads: requests by their tokens and moments of arrival, for every suite that serves some. No model, no memory.

    draw lengths ──> again if prompt + answer pass max_tokens ──> token ids at random ──> (arriving) moments of arrival

All of it follows from the seed. In a closed loop all requests arrive at once; `arriving` spreads them out. Published lengths:

    dataset                median and 90th percentile of prompts     of answers
    openchat_sharegpt4     1730, 5696                                415, 834
    arxiv_summarization    7059, 12985                               208, 371

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, table 2. They left out
requests of more than 8192 tokens of the first and 16384 of the second. Two quantiles determine a log-normal. Prompt and answer
of more than `max_tokens` together are drawn again, so a small `max_tokens` gives shorter requests than the published ones.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]
Range = tuple[int, int]
"""The least and the most, both of them possible."""

_MOST_ROUNDS: Final = 1000
"""Of drawing again; a workload of which less than a hundredth fits is not the one that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    arrival_s: float = 0.0
    """0.0 in a closed loop, and for a request that waits for another (`after`)."""
    prompt: TokenIds
    num_out: int
    after: int | None = None
    """The index of the request that must have ended first: a conversation's turn before. It is a smaller one."""
    think_s: float = 0.0
    """Between that one's end and this one's arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order in which they are sent, if nothing else says when."""

    name: str = ""
    text: str = ""
    """Sizes in words, as rows have them."""
    asks: tuple[Ask, ...]


def at_once(prompts: Iterable[TokenIds], num_out: int, **names: str) -> Workload:
    """Requests for so many tokens each."""
    return Workload(asks=tuple(Ask(prompt=prompt, num_out=num_out) for prompt in prompts), **names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lengths by their median and 90th percentile."""

    median: float
    p90: float

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm."""
        return math.log(self.p90 / self.median) / NormalDist().inv_cdf(0.9)

    def draw(self, rng: np.random.Generator, count: int, scale: float) -> Lengths:
        """At least one token each, `scale` times as long."""
        drawn = rng.lognormal(math.log(self.median * scale), self.sigma, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


CHAT_PROMPT: Final = LogNormal(median=1730, p90=5696)
CHAT_OUT: Final = LogNormal(median=415, p90=834)
DOCUMENT_PROMPT: Final = LogNormal(median=7059, p90=12985)
DOCUMENT_OUT: Final = LogNormal(median=208, p90=371)


class Sizes(TypedDict):
    """Of every workload: `count` requests, or conversations, each of which has `max_tokens` tokens at most."""

    seed: int
    vocabulary: int
    count: int
    max_tokens: int


def uniform(prompt: Range = (100, 1024), out: Range = (100, 1024), **sizes: Unpack[Sizes]) -> Workload:
    """Prompts and answers of any length in a range, each as likely."""
    draws = _Draws(**sizes)
    lengths = draws.pairs(lambda n: (draws.between(n, prompt), draws.between(n, out)))
    return draws.unrelated("uniform", f"{_words(prompt)} in, {_words(out)} out", *lengths)


def chat(scale: float = 1.0, **sizes: Unpack[Sizes]) -> Workload:
    """Lengths of openchat_sharegpt4: conversations with GPT-4, each turn with what came before as its prompt.

    `scale` times as long, for a model that is too small for them: the spread stays.
    """
    return _Draws(**sizes).published("chat", "openchat_sharegpt4", CHAT_PROMPT, CHAT_OUT, scale)


def long_documents(scale: float = 1.0, **sizes: Unpack[Sizes]) -> Workload:
    """Long prompts, short answers: lengths of arxiv_summarization. `scale`: as `chat`."""
    return _Draws(**sizes).published("long documents", "arxiv_summarization", DOCUMENT_PROMPT, DOCUMENT_OUT, scale)


def shared_prefix(
    prefix_tokens: int = 1024, own: Range = (32, 128), out: Range = (32, 128), **sizes: Unpack[Sizes]
) -> Workload:
    """All prompts begin with the same `prefix_tokens` tokens, a system prompt, and go on with their own."""
    draws = _Draws(sizes["seed"], sizes["vocabulary"], sizes["count"], sizes["max_tokens"] - prefix_tokens)
    prefix = draws.ids(prefix_tokens)
    lengths = draws.pairs(lambda n: (draws.between(n, own), draws.between(n, out)))
    text = f"{prefix_tokens} shared + {_words(own)} in, {_words(out)} out"
    return draws.unrelated("shared prefix", text, *lengths, prefix=prefix)


def multi_turn(
    turns: int = 4, new: Range = (50, 200), out: Range = (50, 200), think_s: float = 1.0, **sizes: Unpack[Sizes]
) -> Workload:
    """`count` conversations of so many turns each: a turn's prompt is the whole conversation before it and `new` tokens.

    In place of the model's answers stand random tokens of the right number: the serving loop puts the real ones there. All
    first turns come first, then all second ones. Each turn but the first comes `think_s` after the one before, on average,
    exponentially distributed.
    """
    draws, count = _Draws(**sizes), sizes["count"]
    news, outs = draws.pairs(  # [count, turns]
        lambda n: (draws.between(n * turns, new).reshape(n, turns), draws.between(n * turns, out).reshape(n, turns))
    )
    so_far = [np.empty(0, np.int32)] * count
    asks: list[Ask] = []
    for turn in range(turns):
        for conversation in range(count):
            num_out = int(outs[conversation, turn])
            prompt = np.concatenate((so_far[conversation], draws.ids(int(news[conversation, turn]))))
            after, pause_s = (len(asks) - count, float(draws.rng.exponential(think_s))) if turn else (None, 0.0)
            asks.append(Ask(prompt=prompt, num_out=num_out, after=after, think_s=pause_s))
            so_far[conversation] = np.concatenate((prompt, draws.ids(num_out)))
    text = f"{count} conversations of {turns} turns, {_words(new)} new tokens and {_words(out)} out each"
    return Workload(name="multi turn", text=text, asks=tuple(asks))


def skewed(short: Range = (32, 256), long: Range = (2048, 3072), out: Range = (32, 512), **sizes: Unpack[Sizes]) -> Workload:
    """A few very long prompts (a sixteenth of all, one at least) anywhere among many short ones."""
    draws, count = _Draws(**sizes), sizes["count"]
    num_long = max(1, round(count / 16))
    ins, outs = np.empty(count, np.int64), np.empty(count, np.int64)
    are_long = np.zeros(count, np.bool_)
    are_long[draws.rng.choice(count, num_long, replace=False)] = True
    for which, lengths in ((are_long, long), (~are_long, short)):

        def pairs(n: int, lengths: Range = lengths) -> tuple[Lengths, Lengths]:
            return draws.between(n, lengths), draws.between(n, out)

        ins[which], outs[which] = draws.pairs(pairs, int(np.count_nonzero(which)))
    text = f"{num_long} of {_words(long)} in among {count - num_long} of {_words(short)}, {_words(out)} out"
    return draws.unrelated("skewed", text, ins, outs)


def ragged(prompt: Range = (100, 1024), mean_out: float = 256.0, **sizes: Unpack[Sizes]) -> Workload:
    """Answers that end at very different times: each token is as likely as any to be the last (a geometric distribution)."""
    draws = _Draws(**sizes)
    lengths = draws.pairs(lambda n: (draws.between(n, prompt), draws.rng.geometric(1 / mean_out, n)))
    text = f"{_words(prompt)} in, {mean_out:g} out on average, geometric, at most {sizes['max_tokens']} tokens"
    return draws.unrelated("ragged", text, *lengths)


def arriving(workload: Workload, rate_per_s: float, *, seed: int) -> Workload:
    """The same requests, spread out as a Poisson process.

    A request that waits for another (`after`) has no moment of its own, and keeps 0.0.
    """
    num_free = sum(ask.after is None for ask in workload.asks)
    moments = iter(np.cumsum(np.random.default_rng(seed).gamma(1.0, 1 / rate_per_s, num_free)).tolist())
    asks = tuple(replace(ask, arrival_s=next(moments)) if ask.after is None else ask for ask in workload.asks)
    return replace(workload, text=f"{workload.text}; {rate_per_s:g} a second (Poisson)", asks=asks)


class _Draws:
    """Draws of one workload."""

    def __init__(self, seed: int, vocabulary: int, count: int, max_tokens: int) -> None:
        self.rng: Final = np.random.default_rng(seed)
        self._vocabulary, self._count, self._max_tokens = vocabulary, count, max_tokens

    def between(self, count: int, lengths: Range) -> Lengths:
        return self.rng.integers(lengths[0], lengths[1] + 1, count, dtype=np.int64)

    def ids(self, count: int) -> TokenIds:
        return self.rng.integers(0, self._vocabulary, count, dtype=np.int32)

    def pairs(self, draw: Callable[[int], tuple[Lengths, Lengths]], count: int | None = None) -> tuple[Lengths, Lengths]:
        """`count` pairs that `draw` gives, none with more than `max_tokens` together; [count] or [count, turns] each.

        Raises: ValueError if hardly any fits.
        """
        count = self._count if count is None else count
        first, second = draw(count)
        for _ in range(_MOST_ROUNDS):
            too_long = np.flatnonzero((first + second).sum(axis=tuple(range(1, first.ndim))) > self._max_tokens)
            if not len(too_long):
                return first, second
            first[too_long], second[too_long] = draw(len(too_long))
        raise ValueError(
            f"{len(too_long)} of {count} requests have more than max_tokens={self._max_tokens} tokens however often they are "
            f"drawn; raise it, or make prompts and answers shorter"
        )

    def unrelated(self, name: str, text: str, ins: Lengths, outs: Lengths, prefix: TokenIds | None = None) -> Workload:
        """Prompts that have nothing in common but `prefix`."""
        shared = np.empty(0, np.int32) if prefix is None else prefix
        lengths = zip(ins.tolist(), outs.tolist(), strict=True)
        asks = tuple(Ask(prompt=np.concatenate((shared, self.ids(num_in))), num_out=num_out) for num_in, num_out in lengths)
        return Workload(name=name, text=f"{len(asks)} requests, {text}", asks=asks)

    def published(self, name: str, dataset: str, prompt: LogNormal, out: LogNormal, scale: float) -> Workload:
        lengths = self.pairs(lambda n: (prompt.draw(self.rng, n, scale), out.draw(self.rng, n, scale)))
        times = "" if scale == 1 else f" times {scale:g}"
        return self.unrelated(name, f"lengths of {dataset}{times}, at most {self._max_tokens} tokens", *lengths)


def _words(lengths: Range) -> str:
    return f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"
