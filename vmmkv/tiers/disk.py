"""DiskTier: records in one file of slots, with a table of what each slot holds beside it; both are preallocated.

    records   | slot 0 | slot 1 | slot 2 | ...       a record each, written with O_DIRECT where the file system takes it
    index     | header | entry 0 | entry 1 | ...     an entry has the key, generation and checksum of its slot's record

A record is written to its slot first, and its entry after. So whenever the process is killed, each entry describes what its
slot holds, or what it held before; the checksum tells which when the record is read. If two entries have one key, that of the
higher generation counts. Generations are the order in which records were written. When a tier is opened or closed all are
numbered anew, in the order of use.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import struct
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from vmmkv.arguments import whole
from vmmkv.driver.host import fallocate
from vmmkv.errors import BudgetError, TierUnavailable
from vmmkv.tier import RecordListener, Refusal, Transfer
from vmmkv.tiers.record import ALIGNMENT_BYTES, KEY_BYTES, RECORD_BYTES, checked_record_bytes, checksum_of
from vmmkv.tiers.threaded import MissedError, ThreadedTier, touch
from vmmkv.units import format_bytes

log = logging.getLogger(__name__)

_MAGIC: Final = b"vmmkv disk tier, version 2"
_HEADER_BYTES: Final = 64
_ENTRY: Final = struct.Struct(f"<Q{KEY_BYTES}sI")
"""Generation, key, and checksum of the record; a checksum of these and the slot's number follows."""

_ENTRY_BYTES: Final = 64
"""Distance from one entry to the next: none lies in two sectors."""


@dataclass(eq=False, slots=True)
class _Slot:
    """Place of a record in the file."""

    number: int
    generation: int
    checksum: int
    num_reads: int = 0
    """Reads under way; while there are any, the slot is not overwritten."""


