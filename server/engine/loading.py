"""From a configuration to a model on a device, the layout of its cache, and how much memory that may take."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from vmmkv import GIB, PAGE_BYTES, KVCache, KVLayout, Pool
from vmmkv.driver.host_memory import HostMemory
from vmmkv.errors import BudgetError, DriverError, DriverUnavailable, VmmkvError
from vmmkv.prefix import PrefixCache
from vmmkv.server.engine import decoder
from vmmkv.server.engine.core import EngineCore
from vmmkv.server.engine.decoder_model import DecoderModel
from vmmkv.server.engine.mixed_steps import Chunk
from vmmkv.server.engine.model import Model
from vmmkv.server.engine.runner import Runner
from vmmkv.server.engine.unmodified import UnmodifiedModel
from vmmkv.server.protocol import FromEngine, Generate, Loading, Ready
from vmmkv.server.settings import ServeConfig
from vmmkv.units import format_bytes

log = logging.getLogger(__name__)

STEP_TOKENS: Final = {"cpu": 512, "cuda": 8192}
"""Tokens that one step computes at most, if nobody says. On a CPU a longer one would keep the others waiting for seconds."""

LOOKAHEAD: Final = {"cpu": 0, "cuda": 2}
"""Steps under way while the next is planned. On a CPU a step is over when it is launched."""

PARKED_SLOTS: Final = 3
"""For sequences that have ended, for each that may run: a conversation goes on where its own was parked. Addresses are free."""

GPU_MARGIN_BYTES: Final = 1 * GIB
"""Left to the device for what other libraries take later: cuBLAS workspaces, fragmentation."""

HOST_SHARE: Final = 0.25
"""Of the memory that is available on a host, what a cache takes at most unless it is told."""

MAX_HOST_BYTES: Final = 4 * GIB
"""And however much there is."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready to work, and what the HTTP process must know of it."""

    engine: EngineCore
    ready: Ready


def load(config: ServeConfig, send: Callable[[FromEngine], None]) -> Loaded:
    """Load everything that `config` names; `config.model` is a directory. Sends Loading messages on the way.

    Raises: ValueError or OSError if the model is not one that can be served; DriverUnavailable; DriverError; OutOfPages.
    """
    stages = ("loading weights", "preparing the cache", "warming up")

    def at(stage: int) -> None:
        send(Loading(stage=stages[stage], done=stage, total=len(stages)))

    at(0)
    device = choose_device(config.device)
    if config.kv_budget_bytes is not None:
        check_budget(config.kv_budget_bytes, device)
    dtype = choose_dtype(config.dtype, device)
    source = ModelSource(config, device, dtype)
    at(1)
    layout = KVLayout.from_config(source.text_config, dtype)
    max_tokens = choose_max_tokens(config.max_tokens, source.text_config)
    step_tokens = config.max_num_batched_tokens or STEP_TOKENS[device.type]
    max_sequences = config.max_num_seqs
    most_bytes = layout.peak_pages(max_tokens, sliding=False) * max_sequences * PAGE_BYTES
    first_bytes = layout.peak_pages(min(step_tokens, max_tokens), sliding=False) * PAGE_BYTES
    pool = Pool(device, config.kv_budget_bytes or first_bytes)
    cache = open_cache(layout, pool, max_sequences * (1 + PARKED_SLOTS * config.prefix_cache), max_tokens)
    try:
        at(2)
        runner = Runner(source.over(cache), cache, max_rows=max_sequences, max_tokens=step_tokens)
        warm_up(runner, cache, min(step_tokens, max_tokens - 1, pool_tokens(layout, pool)))
        runner.capture()
        if config.kv_budget_bytes is None:
            pool.resize(max(first_bytes, min(default_budget_bytes(pool), most_bytes)))
        engine = EngineCore(
            cache,
            runner,
            prefix=PrefixCache(cache) if config.prefix_cache else None,
            max_sequences=max_sequences,
            eos_ids=source.end_tokens,
            step_tokens=step_tokens,
            lookahead=LOOKAHEAD[device.type],
            send=send,
        )
    except BaseException:
        with contextlib.suppress(VmmkvError):  # what was raised first is what matters
            cache.close()
            pool.close()
        raise
    ready = Ready(
        model=config.model,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=max_tokens,
        pool_tokens=pool_tokens(layout, pool),
        budget_bytes=pool.budget_bytes,
        max_sequences=max_sequences,
        implementation=runner.model.implementation,
    )
    return Loaded(engine, ready)


