"""Statistics of the engine's parts: a number is a field, declared with its metric, and counted by the part that has the struct.

    counts.preemptions += 1 ──> Snapshot.scheduler.preemptions ──> vmmkv_preemptions_total

Those of the core are here, where the HTTP process can read them without torch. A feature declares its own in its module, and
the engine sends their metrics once, in `Ready`.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, TypeAlias

import msgspec

from vmmkv.units import PAGE_BYTES

if TYPE_CHECKING:
    from vmmkv import CacheStats
    from vmmkv.prefix import PrefixStats
    from vmmkv.tier import TierStats

Value: TypeAlias = int | float | dict[str, int | float] | None
"""A number, or numbers by the value of a label. None: unknown, and absent from the metrics."""


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """A number of the engine as Prometheus has it. Its name is that of the field, behind `vmmkv_`."""

    kind: Literal["counter", "gauge"]
    help: str
    label: str | None = None
    """Label of the numbers in a dict."""


counter: Final = partial(Metric, "counter")
"""The metric of a number that only rises."""
gauge: Final = partial(Metric, "gauge")
"""The metric of a number as of now."""


class Statistics(msgspec.Struct):
    """Numbers of a part of the engine, since its start or as of now. Each field is annotated with its metric."""

    def values(self) -> dict[str, Value]:
        """The numbers by name. Later counts do not change them."""
        values: dict[str, Value] = msgspec.to_builtins(self)
        return values

    def copy(self) -> Self:
        """The same numbers, which later counts do not change."""
        return type(self)(**self.values())

    @classmethod
    @cache
    def metrics(cls) -> dict[str, Metric]:
        """The metrics of the numbers by name."""
        return {field.name: field.type.__metadata__[0] for field in msgspec.structs.fields(cls)}


class SchedulerStatistics(Statistics):
    """Requests that run and wait, and where the rows of those that began were."""

    requests_running: Annotated[int, gauge("Requests that have a slot.")] = 0
    requests_waiting: Annotated[int, gauge("Requests that wait for a slot or for pages.")] = 0
    preemptions: Annotated[int, counter("Sequences preempted because pages ran out.")] = 0
    hit_tokens: Annotated[dict[str, int], counter("Prompt tokens found, by source.", "source")] = {}
    """Tokens of prompts that were cached when their requests first began, by DEVICE or a tier's name."""
    resumed_tokens: Annotated[
        dict[str, int], counter("Tokens of preempted requests that ran again, by source of their rows.", "source")
    ] = {}
    """Rows that preempted requests had, by where they were when these began again; `RECOMPUTED` if nowhere."""


class AnswerStatistics(Statistics):
    """Tokens of prompts and answers."""

    prompt_tokens: Annotated[int, counter("Prompt tokens computed.")] = 0
    generation_tokens: Annotated[int, counter("Tokens generated.")] = 0


