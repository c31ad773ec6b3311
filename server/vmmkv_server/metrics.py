"""Metrics in Prometheus' format, in a registry for each server; and the rates of the log and the page."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vmmkv_server.engine_client import EngineClient
from vmmkv_server.latencies import REQUEST_BOUNDS_S, Times
from vmmkv_server.protocol import BLOCK_TOKENS, Ready, Snapshot

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
"""Between two lines of the log, while something happens."""

_GAUGES: Final = {
    "running": ("requests_running", "Requests that have a slot."),
    "waiting": ("requests_waiting", "Requests that wait for a slot or for pages."),
    "kv_tokens": ("kv_tokens", "Tokens of live sequences."),
    "kv_mapped_bytes": ("kv_mapped_bytes", "Bytes mapped for live sequences; a shared page counts for each of them."),
    "kv_free_bytes": ("kv_free_bytes", "Bytes taken from the device and mapped nowhere."),
    "kv_cached_bytes": ("kv_cached_bytes", "Bytes of cached prefixes, which are evicted when room is needed."),
    "kv_pending_reclaim_bytes": (
        "kv_pending_reclaim_bytes",
        "Bytes given up but still mapped, until the device's work has ended.",
    ),
    "kv_created_bytes": ("kv_created_bytes", "Bytes taken from the device."),
    "kv_budget_bytes": ("kv_budget_bytes", "The most bytes that may be taken from the device."),
    "kv_used_bytes": ("kv_used_bytes", "Bytes of live sequences; a shared page counts once."),
    "prefix_pages": ("prefix_pages", "Pages of 2 MiB that the prefix cache holds."),
}
"""Field of Snapshot: name without prefix, help."""
_COUNTERS: Final = {
    "preemptions": ("preemptions", "Sequences preempted because pages ran out."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "prefix_missed_tokens": ("prefix_missed_tokens", "Prompt tokens not found in the prefix cache."),
    "kv_compactions": ("kv_compactions", "Compactions by a kv_policy."),
    "kv_kept_rows": ("kv_kept_rows", "Rows kept, summed over compactions."),
    "kv_dropped_rows": ("kv_dropped_rows", "Rows dropped by compactions."),
    "generated_tokens": ("generation_tokens", "Tokens generated."),
    "tier_errors": ("tier_call_errors", "Calls of any tier that raised; they count as misses."),
    "stalls": ("stalls", "Steps that waited for a driver call."),
}
TIER_GAUGES: Final = {
    "held_bytes": "Bytes in a tier.",
    "budget_bytes": "The most bytes that a tier may hold.",
}
OF_TIERS: Final = {
    **TIER_GAUGES,
    "stored_bytes": "Bytes stored in a tier; a record has 2 MiB.",
    "loaded_bytes": "Bytes loaded from a tier.",
    "evicted_records": "Records evicted from a tier.",
    "missed_records": "Loads that found no record in a tier.",
    "refused_records": "Records refused by a tier for lack of room.",
    "errors": "Stores and loads of a tier that failed; such a load is a miss.",
}
"""Number of a tier in Snapshot: help. The others are counters."""


class Metrics(Collector):
    """One server's metrics: its own counters, and the engine's last snapshot. Unknown values are absent, not zero."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        """`model` is its name, a label of what vLLM has too."""
        self.request_seconds = Times(
            "request_duration", "Time from a request's arrival to the end of its answer.", REQUEST_BOUNDS_S
        )
        self._engine = engine
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = Counter(
            "vmmkv_requests", "Requests by how they ended: finished, failed or aborted.", ("outcome",), registry=self._registry
        )
        self.refused = Counter(
            "vmmkv_requests_refused",
            "Requests that got an error before they reached the engine, by HTTP status.",
            ("code",),
            registry=self._registry,
        )
        for outcome in ("finished", "failed", "aborted"):
            self.requests.labels(outcome)
        for code in (400, 401, 403, 429, 503):
            self.refused.labels(str(code))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry then does not collect at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine, and the histograms."""
        engine = self._engine
        ready = isinstance(engine.phase, Ready)
        yield GaugeMetricFamily("vmmkv_engine_ready", "1 when the engine can take requests.", value=float(ready))
        if engine.snapshot is not None:
            yield from _families(engine.snapshot)
        for times in (self.request_seconds, engine.first_token_times, engine.token_times, engine.queue_times):
            yield times.family()
        yield from _as_vllm(engine, self._model)


