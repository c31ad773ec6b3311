import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.laws.driver_laws import PRELUDE, ROOT, DriverLaws, put, refused, run_child
from vmmkv.driver import Access, Driver, host
from vmmkv.driver.base import MemoryInfo
from vmmkv.driver.host import HostDriver, HostMemory
from vmmkv.errors import Closed, DriverError, OutOfDeviceMemory, OutOfMappings
from vmmkv.units import GIB, MIB, PAGE_BYTES

CPU = torch.device("cpu")


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.close()


def file_bytes(driver: HostDriver) -> int:
    """Physical memory behind a driver, as the kernel counts it."""
    return os.fstat(driver.file.fd).st_blocks * 512


class TestHostDriverLaws(DriverLaws):
    def test_what_is_not_mapped_cannot_be_unmapped(self, driver: Driver) -> None:
        refused("unmap", driver.unmap, driver.reserve(PAGE_BYTES), PAGE_BYTES)


# memory


def test_memory_is_taken_at_create_and_goes_with_a_released_handles_last_mapping(driver: HostDriver) -> None:
    address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(PAGE_BYTES)
    assert file_bytes(driver) == PAGE_BYTES
    put(driver, address, handle)
    put(driver, address + PAGE_BYTES, handle)
    driver.release(handle)
    driver.unmap(address, PAGE_BYTES)
    assert file_bytes(driver) == PAGE_BYTES
    driver.unmap(address + PAGE_BYTES, PAGE_BYTES)
    assert file_bytes(driver) == 0


