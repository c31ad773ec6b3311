"""Which layers a configuration of transformers has, and what transformers asks of each one of a VmmCache."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import cache_utils

from vmmkv.errors import LayoutError

if TYPE_CHECKING:
    from vmmkv.adapters.hf import VmmCache


class RowLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer of a VmmCache, which has the state: what concerns the batch is asked of the cache, for all layers at once."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "VmmCache", index: int, window: int | None) -> None:
        # Not the base class's own, which sets `keys` and `values`: they are views here.
        self._cache = cache
        self._index = index
        self.is_sliding = window is not None
        self.sliding_window = window

    @property
    def is_initialized(self) -> bool:
        """Has it keys and values?"""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys that the next token sees, [batch, kv heads, tokens, head dim], or None."""
        return self._cache.states(self._index)[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """Values, likewise."""
        return self._cache.states(self._index)[1] if self.is_initialized else None

    @property
    def record_past(self) -> bool:
        """Are rows kept that the window has passed, until `crop`?"""
        return self._cache.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._cache.record_past = value

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """See VmmCache.update."""
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        """Tokens written, whatever the window."""
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next `query_length` tokens see, and the number of the first."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_max_length(self) -> int:
        """The window, or the most tokens that a sequence can have."""
        return self._cache.max_tokens if self.sliding_window is None else self.sliding_window

    def lazy_initialization(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("a VmmCache takes memory as tokens come, none beforehand: just run the model")

    def _of_the_batch(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("all layers of a VmmCache share their rows: call this on the cache, not on one of its layers")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _of_the_batch

    def _offloaded(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a VmmCache keeps all layers on its pool's device; a pool of device 'cpu' is host memory")

    offload = prefetch = _offloaded


def layers_of(cache: "VmmCache", config: Any) -> list[Any]:
    """The layers of a cache for a model: a RowLayer for each layer that transformers itself would keep keys and values of.

    Those that only read what others keep stay transformers' own. Raises: LayoutError, saying which layers are not supported.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"VmmCache(config, pool, ...) takes a model's configuration, such as model.config, not {type(config)}")
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(
            f"{config.model_type} is an encoder and a decoder, and their cross-attention has a cache of another kind; VmmCache "
            f"is for decoders: leave past_key_values to transformers here"
        )
    placeholder = getattr(cache_utils, "DummyLayer", ())  # of layers that keep nothing; not every release has it
    layers: list[Any] = []
    others: dict[str, list[int]] = {}
    for index, layer in enumerate(cache_utils.DynamicCache(config=config).layers):
        if type(layer) is cache_utils.DynamicLayer:
            layers.append(RowLayer(cache, index, None))
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            layers.append(RowLayer(cache, index, layer.sliding_window))
        elif isinstance(layer, placeholder):
            layers.append(layer)
        else:
            others.setdefault(type(layer).__name__, []).append(index)
    if others:
        kinds = "; ".join(f"{kind} in layers {', '.join(map(str, numbers))}" for kind, numbers in others.items())
        raise LayoutError(
            f"{config.model_type} keeps more than keys and values by token: {kinds}. VmmCache is for layers of full and of "
            f"sliding-window attention; use DynamicCache(config=model.config) here"
        )
    if not any(isinstance(layer, RowLayer) for layer in layers):
        raise LayoutError(f"{config.model_type} has no layer that keeps keys and values")
    return layers
