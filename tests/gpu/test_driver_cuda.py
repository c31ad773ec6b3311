import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.laws.driver_laws import DriverLaws, put, refused
from vmmkv.driver import Access, Driver
from vmmkv.driver.cuda import CudaDriver
from vmmkv.memory.address_space import wrap
from vmmkv.units import GIB, MIB, PAGE_BYTES

CYCLES = 400_000_000  # a kernel of some 0.2 s at 2 GHz


class TestCudaDriverLaws(DriverLaws):
    pass


def test_open_driver_gives_the_cuda_driver_of_that_device(gpu: torch.device, driver: Driver) -> None:
    assert isinstance(driver, CudaDriver)
    assert driver.device == gpu
    assert gpu.index is not None


def test_created_memory_is_taken_from_the_device_and_comes_back(driver: Driver) -> None:
    """Nothing else may use the GPU."""
    torch.zeros(1, device=driver.device)
    before = driver.memory().free_bytes
    handle = driver.create(GIB)
    assert abs(before - driver.memory().free_bytes - GIB) < 64 * MIB
    driver.release(handle)
    assert abs(before - driver.memory().free_bytes) < 64 * MIB


def test_a_tensor_over_addresses_is_of_their_device_and_no_copy(driver: Driver) -> None:
    address = driver.reserve(PAGE_BYTES)
    tensor = wrap(address, PAGE_BYTES, driver.device)
    assert (tensor.device, tensor.data_ptr()) == (driver.device, address)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        tensor.as_strided((PAGE_BYTES + 1,), (1,))


def test_a_fence_is_not_done_while_a_kernel_runs(driver: Driver) -> None:
    torch.cuda._sleep(CYCLES)
    fence = driver.fence()
    assert not fence.done()
    deadline = time.monotonic() + 10
    while not fence.done():
        assert time.monotonic() < deadline, "the kernel has long finished"
        time.sleep(0.01)


def test_a_fence_sees_the_streams_that_it_is_given_and_no_others(driver: Driver) -> None:
    stream = torch.cuda.Stream(driver.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
    without, behind = driver.fence(), driver.fence([stream])
    generic = torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    same = driver.fence([generic])
    without.wait()
    assert not behind.done()
    assert not same.done()
    behind.wait()
    assert same.done()


def test_a_fence_used_again_by_another_does_not_report_the_others_work(driver: Driver) -> None:
    first = driver.fence()
    first.wait()
    assert first.done()
    torch.cuda._sleep(CYCLES)
    second = driver.fence()
    assert first.done()
    assert not second.done()
    second.wait()


def test_an_ordered_stream_waits_for_the_fence_and_the_caller_does_not(driver: Driver) -> None:
    stream = torch.cuda.Stream(driver.device)
    torch.cuda._sleep(CYCLES)
    fence = driver.fence()
    with torch.cuda.stream(stream):
        fence.order()
    assert not stream.query()
    stream.synchronize()
    assert fence.done()


def test_a_stream_of_another_device_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="not a stream of"):
        driver.fence([SimpleNamespace(device=torch.device("cpu"))])  # type: ignore[list-item]


