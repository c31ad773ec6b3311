"""What the engine wants of its KV memory. `KVCache` and `PrefixCache` are that; so can be another way of keeping rows.

Who implements these says in which order memory is written: a step touches what was there when it was launched.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import GIB, PAGE_BYTES, KVCache, KVLayout, Pool
from vmmkv.cache import CacheStats
from vmmkv.driver.host import HostMemory
from vmmkv.errors import BudgetError, DriverError, VmmkvError
from vmmkv.prefix import PrefixCache, PrefixStats
from vmmkv.server.engine.attention import Rows, RowsInSlots
from vmmkv.units import format_bytes

# -------- kv

TokenIds = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]


class KVSequence(Protocol):
    """The rows of one sequence."""

    slot: int
    """Where they are, as the device knows it; from 1."""

    @property
    def length(self) -> int:
        """Tokens that have rows, or will have when what is launched is done."""
        ...

    def grow(self, num_tokens: int) -> None:
        """Memory for so many tokens in all. Raises: OutOfPages; DriverError; then nothing has changed."""
        ...

    def advance(self, num_tokens: int = 1) -> None:
        """So many more rows are launched."""
        ...

    def start(self, group: int = 0) -> int:
        """The first row that a group of layers still keeps."""
        ...

    def advance_start(self, group: int) -> None:
        """Give back the rows that have left a group's window."""
        ...

    def close(self) -> None:
        """It is over; its memory is another's once the device is done with it."""
        ...


class KV(Protocol):
    """See `vmmkv.KVCache`, which says what each of these does and costs."""

    @property
    def layout(self) -> KVLayout:
        """What a row is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rows are."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of one sequence."""
        ...

    @property
    def num_slots(self) -> int:
        """Sequences that there can be; slot 0 is nobody's."""
        ...

    @property
    def limit(self) -> torch.Tensor:
        """[1 + slots] int32 on the device: rows below it may be written."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[1 + slots] rows launched."""
        ...

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """[1 + slots] `limit` as the host knows it."""
        ...

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> KVSequence:
        """A new sequence."""
        ...

    # What comes from `open`, `fork` or `attach` goes back to the same memory, whatever it is: its type is that memory's own.

    def fork(self, sequence: Any, count: int = 1, *, max_tokens: int | None = None) -> Sequence[Any]:
        """New sequences that have all tokens of a running one. Only beam searches ask for it."""
        ...

    def copy_rows(self, pairs: Iterable[tuple[Any, Any]], first: int, end: int) -> None:
        """The second of each pair takes rows [first, end) of the first. Only beam searches ask for it."""
        ...

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """So many more rows of each slot are launched."""
        ...

    def lookahead_tokens(self, step_us: float) -> int:
        """How many tokens ahead there should be memory."""
        ...

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int) -> int:
        """Get memory ahead of need, while the device works."""
        ...

    def drain(self) -> None:
        """Nothing runs: give back what waits to be given back."""
        ...

    def stats(self) -> CacheStats:
        """What is held, and for what."""
        ...


class Attached(Protocol):
    """A sequence that has begun with what was known of its tokens."""

    @property
    def sequence(self) -> Any:
        """The sequence."""
        ...

    @property
    def num_tokens(self) -> int:
        """Rows that it has."""
        ...


class Prefixes(Protocol):
    """See `vmmkv.prefix.PrefixCache`, which says what each of these does and costs."""

    def match(self, tokens: TokenIds, *, namespace: Hashable = None) -> int:
        """How many of the first tokens are known."""
        ...

    def attach(self, tokens: TokenIds, *, namespace: Hashable = None, max_tokens: int | None = None) -> Attached:
        """A new sequence with what is known of its tokens, but for the last."""
        ...

    def insert(self, sequence: Any, tokens: TokenIds) -> None:
        """The first rows of a sequence are confirmed to be of these tokens."""
        ...

    def park(self, sequence: Any, tokens: TokenIds) -> None:
        """A sequence is over; it may be gone on from."""
        ...

    def release(self, sequence: Any, tokens: TokenIds) -> None:
        """A sequence is over, or gives way."""
        ...

    def free_slots(self, count: int) -> None:
        """See to it that so many slots can be had at once."""
        ...

    def evict(self) -> int:
        """Forget what no running sequence uses."""
        ...

    def stats(self) -> PrefixStats:
        """What is held and what was done."""
        ...


# -------- memory
# The KV memory of one engine, from its opening to its close: slots of addresses in a pool, unless another kind is given.
#
# open ──> a model runs over it, warms up, is captured ──> take what is free ──> share ──> ... ──> close

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
