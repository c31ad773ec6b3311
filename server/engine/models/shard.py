"""The part of a decoder that one of several ranks has: some of the heads of each layer, and some columns of its MLP.

    q, k, v, gate, up   rows of the rank's heads and columns       the rank's part of the activations
    out, down           columns that take these                    a part of the sum that all ranks add up

    head                rows of the rank's tokens                  the logits of these, which rank 0 joins

Each rank has the embedding and the norms; rank 0 alone has the biases behind a sum. Heads and columns that fill up the last
ranks are zeroes, which change no sum.
"""

from dataclasses import dataclass, replace

import torch

from vmmkv.server.engine.models.decoder import MULTIPLE, DecoderConfig, head_part
from vmmkv.units import ceil_div


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a whole decoder."""

    whole: DecoderConfig
    rank: int = 0
    num_ranks: int = 1

    @property
    def own(self) -> DecoderConfig:
        """The decoder of this rank: its sizes are the same on all ranks."""
        kv_heads = ceil_div(self.whole.num_kv_heads * self._copies, self.num_ranks)
        head_first, head_size = head_part(self.rank, self.num_ranks, self.whole.vocab_size)
        return replace(
            self.whole,
            num_heads=kv_heads * self._queries_each,
            num_kv_heads=kv_heads,
            mlp_size=ceil_div(self.whole.mlp_size, MULTIPLE * self.num_ranks) * MULTIPLE,
            head_first=head_first,
            head_size=head_size,
        )

    def copy(self, name: str, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `place` with this rank's part of a whole tensor, of the name that transformers saves it under."""
        own, whole, kind = self.own, self.whole, name.rpartition(".")[0].rpartition(".")[2]
        first_kv = self.rank * own.num_kv_heads
        first_of = {
            "q_proj": first_kv * self._queries_each * whole.head_dim,
            "k_proj": first_kv // self._copies * whole.head_dim,
            "v_proj": first_kv // self._copies * whole.head_dim,
            "o_proj": first_kv * self._queries_each * whole.head_dim,
            "lm_head": own.head_first,
            "gate_proj": self.rank * own.mlp_size,
            "up_proj": self.rank * own.mlp_size,
            "down_proj": self.rank * own.mlp_size,
        }
        is_summed = kind in ("o_proj", "down_proj")
        if kind not in first_of or (is_summed and tensor.ndim == 1):
            place.copy_(tensor)
            if is_summed and self.rank:
                place.zero_()
            return
        dim, first = int(is_summed), first_of[kind]
        count = max(0, min(place.shape[dim], tensor.shape[dim] - first))
        place.narrow(dim, count, place.shape[dim] - count).zero_()
        place.narrow(dim, 0, count).copy_(tensor.narrow(dim, min(first, tensor.shape[dim]), count))

    @property
    def _copies(self) -> int:
        """Ranks that share a KV head, each with some of its queries: as many as divide them, if there are ranks to spare."""
        queries, most = self.whole.num_heads // self.whole.num_kv_heads, self.num_ranks // self.whole.num_kv_heads
        return max((copies for copies in range(2, most + 1) if queries % copies == 0), default=1)

    @property
    def _queries_each(self) -> int:
        """Query heads of each KV head that a rank has."""
        return self.whole.num_heads // self.whole.num_kv_heads // self._copies
