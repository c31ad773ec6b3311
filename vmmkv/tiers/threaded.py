"""ThreadedTier: the base of a tier whose reads and writes block. And what tiers have in common."""

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from vmmkv.driver.pinned import host_memory
from vmmkv.tier import RecordListener, Refusal, TierStats, Transfer
from vmmkv.tiers.record import RECORD_BYTES, checked_record_bytes
from vmmkv.units import MIB, counted

T = TypeVar("T")

_BUFFERED_BYTES: Final = 64 * MIB
"""Bytes of the buffers of a `ThreadedTier`, unless its records are so large that this would be less than _FEWEST_BUFFERS."""

_FEWEST_BUFFERS: Final = 8
_NUM_THREADS: Final = 4


def check_returned(name: str, num_transfers: int) -> None:
    """Check that no memory of a tier is lent. Raises: ValueError if some is: see Tier.close."""
    if num_transfers:
        raise ValueError(
            f"{counted(num_transfers, 'transfer')} of the {name} tier are under way; close the caches that use it first"
        )


def touch(records: OrderedDict[bytes, T], storing: set[bytes], keys: Sequence[bytes]) -> list[bool]:
    """Use these records, the last key first; which of them a tier has, each. `records`: the least recently used first."""
    for key in reversed(keys):
        if key in records:
            records.move_to_end(key)
    return [key in records and key not in storing for key in keys]


class MissedError(Exception):
    """The tier has no such record, or has it no longer."""


def missed(key: bytes) -> Transfer:
    """A load that has ended as a miss."""
    return Transfer(key, is_store=False)


