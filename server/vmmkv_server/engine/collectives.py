"""Sums, gathers and broadcasts over the ranks of one engine, on their devices.

    on GPUs   NCCL; sums of few bytes by a kernel of ours over torch's symmetric memory
    on CPUs   gloo

On a GPU nothing waits on the host, and all can be captured. Launched work waits on the device for all ranks, without end
where one is gone. `abort` ends it.
"""

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from os import environ
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from vmmkv.units import MIB

log = logging.getLogger(__name__)

_distributed: Any = torch.distributed  # whose types depend on the platform

SYMMETRIC_BYTES: Final = 2 * MIB
"""Most bytes that a rank writes to all others in one sum. On two H200, 8 KiB take 3 us and 2 MiB 15; by NCCL 9 and 29."""
_UNLIMITED: Final = timedelta(days=1)
_NO_WATCHDOG: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own limits end the process, which may be the user's; those of `Ranks` end the engine."""
_END_S: Final = 5.0
"""The longest wait for NCCL when the process ends."""
_working: Final[set[threading.Thread]] = set()
"""Threads of `in_background` that have not ended."""


class Collectives:
    """Sums and broadcasts of one rank. Between CPUs they raise RuntimeError for a rank that is gone or late."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank: Final = rank
        self.num_ranks: Final = num_ranks
        self.symmetric: SymmetricMemory | None = None
        """Memory for sums by kernels of our own; None on a CPU, and where the GPUs cannot have it."""
        self._released: SymmetricMemory | None = None
        """Memory that is no longer used for new sums, but by steps on their way and by graphs."""
        self.group: Any = None
        """Process group of torch; None before `connect` and after `abort`."""
        self._lock = threading.Lock()
        self._device: torch.device | None = None

    def connect(self, store: Any, device: torch.device, timeout_s: float) -> None:
        """Meet the other ranks. Blocks until all are there: between GPUs without end if one is gone, so give it a thread."""
        self._device = device
        if device.type != "cuda":
            options = _distributed.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self.group = _distributed.ProcessGroupGloo(store, self.rank, self.num_ranks, options)
            return
        store.set_timeout(timedelta(seconds=timeout_s / 3))  # of two meetings
        with torch.cuda.device(device):
            options = _distributed.ProcessGroupNCCL.Options()
            options._timeout = _UNLIMITED
            with _environment(_NO_WATCHDOG):
                self.group = _distributed.ProcessGroupNCCL(store, self.rank, self.num_ranks, options)
            self.sum(torch.zeros(1, device=device))  # NCCL meets in its first call, which no graph can have
            torch.cuda.synchronize(device)
            self.symmetric = self.open_symmetric(store, device)

    def open_symmetric(self, store: Any, device: torch.device) -> "SymmetricMemory | None":
        """Symmetric memory if all ranks can have it, else None on all, and a line in the log."""
        found, reason = None, "another rank has none"
        try:
            found = SymmetricMemory(self.rank, self.num_ranks, self.group, store, device)
        except Exception as error:  # of many kinds: GPUs without a link, drivers, containers that hide processes
            reason = f"{type(error).__name__}: {error}"
        num_ready = self.sum(torch.tensor([float(found is not None)], device=device))
        if round(num_ready.item()) == self.num_ranks:
            return found
        if not self.rank:
            log.warning("sums over ranks are all by NCCL, for symmetric memory cannot be had: %s", reason)
        return None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over all ranks, in place: the same bits on each."""
        symmetric = self.symmetric
        return symmetric.sum(tensor) if symmetric is not None and symmetric.fits(tensor) else self.sum_by_group(tensor)

    def sum_by_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks by NCCL or gloo, in place."""
        options = _distributed.AllreduceOptions()
        options.asyncOp = False
        _wait(self.group.allreduce([tensor], options))
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a contiguous tensor with rank 0's."""
        options = _distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = False
        _wait(self.group.broadcast([tensor], options))
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of all ranks, [R, *shape], on each."""
        gathered = tensor.new_empty(self.num_ranks * len(tensor), *tensor.shape[1:])
        options = _distributed.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self.group._allgather_base(gathered, tensor, options))
        return gathered.view(self.num_ranks, *tensor.shape)

    def abort(self) -> None:
        """End what this rank's device waits in, now or soon; nothing can be summed any more. Does not block. Idempotent.

        Any thread may call it.
        """
        with self._lock:
            group, self.group = self.group, None
            symmetric, self.symmetric = self.symmetric, None
            self._released = symmetric or self._released
        if group is None:
            return
        if self._device is None or self._device.type != "cuda":
            group.abort()
            return
        # NCCL has its kernels end at once, and then waits until all graphs with calls of it are gone.
        for end in [group.abort] if symmetric is None else [group.abort, symmetric.release]:
            in_background("abort of collectives", partial(_attempt, end))


def in_background(name: str, work: Callable[[], None]) -> None:
    """Call `work` in a daemon thread, for which the end of the process waits, _END_S for all of them.

    A thread that came back from C++ while Python ends would end the process by abort().
    """

    def run() -> None:
        try:
            work()
        finally:
            _working.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _working.add(thread)
    thread.start()


@atexit.register
def _join_all() -> None:
    until_s = time.monotonic() + _END_S
    for thread in [each for each in _working if each.is_alive()]:
        thread.join(max(0.0, until_s - time.monotonic()))


def _attempt(end: Callable[[], None]) -> None:
    try:
        end()
    except Exception:
        log.warning("collectives were not ended in order", exc_info=True)


def _wait(work: Any) -> None:
    """Order the current stream of a GPU behind some work, where that is not done yet."""
    if work is not None:
        work.wait()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment, for code that reads them now."""
    before = {name: environ[name] for name in variables if name in environ}
    environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del environ[name]
        environ.update(before)


