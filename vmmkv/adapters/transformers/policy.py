"""PolicyCache: a VmmCache whose policy drops rows when there are too many.

Policies score rows by how much queries attend to them (see `vmmkv.eviction`). `Eviction` keeps queries until rows are chosen,
or until there are enough to be worth a product with all keys. Each row of the batch has its own scores.

Legend: B rows of the batch; S sequences; H query heads; K kv heads; N queries; T rows of a sequence; D head dim;
R = D / 2 angles.
"""

import copy
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from vmmkv.adapters.transformers import attention
from vmmkv.adapters.transformers.attention import Scoring
from vmmkv.adapters.transformers.cache import VmmCache
from vmmkv.errors import LayoutError
from vmmkv.kv_policy import MARGIN, KVPolicy, scores_all
from vmmkv.memory.pool import Pool
from vmmkv_kernels.reference import turn

_WAITING_QUERIES: Final = 64
"""Number of queries that are scored together while no rows are to be dropped, for policies that score all queries."""


class PolicyCache(VmmCache):
    """A VmmCache whose `policy` drops rows in layers of full attention; each sequence keeps its own.

    Rows are dropped at the end of a pass that leaves more than the budget, or an eighth more in steps of one token.
    `max_tokens` then bounds rows. The model must attend by "vmmkv", which shows the queries. Refused with a message: padding,
    dropout, arguments that attention does not know, graphs of torch.compile, layers that read others' rows, taking tokens back
    and so drafts of tokens, `compact` and files.

    Tokens keep their positions, unless `inv_freq` is given: the model's angles for one position, as Llama's
    `model.model.rotary_emb.inv_freq`. Positions in these layers are then those of rows: keys that move are turned back, and so
    are the keys and queries of new tokens. So a sequence may go past the length that the model was trained for. For models that
    turn elements j and j + D / 2 of a head together, by the same angle at any length.

    Raises: ValueError for a model with windows in all layers; in the first pass LayoutError for `inv_freq` of another head dim,
    and NotImplementedError for another attention; else as VmmCache.
    """

    def __init__(
        self,
        config: Any,
        pool: Pool,
        *,
        policy: KVPolicy,
        inv_freq: Tensor | None = None,
        max_tokens: int | None = None,
        slots: int = 64,
        share_prompts: bool = True,
    ) -> None:
        super().__init__(config, pool, max_tokens=max_tokens, slots=slots, share_prompts=share_prompts)
        if all(rows.window is not None for rows in self.batch.groups):
            raise ValueError(f"{config.model_type} has windows in all layers: policy={policy} finds no rows to drop")
        self._eviction = Eviction(policy)
        self._inv_freq_R = None if inv_freq is None else inv_freq.to(pool.device)
        self._is_unattended = False
        """Have all layers been written, and has the last one's attention not shown its queries yet?"""

    # a forward pass

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Write a layer's keys and values, as VmmCache.update does. Raises: NotImplementedError in a graph of torch.compile."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(f"{self._eviction.policy} in a graph of torch.compile: leave the model uncompiled")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor, layer: int, num_past: int | None = None) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values, as VmmCache.append does; the keys that it returns lead attention to this cache."""
        seen = super().append(self.turned(layer, k_BKTD), v_BKTD, layer, num_past)
        setattr(seen[0], attention.PLACE, (self._number, layer))
        self._is_unattended = not self._written
        return seen

    def _begin(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        self._check_finished()
        if not self._is_attended_by_vmmkv:
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
        if self._is_unattended:
            raise RuntimeError(
                f"the last pass did not show its queries to the VmmCache, whose policy needs them: all layers are to attend by "
                f'"{attention.NAME}", over the keys that the cache gives; reset() begins anew'
            )
        super()._begin(k_BKTD, v_BKTD)

    def turned(self, layer: int, new_BHTD: Tensor) -> Tensor:
        """Queries or keys of new tokens, turned back from the tokens seen to the rows held; as they are without `inv_freq`."""
        rows = self.batch.rows(layer)
        if self._inv_freq_R is None or rows.window is not None or not rows.num_dropped:
            return new_BHTD
        back_1 = torch.full((1,), rows.num_dropped, device=new_BHTD.device)
        return turn(new_BHTD.flatten(0, 1), back_1, self._inv_freq_R).view(new_BHTD.shape)

    def attended(
        self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scale: float | None, softcap: float | None, *, is_plain: bool
    ) -> None:
        """Score rows by the queries of a layer, which has attended to keys that `append` gave; drop rows after the last layer.

        Raises: NotImplementedError for a mask that is not causal attention with or without a window.
        """
        if not is_plain:
            raise NotImplementedError(
                f"{self._eviction.policy} drops rows of tokens, and an attention_mask would then hide others: give prompts of "
                f"one length, without padding"
            )
        batch, full = self.batch, self.batch.full_rows()
        if full is not None and layer in full.layers:
            self._eviction.observe(layer, q_BHND, k_BKTD, Scoring(scale, None, softcap))
        if self._written or layer != max(batch.rows_of):
            return
        self._is_unattended = False
        assert full is not None and batch.lineage is not None, "there are tokens"
        if self._eviction.is_due(full.sequences[0].length, self._num_new):
            kept = self._eviction.choose({layer: batch.seen(layer)[0] for layer in full.layers}, batch.lineage.parents)
            batch.compact(kept)
            if self._inv_freq_R is not None:
                full.turn_keys(kept, batch.num_tokens, self._inv_freq_R)

    # between passes

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        self._eviction.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = super().__deepcopy__(memo)
        other._eviction = copy.copy(self._eviction)
        return other

    def _end(self) -> None:
        self.batch.follow_stream()  # first: it can be refused
        self._eviction.clear()
        self._is_unattended = False
        super()._end()

    # what a policy excludes

    def activate_past_recording(self) -> None:
        """Refuse drafts of tokens. Raises: ValueError."""
        self._refuse("drafts of tokens")

    def _check_crop(self, removed: int, num_tokens: int) -> None:
        if num_tokens < self.batch.num_tokens or self._written:
            self._refuse(f"crop({removed})")

    def compact(self, keep: npt.ArrayLike | Tensor) -> None:
        """Refuse to drop other rows than the policy does. Raises: ValueError."""
        self._refuse("compact")

    def save(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> None:
        """Refuse to save rows whose scores a file lacks. Raises: ValueError."""
        self._refuse_file(f"save({str(path)!r})")

    def restore(self, path: str | os.PathLike[str] | None = None, *, fingerprint: str = "") -> None:
        """Bring offloaded rows back, as VmmCache.restore does. Raises: ValueError for a file; OutOfPages, DriverError."""
        if path is not None:
            self._refuse_file(f"restore({str(path)!r})")
        super().restore()

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{what}: this cache has policy={self._eviction.policy}, which alone drops rows; reset() ends all")

    def _refuse_file(self, what: str) -> NoReturn:
        raise ValueError(f"{what}: this cache has policy={self._eviction.policy}, and files have nothing of how rows rank")


class Eviction:
    """The queries and scores of a batch by which a policy chooses rows. `copy.copy` is for a fork of the batch."""

    def __init__(self, policy: KVPolicy) -> None:
        self.policy: Final = policy
        self._scores_all = scores_all(policy)
        self.clear()

    def clear(self) -> None:
        """Forget all queries and scores: there are no sequences."""
        self._waiting: dict[int, tuple[Tensor, Scoring]] = {}
        """The last queries of each layer, [B, H, N, D], whose own rows are the last ones."""
        self._sums_BT: Tensor | None = None
        """Scores so far of the first rows; rows behind them have 0."""

    def __copy__(self) -> "Eviction":
        other = Eviction(self.policy)
        other._waiting, other._sums_BT = dict(self._waiting), self._sums_BT
        return other

    def select(self, rows: Seq[int]) -> None:
        """Make the batch of these of its rows."""
        for layer, (q_BHND, scoring) in self._waiting.items():
            self._waiting[layer] = q_BHND[rows], scoring
        if self._sums_BT is not None:
            self._sums_BT = self._sums_BT[rows]

    def observe(self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scoring: Scoring) -> None:
        """Take a layer's queries of a pass, with the keys of all rows. Cost: copies the last queries. H2O: see column_sums."""
        num_queries = self.policy.num_queries(k_BKTD.shape[2])
        if not num_queries:
            return
        if layer in self._waiting:
            q_BHND = torch.cat([self._waiting[layer][0], q_BHND], dim=2)
        self._waiting[layer] = q_BHND[:, :, -num_queries:].clone(), scoring
        if self._scores_all and q_BHND.shape[2] >= _WAITING_QUERIES:
            self._add(layer, k_BKTD)
            del self._waiting[layer]

    def _add(self, layer: int, k_BKTD: Tensor) -> None:
        q_BHND, scoring = self._waiting[layer]
        sums_BT = column_sums(q_BHND, k_BKTD, scoring)
        if self._sums_BT is not None:
            sums_BT += pad(self._sums_BT, (0, sums_BT.shape[1] - self._sums_BT.shape[1]))
        self._sums_BT = sums_BT

    def is_due(self, num_rows: int, num_new: int) -> bool:
        """Are rows to be dropped after a pass of `num_new` tokens?"""
        budget = self.policy.budget
        return num_rows > (budget if num_new > 1 else budget + budget // MARGIN)

    def choose(self, keys: Mapping[int, Tensor], parents: Seq[int]) -> list[npt.NDArray[np.int64]]:
        """Choose the rows to keep of each sequence. `keys` are [B, K, T, D] by layer; row i is of sequence `parents[i]`.

        Cost: waits for the device. Raises: ValueError if the policy keeps more of one sequence than of another.
        """
        num_rows, num_sequences = next(iter(keys.values())).shape[2], max(parents) + 1
        if self.policy.num_queries(num_rows):
            for layer in self._waiting:
                self._add(layer, keys[layer])
            assert self._sums_BT is not None, "a pass has gone before"
            scores_ST = self._sums_BT.new_zeros(num_sequences, num_rows)
            scores_ST.index_add_(0, torch.tensor(parents, device=scores_ST.device), self._sums_BT)
            chosen_S = [self.policy.keep(num_rows, scores_T) for scores_T in scores_ST]
            if len({len(rows_T) for rows_T in chosen_S}) > 1:
                raise ValueError(f"{self.policy} keeps more rows of one sequence than of another: in a batch all have as many")
            chosen = torch.stack(chosen_S)
            self._sums_BT = self._sums_BT.gather(1, chosen[list(parents)]) if self._scores_all else None
            if self._scores_all:
                self._waiting.clear()
        else:
            chosen = self.policy.keep(num_rows).expand(num_sequences, -1)
        return list(chosen.cpu().numpy())


def column_sums(q_BHND: Tensor, k_BKTD: Tensor, scoring: Scoring) -> Tensor:
    """Scores [B, T]: how much the last N tokens attend to each row, over all heads. By vmmkv's kernel if it can, else in torch.

    Cost: see `vmmkv_kernels.attention.column_sums`.
    """
    if isinstance(attention.plan_of(q_BHND, k_BKTD, k_BKTD, scoring), attention.AttentionPlan):
        from vmmkv_kernels.attention.column_sums import column_sums
    else:
        from vmmkv_kernels.reference import column_sums
    num_sequences, num_heads, num_queries, head_dim = q_BHND.shape
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q_BHND.device}
    starts = torch.arange(0, num_sequences * num_queries + 1, num_queries, **integers)
    lengths_B = torch.full((num_sequences,), k_BKTD.shape[2], **integers)
    q_LNHD, k_LBTKD = q_BHND.transpose(1, 2).reshape(1, -1, num_heads, head_dim), k_BKTD.transpose(1, 2)[None]
    where = starts, lengths_B, torch.arange(num_sequences, **integers)
    return column_sums(q_LNHD, k_LBTKD, *where, scale=scoring.scale, softcap=scoring.softcap)[0]
