"""Names of vLLM that the adapter uses, and a check of vLLM's sources for them. Nothing of vLLM is imported.

A table names classes, and modules, with their members, which are of four kinds:

    field                           a field, a property, or an attribute that a method sets
    method(self, request)           a method that vLLM calls, with exactly these parameters; their types and defaults may be any
    method without arguments        a method that the adapter calls, whose parameters all have defaults
    method reading 'module_path'    a method that has this word as a text in its code
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

Names = dict[str, tuple[str, ...]]
"""Members by the full name of their class or module."""

_V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE: Final = f"{_V1}.base.KVConnectorBase_V1"
_OFFLOAD: Final = "vllm.v1.kv_offload"

_REPORTS: Final = (
    "get_kv_connector_stats(self)",
    "build_kv_connector_stats(cls, data)",
    "build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues)",
)

METRICS: Final[Names] = {
    f"{_V1}.metrics.KVConnectorStats": ("data", "reset(self)", "aggregate(self, other)", "reduce(self)", "is_empty(self)"),
    f"{_V1}.metrics.KVConnectorPromMetrics": (
        "__init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "observe(self, transfer_stats_data, engine_idx)",
        "_counter_cls",
        "per_engine_labelvalues",
    ),
    _BASE: _REPORTS,
}
"""Names that statistics.py uses."""

CONNECTOR: Final[Names] = METRICS | {
    _BASE: (
        "__init__(self, vllm_config, role, kv_cache_config)",
        "role",
        "get_required_kvcache_layout(cls, vllm_config)",
        # the scheduler's
        "get_num_new_matched_tokens(self, request, num_computed_tokens)",
        "update_state_after_alloc(self, request, blocks, num_external_tokens)",
        "build_connector_meta(self, scheduler_output)",
        "update_connector_output(self, connector_output)",
        "reset_cache(self)",
        # the worker's
        "register_kv_caches(self, kv_caches)",
        "handle_preemptions(self, kv_connector_metadata)",
        "_get_connector_metadata without arguments",
        "start_load_kv(self, forward_context, **kwargs)",
        "wait_for_layer_load(self, layer_name)",
        "save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs)",
        "wait_for_save(self)",
        "get_finished(self, finished_req_ids)",
        "get_block_ids_with_load_errors(self)",
        "build_connector_worker_meta(self)",
        "shutdown(self)",
        *_REPORTS,
    ),
    f"{_V1}.base.SupportsHMA": ("request_finished_all_groups(self, request, block_ids)",),
    f"{_V1}.base.KVConnectorMetadata": (),
    f"{_V1}.base.KVConnectorWorkerMetadata": ("aggregate(self, other)",),
    f"{_V1}.base.KVConnectorRole": ("SCHEDULER", "WORKER"),
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": (
        "register_connector(cls, name, module_path, class_name)",
        "get_connector_class(cls, kv_transfer_config)",
    ),
    "vllm.distributed.parallel_state": ("get_tensor_model_parallel_rank without arguments",),
    "vllm.config.KVTransferConfig": ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy"),
    "vllm.config.VllmConfig": (
        *("kv_transfer_config", "model_config", "cache_config", "device_config", "parallel_config"),
        "speculative_config",
    ),
    "vllm.config.ModelConfig": (
        *("model", "revision", "hf_config", "dtype", "quantization", "multimodal_config", "enable_prompt_embeds"),
    ),
    "vllm.config.CacheConfig": ("enable_prefix_caching", "cache_dtype"),
    "vllm.config.DeviceConfig": ("device_type",),
    "vllm.config.ParallelConfig": ("world_size", "tensor_parallel_size"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": ("block_size", "page_size_bytes"),
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": ("block_size", "page_size_bytes"),
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": ("get_block_ids without arguments",),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        *("num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "preempted_req_ids"),
    ),
    "vllm.v1.core.sched.output.NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output.CachedRequestData": (*("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"),),
    "vllm.v1.outputs.KVConnectorOutput": ("kv_connector_worker_meta", "finished_recving"),
    "vllm.v1.request.Request": ("request_id", "all_token_ids", "cache_salt", "lora_request", "mm_features"),
    "vllm.multimodal.inputs.MultiModalFeatureSpec": ("identifier", "mm_position"),
    "vllm.multimodal.inputs.PlaceholderRange": ("offset", "length"),
    "vllm.lora.request.LoRARequest": ("lora_int_id", "lora_name", "lora_path", "load_inplace"),
}
"""Names that connector.py, namespaces.py, statistics.py and plugin.py use."""

SECONDARY_TIER: Final[Names] = {
    f"{_OFFLOAD}.tiering.factory.SecondaryTierFactory": ("get_tier_class reading 'module_path'",),
    f"{_OFFLOAD}.tiering.base.SecondaryTierManager": (
        "__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)",
        "medium",
        "locality",
        "block_size_bytes",
        "lookup(self, key, req_context)",
        "submit_store(self, job_metadata)",
        "submit_load(self, job_metadata)",
        "get_finished_jobs(self)",
        "on_new_request(self, req_context)",
        "on_request_finished(self, req_context)",
        "drain_jobs(self)",
        "shutdown(self)",
    ),
    f"{_OFFLOAD}.tiering.base.TransferJob": ("job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
    f"{_OFFLOAD}.tiering.base.JobResult": (*("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),),
    f"{_OFFLOAD}.base.LookupResult": ("HIT", "MISS", "RETRY"),
    f"{_OFFLOAD}.base.Medium": ("STORAGE",),
    f"{_OFFLOAD}.base.Locality": (),
    f"{_OFFLOAD}.base.ReqContext": ("req_id", "get_offload_key_position(self, key)"),
    f"{_OFFLOAD}.base.RequestOffloadingContext": (),
    f"{_OFFLOAD}.base.OffloadingSpec": ("config", "replicated_layout"),
    f"{_OFFLOAD}.config.OffloadingConfig": (
        *("model", "groups", "cache", "parallel", "kv_cache_layout", "canonical_layout", "worker_kv_bytes_per_block"),
    ),
    f"{_OFFLOAD}.config.OffloadingModelConfig": ("name", "dtype"),
    f"{_OFFLOAD}.config.OffloadingGroupConfig": ("group_id", "tokens_per_block", "layer_names"),
    f"{_OFFLOAD}.config.OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    f"{_OFFLOAD}.config.OffloadingParallelConfig": ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
}
"""Names that secondary.py uses."""

HYBRID: Final[Names] = {
    _BASE: ("get_transfer_results(self, finished_req_ids)",),
    f"{_V1}.base.KVConnectorTransferResults": ("failed_recving",),
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ("block_size", "page_size_bytes", "sliding_window"),
}
"""Names by which requests fail to load that have blocks of several groups of layers, from vLLM 0.32."""

LAYOUT: Final[Names] = {
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("kv_cache_layout",),
    "vllm.v1.kv_cache_layout.KVCacheLayout": ("BLNHC",),
    _BASE: ("get_required_kvcache_layout(cls, vllm_config)",),
}
"""Names by which layers lie side by side, from vLLM 0.29."""

CROSS_LAYERS: Final[Names] = {
    _BASE: ("prefer_cross_layer_blocks", "register_cross_layers_kv_cache(self, kv_cache, attn_backend)"),
}
"""Names by which layers lie side by side, below vLLM 0.29."""


ELASTIC: Final[Names] = {
    "vllm.v1.engine.core.EngineCore": (
        "_initialize_kv_caches(self, vllm_config)",
        "step(self)",
        "step_with_batch_queue(self)",
        "shutdown(self)",
        "model_executor",
        "scheduler",
    ),
    "vllm.v1.executor.abstract.Executor": ("initialize_from_config(self, kv_cache_configs)",),
    "vllm.v1.core.sched.scheduler.Scheduler": ("kv_cache_manager",),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": ("coordinator",),
    "vllm.v1.core.kv_cache_coordinator.BlockPool": (
        *("blocks", "null_block", "free_block_queue", "hash_block_size"),
        "get_new_blocks(self, num_blocks)",
        "touch(self, blocks)",
        "free_blocks(self, ordered_blocks)",
        "get_num_free_blocks(self)",
        "reset_prefix_cache(self)",
        "_maybe_evict_cached_block(self, block)",
        "_insert_block_hash(self, block_hash_with_group_id, block, num_tokens)",
        "_remove_cached_block_hashes(self, block)",
    ),
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": (
        *("fake_free_list_head", "fake_free_list_tail", "num_free_blocks"),
        *("remove(self, block)", "append(self, block)", "prepend_n(self, blocks)"),
    ),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": (*("block_id", "ref_cnt", "is_null", "block_hash", "next_free_block"),),
    "vllm.config.VllmConfig": (
        *("additional_config", "model_config", "cache_config", "device_config", "parallel_config"),
        *("kv_transfer_config", "speculative_config", "lora_config", "scheduler_config"),
    ),
    "vllm.config.ModelConfig": (
        *("max_model_len", "enable_sleep_mode", "model", "revision", "hf_config", "dtype", "quantization"),
        "multimodal_config",
    ),
    "vllm.config.CacheConfig": ("block_size", "prefix_caching_hash_algo", "enable_prefix_caching", "cache_dtype"),
    "vllm.config.SchedulerConfig": ("policy",),
    "vllm.config.DeviceConfig": ("device_type",),
    "vllm.config.ParallelConfig": ("world_size", "data_parallel_size", "distributed_executor_backend"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("num_blocks", "kv_cache_groups", "kv_cache_tensors"),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
}
"""Names that elastic/ uses in each vLLM."""

_COUNTED: Final = "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"

ELASTIC_ONE_BUFFER: Final[Names] = ELASTIC | {
    "vllm.v1.worker.utils": ("allocate_kv_cache(kv_cache_config, device, layout, kernel_block_sizes)",),
    "vllm.v1.executor.abstract.Executor": (
        "initialize_from_config(self, kv_cache_configs)",
        "get_supported_kv_cache_layouts(self)",
    ),
    "vllm.v1.kv_cache_interface.KVCacheTensor": ("size", "layers", "layer_stride", "block_stride", "offset"),
    _COUNTED: (
        "get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks, num_encoder_tokens, "
        "total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, apply_admission_cap, prefill_end)",
    ),
}
"""Names that elastic/ uses from vLLM 0.28 on, where the KV cache is one buffer."""

ELASTIC_TENSORS: Final[Names] = ELASTIC | {
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("_allocate_kv_cache_tensors(self, kv_cache_config)",),
    "vllm.v1.worker.gpu.attn_utils": ("_allocate_kv_cache(kv_cache_config, shared_layers, device)",),
    "vllm.v1.attention.backends.utils": ("get_kv_cache_layout()",),
    "vllm.v1.kv_cache_interface.KVCacheTensor": ("size", "offset", "block_stride"),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": ("page_size_bytes", "page_size_padded", "indexes_kv_by_block_stride"),
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": ("page_size_bytes", "page_size_padded", "indexes_kv_by_block_stride"),
    _COUNTED: (
        "get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks, num_encoder_tokens, "
        "total_computed_tokens, num_tokens_main_model, apply_admission_cap)",
    ),
}
"""Names that elastic/ uses below vLLM 0.28, where the KV cache is a tensor for each layer."""

EXTENDED: Final = frozenset(
    (
        f"{_V1}.base.SupportsHMA",
        *(_BASE, f"{_V1}.base.KVConnectorMetadata", f"{_V1}.base.KVConnectorWorkerMetadata"),
        *(f"{_V1}.metrics.KVConnectorStats", f"{_V1}.metrics.KVConnectorPromMetrics"),
        f"{_OFFLOAD}.tiering.base.SecondaryTierManager",
    )
)
"""Base classes of the adapter's: their abstract methods are all in the tables."""


