"""Records: opaque bytes of one size, under keys of 32 bytes.

A record of a `PrefixCache` is a page of 2 MiB of one group: of all layers of the group, with their scales. Other engines choose
a size of their own, such as that of their blocks.
"""

import zlib
from typing import Final

from vmmkv.units import PAGE_BYTES

RECORD_BYTES: Final = PAGE_BYTES
"""Size of a record, if a tier is made without another one."""

KEY_BYTES: Final = 32


def checksum_of(key: bytes, record: memoryview) -> int:
    """Checksum of a record and its key: another record in its place has another one."""
    return zlib.crc32(record, zlib.crc32(key))
