"""Block tables and static slots under the engine on a GPU: the tokens of transformers, by graphs, with hardly an upload."""

from collections.abc import Callable

import pytest
import torch

from bench.baselines.backend import open_common_prefill, open_paged, open_static
from bench.baselines.paged import BLOCK_ROWS
from tests.engine.conftest import Harness, prompt_of
from tests.gpu.test_decode_steps_cuda import DEVICE, model_of
from vmmkv.server.engine.kv_backend import OpenBackend

MEMORIES: dict[str, OpenBackend] = {
    "paged": open_paged,
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
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 40), name
    one.memory.close()


def test_sharers_of_a_prefix_attend_to_it_once_over_blocks_too(over: Callable[..., Harness]) -> None:
    said = []
    for memory in ("paged", "slots, prefill of blocks"):
        one = over(memory, share=True, step_tokens=1024)
        shared = prompt_of(1000)
        one.ask("first", shared, 2)
        finish(one)
        for index in range(12):
            one.ask(str(index), shared + prompt_of(20 + index, index), 30)
        finish(one)
        assert one.runner.has_prefix_groups
        assert one.prefix.stats().hit_tokens >= 12 * (1000 // BLOCK_ROWS * BLOCK_ROWS)
        said.append([one.tokens(str(index)) for index in range(12)])
        assert said[-1][3] == one.expected(shared + prompt_of(23, 3), 30)
        one.memory.close()
    assert said[0] == said[1]


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
