"""Requests with a `kv_policy` on a GPU, between graphs and with steps in flight."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.engine.conftest import Harness, harness, prompt_of, tiny_model, wide_rows
from tests.engine.test_kv_policy import HEAVY, LAST, POLICIES, SNAP, STAYING, STREAM, Reference, compacted
from tests.kernels.cases import FP16, LLAMA, NAN, make_case
from vmmkv.layout import KV_KINDS
from vmmkv.memory.extents import SIZE_CLASSES
from vmmkv.units import GIB, PAGE_BYTES
from vmmkv_kernels.attention import column_sums as kernels
from vmmkv_kernels.attention.column_sums import column_sums
from vmmkv_kernels.quantise import Kind
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.features.compaction import Compactor

__all__ = ["harness"]

DEVICE = "cuda:0"
EXACT = pytest.mark.parametrize("harness", ["exact"], indirect=True)
"""Rows are quantised only where a test says so."""


@EXACT
@pytest.mark.parametrize("share", [False, True])
def test_the_tokens_are_those_of_the_reference_beside_others(harness: Callable[..., Harness], share: bool) -> None:
    one = harness(device=DEVICE, ours=True, capture=True, slots=16, share=share, step_tokens=256)
    policies: dict[str, Any] = {policy["type"]: policy for policy in (STREAM, HEAVY, SNAP, LAST)}
    prompt, plain = prompt_of(700), {str(seed): prompt_of(300, seed) for seed in range(4)}
    for rounds in range(2):  # the second time the prefix cache may have the prompt
        for name, own in plain.items():
            one.ask(f"{name} {rounds}", own, 80)
        for name, policy in policies.items():
            one.ask(f"{name} {rounds}", prompt, 100, kv_policy=policy)
        one.run()
    assert one.failures() == {}
    for rounds in range(2):
        for name, own in plain.items():
            assert one.tokens(f"{name} {rounds}") == one.expected(own, 80), name
        for name, policy in policies.items():
            reference = Reference(one.model, policy)
            assert one.tokens(f"{name} {rounds}") == reference.said(prompt, 100), name
            assert compacted(one, f"{name} {rounds}")[-1][1] == reference.num_dropped


@pytest.mark.parametrize(
    ("shape", "block"),
    [(LLAMA, 0), (LLAMA, 128), (LLAMA, 16), (LLAMA | {"dtype": FP16}, 0), (LLAMA | {"head_dim": 64}, 0)],
    ids=["Hopper", "Hopper over blocks", "blocks", "fp16", "heads of 64"],
)
def test_prefill_gives_the_log_sum_exps_that_column_sums_takes(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], block: int
) -> None:
    """By the kernel for Hopper where it applies, and by the other. The output has the bits that it has without."""
    case = make_case([300, 900, 64, 2500, 129], [300, 1, 2, 1000, 129], **shape)
    attend = functools.partial(case.attend_in_blocks, block) if block else case.attend
    lse_NH = torch.full(case.q_NHD.shape[:2], NAN, device=DEVICE)
    assert torch.equal(attend(lse_NH=lse_NH), attend())
    expected_NH = case.log_sum_exps()
    expected_NH[300] = NAN  # of a sequence of one query
    torch.testing.assert_close(lse_NH, expected_NH, atol=2e-3, rtol=1e-4, equal_nan=True)

    assert case.starts is not None
    wanted = torch.tensor([0, 2, 3, 4], device=DEVICE)
    columns = torch.cat([torch.arange(300, device=DEVICE), torch.arange(301, 1432, device=DEVICE)])
    starts = torch.tensor([0, 300, 302, 1302, 1431], dtype=torch.int32, device=DEVICE)
    where = case.q_NHD[None, columns], case.memory.k[None], starts, case.lengths_B[wanted], case.slots_B[wanted]
    anew = column_sums(*where)
    monkeypatch.setattr(kernels, "log_sum_exp", None)
    torch.testing.assert_close(column_sums(*where, lse_LNH=lse_NH[None, columns]), anew, atol=1e-3, rtol=1e-3)
    attend(lse_NH=lse_NH, limit_S=case.limits(0))
    assert lse_NH[columns].eq(float("-inf")).all(), "of queries that see nothing"


@EXACT
def test_prompts_are_ranked_by_the_log_sum_exps_of_prefill(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    def noting(*args: Any, lse_LNH: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        given.append(lse_LNH is not None)
        return column_sums(*args, lse_LNH=lse_LNH, **options)

    one = harness(device=DEVICE, ours=True, capture=True, step_tokens=256)
    monkeypatch.setattr(kernels, "column_sums", noting)
    one.ask("heavy", prompt_of(700), 1, kv_policy=HEAVY)
    one.run()
    assert one.failures() == {} and given and all(given)


@EXACT
def test_in_bfloat16_a_stream_goes_on_and_its_memory_stays(harness: Callable[..., Harness]) -> None:
    one = harness(wide_rows().to(torch.bfloat16), device=DEVICE, ours=True, capture=True, step_tokens=4096, budget_pages=256)
    one.ask("stream", prompt_of(4096), 1500, kv_policy={"type": "streaming_llm", "window": 250, "every": 100})
    one.ask("heavy", prompt_of(4096, 1), 700, kv_policy={"type": "h2o", "budget": 250, "recent": 100, "every": 100})
    while len(compacted(one, "heavy")) < 2 or len(compacted(one, "stream")) < 2:
        one.step()
    while "length" not in one.finish_reasons("heavy"):
        one.step()
        assert one.cache.lengths.max() <= 354
    one.cache.drain()
    assert one.pool.used_bytes <= 2 * SIZE_CLASSES[0] * PAGE_BYTES
    one.run()
    assert len(one.tokens("stream")) == 1500 and one.failures() == {}


@EXACT
@pytest.mark.parametrize("kind", KV_KINDS)
def test_quantised_rows_are_dropped_once(harness: Callable[..., Harness], kind: Kind) -> None:
    one = harness(device=DEVICE, ours=True, capture=True, kv_kind=kind)
    prompts = {str(length): prompt_of(length, length) for length in (400, 70)}
    one.serve(prompts, 40, kv_policy=SNAP)
    assert one.failures() == {}
    for name, prompt in prompts.items():
        assert compacted(one, name) == [(24, len(prompt) - 24)]
        assert one.tokens(name) == Reference(one.model, SNAP, kind).said(prompt, 40)


@EXACT
@pytest.mark.parametrize("kind", [None, *KV_KINDS])
def test_tokens_with_original_positions_are_those_with_dropped_keys_masked(
    harness: Callable[..., Harness], kind: Kind | None
) -> None:
    """Between graphs, beside prompts, and in slots that later requests without a policy have."""
    one = harness(tiny_model(initializer_range=0.08), device=DEVICE, ours=True, capture=True, kv_kind=kind)
    prompts = {policy["type"]: prompt_of(100 * place, place) for place, policy in enumerate(STAYING, 1)}
    plain = {str(place): prompt_of(150, 10 + place) for place in range(8)}
    for name, policy in zip(prompts, STAYING, strict=True):
        one.ask(name, prompts[name], 60, kv_policy=policy)
    while not all(compacted(one, name) for name in prompts):
        one.step()
    one.serve(plain, 40)
    assert one.failures() == {}
    for name, policy in zip(prompts, STAYING, strict=True):
        reference = Reference(one.model, policy, kind)
        assert one.tokens(name) == reference.said(prompts[name], 60), name
        assert compacted(one, name)[-1][1] == reference.num_dropped
    one.assert_expected(plain, 40)


@EXACT
def test_to_compact_waits_for_nothing(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    compact = Compactor.compact

    def watched(compactor: Compactor, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            compact(compactor, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Compactor, "compact", watched)
    one = harness(device=DEVICE, ours=True, capture=True)
    for name, policy in enumerate((STREAM, HEAVY, *STAYING[:2])):
        one.ask(str(name), prompt_of(400), 100, kv_policy=policy)
    one.run()
    assert one.failures() == {}
    assert all(len(compacted(one, str(name))) > 1 for name in range(4))


def test_the_first_requests_with_a_policy_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has compiled what ranks rows of prompts and of decode steps, and what turns keys."""
    wide_rows().save_pretrained(tmp_path)
    compiled: list[str] = []

    def compiling(*, repr: str, **_: Any) -> None:
        compiled.append(repr)

    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_budget_bytes": GIB}
    with LLM(tmp_path, device=DEVICE, **options) as one:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiling)
        for policy in POLICIES:
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, kv_policy=policy)
            for completion in one.generate([prompt_of(300), prompt_of(30, 1)], params):
                assert completion.outputs[0].finish_reason == "length"
        assert one.snapshot is not None
        num_compactions = one.snapshot.features["kv_compactions"]
        assert isinstance(num_compactions, int) and num_compactions > 2 * len(POLICIES)
        assert compiled == []
        starts, lengths_B, slots_B = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 1], [5], [0]))
        q_LNHD, k_LSTKD = torch.randn(1, 1, 4, 16, device=DEVICE), torch.randn(1, 1, 8, 1, 16, device=DEVICE)
        column_sums(q_LNHD, k_LSTKD, starts, lengths_B, slots_B)
        assert len(compiled) == 2, "of heads that no other test has; else compilations are not seen"
