"""Tiers that fail.

FaultyTier   is slow, has to find out what it has, forgets, refuses, lies, or raises, by turns; with chance 1 it is gone
FaultyDisk   writes are torn or refused, reads are short or wrong
FaultyStore  is full, does not answer, or gives wrong records

And an entry of a disk tier's index, as a tier or a damaged file has it.
"""

import errno
import random
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from vmmkv.tier import Refusal
from vmmkv.tiers import DiskTier, Tier, TierStats, Transfer
from vmmkv.tiers.shared import Refused, SharedTier
from vmmkv.tiers.threaded import MissedError, missed

FAULTS = ("slow", "asks", "forgets", "refuses", "lies", "raises")


class Gone(Exception):
    """A tier whose store does not answer."""


class FaultyTier:
    """Another tier, with faults that `haste` and `faults` decide; without any it is that tier."""

    def __init__(self, tier: Tier, seed: int, faults: Sequence[str] = FAULTS, *, chance: float = 0.2) -> None:
        self.name, self.record_bytes = f"faulty {tier.name}", tier.record_bytes
        self.tier = tier
        self.faults = set(faults)
        self.chance = chance
        self.lent: set[Transfer] = set()
        """What the caller has neither finished nor dropped."""
        self._random = random.Random(seed)
        self._late: list[tuple[Transfer, Future[None] | None]] = []

    def strikes(self, fault: str) -> bool:
        return fault in self.faults and self._random.random() < self.chance

    def advance(self) -> None:
        """Time passes: slow loads come, in any order."""
        self._random.shuffle(self._late)
        for _ in range(self._random.randint(0, len(self._late))):
            self._arrive()

    def come(self, count: int) -> None:
        """So many of the slow loads come, the oldest ones."""
        self._late.reverse()
        for _ in range(count):
            self._arrive()

    def hurry(self) -> None:
        """All of them come."""
        while self._late:
            self._arrive()

    def _arrive(self) -> None:
        transfer, future = self._late.pop()
        promise, transfer.future = transfer.future, future
        if promise is not None and not promise.done():
            promise.set_result(None)

    def open(self, device: torch.device) -> None:
        self.tier.open(device)

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        if self.strikes("raises"):
            raise Gone
        if self.strikes("asks"):
            return None
        found = self.tier.lookup(keys)
        return found and [has != self.strikes("lies") for has in found]

    def store(self, key: bytes) -> Transfer | Refusal:
        if self.strikes("raises"):
            raise Gone
        transfer = Refusal.NOT_NOW if self.strikes("refuses") else self.tier.store(key)
        if isinstance(transfer, Transfer):
            self.lent.add(transfer)
        return transfer

    def load(self, key: bytes) -> Transfer | None:
        if self.strikes("raises"):
            raise Gone
        if self.strikes("refuses"):
            return None
        if self.strikes("forgets"):
            return missed(key)
        transfer = self.tier.load(key)
        if transfer is not None:
            self.lent.add(transfer)
            if self.strikes("slow"):
                self._late.append((transfer, transfer.future))
                transfer.future = Future()
        return transfer

    def finished(self, transfer: Transfer) -> None:
        if transfer.is_store and self.strikes("forgets"):
            self.drop(transfer)
            return
        self.lent.discard(transfer)
        self.tier.finished(transfer)

    def drop(self, transfer: Transfer) -> None:
        self.lent.discard(transfer)
        late = [each for each in self._late if each[0] is transfer]
        for each in late:
            self._late.remove(each)
            transfer.future = each[1]
        self.tier.drop(transfer)

    def flush(self, timeout_s: float) -> bool:
        return self.tier.flush(timeout_s)

    def stats(self) -> TierStats:
        if self.strikes("raises"):
            raise Gone
        return self.tier.stats()

    def close(self) -> None:
        self.tier.close()


DISK_FAULTS = ("full", "error", "torn", "silently torn", "index torn", "gone", "short", "corrupted")


class FaultyDisk(DiskTier):
    """A disk that fails: `fault` is what happens to the next writes and reads of records."""

    fault: str | None = None

    def write_at(self, fd, data, offset):
        if fd == self._fd and self.fault in ("full", "error"):
            raise OSError(errno.ENOSPC if self.fault == "full" else errno.EIO, "injected")
        if fd == self._fd and self.fault == "torn":
            super().write_at(fd, data[: len(data) // 2], offset)
            raise OSError(errno.EIO, "injected")
        if fd == self._fd and self.fault == "silently torn":
            data = data[: len(data) // 2]
        if fd == self._index_fd and self.fault == "index torn":
            super().write_at(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "injected")
        super().write_at(fd, data, offset)

    def read_at(self, fd, data, offset):
        if self.fault == "gone":
            raise OSError(errno.EIO, "injected")
        if self.fault == "short":
            data = data[: len(data) // 2]
        super().read_at(fd, data, offset)
        if self.fault == "short":
            raise OSError(errno.EIO, "injected")
        if self.fault == "corrupted":
            data[len(data) // 3] ^= 1


def index_entry(number: int, generation: int, key: bytes, checksum: int, *, is_whole: bool = True) -> tuple[int, bytes]:
    """Where a slot's entry is in the index of a disk tier, and its 64 bytes; with a wrong checksum if it is not whole."""
    fields = struct.pack("<Q32sI", generation, key, checksum)
    own = zlib.crc32(fields, number if is_whole else number + 1)
    return 64 + 64 * number, (fields + struct.pack("<I", own)).ljust(64, b"\0")


STORE_FAULTS = ("full", "gone", "short", "corrupted", "another's")


class FaultyStore(SharedTier):
    """A dictionary of at most `most` values: `fault` is what happens to the next calls."""

    name = "store"
    fault: str | None = None

    def __init__(self, most):
        super().__init__("a dictionary", timeout_s=60.0)
        self.most = most
        self.values = {}

    def ask(self, names):
        self.answer()
        return [name in self.values for name in names]

    def get(self, name):
        self.answer()
        if name not in self.values:
            raise MissedError
        value = bytearray(self.values[name])
        if self.fault == "corrupted":
            value[len(value) // 3] ^= 1
        if self.fault == "another's":
            value[:] = random.Random(name).choice([*self.values.values()])
        return value[: len(value) // 2] if self.fault == "short" else value

    def put(self, name, header, record):
        self.answer()
        if self.fault == "full":
            raise Refused
        self.values[name] = header + record
        if len(self.values) > self.most:
            del self.values[next(iter(self.values))]

    def remove(self, name):
        self.answer()
        self.values.pop(name, None)

    def answer(self):
        if self.fault == "gone":
            raise ConnectionError("injected")
