"""The block-table twins of append, decode, cascade and prefill: the same kernels at other addresses, for comparison.

Row t of slot s is at [tables_SC[s, t // U], t % U] of the views, for any U. Entries of a table past the rows that are
read or written are never loaded.

Legend: B sequences, N tokens, S slots, P physical blocks, U rows of a block (the block size), C columns of the table,
H query heads, K kv heads, D head dim, W payload width in elements, R = D / 2 angles, G groups (and G1 = G + 1).
"""

import torch

from vmmkv.kernels import checks
from vmmkv.kernels.attention.append import launch_append
from vmmkv.kernels.attention.cascade import Prefixes, launch_cascade
from vmmkv.kernels.attention.decode import launch_decode
from vmmkv.kernels.attention.kv_memory import kv_memory
from vmmkv.kernels.attention.prefill import launch_prefill


def paged_append(
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    k_PUKW: torch.Tensor,
    v_PUKW: torch.Tensor,
    slots_N: torch.Tensor,
    positions_N: torch.Tensor,
    tables_SC: torch.Tensor,
    limit_S: torch.Tensor,
    *,
    q_NHD: torch.Tensor | None = None,
    cos_TR: torch.Tensor | None = None,
    sin_TR: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """`append` into blocks: bit for bit what it writes, where the tables say.

    T is C * U. A token whose table entry is not in [0, P) is written nowhere either. tables_SC: int32 on the device, rows
    contiguous. Token scales: float16 [P, U, K].

    Cost and Raises: as for `append`.
    """
    _check_given(tables_SC)
    launch_append(
        k_NKD, v_NKD, k_PUKW, v_PUKW, slots_N, positions_N, limit_S, tables_SC=tables_SC,
        q_NHD=q_NHD, cos_TR=cos_TR, sin_TR=sin_TR, k_scale=k_scale, v_scale=v_scale,
        q_norm_D=q_norm_D, k_norm_D=k_norm_D, norm_eps=norm_eps,
    )  # fmt: skip


def paged_decode(
    q_BHD: torch.Tensor,
    k_PUKW: torch.Tensor,
    v_PUKW: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    tables_SC: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode` over blocks, bit for bit. T is C * U; tables_SC: int32 on the device, rows contiguous.

    Token scales: float16 [P, U, K]. workspace: at least `workspace_elements(q_BHD, k_PUKW, tables_SC=tables_SC)`.

    Cost and Raises: as for `decode`.
    """
    _check_given(tables_SC)
    checks.runnable("q_BHD", q_BHD.device)
    memory = kv_memory(k_PUKW, v_PUKW, k_scale, v_scale, tables_SC, q_BHD.dtype, q_BHD.device)
    options = checks.attention_options(scale, window, softcap, memory.head_dim)
    return launch_decode(q_BHD, memory, lengths_B, slots_B, limit_S, options, out, workspace)


def paged_cascade(
    q_BHD: torch.Tensor,
    k_PUKD: torch.Tensor,
    v_PUKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    tables_SC: torch.Tensor,
    group_starts_G1: torch.Tensor,
    leaders_G: torch.Tensor,
    prefix_rows_G: torch.Tensor,
    *,
    firsts_B: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cascade` over blocks, bit for bit. T is C * U.

    A prefix is read through its leader's table: only the leader's rows are touched, and only its entries for them. tables_SC:
    int32 on the device, rows contiguous. workspace: at least `workspace_elements(q_BHD, k_PUKD, tables_SC=tables_SC)` of
    cascade.py.

    Cost and Raises: as for `cascade`.
    """
    _check_given(tables_SC)
    prefixes = Prefixes.of(q_BHD, k_PUKD, v_PUKD, tables_SC, group_starts_G1, leaders_G, prefix_rows_G, limit_S)
    options = checks.attention_options(scale, None, softcap, prefixes.memory.head_dim)
    return launch_cascade(q_BHD, prefixes, lengths_B, slots_B, firsts_B, options, out, workspace)


def paged_prefill(
    q_NHD: torch.Tensor,
    k_PUKW: torch.Tensor,
    v_PUKW: torch.Tensor,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    tables_SC: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    limit_S: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`prefill` over blocks, bit for bit but where slots have the kernel for Hopper.

    T is C * U; tables_SC: int32 on the device, rows contiguous.

    Cost and Raises: as for `prefill`.
    """
    _check_given(tables_SC)
    checks.runnable("q_NHD", q_NHD.device)
    memory = kv_memory(k_PUKW, v_PUKW, k_scale, v_scale, tables_SC, q_NHD.dtype, q_NHD.device)
    options = checks.attention_options(scale, window, softcap, memory.head_dim)
    return launch_prefill(q_NHD, memory, query_starts, lengths_B, slots_B, limit_S, options, out, workspace)


def _check_given(tables_SC: object) -> None:
    if tables_SC is None:
        checks.refuse("tables_SC", None, "int32 [slots, blocks of each]; without a table the kernels of slots will do")
