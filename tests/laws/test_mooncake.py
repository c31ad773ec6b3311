"""MooncakeTier: the laws of stores, nightly: its client is large."""

import pytest

from tests.laws.store_laws import StoreLaws, clock
from tests.stores import mooncake_store
from vmmkv.tiers import MooncakeTier

__all__ = ["clock"]

pytestmark = pytest.mark.nightly


class TestMooncake(StoreLaws):
    kind, scheme = MooncakeTier, "mooncake"
    start = staticmethod(mooncake_store)

    @pytest.fixture(autouse=True)
    def client(self):
        pytest.importorskip("mooncake.store", exc_type=ImportError)

    @staticmethod
    def kill(server):
        server.kill_master()

    @staticmethod
    def revive(server):
        server.start_master()
