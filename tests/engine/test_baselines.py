"""Block tables and static slots under the very same engine: the same tokens, nothing leaked, nothing shared that is not."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bench.baselines.backend import open_common_prefill, open_paged, open_static
from bench.baselines.paged import BLOCK_ROWS, PagedCache, PagedPrefixes
from tests.engine.conftest import Harness, prompt_of, tiny_model
from vmmkv import KVLayout
from vmmkv.errors import BudgetError, OutOfPages, RowsUnmapped
from vmmkv.server.engine.kv_backend import BackendConfig
from vmmkv.server.protocol import Beams

BASELINES = {"paged": open_paged, "static": open_static}


@pytest.fixture
def over() -> Callable[..., Harness]:
    """A harness over a baseline."""

    def make(**options: object) -> Harness:
        return Harness(tiny_model(), **({"ours": True, "max_tokens": 512} | options))

    return make


def finish(one: Harness) -> None:
    """Run until all is done, recounting, and see that everything is free."""
    one.run()
    assert not one.cache.sequences
    if isinstance(one.cache, PagedCache):
        if one.prefix is not None:
            one.prefix.evict()
        one.cache.check()
        assert one.cache.blocks.num_held == 0
    one.memory.close()


def wanted(*, budget_bytes: int | None = 2**21, window: int | None = None) -> BackendConfig:
    layout = KVLayout.uniform(layers=3, kv_heads=1, head_dim=16, dtype=torch.float32, windows=[window] * 3)
    return BackendConfig(
        layout=layout, device=torch.device("cpu"), max_sequences=2, max_tokens=64, step_tokens=8, shares_prefixes=True,
        budget_bytes=budget_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("system", BASELINES)
def test_tokens_are_those_of_transformers(over: Callable[..., Harness], system: str, lookahead: int) -> None:
    one = over(open_memory=BASELINES[system], share=True, lookahead=lookahead, step_tokens=64)
    prompts = {str(length): prompt_of(length, length) for length in (1, 15, 16, 17, 100, 33)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 20)
    one.ask("sampled", prompt_of(40), 20, temperature=0.9, seed=7)
    finish(one)
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.expected(prompt, 20), name
    assert len(one.tokens("sampled")) == 20


def test_sampled_tokens_are_those_over_slots(over: Callable[..., Harness], harness: Callable[..., Harness]) -> None:
    said = []
    for one in (over(open_memory=open_paged), over(open_memory=open_static), harness(ours=True, max_tokens=512)):
        for index in range(5):
            one.ask(str(index), prompt_of(30 + index, index), 30, temperature=0.9, top_p=0.9, seed=index)
        one.run()
        said.append([one.tokens(str(index)) for index in range(5)])
    assert said[0] == said[1] == said[2]


def test_whole_blocks_of_a_known_prefix_are_not_computed_again(over: Callable[..., Harness]) -> None:
    one = over(open_memory=open_paged, share=True)
    shared = prompt_of(70)
    one.said(shared + prompt_of(9, 1), 6)
    for name in ("second", "third"):
        one.ask(name, shared + prompt_of(9, len(name)), 6)
    used = one.prefix.stats().hit_tokens
    finish(one)
    assert one.prefix.stats().hit_tokens - used == 2 * (70 // BLOCK_ROWS * BLOCK_ROWS)
    assert one.tokens("second") == one.expected(shared + prompt_of(9, 6), 6)
    assert one.tokens("third") == one.expected(shared + prompt_of(9, 5), 6)


@pytest.mark.parametrize("share", [False, True])
def test_a_request_without_a_block_is_preempted_and_answers_the_same(over: Callable[..., Harness], share: bool) -> None:
    one = over(open_memory=open_paged, share=share, budget_pages=1, max_tokens=2048)  # 2,048 rows
    prompts = [prompt_of(600, index) for index in range(3)]
    for index, prompt in enumerate(prompts):
        one.ask(str(index), prompt, 120)
    finish(one)
    assert one.engine._scheduler.num_preempted > 0
    for index, prompt in enumerate(prompts):
        assert one.tokens(str(index)) == one.expected(prompt, 120)


def test_a_static_cache_runs_as_many_as_it_has_slots(over: Callable[..., Harness]) -> None:
    one = over(open_memory=open_static, budget_pages=1, max_tokens=512)  # 2,048 rows: four slots
    for index in range(7):
        one.ask(str(index), prompt_of(20, index), 10)
    most = 0
    while one.engine.has_work:
        one.engine.step()
        most = max(most, len(one.engine._scheduler.running))
    assert most == 4 == one.cache.num_slots
    finish(one)
    assert all(len(one.tokens(str(index))) == 10 for index in range(7))


def test_beams_over_blocks_are_those_over_slots(over: Callable[..., Harness], harness: Callable[..., Harness]) -> None:
    said = []
    for one in (over(open_memory=open_paged, share=True), harness(ours=True, share=True, max_tokens=512)):
        one.said(prompt_of(37), 12, beam_width=3)
        said.append([message.beams for message in one.sent if isinstance(message, Beams)])
    assert said[0] == said[1] and said[0]


def test_steady_decode_uploads_at_block_borders_alone(over: Callable[..., Harness]) -> None:
    one = over(open_memory=open_paged)
    for index in range(4):
        one.ask(str(index), prompt_of(20, index), 100)
    for _ in range(8):
        one.engine.step()
    uploads, lengths = one.cache.uploads.count, int(one.cache.lengths.max())
    num_steps = 3 * BLOCK_ROWS
    for _ in range(num_steps):
        one.engine.step()
    assert int(one.cache.lengths.max()) == lengths + num_steps
    assert one.cache.uploads.count == uploads + 3, "once for all four, each time"
    assert one.cache.stats().blocked_steps == 0
    finish(one)


def test_a_failed_growth_changes_nothing() -> None:
    cache, _ = blocks_for(3, slots=2)
    one, other = cache.open(), cache.open()
    one.grow(2 * BLOCK_ROWS)
    with pytest.raises(OutOfPages, match="2 blocks are needed, 1 are free and 0 can be evicted"):
        other.grow(2 * BLOCK_ROWS)
    cache.check()
    with pytest.raises(RowsUnmapped):
        other.advance(1)
    with pytest.raises(OutOfPages, match="all 2 slots"):
        cache.open()
    other.close()
    one.close()
    assert cache.blocks.num_held == 0
    cache.check()


@pytest.mark.parametrize("system", BASELINES)
def test_a_baseline_refuses_windows_and_a_missing_budget(system: str) -> None:
    with pytest.raises(BudgetError, match="give a budget of at least"):
        BASELINES[system](wanted(budget_bytes=None))
    with pytest.raises(ValueError, match="without windows"):
        BASELINES[system](wanted(window=8))


def test_slots_with_the_prefill_of_blocks_are_slots(over: Callable[..., Harness]) -> None:
    one = over(open_memory=open_common_prefill, share=True)
    assert one.said(prompt_of(50), 10) == one.expected(prompt_of(50), 10)
    one.memory.close()


def blocks_for(num_blocks: int, slots: int = 3) -> tuple[PagedCache, PagedPrefixes]:
    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=16, dtype=torch.float32)
    cache = PagedCache(layout, torch.device("cpu"), num_blocks=num_blocks, slots=slots, max_tokens=2048)
    return cache, PagedPrefixes(cache)


def cached(prefixes: PagedPrefixes, tokens: np.ndarray) -> None:
    """A sequence of these tokens came and went."""
    sequence = prefixes.attach(tokens).sequence
    sequence.grow(len(tokens))
    sequence.advance(len(tokens) - sequence.length)
    prefixes.release(sequence, tokens)


def test_what_a_prefix_is_followed_by_in_its_node_can_go() -> None:
    cache, prefixes = blocks_for(100)
    long = np.arange(1600, dtype=np.int32)
    cached(prefixes, long)
    assert cache.blocks.num_held == 100
    other = np.concatenate((long[:40], long[:1000] + 5000))
    attached = prefixes.attach(other)
    assert attached.num_tokens == 32
    attached.sequence.grow(len(other))  # 63 blocks more, where all but two of the 100 are cached and unused
    cache.check()
    assert prefixes.lookup(long)() == 32
    attached.sequence.close()


def test_a_refused_request_has_evicted_nothing() -> None:
    cache, prefixes = blocks_for(20)
    running = cache.open()
    running.grow(15 * BLOCK_ROWS)
    prompt = np.arange(5 * BLOCK_ROWS, dtype=np.int32)
    cached(prefixes, prompt)
    other = cache.open()
    with pytest.raises(OutOfPages, match="6 blocks are needed, 0 are free and 5 can be evicted"):
        other.grow(6 * BLOCK_ROWS)
    assert prefixes.lookup(prompt)() == 4 * BLOCK_ROWS, "all but the last token's block, which is always computed"
    other.grow(5 * BLOCK_ROWS)
    assert prefixes.lookup(prompt)() == 0
    cache.check()


def test_what_is_closed_is_free() -> None:
    for open_memory in BASELINES.values():
        memory = open_memory(wanted())
        planes = [weakref.ref(plane) for pair in memory.cache.planes.values() for plane in pair]
        assert len(planes) == 6 and all(plane() is not None for plane in planes)
        memory.close()
        assert not any(plane() is not None for plane in planes)
