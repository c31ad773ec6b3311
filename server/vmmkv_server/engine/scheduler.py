"""Scheduler: the requests that run, the tokens that each computes in a step, and preemption when pages run out."""

import contextlib
import itertools
import logging
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from vmmkv import PAGE_BYTES, DriverError, OutOfPages, RowsUnmapped
from vmmkv_server.engine.feature import Feature, Features
from vmmkv_server.engine.kv_backend import KVBackend, KVSequence, TokenIds, vmmkv_sequence
from vmmkv_server.engine.request import DecodeSet, Request, RequestTable, Shape, Status
from vmmkv_server.engine.sampler import Sampler
from vmmkv_server.engine.step import Chunk, Step
from vmmkv_server.engine.waiting import Order, WaitingQueue
from vmmkv_server.protocol import DEVICE, RECOMPUTED
from vmmkv_server.statistics import SchedulerStatistics, add_counts

log = logging.getLogger(__name__)

_MIN_ADMITTED: Final = 8
_MAX_ADMITTED: Final = 16
"""Requests admitted for one step while the device waits for it, and at most. To open one by aliases of a long prefix takes the
driver some 0.7 ms. A step costs the host as much again, and all requests of a step get their first tokens at its end."""

_place: Final = attrgetter("place")


class CannotRun(Exception):
    """A request cannot have the memory it needs: it is larger than the whole pool, or the driver failed."""

    def __init__(self, request: Request, error: Exception, otherwise: str) -> None:
        """`otherwise`: what the error is about if it is of neither kind."""
        what = otherwise
        if isinstance(error, OutOfPages | DriverError):
            what = "this request can never fit" if isinstance(error, OutOfPages) else "no memory could be mapped"
        super().__init__(f"{what}: {error}")
        self.request = request


class _Preempted(NamedTuple):
    """State of a preempted request while it waits."""

    num_rows: int
    """Rows of it that had been read back."""
    max_others: float
    """Most others that may run when it begins again."""


