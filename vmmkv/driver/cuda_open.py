"""What must be there before CUDA's virtual memory can be used, asked in the order in which the answers help most.

A machine without a GPU is told so whatever torch it has; only where a GPU could be used is a CPU build of torch named.
"""

from typing import Any

import torch

from vmmkv.errors import (
    DriverError,
    MissingDriver,
    MissingPackage,
    NoDevice,
    NoVirtualMemory,
    OutOfDeviceMemory,
    TorchWithoutCuda,
)

_CPU_INSTEAD = "or use device='cpu', which keeps the cache in host memory"


def missing_package(error: ImportError) -> MissingPackage:
    """What to raise when `cuda.bindings` cannot be imported."""
    return MissingPackage(
        f"the package cuda-python, which speaks to the CUDA driver, is not installed ({error}); "
        f"`pip install 'cuda-python>=13'`, {_CPU_INSTEAD}"
    )


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
