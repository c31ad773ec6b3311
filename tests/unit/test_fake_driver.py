"""The fake driver refuses every law broken: else what the law tests prove with it would be nothing."""

import pytest
import torch

from vmmkv import DriverError
from vmmkv.driver.base import Access
from vmmkv.driver.host import HostDriver
from vmmkv.errors import OutOfDeviceMemory
from vmmkv.testing.fake_driver import FakeDriver, LawBroken
from vmmkv.units import PAGE_BYTES


@pytest.fixture
def driver():
    return FakeDriver(memory_bytes=4 * PAGE_BYTES)


@pytest.fixture
def base(driver):
    return driver.reserve(8 * PAGE_BYTES)


def put(driver, address, num_pages=1, access=Access.READ_WRITE):
    handle = driver.create(num_pages * PAGE_BYTES)
    driver.map(address, handle, num_pages * PAGE_BYTES)
    driver.set_access(address, num_pages * PAGE_BYTES, access)
    return handle


def use_after_release(driver, base):
    handle = driver.create(PAGE_BYTES)
    driver.release(handle)
    driver.map(base, handle, PAGE_BYTES)


def release_twice(driver, base):
    handle = driver.create(PAGE_BYTES)
    driver.release(handle)
    driver.release(handle)


def zero_read_only(driver, base):
    put(driver, base, access=Access.READ)
    driver.zero(base, PAGE_BYTES)


def launch_over_read_only(driver, base):
    put(driver, base, access=Access.READ)
    driver.launch([(base, base + 1)])


def launch_past_the_end(driver, base):
    put(driver, base)
    driver.launch([(base, base + PAGE_BYTES + 1)])


def launch_before_zeroes(driver, base):
    put(driver, base)
    driver.zero(base, PAGE_BYTES)
    driver.launch([(base, base + 128)])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda driver, base: driver.map(base, driver.create(2 * PAGE_BYTES), PAGE_BYTES), "in part"),
        (lambda driver, base: (put(driver, base, 2), driver.unmap(base, PAGE_BYTES)), "no one mapping"),
        (lambda driver, base: (put(driver, base, 2), driver.unmap(base + PAGE_BYTES, PAGE_BYTES)), "no one mapping"),
        (lambda driver, base: put(driver, base - PAGE_BYTES), "not inside one reservation"),
        (lambda driver, base: put(driver, base + 8 * PAGE_BYTES), "not inside one reservation"),
        (lambda driver, base: driver.create(0), "multiples of a page"),
        (lambda driver, base: driver.create(PAGE_BYTES - 1), "multiples of a page"),
        (lambda driver, base: put(driver, base + 1), "multiples of a page"),
        (lambda driver, base: (put(driver, base), driver.give_back(base, 8 * PAGE_BYTES)), "something is mapped there"),
        (lambda driver, base: driver.launch([(base, base + 1)]), "not all mapped"),
        (use_after_release, "after its release"),
        (release_twice, "after its release"),
        (zero_read_only, "not all mapped"),
        (launch_over_read_only, "not all mapped"),
        (launch_past_the_end, "not all mapped"),
        (launch_before_zeroes, "zeroed after it"),
    ],
)
def test_what_would_corrupt_a_device_breaks_a_law(driver, base, act, message):
    with pytest.raises(LawBroken, match=message):
        act(driver, base)


def test_a_second_map_where_one_stands_is_refused_as_on_a_device(driver, base):
    put(driver, base, 2)
    handle = driver.create(PAGE_BYTES)
    calls = driver.calls.copy()
    with pytest.raises(DriverError) as error:
        driver.map(base + PAGE_BYTES, handle, PAGE_BYTES)
    assert (error.value.call, error.value.code) == ("map", "FAKE_ALREADY_MAPPED")
    assert driver.calls == calls


def test_released_memory_is_given_back_when_its_last_mapping_goes(driver, base):
    handle = put(driver, base)
    driver.release(handle)
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 1, PAGE_BYTES)
    driver.unmap(base, PAGE_BYTES)
    assert (driver.live_mappings, driver.used_bytes) == (0, 0)


def test_memory_ends(driver):
    driver.create(3 * PAGE_BYTES)
    with pytest.raises(OutOfDeviceMemory, match=r"4\.0 MiB were asked of a device with 2\.0 MiB free"):
        driver.create(2 * PAGE_BYTES)
    assert driver.memory() == (PAGE_BYTES, 4 * PAGE_BYTES)


def test_what_a_launch_touches_stays_mapped_until_it_finishes(driver, base):
    put(driver, base)
    before = driver.fence()
    launch = driver.launch([(base + 100, base + 200)])
    assert before.done(), "a fence knows only what was launched before it"
    for touch in (lambda: driver.unmap(base, PAGE_BYTES), lambda: driver.zero(base, PAGE_BYTES)):
        with pytest.raises(LawBroken, match="while a launch may touch it"):
            touch()
    fence = driver.fence()
    assert not fence.done()
    fence.wait()
    assert launch.finished and fence.done()
    driver.zero(base, PAGE_BYTES)
    driver.order()
    driver.launch([(base, base + 128)]).finish()
    driver.unmap(base, PAGE_BYTES)


def test_it_tells_what_may_be_done_where_and_how_often_a_handle_is_mapped(driver, base):
    handle = driver.create(PAGE_BYTES)
    assert driver.mappings_of(handle) == 0
    for address, access in ((base, Access.READ), (base + PAGE_BYTES, Access.READ_WRITE)):
        driver.map(address, handle, PAGE_BYTES)
        assert not driver.is_read_only(address, 1)
        assert not driver.is_accessible(address, 1)
        driver.set_access(address, PAGE_BYTES, access)
    assert driver.mappings_of(handle) == 2
    assert driver.is_read_only(base, PAGE_BYTES)
    assert driver.is_accessible(base + PAGE_BYTES, PAGE_BYTES)
    for test in (driver.is_read_only, driver.is_accessible):
        assert not test(base + 1, PAGE_BYTES), "it reaches into a page of another kind"
    driver.unmap(base, PAGE_BYTES)
    assert driver.mappings_of(handle) == 1
    assert not driver.is_read_only(base, 1)


def test_a_call_that_was_told_to_fail_changes_nothing_and_is_not_counted(driver, base):
    driver.fail_at = {driver.num_calls}
    with pytest.raises(DriverError, match="told to fail"):
        driver.create(PAGE_BYTES)
    assert driver.calls["create"] == driver.live_handles == driver.used_bytes == 0
    put(driver, base)
    driver.fail_at = {driver.num_calls}
    with pytest.raises(DriverError) as error:
        driver.unmap(base, PAGE_BYTES)
    assert error.value.call == "unmap"
    assert driver.is_accessible(base, PAGE_BYTES)


def test_over_another_driver_the_memory_is_real():
    below = HostDriver()
    driver = FakeDriver(over=below)
    base = driver.reserve(2 * PAGE_BYTES)
    handle = put(driver, base)
    limit = torch.zeros(2, dtype=torch.int32)
    driver.write(limit, {1: 5})
    assert limit.tolist() == [0, 5]
    fd = driver.export_fd(handle)
    imported = driver.import_fd(fd, PAGE_BYTES)
    driver.map(base + PAGE_BYTES, imported, PAGE_BYTES)
    assert below.calls == driver.calls
    below.close()


def test_alone_it_has_no_memory_to_share(driver):
    handle = driver.create(PAGE_BYTES)
    with pytest.raises(DriverError, match="no memory to export"):
        driver.export_fd(handle)
    with pytest.raises(DriverError, match="no memory to import"):
        driver.import_fd(0, PAGE_BYTES)
