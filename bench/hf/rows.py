"""Rows of a model that does not run: random keys and values for every layer, written pass by pass, and read again.

B sequences, K kv heads, T tokens, D head dim
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import torch

from bench.serve.models import ServedModel
from bench.timing import WrongNumbers

_LARGEST_SEED: Final = 2**20


class Rows:
    """What passes write. A pass's rows follow from the seed and its number; no two layers have the same.

    All layers see windows of one random tensor, so that nothing is allocated while they are written.
    """

    def __init__(self, model: ServedModel, device: torch.device, *, batch: int, pass_tokens: int, seed: int) -> None:
        self.layers: Final = model.layers
        self.batch: Final = batch
        self.token_bytes: Final = batch * model.row_bytes
        """Of a token of every sequence, in all layers."""
        self._seed = seed % _LARGEST_SEED
        self._generator = torch.Generator(device)
        kv_heads, head_dim = (cast(int, model.config[key]) for key in ("num_key_value_heads", "head_dim"))
        size = (batch, kv_heads, pass_tokens + self.layers, head_dim)
        self._planes: Final = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in ("k", "v")]

    def draw(self, number: int, num_tokens: int) -> None:
        """The rows of this pass, for `of_layer`."""
        self._generator.manual_seed(self._seed * _LARGEST_SEED + number)
        for plane in self._planes:
            plane[:, :, : num_tokens + self.layers].normal_(generator=self._generator)

    def of_layer(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer in the pass that was drawn last, [B, K, T, D]."""
        k_BKTD, v_BKTD = (plane[:, :, layer : layer + num_tokens] for plane in self._planes)
        return k_BKTD, v_BKTD

    def write(self, cache: Any, plan: Sequence[int], *, first: int = 0) -> None:
        """Passes of so many tokens each through all layers; the number of the first is `first`."""
        for number, num_tokens in enumerate(plan, first):
            self.draw(number, num_tokens)
            for layer in range(self.layers):
                cache.update(*self.of_layer(layer, num_tokens), layer)

    def check(self, cache: Any, plan: Sequence[int], *, first: int = 0) -> None:
        """Has it every row of these passes, and of no others? Raises: WrongNumbers naming the first that is another."""
        start = 0
        for number, num_tokens in enumerate(plan, first):
            self.draw(number, num_tokens)
            for layer in range(self.layers):
                kept = cache.layers[layer]
                for name, given, wanted in zip(
                    ("K", "V"), (kept.keys, kept.values), self.of_layer(layer, num_tokens), strict=True
                ):
                    if not torch.equal(given[:, :, start : start + num_tokens], wanted):
                        raise WrongNumbers(
                            f"{name} of layer {layer}, tokens {start} to {start + num_tokens}: not what was written"
                        )
            start += num_tokens


def plan_of(num_tokens: int, *, chunk_tokens: int, steps: int) -> list[int]:
    """A prompt in chunks, then `steps` single tokens; `num_tokens` in all, or fewer single ones if it is so short."""
    steps = min(steps, num_tokens)
    chunks, rest = divmod(num_tokens - steps, chunk_tokens)
    return [chunk_tokens] * chunks + [rest] * bool(rest) + [1] * steps
