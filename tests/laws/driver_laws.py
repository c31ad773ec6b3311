"""The laws of driver/base.py, run over a real driver: a test class inherits them and gives a fixture `driver`.

What faults, forks or takes half of all addresses runs in a child process.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from vmmkv.driver import Access, Driver, Handle
from vmmkv.driver.base import ADDRESS_SPACE_BYTES
from vmmkv.driver.pinned import host_memory
from vmmkv.errors import DriverError, OutOfDeviceMemory
from vmmkv.memory.address_space import wrap
from vmmkv.units import PAGE_BYTES, round_up

ROOT = Path(__file__).parents[2]

PRELUDE = """
import os, socket, sys
import torch
from vmmkv.memory.address_space import wrap
from vmmkv.driver import Access, open_driver
from vmmkv.units import PAGE_BYTES, TIB
driver = open_driver(sys.argv[1])

def mapped(address, handle, access=Access.READ_WRITE):
    driver.map(address, handle, PAGE_BYTES)
    driver.set_access(address, PAGE_BYTES, access)
    return wrap(address, PAGE_BYTES, driver.device)
"""


def run_child(
    device: torch.device, body: str, *arguments: str, pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python source behind PRELUDE in a new process."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + body, str(device), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        pass_fds=pass_fds,
        check=False,
    )


def assert_faulted(device: torch.device, child: subprocess.CompletedProcess[str]) -> None:
    """The child's last touch killed it: a signal on the host, a lost context on a GPU. It says `before` just ahead."""
    assert child.stdout.split() == ["before"], child.stderr
    if device.type == "cpu":
        assert child.returncode in (-signal.SIGSEGV, -signal.SIGBUS), child.stderr
    else:
        assert child.returncode != 0
        assert "an illegal memory access" in child.stderr or "ErrorIllegalAddress" in child.stderr, child.stderr


def put(driver: Driver, address: int, handle: Handle, num_pages: int = 1, access: Access = Access.READ_WRITE) -> torch.Tensor:
    """Map a handle and make it accessible; its bytes as a tensor."""
    driver.map(address, handle, num_pages * PAGE_BYTES)
    driver.set_access(address, num_pages * PAGE_BYTES, access)
    return wrap(address, num_pages * PAGE_BYTES, driver.device)


def refused(call: str, function: Callable[..., object], *arguments: object) -> DriverError:
    """The call raises a DriverError of that name, that names a code."""
    with pytest.raises(DriverError, match=call) as caught:
        function(*arguments)
    assert caught.value.call == call
    assert caught.value.code.isupper()
    return caught.value


