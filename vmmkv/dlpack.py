"""Tensors over raw addresses, by a DLPack capsule: the same code for CPU and CUDA, no copy, no touch.

A `DLManagedTensor` is a C structure that says where a tensor's bytes are and has a *deleter*, which the consumer calls
with the structure's own address when its tensor dies. Ours, its shape and its strides are one libc `malloc`, and the
deleter is libc's `free`: no Python runs when a tensor dies, in whichever thread, at interpreter exit too.

Torch offers two other ways, and neither would do: `__cuda_array_interface__` silently copies when the pointer's device
is not the one asked for, and `torch.frombuffer` knows no GPU.
"""

import ctypes
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack

_CAPSULE_NAME: Final = b"dltensor"  # a consumer renames it; capsules keep a pointer to the name, so it must stay alive
_DEVICE_TYPES: Final = {"cpu": 1, "cuda": 2}  # kDLCPU, kDLCUDA
_UINT8: Final = (1, 8, 1)  # kDLUInt, bits, lanes


class _Capsule(ctypes.Structure):
    """DLManagedTensor of dlpack.h (its DLTensor spelt out), with a shape and strides of one dimension behind it."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape_pointer", ctypes.c_uint64),
        ("strides_pointer", ctypes.c_uint64),
        ("offset_bytes", ctypes.c_uint64),
        ("manager", ctypes.c_uint64),
        ("deleter", ctypes.c_uint64),
        ("shape", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    ]


_STRUCTURE_BYTES: Final = ctypes.sizeof(_Capsule)
_SHAPE_OFFSET: Final = _Capsule.shape.offset
_STRIDE_OFFSET: Final = _Capsule.stride.offset

_libc = ctypes.CDLL(None)
_malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", _libc))
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", _libc))
_FREE_ADDRESS: Final = ctypes.cast(_free, ctypes.c_void_p).value or 0

# prototypes of our own, since the functions on ctypes.pythonapi are one for the whole process
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def wrap(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes [address, address + size_bytes) as a uint8 tensor `[size_bytes]`; other types by `.view(dtype)` of it.

    Nothing is copied or touched: the addresses may have no memory under them (64 TiB of them is fine), and only an
    operation on elements that are not mapped faults. The storage ends where the tensor does, so torch refuses an
    `as_strided` that would reach past it. The tensor does not own the addresses: they must stay reserved while it lives.

    Cost: some 4 us, no driver call; safe while a graph is captured.
    Raises: ValueError for a size or address that is not positive, a CUDA device without an index, another device.
    """
    if address <= 0 or size_bytes <= 0:
        raise ValueError(f"address={address:#x}, size_bytes={size_bytes}: both must be above 0")
    if device.type not in _DEVICE_TYPES:
        raise ValueError(f"addresses of device {str(device)!r} cannot be wrapped; only those of cpu and cuda")
    if device.type == "cuda" and device.index is None:
        raise ValueError("device 'cuda' does not say which GPU these addresses are of; write 'cuda:0'")
    pointer = _malloc(_STRUCTURE_BYTES)
    if not pointer:
        raise MemoryError(f"malloc of {_STRUCTURE_BYTES} bytes failed")
    try:
        ctypes.memmove(
            pointer,
            ctypes.byref(
                _Capsule(
                    *(address, _DEVICE_TYPES[device.type], device.index or 0, 1, *_UINT8),
                    *(pointer + _SHAPE_OFFSET, pointer + _STRIDE_OFFSET, 0, 0, _FREE_ADDRESS),
                    *(size_bytes, 1),
                )
            ),
            _STRUCTURE_BYTES,
        )
        capsule = _new_capsule(pointer, _CAPSULE_NAME, None)
    except BaseException:
        _free(pointer)
        raise
    try:
        return from_dlpack(capsule)
    finally:
        # The capsule never leaves this function, so it needs no destructor: if torch did not take it, it is ours to free.
        if _is_capsule(capsule, _CAPSULE_NAME):
            _free(pointer)
