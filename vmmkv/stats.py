"""What a cache tells of itself."""

from dataclasses import dataclass

from vmmkv.memory import SlotMemory
from vmmkv.occupancy import Occupancy
from vmmkv.units import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A cache at one moment.

    mapped = tokens + guard + waste + parked;  held = mapped + retiring (of this cache's share of the pool)
    """

    reserved_bytes: int
    """Addresses, which cost nothing."""
    mapped_bytes: int
    """Memory under live and parked slots."""
    retiring_bytes: int
    """Memory that waits for a fence before it is unmapped."""
    parked_bytes: int
    """Memory under parked slots: it can be adopted, and is taken back under pressure."""
    token_bytes: int
    """What the rows of the tokens written need, of running sequences."""
    guard_bytes: int
    """Mapped past the tokens for kernels that read whole tiles."""
    waste_bytes: int
    """Mapped for running sequences beyond tokens and guard: unfilled pages and what was mapped ahead."""
    pool_created_bytes: int
    pool_held_bytes: int
    pool_used_bytes: int
    """Of what is held: by running sequences, of all caches, once however many share it; the rest can be had."""
    pool_free_bytes: int
    pool_budget_bytes: int
    num_tokens: int
    """Tokens of running sequences."""
    num_sequences: int
    num_parked: int
    num_slots: int
    stalls: int
    """Growths of a sequence that had tokens already and lacked memory: its caller waited, for the driver or the lock."""
    stall_us: float
    """How long they waited in all, from the call on."""
    mapped_pages: int
    """Pages mapped in the cache's life, by anybody."""
    pumped_pages: int
    """Of these, ahead of need: by `map_ahead` or the mapper's thread."""
    adopted_slots: int
    """Slots handed on with their mappings, which cost no driver call."""
    driver_calls: dict[str, int]
    """Successful calls by name, of the whole pool."""


def snapshot(memory: SlotMemory, occupancy: Occupancy) -> CacheStats:
    """Count what is mapped for whom. The pool's lock is held."""
    table, pool = memory.table, memory.pool.stats()
    live, parked_pages = list(occupancy.sequences), occupancy.parked_pages()
    token_bytes = guard_bytes = 0
    for index, arena in enumerate(memory.arenas):
        row_bytes = arena.group.row_bytes
        for slot in live:
            length_bytes = int(table.lengths[slot]) * row_bytes
            token_bytes += length_bytes - int(table.starts[index, slot]) * row_bytes
            room_bytes = max(0, arena.spans[slot].end_page * PAGE_BYTES - length_bytes)
            guard_bytes += min(memory.guard_tokens * row_bytes, room_bytes)
    live_bytes = sum(memory.num_pages(slot) for slot in live) * PAGE_BYTES
    return CacheStats(
        reserved_bytes=sum(arena.reserved_bytes for arena in memory.arenas),
        mapped_bytes=live_bytes + parked_pages * PAGE_BYTES,
        retiring_bytes=memory.mapper.retiring_pages * PAGE_BYTES,
        parked_bytes=parked_pages * PAGE_BYTES,
        token_bytes=token_bytes,
        guard_bytes=guard_bytes,
        waste_bytes=live_bytes - token_bytes - guard_bytes,
        pool_created_bytes=pool.created_bytes,
        pool_held_bytes=pool.held_bytes,
        pool_used_bytes=pool.used_bytes,
        pool_free_bytes=pool.free_bytes,
        pool_budget_bytes=pool.budget_bytes,
        num_tokens=int(table.lengths.sum()),
        num_sequences=len(live),
        num_parked=len(occupancy.parked),
        num_slots=table.num_slots,
        stalls=occupancy.stalls,
        stall_us=occupancy.stall_us,
        mapped_pages=memory.mapped_pages,
        pumped_pages=occupancy.pumped_pages,
        adopted_slots=occupancy.adopted_slots,
        driver_calls=pool.driver_calls,
    )
