"""The operations of a decoder by torch, with the roundings of transformers and in its order. `kernel_ops` has them for a GPU.

Legend: N tokens of a step, B rows that are kept, E hidden, G outputs, F = G / 2 gated ones, I inputs.
"""

import torch
import torch.nn.functional as F

from vmmkv_server.engine.attention import rms_norm
from vmmkv_server.engine.collectives import Collectives


class Stream:
    """The residual stream of one forward pass, [N, E]. Reads are normed first, writes are added."""

    def __init__(self, x_NE: torch.Tensor, norm_eps: float, ranks: Collectives | None = None) -> None:
        """Begin as `x_NE`, which the stream owns from now on and may write. With `ranks`, each sum that is added is a part."""
        self._x_NE = x_NE
        self._norm_eps = norm_eps
        self._ranks = ranks

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The linear map [N, G] of the normed stream."""
        return F.linear(self.normed(norm_E), weight_GE, bias_G)

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The same, with rows of gate, then of up: silu(gate) * up, [N, F]."""
        gate_NF, up_NF = self.project(norm_E, weight_GE, bias_G).chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        """Add the linear map of `x_NI`, summed over all ranks."""
        added_NE = F.linear(x_NI, weight_EI, bias_E)
        self._x_NE = self._x_NE + (added_NE if self._ranks is None else self._ranks.sum(added_NE))

    def keep(self, rows_B: torch.Tensor) -> "Stream":
        """The stream of these rows alone; this one is not used any more. Not between `add` and the next `project` or `gate`."""
        return Stream(self._x_NE.index_select(0, rows_B), self._norm_eps, self._ranks)

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        """The normed stream [N, E]."""
        return rms_norm(self._x_NE, norm_E, self._norm_eps)
