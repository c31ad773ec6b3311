"""From a configuration to a model on a device, the layout of its cache, and how much memory that may take."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from vmmkv import GIB, PAGE_BYTES, KVCache, KVLayout, Pool
from vmmkv.prefix import PrefixCache
from vmmkv.server.engine.core import Engine
from vmmkv.server.engine.requests import Request
from vmmkv.server.engine.runner import ModelRunner
from vmmkv.server.protocol import FromEngine, Generate, Loading, Ready
from vmmkv.server.settings import ServeConfig

STEP_TOKENS: Final = {"cpu": 512, "cuda": 4096}
"""Tokens that one step computes at most. On a CPU a longer one would keep the others waiting for seconds."""

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

    engine: Engine
    ready: Ready


def load(config: ServeConfig, send: Callable[[FromEngine], None]) -> Loaded:
    """Load everything that `config` names; `config.model` is a directory. Sends Loading messages on the way.

    Raises: ValueError or OSError if the model is not one that can be served; DriverUnavailable; OutOfPages.
    """
    stages = ("loading weights", "preparing the cache", "warming up")

    def at(stage: int) -> None:
        send(Loading(stage=stages[stage], done=stage, total=len(stages)))

    at(0)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    model = load_model(Path(config.model), device, dtype)
    at(1)
    text_config = model.config.get_text_config()
    layout = KVLayout.from_config(text_config, dtype)
    max_tokens = choose_max_tokens(config.max_tokens, text_config)
    step_tokens = STEP_TOKENS[device.type]
    most_bytes = layout.peak_pages(max_tokens, sliding=False) * config.max_sequences * PAGE_BYTES
    first_bytes = layout.peak_pages(min(step_tokens, max_tokens), sliding=False) * PAGE_BYTES
    pool = Pool(device, config.kv_budget_bytes or first_bytes)
    cache = KVCache(layout, pool, slots=config.max_sequences * (1 + PARKED_SLOTS * config.prefix_cache), max_tokens=max_tokens)
    runner = ModelRunner(model, cache)
    at(2)
    warm_up(runner, cache, min(step_tokens, max_tokens - 1, pool_tokens(layout, pool)))
    if config.kv_budget_bytes is None:
        pool.resize(max(first_bytes, min(default_budget_bytes(pool), most_bytes)))
    prefix = PrefixCache(cache) if config.prefix_cache else None
    engine = Engine(
        cache,
        runner,
        prefix=prefix,
        max_sequences=config.max_sequences,
        eos_ids=end_tokens(model),
        step_tokens=step_tokens,
        send=send,
    )
    ready = Ready(
        model=config.model,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=max_tokens,
        pool_tokens=pool_tokens(layout, pool),
        budget_bytes=pool.budget_bytes,
        max_sequences=config.max_sequences,
    )
    return Loaded(engine, ready)


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
    """The device that was named, or for `auto` the first GPU if torch sees one, else the CPU."""
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    return torch.device("cuda", 0) if chosen.type == "cuda" and chosen.index is None else chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type that was named, or for `auto` bfloat16 on a GPU and float32 on a CPU."""
    name = {"cuda": "bfloat16", "cpu": "float32"}[device.type] if dtype == "auto" else dtype
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def load_model(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """A causal language model of transformers, as it is."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.eval().to(device)


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end an answer, by the model's own generation configuration."""
    ends = model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or [])


def warm_up(runner: ModelRunner, cache: KVCache, num_tokens: int) -> None:
    """One prefill of the largest step and one decode step: kernels compile, and torch's peak of memory is reached."""
    ask = Generate(request_id="warm-up", prompt=[0] * num_tokens, max_new_tokens=1)
    with cache.open() as sequence:
        request = Request(ask, frozenset(), sequence=sequence)
        sequence.grow(num_tokens)
        first = num_tokens - 1
        for count in (first, 1) if first else (1,):
            runner.forward([(request, count)]).tolist()
            runner.check()
            request.num_computed += count


def pool_tokens(layout: KVLayout, pool: Pool) -> int:
    """The longest request that the whole pool can hold; a prompt has all its rows in every group while it is computed."""
    return layout.tokens_in(pool.budget_bytes // PAGE_BYTES, sliding=False)


def default_budget_bytes(pool: Pool) -> int:
    """What the cache may take when nobody says: on a GPU what is free beyond a margin, on a host a share of what is."""
    free_bytes = pool.driver.memory().free_bytes + pool.created_bytes
    if pool.device.type == "cuda":
        return (free_bytes - GPU_MARGIN_BYTES) // PAGE_BYTES * PAGE_BYTES
    return min(int(free_bytes * HOST_SHARE), MAX_HOST_BYTES) // PAGE_BYTES * PAGE_BYTES
