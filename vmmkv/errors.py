"""Every exception of the library; the server adds a few of its own under the same root.

A message says what was given, what was wanted, what there was, and what would work.
"""

import difflib
from collections.abc import Iterable
from typing import Final

_MOST_COMPARED: Final = 100
"""Characters of a misspelt name. One that a client sends can have megabytes, and each character takes 40 bytes to compare."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is nearest to a misspelt one; empty if none is near."""
    near = difflib.get_close_matches(name[:_MOST_COMPARED], list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""


class VmmkvError(Exception):
    """The root of all exceptions of vmmkv."""


class DriverError(VmmkvError):
    """A driver call failed: `call` names it (`"map"`), `code` is the driver's own name for what happened."""

    def __init__(self, message: str, *, call: str, code: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class OutOfDeviceMemory(DriverError):
    """The device has no physical memory left."""


class OutOfAddresses(DriverError, ValueError):
    """Slots that need more addresses than there are. `slots` of that length fit, or as many as were wanted of `max_tokens`;
    0 where none do."""

    def __init__(self, message: str, *, slots: int, max_tokens: int) -> None:
        super().__init__(message, call="reserve", code="ENOMEM")
        self.slots = slots
        self.max_tokens = max_tokens


class OutOfMappings(DriverError):
    """The process has as many mappings as the kernel allows (`vm.max_map_count`)."""


class OutOfDescriptors(DriverError):
    """The process may open no more files. Internal: callers get OutOfPages where evicting gives none."""


class HolderGone(DriverError):
    """The holder process of this pool's memory is gone. Internal: callers get OutOfPages where it would have given more."""


class ForkedProcess(DriverError):
    """A driver, and so a pool or a cache, was used in a child process made by fork()."""


class DriverUnavailable(VmmkvError):
    """A driver cannot work on this machine."""


class MissingPackage(DriverUnavailable):
    """The Python package that the driver needs is not installed."""


class MissingDriver(DriverUnavailable):
    """The machine has no CUDA driver."""


class NoDevice(DriverUnavailable):
    """The machine has no such device."""


class NoVirtualMemory(DriverUnavailable):
    """The device does not support virtual memory management."""


class TorchWithoutCuda(DriverUnavailable):
    """torch was built without CUDA."""


class LayoutError(VmmkvError, ValueError):
    """A geometry that cannot be laid out in pages."""


class BudgetError(VmmkvError, ValueError):
    """A budget that cannot be kept."""


class OutOfPages(VmmkvError):
    """The pool has too few pages for what was asked."""


class OutOfSlots(VmmkvError):
    """Every slot of the cache is taken."""


class SequenceTooLong(VmmkvError):
    """More tokens than a sequence may hold."""


class RowsUnmapped(VmmkvError):
    """Rows that are not mapped, or no longer kept, were asked for."""


class ViewNotCloned(VmmkvError):
    """A view was to be saved, pickled, copied or shared with a storage that torch cannot take whole: clone() it first."""


class Closed(VmmkvError):
    """A pool, cache or sequence was used after it was closed."""


class Evicted(VmmkvError):
    """A parked slot was evicted under pressure, or adopted already."""


class GraphCapture(VmmkvError):
    """An operation that maps, reclaims or waits was called while a CUDA graph is captured."""


class Reentered(VmmkvError):
    """A finalizer or signal handler called a pool or its caches in the middle of one of their operations."""


class TierUnavailable(VmmkvError):
    """A tier cannot be opened: another process has it."""


class HolderUnavailable(VmmkvError):
    """There is no holder process at a path, or it refuses this engine."""


class LogDamaged(VmmkvError):
    """The bytes of a holder's log are not what its writer wrote: nothing in it counts."""
