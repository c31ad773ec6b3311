"""DiskTier: records in one preallocated file of slots, with an append-only index beside it.

    records   | slot 0 | slot 1 | slot 2 | ...       2 MiB each, written with O_DIRECT where the file system takes it
    index     | header | entry | entry | ...         an entry names slot, key, generation and checksum of a record

A record is written to its slot first and entered in the index after. Of the entries of one slot, or of one key, that of the
highest generation counts. So whenever the process is killed, each entry describes what its slot holds, or what it held before;
the checksum tells which when the record is read.
"""

import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmmkv.arguments import whole
from vmmkv.driver.host import fallocate
from vmmkv.errors import BudgetError, TierUnavailable
from vmmkv.tiers.record import KEY_BYTES, RECORD_BYTES
from vmmkv.tiers.tier import MissedError, ThreadedTier, touch
from vmmkv.units import format_bytes

_HEADER: Final = b"vmmkv disk tier, version 1".ljust(64, b"\0")
_ENTRY: Final = struct.Struct(f"<IQ{KEY_BYTES}sII")
"""Slot, generation, key, checksum of the record, and the checksum of these."""

_ALIGNMENT_BYTES: Final = 4096
"""Of memory, offsets and sizes, for O_DIRECT."""

_SLACK_ENTRIES: Final = 1024
"""Superseded entries, beyond twice the slots, before the index is written anew."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A record's place."""

    number: int
    generation: int
    checksum: int
    num_reads: int = 0
    """Under way: it is not overwritten."""