class Scheduler:
    """Plans steps of at most `step_tokens` tokens: first the requests that decode, then prompts in order of admission, the last
    of them in part (chunked prefill, as in Sarathi-Serve).

    A request is admitted when there is memory for its whole prompt, and grows as it generates. When a running request finds no
    page and no step in flight may free some, the newest request of the lowest priority is preempted. It waits, with its tokens.
    The prefix cache keeps its full pages until they are needed. Evicted pages are loaded from tiers, or computed again.

    A waiting request that finds no memory or no slot preempts running requests of lower priority. Requests of equal priority
    never preempt each other for a slot, so preemption cannot cycle.

    A feature may hold a request that could be admitted, with its slots reserved, while later ones are admitted. Where it
    would, but for lack of room, the request waits for that, and all later ones too. A held request is let go, before any is
    preempted, for a running request that finds no page and for a waiting one that is more urgent.

    A request of several slots takes them from the start, and is preempted as a whole. One that samples no tokens may need any
    amount of memory: it begins again when a request that ran beside it, or preempted it, has ended.
    """

    def __init__(
        self,
        memory: KVBackend,
        sampler: Sampler,
        *,
        step_tokens: int,
        max_sequences: int,
        drain: Callable[[], bool],
        is_idle: Callable[[], bool],
        features: Features | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """`drain` reads the steps in flight, and says whether there were any. `is_idle`: does the device wait for a step?

        `most_tokens`: of one request; None for the memory's, which are those whose rows can all be kept.
        """
        self.waiting: Final = WaitingQueue(memory)
        self.running: dict[Request, None] = {}
        """Running requests, in order of admission."""
        self.table: Final = RequestTable(memory.num_slots, most_tokens or memory.max_tokens)
        self.counts: Final = SchedulerStatistics()
        """Counts since the start: see `statistics`."""
        self.held: dict[Request, None] = {}
        """Requests that a feature holds, with their slots reserved."""
        self._memory = memory
        self._sampler = sampler
        self._step_tokens = step_tokens
        self._max_sequences = max_sequences
        self.drain: Final = drain
        self._features = Features() if features is None else features
        self._is_idle = is_idle
        self._windowed = [index for index, group in enumerate(memory.layout.groups) if group.window is not None]
        self._places = itertools.count(1)
        self._by_id: dict[str, Request] = {}
        """Requests by id: those that wait, for tiers too, or run."""
        self._priorities: list[int] = []
        """Sorted priorities of the running requests, one entry for each slot that they hold."""
        self._prefilling: dict[Request, None] = {}
        """Running requests that do not decode."""
        self._unconfirmed: list[Request] = []
        """Running requests whose prompts others will share, and had not been read back at the last plan."""
        self.decoding: Final = DecodeSet(self.table, memory)
        self._unassigned: list[Request] = []
        """Running requests whose sampling parameters are not on the device yet."""
        self._preempted: dict[Request, _Preempted] = {}

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running?"""
        return bool(self.waiting or self.running or self.held)

    def statistics(self) -> SchedulerStatistics:
        """The counts, and the requests that run and wait now."""
        counts = self.counts.copy()
        counts.requests_running, counts.requests_waiting = len(self.running), len(self.waiting) + len(self.held)
        return counts

    def check(self) -> None:
        """Recount the requests that wait and run; AssertionError says what is broken."""
        places = [request.place for request in self.running]
        waiting = [(request.ask.priority, request.place) for request in self.waiting]
        assert places == sorted(places) and waiting == sorted(waiting), "oldest first"
        assert set(self._prefilling) == {each for each in self.running if each.status is Status.PREFILLING}
        priorities = [each.ask.priority for each in self.running for _ in range(each.shape.num_slots)]
        assert self._priorities == sorted(priorities)
        known = {each.ask.request_id: each for each in (*self.running, *self.waiting, *self.held)}
        assert known == self._by_id and len(known) == len(self.running) + len(self.waiting) + len(self.held)

    def add(self, request: Request) -> None:
        """A request comes, and waits."""
        self._by_id[request.ask.request_id] = request
        self._reshape(request)
        self.waiting.add(request, next(self._places))

    def find(self, request_id: str) -> Request | None:
        """The request of that id, if it has not ended."""
        return self._by_id.get(request_id)

    def schedule(self) -> Step | None:
        """The next step, whose memory is mapped; None if no running request can compute now: call again while `has_work`.

        Give the step to `launched` before the next call, which would else plan the same tokens again.
        Raises: CannotRun, naming a request that must be ended; DriverError if the memory of a preempted one cannot be given
        back. What was admitted, grown or preempted before stays so, and the others can go on.
        """
        for feature in self._features.having(Feature.planning):
            feature.planning()
        self._admit()
        self._assign_sampling()
        # To find room, steps in flight are read, and requests end or are preempted. From here on requests leave the decoding
        # ones and the chunks, and none joins them: each slot of the step has memory.
        for request in [self.table.requests[slot] for slot in self.decoding.without_room()]:
            if request is not None and request.is_running:  # else it was preempted, or has ended, for an earlier one
                self.with_room(request, partial(request.memory.grow, request.memory.length + 1))  # if False, it decodes no more
        budget = self._step_tokens - len(self.decoding.slots)
        chunks: list[Chunk] = []
        for request in sorted(self._prefilling, key=_place):  # by admission
            if not request.is_running:  # it was preempted, or has ended, for an earlier one
                continue
            for pending in self._chunks(request):
                chunk = pending.first(max(0, budget))
                if len(chunk.tokens):
                    # Mapped since admission, but for forced tokens, beams, and prompts of which a policy keeps fewer rows.
                    if not self.with_room(request, partial(chunk.sequence.grow, chunk.end)):
                        break
                    chunks.append(chunk)
                    budget -= len(chunk.tokens)
        slots, chunks = self.decoding.slots, [chunk for chunk in chunks if chunk.request.is_running]
        if not len(slots) and not chunks:
            return None
        step = Step(slots, self._memory.lengths.take(slots) + 1, self.decoding.epochs, chunks)
        for feature in self._features.having(Feature.planned):
            feature.planned(step)
        return step

    def launched(self, step: Step) -> None:
        """A step is in flight, or about to be: count its tokens."""
        table = self.table
        np.add.at(table.num_coming, step.slots, 1)
        self._memory.advance(step.slots)
        sampled: list[int] = []
        for chunk in step.chunks:
            chunk.sequence.advance(len(chunk.tokens))
            if chunk.is_sampled:
                chunk.request.status = Status.DECODING
                del self._prefilling[chunk.request]
                sampled.append(chunk.slot)
        if sampled:
            table.num_coming[sampled] += 1
        self.decoding.launched(sampled)

    def force(self, request: Request, tokens: list[int]) -> None:
        """A running request goes on with these tokens, if any. What launched steps sample for it is dropped, with its rows.

        If there are none, the row of the last token that the host knows is computed again. A request is preempted if its rows
        cannot be taken back.
        """
        table, slot = self.table, request.memory.slot
        num_rows = int(table.num_known[slot]) - request.num_dropped - (not tokens)
        table.append_forced(slot, tokens)
        table.epochs[slot] += 1
        request.status = Status.PREFILLING
        self._prefilling[request] = None
        self.decoding.leave(slot)
        if self._sampler.counts(slot):
            self._unassigned.append(request)
        if request.memory.length > num_rows:
            self._take_back(request, num_rows)

    def _take_back(self, request: Request, num_rows: int) -> None:
        """Drop the rows of a running request behind these, or else all.

        A policy may have ranked rows by the others, and a window may have moved with them.
        """
        if request.shape.keeps_rows:
            with contextlib.suppress(RowsUnmapped):
                request.memory.truncate(num_rows)
                return
        self.preempt(request, max_others=len(self.running))

    def insert_prefix(self, request: Request) -> None:
        """Rows of a running request's prompt have been read back: from now on others may attach to them."""
        if self._memory.shares_prefixes and request.shape.shares_rows:
            tokens = request.confirmed_tokens[: len(request.prompt)]
            self.insert(request, tokens)
            if len(tokens) == len(request.prompt):
                self.waiting.memory_changed()  # requests that share it need less now

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """A request is over, or its client is gone. Its memory goes back once the device is done with it.

        `keep`: the prefix cache keeps what it has computed until the room is needed; not after a failure.
        """
        if request.is_running:
            self._stop(request, Status.FINISHED, self._memory.park if keep else None)
        elif request in self.held:
            self._let_go(request)
        elif request in self.waiting:  # else an interrupt came after this
            self.waiting.remove(request)
        request.status = Status.FINISHED
        for feature in self._features.having(Feature.finished):
            feature.finished(request)
        self.waiting.forget(request)
        self._preempted.pop(request, None)
        self._by_id.pop(request.ask.request_id, None)  # last: one that an interrupt keeps from ending is aborted

    def slide_windows(self) -> bool:
        """Give back the rows that have left the windows of running requests; were there any?"""
        has_moved = False
        for sequence in (
            vmmkv_sequence(each) for request in self.running if self._windowed for each in self.sequences(request)
        ):
            for group in self._windowed:
                before = sequence.start(group)
                sequence.advance_start(group)
                has_moved |= sequence.start(group) != before
        if has_moved:
            self.waiting.memory_changed()
        return has_moved

    def rows_dropped(self, request: Request) -> None:
        """Rows of a running request are gone: it may decode again, and there may be room."""
        self._unassigned.append(request)  # the sampler counts rows
        self.waiting.memory_changed()
        if request.status is Status.DECODING:
            self.decoding.join([request.memory.slot])

    def _reshape(self, request: Request) -> None:
        """Ask what a request takes that begins to wait."""
        num_tokens = len(request.tokens)
        shape = Shape(num_tokens, request.max_tokens, num_tokens)
        for feature in self._features.having(Feature.shape):
            shape = feature.shape(request, shape)
        request.shape = shape

    def _chunks(self, request: Request) -> list[Chunk]:
        """All that can be computed of a running request from tokens that the host has."""
        for feature in self._features.having(Feature.chunks):
            if (chunks := feature.chunks(request)) is not None:
                return chunks
        return [Chunk.own(request)]

    def sequences(self, request: Request) -> Sequence[KVSequence]:
        """The sequences of a running request."""
        for feature in self._features.having(Feature.sequences) if request.shape.num_slots > 1 else ():
            if (sequences := feature.sequences(request)) is not None:
                return sequences
        return [request.memory]

    def insert(self, request: Request, tokens: TokenIds) -> None:
        """Rows of a running request have been read back: the prefix cache has those of these tokens from now on."""
        self._memory.insert(request.memory, tokens)
        self.table.num_inserted[request.memory.slot] = len(tokens)

    def _admit(self) -> None:
        """Admit requests whose prompts the next step can begin with. To map memory for more would only delay it."""
        for feature in self._features.having(Feature.released) if self.held else ():
            self._resume(feature.released())
        if not self.waiting or ((self.running or self.held) and self.waiting.is_refused):
            return
        num_tokens, num_slots, num_left = self._num_free_tokens(), self._num_slots_for(), _MAX_ADMITTED
        if num_tokens <= 0:
            return
        if num_slots <= 0 and self._num_slots_for(self.waiting.first.ask.priority) <= 0:
            self.waiting.refuse()
            return
        order = self._order()
        while num_tokens > 0 and num_left:
            if num_left <= _MAX_ADMITTED - _MIN_ADMITTED and self._is_idle():
                return
            request = order.next()
            if request is None or request.shape.num_slots > self._num_slots_for(request.ask.priority):
                return
            if any(feature.is_full(request.ask.priority) for feature in self._features.having(Feature.is_full)):
                return
            if request in self._preempted and len(self.running) > self._preempted[request].max_others:
                return
            opened: tuple[KVSequence, int] | None = None
            is_held: bool | None = False
            if request.shape.num_slots <= num_slots and (is_held := self._hold(request)) is False:
                opened = self._open(request)
            if is_held:
                num_slots -= request.shape.num_slots
                num_left -= 1
                continue
            if opened is None:  # too few slots or pages
                if not self._preempt_for(request):
                    if is_held is False:  # else what ended requests have left may be had after any step
                        self.waiting.refuse()
                    return
                num_tokens, num_slots = self._num_free_tokens(), self._num_slots_for()
                order = self._order()
                continue
            order.admitted(request)
            self._start(request, *opened)
            num_tokens -= len(request.tokens) - request.memory.length
            num_slots -= request.shape.num_slots
            num_left -= 1

    def _hold(self, request: Request) -> bool | None:
        """Have a feature hold a waiting request; None if it would, and others must end before there is room.

        Raises: CannotRun.
        """
        try:
            for feature in self._features.having(Feature.hold):
                if (is_held := feature.hold(request)) is not False:
                    if is_held:
                        self.waiting.remove(request)
                        self.held[request] = None
                    return is_held
        except Exception as error:
            raise CannotRun(request, error, "this request could not begin") from error
        return False

    def _let_go(self, request: Request) -> None:
        del self.held[request]
        for feature in self._features.having(Feature.let_go):
            feature.let_go(request)

    def _resume(self, requests: list[Request]) -> None:
        """Let requests that were held be admitted."""
        for request in requests:
            self.held.pop(request, None)
            self.waiting.add(request, request.place)
            self.waiting.memory_changed()

    def _give_up_held(self, priority: float = -math.inf) -> bool:
        """Free slots and memory of the newest held request that is less urgent than this; is there one?"""
        newest = next((request for request in reversed(self.held) if request.ask.priority > priority), None)
        if newest is None:
            return False
        self._let_go(newest)
        self._resume([newest])
        return True

    def _order(self) -> Order:
        """The order of admission, as of now."""
        self._unconfirmed = [each for each in self._unconfirmed if each.is_running and not each.is_prompt_confirmed]
        return self.waiting.order(self._unconfirmed)

    def _open(self, request: Request) -> tuple[KVSequence, int] | None:
        """Memory for all tokens of a request, and how many of them need not be computed; None if there are too few pages.

        Raises: CannotRun.
        """
        try:
            sequence, num_known = self._memory.attach(
                request.attachable, namespace=request.namespace, max_tokens=request.shape.most_rows
            )
            try:
                sequence.grow(request.shape.num_first_rows)
            except Exception:
                sequence.close()
                raise
        except Exception as error:
            if isinstance(error, OutOfPages) and (self.running or self.held):
                return None
            raise CannotRun(request, error, "this request could not begin") from error
        return sequence, num_known

    def _start(self, request: Request, sequence: KVSequence, num_known: int) -> None:
        """A waiting request runs from now on."""
        if (preempted := self._preempted.pop(request, None)) is None:
            sources = self._sources(request, min(num_known, len(request.prompt)))
            request.cached = tuple(sources.items())
            add_counts(self.counts.hit_tokens, sources)
        else:
            num_kept, num_lost = min(num_known, preempted.num_rows), preempted.num_rows
            sources = self._sources(request, num_kept) + Counter({RECOMPUTED: num_lost - num_kept})
            add_counts(self.counts.resumed_tokens, sources)
        self.waiting.begin(request)
        request.place = next(self._places)
        request.enter(self.table, sequence, num_known)
        self.running[request] = self._prefilling[request] = None
        if request.shape.shares_rows and not request.is_prompt_confirmed:
            self._unconfirmed.append(request)
        place = bisect_left(self._priorities, request.ask.priority)
        self._priorities[place:place] = [request.ask.priority] * request.shape.num_slots
        if request.shape.samples:
            self._unassigned.append(request)
        for feature in self._features.having(Feature.admitted):
            feature.admitted(request)

    def _sources(self, request: Request, num_cached: int) -> Counter[str]:
        """Cached tokens of a request that begins, by where they were."""
        for feature in self._features.having(Feature.sources):
            if (sources := feature.sources(request, num_cached)) is not None:
                return sources
        return +Counter({DEVICE: num_cached})

    def _assign_sampling(self) -> None:
        """Upload the sampling parameters of the requests that were admitted, all at once.

        Raises: CannotRun for the first that cannot begin; the next call assigns the later ones.
        """
        unassigned = dict.fromkeys(self._unassigned)
        self._unassigned = [request for request in unassigned if request.is_running]  # the others have ended
        if not self._unassigned:
            return
        try:
            self._sampler.assign(self._unassigned)
            self._unassigned.clear()
        except Exception:
            log.exception("requests could not begin together, and now begin one by one")
            while self._unassigned:
                request = self._unassigned.pop(0)
                try:
                    self._sampler.assign([request])
                except Exception as error:
                    raise CannotRun(request, error, "this request could not begin") from error

    def _num_free_tokens(self) -> int:
        """Tokens of the next step that no running request will compute."""
        slots = [request.memory.slot for request in self._prefilling]
        dropped = np.array([request.num_dropped for request in self._prefilling], np.int64)
        pending = self.table.num_known[slots] - self._memory.lengths[slots] - dropped
        return self._step_tokens - (len(self.running) - len(slots)) - int(pending.clip(min=0).sum())

    def _num_slots_for(self, priority: float = math.inf) -> int:
        """Slots that a request of this priority can have, by preemption if need be; by default without.

        A lower number is more urgent.
        """
        num_held = sum(request.shape.num_slots for request in self.held if request.ask.priority <= priority)
        return self._max_sequences - num_held - bisect_right(self._priorities, priority)

    def with_room(self, request: Request, take: Callable[[], None]) -> bool:
        """Have a running request take memory, from others if need be; False if it was preempted, or has ended.

        A request that runs alone may be preempted too: begun again, it shares rows that the prefix cache has.
        Raises: CannotRun; DriverError if the memory of a preempted request cannot be given back.
        """
        while True:
            try:
                take()
                return True
            except OutOfPages as error:
                if self.drain() or self.slide_windows() or self._give_up_held():
                    if not request.is_running:
                        return False
                    continue
                if len(self.running) == 1:
                    num_tokens = len(request.tokens)
                    if not self._memory.shares_prefixes or not request.shape.samples or request.num_tokens_stuck == num_tokens:
                        raise CannotRun(request, error, "") from error
                    # The prefix cache may hold the same tokens, computed by another request. Begun again, this one shares
                    # them, and needs no pages of its own for them.
                    request.num_tokens_stuck = num_tokens
                    self._reshape(request)
                last = self._least_urgent()
                self.preempt(last, max_others=len(self.running) - 2)  # one of the others must have ended
                if last is request:
                    return False
            except Exception as error:
                raise CannotRun(request, error, "this request cannot go on") from error

    def _stop(self, request: Request, status: Status, keep: Callable[[KVSequence, TokenIds], None] | None = None) -> None:
        """End the run of a request. `keep` takes its own sequence, and the tokens that it has computed.

        Raises: DriverError if its memory cannot be given back. It runs on then, and can be stopped again.
        """
        is_kept = not request.num_dropped and request.shape.shares_rows
        for feature in self._features.having(Feature.left):
            feature.left(request)
        if keep is None or not is_kept:
            request.memory.close()
        else:
            keep(request.memory, request.confirmed_tokens)
        del self.running[request]
        place = bisect_left(self._priorities, request.ask.priority)
        del self._priorities[place : place + request.shape.num_slots]
        self._prefilling.pop(request, None)
        self.decoding.leave(request.memory.slot)
        self._sampler.release(request.memory.slot)
        request.leave(status)
        self.waiting.memory_changed()

    def _least_urgent(self) -> Request:
        """The newest running request of the lowest priority."""
        lowest = self._priorities[-1]
        return next(running for running in reversed(self.running) if running.ask.priority == lowest)

    def _preempt_for(self, request: Request) -> bool:
        """Make room for a waiting request: let a less urgent held one go, read the steps in flight, slide windows, or
        else preempt a less urgent request.

        False if no running request is less urgent, or all of them together hold too little.
        """
        if self._give_up_held(request.ask.priority):
            return True
        if not self.running or self._priorities[-1] <= request.ask.priority or not self._could_fit(request):
            return False
        if not self.drain() and not self.slide_windows():
            # `request` runs by then, and one more must have ended.
            self.preempt(self._least_urgent(), max_others=len(self.running) - 1)
        return True

    def _could_fit(self, request: Request) -> bool:
        """Would a waiting request fit if all less urgent ones were preempted? An upper bound: shared pages count for each."""
        layout, stats = self._memory.layout, self._memory.stats()
        wanted_bytes = (request.shape.num_first_rows - self.waiting.num_cached(request)) * layout.row_bytes
        given_bytes = sum(
            layout.pages_for(int(self._memory.limits[sequence.slot])) * PAGE_BYTES
            for running in self.running
            if running.ask.priority > request.ask.priority
            for sequence in self.sequences(running)
        )
        return wanted_bytes <= stats.pool_budget_bytes - stats.pool_used_bytes + given_bytes

    def preempt(self, request: Request, *, max_others: int) -> None:
        """Take its memory; it waits to begin again. One that samples no tokens waits until at most `max_others` run."""
        may_resume, num_rows = request.shape.samples, len(request.confirmed_tokens)
        self._preempted[request] = _Preempted(num_rows, math.inf if may_resume else max_others)
        self._stop(request, Status.WAITING, self._memory.release)
        self._reshape(request)
        self.waiting.add(request, -next(self._places))
        self.counts.preemptions += 1
