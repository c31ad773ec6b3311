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

Legend: B rows of the batch; K kv heads; T tokens; D head dim; E elements of a row of all layers.
"""

import copy
import functools
import gc
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, cache_utils
from transformers.cache_utils import Cache

from vmmkv.adapters.transformers import attention, registry, saved
from vmmkv.adapters.transformers.batch import Lineage, WindowRows, agree, prompts
from vmmkv.adapters.transformers.calls import PassCalls
from vmmkv.adapters.transformers.eviction import Eviction
from vmmkv.arguments import whole
from vmmkv.errors import Closed, LayoutError, OutOfPages, OutOfSlots
from vmmkv.eviction import KVPolicy, turn
from vmmkv.lifetime import Closing
from vmmkv.memory.pool import Pool
from vmmkv.model_config import WITH_SINKS, Attention, Latent, ModelConfig, beside_rows, described, read
from vmmkv.saved import Offloaded, fill_batches, read_batches_header, save_batches
from vmmkv.sequence import Sequence
from vmmkv.units import counted

T = TypeVar("T")

_UNFINISHED: Final = (
    "the last forward pass was not finished: it failed, or the model leaves out layers that its configuration has; crop(0) "
    "takes back what it wrote"
)


class VmmCache(Cache, Closing):  # type: ignore[misc]
    """Keys and values of one batch at a time, for `past_key_values` of a model of transformers.

    `config` is the model's. `max_tokens` bounds a sequence, padding included; it costs addresses only, and is the model's
    max_position_embeddings by default. `slots` is the number of sequences with addresses, over this cache and its deep copies;
    at least three times the first batch. Layers of one window have an arena of their own.

    `share_prompts` keeps equal prompts side by side once. They are recognised by the keys and values of the first layer. Say
    False if rows of equal tokens differ past it (a hook or an adapter for one row), or in the attention mask alone.

    `policy` drops rows in layers of full attention at the end of a pass that leaves more than its budget, or an eighth more in
    steps of one token; each sequence has its own. `max_tokens` then bounds rows. The model must attend by "vmmkv", which shows
    the queries. Refused with a message: padding, dropout, arguments that attention does not know, graphs of torch.compile,
    layers that read others' rows, taking tokens back and so drafts of tokens.

    Tokens keep their positions, unless `inv_freq` is given: the model's angles for one position, as Llama's
    `model.model.rotary_emb.inv_freq`. Positions in these layers are then those of rows: keys that move are turned back, and so
    are the keys and queries of new tokens. So a sequence may go past the length that the model was trained for. For models that
    turn elements j and j + D / 2 of a head together, by the same angle at any length.

    `copy.deepcopy` forks: full pages are shared, and the copy is closed for itself. One that is collected as garbage gives its
    memory back at the next call of this cache or another copy that takes some. Several caches can share a pool. `close` gives
    the memory back; `reset` does too, and keeps the addresses.

    Raises: LayoutError for a model that is not supported; ValueError; Closed for a closed pool; in the first pass DriverError
    if the driver lacks addresses. A forward pass raises OutOfPages and SequenceTooLong (see Sequence.grow) before anything is
    written; a first pass then leaves nothing. If a pass fails otherwise, `crop(0)` takes back what it wrote.
    """

    def __init__(
        self,
        config: Any,
        pool: Pool,
        *,
        max_tokens: int | None = None,
        slots: int = 64,
        share_prompts: bool = True,
        policy: KVPolicy | None = None,
        inv_freq: Tensor | None = None,
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"VmmCache(config, pool, ...) takes a Pool, not {type(pool)}")
        _check_pool(pool)
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"VmmCache(config, pool, ...) takes a model's configuration, such as model.config, not {type(config)}"
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
        if policy is not None and None not in by_window:
            raise ValueError(f"{config.model_type} has windows in all layers: policy={policy} finds no rows to drop")
        if inv_freq is not None and policy is None:
            raise ValueError("inv_freq is for a policy, which moves rows: give both, or neither")
        self._eviction = None if policy is None else Eviction(policy)
        self._inv_freq_R = None if inv_freq is None else inv_freq.to(pool.device)
        self._is_unattended = False
        """With a policy: have all layers been written, and has the last one's attention not shown its queries yet?"""
        rows_of = functools.partial(WindowRows, pool=pool, slots=slots, max_tokens=max_tokens)
        self._set_groups([rows_of(tuple(indices), window) for window, indices in by_window.items()])
        self._num_tokens = 0
        """Of each sequence, in all layers."""
        self._num_new = 0
        """Of the pass under way, if there is one."""
        self._written: set[int] = set()
        """Layers that it has written."""
        self._calls = PassCalls()
        """The model's calls in which all layers were written last."""
        self._compacted_tokens = 0
        """How many tokens there were at the last compaction."""
        self._record_past = False
        """Do windows keep the rows that they have passed until `crop`?"""
        self._lineage: Lineage | None = None
        """None as long as there are no sequences."""
        self._replaced: list[Sequence] = []
        """Sequences that are no longer of the batch, and not closed yet: the driver may have refused it."""
        self._collected: list[Sequence] = []
        """Those of deep copies that were collected as garbage; one list of all copies, the next of which closes them."""
        self._offloaded: Offloaded | None = None
        """The rows in host memory, if they were offloaded since the last pass."""
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        """Rows of the lineage on the device: every layer of every pass asks for them."""
        self._stream: torch.Stream | None = None
        """The current stream at the last use of the cache, on CUDA."""
        self._number = registry.enter(self)
        self._closed = False

    def _set_groups(self, groups: list[WindowRows]) -> None:
        self._groups = groups
        self._rows_of = {layer: rows for rows in groups for layer in rows.layers}

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
        if self._eviction is not None:
            raise NotImplementedError(f"{self._eviction.policy} in a graph of torch.compile: leave the model uncompiled")
        if self._is_attended_by_vmmkv:
            return attention.PendingRows(key_states, value_states, self._number, layer_idx, self._num_tokens), value_states
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
        if self.pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a VmmCache maps memory and counts tokens on the host, which a CUDA graph would not do again: run the model "
                "outside the capture"
            )
        if num_past is not None and num_past != self._num_tokens:
            raise RuntimeError(
                f"this graph was entered with {num_past} tokens in the VmmCache, and now there are {self._num_tokens}: "
                f"what is compiled can run the model once over a cache, and change it in no other way; compile the model, not "
                f"the loop around it"
            )
        rows = self._rows(layer)
        k_BKTD = self.turned(layer, k_BKTD)
        if layer in self._written:
            raise RuntimeError(f"layer {layer} is written again. {_UNFINISHED}")
        self._check_shapes(layer, k_BKTD.shape, v_BKTD.shape)
        lineage = self._lineage if self._written else self._begin(k_BKTD, v_BKTD)
        assert lineage is not None, "a pass has begun"
        if not rows.sequences:
            self._open(rows, k_BKTD, v_BKTD, lineage.num_sequences)
        if lineage.settled:
            rows.write(layer, self._num_tokens, k_BKTD, v_BKTD)
        else:
            leaders = self._index(lineage.leaders, k_BKTD.device)
            rows.write(layer, self._num_tokens, k_BKTD.index_select(0, leaders), v_BKTD.index_select(0, leaders))
        self._written.add(layer)
        seen = self._seen(rows, layer, self._num_new) if self._num_tokens else (k_BKTD, v_BKTD)
        if self._eviction is not None:
            setattr(seen[0], attention.PLACE, (self._number, layer))
        if len(self._written) == len(self._rows_of):
            self._num_tokens += self._num_new
            for each in self._groups:
                each.advance(self._num_tokens)
            self._written.clear()
            self._calls = PassCalls(self)
            self._is_unattended = self._eviction is not None
        return seen

    def turned(self, layer: int, new_BHTD: Tensor) -> Tensor:
        """Queries or keys of new tokens, turned back from the tokens seen to the rows held; as they are without `inv_freq`."""
        rows = self._rows(layer)
        if self._inv_freq_R is None or rows.window is not None or not rows.num_dropped:
            return new_BHTD
        back_1 = torch.full((1,), rows.num_dropped, device=new_BHTD.device)
        return turn(new_BHTD.flatten(0, 1), back_1, self._inv_freq_R).view(new_BHTD.shape)

    def attended(
        self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scale: float | None, softcap: float | None, *, is_plain: bool
    ) -> None:
        """A layer has attended to keys that `append` gave: of a cache with a policy, which drops rows after the last layer.

        Raises: NotImplementedError for a mask that is not causal attention with or without a window.
        """
        eviction, (full,) = self._eviction, (rows for rows in self._groups if rows.window is None)
        assert eviction is not None, "else the keys would not say where they are from"
        if not is_plain:
            raise NotImplementedError(
                f"{eviction.policy} drops rows of tokens, and an attention_mask would then hide others: give prompts of one "
                f"length, without padding"
            )
        if layer in full.layers:
            eviction.observe(layer, q_BHND, k_BKTD, attention.Scoring(scale, None, softcap))
        if self._written or layer != max(self._rows_of):
            return
        self._is_unattended = False
        if eviction.is_due(full.sequences[0].length, self._num_new):
            assert self._lineage is not None, "there are tokens"
            keys = {layer: self._seen(full, layer, 0)[0] for layer in full.layers}
            self._drop(eviction.choose(keys, self._lineage.parents))

    def _rows(self, layer: int) -> WindowRows:
        """The rows with this layer. Raises: ValueError naming the layers there are."""
        rows = self._rows_of.get(layer)
        if rows is None:
            raise ValueError(f"layer {layer} keeps no keys and values by the configuration; layers {[*self._rows_of]} do")
        return rows

    def _check_shapes(self, layer: int, of_keys: torch.Size, of_values: torch.Size) -> None:
        """Are these of the rows and the tokens of the pass under way, or of one that can begin? Else LayoutError."""
        num_rows, num_tokens = of_keys[0], of_keys[2]
        wanted = (self._size, self._num_new) if self._written else (num_rows, num_tokens)
        if not (num_rows, num_tokens) == (of_values[0], of_values[2]) == wanted:
            raise LayoutError(
                f"layer {layer} gives keys of {num_rows} rows with {num_tokens} tokens and values of {of_values[0]} with "
                f"{of_values[2]}, and this pass is one of {wanted[0]} with {wanted[1]}: a VmmCache is for models whose layers "
                f"all keep the same tokens; use DynamicCache(config=model.config) here"
            )

    def _begin(self, k_BKTD: Tensor, v_BKTD: Tensor) -> Lineage:
        self._check_finished()
        self._follow_stream()
        size, self._num_new = k_BKTD.shape[0], k_BKTD.shape[2]
        if self._eviction is not None and not self._is_attended_by_vmmkv:
            raise NotImplementedError(
                f'policy={self._eviction.policy} sees queries in attention by "{attention.NAME}" alone: '
                f'model.set_attn_implementation("{attention.NAME}"). No layer may read another one\'s rows, keep latents '
                f"or have sinks"
            )
        if self._inv_freq_R is not None and 2 * len(self._inv_freq_R) != k_BKTD.shape[3]:
            raise LayoutError(
                f"inv_freq has {len(self._inv_freq_R)} angles, and heads of {k_BKTD.shape[3]} want half as many: models that "
                f"turn a part of each head go without it"
            )
        if self._lineage is None or not self._num_tokens:
            self._end()  # a first pass may have failed
            may_share = self._share_prompts and size > 1 and self._num_new > 1
            self._lineage = Lineage.of_prompts(prompts(k_BKTD, v_BKTD) if may_share else range(size))
            return self._lineage
        if self._size != size:
            raise ValueError(
                f"the cache has a batch of {self._size}, and the model computes one of {size}: reset() begins anew, "
                f"batch_repeat_interleave and batch_select_indices change it"
            )
        self.restore()
        if self._is_unattended:
            raise RuntimeError(
                f"the last pass did not show its queries to the VmmCache, whose policy needs them: all layers are to attend by "
                f'"{attention.NAME}", over the keys that the cache gives; reset() begins anew'
            )
        # A prompt may come in chunks that are equal too. With single tokens the answers have begun.
        lineage = self._lineage
        if not (lineage.settled or (self._num_new > 1 and lineage.compact and agree(k_BKTD, v_BKTD, lineage.parents))):
            self._settle(lineage)
        self._close_replaced()
        if not self._record_past:
            for rows in self._groups:
                rows.slide(self._num_tokens)
        self._grow(self._groups, self._num_tokens + self._num_new)
        return self._lineage

    def _settle(self, lineage: Lineage) -> None:
        """Let memory follow the batch. All or none: no row is written before all groups have read theirs."""
        moves = lineage.moves()
        if moves is not None:
            copies = [each for rows in self._groups for each in rows.copies(*moves, self._num_tokens)]
            for place_BTE, targets_B, source_BTE in copies:
                place_BTE.index_copy_(0, targets_B, source_BTE)
        else:
            for rows, forks in zip(self._groups, self._fork(lineage.parents), strict=True):
                self._replaced += rows.replace(forks)
        self._indices.clear()
        self._lineage = lineage.settle(self._num_tokens, forked=moves is None)

    def _close_replaced(self) -> None:
        """If this fails, the next pass or `reset` goes on."""
        for sequences in (self._replaced, self._collected):
            while sequences:
                sequence = sequences.pop()  # at once, for a copy can be collected at any time
                try:
                    sequence.close()
                except BaseException:
                    sequences.append(sequence)
                    raise

    def _with_room(self, take: Callable[[], T]) -> T:
        """Take slots or pages; where they are short, end copies that are garbage and try once more."""
        self._close_replaced()
        try:
            return take()
        except (OutOfPages, OutOfSlots):
            gc.collect()  # a cache and its layers refer to each other
            if not self._collected:
                raise
        self._close_replaced()
        return take()

    def _take_slots(self, rows: WindowRows, take: Callable[[], T]) -> T:
        try:
            return self._with_room(take)
        except OutOfSlots:
            raise OutOfSlots(
                f"this VmmCache and its deep copies have {counted(rows.cache.num_slots, 'slot')}, and "
                f"{len(rows.cache.sequences)} of them hold rows: close() copies that are no longer needed, or give VmmCache "
                f"more slots"
            ) from None

    def _open(self, rows: WindowRows, k_BKTD: Tensor, v_BKTD: Tensor, num_sequences: int) -> None:
        later_pages = sum(
            num_sequences * later.pages_like(k_BKTD, v_BKTD, self._num_new - self._dropped(later))
            for later in self._groups
            if later is not rows and not later.sequences
        )
        try:
            self._take_slots(rows, lambda: rows.open(k_BKTD, v_BKTD, num_sequences, dropped=self._dropped(rows)))
            self._grow([rows], self._num_new, later_pages=later_pages)
        except BaseException:
            self._end()  # as before the first pass
            raise

    def _dropped(self, rows: WindowRows) -> int:
        """How many first tokens of a first prompt longer than the window are seen in this pass alone."""
        return 0 if self._record_past else rows.first_token(self._num_new)

    def _grow(self, groups: Seq[WindowRows], num_tokens: int, *, later_pages: int = 0) -> None:
        """Have memory for `num_tokens` tokens of each row in these groups; none grows if there is too little for all.

        `later_pages` are for groups that this pass opens later. If another thread takes from the pool between the check and
        the growth, some rows may have grown when this raises; they keep that.
        """
        self._check_room(sum(rows.missing_pages(num_tokens) for rows in groups), f"grow to {num_tokens} tokens", later_pages)
        for rows in groups:
            rows.grow(num_tokens)

    def _check_room(self, num_pages: int, what: str, later_pages: int = 0) -> None:
        """Can the whole batch have so many pages now? Else OutOfPages."""
        if not num_pages:
            return
        remedy = "give the model fewer rows in a batch, offload() or reset() another cache of this pool"

        def check() -> None:
            with self.pool.lock:
                self.pool.check_room(num_pages, remedy, later_pages=later_pages)

        try:
            self._with_room(check)
        except OutOfPages as error:
            raise OutOfPages(f"a batch of {counted(self._size or 0, 'row')} cannot {what}: {error}") from None

    def _fork(self, parents: Seq[int]) -> list[list[Sequence]]:
        """For each group a fork of the sequence that each entry names. All or none."""
        self._check_room(sum(rows.fork_pages(parents) for rows in self._groups), "be forked, so that each goes its own way")
        forked: list[list[Sequence]] = []
        with ExitStack() as undo:
            for rows in self._groups:
                forked.append(self._take_slots(rows, functools.partial(rows.fork, parents)))
                for sequence in forked[-1]:
                    undo.callback(sequence.close)
            undo.pop_all()
        return forked

    def _seen(self, rows: WindowRows, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        assert self._lineage is not None, "there are tokens"
        k_BKTD, v_BKTD = rows.view(layer, self._num_tokens, self._num_tokens + num_new)
        if self._lineage.settled:
            return k_BKTD, v_BKTD
        parents = self._index(self._lineage.parents, k_BKTD.device)
        return k_BKTD.index_select(0, parents), v_BKTD.index_select(0, parents)

    def _index(self, rows: tuple[int, ...], device: torch.device) -> Tensor:
        index = self._indices.get((rows, device))
        if index is None:
            with torch.inference_mode(False):  # it may outlive the mode of this pass
                index = self._indices[rows, device] = torch.tensor(rows, device=device)
        return index

    def _follow_stream(self) -> None:
        """If the current stream has changed, memory that is reclaimed waits for both streams, and indices are made anew."""
        current = _current_stream(self.pool.device)
        if self._stream is not None and current != self._stream:
            self._indices.clear()
            for rows in self._groups:
                rows.change_streams(self._stream, current)
        self._stream = current

    # what transformers and its users ask

    def states(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that the next token sees, [batch, kv heads, tokens, head dim]: views, to be read only.

        A copy while equal prompts are kept once. Valid until the next call of the cache or the model; `clone()` keeps them.
        torch saves, pickles and deep-copies a view with its whole storage: the rows of all layers if there is one sequence.
        Views of several sequences raise ViewNotCloned there. `save` writes the cache to a file.
        """
        self._check_open()
        if not self._num_tokens:
            raise ValueError("the cache has no tokens yet, and so no keys and values")
        self._follow_stream()
        self.restore()
        rows = self._rows(layer_idx)
        assert self._lineage is not None, "there are tokens"
        is_alone = self._lineage.settled and self._lineage.num_sequences == 1
        return rows.view_alone(layer_idx, self._num_tokens) if is_alone else self._seen(rows, layer_idx, 0)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Of each layer keys, values (see `states`; None before the first token) and window, as a DynamicCache gives them."""
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window, device=self.pool.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence, padding included, in this layer."""
        return self._num_tokens + (self._num_new if layer_idx in self._written else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys a layer gives the next `query_length` tokens, and the number of the first.

        Raises: ValueError for no tokens, which is what generate leaves of a prompt half as long as what the cache holds.
        """
        num_tokens = self._num_tokens
        if query_length == 0:
            if not num_tokens:
                raise ValueError("no token is new, and the cache has none: give the model a prompt")
            raise ValueError(
                f"no token is new: the cache has a batch of {self._size} with {num_tokens} tokens each, and generate "
                f"takes a prompt for these and what follows them. reset() begins anew, with a batch of any size; to go on, "
                f"give all {num_tokens} tokens and those behind them"
            )
        first = self._rows(layer_idx).first_token(num_tokens)
        return num_tokens - first + query_length, first

    @property
    def is_initialized(self) -> bool:
        """Has it tokens? Models in which a prompt's tokens see each other both ways ask whether this pass is the first."""
        return self._num_tokens > 0

    @property
    def _size(self) -> int | None:
        """Rows of the model's batch, if there is one."""
        return None if self._lineage is None else len(self._lineage.parents)

    @property
    def batch_size(self) -> int:
        """Rows of the model's batch, or -1 if there is none yet, as transformers says it."""
        return -1 if self._size is None else self._size

    def activate_past_recording(self) -> None:
        """From now on windows keep what they have passed until `crop`, so that it can go back there. For drafts of tokens."""
        self._check_uncut("drafts of tokens")
        self._record_past = True

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
        num_tokens = self._num_tokens - (self._num_new if self._calls.have_failed() else 0)
        if not -num_tokens <= removed <= 0:
            raise ValueError(f"crop({removed}): give minus the number of tokens to remove, of {num_tokens} that there are")
        num_tokens += removed
        if not num_tokens:
            self._end()
            return
        if num_tokens < self._num_tokens or self._written:
            self._check_uncut(f"crop({removed})")
        if num_tokens < self._compacted_tokens:
            raise ValueError(
                f"crop({removed}): it would go back before {self._compacted_tokens} tokens, of which rows were dropped then; "
                f"crop to these at least, or reset()"
            )
        self._follow_stream()
        self.restore()
        assert self._lineage is not None, "there are tokens"
        for rows in self._groups:
            rows.check_kept(num_tokens)
        for rows in self._groups:
            rows.own_from(num_tokens)  # all that can fail, before anything is cut
        self._written.clear()
        self._calls = PassCalls()
        for rows in self._groups:
            rows.truncate(num_tokens)
            rows.slide(num_tokens)
        self._num_tokens, self._lineage = num_tokens, self._lineage.cut(num_tokens)

    def compact(self, keep: npt.ArrayLike | Tensor) -> None:
        """Drop all rows but these in the layers of full attention, and give their memory back. See Sequence.compact.

        `keep`: a mask, or row numbers in ascending order, counted over the keys that `states` gives; the same for all rows of
        the batch. Keys keep their rotation, and new tokens their positions: `get_seq_length` counts the tokens seen. For
        batches without padding, since the attention mask tells nothing of rows that moved.
        All or none. Raises: ValueError for no tokens, or no layer of full attention; else as Sequence.compact.
        """
        self._check_between_passes()
        self._check_uncut("compact")
        full = [rows for rows in self._groups if rows.window is None and rows.sequences]
        if not full:
            raise ValueError("the cache has no tokens yet, or every layer has a window: there are no rows to drop")
        self._follow_stream()
        self.restore()
        kept = full[0].sequences[0].rows_to_keep(keep)
        if len(kept) < full[0].sequences[0].length:
            self._drop([kept] * len(full[0].sequences))

    def _drop(self, kept: Seq[npt.NDArray[np.int64]]) -> None:
        """All rows but these of each sequence, in the layers of full attention."""
        assert self._lineage is not None, "there are tokens"
        (full,) = (rows for rows in self._groups if rows.window is None)
        full.compact(kept)
        if self._inv_freq_R is not None:
            full.turn_keys(kept, self._num_tokens, self._inv_freq_R)
        self._compacted_tokens, self._lineage = self._num_tokens, self._lineage.share(self._num_tokens)

    def _check_uncut(self, what: str) -> None:
        if self._eviction is not None:
            raise ValueError(f"{what}: this cache has policy={self._eviction.policy}, which alone drops rows; reset() ends all")

    def reset(self) -> None:
        """End all sequences: the memory goes back to the pool, the addresses stay. The next batch may have another size."""
        self._check_open()
        self._end()

    def _end(self) -> None:
        self._follow_stream()
        for rows in self._groups:
            self._replaced += rows.replace([])
        self._num_tokens, self._compacted_tokens, self._lineage, self._offloaded = 0, 0, None, None
        if self._eviction is not None:
            self._eviction.clear()
        self._is_unattended = False
        self._written.clear()
        self._calls = PassCalls()
        self._indices.clear()
        self._close_replaced()

    def offload(self) -> None:
        """Move all rows to host memory: their pages go back to the pool, the addresses stay. The next pass restores them.

        So does whatever else reads rows: `states`, `crop`, a deep copy. Pages that a deep copy shares stay while it has them,
        and come back as pages of their own. On failure all is as before.
        Cost: blocks while the rows are copied. Pinning takes 0.3 s for each GiB, once: torch keeps the memory.
        Pages are free when work launched so far ends.
        Raises: BudgetError if the host lacks the memory; DriverError; RuntimeError for an unfinished pass.
        """
        self._check_between_passes()
        self._follow_stream()
        self._close_replaced()
        batches = [rows.live_slots for rows in self._groups if rows.sequences]
        if batches and not self._is_offloaded:
            self._offloaded = Offloaded(batches)
            self._offloaded.release()

    def save(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> None:
        """Write the batch to a file, for `restore(path)` of a VmmCache of this model, also in another process.

        The file is there whole or, after a failure, as before; only its owner may read it. `fingerprint` tells models apart
        whose layers are alike. The tokens are the caller's to keep. Rows that a policy ranks are not saved.
        Cost: blocks while the rows are copied and written; offloaded rows are restored first.
        Raises: OSError; ValueError for no tokens, or a cache with a policy; DriverError; RuntimeError for an unfinished pass.
        """
        self._check_between_passes()
        self._check_saved(f"save({str(path)!r})")
        if self._lineage is None or not self._num_tokens:
            raise ValueError(f"save({str(path)!r}): the cache has no tokens yet")
        self._follow_stream()
        self.restore()
        header = saved.header(self._config, self._num_tokens, self._compacted_tokens, self._lineage, self._groups)
        save_batches([rows.live_slots for rows in self._groups], Path(path), fingerprint, header)

    def _check_saved(self, what: str) -> None:
        if self._eviction is not None:
            raise ValueError(f"{what}: this cache has policy={self._eviction.policy}, and files have nothing of how rows rank")

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
            return
        self._check_open()
        if self._offloaded is not None and self._is_offloaded:
            self._check_room(self._offloaded.num_pages, "come back from host memory")
            self._offloaded.restore()
        self._offloaded = None

    def _restore_file(self, path: Path, fingerprint: str) -> None:
        self._check_between_passes()
        self._check_saved(f"restore({str(path)!r})")
        if self._num_tokens:
            raise ValueError(f"restore({str(path)!r}): the cache has {counted(self._num_tokens, 'token')}; reset() it first")
        self._end()  # a first pass may have failed
        with open(path, "rb") as file:
            batch = saved.read(read_batches_header(file, path), path, self._config, self._groups)
            try:
                for rows, (num_dropped, states) in zip(self._groups, batch.windows, strict=True):
                    open_rows = functools.partial(rows.open, *states, batch.lineage.num_sequences, dropped=num_dropped)
                    self._take_slots(rows, open_rows)
                num_rows = [batch.num_tokens - rows.num_dropped for rows in self._groups]
                fill_batches(
                    file, path, [(rows.live_slots, num) for rows, num in zip(self._groups, num_rows, strict=True)], fingerprint
                )
            except BaseException:
                self._end()
                raise
        for rows in self._groups:
            rows.opened_for_file()
        self._num_tokens, self._compacted_tokens, self._lineage = batch.num_tokens, batch.compacted_tokens, batch.lineage

    @property
    def _is_offloaded(self) -> bool:
        return self._offloaded is not None and self._offloaded.released

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch goes on from row `beam_idx[i]`. Rows that the two do not share are copied before the next token.

        Cost: reads the indices, which waits for the device.
        """
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times, side by side. Forks before the next token: full pages are shared."""
        repeats = whole("repeats", repeats)
        self._select([row for row in range(self._size or 0) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch: their numbers, or a mask. Cost: as reorder_cache, and forks."""
        rows = torch.arange(self._size or 0)
        self._select(rows[torch.as_tensor(indices, device="cpu")].tolist() if len(rows) else [])

    def _select(self, rows: list[int]) -> None:
        """Make the batch of these of its rows, in this order. Memory follows in the next pass."""
        self._check_between_passes()
        if self._lineage is None:
            return
        size = len(self._lineage.parents)
        if not rows or not all(0 <= row < size for row in rows):
            raise ValueError(f"rows {rows} of a batch of {size}: they are from 0 on, and at least one")
        self._lineage = self._lineage.select(rows)
        if self._eviction is not None:
            self._eviction.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> "VmmCache":
        """A fork of the whole batch in other slots. Raises: as KVCache.fork_batch."""
        self._check_between_passes()
        self._follow_stream()
        self.restore()
        lineage = self._lineage
        forked = self._fork(range(0 if lineage is None else lineage.num_sequences))
        if lineage is not None:
            self._lineage = lineage.share(self._num_tokens)
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__.update(vars(self))
        other.layers = [RowLayer(other, index, layer.sliding_window) for index, layer in enumerate(self.layers)]
        other._set_groups([rows.beside(sequences) for rows, sequences in zip(self._groups, forked, strict=True)])
        other._written, other._indices, other._replaced, other._calls = set(), {}, [], PassCalls()
        other._eviction = copy.copy(self._eviction)
        other._number = registry.enter(other)
        return other

    def __reduce__(self) -> NoReturn:
        """Neither pickled nor copied by `copy.copy`. Raises: TypeError."""
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
        for rows in self._groups:
            rows.close()

    def check(self) -> None:
        """Recount the laws from scratch, of all arenas and the pool. See KVCache.check."""
        for rows in self._groups:
            if not rows.closed:
                rows.cache.check()

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
        """Raises RuntimeError if the last pass failed behind its last layer."""
        if self._calls.have_failed():
            raise RuntimeError(_UNFINISHED)

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or all(rows.closed for rows in self._groups):
            return
        # Without a lock or a driver call: this can run within any other call.
        left = [rows for rows in self._groups if rows.leave()]
        self._collected += [*self._replaced, *(sequence for rows in left for sequence in rows.sequences)]
        if len(left) < len(self._groups):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._closed or self.pool.closed:
            return f"<VmmCache on {self.pool.device}, closed>"
        where = "the host, offloaded" if self._is_offloaded else self.pool.device
        return f"<VmmCache on {where}: a batch of {self._size or 0} with {counted(self._num_tokens, 'token')} each>"


def _check_pool(pool: Pool) -> None:
    if pool.closed:
        raise Closed("the pool of this VmmCache is closed; make another, and close it after its caches")


def _current_stream(device: torch.device) -> torch.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


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
        return self._cache._record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._cache._record_past = value

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
