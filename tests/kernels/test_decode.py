"""Laws of the decode kernel, over slots of unquantised rows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.cases import LENGTHS, NAN, Case, assert_right, make_case
from tests.kernels.memories import FORMATS
from vmmkv.kernels import checks, reference
from vmmkv.kernels.attention.decode import Tiling, decode, launches_of, tiling, workspace_elements
from vmmkv.kernels.quantise import Kind

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}

Cut = Callable[..., Tiling]


@pytest.fixture
def cut_like(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Tiles of 16 rows in small chunks, so that short sequences go through what long ones do."""

    def cut(**changes: int) -> Tiling:
        small = {"tile_rows": 16, "chunk_tiles": 4, "short_tiles": 4, "max_chunks": 4}
        cut = dataclasses.replace(tiling(4, 2, 64, 2, 128), **(small | changes))
        monkeypatch.setattr("vmmkv.kernels.attention.decode.tiling", lambda *shape: cut)
        return cut

    return cut


@pytest.fixture
def set_lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many programs for each kv head."""
    return lambda num_lanes: monkeypatch.setattr("vmmkv.kernels.attention.decode._num_lanes", lambda *_: num_lanes)


@pytest.fixture
def by_pointers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, tiles are loaded as on a GPU without a tensor memory accelerator."""
    return lambda: monkeypatch.setattr(checks, "has_tma", lambda device: False)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (4, 2, 64, torch.float16),
        (9, 3, 64, torch.float16),
        (3, 1, 80, torch.float16),
        (2, 1, 96, torch.float16),
        (4, 2, 128, torch.float16),
        (3, 1, 256, torch.float16),
        (2, 2, 64, torch.float32),
        (3, 1, 80, torch.float32),
        (2, 1, 256, torch.float32),
    ],
)
def test_decode_is_right_at_every_shape_and_length(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(LENGTHS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    out = case.poisoned_out()
    assert case.decode(out=out) is out
    assert_right(out, case)


@pytest.mark.parametrize("group", [*range(1, 17), 17, 64])
def test_any_number_of_query_heads_shares_a_kv_head(group: int, device: torch.device) -> None:
    case = make_case([130], heads=group, kv_heads=1, head_dim=16, dtype=torch.float16, device=device)
    assert_right(case.decode(out=case.poisoned_out()), case)


@pytest.mark.parametrize("window", [1, 63, 300, 5000])
def test_a_window_reads_nothing_before_it(window: int, by_pointers: Callable[[], None], device: torch.device) -> None:
    case = make_case([0, 1, 63, 64, 65, 500], window=window, device=device, **{**SMALL, "heads": 2})
    out = case.decode(window=window, out=case.poisoned_out())
    assert_right(out, case, window=window)
    by_pointers()
    assert torch.equal(case.decode(window=window), out)


def test_a_window_reads_nothing_before_it_at_a_limit_either(device: torch.device) -> None:
    # Past its limit a sequence has few rows left in its window, and what comes out of them is dropped; but they are read.
    case = make_case([200], window=100, device=device, **SMALL)
    limit_S = torch.full((case.num_slots,), 110, dtype=torch.int32, device=device)
    assert case.decode(window=100, limit_S=limit_S, out=case.poisoned_out()).isfinite().all()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_before_the_first_are_not_attended_to(
    index: torch.dtype, window: int | None, cut_like: Cut, by_pointers: Callable[[], None], device: torch.device
) -> None:
    cut_like()
    lengths, firsts = [300, 300, 130, 130, 64, 5, 5, 0, 300], [0, 170, 1, 129, 64, 9, 2**31 - 1, 3, -7]
    case = make_case(lengths, window=window, device=device, **SMALL)
    firsts_B = torch.tensor(firsts, dtype=index, device=device)
    starts = [
        min(max(first, length - window if window else 0, 0), length) for first, length in zip(firsts, lengths, strict=True)
    ]
    rows = [
        reference.decode(case.q_BHD[b : b + 1], *(view[slot : slot + 1, start:] for view in case.memory.values()),
                         case.lengths_B[b : b + 1] - start, case.slots_B[:1] * 0)
        for b, (slot, start) in enumerate(zip(case.slots_B.tolist(), starts, strict=True))
    ]  # fmt: skip
    out = case.decode(window=window, firsts_B=firsts_B, out=case.poisoned_out())
    torch.testing.assert_close(out.float(), torch.cat(rows), rtol=2e-3, atol=2e-3)
    by_pointers()
    for slot, start in zip(case.slots_B.tolist(), starts, strict=True):
        case.memory.k[slot, :start] = case.memory.v[slot, :start] = NAN
    assert torch.equal(case.decode(window=window, firsts_B=firsts_B), out)


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_two_parts_of_a_sequence_merge_by_their_log_sum_exp(
    num_lanes: int, cut_like: Cut, set_lanes: Callable[[int], None], device: torch.device
) -> None:
    cut_like()
    set_lanes(num_lanes)
    case = make_case([300, 77, 1, 16, 500], device=device, **SMALL)
    parts = []
    for lengths, firsts in (([100, 76, 1, 0, 444], [0] * 5), ([300, 77, 1, 16, 500], [100, 76, 1, 0, 444])):
        part = dataclasses.replace(case, lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device))
        lse_BH = torch.full((5, 4), NAN, device=device)
        out = part.decode(firsts_B=torch.tensor(firsts, dtype=torch.int32, device=device), lse_BH=lse_BH)
        parts.append((out.float(), lse_BH))
    (out, lse_BH), (suffix, suffix_lse_BH) = parts
    assert lse_BH[3].eq(-float("inf")).all()
    assert suffix_lse_BH[2].eq(-float("inf")).all()
    weights_BH1 = torch.sigmoid((suffix_lse_BH - lse_BH) * math.log(2)).unsqueeze(2)
    merged = out * (1 - weights_BH1) + suffix * weights_BH1
    assert_right(merged.half(), case)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("kind", "scale"), FORMATS)
