"""DiskTier: records in one file of slots, with a table of what each slot holds beside it; all files are preallocated.

    records   | slot 0 | slot 1 | slot 2 | ...       a record each, written with O_DIRECT where the file system takes it
    index     | header | entry 0 | entry 1 | ...     an entry has the key, generation and checksum of its slot's record
    shared    what the processes that have the tier open tell each other: see `SharedSlots`
    host      the host of these processes: by a network file system, others would not see their changes

To overwrite a record, its entry is cleared; then the slot is written, and its new entry last. So whenever a process is killed,
each entry describes what its slot holds; the checksum tells it when the record is read. If two entries have one key, that of
the higher generation counts. Generations are the order in which records were written. When the first process opens a tier, and
when the last one closes it, all are numbered anew, in the order of use.
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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from vmmkv.arguments import whole
from vmmkv.errors import BudgetError, TierUnavailable
from vmmkv.tier import RecordListener, Refusal, Transfer
from vmmkv.tiers.answering import Answering
from vmmkv.tiers.record import ALIGNMENT_BYTES, KEY_BYTES, RECORD_BYTES, checked_record_bytes, checksum_of
from vmmkv.tiers.shared_slots import SharedSlots, allocate
from vmmkv.tiers.threaded import MissedError, ThreadedTier, missed
from vmmkv.units import format_bytes

log = logging.getLogger(__name__)

_MAGIC: Final = b"vmmkv disk tier, version 2"
_HEADER_BYTES: Final = 64
_ENTRY: Final = struct.Struct(f"<Q{KEY_BYTES}sI")
"""Generation, key, and checksum of the record; a checksum of these and the slot's number follows."""

_ENTRY_BYTES: Final = 64
"""Distance from one entry to the next: none lies in two sectors."""

_NO_ENTRY: Final = bytes(_ENTRY_BYTES)

CALL_TIMEOUT_S: Final = 10.0
"""Time after which a read or write that has not ended tells that the disk does not answer."""


@dataclass(eq=False, slots=True)
class _Slot:
    """Place of a record in the file."""

    number: int
    generation: int
    checksum: int


