"""Physical memory of the host driver: pieces of one memfd, taken with fallocate and given back by punching holes.

A piece that was exported is also in use elsewhere, and the kernel keeps that count for us, by *open file descriptions*:
`lend` opens the memfd once more, sets that description's position to the piece's offset, and puts a read lock (F_OFD) on
the piece's bytes. The description travels with the file descriptor, to whichever process; the lock stays until the last
descriptor and the last mapping made from it are gone, also when their process is killed. So the owner of the memfd
learns by asking for the lock whether anybody still uses the piece, and punches its hole only then. A descriptor for each
piece would leave all this to the kernel, but 16 GiB would need 8,192 of them, where 1,024 is the usual limit.

Whoever is lent a piece could read the whole memfd; only processes that trust each other pass handles around.
"""

import fcntl
import os
import struct
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from vmmkv.driver import libc

_FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes [offset_bytes, offset_bytes + size_bytes) of the memfd open as `fd`: one handle's physical memory."""

    fd: int
    offset_bytes: int
    size_bytes: int
    borrowed: bool = False
    """From another driver's memfd; `fd` is then this piece's own."""
    num_mappings: int = 0
    released: bool = False


class Memfd:
    """A memfd and the pieces of it that are in use. The file lives on while pieces of it are mapped, here or elsewhere."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("vmmkv", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self._end_bytes = 0
        self._free_offsets: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._leaving: list[Piece] = []  # given back here, but lent to somebody who still has it

    def take(self, size_bytes: int) -> Piece:
        """Zeroed memory, all of it there. Raises OSError: ENOSPC or ENOMEM when the kernel has none left to give."""
        self.reap()
        free = self._free_offsets[size_bytes]
        offset_bytes = free[-1] if free else self._end_bytes
        libc.fallocate(self.fd, 0, offset_bytes, size_bytes)
        if free:
            free.pop()
        else:
            self._end_bytes += size_bytes
        return Piece(self.fd, offset_bytes, size_bytes)

    def give(self, piece: Piece) -> None:
        """Give back a piece that is no longer mapped; one that is lent goes when the borrower lets go, at a `reap`."""
        self._leaving.append(piece)
        self.reap()

    def reap(self) -> None:
        """Punch the pieces that were given back and that nobody else has any more."""
        self._leaving = [piece for piece in self._leaving if not self._punched(piece)]

    def lend(self, piece: Piece) -> int:
        """A descriptor that carries a piece: its position is the offset, its lock says who has it, and how long it is."""
        if piece.borrowed:
            return os.dup(piece.fd)  # the same open file description, so the same position and lock
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.lseek(fd, piece.offset_bytes, os.SEEK_SET)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, piece.offset_bytes, piece.size_bytes))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _punched(self, piece: Piece) -> bool:
        if _lent_range(self.fd, piece.offset_bytes, piece.size_bytes) is not None:
            return False
        try:
            libc.fallocate(self.fd, libc.FALLOC_FL_PUNCH_HOLE | libc.FALLOC_FL_KEEP_SIZE, piece.offset_bytes, piece.size_bytes)
        except OSError:
            return False  # it stays on the list, and is tried again
        self._free_offsets[piece.size_bytes].append(piece.offset_bytes)
        return True


def borrow(fd: int, size_bytes: int) -> Piece:
    """The piece that a descriptor made by `lend` carries; `fd` stays the caller's.

    Raises: ValueError when it carries none, or one of another size; OSError.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only a memfd has
    except OSError as error:
        raise ValueError(f"file descriptor {fd} is not a memfd, so no host driver exported it") from error
    offset_bytes = os.lseek(fd, 0, os.SEEK_CUR)
    probe = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # one's own locks never show, those of another do
    try:
        lent = _lent_range(probe, offset_bytes, 1)
    finally:
        os.close(probe)
    if lent != (offset_bytes, size_bytes):
        there = "none" if lent is None else f"one of {lent[1]} bytes"
        raise ValueError(f"a handle of {size_bytes} bytes was to be imported, but file descriptor {fd} carries {there}")
    return Piece(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), offset_bytes, size_bytes, borrowed=True)


def _lock(kind: int, offset_bytes: int, size_bytes: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, offset_bytes, size_bytes, 0)


def _lent_range(fd: int, offset_bytes: int, size_bytes: int) -> tuple[int, int] | None:
    """The (offset, size) of a piece in the given bytes that another open file description has, if any has."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, offset_bytes, size_bytes))
    kind, _, start, length, _ = struct.unpack(_FLOCK, answer)
    return None if kind == fcntl.F_UNLCK else (start, length)
