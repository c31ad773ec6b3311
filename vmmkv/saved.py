"""Rows of running sequences outside the device: in a file, or in host memory while the sequences keep their slots.

A file holds one sequence, and is written whole and read back whole:

    header    what must agree: layout, fingerprint; how many tokens there are, from which row on in each group; positions of
              rows that were compacted
    rows      of each group, in chunks of 32 MiB, with a checksum behind each

A file of batches has a header of their owner's before, and then each sequence so. Pages that sequences share are in it, and
come back, once for each.

Host memory holds the same chunks. Pages that sequences of a batch share are kept once there, and are shared again.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.driver.base import DONE, Fence, retried
from vmmkv.driver.pinned import host_memory
from vmmkv.errors import SequenceTooLong
from vmmkv.memory.address_space import Span
from vmmkv.memory.extents import Extent
from vmmkv.memory.sharing import Pages
from vmmkv.memory.slots import LiveSlot, Slots
from vmmkv.units import MIB, PAGE_BYTES, ceil_div, counted, format_bytes

_MAGIC: Final = b"vmmkv sequence 1"
_BATCHES_MAGIC: Final = b"vmmkv batches 1\n"
_UNFINISHED: Final = b"vmmkv unfinished"
"""First bytes of a file that is being written, in place of either."""

_NUMBER: Final = struct.Struct("<I")
CHUNK_BYTES: Final = 32 * MIB
"""Most bytes of rows that are read, summed and written at once: each such piece has a checksum in the file."""

_MOST_TOKENS: Final = 2**31
"""Bound of tokens and of positions, which are less."""

_POSITION_BYTES: Final = len(json.dumps([_MOST_TOKENS - 1, _MOST_TOKENS - 1])) - len(json.dumps([_MOST_TOKENS - 1]))
"""Most bytes of one position in a header."""

_HEADER_BYTES: Final = 64 << 10
"""Most bytes of a header without positions."""

_BATCHES_HEADER_BYTES: Final = 64 * MIB
"""Most bytes of the header of batches."""


class _Part(NamedTuple):
    """The rows of one group of layers that are saved of a sequence."""

    span: Span
    start: int
    """The first row that the sequence has."""
    shared_end: int = 0
    """The pages before this one are an earlier sequence's, and saved with that."""
    owner: Span | None = None
    """Span of that earlier sequence; None if no page is shared."""
    large_end: int | None = None
    """Page up to which rows may come back in large extents; None: wherever these fit."""

    @property
    def first_byte(self) -> int:
        """Offset of the first byte that is copied."""
        return max(self.start * self.span.group.row_bytes, self.shared_end * PAGE_BYTES)


