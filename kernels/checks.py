"""What every launcher checks before it launches. A refusal names the argument, what was given and what would work.

A kernel that is launched on wrong strides or on the wrong device reads somebody's memory, or none: then the CUDA context
is lost. So the checks are always on, and cheap enough for it: plain comparisons, and no text is built unless one fails.

Legend: S slots, T rows of a slot, K kv heads, D head dim, N vectors of an index.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
import triton

ALIGNMENT_BYTES = 16
"""The widest load of a GPU thread: strides and addresses are multiples of it."""

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Do the kernels run in Triton's interpreter? It is settled when they are imported."""

_INT32_END = 2**31


def refuse(argument: str, given: object, wanted: str) -> NoReturn:
    """Raise the ValueError of every check."""
    raise ValueError(f"{argument} is {given}; wanted {wanted}")


def runnable(argument: str, device: torch.device) -> None:
    """Refuse a device that these kernels cannot run on in this process."""
    if INTERPRETED and device.type != "cpu":
        refuse(argument, f"on {device}", "a CPU tensor, since TRITON_INTERPRET is set; unset it to run on the GPU")
    if not INTERPRETED and device.type != "cuda":
        refuse(argument, f"on {device}", "a CUDA tensor, or TRITON_INTERPRET=1 set before triton is first imported")


def vectors(argument: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse anything but this shape, dtype and device with a contiguous last dimension and 16-byte strides and address."""
    if tensor.device != device:
        refuse(argument, f"on {tensor.device}", f"a tensor on {device}, where the others are")
    if tensor.dtype != dtype:
        refuse(argument, f"of {tensor.dtype}", f"{dtype}, as the others are")
    if tensor.shape != shape:
        refuse(argument, f"of shape {tuple(tensor.shape)}", f"{shape}")
    aligned(argument, tensor)


def aligned(argument: str, tensor: torch.Tensor) -> None:
    """Refuse strides or an address that a 16-byte load cannot follow."""
    strides = tensor.stride()
    if strides[-1] != 1:
        refuse(argument, f"strided by {strides[-1]} in its last dimension", "a contiguous last dimension: stride 1")
    multiple = ALIGNMENT_BYTES // tensor.element_size()
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        # The stride of a dimension of size 1 is never followed, and torch leaves any number there.
        if stride % multiple and size > 1:
            refuse(argument, f"of strides {strides}", f"multiples of {multiple} elements (16 bytes) but in the last dimension")
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        refuse(argument, f"at address {tensor.data_ptr():#x}", f"an address that is a multiple of {ALIGNMENT_BYTES} bytes")


def arena(k_STKD: torch.Tensor, v_STKD: torch.Tensor, device: torch.device) -> tuple[int, int, int, int]:
    """Check the views of all slots, as `cache.k(layer)` and `cache.v(layer)` give them. Returns S, T, K, D."""
    if k_STKD.dim() != 4:
        refuse("k_STKD", f"of shape {tuple(k_STKD.shape)}", "4 dimensions: [slots, rows, kv heads, head dim]")
    if k_STKD.dtype not in FLOAT_DTYPES:
        refuse("k_STKD", f"of {k_STKD.dtype}", "float16, bfloat16 or float32")
    slots, rows, kv_heads, head_dim = k_STKD.shape
    if rows >= _INT32_END or slots >= _INT32_END:
        refuse("k_STKD", f"of shape {tuple(k_STKD.shape)}", "fewer than 2**31 slots and fewer than 2**31 rows")
    vectors("k_STKD", k_STKD, (slots, rows, kv_heads, head_dim), k_STKD.dtype, device)
    vectors("v_STKD", v_STKD, (slots, rows, kv_heads, head_dim), k_STKD.dtype, device)
    return slots, rows, kv_heads, head_dim


def tile_offsets(argument: str, tensor: torch.Tensor, tile_rows: int) -> None:
    """Refuse a row stride by which an offset inside one tile would leave 32 bits."""
    if tensor.stride(1) * tile_rows >= _INT32_END:
        most = _INT32_END // tile_rows - 1
        refuse(argument, f"strided by {tensor.stride(1)} elements from row to row", f"at most {most} elements")


def index(argument: str, tensor: torch.Tensor, count: int, device: torch.device) -> None:
    """Refuse anything but `count` contiguous int32 or int64 on the device."""
    if tensor.device != device:
        refuse(argument, f"on {tensor.device}", f"a tensor on {device}, where the others are: the host never reads it")
    if tensor.dtype not in INDEX_DTYPES:
        refuse(argument, f"of {tensor.dtype}", "int32 or int64")
    if tensor.shape != (count,):
        refuse(argument, f"of shape {tuple(tensor.shape)}", f"({count},)")
    if count > 1 and tensor.stride(0) != 1:
        refuse(argument, f"strided by {tensor.stride(0)}", "a contiguous tensor")


def limits(argument: str, tensor: torch.Tensor, slots: int, device: torch.device) -> None:
    """Refuse anything but one int32 a slot: the row at which reads and appends of that slot end."""
    index(argument, tensor, slots, device)
    if tensor.dtype != torch.int32:
        refuse(argument, f"of {tensor.dtype}", "int32, as `cache.limit` is")


def workspace(argument: str, tensor: torch.Tensor, elements: int, device: torch.device) -> None:
    """Refuse anything but contiguous float32 memory of at least so many elements."""
    if tensor.device != device:
        refuse(argument, f"on {tensor.device}", f"a tensor on {device}, where the others are")
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() < elements:
        given = f"{tensor.numel()} elements of {tensor.dtype}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        refuse(argument, given, f"at least {elements} contiguous elements of float32")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the *current* device and its stream; make that the tensors' own for the launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
