"""Under flash_attention_2, 3 and 4 a VmmCache gives what transformers' own cache gives there, and what eager attention gives.

transformers' side runs unmodified: it tells whether anything is padded, unpads, counts lengths, and calls the package. The
packages, which run on a GPU alone, have stand-ins (see flash.py).
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.adapters import flash
from tests.adapters.models import (
    assert_same,
    deepseek,
    gemma2,
    gemma3,
    gemma4,
    generated,
    gpt_oss,
    llama,
    mistral,
    prompts,
    qwen2,
)
from tests.attending import attending_by
from vmmkv import Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers.batch import CachedBatch

MODELS: dict[str, Callable[[], Any]] = {
    "full": llama,
    "sliding": lambda: mistral(16),
    "qwen2, full and sliding": lambda: qwen2(16),
    "soft caps": lambda: gemma2(16),
    "sliding and full, head size 256": lambda: gemma3(16),
    "keys wider than values": deepseek,
    "heads of two sizes, layers that read others' rows": lambda: gemma4(16),
}

PLAIN = ("full", "sliding", "qwen2, full and sliding")

WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True},
    "four beams": {"num_beams": 4},
    "three answers": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}

PASSES = (14, 6, 1, 5, 1, 1)
"""Tokens of each: a prompt, a chunk, a step, and so on."""

LENGTH = sum(PASSES)


@pytest.fixture(params=[f"flash_attention_{version}" for version in flash.VERSIONS])
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, name: str) -> flash.Flash:
    return flash.install(monkeypatch, int(name[-1]))


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Three rows: of one length, padded on the left, or their prompts padded on the right, with tokens behind the padding."""
    inputs = prompts(LENGTH, LENGTH, LENGTH)
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


def assert_passes_agree(model: Any, pool: Pool, name: str, inputs: dict[str, torch.Tensor], *also: str) -> None:
    """Over a VmmCache the logits that `name` gives over transformers' own cache, and those of the attentions `also` there."""
    with attending_by(model, name), VmmCache(model.config, pool) as cache:
        given = logits_of(model, cache, inputs)
        cache.check()
    for other in (name, *also):
        with attending_by(model, other):
            expected = logits_of(model, DynamicCache(config=model.config), inputs)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0.0, msg=lambda said, other=other: f"{other}: {said}")


def _marks(kind: str, padding: str) -> list[pytest.MarkDecorator]:
    return [] if kind == "full" and padding != "right" else [pytest.mark.nightly]


CASES = [
    pytest.param(f"flash_attention_{version}", kind, padding, marks=_marks(kind, padding))
    for version in flash.VERSIONS
    for kind in (MODELS if version == 2 else PLAIN)
    for padding in ("none", "left", "right")
]


@pytest.mark.parametrize(("name", "kind", "padding"), CASES)
def test_each_pass_has_the_logits_of_transformers_own_cache_and_of_eager(
    package: flash.Flash, name: str, pool: Pool, kind: str, padding: str
) -> None:
    model = MODELS[kind]()
    # transformers takes the padding out of a window, where a mask counts it as tokens: over every cache
    same_windows = padding != "right" or kind in ("full", "keys wider than values")
    assert_passes_agree(model, pool, name, batch(padding), *(("eager",) if same_windows else ()))
    called = {function for function, _ in package.calls}
    assert called == {"flash_attn_func"} if padding == "none" else "flash_attn_varlen_func" in called


@pytest.mark.nightly
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.usefixtures("package")
def test_the_tokens_are_those_of_transformers_own_cache_and_of_sdpa(name: str, pool: Pool, kind: str) -> None:
    model = MODELS[kind]()
    for inputs, options in ((prompts(45), {}), (prompts(45), {"prefill_chunk_size": 7}), (prompts(45, 20, 3), {})):
        expected = generated(model, DynamicCache(config=model.config), inputs, **options)
        with attending_by(model, name):
            assert_same(model, pool, inputs, **options)
            with VmmCache(model.config, pool) as cache:
                assert generated(model, cache, inputs, **options) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["full", "sliding and full, head size 256"])
