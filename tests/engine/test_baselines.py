"""Block tables and static slots under the very same engine: the same tokens, nothing leaked, nothing shared that is not."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bench.baselines.backend import open_common_prefill, open_paged, open_static
from bench.baselines.paged import FA3Rows, PagedCache
from tests.engine.conftest import Harness, prompt_of, tiny_model
from vmmkv import KVLayout
from vmmkv.errors import BudgetError, OutOfPages, RowsUnmapped
from vmmkv_server.engine.attention import AttentionMetadata, attend
from vmmkv_server.engine.kv_backend import BackendConfig

BASELINES = {"paged": open_paged, "paged 128": partial(open_paged, block_rows=128), "static": open_static}
BLOCK_ROWS = 16
"""Of `open_paged` by default."""


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
    one.memory.evict()
    if isinstance(one.cache, PagedCache):
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
    one.assert_expected(prompts, 20)
    assert len(one.tokens("sampled")) == 20


def test_sampled_tokens_are_those_over_slots(over: Callable[..., Harness], harness: Callable[..., Harness]) -> None:
    said = []
    for one in (*(over(open_memory=each) for each in BASELINES.values()), harness(ours=True, max_tokens=512)):
        for index in range(5):
            one.ask(str(index), prompt_of(30 + index, index), 30, temperature=0.9, top_p=0.9, seed=index)
        one.run()
        said.append([one.tokens(str(index)) for index in range(5)])
    assert all(each == said[0] for each in said)


@pytest.mark.parametrize("block_rows", [16, 128])
def test_whole_blocks_of_a_known_prefix_are_not_computed_again(over: Callable[..., Harness], block_rows: int) -> None:
    one = over(open_memory=partial(open_paged, block_rows=block_rows), share=True)
    shared = prompt_of(270)
    one.said(shared + prompt_of(9, 1), 6)
    for name in ("second", "third"):
        one.ask(name, shared + prompt_of(9, len(name)), 6)
    used = one.memory.prefix_stats().hit_tokens
    finish(one)
    assert one.memory.prefix_stats().hit_tokens - used == 2 * (270 // block_rows * block_rows)
    assert one.tokens("second") == one.expected(shared + prompt_of(9, 6), 6)
    assert one.tokens("third") == one.expected(shared + prompt_of(9, 5), 6)


@pytest.mark.parametrize("share", [False, True])
def test_a_request_without_a_block_is_preempted_and_answers_the_same(over: Callable[..., Harness], share: bool) -> None:
    one = over(open_memory=open_paged, share=share, budget_pages=1, max_tokens=2048)  # 2,048 rows
    prompts = {str(index): prompt_of(600, index) for index in range(3)}
    for name, prompt in prompts.items():
        one.ask(name, prompt, 120)
    finish(one)
    assert one.engine.scheduler.counts.preemptions > 0
    one.assert_expected(prompts, 120)


def test_a_static_cache_runs_as_many_as_it_has_slots(over: Callable[..., Harness]) -> None:
    one = over(open_memory=open_static, budget_pages=1, max_tokens=512)  # 2,048 rows: four slots
    for index in range(7):
        one.ask(str(index), prompt_of(20, index), 10)
    most = 0
    while one.engine.has_work:
        one.engine.step()
        most = max(most, len(one.engine.scheduler.running))
    assert most == 4 == one.cache.num_slots
    finish(one)
    assert all(len(one.tokens(str(index))) == 10 for index in range(7))


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
    cache = blocks_for(3, slots=2)
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


def blocks_for(num_blocks: int, slots: int = 3) -> PagedCache:
    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=16, dtype=torch.float32)
    sizes = {"num_blocks": num_blocks, "block_rows": BLOCK_ROWS, "slots": slots, "max_tokens": 2048}
    return PagedCache(layout, torch.device("cpu"), shares_prefixes=True, **sizes)


def cached(cache: PagedCache, tokens: np.ndarray) -> None:
    """A sequence of these tokens came and went."""
    sequence, _ = cache.attach(tokens)
    sequence.grow(len(tokens))
    sequence.advance(len(tokens) - sequence.length)
    cache.release(sequence, tokens)


def test_what_a_prefix_is_followed_by_in_its_node_can_go() -> None:
    cache = blocks_for(100)
    long = np.arange(1600, dtype=np.int32)
    cached(cache, long)
    assert cache.blocks.num_held == 100
    other = np.concatenate((long[:40], long[:1000] + 5000))
    sequence, num_known = cache.attach(other)
    assert num_known == 32
    sequence.grow(len(other))  # 63 blocks more, where all but two of the 100 are cached and unused
    cache.check()
    assert cache.lookup(long)() == 32
    sequence.close()


def test_a_refused_request_has_evicted_nothing() -> None:
    cache = blocks_for(20)
    running = cache.open()
    running.grow(15 * BLOCK_ROWS)
    prompt = np.arange(5 * BLOCK_ROWS, dtype=np.int32)
    cached(cache, prompt)
    other = cache.open()
    with pytest.raises(OutOfPages, match="6 blocks are needed, 0 are free and 5 can be evicted"):
        other.grow(6 * BLOCK_ROWS)
    assert cache.lookup(prompt)() == 4 * BLOCK_ROWS, "all but the last token's block, which is always computed"
    other.grow(5 * BLOCK_ROWS)
    assert cache.lookup(prompt)() == 0
    cache.check()


def test_what_is_closed_is_free() -> None:
    for open_memory in BASELINES.values():
        memory = open_memory(wanted())
        planes = [weakref.ref(plane) for pair in memory.planes.values() for plane in pair]
        assert len(planes) == 6 and all(plane() is not None for plane in planes)
        memory.close()
        assert not any(plane() is not None for plane in planes)


FA3_FWD = """
    fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k,
    Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,
    Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale,
    Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right,
    float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]