class Way(NamedTuple):
    """A use of vmmkv in vLLM."""

    name: str
    needs: tuple[tuple[Names, str], ...]
    """Names of which all are needed, and a sentence about vLLM that has them. One of several will do."""


WAYS: Final = (
    Way("KV connector", ((CONNECTOR, 'by "kv_connector": "VmmkvConnector"'),)),
    Way("secondary tier", ((SECONDARY_TIER, 'by "module_path": "vmmkv.adapters.vllm.secondary", on a GPU'),)),
    Way("sliding windows", ((HYBRID, "layers with a window may have blocks of their own beside those of full attention"),)),
    Way(
        "layers side by side",
        (
            (LAYOUT, 'by get_required_kvcache_layout, which is "BLNHC" on a GPU'),
            (CROSS_LAYERS, "by prefer_cross_layer_blocks, on a GPU with the V1 model runner: VLLM_USE_V2_MODEL_RUNNER=0"),
        ),
    ),
    Way(
        "elastic memory",
        (
            (ELASTIC_ONE_BUFFER, "by --additional-config '{\"vmmkv_elastic\": {}}'"),
            (ELASTIC_TENSORS, "by --additional-config '{\"vmmkv_elastic\": {}}', on a GPU"),
        ),
    ),
    Way("metrics", ((METRICS, "as vllm:vmmkv_... in vLLM's log and its /metrics"),)),
)
"""The uses; the connector is the first."""