def test_the_log_sum_exp_is_that_of_the_scores(
    kind: Kind | None, scale: str, softcap: float | None, cut_like: Cut, device: torch.device
) -> None:
    cut_like()
    case = make_case([200, 0, 1, 40], kind=kind, scale=scale, device=device, **SMALL)
    lse_BH = torch.full((4, 4), NAN, device=device)
    assert torch.equal(case.decode(softcap=softcap, lse_BH=lse_BH), case.decode(softcap=softcap))
    k_SHTD = case.memory.values()[0].repeat_interleave(2, dim=2).transpose(1, 2)
    for b, (slot, length) in enumerate(zip(case.slots_B.tolist(), case.lengths_B.tolist(), strict=True)):
        scores_HT = torch.einsum("hd,htd->ht", case.q_BHD[b].float(), k_SHTD[slot, :, :length]) / 8
        scores_HT = softcap * torch.tanh(scores_HT / softcap) if softcap else scores_HT
        wanted_H = torch.logsumexp(scores_HT, 1) / math.log(2)
        torch.testing.assert_close(lse_BH[b], wanted_H, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("firsts_B", torch.zeros(2)),
        ("firsts_B", torch.zeros(3, dtype=torch.int32)),
        ("lse_BH", torch.zeros(2, 2)),
        ("lse_BH", torch.zeros(2, 4, dtype=torch.float16)),
        ("lse_BH", torch.zeros(4, 2).T),
        ("lse_BH", torch.zeros(2, 4, device="meta")),
    ],
)
def test_decode_refuses_wrong_firsts_and_log_sum_exps(name: str, wrong: torch.Tensor, device: torch.device) -> None:
    case = make_case([5, 6], device=device, **SMALL)
    with pytest.raises(ValueError, match=f"^{name} is "):
        case.decode(**{name: wrong if wrong.is_meta else wrong.to(device)})


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_scores_are_capped_softly(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case([1, 111, 300], device=device, **{**SMALL, "dtype": dtype})
    out = case.decode(softcap=softcap, scale=0.7)
    assert_right(out, case, softcap=softcap, scale=0.7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("scale", [300.0, 1e-6])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_an_extreme_score_gives_no_nan(softcap: float | None, scale: float, cut_like: Cut, device: torch.device) -> None:
    cut_like()
    case = make_case([1, 111], device=device, **{**SMALL, "dtype": torch.float32})
    assert case.decode(scale=scale, softcap=softcap).isfinite().all()


def test_a_peak_far_above_the_rest_is_kept_wherever_it_is(cut_like: Cut, device: torch.device) -> None:
    cut_like()
    case = make_case([300] * 6, heads=1, kv_heads=1, head_dim=64, dtype=torch.float32, device=device)
    slots, rows = case.slots_B.long(), torch.tensor([0, 15, 16, 150, 288, 299], device=device)
    case.memory.k[slots, rows] = case.q_BHD * 100
    torch.testing.assert_close(case.decode(), case.memory.v[slots, rows], rtol=1e-6, atol=1e-6)


def test_length_one_gives_its_value(device: torch.device) -> None:
    case = make_case([1], device=device, **SMALL)
    value_KD = case.memory.v[case.slots_B[0], 0]
    torch.testing.assert_close(case.decode()[0], value_KD.repeat_interleave(2, dim=0), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[128, 127], [129, 1], [1000, 33, 0, 257]])
@pytest.mark.parametrize("max_chunks", [1, 4])
def test_a_long_sequence_takes_larger_chunks(max_chunks: int, lengths: list[int], cut_like: Cut, device: torch.device) -> None:
    cut_like(max_chunks=max_chunks)
    case = make_case(lengths, device=device, **SMALL)
    assert_right(case.decode(), case)


@pytest.mark.parametrize(("num_rows", "max_chunks"), [(400, 4), (400, 64), (77, 4)])
@pytest.mark.parametrize("num_lanes", [1, 5])
def test_the_workspace_is_as_large_as_said(
    num_lanes: int, num_rows: int, max_chunks: int, cut_like: Cut, set_lanes: Callable[[int], None], device: torch.device
) -> None:
    cut_like(max_chunks=max_chunks)
    set_lanes(num_lanes)
    case = make_case([num_rows, 1, 77], num_rows=num_rows, device=device, **SMALL)
    needed = workspace_elements(case.q_BHD, case.memory.k)
    memory = torch.full((needed + 64,), NAN, device=device)
    out = case.decode(workspace=memory[:needed])
    assert_right(out, case)
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"at least {needed} contiguous"):
        case.decode(workspace=memory[: needed - 1])