def test_a_handle_is_of_no_use_after_its_release(driver: HostDriver) -> None:
    address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
    driver.release(handle)
    refused("release", driver.release, handle)
    refused("map", driver.map, address, handle, PAGE_BYTES)
    refused("export_fd", driver.export_fd, handle)
    assert driver.calls == {"reserve": 1, "create": 1, "release": 1}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_create_that_the_kernel_refuses_changes_nothing(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host, "fallocate", mock.Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(OutOfDeviceMemory, match="do not fit") as caught:
            driver.create(PAGE_BYTES)
    assert caught.value.code == errno.errorcode[number]
    assert file_bytes(driver) == 0
    driver.release(driver.create(PAGE_BYTES))
    assert os.fstat(driver.file.fd).st_size == PAGE_BYTES


def test_create_leaves_headroom_and_says_the_budget_that_would_work(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "read", lambda _: MemoryInfo(host.HEADROOM_BYTES + 4 * MIB, 8 * GIB))
    driver.release(driver.create(4 * MIB))
    with pytest.raises(OutOfDeviceMemory, match=re.escape("6.0 MiB do not fit: 132.0 MiB of 8.0 GiB")) as caught:
        driver.create(6 * MIB)
    assert "at most 4.0 MiB above" in str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_around_the_process_counts(tmp_path: Path, version: int) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    root = cgroups if version == 2 else cgroups / "memory"
    outer, inner = root / "outer", root / "outer" / "inner"
    for folder in (proc / "self", inner):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n" if version == 2 else "4:cpu,memory:/outer/inner\n0::/\n")
    limit, usage, none, prefix = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", str(2**63 - 4096), "total_"),
        2: ("memory.max", "memory.current", "max", ""),
    }[version]
    (inner / limit).write_text(none)
    (outer / limit).write_text(str(4 * GIB))
    (outer / usage).write_text(str(3 * GIB))
    (outer / "memory.stat").write_text(f"{prefix}inactive_file {GIB // 2}\n{prefix}active_file 0\n{prefix}shmem 5\n")
    memory = HostMemory(proc, cgroups)
    assert memory.read() == MemoryInfo(free_bytes=3 * GIB // 2, total_bytes=4 * GIB)
    (outer / usage).write_text(str(5 * GIB))
    assert memory.read().free_bytes == 0


# mappings


def test_what_is_not_whole_pages_or_not_reserved_is_refused(driver: HostDriver) -> None:
    address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(2 * PAGE_BYTES)
    for wrong in (address + 4096, address - PAGE_BYTES, address + PAGE_BYTES, 0):
        refused("map", driver.map, wrong, handle, 2 * PAGE_BYTES)
    driver.map(address, handle, 2 * PAGE_BYTES)
    refused("zero", driver.zero, address, PAGE_BYTES)
    driver.set_access(address, 2 * PAGE_BYTES, Access.READ)
    assert "not writable" in str(refused("zero", driver.zero, address, PAGE_BYTES))
    refused("set_access", driver.set_access, address, PAGE_BYTES, Access.READ_WRITE)


def test_a_failed_map_leaves_the_addresses_reserved_and_free(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux may take the old mapping away before it fails; here it does."""
    address, handle = driver.reserve(3 * PAGE_BYTES), driver.create(PAGE_BYTES)
    with monkeypatch.context() as patch:
        fail_mmap(patch, host.MAP_SHARED, then=host.munmap)
        assert refused("map", driver.map, address + PAGE_BYTES, handle, PAGE_BYTES).code == "ENOMEM"
    assert not host.close_hole(address + PAGE_BYTES, PAGE_BYTES)
    put(driver, address + PAGE_BYTES, handle).fill_(1)


def test_a_failed_unmap_changes_nothing(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
    memory = put(driver, address, handle)
    memory.fill_(6)
    with monkeypatch.context() as patch:
        fail_mmap(patch, host.MAP_FIXED)
        error = refused("unmap", driver.unmap, address, PAGE_BYTES)
    assert type(error) is DriverError
    assert bool((memory == 6).all())
    assert driver.calls["unmap"] == 0
    driver.unmap(address, PAGE_BYTES)


def fail_mmap(
    patch: pytest.MonkeyPatch, failing: int, then: Callable[[int, int], object] = lambda at, size_bytes: None
) -> None:
    """Every mmap with one of these flags does `then` and fails."""
    real = host.mmap

    def mmap(at: int, size_bytes: int, protection: int, flags: int, fd: int = -1, offset_bytes: int = 0) -> int:
        if flags & failing:
            then(at, size_bytes)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(at, size_bytes, protection, flags, fd, offset_bytes)

    patch.setattr(host, "mmap", mmap)


@pytest.mark.nightly
def test_too_many_mappings_have_their_own_error_and_leave_everything_working() -> None:
    limit = host.count_mappings()[1]
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit:,}: too many to exhaust in a test")
    body = """
from vmmkv.errors import OutOfMappings
handle, limit = driver.create(PAGE_BYTES), int(sys.argv[2])
address = driver.reserve(2 * limit * PAGE_BYTES)
made = []
try:
    for number in range(limit):
        at = address + 2 * number * PAGE_BYTES
        driver.map(at, handle, PAGE_BYTES)
        made.append(at)
        driver.set_access(at, PAGE_BYTES, Access.READ_WRITE)
except OutOfMappings as error:
    print(error.call, error.code, str(error))
assert driver.calls["map"] == len(made) > limit // 3
for at in made:
    driver.unmap(at, PAGE_BYTES)
mapped(address + PAGE_BYTES, handle).fill_(1)
"""
    child = run_child(CPU, body, str(limit))
    assert child.returncode == 0, child.stderr
    assert re.match(r"(map|set_access) ENOMEM ", child.stdout)
    assert f"the kernel allows {limit:,}" in child.stdout
    assert f"sysctl -w vm.max_map_count={4 * limit}" in child.stdout


def test_a_lack_of_memory_is_no_lack_of_mappings(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused("reserve", driver.reserve, 1 << 47)
    assert type(error) is DriverError
    monkeypatch.setattr(host, "count_mappings", lambda: (65_530, 65_530))
    with pytest.raises(OutOfMappings, match=r"65,530 mappings.*sysctl -w vm.max_map_count=262120"):
        driver.reserve(1 << 47)


# processes


def test_a_forked_child_neither_shares_pages_nor_uses_the_driver() -> None:
    body = """
import ctypes, signal
from vmmkv.errors import ForkedProcess
address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(PAGE_BYTES)
memory = mapped(address, handle)
memory.fill_(5)
calls = [
    lambda: driver.reserve(PAGE_BYTES), lambda: driver.create(PAGE_BYTES), lambda: driver.release(handle),
    lambda: driver.map(address + PAGE_BYTES, handle, PAGE_BYTES), lambda: driver.unmap(address, PAGE_BYTES),
    lambda: driver.set_access(address, PAGE_BYTES, Access.READ), lambda: driver.zero(address, PAGE_BYTES),
    lambda: driver.write(memory, {}), driver.order, driver.synchronize, driver.fence, driver.memory,
    lambda: driver.export_fd(handle), lambda: driver.import_fd(0, PAGE_BYTES), driver.close,
]

def forked(function, fork=os.fork):
    child = fork()
    if child == 0:
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def every_call_is_refused():
    for call in calls:
        try:
            call()
        except ForkedProcess as error:
            assert "spawn" in str(error)
        else:
            os._exit(1)

def addresses_are_kept():
    flags = ctypes.c_int(0x100000 | 0x22)  # MAP_FIXED_NOREPLACE, private and anonymous
    mmap = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    got = mmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES), 0, flags, -1, ctypes.c_long(0))
    os._exit(got != ctypes.c_void_p(-1).value)

