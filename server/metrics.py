"""What /metrics shows, in a registry of its own: the engine's last snapshot, and times as the clients see them."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vmmkv.server.protocol import Ready, Snapshot

if TYPE_CHECKING:
    from vmmkv.server.engine_client import EngineClient


# -------- latency
# Histograms of times that cost a third of a microsecond to add to: one is added to for every token of every request.

OF_REQUESTS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OF_TOKENS: Final = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
OF_QUEUE: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Times:
    """How often times fell between which bounds. For one thread: it has no lock, as prometheus_client's own has."""

    def __init__(self, name: str, help_text: str, bounds_s: Sequence[float]) -> None:
        """`name` without prefix and unit."""
        self._name = f"vmmkv_{name}_seconds"
        self._help = help_text
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self._sum_s += time_s

    def totals(self) -> tuple[int, float]:
        """How many, and their sum."""
        return sum(self._counts), self._sum_s

    def family(self) -> HistogramMetricFamily:
        """As Prometheus has it: each bucket counts those below too."""
        family = HistogramMetricFamily(self._name, self._help)
        buckets, below = [], 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric((), buckets, self._sum_s)
        return family


# -------- metrics

_GAUGES: Final = {
    "running": ("requests_running", "Requests that have a slot and are being worked on."),
    "waiting": ("requests_waiting", "Requests that wait for a slot or for pages."),
    "kv_tokens": ("kv_tokens", "Tokens whose keys and values are held."),
    "kv_mapped_bytes": ("kv_mapped_bytes", "Memory mapped under live sequences, a shared page once for each."),
    "kv_free_bytes": ("kv_free_bytes", "Physical memory created and mapped nowhere."),
    "kv_cached_bytes": ("kv_cached_bytes", "Physical memory of prefixes kept for others, which goes when room is needed."),
    "kv_retiring_bytes": ("kv_retiring_bytes", "Physical memory whose mapping waits for its fence."),
    "kv_created_bytes": ("kv_created_bytes", "Physical memory taken from the device."),
    "kv_budget_bytes": ("kv_budget_bytes", "The most that may be created."),
    "kv_used_bytes": ("kv_used_bytes", "Physical memory of live sequences, a shared page once for all."),
    "prefix_pages": ("prefix_pages", "Pages of 2 MiB that the prefix cache holds."),
}
"""Field of Snapshot: name without prefix, help."""

_COUNTERS: Final = {
    "preemptions": ("preemptions", "Sequences put back to waiting because pages ran out."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts computed."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Tokens of prompts found in the prefix cache, and so not computed."),
    "prefix_missed_tokens": ("prefix_missed_tokens", "Tokens of prompts looked for in the prefix cache, and not found."),
    "generated_tokens": ("generation_tokens", "Tokens generated."),
    "stalls": ("stalls", "Times that a step waited for a driver call."),
}


class EngineCollector(Collector):
    """The engine's snapshot as metrics, read when asked for. What the engine has not said yet is absent, not zero."""

    def __init__(self, engine: "EngineClient") -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing, which lets the registry take this collector without asking for its metrics first."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine's last snapshot."""
        ready = isinstance(self._engine.phase, Ready)
        yield GaugeMetricFamily("vmmkv_engine_ready", "1 when the engine can take requests.", value=float(ready))
        if self._engine.snapshot is not None:
            yield from _families(self._engine.snapshot)


def _families(snapshot: Snapshot) -> Iterator[Metric]:
    for field, (name, help_text) in _GAUGES.items():
        yield GaugeMetricFamily(f"vmmkv_{name}", help_text, value=getattr(snapshot, field))
    for field, (name, help_text) in _COUNTERS.items():
        yield CounterMetricFamily(f"vmmkv_{name}", help_text, value=getattr(snapshot, field))
    shared_bytes = max(0, snapshot.kv_mapped_bytes - snapshot.kv_used_bytes)
    yield GaugeMetricFamily(
        "vmmkv_kv_shared_bytes",
        "Mapped under live sequences beyond the memory behind it: what sharing saves.",
        value=shared_bytes,
    )
    yield GaugeMetricFamily(
        "vmmkv_kv_usage_ratio",
        "Share of the budget that live sequences use, 0 to 1.",
        value=snapshot.kv_used_bytes / max(1, snapshot.kv_budget_bytes),
    )
    attaches = CounterMetricFamily(
        "vmmkv_attaches", "Sequences by the method that they came to their prefix by.", labels=("method",)
    )
    seconds = CounterMetricFamily("vmmkv_attach_seconds", "Time that attaching took, by method.", labels=("method",))
    for method, count in sorted(snapshot.attached.items()):
        attaches.add_metric((method,), count)
        seconds.add_metric((method,), snapshot.attach_us.get(method, 0.0) / 1e6)
    yield attaches
    yield seconds
    yield CounterMetricFamily("vmmkv_stall_seconds", "Time that steps waited for driver calls.", value=snapshot.stall_us / 1e6)
    calls = CounterMetricFamily("vmmkv_driver_calls", "Driver calls by kind.", labels=("call",))
    for call, count in sorted(snapshot.driver_calls.items()):
        calls.add_metric((call,), count)
    yield calls