def test_a_workspace_may_hold_anything(cut_like: Cut, device: torch.device) -> None:
    cut_like()
    case = make_case([300, 0, 77], device=device, **SMALL)
    workspace = torch.full((workspace_elements(case.q_BHD, case.memory.k),), NAN, device=device)
    expected = case.decode(workspace=workspace)
    assert_right(expected, case)
    assert torch.equal(case.decode(workspace=workspace), expected)


@pytest.mark.parametrize("lengths", [[500, 3, 0, 65], [33, 17, 16, 15, 1, 31, 64, 128], [0, 1300]])
def test_the_bits_do_not_depend_on_the_number_of_lanes(
    lengths: list[int], cut_like: Cut, set_lanes: Callable[[int], None], device: torch.device
) -> None:
    # Leaves grow at 32 and at 64 tiles, of which 1300 rows have 82.
    cut_like(chunk_tiles=8)
    case = make_case(lengths, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, device=device)
    set_lanes(1)
    expected = case.decode(out=case.poisoned_out())
    assert_right(expected, case)
    for num_lanes in (2, 3, 7, 16):
        set_lanes(num_lanes)
        assert torch.equal(case.decode(out=case.poisoned_out()), expected), f"{num_lanes} lanes"


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("num_lanes", [1, 5])
def test_a_sequence_rounds_the_same_in_any_batch_and_slot(
    num_lanes: int, window: int | None, cut_like: Cut, set_lanes: Callable[[int], None], device: torch.device
) -> None:
    cut_like()
    case = make_case([300, 3, 0, 65], heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, device=device)
    together = case.decode(window=window)
    set_lanes(num_lanes)
    for b in range(4):
        alone = case.only(b)
        assert torch.equal(alone.decode(window=window)[0], together[b])
        moved = in_slot(alone, case.num_slots - 1 - int(alone.slots_B))
        assert torch.equal(moved.decode(window=window)[0], together[b])