class _Rows:
    """All rows that a running sequence has now. Raises: GraphCapture, under which no memory can be pinned either."""

    def __init__(self, live: LiveSlot) -> None:
        slots = live.slots
        with slots.pool.lock:
            slots.check_capture()
            self.live: Final = live
            self.num_tokens: Final = live.length
            self.parts = [_Part(span, slots.memory.start(span)) for span in slots.memory.spans(live.slot)]

    def check(self) -> None:
        """Check that the sequence has all rows still. The caller holds the lock. Raises: ValueError, Closed, GraphCapture."""
        start_of = self.live.slots.memory.start
        if self.live.length < self.num_tokens or any(start_of(part.span) != part.start for part in self.parts):
            raise ValueError(f"{self.live!r} lost rows while it was saved")
        self.live.slots.check_capture()

    def read(self, memory_for: Callable[[int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Copy rows to the host memory that `memory_for` gives for so many bytes, chunk by chunk. Takes the lock for each."""
        slots = self.live.slots
        for part in self.parts:
            for at, size_bytes in _chunks(part.first_byte, self.num_tokens * part.span.group.row_bytes):
                chunk = memory_for(size_bytes)
                with _copying(slots):
                    self.check()
                    slots.pool.driver.copy(chunk.data_ptr(), part.span.address + at, size_bytes)
                yield chunk


@contextlib.contextmanager
def _copying(slots: Slots) -> Iterator[None]:
    """Copies to or from host memory that are launched within have ended behind it, interrupted or not: the memory may go."""
    fence: Fence = DONE
    try:
        with slots.pool.lock, slots.memory.copying():
            yield
            fence = retried(slots.pool.driver.fence)
    finally:
        fence.wait()


def _chunks(first_byte: int, end_byte: int) -> Iterator[tuple[int, int]]:
    """Offset and size of each chunk."""
    for at in range(first_byte, end_byte, CHUNK_BYTES):
        yield at, min(CHUNK_BYTES, end_byte - at)


# in a file


def save(live: LiveSlot, path: Path, fingerprint: str) -> None:
    """Write the rows of a sequence to a file. See Sequence.save."""
    rows = _Rows(live)
    if not rows.num_tokens:
        raise ValueError(f"{live!r} has nothing to save")
    buffer = host_memory(CHUNK_BYTES, live.slots.pool.device)
    with _replacing(path, _MAGIC) as file:
        _write(file, rows, fingerprint, buffer)


def save_batches(batches: Sequence[Sequence[LiveSlot]], path: Path, fingerprint: str, header: dict[str, Any]) -> None:
    """Write sequences of one pool, all with tokens, behind a header of the caller's. Cost and errors: see Sequence.save."""
    buffer = host_memory(CHUNK_BYTES, batches[0][0].slots.pool.device)
    with _replacing(path, _BATCHES_MAGIC) as file:
        _write_header(file, header)
        for live in itertools.chain.from_iterable(batches):
            file.write(_MAGIC)
            _write(file, _Rows(live), fingerprint, buffer)


@contextlib.contextmanager
def _replacing(path: Path, magic: bytes) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when what follows `magic` is written; if that fails, all is as before.

    Raises: OSError, which names `path`, and not the file beside it.
    """
    _remove_left(path.parent)
    new: str | None = None
    try:
        fd, new = _new_file(path)
        with open(fd, "wb") as file:
            file.write(_UNFINISHED)
            file.flush()
            yield file
            file.flush()
            os.pwrite(fd, magic, 0)
            os.fsync(fd)
            os.replace(new, path)  # before the lock goes with the open file
    except BaseException as error:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


_NEW_NAME: Final = re.compile(r".+\.[a-z0-9_]{8}\.new")
"""Name of a file that is being written. Its process holds a lock on it: an unlocked one was left by a killed process."""


def _new_file(path: Path) -> tuple[int, str]:
    """A locked file beside `path`, which takes its place when it is whole, and its name."""
    while True:
        fd, new = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, new
        os.close(fd)  # another save has removed it, before it was locked


def _remove_left(folder: Path) -> None:
    """Remove what saves of killed processes have left in a folder. Other files stay, and what cannot be removed."""
    with contextlib.suppress(OSError):
        for name in filter(_NEW_NAME.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.pread(fd, len(_UNFINISHED), 0) == _UNFINISHED:
                        os.unlink(folder / name)
                finally:
                    os.close(fd)


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    if len(text) > _BATCHES_HEADER_BYTES:
        raise ValueError(
            f"the header of the rows takes {format_bytes(len(text))}, and may take {format_bytes(_BATCHES_HEADER_BYTES)}: save "
            "fewer sequences together"
        )
    file.write(_NUMBER.pack(len(text)) + text + _NUMBER.pack(zlib.crc32(text)))


def _write(file: BinaryIO, rows: _Rows, fingerprint: str, buffer: torch.Tensor) -> None:
    """Write the header and the rows of a sequence, behind the first bytes of its file."""
    identity = rows.live.slots.layout.identity(fingerprint).hex()
    header = {"identity": identity, "num_tokens": rows.num_tokens, "starts": [part.start for part in rows.parts]}
    if rows.live.positions is not None:
        header["positions"] = rows.live.positions.tolist()
    _write_header(file, header)
    for chunk in rows.read(lambda size_bytes: buffer[:size_bytes]):
        data = chunk.numpy().data
        file.write(data)
        file.write(_NUMBER.pack(zlib.crc32(data)))


def restore(
    slots: Slots, path: Path, fingerprint: str, begun: list[LiveSlot], *, max_tokens: int | None, tenant: Hashable
) -> None:
    """Begin a sequence with the rows in a file, listed in `begun`: the caller ends it if this fails. See KVCache.restore."""
    with slots.pool.lock:
        slots.check_end(max_tokens)
        slots.check_capture()
    buffer = host_memory(CHUNK_BYTES, slots.pool.device)
    with open(path, "rb") as file:
        header = _read_header(file, path, slots, fingerprint)
        with slots.pool.lock:
            end = slots.check_end(max_tokens)
            slots.check_capture()
            if header.num_tokens > end:
                raise SequenceTooLong(f"{path} has {counted(header.num_tokens, 'token')}, for a sequence of max_tokens={end}")
            begun.append(slots.open_at(slots.clear_run(1), end, tenant))
        _read_rows(file, path, begun[-1], header, buffer)


def read_batches_header(file: BinaryIO, path: Path) -> Any:
    """The header that `save_batches` was given; anything or None for a damaged file. Raises: ValueError for another file."""
    return _read_fields(file, path, _BATCHES_MAGIC, "batch as VmmCache.save", _BATCHES_HEADER_BYTES)


def fill_batches(file: BufferedReader, path: Path, batches: Sequence[tuple[Sequence[LiveSlot], int]], fingerprint: str) -> None:
    """Give sequences without tokens the rows that follow in a file: with each batch the tokens that each of it must have.

    If this fails, some have tokens. Cost: as Sequence.grow; blocks while the rows are read and copied, but without the lock.
    Raises: as KVCache.restore.
    """
    buffer = host_memory(CHUNK_BYTES, batches[0][0][0].slots.pool.device)
    wanted = [(live, num_tokens) for batch, num_tokens in batches for live in batch]
    for place, (live, num_tokens) in enumerate(wanted):
        header = _read_header(file, path, live.slots, fingerprint, is_last=place + 1 == len(wanted))
        if header.num_tokens != num_tokens:
            raise ValueError(f"{path} is damaged: sequence {place} has {header.num_tokens} tokens, and not {num_tokens}")
        if num_tokens > live.max_tokens:
            raise SequenceTooLong(
                f"{path} has {counted(num_tokens, 'token')} of each sequence, for sequences of max_tokens={live.max_tokens}"
            )
        _read_rows(file, path, live, header, buffer)


def _read_rows(file: BufferedReader, path: Path, live: LiveSlot, header: "_Header", buffer: torch.Tensor) -> None:
    """Give a sequence without tokens the rows that follow in a file. They are read without the lock."""
    slots, copies = live.slots, list[tuple[int, int, int]]()
    bare: list[Pages] = [{} for _ in header.starts]
    with slots.pool.lock:
        slots.check_running(live)
        slots.check_capture()
        slots.table.begin(live.slot, header.starts)
        slots.fill(live.slot, header.num_tokens, bare, lambda group, _, size, target: copies.append((group, size, target)))
        live.positions = header.positions
    for group, size_bytes, target in copies:
        for at, chunk_bytes in _chunks(0, size_bytes):
            data = buffer[:chunk_bytes].numpy().data
            if file.readinto(data) != chunk_bytes or file.read(_NUMBER.size) != _NUMBER.pack(zlib.crc32(data)):
                raise ValueError(f"{path} is damaged: what it holds of group {group} is not what was saved")
            with _copying(slots):
                slots.check_running(live)
                slots.check_capture()
                slots.pool.driver.copy(target + at, buffer.data_ptr(), chunk_bytes)


class _Header(NamedTuple):
    """Header of the rows of a sequence; each field is one that a sequence of the cache can have."""

    num_tokens: int
    starts: list[int]
    positions: npt.NDArray[np.int64] | None


def _read_fields(file: BinaryIO, path: Path, magic: bytes, what: str, most_bytes: int, or_long: str = "") -> Any:
    """The fields of a header behind these first bytes; None if its checksum is wrong. Raises: ValueError for another file."""
    if file.read(len(magic)) != magic or len(size := file.read(_NUMBER.size)) != _NUMBER.size:
        raise ValueError(f"{path} holds no {what} writes it")
    (size_bytes,) = _NUMBER.unpack(size)
    if size_bytes > most_bytes:
        raise ValueError(f"{path} is damaged{or_long}: its header has {counted(size_bytes, 'byte')}")
    if size_bytes > (left_bytes := os.fstat(file.fileno()).st_size - file.tell()):
        raise ValueError(f"{path} is damaged: its header has {counted(size_bytes, 'byte')}, of which {left_bytes} are there")
    text = file.read(size_bytes)
    if file.read(_NUMBER.size) == _NUMBER.pack(zlib.crc32(text)):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return None


def _read_header(file: BinaryIO, path: Path, slots: Slots, fingerprint: str, *, is_last: bool = True) -> _Header:
    """The header of a sequence whose rows are as long as it says; nothing is behind the last. Raises: ValueError."""
    fields = _read_fields(
        *(file, path, _MAGIC, "sequence as Sequence.save", _HEADER_BYTES + _POSITION_BYTES * (slots.max_tokens + 1)),
        or_long=f", or its sequence is longer than this cache's slots, which have {slots.max_tokens} tokens",
    )
    if not isinstance(fields, dict) or not {"identity", "num_tokens", "starts"} <= fields.keys():
        raise ValueError(f"{path} is damaged: it has no header of a sequence")
    if fields["identity"] != slots.layout.identity(fingerprint).hex():
        raise ValueError(f"{path} was saved from a cache of another layout, or with another fingerprint than {fingerprint!r}")
    num_tokens, starts, positions = fields["num_tokens"], fields["starts"], fields.get("positions")
    groups = slots.layout.groups
    if not _are_whole([num_tokens], range(1, _MOST_TOKENS)):
        raise ValueError(f"{path} is damaged: no sequence has num_tokens={num_tokens!r:.40}")
    if not _are_whole(starts, range(num_tokens + 1), len(groups)) or any(
        start > slots.layout.start_for(group, num_tokens) for group, start in zip(groups, starts, strict=True)
    ):
        raise ValueError(
            f"{path} is damaged: in no sequence of {num_tokens} tokens do the rows that it needs begin at {starts!s:.80}"
        )
    if "positions" in fields and (
        not _are_whole(positions, range(_MOST_TOKENS))
        or not 1 < len(positions) <= num_tokens + 1
        or any(position >= following for position, following in itertools.pairwise(positions))
        or any(group.window is not None for group in groups)
    ):
        raise ValueError(f"{path} is damaged: its positions are not those of the rows of a sequence")
    rows_bytes = [(num_tokens - start) * group.row_bytes for group, start in zip(groups, starts, strict=True)]
    end_bytes = file.tell() + sum(each + _NUMBER.size * ceil_div(each, CHUNK_BYTES) for each in rows_bytes)
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes < end_bytes or (is_last and size_bytes > end_bytes):
        raise ValueError(f"{path} is damaged: it has {size_bytes} bytes, and its header says {end_bytes}")
    return _Header(num_tokens, starts, None if positions is None else np.array(positions))


def _are_whole(values: Any, allowed: range, count: int | None = None) -> TypeGuard[list[int]]:
    """Is this a list of whole numbers that are allowed, and of so many?"""
    return (
        isinstance(values, list)
        and count in (None, len(values))
        and all(type(value) is int and value in allowed for value in values)
    )


# in host memory


class Offloaded:
    """The rows of running sequences in host memory, so that what is mapped for these can be given back meanwhile.

    The sequences of a batch are of one cache, and the caches of one pool. Pages that are shared within a batch are kept once.
    Cost: blocks while the rows are copied; pinning takes 0.3 s for each GiB.
    Raises: BudgetError if the host lacks the memory; DriverError, GraphCapture.
    """

    def __init__(self, batches: Sequence[Sequence[LiveSlot]]) -> None:
        self.released = False
        """Is the host's copy the only one?"""
        self._kept: list[tuple[_Rows, list[torch.Tensor]]] = []
        self._lock = batches[0][0].slots.pool.lock
        for batch in batches:
            memory_for = functools.partial(host_memory, device=batch[0].slots.pool.device)
            self._kept += [(rows, [*rows.read(memory_for)]) for rows in _sharing([_Rows(each) for each in batch])]

    @property
    def num_pages(self) -> int:
        """Pages that `restore` takes from the pool."""
        return sum(
            end_page - part.first_byte // PAGE_BYTES
            for rows, _ in self._kept
            for part, end_page in zip(rows.parts, rows.live.slots.memory.end_pages(rows.num_tokens), strict=True)
        )

    def release(self) -> None:
        """Reclaim all that is mapped for the sequences. All or none. They keep their slots, without tokens, and cannot grow.

        Pages that a sequence of no batch shares stay mapped there, and come back here as others.
        Cost: a fence for each sequence. Raises: DriverError, GraphCapture; ValueError, Closed if they have lost rows since.
        """
        lowered: list[tuple[LiveSlot, int, Fence]] = []
        with self._lock:
            try:
                for rows, _ in self._kept:
                    rows.check()
                    live, limit = rows.live, rows.live.limit
                    lowered.append((live, limit, live.slots.memory.lower_limit(live.slot, 0)))
            except BaseException:
                for live, limit, _ in lowered:
                    retried(functools.partial(live.slots.memory.raise_limits, {live.slot: limit}))
                raise
            for live, _, fence in lowered:
                live.slots.vacate(live.slot, fence)
            self.released = True

    def restore(self) -> None:
        """Map memory at the same addresses, and copy the rows there. All or none; nothing if they were not released.

        Cost: as Sequence.grow; blocks while the rows are copied, and holds the lock.
        Raises: OutOfPages, DriverError, GraphCapture.
        """
        live_slots = [rows.live for rows, _ in self._kept]
        with self._lock:
            if not self.released:
                return
            for live in live_slots:
                live.slots.check_capture()
                live.slots.make_bare(live.slot)
            try:
                for rows, chunks in self._kept:
                    _fill(rows, iter(chunks))
            except BaseException:
                for live in live_slots:
                    live.slots.vacate(live.slot, retried(functools.partial(live.slots.memory.lower_limit, live.slot, 0)))
                raise
            self.released = False


def _sharing(batch: list[_Rows]) -> list[_Rows]:
    """The rows of a batch, where each shared page is left to the first sequence that has it."""
    for index in range(len(batch[0].parts)):
        owners: dict[Extent, Span] = {}
        for rows in batch:
            part = rows.parts[index]
            for mapping in part.span.live():  # what is shared comes first
                owner = owners.setdefault(mapping.extent, part.span)
                if owner is not part.span:
                    rows.parts[index] = part._replace(shared_end=mapping.end_page, owner=owner)
        large_end = min((rows.parts[index].shared_end for rows in batch if rows.parts[index].owner), default=None)
        for rows in batch:
            rows.parts[index] = rows.parts[index]._replace(large_end=large_end)
    return batch


def _fill(rows: _Rows, chunks: Iterator[torch.Tensor]) -> None:
    live, memory = rows.live, rows.live.slots.memory
    given: list[dict[int, Extent]] = []
    for part in rows.parts:
        shared = () if part.owner is None else part.owner.live()
        given.append({mapping.page: mapping.extent for mapping in shared if mapping.end_page <= part.shared_end})
    memory.table.begin(live.slot, [part.start for part in rows.parts])
    memory.table.ends[live.slot] = live.max_tokens

    def copy_bytes(_group: int, _first_byte: int, size_bytes: int, target: int) -> None:
        for at, chunk_bytes in _chunks(0, size_bytes):
            memory.pool.driver.copy(target + at, next(chunks).data_ptr(), chunk_bytes)
        memory.pool.driver.fence().wait()

    large_ends = [part.large_end for part in rows.parts]
    live.slots.fill(live.slot, rows.num_tokens, given, copy_bytes, large_ends)
