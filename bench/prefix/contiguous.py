"""vmmkv as a system: with a prefix cache, by the method that its chooser takes or by one that is forced; or sharing nothing."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from bench.prefix.addressing import Addressing, HostSlots, Slots
from bench.prefix.systems import Attachment, Indices, TokenIds
from bench.settings import Shape
from bench.timed_driver import TimedDriver
from vmmkv import KVCache, Pool, Sequence
from vmmkv.driver import open_driver
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.units import PAGE_BYTES


class Sharing(enum.Enum):
    """How prompts come by a prefix that is known."""

    NONE = "none"
    CHOOSER = "vmmkv chooser"
    ADOPT = "vmmkv adopt"
    ALIAS = "vmmkv alias"
    COMPUTE = "vmmkv compute"

    @property
    def method(self) -> AttachMethod | None:
        """What is forced."""
        return None if self in (Sharing.NONE, Sharing.CHOOSER) else AttachMethod[self.name]

    @property
    def parks(self) -> bool:
        """Are slots kept to be adopted? Where that is not to happen they are given back."""
        return self in (Sharing.CHOOSER, Sharing.ADOPT)

    @property
    def is_private(self) -> bool:
        """Has every sequence rows of its own?"""
        return self in (Sharing.NONE, Sharing.COMPUTE)


class Vmmkv:
    """See systems.System. `warm` extents, by their pages, are created beforehand, as in a server that has run for a while."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        sharing: Sharing,
        *,
        num_pages: int,
        slots: int,
        max_tokens: int,
        warm: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.name: Final = sharing.value
        self.num_slots: Final = slots
        self.sharing: Final = sharing
        self.driver: Final = TimedDriver(open_driver(device))
        self.pool: Final = Pool(device, num_pages * PAGE_BYTES, driver=self.driver.as_driver())
        try:
            self.cache: Final = KVCache(shape.layout, self.pool, slots=slots, max_tokens=max_tokens)
            self.prefix: Final = None if sharing is Sharing.NONE else PrefixCache(self.cache)
            for extents in self.pool.acquire_mixed(warm).values():
                for extent in extents:
                    self.pool.drop(extent)
        except BaseException:
            self.pool.close()
            raise
        self.sequences: Final[dict[int, Sequence]] = {}
        self.forces = True
        """Whether the method is forced at this time."""
        planes = [(self.cache.k(layer), self.cache.v(layer)) for layer in range(shape.layers)]
        self.addressing: Final[Addressing] = (
            Slots(planes, self.cache.limit, slots) if device.type == "cuda" else HostSlots(planes, self.cache.limit)
        )

    @property
    def prefix_cache(self) -> PrefixCache:
        """Of a system that shares."""
        assert self.prefix is not None
        return self.prefix

    def attach(self, tokens: TokenIds, max_tokens: int) -> Attachment:
        """See System.attach."""
        if self.prefix is None:
            sequence, num_tokens, taken = self.cache.open(max_tokens=max_tokens), 0, AttachMethod.COMPUTE
        else:
            method = self.sharing.method if self.forces else None
            attached = self.prefix.attach(tokens, max_tokens=max_tokens, method=method)
            sequence, num_tokens, taken = attached.sequence, attached.num_tokens, attached.method
        self.sequences[sequence.slot] = sequence
        return Attachment(sequence.slot, num_tokens, taken.value)

    def reserve(self, slots: Indices, num_tokens: Indices) -> None:
        """See System.reserve. Cost: nothing but for slots that lack memory; these grow in the foreground."""
        for index in np.flatnonzero(self.cache.limits[slots] < num_tokens):
            self.sequences[int(slots[index])].grow(int(num_tokens[index]))

    def advance(self, slots: Indices, num_tokens: Indices) -> None:
        """See System.advance."""
        self.cache.advance(slots, num_tokens)

    def insert(self, slot: int, tokens: TokenIds) -> None:
        """See System.insert."""
        if self.prefix is not None:
            self.prefix.insert(self.sequences[slot], tokens)

    def finish(self, slot: int, tokens: TokenIds) -> None:
        """See System.finish."""
        sequence = self.sequences.pop(slot)
        if self.prefix is None:
            sequence.close()
        elif self.sharing.parks:
            self.prefix.park(sequence, tokens)
        else:
            self.prefix.release(sequence, tokens)

    def map_ahead(self, budget_us: float, step_us: float) -> None:
        """See System.map_ahead."""
        self.cache.map_ahead(budget_us, lookahead_tokens=self.cache.lookahead_tokens(step_us))

    def memory(self) -> tuple[int, int]:
        """See System.memory."""
        return self.pool.held_bytes, self.pool.used_bytes

    def driver_us(self) -> float:
        """See System.driver_us."""
        return self.driver.spent_us

    def driver_calls(self) -> Mapping[str, int]:
        """See System.driver_calls."""
        return self.driver.calls

    def rows(self, layer: int, slot: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot's first rows: [num_tokens, K, D] each."""
        return self.cache.k(layer)[slot, :num_tokens], self.cache.v(layer)[slot, :num_tokens]

    def write(self, layer: int, slot: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Fill a slot's first rows."""
        for rows_TKD, values_TKD in zip(self.rows(layer, slot, len(k_TKD)), (k_TKD, v_TKD), strict=True):
            rows_TKD.copy_(values_TKD)

    def close(self) -> None:
        """See System.close."""
        self.sequences.clear()
        self.pool.close()
