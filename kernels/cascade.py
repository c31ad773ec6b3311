"""Cascade attention for decode: sequences that share a prefix attend to it once, as rows of one problem.

After Hydragen (Juravsky et al., 2024) and FlashInfer (Ye et al., 2024). The sharers of a prefix stand side by side in the
batch, as a *group*. A prefix is one range of rows, in the slot of the group's *leader*, so that attending to it is a plain
matrix product with up to 128 queries on one side, spread over the whole device as decode is (cascade_prefix.py). To what each
sequence has for itself `decode` attends, from a first row on. Both come with their log-sum-exp, by which they are merged.
All of it is read on the device: one captured graph serves every grouping of a batch.

Legend: B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim, G groups (and G1 = G + 1).
"""

import torch

from vmmkv.kernels import checks
from vmmkv.kernels.cascade_prefix import ALIGNMENT_ELEMENTS, Parts, Prefixes
from vmmkv.kernels.decode import launch_decode
from vmmkv.kernels.decode import workspace_elements as decode_elements
from vmmkv.units import round_up


def cascade(
    q_BHD: torch.Tensor,
    k_STKD: torch.Tensor,
    v_STKD: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
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
    """Attend from one new query of each sequence to the rows [0, lengths_B[b]), as `decode` does, but once to a shared prefix.

    Group g is the sequences [group_starts_G1[g], group_starts_G1[g + 1]) of the batch, whose first prefix_rows_G[g] rows are
    the same; no sequence has fewer. They attend to those in slot leaders_G[g], and to the others in their own slots, where
    those of the prefix are to be mapped and finite nevertheless (see `firsts_B` of `decode`). The leader need not be one of
    them. A group without sequences or rows is left out, and who is in no group attends as in `decode`. A length of 0, or a slot
    outside [0, S), gives zeros. What comes out is to be dropped if the leader is outside [0, S), or if, with `limit_S`, a
    sequence has passed the limit of its own slot, or its prefix that of the leader's: rows at and past a limit are not loaded.

    q_BHD, k_STKD, v_STKD: of one dtype; quantised K and V are refused. group_starts_G1 (not descending), leaders_G,
    prefix_rows_G: int32 on the device. firsts_B: what `firsts_of` gives; an engine computes it once for all layers.
    workspace: float32, at least `workspace_elements(...)`, not shared by launches that may overlap; if None it comes from
    torch's allocator. The others are as for `decode`.

    The result is that of `decode` within rounding. Its bits are the same on every run, but depend on batch and groups.

    Cost: four launches (some more without `firsts_B`), no synchronisation; safe while a graph is captured, and the graph
    serves all lengths and groups.
    Raises: ValueError naming the argument.
    """
    prefixes = Prefixes.of(q_BHD, k_STKD, v_STKD, None, group_starts_G1, leaders_G, prefix_rows_G, limit_S)
    options = checks.attention_options(scale, None, softcap, prefixes.memory.head_dim)
    return launch_cascade(q_BHD, prefixes, lengths_B, slots_B, firsts_B, options, out, workspace)


def launch_cascade(
    q_BHD: torch.Tensor,
    prefixes: Prefixes,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    firsts_B: torch.Tensor | None,
    options: checks.AttentionOptions,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> torch.Tensor:
    """`cascade` over the memory that the prefixes are in."""
    memory = prefixes.memory
    num_sequences, num_heads, _ = q_BHD.shape
    elements = workspace_elements(q_BHD, memory.k, tables_SC=memory.tables_SC)
    if workspace is None:
        workspace = torch.empty(elements, dtype=torch.float32, device=q_BHD.device)
    else:
        checks.workspace("workspace", workspace, elements, q_BHD.device)
    if firsts_B is None:
        firsts_B = firsts_of(prefixes.starts_G1, prefixes.rows_G, num_sequences)
    workspace = workspace.view(-1)
    num_lse = num_sequences * num_heads
    parts, rest = workspace[: prefixes.parts.elements], workspace[prefixes.parts.elements :]
    lse_BH, rest = rest[:num_lse].view(num_sequences, num_heads), rest[round_up(num_lse, ALIGNMENT_ELEMENTS) :]

    if num_sequences > 0:
        prefixes.attend(q_BHD, options, parts)
    out = launch_decode(q_BHD, memory, lengths_B, slots_B, prefixes.limit_S, options, out, rest, firsts_B, lse_BH)
    if num_sequences > 0:
        prefixes.merge(out, lse_BH, lengths_B, slots_B, parts)
    return out


def workspace_elements(q_BHD: torch.Tensor, k: torch.Tensor, *, tables_SC: torch.Tensor | None = None) -> int:
    """float32 elements that `cascade` needs as its workspace for tensors like these, whatever the lengths and groups.

    k: the views of all slots, or of all blocks with `tables_SC`.
    """
    num_lse = round_up(q_BHD.shape[0] * q_BHD.shape[1], ALIGNMENT_ELEMENTS)
    return Parts.of(q_BHD, k.shape[2]).elements + num_lse + decode_elements(q_BHD, k, tables_SC=tables_SC)


def firsts_of(group_starts_G1: torch.Tensor, prefix_rows_G: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[B] int32 on the device: how many rows of each sequence are of its group's prefix; 0 for who is in no group.

    Cost: a few small launches, no synchronisation; safe while a graph is captured.
    """
    i_B = torch.arange(num_sequences, dtype=torch.int32, device=group_starts_G1.device)
    num_groups = prefix_rows_G.shape[0]
    if num_groups == 0:
        return torch.zeros_like(i_B)
    i_group_B = torch.searchsorted(group_starts_G1, i_B, right=True) - 1
    is_grouped_B = (i_group_B >= 0) & (i_group_B < num_groups)
    return prefix_rows_G[i_group_B.clamp(0, num_groups - 1)].where(is_grouped_B, 0)
