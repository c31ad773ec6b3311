"""What the HTTP process is told of the engine from time to time."""

from vmmkv.server.engine.kv import KV, Prefixes
from vmmkv.server.protocol import Snapshot
from vmmkv.units import PAGE_BYTES


def snapshot(
    cache: KV,
    prefix: Prefixes | None,
    *,
    running: int,
    waiting: int,
    preemptions: int,
    prompt_tokens: int,
    generated_tokens: int,
) -> Snapshot:
    """The engine's own counts, and what its memory is doing. No driver call."""
    stats = cache.stats()
    known = None if prefix is None else prefix.stats()
    return Snapshot(
        running=running,
        waiting=waiting,
        preemptions=preemptions,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        kv_tokens=stats.num_tokens,
        kv_mapped_bytes=stats.mapped_bytes - stats.parked_bytes,
        kv_free_bytes=stats.pool_free_bytes,
        kv_cached_bytes=max(0, stats.pool_held_bytes - stats.pool_used_bytes - stats.retiring_bytes),
        kv_retiring_bytes=stats.retiring_bytes,
        kv_created_bytes=stats.pool_created_bytes,
        kv_budget_bytes=stats.pool_budget_bytes,
        stalls=stats.stalls,
        stall_us=stats.stall_us,
        driver_calls=stats.driver_calls,
        prefix_hit_tokens=0 if known is None else known.hit_tokens,
        prefix_missed_tokens=0 if known is None else known.missed_tokens,
        prefix_pages=0 if known is None else known.held_bytes // PAGE_BYTES,
        kv_used_bytes=stats.pool_used_bytes,
        attached={} if known is None else known.attached,
        attach_us={} if known is None else known.attach_us,
    )
