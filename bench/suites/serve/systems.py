"""What serves a workload: the engine over one kind of memory, the engine as a user has it, and the checks before timing.

    asks ── Turns: which requests have arrived ──> run ──> ServedRun: tokens of each request, and when they came

All is greedy unless a stage samples, and no token ends an answer before its number of tokens. Nothing is known of any prompt
before a run.

Random weights make near-ties, and in bfloat16 the rounding of a batch's shape decides them: a sequence alone and in a batch may
part after some tokens, and both are right. So whole answers are compared between runs that do the same. What batching, chunks
and sharing do is seen in the log-probabilities of first tokens, against those of the request alone, or of another system. How
far these may be off follows from how far they move if the prompt is another one.
"""

import gc
import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch

from bench.baselines.backend import SYSTEMS
from bench.harness import Recorder, Settings, Stopwatch, WrongNumbers, synchronize
from bench.suites.serve.models import ServedModel, Weights
from bench.workloads import Ask, TokenIds, Workload, at_once
from vmmkv.tiers import Tier
from vmmkv.units import MIB
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.loading import Loaded, assemble
from vmmkv_server.protocol import Abort, Failed, FromEngine, Generate, Output, Outputs, Snapshot

OUTSIDE: Final = "transformers StaticCache"
"""Name of the system that is transformers."""
LIKELIEST: Final = 20
"""Tokens whose log-probabilities are compared."""

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


# runs


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


Said = tuple[int, Sequence[int], bool]
"""Of one request, by its index: new tokens, and whether it has ended."""


# systems


Options = Mapping[str, Any]
"""Of `vmmkv_server.LLM`, by their names."""


def of_users(settings: Settings) -> dict[str, Any]:
    """The limits of an engine that takes all memory, which is little where sizes are small."""
    small = settings.small
    return {"max_num_seqs": 16 if small else 256, "kv_budget_bytes": 32 * MIB if small else None}


def params_of(num_out: int, *, num_logprobs: int | None = None, ends: bool = False, **sampling: Any) -> SamplingParams:
    """Greedy, unless `sampling` says how. An end token ends the answer only if `ends`."""
    sampling = {"temperature": 0.0, **sampling}
    return SamplingParams(max_tokens=num_out, ignore_eos=not ends, logprobs=num_logprobs, **sampling)


class EngineSystem:
    """The engine's loop over one of `SYSTEMS`, each a kind of memory."""

    def __init__(self, memory: str, weights: Weights, options: Options, *, tiers: Sequence[Tier] = ()) -> None:
        config = replace(weights.config, **options)
        name = f"{memory} {config.max_tokens}" if memory == "static" else memory
        self.name: Final = name if config.prefix_cache else "none"
        self.dtype: Final = weights.source.dtype
        self._said: deque[FromEngine] = deque()
        self._cached: Counter[str] = Counter()
        self._firsts: dict[int, LogProbs] = {}
        self.beside: Callable[[list[Said]], object] = lambda said: None
        """What else is done behind each step of a run, told what the step has said."""
        self.snapshot: Snapshot | None = None
        """The engine's counts since it was started, at the end of the last run or later."""
        self.loaded: Final = assemble(config, weights.source, self._hear, open_memory=SYSTEMS[memory], tiers=tiers)
        self.loop: Final = self.loaded.engine

    def run(
        self, workload: Workload, *, keep: bool = False, scored: Sequence[int] = (), kv_policy: Options | None = None
    ) -> ServedRun:
        """All requests, each when it arrives. `keep`: prefixes of the run before stay.

        `scored`: requests whose likeliest first tokens are wanted. Raises: WrongNumbers.
        """
        if not keep:
            self.forget()
        self._cached, self._firsts = Counter(), dict[int, LogProbs]()
        params = [
            params_of(ask.num_out, num_logprobs=LIKELIEST if index in scored else None, kv_policy=kv_policy)
            for index, ask in enumerate(workload.asks)
        ]
        turns, began_s = Turns(workload.asks), time.perf_counter()
        try:
            while turns.num_unfinished:
                self._serve(turns, began_s, params)
        except BaseException:
            self.abort(len(workload.asks))
            raise
        self.loop.settle()
        self._said.clear()
        held_bytes = self.loaded.memory.stats().pool_held_bytes
        likeliest = [self._firsts[index] for index in scored]
        return ServedRun(turns.served, turns.seconds, self._cached.total(), self._cached, held_bytes, likeliest)

    def _serve(self, turns: Turns, began_s: float, params: Sequence[SamplingParams]) -> None:
        """A step, for those that have arrived."""
        now_s = time.perf_counter() - began_s
        for index in turns.arrived(now_s):
            self.add(index, turns.prompts[index], params[index])
        if not self.loop.has_work:
            assert turns.next_s is not None, f"the engine has lost {turns.num_unfinished} requests"
            time.sleep(max(0.0, turns.next_s - now_s))
            return
        said = self.step()
        self.beside(said)
        now_s = time.perf_counter() - began_s
        for index, tokens, has_ended in said:
            served = turns.served[index]
            served.tokens += tokens
            served.token_s += [now_s] * len(tokens)
            if has_ended:
                turns.end(index)

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Snapshot):
            self.snapshot = message
        else:
            self._said.append(message)

    def add(self, index: int, prompt: list[int], params: SamplingParams) -> None:
        """A request, from now on."""
        self.loop.receive(Generate(request_id=str(index), prompt=prompt, params=params))

    def step(self) -> list[Said]:
        """A step, and what it has said."""
        self.loop.step()
        said: list[Said] = []
        for output in self.outputs():
            self._cached.update(dict(output.cached))
            if output.top_logprobs:
                self._firsts.setdefault(int(output.request_id), dict(output.top_logprobs[0]))
            said.append((int(output.request_id), output.token_ids, output.finish_reason is not None))
        return said

    def outputs(self) -> Iterator[Output]:
        """Take what the engine has said. Raises: WrongNumbers if a request has failed."""
        while self._said:
            message = self._said.popleft()
            if isinstance(message, Failed):
                raise WrongNumbers(f"request {message.request_id} failed: {message.message}")
            if isinstance(message, Outputs):
                yield from message.outputs

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """The likeliest first tokens of each prompt, computed side by side."""
        return [likeliest[0] for _, likeliest in self.begins(prompts, 1)]

    def begins(self, prompts: Sequence[TokenIds], num_tokens: int) -> list[Begin]:
        """The first tokens of the answer to each prompt, all of them side by side."""
        self.forget()
        begins: list[Begin] = [([], []) for _ in prompts]
        params = params_of(num_tokens, num_logprobs=LIKELIEST)
        for index, prompt in enumerate(prompts):
            self.add(index, prompt.tolist(), params)
        while self.loop.has_work:
            self.loop.step()
        for output in self.outputs():
            tokens, likeliest = begins[int(output.request_id)]
            tokens += output.token_ids
            likeliest += map(dict, output.top_logprobs)
        if any(len(tokens) != num_tokens for tokens, _ in begins):
            raise WrongNumbers(f"{self.name} has not answered all prompts with {num_tokens} tokens")
        return begins

    def abort(self, count: int) -> None:
        """End requests 0 to `count`, and forget what was said of them."""
        for index in range(count):
            self.loop.receive(Abort(request_id=str(index)))
        while self.loop.has_work:
            self.loop.step()
        self._said.clear()

    def forget(self) -> None:
        """Empty the prefix cache. Memory stays with the engine."""
        self.loop.forget()
        self._said.clear()

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        self.loaded.close()


