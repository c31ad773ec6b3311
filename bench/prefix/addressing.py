"""Where rows lie, and what reads and writes them there: in slots of addresses, or in blocks under a table.

On a GPU the project's kernels, which are the same code for both. On a CPU the plain torch of `reference`: it has no blocks, so
there they are gathered first.

Legend: N new tokens, B sequences, S slots, T rows of a slot, P blocks, U rows of a block, C columns of a table, H query heads,
K kv heads, D head dim, R = D / 2 angles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from bench.baselines.common_prefill import prefill_as_over_blocks
from vmmkv.kernels import reference
from vmmkv.units import ceil_div

NOBODY: Final = -1
"""The slot of a row that only fills up a batch: the kernels neither read nor write anything for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Whose the new tokens are. All int32 on the device."""

    slots_N: torch.Tensor
    positions_N: torch.Tensor
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    """With the new tokens."""
    starts: torch.Tensor | None
    """[B + 1] where each sequence's tokens begin; None if each has one, so that N is B."""


class Addressing(Protocol):
    """The memory of all layers."""

    def append(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        rows: NewRows,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """Rotate q in place and K on the way, and write K and V."""
        ...

    def attend(self, layer: int, q_NHD: torch.Tensor, rows: NewRows) -> torch.Tensor:
        """[N, H, D]: causal attention over each sequence's rows, the new ones too."""
        ...


Planes = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer."""


class Slots:
    """Over the views of a cache: [S, T, K, D] a layer, on a GPU."""

    def __init__(self, planes: Planes, limit_S: torch.Tensor, most_sequences: int) -> None:
        self._planes, self._limit_S = planes, limit_S
        self._workspace = _Workspace(most_sequences)

    def append(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        rows: NewRows,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """See Addressing.append."""
        from vmmkv.kernels.attention.append import append

        k, v = self._planes[layer]
        where = (rows.slots_N, rows.positions_N, self._limit_S)
        append(k_NKD, v_NKD, k, v, *where, q_NHD=q_NHD, cos_TR=cos_TR, sin_TR=sin_TR)

    def attend(self, layer: int, q_NHD: torch.Tensor, rows: NewRows) -> torch.Tensor:
        """See Addressing.attend."""
        from vmmkv.kernels.attention.decode import decode

        k, v = self._planes[layer]
        workspace = self._workspace.of(q_NHD, k, None)
        if rows.starts is None:
            return decode(q_NHD, k, v, rows.lengths_B, rows.slots_B, limit_S=self._limit_S, workspace=workspace)
        return prefill_as_over_blocks(
            q_NHD, k, v, rows.starts, rows.lengths_B, rows.slots_B, limit_S=self._limit_S, workspace=workspace
        )


class Blocks:
    """Over blocks: [P, U, K, D] a layer, and `tables_SC` for all of them, on a GPU."""

    def __init__(self, planes: Planes, tables_SC: torch.Tensor, limit_S: torch.Tensor, most_sequences: int) -> None:
        self._planes, self._tables_SC, self._limit_S = planes, tables_SC, limit_S
        self._workspace = _Workspace(most_sequences)

    def append(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        rows: NewRows,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """See Addressing.append."""
        from vmmkv.kernels.attention.append import append

        k, v = self._planes[layer]
        where = (rows.slots_N, rows.positions_N, self._limit_S)
        append(k_NKD, v_NKD, k, v, *where, tables_SC=self._tables_SC, q_NHD=q_NHD, cos_TR=cos_TR, sin_TR=sin_TR)

    def attend(self, layer: int, q_NHD: torch.Tensor, rows: NewRows) -> torch.Tensor:
        """See Addressing.attend."""
        from vmmkv.kernels.attention.decode import decode
        from vmmkv.kernels.attention.prefill import prefill

        k, v = self._planes[layer]
        where = (rows.lengths_B, rows.slots_B)
        workspace = self._workspace.of(q_NHD, k, self._tables_SC)
        options: dict[str, Any] = {"tables_SC": self._tables_SC, "limit_S": self._limit_S, "workspace": workspace}
        if rows.starts is None:
            return decode(q_NHD, k, v, *where, **options)
        return prefill(q_NHD, k, v, rows.starts, *where, **options)


class _Workspace:
    """One for all layers and steps, as an engine has it: launches on one stream do not overlap in it."""

    def __init__(self, most_sequences: int) -> None:
        self._most_sequences = most_sequences
        self._elements: torch.Tensor | None = None

    def of(self, q_NHD: torch.Tensor, k: torch.Tensor, tables_SC: torch.Tensor | None) -> torch.Tensor:
        """What decode needs for the most sequences of a step."""
        from vmmkv.kernels.attention.decode import workspace_elements

        if self._elements is None:
            like_BHD = q_NHD.new_empty(self._most_sequences, *q_NHD.shape[1:])
            num_elements = workspace_elements(like_BHD, k, tables_SC=tables_SC)
            self._elements = torch.empty(num_elements, dtype=torch.float32, device=q_NHD.device)
        return self._elements


class HostSlots:
    """The same as Slots in plain torch."""

    def __init__(self, planes: Planes, limit_S: torch.Tensor) -> None:
        self._planes, self._limit_S = planes, limit_S

    def append(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        rows: NewRows,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """See Addressing.append."""
        k, v = self._planes[layer]
        where = (rows.slots_N, rows.positions_N, self._limit_S)
        reference.append(k_NKD, v_NKD, k, v, *where, q_NHD=q_NHD, cos_TR=cos_TR, sin_TR=sin_TR)

    def attend(self, layer: int, q_NHD: torch.Tensor, rows: NewRows) -> torch.Tensor:
        """See Addressing.attend."""
        k, v = self._planes[layer]
        return _attend(q_NHD, rows, [(k[slot, :length], v[slot, :length]) for slot, length in _sequences(rows)])


class HostBlocks:
    """The same as Blocks in plain torch."""

    def __init__(self, planes: Planes, tables_SC: torch.Tensor) -> None:
        self._planes, self._tables_SC = planes, tables_SC

    def append(
        self,
        layer: int,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        rows: NewRows,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """See Addressing.append. A block is a slot of its own, which has other positions: so K is rotated before."""
        k, v = self._planes[layer]
        num_rows = k.shape[1]
        blocks_N = self._tables_SC[rows.slots_N.long(), rows.positions_N.long() // num_rows]
        k_NKD = reference.rotate(k_NKD, rows.positions_N, cos_TR, sin_TR)
        q_NHD.copy_(reference.rotate(q_NHD, rows.positions_N, cos_TR, sin_TR))
        full_P = torch.full((k.shape[0],), num_rows, dtype=torch.int32)
        reference.append(k_NKD, v_NKD, k, v, blocks_N, rows.positions_N % num_rows, full_P)

    def attend(self, layer: int, q_NHD: torch.Tensor, rows: NewRows) -> torch.Tensor:
        """See Addressing.attend."""
        gathered = []
        for slot, length in _sequences(rows):
            blocks = self._tables_SC[slot, : ceil_div(length, self._planes[layer][0].shape[1])].long()
            k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[:length] for plane in self._planes[layer])
            gathered.append((k_TKD, v_TKD))
        return _attend(q_NHD, rows, gathered)


def _sequences(rows: NewRows) -> list[tuple[int, int]]:
    """Slot and length of each; on a CPU no batch is filled up."""
    return list(zip(rows.slots_B.tolist(), rows.lengths_B.tolist(), strict=True))


def _attend(q_NHD: torch.Tensor, rows: NewRows, planes: Planes) -> torch.Tensor:
    starts = list(range(len(planes) + 1)) if rows.starts is None else rows.starts.tolist()
    outputs = [
        reference.attend(q_NHD[begin:end], k_TKD, v_TKD, torch.arange(len(k_TKD) - (end - begin), len(k_TKD)))
        for begin, end, (k_TKD, v_TKD) in zip(starts[:-1], starts[1:], planes, strict=True)
    ]
    return torch.cat(outputs).to(q_NHD.dtype)
