"""SharedSlots: state that the processes of a host share about the slots of one file: changes, last uses, locks.

    count of changes | ring: slots that changed last | uses: of each slot the time of its last use      in a file that all map

The entry of a slot in an index tells what it holds. A process that changes an entry counts that here, so that the others read
it again. Locks of single bytes (`F_OFD_SETLK`) say that a slot is being written or read. They end with their process.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from vmmkv.driver.host import fallocate

_RING: Final = 4096
"""Changes after which a process that has seen none of them reads all entries again."""

_LOW: Final = (1 << 32) - 1
"""The low half of a word of the ring, which is a slot's number; the high half is the change's own."""

_MUTEX: Final = 1 << 62
"""Byte behind those of all slots, whose lock one process has at a time."""

_CANDIDATES: Final = 256
"""Slots that are looked for at once as the least recently used."""


class SharedSlots:
    """Changes, uses and locks of the slots of one file, by processes that know nothing else of each other.

    Locks separate processes, and not threads of one: which slots those read and write is the caller's to know.

    The constructor opens the file `fd`, which it owns, for `mutex` alone; `begin` or `join` does the rest. Its methods may be
    called by one thread at a time, but `mutex`, which lets one thread of all processes in.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._one_thread = threading.Lock()
        self._words = np.zeros(1, np.uint64)
        self.uses = self._words[1:]
        """Time of the last use of each slot, in nanoseconds since the machine started; 0 for one that is free."""
        self._candidates: list[tuple[int, int]] = []
        """Last use and number of slots, the least recently used last."""
        self._now = 0

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        """Let one thread of all processes in. Waits for those that are in, also for stopped ones."""
        with self._one_thread:
            _lock(self._fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _MUTEX)
            try:
                yield
            finally:
                if self._fd >= 0:
                    _lock(self._fd, fcntl.F_OFD_SETLKW, fcntl.F_UNLCK, _MUTEX)

    def begin(self, num_slots: int, num_changes: int) -> None:
        """Begin as the only process, with so many changes, and all slots free. Raises: OSError, for want of space."""
        size_bytes = 8 * (1 + _RING + num_slots)
        allocate(self._fd, size_bytes)
        os.ftruncate(self._fd, size_bytes)
        zeros = memoryview(bytes(size_bytes))
        while zeros:  # where it could not be allocated this takes the space: a store to a mapped page could not fail
            zeros = zeros[os.pwrite(self._fd, zeros, size_bytes - len(zeros)) :]
        self.join()
        self._words[0] = num_changes

    def join(self) -> None:
        """Take part in what another process has begun."""
        other = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)  # a mapping keeps its file open, with its locks
        try:
            self._words = np.frombuffer(mmap.mmap(other, 0), np.uint64)
        finally:
            os.close(other)
        self.uses = self._words[1 + _RING :]
        self._candidates.clear()

    def close(self) -> None:
        """Let go of the file, and of all locks. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    # changes

    @property
    def num_changes(self) -> int:
        """Changes of all processes, and those of `begin`."""
        return int(self._words[0])

    def changed(self, number: int) -> None:
        """Count a change of a slot's entry, which the caller has made within `mutex`."""
        count = self.num_changes
        self._words[1 + count % _RING] = (count & _LOW) << 32 | number
        self._words[0] = count + 1

    def changed_between(self, start: int, end: int) -> Sequence[int] | None:
        """The slots of the changes [start, end), as they are counted; None if some of them cannot be known any more, or yet."""
        if end - start > _RING:
            return None
        words = [int(self._words[1 + each % _RING]) for each in range(start, end)]
        is_known = all(word >> 32 == each & _LOW for each, word in enumerate(words, start))
        return [word & _LOW for word in words] if is_known else None

    # uses

    def now(self, num_uses: int = 1) -> int:
        """The time of the last of so many uses, each a nanosecond behind the one before it, and all behind earlier ones."""
        self._now = max(time.monotonic_ns(), self._now) + num_uses
        return self._now

    def free(self, number: int) -> None:
        """Say that a slot is free. It is taken next."""
        self.uses[number] = 0
        self._candidates.append((0, number))

    def least_used(self) -> Iterator[int]:
        """Slots, the least recently used first. Cost: 5 ns a slot, for one call of some 200."""
        for has_looked in (False, True):
            while self._candidates:
                use, number = self._candidates.pop()
                if self.uses[number] == use:
                    yield number
            if not has_looked:
                uses, last = self.uses.copy(), np.arange(len(self.uses))  # other processes write there meanwhile
                if len(last) > _CANDIDATES:
                    last = np.argpartition(uses, _CANDIDATES)[:_CANDIDATES]
                oldest = last[np.lexsort((last, uses[last]))]
                self._candidates = [(int(uses[number]), int(number)) for number in oldest[::-1]]

    # locks

    def take(self, number: int) -> bool:
        """Lock a slot for writing; False if another process has it."""
        return self._has_locked(number, fcntl.F_WRLCK)

    def share(self, number: int) -> bool:
        """Lock a slot for reading, beside others who read it; False if another process writes it."""
        return self._has_locked(number, fcntl.F_RDLCK)

    def release(self, number: int) -> None:
        """Unlock a slot."""
        _lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number)

    def _has_locked(self, number: int, how: int) -> bool:
        try:
            _lock(self._fd, fcntl.F_OFD_SETLK, how, number)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True


def _lock(fd: int, command: int, how: int, byte: int) -> None:
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", how, os.SEEK_SET, byte, 1, 0))


def allocate(fd: int, size_bytes: int) -> None:
    """Take a file's disk space; where the file system cannot, a write finds out that the disk is full. Raises: OSError."""
    try:
        fallocate(fd, 0, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
