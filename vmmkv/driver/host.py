"""Virtual memory of the host, through mmap: the driver where there is no GPU, and the one that the tests run on.

The same laws as on a GPU, in Linux's terms. A reservation is an anonymous PROT_NONE mapping, so that nothing else gets
its addresses and whoever touches them faults. A handle is a piece of a memfd (see memfd.py), taken with fallocate, so
that a lack of memory shows there and not as a signal at some later touch. `map` puts the piece over the reservation,
still PROT_NONE, `set_access` is mprotect, and `unmap` puts anonymous PROT_NONE back. A piece can be mapped at many
addresses; since punching its hole would silently zero it under all of them, that waits for the last mapping.

fork(): a child never shares pages with its parent. Mappings are left out of the child (MADV_DONTFORK), what was reserved
is reserved there again, so a stale view faults in the child, and every method raises ForkedProcess. Use spawn or
forkserver, or open a driver of its own in the child; export_fd and import_fd share memory on purpose.
"""

import ctypes
import errno
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from vmmkv.driver import host_addresses, libc, memfd
from vmmkv.driver.base import Access, Fence, Handle, MemoryInfo
from vmmkv.driver.host_memory import HostMemory
from vmmkv.errors import Closed, DriverError, ForkedProcess, OutOfDeviceMemory, OutOfMappings
from vmmkv.units import MIB, PAGE_BYTES, format_bytes

HEADROOM_BYTES: Final = 128 * MIB
"""Memory that `create` leaves to everybody else: taking the last byte would summon the out-of-memory killer."""

_PROTECTION: Final = {Access.READ: libc.PROT_READ, Access.READ_WRITE: libc.PROT_READ | libc.PROT_WRITE}