def test_every_way_to_generate(monkeypatch: pytest.MonkeyPatch, pool: Pool, kind: str, way: str) -> None:
    flash.install(monkeypatch, 2)
    model, inputs = MODELS[kind](), prompts(45)
    inputs["input_ids"][:, 20:40] = inputs["input_ids"][:, :20]  # so that prompt lookup finds something
    with attending_by(model, "flash_attention_2"):
        assert_same(model, pool, inputs, **WAYS[way])


@pytest.mark.nightly
@pytest.mark.usefixtures("package")
def test_half_precision_which_the_packages_are_for(name: str, pool: Pool) -> None:
    model = llama().to(torch.bfloat16)
    with attending_by(model, name):
        for inputs in (prompts(33), prompts(33, 20)):
            assert_same(model, pool, inputs)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_attention_sinks_go_to_a_package_that_has_them(monkeypatch: pytest.MonkeyPatch, pool: Pool, padding: str) -> None:
    flash.install(monkeypatch, 4)
    assert_passes_agree(gpt_oss(), pool, "flash_attention_4", batch(padding), "eager")


@pytest.mark.parametrize(
    "make",
    [pytest.param(llama, id="full"), pytest.param(lambda: gemma3(16), marks=pytest.mark.nightly, id="sliding and full")],
)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_rows_are_read_where_they_lie_unless_transformers_unpads_them(
    package: flash.Flash, name: str, pool: Pool, make: Any, padding: str
) -> None:
    model, inputs = make(), batch(padding)
    with attending_by(model, name), VmmCache(model.config, pool) as cache, torch.no_grad():
        logits_of(model, cache, inputs)
        package.calls.clear()
        seen = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        model(inputs["input_ids"][:, :1], attention_mask=seen, past_key_values=cache)
        in_place = [
            pointer == cache.states(layer)[0].untyped_storage().data_ptr() for layer, (_, pointer) in enumerate(package.calls)
        ]
    assert in_place == [padding == "none"] * 4


# what the comparison above would see


def _rows(change: Callable[[torch.Tensor], torch.Tensor], *, of_keys: bool = True) -> Callable[..., Any]:
    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        append = CachedBatch.append

        def spoiled(self: CachedBatch, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            is_first = not self.num_tokens
            k, v = append(self, *args)
            return (k, v) if is_first else (change(k) if of_keys else k, change(v))

        monkeypatch.setattr(CachedBatch, "append", spoiled)

    return spoil


def _said(method: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        true = getattr(VmmCache, method)
        monkeypatch.setattr(VmmCache, method, lambda self, *args, **options: change(true(self, *args, **options)))

    return spoil


SPOILED: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows one further on": ("none", _rows(lambda states: states.roll(1, dims=2))),
    "rows one further on, padded": ("left", _rows(lambda states: states.roll(1, dims=2))),
    "values one further on": ("none", _rows(lambda states: states.roll(1, dims=2), of_keys=False)),
    "the first row missing": ("none", _rows(lambda states: states[:, :, 1:])),
    "the last row missing": ("none", _rows(lambda states: states[:, :, :-1])),
    "a row too many": ("none", _rows(lambda states: torch.cat([states, states[:, :, -1:]], dim=2))),
    "rows of a neighbour": ("none", _rows(lambda states: states.roll(1, dims=0))),
    "rows of a neighbour, padded": ("left", _rows(lambda states: states.roll(1, dims=0))),
    "a token too few counted": ("none", _said("get_seq_length", lambda length: max(0, length - 1))),
    "a mask one too short": ("left", _said("get_mask_sizes", lambda sizes: (sizes[0] - 1, sizes[1]))),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("what", SPOILED)
def test_the_comparison_sees_rows_and_counts_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, pool: Pool, kind: str, what: str
) -> None:
    flash.install(monkeypatch, 2)
    padding, spoil = SPOILED[what]
    model, inputs = MODELS[kind](), batch(padding)
    assert_passes_agree(model, pool, "flash_attention_2", inputs)
    spoil(monkeypatch)
    with pytest.raises(AssertionError, match=r"flash_attention_2: .* not close"):
        assert_passes_agree(model, pool, "flash_attention_2", inputs)
