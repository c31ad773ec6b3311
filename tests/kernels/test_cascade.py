"""Laws of cascade attention: what decode gives, whoever shares what with whom."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.cases import NAN, Case, make_case
from tests.kernels.compiling import assert_compiles
from vmmkv.kernels import checks, reference
from vmmkv.kernels.attention.cascade import CascadeTiling, cascade, firsts_of, workspace_elements

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}


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
    bound: float

    def cascade(self, **options: Any) -> torch.Tensor:
        """By the kernels."""
        return cascade(*self.case.arguments, *self.groups, **options)

    def in_blocks(self, block: int) -> tuple[torch.Tensor, ...]:
        """Arguments of `paged_cascade`: the same rows in shuffled blocks; entries that nobody is to read name no block."""
        case, (starts_G1, leaders_G, rows_G) = self.case, self.groups
        blocks, tables_SC = case.memory.in_blocks(block)
        is_read_ST = torch.zeros(case.num_slots, tables_SC.shape[1] * block, dtype=torch.bool)
        firsts_B = firsts_of(starts_G1, rows_G, case.lengths_B.shape[0])
        for slot, first, length in torch.stack([case.slots_B, firsts_B, case.lengths_B], 1).tolist():
            is_read_ST[slot, first:length] = True
        for start, end, leader, rows in torch.stack([starts_G1[:-1], starts_G1[1:], leaders_G, rows_G], 1).tolist():
            if start < end:
                is_read_ST[leader, :rows] = True
        tables_SC[~is_read_ST.unflatten(1, (-1, block)).any(2).to(tables_SC.device)] = 2**31 - 1
        return case.q_BHD, blocks.k, blocks.v, case.lengths_B, case.slots_B, tables_SC, *self.groups

    def assert_right(self, out_BHD: torch.Tensor) -> None:
        """The rule of FlashAttention's tests, as for decode."""
        error = (out_BHD.float() - self.truth).abs().max().item()
        assert error <= self.bound, f"error {error:.3g} is above {self.bound:.3g}"


def share(
    lengths: Sequence[int], groups: Sequence[Group], device: torch.device, *, poison: float = 1000.0, spare_groups: int = 3,
    shape: dict[str, Any] = SMALL, **options: Any,
) -> Shared:  # fmt: skip
    """The first sequences of the batch are the first group, and so on; who is left is in none."""
    case = make_case(lengths, device=device, **shape)
    slots, spare_slot = case.slots_B.tolist(), (set(range(case.num_slots)) - set(case.slots_B.tolist())).pop()
    starts = [0, *itertools.accumulate(group.count for group in groups)]
    leaders = []
    for start, group in zip(starts, groups, strict=False):
        leaders.append(spare_slot if group.leader is None else slots[min(start + group.leader, len(slots) - 1)])
        for view in (case.memory.k, case.memory.v):
            prefix_TKD = view[slots[start], : group.rows].clone() if group.count else 0.0
            for slot in (*slots[start : start + group.count], leaders[-1]):
                view[slot, : group.rows] = prefix_TKD
    arguments = (case.q_BHD, *case.memory.values(), case.lengths_B, case.slots_B)
    truth = reference.decode(*arguments, **options)
    peer = reference.decode(*arguments, **options, dtype=case.q_BHD.dtype)
    for start, group, leader in zip(starts, groups, leaders, strict=False):
        for slot in slots[start : start + group.count]:
            if slot != leader:
                case.memory.k[slot, : group.rows] = poison
                case.memory.v[slot, : group.rows] = poison

    def index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts += starts[-1:] * spare_groups
    rows = [group.rows for group in groups] + [77] * spare_groups
    return Shared(
        case=case,
        groups=(index(starts), index(leaders + [10**6] * spare_groups), index(rows)),
        truth=truth,
        bound=2 * (peer.float() - truth).abs().max().item() + 1e-5,
    )


def cut_small(monkeypatch: pytest.MonkeyPatch, num_lanes: int, **changes: int) -> None:
    """Problems of 8 sequences at most and tiles of 16 rows, so that few rows go through what many do; so many lanes."""
    small = dataclasses.replace(CascadeTiling(queries=16, tile_rows=16, merged_parts=2), **changes)
    monkeypatch.setattr("vmmkv.kernels.attention.cascade.cascade_tiling", lambda *shape: small)
    monkeypatch.setattr("vmmkv.kernels.attention.cascade._num_lanes", lambda *_: num_lanes)


