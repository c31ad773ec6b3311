"""Virtual memory of the host, through mmap: the driver where there is no GPU, and the one that the tests run on.

The laws of a GPU, in Linux's terms:

- A reservation is an anonymous PROT_NONE mapping: nothing else gets its addresses, and touching them faults.
- A handle is a piece of a memfd, taken with fallocate, so that a lack of memory shows there and not as a signal at a touch.
- `map` puts the piece over the reservation, still PROT_NONE; `set_access` is mprotect; `unmap` puts anonymous PROT_NONE back.
- A piece can be mapped at many addresses. Punching its hole would zero it under all of them, so that waits for the last one.
- fork(): a child has none of these mappings (MADV_DONTFORK). Their addresses are reserved there again, so a stale view faults,
  and every method raises ForkedProcess. Use spawn or forkserver; export_fd and import_fd share memory on purpose.
"""

import ctypes
import errno
import fcntl
import itertools
import os
import resource
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from mmap import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PAGESIZE, PROT_READ, PROT_WRITE
from pathlib import Path
from typing import Any, Final

import torch

from vmmkv.driver.base import ADDRESS_SPACE_BYTES, DONE, Access, DriverBase, Fence, Handle, MemoryInfo, Reservations, span_text
from vmmkv.errors import Closed, DriverError, OutOfDescriptors, OutOfDeviceMemory, OutOfMappings
from vmmkv.units import KIB, MIB, PAGE_BYTES, format_bytes, round_up

# Free memory. The kernel's answer to shared memory that does not fit is the out-of-memory killer and not an error, so free
# memory is read before: of the machine, and of each control group around the process.


@dataclass(frozen=True, slots=True)
class _ControlGroup:
    """A control group with a memory limit, by its files."""

    limit_bytes: int
    usage: Path
    stat: Path
    stat_prefix: str

    def free_bytes(self) -> int:
        """Bytes that the group may still take; cached files count as free, since the kernel drops them first."""
        try:
            kept = dict(line.split(maxsplit=1) for line in self.stat.read_text().splitlines())
            usage_bytes = int(self.usage.read_text())
        except OSError:  # the process was moved to another group, and this one is gone
            return self.limit_bytes
        cached_bytes = sum(int(kept.get(self.stat_prefix + name, 0)) for name in ("inactive_file", "active_file"))
        return self.limit_bytes - usage_bytes + cached_bytes


class HostMemory:
    """Reader of free and total memory for this process. Limits are read once, when it is made; usage at each call."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = proc / "meminfo"
        machine_bytes = self._read_machine().total_bytes
        self._groups = tuple(group for group in _control_groups(proc, cgroups) if group.limit_bytes < machine_bytes)

    def read(self) -> MemoryInfo:
        """Read free and total memory. Cost: one small file, and two for each control group with a limit: some 30 us in all."""
        free_bytes, total_bytes = self._read_machine()
        for group in self._groups:
            free_bytes, total_bytes = min(free_bytes, group.free_bytes()), min(total_bytes, group.limit_bytes)
        return MemoryInfo(max(0, free_bytes), total_bytes)

    def _read_machine(self) -> MemoryInfo:
        fields = dict(line.split(":", 1) for line in self._meminfo.read_text().splitlines())
        free, total = (int(fields[name].split()[0]) * KIB for name in ("MemAvailable", "MemTotal"))
        return MemoryInfo(free, total)


def _control_groups(proc: Path, cgroups: Path) -> Iterator[_ControlGroup]:
    """The control groups around this process that have a limit, from its own outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        roots: tuple[Path, ...]
        if number == "0":
            roots, limit, usage, stat_prefix = (cgroups, cgroups / "unified"), "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            roots, limit, usage, stat_prefix = (cgroups / "memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        relative = Path(path.lstrip("/"))
        # A container may see its own group as the root while /proc still shows the host's path: then that path is
        # not there, and walking up from it ends at the root that is.
        for folder in (root / level for level in (relative, *relative.parents) for root in roots):
            with suppress(OSError):
                if (text := (folder / limit).read_text().strip()) != "max":
                    yield _ControlGroup(int(text), folder / usage, folder / "memory.stat", stat_prefix)


# Calls of libc, which raise OSError with errno. Python's own `mmap` can neither map at a given address nor change a mapping.

