"""Laws of decoding over quantised rows: what their bits mean, and nothing that is not theirs."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN, Case, assert_right, make_case
from tests.kernels.memories import FORMATS, POISON
from vmmkv.kernels import checks
from vmmkv.kernels.quantise import Kind

SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
TOKEN_KINDS = [kind for kind, scale in FORMATS if scale == "token"]

formats = pytest.mark.parametrize(("kind", "scale"), FORMATS[1:])
kinds = pytest.mark.parametrize("kind", TOKEN_KINDS)


@formats
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (4, 2, 64, torch.float16),
        (3, 1, 80, torch.float16),
        (2, 2, 96, torch.float16),
        (1, 1, 128, torch.float16),
        (2, 1, 256, torch.float16),
        (2, 1, 64, torch.float32),
        (3, 1, 80, torch.float32),
    ],
)
def test_quantised_rows_mean_what_their_bits_say(
    kind: Kind, scale: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([0, 1, 17, 200], kind=kind, scale=scale, device=device, **shape)
    assert_right(case.decode(out=case.poisoned_out()), case)


def every_payload(kind: Kind, device: torch.device) -> Case:
    """256 rows of each byte there is but the NaN of fp8, each row with a scale of its own, and the query one of K's rows."""
    case = make_case([256], num_rows=256, kind=kind, device=device, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    width = memory.k.shape[3]
    bytes_TW = (torch.arange(256)[:, None] + 37 * torch.arange(width)).to(torch.uint8)
    if kind == "fp8":
        bytes_TW[(bytes_TW & 0x7F) == 0x7F] = 0
    elif kind == "int8":
        bytes_TW[bytes_TW == 0x80] = 0
    for view, name in ((memory.k, "k_scale"), (memory.v, "v_scale")):
        view.view(torch.uint8)[slot, :, 0] = bytes_TW.to(device)
        memory.scales[name][slot, :, 0] = (torch.rand(256, generator=torch.Generator().manual_seed(3)) / 100).half().to(device)
    return case


@kinds
def test_every_byte_is_read_as_it_is_written(kind: Kind, device: torch.device) -> None:
    case = every_payload(kind, device)
    assert_right(case.decode(), case)


@kinds
@pytest.mark.parametrize("exponent", [-24, -14, 6])
def test_a_scale_may_be_as_small_or_large_as_float16_is(kind: Kind, exponent: int, device: torch.device) -> None:
    # Weights times the smallest leave the range of float16, in which V is multiplied.
    case = make_case([200], kind=kind, device=device, **SMALL)
    case.memory.scales["v_scale"][case.slots_B.long()] = 2.0**exponent
    assert_right(case.decode(scale=0.01), case, scale=0.01)


@formats
def test_a_window_reads_nothing_before_it(kind: Kind, scale: str, device: torch.device) -> None:
    case = make_case([1, 63, 64, 300], window=63, kind=kind, scale=scale, device=device, **SMALL)
    assert_right(case.decode(window=63, out=case.poisoned_out()), case, window=63)


@formats
def test_rows_at_and_past_the_limit_are_not_read(kind: Kind, scale: str, device: torch.device) -> None:
    case = make_case([40, 100], kind=kind, scale=scale, device=device, **SMALL)
    limit_S = torch.full((case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]] = 40
    expected = case.decode()
    case.lengths_B[0] = 90
    assert torch.equal(case.decode(limit_S=limit_S), expected)


@kinds
def test_pointers_give_the_bits_of_descriptors(kind: Kind, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    case = make_case([1, 17, 300], kind=kind, device=device, **{**SMALL, "head_dim": 80})
    expected = case.decode(out=case.poisoned_out())
    monkeypatch.setattr(checks, "has_tma", lambda device: False)
    assert torch.equal(case.decode(out=case.poisoned_out()), expected)


@kinds
def test_the_bits_do_not_depend_on_what_is_not_read(kind: Kind, device: torch.device) -> None:
    case = make_case([50, 130], kind=kind, device=device, **SMALL)
    expected = case.decode()
    bytes_STE = case.memory.bytes_STE
    for slot, length in zip(case.slots_B.tolist(), case.lengths_B.tolist(), strict=True):
        assert (bytes_STE[slot, length:] == POISON).all()
        bytes_STE[slot, length:] = torch.randint(256, bytes_STE[slot, length:].shape, device=device).to(torch.uint8)
    assert torch.equal(case.decode(), expected)


@kinds
def test_a_row_of_zeros_adds_nothing_but_its_weight(kind: Kind, device: torch.device) -> None:
    case = make_case([1], kind=kind, device=device, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    memory.v.view(torch.uint8)[slot] = 0x88 if kind == "int4" else 0
    memory.scales["v_scale"][slot] = 2.0**-24
    assert torch.equal(case.decode(), torch.zeros_like(case.q_BHD))
    memory.scales["v_scale"][slot] = NAN
    assert case.decode().isnan().all()
