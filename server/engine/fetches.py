"""Fetches: requests that wait for tiers. What is known of a prompt is loaded, or computed, whichever is over first.

    waiting ── start ──> fetching ── done, or later than computing ──> waiting ──> attached, the rest computed

The bandwidth of each tier and the rate of prefill are measured as they run. Each time that computing is faster the estimate of
the bandwidth rises a little, so that now and then a fetch measures it again.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Final

from vmmkv.prefix import Fetch
from vmmkv.server.engine.kv_backend import Prefixes
from vmmkv.server.engine.request import Request

LEAST_TOKENS: Final = 256
"""Fewer are computed: a fetch takes a step at the least."""

_MOST_FETCHES: Final = 2
"""Of a request that waits: a second one goes on where that of another request ended."""

_FIRST_TOKENS_PER_S: Final = 1000.0
"""Rate of prefill before it has been measured: then a fetch is waited for."""

_LEAST_MEASURED: Final = 256
"""Tokens of prompts in a step that measures the rate of prefill. With fewer the step takes its time for other things."""

_KEPT: Final = 0.9
"""Weight of what was measured before, beside the next measurement."""

_HOPE: Final = 1.01
"""By so much the estimate of a bandwidth rises each time that it was too low."""


class Rate:
    """Units a second, averaged over about the last ten pieces by their sizes. What overlaps counts as done in turn."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: until it is measured."""
        self._first = per_s
        self._hope = 1.0
        self._units = self._took_s = self._until_s = 0.0

    @property
    def per_s(self) -> float:
        """The average."""
        return self._hope * self._units / self._took_s if self._took_s else self._first

    def add(self, units: float, began_s: float, ended_s: float) -> None:
        """Measure a piece of work."""
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


class Fetches:
    """The requests that wait for tiers; each has a slot reserved. Without tiers there are none."""

    def __init__(self, prefix: Prefixes | None) -> None:
        self.waiting: dict[Request, _Wait] = {}
        self.num_slots = 0
        """That they will take."""
        self.counts: Counter[str] = Counter()
        """`declined`, since computing was faster; else by how the wait ended: `done`, `late`, `unknown` to the tier that was
        asked, or `given_up` for running requests or by the client."""
        self.waited_s = 0.0
        self._prefix = prefix
        self._prefill = Rate(_FIRST_TOKENS_PER_S)
        self._loads: defaultdict[str, Rate] = defaultdict(partial(Rate, float("inf")))
        """Bytes, by tier."""
        self._began_s: dict[Fetch, float] = {}
        """Of the fetches that are under way."""

    def start(self, request: Request) -> bool:
        """Does a request wait for tiers from now on? Cost: see PrefixCache.fetch. Raises: DriverError."""
        if self._prefix is None or request.num_fetches >= _MOST_FETCHES:
            return False
        tokens, namespace = request.attachable, request.namespace
        fetch = self._prefix.fetch(tokens, namespace=namespace, least_tokens=LEAST_TOKENS, worth=self._is_worth)
        if fetch is None:
            return False
        if not request.num_fetches:
            request.num_unfetched = fetch.known_tokens
        request.num_fetches += 1
        now_s = time.perf_counter()
        self._began_s.setdefault(fetch, now_s)
        self.waiting[request] = _Wait(fetch, now_s)
        self.num_slots += request.num_slots
        return True

    def _is_worth(self, fetch: Fetch) -> bool:
        """Is it over before computing would be, behind those that are under way?"""
        wanted = sum((each.bytes_by_tier for each in {*self._began_s, fetch}), Counter[str]())
        loading_s = sum(size_bytes / self._loads[tier].per_s for tier, size_bytes in wanted.items())
        if loading_s < self._computing_s(fetch):
            return True
        for tier in fetch.bytes_by_tier:
            self._loads[tier].hope()
        self.counts["declined"] += 1
        return False

    def _computing_s(self, fetch: Fetch) -> float:
        return (fetch.num_tokens - fetch.known_tokens) / self._prefill.per_s

    def ended(self) -> list[Request]:
        """The requests that wait no longer: theirs is done, or computing would have been."""
        now_s = time.perf_counter()
        over = [
            request
            for request, wait in self.waiting.items()
            if wait.fetch.done or now_s > wait.began_s + self._computing_s(wait.fetch)
        ]
        for request in over:
            fetch = self.waiting[request].fetch
            began_s = self._began_s.pop(fetch, None)
            if began_s is not None and fetch.size_bytes:
                tier, size_bytes = max(fetch.bytes_by_tier.items(), key=lambda each: each[1] / self._loads[each[0]].per_s)
                self._loads[tier].add(size_bytes if fetch.done else size_bytes / 2, began_s, now_s)  # half at most has come
            if not fetch.done:
                request.num_fetches = _MOST_FETCHES
            self.leave(request, "late" if not fetch.done else "done" if fetch.size_bytes else "unknown")
        return over

    def leave(self, request: Request, how: str = "given_up") -> None:
        """A request waits no longer."""
        wait = self.waiting.pop(request)
        if how == "done":
            request.fetched_bytes += wait.fetch.bytes_by_tier
        wait.fetch.give_up()
        if not wait.fetch.waiting:
            self._began_s.pop(wait.fetch, None)
        self.num_slots -= request.num_slots
        self.counts[how] += 1
        self.waited_s += time.perf_counter() - wait.began_s

    def measure_prefill(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """A step has computed so many tokens of prompts."""
        if num_tokens >= _LEAST_MEASURED:
            self._prefill.add(num_tokens, began_s, ended_s)
