"""Virtual memory of an NVIDIA GPU, through the CUDA driver: `cuda.bindings.driver`, loaded when a driver is opened.

Facts relied upon, seen on an H200 with driver 580:
- A handle is mapped whole: cuMemMap of a part of it, or at an offset, is CUDA_ERROR_NOT_SUPPORTED.
- A released handle lives while it is mapped. Touching what is not mapped loses the CUDA context, of the whole process.
- create, map, set_access, unmap and release do not wait for kernels that run, nor for each other's threads.
- cuMemCreate promises no zeroes.
- cuMemUnmap where nothing is mapped succeeds and does nothing; of a part of a mapping it is refused.
- The calls of virtual memory belong to the device named in the handle or in the access, not to the current context; a
  memset is put on a stream and needs that stream's context current.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from vmmkv.driver.base import ADDRESS_SPACE_BYTES, Access, DriverBase, Fence, Handle, MemoryInfo, Reservations, span_text
from vmmkv.errors import (
    DriverError,
    MissingDriver,
    MissingPackage,
    NoDevice,
    NoVirtualMemory,
    OutOfDeviceMemory,
    TorchWithoutCuda,
)
from vmmkv.units import PAGE_BYTES, format_bytes

_CPU_INSTEAD = "or use device='cpu', which keeps the cache in host memory"


def start(cu: Any) -> None:
    """Initialise the CUDA driver. Raises: MissingDriver, NoDevice."""
    try:
        (status,) = cu.cuInit(0)
    except RuntimeError as error:  # what cuda.bindings raises when there is no libcuda to load
        raise MissingDriver(
            f"this machine has no CUDA driver ({error}); install NVIDIA's driver, in a container start it with the GPUs "
            f"(docker run --gpus all), {_CPU_INSTEAD}"
        ) from error
    if status == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        raise NoDevice(
            f"there is a CUDA driver and no GPU that it may use: look at nvidia-smi and CUDA_VISIBLE_DEVICES, {_CPU_INSTEAD}"
        )
    if status != cu.CUresult.CUDA_SUCCESS:
        raise MissingDriver(
            f"the CUDA driver does not start: {describe(cu, status)}; see that nvidia-smi works, {_CPU_INSTEAD}"
        )


def open_device(cu: Any, device: torch.device) -> tuple[torch.device, Any]:
    """The device with its index, and the driver's name for it, with virtual memory.

    Raises: NoDevice, TorchWithoutCuda, MissingDriver, NoVirtualMemory.
    """
    num_devices = checked(cu, "open", cu.cuDeviceGetCount())
    if num_devices == 0 or (device.index or 0) >= num_devices:
        there = f"the GPUs are cuda:0 to cuda:{num_devices - 1}" if num_devices else "there is no GPU"
        raise NoDevice(f"{str(device)!r} was asked for, and {there}; CUDA_VISIBLE_DEVICES may hide some")
    if torch.version.cuda is None:
        raise TorchWithoutCuda(
            f"there is a GPU, but torch {torch.__version__} was built without CUDA; install a build of torch with CUDA "
            f"(https://pytorch.org/get-started), {_CPU_INSTEAD}"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise MissingDriver(f"the CUDA driver does not suit torch {torch.__version__}: {error}") from error
    index = torch.cuda.current_device() if device.index is None else device.index
    cu_device = checked(cu, "open", cu.cuDeviceGet(index))
    if not attribute(cu, cu_device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        raise NoVirtualMemory(
            f"{torch.cuda.get_device_name(index)} (cuda:{index}) has no virtual memory management: GPUs from Pascal (2016) "
            f"on have it, unless a virtual GPU or the Windows driver model hides it; take another GPU, {_CPU_INSTEAD}"
        )
    return torch.device("cuda", index), cu_device


def attribute(cu: Any, cu_device: Any, name: str) -> int:
    """A device attribute, by its name without the prefix; 0 where this version of the bindings has no such name."""
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    return 0 if key is None else int(checked(cu, "open", cu.cuDeviceGetAttribute(key, cu_device)))


def checked(cu: Any, call: str, answer: tuple[Any, ...], what: str = "") -> Any:
    """The result of a driver call, which comes as (status, results...); None if it has none. Raises DriverError."""
    if answer[0] != cu.CUresult.CUDA_SUCCESS:
        raise failure(cu, call, answer[0], what)
    return answer[1] if len(answer) > 1 else None


def failure(cu: Any, call: str, status: Any, what: str = "") -> DriverError:
    """A driver's refusal in our words; `what` is what was asked."""
    kind = OutOfDeviceMemory if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY else DriverError
    return kind(": ".join(filter(None, (call, what, describe(cu, status)))), call=call, code=_text(cu.cuGetErrorName(status)))


