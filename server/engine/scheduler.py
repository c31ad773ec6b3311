"""Who runs, how many tokens each computes in a step, and who gives way when pages run out."""

from collections import deque

from vmmkv import DriverError, KVCache, OutOfPages
from vmmkv.server.engine.requests import Request


class CannotRun(Exception):
    """A request cannot have the memory it needs: it is larger than the whole pool, or the driver failed."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request


class Scheduler:
    """First come, first served, in steps of at most `step_tokens` tokens.

    A request is admitted when its whole prompt has memory; it then grows as it goes. When a running one finds no page,
    the newest gives its memory back and waits, with what it has generated, to be computed again (vLLM's recompute).
    """

    def __init__(self, cache: KVCache, *, step_tokens: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """The oldest first."""
        self.num_preempted = 0
        self._cache = cache
        self._step_tokens = step_tokens

    @property
    def has_work(self) -> bool:
        """Is anything waiting or running?"""
        return bool(self.waiting or self.running)

    def find(self, request_id: str) -> Request | None:
        """The request of that name, if it has not ended."""
        return next((request for request in (*self.running, *self.waiting) if request.ask.request_id == request_id), None)

    def plan(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in the next step; the memory for them is mapped.

        Raises: CannotRun, naming the request that must be ended; the others can go on.
        """
        self._admit()
        left = self._step_tokens
        work: list[tuple[Request, int]] = []
        for request in list(self.running):
            count = min(len(request.tokens) - request.num_computed, left)
            if count and request in self.running and self._grow(request, request.num_computed + count):
                work.append((request, count))
                left -= count
        return [(request, count) for request, count in work if request in self.running]

    def end(self, request: Request) -> None:
        """A request is over, or its client is gone: its memory goes back, once the device is done with it."""
        if request in self.running:
            self.running.remove(request)
            request.memory.close()
            request.sequence = None
        else:
            self.waiting.remove(request)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._cache.num_slots:
            request = self.waiting[0]
            sequence = self._cache.open(max_tokens=request.max_tokens)
            try:
                sequence.grow(len(request.tokens))
            except OutOfPages as error:
                sequence.close()
                if self.running:
                    return
                raise CannotRun(request, f"this request can never fit: {error}") from error
            except DriverError as error:
                sequence.close()
                raise CannotRun(request, f"no memory could be mapped: {error}") from error
            request.sequence, request.num_computed = sequence, 0
            self.running.append(self.waiting.popleft())

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Map memory for a request, from the newest ones if need be; False if it is the newest itself."""
        while True:
            try:
                request.memory.grow(num_tokens)
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

    def _preempt(self, request: Request) -> None:
        self.end(request)
        self.waiting.appendleft(request)
        self.num_preempted += 1
