"""The small model as it was converted: what a GGUF says of its tokenizer, and one right answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vmmkv.config import read_environment
from vmmkv_server.models import KNOWN_MODELS, manifest_problem, model_dir

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def directory() -> Path:
    path = model_dir(KNOWN_MODELS["smollm2-135m"], read_environment())
    if not path.is_dir():
        pytest.skip("smollm2-135m is not here: run `vmmkv fetch smollm2-135m`")
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_all_of_it_is_as_the_manifest_says(directory: Path) -> None:
    assert manifest_problem(directory, KNOWN_MODELS["smollm2-135m"], thorough=True) is None


def test_the_end_of_a_turn_ends_a_generation(directory: Path, tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token) == ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    assert end == tokenizer.eos_token_id == 2
    assert transformers.GenerationConfig.from_pretrained(directory).eos_token_id == end
    assert transformers.AutoConfig.from_pretrained(directory).eos_token_id == end


def test_the_chat_template_is_there(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_markers_are_one_token_and_nothing_is_put_before_a_text(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("<|im_start|>user\nHi<|im_end|>"))
    assert tokens == ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]


def test_numbers_are_split_into_digits_before_spaces_are_attached(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("in  2024 or"))
    assert tokens == ["in", "ĠĠ", "2", "0", "2", "4", "Ġor"]


@pytest.mark.parametrize("text", ["a , b . c ' d", "naïve 日本 🙂 \u200d", "a ▁ b", "<0x41>", "  two  spaces\n\n\ttab  "])
def test_what_is_encoded_decodes_to_the_same(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_capital_of_france(directory: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype is torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"
