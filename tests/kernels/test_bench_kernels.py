"""What the benchmarks bind of kernels gives right outputs over each of their memories: found out before a GPU is asked."""

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.baselines import fa3
from bench.harness import Settings, Shape
from bench.suites import kernels
from bench.suites.kernels import Queries, memories
from bench.suites.kernels.memories import Case, Format
from tests.kernels.cases import some
from vmmkv.layout import KVType
from vmmkv_kernels import reference

SHAPE = Shape(name="small", layers=2, heads=2, kv_heads=1, head_dim=64, dtype=torch.float32, weight_bytes=0)
PLAIN, INT4 = Format(shape=SHAPE), Format(shape=SHAPE, quantised=KVType("int4"))
OVER = [("tensor", PLAIN), ("vmmkv", PLAIN), ("paged", PLAIN), ("vmmkv", INT4)]

DECODE = (Case(name="decode", lengths=(33, 7)), kernels.bind_decode)
PREFILL = (Case(name="prefill", lengths=(33, 7), counts=(17, 1)), kernels.bind_prefill)


@pytest.mark.parametrize(
    ("kind", "form", "case", "bind"),
    some(
        [("vmmkv", INT4, *DECODE), ("paged", PLAIN, *PREFILL)],
        [*((*over, *DECODE) for over in OVER[:3]), *((*over, *PREFILL) for over in (*OVER[:2], OVER[3]))],
    ),
)
def test_attention(kind: str, form: Format, case: Case, bind: kernels.Bind, device: torch.device) -> None:
    copies = 2 if kind == "tensor" else 1
    memory = memories.open_memory(kind, case, copies, form, device)
    try:
        batch = Queries(case, copies, memory, seed=0)
        batch.check(batch.passes(bind)())
    finally:
        memory.close()


class PagedWrapper:
    """FlashInfer's wrappers of batches over blocks, in torch: as much of what 0.6.13 documents as is called here."""

    def __init__(self, float_workspace_buffer: torch.Tensor, *, use_tensor_cores: bool = False) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.is_decode = use_tensor_cores

    def plan(self, *where: Any, q_data_type: torch.dtype, causal: bool = False) -> None:
        assert causal is not self.is_decode
        *queries, block_starts, blocks, in_last_block, heads, kv_heads, head_dim, block = where
        num_sequences = len(in_last_block)
        self.starts = torch.arange(num_sequences + 1).tolist() if self.is_decode else queries[0].tolist()
        assert {each.dtype for each in (*queries, block_starts, blocks, in_last_block)} == {torch.int32}
        assert len(block_starts) == len(self.starts) == num_sequences + 1 and len(blocks) == block_starts[-1]
        self.blocks = torch.split(blocks, block_starts.diff().tolist())
        self.lengths = ((block_starts.diff() - 1) * block + in_last_block).tolist()
        self.shape, self.kv_shape, self.dtype = (heads, head_dim), (block, kv_heads, head_dim), q_data_type

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> torch.Tensor:
        k, v = paged_kv_cache
        assert q.shape == out.shape == (self.starts[-1], *self.shape) and q.dtype == k.dtype == self.dtype
        assert k.shape[1:] == v.shape[1:] == self.kv_shape
        for (start, end), blocks, length in zip(itertools.pairwise(self.starts), self.blocks, self.lengths, strict=True):
            k_TKD, v_TKD = (plane[blocks.long()].flatten(0, 1)[:length] for plane in (k, v))
            positions = torch.arange(length - (end - start), length, device=q.device)
            out[start:end] = reference.attend(q[start:end], k_TKD, v_TKD, positions)
        return out


@pytest.mark.parametrize("kind", ["paged", "paged-128"])
@pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=lambda case: case.name)
def test_flashinfer_is_given_the_blocks_of_each_copy(
    kind: str, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = package.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    test_attention(kind, PLAIN, case, kernels.bind_flashinfer, device)


def test_flashinfer_that_cannot_be_imported_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "flashinfer" in str(kernels.why_no_flashinfer(torch.device("cuda")))
    assert list(kernels.absent(Settings(device=torch.device("cpu"), shape=SHAPE))) == [fa3.NAME, "FlashInfer"]