def describe(cu: Any, status: Any) -> str:
    """CUDA's own name and text of a status: `CUDA_ERROR_INVALID_VALUE (invalid argument)`."""
    return f"{_text(cu.cuGetErrorName(status))} ({_text(cu.cuGetErrorString(status))})"


def _text(answer: tuple[Any, bytes | None]) -> str:
    return (answer[1] or b"CUDA_ERROR_UNKNOWN").decode()


class EventPool:
    """Events of one device that no fence holds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        """Held while a fence looks at its events or gives them back: two threads may ask one fence at once."""
        self._idle: list[torch.cuda.Event] = []

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event behind all work so far on a stream of this device."""
        try:
            event = self._idle.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def give(self, event: torch.cuda.Event) -> None:
        """Take back an event that has passed; a stream that was told to wait for it waits for what it was then."""
        self._idle.append(event)


class CudaFence:
    """A fence of all work launched on some streams of one device by the time it was made."""

    __slots__ = ("_events", "_pool")

    def __init__(self, pool: EventPool, streams: Iterable[torch.cuda.Stream]) -> None:
        self._pool = pool
        self._events = [pool.record(stream) for stream in streams]

    def done(self) -> bool:
        """Has the work before the fence finished? Cost: a query of each event that had not passed when last asked."""
        with self._pool.lock:
            while self._events and self._events[-1].query():  # type: ignore[no-untyped-call]
                self._pool.give(self._events.pop())
            return not self._events

    def wait(self) -> None:
        """Block until the work before the fence has finished. Blocks the thread, not the interpreter."""
        with self._pool.lock:
            events = list(self._events)
        # An event that another thread gave back meanwhile may be in use anew: then this waits a little too long.
        for event in events:
            event.synchronize()

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order streams behind the work before the fence."""
        if self.done():
            return
        with self._pool.lock:
            for stream in (torch.cuda.current_stream(self._pool.device), *streams):
                for event in self._events:
                    stream.wait_event(event)


_MAX_WRITES: Final = 255
"""Elements written by one call: cuStreamBatchMemOp takes fewer than 256."""

_reservations = Reservations()  # of the process: addresses belong to no device


class CudaDriver(DriverBase):
    """Driver over one GPU, with the methods and laws of Driver.

    Works from any thread, whichever device is current there. Errors carry CUDA's own name as `code`. Handles can be
    exported as file descriptors, which costs nothing and cannot be added later.

    Raises: DriverUnavailable, by what is missing.
    """

    creates_zeroed = False
    _invalid = "CUDA_ERROR_INVALID_VALUE"
    _forked = "where CUDA does not work; start the child with spawn or forkserver, and pass handles by export_fd"
    _forked_code = "CUDA_ERROR_NOT_INITIALIZED"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._cu: Final = load_bindings()
        start(self._cu)
        self.device, self._cu_device = open_device(self._cu, device)
        # The structures of the hot calls are built once: making one in Python costs more than cuMemMap.
        self._success = self._cu.CUresult.CUDA_SUCCESS
        self._location = self._cu.CUmemLocation()
        self._location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = self.device.index
        flags = self._cu.CUmemAccess_flags
        self._access = {
            Access.READ: [self._access_descriptor(flags.CU_MEM_ACCESS_FLAGS_PROT_READ)],
            Access.READ_WRITE: [self._access_descriptor(flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)],
        }
        self._fd_type = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._exports = bool(attribute(self._cu, self._cu_device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"))
        self._allocation = self._allocation_properties()
        self._writes = [self._write_operation() for _ in range(_MAX_WRITES)]
        self._check_granularity()
        # The primary context, which torch uses too, stays for as long as the process: every thread can make it current.
        self._context = checked(self._cu, "open", self._cu.cuDevicePrimaryCtxRetain(self._cu_device))
        self.control: Final = self.new_stream()
        """Stream on which zeroes and limits travel, beside the caller's work."""
        self._events = EventPool(self.device)
        self._unordered = False
        """Was anything put on the control stream since it was last seen empty?"""

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses. Cost: 4 us, whatever the size."""
        self._enter("reserve")
        self._whole_pages("reserve", size_bytes=size_bytes)
        what = f"{format_bytes(size_bytes)} of addresses; {_reservations}"
        if size_bytes > ADDRESS_SPACE_BYTES:
            self._refuse("reserve", what)

        def reserve(size_bytes: int) -> int:
            return int(checked(self._cu, "reserve", self._cu.cuMemAddressReserve(size_bytes, PAGE_BYTES, 0, 0), what))

        address = _reservations.take(size_bytes, reserve)
        self.calls["reserve"] += 1
        return address

    def has_addresses(self, size_bytes: int) -> bool:
        """Could so many bytes of addresses be reserved now? Cost: some 8 us."""
        self._enter("reserve")
        if size_bytes > ADDRESS_SPACE_BYTES:
            return False
        if _reservations.has(size_bytes):
            return True
        status, address = self._cu.cuMemAddressReserve(size_bytes, PAGE_BYTES, 0, 0)
        if status != self._cu.CUresult.CUDA_SUCCESS:
            return False
        checked(self._cu, "reserve", self._cu.cuMemAddressFree(address, size_bytes))
        return True

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a reservation for reuse."""
        _reservations.give_back(address, size_bytes)

    def create(self, size_bytes: int) -> Handle:
        """Create a handle. Cost: 14 us; does not wait for kernels."""
        self._enter("create")
        self._whole_pages("create", size_bytes=size_bytes)
        status, handle = self._cu.cuMemCreate(size_bytes, self._allocation, 0)
        if status == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free_bytes, total_bytes = self.memory()
            raise OutOfDeviceMemory(
                f"create: {format_bytes(size_bytes)} do not fit: {format_bytes(free_bytes)} of {format_bytes(total_bytes)} of "
                f"{self.device} are free (CUDA_ERROR_OUT_OF_MEMORY); lower the budget, or free memory that torch only "
                "keeps with torch.cuda.empty_cache()",
                call="create",
                code="CUDA_ERROR_OUT_OF_MEMORY",
            )
        if status != self._success:
            raise failure(self._cu, "create", status, format_bytes(size_bytes))
        self.calls["create"] += 1
        return int(handle)

    def release(self, handle: Handle) -> None:
        """Release a handle. Cost: 17 us."""
        self._enter("release")
        checked(self._cu, "release", self._cu.cuMemRelease(handle), f"handle {handle:#x}")
        self.calls["release"] += 1

    def map(self, address: int, handle: Handle, size_bytes: int) -> None:
        """Map a handle. Cost: 3 us, whatever the size; does not wait for kernels."""
        self._enter("map")
        (status,) = self._cu.cuMemMap(address, size_bytes, 0, handle, 0)
        if status != self._success:
            raise failure(self._cu, "map", status, f"handle {handle:#x} under {span_text(address, size_bytes)}")
        self.calls["map"] += 1

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        """Set the access to a mapping. Cost: 25 to 40 us, whatever the size; does not wait for kernels."""
        self._enter("set_access")
        (status,) = self._cu.cuMemSetAccess(address, size_bytes, self._access[access], 1)
        if status != self._success:
            raise failure(self._cu, "set_access", status, f"{access.name} at {span_text(address, size_bytes)}")
        self.calls["set_access"] += 1

    def unmap(self, address: int, size_bytes: int) -> None:
        """Remove a mapping. Cost: 24 us; does not wait for kernels, so a kernel that still reads this loses the context."""
        self._enter("unmap")
        (status,) = self._cu.cuMemUnmap(address, size_bytes)
        if status != self._success:
            raise failure(self._cu, "unmap", status, span_text(address, size_bytes))
        self.calls["unmap"] += 1

    def zero(self, address: int, size_bytes: int) -> None:
        """Fill mapped memory with zeroes. Cost: one memset, launched on the control stream."""
        self._enter("zero")
        self._unordered = True
        # torch.cuda.device() would not do: where its device is current already it leaves a new thread without a context.
        checked(self._cu, "zero", self._cu.cuCtxPushCurrent(self._context))
        try:
            answer = self._cu.cuMemsetD8Async(address, 0, size_bytes, self.control.cuda_stream)
        finally:
            self._cu.cuCtxPopCurrent()
        checked(self._cu, "zero", answer, span_text(address, size_bytes))
        self.calls["zero"] += 1

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy bytes between two addresses. Cost: one copy on torch's current stream of this device; does not block."""
        self._enter("copy")
        stream = torch.cuda.current_stream(self.device)
        checked(self._cu, "copy", self._cu.cuCtxPushCurrent(self._context))
        try:
            answer = self._cu.cuMemcpyAsync(target, source, size_bytes, stream.cuda_stream)
        finally:
            self._cu.cuCtxPopCurrent()
        checked(self._cu, "copy", answer, f"{span_text(source, size_bytes)} to {target:#x}")

    def new_stream(self) -> torch.cuda.Stream:
        """Make a stream. It waits for no other, not even for the default one.

        torch.cuda.Stream() would be one of a pool of 32 that torch gives out in turn: in the end to the user, too, and
        then what waits for this stream waits for the user's kernels.
        """
        checked(self._cu, "open", self._cu.cuCtxPushCurrent(self._context))
        try:
            answer = self._cu.cuStreamCreate(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        finally:
            self._cu.cuCtxPopCurrent()
        pointer = int(checked(self._cu, "open", answer))
        return torch.cuda.ExternalStream(pointer, device=self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Make a stream the current one within."""
        return torch.cuda.stream(_as_cuda_stream(stream))

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """Write elements of a device tensor. Cost: a stream memory operation for each, without a kernel; does not block.

        It is ordered after nothing but the control stream: what filled `tensor` before must be over.
        """
        self._enter("write")
        self._unordered = True
        self._write_on(self.control, tensor, values)
        tensor.record_stream(self.control)  # if it dies now, torch does not reuse its memory before this is over
        self.calls["write"] += 1

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """Write elements behind all work so far. Cost: as `write`, two events for each stream, and a fence; does not block."""
        self._enter("write")
        current = torch.cuda.current_stream(self.device)
        others = [_as_cuda_stream(stream) for stream in streams]
        for stream in others:
            current.wait_stream(stream)
        self._write_on(current, tensor, values)
        for stream in others:
            stream.wait_stream(current)
        self.calls["write"] += 1
        return self._fence_behind(others)

    def _write_on(self, stream: torch.cuda.Stream, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        address, elements = tensor.data_ptr(), list(values.items())
        checked(self._cu, "write", self._cu.cuCtxPushCurrent(self._context))
        try:
            for first in range(0, len(elements), _MAX_WRITES):
                batch = elements[first : first + _MAX_WRITES]
                for operation, (index, value) in zip(self._writes, batch, strict=False):
                    operation.writeValue.address = address + 4 * index
                    operation.writeValue.value = value & 0xFFFF_FFFF
                answer = self._cu.cuStreamBatchMemOp(stream.cuda_stream, len(batch), self._writes[: len(batch)], 0)
                checked(self._cu, "write", answer, f"{len(values)} elements")
        finally:
            self._cu.cuCtxPopCurrent()

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order streams behind the control stream. Cost: a few us a stream while that has work, else one query, or none."""
        self._enter("order")
        if not self._unordered:
            return
        if self.control.query():
            self._unordered = False
        else:
            for stream in (torch.cuda.current_stream(self.device), *streams):
                _as_cuda_stream(stream).wait_stream(self.control)

    def synchronize(self) -> None:
        """Wait for the control stream. Blocks until zeroes and writes are through; they wait for no kernel of other streams."""
        self._enter("synchronize")
        if self._unordered:
            self.control.synchronize()
            self._unordered = False

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """Make a fence. Not under graph capture.

        Cost: one event record for each stream. Raises: ValueError for a stream of another device.
        """
        self._enter("fence")
        for stream in streams:
            if stream.device != self.device:
                raise ValueError(f"{stream} is not a stream of {self.device}; record an event on a stream of it that waits")
        fence = self._fence_behind(_as_cuda_stream(stream) for stream in streams)
        self.calls["fence"] += 1
        return fence

    def _fence_behind(self, streams: Iterable[torch.cuda.Stream]) -> CudaFence:
        return CudaFence(self._events, {torch.cuda.current_stream(self.device), self.control, *streams})

    def is_capturing(self, streams: Sequence[torch.Stream] = ()) -> bool:
        """Is one of these streams being captured? Cost: some 2 us, and 1 us more for each of `streams`."""
        self._enter("is_capturing")
        none = self._cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        # The legacy default stream cannot be asked while another one captures.
        implicit = self._cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        checked(self._cu, "is_capturing", self._cu.cuCtxPushCurrent(self._context))
        try:
            for stream in (torch.cuda.current_stream(self.device), *streams):
                answer = self._cu.cuStreamIsCapturing(_as_cuda_stream(stream).cuda_stream)
                if answer[0] == implicit or checked(self._cu, "is_capturing", answer) != none:
                    return True
        finally:
            self._cu.cuCtxPopCurrent()
        return False

    def memory(self) -> MemoryInfo:
        """Physical memory of the device. What torch keeps in its own cache counts as used."""
        self._enter("memory")
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(free_bytes, total_bytes)

    def export_fd(self, handle: Handle) -> int:
        """Export a handle as a file descriptor. Cost: 0.8 ms."""
        self._enter("export_fd")
        if not self._exports:
            self._refuse("export_fd", f"{self.device} cannot export memory as a file descriptor", "CUDA_ERROR_NOT_SUPPORTED")
        answer = self._cu.cuMemExportToShareableHandle(handle, self._fd_type, 0)
        fd = int(checked(self._cu, "export_fd", answer, f"handle {handle:#x}"))
        self.calls["export_fd"] += 1
        return fd

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """Import a handle. Cost: 0.4 ms. A wrong `size_bytes` shows when it is mapped: CUDA does not tell it here."""
        self._enter("import_fd")
        self._whole_pages("import_fd", size_bytes=size_bytes)
        answer = self._cu.cuMemImportFromShareableHandle(fd, self._fd_type)
        handle = int(checked(self._cu, "import_fd", answer, f"file descriptor {fd}"))
        self.calls["import_fd"] += 1
        return handle

    def _access_descriptor(self, flags: Any) -> Any:
        descriptor = self._cu.CUmemAccessDesc()
        descriptor.location = self._location
        descriptor.flags = flags
        return descriptor

    def _write_operation(self) -> Any:
        operation = self._cu.CUstreamBatchMemOpParams()
        operation.writeValue.operation = self._cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        return operation

    def _allocation_properties(self) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        if self._exports:
            properties.requestedHandleTypes = self._fd_type
        # Not gpuDirectRDMACapable: it makes cuMemMap 3.6 us dearer and cuMemUnmap 3.5 (`bench driver_calls` on an H200).
        return properties

    def _check_granularity(self) -> None:
        minimum = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        answer = self._cu.cuMemGetAllocationGranularity(self._allocation, minimum)
        granularity_bytes = int(checked(self._cu, "open", answer))
        if PAGE_BYTES % granularity_bytes:
            message = f"memory of {self.device} comes in {format_bytes(granularity_bytes)}, of which a page of "
            self._refuse("open", f"{message}{format_bytes(PAGE_BYTES)} is no multiple", "CUDA_ERROR_NOT_SUPPORTED")


def find_device(device: torch.device) -> torch.device:
    """The device with its index, if a CudaDriver of it could be opened. Makes nothing that is to be closed.

    Raises: DriverUnavailable, by what is missing.
    """
    bindings = load_bindings()
    start(bindings)
    return open_device(bindings, device)[0]


def load_bindings() -> Any:
    """The module of cuda-python that speaks to the driver. Raises: MissingPackage."""
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackage(
            f"the package cuda-python, which speaks to the CUDA driver, is not installed ({error}); "
            f"`pip install 'cuda-python>=13'`, {_CPU_INSTEAD}"
        ) from error
    return driver


def _as_cuda_stream(stream: torch.Stream) -> torch.cuda.Stream:
    """A stream by the type that CUDA's events ask for."""
    if isinstance(stream, torch.cuda.Stream):
        return stream
    identity = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return torch.cuda.Stream(**identity)  # type: ignore[no-untyped-call]
