"""A driver that tells how much time its calls take, so that Python's share of an operation can be told from the driver's."""

import threading
from collections.abc import Callable
from typing import Any, cast

from bench.timing import now_us
from vmmkv.driver import Driver

CALLS = (
    "reserve",
    "create",
    "release",
    "map",
    "set_access",
    "unmap",
    "zero",
    "write",
    "write_behind",
    "order",
    "synchronize",
    "fence",
    "memory",
)


class TimedDriver:
    """Wraps a driver. `spent_us` grows with every call made by the thread that made this one, and by no other."""

    def __init__(self, driver: Driver) -> None:
        self.device = driver.device
        self.page_bytes = driver.page_bytes
        self.creates_zeroed = driver.creates_zeroed
        self.calls = driver.calls
        self.export_fd = driver.export_fd
        self.import_fd = driver.import_fd
        self.copy, self.give_back, self.is_capturing = driver.copy, driver.give_back, driver.is_capturing
        self.spent_us = 0.0
        self._owner = threading.get_ident()
        for name in CALLS:
            setattr(self, name, self._timed(getattr(driver, name)))

    def as_driver(self) -> Driver:
        """Itself, by the protocol: its methods are set by name, which the type checker cannot follow."""
        return cast(Driver, self)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_us = now_us()
            try:
                return call(*arguments)
            finally:
                if threading.get_ident() == self._owner:
                    self.spent_us += now_us() - began_us

        return timed
