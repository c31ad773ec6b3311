"""Checks that every launcher makes before it launches, and the launch itself.

A refusal is a ValueError that names the argument, what was given and what would work. A kernel launched on wrong strides or on
the wrong device reads other memory, or unmapped memory: then the CUDA context is lost. So the checks are always on, and cheap:
plain comparisons, with no text built unless one fails.

Legend: S slots, T rows of a slot, K kv heads, D head dim, N tokens, R angles.
"""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
import triton

ALIGNMENT_BYTES = 16
"""The widest load of a GPU thread: strides and addresses are multiples of it."""

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Do the kernels run in Triton's interpreter? Decided when they are imported."""

INT32_END = 2**31
NO_WINDOW = INT32_END - 1
_LOG2_E = math.log2(math.e)


def refuse(argument: str, given: object, wanted: str) -> NoReturn:
    """Raise the ValueError of every check."""
    raise ValueError(f"{argument} is {given}; wanted {wanted}")


def runnable(argument: str, device: torch.device) -> None:
    """Refuse a device that these kernels cannot run on in this process."""
    if INTERPRETED and device.type != "cpu":
        refuse(argument, f"on {device}", "a CPU tensor, since TRITON_INTERPRET is set; unset it to run on the GPU")
    if not INTERPRETED and device.type != "cuda":
        refuse(argument, f"on {device}", "a CUDA tensor, or TRITON_INTERPRET=1 set before triton is first imported")


def floats(argument: str, dtype: torch.dtype) -> None:
    """Refuse a dtype in which kernels do not compute, or not here."""
    if dtype not in FLOAT_DTYPES:
        refuse(argument, f"of {dtype}", "float16, bfloat16 or float32")
    if INTERPRETED and dtype == torch.bfloat16:
        refuse(argument, f"of {dtype}", "float16 or float32: Triton's interpreter computes bfloat16 wrongly")


