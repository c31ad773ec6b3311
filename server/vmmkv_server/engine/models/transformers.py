"""Any causal language model of transformers, by its own code: only its attention function is replaced.

A step is a batch of runs of tokens, one run for each sequence, side by side in one row of the model's input. The model
computes everything but attention on all of them at once. Attention goes by run, over the rows of its sequence.

Legend: N tokens of the step, B rows of logits, V vocabulary, H query heads, K key-value heads, D head dimension.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

from vmmkv.model_config import read, shared_rows
from vmmkv.units import counted
from vmmkv.unmodified import INERT_ARGUMENTS
from vmmkv_kernels.quantise import kind_of
from vmmkv_server.engine.attention import AttentionMetadata, CachedAttention, KVRows
from vmmkv_server.models import UnsupportedModel

NAME: Final = "vmmkv-engine"
"""The attention implementation of transformers: `attn_implementation=NAME`."""

_NOT_CAUSAL: Final = "attention to later tokens too (is it an encoder?)"


class TransformersModel:
    """One transformers model over rows of a cache. Several can live in one process, each over its own. See EngineModel."""

    implementation: Final = "transformers"
    capturable: Final = False
    """An unknown model may depend on the host between its layers."""
    keys: Final = None

    def __init__(self, model: Any, rows: KVRows) -> None:
        self._model = model
        self.name: Final = type(model).__name__
        layout = rows.layout
        self._owners = {layer: layer for layer in layout.group_of} | shared_rows(read(model.config).layers)
        """Layer whose rows each layer reads: its own, or another's."""
        self._groups = {layer: layout.groups[layout.group_of[owner]] for layer, owner in self._owners.items()}
        windows = {layer: group.window for layer, group in self._groups.items() if group.window is not None}
        self._attention = CachedAttention(rows, windows=windows)
        self._calls: Counter[int] = Counter()
        self.masked_windows: set[int | None] = set()
        """Windows of the masks that the model asked for in this forward pass; None for a mask that shows all rows."""
        self._output: Any = None
        """The last output of the model without its head, but for its states."""
        self._has_states: bool | None = None
        """Can the model compute in two halves? None before the first forward pass."""
        self.vocabulary_size: Final[int] = model.config.get_text_config().vocab_size
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _no_mask)
        model.set_attn_implementation(NAME)

    def forward(self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns logits [B, V] behind those at `last_B`."""
        return self._compute(ids_N, step, 0 if last_B is None else last_B)[0]

    def _compute(
        self, ids_N: torch.Tensor, step: AttentionMetadata, keep: torch.Tensor | int
    ) -> tuple[torch.Tensor, list[Any]]:
        """Logits behind the columns `keep`, and what the part of the model without its head gave, if that was called."""
        self._attention.begin(step)
        self._calls.clear()
        self.masked_windows.clear()
        computing = _computing.set(self)
        given: list[Any] = []
        hook = self._model.base_model.register_forward_hook(lambda module, arguments, output: given.append(output))
        try:
            output = self._model(input_ids=ids_N[None], position_ids=step.rows_N[None], use_cache=False, logits_to_keep=keep)
        finally:
            hook.remove()
            _computing.reset(computing)
        self._has_states = bool(given) and self._model.base_model is not self._model
        return output.logits[0], given

    @property
    def has_states(self) -> bool:
        """Can the model compute in two halves? Only if the head calls the rest as a whole; OPT's calls a part of it."""
        return self._model.base_model is not self._model if self._has_states is None else self._has_states

    def states(self, ids_N: torch.Tensor, step: AttentionMetadata, rows_W: torch.Tensor) -> torch.Tensor:
        """Append and attend to a step's tokens. Returns the output of the model without its head."""
        _, (given,) = self._compute(ids_N, step, rows_W[:1])
        states_1NE = given.last_hidden_state
        self._output = dataclasses.replace(given, last_hidden_state=states_1NE.new_empty(0))
        states_WE: torch.Tensor = states_1NE[0].index_select(0, rows_W)
        return states_WE

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """Logits [W, V] by the whole model, in which the part without the head is replaced by these states.

        So whatever the model does behind its states (a bias, a cap, a scale) is done by its own code.
        """
        output = dataclasses.replace(self._output, last_hidden_state=states_WE[None])
        zeros = torch.zeros((1, len(states_WE)), dtype=torch.int64, device=states_WE.device)
        with _giving(self._model.base_model, output):
            logits_WV: torch.Tensor = self._model(input_ids=zeros, position_ids=zeros, use_cache=False).logits[0]
        return logits_WV

    def check(self) -> None:
        """Did every layer attend once in the last forward pass? Raises: UnsupportedModel.

        A layer with its own attention sees all runs of a step as one sequence. One that attends twice overwrites its rows.
        """
        others = {layer: self._calls[layer] for layer in self._owners if self._calls[layer] != 1}
        if others:
            raise UnsupportedModel(
                f"layers {sorted(others)} of this model called the attention function {sorted(set(others.values()))} times "
                f"in a forward pass, not once: this model cannot be served from a KV cache of rows"
            )

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers: query [1, H, N, D], key and value [1, K, N, D]; gives [1, N, H, D].

        Raises: UnsupportedModel, naming arguments that are not known here: what they mean is not ignored.
        """
        refused = [name for name, given in others.items() if given is not None and name not in INERT_ARGUMENTS]
        if dropout:
            refused.append("dropout")
        if attention_mask is not None:  # _no_mask gave none
            refused.append("a mask of its own")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            refused.append(_NOT_CAUSAL)
        if query.shape[0] != 1:
            refused.append("a padded batch")
        if refused:
            raise UnsupportedModel(f"{type(module).__name__} asks for {', '.join(refused)}, which vmmkv does not do yet")
        layer = module.layer_idx
        assert isinstance(layer, int)
        self._check_window(module, layer, sliding_window)
        if (share := getattr(module, "own_heads", None)) is not None:  # of all, which the ranks have joined
            query, key, value = share.of_queries(query, 1), share.of_kv(key, 1), share.of_kv(value, 1)
        owner = self._owners[layer]
        self._check_shapes(module, layer, key, value)
        self._calls[layer] += 1
        q_NHD, k_NKD, v_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._attention(owner, q_NHD, k_NKD, v_NKD, appends=owner == layer, scale=scaling, softcap=softcap)[None], None

    def _check_window(self, module: torch.nn.Module, layer: int, given: int | None) -> None:
        """Raise UnsupportedModel unless the layer's window, as an argument or as a mask, is that of its group."""
        kept = self._groups[layer].window
        seen = {given} if given is not None else self.masked_windows or {None}
        if kept not in seen:
            raise UnsupportedModel(
                f"{type(module).__name__} attends to {_last_rows(*seen)} in layer {layer}, where the configuration says "
                f"{_last_rows(kept)}, and no others are kept"
            )

    def _check_shapes(self, module: torch.nn.Module, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise UnsupportedModel unless keys and values have the heads of the layer's rows."""
        planes = [self._groups[layer].plane(name) for name in ("k", "v")]
        # Two elements of int4 lie in a byte.
        kept = [(plane.heads, plane.dim * (2 if kind_of(plane.dtype) == "int4" else 1)) for plane in planes]
        given = [(side.shape[1], side.shape[3]) for side in (key, value)]
        if given != kept:
            raise UnsupportedModel(
                f"{type(module).__name__} gives {_heads(given)} in layer {layer}, where the configuration says {_heads(kept)}"
            )


@contextlib.contextmanager
def _giving(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Within the block the module returns `output`, and computes nothing."""
    own = vars(module).get("forward")  # set on the module itself, in place of its class's
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


_computing: ContextVar[TransformersModel] = ContextVar("vmmkv's model in its forward pass")
"""Model that computes: in a process transformers has one attention function of a name, and one function of masks."""


def _attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer."""
    return _computing.get().attend(module, *args, **kwargs)


def _no_mask(*args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any) -> None:
    """No mask, in place of transformers': the runs say which rows a token sees, and the layout its window."""
    if mask_function is bidirectional_mask_function:
        raise UnsupportedModel(f"the model asks for {_NOT_CAUSAL}, which vmmkv does not do")
    _computing.get().masked_windows.add(local_size)


def _last_rows(*windows: int | None) -> str:
    return " or ".join("all rows" if window is None else f"the last {window} rows" for window in windows)


def _heads(sides: list[tuple[int, int]]) -> str:
    keys, values = (f"{counted(heads, 'head')} of {dim}" for heads, dim in sides)
    return f"keys of {keys} and values of {values}"
