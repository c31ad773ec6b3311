"""Order on a device, by example: what the machines find by chance, a reader can follow here."""

from collections.abc import Iterator

import pytest

from tests.laws.model import ONE_GROUP, TENANTS, Live, append, attend, check_limits, opened
from tests.laws.simulated_driver import SimulatedDriver
from vmmkv import KVCache, Pool, Sequence
from vmmkv.errors import DriverError
from vmmkv.prefix import PrefixCache
from vmmkv.testing.fake_driver import LawBroken
from vmmkv.units import PAGE_BYTES


class Device:
    """A cache on a device on which nothing runs before it must; one sequence, of three tokens a page."""

    def __init__(self, seed: int) -> None:
        self.driver = SimulatedDriver(seed=seed, haste=0)
        self.pool = Pool("cpu", 16 * PAGE_BYTES, driver=self.driver)
        self.cache = KVCache(ONE_GROUP, self.pool, slots=2, max_tokens=14)
        self.live = self.opened("red")

    def opened(self, tenant: str) -> Live:
        return opened(self.cache, self.cache.open(tenant=tenant), owner=TENANTS.index(tenant))

    def begun(self, num_tokens: int) -> Sequence:
        """The sequence, to which its first tokens are appended."""
        self.live.sequence.grow(num_tokens)
        self.step(num_tokens)
        return self.live.sequence

    def step(self, num_tokens: int) -> None:
        """Launch a kernel that appends so many tokens."""
        sequence, stamps = self.live.sequence, self.live.stamps
        del stamps[sequence.length :]
        stamps += range(100 * len(stamps), 100 * len(stamps) + num_tokens)
        append(self.driver, self.live, range(sequence.length, len(stamps)))
        sequence.advance(num_tokens)


@pytest.fixture(params=range(4))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device(request.param)
    yield device
    device.driver.finish_all()
    check_limits(device.cache)
    device.cache.close()
    device.pool.close()
    assert device.driver.broken is None


def test_no_row_is_lost_when_limits_rise_twice_behind_a_lowering(device):
    sequence = device.begun(9)
    sequence.truncate(1)
    lowered = device.driver.last_on(device.driver.main)
    device.step(1)
    sequence.grow(5)  # the limit is written behind the step
    device.driver.finish([lowered])  # the lowering is over, the step is not
    sequence.grow(14)
    device.step(12)
    device.driver.finish_all()
    assert device.cache.limit[sequence.slot] == 14


def test_a_limit_is_lowered_behind_its_raise_whatever_stream_is_current(device):
    sequence = device.live.sequence
    sequence.grow(9)
    with device.driver.on(device.driver.new_stream()):
        sequence.truncate(0)


def test_a_limit_is_raised_behind_its_lowering_whatever_stream_is_current(device):
    sequence = device.begun(9)
    device.driver.finish_all()
    with device.driver.on(device.driver.new_stream()):
        sequence.truncate(1)
    sequence.grow(5)


def test_a_limit_is_lowered_behind_a_raise_that_another_stream_still_has_to_write(device):
    sequence = device.begun(9)
    sequence.truncate(1)
    with device.driver.on(device.driver.new_stream()):
        sequence.grow(5)  # written there, behind the lowering
    sequence.truncate(0)


def test_a_limit_is_lowered_behind_what_recorded_streams_write(device):
    side = device.driver.new_stream()
    device.cache.record_stream(side)
    sequence = device.live.sequence
    sequence.grow(9)
    with device.driver.on(side):
        device.step(9)
    sequence.truncate(1)
    device.driver.synchronize_stream(device.driver.main)


def test_an_adopted_slot_is_not_written_before_work_that_reads_it_has_run(device):
    device.begun(9)
    attend(device.driver, device.live)
    parked = device.live.sequence.park()
    with device.driver.on(device.driver.new_stream()):
        device.live.sequence = device.cache.adopt(parked, 2, tenant="red")
        device.live.stamps[2:] = []
        device.step(3)
        device.driver.synchronize_stream(device.driver.current)


def test_a_parked_slot_is_not_unmapped_before_a_copy_from_it_has_run(device):
    prefix, prompt = PrefixCache(device.cache), [1, 2, 3, 4, 5]
    device.live.sequence.close()
    first = prefix.attach(prompt).sequence
    first.grow(5)
    first.advance(5)
    prefix.park(first, prompt)
    (parked,) = device.cache.parked()
    attached = prefix.attach([*prompt, 6], method="alias")
    assert attached.num_tokens == 5
    device.cache.evict(parked)
    device.cache.map_ahead()
    device.live = device.opened("red")


def test_a_window_is_not_unmapped_before_its_copy_has_run(device):
    prefix, prompt = PrefixCache(device.cache), list(range(8))
    device.live.sequence.close()
    first = prefix.attach(prompt).sequence
    first.grow(8)
    first.advance(8)
    device.driver.finish_all()
    prefix.release(first, prompt)
    attached = prefix.attach([*prompt[:5], 99])
    assert (attached.num_tokens, attached.num_aliased) == (5, 1)  # row 4 is copied, from an extent under no slot


@pytest.mark.parametrize("exchanges", [False, True])
def test_copies_come_behind_what_recorded_streams_write_and_before_what_they_read(device, exchanges):
    side = device.driver.new_stream()
    device.cache.record_stream(side)
    source = device.live
    source.sequence.grow(5)
    with device.driver.on(side):
        device.step(5)
    (fork,) = device.cache.fork(source.sequence)
    if exchanges:
        fork.own_from(1)  # the page that both hold
    with device.driver.on(side):
        attend(device.driver, opened(device.cache, fork, owner=source.owner, stamps=source.stamps))


def test_a_page_is_not_unmapped_before_a_fence_behind_its_work_was_seen(device):
    sequence = device.begun(9)
    span = device.live.bases[0]
    with pytest.raises(LawBroken, match="is unmapped while work may touch it"):
        device.driver.unmap(span, PAGE_BYTES)
    device.driver.broken = None
    sequence.close()
    assert device.cache.map_ahead() == 0
    assert device.cache.stats().num_sequences == 0


def test_pages_of_a_growth_that_fails_are_not_unmapped_before_their_zeroes(device):
    device.driver.fail_at = {device.driver.num_calls + 13}  # the write of the limit
    with pytest.raises(DriverError):
        device.live.sequence.grow(9)
    assert device.driver.calls["zero"] and device.live.sequence.limit == 0


def test_a_reclaimed_page_that_a_fork_holds_is_not_written_again(device):
    sequence = device.begun(9)
    (fork,) = device.cache.fork(sequence)
    forked = opened(device.cache, fork, owner=device.live.owner, stamps=device.live.stamps)
    sequence.truncate(1)
    sequence.grow(9)
    device.step(8)
    attend(device.driver, forked)


@pytest.mark.parametrize("creates_zeroed", [False, True])
def test_memory_that_passes_to_another_tenant_is_zeroed_first(device, creates_zeroed):
    device.driver.creates_zeroed = creates_zeroed
    device.pool.resize(3 * PAGE_BYTES)
    sequence = device.begun(8)
    sequence.close()
    device.live = device.opened("blue")
    device.live.sequence.grow(8)  # waits for the others' work
    attend(device.driver, device.live)
    device.driver.finish_all()
