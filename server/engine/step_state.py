"""Where every sequence stands, on the device: what a decode step begins from and moves on, with nothing from the host."""

import torch

from vmmkv.server.engine.kv import KV

IDLE = -2
"""In place of a token, for a row that had no room for one, or was nobody's: as in `vmmkv.kernels.step`."""


class StepState:
    """Of every slot its last token, which has no row yet, and the rows that it has; slot 0 is nobody's, and pads."""

    def __init__(self, cache: KV) -> None:
        self._limit = cache.limit
        self.tokens_S = torch.zeros_like(cache.limit)
        self.lengths_S = torch.zeros_like(cache.limit)

    def begin(self, slots_B: torch.Tensor, ids_B: torch.Tensor, positions_B: torch.Tensor, ends_B: torch.Tensor) -> None:
        """What the step computes: tokens, their rows, and the rows that there are then; 0 for rows of slot 0. One launch."""
        if slots_B.is_cuda:
            from vmmkv.kernels.step import begin_step

            begin_step(slots_B, self.tokens_S, self.lengths_S, ids_B, positions_B, ends_B)
        else:
            ids_B.copy_(self.tokens_S[slots_B])
            positions_B.copy_(self.lengths_S[slots_B])
            ends_B.copy_((positions_B + 1) * (slots_B > 0))

    def end(self, slots_B: torch.Tensor, sampled_B: torch.Tensor, ends_B: torch.Tensor, out_B: torch.Tensor) -> None:
        """The sampled tokens are the slots' last, behind `ends_B` rows; `out_B` is what the host reads. One launch.

        A row that its slot's limit does not allow stays where it was, and gives IDLE.
        """
        if slots_B.is_cuda:
            from vmmkv.kernels.step import end_step

            end_step(slots_B, sampled_B, ends_B, self._limit, self.tokens_S, self.lengths_S, out_B)
        else:
            moves = (slots_B > 0) & (ends_B <= self._limit[slots_B])
            moved = slots_B[moves].long()
            self.tokens_S[moved] = sampled_B[moves].clamp(min=0)
            self.lengths_S[moved] = ends_B[moves]
            out_B.copy_(torch.where(moves, sampled_B, IDLE))
