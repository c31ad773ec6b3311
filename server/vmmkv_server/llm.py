"""The engine in this process: prompts in, answers out, without HTTP.

    from vmmkv_server import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Names are vLLM's. Prompts are batched, share prefixes, and wait for room, as in `vmmkv serve`.
"""

import asyncio
import dataclasses
import gc
import itertools
import logging
import os
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Number
from os import PathLike
from pathlib import Path
from reprlib import repr as shortened
from traceback import clear_frames
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from rich.console import Console

from vmmkv.errors import Closed, ForkedProcess
from vmmkv.lifetime import Closing
from vmmkv.units import counted, format_bytes
from vmmkv_server.chats import AnswerReader, ChatPrompt
from vmmkv_server.config import DEFAULT_MODEL, EngineConfig
from vmmkv_server.console import DeferredInterrupt, GenerationProgress, LoadingProgress
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.loading import Loaded, current, load
from vmmkv_server.models import has_tokenizer, resolve
from vmmkv_server.protocol import (
    Abort,
    Beams,
    Compacted,
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
)
from vmmkv_server.sampling_params import SEED_MASK, Interval, SamplingParams, unknown_option
from vmmkv_server.structured_output.compiler import GrammarCompiler
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused, of_structured_outputs
from vmmkv_server.tokenizer import Detokenizer, PromptError, TemplateVariable, Tokenizer, decode_all
from vmmkv_server.tools.calls import Call, CallArguments, CallBegun, Content, Reasoning, Toolset
from vmmkv_server.tools.chat_format import ToolChatFormat

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a `role` and a `content`; calls and their results in OpenAI's JSON."""

