"""FlashAttention-3 as vLLM builds and calls it, where its library is at hand (`--fa3 _vllm_fa3_C.abi3.so`).

It runs on the same memories, unmodified: over slots through `kv_batch_idx`, over blocks through its page table, in both
with variable lengths. The scheduler's metadata is computed once for a batch, as an engine computes it once a step for all
layers, and is not timed. The number of splits is left to its own heuristic.

Legend: B sequences, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a table.
"""

from pathlib import Path
from typing import Final

import torch

from bench.kernels.batch import Attend, Batch
from bench.kernels.measure import Inapplicable
from bench.kernels.memories import BLOCK, Planes

NAME: Final = "FlashAttention-3"


def load(library: Path) -> None:
    """Register its operators. Raises OSError if the library does not load: it is built for one version of torch."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def bind_fa3(batch: Batch, copy: int) -> Attend:
    """One layer of a copy. A view of slots is cut to the longest sequence, since TMA must know where tensors end."""
    case, shape, memory = batch.case, batch.shape, batch.memory
    if memory.form.quantised is not None:
        raise Inapplicable("FlashAttention-3 quantises its queries too: not the same work")
    slots_B = batch.slots_B(copy)
    tables_BC = None if memory.tables_SC is None else memory.tables_SC[slots_B.long()]
    most_queries, scale = max(case.queries), shape.head_dim**-0.5
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        len(case.lengths),
        most_queries,
        case.longest,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim,  # of V
        shape.dtype,
        batch.lengths_B,
        batch.query_starts,
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        None,  # leftpad_k
        None if tables_BC is None else BLOCK,
        0,  # max_seqlen_k_new
        True,  # causal
        -1,  # window, left
        -1,  # window, right
        False,  # softcap
        0,  # splits: its heuristic
        None,  # pack_gqa: its heuristic
        0,  # SMs left to others
    )

    def attend(planes: Planes, out: torch.Tensor) -> torch.Tensor:
        contiguous = tables_BC is None
        k, v = (plane[:, : case.longest] if contiguous else plane for plane in (planes.k, planes.v))
        torch.ops._vllm_fa3_C.fwd(
            batch.q_NHD,
            k,  # [S, T, K, D] or [P, U, K, D]
            v,
            None,  # k_new
            None,  # v_new
            None,  # q_v
            out,
            batch.query_starts,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            batch.lengths_B,
            most_queries,
            case.longest,
            tables_BC,
            slots_B if contiguous else None,
            None,  # leftpad_k
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # seqlens_rotary
            None,  # q_descale
            None,  # k_descale
            None,  # v_descale
            scale,
            True,  # causal
            -1,  # window, left
            -1,  # window, right
            0.0,  # softcap
            True,  # rotary_interleaved, of no effect
            metadata,
            0,  # splits
            None,  # pack_gqa
            0,  # SMs left to others
            None,  # s_aux
            1,  # context-parallel world
            0,  # context-parallel rank
            None,  # cp_tot_seqused_k
        )
        return out

    return attend
