"""Laws of cascade attention: the result of decode, for every grouping, over slots and blocks."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.cases import (
    DEVICE,
    FINITE_POISON,
    FORMATS,
    FP16,
    FP32,
    NAN,
    NO_BLOCK,
    SMALL,
    Case,
    assert_close,
    index,
    make_case,
    some,
)
from vmmkv_kernels import reference
from vmmkv_kernels.attention.cascade import cascade, firsts_of, workspace_elements
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.quantise import Kind

NAMES = ("q_BHD", "k_STKW", "v_STKW", "lengths_B", "slots_B", "group_starts_G1", "leaders_G", "prefix_rows_G")
Cut = Callable[..., None]


class Group(NamedTuple):
    """So many sequences of the batch, which share so many rows."""

    count: int
    rows: int
    leader: int | None = 0
    """Which of them, or a slot that none of them has."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A decode problem and its groups. Rows of a prefix are poison everywhere but in the leader's slot."""

    case: Case
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    truth: torch.Tensor
    peer: torch.Tensor

    def cascade(self, **options: Any) -> torch.Tensor:
        """By the kernels, into poison."""
        out = self.case.poisoned_out()
        options = self.case.memory.scales | {"out": out} | options
        assert cascade(*self.case.arguments, *self.groups, **options) is options["out"]
        return options["out"]

    def cascade_in_blocks(self, block: int, **options: Any) -> torch.Tensor:
        """By the kernels, over the same rows in shuffled blocks."""
        return cascade(**self.in_blocks(block), **{"out": self.case.poisoned_out(), **options})

    def in_blocks(self, block: int) -> dict[str, torch.Tensor]:
        """Arguments of `cascade` over the same rows in shuffled blocks; table entries not to be read name no block."""
        case, (starts_G1, leaders_G, rows_G) = self.case, self.groups
        blocks, tables_SC = case.memory.in_blocks(block)
        is_read_ST = torch.zeros(case.num_slots, tables_SC.shape[1] * block, dtype=torch.bool)
        firsts_B = firsts_of(starts_G1, rows_G, case.lengths_B.shape[0])
        for slot, first, length in torch.stack([case.slots_B, firsts_B, case.lengths_B], 1).tolist():
            is_read_ST[slot, first:length] = True
        for start, end, leader, rows in torch.stack([starts_G1[:-1], starts_G1[1:], leaders_G, rows_G], 1).tolist():
            if start < end:
                is_read_ST[leader, :rows] = True
        tables_SC[~is_read_ST.unflatten(1, (-1, block)).any(2).to(tables_SC.device)] = NO_BLOCK
        arguments = (case.q_NHD, blocks.k, blocks.v, case.lengths_B, case.slots_B, *self.groups, tables_SC)
        return dict(zip((*NAMES, "tables_SC"), arguments, strict=True)) | blocks.scales

    def assert_right(self, out_BHD: torch.Tensor) -> None:
        """As decode is."""
        assert_close(out_BHD, self.truth, self.peer)


