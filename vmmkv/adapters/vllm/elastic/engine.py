"""Elastic memory under vLLM's engine: `install_in_vllm`, for the plugin, and what changes in an engine that asks for it.

    EngineCore._initialize_kv_caches   the one change to engines without the option: it looks for it
    executor.initialize_from_config    the KV cache is allocated over ElasticBlocks, with scratch memory for warm-ups
    EngineCore.step...                 holds the memory's lock, and first settles
    coordinator.BlockPool              is an ElasticBlockPool
    coordinator.get_num_blocks_...     maps memory before vLLM asks how many blocks are free

The names of vLLM are those of `ELASTIC` in hooks.py.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import vllm
import vllm.v1.core.kv_cache_coordinator as coordinator
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore

from vmmkv.adapters.vllm.elastic.control import BudgetControl
from vmmkv.adapters.vllm.elastic.kept import KeptBlocks, Shape
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run, aligned, bytes_of_groups
from vmmkv.adapters.vllm.elastic.options import OPTION, ElasticOptions
from vmmkv.adapters.vllm.elastic.pool import ElasticBlockPool
from vmmkv.adapters.vllm.hooks import ELASTIC_ONE_BUFFER, ELASTIC_TENSORS, refuse_unknown, trial_of
from vmmkv.adapters.vllm.identity import identity_of
from vmmkv.driver import Driver, open_driver
from vmmkv.holder import HolderClient
from vmmkv.holder.sharing import SharedBudget
from vmmkv.units import ceil_div, format_bytes

log = logging.getLogger("vllm.vmmkv")

_V1_RUNNER, _V2_RUNNER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils"
_Allocate = Callable[..., Any]


def install_in_vllm() -> None:
    """Let engines of this process be elastic, if their `additional_config` says so. Idempotent."""
    EngineCore._initialize_kv_caches = _initialize_kv_caches


_ORIGINAL: Final = EngineCore._initialize_kv_caches
_ORIGINAL_POOL: Final = coordinator.BlockPool


@functools.wraps(_ORIGINAL)
def _initialize_kv_caches(core: Any, vllm_config: Any) -> Any:
    coordinator.BlockPool = _ORIGINAL_POOL  # of an engine before, whose start may have failed before it had a pool
    options = vllm_config.additional_config
    if not isinstance(options, dict) or OPTION not in options:
        return _ORIGINAL(core, vllm_config)
    return ElasticEngine(core, vllm_config, ElasticOptions.of(options[OPTION])).initialize()


class ElasticEngine:
    """Makes one engine elastic. Raises: ValueError for one that cannot be."""

    def __init__(self, core: Any, vllm_config: Any, options: ElasticOptions) -> None:
        refuse_unknown("elastic memory of vmmkv", (ELASTIC_ONE_BUFFER, ELASTIC_TENSORS))
        if refused := [name for name, is_on in _unserved(vllm_config).items() if is_on]:
            raise ValueError(f"elastic memory of vmmkv does not work with {', '.join(refused)}")
        if options.holder is not None and (refused := [name for name, is_on in _unkept(vllm_config).items() if is_on]):
            raise ValueError(f"vmmkv_elastic has holder, which does not work with {', '.join(refused)}")
        if trial_of(vllm.__version__) is None:
            log.warning("vmmkv has not been tried with vLLM %s; see `vmmkv doctor vllm`", vllm.__version__)
        self._core, self._config, self._options = core, vllm_config, options
        self._until_ready = ExitStack()
        self._memory: ElasticBlocks | None = None
        self._pool: ElasticBlockPool | None = None
        self._shared: SharedBudget | None = None
        self._kept: KeptBlocks | None = None
        self._control: BudgetControl | None = None
        self._kv_config: Any = None
        self._has_begun = False

    def initialize(self) -> Any:
        """Call vLLM's own `_initialize_kv_caches`, and change what it uses. Raises: ValueError."""
        core = self._core
        with self._until_ready:
            self._intercept(core.model_executor, "initialize_from_config", self._initialize_from_config)
            if hasattr(core.model_executor, "get_supported_kv_cache_layouts"):
                self._intercept(core.model_executor, "get_supported_kv_cache_layouts", _blocks_outermost)
            found = _ORIGINAL(core, self._config)
        if self._memory is None:
            raise ValueError("elastic memory of vmmkv serves models with a KV cache, and this one has none")
        memory = self._memory
        log.info(
            "vmmkv: elastic memory: %s of KV reserved, at most %s mapped; %d blocks, %s, come and go together",
            format_bytes(memory.reserved_bytes),
            format_bytes(memory.state().budget_bytes),
            memory.group_blocks,
            format_bytes(memory.group_bytes),
        )

        def pool(*arguments: Any, **named: Any) -> ElasticBlockPool:
            coordinator.BlockPool = _ORIGINAL_POOL
            try:
                self._pool = ElasticBlockPool(memory, *arguments, **named)
                if self._kept is not None:
                    self._adopt(self._kept, memory, self._pool)
                if self._options.control is not None or self._shared is not None:
                    control, shared = self._options.control, self._shared
                    self._control = BudgetControl(memory, self._pool.settle, control=control, shared=shared)
                    self._pool.on_short, self._pool.on_evicting = self._control.ask, self._control.would_keep_more
                return self._pool
            except BaseException:
                if self._shared is not None:
                    self._shared.close()
                self._give_back()
                raise

        coordinator.BlockPool = pool
        for name in ("step", "step_with_batch_queue"):
            setattr(core, name, functools.partial(self._step, getattr(core, name)))
        core.shutdown = functools.partial(self._shut_down, core.shutdown)
        return found

    # while the engine starts

    def _intercept(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        """Until the engine is ready: call `by` with the original and its arguments."""
        self._until_ready.enter_context(patch.object(owner, name, functools.partial(by, getattr(owner, name))))

    def _initialize_from_config(self, original: _Allocate, kv_cache_configs: list[Any]) -> Any:
        (config,) = kv_cache_configs
        self._kv_config = config
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups})
        if kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]) or len(config.kv_cache_groups) != 1:
            raise ValueError(f"elastic memory of vmmkv does not work with layers of {' and '.join(kinds)}")
        runners = {name: sys.modules[name] for name in (_V1_RUNNER, _V2_RUNNER) if name in sys.modules}
        if any(hasattr(runner, "allocate_kv_cache") for runner in runners.values()):
            for runner in runners.values():
                self._intercept(runner, "allocate_kv_cache", self._allocate)
        else:
            _pack(config)
            if _V1_RUNNER in runners:
                self._intercept(runners[_V1_RUNNER].GPUModelRunner, "_allocate_kv_cache_tensors", self._allocate_tensors)
            if _V2_RUNNER in runners:
                self._intercept(runners[_V2_RUNNER], "_allocate_kv_cache", self._allocate_tensors_v2)
        return original(kv_cache_configs)

    def _allocate(self, original: _Allocate, config: Any, device: torch.device, layout: Any, *arguments: Any) -> Any:
        """vLLM's `allocate_kv_cache` from 0.28 on: one buffer, of which each layer has views."""
        if not layout.name.startswith(("B", "LB")):
            raise ValueError(
                f"elastic memory of vmmkv does not work with the layout {layout.name}, where no block is in one piece"
            )
        runs = _placed(config.kv_cache_tensors, config.num_blocks)
        with self._reserved(device, runs, config.num_blocks, [(0, None)], layout.name) as memory:
            for tensor in config.kv_cache_tensors:
                tensor.size = memory.size_bytes
            return original(config, device, layout, *arguments)

    def _allocate_tensors(self, original: _Allocate, runner: Any, config: Any) -> Any:
        """`_allocate_kv_cache_tensors` of vLLM below 0.28, with the V1 model runner."""
        with self._reserved_for(config, runner.device):
            return original(runner, config)

    def _allocate_tensors_v2(self, original: _Allocate, config: Any, shared_layers: Any, device: torch.device) -> Any:
        """`_allocate_kv_cache` of vLLM below 0.28, with the V2 model runner."""
        with self._reserved_for(config, device):
            return original(config, shared_layers, device)

    def _reserved_for(self, config: Any, device: torch.device) -> Any:
        """Memory for tensors of vLLM below 0.28: one for all layers, or one for each."""
        tensors, num_blocks = config.kv_cache_tensors, config.num_blocks
        if tensors[0].block_stride:
            return self._reserved(device, [Run(0, tensors[0].block_stride)], num_blocks, [(0, tensors[0].size)])
        runs = aligned(num_blocks, [tensor.size // num_blocks for tensor in tensors])
        buffers = [(run.offset_bytes, tensor.size) for run, tensor in zip(runs, tensors, strict=True)]
        return self._reserved(device, runs, num_blocks, buffers)

    @contextmanager
    def _reserved(
        self, device: torch.device, runs: list[Run], num_blocks: int, buffers: list[tuple[int, int | None]], layout: str = ""
    ) -> Iterator[ElasticBlocks]:
        """Give addresses for the buffers, by offset and size, that vLLM asks torch for within."""
        if self._memory is not None:
            raise ValueError("elastic memory of vmmkv serves one KV cache, and vLLM has allocated a second one")
        driver = open_driver(device)
        budget_bytes = self._checked_budget(runs, num_blocks, driver.device)
        if self._options.holder is not None:
            self._kept = self._opened(self._options.holder, driver, runs, num_blocks, layout, budget_bytes)
        memory = self._memory = ElasticBlocks(driver, runs, num_blocks, budget_bytes=budget_bytes, source=self._kept)
        self._until_ready.push(lambda error, *_: memory.close() if error else None)
        whole, left, others = memory.tensor(), iter(buffers), torch.zeros

        def zeros(*size: Any, **named: Any) -> torch.Tensor:
            if named.get("dtype") is not torch.int8:
                return others(*size, **named)
            offset, length = next(left)
            return whole[offset:] if length is None else whole[offset : offset + length]

        with patch.object(torch, "zeros", zeros):
            yield memory
        if next(left, None) is not None:
            raise ValueError("elastic memory of vmmkv was not used for all layers of vLLM's KV cache")
        self._until_ready.enter_context(memory.scratch())
        if memory.device.type == "cuda":  # warm-ups and captures have streams of their own
            self._until_ready.callback(torch.cuda.synchronize, memory.device)

    def _checked_budget(self, runs: list[Run], num_blocks: int, device: torch.device) -> int:
        """The budget at first. With an arbiter it is the floor, for which others are waited for. Raises: ValueError."""
        options, reserved_bytes = self._options, bytes_of_groups(num_blocks, runs, num_blocks)
        given = options.floor_bytes if options.arbiter is not None else options.budget_bytes
        budget_bytes = reserved_bytes if given is None else min(given, reserved_bytes)
        block_tokens = self._config.cache_config.block_size
        longest = self._config.model_config.max_model_len
        least_bytes = bytes_of_groups(1 + ceil_div(longest, block_tokens), runs, num_blocks)
        if budget_bytes < least_bytes:
            name = "floor" if options.arbiter is not None else "budget"
            raise ValueError(
                f"{name} of vmmkv_elastic is {format_bytes(budget_bytes)}, and one request of max_model_len={longest} tokens "
                f"needs {format_bytes(least_bytes)}: raise it, or lower --max-model-len"
            )
        if options.arbiter is not None:
            self._shared = SharedBudget(options.arbiter, device, floor_bytes=budget_bytes, most_bytes=reserved_bytes)
            self._until_ready.push(lambda error, *_: self._shared.close() if error and self._shared else None)
            self._shared.wait_for(budget_bytes)
        return budget_bytes

    def _opened(
        self, path: Path, driver: Driver, runs: list[Run], num_blocks: int, layout: str, budget_bytes: int
    ) -> KeptBlocks:
        """Connect to the holder that owns the memory, and find what it keeps. Raises: HolderUnavailable, ValueError."""
        if not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):  # below vLLM 0.32 each process has hashes of its own
            os.environ.setdefault("PYTHONHASHSEED", "0")
        identity = (
            *(*identity_of(self._config, self._kv_config, self._options.fingerprint), layout),
            *([run.stride_bytes for run in runs], self._config.cache_config.prefix_caching_hash_algo),
            *(os.environ.get("PYTHONHASHSEED"), vllm.__version__),
        )
        client = HolderClient(path, driver.device)
        self._until_ready.push(lambda error, *_: client.close() if error else None)
        if budget_bytes > client.budget_bytes:
            raise ValueError(
                f"the holder at {path} may own {format_bytes(client.budget_bytes)}, and this engine may map "
                f"{format_bytes(budget_bytes)}: lower budget of vmmkv_elastic, or raise --budget of the holder"
            )
        kept = KeptBlocks(driver, client, repr(identity).encode())
        kept.find(Shape.of(runs, num_blocks), budget_bytes)
        return kept

    def _adopt(self, kept: KeptBlocks, memory: ElasticBlocks, pool: ElasticBlockPool) -> None:
        """Begin with what an earlier engine has left."""
        with memory.lock:
            pool.adopt(*kept.restore(memory))
            pool.on_cached, pool.on_dropped = kept.cached, kept.dropped

    # while it runs

    def _step(self, original: Callable[[], Any]) -> Any:
        assert self._memory is not None and self._pool is not None
        with self._memory.lock:
            if self._memory.device.type == "cuda":
                self._memory.streams.add(torch.cuda.current_stream(self._memory.device))
            if not self._has_begun:
                self._begin()
            if self._control is None:
                self._pool.settle()
            else:
                self._control.apply()
            if self._kept is not None:
                self._kept.seal_written()
            try:
                return original()
            except BaseException:
                if self._kept is not None:
                    self._kept.void_step()  # the step has cached blocks that nothing may have written
                raise

    def _begin(self) -> None:
        """Map memory from now on before vLLM asks whether there are enough free blocks."""
        assert self._pool is not None and self._memory is not None
        self._has_begun = True
        pool, blocks_of = self._pool, self._core.scheduler.kv_cache_manager.coordinator
        count = blocks_of.get_num_blocks_to_allocate

        @functools.wraps(count)
        def get_num_blocks_to_allocate(*, new_computed_blocks: Any, total_computed_tokens: int, **named: Any) -> int:
            named |= {"new_computed_blocks": new_computed_blocks, "total_computed_tokens": total_computed_tokens}
            num_blocks: int = count(**named)
            found = [block for blocks in new_computed_blocks for block in blocks if not block.ref_cnt and not block.is_null]
            is_running = total_computed_tokens > 0 and not any(new_computed_blocks)  # a waiting one has found what is computed
            pool.prepare(num_blocks - len(found), len(found), is_running=is_running)
            return num_blocks

        blocks_of.get_num_blocks_to_allocate = get_num_blocks_to_allocate

    def _shut_down(self, original: Callable[[], Any]) -> None:
        if self._control is not None:
            self._control.close()
        try:
            original()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Leave what is cached with the holder, if there is one, and give all memory back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        with memory.lock:
            if self._kept is not None:
                self._kept.seal_all()
            memory.close()
            if self._kept is not None:
                self._kept.close()


def _unserved(vllm_config: Any) -> dict[str, bool]:
    """Features with which memory would be used by other processes, or otherwise than by blocks; is each on?"""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = vllm_config.device_config.device_type
    return {
        "several processes of one model: tensor, pipeline, context or data parallelism": parallel.world_size != 1
        or parallel.data_parallel_size != 1
        or getattr(parallel, "decode_context_parallel_size", 1) != 1,
        f"an executor that is not uniproc: {parallel.distributed_executor_backend}": parallel.distributed_executor_backend
        != "uni",
        f"devices of type {device}": device not in ("cuda", "cpu"),
        "sleep mode, which takes the memory away itself": bool(model.enable_sleep_mode),
        "a KV connector, which copies blocks while they are free": vllm_config.kv_transfer_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
    }


def _unkept(vllm_config: Any) -> dict[str, bool]:
    """Features with which vLLM's hashes do not tell all by which bytes differ, or blocks change unseen; is each on?"""
    cache = vllm_config.cache_config
    return {
        "--no-enable-prefix-caching": not cache.enable_prefix_caching,
        f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo}, but with sha256": not (
            cache.prefix_caching_hash_algo.startswith("sha256")
        ),
        "LoRA": vllm_config.lora_config is not None,
        "weights that are sent while it runs": getattr(vllm_config, "weight_transfer_config", None) is not None,
        "scales of KV that are computed at the start": bool(getattr(cache, "calculate_kv_scales", False)),
        "--scheduling-policy priority": vllm_config.scheduler_config.policy == "priority",
    }