class ModelSource:
    """A model's weights on a device, before there is a cache for it to run over.

    It is the config-driven decoder where that knows the model, and transformers' own code otherwise, unless one is asked for.
    Raises: ValueError or OSError.
    """

    def __init__(self, config: ServeConfig, device: torch.device, dtype: torch.dtype) -> None:
        import transformers

        directory = Path(config.model)
        hf_config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        self.text_config = hf_config.get_text_config()
        self.end_tokens = end_tokens(directory, hf_config)
        self._decoder: decoder.Decoder | None = None
        self._transformers: Any = None
        is_random = config.load_format == "dummy"
        if config.model_impl != "transformers":
            try:
                ours = decoder.DecoderConfig.of(hf_config)
                weights = (
                    decoder.random(ours, device, dtype, config.seed)
                    if is_random
                    else decoder.load(directory, ours, device, dtype)
                )
            except decoder.Unsupported as error:
                if config.model_impl == "vmmkv":
                    raise ValueError(f"--model-impl vmmkv cannot run {config.model}: {error}; use auto") from error
                log.info("this model runs by transformers' own code: %s", error)
            else:
                self._decoder = decoder.Decoder(ours, weights)
                return
        transformers.utils.logging.disable_progress_bar()
        auto = transformers.AutoModelForCausalLM
        if is_random:
            torch.manual_seed(config.seed)
            model = auto.from_config(hf_config, dtype=dtype)
        else:
            model = auto.from_pretrained(directory, dtype=dtype, local_files_only=True)
        self._transformers = model.eval().to(device)

    def over(self, cache: KVCache) -> Model:
        """The model, with its keys and values in a cache."""
        if self._decoder is not None:
            return DecoderModel(self._decoder, cache)
        return UnmodifiedModel(self._transformers, cache)


def choose_max_tokens(wanted: int | None, text_config: Any) -> int:
    """The longest sequence: what was asked for, or all that the model's positions reach. Raises ValueError for more."""
    reach: int | None = getattr(text_config, "max_position_embeddings", None)
    longest = wanted if wanted is not None else reach
    if longest is None:
        raise ValueError("the model's configuration does not say how long its sequences may be: give --max-tokens")
    if reach is not None and longest > reach:
        raise ValueError(f"--max-tokens {longest} is more than this model's positions reach, {reach}")
    return longest


def choose_device(device: str) -> torch.device:
    """The device that was named, or for `auto` the first GPU if torch sees one, else the CPU.

    Raises: DriverUnavailable if there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda:0" if count else "cpu"
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return chosen
    index = chosen.index or 0
    if index >= count:
        seen = "torch sees no GPU here" if not count else f"torch sees {count} here, numbered from 0"
        last = f"cuda:{count - 1}, " if count else ""
        raise DriverUnavailable(f"--device {device}: {seen}; use --device {last}cpu or auto")
    return torch.device("cuda", index)


def check_budget(budget_bytes: int, device: torch.device) -> None:
    """Raises: BudgetError for more than the device, or this process on a host, has in all."""
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else HostMemory().read().total_bytes
    if budget_bytes > total_bytes:
        raise BudgetError(
            f"--kv-budget {format_bytes(budget_bytes)} is more than {device} has: {format_bytes(total_bytes)} in all; "
            "lower it, or leave it out for what is free"
        )


def open_cache(layout: KVLayout, pool: Pool, slots: int, max_tokens: int) -> KVCache:
    """The cache. Raises: DriverError if there are not so many addresses; the pool is closed then."""
    try:
        return KVCache(layout, pool, slots=slots, max_tokens=max_tokens)
    except DriverError as error:
        pool.close()
        if error.call != "reserve":
            raise
        message = f"{error}; lower --max-num-seqs or --max-tokens"
        raise type(error)(message, call=error.call, code=error.code) from error


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type that was named, or for `auto` bfloat16 on a GPU and float32 on a CPU."""
    name = {"cuda": "bfloat16", "cpu": "float32"}[device.type] if dtype == "auto" else dtype
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def end_tokens(directory: Path, hf_config: Any) -> frozenset[int]:
    """The tokens that end an answer: by the model's own generation configuration, or if it has none, by its configuration."""
    import transformers

    try:
        generation = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        generation = transformers.GenerationConfig.from_model_config(hf_config)
    ends = generation.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or [])


def warm_up(runner: Runner, cache: KVCache, num_tokens: int) -> None:
    """One prefill of the largest step and one decode step, with all that can be asked of sampling.

    Kernels compile, and torch's peak of memory is reached.

    Raises ValueError if the model cannot be served.
    """
    nobody, nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
    everything = Generate(
        request_id="warm-up", prompt=[0], max_new_tokens=1, top_k=1, presence_penalty=1.0, logit_bias={0: 1.0},
        want_logprobs=True, num_logprobs=1,
    )  # fmt: skip
    with cache.open() as sequence:
        sequence.grow(num_tokens)
        runner.assign(sequence.slot, everything, np.zeros(1, np.int32), nothing)
        for start, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
            if start < end:
                chunk = Chunk(sequence.slot, start, np.zeros(end - start, np.int32), is_last=True, num_candidates=0)
                runner.mixed(nobody, nobody, [chunk]).wait()
                runner.model.check()
        runner.release(sequence.slot)


def pool_tokens(layout: KVLayout, pool: Pool) -> int:
    """The longest request that the whole pool can hold; a prompt has all its rows in every group while it is computed."""
    return layout.tokens_in(pool.budget_bytes // PAGE_BYTES, sliding=False)


def default_budget_bytes(pool: Pool) -> int:
    """What the cache may take when nobody says: on a GPU what is free beyond a margin, on a host a share of what is."""
    free_bytes = pool.driver.memory().free_bytes + pool.created_bytes
    if pool.device.type == "cuda":
        return (free_bytes - GPU_MARGIN_BYTES) // PAGE_BYTES * PAGE_BYTES
    return min(int(free_bytes * HOST_SHARE), MAX_HOST_BYTES) // PAGE_BYTES * PAGE_BYTES
