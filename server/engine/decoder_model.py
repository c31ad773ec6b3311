"""The config-driven decoder over the rows of a cache."""

from typing import Final

import torch

from vmmkv.server.engine.attention import CachedAttention
from vmmkv.server.engine.batch import Batch
from vmmkv.server.engine.decoder import Decoder
from vmmkv.server.engine.kv import KV
from vmmkv.server.engine.rows import Rope, Rows


class DecoderModel:
    """A decoder whose keys and values are a cache's. Several can live in one process."""

    implementation: Final = "vmmkv"
    capturable: Final = True
    has_states: Final = True

    def __init__(self, decoder: Decoder, cache: KV, rows: Rows) -> None:
        config = decoder.config
        cos_TR, sin_TR = config.rope.tables(cache.max_tokens, cache.device)
        windows = {layer: window for layer, window in enumerate(config.windows) if window is not None}
        self._decoder = decoder
        self._attention = CachedAttention(rows, rope=Rope(cos_TR, sin_TR), windows=windows)
        self.vocabulary_size: Final = config.vocab_size

    def forward(self, ids_N: torch.Tensor, batch: Batch, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens; [B, V] logits behind those at `last_B` (all, if None)."""
        self._attention.begin(batch)
        return self._decoder.logits(self._decoder.forward(ids_N, self._attention, last_B))

    def states(self, ids_N: torch.Tensor, batch: Batch, rows_W: torch.Tensor) -> torch.Tensor:
        """See Model: the final, normed hidden states."""
        self._attention.begin(batch)
        return self._decoder.forward(ids_N, self._attention, rows_W)

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self._decoder.logits(states_WE)

    def check(self) -> None:
        """It is known to be one that can be served."""