class MemoryStatistics(Statistics):
    """The KV memory. A *live* sequence is one that runs."""

    kv_tokens: Annotated[int, gauge("Tokens of live sequences.")] = 0
    kv_mapped_bytes: Annotated[int, gauge("Bytes mapped for live sequences; a shared page counts for each of them.")] = 0
    kv_free_bytes: Annotated[int, gauge("Bytes taken from the device and mapped nowhere.")] = 0
    kv_cached_bytes: Annotated[int, gauge("Bytes of cached prefixes, which are evicted when room is needed.")] = 0
    kv_pending_reclaim_bytes: Annotated[int, gauge("Bytes given up but still mapped, until the device's work has ended.")] = 0
    kv_created_bytes: Annotated[int, gauge("Bytes taken from the device.")] = 0
    kv_budget_bytes: Annotated[int, gauge("The most bytes that may be taken from the device.")] = 0
    kv_used_bytes: Annotated[int, gauge("Bytes of live sequences; a shared page counts once.")] = 0
    stalls: Annotated[int, counter("Growths of sequences with rows that waited for the driver or a lock.")] = 0
    stall_seconds: Annotated[float, counter("Time that steps waited for driver calls.")] = 0.0
    driver_calls: Annotated[dict[str, int], counter("Driver calls by kind.", "call")] = {}
    holder_up: Annotated[
        bool | None,
        gauge("1 while the holder or lender runs; 0: prefixes will not survive the server, or none is lent."),
    ] = None
    """None if the engine owns all of its memory."""

    @classmethod
    def of(cls, stats: "CacheStats", *, holder_is_gone: bool | None) -> Self:
        """The memory of an engine's only cache. `holder_is_gone`: None without a holder or lender."""
        return cls(
            kv_tokens=stats.num_tokens,
            kv_mapped_bytes=stats.mapped_bytes - stats.parked_bytes,
            kv_free_bytes=stats.pool_free_bytes,
            kv_cached_bytes=max(0, stats.pool_held_bytes - stats.pool_used_bytes - stats.pending_reclaim_bytes),
            kv_pending_reclaim_bytes=stats.pending_reclaim_bytes,
            kv_created_bytes=stats.pool_created_bytes,
            kv_budget_bytes=stats.pool_budget_bytes,
            kv_used_bytes=stats.pool_used_bytes,
            stalls=stats.blocked_steps,
            stall_seconds=stats.blocked_us / 1e6,
            driver_calls=stats.driver_calls,
            holder_up=None if holder_is_gone is None else not holder_is_gone,
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes that sharing saves."""
        return max(0, self.kv_mapped_bytes - self.kv_used_bytes)

    @property
    def usage_ratio(self) -> float:
        """Used bytes over the budget; 0 of a sleeping engine, which has none."""
        return self.kv_used_bytes / max(1, self.kv_budget_bytes)


class PrefixStatistics(Statistics):
    """The prefix cache, and the calls of its tiers. An engine without one has zeros."""

    prefix_pages: Annotated[int, gauge("Pages of 2 MiB that the prefix cache holds.")] = 0
    prefix_hit_tokens: Annotated[int, counter("Prompt tokens found in the prefix cache.")] = 0
    prefix_missed_tokens: Annotated[int, counter("Prompt tokens not found in the prefix cache.")] = 0
    attaches: Annotated[dict[str, int], counter("Sequences, by how they got their prefix.", "method")] = {}
    attach_seconds: Annotated[dict[str, float], counter("Host time of attaching, by method.", "method")] = {}
    tier_call_errors: Annotated[int, counter("Calls of any tier that raised; they count as misses.")] = 0
    """Errors beside those that the tiers count themselves."""

    @classmethod
    def of(cls, stats: "PrefixStats | None") -> Self:
        """The prefix cache of an engine, if it has one."""
        if stats is None:
            return cls()
        return cls(
            prefix_pages=stats.held_bytes // PAGE_BYTES,
            prefix_hit_tokens=stats.hit_tokens,
            prefix_missed_tokens=stats.missed_tokens,
            attaches=stats.attached,
            attach_seconds={method: stats.attach_us.get(method, 0.0) / 1e6 for method in stats.attached},
            tier_call_errors=stats.tier_errors,
        )


class TierStatistics(Statistics):
    """A tier. The names of its metrics begin with `tier_`, and it is their label."""

    held_bytes: Annotated[int, gauge("Bytes in a tier.")]
    budget_bytes: Annotated[int, gauge("The most bytes that a tier may hold.")]
    stored_bytes: Annotated[int, counter("Bytes stored in a tier; a record has 2 MiB.")]
    loaded_bytes: Annotated[int, counter("Bytes loaded from a tier.")]
    evicted_records: Annotated[int, counter("Records evicted from a tier.")]
    missed_records: Annotated[int, counter("Loads that found no record in a tier.")]
    refused_records: Annotated[int, counter("Records refused by a tier for lack of room.")]
    errors: Annotated[int, counter("Stores and loads of a tier that failed; such a load is a miss.")]

    @classmethod
    def of(cls, stats: "TierStats") -> Self:
        """The statistics of a tier, which has the same names for them."""
        return msgspec.convert(stats, cls, from_attributes=True)


def add_counts(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add to counts by key."""
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
