"""A tier that fails, by turns: it is slow, has to find out what it has, forgets, refuses, lies, or raises.

With chance 1 of that it is gone.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from vmmkv.tiers import Tier, TierStats, Transfer
from vmmkv.tiers.tier import missed

FAULTS = ("slow", "asks", "forgets", "refuses", "lies", "raises")


class Gone(Exception):
    """A tier whose store does not answer."""


class FaultyTier:
    """Another tier, with faults that `haste` and `faults` decide; without any it is that tier."""

    def __init__(self, tier: Tier, seed: int, faults: Sequence[str] = FAULTS, *, chance: float = 0.2) -> None:
        self.name = f"faulty {tier.name}"
        self.tier = tier
        self.faults = set(faults)
        self.chance = chance
        self.lent: set[Transfer] = set()
        """What the caller has neither finished nor dropped."""
        self._random = random.Random(seed)
        self._late: list[tuple[Transfer, Future[None] | None]] = []

    def strikes(self, fault: str) -> bool:
        return fault in self.faults and self._random.random() < self.chance

    def advance(self) -> None:
        """Time passes: slow loads come, in any order."""
        self._random.shuffle(self._late)
        for _ in range(self._random.randint(0, len(self._late))):
            self._arrive()

    def hurry(self) -> None:
        """All of them come."""
        while self._late:
            self._arrive()

    def _arrive(self) -> None:
        transfer, future = self._late.pop()
        promise, transfer.future = transfer.future, future
        if promise is not None and not promise.done():
            promise.set_result(None)

    def open(self, device: torch.device) -> None:
        self.tier.open(device)

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        if self.strikes("raises"):
            raise Gone
        if self.strikes("asks"):
            return None
        return [has != self.strikes("lies") for has in self.tier.lookup(keys)]

    def store(self, key: bytes) -> Transfer | None:
        if self.strikes("raises"):
            raise Gone
        transfer = None if self.strikes("refuses") else self.tier.store(key)
        if transfer is not None:
            self.lent.add(transfer)
        return transfer

    def load(self, key: bytes) -> Transfer | None:
        if self.strikes("raises"):
            raise Gone
        if self.strikes("refuses"):
            return None
        if self.strikes("forgets"):
            return missed(key)
        transfer = self.tier.load(key)
        if transfer is not None:
            self.lent.add(transfer)
            if self.strikes("slow"):
                self._late.append((transfer, transfer.future))
                transfer.future = Future()
        return transfer

    def finished(self, transfer: Transfer) -> None:
        if transfer.is_store and self.strikes("forgets"):
            self.drop(transfer)
            return
        self.lent.discard(transfer)
        self.tier.finished(transfer)

    def drop(self, transfer: Transfer) -> None:
        self.lent.discard(transfer)
        late = [each for each in self._late if each[0] is transfer]
        for each in late:
            self._late.remove(each)
            transfer.future = each[1]
        self.tier.drop(transfer)

    def stats(self) -> TierStats:
        if self.strikes("raises"):
            raise Gone
        return self.tier.stats()

    def close(self) -> None:
        self.tier.close()
