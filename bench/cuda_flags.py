"""CUDA drivers whose handles are created with other flags than the library's: what does being exportable cost?"""

from typing import Any

import torch

from vmmkv.driver import Driver
from vmmkv.driver.cuda import CudaDriver


class FlaggedDriver(CudaDriver):
    """CudaDriver, but for what its handles may be used for. Handles that are not exportable refuse `export_fd`."""

    def __init__(self, device: torch.device, *, exportable: bool, rdma: bool) -> None:
        self._exportable = exportable
        self._rdma = rdma
        super().__init__(device)

    def _allocation_properties(self) -> Any:
        properties = super()._allocation_properties()
        if not self._exportable:
            properties.requestedHandleTypes = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        if self._rdma:
            properties.allocFlags.gpuDirectRDMACapable = 1
        return properties


def drivers_by_flags(device: torch.device) -> dict[str, Driver]:
    """By what is asked for; the library's own choice is "exportable"."""
    return {
        "no flags": FlaggedDriver(device, exportable=False, rdma=False),
        "exportable": FlaggedDriver(device, exportable=True, rdma=False),
        "exportable, RDMA": FlaggedDriver(device, exportable=True, rdma=True),
    }
