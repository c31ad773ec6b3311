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
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch

from vmmkv.eviction import SnapKV
from vmmkv.kv_policy import scores_all
from vmmkv.memory.sharing import num_unmoved
from vmmkv_server.engine.feature import Feature, Need
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.kv_backend import vmmkv_sequence
from vmmkv_server.engine.ranking import Ranked
from vmmkv_server.engine.request import NO_END, Request, Shape, Status
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.step import Chunk, Step
from vmmkv_server.engine.uploads import to_host
from vmmkv_server.kv_policy import Eviction
from vmmkv_server.protocol import Compacted, Generate
from vmmkv_server.statistics import Statistics, counter


class CompactionStatistics(Statistics):
    """Compactions of all requests."""

    kv_compactions: Annotated[int, counter("Compactions by a kv_policy.")] = 0
    kv_kept_rows: Annotated[int, counter("Rows kept, summed over compactions.")] = 0
    kv_dropped_rows: Annotated[int, counter("Rows dropped by compactions.")] = 0


class Compaction(Feature):
    """Drops rows of the requests with a `kv_policy`, by the default policy or their own."""

    def __init__(self, core: Core) -> None:
        self.compactor = Compactor(core.runner, core.send)
        self._limits, self._scheduler, self._memory = core.limits, core.scheduler, core.memory
        self._kept: dict[Request, KeptRows] = {}
        """Rows that the policies leave of the requests, from when these last began to wait."""
        self._running: dict[Request, KeptRows] = {}

    @staticmethod
    def warm_up(runner: Runner, whole: Chunk, behind: Chunk, compute: Callable[..., None]) -> None:
        """Compact by scores."""
        if runner.keys is None:
            return
        policy = SnapKV(budget=behind.start, window=1)
        eviction = Eviction(policy=policy, every=None, share_prompt=True, keeps_positions=False)
        kept = KeptRows(eviction, behind.request)
        ranked = kept.ranked(behind.slot, behind.start, behind.end)
        assert ranked is not None, "the last query is ranked by"
        compute(behind, ranked=[ranked])
        behind.sequence.advance(behind.end)
        Compactor(runner, lambda message: None).compact(kept)

    def need(self, ask: Generate, need: Need) -> Need:
        """Reduce the need to the most rows that the policy leaves."""
        num_prompt, eviction = len(ask.prompt), self._limits.eviction(ask.params)
        if eviction is None:
            return need
        return need._replace(num_rows=eviction.most_rows(num_prompt, num_prompt + need.num_rows) - num_prompt)

    def shape(self, request: Request, shape: Shape) -> Shape:
        """Rows behind the prompt are its own, and so are all if a compaction has found no page for own ones.

        Rows whose queries others are ranked by are computed.
        """
        if (eviction := self._limits.eviction(request.ask.params)) is None:
            return shape
        kept = self._kept[request] = KeptRows(eviction, request)
        is_stuck = request.num_tokens_stuck is not None
        return shape._replace(
            num_first_rows=kept.first(shape.num_first_rows),
            most_rows=eviction.most_rows(len(request.prompt), request.max_tokens),
            num_attachable=min(shape.num_attachable, len(request.prompt), 1 if is_stuck else kept.num_attachable + 1),
            shares_rows=eviction.share_prompt and not is_stuck,
            keeps_rows=False,
        )

    def chunks(self, request: Request) -> list[Chunk] | None:
        """Chunks that do not go beyond the next compaction."""
        if (kept := self._running.get(request)) is None:
            return None
        room = kept.room(request.memory.length)
        return [Chunk.own(request) if room is None else Chunk.own(request).first(room)]

    def admitted(self, request: Request) -> None:
        """Compact the request from now on, at the end that its policy says."""
        if (kept := self._kept.get(request)) is not None:
            self._running[request] = kept
            self._set_end(kept)

    def left(self, request: Request) -> None:
        """Make positions rows again in the request's slot."""
        if request in self._running:
            if request.num_dropped:
                self.compactor.release(request.memory.slot)
            del self._running[request]

    def finished(self, request: Request) -> None:
        """Forget the kept rows of a request."""
        self._kept.pop(request, None)

    def planning(self) -> None:
        """Compact the requests that have as many rows as their policies allow, and no step in flight."""
        if not self._running:
            return
        scheduler, lengths = self._scheduler, self._memory.lengths
        table = scheduler.table
        for slot in np.flatnonzero((lengths == table.ends) & (table.num_coming < table.max_tokens)).tolist():
            if (request := table.requests[slot]) is None:
                continue
            if request.status is Status.PREFILLING:
                scheduler.drain()  # its last row may be of a step that is dropped, which confirms none
                if not request.is_running:
                    continue
            elif table.num_confirmed[slot] < lengths[slot] + request.num_dropped:
                continue
            kept = self._running[request]
            if scheduler.with_room(request, partial(self.compactor.compact, kept)):
                self._set_end(kept)
                scheduler.rows_dropped(request)

    def planned(self, step: Step) -> None:
        """Have the rows of sequences ranked by some of their queries in this step."""
        if not self._running:
            return
        lengths, table = self._memory.lengths, self._scheduler.table
        chunks = [(self._running.get(chunk.request), chunk) for chunk in step.chunks]
        ranked = [kept.ranked(chunk.slot, chunk.start, chunk.end) for kept, chunk in chunks if kept is not None]
        for slot in step.slots[step.ends == table.ends[step.slots]].tolist():
            request = table.requests[slot]
            assert request is not None, "a slot that computes has a request"
            ranked.append(self._running[request].ranked(slot, int(lengths[slot]), int(lengths[slot]) + 1))
        step.ranked = list(filter(None, ranked))

    def statistics(self) -> CompactionStatistics:
        """Compactions, and the rows that they have kept and dropped."""
        return self.compactor.counts

    def _set_end(self, kept: "KeptRows") -> None:
        self._scheduler.table.ends[kept.request.memory.slot] = NO_END if kept.end is None else kept.end


