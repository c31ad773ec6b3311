"""The models of the engine: `decoder` (the Llama line, from configuration), `transformers` (any other, by its own code).

Weights of both go through `checkpoint`, which refuses those that are not the model's; `weights` reads them for `decoder`.

To add a family to `decoder`, name it and the fields that it reads there. ARCHITECTURE.md lists the other places.
"""

from typing import Protocol

import torch

from vmmkv_server.engine.attention import AttentionMetadata, RotaryKeys


class EngineModel(Protocol):
    """Computes the tokens of a step over the cache's slots, and the logits behind some of them."""

    @property
    def implementation(self) -> str:
        """`vmmkv` or `transformers`."""

    @property
    def capturable(self) -> bool:
        """Can a step of the model be captured in a CUDA graph, and replayed for other tokens, slots and lengths?"""

    @property
    def vocabulary_size(self) -> int:
        """Number of logits of a token."""

    def forward(self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns logits [B, V] behind those at `last_B` (all, if None)."""

    @property
    def has_states(self) -> bool:
        """Can the model compute in two halves, `states` and `logits`?"""

    def states(self, ids_N: torch.Tensor, step: AttentionMetadata, rows_W: torch.Tensor) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns hidden states [W, E] behind those at `rows_W`, for `logits`."""

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """Logits [W, V] of the result of the last `states`, or of some of its rows."""

    @property
    def keys(self) -> RotaryKeys | None:
        """The keys of all layers; None if the model's own code alone knows how they are rotated."""

    def check(self) -> None:
        """Check, after a forward pass, that this model can be served. Raises: ValueError."""
