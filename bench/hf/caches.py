"""What is compared: where the caches of one system have their memory, and how one is opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from vmmkv import Pool
from vmmkv.units import PAGE_BYTES

DYNAMIC: Final = "transformers DynamicCache"
STATIC: Final = "transformers StaticCache"
VMMKV: Final = "vmmkv VmmCache"
SYSTEMS: Final = (DYNAMIC, STATIC, VMMKV)
"""The first is what the others' results are held against."""

ATTENDING: Final = ", vmmkv attention"
"""Behind a system's name: attention is by vmmkv's kernels, and not by torch's SDPA."""


class Memory(Protocol):
    """Caches of one system."""

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        """An empty cache for a batch of so many sequences, none of which will have more tokens. `close_caches` ends it."""

    @property
    def own_bytes(self) -> int:
        """Taken from the device by now, and not by torch's allocator."""


class _TorchMemory:
    """transformers' own caches, which have torch's allocator and nothing else."""

    own_bytes: Final = 0

    def __init__(self, system: str, config: Any) -> None:
        self._system, self._config = system, config

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        """See Memory.open. A StaticCache takes what `max_tokens` need at its first pass, whoever comes."""
        from transformers import DynamicCache, StaticCache

        if self._system == STATIC:
            return StaticCache(config=self._config, max_cache_len=max_tokens)
        return DynamicCache(config=self._config)


class _PoolMemory:
    """VmmCaches of one pool."""

    def __init__(self, config: Any, pool: Pool) -> None:
        self._config, self._pool = config, pool
        self._caches: list[Any] = []

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        """See Memory.open."""
        from vmmkv.adapters.transformers import VmmCache

        cache = VmmCache(self._config, self._pool, max_tokens=max_tokens, slots=num_sequences)
        self._caches.append(cache)
        return cache

    @property
    def own_bytes(self) -> int:
        """See Memory.own_bytes. The pad is one page more."""
        return self._pool.created_bytes + PAGE_BYTES

    def close(self) -> None:
        """End all caches."""
        for cache in self._caches:
            cache.close()


@contextmanager
def memory_of(system: str, config: Any, device: torch.device, budget_bytes: int) -> Iterator[Memory]:
    """Where this system's caches are, until the `with` block ends.

    A pool's budget is two pages less: one for its pad, one for the few numbers by slot that a cache has in torch's memory. What
    torch's allocator may give is not limited here: a meter does that.
    """
    if system != VMMKV:
        yield _TorchMemory(system, config)
        return
    with Pool(device, budget_bytes=budget_bytes - 2 * PAGE_BYTES) as pool:
        memory = _PoolMemory(config, pool)
        try:
            yield memory
        finally:
            memory.close()
