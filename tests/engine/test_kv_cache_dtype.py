"""Quantised rows in the engine. Its other tests run over fp8 and int8 as well, nightly: see `harness`."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import transformers as hf

from tests.engine.conftest import Harness, prompt_of, tiny_model, wide_rows, windowed
from tests.engine.test_transformers import RIGHT, assert_tokens_are_those_of_transformers
from tests.kernels.cases import some
from vmmkv import KVType
from vmmkv.layout import KV_KINDS
from vmmkv.units import MIB
from vmmkv_kernels.quantise import Kind
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.loading import choose_layout
from vmmkv_server.models import UnsupportedModel

kinds = pytest.mark.parametrize("kind", KV_KINDS)


@kinds
@pytest.mark.parametrize("make", [wide_rows, windowed])
def test_chunks_and_prefixes_find_what_transformers_finds(kind: Kind, make: Callable[..., hf.PreTrainedModel]) -> None:
    with closing(Harness(make(), kv_kind=kind, ours=True, share=True, step_tokens=50, max_tokens=1024)) as one:
        prompt = prompt_of(150)
        prompt += one.said(prompt)
        assert prompt[150:] == one.expected(prompt[:150])
        prompt += prompt_of(9, 1)
        one.ask("next turn", prompt)
        one.run()
        assert one.tokens("next turn") == one.expected(prompt)
        assert one.outputs("next turn")[0].cached_tokens >= 150


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode calls
@kinds
@pytest.mark.parametrize("name", some([name for name in RIGHT if "bigcode" in name], [*RIGHT]))
def test_unmodified_models_of_transformers(tmp_path: Path, name: str, kind: Kind) -> None:
    assert_tokens_are_those_of_transformers(RIGHT[name](), tmp_path, "cpu", kv_cache_dtype=kind)


def test_an_engine_says_how_it_keeps_rows_and_has_room_for_more(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tokens = {}
    for kind in ("auto", "fp8_e4m3", "int8", "int4"):
        with LLM(tmp_path, device="cpu", kv_budget_bytes=8 * MIB, kv_cache_dtype=kind) as llm:
            (answered,) = llm.generate([prompt_of(9)], SamplingParams(max_tokens=4))
            assert len(answered.outputs[0].token_ids) == 4
            tokens[llm.ready.kv_cache_dtype] = llm.ready.limits.pool_tokens
    assert list(tokens) == ["float32", "fp8", "int8", "int4"]
    assert 2 * tokens["float32"] < tokens["fp8"] == tokens["int8"] < tokens["int4"]


def test_what_cannot_be_kept_so_is_refused_with_what_works() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='int3' is not known; use one of auto, fp8, int8, int4"):
        LLM(kv_cache_dtype="int3")
    with pytest.raises(UnsupportedModel, match="head size 63 is odd; int8 works"):
        choose_layout(hf.LlamaConfig(head_dim=63), KVType("int4"))
    with pytest.raises(UnsupportedModel, match="that keeps latents"):
        choose_layout(hf.DeepseekV3Config(), KVType("fp8"))
