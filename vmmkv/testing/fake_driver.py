"""A driver that keeps the laws: it refuses what CUDA refuses, asserts what CUDA cannot, counts, and fails on demand.

Alone it has addresses but no memory: touching them faults. Over another driver it checks that one's callers while the memory
is real: `FakeDriver(over=HostDriver())`, or over CUDA.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from vmmkv.driver.base import ADDRESS_SPACE_BYTES, Access, Driver, Fence, Handle, MemoryInfo, Reservations, span_text
from vmmkv.errors import DriverError, OutOfDeviceMemory
from vmmkv.units import GIB, PAGE_BYTES, format_bytes, round_up

_T = TypeVar("_T")


class LawBroken(AssertionError):
    """A caller did what would corrupt memory or lose the context on a real device. Always a bug."""


@dataclass(slots=True)
class _Allocation:
    size_bytes: int
    imported: bool = False
    released: bool = False
    num_mappings: int = 0


@dataclass(slots=True)
class _Mapped:
    handle: Handle
    size_bytes: int
    access: Access | None = None


@dataclass(eq=False, slots=True)
class Launch:
    """Device work under way over some byte ranges [start, end); it runs until `finish`."""

    ranges: tuple[tuple[int, int], ...]
    finished: bool = False

    def finish(self) -> None:
        """End this work, as the device does."""
        self.finished = True


@dataclass(eq=False, slots=True)
class _LaunchFence:
    launches: list[Launch]
    under: Fence | None

    def done(self) -> bool:
        return all(launch.finished for launch in self.launches) and (self.under is None or self.under.done())

    def wait(self) -> None:
        for launch in self.launches:
            launch.finish()
        if self.under is not None:
            self.under.wait()

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        if self.under is not None:
            self.under.order(streams)


@dataclass
class FakeDriver:
    """Driver law enforcement. `memory_bytes` is the device's size; `fail_at` the numbers of the calls to fail.

    A call's number counts all calls that can fail, from 0, since the driver was made: `fail_at = {driver.num_calls + 3}`
    fails the fourth from now. `launch` pretends that a kernel runs: what it touches must stay mapped until it finishes.
    """

    over: Driver | None = None
    memory_bytes: int = 64 * GIB
    fail_at: set[int] = field(default_factory=set)
    creates_zeroed: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    num_calls: int = 0
    used_bytes: int = 0

    def __post_init__(self) -> None:
        self.device = torch.device("cpu") if self.over is None else self.over.device
        if self.over is not None:
            self.creates_zeroed = self.over.creates_zeroed
        self._next_address = 1 << 44
        self._handles: dict[Handle, _Allocation] = {}
        self._mapped: dict[int, _Mapped] = {}
        self._pages: dict[int, int] = {}  # address of each mapped page -> address of its mapping
        self._reserved: list[tuple[int, int]] = []
        self._launches: list[Launch] = []
        self.captures = False
        """Does the current stream capture a graph? A test sets it."""
        self._reservations = Reservations()
        self._unordered: list[tuple[int, int]] = []  # zeroed on the control stream, and no launch waits for it yet
        self._numbers = itertools.count(1)

    # what a test asks

    @property
    def live_handles(self) -> int:
        """Number of handles that were made and not released."""
        return sum(not allocation.released for allocation in self._handles.values())

    @property
    def live_mappings(self) -> int:
        """Number of mappings that stand."""
        return len(self._mapped)

    @property
    def live_reservations(self) -> int:
        """Number of address ranges that were reserved and not given back."""
        return len(self._reserved)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of addresses that are mapped; those of a handle count once for each of its mappings."""
        return len(self._pages) * PAGE_BYTES

    def mappings_of(self, handle: Handle) -> int:
        """Number of addresses at which a handle is mapped."""
        return self._handles[handle].num_mappings

    def is_accessible(self, address: int, size_bytes: int) -> bool:
        """May the device read and write every byte of [address, address + size_bytes)?"""
        return self._accesses(address, size_bytes) <= {Access.READ_WRITE}

    def is_read_only(self, address: int, size_bytes: int) -> bool:
        """May the device read every byte of [address, address + size_bytes), and write none?"""
        return self._accesses(address, size_bytes) <= {Access.READ}

    def launch(self, ranges: Sequence[tuple[int, int]]) -> Launch:
        """Start a kernel that touches the byte ranges [start, end).

        All of them must be accessible now, and zeroes on their way to them ordered before (law 4).
        """
        for start, end in ranges:
            if not self.is_accessible(start, end - start):
                raise LawBroken(f"a launch touches {span_text(start, end - start)}, which is not all mapped")
            if any(first < end and start < last for first, last in self._unordered):
                raise LawBroken(f"a launch touches {span_text(start, end - start)}, which may be zeroed after it")
        launch = Launch(tuple(ranges))
        self._launches.append(launch)
        return launch

    # the protocol

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses."""
        self._pages_only(size_bytes)

        def reserve() -> int:
            return self._reservations.take(size_bytes, new) if self.over is None else self.over.reserve(size_bytes)

        def new(size_bytes: int) -> int:
            if size_bytes > ADDRESS_SPACE_BYTES:
                raise DriverError(f"reserve: {format_bytes(size_bytes)} of addresses", call="reserve", code="FAKE_ADDRESSES")
            address, self._next_address = self._next_address, self._next_address + size_bytes + PAGE_BYTES
            return address

        address = self._call("reserve", reserve)
        self._reserved.append((address, address + size_bytes))
        return address

    def has_addresses(self, size_bytes: int) -> bool:
        """Could so many bytes of addresses be reserved now?"""
        return size_bytes <= ADDRESS_SPACE_BYTES if self.over is None else self.over.has_addresses(size_bytes)

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a reservation for reuse. Law 4: nothing is mapped there, and no unfinished launch touches it."""
        if any(address <= page < address + size_bytes for page in self._pages):
            raise LawBroken(f"{span_text(address, size_bytes)} is given back, and something is mapped there")
        self._idle(address, size_bytes, "given back")
        self._reserved.remove((address, address + size_bytes))
        (self._reservations if self.over is None else self.over).give_back(address, size_bytes)

    def create(self, size_bytes: int) -> Handle:
        """Create a handle."""
        self._pages_only(size_bytes)

        def create() -> Handle:
            if self.used_bytes + size_bytes > self.memory_bytes:
                free = self.memory_bytes - self.used_bytes
                raise OutOfDeviceMemory(
                    f"{format_bytes(size_bytes)} were asked of a device with {format_bytes(free)} free",
                    call="create",
                    code="FAKE",
                )
            return next(self._numbers) if self.over is None else self.over.create(size_bytes)

        handle = self._call("create", create)
        self._handles[handle] = _Allocation(size_bytes)
        self.used_bytes += size_bytes
        return handle

    def release(self, handle: Handle) -> None:
        """Release a handle."""
        allocation = self._live(handle)
        self._pass_on("release", handle)
        allocation.released = True
        self._forget_if_gone(handle)

    def map(self, address: int, handle: Handle, size_bytes: int) -> None:
        """Map a handle."""
        self._pages_only(address, size_bytes)
        if self._live(handle).size_bytes != size_bytes:
            raise LawBroken(f"a handle of {self._handles[handle].size_bytes} bytes was mapped in part: {size_bytes} bytes")
        if not self._is_reserved(address, size_bytes):
            raise LawBroken(f"{span_text(address, size_bytes)} is not inside one reservation")
        pages = range(address, address + size_bytes, PAGE_BYTES)

        def map_() -> None:
            if any(page in self._pages for page in pages):
                raise DriverError(f"something is mapped at {address:#x} already", call="map", code="FAKE_ALREADY_MAPPED")
            if self.over is not None:
                self.over.map(address, handle, size_bytes)

        self._call("map", map_)
        self._mapped[address] = _Mapped(handle, size_bytes)
        self._pages.update(dict.fromkeys(pages, address))
        self._handles[handle].num_mappings += 1

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        """Set the access to a mapping."""
        mapped = self._exactly(address, size_bytes)
        self._pass_on("set_access", address, size_bytes, access)
        mapped.access = access

    def unmap(self, address: int, size_bytes: int) -> None:
        """Remove a mapping. Law 4: not while a launch that touches it is unfinished."""
        mapped = self._exactly(address, size_bytes)
        self._idle(address, size_bytes, "unmapped")
        self._pass_on("unmap", address, size_bytes)
        del self._mapped[address]
        for page in range(address, address + size_bytes, PAGE_BYTES):
            del self._pages[page]
        self._handles[mapped.handle].num_mappings -= 1
        self._forget_if_gone(mapped.handle)

    def zero(self, address: int, size_bytes: int) -> None:
        """Fill mapped memory with zeroes. Nothing orders the control stream behind a launch, so none may use this memory."""
        if not self.is_accessible(address, size_bytes):
            raise LawBroken(f"{span_text(address, size_bytes)} is zeroed and not all mapped")
        self._idle(address, size_bytes, "zeroed")
        self._pass_on("zero", address, size_bytes)
        self._unordered.append((address, address + size_bytes))

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between two addresses. Addresses of a reservation must be mapped, and the target writable."""
        for address, allowed in ((target, {Access.READ_WRITE}), (source, {Access.READ, Access.READ_WRITE})):
            if self._is_reserved(address, size_bytes) and not self._accesses(address, size_bytes) <= allowed:
                raise LawBroken(f"a copy touches {span_text(address, size_bytes)}, which is not all mapped")
        if self.over is not None:
            self.over.copy(target, source, size_bytes)

    def gather(self, target_TE: torch.Tensor, source_SE: torch.Tensor, rows_T: torch.Tensor) -> None:
        """Copy rows by their numbers. The rows must be mapped."""
        row_bytes = source_SE.shape[1] * source_SE.itemsize
        for row in rows_T.tolist():
            address = source_SE.data_ptr() + row * row_bytes
            if not self.is_accessible(address, row_bytes):
                raise LawBroken(f"a copy touches {span_text(address, row_bytes)}, which is not all mapped")
        if self.over is not None:
            self.over.gather(target_TE, source_SE, rows_T)

    def new_stream(self) -> torch.Stream:
        """Make a stream."""
        return torch.Stream(stream_id=0, device_index=-1, device_type=0) if self.over is None else self.over.new_stream()

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Make a stream the current one within."""
        return nullcontext() if self.over is None else self.over.on(stream)

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """Write elements of a device tensor."""
        self._call("write", lambda: write_to(tensor, values) if self.over is None else self.over.write(tensor, values))

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """Write elements behind all work launched so far."""
        over = self.over
        under = self._call(
            "write", lambda: write_to(tensor, values) if over is None else over.write_behind(tensor, values, streams)
        )
        return self._behind_launches(under)

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order streams behind the control stream."""
        if self.over is not None:
            self.over.order(streams)
        self._unordered.clear()

    def synchronize(self) -> None:
        """Wait for the control stream."""
        if self.over is not None:
            self.over.synchronize()
        self._unordered.clear()

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """Make a fence. `wait` finishes the launches, as the device would in time."""
        return self._behind_launches(self._call("fence", lambda: None if self.over is None else self.over.fence(streams)))

    def _behind_launches(self, under: Fence | None) -> Fence:
        self._launches = [launch for launch in self._launches if not launch.finished]
        return _LaunchFence(list(self._launches), under)

    def is_capturing(self, streams: Sequence[torch.Stream] = ()) -> bool:
        """Is one of these streams being captured? True while `captures` is set."""
        return self.captures or (self.over is not None and self.over.is_capturing(streams))

    def memory(self) -> MemoryInfo:
        """Physical memory of the device."""
        return MemoryInfo(self.memory_bytes - self.used_bytes, self.memory_bytes)

    def export_fd(self, handle: Handle) -> int:
        """Export a handle as a file descriptor."""
        self._live(handle)
        if self.over is None:
            raise DriverError("a fake device has no memory to export", call="export_fd", code="FAKE_NOT_SUPPORTED")
        over = self.over
        return self._call("export_fd", lambda: over.export_fd(handle))

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """Import a handle."""
        if self.over is None:
            raise DriverError("a fake device has no memory to import", call="import_fd", code="FAKE_NOT_SUPPORTED")
        over = self.over
        handle = self._call("import_fd", lambda: over.import_fd(fd, size_bytes))
        self._handles[handle] = _Allocation(size_bytes, imported=True)
        return handle

    # the laws

    def _accesses(self, address: int, size_bytes: int) -> set[Access | None]:
        """Accesses of the pages of [address, address + size_bytes); None for a page that is not mapped."""
        first = address // PAGE_BYTES * PAGE_BYTES
        pages = range(first, round_up(address + size_bytes, PAGE_BYTES), PAGE_BYTES)
        return {self._mapped[self._pages[page]].access if page in self._pages else None for page in pages}

    def _is_reserved(self, address: int, size_bytes: int) -> bool:
        """Does [address, address + size_bytes) lie in one reservation?"""
        return any(start <= address and address + size_bytes <= end for start, end in self._reserved)

    def _call(self, name: str, function: Callable[[], _T]) -> _T:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number in self.fail_at:
            raise DriverError(f"{name} was told to fail (call {number})", call=name, code="FAKE_INJECTED")
        result = function()
        self.calls[name] += 1
        return result

    def _pass_on(self, name: str, *arguments: object) -> None:
        """Make a call that returns nothing by the driver below, if there is one."""
        self._call(name, lambda: None if self.over is None else getattr(self.over, name)(*arguments))

    def _pages_only(self, *values: int) -> None:
        if any(value <= 0 or value % PAGE_BYTES for value in values):
            raise LawBroken(f"{values} are not all positive multiples of a page, {PAGE_BYTES} bytes")

    def _live(self, handle: Handle) -> _Allocation:
        if handle not in self._handles or self._handles[handle].released:
            raise LawBroken(f"handle {handle} was used after its release, or never made")
        return self._handles[handle]

    def _exactly(self, address: int, size_bytes: int) -> _Mapped:
        mapped = self._mapped.get(address)
        if mapped is None or mapped.size_bytes != size_bytes:
            raise LawBroken(f"no one mapping stands at exactly {span_text(address, size_bytes)}")
        return mapped

    def _idle(self, address: int, size_bytes: int, what: str) -> None:
        for launch in self._launches:
            if not launch.finished and any(start < address + size_bytes and address < end for start, end in launch.ranges):
                raise LawBroken(f"{span_text(address, size_bytes)} is {what} while a launch may touch it")

    def _forget_if_gone(self, handle: Handle) -> None:
        allocation = self._handles[handle]
        if allocation.released and not allocation.num_mappings:
            del self._handles[handle]
            self.used_bytes -= 0 if allocation.imported else allocation.size_bytes


def write_to(tensor: torch.Tensor, values: Mapping[int, int]) -> None:
    """Write numbers to a tensor on the host, by index."""
    tensor.numpy()[list(values)] = list(values.values())