def share(
    lengths: Sequence[int], groups: Sequence[Group], *, poison: float = 1000.0, spare_groups: int = 3,
    shape: dict[str, Any] = SMALL, **options: Any,
) -> Shared:  # fmt: skip
    """The first sequences of the batch are the first group, and so on; those left over are in none."""
    case = make_case(lengths, **shape)
    slots, spare_slot = case.slots_B.tolist(), (set(range(case.num_slots)) - set(case.slots_B.tolist())).pop()
    starts = [0, *itertools.accumulate(group.count for group in groups)]
    leaders = []
    for start, group in zip(starts, groups, strict=False):
        leaders.append(spare_slot if group.leader is None else slots[min(start + group.leader, len(slots) - 1)])
        prefix_TE = case.memory.bytes_STE[slots[start], : group.rows].clone() if group.count else 0
        for slot in (*slots[start : start + group.count], leaders[-1]):
            case.memory.bytes_STE[slot, : group.rows] = prefix_TE
    arguments = (case.q_NHD, *case.memory.values(), case.lengths_B, case.slots_B)
    truth = reference.decode(*arguments, **options)
    peer = reference.decode(*arguments, **options, dtype=case.q_NHD.dtype)
    for start, group, leader in zip(starts, groups, leaders, strict=False):
        for slot in slots[start : start + group.count]:
            if slot != leader and "kind" in shape:
                case.memory.bytes_STE[slot, : group.rows] = FINITE_POISON
            elif slot != leader:
                case.memory.k[slot, : group.rows] = poison
                case.memory.v[slot, : group.rows] = poison
    starts += starts[-1:] * spare_groups
    leaders += [10**6] * spare_groups
    rows = [group.rows for group in groups] + [77] * spare_groups
    return Shared(case=case, groups=(index(*starts), index(*leaders), index(*rows)), truth=truth, peer=peer)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    some(
        [(9, 3, 64, FP16), (3, 1, 80, FP32), (3, 1, 256, FP16)],
        [(4, 2, 64, FP16), (3, 1, 80, FP16), (2, 1, 96, FP16), (4, 1, 128, FP16),
         (2, 2, 64, FP32), (64, 1, 16, FP16)],
    ),
)  # fmt: skip
def test_cascade_is_right_at_every_shape(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    shared = share([140, 66, 70, 75, 1], [Group(2, 64), Group(2, 70)], shape=shape)
    shared.assert_right(shared.cascade())


@pytest.mark.parametrize(
    ("kind", "scale", "head_dim", "dtype", "block"),
    some(
        [("fp8", "token", 64, FP16, 16), ("int8", "token", 80, FP32, 5), ("int4", "token", 96, FP16, 16),
         ("fp8", "head", 64, FP16, 5)],
        [(kind, scale, head_dim, dtype, 16) for kind, scale in FORMATS[1:] for head_dim, dtype in ((128, FP32), (256, FP16))],
    ),
)  # fmt: skip
def test_a_quantised_prefix_is_right_and_has_the_same_bits_in_blocks(
    kind: Kind, scale: str, head_dim: int, dtype: torch.dtype, block: int, cut_cascade: Cut
) -> None:
    cut_cascade(3)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype, "kind": kind, "scale": scale}
    shared = share(*GROUPINGS["led by the last"], shape=shape)
    out = shared.cascade()
    shared.assert_right(out)
    assert torch.equal(shared.cascade_in_blocks(block), out)


def test_the_tiling_of_quantised_rows_is_right() -> None:
    for kind, head_dim in (("int4", 64), ("fp8", 256)):
        shared = share([90, 70, 66, 64], [Group(4, 64)], shape=SMALL | {"kind": kind, "head_dim": head_dim})
        shared.assert_right(shared.cascade())


GROUPINGS = {
    "one": ([90, 70, 66, 64], [Group(4, 64)]),
    "one that ends in a tile": ([90, 70, 66, 51], [Group(4, 51)]),
    "less than a tile": ([9, 20, 7], [Group(3, 7)]),
    "several problems": ([60 + b for b in range(19)], [Group(19, 60)]),
    "several": ([100, 90, 80, 70, 60, 50, 40], [Group(2, 75), Group(3, 60), Group(2, 1)]),
    "some without": ([100, 90, 80, 70, 60, 0, 40], [Group(2, 75), Group(0, 9), Group(1, 0), Group(2, 33)]),
    "all alone": ([100, 3, 0], []),
    "led from elsewhere": ([100, 90, 80], [Group(3, 75, leader=None)]),
    "led by the last": ([100, 90, 80], [Group(3, 75, leader=2)]),
}


@pytest.mark.parametrize(
    ("num_splits", "name", "block"),
    some(
        [(1, "one that ends in a tile", 16), (5, "several problems", 16), (2, "some without", 5), (3, "all alone", 5),
         (3, "led from elsewhere", 16), (3, "led by the last", 5)],
        [(count, name, block) for name in GROUPINGS for count, block in ((1, 1), (2, 5), (3, 16), (5, 64), (16, 16))],
    ),
)  # fmt: skip
def test_any_grouping_is_right_and_has_the_same_bits_in_blocks_and_by_pointers(
    num_splits: int, name: str, block: int, cut_cascade: Cut, by_pointers: Callable[[], None]
) -> None:
    """In blocks and by pointers the sequences' own rows of a prefix are not even touched: there they are NaN."""
    cut_cascade(num_splits)
    expected = share(*GROUPINGS[name]).cascade()
    shared = share(*GROUPINGS[name], poison=NAN)
    shared.assert_right(expected)
    assert torch.equal(shared.cascade_in_blocks(block), expected)
    by_pointers()
    assert torch.equal(shared.cascade(), expected)


