"""Byte units, the page, and the two conversions between bytes and words."""

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

PAGE_BYTES: Final = 2 * MIB
"""The granularity of physical memory: that of `cuMemCreate` on every NVIDIA GPU so far, and of our host driver."""

_DECIMAL: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SUFFIXES: Final = _DECIMAL | {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}


def ceil_div(numerator: int, denominator: int) -> int:
    """The least integer not below `numerator / denominator`."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` not below `value`."""
    return ceil_div(value, multiple) * multiple


def counted(count: int, noun: str, spec: str = "") -> str:
    """A number of things in words: `counted(1, "token") == "1 token"`, `counted(2048, "token", ",") == "2,048 tokens"`."""
    return f"{count:{spec}} {noun}" if count == 1 else f"{count:{spec}} {noun}s"


def format_bytes(size_bytes: int | float) -> str:
    """A size in words, in binary units: `format_bytes(3 * MIB) == "3.0 MiB"`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """A size from words: `"80GiB"`, `"1.5 GB"`, `"4096"`; units of 1000 and of 1024 as written.

    Raises: ValueError naming the units there are.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size: write a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 80GiB")
    return int(float(match[1]) * _SUFFIXES[match[2].upper()])
