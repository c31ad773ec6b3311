"""Loading of an engine by its configuration: the model, the memory, the warm-up, the graphs."""

import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.nn import functional

from vmmkv import KVLayout, KVType
from vmmkv.driver import open_driver
from vmmkv.driver.base import check_budget
from vmmkv.errors import DriverUnavailable, LayoutError
from vmmkv.holder import check_there
from vmmkv.prefix import PrefixListener
from vmmkv.tier import Tier
from vmmkv.units import ceil_div
from vmmkv.unmodified import settle_rotary
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine.attention import KVRows
from vmmkv_server.engine.collectives import Collectives
from vmmkv_server.engine.engine import FEATURES, Engine
from vmmkv_server.engine.feature import metrics_of
from vmmkv_server.engine.kv_backend import (
    BackendConfig,
    KVBackend,
    OpenBackend,
    SlotBackend,
    check_lengths,
    close_after_error,
)
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.models.checkpoint import load_by_transformers, refuse_codes, refuse_made_codes
from vmmkv_server.engine.models.decoder import Decoder, DecoderConfig, DecoderModel, Unsupported
from vmmkv_server.engine.models.shard import Shard, Share, split
from vmmkv_server.engine.models.transformers import TransformersModel
from vmmkv_server.engine.models.weights import load as load_weights
from vmmkv_server.engine.models.weights import random as random_weights
from vmmkv_server.engine.ranks import Ranks
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.servable import (
    INSTEAD,
    check_servable,
    end_tokens,
    quantised_by,
    read_config,
    read_model,
    refusing,
)
from vmmkv_server.engine.step import Chunk, Step
from vmmkv_server.engine.uploads import TokenMasks
from vmmkv_server.kv_policy import Eviction
from vmmkv_server.models import UnsupportedModel
from vmmkv_server.protocol import FromEngine, Generate, KVEventSource, Loading, Ready
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.structured_output.matcher import Vocabulary

log = logging.getLogger(__name__)

STEP_TOKENS: Final = {"cpu": 512, "cuda": 8192}
"""Default of the most tokens of one step. On a CPU a longer one would delay all other requests by seconds."""

PREPARE_S: Final = 1.0
"""The longest time for which a start maps what an earlier engine left with the holder."""

_STAGES: Final = ("loading weights", "meeting the other ranks", "preparing the cache", "warming up", "capturing graphs")
"""Stages of a start, in order; without other ranks there is no meeting, and on a CPU there are no graphs."""

HASHED_WORDS: Final = 1 << 18
"""Words of weights that are hashed at once, 2 MiB: a CPU's caches hold so much."""

LOOKAHEAD: Final = {"cpu": 0, "cuda": 2}
"""Steps in flight while the next is scheduled. On a CPU a step is over when it is launched."""


class EventPublisher(PrefixListener, Protocol):
    """Publisher of what a prefix cache gains and loses."""

    @property
    def source(self) -> KVEventSource:
        """Addresses at which it publishes."""

    def close(self) -> None:
        """End the publishing. Idempotent."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready to work, its memory, and its limits."""

    engine: Engine
    ready: Ready
    memory: KVBackend
    events: EventPublisher | None = None
    ranks: Ranks | None = None

    def close(self) -> None:
        """End the threads and the other ranks, and give all memory back. It can be called again if it fails."""
        if self.ranks is not None:
            self.ranks.close()
        if self.events is not None:
            self.events.close()
        self.engine.close()
        self.memory.close()


def load(config: EngineConfig, send: Callable[[FromEngine], None]) -> Loaded:
    """Load everything that `config` names; `config.model` is a directory. Sends Loading messages on the way.

    Raises: ValueError or OSError if the model is not one that can be served; DriverUnavailable; DriverError; OutOfPages;
    HolderUnavailable.
    """
    device = choose_device(config.device)
    if config.kv_budget_bytes is not None:
        check_budget(config.kv_budget_bytes, open_driver(device), "lower kv_budget_bytes, or leave it out for what is free")
    for path in filter(None, (config.kv_holder, config.kv_lender)):
        check_there(path)
    _begin("loading weights", send)
    with current(device), contextlib.ExitStack() as undo:
        events, tiers = open_events(config, undo), open_tiers(config, device, undo)
        ranks = open_ranks(config, device, undo)
        collectives = None if ranks is None else ranks.collectives
        source = ModelSource(config, device, choose_dtype(config.dtype, device), collectives)
        if ranks is not None:
            _begin("meeting the other ranks", send)
            ranks.connect(device)
            if tiers:
                from vmmkv_server.engine.tiers import mirror

                mirror(tiers, ranks)
        loaded = assemble(config, source, send, tiers=tiers, events=events, ranks=ranks)
        undo.callback(loaded.close)
        until_s = time.monotonic() + PREPARE_S
        loaded.engine.prepare(wait=lambda: time.monotonic() > until_s)
        undo.pop_all()
        return loaded


