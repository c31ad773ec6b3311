"""Drivers of virtual memory: the protocol (base), CUDA, the host, and pinned host memory.

The tests' driver is in `vmmkv.testing`.
"""

from typing import Final

import torch

from vmmkv.driver.base import Access, Driver, Fence, Handle, MemoryInfo

__all__ = ["Access", "Driver", "Fence", "Handle", "MemoryInfo", "open_driver"]


_CHOICE: Final = "choose 'cpu' (host memory) or 'cuda:0' (a GPU)"


def open_driver(device: str | torch.device) -> Driver:
    """The driver of a device: `"cpu"` is the host's own memory, `"cuda:1"` a GPU, `"cuda"` the thread's current one.

    CUDA, and the package that speaks to it, are loaded only when a GPU is asked for.

    Raises: DriverUnavailable, by what is missing; ValueError for a device of another kind.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):  # torch names a dozen kinds of device
        raise ValueError(f"there is no device {device!r}: {_CHOICE}") from None
    if device.type == "cpu" and device.index in (None, 0):
        from vmmkv.driver.host import HostDriver

        return HostDriver()
    if device.type == "cuda":
        from vmmkv.driver.cuda import CudaDriver

        return CudaDriver(device)
    raise ValueError(f"there is no driver for {str(device)!r}: {_CHOICE}")
