"""The models of the engine: `decoder` (the Llama line, from configuration), `transformers` (any other, by its own code).

Weights of both go through `checkpoint`, which refuses those that are not the model's; `weights` reads them for `decoder`.

To add a family to `decoder`, name it and the fields that it reads there.
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
        """Can a step of it be captured in a CUDA graph, and replayed for other tokens, slots and lengths?"""

    @property
    def vocabulary_size(self) -> int:
        """Of the logits."""

    def forward(self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens; [B, V] logits behind those at `last_B` (all, if None)."""

    @property
    def has_states(self) -> bool:
        """Can it compute in two halves, `states` and `logits`?"""

    def states(self, ids_N: torch.Tensor, step: AttentionMetadata, rows_W: torch.Tensor) -> torch.Tensor:
        """Append and attend to a step's tokens; [W, E] of what `logits` makes logits, behind those at `rows_W`."""

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """[W, V] of what the last `states` gave, or of some rows of it."""

    @property
    def keys(self) -> RotaryKeys | None:
        """The keys of all layers; None if the model's own code alone knows how they are rotated."""

    def check(self) -> None:
        """After a forward pass: is this a model that can be served at all? Raises ValueError."""
