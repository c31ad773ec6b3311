"""The calls of libc by which the host driver moves memory; a failure is an OSError with errno.

Python's own `mmap` can neither map at a given address nor change what is mapped.
"""

import ctypes
import os
from typing import Any, Final

PROT_NONE: Final = 0
PROT_READ: Final = 1
PROT_WRITE: Final = 2
MAP_SHARED: Final = 0x01
MAP_PRIVATE: Final = 0x02
MAP_FIXED: Final = 0x10
MAP_ANONYMOUS: Final = 0x20
MAP_NORESERVE: Final = 0x4000
MAP_FIXED_NOREPLACE: Final = 0x100000
MADV_DONTFORK: Final = 10
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_libc, name)
    function.restype, function.argtypes = result, arguments
    return function


_mmap = _function(
    *("mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
)
_munmap = _function("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_mprotect = _function("mprotect", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise = _function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _failure(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int = -1, offset_bytes: int = 0) -> int:
    """mmap(2). Returns the address of the mapping."""
    result: int | None = _mmap(address, size_bytes, protection, flags, fd, offset_bytes)
    if result is None or result == _MAP_FAILED:
        raise _failure("mmap")
    return result


def munmap(address: int, size_bytes: int) -> None:
    """munmap(2)."""
    if _munmap(address, size_bytes):
        raise _failure("munmap")


def mprotect(address: int, size_bytes: int, protection: int) -> None:
    """mprotect(2)."""
    if _mprotect(address, size_bytes, protection):
        raise _failure("mprotect")


def madvise(address: int, size_bytes: int, advice: int) -> None:
    """madvise(2)."""
    if _madvise(address, size_bytes, advice):
        raise _failure("madvise")


def fallocate(fd: int, mode: int, offset_bytes: int, size_bytes: int) -> None:
    """fallocate(2), again when a signal breaks it off: the kernel has then taken back what it had done."""
    while _fallocate(fd, mode, offset_bytes, size_bytes):
        failure = _failure("fallocate")
        if not isinstance(failure, InterruptedError):
            raise failure
