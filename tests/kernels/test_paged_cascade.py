"""Laws of cascade attention through a block table: the bits of the contiguous kernel."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN
from tests.kernels.test_cascade import GROUPINGS, Group, cut_small, share
from vmmkv.kernels.attention.cascade import workspace_elements
from vmmkv.kernels.attention.paged import paged_cascade

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("one that ends in a tile", 5),
        ("one that ends in a tile", 16),
        ("less than a tile", 5),
        ("several", 1),
        ("several", 16),
        ("several", 64),
        ("led from elsewhere", 5),
        ("led by the last", 16),
    ],
)
def test_blocks_give_the_bits_of_slots(name: str, block: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Their own rows of a prefix are poison, and the entries for those name no block."""
    cut_small(monkeypatch, 3)
    expected = share(*GROUPINGS[name], device).cascade()
    shared = share(*GROUPINGS[name], device, poison=NAN)
    out = paged_cascade(*shared.in_blocks(block), out=shared.case.poisoned_out())
    shared.assert_right(out)
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of what is touched and masked
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": torch.float16}, {"softcap": 5.0, "scale": 0.7}),
        ({"heads": 3, "kv_heads": 1, "head_dim": 80, "dtype": torch.float32}, {}),
    ],
    ids=["fp16", "fp32"],
)
def test_blocks_give_the_bits_of_slots_at_other_shapes(
    shape: dict[str, Any], options: dict[str, float], device: torch.device
) -> None:
    shared = share([140, 131, 150], [Group(2, 130)], device, shape=shape, **options)
    out = paged_cascade(*shared.in_blocks(16), **options)
    shared.assert_right(out)
    assert torch.equal(out, shared.cascade(**options))


def test_sharers_may_name_the_same_blocks(device: torch.device) -> None:
    """As engines have them: a shared prefix is the same blocks in every table, and the leader is any of the sharers."""
    shared = share([90, 70, 64], [Group(3, 64)], device)
    expected = shared.cascade()
    q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, tables_SC, *groups = shared.in_blocks(16)
    tables_SC[slots_B.long(), :4] = tables_SC[slots_B[0].long(), :4].clone()
    for leader in slots_B.tolist():
        groups[1][0] = leader
        out = paged_cascade(q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, tables_SC, *groups)
        assert torch.equal(out, expected)


def test_who_is_in_no_group_has_the_bits_of_decode(device: torch.device) -> None:
    shared = share([90, 80, 70, 0], [Group(2, 60)], device)
    assert torch.equal(paged_cascade(*shared.in_blocks(5))[2:], shared.case.decode()[2:])


def test_no_entry_at_or_past_the_limit_is_read(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    cut_small(monkeypatch, 3)
    shared = share([80, 72], [Group(2, 70, leader=None)], device)
    q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, tables_SC, *groups = shared.in_blocks(7)
    leader = int(groups[1][0])
    limit_S = torch.full((shared.case.num_slots,), 1000, dtype=torch.int32, device=device)
    arguments = (q_BHD, k_PUKD, v_PUKD, lengths_B, slots_B, tables_SC, *groups)
    for limit in (70, 42, 3, -5):
        limit_S[leader] = limit
        tables_SC[leader, -(-max(limit, 0) // 7) :] = 2**31 - 1
        out = paged_cascade(*arguments, limit_S=limit_S)
        assert torch.equal(out, shared.cascade(limit_S=limit_S))


def test_a_leader_that_is_no_slot_is_not_read(device: torch.device) -> None:
    shared = share([90, 80], [Group(2, 64)], device)
    arguments = shared.in_blocks(16)
    for leader in (-1, shared.case.num_slots, 2**31 - 1):
        arguments[7][0] = leader
        assert paged_cascade(*arguments).isfinite().all()


def test_a_table_is_not_touched_but_for_the_rows_that_are_attended_to() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.guarded_cascade"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"


def test_the_workspace_is_as_large_as_said_and_may_hold_anything(device: torch.device) -> None:
    shared = share([90, 80, 9], [Group(2, 64)], device)
    arguments = shared.in_blocks(16)
    needed = workspace_elements(shared.case.q_BHD, arguments[1], tables_SC=arguments[5])
    memory = torch.full((needed + 64,), NAN, device=device)
    assert torch.equal(paged_cascade(*arguments, workspace=memory[:needed]), shared.cascade())
    assert memory[needed:].isnan().all()
    with pytest.raises(ValueError, match=f"workspace is .* at least {needed} contiguous"):
        paged_cascade(*arguments, workspace=memory[: needed - 1])


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    q_BHD, k_PUKD, v_PUKD, _, _, *rest = share([5], [], device).in_blocks(16)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert paged_cascade(q_BHD[:0], k_PUKD, v_PUKD, none, none, *rest).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("name", "spoil", "wanted"),
    [
        ("tables_SC", lambda _: None, "without a table the kernels of slots will do"),
        ("tables_SC", lambda tables: tables.long(), "int32"),
        ("tables_SC", lambda tables: tables[0], "2 dimensions"),
        ("q_BHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("k_PUKD", lambda k: k.view(torch.int8), "quantised"),
        ("k_PUKW", lambda k: k.float(), "float16"),
        ("v_PUKW", lambda v: v[:-1], "(6, "),
        ("lengths_B", lambda lengths: lengths.float(), "int32"),
        ("leaders_G", lambda leaders: leaders.long(), "int32"),
        ("limit_S", lambda _: torch.zeros(2, dtype=torch.int32), "(4,)"),
        ("softcap", lambda _: -1.0, "positive"),
    ],
)
def test_paged_cascade_names_the_argument_it_refuses(name: str, spoil: Any, wanted: str, device: torch.device) -> None:
    names = ("q_BHD", "k_PUKD", "v_PUKD", "lengths_B", "slots_B", "tables_SC", "group_starts_G1", "leaders_G", "prefix_rows_G")
    arguments: dict[str, Any] = dict(zip(names, share([9, 8], [Group(2, 5)], device).in_blocks(16), strict=True))
    given = name.replace("PUKW", "PUKD")
    spoilt = spoil(arguments.get(given))
    arguments[given] = spoilt.to(device) if name == "limit_S" else spoilt
    with pytest.raises(ValueError) as refusal:
        paged_cascade(**arguments)
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)
