"""What each call of the driver costs: for small and large handles, alone, beside a busy Python thread, beside a kernel.

One *life* of a handle is timed call by call: created, mapped, made accessible, zeroed, unmapped, released. On CUDA the
lives are repeated with handles created with and without being exportable and open to RDMA.
"""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TypeVar

import torch

from bench.report import Report
from bench.rows import Row
from bench.settings import Settings
from bench.timing import WrongNumbers, device_sleep, now_us, sleep_cycles, summarize
from vmmkv.driver import Access, Driver, open_driver
from vmmkv.memory.address_space import wrap
from vmmkv.units import PAGE_BYTES, format_bytes

SUITE: Final = "driver_calls"
HANDLE_BYTES: Final = (PAGE_BYTES, 16 * PAGE_BYTES)
"""The pool's two size classes."""

_KERNEL_US: Final = 20_000.0
_BYTE: Final = 0xA5
_Answer = TypeVar("_Answer")

Condition = Callable[[], AbstractContextManager[Callable[[], None]]]
"""What goes on beside the calls; what it gives is called before each life, to see that it still does."""


def run(settings: Settings, report: Report) -> None:
    """Time every call under every condition. Raises WrongNumbers if memory is not what the driver promises."""
    driver = open_driver(settings.device)
    conditions = _conditions(settings)
    flagged = _drivers_by_flags(settings)
    _check(driver)
    with report.progress(SUITE, len(HANDLE_BYTES) * (len(conditions) + len(flagged))) as begin:
        for size_bytes in HANDLE_BYTES:
            for name, (condition, num_lives) in conditions.items():
                workload = f"{format_bytes(size_bytes)} handle, {name}"
                begin(workload)
                report.add(*_rows(Life(driver, size_bytes), condition, num_lives, workload, _system(driver)))
            for flags, flagged_driver in flagged.items():
                workload = f"{format_bytes(size_bytes)} handle, alone"
                begin(f"{workload}, {flags}")
                num_lives = conditions["alone"][1]
                life = Life(flagged_driver, size_bytes, exports=False)
                report.add(*_rows(life, _alone, num_lives, workload, f"cuda, {flags}"))


def _conditions(settings: Settings) -> dict[str, tuple[Condition, int]]:
    """By name, what goes on and how many lives are timed: beside a thread each call waits for Python's lock, 5 ms a time."""
    conditions: dict[str, tuple[Condition, int]] = {
        "alone": (_alone, 30 if settings.quick else 500),
        "beside a busy thread": (_beside_thread, 3 if settings.quick else 60),
    }
    if settings.on_gpu:
        conditions["beside a kernel"] = (lambda: _beside_kernel(settings.device), 30 if settings.quick else 500)
    return conditions


def _rows(life: "Life", condition: Condition, num_lives: int, workload: str, system: str) -> Iterator[Row]:
    life.live()  # first calls load code
    life.samples_us.clear()
    with condition() as keep_busy:
        for _ in range(num_lives):
            keep_busy()
            life.live()
    for call, samples in life.samples_us.items():
        yield Row(suite=SUITE, workload=workload, system=system, metric=call, unit="us", summary=summarize(samples))


class Life:
    """The life of a handle, again and again at one address. `samples_us` has the microseconds of each call, by its name."""

    def __init__(self, driver: Driver, size_bytes: int, *, exports: bool = True) -> None:
        self.driver = driver
        self.size_bytes = size_bytes
        self.exports = exports
        self.samples_us: dict[str, list[float]] = defaultdict(list)
        self._address = driver.reserve(size_bytes)
        self._limits = torch.zeros(256, dtype=torch.int32, device=driver.device)
        self._all_limits = dict.fromkeys(range(256), 1)

    def live(self) -> None:
        """Once from create to release, each call timed. Leaves nothing behind but a page of reserved addresses."""
        driver, address, size_bytes = self.driver, self._address, self.size_bytes
        self._timed("reserve", lambda: driver.reserve(PAGE_BYTES))
        handle = self._timed("create", lambda: driver.create(size_bytes))
        self._timed("map", lambda: driver.map(address, handle, size_bytes))
        self._timed("set_access", lambda: driver.set_access(address, size_bytes, Access.READ_WRITE))
        self._timed("zero (launch)", lambda: driver.zero(address, size_bytes))
        self._timed("write 1 limit (launch)", lambda: driver.write(self._limits, {1: 1}))
        self._timed("write 256 limits (launch)", lambda: driver.write(self._limits, self._all_limits))
        self._timed("order", driver.order)
        fence = self._timed("fence", driver.fence)
        self._timed("fence.done", fence.done)
        self._timed("synchronize", driver.synchronize)  # the zeroes are written, so that the page can be unmapped
        if self.exports:
            os.close(self._timed("export_fd", lambda: driver.export_fd(handle)))
        self._timed("unmap", lambda: driver.unmap(address, size_bytes))
        self._timed("release", lambda: driver.release(handle))
        self._timed("memory", driver.memory)

    def _timed(self, name: str, call: Callable[[], _Answer]) -> _Answer:
        began_us = now_us()
        answer = call()
        self.samples_us[name].append(now_us() - began_us)
        return answer


def _check(driver: Driver) -> None:
    """Before anything is timed: bytes written through one address are read through another, and zeroes are zeroes."""
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
        raise WrongNumbers(f"{_system(driver)}: a page mapped twice is read alike: {aliased}; zeroed: {zeroed}")


@contextmanager
def _busy_thread() -> Iterator[None]:
    """A Python thread that never gives up Python's lock unasked."""
    stopping = False

    def spin() -> None:
        number = 0
        while not stopping:
            number += 1

    thread = threading.Thread(target=spin, name="bench-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping = True
        thread.join()


def _alone() -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(_nothing)


def _nothing() -> None:
    pass


@contextmanager
def _beside_thread() -> Iterator[Callable[[], None]]:
    with _busy_thread():
        yield _nothing


@contextmanager
def _beside_kernel(device: torch.device) -> Iterator[Callable[[], None]]:
    """On the current stream a kernel runs; the next is launched before a life in which it would end."""
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


def _system(driver: Driver) -> str:
    return "cuda" if driver.device.type == "cuda" else "host"


def _drivers_by_flags(settings: Settings) -> dict[str, Driver]:
    """Drivers whose handles differ in what they can be used for: can it be had for nothing?"""
    if not settings.on_gpu:
        return {}
    from bench.cuda_flags import drivers_by_flags

    return drivers_by_flags(settings.device)


if __name__ == "__main__":
    from bench.run import main

    sys.exit(main([SUITE, *sys.argv[1:]]))
