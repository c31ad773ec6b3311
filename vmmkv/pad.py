"""The pad: one page of zeroes that stands, read-only, under row 0 (and its guard) of every arena of a pool.

A view of a whole arena begins at slot 0, and its `data_ptr` must be mapped though most of the view is not: Triton's
launcher asks the driver about every pointer argument and refuses one that it does not know ("cannot be accessed from
Triton (cpu tensor?)"). So no sequence ever runs in slot 0, and the pad is mapped there; rows that only fill up a batch
point to it. Whoever writes to it faults.
"""

import contextlib

from vmmkv.driver.base import Access, Driver, Handle
from vmmkv.errors import DriverError
from vmmkv.units import PAGE_BYTES


class Pad:
    """One page of a pool, beyond its budget, and the addresses where it is mapped. Made when the first cache needs it."""

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle | None = None
        self._driver = driver
        self._is_zero = driver.creates_zeroed
        self._addresses: list[int] = []

    def map(self, address: int) -> None:
        """Put the page there, read-only. On failure it is not there, or goes with `close`.

        Cost: a map and an access call; the first time a create, a zero and another access call.
        """
        driver = self._driver
        if self.handle is None:
            self.handle = driver.create(PAGE_BYTES)
        driver.map(address, self.handle, PAGE_BYTES)
        self._addresses.append(address)
        try:
            if not self._is_zero:
                driver.set_access(address, PAGE_BYTES, Access.READ_WRITE)
                driver.zero(address, PAGE_BYTES)
                driver.settle()
                self._is_zero = True
            driver.set_access(address, PAGE_BYTES, Access.READ)
        except BaseException:
            with contextlib.suppress(DriverError):
                self.unmap(address)
            raise

    def unmap(self, address: int) -> None:
        """Take it away again, once no launch reads it. Cost: an unmap."""
        self._driver.unmap(address, PAGE_BYTES)
        self._addresses.remove(address)

    def close(self) -> None:
        """Unmap it wherever it still is, and release it. Idempotent."""
        for address in list(self._addresses):
            self.unmap(address)
        if self.handle is not None:
            self._driver.release(self.handle)
            self.handle = None
