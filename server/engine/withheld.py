"""Tokens that may not come yet: those that would end an answer which is to have `min_tokens` first.

    slot ── ids_SE ──> what it may not have      withheld_before_S ──> as long as fewer tokens than that are behind it

How many are behind a token the device knows, so steps that are launched ahead need nothing from the host.

Legend: B rows of the batch, V vocabulary, S slots, N sequences newly admitted, E ids.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from vmmkv.server.engine.sampling_state import Entry
from vmmkv.server.engine.uploads import Uploads

_LEAST_IDS: Final = 4
"""Then twice as many, and so on."""


class Withheld:
    """The ids of every slot. It has no memory until somebody asks."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._ids_SE = torch.zeros((num_slots, 0), dtype=torch.int64, device=device)

    def assign(self, entries: Sequence[Entry], uploads: Uploads) -> None:
        """Those entries that ask for it have their ids from now on; what others had is nobody's. Waits for nothing."""
        asking = {entry.slot: sorted(entry.withheld) for entry in entries if entry.withheld_before}
        if not asking:
            return
        self._grow(max(map(len, asking.values())))
        num_ids = self._ids_SE.shape[1]
        # Filled up with an id that is among them: to withhold it twice is to withhold it.
        filled_NE = np.array([ids + ids[:1] * (num_ids - len(ids)) for ids in asking.values()], np.int32)
        slots_N, filled = uploads.pack([list(asking), filled_NE.reshape(-1)])
        self._ids_SE.index_copy_(0, slots_N.long(), filled.view(filled_NE.shape).long())

    def withhold(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, before_S: torch.Tensor
    ) -> None:
        """-inf, in place, for what the slots may not have behind positions_B tokens. A few launches; waits for nothing."""
        if not self._ids_SE.shape[1]:
            return
        slots_B = slots_B.long()
        ids_BE = self._ids_SE[slots_B]
        is_early_B1 = (positions_B < before_S[slots_B])[:, None]
        # Equal ids of a row are written the same.
        logits_BV.scatter_(1, ids_BE, logits_BV.gather(1, ids_BE).masked_fill(is_early_B1, -torch.inf))

    def _grow(self, num_ids: int) -> None:
        """Room for so many ids of a slot; those that there are stay, filled up with the first of them."""
        old = self._ids_SE.shape[1]
        if num_ids <= old:
            return
        grown_SE = torch.zeros((self._num_slots, max(num_ids, 2 * old, _LEAST_IDS)), dtype=torch.int64, device=self._device)
        if old:
            grown_SE.copy_(self._ids_SE[:, :1].expand_as(grown_SE))
            grown_SE[:, :old] = self._ids_SE
        self._ids_SE = grown_SE
