"""The attention implementation "vmmkv": what sdpa gives, by vmmkv's kernels where they can, and said where they cannot.

Whole models run with the kernels' reference in their place: in Triton's interpreter a launch takes a second. What the kernels
compute for these calls is tested call by call, and with one model.
"""

import ast
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.masking_utils import and_masks, causal_mask_function, chunked_causal_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as window_mask_function

from tests.adapters.models import (
    MODELS,
    Calls,
    assert_attention_is_sdpas,
    deepseek,
    forward,
    gemma2,
    gemma3,
    generated,
    gpt_oss,
    llama,
    prompts,
)
from vmmkv import Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import attention as attention_module
from vmmkv.adapters.transformers.attention import CHOOSING_ARGUMENTS, DeclinedWarning, attention, declined, mask
from vmmkv.model_config import WITH_SINKS
from vmmkv.unmodified import INERT_ARGUMENTS
from vmmkv_kernels import checks, reference
from vmmkv_kernels.attention import decode, prefill
from vmmkv_server.engine.models.transformers import NAME

KINDS = (
    "grouped",
    "multi-head",
    "multi-query",
    "sliding",
    "sliding and full, head size 256",
    "heads of two sizes, layers that read others' rows",
)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "chunks": {"prefill_chunk_size": 7},
}

PADDED = "a mask: padding, or another pattern than causal"


pytestmark = pytest.mark.skipif(
    not checks.INTERPRETED,
    reason="CPU tensors go to vmmkv's kernels in Triton's interpreter alone; on a GPU: test_transformers_cuda.py",
)


