"""FlashInfer, where the package is installed: its batched functions over blocks, its function of one sequence over slots.

Written from what FlashInfer publishes, and not run: it is neither in the development environment nor on the machine with the
GPU.

Over blocks of 16 it is called as its users call it: what it plans, it plans once for a batch, as an engine does once a step for
all layers, and that is not timed. Over slots there is no such function, for its batched ones want a table of blocks: there it
is `single_prefill_with_kv_cache` for each sequence, with one query to decode, since its function that decodes one wants
K and V without strides; and one call that puts the outputs together. So a row says what FlashInfer as it is does on such
memory. Set are `use_tensor_cores`, which it advises where several query heads share one of K and V, and over slots the backend
`fa2`; all else is its default.

Legend: B sequences, S slots, C columns of a table.
"""

import functools
import itertools
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from bench.kernels.batch import Attend, Batch
from bench.kernels.measure import Inapplicable
from bench.kernels.memories import BLOCK, Planes
from vmmkv.units import MIB, ceil_div

NAME: Final = "FlashInfer"
_PACKAGE: Final = "flashinfer"

_WORKSPACE_BYTES: Final = 128 * MIB
"""As its documentation recommends."""


def is_installed() -> bool:
    """Can it be imported? It is not, yet: that takes seconds."""
    return find_spec(_PACKAGE) is not None


def bind_flashinfer(batch: Batch, copy: int) -> Attend:
    """One layer of a copy."""
    if batch.memory.form.quantised is not None:
        raise Inapplicable("FlashInfer has other scales for quantised K and V: not the same work")
    return _over_slots(batch, copy) if batch.memory.tables_SC is None else _over_blocks(batch, copy)


def _over_slots(batch: Batch, copy: int) -> Attend:
    """Where each sequence begins and ends is on the host, so that a graph can capture the calls."""
    attend_one = import_module(_PACKAGE).single_prefill_with_kv_cache
    queries = [batch.q_NHD[start:end] for start, end in itertools.pairwise(batch.starts.tolist())]
    places = list(zip(queries, batch.slots(copy), batch.case.lengths, strict=True))

    def attend(planes: Planes, _: torch.Tensor) -> torch.Tensor:
        outs = [
            attend_one(q_NHD, planes.k[slot, :length], planes.v[slot, :length], causal=True, kv_layout="NHD", backend="fa2")
            for q_NHD, slot, length in places
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return attend


def _over_blocks(batch: Batch, copy: int) -> Attend:
    flashinfer = import_module(_PACKAGE)
    case, shape, workspace = batch.case, batch.shape, _workspace(batch.device)
    blocks = block_lists(batch, copy)
    types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
    wrapper: Any
    if case.is_decode:
        grouped = shape.heads > shape.kv_heads
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        wrapper.plan(*blocks, shape.heads, shape.kv_heads, shape.head_dim, BLOCK, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        heads = shape.heads, shape.kv_heads, shape.head_dim
        wrapper.plan(batch.query_starts, *blocks, *heads, BLOCK, causal=True, **types)
    return lambda planes, out: wrapper.run(batch.q_NHD, (planes.k, planes.v), out=out)


def block_lists(batch: Batch, copy: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's begin among a copy's blocks [B + 1], these blocks in a row, and how full its last is [B]; int32."""
    assert batch.memory.tables_SC is not None, "there are blocks"
    counts = [ceil_div(length, BLOCK) for length in batch.case.lengths]
    tables = [batch.memory.tables_SC[slot, :count] for slot, count in zip(batch.slots(copy), counts, strict=True)]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = [length - (count - 1) * BLOCK for length, count in zip(batch.case.lengths, counts, strict=True)]
    return starts.to(batch.device), torch.cat(tables), torch.tensor(last, dtype=torch.int32, device=batch.device)


@functools.lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    """For parts of a sequence, before they are summed up; zero at first. Calls follow one another, and all have the same."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
