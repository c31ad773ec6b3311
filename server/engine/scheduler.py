"""Who runs, how many tokens each computes in a step, and who gives way when pages run out."""

from collections.abc import Callable, Iterator

import numpy as np

from vmmkv import DriverError, KVCache, OutOfPages
from vmmkv.prefix import PrefixCache
from vmmkv.sequence import Sequence
from vmmkv.server.engine.beam_group import BeamGroup
from vmmkv.server.engine.requests import Request, Strand

_LOOKED_AT = 32
"""How many of the waiting are looked at for the longest known prefix."""

_MOST_OVERTAKEN = 16
"""By how many a waiting request may be overtaken, for a longer prefix, before it goes first."""


class CannotRun(Exception):
    """A request cannot have the memory it needs: it is larger than the whole pool, or the driver failed."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request


class Scheduler:
    """Longest known prefix first (SGLang), else first come, first served, in steps of at most `step_tokens` tokens.

    A request is admitted when its whole prompt has memory; it then grows as it goes. When a running one finds no page,
    the newest gives its memory back and waits, with what it has generated, to be computed again (vLLM's recompute): what it
    shares, and its full pages for as long as nobody needs them, the prefix cache keeps. Without one, nothing is shared.

    A beam search takes as many slots as it has beams, from the start, and gives way with all of them: it begins anew from its
    prompt, when one that ran beside it has ended.
    """

    def __init__(self, cache: KVCache, prefix: PrefixCache | None, *, step_tokens: int, max_sequences: int) -> None:
        self.waiting: list[Request] = []
        """First come first, but for those that gave way, which stand before."""
        self.running: list[Request] = []
        """The oldest first."""
        self.num_preempted = 0
        self._cache = cache
        self._prefix = prefix
        self._step_tokens = step_tokens
        self._max_sequences = max_sequences
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

    def plan(self) -> list[tuple[Strand, int]]:
        """Who computes how many tokens in the next step; the memory for them is mapped.

        Raises: CannotRun, naming the request that must be ended; the others can go on.
        """
        self._admit()
        left = self._step_tokens
        work: list[tuple[Strand, int]] = []
        for request in list(self.running):
            if request not in self.running or not self._arrange(request):
                continue
            for strand in request.strands:
                count = min(strand.num_left, left)
                if count:
                    if not self._grow(strand, strand.num_computed + count):
                        break
                    work.append((strand, count))
                    left -= count
        return [(strand, count) for strand, count in work if strand.request in self.running]

    def share(self, request: Request) -> None:
        """What a running request has computed is confirmed: from now on others may have it."""
        if self._prefix is not None:
            self._prefix.insert(request.memory, request.prompt[: request.num_computed])
            if request.num_computed == len(request.prompt):
                self._num_refused = 0  # whoever shares it needs less now

    def end(self, request: Request, *, keep: bool = True) -> None:
        """A request is over, or its client is gone: its memory goes back, once the device is done with it.

        `keep`: what it has computed stays for others to have until the room is needed; not after a failure.
        """
        if request not in self.running:
            self.waiting.remove(request)
            self._num_refused = 0
            return
        self._stop(request)
        if self._prefix is None or not keep:
            request.memory.close()
        else:
            self._prefix.park(request.memory, request.tokens[: request.num_computed])
        request.sequence = None

    def _admit(self) -> None:
        while self.waiting and (num_slots := self._num_free_slots()):
            if self.running and len(self.waiting) <= self._num_refused:
                return
            request = self._next()
            if request is None or request.num_slots > num_slots:
                return
            if request.max_others is not None and len(self.running) > request.max_others:
                return
            try:
                sequence, num_known = self._open(request)
            except OutOfPages as error:
                if self.running:
                    self._num_refused = len(self.waiting)
                    return
                raise CannotRun(request, f"this request can never fit: {error}") from error
            except DriverError as error:
                raise CannotRun(request, f"no memory could be mapped: {error}") from error
            if request.num_admitted == 0:
                request.num_cached = num_known
            request.sequence, request.num_computed = sequence, num_known
            request.num_admitted += 1
            if request.ask.beam_width:
                request.beams = BeamGroup(request, self._cache)
            for passed in self.waiting[: self.waiting.index(request)]:
                passed.num_overtaken += 1
            self.waiting.remove(request)
            self.running.append(request)

    def _num_free_slots(self) -> int:
        """Slots that no running request has or will have."""
        return self._max_sequences - sum(request.num_slots for request in self.running)

    def _open(self, request: Request) -> tuple[Sequence, int]:
        """Memory for all tokens of a request, and how many of them need not be computed."""
        num_known = 0
        if self._prefix is None:
            sequence = self._cache.open(max_tokens=request.max_tokens, tenant=request.namespace)
        else:
            attached = self._prefix.attach(
                request.tokens,
                namespace=request.namespace,
                max_tokens=request.max_tokens,
                num_steps=request.ask.max_new_tokens - request.num_generated,
            )
            sequence, num_known = attached.sequence, attached.num_tokens
        try:
            sequence.grow(len(request.tokens))
        except BaseException:
            sequence.close()
            raise
        return sequence, num_known

    def _next(self) -> Request | None:
        """Whom to admit: the longest known prefix of those looked at. None if all of them had better wait.

        Whoever would compute what a running request computes already waits for that, and is passed over.
        """
        if self._prefix is None:
            return self.waiting[0]
        oldest = self.waiting[0]
        if oldest.num_overtaken >= _MOST_OVERTAKEN:
            return oldest
        best: Request | None = None
        longest = -1
        for request in self.waiting[:_LOOKED_AT]:
            tokens = request.tokens if request.num_generated else request.prompt  # an array is looked up faster
            num_known = self._prefix.match(tokens, namespace=request.namespace)
            if num_known > longest and not self._is_on_its_way(request, num_known):
                best, longest = request, num_known
        return best

    def _is_on_its_way(self, request: Request, num_known: int) -> bool:
        """Does a running request compute more of its prompt than is known by now?"""
        for other in self._prefilling():
            if other.namespace == request.namespace and _num_common(other.prompt, request.prompt) > num_known + 1:
                return True
        return False

    def _prefilling(self) -> Iterator[Request]:
        return (request for request in self.running if request.num_computed < len(request.ask.prompt))

    def _grow(self, strand: Strand, num_tokens: int) -> bool:
        """Map memory for a strand; False if its request gave way."""
        return self._with_room(strand.request, lambda: strand.memory.grow(num_tokens))

    def _arrange(self, request: Request) -> bool:
        """Give the beams of a request their sequences, if it searches; False if it gave way."""
        return request.beams is None or self._with_room(request, request.beams.arrange)

    def _with_room(self, request: Request, take: Callable[[], None]) -> bool:
        """Have a request take memory, from the newest ones if need be; False if it is the newest itself."""
        while True:
            try:
                take()
                return True
            except OutOfPages as error:
                if len(self.running) == 1:
                    raise CannotRun(request, f"this request can never fit: {error}") from error
                newest = self.running[-1]
                self._preempt(newest)
                if newest is request:
                    return False
            except DriverError as error:
                raise CannotRun(request, f"no memory could be mapped: {error}") from error

    def _stop(self, request: Request) -> None:
        """It runs no longer. Of its memory nothing is left but its own sequence."""
        self.running.remove(request)
        self._num_refused = 0
        if request.beams is not None:
            request.beams.close()
            request.beams = None

    def _preempt(self, request: Request) -> None:
        if request.beams is not None:
            request.max_others = len(self.running) - 2  # without itself, one fewer
        self._stop(request)
        if self._prefix is None:
            request.memory.close()
        else:
            self._prefix.release(request.memory, request.tokens[: request.num_computed])
        request.sequence = None
        self.waiting.insert(0, request)
        self.num_preempted += 1


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many of the first tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
