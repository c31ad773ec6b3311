"""What /metrics shows, in a registry of its own: the engine's last snapshot, and times as the clients see them."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vmmkv.server.client import EngineClient
from vmmkv.server.protocol import Ready, Snapshot

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

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
    "prefix_pages": ("prefix_pages", "Pages of 2 MiB that the prefix cache holds."),
}
"""Field of Snapshot: name without prefix, help."""

_COUNTERS: Final = {
    "preemptions": ("preemptions", "Sequences put back to waiting because pages ran out."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts computed."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Tokens of prompts found in the prefix cache, and so not computed."),
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
    yield CounterMetricFamily("vmmkv_stall_seconds", "Time that steps waited for driver calls.", value=snapshot.stall_us / 1e6)
    calls = CounterMetricFamily("vmmkv_driver_calls", "Driver calls by kind.", labels=("call",))
    for call, count in sorted(snapshot.driver_calls.items()):
        calls.add_metric((call,), count)
    yield calls


class Metrics:
    """One server's registry. `first_token_seconds` and `request_seconds` are counted from the arrival of the request."""

    def __init__(self, engine: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.request_seconds = Histogram(
            "vmmkv_request_duration_seconds",
            "From the request to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "vmmkv_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.requests = Counter(
            "vmmkv_requests", "Requests by how they ended: finished, failed or aborted.", ("outcome",), registry=self.registry
        )
        for outcome in ("finished", "failed", "aborted"):
            self.requests.labels(outcome)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