class DriverLaws:
    """Laws that hold on every device."""

    def test_a_reservation_is_aligned_and_reservations_are_disjoint(self, driver: Driver) -> None:
        first, second = driver.reserve(3 * PAGE_BYTES), driver.reserve(PAGE_BYTES)
        assert first % PAGE_BYTES == second % PAGE_BYTES == 0
        assert second + PAGE_BYTES <= first or first + 3 * PAGE_BYTES <= second

    def test_mapped_memory_reads_back_what_was_written_in_every_type(self, driver: Driver) -> None:
        address, handle = driver.reserve(4 * PAGE_BYTES), driver.create(2 * PAGE_BYTES)
        memory = put(driver, address + PAGE_BYTES, handle, 2)
        for dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
            view = memory.view(dtype)
            assert view.data_ptr() == address + PAGE_BYTES
            view.copy_(torch.arange(len(view), device=driver.device).remainder(8).float())  # fp8 holds 0 to 8 exactly
            assert view.float()[[0, 7, 9, -1]].tolist() == [0.0, 7.0, 1.0, 7.0]
        driver.fence().wait()
        driver.unmap(address + PAGE_BYTES, 2 * PAGE_BYTES)
        driver.release(handle)

    def test_memory_is_zero_from_the_start_or_after_zero(self, driver: Driver) -> None:
        address = driver.reserve(PAGE_BYTES)
        for _ in range(3):  # the second time, the memory is likely the same
            handle = driver.create(PAGE_BYTES)
            memory = put(driver, address, handle)
            if not driver.creates_zeroed:
                driver.zero(address, PAGE_BYTES)
                driver.order()
            assert not memory.any()
            memory.fill_(0xA5)
            driver.fence().wait()
            driver.zero(address, PAGE_BYTES)
            driver.order()
            assert not memory.any()
            memory.fill_(0x5A)
            driver.fence().wait()
            driver.unmap(address, PAGE_BYTES)
            driver.release(handle)

    def test_a_copy_takes_bytes_between_mappings_and_tensors(self, driver: Driver) -> None:
        address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(2 * PAGE_BYTES)
        memory = put(driver, address, handle, 2)
        memory.copy_(torch.arange(len(memory), device=driver.device).remainder(251))
        kept = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device=driver.device)
        driver.copy(kept.data_ptr(), address + 100, PAGE_BYTES)  # over a border of pages
        assert torch.equal(kept, memory[100 : 100 + PAGE_BYTES])
        kept.fill_(255)
        driver.copy(address + PAGE_BYTES - 64, kept.data_ptr(), 128)
        assert memory.eq(255).nonzero().flatten().tolist() == list(range(PAGE_BYTES - 64, PAGE_BYTES + 64))
        driver.fence().wait()
        driver.unmap(address, 2 * PAGE_BYTES)
        driver.release(handle)

    def test_a_copy_on_another_stream_goes_to_host_memory_and_back(self, driver: Driver) -> None:
        handle, address = driver.create(PAGE_BYTES), driver.reserve(PAGE_BYTES)
        memory = put(driver, address, handle)
        memory.copy_(torch.arange(len(memory), device=driver.device).remainder(251))
        wanted, written, stream = memory.cpu(), driver.fence(), driver.new_stream()
        kept = host_memory(PAGE_BYTES, driver.device)
        with driver.on(stream):
            written.order()
            driver.copy(kept.data_ptr(), address, PAGE_BYTES)
            driver.fence().wait()
        assert torch.equal(kept, wanted)
        memory.zero_()
        zeroed = driver.fence()
        with driver.on(stream):
            zeroed.order()
            driver.copy(address, kept.data_ptr(), PAGE_BYTES)
            driver.fence().wait()
        assert torch.equal(memory.cpu(), wanted)
        driver.unmap(address, PAGE_BYTES)
        driver.release(handle)

    def test_one_handle_at_two_addresses_is_one_memory(self, driver: Driver) -> None:
        address, handle = driver.reserve(4 * PAGE_BYTES), driver.create(PAGE_BYTES)
        one, other = put(driver, address, handle), put(driver, address + 2 * PAGE_BYTES, handle, access=Access.READ)
        one.fill_(7)
        assert bool((other == 7).all())
        driver.fence().wait()
        driver.unmap(address, PAGE_BYTES)
        assert bool((other == 7).all())
        driver.fence().wait()
        driver.unmap(address + 2 * PAGE_BYTES, PAGE_BYTES)
        driver.release(handle)

    def test_a_released_handle_lives_while_it_is_mapped(self, driver: Driver) -> None:
        address, handle = driver.reserve(3 * PAGE_BYTES), driver.create(PAGE_BYTES)
        one, other = put(driver, address, handle), put(driver, address + PAGE_BYTES, handle)
        one.fill_(9)
        driver.fence().wait()
        driver.release(handle)
        driver.unmap(address, PAGE_BYTES)
        newcomer = driver.create(PAGE_BYTES)
        put(driver, address, newcomer).fill_(1)
        assert bool((other == 9).all())
        driver.fence().wait()
        driver.unmap(address, PAGE_BYTES)
        driver.unmap(address + PAGE_BYTES, PAGE_BYTES)
        driver.release(newcomer)

    def test_map_refuses_where_a_mapping_stands_even_in_part(self, driver: Driver) -> None:
        address = driver.reserve(4 * PAGE_BYTES)
        two, three = driver.create(2 * PAGE_BYTES), driver.create(3 * PAGE_BYTES)
        memory = put(driver, address + PAGE_BYTES, two, 2)
        memory.fill_(3)
        for start in (address, address + PAGE_BYTES):
            refused("map", driver.map, start, three, 3 * PAGE_BYTES)
        refused("map", driver.map, address + PAGE_BYTES, two, 2 * PAGE_BYTES)
        assert bool((memory == 3).all())
        driver.fence().wait()
        driver.unmap(address + PAGE_BYTES, 2 * PAGE_BYTES)
        put(driver, address, three, 3).fill_(4)
        driver.fence().wait()
        driver.unmap(address, 3 * PAGE_BYTES)
        driver.release(two)
        driver.release(three)

    def test_a_handle_is_mapped_and_unmapped_whole(self, driver: Driver) -> None:
        address, handle = driver.reserve(4 * PAGE_BYTES), driver.create(2 * PAGE_BYTES)
        refused("map", driver.map, address, handle, PAGE_BYTES)
        memory = put(driver, address, handle, 2)
        memory.fill_(5)
        driver.fence().wait()
        refused("unmap", driver.unmap, address, PAGE_BYTES)
        refused("unmap", driver.unmap, address + PAGE_BYTES, PAGE_BYTES)
        assert bool((memory == 5).all())
        driver.fence().wait()
        driver.unmap(address, 2 * PAGE_BYTES)  # a second time CUDA would accept it, and do nothing
        refused("set_access", driver.set_access, address, 2 * PAGE_BYTES, Access.READ)
        driver.release(handle)

    @pytest.mark.parametrize("size_bytes", [0, -PAGE_BYTES, PAGE_BYTES // 2, PAGE_BYTES + 1])
    def test_sizes_that_are_not_whole_pages_are_refused(self, driver: Driver, size_bytes: int) -> None:
        before = driver.calls.copy()
        assert str(size_bytes) in str(refused("reserve", driver.reserve, size_bytes))
        assert str(PAGE_BYTES) in str(refused("create", driver.create, size_bytes))
        assert driver.calls == before

    @pytest.mark.parametrize("size_bytes", [2 * ADDRESS_SPACE_BYTES, 2**64 + PAGE_BYTES])
    def test_more_addresses_than_a_process_has_are_refused(self, driver: Driver, size_bytes: int) -> None:
        refused("reserve", driver.reserve, size_bytes)

    def test_more_than_the_device_has_is_out_of_memory_and_says_what_there_is(self, driver: Driver) -> None:
        size_bytes = round_up(2 * driver.memory().total_bytes, PAGE_BYTES)
        with pytest.raises(OutOfDeviceMemory, match=r"create: .* do not fit: .* free") as caught:
            driver.create(size_bytes)
        assert caught.value.call == "create"
        driver.release(driver.create(PAGE_BYTES))

    def test_memory_has_a_free_part_and_a_total(self, driver: Driver) -> None:
        memory = driver.memory()
        assert 0 < memory.free_bytes <= memory.total_bytes

    def test_calls_that_succeeded_are_counted_by_name(self, driver: Driver) -> None:
        address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
        put(driver, address, handle)
        refused("map", driver.map, address, handle, PAGE_BYTES)
        driver.zero(address, PAGE_BYTES)
        driver.synchronize()
        driver.fence()
        driver.unmap(address, PAGE_BYTES)
        driver.release(handle)
        names = ("reserve", "create", "map", "set_access", "zero", "fence", "unmap", "release")
        assert driver.calls == dict.fromkeys(names, 1)

    @pytest.mark.parametrize("in_line", [False, True], ids=["control stream", "current stream"])
    def test_what_is_written_last_stands(self, driver: Driver, in_line: bool) -> None:
        tensor = torch.zeros(600, dtype=torch.int32, device=driver.device)
        driver.fence().wait()
        for turn in range(20):
            write = driver.write_behind if in_line else driver.write
            write(tensor, {index: turn * index - 7 for index in range(1, 600)})
            write(tensor, {})
        driver.order()
        assert tensor.tolist() == [0, *(19 * index - 7 for index in range(1, 600))]
        driver.synchronize()

    def test_a_fence_waits_and_orders(self, driver: Driver) -> None:
        fence = driver.fence()
        fence.order()
        fence.wait()
        assert fence.done()
        fence.order()

    def test_every_call_works_from_a_thread_that_never_saw_the_device(self, driver: Driver) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
                put(driver, address, handle)
                driver.zero(address, PAGE_BYTES)
                driver.synchronize()
                driver.unmap(address, PAGE_BYTES)
                driver.release(handle)
                driver.fence().wait()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not failures

    def test_touching_what_is_not_mapped_faults(self, driver: Driver) -> None:
        body = """
print("before", flush=True)
(wrap(driver.reserve(PAGE_BYTES), PAGE_BYTES, driver.device)[:64] + 1).sum().item()
print("after", flush=True)
"""
        assert_faulted(driver.device, run_child(driver.device, body))

    def test_writing_to_a_read_only_alias_faults(self, driver: Driver) -> None:
        body = """
address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(PAGE_BYTES)
writable, readable = mapped(address, handle), mapped(address + PAGE_BYTES, handle, Access.READ)
writable.fill_(1)
assert readable[7].item() == 1
print("before", flush=True)
readable.fill_(2)
readable[7].item()
print("after", flush=True)
"""
        assert_faulted(driver.device, run_child(driver.device, body))

    def test_asking_for_addresses_reserves_none(self, driver: Driver) -> None:
        body = """
for _ in range(200):
    assert driver.has_addresses(TIB)
assert not driver.calls["reserve"] and not driver.has_addresses(2**47 + PAGE_BYTES) and not driver.has_addresses(2**64)
while driver.calls["reserve"] < 64 and driver.has_addresses(4 * TIB):
    address = driver.reserve(4 * TIB)
driver.give_back(address, 4 * TIB)
assert driver.has_addresses(4 * TIB), "it is used again"
print("done")
"""
        child = run_child(driver.device, body)
        assert (child.returncode, child.stdout.split()) == (0, ["done"]), child.stderr

    def test_64_tib_of_addresses_fit_in_one_tensor(self, driver: Driver) -> None:
        body = """
size_bytes = 64 * TIB
address, handle = driver.reserve(size_bytes), driver.create(PAGE_BYTES)
memory = wrap(address, size_bytes, driver.device)
last = address + size_bytes - PAGE_BYTES
mapped(last, handle).fill_(0)
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    view = memory.view(dtype)
    assert view.data_ptr() == address and view.numel() * dtype.itemsize == size_bytes
    view[-3] = 2.0
    assert view[-5:].float().tolist() == [0.0, 0.0, 2.0, 0.0, 0.0]
    view[-3] = 0.0
strided = memory.view(torch.bfloat16).as_strided((4, 2), (size_bytes // 8, 1), size_bytes // 8 - 2)
assert strided[3].tolist() == [0.0, 0.0]
print("done")
"""
        child = run_child(driver.device, body)
        assert (child.returncode, child.stdout.split()) == (0, ["done"]), child.stderr

    def test_an_exported_handle_is_the_same_memory_in_another_process(self, driver: Driver) -> None:
        address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
        other_handle = driver.create(PAGE_BYTES)
        memory = put(driver, address, handle)
        memory.fill_(11)
        driver.fence().wait()
        body = """
channel = socket.socket(fileno=int(sys.argv[2]))
_, fds, _, _ = socket.recv_fds(channel, 1, 1)
handle = driver.import_fd(fds[0], PAGE_BYTES)
os.close(fds[0])
memory = mapped(driver.reserve(PAGE_BYTES), handle)
assert bool((memory == 11).all())
memory[1000:2000] = 22
assert memory[1500].item() == 22
driver.fence().wait()
driver.release(handle)
print("done")
"""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd = driver.export_fd(handle)
            socket.send_fds(ours, [b"."], [fd])
            os.close(fd)
            child = run_child(driver.device, body, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        assert (child.returncode, child.stdout.split()) == (0, ["done"]), child.stderr
        assert memory[[999, 1000, 1999, 2000]].tolist() == [11, 22, 22, 11]
        driver.fence().wait()
        driver.unmap(address, PAGE_BYTES)
        for each in (handle, other_handle):
            driver.release(each)

    def test_an_imported_handle_outlives_the_release_of_the_exported_one(self, driver: Driver) -> None:
        address, handle = driver.reserve(2 * PAGE_BYTES), driver.create(PAGE_BYTES)
        put(driver, address, handle).fill_(33)
        driver.fence().wait()
        fd = driver.export_fd(handle)
        driver.unmap(address, PAGE_BYTES)
        driver.release(handle)
        imported = driver.import_fd(fd, PAGE_BYTES)
        os.close(fd)
        newcomer = driver.create(PAGE_BYTES)
        put(driver, address, newcomer).fill_(44)
        memory = put(driver, address + PAGE_BYTES, imported)
        driver.release(imported)
        assert bool((memory == 33).all())
        driver.fence().wait()
        driver.unmap(address, PAGE_BYTES)
        driver.unmap(address + PAGE_BYTES, PAGE_BYTES)
        driver.release(newcomer)
        assert driver.calls["create"] + driver.calls["import_fd"] == driver.calls["release"]

    def test_reserved_addresses_stay_usable_over_many_rounds(self, driver: Driver) -> None:
        num_pages = 32
        address = driver.reserve(num_pages * PAGE_BYTES)
        handles = [driver.create(PAGE_BYTES) for _ in range(num_pages // 2)]
        for turn in range(8):
            pages = [(page * 7 + turn) % num_pages for page in range(len(handles))]
            views = [put(driver, address + page * PAGE_BYTES, handle) for page, handle in zip(pages, handles, strict=True)]
            for number, view in enumerate(views):
                if turn:
                    assert view[[0, -1]].tolist() == [turn - 1 + number] * 2
                view.fill_(turn + number)
            driver.fence().wait()
            for page in pages:
                driver.unmap(address + page * PAGE_BYTES, PAGE_BYTES)
        for handle in handles:
            driver.release(handle)
