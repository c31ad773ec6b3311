"""What a machine says on which the CUDA driver cannot work: each lack by its own exception, with its own remedy."""

import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from vmmkv.driver import cuda, open_driver
from vmmkv.errors import (
    DriverError,
    DriverUnavailable,
    MissingDriver,
    MissingPackage,
    NoDevice,
    NoVirtualMemory,
    OutOfDeviceMemory,
    TorchWithoutCuda,
)

OK, INVALID, OUT_OF_MEMORY, NO_DEVICE, MISMATCH = 0, 1, 2, 100, 803
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", MISMATCH: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}


def bindings_of(*, init: int = OK, num_devices: int = 1, vmm: int = 1) -> SimpleNamespace:
    """Enough of `cuda.bindings.driver` for a machine with `num_devices` GPUs whose cuInit says `init`."""
    return SimpleNamespace(
        CUresult=SimpleNamespace(
            CUDA_SUCCESS=OK,
            CUDA_ERROR_INVALID_VALUE=INVALID,
            CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY,
            CUDA_ERROR_NO_DEVICE=NO_DEVICE,
        ),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm"),
        cuInit=lambda flags: (init,),
        cuDeviceGetCount=lambda: (OK, num_devices),
        cuDeviceGet=lambda index: (OK, index),
        cuDeviceGetAttribute=lambda key, device: (OK, vmm),
        cuGetErrorName=lambda status: (OK, NAMES[status]) if status in NAMES else (INVALID, None),
        cuGetErrorString=lambda status: (OK, b"what it means"),
    )


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingPackage, match=r"pip install 'cuda-python>=13'"):
        open_driver("cuda")


def test_a_machine_without_a_driver_says_so_whatever_torch_it_has() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    try:
        bindings.cuInit(0)
    except RuntimeError:
        with pytest.raises(MissingDriver, match=r"no CUDA driver .*device='cpu'"):
            open_driver("cuda")
    else:
        pytest.skip("this machine has a CUDA driver")


TOO_OLD = RuntimeError("The NVIDIA driver on your system is too old")


@pytest.mark.parametrize(
    ("error", "message", "device", "bindings", "version", "init_error"),
    [
        (MissingDriver, r"SYSTEM_DRIVER_MISMATCH \(what it means\)", "cuda:0", {"init": MISMATCH}, None, None),
        (NoDevice, "CUDA_VISIBLE_DEVICES", "cuda:0", {"init": NO_DEVICE}, None, None),
        (NoDevice, "CUDA_VISIBLE_DEVICES", "cuda:0", {"num_devices": 0}, None, None),
        (NoDevice, "'cuda:2' was asked for, and the GPUs are cuda:0 to cuda:1", "cuda:2", {"num_devices": 2}, None, None),
        (TorchWithoutCuda, rf"torch {re.escape(torch.__version__)} was built without CUDA", "cuda:0", {}, None, None),
        (MissingDriver, "too old", "cuda:0", {}, "13.0", TOO_OLD),
        (NoVirtualMemory, r"GPU number 1 \(cuda:1\)", "cuda:1", {"vmm": 0, "num_devices": 2}, "13.0", None),
    ],
)
def test_each_lack_has_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
    error: type[DriverUnavailable],
    message: str,
    device: str,
    bindings: dict[str, int],
    version: str | None,
    init_error: Exception | None,
) -> None:
    monkeypatch.setattr(cuda, "load_bindings", lambda: bindings_of(**bindings))
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=init_error))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    with pytest.raises(DriverUnavailable, match=message) as caught:
        open_driver(device)
    assert caught.type is error


def test_a_refused_call_carries_the_call_the_name_and_the_text() -> None:
    bindings = bindings_of()
    assert cuda.checked(bindings, "map", (OK,)) is None
    assert cuda.checked(bindings, "create", (OK, 7)) == 7
    with pytest.raises(DriverError) as caught:
        cuda.checked(bindings, "map", (MISMATCH,), "handle 0x7")
    assert str(caught.value) == "map: handle 0x7: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (what it means)"
    assert (caught.value.call, caught.value.code) == ("map", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    with pytest.raises(OutOfDeviceMemory):
        cuda.checked(bindings, "set_access", (OUT_OF_MEMORY,))
    assert cuda.failure(bindings, "map", 12345).code == "CUDA_ERROR_UNKNOWN"
    assert cuda.attribute(bindings, 0, "A_NAME_OF_A_LATER_VERSION") == 0