PROT_NONE: Final = 0
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MAP_FIXED_NOREPLACE: Final = 0x100000
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_SIZE, _INT, _OFFSET = ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


def _function(name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    """A function of libc that returns -1 on failure."""

    def check(value: int, *_: object) -> int:
        if value == -1:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return value

    function = getattr(_libc, name)
    function.restype, function.argtypes, function.errcheck = result, arguments, check
    return function


mmap = _function("mmap", _SIZE, _SIZE, _INT, _INT, _INT, _OFFSET, result=ctypes.c_ssize_t)
munmap = _function("munmap", _SIZE, _SIZE)
mprotect = _function("mprotect", _SIZE, _SIZE, _INT)
madvise = _function("madvise", _SIZE, _SIZE, _INT)
_fallocate = _function("fallocate", _INT, _INT, _OFFSET, _OFFSET)


def fallocate(fd: int, mode: int, offset_bytes: int, size_bytes: int) -> None:
    """Call fallocate(2), again when a signal breaks it off: the kernel has then undone its part."""
    while True:
        with suppress(InterruptedError):
            _fallocate(fd, mode, offset_bytes, size_bytes)
            return


# Reserved addresses with nothing under them: nothing else is mapped there, and touching them faults.

_MAX_MAP_COUNT: Final = Path("/proc/sys/vm/max_map_count")

_BALLAST_MAPPINGS: Final = 32

_ballast: tuple[int, int] | None = None  # address and size
_reserved: list[tuple[int, int]] = []  # (address, size) of every reservation; they stay until the process ends
reservations = Reservations()
"""Addresses that the drivers of this process have reserved."""


def _map_nothing(address: int, size_bytes: int, flags: int = 0) -> int:
    start: int = mmap(address, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0)
    return start


def reserve(size_bytes: int) -> int:
    """Reserve addresses, aligned to a page of ours. Raises OSError."""
    start = _map_nothing(0, size_bytes + PAGE_BYTES)
    address = round_up(start, PAGE_BYTES)
    if address > start:
        munmap(start, address - start)
    munmap(address + size_bytes, start + PAGE_BYTES - address)
    _reserved.append((address, size_bytes))
    return address


def clear(address: int, size_bytes: int) -> None:
    """Remove all mappings at reserved addresses; they stay reserved. On failure nothing has changed. Raises: OSError."""
    try:
        _map_nothing(address, size_bytes, MAP_FIXED)
    except OSError:
        if close_hole(address, size_bytes):
            return
        if not _throw_ballast():
            raise
        clear(address, size_bytes)


def close_hole(address: int, size_bytes: int) -> bool:
    """Reserve again what a failed mmap(MAP_FIXED) left open, before other memory of the process lands there.

    Linux takes the old mapping away before it makes the new one, and can fail in between. False if no hole was left:
    then what was mapped before still is.
    """
    try:
        _map_nothing(address, size_bytes, MAP_FIXED_NOREPLACE)
    except OSError:
        return False
    return True


def hold_ballast() -> None:
    """Make some empty mappings, to be dropped when unmapping needs more than the kernel allows. Raises: OSError.

    At `vm.max_map_count` Linux refuses even the mmap that takes a mapping away, and what it splits needs one or two more.
    """
    global _ballast
    if _ballast is not None:
        return
    size_bytes = _BALLAST_MAPPINGS * PAGESIZE
    address = _map_nothing(0, size_bytes)
    try:
        for offset_bytes in range(0, size_bytes, 2 * PAGESIZE):  # neighbours that differ stay apart
            mprotect(address + offset_bytes, PAGESIZE, PROT_READ)
    except OSError:
        munmap(address, size_bytes)
        raise
    _ballast = address, size_bytes


def _throw_ballast() -> bool:
    global _ballast
    if _ballast is None:
        return False
    munmap(*_ballast)
    _ballast = None
    return True


def count_mappings() -> tuple[int, int]:
    """Number of mappings of the process, and the most that the kernel allows. Cost: the kernel writes a line for each."""
    with open("/proc/self/maps", "rb") as maps:
        return sum(b"[vsyscall]" not in line for line in maps), int(_MAX_MAP_COUNT.read_text())


def _reserve_in_child() -> None:
    """Keep a fork's own memory away from the addresses that MADV_DONTFORK left open."""
    for address, size_bytes in _reserved:
        with suppress(OSError):
            _map_nothing(address, size_bytes, MAP_FIXED)


os.register_at_fork(after_in_child=_reserve_in_child)


# Physical memory: pieces of one memfd, taken with fallocate and given back by punching holes. A descriptor for each piece would
# be simpler, but 16 GiB would need 8,192 of them, and 1,024 is the usual limit. So `lend` opens the memfd again, sets the
# position to the piece's offset, and puts a read lock (F_OFD) on its bytes. The kernel keeps the lock until the last descriptor
# and mapping made of it are gone, also when their process is killed; only then the owner punches the hole.
# A borrower could read the whole memfd: only processes that trust each other pass handles around.

_FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid


@dataclass(eq=False, slots=True)
class MemfdPiece:
    """Bytes [offset_bytes, offset_bytes + size_bytes) of the memfd open as `fd`: one handle's physical memory."""

    fd: int
    offset_bytes: int
    size_bytes: int
    borrowed: bool = False
    """A piece of another driver's memfd; `fd` is then this piece's own."""
    num_mappings: int = 0
    released: bool = False


class Memfd:
    """A memfd and the pieces of it that are in use. The file lives on while pieces of it are mapped, here or elsewhere."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("vmmkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        # Another process that cut a file lent to it would end this one by SIGBUS. Holes can still be punched.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._end_bytes = 0
        self._free_offsets: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._leaving: list[MemfdPiece] = []  # given back here, but another process still has it

    def take(self, size_bytes: int) -> MemfdPiece:
        """Take zeroed memory, all of it there. Raises: OSError: ENOSPC or ENOMEM when the kernel has none left to give."""
        self.reap()
        free = self._free_offsets[size_bytes]
        offset_bytes = free[-1] if free else self._end_bytes
        fallocate(self.fd, 0, offset_bytes, size_bytes)
        if free:
            free.pop()
        else:
            self._end_bytes += size_bytes
        return MemfdPiece(self.fd, offset_bytes, size_bytes)

    def give(self, piece: MemfdPiece) -> None:
        """Give back a piece that is no longer mapped; one that is lent goes when the borrower lets go, at a `reap`."""
        self._leaving.append(piece)
        self.reap()

    def reap(self) -> None:
        """Punch the pieces that were given back and that no other process has any more."""
        self._leaving = [piece for piece in self._leaving if not self._punched(piece)]

    def lend(self, piece: MemfdPiece) -> int:
        """Make a descriptor that carries a piece: its position is the offset, its lock tells the length and keeps it."""
        if piece.borrowed:
            return os.dup(piece.fd)  # the same open file description, so the same position and lock
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.lseek(fd, piece.offset_bytes, os.SEEK_SET)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, piece.offset_bytes, piece.size_bytes))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _punched(self, piece: MemfdPiece) -> bool:
        if _lent_range(self.fd, piece.offset_bytes, piece.size_bytes) is not None:
            return False
        try:
            fallocate(self.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece.offset_bytes, piece.size_bytes)
        except OSError:
            return False  # it stays on the list, and is tried again
        self._free_offsets[piece.size_bytes].append(piece.offset_bytes)
        return True


def borrow(fd: int, size_bytes: int) -> MemfdPiece:
    """Borrow the piece that a descriptor made by `lend` carries; `fd` stays the caller's.

    Raises: ValueError when it carries none, or one of another size; OSError.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only a memfd has
    except OSError as error:
        raise ValueError(f"file descriptor {fd} is not a memfd, so no host driver exported it") from error
    offset_bytes = os.lseek(fd, 0, os.SEEK_CUR)
    probe = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # one's own locks never show, those of another do
    try:
        lent = _lent_range(probe, offset_bytes, 1)
    finally:
        os.close(probe)
    if lent != (offset_bytes, size_bytes):
        there = "none" if lent is None else f"one of {lent[1]} bytes"
        raise ValueError(f"a handle of {size_bytes} bytes was to be imported, but file descriptor {fd} carries {there}")
    kept_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    if kept_fd >= most_descriptors() - SPARE_DESCRIPTORS:
        os.close(kept_fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return MemfdPiece(kept_fd, offset_bytes, size_bytes, borrowed=True)


def most_descriptors() -> int:
    """Most files that this process may have open at once: `ulimit -n`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def _lock(kind: int, offset_bytes: int, size_bytes: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, offset_bytes, size_bytes, 0)


def _lent_range(fd: int, offset_bytes: int, size_bytes: int) -> tuple[int, int] | None:
    """The (offset, size) of a piece in the given bytes that another open file description has, if any has."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, offset_bytes, size_bytes))
    kind, _, start, length, _ = struct.unpack(_FLOCK, answer)
    return None if kind == fcntl.F_UNLCK else (start, length)


SPARE_DESCRIPTORS: Final = 16
"""Descriptors that `import_fd` leaves to the rest of the process."""

HEADROOM_BYTES: Final = 128 * MIB
"""Memory that `create` leaves to others: taking the last byte would summon the out-of-memory killer."""

_PROTECTION: Final = {Access.READ: PROT_READ, Access.READ_WRITE: PROT_READ | PROT_WRITE}


@dataclass(eq=False, slots=True)
class _Mapping:
    address: int
    piece: MemfdPiece
    access: Access | None = None

    def __str__(self) -> str:
        return span_text(self.address, self.piece.size_bytes)


class HostDriver(DriverBase):
    """Driver over this machine's own memory, with the methods and laws of Driver.

    Errors carry errno's name as `code`. `close` takes all memory away from under the addresses, which stay reserved.
    """

    creates_zeroed = True
    _forked = "which has none of its memory; start the child with spawn, and pass handles by export_fd"

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._closed = False
        self._memory = HostMemory()
        self.file: Final = Memfd()
        """The memory of all handles."""
        self._numbers = itertools.count(1)
        self._pieces: dict[Handle, MemfdPiece] = {}
        self._reserved: list[tuple[int, int]] = []  # [start, end) of each reservation
        self._pages: dict[int, _Mapping] = {}  # by page number: what stands there

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses. Cost: one mmap, and two munmap to align it."""
        with self._calling("reserve", f"{format_bytes(size_bytes)} of addresses", f"; {reservations}, less under `ulimit -v`"):
            self._whole_pages("reserve", size_bytes=size_bytes)
            if size_bytes > ADDRESS_SPACE_BYTES:
                self._refuse("reserve", f"{format_bytes(size_bytes)} of addresses: {reservations}", "ENOMEM")
            address = reservations.take(size_bytes, reserve)
            self._reserved.append((address, address + size_bytes))
        return address

    def mapped_pages(self) -> dict[tuple[int, int], tuple[int, Access | None]]:
        """Offset in `file` of the piece, and access, of each mapped page; by its reservation's number and place there."""
        return {
            (number, page * PAGE_BYTES - start): (mapping.piece.offset_bytes, mapping.access)
            for page, mapping in self._pages.items()
            for number, (start, end) in enumerate(self._reserved)
            if start <= page * PAGE_BYTES < end
        }

    def has_addresses(self, size_bytes: int) -> bool:
        """Could so many bytes of addresses be reserved now?"""
        self._enter("reserve")
        if size_bytes > ADDRESS_SPACE_BYTES:
            return False
        if reservations.has(size_bytes):
            return True
        try:
            address = _map_nothing(0, size_bytes + PAGE_BYTES)
        except OSError:
            return False
        munmap(address, size_bytes + PAGE_BYTES)
        return True

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a reservation for reuse."""
        self._reserved.remove((address, address + size_bytes))
        reservations.give_back(address, size_bytes)

    def create(self, size_bytes: int) -> Handle:
        """Create a handle. Cost: one fallocate, which zeroes the memory (some 300 us for 2 MiB)."""
        with self._calling("create", format_bytes(size_bytes)):
            self._whole_pages("create", size_bytes=size_bytes)
            free_bytes, total_bytes = self._memory.read()
            try:
                if size_bytes + HEADROOM_BYTES > free_bytes:
                    raise OSError(errno.ENOMEM, "shared memory does not fit")
                return self._number(self.file.take(size_bytes))
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                    raise
                raise OutOfDeviceMemory(
                    f"create: {format_bytes(size_bytes)} do not fit: {format_bytes(free_bytes)} of {format_bytes(total_bytes)} "
                    f"of host memory are free, of which {format_bytes(HEADROOM_BYTES)} are left to others; a budget that is at "
                    f"most {format_bytes(max(0, free_bytes - HEADROOM_BYTES))} above what is in use now would work",
                    call="create",
                    code=errno.errorcode[error.errno],
                ) from error

    def release(self, handle: Handle) -> None:
        """Release a handle. Cost: one fallocate that punches the hole, at the last mapping's end if that comes later."""
        with self._calling("release"):
            piece = self._piece("release", handle)
            del self._pieces[handle]
            piece.released = True
            self._give_if_gone(piece)

    def map(self, address: int, handle: Handle, size_bytes: int) -> None:
        """Map a handle. Cost: one mmap, one madvise."""
        span = span_text(address, size_bytes)
        with self._calling("map", span):
            self._whole_pages("map", address=address, size_bytes=size_bytes)
            piece = self._piece("map", handle)
            if piece.size_bytes != size_bytes:
                self._refuse(
                    "map", f"handle {handle} is {piece.size_bytes} bytes and is mapped whole, not {size_bytes} bytes of it"
                )
            if not any(start <= address and address + size_bytes <= end for start, end in self._reserved):
                self._refuse("map", f"{span} does not lie in one reservation of this driver")
            pages = range(address // PAGE_BYTES, (address + size_bytes) // PAGE_BYTES)
            if (there := next(filter(None, map(self._pages.get, pages)), None)) is not None:
                self._refuse("map", f"{span} overlaps {there}, which is mapped; unmap that first", "EEXIST")
            hold_ballast()
            try:
                mmap(address, size_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, piece.fd, piece.offset_bytes)
                madvise(address, size_bytes, MADV_DONTFORK)
            except OSError as error:
                failure = self._failure("map", error, span)  # which counts the mappings as they are now
                with suppress(OSError):
                    clear(address, size_bytes)
                raise failure from error
            self._pages.update(dict.fromkeys(pages, _Mapping(address, piece)))
            piece.num_mappings += 1

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        """Set the access to a mapping. Cost: one mprotect."""
        with self._calling("set_access", span_text(address, size_bytes)):
            mapping = self._mapping("set_access", address, size_bytes)
            mprotect(address, size_bytes, _PROTECTION[access])
            mapping.access = access

    def unmap(self, address: int, size_bytes: int) -> None:
        """Remove a mapping. Cost: one mmap, and a fallocate if this was the last of a released handle."""
        with self._calling("unmap", span_text(address, size_bytes)):
            mapping = self._mapping("unmap", address, size_bytes)
            clear(address, size_bytes)
            self._forget(mapping)

    def zero(self, address: int, size_bytes: int) -> None:
        """Fill mapped memory with zeroes. Cost: one memset, done when this returns."""
        with self._calling("zero"):
            for page in range(address // PAGE_BYTES, -(-(address + size_bytes) // PAGE_BYTES)):
                there = self._pages.get(page)
                if there is None or there.access is not Access.READ_WRITE:
                    where = f"the page at {page * PAGE_BYTES:#x} of {span_text(address, size_bytes)}"
                    self._refuse("zero", f"{where} is {'not mapped' if there is None else 'not writable'}", "EFAULT")
            ctypes.memset(address, 0, size_bytes)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between two addresses. Done when this returns."""
        self._enter("copy")
        ctypes.memmove(target, source, size_bytes)

    def new_stream(self) -> torch.Stream:
        """Make a stream. The host has one, on which everything is done when its call returns."""
        return torch.Stream(stream_id=0, device_index=-1, device_type=0)

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Make a stream the current one within."""
        return nullcontext()

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """Write elements of a device tensor. Done when this returns, as whatever was launched before is."""
        with self._calling("write"):
            tensor.numpy()[list(values)] = list(values.values())

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """Write elements behind all work launched so far. Done when this returns."""
        self.write(tensor, values)
        return DONE

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order streams behind the control stream. Nothing to wait for."""
        self._enter("order")

    def synchronize(self) -> None:
        """Wait for the control stream. Nothing to wait for."""
        self._enter("synchronize")

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """Make a fence. Always done: what the host launched has returned."""
        with self._calling("fence"):
            return DONE

    def is_capturing(self, streams: Sequence[torch.Stream] = ()) -> bool:
        """Is one of these streams being captured? Never: the host has no graphs."""
        return False

    def memory(self) -> MemoryInfo:
        """Physical memory that this process may use, also by its control groups' limits. Cost: some 30 us."""
        self._enter("memory")
        self.file.reap()
        return self._memory.read()

    def export_fd(self, handle: Handle) -> int:
        """Export a handle as a file descriptor. The descriptor, and any mapping made from it, keeps the memory from going."""
        with self._calling("export_fd", f"handle {handle}"):
            return self.file.lend(self._piece("export_fd", handle))

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """Import a handle. Keeps a descriptor of its own until release."""
        with self._calling("import_fd", f"file descriptor {fd}"):
            self._whole_pages("import_fd", size_bytes=size_bytes)
            try:
                return self._number(borrow(fd, size_bytes))
            except ValueError as error:
                self._refuse("import_fd", str(error))

    def close(self) -> None:
        """Unmap and release everything; the addresses stay reserved, so a stale view faults. Idempotent."""
        if self._closed:
            return
        self._enter("close")
        for mapping in set(self._pages.values()):
            clear(mapping.address, mapping.piece.size_bytes)
            self._forget(mapping)
        for handle in list(self._pieces):
            self.release(handle)
        self._closed = True
        self.file.close()

    @contextmanager
    def _calling(self, call: str, what: str = "", remedy: str = "") -> Iterator[None]:
        """Count a call if nothing is raised within; OSError becomes DriverError."""
        self._enter(call)
        try:
            yield
        except OSError as error:
            raise self._failure(call, error, what, remedy) from error
        self.calls[call] += 1

    def _enter(self, call: str) -> None:
        super()._enter(call)
        if self._closed:
            raise Closed(f"{call}: this driver is closed")

    def _number(self, piece: MemfdPiece) -> Handle:
        handle = next(self._numbers)
        self._pieces[handle] = piece
        return handle

    def _piece(self, call: str, handle: Handle) -> MemfdPiece:
        piece = self._pieces.get(handle)
        if piece is None:
            self._refuse(call, f"handle {handle} was released, or is not of this driver")
        return piece

    def _mapping(self, call: str, address: int, size_bytes: int) -> _Mapping:
        mapping = self._pages.get(address // PAGE_BYTES)
        if mapping is None:
            self._refuse(call, f"nothing is mapped at {address:#x}")
        if (mapping.address, mapping.piece.size_bytes) != (address, size_bytes):
            self._refuse(call, f"{span_text(address, size_bytes)} is not one whole mapping; {mapping} is")
        return mapping

    def _forget(self, mapping: _Mapping) -> None:
        piece = mapping.piece
        for page in range(mapping.address // PAGE_BYTES, (mapping.address + piece.size_bytes) // PAGE_BYTES):
            del self._pages[page]
        piece.num_mappings -= 1
        self._give_if_gone(piece)

    def _give_if_gone(self, piece: MemfdPiece) -> None:
        if piece.borrowed:
            if piece.released and piece.fd >= 0:
                os.close(piece.fd)  # a mapping keeps the memory by itself
                piece.fd = -1
        elif piece.released and not piece.num_mappings:
            self.file.give(piece)

    def _failure(self, call: str, error: OSError, what: str, remedy: str = "") -> DriverError:
        """The kernel's error as a DriverError. ENOMEM means two things: no memory, or no more mappings."""
        code = errno.errorcode.get(error.errno or 0, "?")
        if error.errno == errno.ENOMEM:
            num_mappings, limit = count_mappings()
            if num_mappings >= limit - 2:  # a mapping in the midst of another makes three of one
                message = (
                    f"{call}: {what}: the process has {num_mappings:,} mappings, and the kernel allows {limit:,}; "
                    f"raise that with `sysctl -w vm.max_map_count={4 * limit}`, or use larger extents or fewer pages"
                )
                return OutOfMappings(message, call=call, code=code)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = f"; each imported handle takes a file, of {most_descriptors():,}: raise `ulimit -n`"
            if error.errno == errno.ENFILE:
                remedy = "; the machine has as many files open as it may: raise that with `sysctl -w fs.file-max=...`"
            return OutOfDescriptors(f"{call}: {what}: {error.strerror} ({code}){remedy}", call=call, code=code)
        return DriverError(f"{call}: {what}: {error.strerror} ({code}){remedy}", call=call, code=code)
