"""An engine in this process: prompts in, completions out, without HTTP.

    from vmmkv.server import Engine, SamplingParams

    with Engine("smollm2-135m") as engine:
        for completion in engine.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
            print(completion.outputs[0].text)

It is the engine of `vmmkv serve`: prompts are batched, share their prefixes, and wait where there is no room for all.
"""

import dataclasses
import gc
import inspect
import itertools
import logging
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Number
from os import PathLike
from pathlib import Path
from reprlib import repr as shortened
from types import TracebackType
from typing import Any, Final, Never, Self, TypeAlias

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer as RustTokenizer

from vmmkv.errors import Closed
from vmmkv.server.config import DEFAULT_MODEL, ServeConfig
from vmmkv.server.console import DeferredInterrupt, GenerationProgress, LoadingProgress
from vmmkv.server.engine.loading import Loaded, load
from vmmkv.server.models import has_tokenizer, resolve
from vmmkv.server.protocol import (
    Abort,
    Beams,
    Failed,
    FinishReason,
    FromEngine,
    Generate,
    Loading,
    Output,
    Outputs,
    PromptLogprobs,
    Ready,
    Snapshot,
    unpacked,
)
from vmmkv.server.sampling_params import Limits, SamplingParams, unknown_option
from vmmkv.server.tokenizer import Detokenizer, PromptError, Tokenizer, decode_all
from vmmkv.units import counted, format_bytes

# -------- offline prompts
# What a caller gives `Engine.generate`, brought into one form: a list of prompts, and for each its params and priority.

AnyPrompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""

MAX_PRIORITY: Final = 1 << 31
"""Priorities lie in [-MAX_PRIORITY, MAX_PRIORITY), over HTTP too."""

_UNORDERED: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""What can be iterated over, and is no list of prompts, of token ids or of anything else that is asked for."""


def each_prompt(prompts: Any) -> list[Any]:
    """One after the other: a text is one prompt, and so is whatever begins with a number. Raises: ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = list(prompts) if prompts.ndim == 2 else prompts.tolist()
    listed = _listed("prompts", prompts, "a text, token ids, or a list of those")
    return [listed] if listed and isinstance(listed[0], Number) else listed


def each_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Those of each of `count` prompts. Raises: ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * count
    wanted = "SamplingParams, or a list with one for each prompt"
    listed = _counted("params", _listed("params", params, wanted), count)
    for index, each in enumerate(listed):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"prompt {index}: its params are {shortened(each)}; wanted SamplingParams")
    return listed


def each_priority(priorities: Iterable[int] | None, count: int) -> list[int]:
    """That of each of `count` prompts. Raises: ValueError."""
    if priorities is None:
        return [0] * count
    if isinstance(priorities, np.ndarray | torch.Tensor):
        priorities = priorities.tolist()
    listed = _counted("priorities", _listed("priorities", priorities, "a list with a number for each prompt"), count)
    for index, each in enumerate(listed):
        if not _is_whole(each) or not -MAX_PRIORITY <= each < MAX_PRIORITY:
            raise ValueError(f"prompt {index}: its priority is {shortened(each)}; wanted an integer from -2**31 to 2**31 - 1")
    return list(map(int, listed))


