"""The requests that wait, and the order in which they are admitted."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np

from vmmkv.prefix.radix_tree import num_common
from vmmkv_server.engine.kv_backend import KVBackend
from vmmkv_server.engine.request import Request

MAX_COMPARED: Final = 32
"""Waiting requests among which the one with the longest cached prefix is chosen."""

MAX_OVERTAKEN: Final = 16
"""Most requests with a longer cached prefix that may begin before an older one."""

MIN_AWAITED: Final = 128
"""Tokens of a common prefix for which a request waits until a running one has computed them. Fewer are computed again.

128 requests of Llama-3.1-8B that share 200 tokens took 0.86 s on an H200, and 0.94 s when each computed them.
"""

URGENCY: Final = attrgetter("ask.priority", "place")
"""The order of requests, the most urgent first."""


@dataclass(slots=True)
class _Facts:
    """State of a request while it waits."""

    num_overtaken: int = 0
    """Later requests that began before it, because more of their prompts was cached; since it arrived."""
    lookup: Callable[[], int] | None = None
    """Function that counts its cached tokens; None until that has been asked."""
    awaited: Request | None = None
    """A running request that computes some of its prompt."""
    num_awaited: int = 0
    """Tokens that both prompts begin with."""


class WaitingQueue:
    """The waiting requests by priority, the newest preempted ones first, then in order of arrival."""

    def __init__(self, memory: KVBackend) -> None:
        self._requests: list[Request] = []
        self._memory = memory
        self._facts: dict[Request, _Facts] = {}
        """State of the requests that wait, and of those that have waited and run."""
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._requests, URGENCY(request), key=URGENCY)
        return index < len(self._requests) and self._requests[index] is request

    @property
    def first(self) -> Request:
        """The most urgent one."""
        return self._requests[0]

    @property
    def is_refused(self) -> bool:
        """Has one of them found no room, with none having come since, and no memory having come back?

        A try maps memory and evicts cached prefixes, so there is no other then.
        """
        return len(self._requests) <= self._num_refused

    def refuse(self) -> None:
        """One of them has found no room."""
        self._num_refused = len(self._requests)

    def memory_changed(self) -> None:
        """There may be room for those that found none."""
        self._num_refused = 0

    def add(self, request: Request, place: int) -> None:
        """A request waits from now on."""
        request.place = place
        insort(self._requests, request, key=URGENCY)
        self._facts.setdefault(request, _Facts())

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
        assert request in self, "it does not wait"
        del self._requests[bisect_left(self._requests, URGENCY(request), key=URGENCY)]

    def begin(self, request: Request) -> None:
        """A waiting request runs from now on."""
        self.remove(request)
        facts = self._facts[request]
        facts.lookup = facts.awaited = None

    def forget(self, request: Request) -> None:
        """A request has ended: others may have its room."""
        self._facts.pop(request, None)
        self._num_refused = 0

    def num_cached(self, request: Request) -> int:
        """Cached tokens of a waiting request, as of now."""
        facts = self._facts[request]
        if facts.lookup is None:
            facts.lookup = self._memory.lookup(request.attachable, namespace=request.namespace)
        return facts.lookup()

    def order(self, computing: list[Request]) -> "Order":
        """The order of admission, as of now. `computing`: the running requests whose prompts have no rows yet."""
        return Order(self, self._requests, self._facts, computing, compares=self._memory.shares_prefixes)


class Order:
    """The order in which waiting requests are admitted to one step: by priority, by the longest cached prefix (as in SGLang),
    by arrival. A prompt is looked up once.

    The caller removes from the queue, and adds to `computing`, what is admitted.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        waiting: list[Request],
        facts: dict[Request, _Facts],
        computing: list[Request],
        *,
        compares: bool,
    ) -> None:
        self._queue, self._waiting, self._facts = queue, waiting, facts
        self._priority = waiting[0].ask.priority if waiting else None
        self._computing = computing
        self._compares = compares
        self._num_cached: dict[Request, int] = {}

    def next(self) -> Request | None:
        """The next request to admit; None if each waits for a running one to compute tokens that both share."""
        best: Request | None = None
        longest = -1
        for request in self._urgent():
            if not self._compares:
                return request
            num_cached = self._num_cached.get(request)
            if num_cached is None:
                num_cached = self._num_cached[request] = self._queue.num_cached(request)
            if num_cached > longest and not self._is_being_computed(request, num_cached):
                best, longest = request, num_cached
            if self._facts[request].num_overtaken >= MAX_OVERTAKEN:
                break
        return best

    def admitted(self, request: Request) -> None:
        """Note that a request is about to run, and has overtaken those that arrived before it."""
        for passed in itertools.takewhile(lambda each: each is not request, self._urgent()):
            self._facts[passed].num_overtaken += 1

    def _urgent(self) -> list[Request]:
        """The waiting requests that are compared."""
        return [request for request in self._waiting[:MAX_COMPARED] if request.ask.priority == self._priority]

    def _is_being_computed(self, request: Request, num_cached: int) -> bool:
        """Does a running request compute more of this prompt than is cached by now?"""
        end, wanted, facts = num_cached + MIN_AWAITED, request.attachable, self._facts[request]
        for other in self._computing if len(wanted) >= end else ():
            if other is not facts.awaited:
                is_alike = np.array_equal(other.prompt[num_cached:end], wanted[num_cached:end])  # first, for these are few
                if not is_alike or other.namespace != request.namespace:
                    continue
                facts.awaited, facts.num_awaited = other, num_common(other.prompt, wanted)
            if facts.num_awaited >= end:
                return True
        return False
