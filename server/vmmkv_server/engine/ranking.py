"""Ranking of rows, by how much queries of their sequences attend to them.

Policies with scores rank rows by how much some queries attend to them: those of the prompt that the policy asks for, and of the
generated ones the last before a compaction. A decode step leaves its queries behind, by a graph or without, and those of all
layers are ranked by at once. A step with chunks of prompts has too many of them: it runs without a graph, and each layer adds
what its own attend to. Prefill's log-sum-exps halve the work of it, unless one query alone of some sequence is ranked by.

Legend: L layers, T rows of a sequence, M ranked queries, B sequences that have some, C rows of the longest, N tokens of the
step, H query heads, K kv heads, D head dim, S slots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from vmmkv_kernels.quantise import dequantise
from vmmkv_server.engine.uploads import Uploads


class Ranked(NamedTuple):
    """A sequence of a step, the last queries of which are ranked by."""

    take: Callable[[torch.Tensor], None]
    """Function that is called with the attention of the ranked queries to each of its rows, times the weight."""
    slot: int
    end: int
    """Rows behind the step."""
    num_queries: int
    weight: int
    """Queries that each of them stands for."""


class Ranking:
    """Attention of a step's ranked queries to each row, summed."""

    def __init__(self, ranked: Sequence[Ranked], ends: Mapping[int, int], uploads: Uploads) -> None:
        """`ends`: the column behind the last query of each slot."""
        self._ranked = ranked
        self._ends, self._uploads = ends, uploads
        self._ones: list[Ranking] = []
        """Rankings of single sequences, over copies of their rows, where keys are quantised."""
        counts = np.array([each.num_queries for each in ranked])
        starts = np.concatenate([[0], np.cumsum(counts)])
        columns = np.concatenate([np.arange(ends[each.slot] - each.num_queries, ends[each.slot]) for each in ranked])
        lengths, slots = [each.end for each in ranked], [each.slot for each in ranked]
        self._columns_M, *self._where = uploads.pack([columns, starts, lengths, slots])
        self._has_singles: Final = 1 in counts
        """Is one query of a sequence ranked by? `prefill` gives no log-sum-exp of a sequence that has no other."""
        self._sums_LBC: torch.Tensor | None = None

    def add(
        self, q_LNHD: torch.Tensor, k_LSTKD: torch.Tensor, scale: float | None, k_scale_STK: torch.Tensor | None = None,
        lse_NH: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add the attention in some layers, with the rows of the step in place: one layer at each call, or all at once.

        `k_scale_STK`: of quantised keys of one layer. `lse_NH`: what `prefill` gave for the queries of one layer. Cost: three
        launches on a GPU, for quantised keys some ten for each sequence; waits for nothing.
        """
        if k_scale_STK is not None:
            ends = self._ends
            self._ones = self._ones or [
                Ranking([each._replace(slot=0)], {0: ends[each.slot]}, self._uploads) for each in self._ranked
            ]
            for one, each in zip(self._ones, self._ranked, strict=True):
                rows = each.slot, slice(each.end)
                k_TKD = dequantise(k_LSTKD[0][rows], k_scale_STK[rows]).to(q_LNHD.dtype)
                one.add(q_LNHD, k_TKD[None, None], scale, lse_NH=lse_NH)
            return
        q_LMHD = q_LNHD.index_select(1, self._columns_M)
        if self._sums_LBC is None:
            num_columns = max(each.end for each in self._ranked)
            self._sums_LBC = torch.zeros(len(q_LMHD), len(self._ranked), num_columns, device=q_LMHD.device)
        if q_LMHD.is_cuda:
            from vmmkv_kernels.attention.column_sums import column_sums
        else:
            from vmmkv_kernels.reference import column_sums
        lse_LMH = None if lse_NH is None or self._has_singles else lse_NH.index_select(0, self._columns_M)[None]
        column_sums(q_LMHD, k_LSTKD, *self._where, scale=scale, lse_LNH=lse_LMH, out=self._sums_LBC)

    def finish(self) -> None:
        """Hand the summed attention to the sequences, when all layers have added theirs."""
        for one in self._ones:
            one.finish()
        if self._ones:
            return
        assert self._sums_LBC is not None, "no layer has"
        for sums_C, each in zip(self._sums_LBC.sum(0), self._ranked, strict=True):
            each.take(sums_C[: each.end] * each.weight)
