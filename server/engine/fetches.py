"""Fetches: requests that wait for tiers. What tiers have of a prompt is loaded or computed, whichever is done first.

    waiting ── start ──> fetching ── done, or later than computing ──> waiting ──> attached, the rest computed

The bandwidth of each tier and the rate of prefill are measured while the engine runs. Each time that a fetch is declined the
estimate of the bandwidth rises a little, so that now and then a fetch measures it again.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from vmmkv.prefix import Fetch
from vmmkv.server.engine.kv_backend import Prefixes
from vmmkv.server.engine.request import Request

LEAST_TOKENS: Final = 256
"""Fewer tokens are computed: a fetch takes a step at least."""

_MOST_FETCHES: Final = 2
"""For one request: a second fetch goes on where the first, which began for another request, ended."""

_FIRST_TOKENS_PER_S: Final = 1000.0
"""Rate of prefill until it is measured, which the warm-up does: of an engine whose steps are too short to measure it."""

_LEAST_MEASURED: Final = 256
"""Prompt tokens of a step that measures the rate of prefill. A step with fewer spends its time on other things."""

_KEPT: Final = 0.9
"""Weight of the earlier measurements beside a new one."""

_HOPE: Final = 1.01
"""Factor by which the estimate of a bandwidth rises each time that a fetch is declined."""


class Rate:
    """Units a second, averaged over about the last ten pieces of work. Time in which pieces overlap counts once."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: the estimate until something is measured."""
        self._first = per_s
        self._hope = 1.0
        self._units = self._took_s = self._until_s = 0.0

    @property
    def per_s(self) -> float:
        """The average."""
        return self._hope * self._units / self._took_s if self._took_s else self._first

    def add(self, units: float, began_s: float, ended_s: float) -> None:
        """Take a piece of work into the average."""
        self._hope = 1.0
        self._units = _KEPT * self._units + units
        self._took_s = _KEPT * self._took_s + ended_s - min(ended_s, max(began_s, self._until_s))
        self._until_s = ended_s

    def hope(self) -> None:
        """Estimate a little more, until it is measured again."""
        self._hope *= _HOPE


@dataclass(frozen=True, slots=True)
class _Wait:
    fetch: Fetch
    began_s: float
    num_tokens: int
    """Of the request."""
    unless_loaded: str = "unknown"
    """How it is counted if nothing is loaded."""


class Fetches:
    """The requests that wait for tiers; each has its slots reserved. Without tiers there are none."""

    def __init__(self, prefix: Prefixes | None) -> None:
        self.waiting: dict[Request, _Wait] = {}
        self.counts: Counter[str] = Counter()
        """Fetches that were `declined`, since computing is faster; and the waits that ended, by how: `done`, `late`, `unknown`
        to tiers or without room on the device, or `given_up` for other requests or by the client."""
        self.waited_s = 0.0
        self._prefix = prefix
        self._prefill = Rate(_FIRST_TOKENS_PER_S)
        self._loads: defaultdict[str, Rate] = defaultdict(partial(Rate, float("inf")))
        """Bytes a second of each tier, by its name."""
        self._began_s: dict[Fetch, float] = {}
        """When each fetch that is under way began."""

    def num_slots(self, priority: float) -> int:
        """Slots that are reserved for requests of this priority or a more urgent one."""
        return sum(request.num_slots for request in self.waiting if request.ask.priority <= priority)

    def start(self, request: Request) -> bool:
        """Start to load what tiers have of a request, if that is worth it; if so the request waits from now on.

        A request for which it is not worth it is not asked about again before it has run.
        Cost: see PrefixCache.fetch. Raises: DriverError.
        """
        if self._prefix is None or request.num_fetches >= _MOST_FETCHES:
            return False
        tokens, namespace = request.attachable, request.namespace
        worth = partial(self._is_worth, request)
        fetch = self._prefix.fetch(tokens, namespace=namespace, least_tokens=LEAST_TOKENS, worth=worth)
        if fetch is None:
            return False
        request.num_fetches += 1
        now_s = time.perf_counter()
        self._began_s.setdefault(fetch, now_s)
        self.waiting[request] = _Wait(fetch, now_s, len(tokens))
        return True

    def _is_worth(self, request: Request, fetch: Fetch) -> bool:
        """Will a fetch, behind those that are under way, be done before its tokens could be computed?"""
        wanted = sum((each.bytes_by_tier for each in {*self._began_s, fetch}), Counter[str]())
        loading_s = sum(size_bytes / self._loads[tier].per_s for tier, size_bytes in wanted.items())
        if loading_s < self._computing_s(fetch, len(request.attachable)):
            return True
        for tier in fetch.bytes_by_tier:
            self._loads[tier].hope()
        if (wait := self.waiting.get(request)) is not None:
            self.waiting[request] = replace(wait, unless_loaded="declined")
        else:
            self.counts["declined"] += 1
        request.num_fetches = _MOST_FETCHES
        return False

    def _computing_s(self, fetch: Fetch, num_tokens: int) -> float:
        """Time to compute what a fetch brings of a prompt of so many tokens. It may have begun for a longer prompt."""
        return (min(fetch.num_tokens, num_tokens) - fetch.known_tokens) / self._prefill.per_s

    def ended(self) -> list[Request]:
        """The requests that wait no longer: their fetch is done, or computing would be."""
        now_s = time.perf_counter()
        over = [
            request
            for request, wait in self.waiting.items()
            if wait.fetch.done or now_s > wait.began_s + self._computing_s(wait.fetch, wait.num_tokens)
        ]
        for request in over:
            wait = self.waiting[request]
            fetch = wait.fetch
            began_s = self._began_s.pop(fetch, None)
            if began_s is not None and fetch.size_bytes:
                self._measure(fetch, began_s, now_s)
            if fetch.done:
                request.fetched.append(fetch)
            else:
                request.num_fetches = _MOST_FETCHES
            self.leave(request, "late" if not fetch.done else "done" if fetch.size_bytes else wait.unless_loaded)
        return over

    def _measure(self, fetch: Fetch, began_s: float, now_s: float) -> None:
        """A fetch is done or late: take its slowest tier to have had all of the time."""
        tier, size_bytes = max(fetch.bytes_by_tier.items(), key=lambda each: each[1] / self._loads[each[0]].per_s)
        came_bytes = fetch.loaded_bytes[tier] if fetch.done else size_bytes / 2  # of a late one half at most
        if came_bytes:
            self._loads[tier].add(came_bytes, began_s, now_s)

    def leave(self, request: Request, how: str = "given_up") -> None:
        """A request waits no longer."""
        wait = self.waiting.pop(request)
        wait.fetch.give_up()
        if not wait.fetch.waiting:
            self._began_s.pop(wait.fetch, None)
        self.counts[how] += 1
        self.waited_s += time.perf_counter() - wait.began_s

    def measure_prefill(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """Measure the rate of prefill by a step that computed so many prompt tokens."""
        if num_tokens >= _LEAST_MEASURED:
            self._prefill.add(num_tokens, began_s, ended_s)
