"""A holder process as the source of a pool's extents: the one that owns them, or another engine's, which lends them."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence

from vmmkv.driver.base import Driver
from vmmkv.driver.host import SPARE_DESCRIPTORS, most_descriptors
from vmmkv.errors import BudgetError, HolderGone
from vmmkv.holder.client import HolderClient
from vmmkv.memory.extents import Extent, ExtentSource
from vmmkv.units import PAGE_BYTES, format_bytes

log = logging.getLogger(__name__)


class HolderSource(ExtentSource):
    """Extents that a holder process creates and owns, so that they outlive this one."""

    holder: HolderClient

    def __init__(self, driver: Driver, holder: HolderClient) -> None:
        super().__init__(driver)
        self.holder = holder

    def check_budget(self, budget_bytes: int) -> None:
        """Check that the holder may own so much memory. Raises: BudgetError if not."""
        if budget_bytes > self.holder.budget_bytes:
            raise BudgetError(
                f"budget_bytes={format_bytes(budget_bytes)} is more than the holder at {self.holder.path} may own: at most "
                f"{self.holder.budget_bytes} bytes ({format_bytes(self.holder.budget_bytes)})"
            )

    def create(self, num_pages: int) -> Extent | None:
        """A new extent; None if the holder has just ended. On failure there is none. Cost: a round trip and an import."""
        size_bytes = num_pages * PAGE_BYTES
        try:
            serial, fd = self.holder.create(size_bytes)
        except HolderGone:
            return None
        try:
            handle = self._driver.import_fd(fd, size_bytes)
        except BaseException:
            self.holder.release([serial])
            raise
        finally:
            os.close(fd)
        return Extent(handle, num_pages, zeroed=self._driver.creates_zeroed, serial=serial)

    def kept(self, serial: int, num_pages: int) -> Extent:
        """A sealed extent that the holder kept from an earlier process: held once, and not imported yet. No driver call."""
        return Extent(0, num_pages, holders=1, serial=serial, imported=False, sealed=True)

    def import_handles(self, extents: Sequence[Extent]) -> None:
        """Import extents that are not here yet, as far as the holder has them with that size. See `Pool.import_extents`."""
        _import(self._driver, self.holder, extents)

    def release(self, extent: Extent) -> None:
        """Give an extent up. A sealed one stays with the holder for the next process. Cost: a release. Raises: DriverError."""
        super().release(extent)
        if not extent.sealed:
            self.holder.release([extent.serial])

    def text_if_ended(self) -> str | None:
        """Consequence of a gone holder, as text; None if it is there."""
        return self.holder.text_if_gone if self.holder.is_gone() else None

    def check(self, extents: Sequence[Extent]) -> None:
        """Check that each extent is another handle of the holder, which has no others; AssertionError if not."""
        assert len({extent.serial for extent in extents} - {0}) == len(extents), "two extents are one handle of the holder"
        with contextlib.suppress(HolderGone):
            held_bytes = sum(extent.size_bytes for extent in extents)
            assert self.holder.held_bytes() == held_bytes, "the holder has lost a handle, or kept one"

    def close(self) -> None:
        """End the connection: the holder keeps what is sealed."""
        self.holder.close()


class LenderSource(ExtentSource):
    """The device's own extents, and those that another engine's holder lends: mapped read-only, and never free here."""

    lender: HolderClient

    def __init__(self, driver: Driver, lender: HolderClient) -> None:
        super().__init__(driver)
        self.lender = lender
        self._borrowed: Counter[int] = Counter()
        """Number of extents here by serial: one that is pending reclaim can be borrowed again."""

    def borrow(self, serial: int, num_pages: int) -> Extent:
        """A sealed extent of the other engine: held once, and not imported yet. No driver call."""
        extent = Extent(0, num_pages, holders=1, serial=serial, imported=False, lent=True)
        self._borrowed[serial] += 1
        self.borrowed_bytes += extent.size_bytes
        return extent

    def import_handles(self, extents: Sequence[Extent]) -> None:
        """Import extents that are not here yet, as far as the lender has them with that size. See `Pool.import_extents`."""
        _import(self._driver, self.lender, extents)

    def release(self, extent: Extent) -> None:
        """Give an extent up; a lent one goes back when it was borrowed as often. Cost: a release. Raises: DriverError."""
        super().release(extent)
        if not extent.lent:
            return
        self.borrowed_bytes -= extent.size_bytes
        self._borrowed[extent.serial] -= 1
        if self._borrowed[extent.serial]:
            return  # it was borrowed again before it had left
        del self._borrowed[extent.serial]
        self.lender.release([extent.serial])

    def check(self, extents: Sequence[Extent]) -> None:
        """Check the counts of borrowed extents and bytes; AssertionError if they are wrong."""
        lent = [extent for extent in extents if extent.lent]
        assert Counter(extent.serial for extent in lent) == self._borrowed, "what is borrowed is miscounted by handle"
        assert self.borrowed_bytes == sum(extent.size_bytes for extent in lent), "borrowed bytes are miscounted"

    def close(self) -> None:
        """End the connection to the lender."""
        self.lender.close()


def open_source(
    driver: Driver, budget_bytes: int, *, holder: str | os.PathLike[str] | None, lender: str | os.PathLike[str] | None
) -> HolderSource | LenderSource:
    """Connect to the holder at one of these sockets. Raises: ValueError for both; HolderUnavailable; BudgetError."""
    if holder is not None and lender is not None:
        raise ValueError(f"holder={str(holder)!r} and lender={str(lender)!r}: a pool lends or borrows; give one of them")
    source: HolderSource | LenderSource
    if holder is not None:
        client = HolderClient(holder, driver.device)
        source = HolderSource(driver, client)
    else:
        assert lender is not None, "without either the device is the source"
        client = HolderClient(lender, driver.device, borrows=True)
        source = LenderSource(driver, client)
    try:
        source.check_budget(budget_bytes)
    except BaseException:
        source.close()
        raise
    num_extents, most = budget_bytes // PAGE_BYTES, most_descriptors() - SPARE_DESCRIPTORS
    if driver.device.type == "cpu" and num_extents > most:
        log.warning(
            "this process may open %s files (`ulimit -n`), and each of up to %s extents of the holder at %s takes one: "
            "extents beyond %s are evicted; raise the limit to keep them",
            *(f"{most + SPARE_DESCRIPTORS:,}", f"{num_extents:,}", client.path, f"{most:,}"),
        )
    return source


def _import(driver: Driver, owner: HolderClient, extents: Sequence[Extent]) -> None:
    missing = {extent.serial: extent for extent in extents if not extent.imported}
    sizes_bytes = {serial: extent.size_bytes for serial, extent in missing.items()}
    with contextlib.suppress(HolderGone), contextlib.closing(owner.open(sizes_bytes)) as opened:
        for serial, fd in opened:
            extent = missing[serial]
            try:
                extent.handle = driver.import_fd(fd, extent.size_bytes)
            finally:
                os.close(fd)
            extent.imported = True