class DiskTier(ThreadedTier):
    """A tier of `budget_bytes` of disk space in the directory `path`, for `PrefixCache(cache, tiers=[...])` or a `Store`.

    The directory is made if need be, and its space allocated at once. Records, of `record_bytes`, are found again after a
    restart, and verified when they are read. If the process is killed, only what was being written is lost. The least recently
    used record is evicted first. With a smaller budget than before, the records that were used last are kept; some are copied
    for that. Several processes of a host can open one path, with the same budget: what one stores the others load, and the
    record that none of them has used for the longest time is evicted first. Only the owner may read the files. Close it after
    its caches. A disk of which a read or write has not ended after 10 s is left alone, until it answers again. Errors call the
    budget `budget_name`.
    Raises: TierUnavailable if no file can be written there, or a process has it open with another budget or on another host, or
    it has records of another size; BudgetError if it does not fit on the disk, naming what fits; OSError.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget_bytes: int,
        *,
        record_bytes: int = RECORD_BYTES,
        budget_name: str = "budget_bytes",
    ) -> None:
        num_slots = whole(budget_name, budget_bytes) // checked_record_bytes(record_bytes)
        if num_slots < 1:
            raise BudgetError(f"{budget_name}={budget_bytes} of a disk tier is below one record, {format_bytes(record_bytes)}")
        super().__init__(num_slots * record_bytes, record_bytes)
        self._budget_name: Final = budget_name
        self.path: Final = Path(path)
        sized = b"" if record_bytes == RECORD_BYTES else b", records of %d bytes" % record_bytes
        self._header: Final = (_MAGIC + sized).ljust(_HEADER_BYTES, b"\0")
        self._num_slots = num_slots
        self._records: dict[bytes, _Slot] = {}
        """Records of all processes, as far as this one has read their changes."""
        self._keys: dict[int, bytes] = {}
        """Key of the record in each slot that has one."""
        self._num_seen = 0
        """Changes that it has read."""
        self._last_uses: dict[bytes, int] = {}
        """Last use of each record that is being stored."""
        self._writing: set[int] = set()
        """Slots that threads of this process write to, or clear."""
        self._num_reads = Counter[int]()
        """Reads of this process that are under way, by slot; while there are any, it is not overwritten."""
        self._fd = self._index_fd = -1
        self._shared: SharedSlots | None = None
        self.answering: Final = Answering(
            f"the disk tier at {self.path}",
            CALL_TIMEOUT_S,
            probe=self._probe,
            failed=lambda: self._count("errors", 1),
        )
        _tiers.add(self)
        self._open_files()

    # what ThreadedTier asks

    def open(self, device: torch.device) -> None:
        """Get ready for copies. A tier that was closed finds its records again. Raises: as the constructor; see Tier.open."""
        with self.lock:
            if self._fd < 0:
                self._open_files()
        super().open(device)
        self.answering.begin(self.name)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up which of these records the tier has; a use of them. Raises: TierUnavailable while it is left alone."""
        self.answering.check()
        with self.lock:
            if (shared := self._shared) is not None:
                self._catch_up(shared)
                last_use = shared.now(len(keys))
                for at, key in enumerate(keys):
                    if (slot := self._records.get(key)) is not None:
                        shared.uses[slot.number] = last_use - at
                    elif key in self._last_uses:
                        self._last_uses[key] = last_use - at
            return [key in self._records and key not in self._storing for key in keys]

    def held_bytes(self) -> int:
        """Bytes of the records of all processes."""
        with self.lock:
            if self._shared is not None:
                self._catch_up(self._shared)
            return len(self._records) * self.record_bytes

    def store(self, key: bytes) -> Transfer | Refusal:
        """Lend a buffer for a record's bytes, or say why not. The record counts as used now, not when it is written."""
        transfer = super().store(key)
        if isinstance(transfer, Transfer):
            with self.lock:
                self._last_uses[key] = self._opened.now()
        return transfer

    def load(self, key: bytes) -> Transfer | None:
        """Begin to load a record into a buffer. A miss while the disk is left alone; None if no buffer is free."""
        return missed(key) if self.answering.is_left_alone else super().load(key)

    def give_back(self, transfer: Transfer) -> None:
        """Free the buffer of a transfer that has ended."""
        if transfer.is_store:
            with self.lock:
                self._last_uses.pop(transfer.key, None)
        super().give_back(transfer)

    def write(self, key: bytes, data: memoryview) -> None:
        """Write a record to a slot, then its entry to the index; called from a thread. On failure the slot is free again."""
        with self.answering.call():
            self._write_record(self._opened, key, data)

    def read(self, key: bytes, data: memoryview) -> None:
        """Fill `data` from the record's slot; called from a thread.

        Raises: MissedError if it is not there; OSError if its checksum is wrong, after which it is dropped.
        """
        with self.answering.call():
            self._read_record(self._opened, key, data)

    def _write_record(self, shared: SharedSlots, key: bytes, data: memoryview) -> None:
        number = self._take_slot(shared, key)
        if number is None:
            return
        is_kept = False
        try:
            checksum = checksum_of(key, data)
            self.write_at(self._fd, data, number * self.record_bytes)
            with shared.mutex():
                with self.lock:
                    self._catch_up(shared)
                    is_there = key in self._records  # another process has stored it meanwhile
                if not is_there:
                    slot = _Slot(number, shared.num_changes + 1, checksum)
                    self._change_entry(shared, number, _packed(key, slot))
                    with self.lock:
                        shared.uses[number] = self._last_uses.get(key, shared.now())
                    is_kept = True
        finally:
            with self.lock:
                self._writing.discard(number)
                if not is_kept:
                    shared.free(number)
                shared.release(number)

    def _read_record(self, shared: SharedSlots, key: bytes, data: memoryview) -> None:
        with self.lock:
            self._catch_up(shared)
            slot = self._records.get(key)
            if slot is None or not (self._num_reads[slot.number] or self._is_locked_for_reads(shared, key, slot)):
                raise MissedError(key.hex())
            self._num_reads[slot.number] += 1
        is_right = False
        try:
            self.read_at(self._fd, data, slot.number * self.record_bytes)
            is_right = checksum_of(key, data) == slot.checksum
        finally:
            with self.lock:
                self._num_reads[slot.number] -= 1
                if not self._num_reads[slot.number]:
                    shared.release(slot.number)
            if not is_right:
                self._forget(shared, key, slot)
        if not is_right:
            raise OSError(errno.EIO, f"{self.path}: slot {slot.number} does not hold what was written there")

    def listen(self, listener: RecordListener) -> None:
        """Tell one listener which records there are, and then of each that is kept, goes, or could not be stored."""
        with self.lock:
            if self._shared is not None:
                self._catch_up(self._shared)
            self.listener = listener
            listener(list(self._records), True)

    def close(self) -> None:
        """Give memory and files back; the last process writes the index. Idempotent.

        Raises: ValueError while transfers are under way.
        """
        super().close()
        self.answering.end()
        if (shared := self._shared) is not None:
            with shared.mutex(), self.lock:
                try:
                    if self._shared is shared and self._is_alone():
                        self._num_seen = -1  # a process may have been killed before it counted its last change
                        self._catch_up(shared)
                        self._write_index(sorted(self._records, key=lambda key: shared.uses[self._records[key].number]))
                finally:
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
            self._index_fd = self._open_file("index")
            shared = SharedSlots(self._open_file("shared"))
            self._shared = shared
            with shared.mutex():
                try:
                    if self._is_alone():
                        self._begin(shared)
                        fcntl.flock(self._fd, fcntl.LOCK_SH)  # others ask for it within the mutex alone
                    else:
                        self._join(shared)
                except BaseException:
                    self._close_files()  # before another process is let in
                    raise
        except BaseException:
            self._close_files()
            raise

    def _is_alone(self) -> bool:
        """Is this the only tier that has the path open? Then others wait for the mutex. Raises: TierUnavailable."""
        for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, how | fcntl.LOCK_NB)
                return how == fcntl.LOCK_EX
        raise TierUnavailable(
            f"{self.path} is the disk tier of an older vmmkv, which shares it with no other process; end that one"
        )

    def _begin(self, shared: SharedSlots) -> None:
        """Open the tier as the only process."""
        self._check_record_bytes()
        self._allocate()
        self._use_direct_io()
        self._read_index()
        self._shorten()
        self._host(host_now())
        shared.begin(self._num_slots, len(self._records))
        self._write_index(self._records)
        for slot in self._records.values():
            shared.uses[slot.number] = slot.generation
        self._keys = {slot.number: key for key, slot in self._records.items()}
        self._num_seen = len(self._records)

    def _join(self, shared: SharedSlots) -> None:
        """Open the tier beside other processes. Raises: TierUnavailable if theirs is another one, or on another host."""
        self._check_record_bytes()
        if self._host() != host_now():
            raise TierUnavailable(
                f"{self.path} is the disk tier of another host, over a network: hosts do not see what the others write there; "
                "name a directory of this host's own, or share a store such as redis://host"
            )
        if (there := os.fstat(self._fd).st_size) != self.budget_bytes:
            raise TierUnavailable(
                f"{self.path} is open in another process with {self._budget_name}={there}, and this one has "
                f"{self.budget_bytes}; give both the same, or another directory"
            )
        self._use_direct_io()
        shared.join()
        self._records, self._keys, self._num_seen = {}, {}, -1
        self._catch_up(shared)

    def _host(self, new: bytes | None = None) -> bytes:
        """The host whose processes have the tier open, once it is set to `new`, if that is given."""
        fd = self._open_file("host")
        try:
            if new is not None:
                os.pwrite(fd, new, 0)
            return os.pread(fd, 64, 0)
        finally:
            os.close(fd)

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
                allocate(fd, size_bytes)
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
                f"{self._budget_name}={most_bytes} ({format_bytes(most_bytes)}) works"
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
        if self._shared is not None:
            self._shared.close()
        self._shared = None

    # the index

    def _read_index(self) -> None:
        """Find the records that are there. The log says what is damaged; `_write_index` leaves it out."""
        self._records = {}
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
        self._records = dict(sorted(found, key=lambda entry: entry[1].generation))

    def _shorten(self) -> None:
        """Keep the records that were used last, as many as the budget has slots for, and give back the space of the others.

        A path is stored and looked up from its end: what is left of it is its beginning, with which a hit begins. What lies
        behind the last slot is moved to slots before it, and its entry is written there after it: if the process is killed,
        the next one does the rest. What cannot be read is lost.
        """
        for key in list(self._records)[: max(0, len(self._records) - self._num_slots)]:
            del self._records[key]
        taken = {slot.number for slot in self._records.values()}
        free = [number for number in reversed(range(self._num_slots)) if number not in taken]
        data = memoryview(mmap.mmap(-1, self.record_bytes))
        for key, slot in list(self._records.items()):
            if slot.number < self._num_slots:
                continue
            moved = _Slot(free.pop(), slot.generation, slot.checksum)
            try:
                self.read_at(self._fd, data, slot.number * self.record_bytes)
                self.write_at(self._fd, data, moved.number * self.record_bytes)
                self.write_at(self._index_fd, memoryview(_packed(key, moved)), _entry_at(moved.number))
                self._records[key] = moved
            except OSError:
                free.append(moved.number)
                del self._records[key]
        os.ftruncate(self._fd, self.budget_bytes)
        os.ftruncate(self._index_fd, _entry_at(self._num_slots))

    def _write_index(self, keys: Iterable[bytes]) -> None:
        """Write the whole index anew, with generations from 1 in the order of these keys, which is that of their last use.

        The caller is alone. If the process is killed meanwhile, or the disk takes no more, some entries stay as they were: as
        good, in another order.
        """
        content = bytearray(self._header.ljust(_entry_at(self._num_slots), b"\0"))
        for generation, key in enumerate(keys, 1):
            slot = self._records[key]
            slot.generation = generation
            content[_entry_at(slot.number) : _entry_at(slot.number + 1)] = _packed(key, slot)
        with contextlib.suppress(OSError):
            self.write_at(self._index_fd, memoryview(content), 0)

    def _probe(self) -> None:
        """Read a sector, and pass the mutex: a process that holds it may be stopped."""
        self.read_at(self._fd, memoryview(mmap.mmap(-1, ALIGNMENT_BYTES)), 0)
        with self._opened.mutex():
            pass

    # beside other processes

    @property
    def _opened(self) -> SharedSlots:
        assert self._shared is not None, "threads end before the files are closed"
        return self._shared

    def _catch_up(self, shared: SharedSlots) -> None:
        """Read the entries that have changed. The caller holds the lock."""
        if (num_changes := shared.num_changes) == self._num_seen:
            return
        numbers = shared.changed_between(self._num_seen, num_changes) if self._num_seen >= 0 else None
        self._num_seen = num_changes
        if numbers is not None:
            for number in numbers:
                self._know(number, os.pread(self._index_fd, _ENTRY_BYTES, _entry_at(number)))
        else:
            index = os.pread(self._index_fd, _entry_at(self._num_slots), 0)
            for number in range(self._num_slots):
                self._know(number, index[_entry_at(number) : _entry_at(number + 1)])

    def _know(self, number: int, entry: bytes) -> None:
        """Take note of a slot's entry, and tell the listener of what has changed. The caller holds the lock."""
        known = _entry(number, entry)
        before = self._keys.pop(number, None)
        old = None if before is None else self._records.get(before)
        if before is not None and old is not None and old.number == number:  # else it is known already to be in another slot
            if known is not None and known[0] == before and known[1].generation == old.generation:
                self._keys[number] = before
                return
            del self._records[before]
            self.listener([before], False)
        if known is not None:
            key, slot = known
            self._records[key] = slot
            self._keys[number] = key
            self.listener([key], True)

    def _change_entry(self, shared: SharedSlots, number: int, entry: bytes) -> None:
        """Write an entry within the mutex, so that all processes read it; this one at once. Raises: OSError."""
        try:
            self.write_at(self._index_fd, memoryview(entry), _entry_at(number))
        finally:
            shared.changed(number)
            with self.lock:
                self._catch_up(shared)

    def _take_slot(self, shared: SharedSlots, key: bytes) -> int | None:
        """Take a slot to write a record to, without an entry; the least recently used record makes room.

        None if the record is already there. Raises: OSError if all slots are being read or written.
        """
        with shared.mutex():
            with self.lock:
                self._catch_up(shared)
                if key in self._records:
                    return None
                number = next((each for each in shared.least_used() if self._may_write(each) and shared.take(each)), None)
                if number is None:
                    self.counts["refused_records"] += 1
                    raise OSError(errno.ENOSPC, f"{self.path}: every record is being read")
                self._writing.add(number)
                shared.uses[number] = shared.now()
                has_record = number in self._keys
                self.counts["evicted_records"] += has_record
            if has_record:
                try:
                    self._change_entry(shared, number, _NO_ENTRY)
                except BaseException:
                    with self.lock:
                        self._writing.discard(number)
                        shared.free(number)
                        shared.release(number)
                    raise
        return number

    def _may_write(self, number: int) -> bool:
        """Does no thread of this process write to a slot, or read it?"""
        return number not in self._writing and not self._num_reads[number]

    def _is_locked_for_reads(self, shared: SharedSlots, key: bytes, slot: _Slot) -> bool:
        """Lock a slot, unless it has, or will have, another record. The caller holds the lock."""
        if slot.number in self._writing or not shared.share(slot.number):
            return False
        entry = os.pread(self._index_fd, _ENTRY_BYTES, _entry_at(slot.number))
        if entry == _packed(key, slot):
            return True
        shared.release(slot.number)
        self._know(slot.number, entry)  # a process that is killed may not count its last change
        return False

    def _forget(self, shared: SharedSlots, key: bytes, slot: _Slot) -> None:
        """Clear the entry of a record that could not be read, unless it is being read still. Raises: OSError."""
        with shared.mutex():
            with self.lock:
                self._catch_up(shared)
                is_there = self._records.get(key) is slot and self._may_write(slot.number)
                if not is_there or not shared.take(slot.number):
                    return
                self._writing.add(slot.number)
            try:
                self._change_entry(shared, slot.number, _NO_ENTRY)
            finally:
                with self.lock:
                    self._writing.discard(slot.number)
                    shared.free(slot.number)
                    shared.release(slot.number)

    def __repr__(self) -> str:
        return f"<DiskTier at {self.path}: {format_bytes(self.held_bytes())} of {format_bytes(self.budget_bytes)}>"


_tiers: Final[weakref.WeakSet[DiskTier]] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close files after fork(): a child with one open would keep its lock, also when its parent is gone."""
    for tier in list(_tiers):
        tier._close_files()


os.register_at_fork(after_in_child=_close_in_child)


def host_now() -> bytes:
    """A number of this host since it started, the same in its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


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