class ThreadedTier(ABC):
    """A tier whose reads and writes block: they run in a few threads, between its store and buffers of host memory.

    A subclass reads and writes one record, and knows which records there are. It counts its evictions in `counts`.
    """

    name = "threaded"

    def __init__(self, budget_bytes: int, record_bytes: int = RECORD_BYTES) -> None:
        self.budget_bytes: Final = budget_bytes
        self.record_bytes = checked_record_bytes(record_bytes)
        self._num_buffers = max(_BUFFERED_BYTES // record_bytes, _FEWEST_BUFFERS)
        self.counts: Counter[str] = Counter()
        self.lock: Final = threading.Lock()
        """Guards the buffers, and what a subclass knows of its records."""
        self._memory: torch.Tensor | None = None
        self._buffers: list[int] = []
        """Addresses of the free buffers."""
        self._num_lent = 0
        """Transfers that the caller has neither finished nor dropped."""
        self._storing: set[bytes] = set()
        self._refused: bytes | None = None
        """The last record for which no buffer was free. It is asked about again and again, and counts once."""
        self._num_writes = 0
        self._written = threading.Condition(self.lock)
        self.listener: RecordListener = lambda keys, is_held: None
        """Listener of a subclass that can `listen`, which tells of its records; this class tells of failed stores."""
        self._threads: ThreadPoolExecutor | None = None
        self._ending: ThreadPoolExecutor | None = None
        """The threads of a tier that is being closed."""

    # what a subclass does

    @abstractmethod
    def write(self, key: bytes, data: memoryview) -> None:
        """Keep a record; called from a thread. Any error leaves nothing behind that is read as a record."""

    @abstractmethod
    def read(self, key: bytes, data: memoryview) -> None:
        """Fill `data`, rightly; called from a thread. Any error is a miss; MissedError if the record is not there."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Look up which of these records the tier has. See Tier.lookup."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of its records."""

    # the protocol

    def open(self, device: torch.device) -> None:
        """Allocate the buffers and start the threads, unless that is done. See Tier.open."""
        with self.lock:
            if self._memory is None:
                memory = host_memory(self._num_buffers * self.record_bytes, device)
                first = memory.data_ptr()
                self._buffers = [first + index * self.record_bytes for index in range(self._num_buffers)]
                self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"vmmkv-{self.name}")
                self._memory = memory  # last: by it the tier is open

    def store(self, key: bytes) -> Transfer | Refusal:
        """Lend a buffer for a record's bytes, or say why not. At most half are lent for stores: requests wait for loads."""
        found = self.lookup([key])
        if found is None:
            return Refusal.NOT_NOW
        with self.lock:
            if found[0] or key in self._storing:
                return Refusal.THERE
            if self._threads is None:
                return Refusal.NO_ROOM
            if not self._buffers or len(self._storing) >= self._num_buffers // 2:
                self.counts["refused_records"] += key != self._refused
                self._refused = key
                return Refusal.NOT_NOW
            self._storing.add(key)
            self._num_lent += 1
            return Transfer(key, True, self._buffers.pop())

    def load(self, key: bytes) -> Transfer | None:
        """Begin to load a record into a buffer. A miss if the tier is closed; None if no buffer is free: ask again."""
        with self.lock:
            if self._threads is None:
                return missed(key)
            if not self._buffers:
                return None
            address = self._buffers.pop()
            self._num_lent += 1
            return Transfer(key, False, address, self._threads.submit(self._read, key, address))

    def finished(self, transfer: Transfer) -> None:
        """End a transfer: a thread writes a stored record, and the buffer of a loaded one is free."""
        if transfer.is_store:
            with self.lock:
                assert self._threads is not None, "it is not closed while a transfer is under way"
                self._threads.submit(self._write, transfer)
                self._num_writes += 1
                self._num_lent -= 1
        else:
            self.drop(transfer)

    def drop(self, transfer: Transfer) -> None:
        """Give a transfer up. Its buffer is free when no thread uses it."""
        if not transfer.address:
            return
        with self.lock:
            self._num_lent -= 1
        if transfer.is_store:
            self.listener([transfer.key], False)
        if transfer.future is not None:
            transfer.future.cancel()
            transfer.future.add_done_callback(lambda _: self.give_back(transfer))  # a thread may still write to it
        else:
            self.give_back(transfer)

    def stats(self) -> TierStats:
        """Counts of the tier at this moment."""
        held_bytes = self.held_bytes()
        with self.lock:
            return TierStats(name=self.name, budget_bytes=self.budget_bytes, held_bytes=held_bytes, **read_counts(self.counts))

    def close(self) -> None:
        """End threads, and give the buffers back. Waits for records that are being written, without the lock. Idempotent.

        After an interrupt the next call waits for them. Raises: ValueError while transfers are under way.
        """
        with self.lock:
            check_returned(self.name, self._num_lent)
            self._ending, self._threads = self._threads or self._ending, None
        if self._ending is not None:
            self._ending.shutdown(wait=True)
            with self.lock:
                memory, self._memory, self._buffers, self._ending = self._memory, None, [], None
            del memory  # without the lock: unpinning takes its time

    def _read(self, key: bytes, address: int) -> None:
        try:
            self.read(key, self._view(address))
        except MissedError:
            self._count("missed_records", 1)
            raise
        except BaseException:
            self._count("errors", 1)
            raise
        self._count("loaded_bytes", self.record_bytes)

    def _write(self, transfer: Transfer) -> None:
        try:
            self.write(transfer.key, self._view(transfer.address))
            self._count("stored_bytes", self.record_bytes)
        except Exception:  # whatever it is: the record is not there, and will be computed
            self._count("errors", 1)
            self.listener([transfer.key], False)
        finally:
            self.give_back(transfer)
            with self.lock:
                self._num_writes -= 1
                self._written.notify_all()

    def flush(self, timeout_s: float = math.inf) -> bool:
        """Wait until all that was stored so far is written, or has failed; False if the time is over first."""
        with self.lock:
            return self._written.wait_for(lambda: not self._num_writes, min(timeout_s, threading.TIMEOUT_MAX))

    def _view(self, address: int) -> memoryview:
        assert self._memory is not None, "a transfer is of an open tier"
        at = address - self._memory.data_ptr()
        return self._memory[at : at + self.record_bytes].numpy().data

    def give_back(self, transfer: Transfer) -> None:
        """Free the memory of a transfer that has ended, however it did."""
        with self.lock:
            if transfer.address:  # none was lent for what was known to miss
                self._buffers.append(transfer.address)
            if transfer.is_store:
                self._storing.discard(transfer.key)

    def _count(self, name: str, number: int) -> None:
        with self.lock:
            self.counts[name] += number


def read_counts(counts: Counter[str]) -> dict[str, int]:
    """The fields of TierStats that are counts."""
    names = "stored_bytes", "loaded_bytes", "evicted_records", "missed_records", "refused_records", "errors"
    return {name: counts[name] for name in names}