def token_ids_of(prompt: Any) -> list[int]:
    """The numbers of a prompt that is no text; whether the model has them is not looked at. Raises: PromptError."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        if prompt.ndim != 1:
            raise PromptError(f"its shape is {tuple(prompt.shape)}; wanted one dimension of token ids")
        ids = prompt.tolist()
    elif isinstance(prompt, Iterable) and not isinstance(prompt, _UNORDERED):
        ids = list(prompt)
    else:
        raise PromptError(f"{shortened(prompt)} is neither a text nor a list of token ids")
    # A step of Python for each of some 100,000 ids would take longer than to admit their prompts.
    if set(map(type, ids)) <= {int}:
        return ids
    for each in ids:
        if not _is_whole(each):
            raise PromptError(f"{shortened(each)} is not a token id: these are integers")
    return list(map(int, ids))


def _listed(name: str, value: Any, wanted: str) -> list[Any]:
    if isinstance(value, _UNORDERED) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={shortened(value)}: wanted {wanted}")
    return list(value)


def _counted(name: str, listed: list[Any], count: int) -> list[Any]:
    if len(listed) != count:
        raise ValueError(f"{len(listed)} {name} for {count} prompts: give one for each")
    return listed


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# -------- completion
# What `Engine.generate` gives back.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to one prompt."""

    text: str
    """Up to the stop string, if one ended it. Empty if the model's directory has no tokenizer."""
    token_ids: list[int]
    """Without the end token; with the tokens of a stop string."""
    finish_reason: FinishReason | None
    """None if its request failed before its end."""
    logprobs: list[float] | None = None
    """Of each token, under the model's own distribution; None if they were not asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """For each token the likeliest token ids at its place, the likeliest first, with their log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A prompt and its answers. Times are seconds since `generate` was called."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """As many as `n`."""
    cached_tokens: int
    """Tokens of the prompt that its first answer found in the prefix cache."""
    first_token_s: float | None
    """When the first token of any of its answers was there; None if there was none."""
    finished_s: float
    """When the last of its answers had ended."""
    prompt_logprobs: list[float | None] | None = None
    """Of each token of the prompt, under the model's own distribution; None for the first, which comes after nothing. None if
    they were not asked for, and not all there if its request failed."""
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    """For each of them the likeliest token ids at its place, the likeliest first, with their log-probabilities."""
    error: str | None = None
    """Why it failed, if it did; then `outputs` hold what there was."""


# -------- offline job
# One call of `Engine.generate`: its requests to the engine, and its answers as they come.

SEED_MASK = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that grows."""

    prompt: "Prompt"
    detokenizer: Detokenizer | None
    """Only where a stop string can end it: else all text is made at the end, at once."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def feed(self, output: Output) -> None:
        """Further tokens, and the end if it has one; a stop string cuts what follows it, and is an end too."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.finish_reason = output.finish_reason
        if self.detokenizer is None:
            return
        is_last = output.finish_reason is not None
        self.text += self.detokenizer.finish(output.token_ids) if is_last else self.detokenizer.feed(output.token_ids)
        if self.detokenizer.stopped:
            del self.token_ids[self.detokenizer.num_tokens :]
            self.finish_reason = "stop"

    def output(self) -> CompletionOutput:
        """As it is given back. An end token's log-probability is left out, as the token is."""
        count, wanted = len(self.token_ids), self.prompt.params.logprobs
        return CompletionOutput(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=None if wanted is None else self.logprobs[:count],
            top_logprobs=[dict(each) for each in self.top_logprobs[:count]] if wanted else None,
        )


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt, how it is to be continued, and its answers."""

    token_ids: list[int]
    params: SamplingParams
    seed: int
    """Of its first answer; those that follow have the next ones."""
    priority: int
    max_new_tokens: int
    answers: list[Answer] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[Sequence[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float = 0.0
    error: str | None = None

    def request(self, request_id: str, index: int) -> Generate:
        """What the engine is asked for its answer of that index."""
        params = self.params
        return Generate(
            request_id=request_id,
            prompt=self.token_ids,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias),
            seed=(self.seed + index) & SEED_MASK,
            want_logprobs=params.logprobs is not None,
            num_logprobs=params.logprobs or 0,
            num_prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            priority=self.priority,
        )

    def completion(self) -> Completion:
        """As it is given back."""
        wanted = self.params.prompt_logprobs
        tops = [None if each is None else dict(each) for each in self.top_logprobs] if wanted else None
        return Completion(
            prompt_token_ids=self.token_ids,
            outputs=[answer.output() for answer in self.answers],
            cached_tokens=self.cached_tokens,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            prompt_logprobs=None if wanted is None else self.logprobs,
            prompt_top_logprobs=tops,
            error=self.error,
        )


class Job:
    """Prompts under way. Give it what the engine says; `unfinished` is empty when all have ended."""

    def __init__(self, name: str, prompts: Sequence[Prompt], tokenizer: RustTokenizer | None) -> None:
        """`name` is unique within the engine."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self.requests: list[Generate] = []
        self.unfinished: dict[str, Answer] = {}
        """By the names of their requests."""
        self.num_new_tokens = 0
        self.num_prompt_tokens = 0
        """Of the prompts of answers that have begun, without what the prefix cache had."""
        for number, prompt in enumerate(prompts):
            for index in range(prompt.params.n):
                request = prompt.request(f"{name}-{number}-{index}", index)
                answer = Answer(prompt, self._detokenizer(prompt))
                prompt.answers.append(answer)
                self.requests.append(request)
                self.unfinished[request.request_id] = answer

    def take(self, outputs: Sequence[Output], now_s: float) -> Iterator[str]:
        """What a step gave, `now_s` seconds after the start. Names the requests that a stop string ended, to be aborted."""
        for output in outputs:
            answer = self.unfinished.get(output.request_id)
            if answer is None:  # it was aborted before this came
                continue
            prompt = answer.prompt
            self.num_new_tokens += len(output.token_ids)
            if not answer.token_ids and not answer.logprobs:
                self.num_prompt_tokens += len(prompt.token_ids) - output.cached_tokens
                if answer is prompt.answers[0]:
                    prompt.cached_tokens = output.cached_tokens
            if prompt.first_token_s is None and prompt.max_new_tokens:
                prompt.first_token_s = now_s
            answer.feed(output)
            if answer.finish_reason is not None:
                self._end(output.request_id, now_s)
                if output.finish_reason is None:
                    yield output.request_id

    def take_prompt(self, message: PromptLogprobs) -> None:
        """What the engine says of a prompt, before its first answer."""
        if (answer := self.unfinished.get(message.request_id)) is not None:
            logprobs, likeliest = unpacked(message)
            answer.prompt.logprobs += logprobs
            answer.prompt.top_logprobs += likeliest

    def fail(self, request_id: str, message: str, now_s: float) -> None:
        """The engine gave up on one request."""
        if (answer := self.unfinished.get(request_id)) is not None:
            answer.prompt.error = message
            self._end(request_id, now_s)

    def completions(self) -> list[Completion]:
        """All of them, in the order of the prompts."""
        self._decode()
        return [prompt.completion() for prompt in self._prompts]

    def _end(self, request_id: str, now_s: float) -> None:
        prompt = self.unfinished.pop(request_id).prompt
        prompt.finished_s = max(prompt.finished_s, now_s)

    def _detokenizer(self, prompt: Prompt) -> Detokenizer | None:
        if not prompt.params.stop:
            return None
        assert self._tokenizer is not None, "a stop string needs a tokenizer"
        params = prompt.params
        return Detokenizer(self._tokenizer, stops=params.stop, context=prompt.token_ids, min_tokens=params.min_tokens)

    def _decode(self) -> None:
        """Make the text of the answers that nobody looked at while they grew."""
        if self._tokenizer is None:
            return
        unread = [answer for prompt in self._prompts for answer in prompt.answers if answer.detokenizer is None]
        texts = decode_all(self._tokenizer, [(answer.prompt.token_ids, answer.token_ids) for answer in unread])
        for answer, text in zip(unread, texts, strict=True):
            answer.text = text