class Compactor:
    """Compacts the sequences of one engine, and counts what it keeps and drops."""

    def __init__(self, runner: Runner, send: Callable[[Compacted], None]) -> None:
        self.counts = CompactionStatistics()
        self._keys, self._state, self._uploads = runner.keys, runner.state, runner.uploads
        self._send = send

    @torch.inference_mode()
    def compact(self, kept: "KeptRows") -> None:
        """Drop rows of a running request that has no step in flight, by its policy.

        Cost: as Sequence.compact, and two launches; waits for nothing unless shared pages are exchanged.
        Raises: OutOfPages, DriverError; then nothing has changed.
        """
        request, sequence = kept.request, vmmkv_sequence(kept.request.memory)
        assert self._keys is not None, "else it is refused"
        length = sequence.length
        rows_T = kept.eviction.policy.keep(length) if kept.chosen is None else kept.chosen
        rows = rows_T.numpy()
        num_dropped = length - len(rows)
        sequence.compact(rows)
        request.num_dropped += num_dropped
        if kept.eviction.keeps_positions:
            self._state.shifts_S[sequence.slot].fill_(request.num_dropped)  # to assign it would wait for the device
        elif (first := num_unmoved(rows)) < len(rows):
            (back_T,) = self._uploads.pack([rows[first:] - np.arange(first, len(rows))])
            self._keys.turn(sequence.slot, first, back_T)
        self._state.lengths_S[sequence.slot].fill_(len(rows))
        kept.chosen = None
        self.counts.kv_compactions += 1
        self.counts.kv_kept_rows += len(rows)
        self.counts.kv_dropped_rows += num_dropped
        self._send(Compacted(request_id=request.ask.request_id, kept_rows=len(rows), dropped_rows=request.num_dropped))

    def release(self, slot: int) -> None:
        """A compacted request has left this slot: positions are rows there. One launch."""
        self._state.shifts_S[slot].fill_(0)


@dataclass(eq=False, slots=True)
class KeptRows:
    """Rows that the policy of one request has left, while it runs."""

    eviction: Eviction
    request: Request
    scores_T: torch.Tensor | None = None
    """Attention of the ranked queries to each row; None before the first of them. Only of `chosen` rows if any are."""
    chosen: torch.Tensor | None = None
    """Rows to keep in the next compaction, on the host; they are there when the step that ranked them has been read."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_dropped(self) -> int:
        """Tokens whose rows are gone."""
        return self.request.num_dropped

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

    def room(self, num_rows: int) -> int | None:
        """The most rows of its next chunk, which ends with the prompt or at a compaction; None for any number."""
        if num_rows + self.num_dropped < self.num_prompt:
            return self.num_prompt - num_rows
        return None if self.end is None else self.end - num_rows

    def num_ranked(self, start: int, end: int) -> int:
        """Number of queries of its next rows [start, end) that rows are ranked by: the last ones."""
        policy = self.eviction.policy
        if self.end is None or not policy.num_queries(1):
            return 0
        if end + self.num_dropped > self.num_prompt:
            return int(end == self.end)
        is_wanted = self.end == self.num_prompt or scores_all(policy)
        return max(0, end - max(start, self.num_prompt - policy.num_queries(self.num_prompt))) if is_wanted else 0

    def ranked(self, slot: int, start: int, end: int) -> Ranked | None:
        """Ranked queries of its next rows [start, end), in a step that computes these; None if there are none."""
        if not (num_queries := self.num_ranked(start, end)):
            return None
        is_generated = end + self.num_dropped > self.num_prompt
        since = self.eviction.budget if self.num_dropped else self.num_prompt
        return Ranked(self.add, slot, end, num_queries, end - since if is_generated else 1)

    def add(self, sums_T: torch.Tensor) -> None:
        """The ranked queries of a step attend so much to all rows that they see. Waits for nothing."""
        if self.scores_T is not None:
            sums_T[: len(self.scores_T)] += self.scores_T
        self.scores_T = sums_T
        if len(sums_T) == self.end:
            rows = self.eviction.policy.keep(self.end, sums_T)
            self.chosen = to_host(rows)
            self.scores_T = sums_T[rows] if scores_all(self.eviction.policy) else None
