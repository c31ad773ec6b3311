"""`identity_of`: all by which KV of equal tokens differs between engines, for keys of records and for a holder's memory."""

import os
from typing import Any

from vllm.platforms import current_platform

from vmmkv.adapters.tier_options import fingerprint_of


def identity_of(vllm_config: Any, kv_cache_config: Any, fingerprint: str | None) -> tuple[object, ...]:
    """Weights, configuration, types, layers and layout of an engine. Cost: some reads a file of weights. Raises: OSError."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return (
        fingerprint or fingerprint_of(model.model, model.revision),
        *(model.hf_config.to_json_string(), str(model.dtype), str(model.quantization), str(cache.cache_dtype)),
        getattr(kv_cache_config, "kv_cache_layout", None) or _layout_choice(vllm_config),
        [(repr(group.kv_cache_spec), group.layer_names) for group in kv_cache_config.kv_cache_groups],
        vllm_config.device_config.device_type,
        *(() if model.multimodal_config is None else (repr(model.multimodal_config),)),  # how images are read
    )


def _layout_choice(vllm_config: Any) -> str:
    """Choices that decide the layout of a block in vLLM below 0.28, where workers alone know it. The kind of GPU is one."""
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return repr((os.environ.get("VLLM_KV_CACHE_LAYOUT"), str(backend), current_platform.get_device_capability()))
