"""Under flash_attention_2, 3 and 4 a VmmCache gives what transformers' own cache gives there, and what eager attention gives.

transformers' side runs unmodified: it tells whether anything is padded, unpads, counts lengths, and calls the package. The
packages, which run on a GPU alone, have stand-ins (see flash.py).
"""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.adapters import flash
from tests.adapters.models import MODELS, assert_same, gemma3, llama, prompts
from tests.attending import attending_by
from vmmkv import Pool
from vmmkv.adapters.transformers import VmmCache

PLAIN = ("grouped", "sliding", "qwen2, full and sliding")
KINDS = (*PLAIN, *[kind for kind in MODELS if kind.startswith(("soft", "sliding and", "keys", "heads"))])

PASSES = (14, 6, 1, 5, 1, 1)
"""Tokens of each: a prompt, a chunk, a step, and so on."""


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Three rows: of one length, padded on the left, or their prompts padded on the right, with tokens behind the padding."""
    inputs = prompts(*[sum(PASSES)] * 3)
    for row, padded in ((1, 3), (2, 9)):
        if padding == "left":
            inputs["attention_mask"][row, : padded + PASSES[0] // 2] = 0  # some chunks of the last are padding alone
        elif padding == "right":
            inputs["attention_mask"][row, PASSES[0] - padded : PASSES[0]] = 0
    return inputs


def logits_of(model: Any, cache: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of each pass those of the tokens that are no padding, where positions and masks follow from the cache."""
    found, ids, mask = [], inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        for begin, end in itertools.pairwise(itertools.accumulate(PASSES, initial=0)):
            logits = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            found.append(logits[mask[:, begin:end].bool()])
    return found


def _marks(kind: str, padding: str) -> list[pytest.MarkDecorator]:
    return [] if kind == "grouped" and padding != "right" else [pytest.mark.nightly]


CASES = [
    pytest.param(version, kind, padding, marks=_marks(kind, padding))
    for version in flash.VERSIONS
    for kind in (KINDS if version == 2 else PLAIN)
    for padding in ("none", "left", "right")
]


@pytest.mark.parametrize(("version", "kind", "padding"), CASES)
def test_each_pass_has_the_logits_of_transformers_own_cache_and_of_eager(
    monkeypatch: pytest.MonkeyPatch, pool: Pool, version: int, kind: str, padding: str
) -> None:
    package, model, inputs = flash.install(monkeypatch, version), MODELS[kind](), batch(padding)
    name = f"flash_attention_{version}"
    with attending_by(model, name), VmmCache(model.config, pool) as cache:
        given = logits_of(model, cache, inputs)
        cache.check()
        # Rows are read where they lie, unless transformers unpads them.
        rows = [call["k"].untyped_storage().data_ptr() for _, call in package.calls[-len(model.model.layers) :]]
        if padding != "right" and kind != "keys wider than values":
            in_place = {states.untyped_storage().data_ptr() for states, _, _ in cache if states is not None}
            assert all((row in in_place) == (padding == "none") for row in rows)
    called = {function for function, _ in package.calls}
    assert called == {"flash_attn_func"} if padding == "none" else "flash_attn_varlen_func" in called
    # transformers takes the padding out of a window, where a mask counts it as tokens: over every cache
    same_windows = padding != "right" or kind in ("grouped", "keys wider than values")
    for other in (name, *(("eager",) if same_windows else ())):
        with attending_by(model, other):
            expected = logits_of(model, DynamicCache(config=model.config), inputs)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0.0, msg=lambda said, other=other: f"{other}: {said}")


@pytest.mark.nightly
@pytest.mark.parametrize("make", [llama, lambda: gemma3(16)], ids=["full", "hybrid"])
def test_half_precision_which_the_packages_are_for(monkeypatch: pytest.MonkeyPatch, pool: Pool, make: Any) -> None:
    flash.install(monkeypatch, 2)
    model = make().to(torch.bfloat16)
    with attending_by(model, "flash_attention_2"):
        for inputs, options in (
            (prompts(33), {}),
            (prompts(33, 20), {"prefill_chunk_size": 7}),
            (prompts(45), {"num_beams": 4}),
        ):
            assert_same(model, pool, inputs, **options)
