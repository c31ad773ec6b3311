"""What each driver call costs: for small and large handles, alone, beside a busy Python thread, beside a kernel.

The life of a handle is timed call by call: created, mapped, made accessible, zeroed, unmapped, released.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TypeVar

import torch

from bench.figures import Drawing
from bench.harness import Recorder, WrongNumbers, device_sleep, now_us, sleep_cycles
from vmmkv.driver import Access, Driver, open_driver
from vmmkv.memory.address_space import wrap
from vmmkv.units import PAGE_BYTES, format_bytes

FIGURES: Final = (Drawing("calls", "What each call of the driver takes", (), r"(?P<panel>.+?), (?P<series>.+)"),)

HANDLE_BYTES: Final = (PAGE_BYTES, 16 * PAGE_BYTES)
"""The pool's smallest size class, and its largest."""
_KERNEL_US: Final = 20_000.0
_BYTE: Final = 0xA5
_Answer = TypeVar("_Answer")

Beside = Callable[[], AbstractContextManager[Callable[[], None]]]
"""What runs beside the calls. Its function is called before each life, to keep it going."""


def run(recorder: Recorder) -> None:
    """Time every call under every condition. Raises: WrongNumbers if memory is not what the driver says."""
    settings = recorder.settings
    driver = open_driver(settings.device)
    _check(driver)
    name = "cuda" if settings.on_gpu else "host"
    # Beside a thread each call waits for Python's lock, 5 ms a time.
    num_lives = 30 if settings.quick else 500
    conditions: list[tuple[str, Beside, int]] = [
        ("alone", lambda: nullcontext(_nothing), num_lives),
        ("beside a busy thread", _beside_thread, 3 if settings.quick else 60),
    ]
    if settings.on_gpu:
        conditions.append(("beside a kernel", lambda: _beside_kernel(settings.device), num_lives))
    cases = [(size_bytes, *condition) for size_bytes in HANDLE_BYTES for condition in conditions]
    limits = torch.zeros(256, dtype=torch.int32, device=settings.device)
    for size_bytes, beside, condition, count in recorder.track(cases, lambda case: f"{name}, {case[1]}"):
        address, samples_us = driver.reserve(size_bytes), defaultdict[str, list[float]](list)
        live(driver, address, size_bytes, limits, samples_us)  # first calls load code
        samples_us.clear()
        with condition() as keep_busy:
            for _ in range(count):
                keep_busy()
                live(driver, address, size_bytes, limits, samples_us)
        for call, samples in samples_us.items():
            recorder.samples(f"{format_bytes(size_bytes)} handle, {beside}", name, call, "us", samples)


def live(
    driver: Driver, address: int, size_bytes: int, limits: torch.Tensor, samples_us: defaultdict[str, list[float]]
) -> None:
    """The life of a handle at one address, from create to release. `samples_us` gets the microseconds of each call, by name.

    It leaves nothing behind but a page of reserved addresses.
    """

    def timed(name: str, call: Callable[..., _Answer], *arguments: object) -> _Answer:
        began_us = now_us()
        answer = call(*arguments)
        samples_us[name].append(now_us() - began_us)
        return answer

    timed("reserve", driver.reserve, PAGE_BYTES)
    handle = timed("create", driver.create, size_bytes)
    timed("map", driver.map, address, handle, size_bytes)
    timed("set_access", driver.set_access, address, size_bytes, Access.READ_WRITE)
    timed("zero (launch)", driver.zero, address, size_bytes)
    timed("write 1 limit (launch)", driver.write, limits, {1: 1})
    timed("write 256 limits (launch)", driver.write, limits, dict.fromkeys(range(256), 1))
    timed("order", driver.order)
    fence = timed("fence", driver.fence)
    timed("fence.done", fence.done)
    timed("synchronize", driver.synchronize)  # the zeroes are written, so that the page can be unmapped
    os.close(timed("export_fd", driver.export_fd, handle))
    timed("unmap", driver.unmap, address, size_bytes)
    timed("release", driver.release, handle)
    timed("memory", driver.memory)


def _check(driver: Driver) -> None:
    """Bytes written through one address are read through another, and zeroes are zeroes. Raises: WrongNumbers."""
    address, alias = driver.reserve(PAGE_BYTES), driver.reserve(PAGE_BYTES)
    handle = driver.create(PAGE_BYTES)
    for place in (address, alias):
        driver.map(place, handle, PAGE_BYTES)
        driver.set_access(place, PAGE_BYTES, Access.READ_WRITE)
    wrap(address, PAGE_BYTES, driver.device).fill_(_BYTE)
    aliased = bool((wrap(alias, PAGE_BYTES, driver.device) == _BYTE).all())
    driver.zero(address, PAGE_BYTES)
    driver.synchronize()
    zeroed = not wrap(alias, PAGE_BYTES, driver.device).any()
    for place in (address, alias):
        driver.unmap(place, PAGE_BYTES)
    driver.release(handle)
    if not (aliased and zeroed):
        raise WrongNumbers(f"{driver.device}: a page mapped twice is read alike: {aliased}; zeroed: {zeroed}")


def _nothing() -> None:
    pass


@contextmanager
def _beside_thread() -> Iterator[Callable[[], None]]:
    """A Python thread that never gives up Python's lock unasked."""
    stopping = False

    def spin() -> None:
        number = 0
        while not stopping:
            number += 1

    thread = threading.Thread(target=spin, name="bench-busy", daemon=True)
    thread.start()
    try:
        yield _nothing
    finally:
        stopping = True
        thread.join()


@contextmanager
def _beside_kernel(device: torch.device) -> Iterator[Callable[[], None]]:
    """A kernel runs on the current stream; the next is launched before a life in which it would end."""
    cycles = sleep_cycles(device, _KERNEL_US)
    until_us = 0.0

    def keep_busy() -> None:
        nonlocal until_us
        if now_us() > until_us - _KERNEL_US / 2:
            device_sleep(cycles)
            until_us = max(until_us, now_us()) + _KERNEL_US

    try:
        yield keep_busy
    finally:
        torch.cuda.synchronize(device)
