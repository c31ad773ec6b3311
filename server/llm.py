"""The engine in this process: prompts in, answers out, without HTTP.

    from vmmkv.server import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

The names are vLLM's. Prompts are batched, share their prefixes, and wait where there is no room for all, as in `vmmkv serve`.
"""

import asyncio
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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from vmmkv.server.structured_output.compiler import GrammarCompiler
from vmmkv.server.structured_output.schema import Grammar, GrammarRefused, of_structured_outputs
from vmmkv.server.tokenizer import Detokenizer, PromptError, TemplateVariable, Tokenizer, decode_all
from vmmkv.units import counted, format_bytes

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
Conversation: TypeAlias = Sequence[Mapping[str, str]]
"""Messages, each with a `role` and a `content`."""

MAX_PRIORITY: Final = 1 << 31
"""Priorities lie in [-MAX_PRIORITY, MAX_PRIORITY), over HTTP too."""
_SEED_MASK: Final = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""
_UNORDERED: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Iterables that are no list of prompts, of token ids or of anything else that is asked for."""


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
class RequestOutput:
    """A prompt and its answers. Times are seconds since `generate` was called."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """As many as `n`; of a beam search the best, the best first."""
    cached_tokens: int
    """Tokens of the prompt that its first answer found in the prefix cache."""
    first_token_s: float | None
    """When the first token of any of its answers was there; None without one."""
    finished_s: float
    """When the last of its answers had ended."""
    prompt_logprobs: list[float | None] | None = None
    """Of each token of the prompt; None for the first. None if they were not asked for; incomplete if the request failed."""
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    """For each of them the likeliest token ids at its place, the likeliest first, with their log-probabilities."""
    error: str | None = None
    """Why it failed, if it did; then `outputs` hold what there was."""


class LLM:
    """A model and its KV cache, for one caller at a time. Close it, or use it in a `with` block, to free its memory.

    The options are those of `vmmkv serve`, with the same defaults; `dtype` may be torch's own. `model` is a known name, a
    directory in transformers' format, or a hub name. A directory without a tokenizer takes token ids alone, and gives no text;
    one without weights needs `load_format="dummy"`. `seed` is that of dummy weights, and of the seeds of requests without one.

    On a CPU, OpenMP's threads spin as they wait and slow down the others: set OMP_WAIT_POLICY=PASSIVE before Python starts.

    Raises: TypeError for an unknown option, ValueError for one that cannot be; ModelUnavailable; UnsupportedModel (a
    ValueError) for an architecture that cannot be served; DriverUnavailable, OutOfPages.
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
        self._compiling: _Compiling | None = None
        self._messages: deque[FromEngine] = deque()
        """The engine's messages. They are read between steps, since reading may abort requests."""
        directory = resolve(config.model, weights=load_format != "dummy", tokenizer=False)
        self._tokenizer = Tokenizer.load(directory) if has_tokenizer(directory) else None
        vocabulary_size = _vocabulary_size(directory)
        console = Console(stderr=True)
        progress = LoadingProgress(console)

        def hear(message: FromEngine) -> None:
            if not isinstance(message, Loading):
                self._messages.append(message)
            elif console.is_terminal:
                progress.show(message)

        try:
            self._loaded = load(dataclasses.replace(config, model=str(directory)), hear)
        finally:
            progress.close(done=self._loaded is not None)
        self._settle()
        ready = self.ready
        self._limits = Limits(
            model=self._model,
            model_tokens=ready.max_tokens,
            pool_tokens=ready.pool_tokens,
            budget_bytes=ready.budget_bytes,
            max_sequences=ready.max_sequences,
            vocabulary_size=vocabulary_size,
        )
        log.info("%s: %s on %s, %s implementation", model, ready.dtype, ready.device, ready.implementation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_loaded", None) is not None:
            warnings.warn(f"an LLM of {self._model} was not closed: its memory may stay taken", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._loaded is None or self.snapshot is None:
            return f"<LLM of {self._model}, closed>"
        ready, now = self._loaded.ready, self.snapshot
        free_bytes = now.kv_budget_bytes - now.kv_used_bytes - now.kv_cached_bytes - now.kv_pending_reclaim_bytes
        return (
            f"<LLM of {self._model} on {ready.device}: {now.running} of {counted(ready.max_sequences, 'sequence')} running, "
            f"{format_bytes(free_bytes)} of {format_bytes(now.kv_budget_bytes)} free>"
        )

    @property
    def ready(self) -> Ready:
        """Its limits, and its device. Raises: Closed."""
        return self._open().ready

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priorities: Iterable[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs come in the order of the prompts, in a list even for a single prompt.

        `prompts` are texts or token ids (a list, or an array or tensor of one dimension), several or one. `sampling_params`
        are for all, or one for each; `SamplingParams()` by default. Of `priorities`, one for each prompt, lower ones run first.
        `progress` shows a bar on stderr; None does so on a terminal.

        A request that fails on its way leaves the others alone, and says so in its output's `error`. Ctrl-C ends all of
        them after the step that runs; the LLM can be used again.
        Raises: ValueError, before anything runs, for a prompt or parameter that cannot be served, naming the prompt;
        KeyboardInterrupt; Closed; RuntimeError if another thread generates.
        """
        return self._generate(_each_prompt(prompts), sampling_params, priorities, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, TemplateVariable] | None = None,
        priorities: Iterable[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn in a conversation, or in each of several, by the model's chat template.

        Each message has a `role` and a `content`. Else as `generate`; the text is that of the turn alone.
        Raises: as `generate`; ValueError for a conversation that the template refuses.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                if self._tokenizer is None:
                    raise PromptError(f"{self._model} has no tokenizer: give token ids to generate")
                prompts.append(self._tokenizer.encode_chat(conversation, chat_template_kwargs))  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return self._generate(prompts, sampling_params, priorities, progress, continues=False)

    def close(self) -> None:
        """Give back all memory. Idempotent. Raises: RuntimeError if another thread generates."""
        loaded = self._loaded
        if loaded is None:
            return
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this LLM is generating in another thread: close it when that has ended")
        try:
            device = loaded.engine.cache.device
            if self._compiling is not None:
                self._compiling.close()
                self._compiling = None
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
            raise Closed(f"this LLM of {self._model} is closed")
        return self._loaded

    def _generate(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        priorities: Iterable[int] | None,
        progress: bool | None,
        *,
        continues: bool = True,
    ) -> list[RequestOutput]:
        self._open()
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this LLM is generating in another thread: give both lists of prompts to one call")
        try:
            if self._broken is not None:
                raise RuntimeError(f"this LLM is broken and must be closed: {self._broken}")
            tokenizer = None if self._tokenizer is None else self._tokenizer.rust
            running = self._checked(prompts, sampling_params, priorities, continues=continues)
            batch = _Batch(str(next(self._numbers)), running, tokenizer)
            self._run(batch, shown=Console(stderr=True).is_terminal if progress is None else progress)
            return batch.outputs()
        finally:
            self._working.release()

    def _run(self, batch: "_Batch", *, shown: bool) -> None:
        engine = self._open().engine
        began_s = time.perf_counter()
        with DeferredInterrupt() as interrupt, GenerationProgress(len(batch.requests), shown=shown) as bar:
            try:
                for request in batch.requests:
                    engine.receive(request)
                self._read(batch, began_s)
                while batch.unfinished:
                    interrupt.check()
                    assert engine.has_work, f"the engine has lost {len(batch.unfinished)} requests"
                    engine.step()
                    self._read(batch, began_s)
                    bar.update(len(batch.requests) - len(batch.unfinished), batch.num_prompt_tokens, batch.num_new_tokens)
            except BaseException as error:
                self._abandon(batch, error)
                raise
            bar.update(len(batch.requests), batch.num_prompt_tokens, batch.num_new_tokens, at_end=True)
            self._settle()

    def _read(self, batch: "_Batch", began_s: float) -> None:
        """Take the engine's messages, and abort requests that a stop string has ended."""
        engine, now_s = self._open().engine, time.perf_counter() - began_s
        while self._messages:
            match self._messages.popleft():
                case Outputs(outputs=outputs):
                    for request_id in batch.take(outputs, now_s):
                        engine.receive(Abort(request_id=request_id))
                case PromptLogprobs() as message:
                    batch.take_prompt(message)
                case Beams() as message:
                    batch.take_beams(message, now_s)
                case Failed(request_id=request_id, message=message):
                    batch.fail(request_id, message, now_s)
                case Snapshot() as snapshot:
                    self.snapshot = snapshot

    def _abandon(self, batch: "_Batch", error: BaseException) -> None:
        """End what runs, after an error or Ctrl-C. If that fails too, the engine is of no use any more."""
        engine = self._open().engine
        try:
            for request_id in batch.unfinished:
                engine.receive(Abort(request_id=request_id))
            while engine.has_work:
                engine.step()
            self._settle()
        except BaseException as failure:
            self._broken = f"{type(error).__name__}: {error}; then {type(failure).__name__}: {failure}"
            if not isinstance(failure, Exception):
                raise
            log.exception("the engine could not be brought to rest")

    def _settle(self) -> None:
        """With nothing left to do: finish pending unmaps, and read the last snapshot."""
        self._open().engine.settle()
        while self._messages:
            if isinstance(message := self._messages.popleft(), Snapshot):
                self.snapshot = message

    def _checked(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        priorities: Iterable[int] | None,
        *,
        continues: bool,
    ) -> list["_Running"]:
        """Each prompt, ready to run. Raises: ValueError naming the prompt."""
        of_each = zip(
            prompts, _each_params(sampling_params, len(prompts)), _each_priority(priorities, len(prompts)), strict=True
        )
        made = []
        for index, (prompt, params, priority) in enumerate(of_each):
            try:
                made.append(self._running(prompt, params, priority, continues=continues))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return made

    def _running(self, prompt: Prompt, params: SamplingParams, priority: int, *, continues: bool) -> "_Running":
        if not isinstance(prompt, str):
            token_ids = _token_ids_of(prompt)
        elif self._tokenizer is None:
            raise PromptError(f"{self._model} has no tokenizer: give token ids")
        else:
            token_ids = self._tokenizer.encode(prompt)
        if self._tokenizer is None and (params.stop or params.structured_outputs):
            name = "stop strings: use stop_token_ids" if params.stop else "structured outputs"
            raise ValueError(f"{self._model} has no tokenizer, and so no {name}")
        self._limits.check(token_ids, params, follows_grammar=params.structured_outputs is not None)
        return _Running(
            token_ids=token_ids,
            params=params,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            continues=continues,
            grammar=b"" if params.structured_outputs is None else self._compiled(params.structured_outputs),
        )

    def _compiled(self, structured_outputs: Mapping[str, Any]) -> bytes:
        """The grammar as the engine takes it. Raises: ValueError."""
        try:
            grammar = of_structured_outputs(structured_outputs)
            if self._compiling is None:
                self._compiling = _Compiling(self.ready)
            return self._compiling.compile(grammar)
        except GrammarRefused as error:
            raise ValueError(f"structured_outputs: {error}") from error


class _Compiling:
    """The grammar compiler, in an event loop of its own: the caller may be in one."""

    def __init__(self, ready: Ready) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grammars", daemon=True)
        self._thread.start()
        self._compiler = GrammarCompiler(Path(ready.model), ready.vocabulary_size, ready.end_tokens)

    def compile(self, grammar: Grammar) -> bytes:
        """Waits until it is done. Raises: GrammarRefused, CompilerUnavailable."""
        return asyncio.run_coroutine_threadsafe(self._compiler.compile(grammar), self._loop).result()

    def close(self) -> None:
        """End the worker, the loop and the thread."""
        asyncio.run_coroutine_threadsafe(self._compiler.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that grows."""

    prompt: "_Running"
    detokenizer: Detokenizer | None
    """Only where a stop string can end it; all other text is made at the end, at once."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def feed(self, output: Output) -> None:
        """Further tokens, and the end if it has one. A stop string is an end too, and cuts what follows it."""
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
class _Running:
    """A prompt that runs, and its answers."""

    token_ids: list[int]
    params: SamplingParams
    seed: int
    """Of its first answer; the others have the next ones."""
    priority: int
    continues: bool
    """Whether the text of its answers goes on in its own."""
    grammar: bytes
    answers: list[_Answer] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[Sequence[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float = 0.0
    error: str | None = None

    @property
    def context(self) -> list[int]:
        """The tokens that the text of its answers continues."""
        return self.token_ids if self.continues else []

    def request(self, request_id: str, index: int) -> Generate:
        """The request for its answer of that index, or for its beam search."""
        params = dataclasses.replace(
            self.params,
            seed=(self.seed + index) & _SEED_MASK,
            prompt_logprobs=self.params.prompt_logprobs if index == 0 or not self.params.max_tokens else None,
            structured_outputs=None,
        )
        return Generate(
            request_id=request_id, prompt=self.token_ids, params=params, priority=self.priority, grammar=self.grammar
        )

    def output(self) -> RequestOutput:
        """As it is given back."""
        wanted = self.params.prompt_logprobs
        tops = [None if each is None else dict(each) for each in self.top_logprobs] if wanted else None
        return RequestOutput(
            prompt_token_ids=self.token_ids,
            outputs=[answer.output() for answer in self.answers],
            cached_tokens=self.cached_tokens,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            prompt_logprobs=None if wanted is None else self.logprobs,
            prompt_top_logprobs=tops,
            error=self.error,
        )


class _Batch:
    """The prompts of one call. Give it the engine's messages; `unfinished` is empty when all have ended.

    `name` is unique within the LLM.
    """

    def __init__(self, name: str, prompts: Sequence[_Running], tokenizer: RustTokenizer | None) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self.requests: list[Generate] = []
        self.unfinished: dict[str, _Answer] = {}
        """By request id; of a beam search its best answer."""
        self.num_new_tokens = 0
        self.num_prompt_tokens = 0
        """Of the prompts of answers that have begun, without those found in the prefix cache."""
        for number, prompt in enumerate(prompts):
            prompt.answers = [_Answer(prompt, self._detokenizer(prompt)) for _ in range(prompt.params.n)]
            for index, answer in enumerate(prompt.answers[:1] if prompt.params.is_search else prompt.answers):
                request = prompt.request(f"{name}-{number}-{index}", index)
                self.requests.append(request)
                self.unfinished[request.request_id] = answer

    def take(self, outputs: Sequence[Output], now_s: float) -> Iterator[str]:
        """The outputs of a step, `now_s` seconds after the start. Names requests to abort, which a stop string ended."""
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
            if prompt.first_token_s is None and prompt.params.max_tokens:
                prompt.first_token_s = now_s
            answer.feed(output)
            if answer.finish_reason is not None:
                self._end(output.request_id, now_s)
                if output.finish_reason is None:
                    yield output.request_id

    def take_prompt(self, message: PromptLogprobs) -> None:
        """Log-probabilities of a prompt, before its first answer."""
        answer = self.unfinished.get(message.request_id)
        if answer is not None and answer is answer.prompt.answers[0]:
            logprobs, likeliest = unpacked(message)
            answer.prompt.logprobs += logprobs
            answer.prompt.top_logprobs += likeliest

    def take_beams(self, message: Beams, now_s: float) -> None:
        """The whole answer to a beam search."""
        if (answer := self.unfinished.get(message.request_id)) is None:
            return
        prompt = answer.prompt
        prompt.cached_tokens, prompt.first_token_s = message.cached_tokens, now_s
        del prompt.answers[len(message.beams) :]
        for one, beam in zip(prompt.answers, message.beams, strict=False):
            one.feed(Output(request_id=message.request_id, token_ids=tuple(beam.token_ids), finish_reason=beam.finish_reason))
            self.num_new_tokens += len(beam.token_ids)
        self._end(message.request_id, now_s)

    def fail(self, request_id: str, message: str, now_s: float) -> None:
        """The engine gave up on one request."""
        if (answer := self.unfinished.get(request_id)) is not None:
            answer.prompt.error = message
            self._end(request_id, now_s)

    def outputs(self) -> list[RequestOutput]:
        """All of them, in the order of the prompts."""
        if self._tokenizer is not None:  # the text of answers without a stop string
            unread = [answer for prompt in self._prompts for answer in prompt.answers if answer.detokenizer is None]
            texts = decode_all(self._tokenizer, [(answer.prompt.context, answer.token_ids) for answer in unread])
            for answer, text in zip(unread, texts, strict=True):
                answer.text = text
        return [prompt.output() for prompt in self._prompts]

    def _end(self, request_id: str, now_s: float) -> None:
        prompt = self.unfinished.pop(request_id).prompt
        prompt.finished_s = max(prompt.finished_s, now_s)

    def _detokenizer(self, prompt: _Running) -> Detokenizer | None:
        if not prompt.params.stop:
            return None
        assert self._tokenizer is not None, "a stop string needs a tokenizer"
        params = prompt.params
        return Detokenizer(self._tokenizer, stops=params.stop, context=prompt.context, min_tokens=params.min_tokens)


# Arguments in their many forms.


def _each_prompt(prompts: Any) -> list[Any]:
    """A list of prompts: a text is one prompt, and so is a list that begins with a number. Raises: ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = list(prompts) if prompts.ndim == 2 else prompts.tolist()
    listed = _listed("prompts", prompts, "a text, token ids, or a list of those")
    return [listed] if listed and isinstance(listed[0], Number) else listed


def _each_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Those of each of `count` prompts. Raises: ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * count
    wanted = "SamplingParams, or a list with one for each prompt"
    listed = _counted("params", _listed("params", params, wanted), count)
    for index, each in enumerate(listed):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"prompt {index}: its params are {shortened(each)}; wanted SamplingParams")
    return listed


def _each_priority(priorities: Iterable[int] | None, count: int) -> list[int]:
    """That of each of `count` prompts. Raises: ValueError."""
    if priorities is None:
        return [0] * count
    if isinstance(priorities, np.ndarray | torch.Tensor):
        priorities = priorities.tolist()
    listed = _counted("priorities", _listed("priorities", priorities, "a list with a number for each prompt"), count)
    for index, each in enumerate(listed):
        if not _is_integer(each) or not -MAX_PRIORITY <= each < MAX_PRIORITY:
            raise ValueError(f"prompt {index}: its priority is {shortened(each)}; wanted an integer from -2**31 to 2**31 - 1")
    return list(map(int, listed))


def _token_ids_of(prompt: Any) -> list[int]:
    """The token ids of a prompt that is no text, known to the model or not. Raises: PromptError."""
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
        if not _is_integer(each):
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


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _unknown_option(name: str) -> str:
    parameters = inspect.signature(LLM).parameters.values()
    return unknown_option("LLM", name, [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD])


def _vocabulary_size(directory: Path) -> int:
    """Token ids of the model; its tokenizer may have fewer. Raises: OSError, ValueError."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config().vocab_size
    return size
