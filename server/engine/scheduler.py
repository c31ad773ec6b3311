"""Who runs, how many tokens each computes in a step, and who gives way when pages run out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vmmkv import PAGE_BYTES, DriverError, OutOfPages
from vmmkv.server.engine.beams import BeamGroup
from vmmkv.server.engine.kv_backend import KV, KVSequence, Prefixes
from vmmkv.server.engine.request import Ledger, Request, Slots, Strand, TokenIds
from vmmkv.server.engine.sampler import Entry

# -------- admission
# Whom to let in: the most pressing priority, then the longest known prefix (SGLang), then who came first.

_LOOKED_AT = 32
"""How many of the waiting are looked at for the longest known prefix."""

_MOST_OVERTAKEN = 16
"""By how many a waiting request may be overtaken, for a longer prefix, before it goes first."""


_LEAST_AWAITED = 256
"""Tokens that a running request must be about to make known, for another to wait for them: a template or two is computed again
sooner than waited for."""


class Admission:
    """The choice among those that wait when a step is planned. What is known of a prompt is looked up once in a plan.

    waiting: first come first; those that are let in leave it.
    """

    def __init__(self, waiting: list[Request], running: list[Request], prefix: Prefixes | None) -> None:
        most = min((request.ask.priority for request in waiting), default=0)
        self._pressing = [request for request in waiting if request.ask.priority == most]
        self._prefilling = [request for request in running if request.is_prefilling]
        self._prefix = prefix
        self._num_known: dict[Request, int] = {}

    def next(self) -> Request | None:
        """Whose turn it is; None if all had better wait.

        Whoever would compute what a running request computes already waits for that, and is passed over.
        """
        if not self._pressing:
            return None
        oldest = self._pressing[0]
        if self._prefix is None or oldest.num_overtaken >= _MOST_OVERTAKEN:
            return oldest
        best: Request | None = None
        longest = -1
        for request in self._pressing[:_LOOKED_AT]:
            num_known = self._num_known.get(request)
            if num_known is None:
                num_known = self._prefix.match(request.attachable, namespace=request.namespace)
                self._num_known[request] = num_known
            if num_known > longest and not self._is_on_its_way(request, num_known):
                best, longest = request, num_known
        return best

    def admitted(self, request: Request) -> None:
        """It runs now; whoever came before it was overtaken."""
        place = self._pressing.index(request)
        for passed in self._pressing[:place]:
            passed.num_overtaken += 1
        del self._pressing[place]
        if request.is_prefilling:
            self._prefilling.append(request)

    def _is_on_its_way(self, request: Request, num_known: int) -> bool:
        """Does a running request compute more of its prompt than is known by now?"""
        first, wanted = request.prompt[0], request.attachable
        return any(
            other.prompt[0] == first
            and other.namespace == request.namespace
            and _num_common(other.prompt, wanted) >= num_known + _LEAST_AWAITED
            for other in self._prefilling
        )


def _num_common(one: TokenIds, other: TokenIds) -> int:
    """How many of the first tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length


# -------- scheduler

log = logging.getLogger(__name__)

_MOST_LET_IN = 16
"""How many are let in for a step. Opening one by aliases of a long prefix is some 0.5 ms of the driver: the device works on the
first ones while the host opens others, and their first tokens do not wait for all."""


class CannotRun(Exception):
    """A request cannot have the memory it needs: it is larger than the whole pool, or the driver failed."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request


class Assigner(Protocol):
    """Who must know how the tokens of a slot are chosen."""

    def assign(self, entries: Sequence[Entry]) -> None:
        """From now on as these requests asked. Whatever it raises, it can be asked again for some of them."""
        ...

    def release(self, slot: int) -> None:
        """The request in the slot is over."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: memory for it is mapped."""

    decoding: Slots
    """Slots whose last token is on the device: the next one of each."""
    chunks: list[tuple[Strand, int]]
    """Who else computes how many tokens that the host knows."""

    def __bool__(self) -> bool:
        return bool(len(self.decoding) or self.chunks)


