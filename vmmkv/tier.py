"""The protocol of tiers: keep records outside the device, by key, and give them back. `vmmkv.tiers` has tiers.

    store(key) ──> host memory ──the caller fills it──> finished ──> known
    load(key)  ──> host memory ──the tier fills it───> ended ──the caller copies it──> finished

A tier lends host memory for each record on its way, so that nothing is copied twice. No call blocks on a device, a disk or a
network: what takes time ends a future, which the caller looks at. An error is a miss.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

import torch


class Refusal(Enum):
    """Cause for which a tier lends no memory to store a record."""

    THERE = "there"
    """The tier has the record, or another transfer stores it."""
    NO_ROOM = "no room"
    """The tier is full, and all its records are being copied; or it is closed."""
    NOT_NOW = "not now"
    """No buffer is free, or it has still to find out whether it has the record: ask again."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A record on its way in or out of a tier. Its host memory is the caller's until `Tier.finished` or `Tier.drop`."""

    key: bytes
    is_store: bool
    address: int = 0
    """Address of its `record_bytes` of host memory, which a device copies from and to. 0 for a miss.

    One copy moves records at addresses that follow each other: a tier's memory is one allocation, or has gaps.
    """
    future: Future[None] | None = None
    """Future of a load: done when the bytes are there, with an error for a miss.

    None if they are there already, or known to miss.
    """

    @property
    def ended(self) -> bool:
        """Are the bytes there, or is it known that they will not be?"""
        return self.future is None or self.future.done()

    @property
    def missed(self) -> bool:
        """Has the transfer ended without the bytes?"""
        return not self.address or (self.future is not None and self.future.done() and self.future.exception() is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier's contents now, and its counts since it was made."""

    name: str
    budget_bytes: int
    """Budget of the records; 0 for a store with a bound of its own."""
    held_bytes: int
    """Bytes of its records. Of a store that others use too: as far as this tier knows."""
    stored_bytes: int
    loaded_bytes: int
    evicted_records: int
    missed_records: int
    """Loads of records that the tier had not, or not any more."""
    refused_records: int
    """Stores for which the tier had no room."""
    errors: int
    """Stores and loads that failed: counted, and misses otherwise."""


class Tier(Protocol):
    """A store of records. Its methods may be called from any thread; none but `flush` blocks for longer than a lock.

    Records of many layouts, models and namespaces may be in one tier: their keys differ.
    """

    name: str
    record_bytes: int
    """Size of each record; a multiple of 4 KiB."""

    def open(self, device: torch.device) -> None:
        """Get ready for copies from and to a device. Each cache that uses the tier calls it first.

        Raises: BudgetError, if the memory or the disk space of its budget cannot be had.
        """

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Look up which of these records the tier has. A load can miss all the same. None while it finds out: ask again.

        It is a use of them, and of those that are being stored: the last of them is evicted first.
        """

    def store(self, key: bytes) -> Transfer | Refusal:
        """Lend memory for a record's bytes, or say why not. It is a use of it."""

    def load(self, key: bytes) -> Transfer | None:
        """Begin to load a record into memory that is lent. None if there is no room now: ask again."""

    def finished(self, transfer: Transfer) -> None:
        """End a transfer: what was stored is kept, what was loaded has been copied. Its memory goes back."""

    def drop(self, transfer: Transfer) -> None:
        """Give a transfer up, whether or not it has ended. Its memory goes back, and nothing is stored."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was stored so far is kept, or has failed; False if the time is over first."""

    def stats(self) -> TierStats:
        """The tier at this moment."""

    def close(self) -> None:
        """Give memory and files back. Idempotent; it can be opened again.

        Raises: ValueError while transfers are under way: a device may copy from and to the memory.
        """


RecordListener: TypeAlias = Callable[[Sequence[bytes], bool], None]
"""Callback for keys of records, and whether the tier has them now. It returns at once: tiers may call it under a lock."""


@runtime_checkable
class ListenedTier(Tier, Protocol):
    """A tier that knows when its records go, and says so."""

    def listen(self, listener: RecordListener) -> None:
        """Tell one listener which records there are, and then of each that is kept, goes, or could not be stored."""
