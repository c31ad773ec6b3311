"""What a machine says on which the CUDA driver cannot work: each lack by its own exception, with its own remedy."""

import sys
from types import SimpleNamespace
from typing import Any

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

CUDA = torch.device("cuda", 0)
OK, INVALID, OUT_OF_MEMORY, NO_DEVICE, MISMATCH = 0, 1, 2, 100, 803
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", MISMATCH: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}


class Bindings:
    """Enough of `cuda.bindings.driver` for a machine with `num_devices` GPUs whose cuInit says `init`."""

    CUresult = SimpleNamespace(
        CUDA_SUCCESS=OK,
        CUDA_ERROR_INVALID_VALUE=INVALID,
        CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY,
        CUDA_ERROR_NO_DEVICE=NO_DEVICE,
    )
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm")

    def __init__(self, *, init: int = OK, num_devices: int = 1, vmm: int = 1) -> None:
        self.init, self.num_devices, self.vmm = init, num_devices, vmm

    def cuInit(self, flags: int) -> tuple[int]:
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return OK, self.num_devices

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return OK, index

    def cuDeviceGetAttribute(self, key: str, device: int) -> tuple[int, int]:
        return OK, self.vmm

    def cuGetErrorName(self, status: int) -> tuple[int, bytes | None]:
        return (OK, NAMES[status]) if status in NAMES else (INVALID, None)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes | None]:
        return OK, b"what it means"


def raised(monkeypatch: pytest.MonkeyPatch, bindings: Any, device: torch.device = CUDA) -> DriverUnavailable:
    """What opening a driver over these bindings raises."""
    monkeypatch.setattr(cuda, "_load_bindings", lambda: bindings)
    with pytest.raises(DriverUnavailable) as caught:
        open_driver(device)
    return caught.value


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has CUDA, as far as opening a device asks."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")


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


def test_a_driver_that_does_not_start_is_a_missing_driver_with_cudas_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(monkeypatch, Bindings(init=MISMATCH))
    assert type(error) is MissingDriver
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (what it means)" in str(error)


@pytest.mark.parametrize("bindings", [Bindings(init=NO_DEVICE), Bindings(num_devices=0)])
def test_a_driver_without_a_gpu_is_no_device(monkeypatch: pytest.MonkeyPatch, bindings: Bindings) -> None:
    error = raised(monkeypatch, bindings)
    assert type(error) is NoDevice
    assert "CUDA_VISIBLE_DEVICES" in str(error)


def test_an_index_that_is_too_high_names_the_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(monkeypatch, Bindings(num_devices=2), torch.device("cuda", 2))
    assert type(error) is NoDevice
    assert "'cuda:2' was asked for, and the GPUs are cuda:0 to cuda:1" in str(error)


def test_a_cpu_build_of_torch_is_named_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    error = raised(monkeypatch, Bindings())
    assert type(error) is TorchWithoutCuda
    assert torch.__version__ in str(error)


@pytest.mark.usefixtures("cuda_torch")
def test_a_driver_too_old_for_torch_is_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "init", init)
    error = raised(monkeypatch, Bindings())
    assert type(error) is MissingDriver
    assert "too old" in str(error)


@pytest.mark.usefixtures("cuda_torch")
def test_a_device_without_virtual_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(monkeypatch, Bindings(vmm=0, num_devices=2), torch.device("cuda", 1))
    assert type(error) is NoVirtualMemory
    assert "GPU number 1 (cuda:1)" in str(error)


def test_a_refused_call_carries_the_call_the_name_and_the_text() -> None:
    bindings = Bindings()
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
