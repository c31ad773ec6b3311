"""The KV memory of one engine, from its opening to its close: slots of addresses in a pool, unless another kind is given.

open ──> a model runs over it, warms up, is captured ──> take what is free ──> share ──> ... ──> close
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self

import torch

from vmmkv import GIB, PAGE_BYTES, KVCache, KVLayout, Pool
from vmmkv.driver.host import HostMemory
from vmmkv.errors import BudgetError, DriverError, VmmkvError
from vmmkv.prefix import PrefixCache
from vmmkv.server.engine.kv import KV, Prefixes
from vmmkv.server.engine.rows import Rows, RowsInSlots
from vmmkv.units import format_bytes

PARKED_SLOTS: Final = 3
"""For sequences that have ended, for each that may run: a conversation goes on where its own was parked. Addresses are free."""

CLOSING_SLOTS: Final = 1
"""For each that may run, where nothing is parked: who begins does not wait until the device is done with who has ended."""

GPU_MARGIN_BYTES: Final = 1 * GIB
"""Left to the device for what other libraries take later: cuBLAS workspaces, fragmentation."""

HOST_SHARE: Final = 0.25
"""Of the memory that is available on a host, what a cache takes at most unless it is told."""

MAX_HOST_BYTES: Final = 4 * GIB
"""And however much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an engine wants memory for."""

    layout: KVLayout
    device: torch.device
    max_sequences: int
    """At once."""
    max_tokens: int
    """Of one."""
    step_tokens: int
    """Of the longest step."""
    shares_prefixes: bool
    budget_bytes: int | None
    """None: what is free when model and graphs are there."""


class EngineMemory(Protocol):
    """Rows for sequences, and what is known of prefixes. An engine has one, and closes it."""

    @property
    def cache(self) -> KV:
        """The sequences."""
        ...

    @property
    def rows(self) -> Rows:
        """For attention."""
        ...

    @property
    def budget_bytes(self) -> int:
        """What rows may take."""
        ...

    @property
    def num_tokens(self) -> int:
        """The longest request that all of it can hold; a prompt has all its rows while it is computed."""
        ...

    def take_free(self) -> None:
        """The model runs, and has all the memory that it needs: if no budget was given, take of the rest what can be used."""
        ...

    def share(self) -> Prefixes | None:
        """Begin to keep prefixes, if that is wanted. Called once."""
        ...

    def close(self) -> None:
        """Give all back. Can be called again if it fails, and when it is closed."""
        ...


OpenMemory = Callable[[Wanted], EngineMemory]
"""Raises: what `SlotsInPool.open` raises."""


class SlotsInPool:
    """A `KVCache` in a pool of its own. See EngineMemory."""

    def __init__(self, cache: KVCache, wanted: Wanted) -> None:
        self.cache: Final = cache
        self.rows: Rows = RowsInSlots(cache)
        self._wanted: Final = wanted

    @classmethod
    def open(cls, wanted: Wanted) -> Self:
        """Raises: BudgetError, DriverError, OutOfPages, naming the option of the server that would help."""
        pool = Pool(wanted.device, wanted.budget_bytes or _least_bytes(wanted))
        slots = wanted.max_sequences * (1 + (PARKED_SLOTS if wanted.shares_prefixes else CLOSING_SLOTS))
        cache = open_cache(wanted.layout, pool, slots, wanted.max_tokens)
        try:
            return cls(cache, wanted)
        except BaseException:
            with contextlib.suppress(VmmkvError):  # what was raised first is what matters
                cache.close()
                pool.close()
            raise

    @property
    def budget_bytes(self) -> int:
        """See EngineMemory."""
        return self.cache.pool.budget_bytes

    @property
    def num_tokens(self) -> int:
        """See EngineMemory."""
        return self._wanted.layout.tokens_in(self.budget_bytes // PAGE_BYTES, sliding=False)

    def take_free(self) -> None:
        """See EngineMemory."""
        wanted = self._wanted
        if wanted.budget_bytes is None:
            most_bytes = wanted.layout.peak_pages(wanted.max_tokens, sliding=False) * wanted.max_sequences * PAGE_BYTES
            self.cache.pool.resize(max(_least_bytes(wanted), min(default_budget_bytes(self.cache.pool), most_bytes)))

    def resize(self, budget_bytes: int) -> None:
        """Have another budget, while sequences run. Raises: BudgetError for one that cannot be had, and nothing has changed."""
        pool, least_bytes = self.cache.pool, _least_bytes(self._wanted)
        if budget_bytes < least_bytes:
            raise BudgetError(f"{format_bytes(budget_bytes)} do not hold one step; the least is {least_bytes} bytes")
        free_bytes = pool.driver.memory().free_bytes + pool.created_bytes
        margin_bytes = GPU_MARGIN_BYTES if pool.device.type == "cuda" else 0
        most_bytes = max(0, free_bytes - margin_bytes) // PAGE_BYTES * PAGE_BYTES
        if budget_bytes > max(most_bytes, pool.budget_bytes):
            raise BudgetError(
                f"{format_bytes(budget_bytes)} are more than {pool.device} has left; the most is {most_bytes} bytes"
            )
        pool.resize(budget_bytes)

    def share(self) -> PrefixCache | None:
        """See EngineMemory."""
        return PrefixCache(self.cache) if self._wanted.shares_prefixes else None

    def close(self) -> None:
        """See EngineMemory."""
        self.cache.close()
        self.cache.pool.close()


def _least_bytes(wanted: Wanted) -> int:
    """For one step that is as long as a step can be."""
    return wanted.layout.peak_pages(min(wanted.step_tokens, wanted.max_tokens), sliding=False) * PAGE_BYTES


def check_budget(budget_bytes: int, device: torch.device) -> None:
    """Raises: BudgetError for more than the device, or this process on a host, has in all."""
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else HostMemory().read().total_bytes
    if budget_bytes > total_bytes:
        raise BudgetError(
            f"kv_budget_bytes of {format_bytes(budget_bytes)} is more than {device} has: {format_bytes(total_bytes)} in all; "
            "lower it, or leave it out for what is free"
        )


def open_cache(layout: KVLayout, pool: Pool, slots: int, max_tokens: int) -> KVCache:
    """The cache. Raises: DriverError if there are not so many addresses; the pool is closed then."""
    try:
        return KVCache(layout, pool, slots=slots, max_tokens=max_tokens)
    except DriverError as error:
        pool.close()
        if error.call != "reserve":
            raise
        message = f"{error}; lower max_num_seqs or max_tokens"
        raise type(error)(message, call=error.call, code=error.code) from error


def default_budget_bytes(pool: Pool) -> int:
    """What the cache may take when nobody says: on a GPU what is free beyond a margin, on a host a share of what is."""
    free_bytes = pool.driver.memory().free_bytes + pool.created_bytes
    if pool.device.type == "cuda":
        return (free_bytes - GPU_MARGIN_BYTES) // PAGE_BYTES * PAGE_BYTES
    return min(int(free_bytes * HOST_SHARE), MAX_HOST_BYTES) // PAGE_BYTES * PAGE_BYTES
