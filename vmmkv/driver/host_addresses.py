"""Addresses of the host with nothing under them: reserved, so that nobody else gets them, and faulting when touched."""

import mmap as mmap_module
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from vmmkv.driver import libc
from vmmkv.units import PAGE_BYTES, round_up

_NOTHING: Final = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
_MAX_MAP_COUNT: Final = Path("/proc/sys/vm/max_map_count")

_BALLAST_MAPPINGS: Final = 32

_ballast: tuple[int, int] | None = None  # address and size
_reserved: list[tuple[int, int]] = []  # (address, size) of every reservation; they stay until the process ends


def reserve(size_bytes: int) -> int:
    """Reserve addresses, aligned to a page of ours. Raises OSError."""
    start = libc.mmap(0, size_bytes + PAGE_BYTES, libc.PROT_NONE, _NOTHING)
    address = round_up(start, PAGE_BYTES)
    if address > start:
        libc.munmap(start, address - start)
    libc.munmap(address + size_bytes, start + PAGE_BYTES - address)
    _reserved.append((address, size_bytes))
    return address


def clear(address: int, size_bytes: int) -> None:
    """Take away whatever is mapped at reserved addresses; they stay reserved. Raises OSError, and has changed nothing."""
    try:
        libc.mmap(address, size_bytes, libc.PROT_NONE, _NOTHING | libc.MAP_FIXED)
    except OSError:
        if close_hole(address, size_bytes):
            return
        if not _throw_ballast():
            raise
        clear(address, size_bytes)


def close_hole(address: int, size_bytes: int) -> bool:
    """Reserve again what a failed mmap(MAP_FIXED) left open, before other memory of the process lands there.

    Linux takes the old mapping away before it makes the new one, and can fail in between. False if no hole was left:
    then what was mapped before still is.
    """
    try:
        libc.mmap(address, size_bytes, libc.PROT_NONE, _NOTHING | libc.MAP_FIXED_NOREPLACE)
    except OSError:
        return False
    return True


def hold_ballast() -> None:
    """Have some mappings of nothing, to be thrown off when unmapping needs more than the kernel allows. Raises OSError.

    At `vm.max_map_count` Linux refuses even the mmap that takes a mapping away, and what it splits needs one or two more.
    """
    global _ballast
    if _ballast is not None:
        return
    size_bytes = _BALLAST_MAPPINGS * mmap_module.PAGESIZE
    address = libc.mmap(0, size_bytes, libc.PROT_NONE, _NOTHING)
    try:
        for offset_bytes in range(0, size_bytes, 2 * mmap_module.PAGESIZE):  # neighbours that differ stay apart
            libc.mprotect(address + offset_bytes, mmap_module.PAGESIZE, libc.PROT_READ)
    except OSError:
        libc.munmap(address, size_bytes)
        raise
    _ballast = address, size_bytes


def _throw_ballast() -> bool:
    global _ballast
    if _ballast is None:
        return False
    libc.munmap(*_ballast)
    _ballast = None
    return True


def count_mappings() -> tuple[int, int]:
    """How many mappings the process has, and how many the kernel allows. Cost: the kernel writes a line for each."""
    with open("/proc/self/maps", "rb") as maps:
        return sum(b"[vsyscall]" not in line for line in maps), int(_MAX_MAP_COUNT.read_text())


def _reserve_in_child() -> None:
    """After fork(): keep the child's own memory away from the addresses that MADV_DONTFORK left open."""
    for address, size_bytes in _reserved:
        with suppress(OSError):
            libc.mmap(address, size_bytes, libc.PROT_NONE, _NOTHING | libc.MAP_FIXED)


os.register_at_fork(after_in_child=_reserve_in_child)
