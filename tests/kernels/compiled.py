"""Run as a child process without the interpreter: compile the kernels for an H200 (sm_90), which needs no GPU.

    python -m tests.kernels.compiled

The interpreter accepts what the compiler refuses, such as a name that changes its type in a loop.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vmmkv.kernels.append import _append
from vmmkv.kernels.decode import _attend_chunks, _merge_chunks
from vmmkv.kernels.tiling import tiling

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    """Compile as the launcher would: pointers and strides are multiples of 16, other arguments int32 unless `types` says."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and name.startswith(("p_", "stride"))
    }
    binary = triton.compile(ASTSource(kernel, signature, constants, attributes), target=H200, options=options)
    assert binary.metadata.shared <= SHARED_BYTES, f"{binary.metadata.shared} bytes of shared memory"


def build_decode(dtype: str, heads: int, kv_heads: int, head_dim: int, index: str, has_limit: bool, has_softcap: bool) -> None:
    """Both launches of decode; slot strides have the width of the indices."""
    cut = tiling(heads, kv_heads, head_dim, ITEMSIZES[dtype])
    group = heads // kv_heads
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), f"*{dtype}")
    types |= {"p_lengths": f"*{index}", "p_slots": f"*{index}", "p_limits": "*i32", "p_workspace": "*fp32"}
    types |= {"scale_log2": "fp32", "softcap": "fp32", "stride_ks": index, "stride_vs": index}
    constants: dict[str, Any] = {
        "D": head_dim,
        "D_PAD": max(16, triton.next_power_of_2(head_dim)),
        "CHUNK_ROWS": cut.chunk_rows,
        "MAX_CHUNKS": cut.max_chunks,
        "HAS_LIMIT": has_limit,
    }
    if not has_limit:
        constants["p_limits"] = None
    attend = {
        "K": kv_heads,
        "G": group,
        "G_PAD": max(16, triton.next_power_of_2(group)),
        "B_PAD": 64,
        "TILE": cut.tile_rows,
        "HAS_SOFTCAP": has_softcap,
    }
    build(_attend_chunks, types, constants | attend, num_warps=cut.num_warps, num_stages=cut.num_stages)
    build(_merge_chunks, types, constants | {"H": heads, "STEP": 16}, num_warps=4)


def build_append(dtype: str, kv_heads: int, head_dim: int, index: str) -> None:
    """The one launch of append."""
    types = dict.fromkeys(("p_k_new", "p_v_new", "p_k", "p_v"), f"*{dtype}")
    types |= {"p_slots": f"*{index}", "p_positions": f"*{index}", "p_limits": "*i32", "stride_ks": index, "stride_vs": index}
    build(_append, types, {"K": kv_heads, "D": head_dim, "TOKENS": 2, "ELEMENTS": 1024}, num_warps=4)


if __name__ == "__main__":
    build_decode("bf16", 32, 8, 128, "i64", has_limit=True, has_softcap=False)
    build_decode("fp16", 9, 3, 64, "i32", has_limit=False, has_softcap=True)
    build_decode("bf16", 64, 1, 256, "i32", has_limit=True, has_softcap=True)
    build_decode("fp32", 4, 1, 80, "i64", has_limit=False, has_softcap=False)
    build_append("bf16", 8, 128, "i64")
    build_append("fp32", 3, 80, "i32")
    print("done")