def watch_broadcasts(loaded: Loaded) -> list[float]:
    """Seconds, by step to come, in which rank 0 has the others make it: its messages, and launches of broadcasts of inputs.

    It is time of the host, which a GPU that has steps queued does not see. A step that is replayed from a graph has its
    broadcast within: what that takes the device the suite `collectives` says.
    """
    watch, steps_s, ranks, engine = Stopwatch(), list[float](), cast(Any, loaded.ranks), cast(Any, loaded.engine)
    ranks.send, ranks.collectives.broadcast = watch.timed(ranks.send), watch.timed(ranks.collectives.broadcast)
    step = engine.step

    def timed_step() -> None:
        before_us = watch.spent_us
        step()
        steps_s.append(1e-6 * (watch.spent_us - before_us))

    engine.step = timed_step
    return steps_s


class UserEngine:
    """The engine in this process, as a user opens it: `generate` over all requests at once."""

    name = "vmmkv"

    def __init__(self, model: ServedModel, settings: Settings, num_ranks: int = 1, **options: Any) -> None:
        """With a type of the KV cache, or several ranks, the name says it."""
        self._device = settings.device
        given = {"device": str(settings.device), "load_format": "dummy", "seed": settings.seed, **of_users(settings), **options}
        with model.directory() as directory:
            self._engine = LLM(directory, tensor_parallel_size=num_ranks, **given)
        ready = self._engine.ready
        if "kv_cache_dtype" in options:
            self.name = f"{self.name}, {ready.kv_cache_dtype} KV"
        if num_ranks > 1:
            self.name = f"{self.name}, TP {num_ranks}"
        self._broadcasts_s = watch_broadcasts(self._engine._open()) if num_ranks > 1 else []
        self.dtype: Final[torch.dtype] = getattr(torch, ready.dtype)
        self.num_kv_tokens: Final = self._engine.ready.limits.pool_tokens

    def run(self, workload: Workload, *, num_scored: int = 0, keep: bool = False, **sampling: Any) -> ServedRun:
        """All requests at once. Each has a seed, and parameters by `sampling`.

        `num_scored`: the likeliest first tokens of so many; `keep`: prefixes of the run before stay.
        """
        if not keep:
            self._engine._open().engine.forget()
        params = [
            params_of(ask.num_out, num_logprobs=LIKELIEST if index < num_scored else None, seed=index, **sampling)
            for index, ask in enumerate(workload.asks)
        ]
        prompts = [ask.prompt.tolist() for ask in workload.asks]
        gc.collect()
        synchronize(self._device)
        self._broadcasts_s.clear()
        began_s = time.perf_counter()
        completions = self._engine.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began_s
        served = []
        for index, (completion, ask) in enumerate(zip(completions, workload.asks, strict=True)):
            if completion.error is not None:
                raise WrongNumbers(f"request {index} failed: {completion.error}")
            tokens = completion.outputs[0].token_ids
            if len(tokens) != ask.num_out:
                raise WrongNumbers(f"request {index} has {len(tokens)} tokens of {ask.num_out}")
            token_s = [completion.first_token_s or 0.0, *[completion.finished_s] * (len(tokens) - 1)]
            served.append(Served(0.0, len(ask.prompt), tokens, token_s))
        return ServedRun(
            served,
            seconds,
            cached_tokens=sum(completion.cached_tokens for completion in completions),
            broadcasts_s=list(self._broadcasts_s),
            likeliest=[(completion.outputs[0].top_logprobs or [{}])[0] for completion in completions[:num_scored]],
        )

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """Of each prompt alone, over an empty cache: what checks hold a batch against."""
        return [self.run(at_once([prompt], 1), num_scored=1).likeliest[0] for prompt in prompts]

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        self._engine.close()


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
    systems: Sequence[Any],
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
