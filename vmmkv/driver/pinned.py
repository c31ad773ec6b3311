"""Host memory that a device copies from and to without staging, pinned where the device is a GPU."""

import mmap
import sys
from typing import Final

import torch

from vmmkv.driver.host import HEADROOM_BYTES, HostMemory
from vmmkv.errors import BudgetError
from vmmkv.units import format_bytes


def host_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that begins on a page, which `device` copies from and to; untouched until it is used if that is the host.

    It goes back to the machine with the last tensor over it.
    Cost: pinning takes 0.3 s for each GiB.
    Raises: BudgetError, if the machine does not give it, or the container.
    """
    try:
        free_bytes = HostMemory().read().free_bytes
        if size_bytes + HEADROOM_BYTES > free_bytes:  # taking the last byte would summon the out-of-memory killer
            raise OSError(f"this process, in its control group, may take {format_bytes(free_bytes)}")
        mapping = _Pinned(-1, size_bytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if device.type == "cuda":
            mapping.pin(memory.data_ptr(), device)
        return memory
    except (OSError, RuntimeError) as error:
        raise BudgetError(f"{format_bytes(size_bytes)} of host memory for {device} cannot be had: {error}") from error


class _Pinned(mmap.mmap):
    """Host memory that is pinned by CUDA while it is there. Torch's own allocator never gives back what it has pinned."""

    _pinned_for: tuple[int, torch.device] | None = None

    def pin(self, address: int, device: torch.device) -> None:
        """`address` is its own. Raises: RuntimeError."""
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(address, len(self), _PORTABLE))
        self._pinned_for = address, device

    def __del__(self) -> None:
        """Called before it is unmapped."""
        if self._pinned_for is not None and not sys.is_finalizing():
            address, device = self._pinned_for
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every GPU."""