_PRIORITY: Final = Interval(int, -(1 << 31), 1 << 31, "an integer from -2**31 to 2**31 - 1")
_IN_VLLM: Final = {
    "enable_prefix_caching": "did you mean prefix_cache?",
    "gpu_memory_utilization": "kv_budget_bytes is the memory of the KV cache, by default what is free",
    "max_model_len": "did you mean max_tokens?",
}
"""Options of vLLM's LLM, and what to use instead."""
_STORE_S: Final = 30.0
"""Time for stores to tiers when an LLM is closed."""
_NO_LISTS: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Iterables that are no list of prompts, token ids, parameters or priorities."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer to one prompt."""

    text: str = ""
    """Text up to the stop string, if one ended it. Empty if the model's directory has no tokenizer. In chats it is that beside
    `reasoning` and `tool_calls`."""
    reasoning: str | None = None
    """Text that the model wrote before its answer, in chats with models that do."""
    tool_calls: list[Call] = field(default_factory=list)
    """Calls of a chat's tools, in order."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens without the end token, but with those of a stop string."""
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    """Cause of the end, `tool_calls` for an answer with calls that are whole; None if the request failed before it."""
    logprobs: list[float] | None = None
    """Log-probability of each token under the model's own distribution; None unless asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """Likeliest token ids at each place, the likeliest first, with their log-probabilities; None unless asked for."""
    kept_rows: int | None = None
    """Rows of the KV cache that its last compaction by a `kv_policy` left; None without one."""
    dropped_rows: int = 0
    """Rows that its compactions dropped."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers. Times are seconds since `generate` was called."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` answers; those of a beam search are its best, the best first."""
    cached_tokens: int = 0
    """Prompt tokens that the first answer found in the prefix cache."""
    cached_tokens_details: dict[str, int] = field(default_factory=dict)
    """`cached_tokens` by where they were: `device`, or the name of a tier."""
    first_token_s: float | None = None
    """Time of the first token of any answer; None without one."""
    finished_s: float = 0.0
    """End of the last answer."""
    prompt_logprobs: list[float | None] | None = None
    """Log-probability of each prompt token, None for the first. None unless asked for; incomplete if the request failed."""
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    """Likeliest token ids at each place of the prompt, with their log-probabilities; None as in `prompt_logprobs`."""
    error: str | None = None
    """Reason of a request's failure, if it failed; `outputs` hold the tokens so far."""


class EngineOptions(TypedDict, total=False):
    """The options of LLM: those of EngineConfig but the model, `kv_policy`, KV events and logs, which belong to a server."""

    device: str
    dtype: str | torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int | None
    tensor_parallel_size: int
    kv_budget_bytes: int | None
    kv_cache_dtype: str
    kv_holder: str | PathLike[str] | None
    kv_lender: str | PathLike[str] | None
    max_tokens: int | None
    prefix_cache: bool
    kv_host_budget_bytes: int | None
    kv_disk: str | PathLike[str] | None
    kv_disk_budget_bytes: int | None
    kv_store: str | None
    model_impl: str
    load_format: str
    tool_call_parser: str
    reasoning_parser: str
    seed: int


class LLM(Closing):
    """A model and its KV cache, for one caller at a time. Close it, or use it in a `with` block, to free its memory.

    The options are those of `vmmkv serve`, with the same defaults. Sizes are in bytes; `max_tokens` is the most tokens of a
    prompt and its answer together. `model` is `smollm2-135m`, a directory in transformers' format, or a hub name. `dtype` may
    be a torch.dtype. Without a tokenizer in the directory, prompts are token ids and answers have no text; without weights,
    `load_format="dummy"` is needed. `seed` is for dummy weights, and for requests without a seed.

    On a CPU, set OMP_WAIT_POLICY=PASSIVE before Python starts, else idle OpenMP threads spin and slow down the others.
    Python's full garbage collections walk the prefix tree: 0.3 s for 50,000 nodes. `gc.freeze()` between calls avoids that, but
    also keeps garbage cycles that your process has at that time.

    Raises: TypeError for an unknown option, ValueError for a wrong one; ModelUnavailable; UnsupportedModel (a ValueError);
    DriverUnavailable, OutOfPages.
    """

    def __init__(
        self,
        model: str | PathLike[str] = DEFAULT_MODEL,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._loaded: Loaded | None = None
        config = _config_of(model, options)
        self.snapshot: Snapshot | None = None
        """The statistics of the engine's parts, at the end of the last `generate` or later."""
        self._model = config.model
        self._random = random.Random(config.seed)
        self._numbers = itertools.count()
        self._working = threading.Lock()
        self._broken: Exception | None = None
        self._grammars: _Grammars | None = None
        self._messages: deque[FromEngine] = deque()
        """Messages from the engine. They are read between steps, since reading may abort requests."""
        _refuse_forked()
        directory = resolve(config.model, weights=config.load_format != "dummy", tokenizer=False)
        self._tokenizer = Tokenizer.load(directory) if has_tokenizer(directory) else None
        self._chat_format = None if self._tokenizer is None else ToolChatFormat.of(self._tokenizer, config)
        self._load(dataclasses.replace(config, model=str(directory)))
        ready = self.ready
        self._limits = dataclasses.replace(ready.limits, model=self._model)
        log.info(
            "%s: %s on %s, KV cache in %s, %s implementation",
            model, ready.dtype, ready.device, ready.kv_cache_dtype, ready.implementation,
        )  # fmt: skip

    def _load(self, config: EngineConfig) -> None:
        global _loading_pid
        _loading_pid = os.getpid()
        console = Console(stderr=True)
        progress = LoadingProgress(console)

        def hear(message: FromEngine) -> None:
            if isinstance(message, Snapshot):
                self.snapshot = message
            elif not isinstance(message, Loading):
                self._messages.append(message)
            elif console.is_terminal:
                progress.show(message)
            else:
                log.info("%s: %s", self._model, message.stage)

        try:
            self._loaded = load(config, hear)
            self._settle()
        except BaseException as error:
            _clear_frames(error)
            self.close()
            _free_garbage()
            raise
        finally:
            progress.close(done=self._loaded is not None)

    def __del__(self) -> None:
        if getattr(self, "_loaded", None) is not None:
            warnings.warn(f"an LLM of {self._model} was not closed: its memory may stay taken", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._loaded is None or self.snapshot is None:
            return f"<LLM of {self._model}, closed>"
        if self._broken is not None:
            return f"<LLM of {self._model}, to be closed: {self._broken}>"
        ready, scheduler, memory = self._loaded.ready, self.snapshot.scheduler, self.snapshot.memory
        most = counted(ready.limits.max_sequences, "sequence")
        taken_bytes = memory.kv_used_bytes + memory.kv_cached_bytes + memory.kv_pending_reclaim_bytes
        return (
            f"<LLM of {self._model} on {ready.device}: {scheduler.requests_running} of {most} running, "
            f"{format_bytes(memory.kv_budget_bytes - taken_bytes)} of {format_bytes(memory.kv_budget_bytes)} free>"
        )

    @property
    def ready(self) -> Ready:
        """Limits and device. Raises: Closed."""
        return self.loaded.ready

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priorities: Iterable[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Returns one output for each, in order.

        `prompts` is one prompt or several; a prompt is a text or token ids (a list, or an array or tensor of one dimension).
        `sampling_params` is one for all, or one for each; `SamplingParams()` by default. `priorities` has an integer for each
        prompt; lower ones run first. `progress` shows a bar on stderr; by default on a terminal.

        If a request fails, its output's `error` says why; the others go on. Ctrl-C ends all after the running step, and
        the LLM can be used again. So do handlers of SIGTERM, SIGHUP and SIGALRM that raise. A second Ctrl-C does not wait for
        the step: then the LLM can only be closed.

        Raises: ValueError, before anything runs, naming the prompt that cannot be served; KeyboardInterrupt; Closed;
        RuntimeError if another thread generates; EngineDied if the device or another rank is lost, or after a second Ctrl-C.
        """
        return self._generate(_each_prompt(prompts), self._encoded, sampling_params, priorities, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, TemplateVariable] | None = None,
        priorities: Iterable[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn in one or several conversations, by the model's chat template; else as `generate`.

        A conversation is a list of messages, each with a `role` and a `content`, both texts. `tools`, `tool_choice` and
        `parallel_tool_calls` are as in `/v1/chat/completions`: outputs then have `tool_calls`.
        Raises: as `generate`; ValueError for a malformed message, for a conversation that the template refuses, and for tools
        or a choice that cannot be served.
        """
        toolset = Toolset.of(tools, tool_choice, is_parallel=parallel_tool_calls)

        def encoded(conversation: Any, params: SamplingParams) -> ChatPrompt:
            if self._chat_format is None:
                raise PromptError(f"{self._model} has no tokenizer: give token ids to generate")
            has_grammar = params.structured_outputs is not None
            if has_grammar and toolset is not None:
                raise ValueError("an answer that may call tools has no structured_outputs: leave one of them out")
            return self._chat_format.encode(
                conversation, chat_template_kwargs, self._limits, params.max_tokens, has_grammar=has_grammar, toolset=toolset
            )

        listed = _listed("messages", messages, "a list of messages, or a list of such lists")
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        return self._generate(conversations, encoded, sampling_params, priorities, progress)

    def close(self) -> None:
        """Free all memory, after tiers have stored what they lack (for 30 s at most). Idempotent.

        In a child made by fork() it does nothing: the memory is the parent's.

        Raises: RuntimeError if another thread generates.
        """
        loaded = self._loaded
        if loaded is None or _loading_pid != os.getpid():
            return
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this LLM is generating in another thread: close it when that has ended")
        try:
            if self._grammars is not None:
                self._grammars.close()
                self._grammars = None
            with current(loaded.memory.device):
                loaded.engine.store_all(_STORE_S)
                loaded.close()
            self._loaded = None  # last: a close that failed can be called again
        finally:
            self._working.release()
            del loaded
            _free_garbage()

    @property
    def loaded(self) -> Loaded:
        """The engine, its memory and ranks, for tools that look inside: other versions have others. Raises: Closed."""
        if self._loaded is None:
            raise Closed(f"this LLM of {self._model} is closed")
        _check_process(self._loaded)
        return self._loaded

    def _generate(
        self,
        prompts: Sequence[Any],
        encoded: Callable[[Any, SamplingParams], list[int] | ChatPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        priorities: Iterable[int] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        _ = self.loaded  # else it is closed
        if not self._working.acquire(blocking=False):
            raise RuntimeError("this LLM is generating in another thread: give both lists of prompts to one call")
        try:
            if self._broken is not None:
                raise self._broken.with_traceback(None)
            if sampling_params is None or isinstance(sampling_params, SamplingParams):
                all_params = [sampling_params or SamplingParams()] * len(prompts)
            else:
                wanted = "SamplingParams, or a list with one for each prompt"
                all_params = _listed("sampling_params", sampling_params, wanted, len(prompts))
            all_priorities = [0] * len(prompts)
            if priorities is not None:
                all_priorities = _listed("priorities", priorities, "a list with a number for each prompt", len(prompts))
            batch, name = _Batch(), next(self._numbers)
            state = self._random.getstate()
            for index, (prompt, params, priority) in enumerate(zip(prompts, all_params, all_priorities, strict=True)):
                try:
                    if not isinstance(params, SamplingParams):
                        raise ValueError(f"its sampling_params are {shortened(params)}; wanted SamplingParams")
                    checked = int(_PRIORITY.checked("its priority", priority))
                    batch.add(self._answers(f"{name}-{index}", encoded(prompt, params), params, checked))
                except ValueError as error:
                    self._random.setstate(state)  # a refused call moves no seed
                    raise ValueError(f"prompt {index}: {error}") from error
            self._run(batch, shown=Console(stderr=True).is_terminal if progress is None else progress)
            if self._tokenizer is not None:
                unread = [answer for answer in batch.answers if answer.detokenizer is None]
                texts = decode_all(self._tokenizer.rust, [(answer.context, answer.output.token_ids) for answer in unread])
                for answer, text in zip(unread, texts, strict=True):
                    answer.output.text = text
            for answer in batch.answers:
                if answer.reader is not None:
                    _read_parts(answer.output, answer.reader)
            return batch.results
        finally:
            self._working.release()

    def _encoded(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a text or of token ids. Raises: PromptError."""
        if not isinstance(prompt, str):
            return _token_ids_of(prompt)
        if self._tokenizer is None:
            raise PromptError(f"{self._model} has no tokenizer: give token ids")
        return self._tokenizer.encode(prompt, self._limits, params.max_tokens)

    def _answers(
        self, name: str, given: list[int] | ChatPrompt, params: SamplingParams, priority: int
    ) -> "list[GrowingAnswer]":
        """The answers of a prompt, still empty. Raises: ValueError if it cannot be served."""
        chat = given if isinstance(given, ChatPrompt) else None
        prompt = given.token_ids if isinstance(given, ChatPrompt) else given
        if self._tokenizer is None and (params.stop or params.structured_outputs):
            feature = "stop strings: use stop_token_ids" if params.stop else "structured outputs"
            raise ValueError(f"{self._model} has no tokenizer, and so no {feature}")
        wanted = self._grammar(params, chat)
        self._limits.check(prompt, params, follows_grammar=wanted is not None)
        grammar = b""
        if wanted is not None:
            if self._grammars is None:
                self._grammars = _Grammars(self.ready)
            try:
                grammar = self._grammars.compile(wanted)
            except GrammarRefused as error:
                if chat is None or chat.needs_grammar:
                    raise ValueError(f"{_grammar_param(params)}: {error}") from error
                log.info("calls are read without a grammar: %s", error)
        scores, prompt_scores = params.logprobs, params.prompt_logprobs
        result = RequestOutput(
            prompt_token_ids=prompt,
            outputs=[
                CompletionOutput(logprobs=None if scores is None else [], top_logprobs=[] if scores else None)
                for _ in range(params.n)
            ],
            prompt_logprobs=None if prompt_scores is None else [None],
            prompt_top_logprobs=[None] if prompt_scores else None,
        )
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        context = prompt if chat is None else []
        kept = () if chat is None else chat.kept
        answers: list[GrowingAnswer] = []
        for index, output in enumerate(result.outputs):
            own_params = dataclasses.replace(
                params,
                seed=(seed + index) & SEED_MASK,
                prompt_logprobs=prompt_scores if index == 0 or not params.max_tokens else None,
                structured_outputs=None,
            )
            request = Generate(
                request_id=f"{name}-{index}",
                prompt=prompt,
                params=own_params,
                priority=priority,
                grammar=grammar,
                gate=chat.gate if chat is not None and grammar else None,
            )
            detokenizer = None
            if params.stop or kept:
                assert self._tokenizer is not None, "a stop string needs a tokenizer"
                detokenizer = self._tokenizer.detokenizer(params.stop, context, min_tokens=params.min_tokens, kept=kept)
            reader = None if chat is None else chat.reader()
            answers.append(GrowingAnswer(request, result, output, context, detokenizer, reader))
        return answers

    def _grammar(self, params: SamplingParams, chat: ChatPrompt | None) -> Grammar | None:
        """The grammar that answers follow. Raises: ValueError."""
        try:
            if params.structured_outputs is None:
                return None if chat is None else chat.grammar()
            return of_structured_outputs(params.structured_outputs)
        except GrammarRefused as error:
            raise ValueError(f"{error.param or _grammar_param(params)}: {error}") from error

    def _run(self, batch: "_Batch", *, shown: bool) -> None:
        loaded = self.loaded
        engine = loaded.engine
        began_s, num_requests = time.perf_counter(), len(batch.unfinished)
        with (
            current(loaded.memory.device),
            DeferredInterrupt() as interrupt,
            GenerationProgress(num_requests, shown=shown) as bar,
        ):
            try:
                for answers in batch.unfinished.values():
                    engine.receive(answers[0].request)
                self._read(batch, began_s)
                while batch.unfinished:
                    interrupt.check()
                    assert engine.has_work, f"the engine has lost {len(batch.unfinished)} requests"
                    engine.step()
                    self._read(batch, began_s)
                    bar.update(num_requests - len(batch.unfinished), batch.num_prompt_tokens, batch.num_new_tokens)
            except BaseException as error:
                self._abandon(batch, error)
                raise
            bar.update(num_requests, batch.num_prompt_tokens, batch.num_new_tokens, at_end=True)
            self._settle()

    def _read(self, batch: "_Batch", began_s: float) -> None:
        """Take the engine's messages, and abort requests that a stop string has ended."""
        engine, now_s = self.loaded.engine, time.perf_counter() - began_s
        while self._messages:
            for request_id in batch.take(self._messages.popleft(), now_s):
                engine.receive(Abort(request_id=request_id))

    def _abandon(self, batch: "_Batch", error: BaseException) -> None:
        """Abort unfinished requests after an error or Ctrl-C. If that fails too, the LLM is broken."""
        engine = self.loaded.engine
        if engine.is_interrupted:
            error = EngineDied("this LLM must be closed: it was interrupted within a step, as by a second Ctrl-C")
        if isinstance(error, EngineDied):
            self._broken = type(error)(*error.args)  # without the frames
            return
        try:
            for request_id in batch.unfinished:
                engine.receive(Abort(request_id=request_id))
            while engine.has_work:
                engine.step()
            self._settle()
        except BaseException as failure:
            both = f"{type(error).__name__}: {error}; then {type(failure).__name__}: {failure}"
            self._broken = RuntimeError(f"this LLM is broken and must be closed: {both}")
            if not isinstance(failure, Exception):
                raise
            log.exception("the engine could not be brought to rest")

    def _settle(self) -> None:
        """Finish pending unmaps, and drop the engine's messages: no request runs."""
        loaded = self.loaded
        with current(loaded.memory.device):
            loaded.engine.settle()
        self._messages.clear()


def _config_of(model: str | PathLike[str], options: EngineOptions) -> EngineConfig:
    """Paths and torch's dtypes as texts. Raises: TypeError for an unknown option, ValueError for a wrong one."""
    given: dict[str, Any] = {"model": model, **options}
    known = ["model", *EngineOptions.__annotations__]
    for name, value in given.items():
        if name not in known:
            raise TypeError(unknown_option("LLM", name, known, _IN_VLLM))
        if isinstance(value, PathLike):
            given[name] = str(value)
        elif isinstance(value, torch.dtype):
            given[name] = str(value).removeprefix("torch.")
    return EngineConfig(**given)


_loading_pid: int | None = None
"""The last process that has loaded an LLM: this one, or one that it was forked from."""


def _refuse_forked() -> None:
    """Raises: ForkedProcess in a child of a process that has loaded one: torch waits there for threads which the parent has."""
    if _loading_pid not in (None, os.getpid()):
        raise ForkedProcess(
            f"this process was made by fork() of process {_loading_pid}, which has used an LLM: torch would wait here for ever "
            "for threads that only its parent has; start the child with spawn",
            call="LLM",
            code="EPERM",
        )


def _check_process(loaded: Loaded) -> None:
    """Raises: ForkedProcess in a child, which has none of the threads that some calls would wait for."""
    assert loaded.memory.cache is not None, "it is vmmkv's"
    loaded.memory.cache.pool.lock.check_process()


def _grammar_param(params: SamplingParams) -> str:
    """The parameter that a grammar is of, for messages."""
    return "tools" if params.structured_outputs is None else "structured_outputs"


class _Grammars:
    """The grammar compiler in an event loop of its own: the caller may be in one."""

    def __init__(self, ready: Ready) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grammars", daemon=True)
        self._thread.start()
        self._compiler = GrammarCompiler(Path(ready.model), ready.limits.vocabulary_size, ready.end_tokens)

    def compile(self, grammar: Grammar) -> bytes:
        """The grammar for the engine. Raises: GrammarRefused, CompilerUnavailable."""
        return asyncio.run_coroutine_threadsafe(self._compiler.compile(grammar), self._loop).result()

    def close(self) -> None:
        """End the worker, the loop and the thread."""
        asyncio.run_coroutine_threadsafe(self._compiler.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(slots=True, eq=False)
class GrowingAnswer:
    """An answer that grows."""

    request: Generate
    result: RequestOutput
    output: CompletionOutput
    context: list[int]
    """The tokens that the answer's text continues."""
    detokenizer: Detokenizer | None
    """Detokenizer of an answer with stop strings or special tokens that are shown; None without: that text is decoded at the
    end, all at once."""
    reader: AnswerReader | None = None
    """Reader of a chat's answer that may have calls or reasoning."""
    has_begun: bool = False

    @property
    def is_first(self) -> bool:
        """Is the answer the first one to its prompt?"""
        return self.output is self.result.outputs[0]

    def feed(self, output: Output) -> None:
        """Add tokens, and the end if there is one. A stop string is an end too, and cuts what follows it."""
        own = self.output
        own.token_ids += output.token_ids
        own.finish_reason = output.finish_reason
        if own.logprobs is not None:
            own.logprobs += output.logprobs
        if own.top_logprobs is not None:
            own.top_logprobs += map(dict, output.top_logprobs)
        if self.detokenizer is not None:
            decode = self.detokenizer.feed if own.finish_reason is None else self.detokenizer.finish
            own.text += decode(output.token_ids)
            if self.detokenizer.stopped:
                del own.token_ids[self.detokenizer.num_tokens :]
                own.finish_reason = "stop"
        if own.finish_reason is not None:  # an end token has a log-probability, and is not in the answer
            for of_tokens in (own.logprobs, own.top_logprobs):
                if of_tokens is not None:
                    del of_tokens[len(own.token_ids) :]


def _read_parts(output: CompletionOutput, reader: AnswerReader) -> None:
    """Read the calls and the reasoning in the text of an answer, which is whole."""
    parts = [*reader.feed(output.text), *reader.finish()]
    output.text = "".join(part.text for part in parts if isinstance(part, Content))
    output.reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning)) or None
    for part in parts:
        if isinstance(part, CallBegun):
            output.tool_calls.append(Call(name=part.name))
        elif isinstance(part, CallArguments):
            output.tool_calls[part.index].arguments += part.text
    if reader.has_whole_calls and output.finish_reason == "stop":
        output.finish_reason = "tool_calls"


class _Batch:
    """The answers of one call, in the order of the prompts."""

    def __init__(self) -> None:
        self.answers: list[GrowingAnswer] = []
        self.results: list[RequestOutput] = []
        self.unfinished: dict[str, list[GrowingAnswer]] = {}
        """Answers by id of the engine's request: one answer, or all of a beam search."""
        self.num_new_tokens = 0
        self.num_prompt_tokens = 0
        """Prompt tokens computed for answers that have begun."""

    def add(self, answers: list[GrowingAnswer]) -> None:
        """Add the answers of one prompt."""
        self.answers += answers
        self.results.append(answers[0].result)
        is_search = answers[0].request.params.is_search
        for group in [answers] if is_search else ([answer] for answer in answers):
            self.unfinished[group[0].request.request_id] = group

    def take(self, message: FromEngine, now_s: float) -> list[str]:
        """Take a message, `now_s` seconds after the start. Returns the requests to abort, which a stop string ended."""
        if isinstance(message, Outputs):
            return [output.request_id for output in message.outputs if self._take_output(output, now_s)]
        if not isinstance(message, PromptLogprobs | Beams | Compacted | Failed) or message.request_id not in self.unfinished:
            return []
        answers = self.unfinished[message.request_id]
        result = answers[0].result
        if isinstance(message, PromptLogprobs):
            if answers[0].is_first and result.prompt_logprobs is not None:
                logprobs, likeliest = message.unpacked()
                result.prompt_logprobs += logprobs
                if result.prompt_top_logprobs is not None:
                    result.prompt_top_logprobs += map(dict, likeliest)
            return []
        if isinstance(message, Compacted):
            output = answers[0].output
            output.kept_rows, output.dropped_rows = message.kept_rows, message.dropped_rows
            return []
        if isinstance(message, Failed):
            result.error = message.message
        else:
            result.cached_tokens, result.cached_tokens_details = message.cached_tokens, dict(message.cached)
            result.first_token_s = now_s
            del result.outputs[len(message.beams) :]
            for answer, beam in zip(answers, message.beams, strict=False):
                tokens = tuple(beam.token_ids)
                answer.feed(Output(request_id=message.request_id, token_ids=tokens, finish_reason=beam.finish_reason))
                self.num_new_tokens += len(tokens)
        self._end(message.request_id, now_s)
        return []

    def _take_output(self, output: Output, now_s: float) -> bool:
        """Add an output. Returns whether a stop string ended the answer before the engine did."""
        if output.request_id not in self.unfinished:  # aborted before
            return False
        (answer,) = self.unfinished[output.request_id]
        result = answer.result
        self.num_new_tokens += len(output.token_ids)
        if not answer.has_begun:
            answer.has_begun = True
            self.num_prompt_tokens += len(result.prompt_token_ids) - output.cached_tokens
            if answer.is_first:
                result.cached_tokens, result.cached_tokens_details = output.cached_tokens, dict(output.cached)
        if result.first_token_s is None and answer.request.params.max_tokens:
            result.first_token_s = now_s
        answer.feed(output)
        if answer.output.finish_reason is None:
            return False
        self._end(output.request_id, now_s)
        return output.finish_reason is None

    def _end(self, request_id: str, now_s: float) -> None:
        result = self.unfinished.pop(request_id)[0].result
        result.finished_s = max(result.finished_s, now_s)


# Arguments in their many forms. All raise ValueError.


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error and its causes have, such as weights. Consoles keep the last error."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _free_garbage() -> None:
    """Free what is in cycles, such as a runner and its model, and their memory, which torch keeps."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _each_prompt(prompts: Any) -> list[Any]:
    """A list of prompts: a text is one prompt, and so is a list that begins with a number."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed("prompts", prompts, "a text, token ids, or a list of those")
    return [listed] if listed and isinstance(listed[0], Number) else listed


def _token_ids_of(prompt: Any) -> list[int]:
    """The token ids of a prompt that is no text; whether the model has them is not checked here."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        if prompt.ndim != 1:
            raise PromptError(f"its shape is {tuple(prompt.shape)}; wanted one dimension of token ids")
        ids = prompt.tolist()
    elif isinstance(prompt, Iterable) and not isinstance(prompt, _NO_LISTS):
        ids = list(prompt)
    else:
        raise PromptError(f"{shortened(prompt)} is neither a text nor a list of token ids")
    if set(map(type, ids)) <= {int}:  # the loop below would take longer than admission, for 100,000 ids
        return ids
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise PromptError(f"{shortened(each)} is not a token id: these are integers")
    return list(map(int, ids))


def _listed(name: str, value: Any, wanted: str, count: int | None = None) -> list[Any]:
    """A list, array or other iterable as a list, of `count` elements if that is given."""
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist()
    if isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={shortened(value)}: wanted {wanted}")
    listed = list(value)
    if count is not None and len(listed) != count:
        raise ValueError(f"{len(listed)} {name} for {count} prompts: give one for each")
    return listed