class TimesCollector(Collector):
    """Histograms, told when asked for."""

    def __init__(self, *times: Times) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        return (each.family() for each in self._times)


class InFlight(Protocol):
    """A request that is being answered."""

    arrived_s: float
    """Of time.perf_counter."""

    def describe(self, now_s: float) -> dict[str, Any]:
        """What may be told of it."""
        ...


class Metrics:
    """One server's registry. `request_seconds` are counted from the arrival of the request."""

    def __init__(self, engine: "EngineClient") -> None:
        self.in_flight: set[InFlight] = set()
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.request_seconds = Times("request_duration", "From the request to the end of its answer.", OF_REQUESTS)
        self.registry.register(
            TimesCollector(self.request_seconds, engine.first_token_times, engine.token_times, engine.queue_times)
        )
        self.requests = Counter(
            "vmmkv_requests", "Requests by how they ended: finished, failed or aborted.", ("outcome",), registry=self.registry
        )
        for outcome in ("finished", "failed", "aborted"):
            self.requests.labels(outcome)
        self.refused = Counter(
            "vmmkv_requests_refused",
            "Requests to /v1, tokenize, detokenize and kv/reset, kv/resize answered with an error before the engine had them.",
            ("code",),
            registry=self.registry,
        )
        for code in (400, 401, 403, 429, 503):
            self.refused.labels(str(code))

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


# -------- rates
# What the engine did in a while, from two of its snapshots; and the line that says so in the log.

EVERY_S: Final = 10.0
"""Between two lines of the log, while something happens."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Between two moments."""

    generated_per_s: float
    """Tokens."""
    prompt_per_s: float
    """Tokens of prompts computed."""
    hit_rate: float | None
    """Of the prompt tokens that began in this while, the share that was known; None if none began."""

    @classmethod
    def between(cls, old: Snapshot, new: Snapshot, took_s: float) -> Self:
        """Of two snapshots, `took_s` apart."""
        took_s = max(took_s, 1e-3)
        hits = new.prefix_hit_tokens - old.prefix_hit_tokens
        asked = hits + new.prefix_missed_tokens - old.prefix_missed_tokens
        return cls(
            generated_per_s=(new.generated_tokens - old.generated_tokens) / took_s,
            prompt_per_s=(new.prompt_tokens - old.prompt_tokens) / took_s,
            hit_rate=hits / asked if asked else None,
        )


async def tell(engine: "EngineClient", *, every_s: float = EVERY_S) -> None:
    """Log a line every so often, for ever; none where nothing ran, waited or was computed since the last one."""
    last = engine.snapshot
    while True:
        await asyncio.sleep(every_s)
        new = engine.snapshot
        if last is not None and new is not None and (new.running or new.waiting or _has_worked(last, new)):
            rates = Rates.between(last, new, every_s)
            told = {
                "running": new.running,
                "waiting": new.waiting,
                "generated_tok_s": round(rates.generated_per_s, 1),
                "prompt_tok_s": round(rates.prompt_per_s, 1),
                "kv_used": round(new.kv_used_bytes / max(1, new.kv_budget_bytes), 3),
            }
            hits = {} if rates.hit_rate is None else {"prefix_hit_rate": round(rates.hit_rate, 3)}
            log.info("serving", extra=told | hits)
        last = new


def _has_worked(old: Snapshot, new: Snapshot) -> bool:
    return (new.generated_tokens, new.prompt_tokens) != (old.generated_tokens, old.prompt_tokens)
