"""The formats of quantised K and V. Plain torch, which the kernels equal bit for bit.

| kind | torch dtype of the payload | an element |
|---|---|---|
| fp8 | float8_e4m3fn | clamped to [-448, 448], rounded to nearest even |
| int8 | int8 | -127 .. 127, rounded to nearest even |
| int4 | uint8, half as wide | -7 .. 7 stored plus 8: byte j holds element j low and element j + D / 2 high |

An element's value is payload * scale. A *token* scale belongs to one token and head, is float16 and kept beside the
payload; a *head* scale is float32, one a head, static. Division by a scale is multiplication by its float32 reciprocal
everywhere, since a kernel divides once a row and not once an element.

Legend: K kv heads, D head dim, W payload width in elements: D, or D / 2 in int4.
"""

from typing import Literal, get_args

import torch

Kind = Literal["fp8", "int8", "int4"]

KINDS: tuple[Kind, ...] = get_args(Kind)

PAYLOAD_DTYPES: dict[Kind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}

QMAX: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""The largest payload; its negative is the smallest."""

INT4_ZERO = 8
"""Offset of a nibble from its element, by which it is never negative."""

TOKEN_SCALE_DTYPE = torch.float16
TOKEN_SCALE_MIN = 2.0**-24
"""The smallest positive float16: the scale of a row of zeros, so that no reciprocal is infinite."""
TOKEN_SCALE_MAX = 65504.0
"""The largest finite float16. A row with elements above this times QMAX saturates."""

HEAD_SCALE_DTYPE = torch.float32


def kind_of(dtype: torch.dtype) -> Kind | None:
    """The kind whose payload is of this dtype; None for a dtype that is stored as it is."""
    for kind, payload_dtype in PAYLOAD_DTYPES.items():
        if dtype == payload_dtype:
            return kind
    return None


def payload_width(kind: Kind | None, head_dim: int) -> int:
    """Elements of the payload of one head (for kind None, not quantised: its elements)."""
    return head_dim // 2 if kind == "int4" else head_dim


def token_scales(x_KD: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The scale of each head of each token: [..., K, D] gives float16 [..., K].

    It is amax / QMAX rounded up to float16, so that the largest element does not saturate; x is finite.
    """
    amax = x_KD.float().abs().amax(dim=-1)
    # By a tensor: on a GPU torch divides by a number by multiplying with its reciprocal, which rounds twice.
    wanted = (amax / torch.full_like(amax, QMAX[kind])).clamp(TOKEN_SCALE_MIN, TOKEN_SCALE_MAX)
    nearest = wanted.to(torch.float16)
    # The next larger positive float has the next larger bits.
    bits_up = (nearest.float() < wanted).to(torch.int16)
    return (nearest.view(torch.int16) + bits_up).view(torch.float16)


def quantise(x_KD: torch.Tensor, kind: Kind, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., K, D] of finite floats. Returns the payload [..., K, W] and the scales.

    scale: head scales, positive float32 [K]; or token scales, [..., K] of any float type; None computes token scales.
    Raises: ValueError for an odd head dim in int4.
    """
    if kind == "int4" and x_KD.shape[-1] % 2:
        raise ValueError(f"x_KD has head dim {x_KD.shape[-1]}; wanted an even one, since int4 keeps two elements in a byte")
    scale = token_scales(x_KD, kind) if scale is None else scale
    qmax = QMAX[kind]
    scaled_KD = (x_KD.float() * (1.0 / scale.float()).unsqueeze(-1)).clamp(-qmax, qmax)
    if kind == "fp8":
        return scaled_KD.to(torch.float8_e4m3fn), scale
    whole_KD = torch.round(scaled_KD)
    if kind == "int8":
        return whole_KD.to(torch.int8), scale
    low_KW, high_KW = (whole_KD + INT4_ZERO).to(torch.uint8).chunk(2, dim=-1)
    return low_KW | (high_KW << 4), scale


def dequantise(payload_KW: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 [..., K, D] of a payload [..., K, W] with token scales [..., K] or head scales [K].

    Raises: ValueError if the payload's dtype is of no kind.
    """
    kind = kind_of(payload_KW.dtype)
    if kind is None:
        raise ValueError(f"payload_KW is of {payload_KW.dtype}; wanted one of {list(PAYLOAD_DTYPES.values())}")
    if kind == "int4":
        nibbles_KD = torch.cat([payload_KW & 15, payload_KW >> 4], dim=-1)
        values_KD = nibbles_KD.float() - INT4_ZERO
    else:
        values_KD = payload_KW.float()
    return values_KD * scale.float().unsqueeze(-1)
