"""The few operations that a decoder is made of, on its residual stream; here in plain torch, as transformers does them.

Legend: N tokens of a step, B rows that are kept, E hidden, G outputs, F = G / 2 gated ones, I inputs, V vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Stream(Protocol):
    """The residual stream of one forward pass, [N, E]. What is read from it is normed first, what is written is added."""

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The linear map [N, G] of the normed stream."""

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        """The same, with rows of gate, then of up: silu(gate) * up, [N, F]."""

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        """Add the linear map of `x_NI`."""

    def keep(self, rows_B: torch.Tensor) -> "Stream":
        """The stream of these rows alone; this one is not used any more. Not between `add` and the next `project` or `gate`."""

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        """The normed stream [N, E]."""


class Ops(Protocol):
    """How one device does it."""

    def stream(self, x_NE: torch.Tensor, norm_eps: float) -> Stream:
        """A residual stream that begins as `x_NE`, which belongs to it from now on and may be written."""

    def linear(self, x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """[B, V]"""


def ops_for(device: torch.device) -> Ops:
    """vmmkv's kernels on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    from vmmkv.server.engine.decoder.kernel_ops import KernelOps  # not above: it imports triton

    return KernelOps()


class TorchOps:
    """Plain torch, with the roundings of transformers and in its order."""

    def stream(self, x_NE: torch.Tensor, norm_eps: float) -> Stream:
        """A stream whose tensors are replaced, never written."""
        return _TorchStream(x_NE, norm_eps)

    def linear(self, x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        """torch's own."""
        return F.linear(x_BE, weight_VE)


class _TorchStream:
    def __init__(self, x_NE: torch.Tensor, norm_eps: float) -> None:
        self._x_NE = x_NE
        self._norm_eps = norm_eps

    def project(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        return F.linear(self.normed(norm_E), weight_GE, bias_G)

    def gate(self, norm_E: torch.Tensor, weight_GE: torch.Tensor, bias_G: torch.Tensor | None) -> torch.Tensor:
        gate_NF, up_NF = self.project(norm_E, weight_GE, bias_G).chunk(2, dim=-1)
        return F.silu(gate_NF) * up_NF

    def add(self, x_NI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        self._x_NE = self._x_NE + F.linear(x_NI, weight_EI, bias_E)

    def keep(self, rows_B: torch.Tensor) -> Stream:
        return _TorchStream(self._x_NE.index_select(0, rows_B), self._norm_eps)

    def normed(self, norm_E: torch.Tensor) -> torch.Tensor:
        wide_NE = self._x_NE.float()
        wide_NE = wide_NE * torch.rsqrt(wide_NE.pow(2).mean(-1, keepdim=True) + self._norm_eps)
        return norm_E * wide_NE.to(self._x_NE.dtype)
