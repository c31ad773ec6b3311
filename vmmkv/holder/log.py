"""The log of sealed extents: which tokens' rows are in which handle. It lies in shared memory and outlives its writer.

    header   | format | active half | bytes used of half 0 | of half 1 | borrowers | rewrites |     words, each one store
    half     | length, checksum, identity | length, checksum, seal | ... | length, checksum, drop | ... free

A record counts once the used bytes of its half reach past it, so a writer that is killed leaves it whole or not at all.
A seal names its parent, an earlier seal on the same path, and has the tokens behind the parent's. A drop ends a seal; its
tokens stay for its children. When a half is full, `rewrite` writes what still counts to the other half and then makes that
the active one.

One process writes, and the holder the number of borrowers. The memory of a sealed extent is not written: `drop` comes before
its reuse. Borrowers read while it is written; as long as there are any, what was sealed is not written again at all.
"""

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vmmkv.errors import LogDamaged
from vmmkv.units import MIB, round_up

_FORMAT: Final = int.from_bytes(b"vmmkvlg2", "little")
_HEADER_BYTES: Final = mmap.PAGESIZE
_LEAST_HALF_BYTES: Final = MIB
_BUDGET_SHARE: Final = 16
"""A half is a sixteenth of the budget: the tokens of the smallest rows, 128 bytes, take a thirty-second. It takes memory only
as it is written."""

_RECORD: Final = struct.Struct("<IIc")  # length of the body, checksum of kind and body, kind
_SEAL: Final = struct.Struct("<QQQQIIII")
_IDENTITY_KIND, _SEAL_KIND, _DROP_KIND = b"i", b"s", b"d"
_SERIAL_BYTES: Final = 8
_TOKEN_BYTES: Final = 4


class Sealed(NamedTuple):
    """An extent all of whose rows are computed, and the place of these rows in a prefix."""

    serial: int
    """The holder's number of the handle. Numbers are not used again, so it is the generation too."""
    parent: int | None
    """The place in the log of the seal before it on the path; None if its tokens begin at the first."""
    end_token: int
    """Tokens of the path up to the last row of the extent."""
    first_token: int
    """First row of the path that is there for certain."""
    group: int
    page: int
    num_pages: int
    namespace: bytes
    """Namespace of the path; empty if it has a parent."""
    tokens: bytes
    """Packed ids [end of the parent, end_token) of the path."""


@dataclass(slots=True)
class LogContents:
    """The contents of a log, as far as they were read."""

    identity: bytes = b""
    """Identity of the layout and the model; empty for a new log."""
    seals: dict[int, Sealed] = field(default_factory=dict)
    """Seals by their place in the log, parents first; those that were dropped too."""
    live: dict[int, int] = field(default_factory=dict)
    """Places of the seals that were not dropped, by serial, in the order in which they were sealed."""
    end: int = 0
    """Place of the record after the last one read."""


