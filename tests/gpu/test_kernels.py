"""Laws of the kernels on a real GPU: every dtype, large strides, captured graphs, unmapped memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported: tests/kernels settles that it is to be interpreted here.
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.kernels.cases import LENGTHS, NAN, Case, assert_right, make_case
from vmmkv.kernels.append import append
from vmmkv.kernels.decode import decode, workspace_elements

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 8, 80), (24, 8, 96), (8, 2, 256), (12, 1, 128), (16, 1, 64), (71, 71, 64)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_decode_is_right_at_every_shape_and_length(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case((*LENGTHS, 4097), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    assert_right(decode(*case.arguments, out=case.poisoned_out()), case)


@pytest.mark.parametrize("group", range(1, 17))
def test_any_number_of_query_heads_shares_a_kv_head(group: int) -> None:
    case = make_case([1, 300, 1111], heads=2 * group, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    assert_right(decode(*case.arguments, out=case.poisoned_out()), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (63, None), (1000, 30.0), (None, 5.0)])
def test_windows_and_caps(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    lengths = [0, 1, 63, 64, 1063, 5000]
    case = make_case(lengths, heads=8, kv_heads=4, head_dim=128, dtype=dtype, device=DEVICE, window=window)
    out = decode(*case.arguments, window=window, softcap=softcap, out=case.poisoned_out())
    assert_right(out, case, window=window, softcap=softcap)


def test_long_sequences_beside_short_ones() -> None:
    lengths = [40_000, *[300] * 30, 17_000, 0]
    case = make_case(lengths, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    together = decode(*case.arguments)
    assert_right(together, case)
    for b in (0, 1, 31, 32):
        assert torch.equal(decode(*case.only(b).arguments)[0], together[b])
    assert torch.equal(decode(*case.arguments), together)


def llama_arena(num_slots: int, num_rows: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer of 32 with 8 kv heads of 128, all layers of a token in one row of 65,536 elements."""
    arena = torch.empty(num_slots, num_rows, 32, 2, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    return arena[:, :, layer, 0], arena[:, :, layer, 1]


def test_strides_and_offsets_past_2_to_the_31_elements() -> None:
    num_rows = 33_024
    k_STKD, v_STKD = llama_arena(3, num_rows, layer=31)
    assert k_STKD.stride(0) > 2**31
    assert k_STKD.stride(1) * 32_769 > 2**31
    lengths = [33_000, 1000, 32_769]
    slots_B = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    limit_S = torch.full((3,), num_rows, dtype=torch.int32, device=DEVICE)
    k_STKD.fill_(NAN)
    v_STKD.fill_(NAN)
    for length, slot in zip(lengths, slots_B.tolist(), strict=True):
        k_NKD, v_NKD = torch.randn(2, length, 8, 128, device=DEVICE).bfloat16()
        positions_N = torch.randperm(length, device=DEVICE)
        append(k_NKD, v_NKD, k_STKD, v_STKD, torch.full_like(positions_N, slot), positions_N, limit_S)
        assert torch.equal(k_STKD[slot, positions_N], k_NKD)
        assert torch.equal(v_STKD[slot, positions_N], v_NKD)
        assert k_STKD[slot, length:].isnan().all()
        assert v_STKD[slot, length:].isnan().all()
    case = Case(
        q_BHD=torch.randn(3, 32, 128, device=DEVICE).bfloat16(),
        k_STKD=k_STKD,
        v_STKD=v_STKD,
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        slots_B=slots_B,
    )
    assert_right(decode(*case.arguments, limit_S=limit_S, out=case.poisoned_out()), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 64), (5, 80), (2, 256)])
def test_append_writes_what_its_limit_allows_and_nothing_else(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    num_slots, num_rows, num_tokens = 7, 111, 500
    arena = torch.full((num_slots, num_rows, 2, 2, kv_heads, head_dim), NAN, dtype=dtype, device=DEVICE)
    cells = torch.randperm(num_slots * num_rows, device=DEVICE)[:num_tokens]
    slots_N, positions_N = cells // num_rows, (cells % num_rows).int()
    positions_N[:3] = torch.tensor([-1, num_rows, 2**31 - 1], device=DEVICE)
    slots_N[3:5] = torch.tensor([-1, num_slots], device=DEVICE)
    limit_S = torch.tensor([0, 1, 63, 64, 110, 111, 5000], dtype=torch.int32, device=DEVICE)
    k_NKD, v_NKD = torch.randn(2, num_tokens, kv_heads, head_dim, device=DEVICE).to(dtype)
    append(k_NKD, v_NKD, arena[:, :, 1, 0], arena[:, :, 1, 1], slots_N, positions_N, limit_S)

    written_N = (slots_N >= 0) & (slots_N < num_slots) & (positions_N >= 0) & (positions_N < num_rows)
    written_N &= positions_N < limit_S[slots_N.clamp(0, num_slots - 1)]
    expected = torch.full_like(arena, NAN)
    expected[slots_N[written_N], positions_N[written_N].long(), 1, 0] = k_NKD[written_N]
    expected[slots_N[written_N], positions_N[written_N].long(), 1, 1] = v_NKD[written_N]
    assert 0 < written_N.sum() < num_tokens
    torch.testing.assert_close(arena, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("own_workspace", [False, True])
def test_one_captured_graph_serves_every_length(own_workspace: bool) -> None:
    case = make_case([3000, 2500, 2000], heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=DEVICE)
    limit_S = torch.full((case.k_STKD.shape[0],), 3000, dtype=torch.int32, device=DEVICE)
    k_NKD, v_NKD = torch.randn(2, 3, 8, 128, device=DEVICE).bfloat16()
    workspace = torch.empty(workspace_elements(3, 32, 8, 128, 2), device=DEVICE) if own_workspace else None
    out = case.poisoned_out()

    def step() -> None:
        append(k_NKD, v_NKD, case.k_STKD, case.v_STKD, case.slots_B, case.lengths_B - 1, limit_S)
        decode(*case.arguments, limit_S=limit_S, out=out, workspace=workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([1, 0, 2000], [3000, 17, 63], [0, 0, 0], [129, 2500, 1]):
        case.lengths_B.copy_(torch.tensor(lengths))
        k_NKD.normal_()
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, decode(*case.arguments))
        assert_right(out, case)
        for b, length in enumerate(lengths):
            if length:
                assert torch.equal(case.k_STKD[case.slots_B[b], length - 1], k_NKD[b])


def test_the_host_waits_for_nothing() -> None:
    case = make_case([100, 200], heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    limit_S = torch.full((case.k_STKD.shape[0],), 200, dtype=torch.int32, device=DEVICE)
    k_NKD = torch.randn(2, 2, 64, device=DEVICE).bfloat16()
    positions_N = case.lengths_B - 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        append(k_NKD, k_NKD, case.k_STKD, case.v_STKD, case.slots_B, positions_N, limit_S)
        decode(*case.arguments, limit_S=limit_S)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_tensors_device_not_the_current_one() -> None:
    case = make_case([63, 1000], heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda", 1))
    with torch.cuda.device(0):
        assert_right(decode(*case.arguments, out=case.poisoned_out()), case)


def run_guarded(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.guarded_kernels", what]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_kernels_stay_within_mapped_memory() -> None:
    child = run_guarded("within")
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize("what", ["decode-past", "window-before", "append-past"])
def test_the_guard_sees_a_stray_access(what: str) -> None:
    child = run_guarded(what)
    assert child.returncode == 3, child.stderr
    assert "illegal memory access" in child.stderr
