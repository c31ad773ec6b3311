"""Of transformers' causal models as they are: those that the engine runs give that library's tokens, the others are refused."""

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.llama import modeling_llama

from tests.engine.conftest import MakeHarness, prompt_of, quantising
from tests.engine.decoder_models import FAMILIES, model_of, small
from vmmkv import MIB, KVLayout
from vmmkv.errors import OutOfPages
from vmmkv.unmodified import settle_rotary
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine import waiting
from vmmkv_server.engine.loading import ModelSource, choose_max_tokens
from vmmkv_server.engine.models.decoder import DecoderModel
from vmmkv_server.engine.models.transformers import TransformersModel
from vmmkv_server.engine.servable import refusing
from vmmkv_server.models import UnsupportedModel

EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
"""Of models that choose some of their experts for each token."""

CAPPED: dict[str, Any] = {
    "head_dim": 16, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 1.0, "sliding_window": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Scores so large that the cap changes the tokens; tied embeddings, being random, repeat the last one whatever the scores."""

OPT = "opt, whose head calls a part of a part"
BLOOM = hf.BloomConfig(vocab_size=99, hidden_size=64, n_layer=2, n_head=4)
RIGHT: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "mixtral": lambda: small(hf.MixtralConfig, num_local_experts=4, **EXPERTS),
    "olmoe": lambda: small(hf.OlmoeConfig, num_experts=4, **EXPERTS),
    "bert, a decoder": lambda: small(hf.BertConfig, num_key_value_heads=4, is_decoder=True),
    "gpt-bigcode, one head for all queries": lambda: small(hf.GPTBigCodeConfig, num_key_value_heads=4, n_inner=96),
    OPT: lambda: small(hf.OPTConfig, num_key_value_heads=4, ffn_dim=96, word_embed_proj_dim=64),
    "gemma 3n, whose last layers read the rows of others": lambda: small(
        hf.Gemma3nTextConfig,
        head_dim=16,
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        sliding_window=16,
        laurel_rank=8,
        vocab_size_per_layer_input=199,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma 4, heads of two sizes": lambda: small(
        hf.Gemma4TextConfig,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        sliding_window=16,
        vocab_size_per_layer_input=199,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma 2, capped scores": lambda: small(hf.Gemma2Config, **CAPPED),
    "vaultgemma, capped scores": lambda: small(hf.VaultGemmaConfig, **CAPPED),
    "phimoe, a window in its mask alone": lambda: small(hf.PhimoeConfig, num_local_experts=4, sliding_window=16, **EXPERTS),
}
REFUSED: dict[str, tuple[Callable[[], hf.PreTrainedConfig], str]] = {
    "bert, an encoder": (
        lambda: small(hf.BertConfig, num_key_value_heads=4),
        "a model of type bert cannot be served: the configuration (bert) is an encoder",
    ),
    "doge, biases in its mask": (lambda: small(hf.DogeConfig), "DogeAttention asks for a mask of its own"),
    "deepseek-v3, latents": (
        lambda: small(hf.DeepseekV3Config, kv_lora_rank=16),
        "a model of type deepseek_v3 cannot be served: it has latents (kv_lora_rank) in layers 0 to",
    ),
    "jetmoe, heads for each expert": (
        lambda: small(hf.JetMoeConfig, kv_channels=16, num_local_experts=4),
        "JetMoeForCausalLM cannot be served: JetMoeAttention gives keys of 4 heads of 16 and values of 4 heads of 16",
    ),
    "gpt-oss, sinks": (
        lambda: small(hf.GptOssConfig, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        "a model of type gpt_oss cannot be served: it has attention sinks",
    ),
    "bloom": (lambda: BLOOM, "BloomForCausalLM has an attention of its own"),
    "llama, made an encoder": (
        lambda: small(hf.LlamaConfig, is_causal=False),
        "asks for attention to later tokens too",
    ),
    "moshi, a window for one attention only": (
        lambda: small(hf.MoshiConfig, head_dim=16, ffn_dim=96, num_hidden_layers=2, sliding_window=16),
        "MoshiAttention attends to all rows in layer 0, where the configuration says the last 16 rows",
    ),
}
LENGTHS = (1, 7, 50)
NUM_NEW = 12


@contextmanager
def engine_of(directory: Path, **options: Any) -> Iterator[LLM]:
    with LLM(
        directory, **{"device": "cpu", "max_num_seqs": 4, "max_tokens": 128, "kv_budget_bytes": 64 * MIB} | options
    ) as one:
        yield one


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode calls
@pytest.mark.parametrize("name", RIGHT)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    assert_tokens_are_those_of_transformers(RIGHT[name](), tmp_path, "cpu")


def assert_tokens_are_those_of_transformers(
    config: hf.PreTrainedConfig, directory: Path, device: str, lengths: Sequence[int] = LENGTHS, **options: Any
) -> None:
    model = model_of(config)
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None  # which sdpa ignores
    if kind := options.get("kv_cache_dtype"):
        own = [sys.modules[type(model).__module__].eager_attention_forward] if is_capped else []
        model.set_attn_implementation(quantising(kind, *own))
    else:
        model.set_attn_implementation("eager" if is_capped else "sdpa")
    model.save_pretrained(directory)
    model.to(device)
    prompts = [prompt_of(length, length) for length in lengths]
    with engine_of(directory, device=device, dtype="float32", **options) as engine:
        assert engine.ready.implementation == "transformers"
        completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_NEW))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt], device=device)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
        assert completion.outputs[0].token_ids == expected[0, len(prompt) :].tolist(), len(prompt)


def test_a_window_in_the_mask_alone_gives_back_the_rows_before_it(tmp_path: Path) -> None:
    """Rows of 16 KiB, so that pages are passed within the test: what read from row 0 met memory that was no longer mapped."""
    config = small(
        hf.PhimoeConfig, hidden_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
        num_local_experts=2, sliding_window=16,
    )  # fmt: skip
    assert_tokens_are_those_of_transformers(config, tmp_path, "cpu", [290], max_tokens=400, max_num_batched_tokens=32)


@pytest.mark.parametrize("implementation", ["vmmkv", "transformers"])
def test_layers_in_several_groups_of_one_shape_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """As where a row of all layers is more than a page. Prompts that are sent again hit their prefix."""
    whole = KVLayout.of_rows

    def apart(rows: Mapping[int, Any]) -> KVLayout:
        return KVLayout(groups=tuple(group for layer in rows for group in whole({layer: rows[layer]}).groups))

    monkeypatch.setattr(KVLayout, "of_rows", apart)
    model = model_of(small(hf.LlamaConfig))
    model.save_pretrained(tmp_path)
    prompt = prompt_of(50, 3)
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    with engine_of(tmp_path, dtype="float32", model_impl=implementation) as engine:
        assert len(engine.loaded.memory.cache.layout.groups) == 3
        for _ in range(2):
            (completion,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_NEW))
            assert completion.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
        assert completion.cached_tokens


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_and_it_is_said_why(tmp_path: Path, name: str) -> None:
    make, reason = REFUSED[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as raised, engine_of(tmp_path, load_format="dummy"):
        pass
    assert reason in str(raised.value)


def test_capped_scores_are_those_of_transformers_in_steps_of_any_size(tmp_path: Path) -> None:
    config = RIGHT["gemma 2, capped scores"]()
    assert_tokens_are_those_of_transformers(config, tmp_path, "cpu", max_num_batched_tokens=11)
    plain = small(hf.Gemma2Config, **(CAPPED | {"attn_logit_softcapping": None}))
    ids = torch.tensor([prompt_of(50, 50)])
    capped, uncapped = (model_of(each).generate(ids, max_new_tokens=NUM_NEW, do_sample=False) for each in (config, plain))
    assert not torch.equal(capped, uncapped), "the cap changes nothing here"


@pytest.mark.parametrize("name", ["sinks", "s_aux", "indices", "block_indices", "position_bias", "of_tomorrow"])
def test_arguments_of_attention_that_are_unknown_are_refused_by_name(harness: MakeHarness, name: str) -> None:
    model = harness(ours=False).runner.model
    assert isinstance(model, TransformersModel)
    module, states = torch.nn.Module(), [torch.zeros(1, 4, 3, 16)] * 3
    with pytest.raises(UnsupportedModel, match=rf"Module asks for {name}, which vmmkv does not do yet"):
        model.attend(module, *states, None, cache_position=torch.arange(3), output_attentions=False, **{name: torch.zeros(3)})


def test_a_mask_of_later_tokens_is_refused_even_if_layers_say_causal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def later_tokens_too(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, **_: Any) -> Any:
        return create_bidirectional_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", later_tokens_too)
    small(hf.LlamaConfig).save_pretrained(tmp_path)
    reason = r"LlamaForCausalLM cannot be served: the model asks for attention to later tokens too"
    with (
        pytest.raises(UnsupportedModel, match=reason),
        engine_of(tmp_path, load_format="dummy", model_impl="transformers"),
    ):
        pass


def test_an_error_of_transformers_is_the_models_but_for_want_of_memory() -> None:
    with (
        pytest.raises(UnsupportedModel, match=r"Llama cannot be served: IndexError: list index out of range; use another$"),
        refusing("Llama", "use another"),
    ):
        raise IndexError("list index\n  out of range")
    for error in (OutOfPages("none is free"), torch.OutOfMemoryError("none is left"), MemoryError(), OSError("no such file")):
        with pytest.raises(type(error)) as raised, refusing("Llama"):
            raise error
        assert raised.value is error
    with pytest.raises(MemoryError, match="4503599627370496 bytes"), refusing("Llama"):
        torch.empty(2**50)  # a RuntimeError


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.6 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_frequencies_that_depend_on_lengths_are_those_of_the_longest(tmp_path: Path) -> None:
    """A request's answer is the same alone, beside a long one, and after a prefix that was computed when it was short."""
    options = {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64, "sliding_window": None}
    model = model_of(small(hf.Phi3Config, **options))
    model.save_pretrained(tmp_path)
    short, long = prompt_of(30, 1), prompt_of(200, 2)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
    for max_tokens in (400, 60):
        prompts = [each for each in (short, long) if len(each) < max_tokens]
        settle_rotary(model, max_tokens)
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
            expected.append(out[0, len(prompt) :].tolist())
        with engine_of(tmp_path, max_tokens=max_tokens) as engine:
            (alone,) = engine.generate([short], params)
            engine.generate([long[:40]], params)
            beside = engine.generate(prompts, params)
        assert alone.outputs[0].token_ids == expected[0]
        assert [each.outputs[0].token_ids for each in beside] == expected
        assert max_tokens == 60 or beside[1].cached_tokens >= 39


def test_rows_of_other_frequencies_have_another_identity(tmp_path: Path) -> None:
    def fingerprint(max_tokens: int, rope: dict[str, Any]) -> str:
        options = {"rope_parameters": dict(rope), "original_max_position_embeddings": 64, "sliding_window": None}
        model_of(small(hf.Phi3Config, **options)).save_pretrained(tmp_path)
        config = EngineConfig(model=str(tmp_path), max_tokens=max_tokens, max_num_seqs=2)
        return ModelSource(config, torch.device("cpu"), torch.float32).fingerprint

    assert fingerprint(60, LONGROPE) != fingerprint(400, LONGROPE) == fingerprint(400, LONGROPE)
    default = {"rope_type": "default", "rope_theta": 10000.0}
    assert fingerprint(60, default) == fingerprint(400, default)


def test_the_option_that_a_model_of_any_length_wants_is_named() -> None:
    with pytest.raises(ValueError, match=r"give max_tokens$"):
        choose_max_tokens(None, BLOOM)


def test_a_head_that_calls_a_part_of_a_part_has_no_log_probabilities_of_prompts(tmp_path: Path) -> None:
    RIGHT[OPT]().save_pretrained(tmp_path)
    with engine_of(tmp_path, load_format="dummy") as engine:
        assert not engine.loaded.engine.runner.model.has_states
        (completion,) = engine.generate([[1, 2, 3]], SamplingParams(prompt_logprobs=0, max_tokens=2))
    assert completion.error is not None and "no log-probabilities of its prompts" in completion.error


SMOLLM2 = {
    "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of SmolLM2-135M, an eighth as wide."""

MODELS: dict[str, Callable[[], hf.PreTrainedConfig]] = FAMILIES | {
    "smollm2": lambda: small(hf.LlamaConfig, **SMOLLM2),
    "mistral, window of 16": lambda: small(hf.MistralConfig, head_dim=32, sliding_window=16),
}
FAMILY_LENGTHS = (1, 2, 15, 16, 17, 63, 130)


@pytest.mark.parametrize("family", MODELS)
def test_families_give_the_tokens_of_transformers(harness: MakeHarness, family: str) -> None:
    """By our decoder and by transformers' own code, in steps of any size."""
    model = model_of(MODELS[family]())
    prompts = {str(length): prompt_of(length, length) for length in FAMILY_LENGTHS}
    expected: dict[str, list[int]] = {}
    for ours, step_tokens in itertools.product((True, False), (11, 4096)):
        one = harness(model, ours=ours, step_tokens=step_tokens)
        assert isinstance(one.runner.model, DecoderModel if ours else TransformersModel)
        one.serve(prompts, 20)
        expected = expected or {name: one.expected(prompt, 20) for name, prompt in prompts.items()}
        assert {name: one.tokens(name) for name in prompts} == expected, (ours, step_tokens)
    assert len({tuple(tokens) for tokens in expected.values()}) > len(prompts) // 2, "it says the same to few"


@pytest.mark.parametrize(
    ("family", "ours"), [("llama 3 scaling", True), ("mistral, window of 16", True), ("mistral, window of 16", False)]
)
def test_and_with_what_is_shared(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, family: str, ours: bool) -> None:
    monkeypatch.setattr(waiting, "MIN_AWAITED", 2)  # so that so little is waited for
    one = harness(model_of(MODELS[family]()), ours=ours, step_tokens=50, share=True)
    shared = prompt_of(120)
    prompts = {str(index): [*shared, *prompt_of(3 + index, index)] for index in range(4)}
    one.serve(prompts, 20)
    one.assert_expected(prompts, 20)
    assert sum(output.cached_tokens for output in one.outputs()) >= 3 * len(shared) - 3


OTHERS: dict[str, tuple[Callable[[], hf.PreTrainedConfig], str]] = {
    "gemma": (lambda: small(hf.GemmaConfig, head_dim=16), "model_type is 'gemma'"),
    "gpt-neox": (lambda: small(hf.GPTNeoXConfig, num_key_value_heads=4), "model_type is 'gpt_neox'"),
    "phi": (lambda: small(hf.PhiConfig), "model_type is 'phi'"),
    "llama with another activation": (lambda: small(hf.LlamaConfig, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "llama of odd heads": (lambda: small(hf.LlamaConfig, head_dim=20), "head_dim is 20"),
}


def assert_answers(engine: LLM) -> None:
    completions = engine.generate([prompt_of(9 + index) for index in range(6)], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [(each.error, len(each.outputs[0].token_ids)) for each in completions] == [(None, 5)] * 6


@pytest.mark.parametrize("family", ["smollm2", "mistral, window of 16", "qwen3"])
def test_our_decoder_runs_what_it_knows(tmp_path: Path, family: str) -> None:
    MODELS[family]().save_pretrained(tmp_path)
    with engine_of(tmp_path, load_format="dummy") as engine:
        assert engine.ready.implementation == "vmmkv"
        assert_answers(engine)


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_runs_the_others_and_it_is_said_why(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    make, reason = OTHERS[name]
    make().save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "vmmkv_server"), engine_of(tmp_path, load_format="dummy") as engine:
        assert engine.ready.implementation == "transformers"
        assert_answers(engine)
    assert "transformers' own code" in caplog.text and reason in caplog.text
    with pytest.raises(ValueError, match=r"model_impl='vmmkv' cannot run .* use 'auto'") as raised:
        LLM(tmp_path, device="cpu", load_format="dummy", model_impl="vmmkv")
    assert reason in str(raised.value)