class DiskTier(ThreadedTier):
    """Up to `budget_bytes` of records in the directory `path`, which is made. They are found again after a restart.

    Each record is verified when it is read. If the process is killed, what was being written is lost and nothing else. The
    least recently used record goes first. One process at a time uses a path. Only their owner may read its files.
    Raises: TierUnavailable if another process uses the path; BudgetError if it does not fit on the disk, naming what fits;
    OSError.
    """

    name = "disk"

    def __init__(self, path: str | os.PathLike[str], budget_bytes: int, *, num_threads: int = 4) -> None:
        num_slots = whole("budget_bytes", budget_bytes) // RECORD_BYTES
        if num_slots < 1:
            raise BudgetError(f"budget_bytes={budget_bytes} of a disk tier is below one record, {format_bytes(RECORD_BYTES)}")
        super().__init__(num_slots * RECORD_BYTES, num_threads=num_threads)
        self.path: Final = Path(path)
        self._num_slots = num_slots
        self._records: OrderedDict[bytes, _Slot] = OrderedDict()
        """The least recently used first."""
        self._generation = 0
        self._index_lock = threading.Lock()
        """Taken before `lock`: an entry may wait for the disk, and what is known does not."""
        self._fd = self._index_fd = -1
        self._index_end = 0
        self._compacting = False
        _tiers.add(self)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path / "records", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock_path()
            self._allocate()
            self._use_direct_io()
            self._read_index()
        except BaseException:
            self._close_files()
            raise
        taken = {slot.number for slot in self._records.values()}
        self._free = [number for number in reversed(range(num_slots)) if number not in taken]

    # what ThreadedTier asks

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """See Tier.lookup."""
        with self.lock:
            return touch(self._records, keys)

    def held_bytes(self) -> int:
        """See ThreadedTier.held_bytes."""
        return len(self._records) * RECORD_BYTES

    def write(self, key: bytes, data: memoryview) -> None:
        """See ThreadedTier.write."""
        with self.lock:
            if key in self._records:
                return
            number = self._take_slot()
        try:
            checksum = _checksum(key, data)
            self.write_at(self._fd, data, number * RECORD_BYTES)
            with self._index_lock:
                slot = _Slot(number, self._generation + 1, checksum)
                entry = _packed(key, slot)
                self.write_at(self._index_fd, memoryview(entry), self._index_end)
                self._index_end += len(entry)
                self._generation += 1
                with self.lock:
                    self._records[key] = slot
        except BaseException:
            with self.lock:
                self._free.append(number)
            raise
        self._compact_if_due()

    def read(self, key: bytes, data: memoryview) -> None:
        """See ThreadedTier.read."""
        with self.lock:
            slot = self._records.get(key)
            if slot is None:
                raise MissedError(key.hex())
            slot.num_reads += 1
            self._records.move_to_end(key)
        is_right = False
        try:
            self.read_at(self._fd, data, slot.number * RECORD_BYTES)
            is_right = _checksum(key, data) == slot.checksum
        finally:
            with self.lock:
                slot.num_reads -= 1
                if not is_right and not slot.num_reads and self._records.get(key) is slot:
                    del self._records[key]
                    self._free.append(slot.number)
        if not is_right:
            raise OSError(errno.EIO, f"{self.path}: slot {slot.number} does not hold what was written there")

    def close(self) -> None:
        """See Tier.close."""
        super().close()
        self._close_files()

    # files

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data`. Raises OSError, also where the file system takes a part only."""
        written = 0
        while written < len(data):
            count = os.pwrite(fd, data[written:], offset + written)
            if count == 0 or (written + count < len(data) and count % _ALIGNMENT_BYTES):
                raise OSError(errno.EIO, f"{self.path}: {written + count} of {len(data)} bytes could be written")
            written += count

    def read_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Fill all of `data`. Raises OSError, also where the file is shorter."""
        count = 0
        while count < len(data):
            more = os.preadv(fd, [data[count:]], offset + count)
            count += more
            if more == 0 or (count < len(data) and more % _ALIGNMENT_BYTES):
                raise OSError(errno.EIO, f"{self.path}: {count} of {len(data)} bytes could be read")

    def _lock_path(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierUnavailable(
                f"{self.path} is another process's disk tier, or another tier's of this one; give each a path of its own, or "
                "end the other"
            ) from None

    def _allocate(self) -> None:
        """Take the disk space of all slots, or give back what is beyond them. On failure the records stay as they were."""
        before = os.fstat(self._fd)
        try:
            fallocate(self._fd, 0, 0, self.budget_bytes)
            os.ftruncate(self._fd, self.budget_bytes)
        except OSError as error:
            os.ftruncate(self._fd, before.st_size)
            if error.errno == errno.EOPNOTSUPP:  # then a write finds out that the disk is full
                os.ftruncate(self._fd, self.budget_bytes)
                return
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            disk = os.statvfs(self.path)
            most_bytes = (disk.f_bavail * disk.f_frsize + before.st_blocks * 512) * 95 // 100 // RECORD_BYTES * RECORD_BYTES
            raise BudgetError(
                f"a disk tier of {format_bytes(self.budget_bytes)} does not fit in {self.path}: {error.strerror}; at most "
                f"budget_bytes={most_bytes} ({format_bytes(most_bytes)}) works"
            ) from None

    def _use_direct_io(self) -> None:
        """Read and write past the page cache, if the file system takes that: the host's memory is the host tier's."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [mmap.mmap(-1, _ALIGNMENT_BYTES)], 0)  # some refuse only this, or ask for more alignment
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)

    def _close_files(self) -> None:
        for fd in (self._index_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._index_fd = self._fd = -1

    # the index

    def _read_index(self) -> None:
        """Find the records that are there. An index that is not ours, or of another version, is begun anew."""
        self._index_fd = os.open(self.path / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        content = (self.path / "index").read_bytes()
        entries = sorted(_entries(content), key=lambda entry: entry[1].generation)
        by_slot: dict[int, bytes] = {}
        for key, slot in entries:  # the later one takes the slot, and the key
            if slot.number < self._num_slots:
                if (other := by_slot.get(slot.number)) is not None:
                    self._records.pop(other, None)
                if (before := self._records.pop(key, None)) is not None:
                    del by_slot[before.number]
                by_slot[slot.number] = key
                self._records[key] = slot
        self._generation = max((slot.generation for _, slot in entries), default=0)
        self._compact()

    def _compact_if_due(self) -> None:
        most_bytes = len(_HEADER) + (2 * self._num_slots + _SLACK_ENTRIES) * _ENTRY.size
        with self._index_lock:
            if self._compacting or self._index_end <= most_bytes:
                return
            self._compacting = True
        try:
            self._compact()
        finally:
            self._compacting = False

    def _compact(self) -> None:
        """Write the index anew, with the entries that count. The old one stays until the new one is whole."""
        with self._index_lock, self.lock:
            records, seen_end = list(self._records.items()), self._index_end
        new = self.path / "index.new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            content = b"".join([_HEADER, *(_packed(key, slot) for key, slot in records)])
            self.write_at(fd, memoryview(content), 0)
            os.fsync(fd)
            with self._index_lock:
                since = os.pread(self._index_fd, self._index_end - seen_end, seen_end)  # entered meanwhile
                self.write_at(fd, memoryview(since), len(content))
                os.replace(new, self.path / "index")
                os.close(self._index_fd)
                self._index_fd, self._index_end = fd, len(content) + len(since)
        except BaseException:
            os.close(fd)
            raise

    def _take_slot(self) -> int:
        """A slot to write to; the least recently used record makes room. Raises OSError if all are being read."""
        if self._free:
            return self._free.pop()
        key = next((key for key, slot in self._records.items() if not slot.num_reads), None)
        if key is None:
            self.counts["refused_records"] += 1
            raise OSError(errno.ENOSPC, f"{self.path}: every record is being read")
        self.counts["evicted_records"] += 1
        return self._records.pop(key).number

    def __repr__(self) -> str:
        return f"<DiskTier at {self.path}: {format_bytes(self.held_bytes())} of {format_bytes(self.budget_bytes)}>"


_tiers: Final[weakref.WeakSet[DiskTier]] = weakref.WeakSet()


def _close_in_child() -> None:
    """After fork(): a child that kept the file open would keep its lock, also when its parent is gone."""
    for tier in list(_tiers):
        tier._close_files()


os.register_at_fork(after_in_child=_close_in_child)


def _checksum(key: bytes, data: Iterable[int]) -> int:
    """Of a record under its key: another record in its slot does not pass for it."""
    return zlib.crc32(data, zlib.crc32(key))  # type: ignore[arg-type]


def _packed(key: bytes, slot: _Slot) -> bytes:
    fields = _ENTRY.pack(slot.number, slot.generation, key, slot.checksum, 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


def _entries(content: bytes) -> Iterator[tuple[bytes, _Slot]]:
    """The entries of an index that are whole."""
    if not content.startswith(_HEADER):
        return
    whole_bytes = (len(content) - len(_HEADER)) // _ENTRY.size * _ENTRY.size
    for at in range(len(_HEADER), len(_HEADER) + whole_bytes, _ENTRY.size):
        number, generation, key, checksum, own = _ENTRY.unpack_from(content, at)
        if zlib.crc32(content[at : at + _ENTRY.size - 4]) == own:
            yield key, _Slot(number, generation, checksum)