"""
FA3_PLAN = """
    get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim,
    int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
    Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left,
    int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor
"""
"""As the library of vLLM 0.25.1 declares them."""


class FA3:
    """Stands for FlashAttention-3's library: its declarations, and torch's answers."""

    def __init__(self) -> None:
        self.library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
        self.planned: list[torch.Tensor] = []
        for declared, implementation in ((FA3_FWD, self.fwd), (FA3_PLAN, self.plan)):
            name = self.library.define("".join(declared.strip().splitlines()))
            self.library.impl(name, implementation, "CPU")

    def plan(self, *given: Any) -> torch.Tensor:
        count, most, longest, heads, kv_heads, dim, value_dim, dtype, lengths_B, starts = given[:10]
        assert (heads, kv_heads, dim, value_dim, dtype, given[14]) == (4, 2, 16, 16, torch.float32, BLOCK_ROWS)
        assert len(lengths_B) == count == len(starts) - 1
        assert starts.diff().max() <= most and lengths_B.max() <= longest
        self.planned.append(torch.full((1,), len(self.planned)))
        return self.planned[-1]

    def fwd(self, q_NHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        out, starts, lengths_B, tables_BC, scale, is_causal, planned = (given[place] for place in (3, 4, 8, 11, 20, 21, 26))
        assert is_causal and int(planned) == len(self.planned) - 1
        for b, (length, begin, end) in enumerate(zip(lengths_B.tolist(), starts.tolist(), starts[1:].tolist(), strict=False)):
            blocks = tables_BC[b, : -(-length // BLOCK_ROWS)].long()
            assert (blocks >= 0).all()
            if begin < end and length:
                rows = [plane[blocks].flatten(0, 1)[:length] for plane in (k, v)]
                out[begin:end] = attend(q_NHD[begin:end], *rows, scale, None)
        return []


@pytest.fixture
def flash_attention_3() -> Iterator[FA3]:
    stands = FA3()
    yield stands
    stands.library._destroy()


def test_fa3_is_given_tables_and_lengths_and_plans_once_a_step(flash_attention_3: FA3) -> None:
    layout = KVLayout.uniform(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
    cache = PagedCache(layout, torch.device("cpu"), num_blocks=40, block_rows=BLOCK_ROWS, slots=4, max_tokens=128)
    rows, lengths = FA3Rows(cache), (40, 1, 97)
    slots = []
    for length in lengths:
        sequence = cache.open()
        sequence.grow(length)
        sequence.advance(length)
        slots.append(sequence.slot)
    for planes in cache.planes.values():
        for plane in planes:
            plane.normal_()
    # Behind the sequences a row of the null slot, as steps are padded.
    slots_B, lengths_B = torch.tensor([*slots, 0], dtype=torch.int32), torch.tensor([*lengths, 0], dtype=torch.int32)
    chunks, behind_groups = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 6, 36, 36], [0, 1, 2, 32, 32]))
    no_tokens = torch.zeros(0, dtype=torch.int32)
    for starts in (None, chunks, behind_groups):
        step = AttentionMetadata(slots_N=no_tokens, rows_N=no_tokens, slots_B=slots_B, lengths_B=lengths_B, query_starts=starts)
        for layer in range(2):
            q_NHD = torch.randn(4 if starts is None else 40, 4, 16)
            by_cascade = torch.zeros(40, 4, 16) if starts is behind_groups else None
            if starts is None:
                out = rows.decode(layer, q_NHD, step, scale=0.3, window=None)
            else:
                out = rows.prefill(layer, q_NHD, step, scale=0.3, window=None, out_NHD=by_cascade)
            for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                own = slice(b, b + 1) if starts is None else slice(int(starts[b]), int(starts[b + 1]))
                expected = attend(q_NHD[own], *rows.read(layer, slot, 0, length), 0.3, None)
                if by_cascade is not None and b < 2:
                    expected = by_cascade[own] * 0
                assert torch.allclose(out[own], expected, atol=1e-6)
    assert len(flash_attention_3.planned) == 3
