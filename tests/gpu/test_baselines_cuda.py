"""Block tables and static slots under the engine on a GPU: the tokens of transformers, by graphs, with hardly an upload.

FlashAttention-3 is tested where the environment's FA3_LIBRARY names its library: see bench/README.md.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.baselines import PAGED_FA3, fa3
from bench.baselines.backend import open_common_prefill, open_paged, open_paged_fa3, open_static
from tests.engine.conftest import Harness, prompt_of
from tests.engine.decoder_models import small
from tests.gpu.test_decode_steps_cuda import DEVICE, SIZES, model_of
from vmmkv_server.engine.kv_backend import OpenBackend, SlotBackend

BLOCK_ROWS = 16
MEMORIES: dict[str, OpenBackend] = {
    "paged": open_paged,
    "paged 128": partial(open_paged, block_rows=128),
    "static": open_static,
    "slots, prefill of blocks": open_common_prefill,
}


@pytest.fixture
def over() -> Callable[..., Harness]:
    def make(memory: str, family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: object) -> Harness:
        given = {"device": DEVICE, "ours": True, "capture": True, "slots": 16, "step_tokens": 512, "max_tokens": 2048} | options
        return Harness(model_of(family).to(dtype), open_memory=MEMORIES[memory], **given)

    return make


def finish(one: Harness) -> None:
    while one.engine.has_work:
        one.engine.step()
        one.check_table()
        if hasattr(one.cache, "check"):
            one.cache.check()
    one.engine.settle()


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("memory", MEMORIES)
def test_tokens_are_those_of_transformers(over: Callable[..., Harness], memory: str, capture: bool) -> None:
    one = over(memory, capture=capture, share=True)
    prompts = {str(length): prompt_of(length, length) for length in (1, 15, 16, 17, 130, 700, 1500)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 40)
    finish(one)
    one.assert_expected(prompts, 40)
    one.memory.close()


def test_sharers_of_a_prefix_attend_to_it_once_over_blocks_too(over: Callable[..., Harness]) -> None:
    said = []
    for memory, block_rows in (("paged", 16), ("paged 128", 128), ("slots, prefill of blocks", 16)):
        one = over(memory, share=True, step_tokens=1024)
        shared = prompt_of(1000)
        one.ask("first", shared, 2)
        finish(one)
        for index in range(12):
            one.ask(str(index), shared + prompt_of(20 + index, index), 30)
        finish(one)
        assert one.runner.has_prefix_groups
        assert one.memory.prefix_stats().hit_tokens >= 12 * (1000 // block_rows * block_rows)
        said.append([one.tokens(str(index)) for index in range(12)])
        assert said[-1][3] == one.expected(shared + prompt_of(23, 3), 30)
        one.memory.close()
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("memory", ["paged 128", PAGED_FA3])
def test_heads_of_128_in_bfloat16_are_attended_to_as_over_slots(memory: str, capture: bool) -> None:
    if memory == PAGED_FA3:
        library = os.environ.get("FA3_LIBRARY")
        if why := fa3.why_absent(Path(library) if library else None, torch.device(DEVICE)):
            pytest.skip(why.replace("--fa3", "FA3_LIBRARY"))
        fa3.load(Path(str(library)), torch.device(DEVICE))
    torch.manual_seed(0)
    sizes = {"head_dim": 128, "initializer_range": 0.05, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = LlamaForCausalLM(small(LlamaConfig, **SIZES | sizes)).eval().to(torch.bfloat16)
    shared = prompt_of(1000)
    prompts = [prompt_of(length, length) for length in (1, 15, 16, 17, 127, 128, 129, 700, 1500)]
    prompts += [shared + prompt_of(20 + index, index) for index in range(12)]
    answers = []
    for open_memory in (SlotBackend.open, open_paged_fa3 if memory == PAGED_FA3 else MEMORIES[memory]):
        # A step that has chunks has rows that decode as well: the prompts do not fit in one.
        options = {"device": DEVICE, "ours": True, "capture": capture, "slots": 24, "step_tokens": 1024, "max_tokens": 2048}
        one = Harness(model, open_memory=open_memory, share=True, budget_pages=256, **options)
        one.ask("first", shared, 2)
        finish(one)
        for index, prompt in enumerate(prompts):
            one.ask(str(index), prompt, 40, logprobs=0)
        finish(one)
        assert one.runner.has_prefix_groups == capture
        answers.append([(one.tokens(str(index)), one.logprobs(str(index))) for index in range(len(prompts))])
        one.memory.close()
    num_compared = 0
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(*answers, strict=True):
        same = next((i for i in range(40) if tokens[i] != other_tokens[i]), 40)
        num_compared += same
        pairs = zip(logprobs[:same], other_logprobs[:same], strict=True)
        assert all(abs(one - other) < 0.1 for one, other in pairs), "more than bfloat16 rounds"
    # Near-ties are decided by rounding, and answers part there.
    assert num_compared > 0.3 * 40 * len(prompts)


def test_in_bfloat16_blocks_give_the_bits_of_slots_by_the_same_kernels(over: Callable[..., Harness]) -> None:
    said = []
    for memory in ("paged", "slots, prefill of blocks", "static"):
        one = over(memory, dtype=torch.bfloat16)
        for index in range(8):
            one.ask(str(index), prompt_of(50 + 37 * index, index), 40, logprobs=0)
        finish(one)
        said.append([(one.tokens(str(index)), one.logprobs(str(index))) for index in range(8)])
        one.memory.close()
    assert said[0] == said[1], "blocks and slots in pages"
    assert said[0][0][0][:1] == said[2][0][0][:1], "a static slot's prefill may be Hopper's own"


def test_steady_decode_uploads_at_block_borders_alone(over: Callable[..., Harness]) -> None:
    one = over("paged", lookahead=2)
    for index in range(8):
        one.ask(str(index), prompt_of(40, index), 200)
    for _ in range(12):
        one.engine.step()
    tables, steps = one.cache.uploads.count, one.runner.uploads.count
    for _ in range(4 * BLOCK_ROWS):
        one.engine.step()
    assert one.cache.uploads.count == tables + 4, "one for all, at each border"
    assert one.runner.uploads.count == steps
    assert one.cache.stats().blocked_steps == 0
    finish(one)
    one.memory.close()
