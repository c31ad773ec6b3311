"""With the prefix cache requests get the tokens that they get without it, for less work."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from tests.engine.conftest import VOCABULARY, Harness, prompt_of, tiny_model
from vmmkv.server.protocol import Abort
from vmmkv.units import PAGE_BYTES

PAGE_TOKENS = 2048
"""Of the tiny model's cache."""


def cached(harness: Harness, request_id: str) -> int:
    return sum(output.cached_tokens for output in harness.outputs(request_id))


def test_fifty_prompts_with_shared_prefixes_on_smollm2(smollm2: Path, harness: Callable[..., Harness]) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    systems = [text * 5 for text in ("You are a helpful guide to old cities. ", "Answer with one word, in French. ")]
    questions = ("Where is the oldest bridge?", "Where is the oldest mill?", "Why?", "What is a canal?", "Name a river.")
    texts = [system + " " * turn + question for system in systems for question in questions for turn in range(5)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts[7] = prompts[3]  # a hit of the whole prompt
    prompts[9] = prompts[4][:1] + prompts[9][:40]  # of one token, or few
    answers = []
    for share in (False, True):
        one = harness(model, share=share, budget_pages=40, slots=6)
        for index, prompt in enumerate(prompts):
            one.ask(str(index), prompt, 6)
        one.run()
        assert not one.failures()
        answers.append([one.tokens(str(index)) for index in range(len(prompts))])
    assert len(prompts) == 50
    assert answers[0] == answers[1]
    assert cached(one, "7") == len(prompts[7]) - 1
    known = sum(cached(one, str(index)) for index in range(len(prompts)))
    assert known > 0.5 * sum(map(len, prompts))
    assert cached(one, "9") == 1
    (group,) = one.cache.layout.groups
    inside = (cached(one, str(index)) * group.row_bytes % PAGE_BYTES for index in range(len(prompts)) if index not in (7, 9))
    assert any(group.row_bytes < rest_bytes < PAGE_BYTES - group.row_bytes for rest_bytes in inside), "within an extent"
    assert one.prefix.stats().evicted_pages > 0


@pytest.mark.parametrize("length", [1, 2, 100, PAGE_TOKENS, PAGE_TOKENS + 1, PAGE_TOKENS + 700])
def test_a_prompt_that_was_there_before_computes_its_last_token_only(harness: Callable[..., Harness], length: int) -> None:
    one = harness(share=True, step_tokens=4096)
    prompt = prompt_of(length)
    one.ask("first", prompt)
    one.run()
    one.ask("second", prompt)
    one.ask("longer", [*prompt, *one.tokens("first")[:-1], 7, 8, 9])
    one.run()
    assert one.tokens("first") == one.tokens("second") == one.expected(prompt)
    assert one.tokens("longer") == one.expected([*prompt, *one.tokens("first")[:-1], 7, 8, 9])
    assert (cached(one, "first"), cached(one, "second")) == (0, length - 1)
    assert cached(one, "longer") == length + 7


def test_after_an_eviction_it_is_computed_again(harness: Callable[..., Harness]) -> None:
    one = harness(share=True, budget_pages=3, step_tokens=4096)
    prompt = prompt_of(PAGE_TOKENS + 100)
    for name in ("first", "again"):
        one.ask(name, prompt)
        one.run()
        one.ask("other " + name, prompt_of(2 * PAGE_TOKENS, 5))
        one.run()
    assert one.tokens("first") == one.tokens("again") == one.expected(prompt)
    assert cached(one, "again") < PAGE_TOKENS
    assert one.prefix is not None
    assert one.prefix.stats().evicted_pages > 0


def test_four_choices_are_four_requests_with_the_same_seeds(harness: Callable[..., Harness]) -> None:
    prompt = prompt_of(PAGE_TOKENS + 300)
    together = harness(share=True, step_tokens=4096)
    for seed in range(4):
        together.ask(str(seed), prompt, 8, temperature=1.0, seed=seed)
    together.run()
    alone = harness(step_tokens=4096)
    for seed in range(4):
        alone.ask(str(seed), prompt, 8, temperature=1.0, seed=seed)
        alone.run()
        assert together.tokens(str(seed)) == alone.tokens(str(seed))
    assert [cached(together, str(seed)) for seed in range(4)] == [0, *[len(prompt) - 1] * 3], "siblings wait for the first"


def test_a_salt_never_hits_anothers(harness: Callable[..., Harness]) -> None:
    one = harness(share=True)
    prompt = prompt_of(300)
    for index, salt in enumerate((None, "red", "blue", "red")):
        one.ask(str(index), prompt, cache_salt=salt)
        one.run()
    assert [cached(one, str(index)) for index in range(4)] == [0, 0, 0, 299]


def test_who_gives_way_keeps_what_is_shared(harness: Callable[..., Harness]) -> None:
    one = harness(share=True, budget_pages=4, step_tokens=4096, slots=4)
    shared = prompt_of(PAGE_TOKENS + 20)
    prompts = {str(seed): [*shared, *prompt_of(PAGE_TOKENS - 100, seed)] for seed in range(1, 5)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 120)
    one.run()
    assert not one.failures()
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 120), name


def test_windowed_layers_need_their_last_window_only(harness: Callable[..., Harness]) -> None:
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, sliding_window=100,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    one = harness(MistralForCausalLM(config).eval(), share=True, step_tokens=4096)
    prompt = prompt_of(PAGE_TOKENS + 500)
    one.ask("first", prompt)
    one.run()
    longer = [*prompt, *one.tokens("first")[:-1], 5]
    one.ask("longer", longer)
    one.run()
    assert one.tokens("longer") == one.expected(longer)
    assert cached(one, "longer") == len(longer) - 1


def test_nobody_waits_for_ever_behind_longer_prefixes(harness: Callable[..., Harness]) -> None:
    one = harness(tiny_model(1), share=True, slots=1)
    known = prompt_of(200)
    one.ask("known", known, 1)
    one.run()
    one.ask("unknown", prompt_of(50, 9), 1)
    for index in range(40):
        one.ask(f"hit {index}", [*known, index], 1)
    one.run()
    order = [output.request_id for output in one.outputs()]
    assert 1 < order.index("unknown") <= 18


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_an_aborted_request_leaves_what_it_computed(harness: Callable[..., Harness], lookahead: int) -> None:
    """Of steps that are under way nothing is known yet: they give nothing to anybody."""
    one = harness(share=True, step_tokens=64, lookahead=lookahead)
    prompt = prompt_of(300)
    one.ask("gone", prompt)
    for _ in range(3):
        one.engine.step()
    one.engine.receive(Abort(request_id="gone"))
    one.ask("next", prompt)
    one.run()
    assert cached(one, "next") == 64 * (3 - lookahead)
    assert one.tokens("next") == one.expected(prompt)