class _Done:
    """Host work is done when the call that does it returns."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        pass


_DONE: Final = _Done()


@dataclass(eq=False, slots=True)
class _Mapping:
    address: int
    piece: memfd.Piece
    access: Access | None = None


class HostDriver:
    """Driver over this machine's own memory. See Driver for what each method promises.

    Errors carry errno's name as `code`. `close` takes all memory away from under the addresses, which stay reserved.
    """

    creates_zeroed = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.page_bytes = PAGE_BYTES
        self.calls: Counter[str] = Counter()
        self._pid = os.getpid()
        self._closed = False
        self._memory = HostMemory()
        self._file = memfd.Memfd()
        self._numbers = itertools.count(1)
        self._pieces: dict[Handle, memfd.Piece] = {}
        self._reserved: list[tuple[int, int]] = []  # [start, end) of each reservation
        self._pages: dict[int, _Mapping] = {}  # by page number: what stands there

    def reserve(self, size_bytes: int) -> int:
        """See Driver.reserve. Cost: one mmap, and two munmap to align it."""
        self._enter("reserve")
        self._whole_pages("reserve", size_bytes=size_bytes)
        try:
            address = host_addresses.reserve(size_bytes)
        except OSError as error:
            remedy = "; a process has 128 TiB of addresses on most machines, less under `ulimit -v`"
            raise self._failure("reserve", error, f"{format_bytes(size_bytes)} of addresses", remedy) from error
        self._reserved.append((address, address + size_bytes))
        self.calls["reserve"] += 1
        return address

    def create(self, size_bytes: int) -> Handle:
        """See Driver.create. Cost: one fallocate, which zeroes the memory (some 300 us for 2 MiB)."""
        self._enter("create")
        self._whole_pages("create", size_bytes=size_bytes)
        free_bytes, total_bytes = self._memory.read()
        try:
            if size_bytes + HEADROOM_BYTES > free_bytes:
                raise OSError(errno.ENOMEM, "shared memory does not fit")
            piece = self._file.take(size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise self._failure("create", error, format_bytes(size_bytes)) from error
            raise OutOfDeviceMemory(
                f"create: {format_bytes(size_bytes)} do not fit: {format_bytes(free_bytes)} of {format_bytes(total_bytes)} of "
                f"host memory are free, of which {format_bytes(HEADROOM_BYTES)} are left to others; a budget that is at most "
                f"{format_bytes(max(0, free_bytes - HEADROOM_BYTES))} above what is in use now would work",
                call="create",
                code=errno.errorcode[error.errno],
            ) from error
        return self._number("create", piece)

    def release(self, handle: Handle) -> None:
        """See Driver.release. Cost: one fallocate that punches the hole, at the last mapping's end if that comes later."""
        self._enter("release")
        piece = self._piece("release", handle)
        del self._pieces[handle]
        piece.released = True
        self._give_if_gone(piece)
        self.calls["release"] += 1

    def map(self, address: int, handle: Handle, size_bytes: int) -> None:
        """See Driver.map. Cost: one mmap, one madvise."""
        self._enter("map")
        self._whole_pages("map", address=address, size_bytes=size_bytes)
        piece = self._piece("map", handle)
        if piece.size_bytes != size_bytes:
            self._refuse(
                "map", f"handle {handle} is {piece.size_bytes} bytes and is mapped whole, not {size_bytes} bytes of it"
            )
        if not any(start <= address and address + size_bytes <= end for start, end in self._reserved):
            self._refuse("map", f"{_span(address, size_bytes)} does not lie in one reservation of this driver")
        pages = range(address // PAGE_BYTES, (address + size_bytes) // PAGE_BYTES)
        for page in pages:
            if (there := self._pages.get(page)) is not None:
                standing = _span(there.address, there.piece.size_bytes)
                self._refuse(
                    "map", f"{_span(address, size_bytes)} overlaps {standing}, which is mapped; unmap that first", "EEXIST"
                )
        try:
            host_addresses.hold_ballast()
            libc.mmap(address, size_bytes, libc.PROT_NONE, libc.MAP_SHARED | libc.MAP_FIXED, piece.fd, piece.offset_bytes)
            libc.madvise(address, size_bytes, libc.MADV_DONTFORK)
        except OSError as error:
            failure = self._failure("map", error, _span(address, size_bytes))
            with suppress(OSError):
                host_addresses.clear(address, size_bytes)
            raise failure from error
        self._pages.update(dict.fromkeys(pages, _Mapping(address, piece)))
        piece.num_mappings += 1
        self.calls["map"] += 1

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        """See Driver.set_access. Cost: one mprotect."""
        self._enter("set_access")
        mapping = self._mapping("set_access", address, size_bytes)
        try:
            libc.mprotect(address, size_bytes, _PROTECTION[access])
        except OSError as error:
            raise self._failure("set_access", error, _span(address, size_bytes)) from error
        mapping.access = access
        self.calls["set_access"] += 1

    def unmap(self, address: int, size_bytes: int) -> None:
        """See Driver.unmap. Cost: one mmap, and a fallocate if this was the last of a released handle."""
        self._enter("unmap")
        mapping = self._mapping("unmap", address, size_bytes)
        try:
            host_addresses.clear(address, size_bytes)
        except OSError as error:
            raise self._failure("unmap", error, _span(address, size_bytes)) from error
        self._forget(mapping)
        self.calls["unmap"] += 1

    def zero(self, address: int, size_bytes: int) -> None:
        """See Driver.zero. Cost: one memset, done when this returns."""
        self._enter("zero")
        for page in range(address // PAGE_BYTES, -(-(address + size_bytes) // PAGE_BYTES)):
            there = self._pages.get(page)
            if there is None or there.access is not Access.READ_WRITE:
                state = "not mapped" if there is None else "not writable"
                self._refuse("zero", f"the page at {page * PAGE_BYTES:#x} of {_span(address, size_bytes)} is {state}", "EFAULT")
        ctypes.memset(address, 0, size_bytes)
        self.calls["zero"] += 1

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """See Driver.write. Done when this returns, as whatever was launched before is."""
        self._enter("write")
        tensor.numpy()[list(values)] = list(values.values())
        self.calls["write"] += 1

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """See Driver.write_behind. Done when this returns."""
        self.write(tensor, values)
        return _DONE

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """See Driver.order. Nothing to wait for."""
        self._enter("order")

    def settle(self) -> None:
        """See Driver.settle. Nothing to wait for."""
        self._enter("settle")

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """See Driver.fence. Always done: what the host launched has returned."""
        self._enter("fence")
        self.calls["fence"] += 1
        return _DONE

    def memory(self) -> MemoryInfo:
        """See Driver.memory. What this process may use, also by its control groups' limits. Cost: some 30 us."""
        self._enter("memory")
        self._file.reap()
        return self._memory.read()

    def export_fd(self, handle: Handle) -> int:
        """See Driver.export_fd. Whoever has the descriptor, or a mapping made from it, keeps the memory from going."""
        self._enter("export_fd")
        piece = self._piece("export_fd", handle)
        try:
            fd = self._file.lend(piece)
        except OSError as error:
            raise self._failure("export_fd", error, f"handle {handle}") from error
        self.calls["export_fd"] += 1
        return fd

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """See Driver.import_fd. Keeps a descriptor of its own until release."""
        self._enter("import_fd")
        self._whole_pages("import_fd", size_bytes=size_bytes)
        try:
            piece = memfd.borrow(fd, size_bytes)
        except ValueError as error:
            self._refuse("import_fd", str(error))
        except OSError as error:
            raise self._failure("import_fd", error, f"file descriptor {fd}") from error
        return self._number("import_fd", piece)

    def close(self) -> None:
        """Unmap and release everything; the addresses stay reserved, so a stale view faults. Idempotent."""
        if self._closed:
            return
        self._enter("close")
        for mapping in set(self._pages.values()):
            host_addresses.clear(mapping.address, mapping.piece.size_bytes)
            self._forget(mapping)
        for handle in list(self._pieces):
            self.release(handle)
        self._closed = True
        self._file.close()

    def _enter(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"{call}: this driver belongs to process {self._pid}, and this is {os.getpid()}, a child made by fork(), which "
                "has none of its memory; open a driver in the child, or start it with spawn and pass handles by export_fd",
                call=call,
                code="EPERM",
            )
        if self._closed:
            raise Closed(f"{call}: this driver is closed")

    def _number(self, call: str, piece: memfd.Piece) -> Handle:
        handle = next(self._numbers)
        self._pieces[handle] = piece
        self.calls[call] += 1
        return handle

    def _piece(self, call: str, handle: Handle) -> memfd.Piece:
        piece = self._pieces.get(handle)
        if piece is None:
            self._refuse(call, f"handle {handle} was released, or is not of this driver")
        return piece

    def _mapping(self, call: str, address: int, size_bytes: int) -> _Mapping:
        mapping = self._pages.get(address // PAGE_BYTES)
        if mapping is None:
            self._refuse(call, f"nothing is mapped at {address:#x}")
        if (mapping.address, mapping.piece.size_bytes) != (address, size_bytes):
            standing = _span(mapping.address, mapping.piece.size_bytes)
            self._refuse(call, f"{_span(address, size_bytes)} is not one whole mapping; {standing} is")
        return mapping

    def _forget(self, mapping: _Mapping) -> None:
        piece = mapping.piece
        for page in range(mapping.address // PAGE_BYTES, (mapping.address + piece.size_bytes) // PAGE_BYTES):
            del self._pages[page]
        piece.num_mappings -= 1
        self._give_if_gone(piece)

    def _give_if_gone(self, piece: memfd.Piece) -> None:
        if piece.borrowed:
            if piece.released and piece.fd >= 0:
                os.close(piece.fd)  # a mapping keeps the memory by itself
                piece.fd = -1
        elif piece.released and not piece.num_mappings:
            self._file.give(piece)

    def _whole_pages(self, call: str, **values: int) -> None:
        for name, value in values.items():
            if value <= 0 or value % PAGE_BYTES:
                self._refuse(call, f"{name}={value} must be a positive multiple of the page, {PAGE_BYTES} bytes")

    def _refuse(self, call: str, message: str, code: str = "EINVAL") -> NoReturn:
        raise DriverError(f"{call}: {message}", call=call, code=code)

    def _failure(self, call: str, error: OSError, what: str, remedy: str = "") -> DriverError:
        """The kernel's error in our words. ENOMEM means two things: no memory, or no more mappings."""
        code = errno.errorcode.get(error.errno or 0, "?")
        if error.errno == errno.ENOMEM:
            num_mappings, limit = host_addresses.count_mappings()
            if num_mappings >= limit - 2:  # a mapping in the midst of another makes three of one
                message = (
                    f"{call}: {what}: the process has {num_mappings:,} mappings, and the kernel allows {limit:,}; "
                    f"raise that with `sysctl -w vm.max_map_count={4 * limit}`, or use larger extents or fewer pages"
                )
                return OutOfMappings(message, call=call, code=code)
        return DriverError(f"{call}: {what}: {error.strerror} ({code}){remedy}", call=call, code=code)


def _span(address: int, size_bytes: int) -> str:
    return f"[{address:#x}, {address + size_bytes:#x})"
