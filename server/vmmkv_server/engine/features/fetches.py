"""Fetches: requests that wait for tiers. Rows of a prompt that tiers have are loaded or computed, whichever is done first.

    waiting ── hold ──> fetching ── done, or later than computing ──> waiting ──> attached, the rest computed

Fetches end in the order in which they began, as prompts that are computed would. So each is compared with computing its own
tokens alone, and is late when it takes a step longer than that as the oldest: computing waits for the step under way. Few are
under way at once: they fill the link already, and what they have loaded is attached before room is made for more.

The bandwidth of each tier and the rate of prefill are measured while the engine runs. Where loading takes longer than computing
the slowest tier is left out, with what is behind its records. Each request that leaves it out raises the estimate of its
bandwidth a little, so that now and then a fetch measures it again. Little is stored meanwhile: stores take time from steps.
"""

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

import msgspec

from vmmkv import PAGE_BYTES
from vmmkv.prefix import Borrowed, Fetch
from vmmkv.rate import Rate
from vmmkv.units import ceil_div
from vmmkv_server.engine.feature import Feature
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.waiting import URGENCY
from vmmkv_server.protocol import DEVICE
from vmmkv_server.statistics import Statistics, counter

LEAST_TOKENS: Final = 256
"""Fewer tokens are computed: a fetch takes a step at least."""

_MOST_AT_ONCE: Final = 8
"""Fetches under way. While there are so many no request is admitted: loading is faster than computing those before it."""

_MOST_FETCHES: Final = 2
"""Fetches of one request: the second goes on where the first, which began for another request, ended."""

_SPARE_TOKENS: Final = 16
"""Spare tokens of each running request: memory for them is left when a fetch takes some. Else it was given up soon."""

FIRST_TOKENS_PER_S: Final = 1000.0
"""Rate of prefill until it is measured, which the warm-up does: of an engine whose steps are too short to measure it."""

LEAST_MEASURED: Final = 256
"""Prompt tokens of a step that measures the rate of prefill. A step with fewer spends its time on other things."""

TRIAL: Final = 64
"""One path of so many is stored in a tier that is slower than computing. Loads of those find out when it is no longer."""


@dataclass(frozen=True, slots=True)
class _Wait:
    fetch: Fetch
    began_s: float
    num_tokens: int
    """Tokens of the request."""
    had_no_room: bool
    """Did its last fetch find no room?"""


@dataclass(slots=True)
class _Asked:
    """State of a request's questions to tiers since it last began to wait."""

    num_fetches: int = 0
    """Times that it has waited for tiers."""
    unfetched: str = "unknown"
    """Reason that its last question to tiers led to no fetch, if so: as in `FetchStatistics.fetches`."""
    declined: set[str] = field(default_factory=set)
    """Tiers that take longer to load from than computing, as was found."""
    fetched: list[Fetch | Borrowed] = field(default_factory=list)
    """Fetches of the request that were done, and what was borrowed."""


class FetchStatistics(Statistics):
    """Counts of fetches, and the time that they took requests."""

    fetches: Annotated[Counter[str], counter("Loads from tiers for prompts, by outcome.", "outcome")] = msgspec.field(
        default_factory=Counter
    )
    """Fetches that were `declined`, since computing is faster; and the waits that ended, by how: `done`, `late`, `unknown`
    to tiers, with `no_room` on the device, or `given_up` for other requests or by the client. A request that is computed
    since there was `no_room` to begin one, or to borrow, counts too."""
    fetch_wait_seconds: Annotated[float, counter("Time that requests waited for tiers.")] = 0.0


