"""Laws of the decode kernel, over slots and blocks, plain and quantised."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.kernels.cases import DEVICE, FORMATS, FP16, FP32, NAN, NO_BLOCK, SMALL, Case, index, make_case, some
from vmmkv_kernels.attention.decode import decode, launches_of, workspace_elements
from vmmkv_kernels.quantise import KINDS, Kind

Cut = Callable[..., None]
SetSplits = Callable[[int], None]

kinds = pytest.mark.parametrize("kind", KINDS)


def test_a_window_reads_nothing_before_it_at_a_limit_either() -> None:
    # Past its limit a sequence has few rows left in its window. Their output is dropped, but they are read.
    case = make_case([200], window=100, **SMALL)
    assert case.attend(window=100, limit_S=case.limits(110)).isfinite().all()


def test_a_peak_far_above_the_rest_is_kept_wherever_it_is(cut_decode: Cut) -> None:
    cut_decode()
    case = make_case([300] * 6, heads=1, kv_heads=1, head_dim=64, dtype=FP32)
    slots, rows = case.slots_B.long(), torch.tensor([0, 15, 16, 150, 288, 299], device=DEVICE)
    case.memory.k[slots, rows] = case.q_NHD * 100
    torch.testing.assert_close(case.attend(), case.memory.v[slots, rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "num_splits", "max_chunks"),
    some([([200, 1, 77], 5, 64), ([300, 33, 0], 4, 4)],
         [([1000, 33, 0, 257], 4, 4), ([128, 127], 4, 1), ([400, 1, 77], 1, 4), ([77, 1, 77], 1, 4)]),
)  # fmt: skip
def test_a_workspace_of_the_size_said_is_enough_whatever_it_holds(
    lengths: list[int], num_splits: int, max_chunks: int, cut_decode: Cut, set_splits: SetSplits
) -> None:
    """A long sequence takes larger chunks, which bounds the size."""
    cut_decode(max_chunks=max_chunks)
    set_splits(num_splits)
    case = make_case(lengths, num_rows=max(lengths), **SMALL)
    needed = workspace_elements(case.q_NHD, case.memory.k)
    memory = torch.full((needed + 64,), NAN, device=DEVICE)
    out = case.attend(workspace=memory[:needed])
    case.assert_right(out)
    assert torch.equal(case.attend(workspace=memory[:needed]), out)
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"at least {needed} contiguous"):
        case.attend(workspace=memory[: needed - 1])


@pytest.mark.parametrize("lengths", some([[500, 3, 0, 65]], [[0, 1300], [33, 17, 16, 15, 1, 31, 64, 128]]))
def test_the_bits_do_not_depend_on_the_number_of_splits(lengths: list[int], cut_decode: Cut, set_splits: SetSplits) -> None:
    # Leaves grow at 32 and at 64 tiles, of which 1300 rows have 82.
    cut_decode(chunk_tiles=8)
    case = make_case(lengths, **SMALL)
    set_splits(1)
    expected = case.attend()
    case.assert_right(expected)
    for num_splits in (3, 16):
        set_splits(num_splits)
        assert torch.equal(case.attend(), expected), f"{num_splits} splits"


@pytest.mark.parametrize(("num_splits", "window"), some([(5, 90)], [(1, None)]))
def test_a_sequence_rounds_the_same_in_any_batch_and_slot(
    num_splits: int, window: int | None, cut_decode: Cut, set_splits: SetSplits
) -> None:
    cut_decode()
    case = make_case([200, 3, 0, 65], **SMALL)
    together = case.attend(window=window)
    set_splits(num_splits)
    for b in range(4):
        alone = case.only(b)
        assert torch.equal(alone.attend(window=window)[0], together[b])
        moved = in_slot(alone, case.num_slots - 1 - int(alone.slots_B))
        assert torch.equal(moved.attend(window=window)[0], together[b])


@pytest.mark.parametrize(("kind", "scale"), some([(None, "")], FORMATS[1:]))
def test_blocks_of_whole_tiles_are_right_and_round_the_same_on_any_splits(
    kind: Kind | None, scale: str, cut_decode: Cut, set_splits: SetSplits, by_pointers: Callable[[], None]
) -> None:
    cut_decode()
    case = make_case([200, 3, 0, 65, 128], kind=kind, scale=scale, **SMALL)
    set_splits(1)
    out = case.attend_in_blocks(128)
    case.assert_right(out)
    set_splits(5)
    assert torch.equal(case.attend_in_blocks(128), out)
    by_pointers()
    assert torch.equal(case.attend_in_blocks(128)[4], out[4]), "without rows behind the sequence tiles are those of slots"


def in_slot(case: Case, slot: int) -> Case:
    """The one sequence of a case in another slot of a poisoned arena, whose slots lie further apart."""
    old = case.memory
    wide = torch.full((case.num_slots, old.k.shape[1] + 16, 3, 4, 64), NAN, dtype=FP16, device=DEVICE)
    k, v = wide[:, : old.k.shape[1], 0, :1], wide[:, : old.k.shape[1], 2, 1:2]
    k[slot], v[slot] = old.k[case.slots_B[0]], old.v[case.slots_B[0]]
    return dataclasses.replace(case, memory=dataclasses.replace(old, k=k, v=v), slots_B=torch.full_like(case.slots_B, slot))


@pytest.mark.parametrize(("kind", "scale"), some([(None, ""), ("int4", "token")], FORMATS[1:4]))
def test_no_row_or_table_entry_at_or_past_the_limit_is_read(kind: Kind | None, scale: str) -> None:
    case = make_case([40, 17, 100], kind=kind, scale=scale, **SMALL)
    expected, limit_S = case.attend(), case.limits(1000, 40, 0)
    case.lengths_B[0] = 90
    for out in (case.attend(limit_S=limit_S), case.attend_in_blocks(7, limit_S=limit_S)):
        assert torch.equal(out[::2], expected[::2])
        assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_nothing_outside_the_arena_is_read() -> None:
    case = make_case([48] * 4, num_rows=48, **SMALL)
    case.slots_B[0], case.slots_B[1] = -1, case.num_slots
    case.lengths_B[2], case.lengths_B[3] = -(2**31), 2**31 - 1
    blocks, tables_SC = case.memory.in_blocks(16)
    out = case.attend()
    rest = (case.lengths_B, case.slots_B)
    assert torch.equal(decode(case.q_NHD, blocks.k, blocks.v, *rest, tables_SC=tables_SC), out)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    case.lengths_B[3] = 48
    assert torch.equal(out[3], case.attend()[3])


def test_an_arena_may_be_of_one_slot_one_row_and_one_head() -> None:
    q_BHD = torch.ones(1, 1, 64, dtype=FP16, device=DEVICE)
    row_STKD = torch.ones(1, 1, 1, 64, dtype=FP16, device=DEVICE).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert torch.equal(decode(q_BHD, row_STKD, 2 * row_STKD, index(1), index(0)), 2 * q_BHD)
    fp8_STKD, scales = row_STKD.to(torch.float8_e4m3fn).as_strided((1, 1, 1, 64), (3, 5, 7, 1)), row_STKD[..., 0]
    out_BHD = decode(q_BHD, fp8_STKD, fp8_STKD, index(1), index(0), k_scale=scales, v_scale=2 * scales)
    assert torch.equal(out_BHD, 2 * q_BHD)


def test_launch_constants_are_worked_out_once_for_all_layers(cut_decode: Cut) -> None:
    cut_decode(tile_rows=32)
    launches_of.cache_clear()
    for seed in range(3):
        make_case([40, 3], seed=seed, **SMALL).attend()
    assert launches_of.cache_info().misses == 1
    make_case([40, 3, 7], **SMALL).attend()
    assert launches_of.cache_info().misses == 2


def test_a_table_may_be_part_of_a_wider_one_and_two_slots_may_share_blocks() -> None:
    case = make_case([40, 40], **SMALL)
    blocks, tables_SC = case.memory.in_blocks(16)
    tables_SC[case.slots_B[1]] = tables_SC[case.slots_B[0]]
    wide_SC = torch.full((case.num_slots, tables_SC.shape[1] + 3), NO_BLOCK, dtype=torch.int32, device=DEVICE)
    part_SC = wide_SC[:, 2:-1]
    part_SC.copy_(tables_SC)
    q_BHD = case.q_NHD[:1].expand(2, -1, -1).contiguous()
    needed = workspace_elements(q_BHD, blocks.k, tables_SC=part_SC)
    memory = torch.full((needed + 64,), NAN, device=DEVICE)
    rest = (case.lengths_B, case.slots_B)
    out = decode(q_BHD, blocks.k, blocks.v, *rest, tables_SC=part_SC, workspace=memory[:needed])
    assert torch.equal(out[0], case.attend()[0])
    assert torch.equal(out[1], out[0])
    assert memory[needed:].isnan().all()


@kinds
def test_every_byte_is_read_as_it_is_written(kind: Kind) -> None:
    """256 rows of each byte but the NaN of fp8, each row with a scale of its own."""
    case = make_case([256], num_rows=256, kind=kind, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    bytes_TW = (torch.arange(256)[:, None] + 37 * torch.arange(memory.k.shape[3])).to(torch.uint8)
    if kind == "fp8":
        bytes_TW[(bytes_TW & 0x7F) == 0x7F] = 0
    elif kind == "int8":
        bytes_TW[bytes_TW == 0x80] = 0
    for view, name in ((memory.k, "k_scale"), (memory.v, "v_scale")):
        view.view(torch.uint8)[slot, :, 0] = bytes_TW.to(DEVICE)
        memory.scales[name][slot, :, 0] = (torch.rand(256, generator=torch.Generator().manual_seed(3)) / 100).half().to(DEVICE)
    case.assert_right(case.attend())


@pytest.mark.parametrize(("kind", "exponent"), some([("int8", -24), ("fp8", 6)], [("int4", -14), ("fp8", -24)]))
def test_a_scale_may_be_as_small_or_large_as_float16_is(kind: Kind, exponent: int) -> None:
    # Weights times the smallest leave the range of float16, in which V is multiplied.
    case = make_case([200], kind=kind, **SMALL)
    case.memory.scales["v_scale"][case.slots_B.long()] = 2.0**exponent
    case.assert_right(case.attend(scale=0.01), scale=0.01)


@kinds
def test_a_row_of_zeros_adds_nothing_but_its_weight(kind: Kind) -> None:
    case = make_case([1], kind=kind, **SMALL)
    memory, slot = case.memory, case.slots_B.long()
    memory.v.view(torch.uint8)[slot] = 0x88 if kind == "int4" else 0
    memory.scales["v_scale"][slot] = 2.0**-24
    assert torch.equal(case.attend(), torch.zeros_like(case.q_NHD))
    memory.scales["v_scale"][slot] = NAN
    assert case.attend().isnan().all()