def _blocks_outermost(original: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Layouts of the workers, those first that have all layers of a block side by side: fewer blocks are whole pages then."""
    return [sorted(names, key=lambda name: not name.startswith("BL")) for names in original()]


def _placed(tensors: list[Any], num_blocks: int) -> list[Run]:
    """Runs of the tensors of vLLM from 0.28 on. Layers that lie apart are moved to whole groups."""
    if all(tensor.block_stride > tensor.layer_stride for tensor in tensors):
        return [Run(0, tensors[0].block_stride)]
    strides = [tensor.block_stride for tensor in tensors for _ in tensor.layers]
    runs = aligned(num_blocks, strides)
    left = iter(runs)
    for tensor in tensors:
        places = [next(left).offset_bytes for _ in tensor.layers]
        tensor.offset = places[0]
        tensor.layer_stride = places[1] - places[0] if len(places) > 1 else tensor.layer_stride
    return runs


def _pack(config: Any) -> None:
    """Lay all layers of a block side by side, as vLLM below 0.28 does for some models, where its attention takes that.

    Raises: ValueError for an attention that has no block in one piece.
    """
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    spec, tensors = config.kv_cache_groups[0].kv_cache_spec, config.kv_cache_tensors
    takes_strides, page_bytes, is_padded = (
        spec.indexes_kv_by_block_stride,
        spec.page_size_bytes,
        spec.page_size_padded is not None,
    )
    if not takes_strides and type(spec).__name__ != "MLAAttentionSpec":
        raise ValueError("elastic memory of vmmkv does not work with an attention backend that may keep keys and values apart")
    if (
        not takes_strides
        or is_padded
        or get_kv_cache_layout() != "NHD"
        or any(tensor.size != config.num_blocks * page_bytes for tensor in tensors)
    ):
        return
    for index, tensor in enumerate(tensors):
        tensor.offset, tensor.block_stride = index * page_bytes, len(tensors) * page_bytes
        tensor.size = config.num_blocks * tensor.block_stride