class SymmetricMemory:
    """Sums by `sum_ranks` over a buffer on each GPU that the others map, on one stream. `release` makes all of them end."""

    def __init__(self, rank: int, num_ranks: int, group: Any, store: Any, device: torch.device) -> None:
        """Blocks until all ranks have come, or for as long as the store waits. Raises errors of many kinds."""
        import torch.distributed._symmetric_memory as symmetric_memory

        from vmmkv_kernels import sums  # not above: it imports triton

        self._store: Final = RenumberedStore(store)  # torch's own references do not keep what Python has of it
        self._named: Final = register(rank, num_ranks, group, self._store, device)
        self._row_bytes: int | None = None
        self._side_stream: Final = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._true_1: Final = torch.ones(1, dtype=torch.int32).pin_memory()

        def map_all(num_words: int) -> list[int]:
            with _environment({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}):
                self._buffer = symmetric_memory.empty(num_words, dtype=torch.int64, device=device).zero_()
                torch.cuda.synchronize(device)
                self._handle = symmetric_memory.rendezvous(self._buffer, self._named.group_name)
            return [self._handle.get_buffer(each, (1,), torch.int64).data_ptr() for each in range(num_ranks)]

        self._region: Final = sums.Region.open(rank, num_ranks, SYMMETRIC_BYTES // (num_ranks - 1), map_all, device)
        self._sum_ranks: Final = sums.sum_ranks

    def fits(self, tensor: torch.Tensor) -> bool:
        """Is it summed so? All ranks say the same: by its shape and type, and rows are as wide as those of the first sum."""
        row_bytes = tensor.shape[-1] * tensor.element_size()
        if not self._region.fits(tensor) or self._row_bytes not in (None, row_bytes):
            return False
        self._row_bytes = row_bytes
        return True

    def sum(self, tensor: torch.Tensor, **norm: Any) -> torch.Tensor:
        """Sum a tensor that fits over the ranks, as `sum_ranks`."""
        return self._sum_ranks(tensor, self._region, **norm)

    def release(self) -> None:
        """Have kernels end that wait for a rank which is gone, also those launched from now on."""
        # A copy: the kernels may leave no room for another one.
        with torch.inference_mode(), torch.cuda.stream(self._side_stream):
            self._region.ended_1.copy_(self._true_1, non_blocking=True)
            self._side_stream.synchronize()


_groups = itertools.count()


def register(rank: int, num_ranks: int, backend: Any, store: Any, device: torch.device) -> Any:
    """A group that torch's kernels find by its name, for as long as it is referenced. The name is of this process alone."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

    name: Any = f"vmmkv-{next(_groups)}"
    group: Any = ProcessGroup(store, rank, num_ranks)
    kind = ProcessGroup.BackendType.NCCL if device.type == "cuda" else ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)
    group._set_group_name(name)
    _register_process_group(name, group)
    _SymmetricMemory.set_group_info(name, rank, num_ranks, store)
    return group


class RenumberedStore(Store):
    """A store with keys `.../NUMBER/RANK`, in which numbers count from 0.

    torch counts them over all engines that a process has had. Rank 0 may have had several, and other ranks are new each time.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        match key.rsplit("/", 2):
            case [name, number, rank] if number.isdigit():
                return f"{name}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"
        return key

    def set(self, key: str, value: Any) -> None:
        """Set a key of the store, as Store does."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """The value of a key, as of Store. Blocks until it is there. Raises: torch's DistStoreError after the store's time."""
        value: bytes = self._store.get(self._key(key))
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, as Store does. Raises: DistStoreError, as `get`."""
        names = [self._key(key) for key in keys]
        self._store.wait(names) if timeout is None else self._store.wait(names, timeout)
