"""The KV memory of an engine: what its loop calls, and the same over a vmmkv pool.

open ──> a model runs over it, warms up, is captured ──> take_free ──> requests ──> close
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

import vmmkv
from vmmkv import GIB, PAGE_BYTES, KVCache, KVLayout, Pool
from vmmkv.cache import CacheStats
from vmmkv.driver import Driver, open_driver
from vmmkv.errors import BudgetError, HolderUnavailable, OutOfAddresses, VmmkvError
from vmmkv.memory.address_space import check_addresses
from vmmkv.prefix import PrefixCache, PrefixStats
from vmmkv.tier import Tier
from vmmkv.units import format_bytes
from vmmkv_server.engine.attention import KVRows

TokenIds = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]

PARKED_SLOTS: Final = 3
"""Slots of ended sequences for each running one: a conversation goes on where it was parked. Addresses are free."""

CLOSING_SLOTS: Final = 1
"""Slots of ended sequences for each running one without a prefix cache: a new one does not wait for the device to be done."""

GPU_MARGIN_BYTES: Final = 1 * GIB
"""Memory left to the device for what other libraries take later: cuBLAS workspaces, fragmentation."""

HOST_SHARE: Final = 0.25
"""Share of the available host memory that a cache takes by default."""

MAX_HOST_BYTES: Final = 4 * GIB
"""The most that it takes by default."""


class KVSequence(Protocol):
    """Rows of one running sequence, in a slot of its own."""

    @property
    def slot(self) -> int:
        """Index of its slot; 0 is the null slot."""

    @property
    def length(self) -> int:
        """Rows launched."""

    def grow(self, num_tokens: int) -> None:
        """Have memory for `num_tokens` rows in all. Raises: OutOfPages, DriverError; then nothing has changed."""

    def advance(self, num_tokens: int = 1) -> None:
        """Count `num_tokens` more rows as launched. Raises: RowsUnmapped if there is no memory for them."""

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Launched steps may still write the others.

        Raises: RowsUnmapped if rows are gone that the next token sees; then nothing has changed.
        """

    def close(self) -> None:
        """End the sequence. Its memory is free when the device is done with it. Idempotent."""