class Scheduler:
    """Steps of at most `step_tokens` tokens: those that decode first, then as much of the prompts as there is room for
    (Sarathi-Serve), the oldest first. Who is let in is a matter of `Admission`.

    A request is admitted when its whole prompt has memory; it then grows as it goes. When a running one finds no page, and no
    step is under way that may free some, the least pressing and newest gives its memory back and waits, with what it has
    generated, to be computed again (vLLM's recompute): what it shares, and its full pages for as long as nobody needs them,
    the prefix cache keeps. Without one, nothing is shared.

    So does the newest of those least pressing when a waiting request that is more pressing finds no memory or no slot: never
    among equals, so that nobody is displaced by whom it displaced.

    A beam search takes as many slots as it has beams, from the start, and gives way with all of them: it begins anew from its
    prompt, when one that ran beside it, or displaced it, has ended.
    """

    def __init__(
        self,
        cache: KV,
        prefix: Prefixes | None,
        assigner: Assigner,
        *,
        step_tokens: int,
        max_sequences: int,
        drain: Callable[[], bool],
    ) -> None:
        """`drain` waits for the steps under way, and says whether there were any."""
        self.waiting: list[Request] = []
        """First come first, but for those that gave way, which stand before."""
        self.running: list[Request] = []
        """The oldest first."""
        self.ledger = Ledger(cache.num_slots, cache.max_tokens)
        self.num_preempted = 0
        self._cache = cache
        self._prefix = prefix
        self._assigner = assigner
        self._step_tokens = step_tokens
        self._max_sequences = max_sequences
        self._drain = drain
        self._windowed = [index for index, group in enumerate(cache.layout.groups) if group.window is not None]
        self._decoding: Slots | None = None
        """Slots of those whose last token is on the device, the oldest first; None if that has to be looked up."""
        self._beginning: list[Request] = []
        """Those that run, and of whose slots nobody was told yet how their tokens are chosen."""
        self._num_refused = 0
        """How many waited when one of them found no room; 0 if there may be some. To try is to map, and to evict what is
        cached: it is not done again before memory can have come back, or somebody else has come."""

    @property
    def has_work(self) -> bool:
        """Is anything waiting or running?"""
        return bool(self.waiting or self.running)

    def find(self, request_id: str) -> Request | None:
        """The request of that name, if it has not ended."""
        return next((request for request in (*self.running, *self.waiting) if request.ask.request_id == request_id), None)

    def plan(self) -> Plan:
        """Who computes how many tokens in the next step; the memory for them is mapped.

        Raises: CannotRun, naming the request that must be ended; the others can go on.
        """
        self._admit()
        self._begin()
        lengths, limits = self._cache.lengths, self._cache.limits
        decoding = self._slots_decoding()
        if len(short := decoding[lengths[decoding] >= limits[decoding]]):
            for request in [self.ledger.requests[slot] for slot in short]:
                if request is not None and request.sequence is not None:  # else it has given way, or come to its end
                    self._grow(request, request.memory.length + 1)
        left = self._step_tokens - len(self._slots_decoding())
        chunks: list[tuple[Strand, int]] = []
        for request in self.running.copy() if len(decoding) < len(self.running) else ():
            if request.sequence is None or not self._arrange(request):
                continue
            for strand in request.strands:
                count = min(strand.num_left, left)
                if count > 0:
                    if not self._grow(strand, strand.memory.length + count):
                        break
                    chunks.append((strand, count))
                    left -= count
        chunks = [(strand, count) for strand, count in chunks if strand.request.sequence is not None]
        return Plan(self._slots_decoding(), chunks)

    def launched(self, plan: Plan) -> None:
        """The step is under way."""
        self.ledger.coming[plan.decoding] += 1
        self._cache.advance(plan.decoding)
        for strand, count in plan.chunks:
            strand.memory.advance(count)
            samples = strand is strand.request and not strand.num_candidates and strand.request.ask.max_new_tokens > 0
            if samples and not strand.num_left:
                strand.request.decodes = True
                self.ledger.coming[strand.memory.slot] += 1
                self._decoding = None

    def force(self, request: Request, tokens: Sequence[int]) -> None:
        """A running request goes on with these, instead of what a launched step samples for it: they are its next chunk."""
        self.ledger.take_forced(request.memory.slot, tokens)
        request.decodes = False
        self._decoding = None

    def share(self, request: Request) -> None:
        """What a running request has computed of its prompt is confirmed: from now on others may have it."""
        if self._prefix is not None:
            tokens = request.confirmed_tokens[: len(request.prompt)]
            self._prefix.insert(request.memory, tokens)
            if len(tokens) == len(request.prompt):
                self._num_refused = 0  # whoever shares it needs less now

    def end(self, request: Request, *, keep: bool = True) -> None:
        """A request is over, or its client is gone: its memory goes back, once the device is done with it.

        `keep`: what it has computed stays for others to have until the room is needed; not after a failure.
        """
        if request.sequence is None:
            self.waiting.remove(request)
            self._num_refused = 0
            return
        self._stop(request)
        if self._prefix is None or not keep:
            request.memory.close()
        else:
            self._prefix.park(request.memory, request.confirmed_tokens)
        request.leave()

    def look_again(self) -> None:
        """There may be room now for those who found none."""
        self._num_refused = 0

    def slide(self) -> bool:
        """Give back the rows that have left the windows of those that run; were there any?"""
        starts = [self._starts(request) for request in self.running]
        for request in self.running:
            for strand in request.strands:
                for group in self._windowed:
                    strand.memory.advance_start(group)
        has_come = starts != [self._starts(request) for request in self.running]
        if has_come:
            self._num_refused = 0
        return has_come

    def _starts(self, request: Request) -> list[int]:
        return [strand.memory.start(group) for strand in request.strands for group in self._windowed]

    def _slots_decoding(self) -> Slots:
        """Of those whose last token is on the device, and that want another."""
        if self._decoding is None:
            self._decoding = np.array([request.memory.slot for request in self.running if request.decodes], np.int64)
        wants = self.ledger.coming[self._decoding] < self.ledger.ends[self._decoding]
        if not wants.all():
            self._decoding = self._decoding[wants]
        return self._decoding

    def _admit(self) -> None:
        """Let some of those in whose prompts the next step can begin with: to map memory for more would only delay it."""
        if not self.waiting or (self.running and len(self.waiting) <= self._num_refused):
            return
        num_tokens, num_slots = self._num_free_tokens(), self._num_free_slots()
        if num_tokens <= 0:
            return
        if num_slots <= 0 and self._num_slots_for(min(request.ask.priority for request in self.waiting)) <= 0:
            self._num_refused = len(self.waiting)
            return
        admission = Admission(self.waiting, self.running, self._prefix)
        num_left = _MOST_LET_IN
        while num_tokens > 0 and num_left:
            request = admission.next()
            if request is None or request.num_slots > self._num_slots_for(request.ask.priority):
                return
            if request.max_others is not None and len(self.running) > request.max_others:
                return
            if request.num_slots > num_slots:
                if not self._displace(request):
                    self._num_refused = len(self.waiting)
                    return
                num_tokens, num_slots = self._num_free_tokens(), self._num_free_slots()
                admission = Admission(self.waiting, self.running, self._prefix)
                continue
            try:
                sequence, num_known = self._open(request)
            except OutOfPages as error:
                if self._displace(request):
                    num_tokens, num_slots = self._num_free_tokens(), self._num_free_slots()
                    admission = Admission(self.waiting, self.running, self._prefix)
                    continue
                if self.running:
                    self._num_refused = len(self.waiting)
                    return
                raise CannotRun(request, f"this request can never fit: {error}") from error
            except DriverError as error:
                raise CannotRun(request, f"no memory could be mapped: {error}") from error
            except Exception as error:
                raise CannotRun(request, f"this request could not begin: {error}") from error
            if request.num_admitted == 0:
                request.num_cached = min(num_known, len(request.prompt))
            self.waiting.remove(request)
            self.running.append(request)
            request.enter(self.ledger, sequence, num_known)
            if not request.ask.beam_width:
                self._beginning.append(request)
            else:
                try:
                    request.beams = BeamGroup(request, self._cache)
                except Exception as error:
                    raise CannotRun(request, f"this request could not begin: {error}") from error
            admission.admitted(request)
            num_tokens -= request.num_left
            num_slots -= request.num_slots
            num_left -= 1

    def _begin(self) -> None:
        """From now on tokens are chosen for those who were let in as they ask: one upload for all of them.

        Raises: CannotRun for the first that cannot begin; those behind it have their turn in the next call.
        """
        self._beginning = [request for request in self._beginning if request.sequence is not None]  # the others are gone
        if not self._beginning:
            return
        try:
            self._assigner.assign([_entry(request) for request in self._beginning])
            self._beginning.clear()
        except Exception:
            log.exception("requests could not begin together, and now begin one by one")
            while self._beginning:
                request = self._beginning.pop(0)
                try:
                    self._assigner.assign([_entry(request)])
                except Exception as error:
                    raise CannotRun(request, f"this request could not begin: {error}") from error

    def _num_free_tokens(self) -> int:
        """Tokens of the next step that no running request will compute."""
        waits = self.ledger.known - self._cache.lengths
        return self._step_tokens - sum(
            max(0, int(waits[request.memory.slot])) if not request.decodes else 1 for request in self.running
        )

    def _num_free_slots(self) -> int:
        """Slots that no running request has or will have."""
        return self._max_sequences - sum(request.num_slots for request in self.running)

    def _num_slots_for(self, priority: int) -> int:
        """Slots that nobody has who is as pressing as that."""
        return self._max_sequences - sum(request.num_slots for request in self.running if request.ask.priority <= priority)

    def _open(self, request: Request) -> tuple[KVSequence, int]:
        """Memory for all tokens of a request, and how many of them need not be computed."""
        num_known = 0
        if self._prefix is None:
            sequence = self._cache.open(max_tokens=request.max_tokens, tenant=request.namespace)
        else:
            attached = self._prefix.attach(request.attachable, namespace=request.namespace, max_tokens=request.max_tokens)
            sequence, num_known = attached.sequence, attached.num_tokens
        try:
            sequence.grow(len(request.tokens))
        except BaseException:
            sequence.close()
            raise
        return sequence, num_known

    def _grow(self, strand: Strand, num_tokens: int) -> bool:
        """Map memory for a strand; False if its request gave way."""
        return self._with_room(strand.request, lambda: strand.memory.grow(num_tokens))

    def _arrange(self, request: Request) -> bool:
        """Give the beams of a request their sequences, if it searches; False if it gave way."""
        return request.beams is None or self._with_room(request, request.beams.arrange)

    def _with_room(self, request: Request, take: Callable[[], None]) -> bool:
        """Have a request take memory, from others if need be; False if it is the one to give way, or has come to its end."""
        while True:
            try:
                take()
                return True
            except OutOfPages as error:
                if self._drain() or self.slide():
                    if request.sequence is None:
                        return False
                    continue
                if len(self.running) == 1:
                    num_tokens = len(request.tokens)
                    if self._prefix is None or request.beams is not None or request.num_tokens_stuck == num_tokens:
                        raise CannotRun(request, f"this request can never fit: {error}") from error
                    # The tree may keep, for this very request, what another has computed of the same tokens. Begun again it
                    # shares that, and needs no pages of its own for it.
                    request.num_tokens_stuck = num_tokens
                last = max(reversed(self.running), key=lambda running: running.ask.priority)
                self._preempt(last, max_others=len(self.running) - 2)  # without itself, one fewer
                if last is request:
                    return False
            except DriverError as error:
                raise CannotRun(request, f"no memory could be mapped: {error}") from error
            except Exception as error:
                raise CannotRun(request, f"this request cannot go on: {error}") from error

    def _stop(self, request: Request) -> None:
        """It runs no longer. Of its memory nothing is left but its own sequence."""
        self.running.remove(request)
        self._decoding = None
        self._num_refused = 0
        if request.beams is not None:
            request.beams.close()
            request.beams = None
        else:
            self._assigner.release(request.memory.slot)

    def _displace(self, request: Request) -> bool:
        """Let one who is less pressing than a waiting request give way to it; False if all are as pressing, or it is in vain.

        The steps under way are waited for first, and windows slide: that may make room already.
        """
        last = max(reversed(self.running), key=lambda running: running.ask.priority, default=request)
        if last.ask.priority <= request.ask.priority or not self._could_fit(request):
            return False
        if not self._drain() and not self.slide():
            self._preempt(last, max_others=len(self.running) - 1)  # without itself, as many: the other is in by then
        return True

    def _could_fit(self, request: Request) -> bool:
        """Would a waiting request find memory if all who press less gave way? At best: what they share counts as theirs."""
        layout, stats = self._cache.layout, self._cache.stats()
        num_known = 0 if self._prefix is None else self._prefix.match(request.attachable, namespace=request.namespace)
        wanted_bytes = (len(request.tokens) - num_known) * layout.row_bytes
        given_bytes = sum(
            layout.pages_for(int(self._cache.limits[strand.memory.slot])) * PAGE_BYTES
            for running in self.running
            if running.ask.priority > request.ask.priority
            for strand in running.strands
        )
        return wanted_bytes <= stats.pool_budget_bytes - stats.pool_used_bytes + given_bytes

    def _preempt(self, request: Request, *, max_others: int) -> None:
        if request.beams is not None:
            request.max_others = max_others
        self._stop(request)
        if self._prefix is None:
            request.memory.close()
        else:
            self._prefix.release(request.memory, request.confirmed_tokens)
        request.leave()
        self.waiting.insert(0, request)
        self.num_preempted += 1


def _entry(request: Request) -> Entry:
    """How a running request samples, and what it has sampled before it gave way."""
    return Entry(request.memory.slot, request.ask, request.prompt, request.tokens[len(request.prompt) :], request.withheld)
