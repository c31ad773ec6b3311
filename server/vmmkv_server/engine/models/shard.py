"""The part of a model that one of several ranks has: some of the heads of each layer, and some columns of its MLP.

`Shard` is that of a decoder:

    q, k, v, gate, up   rows of the rank's heads and columns       the rank's part of the activations
    out, down           columns that take these                    a part of the sum that all ranks add up

    head                rows of the rank's tokens                  the logits of these, which rank 0 joins

`split` does so with a model of transformers, by that library's plan, which has a style for each matrix:

    colwise                        as q, k, v, gate, up; packed_colwise with two in one
    rowwise, rowwise_split_input   as out, down; a whole input is cut to the rank's columns
    colwise_gather_output          as head; if all ranks join heads of attention, each attends to its own
    moe_tp_experts                 what the rank's columns of all experts give is summed

Each rank has the embedding and the norms; rank 0 alone has the biases behind a sum. Heads and columns that fill up the last
ranks are zeroes, which change no sum.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from vmmkv.units import ceil_div
from vmmkv_server.engine.collectives import Collectives
from vmmkv_server.engine.models.decoder import MULTIPLE, DecoderConfig, head_part, joined
from vmmkv_server.models import UnsupportedModel

_WHOLE: Final = (None, "embedding_rowwise", "replicated_with_grad_allreduce")
_OF_LINEAR: Final = ("colwise", "rowwise", "rowwise_split_input", "colwise_gather_output")
_OF_EXPERTS: Final = ("packed_colwise", "rowwise")


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a dimension: of equal size on all, with zeroes behind the end. A view if there are no zeroes."""

    num_heads: int
    num_kv_heads: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def own_kv_heads(self) -> int:
        """Number of a rank's KV heads."""
        return ceil_div(self.num_kv_heads * self._copies, self.num_ranks)

    @property
    def queries_each(self) -> int:
        """Number of a rank's query heads for each of its KV heads."""
        return self.num_heads // self.num_kv_heads // self._copies

    def own_columns(self, size: int) -> int:
        """Number of a rank's columns of an MLP."""
        return ceil_div(size, MULTIPLE * self.num_ranks) * MULTIPLE

    def of_queries(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Part of a dimension of query heads."""
        each = tensor.shape[dim] // (self.num_kv_heads * self._copies)
        return _part(tensor, dim, self.rank * self.own_kv_heads * each, self.own_kv_heads * each)

    def of_kv(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Part of a dimension of KV heads."""
        each = tensor.shape[dim] // self.num_kv_heads
        return _part(tensor, dim, self.rank * self.own_kv_heads // self._copies * each, self.own_kv_heads * each)

    def of_columns(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Part of a dimension of an MLP's columns."""
        count = self.own_columns(tensor.shape[dim])
        return _part(tensor, dim, self.rank * count, count)

    def of_joined(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Part of a dimension that `joined` joins, without zeroes."""
        return _part(tensor, dim, *head_part(self.rank, self.num_ranks, tensor.shape[dim]))

    @property
    def _copies(self) -> int:
        """Number of ranks that share a KV head, each with some of its queries. It divides the queries."""
        queries, most = self.num_heads // self.num_kv_heads, self.num_ranks // self.num_kv_heads
        return max((copies for copies in range(2, most + 1) if queries % copies == 0), default=1)


def _part(tensor: torch.Tensor, dim: int, first: int, count: int) -> torch.Tensor:
    first = min(first, tensor.shape[dim])
    there = tensor.narrow(dim, first, min(count, tensor.shape[dim] - first))
    if (num_zeroes := count - there.shape[dim]) == 0:
        return there
    shape = list(tensor.shape)
    shape[dim] = num_zeroes
    return torch.cat([there, there.new_zeros(shape)], dim)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a whole decoder."""

    whole: DecoderConfig
    rank: int = 0
    num_ranks: int = 1

    @property
    def own(self) -> DecoderConfig:
        """Configuration of this rank's decoder, with the same sizes on all ranks."""
        share = self._share
        head_first, head_size = head_part(self.rank, self.num_ranks, self.whole.vocab_size)
        return replace(
            self.whole,
            num_heads=share.own_kv_heads * share.queries_each,
            num_kv_heads=share.own_kv_heads,
            mlp_size=share.own_columns(self.whole.mlp_size),
            head_first=head_first,
            head_size=head_size,
        )

    def copy(self, name: str, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `place` with this rank's part of a whole tensor, of the name that transformers saves it under."""
        share, kind = self._share, name.rpartition(".")[0].rpartition(".")[2]
        own_of = {
            "q_proj": share.of_queries, "k_proj": share.of_kv, "v_proj": share.of_kv, "o_proj": share.of_queries,
            "gate_proj": share.of_columns, "up_proj": share.of_columns, "down_proj": share.of_columns,
            "lm_head": share.of_joined,
        }  # fmt: skip
        is_summed = kind in ("o_proj", "down_proj")
        if kind not in own_of or (is_summed and tensor.ndim == 1):
            place.copy_(tensor)
            if is_summed and self.rank:
                place.zero_()
            return
        place.copy_(own_of[kind](tensor, int(is_summed)))

    @property
    def _share(self) -> Share:
        return Share(self.whole.num_heads, self.whole.num_kv_heads, self.rank, self.num_ranks)


def split(model: Any, share: Share, ranks: Collectives) -> None:
    """Reduce a model of transformers to this rank's part. All ranks must then make each forward pass.

    Its matrices become views of the whole ones. Raises: UnsupportedModel if its plan does not say how, or by unknown styles.
    """
    refusal = f"tensor_parallel_size={share.num_ranks} does not go with {type(model).__name__}; use 1: "
    split_layers = set()

    def style_of(name: str) -> str | None:
        style: str | None = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        return style

    for name, whole in [*model.named_modules(), *model.named_parameters()]:
        style = style_of(name)
        owner, _, kind = name.rpartition(".")
        parent, dim = model.get_submodule(owner), -1 if style == "rowwise" else -2
        if style in _WHOLE:
            continue
        if style == "moe_tp_experts" and all(style_of(f"{name}.{each}") in _OF_EXPERTS for each in whole.state_dict()):
            whole.register_forward_hook(lambda module, inputs, output: ranks.sum(output))
        elif isinstance(whole, nn.Parameter) and whole.ndim == 3 and style in _OF_EXPERTS:
            wholes = whole.chunk(1 if style == "rowwise" else 2, dim)
            setattr(parent, kind, _parameter(torch.cat([share.of_columns(each, dim) for each in wholes], dim)))
        elif type(whole) is not nn.Linear or style not in _OF_LINEAR:
            raise UnsupportedModel(
                f"{refusal}transformers' plan is to split {name}, a {type(whole).__name__}, by {style!r}; known are "
                f"{', '.join(_OF_LINEAR)} of Linear, and {', '.join(_OF_EXPERTS)} of experts"
            )
        elif hasattr(parent, "is_causal"):
            _split_linear(whole, style, share.of_kv if kind in ("k_proj", "v_proj") else share.of_queries, share, ranks)
            if style == "colwise_gather_output":
                parent.own_heads = share
            if style in ("rowwise", "rowwise_split_input"):
                split_layers.add(parent.layer_idx)
        else:
            _split_linear(whole, style, share.of_columns, share, ranks)
    if len(split_layers) < model.config.get_text_config().num_hidden_layers:
        raise UnsupportedModel(f"{refusal}neither vmmkv nor transformers has a plan by which its attention is split")


def _split_linear(
    linear: nn.Linear, style: str, own: Callable[[torch.Tensor, int], torch.Tensor], share: Share, ranks: Collectives
) -> None:
    dim = 0 if style.startswith("colwise") else 1
    size = linear.weight.shape[dim]
    if style == "colwise_gather_output":
        own = share.of_joined
        linear.register_forward_hook(
            lambda module, inputs, output: joined(ranks.gather(output.flatten(0, -2)), size).view(*output.shape[:-1], size)
        )
    if dim == 1:
        linear.register_forward_pre_hook(
            lambda module, inputs: (own(inputs[0], -1),) if inputs[0].shape[-1] == size else inputs
        )
        linear.register_forward_hook(lambda module, inputs, output: ranks.sum(output))
        if share.rank:
            linear.register_parameter("bias", None)
    elif linear.bias is not None:
        linear.bias = _parameter(own(linear.bias, 0))
    linear.weight = _parameter(own(linear.weight, dim))


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