@pytest.fixture(autouse=True)
def nothing_is_declined_unseen() -> Iterator[None]:
    declined.clear()
    attention_module.plans.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeclinedWarning)
        yield
    declined.clear()


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reference in the place of both kernels; which of them were called."""
    calls: list[str] = []

    def decode_in_torch(q: Any, kv: Any, lengths: Any, slots: Any, _: Any, __: Any, options: Any, out: Any, ___: Any) -> None:
        calls.append("decode")
        cap = options.softcap_log2 / math.log2(math.e) or None
        scale = options.scale_log2 / math.log2(math.e) * (1.0 if cap is None else cap / 2.0)
        window = min(options.rows_seen, 2**30)
        out.copy_(reference.decode(q, kv.k, kv.v, lengths, slots, scale=scale, window=window, softcap=cap))

    def prefill_in_torch(q: Any, k: Any, v: Any, starts: Any, lengths: Any, slots: Any, **options: Any) -> torch.Tensor:
        calls.append("prefill")
        return reference.prefill(q, k, v, starts.diff(), lengths, slots, **options)

    monkeypatch.setattr(decode, "attend_singles", decode_in_torch)
    monkeypatch.setattr(prefill, "prefill", prefill_in_torch)
    return calls


@pytest.mark.parametrize("way", ["greedy", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "greedy")])
@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_are_those_of_sdpa(pool: Pool, in_torch: list[str], name: str, way: str) -> None:
    inputs = prompts(30)
    inputs["input_ids"][:, 15:28] = inputs["input_ids"][:, :13]  # so that prompt lookup finds something
    cuts_masks = name.startswith("heads of two sizes")  # from some release on, in layers that read what others keep
    with warnings.catch_warnings():
        if cuts_masks:
            warnings.simplefilter("ignore", DeclinedWarning)
        assert_attention_is_sdpas(MODELS[name](), pool, inputs, max_new_tokens=10, **WAYS[way])
    assert {"decode", "prefill"} == set(in_torch)
    assert set(declined) <= ({PADDED} if cuts_masks else set())


def test_a_model_in_the_interpreter(pool: Pool) -> None:
    model = llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    assert_attention_is_sdpas(model, pool, prompts(9), max_new_tokens=3, prefill_chunk_size=5)
    assert not declined


def test_a_batch_that_is_padded_goes_to_sdpa(pool: Pool, in_torch: list[str]) -> None:
    with pytest.warns(DeclinedWarning, match="padding") as seen:
        assert_attention_is_sdpas(llama(), pool, prompts(30, 3, 17))
    assert set(declined) == {PADDED} and len(seen) == 1 and not in_torch


def test_a_soft_cap_is_kept(pool: Pool, in_torch: list[str]) -> None:
    model = gemma2(16)
    model.set_attn_implementation("eager")
    expected = generated(model, DynamicCache(config=model.config), prompts(30))
    model.set_attn_implementation("vmmkv")
    with VmmCache(model.config, pool) as cache:
        assert generated(model, cache, prompts(30)) == expected
        cache.reset()
        with pytest.raises(NotImplementedError, match=r'padding.*set_attn_implementation\("eager"\)'):
            generated(model, cache, prompts(30, 3))
        cache.crop(0)


# call by call, in the interpreter


def states(*, heads: int, kv_heads: int, queries: int, tokens: int, dim: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """q, k and v as a model and a cache give them: strided, and the cache's rows further apart than they are long."""
    torch.manual_seed(1)
    q = torch.randn(batch, queries, heads, dim).transpose(1, 2)
    k, v = torch.randn(2, batch, tokens + 3, kv_heads, dim + 8)[..., :dim].transpose(2, 3)[:, :, :, 2 : tokens + 2].unbind()
    return q, k, v


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    num_queries, num_tokens = q.shape[2], k.shape[2]
    i_query = torch.arange(num_tokens - num_queries, num_tokens)[:, None]
    i_token = torch.arange(num_tokens)
    seen = (i_token <= i_query) & (i_token > i_query - (window or num_tokens))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return ((q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("shape", "scale", "window"),
    [
        ({"heads": 4, "kv_heads": 2, "queries": 1, "tokens": 21, "dim": 32}, 0.2, None),
        ({"heads": 2, "kv_heads": 2, "queries": 1, "tokens": 9, "dim": 80, "batch": 1}, 0.1, 5),
        ({"heads": 2, "kv_heads": 1, "queries": 1, "tokens": 17, "dim": 256, "batch": 1}, 0.1, None),
        ({"heads": 2, "kv_heads": 1, "queries": 7, "tokens": 7, "dim": 16}, 0.3, None),
        ({"heads": 2, "kv_heads": 1, "queries": 5, "tokens": 18, "dim": 16}, 0.3, None),
        ({"heads": 2, "kv_heads": 1, "queries": 5, "tokens": 18, "dim": 16}, 0.3, 6),
    ],
    ids=["decode", "decode, head size 80, window", "decode, head size 256", "prompt", "chunk", "chunk, window"],
)
def test_a_call_gives_what_causal_attention_is(shape: dict[str, int], scale: float, window: int | None) -> None:
    q, k, v = states(**shape)
    out, _ = attention(torch.nn.Module(), q, k, v, None, scaling=scale, sliding_window=window)
    assert out.shape == (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    torch.testing.assert_close(out, truth(q, k, v, scale, window), atol=1e-5, rtol=1e-5)
    assert not declined


# what is declined


@pytest.mark.parametrize(("queries", "window"), [(1, None), (4, None), (4, 5)], ids=["decode", "chunk", "chunk, window"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 264}, "heads of 264, over 256"),
        ({"dim": 18}, "heads of 18, or strides"),
        ({"heads": 65, "kv_heads": 1}, "65 query heads over 1"),
    ],
)
def test_shapes_that_the_kernels_lack_go_to_sdpa(queries: int, window: int | None, change: Any, reason: str) -> None:
    q, k, v = states(**({"heads": 4, "kv_heads": 2, "queries": queries, "tokens": 12, "dim": 16} | change))
    with pytest.warns(DeclinedWarning, match=reason):
        out, _ = attention(torch.nn.Module(), q, k, v, None, scaling=0.2, sliding_window=window)
    torch.testing.assert_close(out, truth(q, k, v, 0.2, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "interpreted", "reason"),
    [
        (lambda: gemma3(16), False, "tensors on cpu"),
        (deepseek, True, "heads of 24 in queries, 24 in keys and 12 in values"),
    ],
    ids=["on a CPU", "keys wider than values"],
)
def test_models_that_the_kernels_cannot_run_go_to_sdpa(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, make: Any, interpreted: bool, reason: str
) -> None:
    monkeypatch.setattr(checks, "INTERPRETED", interpreted)
    with pytest.warns(DeclinedWarning, match=reason):
        assert_attention_is_sdpas(make(), pool, prompts(20), prefill_chunk_size=7, max_new_tokens=6)


def test_types_that_the_kernels_lack_go_to_sdpa() -> None:
    q, k, v = states(heads=2, kv_heads=1, queries=1, tokens=9, dim=16)
    for dtype, reason in ((torch.float64, "tensors of torch.float64"), (torch.bfloat16, "interpreter computes wrongly")):
        with pytest.warns(DeclinedWarning, match=reason):
            out, _ = attention(torch.nn.Module(), q.to(dtype), k.to(dtype), v.to(dtype), None, scaling=0.2)
        assert out.dtype == dtype


