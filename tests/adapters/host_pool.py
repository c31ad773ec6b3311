"""Stands for SGLang's host memory of pages, its server's arguments, and the configuration of a rank's storage.

Test processes import it that have nothing of what tests use but torch.
"""

from types import SimpleNamespace
from typing import Any

import torch

EXTRA = {
    "backend_name": "vmmkv",
    "module_path": "vmmkv.adapters.sglang.hicache",
    "class_name": "VmmkvHiCache",
    "interface_v1": 1,
}

RANK = {
    **{"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 2, "attn_cp_rank": 0, "attn_cp_size": 2},
    **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "served"},
    **{"tp_lcm_size": None, "should_split_heads": False},
}
"""Fields of SGLang's HiCacheStorageConfig that all versions have, besides `extra_config`."""


def server_args(**changed: Any) -> SimpleNamespace:
    """The arguments of SGLang's server that the storage reads."""
    args = {
        **{"model_path": "org/model", "revision": None, "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None},
        **{"quantization_param_path": None, "json_model_override_args": "{}"},
        **{"enable_lora": None, "lora_paths": None, "speculative_algorithm": None},
    }
    return SimpleNamespace(**args | changed)


class HostPool:
    """Pages of keys and values in a layout of SGLang, of 4 layers with 2 heads of 20."""

    def __init__(self, layout: str = "page_first", *, num_pages: int = 8, dtype: torch.dtype = torch.float16) -> None:
        self.layout, self.dtype, self.page_size, self.size = layout, dtype, 16, 16 * num_pages
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = 4, 2, 20, 20
        self.start_layer, self.end_layer = 0, 3
        self.size_per_token = 2 * self.layer_num * self.head_num * self.head_dim * dtype.itemsize
        shapes = {
            "layer_first": (4, self.size, 2, 20),
            "page_first": (self.size, 4, 2, 20),
            "page_first_direct": (num_pages, 4, 16, 2, 20),
            "page_head": (num_pages, 2, 16, 4, 20),
        }
        self.kv_buffer = torch.zeros(2, *shapes.get(layout, ()), dtype=dtype)
        self.k_buffer, self.v_buffer = self.kv_buffer

    def __repr__(self) -> str:
        """The name of a test's case, the same in each process."""
        return f"{self.layout} of {self.dtype}"

    def page(self, number: int) -> torch.Tensor:
        """A page, as a view that shares its memory."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, tokens]
        return self.kv_buffer[:, tokens if self.layout == "page_first" else number]

    def indices(self, *pages: int) -> torch.Tensor:
        """The numbers of all tokens of pages."""
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of pages, as SGLang's own pools give them."""
        assert len(indices) % self.page_size == 0
        pieces: list[torch.Tensor] = []
        for first in indices[:: self.page_size].tolist():
            keys, values = self.page(first // self.page_size)
            is_apart = self.layout == "layer_first"
            pieces += [each for pair in zip(keys, values, strict=True) for each in pair] if is_apart else [keys, values]
        return [each.data_ptr() for each in pieces], [each.nbytes for each in pieces]