_TABLES: Final = [names for way in WAYS for names, _ in way.needs]


_TRIALS: Final = {
    "0.25.1": "vmmkv has run in it, on a GPU",
    "0.32": "vmmkv has run in it, on a CPU",
    "0.33": "vmmkv has not run in it, but its sources were read",
}
"""Trials of vmmkv by version of vLLM, or by its first two numbers."""


def trial_of(version: str) -> str | None:
    """The trial of vmmkv in a version of vLLM, as a sentence; None if there was none."""
    return next((text for known, text in _TRIALS.items() if re.match(rf"{re.escape(known)}(?![0-9])", version)), None)


class Verdict(NamedTuple):
    """Judgement of a use of vmmkv: does it work, and how, or why not?"""

    name: str
    works: bool
    reason: str


class _Member(NamedTuple):
    """A member of a class, as in a table."""

    text: str
    is_abstract: bool = False


class Sources:
    """Classes of the vLLM in a folder of packages, read from its files."""

    def __init__(self, packages: Path) -> None:
        self._packages = packages
        self._trees: dict[str, ast.Module | None] = {}

    def differences(self, names: Names) -> Iterator[str]:
        """Say of each name that is not as the table has it how it differs. Raises: OSError, ValueError, as `definition`."""
        for owner, wanted in names.items():
            members, short = self.members(owner), owner.rpartition(".")[2]
            if members is None:
                yield f"{owner} is not there"
                continue
            for each in wanted:
                found = members.get(name := each.partition("(")[0])
                if found is None:
                    yield f"{short}.{name} is not there"
                elif found.text != each:
                    yield f"{short} has {found.text} and not {each}"
            if owner not in EXTENDED:
                continue
            known = {each.partition("(")[0] for table in _TABLES for each in table.get(owner, ())}
            for name, member in members.items():
                if member.is_abstract and name not in known:
                    yield f"{short}.{name} is abstract, and vmmkv has none"

    def definition(self, owner: str) -> tuple[str, ast.ClassDef | ast.Module] | None:
        """The module that defines a class, which its own may import, and the class; of a module itself. None for neither.

        Raises: OSError, and ValueError for a file that is no Python.
        """
        module, _, name = owner.rpartition(".")
        tree = self._tree(module)
        for node in () if tree is None else tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.definition(f"{node.module}.{alias.name}")
        whole = self._tree(owner)
        return None if whole is None else (owner, whole)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            place = self._packages.joinpath(*module.split("."))
            path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            try:
                self._trees[module] = ast.parse(path.read_bytes()) if path.exists() else None
            except SyntaxError as error:
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                raise ValueError(f"{path} is no Python {version}: {error}") from error
        return self._trees[module]

    def members(self, owner: str) -> dict[str, _Member] | None:
        """Members of a class by name, those of its base classes in vLLM too; of a module. None if there is none."""
        if (definition := self.definition(owner)) is None:
            return None
        module, node = definition
        members: dict[str, _Member] = {}
        for base in reversed(node.bases) if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Name):
                members |= self.members(f"{module}.{base.id}") or {}
        return members | _own_members(node)


