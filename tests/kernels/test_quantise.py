"""Laws of the quantised formats."""

import pytest
import torch

from vmmkv_kernels.quantise import KINDS, PAYLOAD_DTYPES, QMAX, Kind, dequantise, kind_of, payload_width, quantise

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_payload_names_its_kind(kind: Kind) -> None:
    payload, scale = quantise(torch.randn(5, 3, 96), kind)
    assert payload.dtype == PAYLOAD_DTYPES[kind]
    assert kind_of(payload.dtype) == kind
    assert payload.shape == (5, 3, payload_width(kind, 96))
    assert scale.shape == (5, 3)
    assert kind_of(torch.bfloat16) is None


@kinds
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 1e3])
def test_the_error_is_at_most_half_a_step(kind: Kind, magnitude: float) -> None:
    x = torch.randn(200, 3, 64) * magnitude
    payload, scale = quantise(x, kind)
    error = (dequantise(payload, scale) - x).abs()
    # fp8 has 3 bits after the point; below 2**-6 its step is 2**-9.
    step = (x.abs() / 8).maximum(scale.float()[..., None] / 512) if kind == "fp8" else scale.float()[..., None]
    assert (error <= step / 2 * (1 + 1e-5)).all()


@kinds
def test_a_token_scale_is_the_least_float16_that_does_not_saturate(kind: Kind) -> None:
    magnitudes = 2.0 ** torch.arange(-30.0, 15.0)
    x = torch.randn(45, 7, 64) * magnitudes[:, None, None]
    _, scale = quantise(x, kind)
    assert scale.dtype == torch.float16
    wanted = x.abs().amax(-1).double() / QMAX[kind]
    below = (scale.view(torch.int16) - 1).view(torch.float16)
    # The quotient is itself rounded to float32.
    assert (scale.double() >= wanted * (1 - 2.0**-24)).all()
    assert ((below.double() < wanted * (1 + 2.0**-24)) | (below == 0)).all()


@kinds
def test_a_row_of_zeros_stays_zero(kind: Kind) -> None:
    payload, scale = quantise(torch.zeros(2, 3, 64), kind)
    assert (scale == 2.0**-24).all()
    assert (dequantise(payload, scale) == 0).all()


@kinds
def test_a_head_scale_saturates(kind: Kind) -> None:
    scale_K = torch.tensor([0.5, 2.0])
    x = torch.tensor([-3e38, 1e9, 1.0, -0.0]).expand(5, 2, 4)
    payload, same = quantise(x, kind, scale_K)
    assert same is scale_K
    values = dequantise(payload, scale_K)
    assert torch.equal(values[..., 0], -QMAX[kind] * scale_K.expand(5, 2))
    assert torch.equal(values[..., 1], QMAX[kind] * scale_K.expand(5, 2))


@kinds
def test_quantising_what_was_dequantised_changes_nothing(kind: Kind) -> None:
    payload, scale = quantise(torch.randn(50, 3, 64), kind)
    again, _ = quantise(dequantise(payload, scale), kind, scale)
    assert torch.equal(payload.view(torch.uint8), again.view(torch.uint8))


def test_a_byte_of_int4_holds_elements_half_a_head_apart() -> None:
    x = torch.tensor([[1.0, -7.0, 3.0, 7.0]])
    payload, scale = quantise(x, "int4")
    assert scale.item() == 1.0
    assert payload.tolist() == [[(3 + 8) << 4 | (1 + 8), (7 + 8) << 4 | (-7 + 8)]]


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="head dim 5"):
        quantise(torch.zeros(1, 1, 5), "int4")
    with pytest.raises(ValueError, match="float32"):
        dequantise(torch.zeros(1, 1, 4), torch.ones(1, 1))
