"""Records: opaque bytes of one size, under keys of 32 bytes.

A record of a `PrefixCache` is a page of 2 MiB of one group: of all layers of the group, with their scales. Other engines choose
a size of their own, such as that of their blocks.
"""

import zlib
from typing import Final

from vmmkv.arguments import whole
from vmmkv.units import KIB, PAGE_BYTES

RECORD_BYTES: Final = PAGE_BYTES
"""Size of a record, if a tier is made without another one."""

KEY_BYTES: Final = 32

ALIGNMENT_BYTES: Final = 4 * KIB
"""Sizes of records are multiples of it: disks are read and written past the page cache in such pieces."""


def checked_record_bytes(record_bytes: int) -> int:
    """The size of a tier's records. Raises ValueError, naming sizes that work."""
    size_bytes = whole("record_bytes", record_bytes)
    if size_bytes < 1 or size_bytes % ALIGNMENT_BYTES:
        least = max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        raise ValueError(f"record_bytes={record_bytes}: a record is a multiple of {ALIGNMENT_BYTES} bytes, such as {least}")
    return size_bytes


def checksum_of(key: bytes, record: memoryview) -> int:
    """Checksum of a record and its key: another record in its place has another one."""
    return zlib.crc32(record, zlib.crc32(key))
