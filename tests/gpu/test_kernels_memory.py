"""Kernels, graphs and memory on a real GPU: one capture for every length, no wait, no stray access."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.cases import BF16, DEVICE, LLAMA, NAN, index, make_case
from vmmkv_kernels.attention.append import append
from vmmkv_kernels.attention.decode import decode, workspace_elements
from vmmkv_kernels.attention.prefill import prefill

ROOT = Path(__file__).parents[2]
STRAYS = [
    "decode-past",
    "decode-paged-past",
    "decode-table-past",
    "decode-window-before",
    "prefill-past",
    "prefill-paged-past",
    "prefill-window-before",
    "append-past",
    "append-paged-past",
]


@pytest.mark.parametrize("own_workspace", [False, True])
def test_one_captured_graph_serves_every_length(own_workspace: bool) -> None:
    case = make_case([3000, 2500, 2000], **LLAMA)
    memory = case.memory
    limit_S = case.limits(3000)
    k_NKD, v_NKD = torch.randn(2, 3, 8, 128, device=DEVICE).bfloat16()
    elements = workspace_elements(case.q_NHD, memory.k)
    workspace = torch.empty(elements, device=DEVICE) if own_workspace else None
    out = case.poisoned_out()
    prompt_NHD = torch.randn(700, 32, 128, device=DEVICE).bfloat16()
    prompt_out = torch.full_like(prompt_NHD, NAN)
    starts = index(0, 30, 31, 700)

    def step() -> None:
        append(k_NKD, v_NKD, memory.k, memory.v, case.slots_B, case.lengths_B - 1, limit_S)
        case.attend(limit_S=limit_S, out=out, workspace=workspace)
        where = (starts, case.lengths_B, case.slots_B)
        prefill(prompt_NHD, memory.k, memory.v, *where, limit_S=limit_S, out=prompt_out, workspace=workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, counts in (
        ([60, 0, 2000], [33, 0, 640]),
        ([3000, 17, 63], [1, 17, 60]),
        ([0, 0, 0], [0, 0, 0]),
        ([129, 2500, 1], [0, 100, 0]),
        ([400, 300, 2], [400, 298, 2]),
    ):
        case.lengths_B.copy_(torch.tensor(lengths))
        starts[1:] = torch.tensor(counts).cumsum(0).to(DEVICE)
        k_NKD.normal_()
        out.fill_(NAN)
        prompt_out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, case.attend())
        case.assert_right(out)
        used = sum(counts)
        where = (starts, case.lengths_B, case.slots_B)
        assert torch.equal(prompt_out[:used], prefill(prompt_NHD, memory.k, memory.v, *where)[:used])
        assert prompt_out[:used].isfinite().all()
        assert prompt_out[used:].isnan().all()
        for b, length in enumerate(lengths):
            if length:
                assert torch.equal(memory.k[case.slots_B[b], length - 1], k_NKD[b])


def test_settled_indices_are_looked_up_early_with_the_same_bits() -> None:
    case = make_case([3000, 2500, 2000], **LLAMA)
    memory, limit_S = case.memory, case.limits(3000)
    k_NKD, v_NKD = torch.randn(2, 3, 8, 128, device=DEVICE).bfloat16()
    given_B, positions_N = case.lengths_B.clone(), case.lengths_B - 1
    outs = torch.empty(8, *case.q_NHD.shape, dtype=BF16, device=DEVICE)

    def step() -> None:
        torch.add(given_B, 1, out=case.lengths_B)
        positions_N.copy_(given_B)
        outs.fill_(NAN)  # launched without overlap: what was written before it is settled
        for out in outs:
            append(k_NKD, v_NKD, memory.k, memory.v, case.slots_B, positions_N, limit_S)
            decode(*case.arguments, out=out, settled=True)

    given_B -= 1
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([60, 1, 2000], [3000, 17, 63], [1, 1, 1], [129, 2500, 1], [3000, 2500, 2000]) * 3:
        given_B.copy_(torch.tensor(lengths) - 1)
        k_NKD.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = decode(*case.arguments)
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("lengths", [[100] * 16, [5000] * 48, [9000]], ids=["one tile", "one split", "many splits"])
def test_the_next_kernel_sees_the_whole_output(lengths: list[int]) -> None:
    """The second launch starts before the first ends; a kernel behind it comes behind both."""
    case = make_case(lengths, **LLAMA)
    expected = decode(*case.arguments)
    out, seen = torch.empty_like(expected), torch.empty(8, *expected.shape, dtype=expected.dtype, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in seen:
            out.fill_(NAN)
            decode(*case.arguments, out=out)
            copy.copy_(out)
    for _ in range(20):
        seen.fill_(NAN)
        graph.replay()
        assert all(torch.equal(copy, expected) for copy in seen)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_host_waits_for_nothing(head_dim: int) -> None:
    case = make_case([100, 200], heads=8, kv_heads=2, head_dim=head_dim, dtype=BF16)
    memory = case.memory
    limit_S = case.limits(200)
    k_NKD = torch.randn(2, 2, head_dim, device=DEVICE).bfloat16()
    positions_N, starts = case.lengths_B - 1, index(0, 1, 2)
    blocks, tables_SC = memory.in_blocks(16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        append(k_NKD, k_NKD, memory.k, memory.v, case.slots_B, positions_N, limit_S)
        decode(*case.arguments, limit_S=limit_S)
        prefill(case.q_NHD, memory.k, memory.v, starts, case.lengths_B, case.slots_B, limit_S=limit_S)
        options = {"tables_SC": tables_SC, "limit_S": limit_S}
        append(k_NKD, k_NKD, blocks.k, blocks.v, case.slots_B, positions_N, **options)
        decode(case.q_NHD, blocks.k, blocks.v, case.lengths_B, case.slots_B, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def start_guarded(what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.guarded_kernels", what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str, str]]:
    """How each child ended: they all run at once, since each has a context to lose."""
    children = {what: start_guarded(what) for what in ("within", *STRAYS)}
    ended = {}
    for what, child in children.items():
        stdout, stderr = child.communicate(timeout=250)
        ended[what] = (child.returncode, stdout, stderr)
    return ended


def test_kernels_stay_within_mapped_memory(ends: dict[str, tuple[int, str, str]]) -> None:
    status, stdout, stderr = ends["within"]
    assert status == 0, stderr
    assert stdout == "done\n"


@pytest.mark.parametrize("what", STRAYS)
def test_the_guard_sees_a_stray_access(what: str, ends: dict[str, tuple[int, str, str]]) -> None:
    status, _, stderr = ends[what]
    assert status == 3, stderr
