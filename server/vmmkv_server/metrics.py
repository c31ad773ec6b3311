"""Metrics in Prometheus' format, in a registry for each server; and the rates of the log and the page."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from vmmkv_server.engine_client import EngineClient
from vmmkv_server.latencies import REQUEST_BOUNDS_S, Times
from vmmkv_server.protocol import BLOCK_TOKENS, Ready, Snapshot
from vmmkv_server.statistics import Metric, TierStatistics, Value

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
"""Between two lines of the log, while something happens."""

_FAMILIES: Final[Mapping[str, type[CounterMetricFamily] | type[GaugeMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


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

    def describe(self) -> Iterator[Family]:
        """Nothing: the registry then does not collect at registration."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """The metrics of the engine, and the histograms."""
        engine = self._engine
        ready = isinstance(engine.phase, Ready)
        yield GaugeMetricFamily("vmmkv_engine_ready", "1 when the engine can take requests.", value=float(ready))
        if engine.snapshot is not None:
            yield from _families(engine.snapshot, engine.feature_metrics)
        for times in (self.request_seconds, engine.first_token_times, engine.token_times, engine.queue_times):
            yield times.family()
        yield from _as_vllm(engine, self._model)


def _as_vllm(engine: EngineClient, model: str) -> Iterator[Family]:
    """Metrics that routers read of an engine, by vLLM's names and with its labels."""
    labels = {"model_name": model, "engine": "0"}
    if (now := engine.snapshot) is not None:
        scheduler, hits = now.scheduler, now.prefix.prefix_hit_tokens
        queries = hits + now.prefix.prefix_missed_tokens
        for kind, name, help_text, value in (
            (GaugeMetricFamily, "num_requests_running", "vmmkv_requests_running.", scheduler.requests_running),
            (GaugeMetricFamily, "num_requests_waiting", "vmmkv_requests_waiting.", scheduler.requests_waiting),
            (GaugeMetricFamily, "kv_cache_usage_perc", "vmmkv_kv_usage_ratio.", now.memory.usage_ratio),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", queries),
            (CounterMetricFamily, "prefix_cache_hits", "vmmkv_prefix_hit_tokens.", hits),
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


def _families(snapshot: Snapshot, feature_metrics: Mapping[str, Metric]) -> Iterator[Family]:
    memory = snapshot.memory
    for part in (snapshot.scheduler, snapshot.answers, snapshot.prefix, memory):
        yield from _of_part(part.metrics(), part.values())
    for name, help_text, number in (
        ("kv_shared_bytes", "Bytes that sharing saves: mapped bytes less used bytes.", memory.shared_bytes),
        ("kv_usage_ratio", "Used bytes over the budget, 0 to 1.", memory.usage_ratio),
        ("asleep", "1 while POST /sleep has given the KV memory back.", float(not memory.kv_budget_bytes)),
    ):
        yield GaugeMetricFamily(f"vmmkv_{name}", help_text, value=number)
    yield from _of_part(feature_metrics, snapshot.features)
    for field, metric in TierStatistics.metrics().items():
        yield _labelled(f"tier_{field}", metric, "tier", {name: getattr(tier, field) for name, tier in snapshot.tiers.items()})


def _of_part(metrics: Mapping[str, Metric], values: Mapping[str, Value]) -> Iterator[Family]:
    for name, metric in metrics.items():
        value = values[name]
        if isinstance(value, dict):
            assert metric.label is not None, "it is declared for a dict"
            yield _labelled(name, metric, metric.label, value)
        elif value is not None:
            yield _FAMILIES[metric.kind](f"vmmkv_{name}", metric.help, value=float(value))


def _labelled(name: str, metric: Metric, label: str, numbers: Mapping[str, float]) -> Family:
    family = _FAMILIES[metric.kind](f"vmmkv_{name}", metric.help, labels=(label,))
    for key, number in sorted(numbers.items()):
        family.add_metric((key,), number)
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
        hits = new.prefix.prefix_hit_tokens - old.prefix.prefix_hit_tokens
        asked = hits + new.prefix.prefix_missed_tokens - old.prefix.prefix_missed_tokens
        return cls(
            generated_per_s=(new.answers.generation_tokens - old.answers.generation_tokens) / took_s,
            prompt_per_s=(new.answers.prompt_tokens - old.answers.prompt_tokens) / took_s,
            hit_rate=hits / asked if asked else None,
        )


async def log_rates(engine: EngineClient, *, every_s: float = LOG_INTERVAL_S) -> None:
    """Log a line at intervals, until cancelled; none while the engine is idle."""
    last = engine.snapshot
    while True:
        await asyncio.sleep(every_s)
        new = engine.snapshot
        if last is not None and new is not None:
            rates, scheduler = Rates.between(last, new, every_s), new.scheduler
            if scheduler.requests_running or scheduler.requests_waiting or rates.generated_per_s or rates.prompt_per_s:
                values = {
                    "running": scheduler.requests_running,
                    "waiting": scheduler.requests_waiting,
                    "generated_tok_s": round(rates.generated_per_s, 1),
                    "prompt_tok_s": round(rates.prompt_per_s, 1),
                    "kv_used": round(new.memory.usage_ratio, 3),
                }
                if rates.hit_rate is not None:
                    values["prefix_hit_rate"] = round(rates.hit_rate, 3)
                log.info("serving", extra=values)
        last = new