def _begin(stage: str, send: Callable[[FromEngine], None]) -> None:
    send(Loading(stage=stage, done=_STAGES.index(stage), total=len(_STAGES)))


def assemble(
    config: EngineConfig,
    source: "ModelSource",
    send: Callable[[FromEngine], None],
    *,
    open_memory: OpenBackend = SlotBackend.open,
    tiers: Sequence[Tier] = (),
    events: EventPublisher | None = None,
    ranks: Ranks | None = None,
) -> Loaded:
    """An engine from a model that is loaded, over memory of its own, which closes the tiers too. Sends Loading messages.

    Raises: as `load`.
    """
    _begin("preparing the cache", send)
    wanted = _wanted_memory(config, source, tiers, ranks)
    with contextlib.ExitStack() as undo:
        memory = open_memory(wanted)
        undo.callback(close_after_error, memory)
        _begin("warming up", send)
        model = source.over(memory.rows)
        parallel = model if ranks is None else ranks.model(model, memory)
        max_rows = min(config.max_num_seqs, memory.num_slots)
        runner = Runner(parallel, memory, max_rows=max_rows, max_tokens=wanted.step_tokens, ranks=ranks)
        undo.callback(runner.close)
        prefill = _warm_up_and_capture(runner, model, memory, wanted, send)
        _note_prefill_kernel(source)
        memory.take_free()
        engine = Engine(
            memory,
            runner,
            max_sequences=config.max_num_seqs,
            eos_ids=source.end_tokens,
            step_tokens=wanted.step_tokens,
            lookahead=LOOKAHEAD[source.device.type],
            send=send,
            vocabulary=lambda: Vocabulary.load(Path(config.model), model.vocabulary_size, sorted(source.end_tokens)),
            kv_policy=config.kv_policy,
        )
        engine.prefilled(*prefill)
        ready = _ready(config, source, engine, events, max_tokens=wanted.max_tokens, implementation=model.implementation)
        if events is not None:
            assert memory.prefixes is not None, "the server's engine has a prefix tree"
            memory.prefixes.listen(events)
        undo.pop_all()
    return Loaded(engine, ready, memory, events, ranks)


def _wanted_memory(config: EngineConfig, source: "ModelSource", tiers: Sequence[Tier], ranks: Ranks | None) -> BackendConfig:
    """Needs of an engine for memory, by its configuration and its model."""
    return BackendConfig(
        layout=source.layout,
        device=source.device,
        max_sequences=config.max_num_seqs,
        max_tokens=choose_max_tokens(config.max_tokens, source.text_config),
        step_tokens=config.max_num_batched_tokens or STEP_TOKENS[source.device.type],
        shares_prefixes=config.prefix_cache,
        budget_bytes=config.kv_budget_bytes,
        holder=config.kv_holder,
        lender=config.kv_lender,
        tiers=tiers,
        fingerprint=source.fingerprint if tiers or config.kv_holder or config.kv_lender else "",
        driver=None if ranks is None else ranks.mirrored(open_driver(source.device)),
    )


def _warm_up_and_capture(
    runner: Runner, model: EngineModel, memory: KVBackend, wanted: BackendConfig, send: Callable[[FromEngine], None]
) -> tuple[int, float, float]:
    """Reach torch's peak of memory, and make the graphs on a GPU. Returns a prefill's tokens, begin and end: see `warm_up`."""
    longest = min(wanted.step_tokens, wanted.max_tokens - 1, memory.num_tokens)
    with refusing(model.name) if isinstance(model, TransformersModel) else contextlib.nullcontext():
        prefill = warm_up(runner, memory, longest)
    if memory.device.type == "cuda" and model.capturable:
        _begin("capturing graphs", send)
        runner.capture()
        prefill = warm_up(runner, memory, longest)  # to capture, torch has given back what the longest step takes
    return prefill


def _note_prefill_kernel(source: "ModelSource") -> None:
    """Log that quantised rows keep an H200 from its faster prefill."""
    on_hopper = source.device.type == "cuda" and torch.cuda.get_device_capability(source.device) == (9, 0)
    if on_hopper and isinstance(source.kv_dtype, KVType):
        log.info("prefill over %s rows is by the Triton kernel: that for Hopper reads bfloat16 alone", source.kv_dtype.kind)


