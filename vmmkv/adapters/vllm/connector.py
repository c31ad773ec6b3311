"""VmmkvConnector: vLLM's `KVConnectorBase_V1` over vmmkv's tiers.

vLLM makes it for its scheduler and for each worker, in processes of their own. Workers have the tiers, and the scheduler a
`Directory` of what they hold. Of a tensor-parallel engine each rank has a part of each
record; what some rank lacks nobody loads.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vmmkv.adapters.vllm.blocks import BlockMemory, BlockMover, IdlePoller, blocks_of_record
from vmmkv.adapters.vllm.directory import Change, Directory, listen_to
from vmmkv.adapters.vllm.hooks import refuse_unknown, trial_of
from vmmkv.adapters.vllm.namespaces import Features, Namespaces
from vmmkv.adapters.vllm.plugin import options_of
from vmmkv.adapters.vllm.schedule import Schedule, StepPlan
from vmmkv.adapters.vllm.worth import Worth
from vmmkv.tiers import Store

refuse_unknown()  # before the imports of what may not be there

from vllm import __version__  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: E402

from vmmkv.adapters.vllm.identity import identity_of  # noqa: E402
from vmmkv.adapters.vllm.statistics import (  # noqa: E402
    Changes,
    ConnectorMetrics,
    ConnectorStats,
    totals_of_schedule,
    totals_of_tiers,
)

log = logging.getLogger("vllm.vmmkv")

_WINDOWED: Final = "SlidingWindowSpec"
"""Class of vLLM's layers whose blocks are taken back behind a window. Others may have a window too, and keep their blocks."""

_REPORT_S: Final = 1.0
"""Time between two reports of the tiers' statistics. One more is made when they have nothing left to do."""


@dataclass
class _StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Message of the scheduler to the worker, for a step."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class _Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message of the workers to the scheduler: changes of their tiers, in order."""

    changes: list[Change]
    is_busy: bool
    """Are there others on their way?"""
    measured: int | None
    """Number of the step, if it measures the rate of prefill."""
    failed: set[str]
    """Requests whose loads have failed."""

    def aggregate(self, other: "_Report") -> "_Report":
        is_busy = self.is_busy or other.is_busy
        return _Report(self.changes + other.changes, is_busy, self.measured, self.failed | other.failed)


class VmmkvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefixes of vLLM in vmmkv's tiers. `kv_connector_extra_config`: see `TierOptions`.

    Raises: ValueError, TierUnavailable and BudgetError at the start, for what it cannot serve, in a sentence.
    """

    prefer_cross_layer_blocks = True
    """Wish for all layers of a block side by side, for vLLM below 0.29, where the attention takes that."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout with all layers of a block side by side, where this vLLM has it: copies are as large as a block."""
        from vllm.v1 import kv_cache_interface

        has_layouts = "kv_cache_layout" in kv_cache_interface.KVCacheConfig.__dataclass_fields__
        return "BLNHC" if has_layouts and vllm_config.device_config.device_type == "cuda" else None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options, groups = options_of(vllm_config.kv_transfer_config), kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        for feature, is_on in _unserved(vllm_config, specs).items():
            if is_on:
                raise ValueError(f"the vmmkv connector does not serve {feature} yet: start vLLM without one of the two")
        spec = specs[0]
        block_bytes = spec.page_size_bytes * max(len(group.layer_names) for group in groups)
        self._per_record: Final = blocks_of_record(block_bytes)
        self._record_bytes: Final = block_bytes * self._per_record
        self._num_blocks: Final = kv_cache_config.num_blocks
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._tiers: Final = options.tiers(self._record_bytes, has_host=role is KVConnectorRole.WORKER, num_ranks=num_ranks)
        self._device: Final = vllm_config.device_config.device_type
        # the worker's
        self._store: Store | None = None
        self._mover: BlockMover | None = None
        self._names_blocks: Final = _has_one_table(specs)
        """Is vLLM told which blocks could not be loaded? Else which requests."""
        self._failed = dict[str, set[int]]()
        """Requests whose loads have failed in this step, and blocks that could not be loaded."""
        self._poller: IdlePoller | None = None
        self._changes = deque[Change]()
        self._was_busy = False
        """Has the scheduler been told that records are on their way?"""
        self._counted, self._counted_s = Changes(), 0.0
        if role is KVConnectorRole.WORKER:
            return
        if trial_of(__version__) is None:
            log.warning("vmmkv has not been tried with vLLM %s; see `vmmkv doctor vllm`", __version__)
        self._directory: Final = Directory(self._tiers, num_ranks, len(groups))
        self._namespaces: Final = Namespaces()
        self._schedule: Final = Schedule(
            repr((*identity_of(vllm_config, kv_cache_config, options.fingerprint), self._per_record, num_ranks)),
            block_tokens=spec.block_size,
            record_tokens=spec.block_size * self._per_record,
            lookup=self._directory.lookup,
            worth=Worth(record_tokens=spec.block_size * self._per_record, record_bytes=self._record_bytes),
            may_wait=bool(vllm_config.cache_config.enable_prefix_caching),
            windows=[each.sliding_window if type(each).__name__ == _WINDOWED else None for each in specs],
        )

    # the scheduler's calls

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count the tokens that tiers have behind those on the device; None to be asked again. See KVConnectorBase_V1."""
        namespace = self._namespaces.of(request)
        if namespace is None:
            return 0, False
        found = self._schedule.matched(
            request.request_id,
            request.all_token_ids,
            namespace,
            num_computed_tokens,
            beside=Features(request.mm_features),
            may_load=not request.skip_reading_prefix_cache,
        )
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that a request has for what it loads. See KVConnectorBase_V1."""
        self._schedule.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Make the plan of a step for the worker. See KVConnectorBase_V1."""
        num_new = scheduler_output.num_scheduled_tokens
        for name in scheduler_output.preempted_req_ids or ():
            self._schedule.preempted(name)
        for new in scheduler_output.scheduled_new_reqs:
            self._schedule.scheduled(new.req_id, new.block_ids, new.num_computed_tokens, num_new[new.req_id], is_new=True)
        cached = scheduler_output.scheduled_cached_reqs
        new_blocks = [blocks or () for blocks in cached.new_block_ids]
        self._schedule.go_on(cached.req_ids, new_blocks, cached.num_computed_tokens, num_new, cached.resumed_req_ids)
        return _StepMetadata(self._schedule.take_plan())

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what a step has brought: reports, and requests that have loaded. See KVConnectorBase_V1."""
        report = connector_output.kv_connector_worker_meta
        report = report if isinstance(report, _Report) else None
        self._directory.learn(() if report is None else report.changes, is_busy=report is not None and report.is_busy)
        self._schedule.worth.step_ends(None if report is None else report.measured)
        self._schedule.failed(() if report is None else report.failed)
        for name in connector_output.finished_recving or ():
            self._schedule.loaded(name)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request, whose blocks are free at once: they are read before they are written. See SupportsHMA."""
        self._schedule.ended(request.request_id)
        return False, None

    # the worker's calls

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin with the engine's memory: open the tiers. See KVConnectorBase_V1. Raises: ValueError, BudgetError."""
        tensors = list({tensor.data_ptr(): tensor for tensor in kv_caches.values()}.values())
        memory = BlockMemory(tensors, self._num_blocks)
        if memory.block_bytes != (block_bytes := self._record_bytes // self._per_record):
            raise ValueError(
                f"a block has {memory.block_bytes} bytes in vLLM's tensors, and {block_bytes} by its configuration: the vmmkv "
                "connector does not know this layout"
            )
        listen_to(self._tiers, self._changes.append)
        self._store = Store(self._tiers, self._device)
        self._poller = IdlePoller(self._store)
        self._mover = BlockMover(self._store, memory, get_tensor_model_parallel_rank())
        names = ", ".join(tier.name for tier in self._tiers)
        log.info("vmmkv: tiers: %s; a record has %d blocks of tokens, %d bytes", names, self._per_record, self._record_bytes)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Begin with memory in one tensor. See KVConnectorBase_V1 of vLLM below 0.29."""
        self.register_kv_caches({"all": kv_cache})

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before each forward pass: what its blocks held is read, or not stored. See KVConnectorBase_V1."""
        if self._mover is not None and isinstance(kv_connector_metadata, _StepMetadata):
            self._mover.before_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of a step. See KVConnectorBase_V1."""
        if self._mover is not None:
            self._mover.begin(self._bound.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests are scheduled when all their layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: records have all layers, and are stored behind the step."""

    def wait_for_save(self) -> None:
        """Begin the stores of a step, and wait for nothing. See KVConnectorBase_V1."""
        if self._mover is not None:
            self._mover.after_step(self._bound.plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Called at the end of each step, also of one that computes nothing. See KVConnectorBase_V1."""
        if self._mover is None or self._poller is None:
            return None, None
        self._mover.go_on(computes=self._bound.plan.computes)
        if self._mover.is_busy:
            self._poller.stepped()
        ended, self._failed = self._mover.ended_loads()
        return None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Called at the end of each step, from vLLM 0.32 on. See KVConnectorBase_V1."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = set() if self._names_blocks else set(self._failed)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that could not be loaded in this step. See KVConnectorBase_V1."""
        return set().union(*self._failed.values()) if self._names_blocks else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Make the report of a step for the scheduler; None for nothing new. See KVConnectorBase_V1."""
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        was_busy, self._was_busy = self._was_busy, self._mover is not None and self._mover.is_busy
        measured = self._bound.plan.measured
        is_news = changes or was_busy or self._was_busy or measured is not None or self._failed
        return _Report(changes, self._was_busy, measured, set(self._failed)) if is_news else None

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Report what the scheduler or the worker has counted since the last report. See KVConnectorBase_V1."""
        if self.role is KVConnectorRole.SCHEDULER:
            return self._counted.of(totals_of_schedule(self._schedule))
        if self._store is None or self._mover is None:
            return None
        now_s = time.monotonic()
        is_over = self._was_busy and not self._mover.is_busy
        if not is_over and now_s - self._counted_s < _REPORT_S:
            return None
        self._counted_s = now_s
        return self._counted.of(totals_of_tiers(self._store.stats(), self._mover.counts))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Make a report out of what was sent of it. See KVConnectorBase_V1."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> ConnectorMetrics:
        """Make the counters for `/metrics`. See KVConnectorBase_V1."""
        return ConnectorMetrics(*arguments)

    def reset_cache(self) -> bool | None:
        """Refuse: records outlive the engine's cache, and are of its weights as they were loaded. See KVConnectorBase_V1."""
        log.warning("vmmkv keeps its records; other weights need an engine with another fingerprint")
        return False

    def shutdown(self) -> None:
        """Keep what has been put, for 10 s at most, and close the tiers. See KVConnectorBase_V1."""
        if self._poller is not None:
            self._poller.close()
        if self._store is not None:
            self._store.flush(10.0)
            self._store.close()
        if self.role is KVConnectorRole.SCHEDULER:
            self._directory.close()
        for tier in self._tiers:
            tier.close()

    @property
    def _bound(self) -> _StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata), "the scheduler's connector has made it"
        return metadata


def _has_one_table(specs: Sequence[Any]) -> bool:
    """Is there one table of blocks, of which vLLM takes none back? Only then it maps blocks to requests, if loads fail."""
    return [type(spec).__name__ for spec in specs] in (["FullAttentionSpec"], ["MLAAttentionSpec"])


def _unserved(vllm_config: Any, specs: Sequence[Any]) -> dict[str, bool]:
    """Features by which KV differs beyond its key, or lies elsewhere than in blocks of one size; is each on?"""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    media = model.multimodal_config
    kinds = [*dict.fromkeys(type(spec).__name__ for spec in specs)]
    is_kept = _has_one_table(specs) or {*kinds} <= {"FullAttentionSpec", _WINDOWED}
    is_even = len({(spec.block_size, spec.page_size_bytes) for spec in specs}) == 1
    return {
        "pipeline or context parallelism": parallel.world_size != parallel.tensor_parallel_size
        or getattr(parallel, "decode_context_parallel_size", 1) != 1,
        "an engine over several machines": getattr(parallel, "nnodes", 1) != 1,
        f"layers of {' and '.join(kinds)}": not is_kept,
        f"layers of {' and '.join(kinds)} with blocks of several sizes": not is_even,
        f"layers of {' and '.join(kinds)} before vLLM 0.32, unless it has --disable-hybrid-kv-cache-manager": not (
            _has_one_table(specs) or hasattr(KVConnectorBase_V1, "get_transfer_results")
        ),
        "speculative decoding": vllm_config.speculative_config is not None,
        "models of images or sound with --no-enable-prefix-caching, where vLLM may not name them by their content": (
            media is not None and not cache.enable_prefix_caching
        ),
        "pruned videos, of which the encoder alone tells positions": bool(getattr(media, "video_pruning_rate", None)),
        "prompts as embeddings": bool(model.enable_prompt_embeds),
        "sleep mode, which unmaps blocks while they are copied": bool(model.enable_sleep_mode),
        "scales of KV that are computed at the start": bool(getattr(cache, "calculate_kv_scales", False)),
    }
