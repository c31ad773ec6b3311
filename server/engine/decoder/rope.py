"""Rotary position embedding (Su et al., 2021) with the frequencies that transformers computes.

Legend: T positions, R = D / 2 angles: angle j turns elements j and j + D / 2 of a head.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vmmkv.server.engine.decoder.errors import Unsupported

SCALED: Final = ("linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies do not depend on how long a sequence is; transformers' own functions compute them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """How fast each angle of a head turns: what a model's rotary embedding is, whatever the position."""

    kind: str
    frequencies_R: tuple[float, ...] = field(repr=False)
    """Radians from one position to the next: float32 numbers."""
    scale: float
    """Of all cosines and sines: yarn's attention factor, else 1."""

    @classmethod
    def of(cls, config: Any, head_dim: int) -> "Frequencies":
        """Read the `rope_parameters` of a transformers configuration. Raises Unsupported."""
        parameters = config.rope_parameters
        kind = parameters.get("rope_type")
        if kind == "default":
            # As in each model's own file: transformers has no function for it.
            exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies_R, scale = 1.0 / parameters["rope_theta"] ** exponents_R, 1.0
        elif kind in SCALED:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies_R, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise Unsupported(f"rope_parameters are {parameters}; known are the types default, {', '.join(SCALED)}")
        rotated = 2 * len(frequencies_R)
        if rotated != head_dim or parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise Unsupported(f"rope_parameters are {parameters}, which rotate a part of each head and not all {head_dim}")
        return cls(kind=kind, frequencies_R=tuple(frequencies_R.tolist()), scale=scale)

    def tables(self, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] of positions [0, num_positions), float32, times `scale`."""
        positions_T = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles_TR = positions_T[:, None] * torch.tensor(self.frequencies_R, dtype=torch.float32, device=device)
        return angles_TR.cos() * self.scale, angles_TR.sin() * self.scale
