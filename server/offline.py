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
from collections.abc import Collection, Iterable
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Never, Self

import torch
from rich.console import Console

from vmmkv.errors import Closed
from vmmkv.server.completion import Completion
from vmmkv.server.engine.loading import Loaded, load
from vmmkv.server.interrupt import DeferredInterrupt
from vmmkv.server.limits import Limits
from vmmkv.server.models import has_tokenizer, resolve
from vmmkv.server.offline_job import Job, Prompt
from vmmkv.server.offline_prompts import AnyPrompt, each_params, each_priority, each_prompt, token_ids_of
from vmmkv.server.progress import GenerationProgress, LoadingProgress
from vmmkv.server.protocol import Abort, Beams, Failed, FromEngine, Loading, Outputs, PromptLogprobs, Ready, Snapshot
from vmmkv.server.sampling import SamplingParams, unknown_option
from vmmkv.server.settings import DEFAULT_MODEL, ServeConfig
from vmmkv.server.tokenizer import PromptError, Tokenizer
from vmmkv.units import counted, format_bytes

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
