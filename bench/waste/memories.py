"""What is compared, as the simulation sees it: memory for sequences that come, get a row a step, and go.

Nothing is computed and nothing is written: only who holds how much is real. Static and blocks are here, vmmkv is in slots.
A sequence is known by its slot, from 1 on.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bench.baselines.blocks import BLOCK_ROWS
from bench.prefix.paged import Paged
from bench.settings import Shape
from bench.timing import WrongNumbers
from bench.waste.sizes import MAX_TOKENS
from vmmkv.units import ceil_div

Indices = npt.NDArray[np.int64]

_ENTRY_BYTES: Final = 4
"""Of a block table."""
_NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that a system holds at one moment."""

    rows_bytes: int
    """For running sequences: their rows, what is not yet filled, and what was mapped ahead. Of one row at least each."""
    tables_bytes: int = 0
    """For running sequences, to find their rows."""
    kept_bytes: int = 0
    """For nobody who runs, and to be had at once by whoever needs it."""


class Memory(Protocol):
    """Memory of a fixed budget. A caller holds it against what the rows need (see loop)."""

    @property
    def name(self) -> str:
        """As rows have it."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots are numbered from 1."""
        ...

    @property
    def unfilled_bytes(self) -> float:
        """What a sequence of any length holds on average for rows that are not there yet, at the least: for the last page."""
        ...

    @property
    def lookahead_tokens(self) -> int:
        """So many tokens ahead was memory mapped last; 0 for a system that does not map ahead."""
        ...

    def fits(self, num_rows: int, spare_bytes: int) -> bool:
        """Would a newcomer of so many rows find memory, and leave so much for those who run?"""
        ...

    def begin(self, num_rows: int) -> int:
        """A newcomer whose prompt is computed in this step; its slot."""
        ...

    def lacking(self, slots: Indices) -> Indices:
        """Those of the running sequences that have no memory for their next row."""
        ...

    def reserve(self, slot: int) -> None:
        """See to it that one of them has. Raises: OutOfPages."""
        ...

    def launch(self, slots: Indices) -> None:
        """The device begins to write the next row of each of these, all that run."""
        ...

    def idle(self, step_us: float) -> None:
        """The device is busy with it for so long, and the host is not. When this returns the step is over."""
        ...

    def end(self, slot: int) -> None:
        """A sequence is over, or gives way."""
        ...

    def held(self) -> Held:
        """By the allocator's own account."""
        ...

    def laid_bytes(self, num_rows: Indices) -> int:
        """What sequences of so many rows hold if nothing is mapped ahead: by arithmetic, not by the allocator."""
        ...

    def check(self, slots: Indices, num_rows: Indices) -> None:
        """Recount everything, and hold it against the rows of all that run. Raises: WrongNumbers, AssertionError."""
        ...

    def close(self) -> None:
        """All sequences have ended: give everything back. Raises: WrongNumbers if anything is held by then."""
        ...


class Static:
    """Rows for MAX_TOKENS tokens laid for every sequence when it comes, whatever it needs."""

    def __init__(self, shape: Shape, budget_bytes: int) -> None:
        self.name: Final = f"static {MAX_TOKENS}"
        self._slot_bytes = MAX_TOKENS * shape.layout.row_bytes
        self.num_slots: Final = budget_bytes // self._slot_bytes
        self.unfilled_bytes: Final = 0.0
        """There is no last page: what is unfilled here is all its waste, and no bound of anything."""
        self.lookahead_tokens: Final = 0
        self._free = list(range(self.num_slots, 0, -1))

    def fits(self, num_rows: int, spare_bytes: int) -> bool:
        """See Memory.fits. Nobody grows, so nothing is to be spared."""
        return bool(self._free)

    def begin(self, num_rows: int) -> int:
        """See Memory.begin."""
        return self._free.pop()

    def lacking(self, slots: Indices) -> Indices:
        """See Memory.lacking."""
        return slots[:0]

    def reserve(self, slot: int) -> None:
        """See Memory.reserve."""

    def launch(self, slots: Indices) -> None:
        """See Memory.launch."""

    def idle(self, step_us: float) -> None:
        """See Memory.idle."""

    def end(self, slot: int) -> None:
        """See Memory.end."""
        self._free.append(slot)

    def held(self) -> Held:
        """See Memory.held."""
        return Held(rows_bytes=(self.num_slots - len(self._free)) * self._slot_bytes)

    def laid_bytes(self, num_rows: Indices) -> int:
        """See Memory.laid_bytes."""
        return len(num_rows) * self._slot_bytes

    def check(self, slots: Indices, num_rows: Indices) -> None:
        """See Memory.check."""
        if set(slots.tolist()) & set(self._free) or len(slots) + len(self._free) != self.num_slots:
            raise WrongNumbers(f"{self.name}: {len(slots)} sequences run and {len(self._free)} slots are free")
        if (num_rows > MAX_TOKENS).any():
            raise WrongNumbers(f"{self.name}: a sequence has {num_rows.max()} rows")

    def close(self) -> None:
        """See Memory.close."""
        if len(self._free) != self.num_slots:
            raise WrongNumbers(f"{self.name}: {self.num_slots - len(self._free)} slots are taken and nobody runs")