def in_slot(case: Case, slot: int) -> Case:
    """The one sequence of a case in another slot of a poisoned arena."""
    source = case.slots_B[0]
    bytes_STE = torch.full_like(case.memory.bytes_STE, 0xFF)
    bytes_STE[slot] = case.memory.bytes_STE[source]
    offset = case.memory.k.storage_offset(), case.memory.v.storage_offset()
    k, v = (
        bytes_STE.view(-1).view(view.dtype).as_strided(view.shape, view.stride(), start)
        for view, start in zip((case.memory.k, case.memory.v), offset, strict=True)
    )
    return dataclasses.replace(
        case,
        memory=dataclasses.replace(case.memory, bytes_STE=bytes_STE, k=k, v=v),
        slots_B=torch.full_like(case.slots_B, slot),
    )


@pytest.mark.parametrize("shape", [{}, {"head_dim": 80, "heads": 3, "kv_heads": 1}, {"dtype": torch.float32}])
def test_pointers_give_the_bits_of_descriptors(
    shape: dict[str, Any], by_pointers: Callable[[], None], device: torch.device
) -> None:
    case = make_case([0, 1, 15, 16, 17, 300], device=device, **{**SMALL, **shape})
    expected = case.decode(out=case.poisoned_out())
    by_pointers()
    out = case.decode(out=case.poisoned_out())
    assert_right(out, case)
    assert torch.equal(out, expected)


def test_rows_at_and_past_the_limit_are_not_read(device: torch.device) -> None:
    case = make_case([40, 17, 100], device=device, **SMALL)
    limit_S = torch.full((case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]] = 40
    limit_S[case.slots_B[1]] = 0
    past = dataclasses.replace(case, lengths_B=torch.tensor([41, 17, 100], dtype=torch.int32, device=device))
    out = past.decode(limit_S=limit_S)
    expected = case.decode()
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[2], expected[2])


def test_what_lies_outside_the_arena_is_not_read(device: torch.device) -> None:
    case = make_case([50] * 4, num_rows=50, device=device, **SMALL)
    case.slots_B[0], case.slots_B[1] = -1, case.num_slots
    case.lengths_B[2], case.lengths_B[3] = -(2**31), 2**31 - 1
    out = case.decode(out=case.poisoned_out())
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    case.lengths_B[3] = 50
    assert torch.equal(out[3], case.decode()[3])


def test_an_arena_may_be_of_one_slot_one_row_and_one_head(device: torch.device) -> None:
    q_BHD = torch.ones(1, 1, 64, dtype=torch.float16, device=device)
    row_STKD = torch.ones(1, 1, 1, 64, dtype=torch.float16, device=device).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    one_B = torch.ones(1, dtype=torch.int32, device=device)
    assert torch.equal(decode(q_BHD, row_STKD, 2 * row_STKD, one_B, one_B - 1), 2 * q_BHD)


def test_indices_may_have_64_bits(device: torch.device) -> None:
    case = make_case([50, 0, 130], device=device, **SMALL)
    wide = dataclasses.replace(case, lengths_B=case.lengths_B.long(), slots_B=case.slots_B.long())
    assert torch.equal(wide.decode(window=129), case.decode(window=129))


def test_what_launches_are_given_is_worked_out_once_for_all_layers(cut_like: Cut, device: torch.device) -> None:
    cut_like(tile_rows=32)
    launches_of.cache_clear()
    for seed in range(3):
        case = make_case([40, 3], seed=seed, **SMALL, device=device)
        assert_right(case.decode(out=case.poisoned_out()), case)
    assert launches_of.cache_info().misses == 1
    case = make_case([40, 3, 7], **SMALL, device=device)
    assert_right(case.decode(out=case.poisoned_out()), case)
    assert launches_of.cache_info().misses == 2


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    case = make_case([5], device=device, **SMALL)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert decode(case.q_BHD[:0], case.memory.k, case.memory.v, none, none).shape == (0, 4, 64)
