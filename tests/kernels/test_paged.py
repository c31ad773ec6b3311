"""Laws of decoding and appending through a block table: the bits of the contiguous kernels."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import NAN, assert_right, make_case
from tests.kernels.memories import FORMATS, Memory, make_memory
from tests.kernels.test_append import ROWS, SLOTS, make_angles, make_norms, make_tokens
from vmmkv.kernels.attention.append import append
from vmmkv.kernels.attention.decode import workspace_elements
from vmmkv.kernels.attention.paged import paged_append, paged_decode
from vmmkv.kernels.quantise import Kind

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}


@pytest.mark.parametrize("block", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("window", [None, 30])
def test_blocks_give_the_bits_of_slots(block: int, window: int | None, device: torch.device) -> None:
    case = make_case([0, 1, 17, 64, 300], window=window, device=device, **SMALL)
    out = case.paged_decode(block, window=window, out=case.poisoned_out())
    assert torch.equal(out, case.decode(window=window))
    assert_right(out, case, window=window)


@pytest.mark.parametrize("block", [5, 16])
@pytest.mark.parametrize(("kind", "scale"), FORMATS[1:])
def test_quantised_blocks_give_the_bits_of_slots(block: int, kind: Kind, scale: str, device: torch.device) -> None:
    case = make_case([0, 17, 200], kind=kind, scale=scale, device=device, **SMALL)
    assert torch.equal(case.paged_decode(block, out=case.poisoned_out()), case.decode())


@pytest.mark.parametrize("block", [7, 16])
def test_no_entry_at_or_past_the_limit_is_read(block: int, device: torch.device) -> None:
    case = make_case([64, 40, 100], device=device, **SMALL)
    expected = case.decode()
    limit_S = torch.full((case.num_slots,), 1000, dtype=torch.int32, device=device)
    limit_S[case.slots_B[0]], limit_S[case.slots_B[1]] = 64, 0
    blocks, tables_SC = case.memory.in_blocks(block)
    tables_SC[case.slots_B[0], -(-64 // block) :] = 2**31 - 1
    tables_SC[case.slots_B[1]] = 2**31 - 1
    lengths_B = torch.tensor([90, 40, 100], dtype=torch.int32, device=device)
    out = paged_decode(case.q_BHD, blocks.k, blocks.v, lengths_B, case.slots_B, tables_SC, limit_S=limit_S)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[2], expected[2])


def test_what_lies_outside_the_tables_is_not_read(device: torch.device) -> None:
    case = make_case([48] * 4, num_rows=48, device=device, **SMALL)
    blocks, tables_SC = case.memory.in_blocks(16)
    case.slots_B[0], case.slots_B[1] = -1, case.num_slots
    case.lengths_B[2], case.lengths_B[3] = -(2**31), 2**31 - 1
    out = paged_decode(case.q_BHD, blocks.k, blocks.v, case.lengths_B, case.slots_B, tables_SC, out=case.poisoned_out())
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert out[3].isfinite().all()


def test_a_table_may_be_part_of_a_wider_one_and_two_slots_may_share_blocks(device: torch.device) -> None:
    case = make_case([40, 40], device=device, **SMALL)
    blocks, tables_SC = case.memory.in_blocks(16)
    tables_SC[case.slots_B[1]] = tables_SC[case.slots_B[0]]
    wide_SC = torch.full((case.num_slots, tables_SC.shape[1] + 3), 2**31 - 1, dtype=torch.int32, device=device)
    part_SC = wide_SC[:, 2:-1]
    part_SC.copy_(tables_SC)
    q_BHD = case.q_BHD[:1].expand(2, -1, -1)
    out = paged_decode(q_BHD.contiguous(), blocks.k, blocks.v, case.lengths_B, case.slots_B, part_SC)
    assert torch.equal(out[0], case.decode()[0])
    assert torch.equal(out[1], out[0])


def test_the_workspace_is_as_large_as_said(device: torch.device) -> None:
    case = make_case([300, 9], device=device, **SMALL)
    blocks, tables_SC = case.memory.in_blocks(16)
    needed = workspace_elements(case.q_BHD, blocks.k, tables_SC=tables_SC)
    memory = torch.full((needed + 64,), NAN, device=device)
    out = paged_decode(case.q_BHD, blocks.k, blocks.v, case.lengths_B, case.slots_B, tables_SC, workspace=memory[:needed])
    assert torch.equal(out, case.decode())
    assert memory[needed:].isnan().all()


@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_normed_tokens_are_the_same_bits_in_blocks_as_in_slots(rope: bool, device: torch.device) -> None:
    k_NKD, v_NKD, q_NHD, *where, limit_S = make_tokens(2, 64, torch.float16, device)
    options = make_norms(64, torch.float16, device) | (make_angles(64, device) if rope else {})
    slots = make_memory((SLOTS, ROWS), 2, 64, torch.float16, None, "", device)
    blocks, tables_SC = slots.in_blocks(5)
    queries = q_NHD.clone(), q_NHD.clone()
    append(k_NKD, v_NKD, slots.k, slots.v, *where, limit_S, q_NHD=queries[0], **options)
    paged_append(k_NKD, v_NKD, blocks.k, blocks.v, *where, tables_SC, limit_S, q_NHD=queries[1], **options)
    written, _ = slots.in_blocks(5)
    assert torch.equal(blocks.bytes_STE, written.bytes_STE)
    assert not torch.equal(queries[0], q_NHD)
    assert torch.equal(queries[0], queries[1])


@pytest.mark.parametrize("rows_per_page", [1, 16])
def test_slots_may_lie_anywhere(rows_per_page: int, device: torch.device) -> None:
    """One address space, whatever is behind it: the same rows in an arena of other strides give the same bits."""
    case = make_case([100, 33], num_rows=112, device=device, **SMALL)
    wide = torch.full((case.num_slots, 112 + rows_per_page, 3, 4, 64), NAN, dtype=torch.float16, device=device)
    k, v = wide[:, :112, 0, :2], wide[:, :112, 2, 1:3]
    k.copy_(case.memory.k)
    v.copy_(case.memory.v)
    moved = Memory(bytes_STE=case.memory.bytes_STE, k=k, v=v, scales={}, format=case.memory.format)
    other = type(case)(q_BHD=case.q_BHD, memory=moved, lengths_B=case.lengths_B, slots_B=case.slots_B)
    assert torch.equal(other.decode(), case.decode())
