"""The requests that decode, as arrays, and what a step need not look at."""

from typing import Final

import numpy as np

from vmmkv_server.engine.kv_backend import KVBackend, Slots
from vmmkv_server.engine.request import RequestTable


class DecodeSet:
    """The slots whose next token is on the device, the oldest first, but for those of which the last token has been launched.

    A slot that is compacted next is not in it either.

    Two counts save most steps a look at each slot. For every slot of the set

        _num_roomy   <= limit - length                          rows that are mapped already
        _num_wanting <= max_tokens - num_coming, end - length   tokens that are wanted yet, rows before it is compacted

    Each launched step lowers both by one, as it does the right sides. A slot that joins lowers them to its own, one that leaves
    leaves them as they are. At 0 they are counted again.
    """

    def __init__(self, table: RequestTable, memory: KVBackend) -> None:
        self.slots: Slots = np.zeros(0, np.int64)
        """Never changed in place: steps have it."""
        self.epochs = self.slots
        """Epochs of the slots."""
        self._table: Final = table
        self._memory: Final = memory
        self._num_roomy = self._num_wanting = 0

    def join(self, slots: list[int]) -> None:
        """Add slots that decode from now on."""
        joined = np.append(self.slots, slots)
        self._set(joined[self._table.places[joined].argsort(kind="stable")])
        room = self._memory.limits[slots] - self._memory.lengths[slots]
        self._num_roomy = max(0, min(self._num_roomy, int(room.min())))
        self._num_wanting = min(self._num_wanting, int(self._wanted(np.array(slots)).min()))

    def leave(self, slot: int) -> None:
        """Remove a slot, if it decodes."""
        self._set(self.slots[self.slots != slot])

    def without_room(self) -> list[int]:
        """The slots that have no room for their next row."""
        if self._num_roomy or not self.slots.size:
            return []
        room = self._memory.limits.take(self.slots) - self._memory.lengths.take(self.slots)
        self._num_roomy = max(0, int(room.min()))
        found: list[int] = self.slots[room <= 0].tolist()
        return found

    def launched(self, sampled: list[int]) -> None:
        """A step of these slots has been launched, and their tables say so; the next one has the sampled slots too."""
        self._num_roomy = max(0, self._num_roomy - 1)
        self._num_wanting -= 1
        if sampled:
            self.join(sampled)
        if self._num_wanting <= 0 and self.slots.size:
            wanted = self._wanted(self.slots)
            if wanted.min() <= 0:
                self._set(self.slots[wanted > 0])
            self._num_wanting = int(wanted[wanted > 0].min(initial=np.iinfo(np.int64).max))

    def _wanted(self, slots: Slots) -> Slots:
        """Steps until each slot has its last token, or is compacted."""
        table = self._table
        num_tokens = table.max_tokens[slots] - table.num_coming[slots]
        num_rows = table.ends[slots] - self._memory.lengths[slots]
        wanted: Slots = np.minimum(num_tokens, num_rows)
        return wanted

    def _set(self, slots: Slots) -> None:
        self.slots, self.epochs = slots, self._table.epochs.take(slots)
