"""Functions for the compiler's worker, which imports this module."""

import os
import time
from typing import NoReturn


def crash(kind: str, source: str) -> bytes:
    """End the process, as C++ does where an allocation fails."""
    os.abort()


def hoard(kind: str, source: str) -> bytes:
    """More memory than a grammar may take."""
    return bytes(3 << 30)


def sleep(kind: str, source: str) -> bytes:
    """Take time, and no CPU."""
    time.sleep(1.5)
    return b"1.5"


def fail_to_load(*vocabulary: object) -> NoReturn:
    """Raises: OSError with a path in its message."""
    raise OSError("/a/path is missing")


def refuse(kind: str, source: str) -> bytes:
    """Refuse each grammar."""
    raise ValueError("it is too large")
