"""A Cache of transformers: each sequence's keys and values lie contiguously, in memory that is mapped as tokens come.

    pool = Pool("cuda:0", budget_bytes=40 * GIB)
    with VmmCache(model.config, pool) as cache:
        model.generate(**inputs, past_key_values=cache)

New rows are written in place behind the old ones, and attention reads views of them. Only addresses are reserved. Equal prompts
side by side, as with beams and `num_return_sequences`, are kept once; so are the full pages that a repeated, reordered or
deep-copied cache has in common with others. Any attention implementation works that takes strided keys and values.

For transformers from 5.17 on. Models whose layers keep more than keys and values by token are refused: encoder-decoders, Mamba
and other recurrent layers. So are gradients, layers on several devices, offloading layer by layer, and capture in a CUDA graph.

With the attention implementation "vmmkv" a step of `torch.compile(model, dynamic=True)` is one graph. With another one the
graph breaks at every layer. It also breaks in models that read other layers' rows, keep latents (DeepSeek's), or have attention
sinks (gpt-oss).

A forward pass:

    begins          memory follows the batch; windows reclaim the rows that they have passed; memory for new rows is mapped
    each layer      writes its new rows behind the others, and gets views of all that it sees
    its last layer  the new tokens count, unless the model's call fails behind it

Between passes nothing is copied: a batch that is repeated, selected or reordered changes its `Lineage` at once, and memory
follows before the next token. A pass that is not finished counts for nothing.

Legend: B rows of the batch; K kv heads; T tokens; D head dim.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, cache_utils
from transformers.cache_utils import Cache

from vmmkv.adapters.transformers import attention, registry, saved
from vmmkv.adapters.transformers.batch import BatchRows, Lineage, WindowRows, prompts
from vmmkv.adapters.transformers.calls import PassCalls
from vmmkv.adapters.transformers.registry import AttendedCache
from vmmkv.arguments import whole
from vmmkv.errors import Closed, LayoutError
from vmmkv.lifetime import Closing
from vmmkv.memory.pool import Pool
from vmmkv.model_config import WITH_SINKS, Attention, Latent, ModelConfig, beside_rows, described, read
from vmmkv.units import counted

_UNFINISHED: Final = (
    "the last forward pass was not finished: it failed, or the model leaves out layers that its configuration has; crop(0) "
    "takes back what it wrote"
)


class VmmCache(Cache, Closing, AttendedCache):  # type: ignore[misc]
    """Keys and values of one batch at a time, for `past_key_values` of a model of transformers.

    `config` is the model's. `max_tokens` bounds a sequence, padding included; it costs addresses only, and is the model's
    max_position_embeddings by default. `slots` is the number of sequences with addresses, over this cache and its deep copies;
    at least three times the first batch. Layers of one window have an arena of their own.

    `share_prompts` keeps equal prompts side by side once. They are recognised by the keys and values of the first layer. Say
    False if rows of equal tokens differ past it (a hook or an adapter for one row), or in the attention mask alone.

    `copy.deepcopy` forks: full pages are shared, and the copy is closed for itself. One that is collected as garbage gives its
    memory back at the next call of this cache or another copy that takes some. Several caches can share a pool. `close` gives
    the memory back; `reset` does too, and keeps the addresses.

    Raises: LayoutError for a model that is not supported; ValueError; Closed for a closed pool; in the first pass DriverError
    if the driver lacks addresses. A forward pass raises OutOfPages and SequenceTooLong (see Sequence.grow) before anything is
    written; a first pass then leaves nothing. If a pass fails otherwise, `crop(0)` takes back what it wrote.
    """

    def __init__(
        self, config: Any, pool: Pool, *, max_tokens: int | None = None, slots: int = 64, share_prompts: bool = True
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"{type(self).__name__}(config, pool, ...) takes a Pool, not {type(pool)}")
        _check_pool(pool)
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"{type(self).__name__}(config, pool, ...) takes a model's configuration, such as model.config, "
                f"not {type(config)}"
            )
        model = read(config)
        super().__init__(layers=layers_of(self, model))
        _check_model(config)
        if max_tokens is None:
            max_tokens = model.max_tokens
            if max_tokens is None:
                raise ValueError(f"{config.model_type} does not say how long a sequence can be; give max_tokens")
        max_tokens, slots = whole("max_tokens", max_tokens), whole("slots", slots)
        if max_tokens < 1 or slots < 1:
            raise ValueError(f"max_tokens={max_tokens}, slots={slots}: both must be at least 1")
        by_window: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_window.setdefault(layer.sliding_window, []).append(index)
        self.pool = pool
        self.max_tokens = max_tokens
        self._config = config
        self._share_prompts = share_prompts
        rows_of = functools.partial(WindowRows, pool=pool, slots=slots, max_tokens=max_tokens)
        self.batch = BatchRows(pool, [rows_of(tuple(indices), window) for window, indices in by_window.items()])
        """Rows of the batch, by groups of layers."""
        self._num_new = 0
        """New tokens of each sequence in the pass under way, or in the last one."""
        self._written: set[int] = set()
        """Layers that the pass under way has written; empty between passes."""
        self._calls = PassCalls()
        """The model's calls in which all layers were written last."""
        self._number = registry.enter(self)
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
            return attention.PendingRows(key_states, value_states, self._number, layer_idx, self.batch.num_tokens), value_states
        seen: tuple[Tensor, Tensor] = self._append_outside(key_states, value_states, layer_idx)
        return seen

    @property
    def _is_attended_by_vmmkv(self) -> bool:
        """Does the model attend by vmmkv, and does each layer read only the rows that it appends itself?"""
        config = self._config.get_text_config(decoder=True)
        reads_others_rows = getattr(config, "num_kv_shared_layers", 0)
        keeps_latents = getattr(config, "kv_lora_rank", None)  # which it expands to keys and values after the update
        has_sinks = config.model_type in WITH_SINKS
        return config._attn_implementation == attention.NAME and not (reads_others_rows or keeps_latents or has_sinks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it maps memory and counts on the host
    def _append_outside(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.append(*args)

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor, layer: int, num_past: int | None = None) -> tuple[Tensor, Tensor]:
        """`update` outside a graph, or when a graph runs: `num_past` is the number of tokens that its positions begin at."""
        self._check_open()
        batch = self.batch
        if self.pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a VmmCache maps memory and counts tokens on the host, which a CUDA graph would not do again: run the model "
                "outside the capture"
            )
        if num_past is not None and num_past != batch.num_tokens:
            raise RuntimeError(
                f"this graph was entered with {num_past} tokens in the VmmCache, and now there are {batch.num_tokens}: "
                f"what is compiled can run the model once over a cache, and change it in no other way; compile the model, not "
                f"the loop around it"
            )
        rows = batch.rows(layer)
        if layer in self._written:
            raise RuntimeError(f"layer {layer} is written again. {_UNFINISHED}")
        self._check_shapes(layer, k_BKTD.shape, v_BKTD.shape)
        if not self._written:
            self._begin(k_BKTD, v_BKTD)
        if not rows.sequences:
            try:
                batch.open(rows, k_BKTD, v_BKTD)
            except BaseException:
                self._end()  # as before the first pass
                raise
        batch.write(rows, layer, k_BKTD, v_BKTD)
        self._written.add(layer)
        seen = batch.seen(layer, self._num_new) if batch.num_tokens else (k_BKTD, v_BKTD)
        if len(self._written) == len(batch.rows_of):
            batch.advance(self._num_new)
            self._written.clear()
            self._calls = PassCalls(self)
        return seen

    def _check_shapes(self, layer: int, of_keys: torch.Size, of_values: torch.Size) -> None:
        """Check that a layer has the rows and tokens of the pass under way, or of one that can begin. Raises: LayoutError."""
        num_rows, num_tokens = of_keys[0], of_keys[2]
        wanted = (self.batch.size, self._num_new) if self._written else (num_rows, num_tokens)
        if not (num_rows, num_tokens) == (of_values[0], of_values[2]) == wanted:
            raise LayoutError(
                f"layer {layer} gives keys of {num_rows} rows with {num_tokens} tokens and values of {of_values[0]} with "
                f"{of_values[2]}, and this pass is one of {wanted[0]} with {wanted[1]}: a VmmCache is for models whose layers "
                f"all keep the same tokens; use DynamicCache(config=model.config) here"
            )

    def _begin(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Begin a pass by the keys and values of its first layer: memory follows the batch, and grows for the new tokens."""
        self._check_finished()
        batch = self.batch
        batch.follow_stream()
        size, self._num_new = k_BKTD.shape[0], k_BKTD.shape[2]
        if batch.lineage is None or not batch.num_tokens:
            self._end()  # a first pass may have failed
            may_share = self._share_prompts and size > 1 and self._num_new > 1
            batch.lineage = Lineage.of_prompts(prompts(k_BKTD, v_BKTD) if may_share else range(size))
            return
        if batch.size != size:
            raise ValueError(
                f"the cache has a batch of {batch.size}, and the model computes one of {size}: reset() begins anew, "
                f"batch_repeat_interleave and batch_select_indices change it"
            )
        batch.restore()
        batch.extend(k_BKTD, v_BKTD)

    # what transformers and its users ask

    def states(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that the next token sees, [batch, kv heads, tokens, head dim]: views, to be read only.

        A copy while equal prompts are kept once. Valid until the next call of the cache or the model; `clone()` keeps them.
        torch saves, pickles and deep-copies a view with its whole storage: the rows of all layers if there is one sequence.
        Views of several sequences raise ViewNotCloned there. `save` writes the cache to a file.
        """
        self._check_open()
        if not self.batch.num_tokens:
            raise ValueError("the cache has no tokens yet, and so no keys and values")
        self.batch.follow_stream()
        self.batch.restore()
        return self.batch.seen_alone(layer_idx)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys, values (see `states`; None before the first token) and window of each layer, as a DynamicCache gives them."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window, device=self.pool.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence, padding included, in this layer."""
        return self.batch.num_tokens + (self._num_new if layer_idx in self._written else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a layer gives the next `query_length` tokens, and number of the first of these tokens.

        Raises: ValueError for no tokens, which is what generate leaves of a prompt half as long as what the cache holds.
        """
        num_tokens = self.batch.num_tokens
        if query_length == 0:
            if not num_tokens:
                raise ValueError("no token is new, and the cache has none: give the model a prompt")
            raise ValueError(
                f"no token is new: the cache has a batch of {self.batch.size} with {num_tokens} tokens each, and generate "
                f"takes a prompt for these and what follows them. reset() begins anew, with a batch of any size; to go on, "
                f"give all {num_tokens} tokens and those behind them"
            )
        first = self.batch.rows(layer_idx).first_token(num_tokens)
        return num_tokens - first + query_length, first

    @property
    def is_initialized(self) -> bool:
        """Has the cache tokens? Models in which a prompt's tokens see each other both ways ask if this pass is the first."""
        return self.batch.num_tokens > 0

    @property
    def batch_size(self) -> int:
        """Rows of the model's batch, or -1 if there is none yet, as transformers says it."""
        return -1 if self.batch.size is None else self.batch.size

    def activate_past_recording(self) -> None:
        """Keep rows that windows have passed until `crop`, from now on, so that it can go back there. For drafts of tokens."""
        self.batch.record_past = True

    # between passes

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number, and before what a forward pass wrote that was not finished.

        That is one that failed in any layer, or behind the last one before the model's call had returned.
        Windows then give back what they have passed. Cost: see Sequence.truncate; no copy, unless a page is shared.
        All or none. Raises: ValueError; RowsUnmapped if a window has passed rows that are needed; OutOfPages if the last
        token's page is shared and no page is free for a copy.
        """
        self._check_open()
        removed = whole("tokens_to_remove", tokens_to_remove)
        num_tokens = self.batch.num_tokens - (self._num_new if self._calls.have_failed() else 0)
        if not -num_tokens <= removed <= 0:
            raise ValueError(f"crop({removed}): give minus the number of tokens to remove, of {num_tokens} that there are")
        num_tokens += removed
        if not num_tokens:
            self._end()
            return
        self._check_crop(removed, num_tokens)
        self.batch.truncate(num_tokens)
        self._written.clear()
        self._calls = PassCalls()

    def _check_crop(self, removed: int, num_tokens: int) -> None:
        """Check that rows are still there to go back to `num_tokens` tokens. Raises: ValueError."""
        if num_tokens < self.batch.compacted_tokens:
            raise ValueError(
                f"crop({removed}): it would go back before {self.batch.compacted_tokens} tokens, of which rows were dropped "
                f"then; crop to these at least, or reset()"
            )

    def compact(self, keep: npt.ArrayLike | Tensor) -> None:
        """Drop all rows but these in the layers of full attention, and give their memory back. See Sequence.compact.

        `keep`: a mask, or row numbers in ascending order, counted over the keys that `states` gives; the same for all rows of
        the batch. Keys keep their rotation, and new tokens their positions: `get_seq_length` counts the tokens seen. For
        batches without padding, since the attention mask tells nothing of rows that moved.
        All or none. Raises: ValueError for no tokens, or no layer of full attention; else as Sequence.compact.
        """
        self._check_between_passes()
        full = self.batch.full_rows()
        if full is None:
            raise ValueError("the cache has no tokens yet, or every layer has a window: there are no rows to drop")
        self.batch.follow_stream()
        self.batch.restore()
        kept = full.sequences[0].rows_to_keep(keep)
        if len(kept) < full.sequences[0].length:
            self.batch.compact([kept] * len(full.sequences))

    def reset(self) -> None:
        """End all sequences: the memory goes back to the pool, the addresses stay. The next batch may have another size."""
        self._check_open()
        self._end()

    def _end(self) -> None:
        self.batch.follow_stream()  # first: it can be refused
        self._written.clear()
        self._calls = PassCalls()
        self.batch.end()

    def offload(self) -> None:
        """Move all rows to host memory: their pages go back to the pool, the addresses stay. The next pass restores them.

        So does whatever else reads rows: `states`, `crop`, a deep copy. Pages that a deep copy shares stay while it has them,
        and come back as pages of their own. On failure all is as before.
        Cost: blocks while the rows are copied. Pinning takes 0.3 s for each GiB, once: torch keeps the memory.
        Pages are free when work launched so far ends.
        Raises: BudgetError if the host lacks the memory; DriverError; RuntimeError for an unfinished pass.
        """
        self._check_between_passes()
        self.batch.offload()

    def save(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> None:
        """Write the batch to a file, for `restore(path)` of a VmmCache of this model, also in another process.

        The file is there whole or, after a failure, as before; only its owner may read it. `fingerprint` tells models apart
        whose layers are alike. The tokens are the caller's to keep.
        Cost: blocks while the rows are copied and written; offloaded rows are restored first.
        Raises: OSError; ValueError for no tokens; DriverError; RuntimeError for an unfinished pass.
        """
        self._check_between_passes()
        if not self.batch.num_tokens:
            raise ValueError(f"save({str(path)!r}): the cache has no tokens yet")
        self.batch.follow_stream()
        self.batch.restore()
        saved.save(self.batch, self._config, Path(path), fingerprint)

    def restore(self, path: str | os.PathLike[str] | None = None, *, fingerprint: str = "") -> None:
        """Bring rows back: offloaded ones to the same addresses, or with `path` those that `save` wrote to a file.

        The cache must have no tokens for a file, which stays. Rows of equal prompts are one sequence again; what others shared
        are pages of each. Nothing is done if no rows are offloaded. On failure offloaded rows stay so, and a cache that reads a
        file has no tokens.
        Cost: see Sequence.grow; blocks while the rows are copied. Raises: OutOfPages, DriverError. With a file also OSError;
        SequenceTooLong; ValueError if it is damaged, of another model or another fingerprint, or the cache has tokens.
        """
        if path is not None:
            self._restore_file(Path(path), fingerprint)
        else:
            self._check_open()
            self.batch.restore()

    def _restore_file(self, path: Path, fingerprint: str) -> None:
        self._check_between_passes()
        if num_tokens := self.batch.num_tokens:
            raise ValueError(f"restore({str(path)!r}): the cache has {counted(num_tokens, 'token')}; reset() it first")
        self._end()  # a first pass may have failed
        try:
            saved.restore(self.batch, self._config, path, fingerprint)
        except BaseException:
            self._end()
            raise

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch goes on from row `beam_idx[i]`. Rows that the two do not share are copied before the next token.

        Cost: reads the indices, which waits for the device.
        """
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times, side by side. Forks before the next token: full pages are shared."""
        repeats = whole("repeats", repeats)
        self._select([row for row in range(self.batch.size or 0) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone of the batch: their numbers, or a mask. Cost: as reorder_cache, and forks."""
        rows = torch.arange(self.batch.size or 0)
        self._select(rows[torch.as_tensor(indices, device="cpu")].tolist() if len(rows) else [])

    def _select(self, rows: list[int]) -> None:
        """Make the batch of these of its rows, in this order. Memory follows in the next pass."""
        self._check_between_passes()
        size, lineage = self.batch.size, self.batch.lineage
        if size is None or lineage is None:
            return
        if not rows or not all(0 <= row < size for row in rows):
            raise ValueError(f"rows {rows} of a batch of {size}: they are from 0 on, and at least one")
        self.batch.lineage = lineage.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A fork of the whole batch in other slots. Raises: as KVCache.fork_batch."""
        self._check_between_passes()
        batch = self.batch.fork()
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__.update(vars(self))
        other.layers = [RowLayer(other, index, layer.sliding_window) for index, layer in enumerate(self.layers)]
        other.batch, other._written, other._calls = batch, set(), PassCalls()
        other._number = registry.enter(other)
        return other

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, and to be copied by `copy.copy`. Raises: TypeError."""
        raise TypeError(
            "a VmmCache can be neither pickled nor copied as it is: its memory belongs to this process and this object; "
            "cache.save(path) writes it to a file, from which restore(path) of another one reads it, and copy.deepcopy forks it"
        )

    def close(self) -> None:
        """Give all memory back. If no deep copy is left, later caches of the same sizes reuse the addresses. Idempotent.

        Cost: see KVCache.close.
        """
        self._closed = True
        self._end()
        self.batch.close()

    def check(self) -> None:
        """Recount the laws from scratch, of all arenas and the pool. See KVCache.check."""
        self.batch.check()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this VmmCache is closed; make another")
        _check_pool(self.pool)

    def _check_between_passes(self) -> None:
        self._check_open()
        if self._written:
            raise RuntimeError(_UNFINISHED)
        self._check_finished()

    def _check_finished(self) -> None:
        """Check that the last pass did not fail behind its last layer. Raises: RuntimeError."""
        if self._calls.have_failed():
            raise RuntimeError(_UNFINISHED)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self.batch.closed and not self.batch.leave():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._closed or self.pool.closed:
            return f"<{type(self).__name__} on {self.pool.device}, closed>"
        where = "the host, offloaded" if self.batch.is_offloaded else self.pool.device
        tokens = counted(self.batch.num_tokens, "token")
        return f"<{type(self).__name__} on {where}: a batch of {self.batch.size or 0} with {tokens} each>"


def _check_pool(pool: Pool) -> None:
    if pool.closed:
        raise Closed("the pool of this VmmCache is closed; make another, and close it after its caches")


# the layers of a model


class RowLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer of a VmmCache, which has the state. Methods for the batch are called on the cache, for all layers at once."""

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
        """Has the layer keys and values?"""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> Tensor | None:
        """Keys that the next token sees, [batch, kv heads, tokens, head dim], or None."""
        return self._cache.states(self._index)[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """Values that the next token sees, [batch, kv heads, tokens, head dim], or None."""
        return self._cache.states(self._index)[1] if self.is_initialized else None

    @property
    def record_past(self) -> bool:
        """Are rows kept that the window has passed, until `crop`?"""
        return self._cache.batch.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._cache.batch.record_past = value

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write the new tokens of this layer, as VmmCache.update does."""
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        """Tokens written, whatever the window."""
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that the next `query_length` tokens see, and number of the first of these tokens."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_max_length(self) -> int:
        """The window, or the most tokens that a sequence can have."""
        return self._cache.max_tokens if self.sliding_window is None else self.sliding_window

    def lazy_initialization(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to take memory before tokens come. Raises: NotImplementedError."""
        raise NotImplementedError("a VmmCache takes memory as tokens come, none beforehand: just run the model")

    def _refuse_alone(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("all layers of a VmmCache share their rows: call this on the cache, not on one of its layers")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse_alone

    def _refuse_offload(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a VmmCache moves all layers at once: call its offload(), and restore() if you cannot wait")

    offload = prefetch = _refuse_offload


def layers_of(cache: "VmmCache", model: ModelConfig) -> list[Any]:
    """The layers of a cache for a model: a RowLayer for each layer that keeps keys and values of its own.

    Layers that read another layer's rows come last, and have none. Raises: LayoutError, naming unsupported layers.
    """
    if others := beside_rows([part for part in parts if not isinstance(part, Attention | Latent)] for parts in model.layers):
        raise LayoutError(
            f"{model.family} keeps more than keys and values by token: {described(others)}. VmmCache is for layers of "
            f"full and of sliding-window attention; use DynamicCache(config=model.config) here"
        )
    layers = []
    for index, parts in enumerate(model.layers):
        for part in parts:
            if isinstance(part, Attention):
                # The mask of a chunk hides what is before it, and the window of its length has all that it shows.
                layers.append(RowLayer(cache, index, part.window or part.chunk))
            elif isinstance(part, Latent):  # which the model expands to keys and values before it hands them on
                layers.append(RowLayer(cache, index, part.window))
    if not layers:
        raise LayoutError(f"{model.family} has no layer that keeps keys and values")
    return layers


_CONTIGUOUS: Final = ("gpt_neox_japanese",)
"""Types of models that call `view` on keys, which fails for strided ones."""


def _check_model(config: Any) -> None:
    """Does the model of a configuration take a cache, and strided keys from it? Raises: LayoutError, ValueError."""
    if getattr(config.get_text_config(decoder=True), "use_cache", True) is False:
        raise ValueError(
            f"{config.model_type}: this configuration has use_cache=False, with which generate runs all tokens anew at each "
            f"step and appends them to the cache; set model.config.use_cache = model.generation_config.use_cache = True"
        )
    model: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if hasattr(model, "forward") and "past_key_values" not in inspect.signature(model.forward).parameters:
        raise LayoutError(
            f"{config.model_type}: {model.__name__} takes no past_key_values and would leave a VmmCache empty; it keeps "
            f"what it needs of tokens in another way: call it without a cache"
        )
    if config.model_type in _CONTIGUOUS:
        raise LayoutError(
            f"{config.model_type}: its attention takes contiguous keys alone, and those of a VmmCache are strided views; use "
            f"DynamicCache(config=model.config) here"
        )
