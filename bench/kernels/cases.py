"""What is attended to: batches by the lengths of their sequences, and what they cost at least, in bytes and in operations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.settings import Shape
from vmmkv.units import KIB, MIB, ceil_div

COLD_BYTES: Final = 256 * MIB
"""A pass reads at least so much, five times an H200's L2 cache, so that nothing of it is there when the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch: of each sequence its length, and how many of its last tokens ask (None: one each, a decode step)."""

    name: str
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.lengths):
            raise ValueError(f"{self.name}: {len(self.queries)} counts of queries for {len(self.lengths)} sequences")
        if not all(1 <= count <= length for count, length in zip(self.queries, self.lengths, strict=True)):
            raise ValueError(f"{self.name}: a sequence asks with at least 1 token, and with no more than it has")

    @property
    def queries(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return self.counts or (1,) * len(self.lengths)

    @property
    def is_decode(self) -> bool:
        """One query of each sequence?"""
        return self.counts is None

    @property
    def is_uniform(self) -> bool:
        """Are all sequences of one length?"""
        return len(set(self.lengths)) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def bytes_per_layer(self, token_bytes: int) -> int:
        """Bytes of K and V that a layer reads at least; `token_bytes` are those of one token in one layer."""
        return self.num_tokens * token_bytes

    def copies(self, pass_bytes: int) -> int:
        """How many such batches a pass goes over, by turns, so that none of it is found in L2; 1 for a large one."""
        return ceil_div(COLD_BYTES, pass_bytes) if self.is_decode else 1

    def flops_per_layer(self, shape: Shape) -> float:
        """Multiplications and additions of both products: 4 D for each query head, query and row that it sees."""
        seen = sum(
            count * (length - count) + count * (count + 1) // 2
            for count, length in zip(self.queries, self.lengths, strict=True)
        )
        return 4.0 * shape.heads * shape.head_dim * seen


def uniform(count: int, length: int) -> Case:
    """`count` sequences of one length, named as in 64x8K."""
    name = f"{length // KIB}K" if length % KIB == 0 else str(length)
    return Case(name=f"{count}x{name}", lengths=(length,) * count)


SKEWED: Final = Case(name="skewed", lengths=(*(KIB,) * 40, 64 * KIB, *(KIB,) * 23))
"""One of 64K among 63 of 1K; not the last, nor the first."""

TWIN: Final = Case(name="64x2032", lengths=(math.ceil(SKEWED.num_tokens / 64),) * 64)
"""The same bytes as SKEWED in sequences of one length: 127 K rows / 64 = 2032."""

DECODE: Final = (
    uniform(1, 1 * KIB),
    uniform(1, 8 * KIB),
    uniform(1, 128 * KIB),
    uniform(16, 4 * KIB),
    uniform(64, 8 * KIB),
    uniform(256, 2 * KIB),
    uniform(8, 64 * KIB),
    SKEWED,
    TWIN,
)

PREFILL: Final = (
    Case(name="8192", lengths=(8192,), counts=(8192,)),
    Case(name="2048-of-32768", lengths=(32768,), counts=(2048,)),
    Case(
        name="mixed",
        lengths=(2048, 8192, 3000, 129, *range(1024, 1024 + 60 * 37, 37)),
        counts=(2048, 1024, 777, 129, *(1,) * 60),
    ),
)
"""A whole prompt; a chunk late in one; four chunks of several lengths beside sixty rows that decode."""

QUICK_DECODE: Final = (uniform(1, 1 * KIB), uniform(16, 1 * KIB))
QUICK_PREFILL: Final = (Case(name="512", lengths=(512,), counts=(512,)), Case(name="mixed", lengths=(300, 700), counts=(40, 1)))

CPU_DECODE: Final = (
    Case(name="2x96", lengths=(96, 96)),
    Case(name="skewed", lengths=(1, 17, 128, 63)),
)
CPU_PREFILL: Final = (
    Case(name="64", lengths=(64,), counts=(64,)),
    Case(name="mixed", lengths=(48, 64, 7), counts=(5, 64, 1)),
)


def chosen(all_cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those of these names, or all if none is named."""
    return [case for case in all_cases if not names or case.name in names]