def test_order_puts_the_callers_stream_behind_zeroes_and_writes(driver: Driver) -> None:
    size_bytes = 256 * MIB
    address, handle = driver.reserve(size_bytes), driver.create(size_bytes)
    memory = put(driver, address, handle, size_bytes // PAGE_BYTES)
    flag = torch.zeros(4, dtype=torch.int32, device=driver.device)
    for turn in range(1, 20):
        memory.fill_(turn)
        driver.fence().wait()
        driver.zero(address, size_bytes)
        driver.write(flag, dict.fromkeys(range(4), turn))
        driver.order()
        any_left = memory.view(torch.int64).any()
        seen = flag.clone()
        assert not any_left
        assert seen.tolist() == [turn] * 4
    driver.synchronize()
    driver.fence().wait()
    driver.unmap(address, size_bytes)
    driver.release(handle)


def test_a_write_in_line_is_behind_what_was_launched_and_before_what_comes(driver: Driver) -> None:
    tensor, side = torch.zeros(4, dtype=torch.int32, device=driver.device), torch.cuda.Stream()
    before, beside = tensor.clone(), tensor.clone()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(CYCLES)
    before.copy_(tensor)
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        beside.copy_(tensor)
    fence = driver.write_behind(tensor, {2: 7}, [side])
    after = tensor.clone()
    with torch.cuda.stream(side):
        later = tensor.clone()
    assert not side.query() and not fence.done()
    torch.cuda.synchronize()
    assert fence.done()
    assert before.tolist() == beside.tolist() == [0, 0, 0, 0]
    assert after.tolist() == later.tolist() == [0, 0, 7, 0]


def test_no_call_waits_for_a_kernel_that_runs(driver: Driver) -> None:
    address, settled = driver.reserve(4 * PAGE_BYTES), driver.create(PAGE_BYTES)
    put(driver, address, settled)
    driver.zero(address, PAGE_BYTES)  # once before: CUDA loads its memset kernel at the first use, and that may wait
    driver.synchronize()
    driver.fence().wait()
    torch.cuda._sleep(CYCLES)
    behind_kernel = driver.fence()
    start = time.perf_counter()
    handle = driver.create(PAGE_BYTES)
    memory = put(driver, address + PAGE_BYTES, handle)
    driver.zero(address + PAGE_BYTES, PAGE_BYTES)
    driver.synchronize()
    driver.unmap(address, PAGE_BYTES)
    driver.unmap(address + PAGE_BYTES, PAGE_BYTES)
    driver.release(handle)
    driver.release(settled)
    elapsed_s = time.perf_counter() - start
    assert not behind_kernel.done(), f"the calls took {elapsed_s * 1e3:.1f} ms, as long as the kernel"
    assert memory.data_ptr() == address + PAGE_BYTES
    behind_kernel.wait()


def test_memory_mapped_while_a_kernel_runs_is_there_for_the_next(driver: Driver) -> None:
    address = driver.reserve(4 * PAGE_BYTES)
    torch.cuda._sleep(CYCLES)
    handles = driver.create(3 * PAGE_BYTES), driver.create(PAGE_BYTES)
    put(driver, address, handles[0], 3)
    put(driver, address + 3 * PAGE_BYTES, handles[1])
    memory = wrap(address, 4 * PAGE_BYTES, driver.device)
    driver.zero(address, 4 * PAGE_BYTES)  # of both at once
    driver.order()
    memory[::4096] += 1
    assert int(memory.sum(dtype=torch.int64)) == 4 * PAGE_BYTES // 4096
    driver.fence().wait()
    for handle, start, num_pages in ((handles[0], address, 3), (handles[1], address + 3 * PAGE_BYTES, 1)):
        driver.unmap(start, num_pages * PAGE_BYTES)
        driver.release(handle)


def test_another_current_device_does_not_matter(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    driver = CudaDriver(torch.device("cuda", 1))
    assert gpu.index == torch.cuda.current_device() == 0
    address, handle = driver.reserve(PAGE_BYTES), driver.create(PAGE_BYTES)
    memory = put(driver, address, handle)
    driver.zero(address, PAGE_BYTES)
    driver.order()
    assert memory.device.index == 1
    assert not memory.any()
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            driver.zero(address, PAGE_BYTES)
            driver.synchronize()
            driver.fence().wait()
            driver.unmap(address, PAGE_BYTES)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failures
    driver.release(handle)
    assert torch.cuda.current_device() == 0


def test_errors_name_the_call_and_cudas_own_code(driver: Driver) -> None:
    address = driver.reserve(PAGE_BYTES)
    error = refused("set_access", driver.set_access, address, PAGE_BYTES, Access.READ)
    assert error.code.startswith("CUDA_ERROR_")
    assert error.code in str(error)
    assert hex(address) in str(error)
