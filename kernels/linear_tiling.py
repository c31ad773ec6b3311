"""How a linear layer of few rows is cut into programs and steps.

Legend: M rows of x, N rows of the weight (of the gate alone, where it is gated), K columns of both.
"""

import functools
from dataclasses import dataclass
from typing import Final

import triton

from vmmkv.units import MIB, ceil_div

_LARGE_BYTES: Final = 64 * MIB
_SMALL_BYTES: Final = 16 * MIB
"""Of a weight: streamed from memory for long enough to fill the pipeline, or over before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiling:
    """How a launch is cut; what a row of x is summed up from, and in which order, depends on no other row."""

    dots: bool
    """Multiply on tensor cores, from shared memory; else without, from registers."""
    tile_n: int
    """Rows of the weight of a program; if gated, as many of gate and of up each."""
    tile_k: int
    """Columns in one step."""
    num_warps: int = 4
    depth: int = 2
    """Steps whose loads are under way ahead: in registers without dots, in shared memory with them."""
    splits: int = 1
    """Parts of a step's columns, each the dot of a warp of its own; only with dots, and then 1 or `num_warps`."""
    prefetch_bytes: int = 0
    """Of each row of the weight, behind what is loaded early anyway: into L2, before the kernel waits for the one before it."""

    max_registers: int | None = None
    """Of a thread; None leaves it to the compiler, which takes as many as it finds loads to begin early."""

    def __post_init__(self) -> None:
        assert self.splits in (1, self.num_warps), "a batch of dots is dealt to warps"
        assert not self.dots or self.tile_n >= 16, "the fewest rows of the first operand"
        assert self.dots or self.splits == 1, "registers are summed up over all warps anyway"


def padded_rows(num_rows: int, dots: bool) -> int:
    """Rows of x in a program: with dots 8 at least, as a tensor core takes them."""
    padded: int = triton.next_power_of_2(num_rows)
    return max(8 if dots else 1, padded)


@functools.cache
def linear_tiling(num_rows: int, num_outputs: int, num_columns: int, itemsize: int, gated: bool) -> LinearTiling:
    """The tiling of a shape; `num_outputs` is N of the result.

    One row is bound by memory whatever multiplies it, so it needs no tensor cores: the weights go from memory to registers and
    stay there. More rows would be bound by arithmetic, and float32 has no tensor cores here.
    """
    if num_rows == 1 or itemsize == 4:
        return _in_registers(num_rows, num_outputs, num_columns, itemsize, gated)
    return _on_tensor_cores(num_rows, num_outputs, num_columns, gated)


def _in_registers(num_rows: int, num_outputs: int, num_columns: int, itemsize: int, gated: bool) -> LinearTiling:
    """tile_k: of 16 bytes a thread, so that the threads of a program are side by side along a row.

    Measured on an H200 with one row, bf16, in a captured chain: many programs of few rows with
    many steps under way stream large weights best; small ones are over before that pays, and want larger programs.
    """
    tile_k = min(2048 // itemsize, max(16, triton.next_power_of_2(num_columns)))
    if num_rows == 1 and itemsize == 2:
        weight_bytes = num_outputs * num_columns * itemsize * (2 if gated else 1)
        if gated and weight_bytes >= _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=1, tile_k=tile_k, depth=4)
        if num_columns >= 8192:
            return LinearTiling(dots=False, tile_n=2, tile_k=2 * tile_k, depth=3)
        if num_columns <= 1024 and weight_bytes < _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=min(tile_k, 512), num_warps=2)
        if weight_bytes < _SMALL_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, depth=3)
        if weight_bytes >= 4 * _LARGE_BYTES:
            return LinearTiling(dots=False, tile_n=2, tile_k=tile_k, depth=4)
        if weight_bytes < 3 * _SMALL_BYTES:
            return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, max_registers=96)
        return LinearTiling(dots=False, tile_n=4, tile_k=tile_k, depth=3, max_registers=128)
    tile_n = max(1, 8192 // (tile_k * itemsize * (2 if gated else 1) * padded_rows(num_rows, False)))
    while tile_n > 1 and ceil_div(num_outputs, tile_n) < 512:
        tile_n //= 2
    return LinearTiling(dots=False, tile_n=tile_n, tile_k=tile_k)


def _on_tensor_cores(num_rows: int, num_outputs: int, num_columns: int, gated: bool) -> LinearTiling:
    """tile_n: 16, which deals most layers evenly to 132 SMs; more where x, read by every program, would weigh as much as they.

    tile_k: 512 columns, of which each of 4 warps has 128. depth: three steps of 16 KiB; a layer of two steps wants all at once.
    """
    tile_n = 16 if num_rows <= 8 or num_outputs < 16384 or gated else 32
    tile_k = min(512, max(64, triton.next_power_of_2(num_columns)))
    depth = 4 if num_columns <= 1024 and not gated and num_outputs < 65536 and num_rows <= 8 else 3
    return LinearTiling(dots=True, tile_n=tile_n, tile_k=tile_k, depth=depth, splits=4, prefetch_bytes=2048)