# -------- offline

log = logging.getLogger(__name__)


class Engine:
    """A model and its KV cache, for one caller at a time. Close it, or use it in a `with` block: its memory goes back then.

    The options are those of `vmmkv serve`, with the same defaults; `dtype` may be torch's own. `model` is a known name, a
    directory in transformers' format, or a hub name. A directory without a tokenizer takes token ids alone, and gives no text;
    one without weights needs `load_format="dummy"`. `seed` is that of dummy weights, and of the seeds that requests without one
    are given.

    On a CPU, OpenMP's threads spin as they wait and take the processors from those that work: set OMP_WAIT_POLICY=PASSIVE
    before Python starts.

    Raises: TypeError for an option that there is not, ValueError for one that cannot be; ModelUnavailable for a model that
    cannot be had, UnsupportedModel (a ValueError) for an architecture that cannot be served; DriverUnavailable, OutOfPages.
    """

    def __init__(
        self,
        model: str | PathLike[str] = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        kv_budget_bytes: int | None = None,
        max_tokens: int | None = None,
        prefix_cache: bool = True,
        model_impl: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        **unknown: Never,
    ) -> None:
        self._loaded: Loaded | None = None
        if unknown:
            raise TypeError(_unknown_option(next(iter(unknown))))
        config = ServeConfig(
            model=str(model) if isinstance(model, PathLike) else model,
            device=device,
            dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_budget_bytes=kv_budget_bytes,
            max_tokens=max_tokens,
            prefix_cache=prefix_cache,
            model_impl=model_impl,
            load_format=load_format,
            seed=seed,
        )
        self.snapshot: Snapshot | None = None
        """The engine's last account of its requests and its memory, at the latest of the end of the last `generate`."""
        self._model = config.model
        self._random = random.Random(config.seed)
        self._numbers = itertools.count()
        self._working = threading.Lock()
        self._broken: str | None = None
        self._said: deque[FromEngine] = deque()
        """What the engine said and nobody has read. It is read between steps, since aborting answers some of it."""
        directory = resolve(config.model, weights=load_format != "dummy", tokenizer=False)
        self._tokenizer = Tokenizer.load(directory) if has_tokenizer(directory) else None
        self._vocab_size = _vocab_size(directory)
        console = Console(stderr=True)
        progress = LoadingProgress(console)

        def hear(message: FromEngine) -> None:
            if not isinstance(message, Loading):
                self._said.append(message)
            elif console.is_terminal:
                progress.show(message)

        try:
            self._loaded = load(dataclasses.replace(config, model=str(directory)), hear)
        finally:
            progress.close(done=self._loaded is not None)
        self._settle()
        log.info("%s: %s on %s, %s implementation", model, self.ready.dtype, self.ready.device, self.ready.implementation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_loaded", None) is not None:
            warnings.warn(
                f"an Engine of {self._model} was not closed: its memory may stay taken", ResourceWarning, stacklevel=2
            )

    def __repr__(self) -> str:
        if self._loaded is None or self.snapshot is None:
            return f"<Engine of {self._model}, closed>"
        ready, now = self._loaded.ready, self.snapshot
        free_bytes = now.kv_budget_bytes - now.kv_used_bytes - now.kv_cached_bytes - now.kv_retiring_bytes
        return (
            f"<Engine of {self._model} on {ready.device}: {now.running} of {counted(ready.max_sequences, 'sequence')} running, "
            f"{format_bytes(free_bytes)} of {format_bytes(now.kv_budget_bytes)} free>"
        )

    @property
    def ready(self) -> Ready:
        """Its limits, and what it runs on. Raises: Closed."""
        return self._open().ready

    def generate(
        self,
        prompts: AnyPrompt | Iterable[AnyPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priorities: Iterable[int] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continue each prompt; the completions come in the order of the prompts, one even of a single prompt.

        `prompts` are texts or token ids (a list, or an array or tensor of one dimension), several or one. `params` are for
        all, or one for each; `SamplingParams()` by default. Of `priorities`, one for each prompt, lower ones go first.
        `progress` shows a bar on stderr; None does so on a terminal.

        A request that fails on its way leaves the others alone, and says so in its completion's `error`. Ctrl-C ends all of
        them after the step that runs; the engine can be used again.
        Raises: ValueError, before anything runs, for a prompt or parameter that cannot be served, naming the prompt;
        KeyboardInterrupt; Closed; RuntimeError if another thread generates.
        """
        self._open()
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this Engine is generating in another thread: give both lists of prompts to one call")
        try:
            if self._broken is not None:
                raise RuntimeError(f"this Engine is broken and must be closed: {self._broken}")
            tokenizer = None if self._tokenizer is None else self._tokenizer.rust
            job = Job(str(next(self._numbers)), self._prompts(prompts, params, priorities), tokenizer)
            self._run(job, shown=Console(stderr=True).is_terminal if progress is None else progress)
            return job.completions()
        finally:
            self._working.release()

    def close(self) -> None:
        """Give back all memory. Idempotent. Raises: RuntimeError if another thread generates."""
        loaded = self._loaded
        if loaded is None:
            return
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this Engine is generating in another thread: close it when that has ended")
        try:
            device = loaded.engine.cache.device
            loaded.close()
            self._loaded = None  # not before: a close that failed can be called again
        finally:
            self._working.release()
            del loaded
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the weights are back with torch, and not yet with the device

    def _open(self) -> Loaded:
        if self._loaded is None:
            raise Closed(f"this Engine of {self._model} is closed")
        return self._loaded

    def _run(self, job: Job, *, shown: bool) -> None:
        core = self._open().engine
        began_s = time.perf_counter()
        with DeferredInterrupt() as interrupt, GenerationProgress(len(job.requests), shown=shown) as bar:
            try:
                for request in job.requests:
                    core.receive(request)
                self._read(job, began_s)
                while job.unfinished:
                    interrupt.check()
                    assert core.has_work, f"the engine has lost {len(job.unfinished)} requests"
                    core.step()
                    self._read(job, began_s)
                    bar.update(len(job.requests) - len(job.unfinished), job.num_prompt_tokens, job.num_new_tokens)
            except BaseException as error:
                self._abandon(job, error)
                raise
            bar.update(len(job.requests), job.num_prompt_tokens, job.num_new_tokens, at_end=True)
            self._settle()

    def _read(self, job: Job, began_s: float) -> None:
        """Take what the engine has said, and stop what a stop string has ended."""
        core, now_s = self._open().engine, time.perf_counter() - began_s
        while self._said:
            match self._said.popleft():
                case Outputs(outputs=outputs):
                    for request_id in job.take(outputs, now_s):
                        core.receive(Abort(request_id=request_id))
                case PromptLogprobs() as message:
                    job.take_prompt(message)
                case Failed(request_id=request_id, message=message):
                    job.fail(request_id, message, now_s)
                case Snapshot() as snapshot:
                    self.snapshot = snapshot
                case Beams() | Loading() | Ready():
                    raise AssertionError("nobody asked for that")

    def _abandon(self, job: Job, error: BaseException) -> None:
        """End what runs, after an error or Ctrl-C. If that fails too, the engine is of no use any more."""
        core = self._open().engine
        try:
            for request_id in job.unfinished:
                core.receive(Abort(request_id=request_id))
            while core.has_work:
                core.step()
            self._settle()
        except BaseException as failure:
            self._broken = f"{type(error).__name__}: {error}; then {type(failure).__name__}: {failure}"
            if not isinstance(failure, Exception):
                raise
            log.exception("the engine could not be brought to rest")

    def _settle(self) -> None:
        """Nothing is left to do: what retires goes, and the last account is read; nobody waits for anything else."""
        self._open().engine.settle()
        while self._said:
            if isinstance(message := self._said.popleft(), Snapshot):
                self.snapshot = message

    def _prompts(
        self,
        prompts: AnyPrompt | Iterable[AnyPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        priorities: Iterable[int] | None,
    ) -> list[Prompt]:
        """What was asked for, checked. Raises: ValueError."""
        listed = each_prompt(prompts)
        of_each = zip(listed, each_params(params, len(listed)), each_priority(priorities, len(listed)), strict=True)
        made = []
        for index, (prompt, own, priority) in enumerate(of_each):
            try:
                made.append(self._prompt(prompt, own, priority))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return made

    def _prompt(self, prompt: AnyPrompt, params: SamplingParams, priority: int) -> Prompt:
        if not isinstance(prompt, str):
            token_ids = token_ids_of(prompt)
        elif self._tokenizer is None:
            raise PromptError(f"{self._model} has no tokenizer: give token ids")
        else:
            token_ids = self._tokenizer.encode_one(prompt)
        if params.stop and self._tokenizer is None:
            raise ValueError(f"{self._model} has no tokenizer, and so no stop strings: use stop_token_ids")
        self._check_ids("a token id", token_ids)
        self._check_ids("a token id of logit_bias", params.logit_bias)
        self._check_ids("a token id of stop_token_ids", params.stop_token_ids)
        ready = self.ready
        limits = Limits(
            model=self._model, of_model=ready.max_tokens, of_pool=ready.pool_tokens, budget_bytes=ready.budget_bytes
        )
        return Prompt(
            token_ids=token_ids,
            params=params,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            max_new_tokens=limits.fit(len(token_ids), params.max_tokens),
        )

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        unknown = next((end for end in (min(ids, default=0), max(ids, default=0)) if not 0 <= end < self._vocab_size), None)
        if unknown is not None:
            raise PromptError(f"{unknown} is not {name}: this model's go from 0 to {self._vocab_size - 1}")


def _unknown_option(name: str) -> str:
    """What to say of it."""
    parameters = inspect.signature(Engine).parameters.values()
    options = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return unknown_option("Engine", name, options)


def _vocab_size(directory: Path) -> int:
    """How many token ids the model has; its tokenizer may have fewer. Raises: OSError, ValueError."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config().vocab_size
    return size
