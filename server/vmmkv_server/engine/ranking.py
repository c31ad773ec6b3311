"""What a `kv_policy` leaves of a request's rows, and how queries rank them.

Policies with scores rank rows by how much some queries attend to them: those of the prompt that the policy asks for, and of the
generated ones the last before a compaction. A decode step leaves its queries behind, by a graph or without, and those of all
layers are ranked by at once. A step with chunks of prompts has too many of them: it runs without a graph, and each layer adds
what its own attend to. Prefill's log-sum-exps halve the work of it, unless one query alone of some sequence is ranked by.

Legend: L layers, T rows of a sequence, M ranked queries, B sequences that have some, C rows of the longest, N tokens of the
step, H query heads, K kv heads, D head dim, S slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from vmmkv.eviction import H2O
from vmmkv_kernels.quantise import dequantise
from vmmkv_server.engine.uploads import Uploads, to_host
from vmmkv_server.kv_policy import Eviction


@dataclass(eq=False, slots=True)
class KeptRows:
    """What the policy of one request has left of its rows, while it runs."""

    eviction: Eviction
    num_prompt: int
    num_dropped: int = 0
    """Tokens whose rows are gone: its next token is that of row `length`, and token `length + num_dropped`."""
    scores_T: torch.Tensor | None = None
    """How much the ranked queries attend to each row; None before the first of them. Of `chosen` rows alone if any are."""
    chosen: torch.Tensor | None = None
    """On the host, the rows to keep in the next compaction; they are there when the step that ranked them has been read."""

    @property
    def end(self) -> int | None:
        """Rows with which it is compacted next; None for never."""
        budget, every = self.eviction.budget, self.eviction.every
        if every is not None:
            return budget + every if self.num_dropped else max(self.num_prompt, budget + every)
        return self.num_prompt if not self.num_dropped and self.num_prompt > budget else None

    def first(self, num_tokens: int) -> int:
        """Rows that it needs to begin with so many tokens."""
        return num_tokens if self.end is None else min(num_tokens, self.end)

    @property
    def num_attachable(self) -> int:
        """Rows of its prompt that may be another's: those before the first query that is ranked by."""
        return self.num_prompt - (self.eviction.policy.num_queries(self.num_prompt) if self.end is not None else 0)

    def anew(self) -> "KeptRows":
        """As before its first compaction."""
        return KeptRows(self.eviction, self.num_prompt)

    def room(self, num_rows: int) -> int | None:
        """The most rows of its next chunk, which ends with the prompt or at a compaction; None for any number."""
        if num_rows + self.num_dropped < self.num_prompt:
            return self.num_prompt - num_rows
        return None if self.end is None else self.end - num_rows

    def num_ranked(self, start: int, end: int) -> int:
        """Of the queries of its next rows [start, end), how many are ranked by: the last ones."""
        policy = self.eviction.policy
        if self.end is None or not policy.num_queries(1):
            return 0
        if end + self.num_dropped > self.num_prompt:
            return int(end == self.end)
        is_wanted = self.end == self.num_prompt or isinstance(policy, H2O)
        return max(0, end - max(start, self.num_prompt - policy.num_queries(self.num_prompt))) if is_wanted else 0

    def add(self, sums_T: torch.Tensor) -> None:
        """The ranked queries of a step attend so much to all rows that they see. Waits for nothing."""
        if self.scores_T is not None:
            sums_T[: len(self.scores_T)] += self.scores_T
        self.scores_T = sums_T
        if len(sums_T) == self.end:
            rows = self.eviction.policy.keep(self.end, sums_T)
            self.chosen = to_host(rows)
            self.scores_T = sums_T[rows] if isinstance(self.eviction.policy, H2O) else None


class Ranked(NamedTuple):
    """A sequence of a step, the last queries of which are ranked by."""

    kept: KeptRows
    slot: int
    end: int
    """Rows behind the step."""
    num_queries: int
    weight: int
    """Queries that each of them stands for."""

    @classmethod
    def of(cls, kept: KeptRows | None, slot: int, start: int, end: int) -> "Ranked | None":
        """The sequence of a step that computes its rows [start, end); None if none of them is ranked by."""
        if kept is None or not (num_queries := kept.num_ranked(start, end)):
            return None
        is_generated = end + kept.num_dropped > kept.num_prompt
        since = kept.eviction.budget if kept.num_dropped else kept.num_prompt
        return cls(kept, slot, end, num_queries, end - since if is_generated else 1)


class Ranking:
    """What the ranked queries of a step attend to."""

    def __init__(self, ranked: Sequence[Ranked], ends: Mapping[int, int], uploads: Uploads) -> None:
        """`ends`: by slot, the column behind its last query."""
        self._ranked = ranked
        self._ends, self._uploads = ends, uploads
        self._ones: list[Ranking] = []
        """Of quantised keys: a ranking for each sequence, over a copy of its rows."""
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
        """Of some layers, with the rows of the step in place: one layer at each call, or all at once.

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
        """All layers have added theirs: their sequences are ranked by it."""
        for one in self._ones:
            one.finish()
        if self._ones:
            return
        assert self._sums_LBC is not None, "no layer has"
        for sums_C, each in zip(self._sums_LBC.sum(0), self._ranked, strict=True):
            each.kept.add(sums_C[: each.end] * each.weight)
