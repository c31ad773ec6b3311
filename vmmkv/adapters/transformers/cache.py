"""A Cache of transformers: each sequence's keys and values lie contiguously, in memory that is mapped as tokens come.

    pool = Pool("cuda:0", budget_bytes=40 * GIB)
    with VmmCache(model.config, pool) as cache:
        model.generate(**inputs, past_key_values=cache)

New rows are written in place behind the old ones, and attention reads views of them. Only addresses are reserved. Equal prompts
side by side, as with beams and `num_return_sequences`, are kept once; so are the full pages that a repeated, reordered or
deep-copied cache has in common with others. Any attention implementation works that takes strided keys and values.

For transformers from 5.17 on. Models whose layers keep more than keys and values by token are refused: encoder-decoders, Mamba
and other recurrent layers. So are gradients, layers on several devices, offloading, and capture in a CUDA graph.

With the attention implementation "vmmkv" a step of `torch.compile(model, dynamic=True)` is one graph. With another one the
graph breaks at every layer. It also breaks in models that read other layers' rows, keep latents (DeepSeek's), or have attention
sinks (gpt-oss).
"""

import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from vmmkv.adapters.transformers import attention
from vmmkv.adapters.transformers.batch import CachedBatch, WindowRows
from vmmkv.arguments import whole
from vmmkv.errors import Closed, LayoutError
from vmmkv.memory.pool import Pool
from vmmkv.units import counted


