"""What the engine wants of its KV memory. `KVCache` and `PrefixCache` are that; so can be another way of keeping rows.

Who implements these says in which order memory is written: a step touches what was there when it was launched.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVLayout
from vmmkv.cache import CacheStats
from vmmkv.prefix import PrefixStats

TokenIds = npt.NDArray[np.int32]


class KVSequence(Protocol):
    """The rows of one sequence."""

    slot: int
    """Where they are, as the device knows it; from 1."""

    @property
    def length(self) -> int:
        """Tokens that have rows, or will have when what is launched is done."""
        ...

    def grow(self, num_tokens: int) -> None:
        """Memory for so many tokens in all. Raises: OutOfPages; DriverError; then nothing has changed."""
        ...

    def advance(self, num_tokens: int = 1) -> None:
        """So many more rows are launched."""
        ...

    def start(self, group: int = 0) -> int:
        """The first row that a group of layers still keeps."""
        ...

    def advance_start(self, group: int) -> None:
        """Give back the rows that have left a group's window."""
        ...

    def close(self) -> None:
        """It is over; its memory is another's once the device is done with it."""
        ...


class KV(Protocol):
    """See `vmmkv.KVCache`, which says what each of these does and costs."""

    @property
    def layout(self) -> KVLayout:
        """What a row is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rows are."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of one sequence."""
        ...

    @property
    def num_slots(self) -> int:
        """Sequences that there can be; slot 0 is nobody's."""
        ...

    @property
    def limit(self) -> torch.Tensor:
        """[1 + slots] int32 on the device: rows below it may be written."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[1 + slots] rows launched."""
        ...

    @property
    def limits(self) -> npt.NDArray[np.int32]:
        """[1 + slots] `limit` as the host knows it."""
        ...

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> KVSequence:
        """A new sequence."""
        ...

    # What comes from `open`, `fork` or `attach` goes back to the same memory, whatever it is: its type is that memory's own.

    def fork(self, sequence: Any, count: int = 1, *, max_tokens: int | None = None) -> Sequence[Any]:
        """New sequences that have all tokens of a running one. Only beam searches ask for it."""
        ...

    def copy_rows(self, pairs: Iterable[tuple[Any, Any]], first: int, end: int) -> None:
        """The second of each pair takes rows [first, end) of the first. Only beam searches ask for it."""
        ...

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """So many more rows of each slot are launched."""
        ...

    def lookahead_tokens(self, step_us: float) -> int:
        """How many tokens ahead there should be memory."""
        ...

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int) -> int:
        """Get memory ahead of need, while the device works."""
        ...

    def drain(self) -> None:
        """Nothing runs: give back what waits to be given back."""
        ...

    def stats(self) -> CacheStats:
        """What is held, and for what."""
        ...


class Attached(Protocol):
    """A sequence that has begun with what was known of its tokens."""

    @property
    def sequence(self) -> Any:
        """The sequence."""
        ...

    @property
    def num_tokens(self) -> int:
        """Rows that it has."""
        ...


class Prefixes(Protocol):
    """See `vmmkv.prefix.PrefixCache`, which says what each of these does and costs."""

    def match(self, tokens: TokenIds, *, namespace: Hashable = None) -> int:
        """How many of the first tokens are known."""
        ...

    def attach(
        self, tokens: TokenIds, *, namespace: Hashable = None, max_tokens: int | None = None, num_steps: int = 0
    ) -> Attached:
        """A new sequence with what is known of its tokens, but for the last."""
        ...

    def insert(self, sequence: Any, tokens: TokenIds) -> None:
        """The first rows of a sequence are confirmed to be of these tokens."""
        ...

    def park(self, sequence: Any, tokens: TokenIds) -> None:
        """A sequence is over; it may be gone on from."""
        ...

    def release(self, sequence: Any, tokens: TokenIds) -> None:
        """A sequence is over, or gives way."""
        ...

    def promote(self, budget_us: float) -> int:
        """Spend idle time on what many attach."""
        ...

    def free_slots(self, count: int) -> None:
        """See to it that so many slots can be had at once."""
        ...

    def evict(self) -> int:
        """Forget what no running sequence uses."""
        ...

    def stats(self) -> PrefixStats:
        """What is held and what was done."""
        ...
