"""What torch's allocator gives: its peak, and no more than a limit.

A GPU's allocator counts for itself. A CPU's does not: there every operation's new tensors are counted while they live.
"""

import gc
import weakref
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.timing import WrongNumbers
from vmmkv.units import MIB, format_bytes

_MOST_UNUSED_BYTES: Final = 96 * MIB
"""That torch may have kept when a meter begins: the rest of a few segments, of up to 20 MiB each, of which somebody holds a
piece. What compiled steps leave is gigabytes.
"""


class Meter(Protocol):
    """Counts from when it is entered, without what was there before. What has begun outside must not end inside."""

    @property
    def live_bytes(self) -> int:
        """Now, in tensors."""

    @property
    def peak_bytes(self) -> int:
        """In tensors, at most; since `restart` if that was called."""

    @property
    def taken_bytes(self) -> int:
        """From the device, at most: on a GPU with what the allocator keeps of memory that was given back, in pieces or not.

        Raises: WrongNumbers if there was memory in the beginning that torch had kept and could not give back, and that nobody
        used: what is put there is not counted.
        """

    def restart(self) -> None:
        """Begin the peaks anew."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End."""


def meter_of(device: torch.device, limit_bytes: int | None = None) -> Meter:
    """For this device. Whoever asks for more than the limit gets a torch.OutOfMemoryError."""
    return _DeviceMeter(device, limit_bytes) if device.type == "cuda" else _HostMeter(limit_bytes)


def release(device: torch.device) -> None:
    """Give what nobody holds any more back to a GPU: what runs next may not be torch, or want it in other pieces."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _DeviceMeter:
    """What the caching allocator says of itself. The limit is of what it takes from the device, all its pieces together."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._allocated_before = self._reserved_before = 0

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._allocated_before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._allocated_before

    @property
    def taken_bytes(self) -> int:
        unused_bytes = self._reserved_before - self._allocated_before
        if unused_bytes > _MOST_UNUSED_BYTES:
            raise WrongNumbers(
                f"torch had kept {format_bytes(unused_bytes)} that nobody used when counting began, over "
                f"{format_bytes(_MOST_UNUSED_BYTES)}, and what was put there is not counted; run these parts in a process of "
                f"their own: --parts memory longest mixed"
            )
        return torch.cuda.max_memory_reserved(self._device) - self._reserved_before

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        release(self._device)
        self._allocated_before = torch.cuda.memory_allocated(self._device)
        self._reserved_before = torch.cuda.memory_reserved(self._device)
        self.restart()
        if self._limit_bytes is not None:
            _, total_bytes = torch.cuda.mem_get_info(self._device)
            self._limit((self._reserved_before + self._limit_bytes) / total_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._limit_bytes is not None:
            self._limit(1.0)

    def _limit(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)


class _HostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation. A tensor whose storage no argument has is new, and its bytes live until that storage is freed."""

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0

    @property
    def taken_bytes(self) -> int:
        return self.peak_bytes

    def restart(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(given):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._forget, storage.nbytes())
        if self._limit_bytes is not None and self.live_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(f"{format_bytes(self.live_bytes)} in tensors, over {format_bytes(self._limit_bytes)}")
        return given

    def _count(self, size_bytes: int) -> None:
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
