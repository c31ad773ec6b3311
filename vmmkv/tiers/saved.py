"""One sequence in a file: its rows, written whole and read back whole.

header    what must agree: layout, fingerprint; and how many tokens there are, from which row on in each group
rows      of each group, in chunks of 32 MiB, with a checksum behind each
"""

import contextlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from vmmkv.errors import SequenceTooLong
from vmmkv.tiers.record import Keys
from vmmkv.tiers.tier import host_memory
from vmmkv.units import MIB, counted

if TYPE_CHECKING:
    from vmmkv.cache import KVCache, Sequence

_MAGIC: Final = b"vmmkv sequence 1"
_NUMBER: Final = struct.Struct("<I")
_CHUNK_BYTES: Final = 32 * MIB


def save(sequence: "Sequence", path: Path, fingerprint: str) -> None:
    """See Sequence.save."""
    cache, memory = sequence.cache, sequence.cache.memory
    with cache.pool.lock:
        cache.check_capture()  # nor is memory pinned under one
        num_tokens = sequence.length
        if not num_tokens:
            raise ValueError(f"{sequence!r} has nothing to save")
        spans = memory.spans(sequence.slot)
        starts = [memory.start(span) for span in spans]
    header = {"identity": Keys(cache.layout, fingerprint).identity.hex(), "num_tokens": num_tokens, "starts": starts}
    buffer = host_memory(_CHUNK_BYTES, cache.device)
    fd, new = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
    try:
        with open(fd, "wb") as file:
            text = json.dumps(header).encode()
            file.write(_MAGIC + _NUMBER.pack(len(text)) + text + _NUMBER.pack(zlib.crc32(text)))
            for span, start in zip(spans, starts, strict=True):
                row_bytes = span.group.row_bytes
                for first_byte, size_bytes in _chunks(start * row_bytes, num_tokens * row_bytes):
                    with cache.pool.lock, memory.copying():
                        cache.check_capture()
                        if sequence.length < num_tokens or [memory.start(span) for span in spans] != starts:
                            raise ValueError(f"{sequence!r} lost rows while it was saved")
                        cache.pool.driver.copy(buffer.data_ptr(), span.address + first_byte, size_bytes)
                        fence = cache.pool.driver.fence()
                    fence.wait()
                    data = buffer[:size_bytes].numpy().data
                    file.write(data)
                    file.write(_NUMBER.pack(zlib.crc32(data)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def restore(cache: "KVCache", path: Path, fingerprint: str, *, max_tokens: int | None, tenant: Hashable) -> "Sequence":
    """See KVCache.restore."""
    with cache.pool.lock:
        cache.check_end(max_tokens)
        cache.check_capture()
    buffer = host_memory(_CHUNK_BYTES, cache.device)
    driver = cache.pool.driver
    with open(path, "rb") as file:
        header = _read_header(file, path)
        if header["identity"] != Keys(cache.layout, fingerprint).identity.hex():
            raise ValueError(
                f"{path} was saved from a cache of another layout, or with another fingerprint than {fingerprint!r}"
            )
        num_tokens: int = header["num_tokens"]

        def copy_bytes(group: int, first_byte: int, size_bytes: int, target: int) -> None:
            for at, chunk_bytes in _chunks(first_byte, first_byte + size_bytes):
                data = buffer[:chunk_bytes].numpy().data
                if file.readinto(data) != chunk_bytes or file.read(_NUMBER.size) != _NUMBER.pack(zlib.crc32(data)):
                    raise ValueError(f"{path} is damaged: what it holds of group {group} is not what was saved")
                driver.copy(target + at - first_byte, buffer.data_ptr(), chunk_bytes)
                driver.fence().wait()  # the next chunk comes into the same memory

        with cache.pool.lock:
            end = cache.check_end(max_tokens)
            cache.check_capture()
            if num_tokens > end:
                raise SequenceTooLong(f"{path} has {counted(num_tokens, 'token')}, for a sequence of max_tokens={end}")
            slot = cache.clear_run(1)
            cache.memory.table.starts[:, slot] = header["starts"]
            return cache.open_with(slot, end, tenant, num_tokens, [{} for _ in header["starts"]], copy_bytes)


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    if file.read(len(_MAGIC)) == _MAGIC and len(size := file.read(_NUMBER.size)) == _NUMBER.size:
        text = file.read(_NUMBER.unpack(size)[0])
        if file.read(_NUMBER.size) == _NUMBER.pack(zlib.crc32(text)):
            header: dict[str, Any] = json.loads(text)
            return header
    raise ValueError(f"{path} holds no sequence as Sequence.save writes it")


def _chunks(first_byte: int, end_byte: int) -> Iterator[tuple[int, int]]:
    """Where each begins, and its size."""
    for at in range(first_byte, end_byte, _CHUNK_BYTES):
        yield at, min(_CHUNK_BYTES, end_byte - at)
