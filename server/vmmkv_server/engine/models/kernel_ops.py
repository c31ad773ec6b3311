"""The operations of a decoder by vmmkv's kernels. Importing this imports triton.

A step of few tokens is bound by the weights that it reads: each linear map is one kernel that norms, activates and adds on the
way. A step of many is bound by arithmetic, which cuBLAS does best; what lies between is added and normed in one kernel.

Legend: N tokens of a step, B rows that are kept, E hidden, G outputs, F = G / 2 gated ones, I inputs, V vocabulary.
"""

import torch
import torch.nn.functional as F

from vmmkv_kernels import linear as kernels
from vmmkv_kernels.activation import silu_mul
from vmmkv_kernels.norm import rms_norm
from vmmkv_server.engine.collectives import Collectives
from vmmkv_server.engine.models.torch_ops import Stream


def stream(x_NE: torch.Tensor, norm_eps: float, ranks: Collectives | None = None) -> Stream:
    """A residual stream that begins as `x_NE`, and is written there."""
    return (_NarrowStream if x_NE.shape[0] <= kernels.MAX_ROWS else _WideStream)(x_NE, norm_eps, ranks)


def linear(x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """A linear map without activation: logits [B, V] in the decoder's head."""
    return (kernels.linear if x_BE.shape[0] <= kernels.MAX_ROWS else F.linear)(x_BE, weight_VE)


class _NarrowStream(Stream):
    """Residual stream of a few tokens: a kernel for each linear map, with norm, activation and residual."""

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        return kernels.linear(self._x_NE, weight_GE, bias_N=bias_G, norm_weight_K=norm_E, norm_eps=self._norm_eps)

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        return kernels.linear(self._x_NE, weight_GE, bias_N=bias_G, norm_weight_K=norm_E, norm_eps=self._norm_eps, gated=True)

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        if self._ranks is None or not self._ranks.rank:
            kernels.linear(x_NI, weight_EI, bias_N=bias_E, residual_MN=self._x_NE)
        else:
            kernels.linear(x_NI, weight_EI, bias_N=bias_E, out=self._x_NE)
        if self._ranks is not None:
            self._ranks.sum(self._x_NE)  # with what it was on rank 0

    def keep(self, rows_B: torch.Tensor) -> Stream:
        return stream(self._x_NE.index_select(0, rows_B), self._norm_eps, self._ranks)

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        return rms_norm(self._x_NE, norm_E, self._norm_eps)


class _WideStream(Stream):
    """Residual stream of many tokens: `_x_NE`, plus `_due_NE` of all ranks until the next norm adds it."""

    _due_NE: torch.Tensor | None = None

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        return silu_mul(self.project(norm_E, weight_GE, bias_G))

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        assert self._due_NE is None, "something is due already: norm between two additions"
        self._due_NE = F.linear(x_NI, weight_EI, bias_E)

    def keep(self, rows_B: torch.Tensor) -> Stream:
        assert self._due_NE is None, "rows can be kept after a norm only"
        return stream(self._x_NE.index_select(0, rows_B), self._norm_eps, self._ranks)

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        due_NE, self._due_NE = self._due_NE, None
        if due_NE is None:
            return rms_norm(self._x_NE, norm_E, self._norm_eps)
        if self._ranks is not None:
            if (symmetric := self._ranks.symmetric) is not None and symmetric.fits(due_NE):
                return symmetric.sum(due_NE, residual_NE=self._x_NE, weight_E=norm_E, eps=self._norm_eps)
            self._ranks.sum(due_NE)
        return rms_norm(due_NE, norm_E, self._norm_eps, residual_NE=self._x_NE)
