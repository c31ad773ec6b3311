"""What is compared: a cache that shares nothing, vmmkv's prefix cache by each method of its ladder, and blocks under a table.

All of them do the same for the same loop (see loop): attach a prompt, see to it that rows can be written, make a prefix known,
end a sequence. A sequence is known by its slot.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bench.prefix.addressing import Addressing

Indices = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]


class Attachment(NamedTuple):
    """A sequence that has begun."""

    slot: int
    num_tokens: int
    """Of its prompt, whose rows are there already."""
    method: str
    """How they came there."""


class System(Protocol):
    """Memory for the sequences of a loop."""

    @property
    def name(self) -> str:
        """As rows have it."""
        ...

    @property
    def addressing(self) -> Addressing:
        """Where rows lie."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots are numbered from 1; 0 is nobody's."""
        ...

    def attach(self, tokens: TokenIds, max_tokens: int) -> Attachment:
        """Begin a sequence of at most so many tokens; all of its prompt but the last may be there already."""
        ...

    def reserve(self, slots: Indices, num_tokens: Indices) -> None:
        """See to it that the first `num_tokens` rows of each slot can be written by what is launched next."""
        ...

    def advance(self, slots: Indices, num_tokens: Indices) -> None:
        """So many more rows of each slot have been launched."""
        ...

    def insert(self, slot: int, tokens: TokenIds) -> None:
        """The first rows of a slot are confirmed to be of these tokens: others may share them."""
        ...

    def finish(self, slot: int, tokens: TokenIds) -> None:
        """The sequence is over, and these are the tokens of its rows."""
        ...

    def map_ahead(self, budget_us: float, step_us: float) -> None:
        """There is so much time while the device works. Steps take `step_us`."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that sequences and the tree hold; and those that running sequences use."""
        ...

    def driver_us(self) -> float:
        """What the driver's calls have taken so far."""
        ...

    def driver_calls(self) -> Mapping[str, int]:
        """How many there were, by name."""
        ...

    def rows(self, layer: int, slot: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot's first rows: [num_tokens, kv_heads, head_dim] each."""
        ...

    def write(self, layer: int, slot: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Fill a slot's first rows."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


def calls_since(before: Mapping[str, int], system: System) -> Counter[str]:
    """Driver calls by name since a count was taken."""
    now = Counter(system.driver_calls())
    now.subtract(before)
    return +now
