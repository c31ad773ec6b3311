"""Directory: which records there are, as the engine's scheduler knows. The tiers that store them are those of its workers."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from vmmkv.adapters.vllm.blocks import of_rank
from vmmkv.adapters.vllm.schedule import of_group
from vmmkv.tier import Tier
from vmmkv.tiers import HostTier, Store
from vmmkv.tiers.shared import SharedTier

Change = tuple[str, bytes, bool]
"""A record that a worker's tier has taken, or lost: name of the tier, key of a rank's part, and whether it is there now."""

_RECENT_S: Final = 0.02
"""Age up to which a report of the workers tells of now."""


class Directory:
    """Records that there are, as the scheduler knows: of host tiers by reports, of disks by asking, of stores by both.

    A store is believed for a while when it says that it has no record. So workers report what they have put there.
    """

    def __init__(self, tiers: Sequence[Tier], num_ranks: int, num_groups: int = 1) -> None:
        """`tiers`: those that the scheduler can ask, which it opens. Each rank has a part of each record for each group."""
        self._places = [*itertools.product(range(num_ranks), range(num_groups))]
        """Rank and group of each part of a record."""
        self._held = set[bytes]()
        """Keys of the parts in the host tiers of all ranks."""
        self._is_busy, self._reported_s = False, 0.0
        self._tiers = tuple(tiers)
        self._store = Store(tiers) if tiers else None

    def lookup(self, keys: Sequence[bytes]) -> list[str] | None:
        """Name the tier of each record, "" for none; None while a store finds out, or until the workers say so in a step."""
        parts = [[of_rank(of_group(key, group), rank) for rank, group in self._places] for key in keys]
        found = [HostTier.name if self._held.issuperset(each) else "" for each in parts]
        if all(found):
            return found
        if self._is_busy and time.monotonic() - self._reported_s > _RECENT_S:
            return None
        for tier in self._tiers:
            assert self._store is not None, "it has these tiers"
            answers = self._store.lookup_in(tier, [part for each in parts for part in each])
            if answers is None:
                return None
            has = [all(answers[at : at + len(self._places)]) for at in range(0, len(answers), len(self._places))]
            found = [name or (tier.name if is_there else "") for name, is_there in zip(found, has, strict=True)]
        return found

    def learn(self, changes: Iterable[Change], *, is_busy: bool) -> None:
        """Take note of the workers' report of the step that has just ended. `is_busy`: are more records on their way?"""
        self._is_busy, self._reported_s = is_busy, time.monotonic()
        for name, part, is_held in changes:
            if name == HostTier.name:
                (self._held.add if is_held else self._held.discard)(part)
            for tier in self._tiers:
                if tier.name == name and isinstance(tier, SharedTier):
                    tier.learn([part])

    def close(self) -> None:
        """Close the store. Idempotent."""
        if self._store is not None:
            self._store.close()


def listen_to(tiers: Iterable[Tier], changed: Callable[[Change], object]) -> None:
    """Call back with each change of a worker's tiers of which its scheduler has to be told; from any thread."""

    def tell(name: str, parts: Sequence[bytes], is_held: bool) -> None:
        for part in parts:
            changed((name, part, is_held))

    for tier in tiers:
        if isinstance(tier, HostTier):
            tier.listen(partial(tell, tier.name))
        elif isinstance(tier, SharedTier):
            tier.on_kept = partial(tell, tier.name)