def _ready(
    config: EngineConfig,
    source: "ModelSource",
    engine: Engine,
    events: EventPublisher | None,
    *,
    max_tokens: int,
    implementation: str,
) -> Ready:
    """The message that an engine is ready. Raises: ValueError if its limits refuse the default `kv_policy`."""
    memory = engine.memory
    limits = replace(engine.limits, model_tokens=max_tokens, pool_tokens=memory.num_tokens, budget_bytes=memory.budget_bytes)
    if config.kv_policy is not None and (eviction := Eviction.of(config.kv_policy)) is not None:
        limits.check_policy(eviction)
    return Ready(
        model=config.model,
        device=str(source.device),
        dtype=str(source.dtype).removeprefix("torch."),
        kv_cache_dtype=str(getattr(source.kv_dtype, "kind", source.kv_dtype)).removeprefix("torch."),
        num_ranks=config.tensor_parallel_size,
        implementation=implementation,
        limits=limits,
        end_tokens=sorted(source.end_tokens),
        kv_events=None if events is None else events.source,
        feature_metrics=metrics_of(type(feature) for feature in engine.features.every),
    )


class ModelSource:
    """The weights of a model on a device, before there is a cache.

    The model is run by the config-driven decoder if that supports it, else by transformers' own code; `model_impl` forces one.
    With `collectives` it is one rank's part.
    Raises: ValueError, of the kind UnsupportedModel for an architecture that cannot be served, or OSError.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, dtype: torch.dtype, collectives: Collectives | None = None
    ) -> None:
        self.device: Final = device
        self.dtype: Final = dtype
        self.kv_dtype: Final = dtype if config.kv_cache_dtype == "auto" else KVType(config.kv_cache_dtype)
        directory = Path(config.model)
        self._configuration = (directory / "config.json").read_bytes()
        hf_config = read_config(directory)
        if (code := getattr(hf_config, "auto_map", None)) and (collectives is None or collectives.rank == 0):
            log.warning(
                "config.json names code of its own (%s), which is not run: %s is run as the %s that transformers knows",
                ", ".join(map(str, code.values() if isinstance(code, Mapping) else [code])), directory, hf_config.model_type,
            )  # fmt: skip
        if config.load_format == "dummy":
            refuse_made_codes(directory, hf_config)
        check_servable(directory, hf_config, on_gpu=device.type == "cuda")
        self.text_config = hf_config.get_text_config()
        self._whole: Final = choose_layout(self.text_config, self.kv_dtype)
        self.layout: Final = self._whole.of_rank(config.tensor_parallel_size)
        longest = config.max_tokens or getattr(self.text_config, "max_position_embeddings", None)
        if longest is not None:  # refuse before the weights are read; `assemble` refuses a model that does not say
            check_lengths(
                self.layout,
                device,
                max_sequences=config.max_num_seqs,
                max_tokens=choose_max_tokens(longest, self.text_config),
                shares_prefixes=config.prefix_cache,
            )
        self.end_tokens = end_tokens(directory, hf_config)
        self._rotary = ""
        """The length that rotary frequencies depend on beside the model, as text; part of the identity of its rows."""
        if config.load_format != "dummy":
            refuse_codes(directory, hf_config)
        self._decoder: Final = self._load_decoder(config, hf_config, collectives)
        self._transformers: Any = None if self._decoder else self._load_transformers(config, hf_config, collectives)

    def _load_decoder(self, config: EngineConfig, hf_config: Any, collectives: Collectives | None) -> Decoder | None:
        """The config-driven decoder; None if it is not wanted, or does not support the model."""
        if config.model_impl == "transformers":
            return None
        try:
            whole = DecoderConfig.of(hf_config)
            shard = Shard(whole) if collectives is None else Shard(whole, collectives.rank, collectives.num_ranks)
            if config.load_format == "dummy":
                weights = random_weights(shard, self.device, self.dtype, config.seed)
            else:
                weights = load_weights(Path(config.model), shard, self.device, self.dtype)
        except Unsupported as error:
            if config.model_impl == "vmmkv":
                raise ValueError(f"model_impl='vmmkv' cannot run {config.model}: {error}; use 'auto'") from error
            log.info("this model runs by transformers' own code: %s", error)
            return None
        return Decoder(shard.own, weights, ranks=collectives)

    def _load_transformers(self, config: EngineConfig, hf_config: Any, collectives: Collectives | None) -> Any:
        """A model of transformers, or one rank's part of it."""
        import transformers

        directory = Path(config.model)
        transformers.utils.logging.disable_progress_bar()
        method = quantised_by(directory, hf_config)
        what, instead = (", quantised by " + method, INSTEAD) if method else ("", None)
        with refusing(f"a model of type {hf_config.model_type}{what}", instead):
            if config.load_format == "dummy":
                torch.manual_seed(config.seed)
                model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=self.dtype)
            else:
                model = load_by_transformers(directory, hf_config, self.dtype)
        if collectives is not None:
            self._split(model, hf_config.model_type, collectives)
        if settle_rotary(model, max_tokens := choose_max_tokens(config.max_tokens, self.text_config)):
            log.info("rotary frequencies of this model depend on lengths: they are those of max_tokens=%s", max_tokens)
            self._rotary = f" rotary of {max_tokens}"
        return model.eval().to(self.device)

    def _split(self, model: Any, model_type: str, collectives: Collectives) -> None:
        """Leave a model of transformers one rank's part of the weights."""
        model.get_input_embeddings().to(self.device)  # first: the part of a tied head is a view of it
        shapes = {(group.plane("k").heads, group.plane("k").dim) for group in self._whole.groups}
        if len(shapes) > 1 or getattr(self.text_config, "per_layer_attributes", None):
            raise UnsupportedModel(
                f"a model of type {model_type} cannot be split over {collectives.num_ranks} ranks: its layers "
                f"differ in their heads; tensor_parallel_size=1 works"
            )
        ((num_kv, _),) = shapes
        split(model, Share(self.text_config.num_attention_heads, num_kv, collectives.rank, collectives.num_ranks), collectives)

    @property
    def fingerprint(self) -> str:
        """Tells models apart whose rows a tier may have: by configuration, weights, type, code, and frequencies."""
        if self._decoder is None:
            code, weights = "transformers", self._transformers.state_dict()
        else:
            code, weights = "vmmkv", self._decoder.weights.named(self._decoder.config)
        configuration = hashlib.blake2b(self._configuration, digest_size=16).hexdigest()
        return f"{configuration} {weights_identity(weights)} {self.dtype} {code}{self._rotary}"

    def over(self, rows: KVRows) -> EngineModel:
        """The model over the rows of a cache."""
        if self._decoder is not None:
            return DecoderModel(self._decoder, rows)
        return TransformersModel(self._transformers, rows)


