"""A policy over the rows of a batch: it sees the queries of each pass, and chooses rows when there are too many.

Policies rank rows by how much queries attend to them (see `vmmkv.eviction`). Queries wait here until rows are chosen, or until
there are enough to be worth a product with all keys. Each row of the batch has its own scores.

Legend: B rows of the batch; H query heads; K kv heads; N queries; T rows of a sequence; D head dim.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from vmmkv.adapters.transformers import attention
from vmmkv.adapters.transformers.attention import Scoring
from vmmkv.eviction import MARGIN, KVPolicy

_WAITING_QUERIES: Final = 64
"""Of policies that count all queries, so many are scored together while no rows are to be dropped."""


class Eviction:
    """When a policy drops rows of a batch, and which. It changes with the batch; `copy.copy` is for a fork of it."""

    def __init__(self, policy: KVPolicy) -> None:
        self.policy: Final = policy
        self._counts_all = policy.num_queries(policy.budget + 1) > policy.budget
        """All queries there have been, not only the last ones?"""
        self.clear()

    def clear(self) -> None:
        """There are no sequences."""
        self._waiting: dict[int, tuple[Tensor, Scoring]] = {}
        """Of each layer the last queries, [B, H, N, D], whose own rows are the last ones."""
        self._sums_BT: Tensor | None = None
        """What is known of the rows already; those behind have 0."""

    def __copy__(self) -> "Eviction":
        other = Eviction(self.policy)
        other._waiting, other._sums_BT = dict(self._waiting), self._sums_BT
        return other

    def select(self, rows: Seq[int]) -> None:
        """The batch becomes these of its rows."""
        for layer, (q_BHND, scoring) in self._waiting.items():
            self._waiting[layer] = q_BHND[rows], scoring
        if self._sums_BT is not None:
            self._sums_BT = self._sums_BT[rows]

    def observe(self, layer: int, q_BHND: Tensor, k_BKTD: Tensor, scoring: Scoring) -> None:
        """A layer's queries of a pass, and the keys of all rows. Cost: a copy of the last queries; for H2O see column_sums."""
        num_queries = self.policy.num_queries(k_BKTD.shape[2])
        if not num_queries:
            return
        if layer in self._waiting:
            q_BHND = torch.cat([self._waiting[layer][0], q_BHND], dim=2)
        self._waiting[layer] = q_BHND[:, :, -num_queries:].clone(), scoring
        if self._counts_all and q_BHND.shape[2] >= _WAITING_QUERIES:
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
        """For each sequence the rows to keep. `keys` are [B, K, T, D] by layer; row i of the batch is of sequence `parents[i]`.

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
            self._sums_BT = self._sums_BT.gather(1, chosen[list(parents)]) if self._counts_all else None
            if self._counts_all:
                self._waiting.clear()
        else:
            chosen = self.policy.keep(num_rows).expand(num_sequences, -1)
        return list(chosen.cpu().numpy())


def column_sums(q_BHND: Tensor, k_BKTD: Tensor, scoring: Scoring) -> Tensor:
    """[B, T] how much the last N tokens attend to each of T rows, over all heads: by vmmkv's kernel if it can, else in torch.

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
