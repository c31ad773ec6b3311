"""Small random models of several families, and what they generate with transformers' own cache and with this one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from tests.attending import attending_by
from tests.engine.decoder_models import VOCABULARY, small
from vmmkv import Pool
from vmmkv.adapters.transformers import VmmCache

PAD = 0


def _model(kind: type[PreTrainedConfig], **changes: Any) -> Any:
    options: dict[str, Any] = {
        "num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": 8192, "pad_token_id": PAD,
        "initializer_range": 0.25,  # with the default of 0.02 a model hardly reads its rows, and repeats a token
    }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small(kind, **(options | changes))).eval()


def llama(**changes: Any) -> Any:
    """Four query heads over two key-value heads; a row of 2 KiB."""
    return _model(LlamaConfig, **changes)


def wide_llama(**changes: Any) -> Any:
    """A row of 64 KiB, so that 32 tokens fill a page."""
    return llama(num_key_value_heads=4, head_dim=512, **changes)


def mistral(sliding_window: int, **changes: Any) -> Any:
    """Every layer with a window."""
    return _model(MistralConfig, sliding_window=sliding_window, **changes)


def qwen2(sliding_window: int) -> Any:
    """Two layers without a window and two with one; biases on queries, keys and values."""
    model = _model(Qwen2Config, use_sliding_window=True, sliding_window=sliding_window, max_window_layers=2)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    return model


def gemma2(sliding_window: int) -> Any:
    """Soft-capped scores; every other layer with a window."""
    caps = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 32}
    return _model(Gemma2Config, sliding_window=sliding_window, **caps)


def gemma3(sliding_window: int, **changes: Any) -> Any:
    """Three layers with a window and one without; head size 256, one key-value head."""
    shape = {"head_dim": 256, "num_key_value_heads": 1, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    # Tied embeddings, which are scaled up, would repeat the last token.
    return _model(Gemma3TextConfig, **(shape | changes), sliding_window=sliding_window, tie_word_embeddings=False)


def gpt_neox() -> Any:
    """A rotary embedding turns a quarter of each head only."""
    return _model(GPTNeoXConfig, hidden_size=128, initializer_range=0.3)


def deepseek(**changes: Any) -> Any:
    """Latent attention, of which transformers keeps each head's keys and values: 24 wide, and 12."""
    latents = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 12}
    latents |= {"head_dim": 8, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _model(DeepseekV3Config, num_key_value_heads=4, first_k_dense_replace=1, **latents, **experts, **changes)


def gpt_oss() -> Any:
    """Two layers, one of a window; sinks that take most of the softmax."""
    shape = {"num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 64, "sliding_window": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = _model(GptOssConfig, **shape, **experts, initializer_range=0.02)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.sinks, 1.0, 3.0)
    return model


def gemma4(sliding_window: int) -> Any:
    """Two layers with a window and two without, of another head size; the second two read what the first two keep."""
    kinds = ["sliding_attention", "full_attention"] * 2
    heads = {"head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2}
    inputs = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "tie_word_embeddings": False}
    return _model(Gemma4TextConfig, sliding_window=sliding_window, layer_types=kinds, **heads, **inputs)


MODELS: dict[str, Callable[[], Any]] = {
    "grouped": llama,
    "multi-head": lambda: llama(num_key_value_heads=4),
    "multi-query": lambda: llama(num_key_value_heads=1),
    "pages of 32 tokens": wide_llama,
    "sliding": lambda: mistral(16),
    "qwen2, full and sliding": lambda: qwen2(16),
    "soft caps": lambda: gemma2(16),
    "sliding and full, head size 256": lambda: gemma3(16),
    "keys wider than values": deepseek,
    "heads of two sizes, layers that read others' rows": lambda: gemma4(16),
}


def prompts(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch of random prompts, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def ids_of(*rows: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Random prompts of one length; equal numbers are equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 199, (max(rows) + 1, num_tokens), generator=generator)[list(rows)]


def states_of(cache: VmmCache) -> list[torch.Tensor]:
    """Keys and values of every layer."""
    return [each for layer in range(len(cache.layers)) for each in cache.states(layer)]


def forward(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of one pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, past_key_values=cache, **options).logits
    return logits


class Calls(TorchDispatchMode):  # type: ignore[misc]
    """What torch is asked for within, views among it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def answered(model: Any, cache: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """What a model generates with a cache, and its logits: 24 tokens, one seed, greedily unless the options say otherwise."""
    torch.manual_seed(2)
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)


def generated(model: Any, cache: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    """The tokens of `answered`."""
    answer: list[list[int]] = answered(model, cache, inputs, **options).sequences.tolist()
    return answer


def assert_same(
    model: Any, pool: Pool, inputs: dict[str, torch.Tensor], *, reference: str | None = None, **options: Any
) -> None:
    """The same tokens and logits as with transformers' own cache, of many kinds; the laws hold and nothing is left behind.

    `reference`: the attention by which the model gives them over that cache, if it is not its own.
    """
    with attending_by(model, reference or model.config._attn_implementation):
        expected = answered(model, DynamicCache(config=model.config), inputs, **options)
    for answer in expected.sequences[:, inputs["input_ids"].shape[1] :].tolist():
        assert len(set(answer)) > len(answer) // 4, "it says so few tokens that equal ones prove little"
    with VmmCache(model.config, pool) as cache:
        given = answered(model, cache, inputs, **options)
        assert given.sequences.tolist() == expected.sequences.tolist()
        on_cpu = model.device.type == "cpu"  # on a GPU strides may choose another kernel, which sums up in another order
        torch.testing.assert_close(given.logits, expected.logits, atol=1e-4 if on_cpu else 1e-2, rtol=0.0)
        cache.check()


def assert_attention_is_sdpas(model: Any, pool: Pool, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    """With vmmkv's attention, over both caches, the same tokens as sdpa gives over transformers' own."""
    with attending_by(model, "sdpa"):
        expected = generated(model, DynamicCache(config=model.config), inputs, **options)
    with attending_by(model, "vmmkv"):
        assert generated(model, DynamicCache(config=model.config), inputs, **options) == expected
        with VmmCache(model.config, pool) as cache:
            assert generated(model, cache, inputs, **options) == expected
