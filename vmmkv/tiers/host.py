"""HostTier: records in pinned host memory, copied by the device's own engines."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv.arguments import whole
from vmmkv.driver.host import HEADROOM_BYTES, HostMemory
from vmmkv.driver.pinned import host_memory
from vmmkv.errors import BudgetError
from vmmkv.tier import RecordListener, Refusal, TierStats, Transfer
from vmmkv.tiers.record import RECORD_BYTES, checked_record_bytes
from vmmkv.tiers.threaded import check_returned, missed, read_counts, touch
from vmmkv.units import format_bytes


@dataclass(eq=False, slots=True)
class _Held:
    address: int
    num_copies: int
    """Copies under way, from and to it; while there are any it is not evicted."""


class HostTier:
    """A tier of `budget_bytes` of host memory, for `PrefixCache(cache, tiers=[...])` or a `Store`.

    All memory is allocated when the first cache opens the tier, pinned if that is on a GPU. A record has `record_bytes`, 2 MiB
    for a PrefixCache; the least recently used one is evicted first. Close the tier after its caches. Errors call the budget
    `budget_name`.
    Cost: pinning takes 0.3 s for each GiB, once; a call takes a microsecond for each record.
    Raises: BudgetError for a budget below one record, or above the memory that this process may take, naming what fits.
    """

    name = "host"

    def __init__(self, budget_bytes: int, *, record_bytes: int = RECORD_BYTES, budget_name: str = "budget_bytes") -> None:
        self.record_bytes = checked_record_bytes(record_bytes)
        self.budget_bytes: Final = whole(budget_name, budget_bytes) // record_bytes * record_bytes
        self._budget_name: Final = budget_name
        if self.budget_bytes <= 0:
            raise BudgetError(f"{budget_name}={budget_bytes} of host memory is below one record, {format_bytes(record_bytes)}")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._free: list[int] = []
        """Addresses of free memory, taken from the end: paths are stored from their ends, and one copy moves neighbours."""
        self._records: OrderedDict[bytes, _Held] = OrderedDict()
        """Records, the least recently used first, among them those that are being stored."""
        self._storing: set[bytes] = set()
        self.listener: RecordListener = lambda keys, is_held: None

    def open(self, device: torch.device) -> None:
        """Allocate the memory of the budget, once; it is pinned on a GPU. Raises: BudgetError, naming the budget that works."""
        with self._lock:
            if self._memory is not None:
                return
            free_bytes = HostMemory().read().free_bytes
            most_bytes = max(0, free_bytes - HEADROOM_BYTES) // self.record_bytes * self.record_bytes
            if self.budget_bytes > most_bytes:
                raise BudgetError(
                    f"a host tier of {format_bytes(self.budget_bytes)} does not fit: this process, in its control group, may "
                    f"take {format_bytes(free_bytes)}; at most {self._budget_name}={most_bytes} ({format_bytes(most_bytes)}) "
                    "works"
                )
            memory = host_memory(self.budget_bytes, device)
            first = memory.data_ptr()
            self._free = [*range(first, first + self.budget_bytes, self.record_bytes)]
            self._memory = memory  # last: by it the tier is open

    @property
    def address(self) -> int:
        """Address of its memory; 0 before it is opened."""
        return 0 if self._memory is None else self._memory.data_ptr()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up which of these records the tier has; a use of them. See Tier.lookup."""
        with self._lock:
            return touch(self._records, self._storing, keys)

    def store(self, key: bytes) -> Transfer | Refusal:
        """Lend memory for a record's bytes, or say why not. It evicts the least recently used record if none is free."""
        with self._lock:
            if key in self._records:
                return Refusal.THERE
            if not self._free and not self._evict():
                self._counts["refused_records"] += 1
                return Refusal.NO_ROOM
            self._storing.add(key)
            self._records[key] = _Held(self._free.pop(), num_copies=1)
            return Transfer(key, True, self._records[key].address)

    def load(self, key: bytes) -> Transfer | None:
        """Lend the memory of a record, to be copied from; a miss if it is not there. The transfer has ended at once."""
        with self._lock:
            held = self._records.get(key)
            if held is None or key in self._storing:
                self._counts["missed_records"] += 1
                return missed(key)
            held.num_copies += 1
            return Transfer(key, False, held.address)

    def finished(self, transfer: Transfer) -> None:
        """End a transfer: a stored record is kept, and a loaded one can be evicted again."""
        with self._lock:
            if not transfer.address:
                return
            self._records[transfer.key].num_copies -= 1
            self._counts["stored_bytes" if transfer.is_store else "loaded_bytes"] += self.record_bytes
            if transfer.is_store:
                self._storing.remove(transfer.key)
                self.listener([transfer.key], True)

    def drop(self, transfer: Transfer) -> None:
        """Give a transfer up. A record that was being stored is forgotten, and its memory is free."""
        with self._lock:
            if transfer.is_store:
                self._storing.remove(transfer.key)
                self._free.append(self._records.pop(transfer.key).address)
                self.listener([transfer.key], False)
            elif transfer.address:
                self._records[transfer.key].num_copies -= 1

    def listen(self, listener: RecordListener) -> None:
        """Tell one listener which records there are, and then of each that is kept, goes, or could not be stored."""
        with self._lock:
            self.listener = listener
            listener([key for key in self._records if key not in self._storing], True)

    def flush(self, timeout_s: float) -> bool:
        """Wait for nothing: a stored record is kept at once. Always True."""
        return True

    def stats(self) -> TierStats:
        """Counts of the tier at this moment."""
        with self._lock:
            held_bytes = (len(self._records) - len(self._storing)) * self.record_bytes
            return TierStats(name=self.name, budget_bytes=self.budget_bytes, held_bytes=held_bytes, **read_counts(self._counts))

    def close(self) -> None:
        """Give the memory back, with all records. Idempotent. Raises: ValueError while transfers are under way."""
        with self._lock:
            check_returned(self.name, sum(held.num_copies for held in self._records.values()))
            self._records.clear()
            self._free.clear()
            memory, self._memory = self._memory, None
        del memory  # without the lock: unpinning takes its time

    def _evict(self) -> bool:
        """Free the memory of the least recently used record that is not being copied; False if there is none."""
        key = next((key for key, held in self._records.items() if not held.num_copies), None)
        if key is None:
            return False
        self._free.append(self._records.pop(key).address)
        self.listener([key], False)
        self._counts["evicted_records"] += 1
        return True

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<HostTier: {format_bytes(stats.held_bytes)} of {format_bytes(stats.budget_bytes)}>"
