"""The keys and values of a batch, as torch writes and reads them: views of adjacent slots, made for all layers at once.

A decode step that no graph has captured is bound by the host, to which each call of torch costs a microsecond or more. So the
views of all layers come from one call, and a layer costs two copies.

    B sequences, L layers, K kv heads, T tokens, D head dim
"""

from collections.abc import Iterable
from typing import Final

import torch

from vmmkv.cache import KVCache
from vmmkv.errors import LayoutError
from vmmkv.layout import Group

_INT32_END: Final = 2**31


class LayerRows:
    """Rows [first, first + count) of each layer: keys and values, [B, K, T, D]. See Planes.rows."""

    def __init__(
        self,
        bounds: tuple[int, int],
        of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]],
        slots_B: torch.Tensor | None,
    ) -> None:
        self.bounds: Final = bounds
        """`first` and `count`."""
        self.of_layer: Final = of_layer
        self._slots_B: Final = slots_B
        k_BKTD, v_BKTD = next(iter(of_layer.values()))
        self._k_kind, self._v_kind = _kind(k_BKTD), _kind(v_BKTD)

    def write(self, layer: int, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> None:
        """Copy a layer's keys and values here. Cost: two launches. Raises: LayoutError."""
        places = self.of_layer[layer]
        if _kind(k_BKTD) != self._k_kind or _kind(v_BKTD) != self._v_kind:
            raise _misfit(layer, zip(places, (k_BKTD, v_BKTD), strict=True))
        k_place, v_place = places
        if self._slots_B is None:
            k_place.copy_(k_BKTD)
            v_place.copy_(v_BKTD)
        else:  # the offset along the dimension of the index has 64 bits
            k_place.index_copy_(0, self._slots_B, k_BKTD)
            v_place.index_copy_(0, self._slots_B, v_BKTD)


class Planes:
    """Keys and values of all layers in `num_slots` adjacent slots of a cache, from `first_slot` on."""

    def __init__(self, cache: KVCache, first_slot: int, num_slots: int) -> None:
        with torch.inference_mode(False):  # else nothing here could be written under another mode
            self._of_groups: Final = [
                (
                    group.layers,
                    _plane(cache, group, "k", first_slot, num_slots),
                    _plane(cache, group, "v", first_slot, num_slots),
                )
                for group in cache.layout.groups
            ]
            k_LBKTD = self._of_groups[0][1]
            span_bytes = (num_slots - 1) * k_LBKTD.stride(1) * k_LBKTD.itemsize + cache.layout.groups[0].row_bytes
            splits = splits_a_copy(cache.device, span_bytes)
            self._slots_B: Final = torch.arange(num_slots, device=cache.device) if splits else None

    def rows(self, first: int, count: int) -> LayerRows:
        """Rows [first, first + count) of each layer. Cost: a few calls of torch for each group, on the host alone."""
        of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layers, k_LBKTD, v_LBKTD in self._of_groups:
            both = zip(k_LBKTD.narrow(3, first, count).unbind(), v_LBKTD.narrow(3, first, count).unbind(), strict=True)
            of_layer.update(zip(layers, both, strict=True))
        return LayerRows((first, count), of_layer, self._slots_B)


def splits_a_copy(device: torch.device, span_bytes: int) -> bool:
    """Does torch copy in several launches to a view that spans so many bytes?

    Offsets in its CUDA kernels have 32 bits: a view of more bytes is halved until each part has fewer, down to a launch for
    each slot.
    """
    return device.type == "cuda" and span_bytes > _INT32_END


def _plane(cache: KVCache, group: Group, name: str, first_slot: int, num_slots: int) -> torch.Tensor:
    """A plane of all layers of a group: [L, B, K, T, D]."""
    first_STKD, last_STKD = cache.view(group.layers[0], name), cache.view(group.layers[-1], name)
    between = last_STKD.storage_offset() - first_STKD.storage_offset()
    layer_stride = between // max(1, len(group.layers) - 1)  # layers are equal, and follow one another in the row
    _, num_tokens, heads, dim = first_STKD.shape
    slot_stride, row_stride, head_stride, _ = first_STKD.stride()
    return first_STKD.as_strided(
        (len(group.layers), num_slots, heads, num_tokens, dim),
        (layer_stride, slot_stride, head_stride, row_stride, 1),
        first_STKD.storage_offset() + first_slot * slot_stride,
    )


def _kind(states: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return states.shape, states.dtype, states.device


def _misfit(layer: int, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> LayoutError:
    place, states = next((place, states) for place, states in pairs if _kind(place) != _kind(states))
    return LayoutError(
        f"layer {layer} gives {list(states.shape)} {states.dtype} on {states.device}, and its rows are {list(place.shape)} "
        f"{place.dtype} on {place.device}: all layers of one window have one shape and type, on the pool's device; another "
        f"model wants a VmmCache of its own"
    )
