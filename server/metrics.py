"""What /metrics shows, in a registry of its own: the engine's last snapshot, and times as the clients see them."""

from collections.abc import Iterator
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vmmkv.server.client import EngineClient
from vmmkv.server.latency import OF_REQUESTS, Times
from vmmkv.server.protocol import Ready, Snapshot

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

    def __init__(self, engine: EngineClient) -> None:
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

    def __init__(self, engine: EngineClient) -> None:
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