def _as_vllm(engine: EngineClient, model: str) -> Iterator[Metric]:
    """Metrics that routers read of an engine, by vLLM's names and with its labels."""
    labels = {"model_name": model, "engine": "0"}
    if (now := engine.snapshot) is not None:
        queries = now.prefix_hit_tokens + now.prefix_missed_tokens
        usage = now.kv_used_bytes / max(1, now.kv_budget_bytes)
        for kind, name, help_text, value in (
            (GaugeMetricFamily, "num_requests_running", "vmmkv_requests_running.", now.running),
            (GaugeMetricFamily, "num_requests_waiting", "vmmkv_requests_waiting.", now.waiting),
            (GaugeMetricFamily, "kv_cache_usage_perc", "vmmkv_kv_usage_ratio.", usage),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", queries),
            (CounterMetricFamily, "prefix_cache_hits", "vmmkv_prefix_hit_tokens.", now.prefix_hit_tokens),
        ):
            family: CounterMetricFamily | GaugeMetricFamily = kind(f"vllm:{name}", help_text, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), value)
            yield family
    if isinstance(ready := engine.phase, Ready):
        blocks = {
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(ready.num_blocks),
            "engine": "0",
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Blocks that routers reckon with.", labels=tuple(blocks))
        info.add_metric(tuple(blocks.values()), 1)
        yield info
    for times in (engine.first_token_times, engine.token_times):
        yield times.family("vllm:", **labels)


def _families(snapshot: Snapshot) -> Iterator[Metric]:
    for field, (name, help_text) in _GAUGES.items():
        yield GaugeMetricFamily(f"vmmkv_{name}", help_text, value=getattr(snapshot, field))
    for field, (name, help_text) in _COUNTERS.items():
        yield CounterMetricFamily(f"vmmkv_{name}", help_text, value=getattr(snapshot, field))
    used_bytes, budget_bytes = snapshot.kv_used_bytes, snapshot.kv_budget_bytes
    saved_bytes = max(0, snapshot.kv_mapped_bytes - used_bytes)
    for name, help_text, number in (
        ("kv_shared_bytes", "Bytes that sharing saves: mapped bytes less used bytes.", saved_bytes),
        ("kv_usage_ratio", "Used bytes over the budget, 0 to 1.", used_bytes / max(1, budget_bytes)),
        ("asleep", "1 while POST /sleep has given the KV memory back.", float(not budget_bytes)),
    ):
        yield GaugeMetricFamily(f"vmmkv_{name}", help_text, value=number)
    yield CounterMetricFamily("vmmkv_stall_seconds", "Time that steps waited for driver calls.", value=snapshot.stall_us / 1e6)
    attach_s = {method: snapshot.attach_us.get(method, 0.0) / 1e6 for method in snapshot.attached}
    yield _labelled("attaches", "Sequences, by how they got their prefix.", "method", snapshot.attached)
    yield _labelled("attach_seconds", "Host time of attaching, by method.", "method", attach_s)
    yield _labelled("driver_calls", "Driver calls by kind.", "call", snapshot.driver_calls)
    yield _labelled("hit_tokens", "Prompt tokens found, by source.", "source", snapshot.hit_tokens)
    yield _labelled(
        "resumed_tokens",
        "Tokens of preempted requests that ran again, by source of their rows.",
        "source",
        snapshot.resumed_tokens,
    )
    yield _labelled("fetches", "Loads from tiers for prompts, by outcome.", "outcome", snapshot.fetches)
    yield CounterMetricFamily(
        "vmmkv_fetch_wait_seconds", "Time that requests waited for tiers.", value=snapshot.fetch_wait_us / 1e6
    )
    if snapshot.holder_is_gone is not None:
        help_text = "1 while the holder or lender runs; 0: prefixes will not survive the server, or none is lent."
        yield GaugeMetricFamily("vmmkv_holder_up", help_text, value=float(not snapshot.holder_is_gone))
    for field, help_text in OF_TIERS.items():
        values = {name: tier[field] for name, tier in snapshot.tiers.items()}
        kind = GaugeMetricFamily if field in TIER_GAUGES else CounterMetricFamily
        yield _labelled(f"tier_{field}", help_text, "tier", values, kind)


def _labelled(
    name: str,
    help_text: str,
    label: str,
    values: "dict[str, int] | dict[str, float]",
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
) -> Metric:
    family = kind(f"vmmkv_{name}", help_text, labels=(label,))
    for key, value in sorted(values.items()):
        family.add_metric((key,), value)
    return family


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second between two snapshots."""

    generated_per_s: float
    prompt_per_s: float
    """Prompt tokens computed."""
    hit_rate: float | None
    """Share of prompt tokens found in the prefix cache; None if no prompt began."""

    @classmethod
    def between(cls, old: Snapshot, new: Snapshot, took_s: float) -> Self:
        """The rates of two snapshots that are `took_s` apart."""
        took_s = max(took_s, 1e-3)
        hits = new.prefix_hit_tokens - old.prefix_hit_tokens
        asked = hits + new.prefix_missed_tokens - old.prefix_missed_tokens
        return cls(
            generated_per_s=(new.generated_tokens - old.generated_tokens) / took_s,
            prompt_per_s=(new.prompt_tokens - old.prompt_tokens) / took_s,
            hit_rate=hits / asked if asked else None,
        )


async def log_rates(engine: EngineClient, *, every_s: float = LOG_INTERVAL_S) -> None:
    """Log a line at intervals, until cancelled; none while the engine is idle."""
    last = engine.snapshot
    while True:
        await asyncio.sleep(every_s)
        new = engine.snapshot
        if last is not None and new is not None:
            rates = Rates.between(last, new, every_s)
            if new.running or new.waiting or rates.generated_per_s or rates.prompt_per_s:
                values = {
                    "running": new.running,
                    "waiting": new.waiting,
                    "generated_tok_s": round(rates.generated_per_s, 1),
                    "prompt_tok_s": round(rates.prompt_per_s, 1),
                    "kv_used": round(new.kv_used_bytes / max(1, new.kv_budget_bytes), 3),
                }
                if rates.hit_rate is not None:
                    values["prefix_hit_rate"] = round(rates.hit_rate, 3)
                log.info("serving", extra=values)
        last = new