class Tables:
    """Blocks of 16 rows under block tables, by the allocator of the prefix suite.

    That one owns a tensor, which is never touched here: it is given a shape of one small head, and its blocks are counted as
    the real shape's. Nothing is shared or kept: sequences end without their tokens being said.
    """

    def __init__(self, shape: Shape, budget_bytes: int, *, slots: int) -> None:
        self.name: Final = f"paged {BLOCK_ROWS}"
        self.num_slots: Final = slots
        row_bytes = shape.layout.row_bytes
        self._block_bytes = BLOCK_ROWS * row_bytes
        # A row fills its block on average by half, but for the one that is there.
        self.unfilled_bytes: Final = (BLOCK_ROWS - 1) / 2 * row_bytes
        self.lookahead_tokens: Final = 0
        self._num_blocks = budget_bytes // self._block_bytes
        self._table_bytes = ceil_div(MAX_TOKENS, BLOCK_ROWS) * _ENTRY_BYTES
        self._paged = open_paged(num_blocks=self._num_blocks, slots=slots, max_tokens=MAX_TOKENS)
        self._rows = np.zeros(1 + slots, np.int64)
        self._blocks = np.zeros(1 + slots, np.int64)

    def fits(self, num_rows: int, spare_bytes: int) -> bool:
        """See Memory.fits."""
        free = self._num_blocks - paged_blocks(self._paged)
        return (free - ceil_div(num_rows, BLOCK_ROWS)) * self._block_bytes >= spare_bytes

    def begin(self, num_rows: int) -> int:
        """See Memory.begin."""
        slot = self._paged.attach(_NO_TOKENS, MAX_TOKENS).slot
        self._lay(slot, num_rows)
        self._rows[slot] = num_rows
        return slot

    def lacking(self, slots: Indices) -> Indices:
        """See Memory.lacking."""
        return slots[self._rows[slots] >= self._blocks[slots] * BLOCK_ROWS]

    def reserve(self, slot: int) -> None:
        """See Memory.reserve."""
        self._lay(slot, int(self._rows[slot]) + 1)

    def launch(self, slots: Indices) -> None:
        """See Memory.launch."""
        self._rows[slots] += 1

    def idle(self, step_us: float) -> None:
        """See Memory.idle. There is nothing to do ahead."""

    def end(self, slot: int) -> None:
        """See Memory.end."""
        self._paged.finish(slot, _NO_TOKENS)
        self._rows[slot] = self._blocks[slot] = 0

    def held(self) -> Held:
        """See Memory.held. A running sequence's table has a column for each block that it may come to have."""
        num_running = int(np.count_nonzero(self._rows))
        return Held(
            rows_bytes=paged_blocks(self._paged) * self._block_bytes,
            tables_bytes=num_running * self._table_bytes,
        )

    def laid_bytes(self, num_rows: Indices) -> int:
        """See Memory.laid_bytes."""
        return int((-(-num_rows // BLOCK_ROWS)).sum()) * self._block_bytes

    def check(self, slots: Indices, num_rows: Indices) -> None:
        """See Memory.check. Blocks are counted by the allocator, in the tables, and from the rows."""
        in_tables = self._paged.tables_SC[torch.from_numpy(slots)].numpy()
        columns = np.arange(in_tables.shape[1])
        blocks = in_tables[columns < -(-num_rows[:, None] // BLOCK_ROWS)]
        counts = paged_blocks(self._paged), len(np.unique(blocks)), self.laid_bytes(num_rows) // self._block_bytes
        if len(set(counts)) > 1 or (blocks < 0).any():
            raise WrongNumbers(
                f"{self.name}: the allocator holds {counts[0]} blocks, tables {counts[1]}, rows need {counts[2]}"
            )

    def close(self) -> None:
        """See Memory.close."""
        held = paged_blocks(self._paged)
        self._paged.close()
        if held:
            raise WrongNumbers(f"{self.name}: {held} blocks are held and nobody runs")

    def _lay(self, slot: int, num_rows: int) -> None:
        self._paged.reserve(np.array([slot]), np.array([num_rows]))
        self._blocks[slot] = ceil_div(num_rows, BLOCK_ROWS)


_COUNTED: Final = Shape(name="counted", layers=1, heads=1, kv_heads=1, head_dim=1, dtype=torch.float16, weight_bytes=0)


def open_paged(*, num_blocks: int, slots: int, max_tokens: int) -> Paged:
    """Blocks that are counted and hold nothing."""
    return Paged(_COUNTED, torch.device("cpu"), num_blocks=num_blocks, slots=slots, max_tokens=max_tokens)


def paged_blocks(paged: Paged) -> int:
    """Of these, how many sequences or the tree hold."""
    return paged.memory()[0] // (BLOCK_ROWS * _COUNTED.layout.row_bytes)
