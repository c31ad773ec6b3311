"""KV memory that is all taken at once, under slots that are numbers: the base of the baselines, and static slots."""

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVLayout
from vmmkv.cache import CacheStats
from vmmkv.errors import OutOfPages, RowsUnmapped
from vmmkv.layout import Plane
from vmmkv.prefix import PrefixStats
from vmmkv.sequence import Planes
from vmmkv_server.engine.attention import KVRows
from vmmkv_server.engine.kv_backend import KVSequence, TokenIds
from vmmkv_server.engine.uploads import Uploads


class BaselineSequence:
    """See KVSequence."""

    def __init__(self, cache: "BaselineCache", slot: int, max_tokens: int, namespace: Hashable) -> None:
        self._cache = cache
        self.slot = slot
        self.max_tokens: Final = max_tokens
        self.namespace: Final = namespace
        self.closed = False

    @property
    def length(self) -> int:
        """Rows launched."""
        return int(self._cache.lengths[self.slot])

    def grow(self, num_tokens: int) -> None:
        """Memory for so many tokens. Raises: OutOfPages; then nothing has changed."""
        assert num_tokens <= self.max_tokens, f"a sequence of {self.max_tokens} tokens at most grows to {num_tokens}"
        if num_tokens > self._cache.limits[self.slot]:
            self._cache.reserve(self.slot, num_tokens)

    def advance(self, num_tokens: int = 1) -> None:
        """So many more rows are launched."""
        self._cache.advance(self.slot, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first rows, and the memory of all."""
        assert num_tokens <= self.length
        self._cache.lengths[self.slot] = num_tokens

    def close(self) -> None:
        """Free its slot. What is launched later comes later on the stream, so nothing waits. Idempotent."""
        if not self.closed:
            self.closed = True
            self._cache.end(self)


class BaselineCache(Planes):
    """K and V of each layer in plain tensors [*size, kv_heads, head_dim]. See KVBackend. Sequences share no rows here.

    Raises: ValueError for windows, several groups of layers, and quantised rows.
    """

    shares_prefixes = False
    cache: Final = None
    prefixes: Final = None
    rows: KVRows
    num_tokens: int

    def __init__(
        self, layout: KVLayout, device: torch.device, *, slots: int, max_tokens: int, num_rows: tuple[int, int]
    ) -> None:
        """`num_rows`: of each piece of memory, and pieces."""
        group = layout.groups[0]
        if len(layout.groups) > 1 or group.window is not None or [plane.name for plane in group.planes] != ["k", "v"]:
            raise ValueError("a baseline keeps K and V as they are, of all layers alike, without windows: this model differs")

        def zeroes(plane: Plane) -> torch.Tensor:
            return torch.zeros(*num_rows, plane.heads, plane.dim, dtype=plane.dtype, device=device)

        k, v = group.planes
        self.planes: Final = {layer: (zeroes(k), zeroes(v)) for layer in layout.group_of}
        self.layout: Final = layout
        self.device: Final = device
        self.num_slots: Final = slots
        self.max_tokens: Final = max_tokens
        self.lengths: Final[npt.NDArray[np.int64]] = np.zeros(1 + slots, np.int64)
        self.limits: Final[npt.NDArray[np.int32]] = np.zeros(1 + slots, np.int32)
        self.limit: Final = torch.zeros(1 + slots, dtype=torch.int32, device=device)
        self.uploads: Final = Uploads(device)
        self.sequences: Final[dict[int, BaselineSequence]] = {}
        """By slot."""
        self._free = list(range(slots, 0, -1))

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """[*size, kv_heads, head_dim]"""
        return self.planes[layer]["kv".index(plane)]

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> BaselineSequence:
        """A new sequence without rows. Memory of other tenants is not zeroed. Raises: OutOfPages if all slots run one."""
        if not self._free:
            raise OutOfPages(f"all {self.num_slots} slots run a sequence")
        slot = self._free.pop()
        self.sequences[slot] = BaselineSequence(self, slot, max_tokens or self.max_tokens, tenant)
        return self.sequences[slot]

    def begin(self) -> BaselineSequence:
        """Begin a sequence without rows. Raises: OutOfPages if all slots run one."""
        return self.open()

    def attach(self, tokens: TokenIds, *, namespace: Hashable, max_tokens: int) -> tuple[BaselineSequence, int]:
        """Begin a sequence without rows: nothing is shared."""
        return self.open(max_tokens=max_tokens, tenant=namespace), 0

    def lookup(self, tokens: TokenIds, *, namespace: Hashable) -> Callable[[], int]:
        """Function that finds no row: nothing is shared."""
        return lambda: 0

    def advance(self, slots: npt.ArrayLike, num_tokens: npt.ArrayLike = 1) -> None:
        """Count `num_tokens` more rows of each slot as launched."""
        indices = np.atleast_1d(np.asarray(slots, np.int64))
        after = self.lengths[indices] + np.asarray(num_tokens, np.int64)
        if (beyond := after > self.limits[indices]).any():
            slot = int(indices[beyond][0])
            raise RowsUnmapped(f"slot {slot} cannot have {int(after[beyond][0])} rows: its limit is {self.limits[slot]}")
        self.lengths[indices] = after

    @abstractmethod
    def reserve(self, slot: int, num_tokens: int) -> None:
        """Have memory for more tokens than a slot's limit. Raises: OutOfPages; then nothing has changed."""

    def insert(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """Keep nothing for others: no rows are shared."""

    def park(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """End a sequence. Nothing is kept of it but what others may attach to."""
        self.release(sequence, tokens)

    def release(self, sequence: KVSequence, tokens: TokenIds) -> None:
        """End a sequence whose memory is needed."""
        self.insert(sequence, tokens)
        sequence.close()

    def end(self, sequence: BaselineSequence) -> None:
        """Free its slot. The device's limit stays until the next sequence's: nothing is launched there before."""
        del self.sequences[sequence.slot]
        self.lengths[sequence.slot] = self.limits[sequence.slot] = 0
        self._free.append(sequence.slot)

    def map_ahead(self, budget_us: float, *, lookahead_tokens: int = 1) -> None:
        """Get the memory of the next token. Blocks cost nothing to get, so that is soon enough."""

    def drain(self) -> None:
        """Give back nothing: ended sequences have left nothing."""

    def evict(self) -> None:
        """Evict nothing: no row outlives its sequence."""

    def prefix_stats(self) -> PrefixStats | None:
        """Statistics of shared rows: None, as there are none."""
        return None

    def take_free(self) -> None:
        """Take nothing: all memory was taken at once."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that rows may take."""
        return self.stats().pool_budget_bytes

    @abstractmethod
    def stats(self) -> CacheStats:
        """Statistics in the words of a cache of pages."""

    def stats_of(self, budget_bytes: int, held_bytes: int, used_bytes: int, mapped_bytes: int, **counts: int) -> CacheStats:
        """`counts` are other fields; what is not named is 0."""
        num_tokens = int(self.lengths[list(self.sequences)].sum())
        token_bytes = num_tokens * self.layout.row_bytes
        given: dict[str, Any] = dict.fromkeys((each.name for each in fields(CacheStats)), 0)
        given |= {"mapped_bytes": mapped_bytes, "token_bytes": token_bytes, "waste_bytes": mapped_bytes - token_bytes}
        given |= dict.fromkeys(("reserved_bytes", "pool_created_bytes", "pool_budget_bytes"), budget_bytes)
        given |= {"pool_held_bytes": held_bytes, "pool_used_bytes": used_bytes, "pool_free_bytes": budget_bytes - held_bytes}
        given |= {"num_tokens": num_tokens, "num_sequences": len(self.sequences), "num_slots": self.num_slots}
        return CacheStats(**given | {"driver_calls": {}} | counts)

    def close(self) -> None:
        """Give all memory back. What torch's allocator keeps is not free for the driver's own calls."""
        self.rows.views.clear()
        self.planes.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class StaticCache(BaselineCache):
    """The longest sequence's rows for every slot. It shares nothing. How many sequences run is how many slots there are."""

    def __init__(self, layout: KVLayout, device: torch.device, *, slots: int, max_tokens: int) -> None:
        super().__init__(layout, device, slots=slots, max_tokens=max_tokens, num_rows=(1 + slots, max_tokens))
        self.rows, self.num_tokens = KVRows(self), max_tokens

    def open(self, *, max_tokens: int | None = None, tenant: Hashable = None) -> BaselineSequence:
        """A new sequence, which has all that it may need. Cost: an upload. Raises: OutOfPages if all slots run one."""
        sequence = super().open(max_tokens=max_tokens, tenant=tenant)
        self.reserve(sequence.slot, sequence.max_tokens)
        return sequence

    def reserve(self, slot: int, num_tokens: int) -> None:
        """See BaselineCache.reserve."""
        self.limits[slot] = num_tokens
        slots_1, limits_1 = self.uploads.pack([[slot], [num_tokens]])
        self.limit.index_copy_(0, slots_1.long(), limits_1)

    def stats(self) -> CacheStats:
        """A slot in which a sequence runs is used, and held as all others are."""
        slot_bytes = self.max_tokens * self.layout.row_bytes
        used_bytes, budget_bytes = len(self.sequences) * slot_bytes, self.num_slots * slot_bytes
        return self.stats_of(budget_bytes, budget_bytes, used_bytes, used_bytes)

    def check(self) -> None:
        """No sequence has more rows than its slot."""
        assert (self.lengths <= self.limits).all() and (self.limits <= self.max_tokens).all()
