"""Laws of decode and cascade on a real GPU: every dtype and format, blocks, long sequences, large strides."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.cases import (
    BF16,
    DEVICE,
    FORMATS,
    FP16,
    FP32,
    LENGTHS,
    LLAMA,
    NAN,
    Case,
    Memory,
    assert_close,
    index,
    make_case,
)
from tests.kernels.test_cascade import Group, assert_same_beside_a_chunk, share
from vmmkv_kernels import checks, reference
from vmmkv_kernels.attention.append import append
from vmmkv_kernels.attention.cascade import cascade, workspace_elements
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.quantise import Kind

SHAPES = [(32, 8, 128), (9, 3, 64), (8, 8, 80), (24, 8, 96), (8, 2, 256)]
QUANTISED = [(32, 8, 128, BF16), (9, 3, 64, FP16), (4, 4, 80, BF16), (8, 2, 256, BF16), (8, 2, 96, FP32)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "kind", "scale"),
    [
        *((*shape, dtype, None, "") for shape in SHAPES for dtype in (BF16, FP16, FP32)),
        *((2 * group, 2, 64, BF16, None, "") for group in (1, 3, 5, 7, 11, 16, 17, 64)),
        *((*shape, kind, scale) for shape in QUANTISED for kind, scale in FORMATS[1:]),
    ],
)
def test_decode_is_right_at_every_shape_format_and_length(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case((*LENGTHS, 4097), kind=kind, scale=scale, **shape)
    case.assert_right(case.attend())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (63, None), (1000, 30.0), (None, 5.0)])
def test_windows_and_caps(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    lengths = [0, 1, 63, 64, 1063, 5000]
    case = make_case(lengths, heads=8, kv_heads=4, head_dim=128, dtype=dtype, window=window)
    out = case.attend(window=window, softcap=softcap)
    case.assert_right(out, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("block", "window", "shape"),
    [
        *((block, window, LLAMA) for block in (1, 5, 16, 64) for window in (None, 100)),
        (128, 100, LLAMA),
        *((16, None, {"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": dtype}) for dtype in (FP16, FP32)),
        *((16, None, LLAMA | {"kind": kind, "scale": scale}) for kind, scale in FORMATS[1:]),
    ],
    ids=str,
)
def test_blocks_give_the_bits_of_slots(block: int, window: int | None, shape: dict[str, Any]) -> None:
    case = make_case([0, 1, 17, 64, 1000, 3000], window=window, **shape)
    assert torch.equal(case.attend_in_blocks(block, window=window), case.attend(window=window))


@pytest.mark.parametrize("changes", [{}, {"dtype": FP16, "heads": 16}, {"kind": "fp8", "scale": "token"}], ids=str)
def test_blocks_that_are_tiles_are_right_and_round_the_same_in_any_batch(changes: dict[str, Any]) -> None:
    case = make_case([0, 1, 17, 128, 1000, 3000, 640], **LLAMA | changes)
    out = case.attend_in_blocks(128)
    case.assert_right(out)
    for b in (2, 5):
        assert torch.equal(case.only(b).attend_in_blocks(128)[0], out[b])


SHARING = [*range(1000, 1400, 10), 131, 140, 150, 9, 3000, 700, 0]
"""Lengths of the three groups, of more than one problem, one, and less than a tile; and of sequences in none."""
GROUPS = [Group(40, 1000), Group(3, 131, leader=None), Group(2, 7)]


@pytest.mark.parametrize(
    ("block", "heads", "kv_heads", "head_dim", "dtype", "options"),
    [
        *((block, 32, 8, 128, BF16, {}) for block in (1, 5, 16, 64)),
        (16, 14, 2, 64, BF16, {}),
        (16, 9, 3, 64, FP16, {"softcap": 30.0}),
        (16, 8, 2, 256, BF16, {"scale": 0.1}),
        (16, 3, 1, 80, FP32, {}),
    ],
)
def test_a_prefix_in_blocks_gives_the_bits_of_slots(
    block: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    shared = share(SHARING, GROUPS, shape=shape, **options)
    out = shared.cascade_in_blocks(block, **options)
    shared.assert_right(out)
    assert torch.equal(out, shared.cascade(**options))


def test_beside_a_chunk_all_rows_keep_their_bits() -> None:
    assert_same_beside_a_chunk(share([1000, 900, 800, 700, 333], [Group(2, 750), Group(2, 9)], shape=LLAMA))


def test_a_prefix_in_blocks_that_are_tiles_is_right() -> None:
    shared = share(SHARING, GROUPS, shape=LLAMA)
    shared.assert_right(shared.cascade_in_blocks(128))


@pytest.mark.parametrize(("kind", "scale"), FORMATS[1:])
@pytest.mark.parametrize(
    "shape", [LLAMA, {"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": FP16}, LLAMA | {"head_dim": 256}], ids=str
)
def test_a_quantised_prefix_is_right_in_slots_and_blocks(kind: Kind, scale: str, shape: dict[str, Any]) -> None:
    shared = share(SHARING, GROUPS, shape=shape | {"kind": kind, "scale": scale})
    out = shared.cascade()
    shared.assert_right(out)
    assert torch.equal(shared.cascade_in_blocks(16), out)


def test_one_captured_graph_serves_every_table_and_grouping() -> None:
    lengths = [600, 500, 400, 300]
    first, *others = (
        share(lengths, groups, shape=LLAMA, spare_groups=3 - len(groups))
        for groups in ([Group(4, 300)], [Group(2, 130), Group(2, 64)], [Group(1, 0), Group(2, 77), Group(1, 300)], [])
    )
    arguments = {name: tensor.clone() for name, tensor in first.in_blocks(16).items()}
    elements = workspace_elements(first.case.q_NHD, arguments["k_STKW"], tables_SC=arguments["tables_SC"])
    workspace = torch.empty(elements, device=DEVICE)
    out = cascade(**arguments, workspace=workspace, out=first.case.poisoned_out())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cascade(**arguments, workspace=workspace, out=out)
    for shared in (*others, first):
        for name, given in shared.in_blocks(16).items():
            arguments[name].copy_(given)
        out.fill_(NAN)
        graph.replay()
        shared.assert_right(out)
        assert torch.equal(out, shared.cascade())


@pytest.mark.parametrize(("kind", "scale"), [FORMATS[0], FORMATS[4]])
def test_pointers_give_the_bits_of_descriptors(kind: Kind | None, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [0, 1, 17, 1000, 3000]
    case = make_case(lengths, kind=kind, scale=scale, **LLAMA)
    expected = case.attend()
    monkeypatch.setattr(checks, "has_tma", lambda device: False)
    assert torch.equal(case.attend(), expected)


@pytest.mark.parametrize(("kind", "scale"), [FORMATS[0], FORMATS[1]])
def test_long_sequences_beside_short_ones(kind: Kind | None, scale: str) -> None:
    lengths = [40_000, *[300] * 30, 17_000, 0]
    case = make_case(lengths, kind=kind, scale=scale, heads=8, kv_heads=2, head_dim=64, dtype=BF16)
    together = case.attend()
    case.assert_right(together)
    for b in (0, 1, 31, 32):
        assert torch.equal(case.only(b).attend()[0], together[b])
    assert torch.equal(case.attend(), together)


def test_the_bits_do_not_depend_on_the_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [9000, 1, 0, 4097, *range(100, 2000, 77)]
    case = make_case(lengths, **LLAMA)
    expected = case.attend()
    case.assert_right(expected)
    for num_splits in (1, 2, 7, 16, 100, 1000):
        monkeypatch.setattr("vmmkv_kernels.attention.decode.resident_splits", lambda *_, num_splits=num_splits: num_splits)
        assert torch.equal(case.attend(), expected), f"{num_splits} splits"


def test_rows_at_and_past_the_limit_are_not_read() -> None:
    case = make_case([40, 17, 1000], heads=8, kv_heads=2, head_dim=128, dtype=BF16)
    expected, limit_S = case.attend(), case.limits(5000, 40, 0)
    past = dataclasses.replace(case, lengths_B=index(90, 17, 1000))
    for out in (past.attend(limit_S=limit_S), past.attend_in_blocks(16, limit_S=limit_S)):
        assert torch.equal(out[0], expected[0])
        assert out[1].eq(0.0).all()
        assert torch.equal(out[2], expected[2])


def llama_arena(num_slots: int, num_rows: int, layer: int) -> Memory:
    """K and V of one layer of 32 with 8 kv heads of 128, all layers of a token in one row of 65,536 elements."""
    arena = torch.empty(num_slots, num_rows, 32, 2, 8, 128, dtype=BF16, device=DEVICE)
    k, v = arena[:, :, layer, 0], arena[:, :, layer, 1]
    k.fill_(NAN)
    v.fill_(NAN)
    return Memory(bytes_STE=arena.flatten(2).view(torch.uint8), k=k, v=v, scales={}, format=(8, 128, BF16, None, ""))


def test_strides_and_offsets_past_2_to_the_31_elements() -> None:
    num_rows, lengths = 33_024, [33_000, 1000, 32_769]
    memory = llama_arena(3, num_rows, layer=31)
    assert memory.k.stride(0) > 2**31
    assert memory.k.stride(1) * 32_769 > 2**31
    case = Case(
        q_NHD=torch.randn(3, 32, 128, device=DEVICE).bfloat16(),
        memory=memory,
        lengths_B=index(*lengths),
        slots_B=index(2, 0, 1),
    )
    limit_S = case.limits(num_rows)
    for length, slot in zip(lengths, case.slots_B.tolist(), strict=True):
        k_NKD, v_NKD = torch.randn(2, length, 8, 128, device=DEVICE).bfloat16()
        positions_N = torch.randperm(length, device=DEVICE)
        append(k_NKD, v_NKD, memory.k, memory.v, torch.full_like(positions_N, slot), positions_N, limit_S)
        assert torch.equal(memory.k[slot, positions_N], k_NKD)
        assert torch.equal(memory.v[slot, positions_N], v_NKD)
        assert memory.k[slot, length:].isnan().all()
        assert memory.v[slot, length:].isnan().all()
    out = case.attend(limit_S=limit_S)
    case.assert_right(out)
    # The same rows as blocks that lie in the arena where they are: row t of slot s in block s * 2064 + t // 16.
    k_PUKW, v_PUKW = (view.unflatten(1, (-1, 16)).flatten(0, 1) for view in (memory.k, memory.v))
    tables_SC = torch.arange(3 * num_rows // 16, dtype=torch.int32, device=DEVICE).view(3, -1)
    where = (case.lengths_B, case.slots_B)
    assert torch.equal(decode(case.q_NHD, k_PUKW, v_PUKW, *where, tables_SC=tables_SC), out)

    starts = index(0, 40, 41, 60)
    q_NHD = torch.randn(60, 32, 128, device=DEVICE).bfloat16()
    prefilled = prefill(q_NHD, memory.k, memory.v, starts, case.lengths_B, case.slots_B, limit_S=limit_S)
    arguments = (q_NHD, memory.k, memory.v, starts.diff(), case.lengths_B, case.slots_B)
    assert_close(prefilled, reference.prefill(*arguments), reference.prefill(*arguments, dtype=BF16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_tensors_device_not_the_current_one() -> None:
    case = make_case([63, 1000], heads=8, kv_heads=2, head_dim=64, dtype=BF16, device=torch.device("cuda", 1))
    with torch.cuda.device(0):
        case.assert_right(case.attend())
