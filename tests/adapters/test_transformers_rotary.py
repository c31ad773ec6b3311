"""Of models whose rotary frequencies depend on lengths: settled once, a sequence's numbers do not depend on its neighbours."""

from typing import Any

import pytest
import torch
import transformers as hf

from tests.engine.decoder_models import model_of, small
from vmmkv import MIB, Pool
from vmmkv.adapters.transformers import VmmCache, settle_rotary

ORIGINAL, MAX_TOKENS, SHORT, LONG = 32, 128, 9, 90
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.6 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def model(name: str) -> hf.PreTrainedModel:
    options: dict[str, Any] = {"max_position_embeddings": MAX_TOKENS, "original_max_position_embeddings": ORIGINAL}
    return model_of(
        {
            "phi3, longrope": lambda: small(hf.Phi3Config, rope_parameters=dict(LONGROPE), sliding_window=None, **options),
            "phimoe, longrope": lambda: small(
                hf.PhimoeConfig, rope_parameters=LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4}, num_local_experts=4,
                num_experts_per_tok=2, sliding_window=None, **options,
            ),
            "llama, dynamic": lambda: small(hf.LlamaConfig, rope_parameters=dict(DYNAMIC), max_position_embeddings=ORIGINAL),
            "llama, default": lambda: small(hf.LlamaConfig),
        }[name]()
    )  # fmt: skip


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(5, 199, (1, length), generator=torch.Generator().manual_seed(length))


def logits(one: hf.PreTrainedModel, *rows_1T: torch.Tensor) -> torch.Tensor:
    """Over a VmmCache: of the last token of each row of a batch, padded on the left."""
    longest = max(row_1T.shape[1] for row_1T in rows_1T)
    ids_BT = torch.cat([torch.nn.functional.pad(row_1T, (longest - row_1T.shape[1], 0)) for row_1T in rows_1T])
    mask_BT = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(row_1T), (longest - row_1T.shape[1], 0)) for row_1T in rows_1T]
    )
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    with Pool("cpu", 64 * MIB) as pool, VmmCache(one.config, pool, max_tokens=MAX_TOKENS) as cache, torch.no_grad():
        given = one(ids_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache)
    last_BV: torch.Tensor = given.logits[:, -1]
    return last_BV


@pytest.mark.parametrize("name", ["phi3, longrope", "phimoe, longrope", "llama, dynamic"])
def test_a_short_sequence_is_the_same_beside_a_long_one(name: str) -> None:
    one, short, long = model(name), ids_of(SHORT), ids_of(LONG)
    assert not torch.allclose(logits(one, short)[0], logits(one, short, long)[0], atol=1e-3), "transformers differs from itself"
    assert settle_rotary(one, MAX_TOKENS)
    both = logits(one, short, long)
    assert torch.allclose(logits(one, short)[0], both[0], atol=1e-4)
    assert torch.allclose(logits(one, long)[0], both[1], atol=1e-4)


@pytest.mark.parametrize("name", ["phi3, longrope", "phimoe, longrope", "llama, dynamic"])
def test_the_last_number_of_tokens_counts(name: str) -> None:
    """Up to the original length the frequencies are those of a short sequence alone."""
    one, short = model(name), ids_of(SHORT)
    alone = logits(one, short)
    assert settle_rotary(one, MAX_TOKENS)
    assert not torch.allclose(logits(one, short), alone, atol=1e-3)
    assert settle_rotary(one, ORIGINAL)
    assert torch.allclose(logits(one, short), alone, atol=1e-5)


def test_a_forward_that_a_hook_has_set_is_called_within() -> None:
    one, called = model("phi3, longrope"), []
    rotary: Any = next(module for name, module in one.named_modules() if name.endswith("rotary_emb"))
    forward = rotary.forward
    rotary.forward = lambda *args, **kwargs: called.append(1) or forward(*args, **kwargs)
    for _ in range(2):
        assert settle_rotary(one, MAX_TOKENS)
    logits(one, ids_of(SHORT))
    assert called == [1]


def test_a_model_of_other_frequencies_is_as_it_was() -> None:
    one = model("llama, default")
    assert not settle_rotary(one, MAX_TOKENS)
    assert not any("forward" in vars(module) for module in one.modules())
