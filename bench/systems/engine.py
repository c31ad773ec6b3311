"""The engine: over one kind of memory, beside other systems; and as a user opens it."""

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from bench.harness import Settings, Stopwatch, WrongNumbers, synchronize
from bench.systems.models import ServedModel, Weights
from bench.systems.runs import LIKELIEST, Begin, LogProbs, Served, ServedRun, Turns
from bench.workloads import TokenIds, Workload, at_once
from vmmkv.tier import Tier
from vmmkv.units import MIB
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.kv_backend import OpenBackend, SlotBackend
from vmmkv_server.engine.loading import Loaded, assemble
from vmmkv_server.protocol import Abort, Failed, FromEngine, Generate, Output, Outputs, Snapshot

Said = tuple[int, Sequence[int], bool]
"""Of one request, by its index: new tokens, and whether it has ended."""


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
    """The engine's loop over one kind of memory."""

    def __init__(
        self,
        weights: Weights,
        options: Options,
        *,
        name: str = "vmmkv",
        open_memory: OpenBackend = SlotBackend.open,
        tiers: Sequence[Tier] = (),
    ) -> None:
        config = replace(weights.config, **options)
        self.name: Final = name
        self.dtype: Final = weights.source.dtype
        self._said: deque[FromEngine] = deque()
        self._cached: Counter[str] = Counter()
        self._firsts: dict[int, LogProbs] = {}
        self.beside: Callable[[list[Said]], object] = lambda said: None
        """What else is done behind each step of a run, told what the step has said."""
        self.snapshot: Snapshot | None = None
        """The engine's counts since it was started, at the end of the last run or later."""
        self.loaded: Final = assemble(config, weights.source, self._hear, open_memory=open_memory, tiers=tiers)
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
            self.llm = LLM(directory, tensor_parallel_size=num_ranks, **given)
        ready = self.llm.ready
        if "kv_cache_dtype" in options:
            self.name = f"{self.name}, {ready.kv_cache_dtype} KV"
        if num_ranks > 1:
            self.name = f"{self.name}, TP {num_ranks}"
        self._broadcasts_s = watch_broadcasts(self.llm.loaded) if num_ranks > 1 else []
        self.dtype: Final[torch.dtype] = getattr(torch, ready.dtype)
        self.num_kv_tokens: Final = self.llm.ready.limits.pool_tokens

    def run(self, workload: Workload, *, num_scored: int = 0, keep: bool = False, **sampling: Any) -> ServedRun:
        """All requests at once. Each has a seed, and parameters by `sampling`.

        `num_scored`: the likeliest first tokens of so many; `keep`: prefixes of the run before stay.
        """
        if not keep:
            self.llm.loaded.engine.forget()
        params = [
            params_of(ask.num_out, num_logprobs=LIKELIEST if index < num_scored else None, seed=index, **sampling)
            for index, ask in enumerate(workload.asks)
        ]
        prompts = [ask.prompt.tolist() for ask in workload.asks]
        gc.collect()
        synchronize(self._device)
        self._broadcasts_s.clear()
        began_s = time.perf_counter()
        completions = self.llm.generate(prompts, params, progress=False)
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
        self.llm.close()
