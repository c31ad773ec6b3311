"""Laws of the decode kernel, over slots and blocks, plain and quantised."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.cases import FORMATS, LENGTHS, NAN, NO_BLOCK, POISON, Case, make_case, some
from vmmkv.kernels import reference
from vmmkv.kernels.attention.decode import Tiling, decode, launches_of, tiling, workspace_elements
from vmmkv.kernels.quantise import KINDS, Kind

SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}

Cut = Callable[..., Tiling]
SetSplits = Callable[[int], None]

kinds = pytest.mark.parametrize("kind", KINDS)
quantised = pytest.mark.parametrize(("kind", "scale"), some(FORMATS[1:2], FORMATS[2:]))


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
def set_splits(monkeypatch: pytest.MonkeyPatch) -> SetSplits:
    """So many programs for each kv head."""
    return lambda num_splits: monkeypatch.setattr("vmmkv.kernels.attention.decode.resident_splits", lambda *_: num_splits)


SHAPES = some(
    [(9, 3, 64, torch.float16), (3, 1, 80, torch.float16), (2, 1, 256, torch.float32)],
    [(4, 2, 64, torch.float16), (2, 1, 96, torch.float16), (4, 2, 128, torch.float16), (3, 1, 256, torch.float16),
     (2, 2, 64, torch.float32), (3, 1, 80, torch.float32)],
)  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), SHAPES)
def test_decode_is_right_at_every_shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = LENGTHS if (heads, kv_heads) == (9, 3) else (0, 1, 17, 129)
    case = make_case(lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    case.assert_right(case.attend())


@pytest.mark.parametrize("group", some([1, 7, 64], [*range(2, 7), *range(8, 18)]))
def test_any_number_of_query_heads_shares_a_kv_head(group: int, device: torch.device) -> None:
    case = make_case([130], heads=group, kv_heads=1, head_dim=16, dtype=torch.float16, device=device)
    case.assert_right(case.attend())


@pytest.mark.parametrize("window", some([63, 300], [1, 5000]))
def test_a_window_reads_nothing_before_it(window: int, by_pointers: Callable[[], None], device: torch.device) -> None:
    case = make_case([0, 1, 63, 64, 65, 400], window=window, device=device, **SMALL)
    out = case.attend(window=window)
    case.assert_right(out, window=window)
    by_pointers()
    assert torch.equal(case.attend(window=window), out)


def test_a_window_reads_nothing_before_it_at_a_limit_either(device: torch.device) -> None:
    # Past its limit a sequence has few rows left in its window. Their output is dropped, but they are read.
    case = make_case([200], window=100, device=device, **SMALL)
    limit_S = torch.full((case.num_slots,), 110, dtype=torch.int32, device=device)
    assert case.attend(window=100, limit_S=limit_S).isfinite().all()


@pytest.mark.parametrize(("index", "window"), [(torch.int32, None), (torch.int64, 40)])
def test_rows_before_the_first_are_not_attended_to(
    index: torch.dtype, window: int | None, cut_like: Cut, by_pointers: Callable[[], None], device: torch.device
) -> None:
    cut_like()
    lengths, firsts = [130, 100, 70, 70, 64, 5, 5, 0, 100], [0, 77, 1, 69, 64, 9, 2**31 - 1, 3, -7]
    case = make_case(lengths, window=window, device=device, **SMALL)
    firsts_B = torch.tensor(firsts, dtype=index, device=device)
    starts = [
        min(max(first, length - window if window else 0, 0), length) for first, length in zip(firsts, lengths, strict=True)
    ]
    rows = [
        reference.decode(case.q_NHD[b : b + 1], *(view[slot : slot + 1, start:] for view in case.memory.values()),
                         case.lengths_B[b : b + 1] - start, case.slots_B[:1] * 0)
        for b, (slot, start) in enumerate(zip(case.slots_B.tolist(), starts, strict=True))
    ]  # fmt: skip
    out = case.attend(window=window, firsts_B=firsts_B)
    torch.testing.assert_close(out.float(), torch.cat(rows), rtol=2e-3, atol=2e-3)
    by_pointers()
    for slot, start in zip(case.slots_B.tolist(), starts, strict=True):
        case.memory.k[slot, :start] = case.memory.v[slot, :start] = NAN
    assert torch.equal(case.attend(window=window, firsts_B=firsts_B), out)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_two_parts_of_a_sequence_merge_by_their_log_sum_exp(
    num_splits: int, cut_like: Cut, set_splits: SetSplits, device: torch.device
) -> None:
    cut_like()
    set_splits(num_splits)
    case = make_case([300, 77, 1, 16, 500], device=device, **SMALL)
    parts = []
    for lengths, firsts in (([100, 76, 1, 0, 444], [0] * 5), ([300, 77, 1, 16, 500], [100, 76, 1, 0, 444])):
        part = dataclasses.replace(case, lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device))
        lse_BH = torch.full((5, 2), NAN, device=device)
        out = part.attend(firsts_B=torch.tensor(firsts, dtype=torch.int32, device=device), lse_BH=lse_BH)
        parts.append((out.float(), lse_BH))
    (out, lse_BH), (suffix, suffix_lse_BH) = parts
    assert lse_BH[3].eq(-float("inf")).all()
    assert suffix_lse_BH[2].eq(-float("inf")).all()
    weights_BH1 = torch.sigmoid((suffix_lse_BH - lse_BH) * math.log(2)).unsqueeze(2)
    merged = out * (1 - weights_BH1) + suffix * weights_BH1
    case.assert_right(merged.half())


@pytest.mark.parametrize(("kind", "scale", "softcap"), [("int4", "token", 3.0), ("fp8", "head", None), (None, "", 3.0)])
def test_the_log_sum_exp_is_that_of_the_scores(
    kind: Kind | None, scale: str, softcap: float | None, cut_like: Cut, device: torch.device
) -> None:
    cut_like()
    case = make_case([200, 0, 1, 40], kind=kind, scale=scale, device=device, **SMALL)
    lse_BH = torch.full((4, 2), NAN, device=device)
    assert torch.equal(case.attend(softcap=softcap, lse_BH=lse_BH), case.attend(softcap=softcap))
    k_SHTD = case.memory.values()[0].repeat_interleave(2, dim=2).transpose(1, 2)
    for b, (slot, length) in enumerate(zip(case.slots_B.tolist(), case.lengths_B.tolist(), strict=True)):
        scores_HT = torch.einsum("hd,htd->ht", case.q_NHD[b].float(), k_SHTD[slot, :, :length]) / 8
        scores_HT = softcap * torch.tanh(scores_HT / softcap) if softcap else scores_HT
        wanted_H = torch.logsumexp(scores_HT, 1) / math.log(2)
        torch.testing.assert_close(lse_BH[b], wanted_H, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("softcap", "dtype"), some([(5.0, torch.float16)], [(0.5, torch.float16), (50.0, torch.float32)]))
def test_scores_are_capped_softly(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case([1, 111, 300], device=device, **{**SMALL, "dtype": dtype})
    case.assert_right(case.attend(softcap=softcap, scale=0.7), softcap=softcap, scale=0.7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize(("softcap", "scale"), [(None, 300.0), (30.0, 300.0), (None, 1e-6)])
def test_an_extreme_score_gives_no_nan(softcap: float | None, scale: float, cut_like: Cut, device: torch.device) -> None:
    cut_like()
    case = make_case([1, 111], device=device, **{**SMALL, "dtype": torch.float32})
    assert case.attend(scale=scale, softcap=softcap).isfinite().all()


def test_a_peak_far_above_the_rest_is_kept_wherever_it_is(cut_like: Cut, device: torch.device) -> None:
    cut_like()
    case = make_case([300] * 6, heads=1, kv_heads=1, head_dim=64, dtype=torch.float32, device=device)
    slots, rows = case.slots_B.long(), torch.tensor([0, 15, 16, 150, 288, 299], device=device)
    case.memory.k[slots, rows] = case.q_NHD * 100
    torch.testing.assert_close(case.attend(), case.memory.v[slots, rows], rtol=1e-6, atol=1e-6)


def test_length_one_gives_its_value(device: torch.device) -> None:
    case = make_case([1], device=device, **SMALL)
    value_KD = case.memory.v[case.slots_B[0], 0]
    torch.testing.assert_close(case.attend()[0], value_KD.repeat_interleave(2, dim=0), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lengths", "max_chunks"), some([([300, 33, 0], 4)], [([1000, 33, 0, 257], 4), ([128, 127], 1), ([129, 1], 4)])
)
def test_a_long_sequence_takes_larger_chunks(lengths: list[int], max_chunks: int, cut_like: Cut, device: torch.device) -> None:
    cut_like(max_chunks=max_chunks)
    case = make_case(lengths, device=device, **SMALL)
    case.assert_right(case.attend())


@pytest.mark.parametrize(("num_splits", "num_rows", "max_chunks"), some([(5, 200, 64)], [(1, 400, 4), (5, 400, 4), (1, 77, 4)]))
def test_the_workspace_is_as_large_as_said_and_may_hold_anything(
    num_splits: int, num_rows: int, max_chunks: int, cut_like: Cut, set_splits: SetSplits, device: torch.device
) -> None:
    cut_like(max_chunks=max_chunks)
    set_splits(num_splits)
    case = make_case([num_rows, 1, 77], num_rows=num_rows, device=device, **SMALL)
    needed = workspace_elements(case.q_NHD, case.memory.k)
    memory = torch.full((needed + 64,), NAN, device=device)
    out = case.attend(workspace=memory[:needed])
    case.assert_right(out)
    assert torch.equal(case.attend(workspace=memory[:needed]), out)
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"at least {needed} contiguous"):
        case.attend(workspace=memory[: needed - 1])


@pytest.mark.parametrize("lengths", some([[500, 3, 0, 65]], [[0, 1300], [33, 17, 16, 15, 1, 31, 64, 128]]))
def test_the_bits_do_not_depend_on_the_number_of_splits(
    lengths: list[int], cut_like: Cut, set_splits: SetSplits, device: torch.device
) -> None:
    # Leaves grow at 32 and at 64 tiles, of which 1300 rows have 82.
    cut_like(chunk_tiles=8)
    case = make_case(lengths, device=device, **SMALL)
    set_splits(1)
    expected = case.attend()
    case.assert_right(expected)
    for num_splits in (3, 16):
        set_splits(num_splits)
        assert torch.equal(case.attend(), expected), f"{num_splits} splits"


@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (5, 90)])
def test_a_sequence_rounds_the_same_in_any_batch_and_slot(
    num_splits: int, window: int | None, cut_like: Cut, set_splits: SetSplits, device: torch.device
) -> None:
    cut_like()
    case = make_case([200, 3, 0, 65], device=device, **SMALL)
    together = case.attend(window=window)
    set_splits(num_splits)
    for b in range(4):
        alone = case.only(b)
        assert torch.equal(alone.attend(window=window)[0], together[b])
        moved = in_slot(alone, case.num_slots - 1 - int(alone.slots_B))
        assert torch.equal(moved.attend(window=window)[0], together[b])


def in_slot(case: Case, slot: int) -> Case:
    """The one sequence of a case in another slot of a poisoned arena."""
    source = case.slots_B[0]
    bytes_STE = torch.full_like(case.memory.bytes_STE, POISON)
    bytes_STE[slot] = case.memory.bytes_STE[source]
    offset = case.memory.k.storage_offset(), case.memory.v.storage_offset()
    k, v = (
        bytes_STE.view(-1).view(view.dtype).as_strided(view.shape, view.stride(), start)
        for view, start in zip((case.memory.k, case.memory.v), offset, strict=True)
    )
    memory = dataclasses.replace(case.memory, bytes_STE=bytes_STE, k=k, v=v)
    return dataclasses.replace(case, memory=memory, slots_B=torch.full_like(case.slots_B, slot))


@pytest.mark.parametrize(
    ("changes", "kind"),
    some([({}, None), ({"head_dim": 80}, "int4")], [({"dtype": torch.float32}, None), ({}, "int8"), ({}, "fp8")]),
)
def test_pointers_give_the_bits_of_descriptors(
    changes: dict[str, Any], kind: Kind | None, by_pointers: Callable[[], None], device: torch.device
) -> None:
    case = make_case([0, 1, 15, 16, 17, 300], kind=kind, device=device, **{**SMALL, **changes})
    expected = case.attend()
    by_pointers()
    out = case.attend()
    case.assert_right(out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("kind", "scale"), some([(None, ""), ("int4", "token")], FORMATS[1:4]))
def test_rows_at_and_past_the_limit_are_not_read(kind: Kind | None, scale: str, device: torch.device) -> None:
    case = make_case([40, 17, 100], kind=kind, scale=scale, device=device, **SMALL)
    limit_S = torch.full((case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]], limit_S[case.slots_B[1]] = 40, 0
    expected = case.attend()
    case.lengths_B[0] = 90
    out = case.attend(limit_S=limit_S)
    assert torch.equal(out[::2], expected[::2])
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_nothing_outside_the_arena_is_read(device: torch.device) -> None:
    case = make_case([48] * 4, num_rows=48, device=device, **SMALL)
    case.slots_B[0], case.slots_B[1] = -1, case.num_slots
    case.lengths_B[2], case.lengths_B[3] = -(2**31), 2**31 - 1
    blocks, tables_SC = case.memory.in_blocks(16)
    out = case.attend()
    rest = (case.lengths_B, case.slots_B)
    assert torch.equal(decode(case.q_NHD, blocks.k, blocks.v, *rest, tables_SC=tables_SC), out)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    case.lengths_B[3] = 48
    assert torch.equal(out[3], case.attend()[3])


def test_an_arena_may_be_of_one_slot_one_row_and_one_head(device: torch.device) -> None:
    q_BHD = torch.ones(1, 1, 64, dtype=torch.float16, device=device)
    row_STKD = torch.ones(1, 1, 1, 64, dtype=torch.float16, device=device).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    one_B = torch.ones(1, dtype=torch.int32, device=device)
    assert torch.equal(decode(q_BHD, row_STKD, 2 * row_STKD, one_B, one_B - 1), 2 * q_BHD)


def test_slots_may_lie_anywhere(device: torch.device) -> None:
    """The same rows in an arena of other strides give the same bits."""
    case = make_case([100, 33], num_rows=112, device=device, **SMALL)
    wide = torch.full((case.num_slots, 128, 3, 4, 64), NAN, dtype=torch.float16, device=device)
    k, v = wide[:, :112, 0, :2], wide[:, :112, 2, 1:3]
    k.copy_(case.memory.k)
    v.copy_(case.memory.v)
    moved = dataclasses.replace(case, memory=dataclasses.replace(case.memory, k=k, v=v))
    assert torch.equal(moved.attend(), case.attend())


def test_indices_may_have_64_bits(device: torch.device) -> None:
    case = make_case([50, 0, 130], device=device, **SMALL)
    wide = dataclasses.replace(case, lengths_B=case.lengths_B.long(), slots_B=case.slots_B.long())
    assert torch.equal(wide.attend(window=129), case.attend(window=129))


def test_launch_constants_are_worked_out_once_for_all_layers(cut_like: Cut, device: torch.device) -> None:
    cut_like(tile_rows=32)
    launches_of.cache_clear()
    for seed in range(3):
        case = make_case([40, 3], seed=seed, **SMALL, device=device)
        case.assert_right(case.attend())
    assert launches_of.cache_info().misses == 1
    make_case([40, 3, 7], **SMALL, device=device).attend()
    assert launches_of.cache_info().misses == 2


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    case = make_case([5], device=device, **SMALL)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert decode(case.q_NHD[:0], case.memory.k, case.memory.v, none, none).shape == (0, 2, 64)


# Blocks


@pytest.mark.parametrize(("block", "window"), some([(5, None), (16, 30)], [(1, 30), (64, None), (128, 30)]))
def test_blocks_give_the_bits_of_slots(block: int, window: int | None, device: torch.device) -> None:
    case = make_case([0, 1, 17, 64, 300], window=window, device=device, **SMALL)
    out = case.attend_in_blocks(block, window=window)
    assert torch.equal(out, case.attend(window=window))
    case.assert_right(out, window=window)


@quantised
def test_quantised_blocks_give_the_bits_of_slots(kind: Kind, scale: str, device: torch.device) -> None:
    case = make_case([0, 17, 200], kind=kind, scale=scale, device=device, **SMALL)
    assert torch.equal(case.attend_in_blocks(5), case.attend())


def test_no_table_entry_at_or_past_the_limit_is_read(device: torch.device) -> None:
    case = make_case([64, 40, 100], device=device, **SMALL)
    expected = case.attend()
    limit_S = torch.full((case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]], limit_S[case.slots_B[1]] = 64, 0
    blocks, tables_SC = case.memory.in_blocks(7)
    tables_SC[case.slots_B[0], -(-64 // 7) :] = NO_BLOCK
    tables_SC[case.slots_B[1]] = NO_BLOCK
    lengths_B = torch.tensor([90, 40, 100], dtype=torch.int32, device=device)
    out = decode(case.q_NHD, blocks.k, blocks.v, lengths_B, case.slots_B, tables_SC=tables_SC, limit_S=limit_S)
    assert torch.equal(out[::2], expected[::2])
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_a_table_may_be_part_of_a_wider_one_and_two_slots_may_share_blocks(device: torch.device) -> None:
    case = make_case([40, 40], device=device, **SMALL)
    blocks, tables_SC = case.memory.in_blocks(16)
    tables_SC[case.slots_B[1]] = tables_SC[case.slots_B[0]]
    wide_SC = torch.full((case.num_slots, tables_SC.shape[1] + 3), NO_BLOCK, dtype=torch.int32, device=device)
    part_SC = wide_SC[:, 2:-1]
    part_SC.copy_(tables_SC)
    q_BHD = case.q_NHD[:1].expand(2, -1, -1).contiguous()
    needed = workspace_elements(q_BHD, blocks.k, tables_SC=part_SC)
    memory = torch.full((needed + 64,), NAN, device=device)
    rest = (case.lengths_B, case.slots_B)
    out = decode(q_BHD, blocks.k, blocks.v, *rest, tables_SC=part_SC, workspace=memory[:needed])
    assert torch.equal(out[0], case.attend()[0])
    assert torch.equal(out[1], out[0])
    assert memory[needed:].isnan().all()


# Quantised rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "kind", "scale"),
    [
        *((2, 1, 64, torch.float16, kind, scale) for kind, scale in FORMATS[1:]),
        *some(
            [(3, 1, 80, torch.float32, "int4", "token")],
            [(3, 1, 80, torch.float16, kind, "token") for kind in KINDS]
            + [(2, 1, 256, torch.float16, "fp8", "head"), (2, 2, 96, torch.float32, "int8", "token")],
        ),
    ],
)
def test_quantised_rows_are_dequantised_exactly(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind, scale: str, device: torch.device
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case([0, 1, 17, 200], kind=kind, scale=scale, device=device, **shape)
    case.assert_right(case.attend())


@kinds
def test_every_byte_is_read_as_it_is_written(kind: Kind, device: torch.device) -> None:
    """256 rows of each byte but the NaN of fp8, each row with a scale of its own."""
    case = make_case([256], num_rows=256, kind=kind, device=device, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    bytes_TW = (torch.arange(256)[:, None] + 37 * torch.arange(memory.k.shape[3])).to(torch.uint8)
    if kind == "fp8":
        bytes_TW[(bytes_TW & 0x7F) == 0x7F] = 0
    elif kind == "int8":
        bytes_TW[bytes_TW == 0x80] = 0
    for view, name in ((memory.k, "k_scale"), (memory.v, "v_scale")):
        view.view(torch.uint8)[slot, :, 0] = bytes_TW.to(device)
        memory.scales[name][slot, :, 0] = (torch.rand(256, generator=torch.Generator().manual_seed(3)) / 100).half().to(device)
    case.assert_right(case.attend())


@pytest.mark.parametrize(("kind", "exponent"), some([("int8", -24), ("fp8", 6)], [("int4", -14), ("fp8", -24)]))
def test_a_scale_may_be_as_small_or_large_as_float16_is(kind: Kind, exponent: int, device: torch.device) -> None:
    # Weights times the smallest leave the range of float16, in which V is multiplied.
    case = make_case([200], kind=kind, device=device, **SMALL)
    case.memory.scales["v_scale"][case.slots_B.long()] = 2.0**exponent
    case.assert_right(case.attend(scale=0.01), scale=0.01)


@quantised
def test_a_window_over_quantised_rows_reads_nothing_before_it(kind: Kind, scale: str, device: torch.device) -> None:
    case = make_case([1, 63, 64, 300], window=63, kind=kind, scale=scale, device=device, **SMALL)
    case.assert_right(case.attend(window=63), window=63)


@kinds
def test_the_bits_do_not_depend_on_unread_bytes(kind: Kind, device: torch.device) -> None:
    case = make_case([50, 130], kind=kind, device=device, **SMALL)
    expected = case.attend()
    bytes_STE = case.memory.bytes_STE
    for slot, length in zip(case.slots_B.tolist(), case.lengths_B.tolist(), strict=True):
        assert (bytes_STE[slot, length:] == POISON).all()
        bytes_STE[slot, length:] = torch.randint(256, bytes_STE[slot, length:].shape, device=device).to(torch.uint8)
    assert torch.equal(case.attend(), expected)


@kinds
def test_a_row_of_zeros_adds_nothing_but_its_weight(kind: Kind, device: torch.device) -> None:
    case = make_case([1], kind=kind, device=device, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    memory.v.view(torch.uint8)[slot] = 0x88 if kind == "int4" else 0
    memory.scales["v_scale"][slot] = 2.0**-24
    assert torch.equal(case.attend(), torch.zeros_like(case.q_NHD))
    memory.scales["v_scale"][slot] = NAN
    assert case.attend().isnan().all()
