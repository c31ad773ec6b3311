"""The driver protocol: a device's virtual memory, as far as vmmkv needs it.

Handle table

| thing       | made by            | undone by            | depends on                                    |
|-------------|--------------------|----------------------|-----------------------------------------------|
| reservation | reserve            | give_back (reuse)    | nothing                                       |
| handle      | create, import_fd  | release              | nothing                                       |
| mapping     | map + set_access   | unmap                | a reservation and a handle                    |
| fence       | fence              | (garbage collection) | the streams' work at the moment it was made   |

Laws every implementation keeps:
1. A handle is indivisible: it is mapped whole and unmapped whole.
2. `map` refuses an address where a mapping stands.
3. A released handle's memory lives on while it is mapped, and is given back when the last mapping goes.
4. Unmapped addresses of a reservation fault when touched; they never read other bytes.
5. A call that fails changes nothing.
6. `calls` counts the calls that succeeded, by name, so that live handles are `create + import_fd - release`.
"""

import enum
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import torch

from vmmkv.errors import BudgetError, DriverError, ForkedProcess
from vmmkv.units import PAGE_BYTES, format_bytes

ADDRESS_SPACE_BYTES: Final = 1 << 47
"""The addresses of a process on x86-64. No reservation is larger."""

T = TypeVar("T")

Handle: TypeAlias = int
"""A driver's name for one physical allocation. Opaque; a handle is never used after `release`."""


class Access(enum.Enum):
    """Access of the device to a mapping."""

    READ = "read"
    READ_WRITE = "read_write"


class MemoryInfo(NamedTuple):
    """Physical memory of a device, in bytes."""

    free_bytes: int
    total_bytes: int


def check_budget(budget_bytes: int, driver: "Driver", remedy: str) -> None:
    """Check that the device, or this process on a host, has so much in all. Raises: BudgetError. Cost: as `Driver.memory`."""
    total_bytes = driver.memory().total_bytes
    if budget_bytes > total_bytes:
        owner = "this machine, or its container," if driver.device.type == "cpu" else driver.device
        message = f"a budget of {format_bytes(budget_bytes)} is more than {owner} has: {format_bytes(total_bytes)} in all"
        raise BudgetError(f"{message}; {remedy}")


class Fence(Protocol):
    """All work that had been launched on some streams when the fence was made. Compared by identity."""

    def done(self) -> bool:
        """Has that work finished? Never blocks."""

    def wait(self) -> None:
        """Block until that work has finished."""

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Make the caller's current stream, and `streams`, wait for that work. Does not block the caller."""


class _Done:
    """A fence that has passed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        pass


DONE: Final = _Done()
"""The fence of no work, or of work that is done when the call that launches it returns."""


class Reservations:
    """The reservations of one address space, those in use and those given back for reuse. They outlive every driver."""

    def __init__(self) -> None:
        self._used_bytes = 0
        self._free: defaultdict[int, deque[int]] = defaultdict(deque)
        """Addresses by size, the oldest first: a stale view goes on faulting as long as possible."""

    def take(self, size_bytes: int, reserve: Callable[[int], int]) -> int:
        """Take the reservation of this size that was given back first; if there is none, a new one by `reserve`."""
        try:
            address = self._free[size_bytes].popleft()
        except IndexError:  # asked for and taken in one step: pools of several threads share this
            address = reserve(size_bytes)
        self._used_bytes += size_bytes
        return address

    def has(self, size_bytes: int) -> bool:
        """Was a reservation of this size given back?"""
        return bool(self._free.get(size_bytes))

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a reservation for reuse."""
        self._used_bytes -= size_bytes
        self._free[size_bytes].append(address)

    def __str__(self) -> str:
        free_bytes = sum(size_bytes * len(addresses) for size_bytes, addresses in list(self._free.items()))
        return (
            f"this process has reserved {format_bytes(self._used_bytes)} for open caches, and keeps {format_bytes(free_bytes)} "
            f"of closed ones, which caches of the same sizes reuse; it has {format_bytes(ADDRESS_SPACE_BYTES)} in all"
        )


def retried(call: Callable[[], T]) -> T:
    """Make a driver call of an undo, or one that cannot be undone, up to three times. If all fail, the device is lost."""
    for _ in range(2):
        with suppress(DriverError):
            return call()
    return call()


def span_text(address: int, size_bytes: int) -> str:
    """Addresses as messages name them: `[start, end)`."""
    return f"[{address:#x}, {address + size_bytes:#x})"


