"""FlashAttention-3 as vLLM builds and calls it: variable lengths, all of which are on the device, over slots or over blocks.

Its library knows nothing of vLLM; bench/README.md says where it is. How a batch is split is computed on the device, once for
all layers of a step, as vLLM does. The host gives bounds alone, so a captured step serves every length.

Legend: B sequences, N queries, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a table, H query heads,
K kv heads, D head dim.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

NAME: Final = "FlashAttention-3"
_CAUSAL: Final = (True, -1, -1)
"""And no window, left or right."""
_OWN_SPLITS: Final = (0, None, 0)
"""Most splits of a sequence and pack_gqa, by its own heuristics; SMs that are left to others."""


def why_absent(library: Path | None, device: torch.device) -> str | None:
    """Why it cannot be measured; None if it can."""
    if device.type != "cuda":
        return "its kernels do not run on a CPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernels are for Hopper"
    return None if library else "--fa3 names no library of it"


def load(library: Path | None, device: torch.device) -> bool:
    """Load its library, once, if it can be measured. Returns whether it can."""
    if why_absent(library, device) is not None:
        return False
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The queries of a step, int32 on the device, and bounds of them."""

    query_starts: torch.Tensor
    """[B + 1]"""
    lengths_B: torch.Tensor
    max_queries: int
    """Of a sequence."""
    max_rows: int
    """Of a sequence; over slots, all rows that are shown."""
    tables_BC: torch.Tensor | None = None
    """Over blocks. Entries of rows that a sequence does not have are not read."""
    slots_B: torch.Tensor | None = None
    """Over slots."""

    def plan(self, q_NHD: torch.Tensor, num_kv_heads: int, block: int | None) -> torch.Tensor:
        """How the batch is split, for `attend` of each layer. One launch."""
        _, num_heads, head_dim = q_NHD.shape
        planned: torch.Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(self.lengths_B), self.max_queries, self.max_rows, num_heads, num_kv_heads, head_dim, head_dim, q_NHD.dtype,
            self.lengths_B, self.query_starts,
            None, None, None, None,  # cu_seqlens of k and of k_new, seqused_q, leftpad_k
            block,
            0,  # max_seqlen_k_new
            *_CAUSAL,
            False,  # softcap
            *_OWN_SPLITS,
        )  # fmt: skip
        return planned

    def attend(
        self,
        q_NHD: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        planned: torch.Tensor,
        out: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Causal attention of the batch's queries to k and v, [P, U, K, D] or [S, T, K, D], into `out`."""
        arguments: tuple[Any, ...] = (
            q_NHD, k, v,
            None, None, None,  # k_new, v_new, q_v
            out, self.query_starts,
            None, None, None,  # cu_seqlens of k and of k_new, seqused_q
            self.lengths_B, self.max_queries, self.max_rows, self.tables_BC, self.slots_B,
            None,  # leftpad_k
            None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
            None, None, None,  # scales of q, k, v
            q_NHD.shape[-1] ** -0.5 if scale is None else scale, *_CAUSAL,
            0.0,  # softcap
            True,  # rotary_interleaved, of no effect
            planned, *_OWN_SPLITS,
            None,  # s_aux
            1, 0, None,  # context-parallel: world, rank, cp_tot_seqused_k
        )  # fmt: skip
        torch.ops._vllm_fa3_C.fwd(*arguments)
        return out