def vectors(argument: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse anything but this shape, dtype and device with a contiguous last dimension and 16-byte strides and address."""
    if tensor.device != device:
        refuse(argument, f"on {tensor.device}", f"a tensor on {device}, where the others are")
    if tensor.dtype != dtype:
        refuse(argument, f"of {tensor.dtype}", f"{dtype}, as the others are")
    if tensor.shape != shape:
        refuse(argument, f"of shape {tuple(tensor.shape)}", f"{tuple(shape)}")
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


def exactly(argument: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse anything but a contiguous tensor of this dtype and shape on the device."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        given += "" if tensor.is_contiguous() else ", not contiguous"
        refuse(argument, given, f"contiguous {dtype} of shape {tuple(shape)} on {device}")


def output(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The output tensor: `out`, checked, or a new one if it is None."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    vectors("out", out, shape, dtype, device)
    return out


def index(
    argument: str, tensor: torch.Tensor, count: int, device: torch.device, dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES
) -> None:
    """Refuse anything but `count` contiguous integers of one of these dtypes on the device."""
    if tensor.device != device:
        refuse(argument, f"on {tensor.device}", f"a tensor on {device}, where the others are: the host never reads it")
    if tensor.dtype not in dtypes:
        refuse(argument, f"of {tensor.dtype}", " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if tensor.shape != (count,):
        refuse(argument, f"of shape {tuple(tensor.shape)}", f"({count},)")
    if count > 1 and tensor.stride(0) != 1:
        refuse(argument, f"strided by {tensor.stride(0)}", "a contiguous tensor")


def limits(limit_S: torch.Tensor, slots: int, device: torch.device) -> None:
    """Refuse anything but one int32 a slot: the row at which reads and appends of that slot end."""
    if limit_S.dtype != torch.int32:
        refuse("limit_S", f"of {limit_S.dtype}", "int32, as `cache.limit` is")
    index("limit_S", limit_S, slots, device)


def matrix(argument: str, tensor: torch.Tensor, wanted: str) -> tuple[int, int]:
    """Refuse anything but 2 dimensions of floats that kernels compute right here. Returns their sizes."""
    runnable(argument, tensor.device)
    floats(argument, tensor.dtype)
    if tensor.dim() != 2:
        refuse(argument, f"of shape {tuple(tensor.shape)}", f"2 dimensions: {wanted}")
    aligned(argument, tensor)
    return tensor.shape[0], tensor.shape[1]


def logits(tensor: torch.Tensor) -> tuple[int, int]:
    """Refuse anything but [rows, vocabulary] of floats with contiguous elements. Returns their sizes."""
    runnable("logits_BV", tensor.device)
    if tensor.dtype not in FLOAT_DTYPES or tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        refuse("logits_BV", given, "float16, bfloat16 or float32 of 2 dimensions, the last one contiguous")
    return tensor.shape[0], tensor.shape[1]


def norm(
    argument: str, weight: torch.Tensor, eps_argument: str, eps: float, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Check the weight of a norm over `size` elements, and what is added under its root."""
    vectors(argument, weight, (size,), dtype, device)
    if not 0.0 < eps < math.inf:
        refuse(eps_argument, eps, "a positive, finite number, as a model's rms_norm_eps is: the mean square of zeros is 0")


def workspace(tensor: torch.Tensor | None, elements: int, device: torch.device) -> torch.Tensor:
    """The given workspace, if it is contiguous float32 of at least so many elements; a new one if it is None."""
    if tensor is None:
        return torch.empty(elements, dtype=torch.float32, device=device)
    if tensor.device != device:
        refuse("workspace", f"on {tensor.device}", f"a tensor on {device}, where the others are")
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() < elements:
        given = f"{tensor.numel()} elements of {tensor.dtype}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        refuse("workspace", given, f"at least {elements} contiguous elements of float32")
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Scale, softcap and window as kernels take them, in base-2 logarithms."""

    scale_log2: float
    """Factor from a dot product to the score; with a cap, to twice the score over the cap."""
    softcap_log2: float
    """The cap in base-2 logarithms; 0 for no cap."""
    rows_seen: int
    """The window; NO_WINDOW for none."""


def attention_options(scale: float | None, window: int | None, softcap: float | None, head_dim: int) -> AttentionOptions:
    """Check the options that all attention takes. Scores are softcap * tanh(scale * qk / softcap)."""
    if window is not None and window < 1:
        refuse("window", window, "at least 1, or None to attend to all rows")
    if softcap is not None and not 0.0 < softcap < math.inf:
        refuse("softcap", softcap, "a positive, finite number, or None for no cap")
    if scale is not None and not 0.0 < scale < math.inf:
        refuse("scale", scale, "a positive, finite number, or None for 1 / sqrt(head dim)")
    scale_log2 = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    if softcap is not None:
        scale_log2 *= 2.0 / softcap
    rows_seen = min(window or NO_WINDOW, NO_WINDOW)
    return AttentionOptions(scale_log2=scale_log2, softcap_log2=(softcap or 0.0) * _LOG2_E, rows_seen=rows_seen)


@functools.cache
def launches_dependents(device: torch.device) -> bool:
    """Has the device programmatic dependent launch: can a kernel start while the one before it runs, and wait inside?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Has the device a tensor memory accelerator, which loads tiles by itself? The interpreter has."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_options(overlaps: bool) -> dict[str, bool]:
    """Launch options of a kernel that can wait inside: its `PDL`, and the launcher's own, which older devices refuse.

    Such a kernel may start once all programs of the kernel before it have called `gdc_launch_dependents`. Where these do so
    before they wait, kernels further back may still run too. `gdc_wait` ends when the kernel before has ended, which has waited
    as well: so all have ended, and what they wrote is seen. Until then a kernel may read only what is *settled*: what was
    written before a kernel or a copy, itself before this one, that

    - was launched without overlap, as torch's own kernels are: it started when all before it had ended; or
    - calls `gdc_launch_dependents` after its own `gdc_wait`: nothing behind it starts before that.
    """
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


def overlap(device: torch.device) -> dict[str, bool]:
    """`overlap_options` for this device."""
    return overlap_options(launches_dependents(device))


def padded(size: int) -> int:
    """The size of a tensor core's tile: a power of two, 16 or more."""
    return max(16, int(triton.next_power_of_2(size)))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' device current: Triton launches on the current device and its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