class DriverBase:
    """Base of the devices' drivers: the count of calls, the process that they belong to, refusals, and `gather`."""

    _invalid = "EINVAL"
    """The driver's own name for a bad argument."""
    _forked = ""
    """End of the message to a child made by fork(): what it lacks, and can do instead."""
    _forked_code = "EPERM"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._pid = os.getpid()

    def gather(self, target_TE: torch.Tensor, source_SE: torch.Tensor, rows_T: torch.Tensor) -> None:
        """Copy rows by their numbers. Cost: one launch, which does not block; on a host it is done when this returns."""
        self._enter("gather")
        torch.index_select(source_SE, 0, rows_T, out=target_TE)

    def _enter(self, call: str) -> None:
        """Check that a call comes from the driver's own process. Raises: ForkedProcess."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"{call}: this driver belongs to process {self._pid}, and this is {os.getpid()}, a child made by fork(), "
                f"{self._forked}",
                call=call,
                code=self._forked_code,
            )

    def _refuse(self, call: str, message: str, code: str = "") -> NoReturn:
        raise DriverError(f"{call}: {message}", call=call, code=code or self._invalid)

    def _whole_pages(self, call: str, **values: int) -> None:
        for name, value in values.items():
            if value <= 0 or value % PAGE_BYTES:
                self._refuse(call, f"{name}={value} must be a positive multiple of the page, {PAGE_BYTES} bytes")


class Driver(Protocol):
    """A device's virtual memory: addresses are reserved, handles created, and one put under the other.

    Addresses and sizes are multiples of PAGE_BYTES, in bytes. Every method raises DriverError, with `call` the
    method's name, if the driver refuses, and then has changed nothing. Methods may be called from any thread, but
    not from two at once (the pool's lock sees to that).
    """

    device: torch.device
    creates_zeroed: bool
    """Does `create` give zeroes? If not, the memory must be zeroed before its first use."""
    calls: Counter[str]

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses, aligned to a page, with nothing mapped. They stay reserved until the process ends.

        The oldest reservation of the same size that was given back is reused first.
        """

    def has_addresses(self, size_bytes: int) -> bool:
        """Could so many bytes of addresses be reserved now? None stay reserved. Cost: two calls."""

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a whole reservation for reuse: nothing is mapped there, and no work touches it. Cannot fail."""

    def create(self, size_bytes: int) -> Handle:
        """Take physical memory from the device. Raises OutOfDeviceMemory when there is none."""

    def release(self, handle: Handle) -> None:
        """Give a handle up; its memory goes back to the device when its last mapping goes."""

    def map(self, address: int, handle: Handle, size_bytes: int) -> None:
        """Put a whole handle under `[address, address + size_bytes)`, where nothing stands; not accessible yet."""

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        """Let the device read, or read and write, what is mapped at `[address, address + size_bytes)`."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take the one mapping at `[address, address + size_bytes)` away. The caller has seen its fence done."""

    def zero(self, address: int, size_bytes: int) -> None:
        """Fill mapped, writable memory with zeroes, in order on the driver's own *control stream* (see `order`)."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between two addresses that do not overlap, in order on the caller's current stream.

        Each is the device's, a torch tensor's, or of pinned host memory. Not counted in `calls`.
        """

    def gather(self, target_TE: torch.Tensor, source_SE: torch.Tensor, rows_T: torch.Tensor) -> None:
        """Copy row `rows_T[t]` of the source to row t of the target, in order on the caller's current stream.

        Both are the device's, and do not overlap; the target is contiguous. Not counted in `calls`.
        """

    def new_stream(self) -> torch.Stream:
        """A stream besides the caller's, for copies that run beside its work. It lasts as long as the process."""

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Make a stream the caller's current one within."""

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """Write elements of a contiguous int32 device tensor, by index, in order on the control stream."""

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """Write as `write`, in order on the caller's current stream and `streams`: behind all work launched so far on them.

        What is launched later on any of them comes behind it. Returns a fence, as `fence` does, behind that too.
        """

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Make the caller's current stream, and `streams`, wait for what is on the control stream. Does not block."""

    def synchronize(self) -> None:
        """Block until the control stream is empty."""

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """A fence behind all work so far on the caller's current stream, the control stream, and `streams`."""

    def is_capturing(self, streams: Sequence[torch.Stream] = ()) -> bool:
        """Is work on the caller's current stream, or on one of `streams`, being captured into a graph?"""

    def memory(self) -> MemoryInfo:
        """Physical memory of the device, free and in total."""

    def export_fd(self, handle: Handle) -> int:
        """A file descriptor, owned by the caller, by which another process can import this handle."""

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """A handle to memory that another process exported; `fd` stays the caller's to close."""