def test_training_goes_to_sdpa_and_has_its_gradients() -> None:
    model, ids = llama(num_hidden_layers=2), prompts(12)["input_ids"]
    gradients = []
    for name in ("sdpa", "vmmkv"):
        model.set_attn_implementation(name)
        model.zero_grad()
        with pytest.warns(DeclinedWarning, match="gradients") if name == "vmmkv" else warnings.catch_warnings():
            model(ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    layer = model.model.layers[0].self_attn
    with pytest.warns(DeclinedWarning, match="dropout"):
        attention(layer, *states(heads=4, kv_heads=2, queries=3, tokens=9, dim=16), None, dropout=0.5)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_from_both_sides_and_arguments_that_are_not_known_go_to_sdpa(window: int | None) -> None:
    """Where mask is None transformers' sdpa would take the queries of a chunk for the first tokens."""
    q, k, v = states(heads=2, kv_heads=1, queries=3, tokens=9, dim=16)
    module = torch.nn.Module()  # without num_key_value_groups, which sdpa asks for
    with pytest.warns(DeclinedWarning, match="not causal"):
        out, _ = attention(module, q, k, v, None, scaling=0.2, is_causal=False)
    k2, v2 = (each.repeat_interleave(2, dim=1) for each in (k, v))
    torch.testing.assert_close(out, ((q @ k2.mT * 0.2).softmax(-1) @ v2).transpose(1, 2))
    for name, given in (("num_items_in_batch", 3), ("position_bias", torch.zeros(1, 2, 3, 9))):
        with pytest.warns(DeclinedWarning, match=f"{name} given"):
            out, _ = attention(module, q, k, v, None, scaling=0.2, sliding_window=window, **{name: given})
        torch.testing.assert_close(out, truth(q, k, v, 0.2, window), atol=1e-5, rtol=1e-5)


def test_a_capture_keeps_nothing_for_others_and_has_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes is written when its graph is replayed; what others made goes when they need it no more."""
    q, k, v = states(heads=2, kv_heads=1, queries=1, tokens=9, dim=16)
    scoring = attention_module.Scoring(0.2, None, None)
    before = attention_module.plan_of(q, k, v, scoring)
    masks = attention_module.causal_mask(q.device, 3, 9, None)
    monkeypatch.setattr(attention_module, "is_capturing", lambda device: True)
    captured = [attention_module.plan_of(q, k, v, scoring) for _ in range(2)]
    assert captured[0] is not captured[1] and all(plan is not before for plan in captured)
    assert attention_module.causal_mask(q.device, 3, 9, None) is not masks
    monkeypatch.undo()
    assert attention_module.plan_of(q, k, v, scoring) is before and attention_module.causal_mask(q.device, 3, 9, None) is masks


@pytest.mark.parametrize("cached", ["DynamicCache", "VmmCache"])
@pytest.mark.parametrize("inputs", [prompts(20, 20), prompts(20, 9)], ids=["full", "padded"])
def test_attention_sinks_go_to_the_models_own_function(pool: Pool, cached: str, inputs: Any) -> None:
    model = gpt_oss()

    def logits_of(name: str) -> list[torch.Tensor]:
        """Of a prompt, a chunk and a step."""
        model.set_attn_implementation(name)
        with VmmCache(model.config, pool) if cached == "VmmCache" else nullcontext(DynamicCache(config=model.config)) as cache:
            found, mask = [], inputs["attention_mask"]
            for ids in torch.split(inputs["input_ids"], [14, 5, 1], dim=1):
                seen = mask[:, : cache.get_seq_length() + ids.shape[1]]
                found.append(model(ids, attention_mask=seen, past_key_values=cache).logits[:, -1])
        return found

    with torch.no_grad():
        expected = logits_of("eager")
        with pytest.warns(DeclinedWarning, match="transformers' eager attention: attention sinks") as said:
            ours = logits_of("vmmkv")
        for layer in model.model.layers:
            layer.self_attn.sinks -= 9.0
        without = logits_of("eager")
    assert len(said) == 1 and declined == {"attention sinks": 2 * 3}
    for one, two, other in zip(ours, expected, without, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(other, two, atol=1e-3), "the sinks count"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"s_aux": torch.ones(2)}, r"sinks.*eager"),
        ({"sinks": torch.ones(1, 2, 3, 1)}, r"sinks.*eager"),
        ({"indices": torch.zeros(1, 3, 4)}, r"indices given.*sdpa"),
        ({"block_indices": torch.zeros(1, 3, 4)}, r"block_indices given.*sdpa"),
    ],
)
def test_what_sdpa_would_ignore_is_refused(given: dict[str, Any], complaint: str) -> None:
    """Sinks of a model whose own function may take other masks; tokens that are chosen."""
    with pytest.raises(NotImplementedError, match=complaint):
        attention(torch.nn.Module(), *states(heads=2, kv_heads=1, queries=3, tokens=9, dim=16), None, scaling=0.2, **given)
    assert not declined


@pytest.mark.nightly
def test_every_argument_that_transformers_gives_to_attention_is_known() -> None:
    """By a look into its models: what a new release adds is not ignored."""
    known = {*inspect.signature(attention).parameters, "position_bias", *INERT_ARGUMENTS, *CHOOSING_ARGUMENTS}
    of_flash = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic"}
    found: dict[str, str] = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if " attention_interface(" in text:
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "attention_interface":
                    found |= {argument.arg: path.parent.name for argument in call.keywords if argument.arg}
    assert "s_aux" in found and "gpt_oss" in WITH_SINKS
    assert {name: model for name, model in found.items() if name not in known | of_flash} == {}


# masks


def made(q_length: int, kv_length: int, *, first: int = 0, **options: Any) -> torch.Tensor | None:
    offsets = {"q_offset": first + kv_length - q_length, "kv_offset": first}
    return mask(batch_size=2, q_length=q_length, kv_length=kv_length, **(offsets | options))


def test_no_mask_is_made_where_the_kernels_need_none() -> None:
    nothing_padded = torch.ones(2, 20, dtype=torch.bool)
    windowed = {"mask_function": window_mask_function(8), "local_size": 8}
    for attention_mask in (None, nothing_padded):
        assert made(1, 20, attention_mask=attention_mask) is None
        assert made(7, 20, attention_mask=attention_mask) is None
        assert made(1, 8, first=12, attention_mask=attention_mask, **windowed) is None
    of_a_window = made(5, 12, first=8, attention_mask=nothing_padded, **windowed)
    assert of_a_window is not None and getattr(of_a_window, attention_module.WINDOW) == 8
    assert not hasattr(of_a_window[:, :, :, 1:], attention_module.WINDOW), "a mask that is cut is another"


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.arange(20).expand(2, -1) > 3},
        {"attention_mask": torch.arange(20).expand(2, -1) > 3, "mask_function": window_mask_function(8)},
        {"attention_mask": torch.ones(2, 17, dtype=torch.bool)},
        {"mask_function": chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long))},
        {"mask_function": and_masks(causal_mask_function, lambda b, h, q, k: k != 5)},
        {"allow_is_causal_skip": False},
        {"q_offset": 0},
        {"q_offset": torch.tensor(0)},
    ],
    ids=["padded", "padded, window", "too short", "chunks", "another pattern", "wanted", "not the last", "a static cache"],
)
def test_every_other_mask_is_sdpas_own(options: dict[str, Any]) -> None:
    given = made(7, 20, **options)
    offsets = {"q_offset": 13, "kv_offset": 0, "allow_is_causal_skip": False}
    expected = sdpa_mask(batch_size=2, q_length=7, kv_length=20, **(offsets | options | {"allow_is_causal_skip": False}))
    assert given is not None and not hasattr(given, attention_module.WINDOW)
    assert torch.equal(given, expected)


# what a step costs on the host


def test_queries_that_kernels_cannot_load_are_copied_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.Tensor] = []
    monkeypatch.setattr(decode, "attend_singles", lambda *args: launched.append(args[0]))
    k_BKTD = torch.zeros(2, 2, 9, 32)
    numbers = torch.zeros(2 * 4 * 32 + 1)
    even, misplaced = numbers[:-1].view(2, 4, 1, 32), numbers[1:].view(2, 4, 1, 32)
    spaced = torch.zeros(2, 4, 1, 33)[..., :32]
    for q_BHND in (even, misplaced, spaced, even):
        attention_module.attend_causally(q_BHND, k_BKTD, k_BKTD, None, None, None, None)
        checks.aligned("q_BHD", launched[-1])
    assert [each.data_ptr() == even.data_ptr() for each in launched] == [True, False, False, True]


def test_a_decode_pass_is_planned_once_and_waits_for_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, launches = attention_module.plans, []
    monkeypatch.setattr(decode, "attend_singles", lambda *args: launches.append(args[0].shape) or args[7].zero_())
    model = llama()
    model.set_attn_implementation("vmmkv")
    for cache in (VmmCache(model.config, pool), DynamicCache(config=model.config)):
        for layer in range(4):
            cache.update(*torch.zeros(2, 2, 2, 9, 32), layer)
        plans.clear(), launches.clear()
        with Calls() as calls:
            for step in range(3):
                forward(model, cache, torch.ones(2, 1, dtype=torch.long))
                assert (len(plans), len(launches)) == (step + 1, 4 * (step + 1))
        assert calls.names["_local_scalar_dense"] == 0, "it waits for the device"
        if isinstance(cache, VmmCache):
            cache.close()


def test_the_engines_attention_has_a_name_of_its_own() -> None:
    """transformers keeps such functions by name, for the whole process."""
    assert NAME != attention_module.NAME
