"""Statistics of the connector in vLLM's log and its `/metrics`: counters of each tier, and of the requests that ask them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vmmkv.adapters.vllm.schedule import Schedule
from vmmkv.tier import TierStats

OF_TIERS: Final = {
    "stored_bytes": "Bytes of KV stored in a tier.",
    "loaded_bytes": "Bytes of KV loaded from a tier.",
    "evicted_records": "Records evicted from a tier.",
    "missed_records": "Loads of records that a tier had not, or not any more.",
    "refused_records": "Stores for which a tier had no room.",
    "errors": "Stores and loads of a tier that failed, damaged records among them.",
    "loaded_tokens": "Prompt tokens that requests loaded from a tier.",
}
"""Counters with the label `tier`, by name, and what each counts."""

OF_REQUESTS: Final = {
    "loads": "Requests that began to load from tiers.",
    "waits": "Questions of requests that had to wait for another request, or for a tier.",
    "declined": "Requests that computed tokens which tiers have, since that is faster.",
    "failed": "Records that could not be loaded. They are computed.",
    "given_up": "Records that were not stored, since their blocks were needed first.",
}
"""Counters without a label."""

_BETWEEN: Final = "/"
"""Between the name of a counter and that of a tier."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report: numbers, by the name of a counter, and of a tier behind a slash."""

    def reset(self) -> None:
        """Forget what was counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        """Add what another report has counted."""
        return ConnectorStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """The counts, for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Was nothing counted?"""
        return not self.data


class Changes:
    """Growth of totals that only grow, since they were last reported."""

    def __init__(self) -> None:
        self._reported = Counter[str]()

    def of(self, totals: Mapping[str, int]) -> ConnectorStats | None:
        """Report totals; None if they are as they were."""
        grown = Counter(totals) - self._reported
        self._reported.update(grown)
        return ConnectorStats(data=dict(grown)) if grown else None


def totals_of_tiers(stats: Iterable[TierStats], counts: Mapping[str, int]) -> Counter[str]:
    """The worker's totals: of its tiers, and counts of its mover."""
    totals = Counter({name: counts.get(name, 0) for name in OF_REQUESTS})
    for each in stats:
        for name in OF_TIERS:
            totals[f"{name}{_BETWEEN}{each.name}"] = getattr(each, name, 0)
    return totals


def totals_of_schedule(schedule: Schedule) -> Counter[str]:
    """The scheduler's totals."""
    totals = Counter({name: schedule.counts[name] for name in OF_REQUESTS})
    for tier, tokens in schedule.loaded_tokens.items():
        totals[f"loaded_tokens{_BETWEEN}{tier}"] = tokens
    return totals


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `vllm:vmmkv_...` for Prometheus, with the labels that vLLM's own metrics have."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:vmmkv_{name}", documentation=text, labelnames=[*labelnames, *labels])
            for counters, labels in ((OF_TIERS, ["tier"]), (OF_REQUESTS, []))
            for name, text in counters.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report to the counters."""
        for key, count in transfer_stats_data.items():
            name, *tier = key.split(_BETWEEN, 1)
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], *tier).inc(count)