def weights_identity(weights: Mapping[str, torch.Tensor]) -> str:
    """A hash of all bytes of a model's weights, where they are: the same on every machine that has the same ones.

    Cost: 0.5 s for each GB on a CPU; a launch of two kernels for each 2 MiB on a GPU.
    """
    sums = {}
    for name, tensor in weights.items():
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        end = len(flat) // 8 * 8
        if flat.storage_offset() % 8:
            flat = flat.clone()
        parts = [*torch.split(flat[:end], 8 * HASHED_WORDS), functional.pad(flat[end:], (0, -len(flat) % 8))]
        factors = 2 * torch.arange(HASHED_WORDS, device=tensor.device) + 1  # odd and different: no change of a word is lost
        words = (part.view(torch.int64) for part in parts)
        sums[name] = torch.stack([(each * factors[: len(each)]).sum() for each in words])  # modulo 2**64
    text = repr([(name, tuple(weights[name].shape), each.tolist()) for name, each in sums.items()])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def open_ranks(config: EngineConfig, device: torch.device, undo: contextlib.ExitStack) -> Ranks | None:
    """The processes of the other ranks, if there are any; `undo` ends them. Raises: DriverUnavailable, ValueError, OSError."""
    if config.tensor_parallel_size == 1:
        return None
    choose_device(config.device, config.tensor_parallel_size - 1)
    num_heads = read_model(read_config(Path(config.model))).num_heads
    if config.tensor_parallel_size > num_heads:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size}: ranks share the attention heads, and this model has "
            f"{num_heads} of them; lower it to {num_heads} or less"
        )
    ranks = Ranks.start(config, device)
    undo.callback(ranks.close)
    return ranks


def open_events(config: EngineConfig, undo: contextlib.ExitStack) -> EventPublisher | None:
    """The publisher of KV events, if it was asked for; `undo` closes it. Raises: ValueError."""
    if config.kv_events is None:
        return None
    from vmmkv_server.engine.kv_events import KVEventPublisher

    publisher = KVEventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic or "")
    undo.callback(publisher.close)
    return publisher