class KVBackend(Protocol):
    """KV memory of one engine: all that the loop calls, from a model's warm-up to `close`.

    Each sequence has a slot. `SlotBackend` is one, and each of `bench/baselines`. Only vmmkv has forks, windows, compaction,
    tiers and maps of memory: an engine asks for `cache` or `prefixes` where it needs them.
    """

    @property
    def layout(self) -> KVLayout:
        """Bytes of each row."""

    @property
    def device(self) -> torch.device:
        """Device that has the rows."""

    @property
    def num_slots(self) -> int:
        """Slots, but for the null slot."""

    @property
    def max_tokens(self) -> int:
        """Rows of the longest sequence."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[1 + num_slots] rows launched, by slot."""

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """[1 + num_slots] rows that have memory, by slot."""

    @property
    def limit(self) -> torch.Tensor:
        """`limits` on the device, int32."""

    @property
    def rows(self) -> KVRows:
        """Rows of all layers, for a model's attention."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that rows may take."""

    @property
    def num_tokens(self) -> int:
        """Rows of the longest request that all of it can hold. A prompt has all its rows while it is computed."""

    @property
    def shares_prefixes(self) -> bool:
        """Can a sequence begin with rows of others?"""

    @property
    def cache(self) -> KVCache | None:
        """vmmkv's cache; None for a baseline."""

    @property
    def prefixes(self) -> PrefixCache | None:
        """vmmkv's prefix cache; None without one, and for a baseline."""

    def begin(self) -> KVSequence:
        """Begin a sequence without rows. Raises: OutOfSlots or OutOfPages if no slot is free."""

    def attach(self, tokens: TokenIds, *, namespace: Hashable, max_tokens: int) -> tuple[KVSequence, int]:
        """Begin a sequence with cached rows of these tokens, but for the last; and their number. Raises: as `begin`."""

    def lookup(self, tokens: TokenIds, *, namespace: Hashable) -> Callable[[], int]:
        """Function that returns how many rows `attach` would find now."""

    def advance(self, slots: Slots) -> None:
        """Count one more row of each slot as launched. Raises: RowsUnmapped, and then none has advanced."""

    def insert(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """Let others attach to the rows of these tokens, the sequence's first, which the device has written."""

    def park(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """End a sequence that is done. Its rows of these tokens are kept for others while there is room."""

    def release(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """End a sequence whose memory is needed. Rows that others may attach to are evicted last."""

    def map_ahead(self, budget_us: float) -> None:
        """Get memory that the next steps need, for `budget_us` at most, while the device computes."""

    def drain(self) -> None:
        """Give back what ended sequences have left, once the device is done with it. Blocks."""

    def evict(self) -> None:
        """Evict all rows that no running sequence uses."""

    def stats(self) -> CacheStats:
        """Memory as it is now."""

    def prefix_stats(self) -> PrefixStats | None:
        """Counts of cached prefixes; None if sequences share none."""

    def take_free(self) -> None:
        """Take what the model and its graphs have left, if no budget was given."""

    def close(self) -> None:
        """Give everything back. Idempotent; it can be called again if it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """Needs of an engine for memory."""

    layout: KVLayout
    device: torch.device
    max_sequences: int
    """Most sequences at once."""
    max_tokens: int
    """Most tokens of one sequence."""
    step_tokens: int
    """Most tokens of a step."""
    shares_prefixes: bool
    budget_bytes: int | None
    """Budget; None for all that is free once the model and its graphs are there, or that the holder may own."""
    holder: str | None = None
    """The socket of the process that owns the memory; None for this one."""
    lender: str | None = None
    """The socket of the holder of another engine, whose prefixes are borrowed; None for none."""
    tiers: Sequence[Tier] = ()
    """Tiers to which prefixes go that leave the device; the backend closes them."""
    fingerprint: str = ""
    """Fingerprint of the model, with tiers, a holder or a lender; else empty."""
    driver: Driver | None = None
    """Driver; None for the device's own."""


class SlotBackend:
    """KV memory of one engine, which closes it: a `KVCache` in a pool of its own. See KVBackend."""

    def __init__(self, cache: KVCache, config: BackendConfig) -> None:
        self.cache: Final = cache
        self.rows = KVRows(cache)
        self.layout: Final = cache.layout
        self.device: Final = cache.device
        self.num_slots: Final = cache.num_slots
        self.max_tokens: Final = cache.max_tokens
        self.lengths: Final = cache.lengths
        self.limits: Final = cache.limits
        self.limit: Final = cache.limit
        self.begin: Final = cache.open
        self.advance: Final = cache.advance
        self.drain: Final = cache.drain
        self.stats: Final = cache.stats
        self._config: Final = config
        self._asleep_bytes = 0
        """The budget to have again after a sleep; 0 while awake."""
        # At once: what an earlier process left with a holder takes part of the budget, and the warm-up evicts what it needs.
        self.prefixes: Final = (
            PrefixCache(cache, config.tiers, fingerprint=config.fingerprint) if config.shares_prefixes else None
        )
        self.shares_prefixes: Final = config.shares_prefixes

    @classmethod
    def open(cls, config: BackendConfig) -> Self:
        """Raises: BudgetError, DriverError, OutOfPages, HolderUnavailable."""
        budget_bytes = config.budget_bytes or _least_bytes(config)
        pool = Pool(config.device, budget_bytes, driver=config.driver, holder=config.holder, lender=config.lender)
        slots = config.max_sequences * _slots_each(config.shares_prefixes)
        with contextlib.ExitStack() as undo:
            undo.callback(close_after_error, pool)  # with its caches
            if pool.holder is not None and config.budget_bytes is None:
                pool.resize(pool.holder.budget_bytes)
            backend = cls(KVCache(config.layout, pool, slots=slots, max_tokens=config.max_tokens), config)
            undo.pop_all()
        return backend

    @property
    def budget_bytes(self) -> int:
        """Budget, asleep too, as `KVBackend.budget_bytes`."""
        return self._asleep_bytes or self.cache.pool.budget_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of one sequence that the budget holds, as `KVBackend.num_tokens`."""
        return self._config.layout.tokens_in(self.budget_bytes // PAGE_BYTES, sliding=False)

    def attach(self, tokens: TokenIds, *, namespace: Hashable, max_tokens: int) -> tuple[KVSequence, int]:
        """Open a sequence, as `KVBackend.attach`."""
        if self.prefixes is None:
            return self.cache.open(max_tokens=max_tokens, tenant=namespace), 0
        attached = self.prefixes.attach(tokens, namespace=namespace, max_tokens=max_tokens)
        return attached.sequence, attached.num_tokens

    def lookup(self, tokens: TokenIds, *, namespace: Hashable) -> Callable[[], int]:
        """Count cached tokens, as `KVBackend.lookup`."""
        return (lambda: 0) if self.prefixes is None else self.prefixes.lookup(tokens, namespace=namespace)

    def insert(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """Share rows of a running sequence, as `KVBackend.insert`."""
        if self.prefixes is not None:
            self.prefixes.insert(vmmkv_sequence(sequence), tokens, is_written=True)

    def park(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """Keep an ended sequence for its conversation, as `KVBackend.park`."""
        if self.prefixes is None:
            sequence.close()
        else:
            self.prefixes.park(vmmkv_sequence(sequence), tokens)

    def release(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """End a sequence, as `KVBackend.release`."""
        if self.prefixes is None:
            sequence.close()
        else:
            self.prefixes.release(vmmkv_sequence(sequence), tokens)

    def map_ahead(self, budget_us: float) -> None:
        """Map pages ahead of use, as `KVBackend.map_ahead`. Raises: DriverError."""
        self.cache.map_ahead(budget_us, lookahead_tokens=self.cache.lookahead_tokens(budget_us))

    def evict(self) -> None:
        """Evict cached prefixes, as `KVBackend.evict`. The memory stays in the pool; tiers keep theirs."""
        if self.prefixes is not None:
            self.prefixes.evict()

    def prefix_stats(self) -> PrefixStats | None:
        """Counts of the prefix cache, as `KVBackend.prefix_stats`."""
        return None if self.prefixes is None else self.prefixes.stats()

    def take_free(self) -> None:
        """Take what memory is left and useful, as `KVBackend.take_free`."""
        config = self._config
        if config.budget_bytes is None and config.holder is None:
            most_bytes = config.layout.peak_pages(config.max_tokens, sliding=False) * config.max_sequences * PAGE_BYTES
            free_bytes = _free_bytes(self.cache.pool)
            if config.device.type != "cuda":
                free_bytes = min(int(free_bytes * HOST_SHARE), MAX_HOST_BYTES) // PAGE_BYTES * PAGE_BYTES
            self.cache.pool.resize(max(_least_bytes(config), min(free_bytes, most_bytes)))

    def resize(self, budget_bytes: int) -> None:
        """Change the budget while sequences run. Raises: BudgetError for one that cannot be had; then nothing has changed."""
        pool, least_bytes = self.cache.pool, _least_bytes(self._config)
        if self._asleep_bytes:
            raise BudgetError("the memory is given back while the server sleeps; wake it up first")
        if budget_bytes < least_bytes:
            raise BudgetError(f"{format_bytes(budget_bytes)} do not hold one step; the least is {least_bytes} bytes")
        most_bytes = _free_bytes(pool)
        if budget_bytes > max(most_bytes, pool.budget_bytes):
            raise BudgetError(
                f"{format_bytes(budget_bytes)} are more than {pool.device} has left; the most is {most_bytes} bytes"
            )
        pool.resize(budget_bytes)

    def sleep(self) -> None:
        """Give all memory back but the null page, with what is cached; addresses stay. Idempotent.

        Raises: BudgetError while sequences run, HolderUnavailable if the holder is gone, and then nothing has changed.
        """
        if not self._asleep_bytes:
            self._check_holder()
            budget_bytes = self.cache.pool.budget_bytes
            self.cache.pool.resize(0)
            self._asleep_bytes = budget_bytes

    def wake_up(self) -> None:
        """Have the budget again: memory is taken as sequences grow. Idempotent. Raises: HolderUnavailable if it is gone."""
        if self._asleep_bytes:
            self._check_holder()
            self.cache.pool.resize(self._asleep_bytes)
            self._asleep_bytes = 0

    def _check_holder(self) -> None:
        holder = self.cache.pool.holder
        if holder is not None and holder.is_gone():
            raise HolderUnavailable(
                f"the holder at {holder.path} is gone, so memory that is given back cannot be had again: start a holder, and "
                "then this server anew"
            )

    def close(self) -> None:
        """Give all memory back, as `KVBackend.close`."""
        self.cache.close()
        self.cache.pool.close()
        for tier in self._config.tiers:
            tier.close()


OpenBackend = Callable[[BackendConfig], KVBackend]
"""Raises: see `SlotBackend.open`."""


def vmmkv_sequence(sequence: KVSequence) -> vmmkv.Sequence:
    """A sequence of a `SlotBackend`, with what only such have."""
    assert isinstance(sequence, vmmkv.Sequence), "a baseline has no forks, windows or compaction"
    return sequence


def close_after_error(memory: Pool | KVBackend) -> None:
    """Give memory back behind an error, which matters more than what fails here."""
    with contextlib.suppress(VmmkvError):
        memory.close()


def _free_bytes(pool: Pool) -> int:
    """Memory that the pool can have, in whole pages; on a GPU but for a margin."""
    free_bytes = pool.driver.memory().free_bytes + pool.created_bytes - pool.borrowed_bytes
    margin_bytes = GPU_MARGIN_BYTES if pool.device.type == "cuda" else 0
    return max(0, free_bytes - margin_bytes) // PAGE_BYTES * PAGE_BYTES


def _least_bytes(config: BackendConfig) -> int:
    """Least memory that one step of the greatest length needs."""
    return config.layout.peak_pages(min(config.step_tokens, config.max_tokens), sliding=False) * PAGE_BYTES


def _slots_each(shares_prefixes: bool) -> int:
    """Slots for each sequence that may run at once: its own, and those of ended ones."""
    return 1 + (PARKED_SLOTS if shares_prefixes else CLOSING_SLOTS)


def check_lengths(
    layout: KVLayout, device: torch.device, *, max_sequences: int, max_tokens: int, shares_prefixes: bool
) -> None:
    """Raises: ValueError if so many sequences of that length need more addresses than there are, naming what would fit."""
    each = _slots_each(shares_prefixes)
    try:
        check_addresses(open_driver(device), layout.groups, slots=max_sequences * each, max_tokens=max_tokens)
    except OutOfAddresses as error:
        lower = [f"max_num_seqs from {max_sequences} to {error.slots // each}"] if error.slots >= each else []
        lower += [f"max_tokens to {error.max_tokens}"] if error.max_tokens > 1 else []
        remedy = ", or ".join(lower) or "both max_num_seqs and max_tokens"
        raise ValueError(f"{error}. Each sequence has {each} slots here: lower {remedy}") from error


def least_bytes(layout: KVLayout, num_prompt: int, num_rows: int, *, num_beams: int, attaches: bool) -> int:
    """Bytes of the rows that a request has at the least when `num_rows` follow its prompt, in each of its beams.

    The beams share the prompt's rows. A prompt that is computed has all its rows at once; one that `attaches` may need no more
    of them than its windows still see. Pages that are not full, and rows that leave a window late, come on top.
    """
    num_tokens = num_prompt + num_rows
    size_bytes = 0
    for group in layout.groups:
        start = layout.start_for(group, num_tokens)
        num_own = num_tokens - max(start, num_prompt)
        size_bytes += (max(0, num_prompt - start) + num_beams * num_own) * group.row_bytes
    return size_bytes if attaches else max(size_bytes, num_prompt * layout.row_bytes)
