"""Runs of workloads: what a system is asked for, what became of each request, and the checks before timing.

    asks ── Turns: which requests have arrived ──> System.run ──> ServedRun: tokens of each request, and when they came

All is greedy unless `sampling` says how, and no token ends an answer before its number of tokens. Nothing is known of any
prompt before a run.

Random weights make near-ties, and in bfloat16 the rounding of a batch's shape decides them: a sequence alone and in a batch may
part after some tokens, and both are right. So whole answers are compared between runs that do the same. What batching, chunks
and sharing do is seen in the log-probabilities of first tokens, against those of the request alone, or of another system. How
far these may be off follows from how far they move if the prompt is another one.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch

from bench.harness import Recorder, WrongNumbers
from bench.systems.models import ServedModel
from bench.workloads import Ask, TokenIds, Workload

LIKELIEST: Final = 20
"""Tokens whose log-probabilities are compared."""
_CHECKED_TOKENS: Final = 4
"""Of each answer that is held against the first system's."""

TOLERANCE: Final = {torch.float32: 0.001, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Of what another prompt would change, by the type of weights, K and V.

Of four seeds, right systems were off by up to 0.02 % in float32 on a CPU (transformers; engines by less), of one by 6.1 % in
bfloat16 on an H200. A system that reads zeroes for each sequence's first key is off by 26 %.
"""
_LEAST_COMMON: Final = 0.5
"""Of the likeliest tokens, the share that both must have, for their log-probabilities to be compared."""

LogProbs = Mapping[int, float]
Begin = tuple[list[int], list[LogProbs]]
"""Of an answer: its first tokens, and at each the likeliest ones."""


@dataclass(slots=True)
class Served:
    """What became of one request; seconds from the run's begin."""

    arrival_s: float = 0.0
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """When each came."""

    @property
    def first_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def per_token_s(self) -> float | None:
        """From its first token to its last, for each behind the first; None if there is one only."""
        return None if len(self.token_s) < 2 else (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Of one run of a workload, in the order of its requests."""

    served: list[Served]
    seconds: float
    """From the begin until the last token."""
    cached_tokens: int = 0
    """Of all prompts, what the prefix cache had."""
    cached_by_source: Mapping[str, int] = field(default_factory=dict)
    """The same by where it was: the device, or a tier's name."""
    held_bytes: int = 0
    """By the cache behind the run: of sequences that have ended, and of prefixes."""
    likeliest: list[LogProbs] = field(default_factory=list)
    """Of requests for which it was asked: the likeliest first tokens."""
    broadcasts_s: list[float] = field(default_factory=list)
    """Of an engine over several ranks, by step: see `watch_broadcasts`."""

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(each.prompt_tokens for each in self.served)


class Turns:
    """Which requests may be served when: as they arrive, a conversation's next turn behind the one before."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks = asks
        self.served = [Served(prompt_tokens=len(ask.prompt)) for ask in asks]
        self.prompts = [ask.prompt.tolist() for ask in asks]
        """Of later turns, with random tokens in place of an answer until that is there."""
        self.num_unfinished = len(asks)
        self._coming = [(ask.arrival_s, index) for index, ask in enumerate(asks) if ask.after is None]
        heapq.heapify(self._coming)
        self._followers: dict[int, list[int]] = {}
        for index, ask in enumerate(asks):
            if ask.after is not None:
                self._followers.setdefault(ask.after, []).append(index)

    def arrived(self, now_s: float) -> list[int]:
        """Requests that have arrived since this was last asked, in order."""
        arrived: list[int] = []
        while self._coming and self._coming[0][0] <= now_s:
            arrival_s, index = heapq.heappop(self._coming)
            self.served[index].arrival_s = arrival_s
            arrived.append(index)
        return arrived

    @property
    def next_s(self) -> float | None:
        """When the next one arrives; None if none does before another has ended."""
        return self._coming[0][0] if self._coming else None

    @property
    def seconds(self) -> float:
        """Until the last token of all."""
        return max(served.token_s[-1] for served in self.served)

    def end(self, index: int) -> None:
        """A request has all its tokens: its followers may come. Raises: WrongNumbers if they are too many or too few."""
        served, ask = self.served[index], self.asks[index]
        if len(served.tokens) != ask.num_out:
            raise WrongNumbers(f"request {index} has {len(served.tokens)} tokens of {ask.num_out}")
        self.num_unfinished -= 1
        for follower in self._followers.get(index, ()):
            so_far = self.prompts[index] + served.tokens
            self.prompts[follower] = so_far + self.prompts[follower][len(so_far) :]
            heapq.heappush(self._coming, (served.token_s[-1] + self.asks[follower].think_s, follower))


class System(Protocol):
    """What serves workloads."""

    @property
    def name(self) -> str:
        """The name that rows have."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, K and V."""

    def run(self, workload: Workload, *, keep: bool = False) -> ServedRun:
        """Serve all requests, each when it arrives. `keep`: prefixes of the run before stay. Raises: WrongNumbers."""

    def close(self) -> None:
        """Give its memory back. Idempotent."""


class SharedSystem(System, Protocol):
    """A system over weights that others share, in as much memory as it is told."""

    def begins(self, prompts: Sequence[TokenIds], num_tokens: int) -> list[Begin]:
        """Compute the first tokens of the answer to each prompt, side by side."""


class UsersSystem(System, Protocol):
    """A system as its users open it: it takes all memory."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that its memory for K and V holds."""

    def run(self, workload: Workload, *, keep: bool = False, num_scored: int = 0, **sampling: Any) -> ServedRun:
        """As System, by parameters `sampling`. `num_scored`: the likeliest first tokens of so many requests are wanted."""

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """Compute the likeliest first tokens of each prompt, over an empty cache."""


# checks


def alike(one: LogProbs, other: LogProbs) -> bool:
    """Whether they have enough tokens in common to be compared."""
    return len(one.keys() & other.keys()) >= max(1, _LEAST_COMMON * min(len(one), len(other)))


def distance(some: Sequence[LogProbs], others: Sequence[LogProbs]) -> float:
    """Root mean square of the differences, over the tokens that both have."""
    squares = [
        (one[token] - other[token]) ** 2 for one, other in zip(some, others, strict=True) for token in one.keys() & other.keys()
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


def share_off(
    wanted: Sequence[LogProbs], given: Sequence[LogProbs], others: Sequence[LogProbs], dtype: torch.dtype, what: str
) -> float:
    """By how much `given` is off, as a share of what other prompts (`others`) change. Raises: WrongNumbers if too much."""
    if not all(map(alike, wanted, given)):
        raise WrongNumbers(f"{what} have other likeliest tokens")
    # Where other prompts leave nothing in common, log-probabilities of flat distributions still differ by about 1.
    pairs = [(one, other) for one, other in zip(wanted, others, strict=False) if alike(one, other)]
    shift = min(1.0, distance(*zip(*pairs, strict=True))) if pairs else 1.0
    if not shift > 0:
        raise WrongNumbers("other prompts change nothing: wrong rows would not be seen")
    off = distance(wanted, given) / shift
    if not off <= TOLERANCE[dtype]:  # NaN is not
        raise WrongNumbers(
            f"{what} are off by {100 * off:.2g} % of what other prompts change, at most {100 * TOLERANCE[dtype]:g} %"
        )
    return off


def share_same(runs: Sequence[ServedRun], wanted: ServedRun, *, strict: bool) -> float:
    """The share of requests that have in all runs the tokens of `wanted`. Raises: WrongNumbers if `strict` and not all have.

    On a CPU all is in float32, where a batch's shape decides nothing.
    """
    differing = [
        index for index, served in enumerate(wanted.served) if any(run.served[index].tokens != served.tokens for run in runs)
    ]
    if differing and strict:
        raise WrongNumbers(
            f"{len(differing)} of {len(wanted.served)} requests have other tokens in another run: {differing[:8]}"
        )
    return 1 - len(differing) / len(wanted.served)


def take_turns(
    recorder: Recorder,
    systems: Sequence[System],
    rounds: Sequence[Sequence[Workload]],
    names: Sequence[str],
    *,
    leaves_out: Callable[[str, int, int], bool] = lambda system, round_, place: False,
) -> list[dict[str, list[ServedRun]]]:
    """Run every round's workloads on every system. Returns for each of `names` the runs by system.

    Workload i of a round counts to `names[i]`, those beyond the last name to the last. The first workload of a round finds an
    empty prefix cache, each other what is left. In every other round the systems come backwards, so that a drift of the machine
    is no system's.
    """
    runs: list[dict[str, list[ServedRun]]] = [{system.name: [] for system in systems} for _ in names]
    for number, round_ in enumerate(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            for place, workload in enumerate(round_):
                if leaves_out(system.name, number, place):
                    continue
                row = min(place, len(names) - 1)
                recorder.note(f"{names[row]}, {system.name}")
                run = system.run(workload, keep=True) if place else system.run(workload)
                runs[row][system.name].append(run)
    return runs


def checked(systems: Sequence[SharedSystem], workload: Workload, count: int, model: ServedModel, seed: int) -> dict[str, float]:
    """By how much log-probabilities are off the first system's, as a share of what other prompts change.

    They are those of the first tokens of some answers, of which all but one are decoded, as far as these tokens are the same.
    """
    prompts = [ask.prompt for ask in workload.asks[:count]]
    rng = np.random.default_rng((seed, 7))
    others = [rng.integers(0, model.vocabulary, len(prompt), dtype=np.int32) for prompt in prompts]
    first, *compared = systems
    begins = first.begins(prompts, _CHECKED_TOKENS)
    changed = [likeliest[0] for _, likeliest in first.begins(others, 1)]
    offs: dict[str, float] = {}
    for system in compared:
        pairs: list[tuple[LogProbs, LogProbs]] = [
            (of_first[place], of_other[place])
            for (tokens, of_first), (other_tokens, of_other) in zip(
                begins, system.begins(prompts, _CHECKED_TOKENS), strict=True
            )
            for place in range(_CHECKED_TOKENS)
            if tokens[:place] == other_tokens[:place]
        ]
        if len(pairs) <= len(prompts):
            raise WrongNumbers(f"{system.name} answers with other tokens than {first.name}")
        wanted, given = zip(*pairs, strict=True)
        # What other prompts change is seen at first tokens.
        shifts = [changed[index % len(changed)] for index in range(len(pairs))]
        offs[system.name] = share_off(wanted, given, shifts, first.dtype, f"first tokens of {system.name}")
    return offs
