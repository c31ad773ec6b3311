"""Laws of the decode kernel."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.cases import LENGTHS, NAN, assert_right, make_case
from vmmkv.kernels.decode import decode, workspace_elements
from vmmkv.kernels.tiling import Tiling, tiling

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}


@pytest.fixture
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> Tiling:
    """Chunks of 32 rows and at most 4 of them, so that short sequences go through what long ones do."""
    cut = dataclasses.replace(tiling(4, 2, 64, 2), tile_rows=16, chunk_rows=32, max_chunks=4)
    monkeypatch.setattr("vmmkv.kernels.decode.tiling", lambda *shape: cut)
    return cut


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 64), (3, 3, 64), (9, 3, 64), (3, 1, 80), (16, 1, 96), (8, 2, 128), (5, 1, 256), (17, 1, 16)],
)
def test_decode_is_right_at_every_shape_and_length(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = LENGTHS if heads < 16 else LENGTHS[:6]
    case = make_case(lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    out = case.poisoned_out()
    assert decode(*case.arguments, out=out) is out
    assert_right(out, case)


@pytest.mark.parametrize("window", [1, 16, 63, 300, 5000])
def test_a_window_reads_nothing_before_it(window: int, device: torch.device) -> None:
    case = make_case([0, 1, 63, 64, 65, 700], window=window, device=device, **SMALL)
    out = decode(*case.arguments, window=window)
    assert_right(out, case, window=window)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_scores_are_capped_softly(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case([1, 111, 300], device=device, **{**SMALL, "dtype": dtype})
    out = decode(*case.arguments, softcap=softcap, scale=0.7)
    assert_right(out, case, softcap=softcap, scale=0.7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_an_extreme_score_gives_no_nan(softcap: float | None, device: torch.device) -> None:
    case = make_case([1, 111], device=device, **{**SMALL, "dtype": torch.float32})
    assert decode(*case.arguments, scale=300.0, softcap=softcap).isfinite().all()


def test_length_one_gives_its_value(device: torch.device) -> None:
    case = make_case([1], device=device, **SMALL)
    value_KD = case.v_STKD[case.slots_B[0], 0]
    torch.testing.assert_close(decode(*case.arguments)[0], value_KD.repeat_interleave(2, dim=0), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[128, 127], [129, 1], [1000, 33, 0, 257]])
def test_a_long_sequence_takes_larger_chunks(lengths: list[int], few_chunks: Tiling, device: torch.device) -> None:
    case = make_case(lengths, device=device, **SMALL)
    assert_right(decode(*case.arguments), case)


def test_the_workspace_is_as_large_as_said(few_chunks: Tiling, device: torch.device) -> None:
    case = make_case([1000, 1, 77], device=device, **SMALL)
    needed = workspace_elements(3, 4, 2, 64, 2)
    assert needed == 3 * 4 * few_chunks.max_chunks * (64 + 1)
    memory = torch.full((needed + 64,), NAN, device=device)
    out = decode(*case.arguments, workspace=memory[:needed])
    assert_right(out, case)
    assert memory[needed:].isnan().all()


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_a_sequence_rounds_the_same_in_any_batch(
    programs: int, few_chunks: Tiling, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = make_case([500, 3, 0, 65], device=device, **SMALL)
    together = decode(*case.arguments)
    monkeypatch.setattr("vmmkv.kernels.decode._num_programs", lambda *_: programs)
    for b in range(4):
        assert torch.equal(decode(*case.only(b).arguments)[0], together[b])


def test_rows_at_and_past_the_limit_are_not_read(device: torch.device) -> None:
    case = make_case([40, 17, 100], device=device, **SMALL)
    limit_S = torch.full((case.k_STKD.shape[0],), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]] = 40
    limit_S[case.slots_B[1]] = 0
    lengths_B = torch.tensor([41, 17, 100], dtype=torch.int32, device=device)
    out = decode(case.q_BHD, case.k_STKD, case.v_STKD, lengths_B, case.slots_B, limit_S=limit_S)
    expected = decode(*case.arguments)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[2], expected[2])


def test_what_lies_outside_the_arena_is_not_read(device: torch.device) -> None:
    case = make_case([50] * 4, num_rows=50, device=device, **SMALL)
    case.slots_B[0], case.slots_B[1] = -1, case.k_STKD.shape[0]
    case.lengths_B[2], case.lengths_B[3] = -(2**31), 2**31 - 1
    out = decode(*case.arguments, out=case.poisoned_out())
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    case.lengths_B[3] = 50
    assert torch.equal(out[3], decode(*case.arguments)[3])


def test_indices_may_have_64_bits(device: torch.device) -> None:
    case = make_case([50, 0, 130], device=device, **SMALL)
    wide = dataclasses.replace(case, lengths_B=case.lengths_B.long(), slots_B=case.slots_B.long())
    assert torch.equal(decode(*wide.arguments, window=77), decode(*case.arguments, window=77))


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    case = make_case([5], device=device, **SMALL)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert decode(case.q_BHD[:0], case.k_STKD, case.v_STKD, none, none).shape == (0, 4, 64)
