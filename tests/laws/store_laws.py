"""The laws of a tier over a store that engines share: a test class inherits them and says how its store is started.

What else a tier keeps is in test_tiers.py, and what holds of any store, however it fails, in test_stores.py.
"""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.laws.test_tiers import CPU, found, key_of, load, store
from tests.stores import Clock, free_port, until
from vmmkv import TierUnavailable
from vmmkv.tiers import answering, open_store, shared
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.tiers.shared import SharedTier


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(shared, "time", clock)
    monkeypatch.setattr(answering, "time", clock)
    return clock


def is_left_alone(tier) -> bool:
    try:
        tier.lookup([key_of(0)])
    except TierUnavailable:
        return True
    return False


def works(tier, clock) -> bool:
    """Does it, when it has been left alone for so long that it is tried again?"""
    clock.pass_for(answering.LONGEST_PAUSE_S)
    try:
        return (store(tier, 20) or found(tier, 20) == [True]) and load(tier, 20)
    except TierUnavailable:
        return False


def lendable(tier) -> int:
    """How many buffers it lends before it has none left."""
    lent = []
    while (transfer := tier.load(key_of(99))) is not None and transfer.address:
        lent.append(transfer)
    for transfer in lent:
        tier.drop(transfer)
    return len(lent)


def value_of(tier, number: int) -> str:
    return f"vmmkv:{key_of(number).hex()}"


class StoreLaws:
    """The laws. The module of a subclass imports the fixture `clock`, so that no test waits for time to pass."""

    kind: type[SharedTier]
    scheme: str
    """Scheme of its URLs, and extra of vmmkv that installs its client."""

    @staticmethod
    def start() -> AbstractContextManager[Any]:
        """A store that runs until the end of the block."""
        raise NotImplementedError

    @staticmethod
    def kill(server: Any) -> None:
        """Have it answer no more."""
        server.kill()

    @staticmethod
    def revive(server: Any) -> None:
        """Have it answer again."""
        server.start()

    @pytest.fixture
    def server(self):
        with self.start() as server:
            yield server

    @pytest.fixture
    def make(self):
        """Open tiers, which are closed at the end."""
        tiers = []

        def make(url, timeout_s=60.0):
            tiers.append(self.kind(url, timeout_s=timeout_s))
            tiers[-1].open(CPU)
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()

    def test_a_tier_finds_what_another_stored_and_not_for_ever_what_is_gone(self, make, clock):
        with self.start() as server:
            one, other = make(server.url), make(server.url)
            assert found(other, 1) == [False]
            assert store(one, 1) and found(other, 1) == [False]
            clock.pass_for(shared.LACKED_S)
            assert found(other, 1) == [True]
            assert load(other, 1) and not store(other, 1)
            server.empty()
            assert found(other, 1) == [True]
            clock.pass_for(shared.KNOWN_S)
            assert found(other, 1) == [False]
            assert store(other, 1) and load(one, 1)
            one.close(), other.close()

    def test_a_store_that_is_killed_in_the_middle_is_left_alone_and_comes_back(self, make, clock, caplog, monkeypatch):
        with self.start() as server:
            tier = make(server.url)
            num_buffers = lendable(tier)
            assert store(tier, 1) and found(tier, *range(2, 14))[0] is False
            lent = [tier.store(key_of(number)) for number in range(2, 14)] + [tier.load(key_of(1)) for _ in range(8)]
            self.kill(server)
            for transfer in lent:
                (tier.finished if transfer.is_store else tier.drop)(transfer)
            tier.flush()
            until(lambda: all(transfer.is_store or transfer.ended for transfer in lent))  # one may have been answered before
            until(lambda: is_left_alone(tier))
            with monkeypatch.context() as patch:
                patch.setattr(tier, "ask", lambda _: pytest.fail("it is asked"))
                assert all(is_left_alone(tier) and tier.load(key_of(1)).missed for _ in range(1000))
            self.revive(server)
            until(lambda: works(tier, clock))
            until(lambda: lendable(tier) == num_buffers)
            said = [record.getMessage() for record in caplog.records]
            assert "does not answer" in said[0] and "answers again" in said[-1]
            tier.close()

    def test_a_value_that_is_too_long_is_not_read_and_is_removed(self, make, monkeypatch):
        with self.start() as server:
            tier, got = make(server.url), []
            get = tier.get
            monkeypatch.setattr(tier, "get", lambda name: got.append(get(name)) or got[-1])
            server.put(value_of(tier, 1), bytes(80 * RECORD_BYTES // 2))
            assert found(tier, 1) == [True] and not load(tier, 1)
            assert len(got[0]) != tier.value_bytes and len(got[0]) < 2 * tier.value_bytes
            assert tier.stats().errors == 1 and not is_left_alone(tier)
            until(lambda: not server.has(value_of(tier, 1)))
            assert store(tier, 1) and load(tier, 1)
            tier.close()

    def test_an_engine_starts_without_its_store_and_says_so(self, make, caplog):
        tier = make(f"{self.scheme}://127.0.0.1:{free_port()}")
        until(lambda: is_left_alone(tier) and tier.stats().errors and "does not answer" in caplog.text)
        assert not tier.stats().held_bytes

    def test_what_another_process_has_put_is_found_at_once_by_a_tier_that_is_told(self, make, server):
        tier, other = make(server.url), make(server.url)
        assert found(tier, 1) == [False]
        other.on_kept = lambda keys, is_held: tier.learn(keys)
        assert store(other, 1) and found(tier, 1, 2) == [True, False] and load(tier, 1)

    def test_a_client_that_is_missing_is_named_with_its_extra(self, monkeypatch):
        monkeypatch.setattr(shared.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(f"no {name}")))
        with pytest.raises(TierUnavailable, match=rf"in a checkout: pip install '\.\[{self.scheme}\]'"):
            self.kind(f"{self.scheme}://localhost:1")

    def test_a_wrong_url_is_refused_without_its_password(self):
        with pytest.raises(ValueError, match=rf"this is no URL of .*; write {self.scheme}://") as refused:
            open_store(f"{self.scheme}://:secret@[")
        assert "secret" not in str(refused.value)

    def test_a_record_size_that_no_disk_can_align_is_refused_by_one_that_works(self):
        for size, near in ((0, 4096), (-4096, 4096), (4097, 8192)):
            with pytest.raises(ValueError, match=f"record_bytes={size}: .*such as {near}"):
                self.kind(f"{self.scheme}://localhost:1", record_bytes=size)