class SealedLog:
    """The log over a file descriptor, which stays the caller's. Raises: LogDamaged if there is another format in it.

    Any process that a holder welcomes can write to it, so all that is read is checked against what can be.
    """

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < _HEADER_BYTES + 2 * _LEAST_HALF_BYTES:
            raise LogDamaged("the shared memory is too small for a log")
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(self._map)
        self.words = self._bytes[:_HEADER_BYTES].cast("Q")
        """The header. Each word is written by one store, so that a writer can be killed between any two."""
        self._half_bytes: Final = (len(self._map) - _HEADER_BYTES) // 2
        if self.words[0] != _FORMAT:
            self.close()
            raise LogDamaged("the shared memory holds no log of this version")
        self._due_bytes = self._next_due()

    @staticmethod
    def create(budget_bytes: int) -> int:
        """A file descriptor of a new log for so much memory."""
        half_bytes = round_up(max(_LEAST_HALF_BYTES, budget_bytes // _BUDGET_SHARE), mmap.PAGESIZE)
        fd = os.memfd_create("vmmkv-sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _HEADER_BYTES + 2 * half_bytes)
            # Every client has the descriptor: a file that it cut would end holder and engine by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(fd, struct.pack("<Q", _FORMAT), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Unmap the log. Idempotent."""
        self.words.release()
        self._bytes.release()
        self._map.close()

    @property
    def used_bytes(self) -> int:
        """Bytes used of the active half."""
        return self.words[2 + self._half]

    @property
    def _half(self) -> int:
        """The active half, also where the header is damaged."""
        return self.words[1] % 2

    @property
    def version(self) -> tuple[int, int]:
        """Version of the places in the log: it changes whenever they are of other records."""
        return self.words[5], self.words[1]

    @property
    def num_borrowers(self) -> int:
        """Engines that may map what this one seals. The holder counts them."""
        return self.words[4]

    @num_borrowers.setter
    def num_borrowers(self, number: int) -> None:
        self.words[4] = number

    @property
    def is_due(self) -> bool:
        """Has the log grown to twice what counted at the last rewrite, or is it nearly full?"""
        return self.used_bytes > self._due_bytes

    def read(self) -> LogContents:
        """Read the active half. Raises: LogDamaged. Cost: grows with the log."""
        contents = LogContents()
        self.read_on(contents)
        return contents

    def read_on(self, contents: LogContents) -> list[int]:
        """Read what was written behind `contents`, of the same `version`; the places of the new seals. Raises: LogDamaged."""
        half, used_bytes, new = self.words[1], self.used_bytes, list[int]()
        if half > 1 or used_bytes > self._half_bytes:
            raise LogDamaged(f"half {half} with {used_bytes} bytes of {self._half_bytes}")
        while (place := contents.end) < used_bytes:
            kind, body = self._record(half, place, used_bytes)
            if kind == _IDENTITY_KIND:
                contents.identity = body
            elif kind == _SEAL_KIND:
                contents.seals[place] = seal = _unpack(body, contents)
                contents.live[seal.serial] = place
                new.append(place)
            elif kind == _DROP_KIND and len(body) == _SERIAL_BYTES:
                contents.live.pop(int.from_bytes(body, "little"), None)
            else:
                raise LogDamaged(f"the record at {place} is of kind {kind!r}, with {len(body)} bytes")
            contents.end += _RECORD.size + len(body)
        return new

    def seal(self, seal: Sealed) -> int | None:
        """Append a seal, and return its place; None if there is no room. Its memory is not written until it is dropped."""
        return self._append(self._half, _SEAL_KIND, _pack(seal))

    def drop(self, serial: int) -> bool:
        """End a seal: its memory may be written when this returns True; False if there is no room."""
        return self._append(self._half, _DROP_KIND, serial.to_bytes(_SERIAL_BYTES, "little")) is not None

    def rewrite(self, identity: bytes, seals: Iterable[Sealed]) -> list[int | None]:
        """Replace all; where each seal is from now on, None for one that has no room. All or nothing for a later reader.

        A parent in `seals` is the number of an earlier one among them.
        """
        # The generation changes first: a borrower may be reading what is written over.
        self.words[5] = (self.words[5] + 1) % (1 << 64)
        half = 1 - self._half
        self.words[2 + half] = 0
        self._append(half, _IDENTITY_KIND, identity)
        places: list[int | None] = []
        for seal in seals:
            parent = None if seal.parent is None else places[seal.parent]
            has_parent = seal.parent is None or parent is not None
            places.append(self._append(half, _SEAL_KIND, _pack(seal._replace(parent=parent))) if has_parent else None)
        self.words[1] = half
        self._due_bytes = self._next_due()
        self._map.madvise(mmap.MADV_REMOVE, _HEADER_BYTES + (1 - half) * self._half_bytes, self._half_bytes)
        return places

    def _next_due(self) -> int:
        return min(max(_LEAST_HALF_BYTES // 2, 2 * self.used_bytes), self._half_bytes * 3 // 4)

    def _append(self, half: int, kind: bytes, body: bytes) -> int | None:
        place = self.words[2 + half]
        end = place + _RECORD.size + len(body)
        if end > self._half_bytes:
            return None
        start = _HEADER_BYTES + half * self._half_bytes + place
        _RECORD.pack_into(self._bytes, start, len(body), zlib.crc32(kind + body), kind)
        self._bytes[start + _RECORD.size : start + _RECORD.size + len(body)] = body
        self.words[2 + half] = end
        return place

    def _record(self, half: int, place: int, used_bytes: int) -> tuple[bytes, bytes]:
        start, left_bytes = _HEADER_BYTES + half * self._half_bytes + place, used_bytes - place
        if left_bytes >= _RECORD.size:
            size_bytes, checksum, kind = _RECORD.unpack_from(self._bytes, start)
            if size_bytes <= left_bytes - _RECORD.size:
                body = bytes(self._bytes[start + _RECORD.size : start + _RECORD.size + size_bytes])
                if zlib.crc32(kind + body) == checksum:
                    return kind, body
        raise LogDamaged(f"the record at {place} of half {half} has another checksum or length")


def _pack(seal: Sealed) -> bytes:
    parent = 0 if seal.parent is None else 1 + seal.parent
    numbers = seal.serial, parent, seal.end_token, seal.first_token, seal.group, seal.page, seal.num_pages, len(seal.namespace)
    return _SEAL.pack(*numbers) + seal.namespace + seal.tokens


def _unpack(body: bytes, before: LogContents) -> Sealed:
    """Unpack a seal that goes on from earlier ones. Raises: LogDamaged."""
    if len(body) < _SEAL.size:
        raise LogDamaged(f"a seal of {len(body)} bytes")
    serial, parent, end_token, first_token, group, page, num_pages, name_bytes = _SEAL.unpack_from(body)
    tokens_at = _SEAL.size + name_bytes
    place, name, tokens = parent - 1 if parent else None, body[_SEAL.size : tokens_at], body[tokens_at:]
    above = None if place is None else before.seals.get(place)
    start = 0 if above is None else above.end_token
    if (
        (above is None) != (place is None)
        or (above is None) != bool(name_bytes)
        or len(body) - tokens_at != (end_token - start) * _TOKEN_BYTES
        or not 0 <= first_token < end_token
        or serial in before.live
    ):
        raise LogDamaged(
            f"a seal of handle {serial} for tokens [{first_token}, {end_token}) with {len(tokens)} bytes of them and a name of "
            f"{name_bytes}, behind {above and above.end_token} tokens of the seal at {place}"
        )
    return Sealed(serial, place, end_token, first_token, group, page, num_pages, name, tokens)