@pytest.mark.parametrize("changes", [{"least_tiles": 3}, {"merged_elements": 64}, {"merged_elements": 8192, "merged_parts": 7}])
def test_any_cut_is_right(changes: dict[str, int], cut_cascade: Cut) -> None:
    cut_cascade(4, **changes)
    shared = share(*GROUPINGS["led by the last"], shape=SMALL | {"heads": 3})
    shared.assert_right(shared.cascade())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of rows that are touched and masked
@pytest.mark.parametrize(("dtype", "options"), some([(FP16, {"softcap": 5.0, "scale": 0.7})], [(FP32, {"scale": 0.02})]))
def test_scores_are_scaled_and_capped(dtype: torch.dtype, options: dict[str, float], cut_cascade: Cut) -> None:
    cut_cascade(3)
    shared = share(*GROUPINGS["led by the last"], shape=SMALL | {"dtype": dtype}, **options)
    shared.assert_right(shared.cascade(**options))
    assert torch.equal(shared.cascade_in_blocks(16, **options), shared.cascade(**options))


@pytest.mark.parametrize("row", some([0, 63, 64], [15, 89]))
def test_a_peak_far_above_the_rest_is_kept_wherever_it_is(row: int, cut_cascade: Cut) -> None:
    cut_cascade(3)
    shared = share([90, 90], [Group(2, 64)], shape=SMALL | {"kv_heads": 2, "dtype": FP32})
    case = shared.case
    for b, slot in enumerate(case.slots_B.tolist() if row >= 64 else [int(shared.groups[1][0])]):
        case.memory.k[slot, row] = 100 * case.q_NHD[b]
        case.memory.v[slot, row] = 5.0
    out = shared.cascade() if row >= 64 else shared.cascade()[:1]
    torch.testing.assert_close(out, torch.full_like(out, 5.0))


def test_a_sequence_in_no_group_has_the_bits_of_decode() -> None:
    shared = share([150, 140, 130, 70, 0], [Group(2, 100), Group(1, 0)])
    assert torch.equal(shared.cascade()[2:], shared.case.attend()[2:])
    assert torch.equal(shared.cascade_in_blocks(5)[2:], shared.case.attend()[2:])


def test_beside_a_chunk_all_rows_keep_their_bits(cut_cascade: Cut) -> None:
    cut_cascade(5)
    assert_same_beside_a_chunk(share([100, 90, 80, 70, 33], [Group(2, 75), Group(1, 9)]))


def assert_same_beside_a_chunk(shared: Shared) -> None:
    """Of five sequences the last one has seven queries; the others have the bits that they have in a decode step."""
    q_BHD, *memory = shared.case.arguments[:3]
    where = shared.case.arguments[3:]
    starts, q_NHD = index(0, 1, 2, 3, 4, 11), torch.cat([q_BHD, q_BHD[:2].repeat(3, 1, 1)])
    out = cascade(q_NHD, *memory, *where, *shared.groups, query_starts=starts, out=torch.full_like(q_NHD, NAN))
    assert torch.equal(out[:4], shared.cascade()[:4])
    assert out[4:].isnan().all(), "these belong to a chunk"
    prefill(q_NHD, *memory, starts, *where, skips_singles=True, out=out)
    assert torch.equal(out[:4], shared.cascade()[:4])
    assert torch.equal(out[4:], prefill(q_NHD, *memory, starts, *where)[4:])


def test_an_idle_sequence_gives_zeros() -> None:
    shared = share([150, 140, 130, 120], [Group(4, 100, leader=2)])
    expected = shared.cascade()
    shared.case.lengths_B[0] = 0
    shared.case.slots_B[1] = -1
    shared.case.slots_B[3] = shared.case.num_slots
    out = shared.cascade()
    idle = torch.tensor([0, 1, 3], device=DEVICE)
    assert torch.equal(out[idle], torch.zeros_like(out[idle]))
    assert torch.equal(out[2], expected[2])


def test_a_leader_that_is_no_slot_is_not_read() -> None:
    shared = share([90, 80, 50], [Group(2, 64)])
    expected = shared.cascade()
    for leader in (-1, shared.case.num_slots, 2**31 - 1):
        arguments = shared.in_blocks(16)
        arguments["leaders_G"][0] = leader
        assert cascade(**arguments).isfinite().all()
        shared.groups[1][0] = leader
        out = shared.cascade()
        assert out.isfinite().all()
        assert torch.equal(out[2], expected[2])
        shared.groups[1][0] = shared.case.slots_B[0]