class Fetches(Feature):
    """The requests that wait for tiers, and what these store meanwhile. Without tiers there are none."""

    def __init__(self, core: Core) -> None:
        self.waiting: dict[Request, _Wait] = {}
        self.counts = FetchStatistics()
        self._asked: defaultdict[Request, _Asked] = defaultdict(_Asked)
        self._prefix, self._scheduler, self._layout = core.memory.prefixes, core.scheduler, core.memory.layout
        self._has_windows = any(group.window is not None for group in self._layout.groups)
        if self._prefix is not None:
            self._prefix.store_if(self.is_worth_storing)
        self._token_bytes = 0.0
        """Bytes that tiers have for each token, of the fetch that was last asked about."""
        self._num_paths: Counter[str] = Counter()
        """Paths that could be stored, by tier."""
        self.prefill = Rate(FIRST_TOKENS_PER_S)
        """Prompt tokens that are computed in a second."""
        self._step_s = 0.0
        """Time of the last step."""
        self.loads: defaultdict[str, Rate] = defaultdict(partial(Rate, float("inf")))
        """Bytes a second of each tier, by its name."""
        self._began_s: dict[Fetch, float] = {}
        """Time at which each fetch that is under way began, or became the oldest. The oldest is first."""

    @property
    def under_way(self) -> list[Fetch]:
        """Fetches under way, the oldest first."""
        return list(self._began_s)

    def hold(self, request: Request) -> bool | None:
        """Borrow what another engine has of a request, and start to load what tiers have, if that is worth it.

        True if it loads. None if there is no room for what it is worth to load or borrow, and it is worth waiting for what
        ended requests leave. A request for which loading is not worth it is not asked about again before it has run.
        Cost: see PrefixCache.fetch. Raises: DriverError.
        """
        num_running = len(self._scheduler.running)
        spare_pages = ceil_div(num_running * _SPARE_TOKENS * self._layout.row_bytes, PAGE_BYTES)
        is_held = self._load(request, self._layout.pages_for(request.shape.num_first_rows) + spare_pages)
        if is_held is None and not (num_running or self.waiting):
            self.counts.fetches["no_room"] += 1
            return False
        return is_held

    def sources(self, request: Request, num_cached: int) -> Counter[str] | None:
        """Rows of a fetch are in proportion to the bytes from each tier."""
        sources: Counter[str] = Counter()
        counted = 0
        for fetch in self._asked[request].fetched if request in self._asked else ():
            start, end = max(counted, fetch.known_tokens), min(num_cached, fetch.num_tokens)
            if start < end:
                for name, size_bytes in fetch.loaded_bytes.items():
                    sources[name] += (end - start) * size_bytes // fetch.loaded_bytes.total()
                counted = end
        sources[DEVICE] = num_cached - sources.total()
        return +sources

    def admitted(self, request: Request) -> None:
        """Forget what was asked: if the request is preempted, tiers are asked anew."""
        self._asked.pop(request, None)

    def finished(self, request: Request) -> None:
        """Forget what was asked for the request."""
        self._asked.pop(request, None)

    def mapped_ahead(self) -> None:
        """Give tiers something to store: insert what the request that would be preempted first has generated."""
        if self._prefix is None or not self._prefix.has_tiers or self._has_windows:
            return
        scheduler, slots = self._scheduler, self._scheduler.decoding.slots
        table = scheduler.table
        behind = slots[table.num_confirmed[slots] - table.num_inserted[slots] >= LEAST_TOKENS].tolist()
        found = [request for slot in behind if (request := table.requests[slot]) is not None and request.shape.keeps_rows]
        if found:
            request = max(found, key=URGENCY)
            scheduler.insert(request, request.confirmed_tokens)

    def statistics(self) -> FetchStatistics:
        """Fetches by outcome, and the time that requests have waited for them."""
        return self.counts

    def check(self) -> None:
        """Exactly the requests that are held wait for a fetch, and each fetch under way is waited for."""
        assert self.waiting.keys() == self._scheduler.held.keys()
        assert set(self.under_way) <= {wait.fetch for wait in self.waiting.values()}

    def is_full(self, priority: float) -> bool:
        """Are as many fetches under way as may be, for requests of this priority or a more urgent one?

        One that found no room, and begins again, is enough until it has some: requests behind it would take that.
        """
        waits = [wait for request, wait in self.waiting.items() if request.ask.priority <= priority]
        is_finding = any(wait.had_no_room and not wait.fetch.size_bytes for wait in waits)
        return is_finding or len({wait.fetch for wait in waits}) >= _MOST_AT_ONCE

    def _load(self, request: Request, room_pages: int) -> bool | None:
        """Borrow and start to load, as `hold`; None if there is no room."""
        if self._prefix is None:
            return False
        tokens, namespace, asked = request.attachable, request.namespace, self._asked[request]
        borrowed = self._prefix.borrow(tokens, namespace=namespace, room_pages=room_pages)
        if borrowed is not None and borrowed.loaded_bytes:
            asked.fetched.append(borrowed)
        elif borrowed is not None and borrowed.num_tokens - borrowed.known_tokens >= LEAST_TOKENS:
            return None
        if asked.num_fetches >= _MOST_FETCHES or asked.unfetched == "declined":
            return False
        had_no_room = asked.unfetched == "no_room"
        if had_no_room and not self._prefix.has_room(tokens, namespace=namespace, room_pages=room_pages):
            return None  # tiers are not asked in vain
        asked.unfetched, worth = "unknown", partial(self.is_worth, request)
        fetch = self._prefix.fetch(tokens, namespace=namespace, least_tokens=LEAST_TOKENS, room_pages=room_pages, worth=worth)
        if fetch is None:
            if asked.unfetched == "declined":
                self.counts.fetches["declined"] += 1
            return None if asked.unfetched == "no_room" else False
        asked.num_fetches += 1
        now_s = time.perf_counter()
        self._began_s.setdefault(fetch, now_s)
        self.waiting[request] = _Wait(fetch, now_s, len(tokens), had_no_room)
        return True

    def is_worth(self, request: Request, fetch: Fetch) -> bool:
        """Will a fetch take less time than its tokens would take to compute? If not, this may be asked about its beginning."""
        asked = self._asked[request]
        loading_s = {tier: size_bytes / self.loads[tier].per_s for tier, size_bytes in fetch.bytes_by_tier.items()}
        self._token_bytes = fetch.size_bytes / (fetch.num_tokens - fetch.known_tokens)
        if sum(loading_s.values()) < self.computing_s(fetch, len(request.attachable)):
            asked.unfetched = "no_room"  # if nothing comes of it
            return True
        slowest = max(loading_s, key=loading_s.__getitem__)
        if slowest not in asked.declined:
            self.loads[slowest].hope()
        asked.declined.add(slowest)
        asked.unfetched = "declined"
        return False

    def is_worth_storing(self, tier: str) -> bool:
        """Is it measured to be faster than computing, or not measured yet? If not, one path of `TRIAL` is."""
        self._num_paths[tier] += 1
        is_faster = self.loads[tier].measured_per_s > self._token_bytes * self.prefill.per_s
        return is_faster or self._num_paths[tier] % TRIAL == 0

    def computing_s(self, fetch: Fetch, num_tokens: int) -> float:
        """Time to compute what a fetch brings of a prompt of so many tokens. It may have begun for a longer prompt."""
        return (min(fetch.num_tokens, num_tokens) - fetch.known_tokens) / self.prefill.per_s

    def released(self) -> list[Request]:
        """Requests whose fetch is done, or would take longer than computing."""
        may_wait = bool(self._scheduler.running)  # those without room may fetch again, since others will end
        now_s = time.perf_counter()
        over = [request for request, wait in self.waiting.items() if wait.fetch.done or self._is_late(wait, now_s)]
        for request in over:
            wait, asked = self.waiting[request], self._asked[request]
            asked.fetched.append(wait.fetch)
            if wait.fetch.done:
                if wait.fetch.size_bytes:
                    asked.unfetched = "unknown"
                    self._end(request, "done")
                else:
                    asked.num_fetches -= may_wait and asked.unfetched == "no_room"
                    self._end(request, asked.unfetched)
            else:
                asked.num_fetches = _MOST_FETCHES
                self._end(request, "late")
        return over

    def _is_late(self, wait: _Wait, now_s: float) -> bool:
        """Has a wait for the oldest fetch taken a step longer than computing, or any wait as long as computing all of them?

        The oldest one may stay, since more and more requests wait for it.
        """
        oldest, began_s = next(iter(self._began_s.items()), (None, 0.0))
        began_s = max(began_s, wait.began_s) if wait.fetch is oldest else math.inf
        computing_s = self.computing_s(wait.fetch, wait.num_tokens)
        return now_s > min(began_s + computing_s, wait.began_s + _MOST_AT_ONCE * computing_s) + self._step_s

    def let_go(self, request: Request) -> None:
        """Give up the fetch of a request."""
        if request in self.waiting:
            self._end(request, "given_up")

    def _end(self, request: Request, how: str) -> None:
        """A request waits no longer. If its fetch was given up, it may fetch again."""
        wait, now_s = self.waiting.pop(request), time.perf_counter()
        fetch, came_bytes = wait.fetch, wait.fetch.loaded_bytes
        if how == "late":  # of the tiers that it waits for; a record at least, or they would never be tried again
            lacking = fetch.bytes_by_tier - came_bytes
            came_bytes = Counter({tier: max(came_bytes[tier], PAGE_BYTES) for tier in lacking})
        elif how == "given_up":
            came_bytes = Counter()
            self._asked[request].num_fetches -= 1
        fetch.give_up()
        if fetch.done:
            self._forget(fetch, came_bytes, fetch.ended_s if how == "done" else now_s)
        self.counts.fetches[how] += 1
        self.counts.fetch_wait_seconds += now_s - wait.began_s

    def _forget(self, fetch: Fetch, came_bytes: Counter[str], ended_s: float) -> None:
        """A fetch is under way no longer. Take its slowest tier to have had all of the time."""
        was_oldest = fetch is next(iter(self._began_s), None)
        began_s = self._began_s.pop(fetch, None)
        if was_oldest and self._began_s:
            self._began_s[next(iter(self._began_s))] = ended_s
        if began_s is None or not came_bytes:
            return
        tier = max(came_bytes, key=lambda each: came_bytes[each] / self.loads[each].per_s)
        self.loads[tier].add(came_bytes[tier], began_s, ended_s)

    def prefilled(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """Measure the time of a step, and the rate of prefill by one that computed many prompt tokens."""
        self._step_s = ended_s - began_s
        if num_tokens >= LEAST_MEASURED:
            self.prefill.add(num_tokens, began_s, ended_s)
