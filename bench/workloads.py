"""Workloads: requests by their tokens and moments of arrival, for every suite that serves some. No model, no memory.

    draw lengths ──> again if prompt + answer pass max_tokens ──> token ids at random ──> (arriving) moments of arrival

All of it follows from the seed. In a closed loop all requests arrive at once; `arriving` spreads them out. Published lengths:

    dataset                median and 90th percentile of prompts     of answers
    openchat_sharegpt4     1730, 5696                                415, 834
    arxiv_summarization    7059, 12985                               208, 371

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, table 2. They left out
requests of more than 8192 tokens of the first and 16384 of the second. Two quantiles determine a log-normal. It is cut where
`max_tokens` says, prompt and answer together, by drawing both again; so what is drawn is shorter than what was published, the
more the smaller `max_tokens` is: only without it are the quantiles those of the table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

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

    name: str
    text: str
    """Sizes in words, as rows have them."""
    asks: tuple[Ask, ...]


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


def uniform(
    *, seed: int, vocabulary: int, count: int, max_tokens: int, prompt: Range = (100, 1024), out: Range = (100, 1024)
) -> Workload:
    """Prompts and answers of any length in a range, each as likely. Raises: ValueError for sizes that cannot be."""
    rng = _checked(seed, vocabulary, count, prompt, out)
    ins, outs = _drawn(rng, count, max_tokens, lambda rng, n: (_between(rng, n, prompt), _between(rng, n, out)))
    return _alone("uniform", f"{_words(prompt)} in, {_words(out)} out", rng, vocabulary, ins, outs)


def chat(*, seed: int, vocabulary: int, count: int, max_tokens: int, scale: float = 1.0) -> Workload:
    """Lengths of openchat_sharegpt4: conversations with GPT-4, each turn with what came before as its prompt.

    `scale` times as long: for a model that is too small for them, which then has lengths that are spread alike.
    Raises: ValueError for sizes that cannot be, or of which hardly anything fits into `max_tokens`.
    """
    rng = _checked(seed, vocabulary, count)
    return _published("chat", "openchat_sharegpt4", CHAT_PROMPT, CHAT_OUT, rng, vocabulary, count, max_tokens, scale)


def long_documents(*, seed: int, vocabulary: int, count: int, max_tokens: int, scale: float = 1.0) -> Workload:
    """Long prompts, short answers: lengths of arxiv_summarization. `scale` and errors: as `chat`."""
    rng, lengths = _checked(seed, vocabulary, count), (DOCUMENT_PROMPT, DOCUMENT_OUT)
    return _published("long documents", "arxiv_summarization", *lengths, rng, vocabulary, count, max_tokens, scale)


def shared_prefix(
    *,
    seed: int,
    vocabulary: int,
    count: int,
    max_tokens: int,
    prefix_tokens: int = 1024,
    own: Range = (32, 128),
    out: Range = (32, 128),
) -> Workload:
    """All prompts begin with the same `prefix_tokens` tokens, a system prompt, and go on with their own."""
    rng = _checked(seed, vocabulary, count, (prefix_tokens, prefix_tokens), own, out)
    prefix = _ids(rng, vocabulary, prefix_tokens)
    owns, outs = _drawn(rng, count, max_tokens - prefix_tokens, lambda rng, n: (_between(rng, n, own), _between(rng, n, out)))
    asks = [
        Ask(prompt=np.concatenate((prefix, _ids(rng, vocabulary, num_own))), num_out=num_out)
        for num_own, num_out in _pairs(owns, outs)
    ]
    text = f"{count} requests, {prefix_tokens} shared + {_words(own)} in, {_words(out)} out"
    return Workload(name="shared prefix", text=text, asks=tuple(asks))


def multi_turn(
    *,
    seed: int,
    vocabulary: int,
    count: int,
    max_tokens: int,
    turns: int = 4,
    new: Range = (50, 200),
    out: Range = (50, 200),
    think_s: float = 1.0,
) -> Workload:
    """`count` conversations of so many turns each: a turn's prompt is the whole conversation before it and `new` tokens.

    In place of the model's answers stand random tokens of the right number: the serving loop puts the real ones there. All
    first turns come first, then all second ones. Each turn but the first comes `think_s` after the one before, on average,
    exponentially distributed.
    """
    rng = _checked(seed, vocabulary, count, (turns, turns), new, out)
    if think_s < 0:
        raise ValueError(f"think_s={think_s}: at least 0")

    def conversations(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths]:
        """New tokens of all turns [n, turns], and answers."""
        return _between(rng, n * turns, new).reshape(n, turns), _between(rng, n * turns, out).reshape(n, turns)

    news, outs = _drawn(rng, count, max_tokens, conversations)
    so_far = [np.empty(0, np.int32)] * count
    asks: list[Ask] = []
    for turn in range(turns):
        for conversation in range(count):
            num_out = int(outs[conversation, turn])
            prompt = np.concatenate((so_far[conversation], _ids(rng, vocabulary, int(news[conversation, turn]))))
            asks.append(
                Ask(
                    prompt=prompt,
                    num_out=num_out,
                    after=len(asks) - count if turn else None,
                    think_s=float(rng.exponential(think_s)) if turn else 0.0,
                )
            )
            so_far[conversation] = np.concatenate((prompt, _ids(rng, vocabulary, num_out)))
    text = f"{count} conversations of {turns} turns, {_words(new)} new tokens and {_words(out)} out each"
    return Workload(name="multi turn", text=text, asks=tuple(asks))


def skewed(
    *,
    seed: int,
    vocabulary: int,
    count: int,
    max_tokens: int,
    short: Range = (32, 256),
    long: Range = (2048, 3072),
    out: Range = (32, 512),
    long_share: float = 1 / 16,
) -> Workload:
    """A few very long prompts (`long_share` of all, one at least) anywhere among many short ones."""
    rng = _checked(seed, vocabulary, count, short, long, out)
    if not 0 < long_share <= 1:
        raise ValueError(f"long_share={long_share}: a share of all requests, more than 0 and at most 1")
    num_long = max(1, round(count * long_share))
    ins, outs = np.empty(count, np.int64), np.empty(count, np.int64)
    are_long = np.zeros(count, np.bool_)
    are_long[rng.choice(count, num_long, replace=False)] = True
    for which, lengths in ((are_long, long), (~are_long, short)):

        def pairs(rng: np.random.Generator, n: int, lengths: Range = lengths) -> tuple[Lengths, Lengths]:
            return _between(rng, n, lengths), _between(rng, n, out)

        ins[which], outs[which] = _drawn(rng, int(np.count_nonzero(which)), max_tokens, pairs)
    text = f"{num_long} of {_words(long)} in among {count - num_long} of {_words(short)}, {_words(out)} out"
    return _alone("skewed", text, rng, vocabulary, ins, outs)


def ragged(
    *, seed: int, vocabulary: int, count: int, max_tokens: int, prompt: Range = (100, 1024), mean_out: float = 256.0
) -> Workload:
    """Answers that end at very different times: each token is as likely as any to be the last (a geometric distribution)."""
    rng = _checked(seed, vocabulary, count, prompt)
    if mean_out < 1:
        raise ValueError(f"mean_out={mean_out}: an answer has at least 1 token")
    ins, outs = _drawn(rng, count, max_tokens, lambda rng, n: (_between(rng, n, prompt), rng.geometric(1 / mean_out, n)))
    text = f"{_words(prompt)} in, {mean_out:g} out on average, geometric, at most {max_tokens} tokens"
    return _alone("ragged", text, rng, vocabulary, ins, outs)


def arriving(workload: Workload, rate_per_s: float, burstiness: float = 1.0, *, seed: int) -> Workload:
    """The same requests, spread out: gaps between arrivals are gamma-distributed, with mean 1 / rate.

    `burstiness` is their squared coefficient of variation: 1 is a Poisson process, 4 comes in bursts, near 0 all are alike.
    A request that waits for another (`after`) has no moment of its own, and keeps 0.0.
    Raises: ValueError if either is not positive.
    """
    if not (rate_per_s > 0 and burstiness > 0):
        raise ValueError(f"rate_per_s={rate_per_s}, burstiness={burstiness}: both are more than 0")
    rng = np.random.default_rng(seed)
    num_free = sum(ask.after is None for ask in workload.asks)
    moments = iter(np.cumsum(rng.gamma(1 / burstiness, burstiness / rate_per_s, num_free)).tolist())
    asks = tuple(replace(ask, arrival_s=next(moments)) if ask.after is None else ask for ask in workload.asks)
    kind = "Poisson" if burstiness == 1 else f"gamma, burstiness {burstiness:g}"
    return replace(workload, text=f"{workload.text}; {rate_per_s:g} a second ({kind})", asks=asks)


_Draw = Callable[[np.random.Generator, int], tuple[Lengths, Lengths]]
"""Lengths of so many prompts, and of their answers; or of all turns of so many conversations."""


def _checked(seed: int, vocabulary: int, count: int, *ranges: Range) -> np.random.Generator:
    if vocabulary < 1 or count < 1:
        raise ValueError(f"vocabulary={vocabulary}, count={count}: both are at least 1")
    for least, most in ranges:
        if not 1 <= least <= most:
            raise ValueError(f"lengths from {least} to {most}: at least 1, and not more than the most")
    return np.random.default_rng(seed)


def _drawn(rng: np.random.Generator, count: int, max_tokens: int, draw: _Draw) -> tuple[Lengths, Lengths]:
    """`count` pairs that have no more than `max_tokens` together."""
    first, second = draw(rng, count)
    for _ in range(_MOST_ROUNDS):
        tokens = first + second
        too_long = np.flatnonzero((tokens if tokens.ndim == 1 else tokens.sum(axis=1)) > max_tokens)
        if not len(too_long):
            return first, second
        first[too_long], second[too_long] = draw(rng, len(too_long))
    raise ValueError(
        f"{len(too_long)} of {count} requests have more than max_tokens={max_tokens} tokens however often they are drawn; "
        f"raise it, or make prompts and answers shorter"
    )


def _between(rng: np.random.Generator, count: int, lengths: Range) -> Lengths:
    return rng.integers(lengths[0], lengths[1] + 1, count, dtype=np.int64)


def _ids(rng: np.random.Generator, vocabulary: int, count: int) -> TokenIds:
    return rng.integers(0, vocabulary, count, dtype=np.int32)


def _alone(name: str, text: str, rng: np.random.Generator, vocabulary: int, ins: Lengths, outs: Lengths) -> Workload:
    """Prompts that have nothing to do with each other."""
    asks = tuple(Ask(prompt=_ids(rng, vocabulary, num_in), num_out=num_out) for num_in, num_out in _pairs(ins, outs))
    return Workload(name=name, text=f"{len(asks)} requests, {text}", asks=asks)


def _pairs(first: Lengths, second: Lengths) -> list[tuple[int, int]]:
    return list(zip(first.tolist(), second.tolist(), strict=True))


def _words(lengths: Range) -> str:
    return f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"


def _published(
    name: str,
    dataset: str,
    prompt: LogNormal,
    out: LogNormal,
    rng: np.random.Generator,
    vocabulary: int,
    count: int,
    max_tokens: int,
    scale: float,
) -> Workload:
    if scale <= 0:
        raise ValueError(f"scale={scale}: more than 0")
    ins, outs = _drawn(rng, count, max_tokens, lambda rng, n: (prompt.draw(rng, n, scale), out.draw(rng, n, scale)))
    times = "" if scale == 1 else f" times {scale:g}"
    return _alone(name, f"lengths of {dataset}{times}, at most {max_tokens} tokens", rng, vocabulary, ins, outs)