class DiskTier(ThreadedTier):
    """A tier of `budget_bytes` of disk space in the directory `path`, for `PrefixCache(cache, tiers=[...])` or a `Store`.

    The directory is made if need be, and its space allocated at once. Records, of `record_bytes`, are found again after a
    restart, and verified when they are read. If the process is killed, only what was being written is lost. The least recently
    used record is evicted first. With a smaller budget than before, the records that were used last are kept; some are copied
    for that. One process at a time can use a path. Only the owner may read its files. Close it after its caches.
    Raises: TierUnavailable if another process uses the path, no file can be written there, or it has records of another size;
    BudgetError if it does not fit on the disk, naming what fits; OSError.
    """

    name = "disk"

    def __init__(self, path: str | os.PathLike[str], budget_bytes: int, *, record_bytes: int = RECORD_BYTES) -> None:
        num_slots = whole("budget_bytes", budget_bytes) // checked_record_bytes(record_bytes)
        if num_slots < 1:
            raise BudgetError(f"budget_bytes={budget_bytes} of a disk tier is below one record, {format_bytes(record_bytes)}")
        super().__init__(num_slots * record_bytes, record_bytes)
        self.path: Final = Path(path)
        sized = b"" if record_bytes == RECORD_BYTES else b", records of %d bytes" % record_bytes
        self._header: Final = (_MAGIC + sized).ljust(_HEADER_BYTES, b"\0")
        self._num_slots = num_slots
        self._records: OrderedDict[bytes, _Slot | None] = OrderedDict()
        """Records, the least recently used first; None for those that are being stored."""
        self._generation = 0
        self._fd = self._index_fd = -1
        _tiers.add(self)
        self._open_files()

    # what ThreadedTier asks

    def open(self, device: torch.device) -> None:
        """Get ready for copies. A tier that was closed finds its records again. Raises: as the constructor; see Tier.open."""
        with self.lock:
            if self._fd < 0:
                self._open_files()
        super().open(device)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up which of these records the tier has; a use of them. See Tier.lookup."""
        with self.lock:
            return touch(self._records, self._storing, keys)

    def held_bytes(self) -> int:
        """Bytes of the slots that are taken."""
        return (self._num_slots - len(self._free)) * self.record_bytes

    def store(self, key: bytes) -> Transfer | Refusal:
        """Lend a buffer for a record's bytes, or say why not. The record counts as used now, not when it is written."""
        transfer = super().store(key)
        if isinstance(transfer, Transfer):
            with self.lock:
                self._records.setdefault(key)
        return transfer

    def give_back(self, transfer: Transfer) -> None:
        """Free the buffer of a transfer that has ended, and forget a record that was not stored."""
        with self.lock:
            if transfer.is_store and self._records.get(transfer.key, transfer) is None:
                del self._records[transfer.key]
        super().give_back(transfer)

    def write(self, key: bytes, data: memoryview) -> None:
        """Write a record to a slot, then its entry to the index; called from a thread. On failure the slot is free again."""
        with self.lock:
            if self._records.get(key) is not None:
                return
            number = self._take_slot()
        try:
            checksum = checksum_of(key, data)
            self.write_at(self._fd, data, number * self.record_bytes)
            with self.lock:
                self._generation += 1
                slot = _Slot(number, self._generation, checksum)
            self.write_at(self._index_fd, memoryview(_packed(key, slot)), _entry_at(number))
            with self.lock:
                self._records[key] = slot
                self.listener([key], True)
        except BaseException:
            with self.lock:
                self._free.append(number)
            raise

    def read(self, key: bytes, data: memoryview) -> None:
        """Fill `data` from the record's slot; called from a thread.

        Raises: MissedError if it is not there; OSError if its checksum is wrong, after which it is dropped.
        """
        with self.lock:
            slot = self._records.get(key)
            if slot is None:
                raise MissedError(key.hex())
            slot.num_reads += 1
        is_right = False
        try:
            self.read_at(self._fd, data, slot.number * self.record_bytes)
            is_right = checksum_of(key, data) == slot.checksum
        finally:
            with self.lock:
                slot.num_reads -= 1
                if not is_right and not slot.num_reads and self._records.get(key) is slot:
                    del self._records[key]
                    self._free.append(slot.number)
                    self.listener([key], False)
        if not is_right:
            raise OSError(errno.EIO, f"{self.path}: slot {slot.number} does not hold what was written there")

    def listen(self, listener: RecordListener) -> None:
        """Tell one listener which records there are, and then of each that is kept, goes, or could not be stored."""
        with self.lock:
            self.listener = listener
            listener([key for key, slot in self._records.items() if slot is not None], True)

    def close(self) -> None:
        """Write the index, and give memory and files back. Idempotent. Raises: ValueError while transfers are under way."""
        super().close()
        with self.lock:
            if self._fd >= 0:
                self._write_index()
        self._close_files()

    # files

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data`. Raises OSError, also where the file system takes a part only."""
        written = 0
        while written < len(data):
            count = os.pwrite(fd, data[written:], offset + written)
            if count == 0 or (written + count < len(data) and count % ALIGNMENT_BYTES):
                raise OSError(errno.EIO, f"{self.path}: {written + count} of {len(data)} bytes could be written")
            written += count

    def read_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Fill all of `data`. Raises OSError, also where the file is shorter."""
        count = 0
        while count < len(data):
            more = os.preadv(fd, [data[count:]], offset + count)
            count += more
            if more == 0 or (count < len(data) and more % ALIGNMENT_BYTES):
                raise OSError(errno.EIO, f"{self.path}: {count} of {len(data)} bytes could be read")

    def _open_files(self) -> None:
        """Take the path, and find the records that are there."""
        try:
            self._fd = self._open_file("records")
            self._lock_path()
            self._index_fd = self._open_file("index")
            self._check_record_bytes()
            self._allocate()
            self._use_direct_io()
            self._read_index()
            self._shorten()
            self._write_index()
        except BaseException:
            self._close_files()
            raise

    def _lock_path(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierUnavailable(
                f"{self.path} is another process's disk tier, or another tier's of this one; give each a path of its own, or "
                "end the other"
            ) from None

    def _check_record_bytes(self) -> None:
        header = os.pread(self._index_fd, _HEADER_BYTES, 0)
        found = re.fullmatch(_MAGIC + rb"(?:, records of (\d+) bytes)?\0*", header)
        if found is not None and (there := int(found[1] or RECORD_BYTES)) != self.record_bytes:
            raise TierUnavailable(
                f"{self.path} has records of {there} bytes, and record_bytes={self.record_bytes}; give record_bytes={there}, "
                "or another directory"
            )

    def _open_file(self, name: str) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierUnavailable(
                f"no disk tier can be in {self.path}: {error.strerror}; name a directory that this user can make and write to"
            ) from error

    def _allocate(self) -> None:
        """Take the disk space of both files. On failure the records stay as they were.

        A restart takes no more, so it does not fail on a disk that has become full.
        """
        sizes = {self._fd: self.budget_bytes, self._index_fd: _entry_at(self._num_slots)}
        before = {fd: os.fstat(fd) for fd in sizes}
        try:
            for fd, size_bytes in sizes.items():
                _take(fd, size_bytes)
            for fd, size_bytes in sizes.items():
                os.ftruncate(fd, max(size_bytes, before[fd].st_size))
        except OSError as error:
            for fd, stat in before.items():
                os.ftruncate(fd, stat.st_size)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            disk = os.statvfs(self.path)
            taken_bytes = sum(stat.st_blocks * 512 for stat in before.values())
            most_bytes = (disk.f_bavail * disk.f_frsize + taken_bytes) * 95 // 100 // self.record_bytes * self.record_bytes
            raise BudgetError(
                f"a disk tier of {format_bytes(self.budget_bytes)} does not fit in {self.path}: {error.strerror}; at most "
                f"budget_bytes={most_bytes} ({format_bytes(most_bytes)}) works"
            ) from None

    def _use_direct_io(self) -> None:
        """Read and write past the page cache, if the file system takes that: the host's memory is the host tier's."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [mmap.mmap(-1, ALIGNMENT_BYTES)], 0)  # some refuse only this, or ask for more alignment
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)

    def _close_files(self) -> None:
        for fd in (self._index_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._index_fd = self._fd = -1

    # the index

    def _read_index(self) -> None:
        """Find the records that are there. The log says what is damaged; `_write_index` leaves it out."""
        self._records.clear()
        num_slots, num_damaged, found = os.fstat(self._fd).st_size // self.record_bytes, 0, []
        with open(self.path / "index", "rb") as index:
            if (header := index.read(_HEADER_BYTES)) != self._header:
                if any(header):
                    log.warning("%s: its index is damaged, or of another version: the tier begins empty", self.path)
                return
            for number in range(num_slots):
                entry = index.read(_ENTRY_BYTES)
                if (known := _entry(number, entry)) is not None:
                    found.append(known)
                elif any(entry):
                    num_damaged += 1
        if num_damaged:
            log.warning("%s: %d entries of its index are damaged; their records are lost", self.path, num_damaged)
        for key, slot in sorted(found, key=lambda entry: entry[1].generation):
            self._records.pop(key, None)
            self._records[key] = slot

    def _shorten(self) -> None:
        """Keep the records that were used last, as many as the budget has slots for, and give back the space of the others.

        A path is stored and looked up from its end: what is left of it is its beginning, with which a hit begins. What lies
        behind the last slot is moved to slots before it, and its entry is written there after it: if the process is killed,
        the next one does the rest. What cannot be read is lost.
        """
        for _ in range(len(self._records) - self._num_slots):
            self._records.popitem(last=False)
        found = [(key, slot) for key, slot in self._records.items() if slot is not None]
        taken = {slot.number for _, slot in found}
        self._free = [number for number in reversed(range(self._num_slots)) if number not in taken]
        data = memoryview(mmap.mmap(-1, self.record_bytes))
        for key, slot in found:
            if slot.number < self._num_slots:
                continue
            moved = _Slot(self._free.pop(), slot.generation, slot.checksum)
            try:
                self.read_at(self._fd, data, slot.number * self.record_bytes)
                self.write_at(self._fd, data, moved.number * self.record_bytes)
                self.write_at(self._index_fd, memoryview(_packed(key, moved)), _entry_at(moved.number))
                self._records[key] = moved
            except OSError:
                self._free.append(moved.number)
                del self._records[key]
        os.ftruncate(self._fd, self.budget_bytes)
        os.ftruncate(self._index_fd, _entry_at(self._num_slots))

    def _write_index(self) -> None:
        """Write the whole index anew, with generations from 1 in the order of use, which this process alone knows.

        The caller holds the lock, or is alone. If the process is killed meanwhile, or the disk takes no more, some entries stay
        as they were: as good, in another order.
        """
        content = bytearray(self._header.ljust(_entry_at(self._num_slots), b"\0"))
        self._generation = 0
        for key, slot in self._records.items():
            if slot is not None:
                self._generation = slot.generation = self._generation + 1
                content[_entry_at(slot.number) : _entry_at(slot.number + 1)] = _packed(key, slot)
        with contextlib.suppress(OSError):
            self.write_at(self._index_fd, memoryview(content), 0)

    def _take_slot(self) -> int:
        """A slot to write to; the least recently used record makes room. Raises OSError if all are being read."""
        if self._free:
            return self._free.pop()
        key, slot = next(((key, slot) for key, slot in self._records.items() if slot and not slot.num_reads), (b"", None))
        if slot is None:
            self.counts["refused_records"] += 1
            raise OSError(errno.ENOSPC, f"{self.path}: every record is being read")
        self.counts["evicted_records"] += 1
        self.listener([key], False)
        del self._records[key]
        return slot.number

    def __repr__(self) -> str:
        return f"<DiskTier at {self.path}: {format_bytes(self.held_bytes())} of {format_bytes(self.budget_bytes)}>"


_tiers: Final[weakref.WeakSet[DiskTier]] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close files after fork(): a child with one open would keep its lock, also when its parent is gone."""
    for tier in list(_tiers):
        tier._close_files()


os.register_at_fork(after_in_child=_close_in_child)


def _take(fd: int, size_bytes: int) -> None:
    """Take a file's disk space; where the file system cannot, a write finds out that the disk is full."""
    try:
        fallocate(fd, 0, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def _entry_at(number: int) -> int:
    """Offset of a slot's entry in the index."""
    return _HEADER_BYTES + number * _ENTRY_BYTES


def _packed(key: bytes, slot: _Slot) -> bytes:
    fields = _ENTRY.pack(slot.generation, key, slot.checksum)
    return (fields + _own_checksum(slot.number, fields)).ljust(_ENTRY_BYTES, b"\0")


def _own_checksum(number: int, fields: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(fields, number))


def _entry(number: int, entry: bytes) -> tuple[bytes, _Slot] | None:
    """Key and slot of an entry of the index; None for one that is not whole."""
    fields = entry[: _ENTRY.size]
    if entry[_ENTRY.size :] != _own_checksum(number, fields).ljust(_ENTRY_BYTES - _ENTRY.size, b"\0"):
        return None
    generation, key, checksum = _ENTRY.unpack(fields)
    return key, _Slot(number, generation, checksum)