@pytest.fixture
def cut_like(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`cut_small` until the test ends."""
    return functools.partial(cut_small, monkeypatch)


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
        (4, 1, 128, torch.float16),
        (3, 1, 256, torch.float16),
        (2, 2, 64, torch.float32),
        (3, 1, 80, torch.float32),
        (64, 1, 16, torch.float16),
    ],
)
def test_cascade_is_right_at_every_shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    shared = share([200, 150, 140, 131, 1], [Group(2, 128), Group(2, 130)], device, shape=shape)
    out = shared.case.poisoned_out()
    assert shared.cascade(out=out) is out
    shared.assert_right(out)


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


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("num_lanes", [1, 2, 5, 16])
def test_any_grouping_on_any_number_of_lanes_is_right(
    num_lanes: int, name: str, cut_like: Callable[..., None], device: torch.device
) -> None:
    cut_like(num_lanes)
    shared = share(*GROUPINGS[name], device)
    shared.assert_right(shared.cascade(out=shared.case.poisoned_out()))


@pytest.mark.parametrize("changes", [{"least_tiles": 3}, {"merged_elements": 64}, {"merged_elements": 8192, "merged_parts": 7}])
def test_any_cut_is_right(changes: dict[str, int], cut_like: Callable[..., None], device: torch.device) -> None:
    cut_like(4, **changes)
    shared = share(*GROUPINGS["several"], device, shape={**SMALL, "heads": 6})
    shared.assert_right(shared.cascade(out=shared.case.poisoned_out()))


@pytest.mark.parametrize("name", ["one that ends in a tile", "less than a tile", "several"])
def test_by_pointers_no_row_of_a_prefix_is_touched_but_the_leaders(
    name: str, cut_like: Callable[..., None], by_pointers: Callable[[], None], device: torch.device
) -> None:
    cut_like(3)
    expected = share(*GROUPINGS[name], device).cascade()
    by_pointers()
    shared = share(*GROUPINGS[name], device, poison=NAN)
    out = shared.cascade()
    shared.assert_right(out)
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of what is touched and masked
@pytest.mark.parametrize("options", [{"softcap": 5.0, "scale": 0.7}, {"scale": 0.02}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_scores_are_scaled_and_capped(
    dtype: torch.dtype, options: dict[str, float], cut_like: Callable[..., None], device: torch.device
) -> None:
    cut_like(3)
    shared = share(*GROUPINGS["several"], device, shape={**SMALL, "dtype": dtype}, **options)
    shared.assert_right(shared.cascade(**options))


@pytest.mark.parametrize("row", [0, 15, 63, 64, 89])
def test_a_peak_far_above_the_rest_is_kept_wherever_it_is(
    row: int, cut_like: Callable[..., None], device: torch.device
) -> None:
    cut_like(3)
    shared = share([90, 90], [Group(2, 64)], device, shape={**SMALL, "heads": 2, "dtype": torch.float32})
    case = shared.case
    for b, slot in enumerate(case.slots_B.tolist() if row >= 64 else [int(shared.groups[1][0])]):
        case.memory.k[slot, row] = 100 * case.q_BHD[b]
        case.memory.v[slot, row] = 5.0
    out = shared.cascade()
    torch.testing.assert_close(out if row >= 64 else out[:1], torch.full_like(out if row >= 64 else out[:1], 5.0))


def test_who_is_in_no_group_has_the_bits_of_decode(device: torch.device) -> None:
    shared = share([150, 140, 130, 70, 0], [Group(2, 100), Group(1, 0)], device)
    assert torch.equal(shared.cascade()[2:], shared.case.decode()[2:])


def test_an_idle_sequence_gives_zeros(device: torch.device) -> None:
    shared = share([150, 140, 130, 120], [Group(4, 100, leader=2)], device)
    expected = shared.cascade()
    shared.case.lengths_B[0] = 0
    shared.case.slots_B[1] = -1
    shared.case.slots_B[3] = shared.case.num_slots
    out = shared.cascade(out=shared.case.poisoned_out())
    idle = torch.tensor([0, 1, 3], device=device)
    assert torch.equal(out[idle], torch.zeros_like(out[idle]))
    assert torch.equal(out[2], expected[2])


def test_a_leader_that_is_no_slot_is_not_read(device: torch.device) -> None:
    shared = share([150, 140, 50], [Group(2, 100)], device)
    expected = shared.cascade()
    for leader in (-1, shared.case.num_slots, 2**31 - 1):
        shared.groups[1][0] = leader
        out = shared.cascade()
        assert out.isfinite().all()
        assert torch.equal(out[2], expected[2])


def test_rows_at_and_past_a_limit_are_not_read(cut_like: Callable[..., None], device: torch.device) -> None:
    cut_like(3)
    shared = share([150, 140, 50], [Group(2, 100, leader=None)], device)
    leader = int(shared.groups[1][0])
    limit_S = torch.full((shared.case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[leader] = 100
    expected = shared.cascade(limit_S=limit_S)
    shared.assert_right(expected)
    for view in (shared.case.memory.k, shared.case.memory.v):
        view[leader, 70:] = NAN
    for limit in (70, 16, 3, 0, -5):
        limit_S[leader] = limit
        out = shared.cascade(limit_S=limit_S)
        assert out.isfinite().all()
        assert torch.equal(out[2], expected[2])


def test_groups_past_the_batch_or_the_slot_are_cut(device: torch.device) -> None:
    shared = share([150, 140], [Group(2, 100)], device)
    expected = shared.cascade()
    shared.groups[0][1:] = 99
    assert torch.equal(shared.cascade(firsts_B=shared.groups[2][:1].repeat(2)), expected)
    shared.groups[2][0] = 2**31 - 1
    assert shared.cascade().shape == expected.shape


def test_the_firsts_may_be_given_and_of_64_bits(device: torch.device) -> None:
    shared = share(*GROUPINGS["some without"], device)
    firsts_B = firsts_of(shared.groups[0], shared.groups[2], 7)
    assert firsts_B.dtype == torch.int32
    assert firsts_B.tolist() == [75, 75, 0, 33, 33, 0, 0]
    assert torch.equal(shared.cascade(firsts_B=firsts_B.long()), shared.cascade())
    no_groups = shared.groups[0][:1], shared.groups[2][:0]
    assert firsts_of(*no_groups, 2).tolist() == [0, 0]
    assert torch.equal(cascade(*shared.case.arguments, no_groups[0], no_groups[1], no_groups[1])[5:], shared.cascade()[5:])


@pytest.mark.parametrize("num_lanes", [1, 5])
def test_the_workspace_is_as_large_as_said_and_may_hold_anything(
    num_lanes: int, cut_like: Callable[..., None], device: torch.device
) -> None:
    cut_like(num_lanes)
    shared = share(*GROUPINGS["several problems"], device, shape={**SMALL, "heads": 6})
    needed = workspace_elements(shared.case.q_BHD, shared.case.memory.k)
    memory = torch.full((needed + 64,), NAN, device=device)
    shared.assert_right(shared.cascade(workspace=memory[:needed]))
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"workspace is .* at least {needed} contiguous"):
        shared.cascade(workspace=memory[: needed - 1])


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    shared = share([5], [], device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    case = shared.case
    assert cascade(case.q_BHD[:0], case.memory.k, case.memory.v, none, none, *shared.groups).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("name", "spoil", "wanted"),
    [
        ("q_BHD", lambda q: q[0], "3 dimensions"),
        ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("q_BHD", lambda q: q[..., :32], "64"),
        ("k_STKD", lambda k: k.view(torch.int8), "quantised"),
        ("k_STKW", lambda k: k.float(), "float16"),
        ("v_STKW", lambda v: v[:, :-1], "(4, "),
        ("lengths_B", lambda lengths: lengths.float(), "int32"),
        ("slots_B", lambda slots: slots.repeat(2), "(2,)"),
        ("group_starts_G1", lambda starts: starts[:-1], "(5,)"),
        ("group_starts_G1", lambda starts: starts.long(), "int32"),
        ("leaders_G", lambda leaders: leaders.long(), "int32"),
        ("leaders_G", lambda leaders: leaders.to("meta"), "the host never reads it"),
        ("prefix_rows_G", lambda rows: rows.float(), "int32"),
        ("prefix_rows_G", lambda rows: rows.repeat(2000), "at most 4096"),
        ("firsts_B", lambda _: torch.zeros(3, dtype=torch.int32), "(2,)"),
        ("limit_S", lambda _: torch.zeros(2, dtype=torch.int32), "(4,)"),
        ("softcap", lambda _: math.inf, "positive"),
        ("scale", lambda _: -1.0, "positive"),
        ("out", lambda _: torch.zeros(2, 4, 64), "float16"),
        ("workspace", lambda _: torch.zeros(5), "at least"),
    ],
)
def test_cascade_names_the_argument_it_refuses(name: str, spoil: Any, wanted: str, device: torch.device) -> None:
    shared = share([9, 8], [Group(2, 5)], device)
    names = ("q_BHD", "k_STKD", "v_STKD", "lengths_B", "slots_B", "group_starts_G1", "leaders_G", "prefix_rows_G")
    arguments: dict[str, Any] = dict(zip(names, (*shared.case.arguments, *shared.groups), strict=True))
    given = name.replace("STKW", "STKD")
    spoilt = spoil(arguments.get(given))
    arguments[given] = spoilt.to(device) if name in ("firsts_B", "limit_S", "out", "workspace") else spoilt
    with pytest.raises(ValueError) as refusal:
        cascade(**arguments)
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)


def test_cascade_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    statements = """
from vmmkv.kernels.attention import cascade as module
from vmmkv.kernels.attention.cascade import cascade
from vmmkv.kernels.attention.paged import paged_cascade
module._num_lanes = lambda device, num_kv_heads, programs_per_sm: 16

def run(*shape, block=0, **options):
    model = Model(*shape, block=block)
    rows, groups = (empty(64) for _ in range(2)), (empty(9), empty(8), empty(8))
    launch = paged_cascade if block else cascade
    launch(model.q_NHD, *model.kv, *rows, *model.tables, *groups, firsts_B=empty(64), **options)

run(32, 8, 128, torch.bfloat16, limit_S=empty(64))
run(32, 8, 128, torch.bfloat16, limit_S=empty(64), block=16)
run(9, 3, 64, torch.float16, softcap=30.0)
run(4, 1, 80, torch.float32)
"""
    assert_compiles(statements, tmp_path)
