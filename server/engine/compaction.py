"""Compaction: rows of running requests with a `kv_policy` are dropped, and their memory goes back.

    rows of a request   | prompt ................... |              all of them, while it is computed
                        | kept ...... |                             compacted to the budget
                        | kept ...... | `every` more |              compacted again, as it generates

A request is compacted at fixed numbers of rows. So one that was preempted and is computed again goes through the same
compactions: it gives the same tokens, and needs no more memory. It has no step in flight then, while others may: it waits until
its last one has been read. That step has also ranked the rows, and the host has the numbers of those to keep.

Keys that have moved are turned back to the positions of their rows. From then on the sequence is like any other of that length
to the model and the sampler: steps know rows alone, and nothing but `num_dropped` tells them from tokens. If the policy keeps
positions, keys stay as they are, and the model's positions are rows plus `num_dropped`: see `DeviceState.shifts_S`.

Policies with scores rank rows by how much some queries attend to them: those of the prompt that the policy asks for, and of the
generated ones the last before a compaction. A decode step leaves its queries behind, by a graph or without, and those of all
layers are ranked by at once. A step with chunks of prompts has too many of them: it runs without a graph, and each layer adds
what its own attend to. Prefill's log-sum-exps halve the work of it, unless one query alone of some sequence is ranked by.

Legend: L layers, T rows of a sequence, M ranked queries, B sequences that have some, C rows of the longest, N tokens of the
step, H query heads, K kv heads, D head dim, S slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

import vmmkv
from vmmkv.cache import num_unmoved
from vmmkv.eviction import H2O
from vmmkv.kernels.quantise import dequantise
from vmmkv.server.engine.kv_backend import EngineCache, KVSequence
from vmmkv.server.engine.models import EngineModel
from vmmkv.server.engine.uploads import Uploads, to_host
from vmmkv.server.kv_policy import Eviction
from vmmkv.server.protocol import Compacted

if TYPE_CHECKING:
    from vmmkv.server.engine.request import Request
    from vmmkv.server.engine.runner import Runner


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
    def of(cls, request: "Request | None", slot: int, start: int, end: int) -> "Ranked | None":
        """Of rows [start, end) of a request that a step computes; None if none is ranked by."""
        kept = None if request is None else request.kept
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
            from vmmkv.kernels.attention.column_sums import column_sums
        else:
            from vmmkv.kernels.reference import column_sums
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


ROUNDED_ANEW: Final = (
    "compacts as requests generate, and quantised keys would be rounded anew each time they are turned: use "
    '"positions": "original", or snapkv, or leave it out'
)
"""Why a policy that turns keys again and again is not for quantised rows. In fp8, turned 32 times, perplexity was 24.0 instead
of 15.6."""


def refusal(cache: EngineCache, model: EngineModel, *, is_split: bool) -> str:
    """Why no request can have a policy with this model and this memory; empty if it can. `is_split`: over several devices."""
    groups = cache.layout.groups
    if is_split:
        return "is for a model on one device (tensor_parallel_size=1), and this one is split over several"
    if not isinstance(cache, vmmkv.KVCache):
        return "needs memory that can be compacted"
    if any(group.window is not None for group in groups):
        return "is for full attention, and this model has sliding windows, which give memory back by themselves"
    if len(groups) > 1:
        return "is for models of which a token's rows fit in a page"
    if model.keys is None:
        return (
            "needs a model whose rotary positions vmmkv knows, and this one runs by transformers' own code: "
            "model_impl='vmmkv' says what it lacks"
        )
    return ""


class Compactor:
    """Compacts the sequences of one engine, and counts what it keeps and drops."""

    def __init__(self, runner: "Runner", send: Callable[[Compacted], None]) -> None:
        self.num_compactions = self.num_rows_kept = self.num_rows_dropped = 0
        self._keys, self._state, self._uploads = runner.keys, runner.state, runner.uploads
        self._send = send

    @torch.inference_mode()
    def compact(self, request_id: str, kept: KeptRows, sequence: KVSequence) -> None:
        """Drop rows of a sequence that has no step in flight, by its policy.

        Cost: as Sequence.compact, and two launches; waits for nothing unless shared pages are exchanged.
        Raises: OutOfPages, DriverError; then nothing has changed. After an interrupt the request cannot go on.
        """
        assert isinstance(sequence, vmmkv.Sequence) and self._keys is not None, "else it is refused"
        length = sequence.length
        rows_T = kept.eviction.policy.keep(length) if kept.chosen is None else kept.chosen
        rows = rows_T.numpy()
        num_dropped = length - len(rows)
        kept.num_dropped += num_dropped  # first: a request whose rows are fewer than this says cannot be parked
        try:
            sequence.compact(rows)
        except BaseException:
            kept.num_dropped -= sequence.length - len(rows)  # 0 if an interrupt came behind it
            raise
        if kept.eviction.keeps_positions:
            self._state.shifts_S[sequence.slot].fill_(kept.num_dropped)  # to assign it would wait for the device
        elif (first := num_unmoved(rows)) < len(rows):
            (back_T,) = self._uploads.pack([rows[first:] - np.arange(first, len(rows))])
            self._keys.turn(sequence.slot, first, back_T)
        self._state.lengths_S[sequence.slot].fill_(len(rows))
        kept.chosen = None
        self.num_compactions += 1
        self.num_rows_kept += len(rows)
        self.num_rows_dropped += num_dropped
        self._send(Compacted(request_id=request_id, kept_rows=len(rows), dropped_rows=kept.num_dropped))

    def release(self, slot: int) -> None:
        """A compacted request has left this slot: positions are rows there. One launch."""
        self._state.shifts_S[slot].fill_(0)
