"""A launcher refuses what its kernel would misread, and names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.cases import make_case
from vmmkv.kernels.append import append
from vmmkv.kernels.decode import decode

Tensors = dict[str, torch.Tensor]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, one element off a 16-byte address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)


def odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, rows one element further apart than 16 bytes allow."""
    return torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)[..., :-1]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with every other element in its last dimension."""
    return torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)[..., ::2]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on another device."""
    return tensor.to("meta")


DECODE_REFUSALS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("q_BHD", lambda q: q[0], "3 dimensions"),
    ("q_BHD", lambda q: q.float(), "float16"),
    ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
    ("q_BHD", lambda q: q[:, :0], "multiple of the 2 kv heads"),
    ("q_BHD", lambda q: q[..., :32], "(2, 4, 64)"),
    ("q_BHD", spread, "stride 1"),
    ("q_BHD", odd_strides, "16 bytes"),
    ("q_BHD", misaligned, "16 bytes"),
    ("q_BHD", meta, "tensor"),
    ("k_STKD", lambda k: k[0], "4 dimensions"),
    ("k_STKD", lambda k: k.long(), "float16, bfloat16 or float32"),
    ("k_STKD", spread, "stride 1"),
    ("k_STKD", meta, "where the others are"),
    ("v_STKD", lambda v: v[:, :-1], "(4, "),
    ("v_STKD", lambda v: v.float(), "float16"),
    ("v_STKD", odd_strides, "16 bytes"),
    ("lengths_B", lambda lengths: lengths[:1], "(2,)"),
    ("lengths_B", lambda lengths: lengths.float(), "int32 or int64"),
    ("slots_B", lambda slots: slots.repeat_interleave(2)[::2], "contiguous"),
    ("slots_B", meta, "the host never reads it"),
    ("limit_S", lambda limit: limit.long(), "int32"),
    ("limit_S", lambda limit: limit[:1], "(4,)"),
    ("window", lambda _: 0, "at least 1"),
    ("softcap", lambda _: 0.0, "positive"),
    ("out", lambda q: q.float(), "float16"),
    ("workspace", lambda q: torch.empty(5, device=q.device), "at least"),
]


@pytest.mark.parametrize(("name", "spoil", "wanted"), DECODE_REFUSALS)
def test_decode_names_the_argument_it_refuses(
    name: str, spoil: Callable[[torch.Tensor], Any], wanted: str, device: torch.device
) -> None:
    case = make_case([5, 9], heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, device=device)
    arguments: dict[str, Any] = dict(
        zip(("q_BHD", "k_STKD", "v_STKD", "lengths_B", "slots_B"), case.arguments, strict=True),
        limit_S=torch.full((4,), 9, dtype=torch.int32, device=device),
        out=torch.empty_like(case.q_BHD),
    )
    decode(**arguments)
    arguments[name] = spoil(arguments.get(name, case.q_BHD))
    with pytest.raises(ValueError) as refusal:
        decode(**arguments)
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)


def test_decode_refuses_rows_too_far_apart_for_32_bit_offsets(device: torch.device) -> None:
    case = make_case([1], heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, device=device)
    k_STKD = torch.empty(1, 1, 2, 64, dtype=torch.float16, device=device)
    far_STKD = k_STKD.as_strided((1, 1, 2, 64), (2**31, 2**31 // 16, 64, 1))
    with pytest.raises(ValueError, match="k_STKD is strided by"):
        decode(case.q_BHD, far_STKD, far_STKD, case.lengths_B, case.slots_B)


@pytest.mark.parametrize(
    ("name", "spoil", "wanted"),
    [
        ("k_NKD", lambda k: k[0], "(0, 2, 64)"),
        ("k_NKD", lambda k: k.float(), "float16"),
        ("v_NKD", lambda v: v[:-1], "(3, 2, 64)"),
        ("v_NKD", odd_strides, "16 bytes"),
        ("v_STKD", misaligned, "16 bytes"),
        ("slots_N", lambda slots: slots[:1], "(3,)"),
        ("positions_N", meta, "where the others are"),
        ("limit_S", lambda limit: limit.long(), "int32"),
    ],
)
def test_append_names_the_argument_it_refuses(
    name: str, spoil: Callable[[torch.Tensor], Any], wanted: str, device: torch.device
) -> None:
    arguments = {
        "k_NKD": torch.zeros(3, 2, 64, dtype=torch.float16, device=device),
        "v_NKD": torch.zeros(3, 2, 64, dtype=torch.float16, device=device),
        "k_STKD": torch.zeros(4, 8, 2, 64, dtype=torch.float16, device=device),
        "v_STKD": torch.zeros(4, 8, 2, 64, dtype=torch.float16, device=device),
        "slots_N": torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        "positions_N": torch.tensor([3, 4, 5], dtype=torch.int32, device=device),
        "limit_S": torch.full((4,), 8, dtype=torch.int32, device=device),
    }
    append(**arguments)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(ValueError) as refusal:
        append(**arguments)
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)
