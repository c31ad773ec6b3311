"""The groups of rows that share a prefix, as attention reads them: on the device, at addresses that do not change."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from vmmkv_server.engine.attention import SharedPrefixes
from vmmkv_server.engine.kv_backend import Slots
from vmmkv_server.engine.uploads import Uploads, aligned_parts, packed_size

MAX_GROUPS: Final = 8


class PrefixGroup(NamedTuple):
    """Requests with a common prefix: their slots, and the number of common tokens."""

    members: Slots
    num_common: int

    @property
    def saved(self) -> int:
        """Rows that a step reads less."""
        return (len(self.members) - 1) * self.num_common


class GroupTensors:
    """The groups among the rows that decode next, on the device, at addresses that do not change. At first there are none."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.are_any = False
        self._sizes = MAX_GROUPS + 1, MAX_GROUPS, MAX_GROUPS, max_rows
        self._packed = torch.zeros(packed_size(self._sizes), dtype=torch.int32, device=device)

    def tensors(self, num_rows: int) -> SharedPrefixes:
        """Tensors for a batch of so many rows."""
        starts_G1, leaders_G, num_rows_G, firsts_B = aligned_parts(self._packed, self._sizes)
        return SharedPrefixes(starts_G1=starts_G1, leaders_G=leaders_G, num_rows_G=num_rows_G, firsts_B=firsts_B[:num_rows])

    def upload(self, slots: Slots, groups: Sequence[PrefixGroup], uploads: Uploads) -> None:
        """The first rows of the batch, whose slots these are, are the members of the first group, then of the next."""
        self.are_any = bool(groups)
        if not groups:
            return  # steps without groups look at none of it
        packed = np.zeros(len(self._packed), np.int32)
        starts, leaders, num_rows, firsts = aligned_parts(packed, self._sizes)
        begin = 0
        for index, group in enumerate(groups):
            end = begin + len(group.members)
            leaders[index], num_rows[index] = slots[begin], group.num_common
            firsts[begin:end] = group.num_common
            starts[index + 1 :] = begin = end
        uploads.into(self._packed, packed)