def _own_members(node: ast.ClassDef | ast.Module) -> dict[str, _Member]:
    """Members by name that a class or module defines itself."""
    members: dict[str, _Member] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign | ast.Assign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            members |= {target.id: _Member(target.id) for target in targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in each.decorator_list}
            text = each.name if decorators & {"property", "cached_property", "setter"} else _signature(each)
            members[each.name] = _Member(text, "abstractmethod" in decorators)
            for other in _uses(each, num_given=int(isinstance(node, ast.ClassDef))):
                members.setdefault(other, _Member(other))
    return members


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A method's name and the names of its parameters."""
    given = function.args
    names = ast.arguments(
        posonlyargs=[ast.arg(each.arg) for each in given.posonlyargs],
        args=[ast.arg(each.arg) for each in given.args],
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in given.kwonlyargs],
        kw_defaults=[None] * len(given.kwonlyargs),
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=[],
    )
    return f"{function.name}({ast.unparse(names)})"


def _uses(function: ast.FunctionDef | ast.AsyncFunctionDef, *, num_given: int) -> Iterator[str]:
    """Members that a method is or makes beside itself: as one without arguments, by its words, and attributes that it sets.

    `num_given`: parameters that each call gives, which is `self`.
    """
    given = function.args
    if len(given.posonlyargs + given.args) - len(given.defaults) <= num_given and None not in given.kw_defaults:
        yield f"{function.name} without arguments"
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield f"{function.name} reading {node.value!r}"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def packages_with_vllm() -> Path | None:
    """The folder of packages with the vLLM that this Python would import; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0]).parent if places else None


def version_of(packages: Path) -> str:
    """The version of the vLLM in a folder of packages."""
    path = packages / "vllm" / "_version.py"
    found = re.search(r"^__version__ = .*'(.+)'$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else None
    return found[1] if found else "of unknown version"


def examine(packages: Path) -> list[Verdict]:
    """Judge each use of vmmkv in the vLLM of a folder of packages. Cost: some 0.3 s. Raises: OSError, ValueError."""
    sources, verdicts = Sources(packages), []
    for way in WAYS:
        answers = [([*sources.differences(names)], sentence) for names, sentence in way.needs]
        lacks, sentence = min(answers, key=lambda answer: len(answer[0]))
        more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
        verdicts.append(Verdict(way.name, not lacks, f"{lacks[0]}{more}" if lacks else sentence))
    return verdicts


def refuse_unknown(use: str = "the vmmkv connector", tables: Sequence[Names] = (CONNECTOR,)) -> None:
    """Check the vLLM that this Python would import for what a use needs: all of one table. Cost: some 0.2 s.

    Raises: ImportError.
    """
    if (packages := packages_with_vllm()) is None:
        return
    sources = Sources(packages)
    if differences := min(([*sources.differences(names)] for names in tables), key=len):
        version = version_of(packages)
        raise ImportError(f"{use} does not know vLLM {version}: {differences[0]}; see `vmmkv doctor vllm`")