class VmmCache(Cache):  # type: ignore[misc]
    """Keys and values of one batch at a time, for `past_key_values` of a model of transformers.

    `config` is the model's. `max_tokens` bounds a sequence, padding included; it costs addresses only, and is the model's
    max_position_embeddings by default. `slots` is the number of sequences with addresses, over this cache and its deep copies;
    at least three times the first batch. Layers of one window have an arena of their own.

    `share_prompts` keeps equal prompts side by side once. They are recognised by the keys and values of the first layer. Say
    False if rows of equal tokens differ past it (a hook or an adapter for one row), or in the attention mask alone.

    `copy.deepcopy` forks: full pages are shared, and the copy is closed for itself. Several caches can share a pool. `close`
    gives the memory back; `reset` does too, and keeps the addresses.

    Raises: LayoutError for a model that is not supported; ValueError; Closed for a closed pool; in the first pass DriverError
    if the driver lacks addresses. A forward pass raises OutOfPages and SequenceTooLong (see Sequence.grow) before anything is
    written; a first pass then leaves nothing. If a pass fails otherwise, `crop(0)` takes back what it wrote.
    """

    def __init__(
        self, config: Any, pool: Pool, *, max_tokens: int | None = None, slots: int = 64, share_prompts: bool = True
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"VmmCache(config, pool, ...) takes a Pool, not {type(pool)}")
        _check_pool(pool)
        layers = layers_of(self, config)
        if max_tokens is None:
            max_tokens = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
            if max_tokens is None:
                raise ValueError(f"{config.model_type} does not say how long a sequence can be; give max_tokens")
        max_tokens, slots = whole("max_tokens", max_tokens), whole("slots", slots)
        if max_tokens < 1 or slots < 1:
            raise ValueError(f"max_tokens={max_tokens}, slots={slots}: both must be at least 1")
        by_window: dict[int | None, list[int]] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, RowLayer):
                by_window.setdefault(layer.sliding_window, []).append(index)
        groups = [
            WindowRows(tuple(indices), window, pool, slots=slots, max_tokens=max_tokens)
            for window, indices in by_window.items()
        ]
        self._start(layers, CachedBatch(groups, share_prompts=share_prompts), pool, max_tokens, config)

    def _start(self, layers: list[Any], batch: CachedBatch, pool: Pool, max_tokens: int, config: Any) -> None:
        super().__init__(layers=layers)
        self._config = config
        self._number = attention.enter(self)
        self.pool = pool
        self.max_tokens = max_tokens
        self._batch = batch
        self._closed = False

    # a forward pass

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Write a layer's keys and values of the new tokens behind the others; all that the tokens see, as strided views.

        In a graph of torch.compile that is left to the model's attention if it is vmmkv's; before any other the graph breaks.

        Cost: two copies of the new rows. In the first layer of a pass, memory for all layers: see Sequence.grow; and the copies
        or forks that a reordered, repeated or selected batch takes.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError(
                "a VmmCache passes no gradients on: run the model under torch.no_grad() or torch.inference_mode(); to train, "
                "take a DynamicCache"
            )
        if not torch.compiler.is_compiling():
            return self.append(key_states, value_states, layer_idx)
        if self._is_attended_by_vmmkv:
            num_past = self._batch.num_tokens
            return attention.PendingRows(key_states, value_states, self._number, layer_idx, num_past), value_states
        seen: tuple[Tensor, Tensor] = self._append_outside(key_states, value_states, layer_idx)
        return seen

    def append(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, num_past: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`update` outside a graph, or when a graph runs: `num_past` is the number of tokens that its positions begin at."""
        self._check_open()
        if self.pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a VmmCache maps memory and counts tokens on the host, which a CUDA graph would not do again: run the model "
                "outside the capture"
            )
        if num_past is not None and num_past != self._batch.num_tokens:
            raise RuntimeError(
                f"this graph was entered with {num_past} tokens in the VmmCache, and now there are {self._batch.num_tokens}: "
                f"what is compiled can run the model once over a cache, and change it in no other way; compile the model, not "
                f"the loop around it"
            )
        return self._batch.append(layer_idx, key_states, value_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it maps memory and counts on the host
    def _append_outside(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.append(*args)

    @property
    def _is_attended_by_vmmkv(self) -> bool:
        """Does the model attend by vmmkv, and does each layer read only the rows that it appends itself?"""
        config = self._config.get_text_config(decoder=True)
        reads_others_rows = getattr(config, "num_kv_shared_layers", 0)
        keeps_latents = getattr(config, "kv_lora_rank", None)  # which it expands to keys and values after the update
        has_sinks = config.model_type in attention.WITH_SINKS
        return config._attn_implementation == attention.NAME and not (reads_others_rows or keeps_latents or has_sinks)

    def states(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that the next token sees, [batch, kv heads, tokens, head dim]: views, to be read only.

        A copy while equal prompts are kept once. Valid until the next call of the cache or the model.
        """
        self._check_open()
        if not self._batch.num_tokens:
            raise ValueError("the cache has no tokens yet, and so no keys and values")
        return self._batch.states(layer_idx)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Of each layer keys, values (see `states`; None before the first token) and window, as a DynamicCache gives them."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window, device=self.pool.device)

    # what transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence, padding included, in this layer."""
        return self._batch.num_tokens + (self._batch.num_new if layer_idx in self._batch.written else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys a layer gives the next `query_length` tokens, and the number of the first.

        Raises: ValueError for no tokens, which is what generate leaves of a prompt half as long as what the cache holds.
        """
        num_tokens = self._batch.num_tokens
        if query_length == 0:
            if not num_tokens:
                raise ValueError("no token is new, and the cache has none: give the model a prompt")
            raise ValueError(
                f"no token is new: the cache has a batch of {self._batch.size} with {num_tokens} tokens each, and generate "
                f"takes a prompt for these and what follows them. reset() begins anew, with a batch of any size; to go on, "
                f"give all {num_tokens} tokens and those behind them"
            )
        first = self._batch.rows_of(layer_idx).first_token(num_tokens)
        return num_tokens - first + query_length, first

    @property
    def is_initialized(self) -> bool:
        """Has it tokens? Models in which a prompt's tokens see each other both ways ask whether this pass is the first."""
        return self._batch.num_tokens > 0

    @property
    def batch_size(self) -> int:
        """Rows of the model's batch, or -1 if there is none yet, as transformers says it."""
        size = self._batch.size
        return -1 if size is None else size

    def activate_past_recording(self) -> None:
        """From now on windows keep what they have passed until `crop`, so that it can go back there. For drafts of tokens."""
        self._batch.record_past = True

    # the batch

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number, and what an unfinished forward pass wrote.

        Windows then give back what they have passed. Cost: see Sequence.truncate; no copy, unless a page is shared.
        All or none. Raises: ValueError; RowsUnmapped if a window has passed rows that are needed; OutOfPages if the last
        token's page is shared and no page is free for a copy.
        """
        self._check_open()
        removed, num_tokens = whole("tokens_to_remove", tokens_to_remove), self._batch.num_tokens
        if not -num_tokens <= removed <= 0:
            raise ValueError(f"crop({removed}): give minus the number of tokens to remove, of {num_tokens} that there are")
        self._batch.crop(num_tokens + removed)

    def reset(self) -> None:
        """End all sequences: the memory goes back to the pool, the addresses stay. The next batch may have another size."""
        self._check_open()
        self._batch.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch goes on from row `beam_idx[i]`. Rows that the two do not share are copied before the next token.

        Cost: reads the indices, which waits for the device.
        """
        self._check_open()
        self._batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times, side by side. Forks before the next token: full pages are shared."""
        self._check_open()
        repeats = whole("repeats", repeats)
        self._batch.select([row for row in range(self._batch.size or 0) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch: their numbers, or a mask. Cost: as reorder_cache, and forks."""
        self._check_open()
        rows = torch.arange(self._batch.size or 0)
        self._batch.select(rows[torch.as_tensor(indices, device="cpu")].tolist() if len(rows) else [])

    # the whole

    def __deepcopy__(self, memo: dict[int, Any]) -> "VmmCache":
        """A fork of the whole batch in other slots. Raises: as KVCache.fork_batch."""
        self._check_open()
        memo[id(self)] = other = type(self).__new__(type(self))
        layers = [
            RowLayer(other, index, layer.sliding_window) if isinstance(layer, RowLayer) else layer
            for index, layer in enumerate(self.layers)
        ]
        other._start(layers, self._batch.fork(), self.pool, self.max_tokens, self._config)
        return other

    def close(self) -> None:
        """Give all memory back. If no deep copy is left, later caches of the same sizes reuse the addresses. Idempotent.

        Cost: see KVCache.close.
        """
        self._closed = True
        self._batch.close()

    def check(self) -> None:
        """Recount the laws from scratch, of all arenas and the pool. See KVCache.check."""
        for rows in self._batch.groups:
            if not rows.closed:
                rows.cache.check()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this VmmCache is closed; make another")
        _check_pool(self.pool)

    def __enter__(self) -> "VmmCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not all(rows.closed for rows in self._batch.groups):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._closed or self.pool.closed:
            return f"<VmmCache on {self.pool.device}, closed>"
        tokens = counted(self._batch.num_tokens, "token")
        return f"<VmmCache on {self.pool.device}: a batch of {self._batch.size or 0} with {tokens} each>"


def _check_pool(pool: Pool) -> None:
    if pool.closed:
        raise Closed("the pool of this VmmCache is closed; make another, and close it after its caches")


# the layers of a model


class RowLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer of a VmmCache, which has the state. What concerns the batch is called on the cache, for all layers at once."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "VmmCache", index: int, window: int | None) -> None:
        # Not the base class's own, which sets `keys` and `values`: they are views here.
        self._cache = cache
        self._index = index
        self.is_sliding = window is not None
        self.sliding_window = window

    @property
    def is_initialized(self) -> bool:
        """Has it keys and values?"""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> Tensor | None:
        """Keys that the next token sees, [batch, kv heads, tokens, head dim], or None."""
        return self._cache.states(self._index)[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """Values, likewise."""
        return self._cache.states(self._index)[1] if self.is_initialized else None

    @property
    def record_past(self) -> bool:
        """Are rows kept that the window has passed, until `crop`?"""
        return self._cache._batch.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._cache._batch.record_past = value

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """See VmmCache.update."""
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        """Tokens written, whatever the window."""
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next `query_length` tokens see, and the number of the first."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_max_length(self) -> int:
        """The window, or the most tokens that a sequence can have."""
        return self._cache.max_tokens if self.sliding_window is None else self.sliding_window

    def lazy_initialization(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("a VmmCache takes memory as tokens come, none beforehand: just run the model")

    def _refuse_alone(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("all layers of a VmmCache share their rows: call this on the cache, not on one of its layers")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse_alone

    def _refuse_offload(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a VmmCache keeps all layers on its pool's device; a pool of device 'cpu' is host memory")

    offload = prefetch = _refuse_offload


def layers_of(cache: "VmmCache", config: Any) -> list[Any]:
    """The layers of a cache for a model: a RowLayer for each layer of which transformers keeps keys and values.

    Layers that only read another layer's rows stay transformers' own. Raises: LayoutError, naming unsupported layers.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"VmmCache(config, pool, ...) takes a model's configuration, such as model.config, not {type(config)}")
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(
            f"{config.model_type} is an encoder and a decoder, and their cross-attention has a cache of another kind; VmmCache "
            f"is for decoders: leave past_key_values to transformers here"
        )
    placeholder = getattr(cache_utils, "DummyLayer", ())  # of layers that keep nothing; not every release has it
    layers: list[Any] = []
    others: dict[str, list[int]] = {}
    for index, layer in enumerate(cache_utils.DynamicCache(config=config).layers):
        if type(layer) is cache_utils.DynamicLayer:
            layers.append(RowLayer(cache, index, None))
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            layers.append(RowLayer(cache, index, layer.sliding_window))
        elif isinstance(layer, placeholder):
            layers.append(layer)
        else:
            others.setdefault(type(layer).__name__, []).append(index)
    if others:
        kinds = "; ".join(f"{kind} in layers {', '.join(map(str, numbers))}" for kind, numbers in others.items())
        raise LayoutError(
            f"{config.model_type} keeps more than keys and values by token: {kinds}. VmmCache is for layers of full and of "
            f"sliding-window attention; use DynamicCache(config=model.config) here"
        )
    if not any(isinstance(layer, RowLayer) for layer in layers):
        raise LayoutError(f"{config.model_type} has no layer that keeps keys and values")
    return layers