def open_tiers(config: EngineConfig, device: torch.device, undo: contextlib.ExitStack) -> list[Tier]:
    """The tiers that were asked for, the fastest first, with their memory and disk space; `undo` closes them.

    A shared store need not answer yet. Raises: BudgetError naming what fits, TierUnavailable, ValueError, OSError.
    """
    if config.kv_host_budget_bytes is None and config.kv_disk is None and config.kv_store is None:
        return []
    from vmmkv_server.engine.tiers import opened

    return opened(config, device, undo)


def choose_layout(text_config: Any, dtype: torch.dtype | KVType) -> KVLayout:
    """The layout of a model's keys and values. Raises: UnsupportedModel for layers that keep anything else."""
    try:
        return KVLayout.from_config(text_config, dtype)
    except LayoutError as error:
        raise UnsupportedModel(f"a model of type {text_config.model_type} cannot be served: {error}") from error


def choose_max_tokens(wanted: int | None, text_config: Any) -> int:
    """The longest sequence: as wanted, by default all of the model's positions. Raises ValueError for more."""
    reach: int | None = getattr(text_config, "max_position_embeddings", None)
    longest = wanted if wanted is not None else reach
    if longest is None:
        raise ValueError("the model's configuration does not say how long its sequences may be: give max_tokens")
    if reach is not None and longest > reach:
        raise ValueError(f"max_tokens={longest} is more than this model's positions reach, {reach}")
    return longest


def choose_device(device: str, rank: int = 0) -> torch.device:
    """The device that was named, or for `auto` the first GPU if torch sees one, else the CPU. A rank's GPU is so many further.

    Raises: DriverUnavailable if there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda:0" if count else "cpu"
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return chosen
    index = (chosen.index or 0) + rank
    if index >= count:
        seen = "torch sees no GPU here" if not count else f"torch sees {count} here, numbered from 0"
        if rank:
            raise DriverUnavailable(f"tensor_parallel_size={rank + 1} needs a GPU for each rank: {seen}; lower it")
        last = f"cuda:{count - 1}, " if count else ""
        raise DriverUnavailable(f"device={device!r}: {seen}; use {last}cpu or auto")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current. Graphs, events and pinned memory are of the current one, whatever GPU their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type that was named, or for `auto` bfloat16 on a GPU and float32 on a CPU."""
    name = {"cuda": "bfloat16", "cpu": "float32"}[device.type] if dtype == "auto" else dtype
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def warm_up(runner: Runner, memory: KVBackend, num_tokens: int) -> tuple[int, float, float]:
    """Run the largest prefill, a decode step with every sampling option, one with a mask only, and what features add to steps.

    Kernels compile, and torch's peak of memory is reached. The prefill is run twice: first it shows whether the model can, then
    the rate of prefill: its tokens, and when it began and ended, of time.perf_counter, are returned.

    Raises: ValueError if the model cannot be served.
    """
    # One likeliest token of one row is not sorted: a kernel that sorts more may be loaded by the first request for them.
    params = SamplingParams(max_tokens=1, top_k=1, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=20, prompt_logprobs=1)
    everything = Generate(request_id="warm-up", prompt=[0] * num_tokens, params=params)
    request = Request(everything, frozenset())
    with contextlib.closing(memory.begin()) as sequence:
        sequence.grow(num_tokens)
        request.sequence = sequence
        runner.sampler.assign([request])
        prefill, last = (0, 0.0, 0.0), num_tokens - 1
        whole = Chunk(request, sequence, 0, request.prompt[:last])
        behind = Chunk(request, sequence, last, request.prompt[last:])
        for chunk in (whole, whole, behind) if last else (behind,):
            began_s = time.perf_counter()
            _compute(runner, chunk)
            if chunk is whole:
                prefill = last, began_s, time.perf_counter()
            runner.model.check()
        runner.sampler.release(sequence.slot)
        _compute(runner, behind)
        for feature in FEATURES if last else ():
            feature.warm_up(runner, whole, behind, functools.partial(_compute, runner))
    runner.uploads.send(_masks(runner, memory.num_slots).packed)  # as many masks as there can be: memory is there then
    return prefill


def _compute(runner: Runner, chunk: Chunk, **wanted: Any) -> None:
    no_slots = np.zeros(0, np.int64)
    forwarded = runner.forward(Step(no_slots, no_slots, no_slots, [chunk], **wanted))
    masks = _masks(runner, len(forwarded.slots))
    masks.words_GW.fill_(-1)
    runner.wait(runner.sample(forwarded, masks))


def _masks(runner: Runner, num_rows: int) -> TokenMasks:
    return TokenMasks.of(list(range(num_rows)), ceil_div(runner.model.vocabulary_size, 32), runner.uploads)
