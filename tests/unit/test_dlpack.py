"""Tensors over raw addresses: no copy, no touch, no leak."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from vmmkv.memory.address_space import wrap
from vmmkv.units import KIB

CPU = torch.device("cpu")
UNMAPPED = 1 << 40  # no mmap without MAP_FIXED comes near


@pytest.fixture
def buffer() -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(4 * KIB)


def test_a_tensor_is_the_memory_and_not_a_copy(buffer: "ctypes.Array[ctypes.c_char]") -> None:
    tensor = wrap(ctypes.addressof(buffer), 4 * KIB, CPU)
    assert (tensor.dtype, tuple(tensor.shape), tensor.device) == (torch.uint8, (4 * KIB,), CPU)
    assert tensor.data_ptr() == ctypes.addressof(buffer)
    tensor[17] = 99
    assert buffer.raw[17] == 99
    ctypes.memset(buffer, 7, 100)
    assert tensor[99:101].tolist() == [7, 0]


def test_torch_refuses_to_go_past_the_end(buffer: "ctypes.Array[ctypes.c_char]") -> None:
    tensor = wrap(ctypes.addressof(buffer), 4 * KIB, CPU)
    assert tensor.as_strided((2, 2 * KIB), (2 * KIB, 1))[1, -1].data_ptr() == ctypes.addressof(buffer) + 4 * KIB - 1
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 4096"):
        tensor.as_strided((4 * KIB + 1,), (1,))
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 4096"):
        tensor.view(torch.bfloat16).as_strided((2,), (2 * KIB,))
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 4096"):
        tensor[KIB:].as_strided((1,), (1,), 4 * KIB)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.resize_(8 * KIB)


@pytest.mark.parametrize(
    ("address", "size_bytes", "device", "message"),
    [
        (0, 8, CPU, "address=0x0"),
        (4096, 0, CPU, "size_bytes=0"),
        (4096, -1, CPU, "size_bytes=-1"),
        (4096, 8, torch.device("meta"), "'meta'"),
        (4096, 8, torch.device("cuda"), "write 'cuda:0'"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(address: int, size_bytes: int, device: torch.device, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(address, size_bytes, device)


def test_neither_taken_nor_refused_capsules_leak() -> None:
    source = """
import resource, torch
from vmmkv.memory.address_space import wrap
import vmmkv.memory.address_space as dlpack
cpu, real = torch.device("cpu"), dlpack.from_dlpack
def refuse(capsule):
    raise RuntimeError
def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def work(count):
    for number in range(count):
        dlpack.from_dlpack = real
        wrap(1 << 40, 1 << 46, cpu).view(torch.bfloat16)
        dlpack.from_dlpack = refuse
        try:
            wrap(1 << 40, 1 << 46, cpu)
        except RuntimeError:
            pass
work(2000)
before = peak_kib()
work(30_000)
print(peak_kib() - before)
"""
    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True, check=True)
    assert int(child.stdout) < 2 * KIB  # 60,000 structures of 80 bytes that leak are above 4,600 KiB


def test_a_tensor_may_die_in_another_thread() -> None:
    tensors = [wrap(UNMAPPED, 8, CPU) for _ in range(1000)]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert not tensors