assert forked(every_call_is_refused) == 0
assert forked(addresses_are_kept) == 0
assert forked(lambda: ctypes.string_at(address, 1)) == -signal.SIGSEGV
assert forked(lambda: ctypes.memset(address, 1, 1)) == -signal.SIGSEGV
assert forked(lambda: ctypes.string_at(address, 1), ctypes.CDLL(None).fork) == -signal.SIGSEGV  # Python does not know of it
assert bool((memory == 5).all())
driver.unmap(address, PAGE_BYTES)
print("done")
"""
    child = run_child(CPU, body)
    assert (child.returncode, child.stdout.split()) == (0, ["done"]), child.stderr


@pytest.mark.nightly
def test_memory_lent_to_another_process_goes_when_that_one_lets_go_also_when_killed(driver: HostDriver) -> None:
    handles = [driver.create(PAGE_BYTES) for _ in range(3)]
    fd = driver.export_fd(handles[1])
    body = """
import signal, time
handle = driver.import_fd(int(sys.argv[2]), PAGE_BYTES)
mapped(driver.reserve(PAGE_BYTES), handle).fill_(1)
driver.release(handle)
os.close(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body, "cpu", str(fd)],
        cwd=ROOT,
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.close(fd)
        for handle in handles:
            driver.release(handle)
        driver.memory()
        assert file_bytes(driver) == PAGE_BYTES, "the child still maps its page, and only that"
        child.kill()
    driver.memory()
    assert file_bytes(driver) == 0


def test_what_is_no_exported_handle_of_this_size_is_refused(driver: HostDriver, tmp_path: Path) -> None:
    handle = driver.create(2 * PAGE_BYTES)
    fd = driver.export_fd(handle)
    try:
        assert f"carries one of {2 * PAGE_BYTES} bytes" in str(refused("import_fd", driver.import_fd, fd, PAGE_BYTES))
        imported = driver.import_fd(fd, 2 * PAGE_BYTES)
        again = driver.export_fd(imported)
        driver.release(driver.import_fd(again, 2 * PAGE_BYTES))
        os.close(again)
        driver.release(imported)
    finally:
        os.close(fd)
    with (tmp_path / "file").open("w+") as file:
        assert "not a memfd" in str(refused("import_fd", driver.import_fd, file.fileno(), PAGE_BYTES))
    assert "carries none" in str(refused("import_fd", driver.import_fd, driver.file.fd, PAGE_BYTES))
    refused("import_fd", driver.import_fd, 9999, PAGE_BYTES)
    driver.release(handle)
    assert file_bytes(driver) == 0


def test_memory_lent_to_another_process_cannot_be_cut_by_it() -> None:
    driver = HostDriver()
    handle = driver.create(PAGE_BYTES)
    fd = driver.export_fd(handle)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    driver.release(handle)
    driver.close()


def test_a_closed_driver_holds_no_memory_and_says_that_it_is_closed() -> None:
    driver = HostDriver()
    address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(PAGE_BYTES)
    put(driver, address, handle)
    before = len(os.listdir("/proc/self/fd"))
    driver.close()
    driver.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert not host.close_hole(address, 2 * PAGE_BYTES), "closed, and its addresses are not reserved any more"
    with pytest.raises(Closed, match="create"):
        driver.create(PAGE_BYTES)


def test_neither_descriptors_nor_offsets_pile_up(driver: HostDriver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        handle = driver.create(PAGE_BYTES)
        fd = driver.export_fd(handle)
        driver.release(driver.import_fd(fd, PAGE_BYTES))
        os.close(fd)
        driver.release(handle)
        HostDriver()
    assert len(os.listdir("/proc/self/fd")) == before
    assert file_bytes(driver) == 0
    assert os.fstat(driver.file.fd).st_size == PAGE_BYTES, "offsets are used again"