def test_rows_and_entries_at_and_past_a_limit_are_not_read(cut_cascade: Cut) -> None:
    cut_cascade(3)
    shared = share([80, 72, 50], [Group(2, 70, leader=None)])
    leader = int(shared.groups[1][0])
    limit_S = shared.case.limits(1000)
    limit_S[leader] = 70
    expected = shared.cascade(limit_S=limit_S)
    shared.assert_right(expected)
    blocks = shared.in_blocks(7)
    for limit in (42, 0, -5):
        limit_S[leader] = limit
        blocks["tables_SC"][leader, -(-max(limit, 0) // 7) :] = NO_BLOCK
        for view in (shared.case.memory.k, shared.case.memory.v):
            view[leader, max(limit, 0) :] = NAN
        out = shared.cascade(limit_S=limit_S)
        assert out.isfinite().all()
        assert torch.equal(out[2], expected[2])
        assert torch.equal(cascade(**blocks, limit_S=limit_S), out)


def test_groups_past_the_batch_or_the_slot_are_cut() -> None:
    shared = share([150, 140], [Group(2, 100)])
    expected = shared.cascade()
    shared.groups[0][1:] = 99
    assert torch.equal(shared.cascade(firsts_B=shared.groups[2][:1].repeat(2)), expected)
    shared.groups[2][0] = 2**31 - 1
    assert shared.cascade().shape == expected.shape


def test_the_firsts_may_be_given_and_of_64_bits() -> None:
    shared = share(*GROUPINGS["some without"])
    firsts_B = firsts_of(shared.groups[0], shared.groups[2], 7)
    assert firsts_B.dtype == torch.int32
    assert firsts_B.tolist() == [75, 75, 0, 33, 33, 0, 0]
    assert torch.equal(shared.cascade(firsts_B=firsts_B.long()), shared.cascade())
    no_groups = shared.groups[0][:1], shared.groups[2][:0]
    assert firsts_of(*no_groups, 2).tolist() == [0, 0]
    assert torch.equal(cascade(*shared.case.arguments, no_groups[0], no_groups[1], no_groups[1])[5:], shared.cascade()[5:])


@pytest.mark.parametrize("block", [0, 16])
def test_the_workspace_is_as_large_as_said_and_may_hold_anything(block: int, cut_cascade: Cut) -> None:
    cut_cascade(5)
    shared = share([60 + b for b in range(9)], [Group(9, 60)], shape=SMALL | {"heads": 3})
    arguments = shared.in_blocks(block) if block else dict(zip(NAMES, (*shared.case.arguments, *shared.groups), strict=True))
    needed = workspace_elements(shared.case.q_NHD, arguments["k_STKW"], tables_SC=arguments.get("tables_SC"))
    memory = torch.full((needed + 64,), NAN, device=DEVICE)
    shared.assert_right(cascade(**arguments, workspace=memory[:needed]))
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"workspace is .* at least {needed} contiguous"):
        cascade(**arguments, workspace=memory[: needed - 1])


def test_an_empty_batch_launches_nothing() -> None:
    shared = share([5], [])
    empty = {"q_BHD": shared.case.q_NHD[:0], "lengths_B": index(), "slots_B": index()}
    assert cascade(**(shared.in_blocks(16) | empty)).shape == (0, 2, 64)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_prefix_in_blocks_of_whole_tiles_is_right(num_splits: int, cut_cascade: Cut) -> None:
    cut_cascade(num_splits)
    shared = share([140, 166, 170, 175, 1], [Group(2, 130), Group(2, 70)])
    shared.assert_right(shared.cascade_in_blocks(128))


def test_sequences_may_name_the_same_blocks() -> None:
    """As engines have them: a shared prefix is the same blocks in every table, and the leader is any of its sequences."""
    shared = share([90, 70, 64], [Group(3, 64)])
    expected = shared.cascade()
    arguments = shared.in_blocks(16)
    slots_B, tables_SC = arguments["slots_B"], arguments["tables_SC"]
    tables_SC[slots_B.long(), :4] = tables_SC[slots_B[0].long(), :4].clone()
    for leader in slots_B.tolist():
        arguments["leaders_G"][0] = leader
        assert torch.equal(cascade(**arguments), expected)
