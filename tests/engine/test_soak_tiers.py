"""Many requests over tiers that fail and are late: each ends once with its tokens, and nothing is left behind."""

import itertools
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_soak import soak
from tests.laws.faulty_tier import FaultyTier
from vmmkv import PAGE_BYTES, HostTier
from vmmkv.driver.host import HostDriver
from vmmkv_server.engine.features import fetches
from vmmkv_server.engine.features.fetches import Fetches


class LateFence:
    """A fence that has passed some looks at fences later, as if the device were busy. Those made before it pass first."""

    made = passed = 0
    chance = random.Random(2)

    def __init__(self, *_: object) -> None:
        LateFence.made = self.place = self.made + 1

    def done(self) -> bool:
        LateFence.passed = min(self.made, self.passed + self.chance.choice([0, 0, 0, 1]))
        return self.place <= self.passed

    def wait(self) -> None:
        LateFence.passed = max(self.place, self.passed)

    def order(self, streams: object = ()) -> None:
        pass


@pytest.mark.parametrize(
    ("count", "seed", "is_late"),
    [(250, 2, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((250, 1, False), (2000, None, True)))],
)
def test_every_request_ends_once_with_a_tier_that_fails(
    count: int, seed: int | None, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, steps = random.Random(1), itertools.count()
    patience: defaultdict[Any, float] = defaultdict(lambda: own.choice([0.0, 10.0, 1e9]))
    if is_late:
        monkeypatch.setattr(HostDriver, "fence", LateFence)
    monkeypatch.setattr(fetches, "LEAST_TOKENS", 1)
    monkeypatch.setattr(Fetches, "is_worth", lambda *_: True)
    monkeypatch.setattr(Fetches, "computing_s", lambda _, fetch, __: patience[fetch])
    monkeypatch.setattr(fetches, "time", SimpleNamespace(perf_counter=lambda: float(next(steps))))  # time is counted in looks
    tier = FaultyTier(HostTier(40 * PAGE_BYTES), 1)
    try:
        counts = soak(count, seed, 2, tick=tier.advance, tiers=[tier]).of(Fetches).counts.fetches
        assert not tier.lent
    finally:
        tier.close()
    assert counts.total() and (count < 2000 or (counts["done"] and counts["late"])), counts
