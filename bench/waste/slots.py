"""vmmkv as the simulation sees it: the real cache, pool and mapper, over a driver that has addresses and no memory.

No figure here depends on the device, for they are counts of bytes, and of the same seed they are the same. What could make them
depend on it is how far ahead is mapped. `KVCache.lookahead_tokens` computes that from two stated times: that of a step
(see loop), and what mapping a page takes on an H200, which the mapper is told instead of what it measures over this driver.
"""

from math import gcd
from typing import Final

import numpy as np

from bench.settings import Shape
from bench.timing import WrongNumbers
from bench.waste.memories import Held, Indices
from bench.waste.sizes import MAX_TOKENS, SLACK_SHARE
from vmmkv import KVCache, Pool, Sequence
from vmmkv.testing.fake_driver import FakeDriver, Launch
from vmmkv.units import MIB, PAGE_BYTES

PAGE_US: Final = 75.0
"""What a page costs on an H200, with the Python (docs/performance.md). Unmapping it is in there, so the lead errs high."""

_WATCHED_EVERY: Final = 8
"""Steps of which the driver is told: it looks at each row of each, which takes longer than all else of a step."""


class Slots:
    """See memories.Memory. Guard 0; sequences do not say when they will end; who ends is parked, as the engine does.

    Parked memory is cache: whoever needs it has it, and it is counted apart. No two prompts begin alike, so nobody adopts a
    parked slot with what was mapped there for somebody longer: `memory_map` shows what that looks like.
    """

    def __init__(self, shape: Shape, budget_bytes: int, *, slots: int) -> None:
        self.name: Final = "vmmkv"
        self.num_slots: Final = slots
        self.lookahead_tokens = 0
        """With which was pumped last."""
        self._row_bytes = shape.layout.row_bytes
        # What lies behind the last row is a multiple of what rows and pages have in common, each as likely.
        self.unfilled_bytes: Final = (PAGE_BYTES - gcd(PAGE_BYTES, self._row_bytes)) / 2
        self._driver = FakeDriver(memory_bytes=budget_bytes + 16 * MIB)  # the pad is beyond the budget
        self._pool = Pool("cpu", budget_bytes, driver=self._driver)
        self._cache = KVCache(shape.layout, self._pool, slots=slots, max_tokens=MAX_TOKENS)
        self._sequences: dict[int, Sequence] = {}
        self._asked = np.zeros(1 + slots, np.int64)
        """Rows that memory was asked for: the most that may be mapped."""
        self._running: Launch | None = None
        self._num_launches = 0
        keys_SUKD = self._cache.k(0)
        self._first_address = keys_SUKD.data_ptr()
        self._slot_bytes = keys_SUKD.stride(0) * keys_SUKD.itemsize

    def fits(self, num_rows: int, spare_bytes: int) -> bool:
        """See Memory.fits."""
        pages_bytes = self._cache.layout.pages_for(num_rows) * PAGE_BYTES
        return self._pool.used_bytes + pages_bytes + spare_bytes <= self._pool.budget_bytes

    def begin(self, num_rows: int) -> int:
        """See Memory.begin."""
        sequence = self._cache.open()
        sequence.grow(num_rows)
        sequence.advance(num_rows)
        self._sequences[sequence.slot] = sequence
        self._asked[sequence.slot] = num_rows
        return sequence.slot

    def lacking(self, slots: Indices) -> Indices:
        """See Memory.lacking."""
        return slots[self._cache.lengths[slots] >= self._cache.limits[slots]]

    def reserve(self, slot: int) -> None:
        """See Memory.reserve."""
        sequence = self._sequences[slot]
        sequence.grow(sequence.length + 1)
        self._asked[slot] = max(self._asked[slot], sequence.length + 1)

    def launch(self, slots: Indices) -> None:
        """See Memory.launch. In some steps the driver sees to it that these rows are mapped, and stay so until the end."""
        self._num_launches += 1
        if self._num_launches % _WATCHED_EVERY == 0:
            self._watch(slots)
        self._cache.advance(slots)

    def idle(self, step_us: float) -> None:
        """See Memory.idle."""
        self._cache.memory.mapper.map_us = PAGE_US
        self.lookahead_tokens = self._cache.lookahead_tokens(SLACK_SHARE * step_us)
        self._cache.map_ahead(lookahead_tokens=self.lookahead_tokens)  # without a limit
        slots = np.fromiter(self._sequences, np.int64, len(self._sequences))
        wanted = np.minimum(self._cache.lengths[slots] + self.lookahead_tokens, MAX_TOKENS)
        self._asked[slots] = np.maximum(self._asked[slots], wanted)
        if self._running is not None:
            self._running.finish()

    def end(self, slot: int) -> None:
        """See Memory.end."""
        self._sequences.pop(slot).park()
        self._asked[slot] = 0

    def held(self) -> Held:
        """See Memory.held."""
        stats = self._cache.stats()
        return Held(
            rows_bytes=stats.mapped_bytes - stats.parked_bytes, kept_bytes=stats.pool_held_bytes - stats.pool_used_bytes
        )

    def laid_bytes(self, num_rows: Indices) -> int:
        """See Memory.laid_bytes."""
        return int((-(-num_rows * self._row_bytes // PAGE_BYTES)).sum()) * PAGE_BYTES

    def check(self, slots: Indices, num_rows: Indices) -> None:
        """See Memory.check. The cache recounts its laws; pages are counted under the slots, in the pool, and from the rows."""
        self._cache.check()
        stats, held_bytes = self._cache.stats(), self.held().rows_bytes
        if stats.token_bytes != int(num_rows.sum()) * self._row_bytes or stats.num_sequences != len(slots):
            raise WrongNumbers(f"vmmkv: {stats.num_sequences} sequences have {stats.num_tokens} rows, not {num_rows.sum()}")
        if held_bytes != stats.pool_used_bytes:
            raise WrongNumbers(
                f"vmmkv: {held_bytes} bytes are mapped under sequences, {stats.pool_used_bytes} used of the pool"
            )
        least_bytes, most_bytes = self.laid_bytes(num_rows), self.laid_bytes(self._asked[slots])
        if not least_bytes <= held_bytes <= most_bytes:
            raise WrongNumbers(
                f"vmmkv: {held_bytes} bytes are held; the rows need {least_bytes}, and {most_bytes} were ever asked for"
            )

    def close(self) -> None:
        """See Memory.close."""
        used_bytes = self._pool.used_bytes
        self._pool.close()
        if used_bytes or self._pool.created_bytes or self._driver.live_mappings or self._driver.live_handles:
            raise WrongNumbers(
                f"vmmkv: {used_bytes} bytes were used and nobody ran; {self._driver.live_mappings} mappings and "
                f"{self._driver.live_handles} handles are left"
            )

    def _watch(self, slots: Indices) -> None:
        addresses = self._first_address + slots * self._slot_bytes + self._cache.lengths[slots] * self._row_bytes
        self._running = self._driver.launch([(start, start + self._row_bytes) for start in addresses.tolist()])
