"""Requests with a `kv_policy`: their tokens are those of a plain reference, and the memory of dropped rows comes back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import eager_attention_forward

from tests.attending import attending_by
from tests.engine.conftest import Harness, MakeHarness, prompt_of, quantising, tiny_model, wide_rows, windowed
from vmmkv.eviction import H2O
from vmmkv.memory.extents import SIZE_CLASSES
from vmmkv.units import MIB, PAGE_BYTES
from vmmkv_kernels.quantise import Kind, dequantise, quantise
from vmmkv_kernels.reference import turn
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.kv_policy import Eviction
from vmmkv_server.protocol import Abort, Compacted, PromptLogprobs, Snapshot

pytestmark = pytest.mark.parametrize("harness", ["exact"], indirect=True)
"""Quantised rows can be dropped once: see `test_quantised_rows_are_dropped_once`."""

STREAM = {"type": "streaming_llm", "sinks": 2, "window": 20, "every": 7}
HEAVY = {"type": "h2o", "budget": 24, "recent": 10, "every": 9}
SNAP = {"type": "snapkv", "budget": 24, "window": 8}
LAST = {"type": "tova", "budget": 24, "every": 9}
POLICIES = [STREAM, HEAVY, SNAP, LAST]
STAYING = [{**policy, "positions": "original"} for policy in POLICIES]
RUN = [(100, 2), (24, 2)]
"""Lengths of prompts, and steps in flight, of the default run."""


class Reference:
    """transformers' own code and cache. Rows are ranked by the weights of its attention, and dropped by indexing and turned, or
    masked if the policy keeps positions."""

    def __init__(self, model: Any, given: Mapping[str, Any], kind: Kind | None = None) -> None:
        """Of a kind K and V are rounded to, as they are attended to and before they are turned."""
        eviction = Eviction.of(given)
        assert eviction is not None
        self.kind, self.attention = kind, "eager" if kind is None else quantising(kind, eager_attention_forward)
        self.model, self.eviction, self.cache = model, eviction, DynamicCache(config=model.config)
        self.num_rows = self.num_dropped = 0
        self.scores_T = torch.zeros(0, device=model.device)
        self.kept_T = torch.zeros(0, dtype=torch.int64, device=model.device)
        """Columns of the cache that are not masked."""

    def forward(self, ids: list[int], num_ranked: int, weight: int = 1) -> int:
        num_cached = self.cache.get_seq_length()
        positions = torch.arange(num_cached, num_cached + len(ids), device=self.model.device)
        self.kept_T = torch.cat([self.kept_T, positions])
        mask_NT = torch.full((len(ids), num_cached + len(ids)), -torch.inf, device=self.model.device)
        mask_NT[:, self.kept_T] = 0.0
        mask_NT.masked_fill_(torch.arange(mask_NT.shape[1], device=mask_NT.device) > positions[:, None], -torch.inf)
        with torch.inference_mode(), attending_by(self.model, self.attention):
            out = self.model(
                torch.tensor([ids], device=self.model.device),
                position_ids=positions[None],
                attention_mask=mask_NT[None, None].to(self.model.dtype),
                past_key_values=self.cache,
                output_attentions=True,
            )
        self.num_rows += len(ids)
        ranked = [weights_1HNT[0, :, len(ids) - num_ranked :].sum((0, 1)) for weights_1HNT in out.attentions]
        scores_T = torch.stack(ranked).sum(0)[self.kept_T]
        self.scores_T = torch.nn.functional.pad(self.scores_T, (0, len(ids))) + weight * scores_T
        return int(out.logits[0, -1].argmax())

    def compact(self) -> None:
        rows = self.eviction.policy.keep(self.num_rows, self.scores_T)
        self.kept_T = self.kept_T[rows]
        if not self.eviction.keeps_positions:
            self.kept_T = torch.arange(len(rows), device=rows.device)
            inv_freq_R = self.model.model.rotary_emb.inv_freq
            for layer in self.cache.layers:
                if self.kind is not None:
                    layer.keys = dequantise(*quantise(layer.keys, self.kind))
                layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
                layer.keys = turn(layer.keys[0].transpose(0, 1), rows - self.kept_T, inv_freq_R).transpose(0, 1)[None]
        self.num_dropped, self.num_rows = self.num_dropped + self.num_rows - len(rows), len(rows)
        carries = isinstance(self.eviction.policy, H2O)
        self.scores_T = self.scores_T[rows] if carries else torch.zeros_like(rows, dtype=torch.float32)

    def said(self, prompt: list[int], count: int) -> list[int]:
        """Its greedy answer."""
        policy, budget, every = self.eviction.policy, self.eviction.budget, self.eviction.every
        tokens, since = [self.forward(prompt, policy.num_queries(len(prompt)))], len(prompt)
        end = max(len(prompt), budget + every) if every is not None else len(prompt) if len(prompt) > budget else None
        if end != len(prompt) and not isinstance(policy, H2O):
            self.scores_T.zero_()
        while len(tokens) < count:
            if self.num_rows == end:
                self.compact()
                end, since = None if every is None else budget + every, self.num_rows
            is_ranked = self.num_rows + 1 == end
            tokens.append(self.forward(tokens[-1:], int(is_ranked), end - since if is_ranked and end is not None else 1))
        return tokens


def compacted(one: Harness, name: str) -> list[tuple[int, int]]:
    return [(each.kept_rows, each.dropped_rows) for each in one.sent if isinstance(each, Compacted) and each.request_id == name]


CASES = [
    pytest.param(policy, num_prompt, lookahead, marks=() if (num_prompt, lookahead) in RUN else pytest.mark.nightly)
    for policy in POLICIES
    for num_prompt in (5, 24, 29, 100)
    for lookahead in (0, 2)
]


@pytest.mark.parametrize(("policy", "num_prompt", "lookahead"), CASES)
def test_the_tokens_are_those_of_the_reference(
    harness: MakeHarness, policy: dict[str, Any], num_prompt: int, lookahead: int
) -> None:
    model, prompt = tiny_model(initializer_range=0.25), prompt_of(num_prompt)  # by default it hardly reads its rows
    one = harness(model, ours=True, lookahead=lookahead, step_tokens=40)
    one.ask("beside", prompt_of(30, 1), 60)
    assert one.said(prompt, 70, kv_policy=policy) == (reference := Reference(one.model, policy)).said(prompt, 70)
    assert one.tokens("beside") == one.expected(prompt_of(30, 1), 60)
    assert (compacted(one, "alone") or [(0, 0)])[-1][1] == reference.num_dropped


@pytest.mark.parametrize("policy", STAYING, ids=lambda policy: policy["type"])
@pytest.mark.parametrize("kind", [None, "int8", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp8", "int4"))])
def test_tokens_with_original_positions_are_those_with_dropped_keys_masked(
    harness: MakeHarness, policy: dict[str, Any], kind: Kind | None
) -> None:
    """Over quantised rows, too, which no compaction rounds. Requests beside them, and later in their slots, have their own."""
    model = tiny_model(initializer_range=0.12, max_position_embeddings=170)  # those of a slot that stays shifted go beyond
    prompts = [prompt_of(100), prompt_of(24, 1)]
    one = harness(model, ours=True, kv_kind=kind, slots=3, step_tokens=40)
    for name, prompt in zip("ab", prompts, strict=True):
        one.ask(name, prompt, 70, kv_policy=policy)
    while not compacted(one, "a"):
        one.step()
    one.ask("beside", prompts[0], 1)
    one.run()
    for name, prompt in zip("ab", prompts, strict=True):
        assert one.tokens(name) == (reference := Reference(model, policy, kind)).said(prompt, 70)
        assert (compacted(one, name) or [(0, 0)])[-1][1] == reference.num_dropped
    later = {str(len(prompt)): prompt for prompt in prompts}
    one.serve(later, 30)
    one.assert_expected(later, 30)


@pytest.mark.parametrize("policy", [*POLICIES, STAYING[1]], ids=lambda policy: "-".join(map(str, policy.values())))
def test_a_request_says_the_same_however_often_it_is_preempted(harness: MakeHarness, policy: dict[str, Any]) -> None:
    """With random numbers and `min_tokens`, which count tokens and not rows."""
    options = {"kv_policy": policy, "temperature": 1.0, "frequency_penalty": 0.5, "min_tokens": 50}
    one = harness(tiny_model(initializer_range=0.25), ours=True, share=True, eos_ids=frozenset(range(20)))
    wanted = one.said(prompt_of(60), 70, **options)
    assert len(wanted) >= 50 and compacted(one, "alone")
    one.ask("a", prompt_of(60), 70, **options)
    request, scheduler = one.engine.scheduler.find("a"), one.engine.scheduler
    assert request is not None
    for num_tokens in (1, 20, 45):
        while len(one.tokens("a")) < num_tokens:
            one.step()
        one.engine.drain()
        scheduler.preempt(request, max_others=0)
    one.run()
    assert one.tokens("a") == wanted


def test_the_memory_of_dropped_rows_comes_back_while_the_request_runs(harness: MakeHarness) -> None:
    one = harness(wide_rows(), ours=True, step_tokens=2048)  # 64 rows to a page
    layout = one.cache.layout
    one.ask("a", prompt_of(2000), 200, kv_policy={"type": "streaming_llm", "sinks": 4, "window": 150, "every": 60})
    one.step()
    assert one.pool.used_bytes == layout.pages_for(2000) * PAGE_BYTES
    while not compacted(one, "a"):
        one.step()
    for _ in range(150):
        one.step()
        assert one.cache.lengths.max() <= 154 + 60
        assert one.pool.used_bytes == SIZE_CLASSES[0] * PAGE_BYTES, "one extent, which is never split"
    assert [kept for kept, _ in compacted(one, "a")] == [154] * 3
    assert compacted(one, "a")[-1][1] == 2000 - 154 + 2 * 60
    one.engine.report()
    snapshot = one.sent[-1]
    assert isinstance(snapshot, Snapshot)
    counts = {"kv_compactions": 3, "kv_kept_rows": 3 * 154, "kv_dropped_rows": 2000 - 154 + 2 * 60}
    assert snapshot.features.items() >= counts.items()
    one.run()


def test_a_request_that_waits_for_memory_begins_when_another_is_compacted(harness: MakeHarness) -> None:
    one = harness(wide_rows(), ours=True, step_tokens=1024, budget_pages=11)
    one.ask("long", prompt_of(600), 60, kv_policy={"type": "snapkv", "budget": 100})  # 10 pages, and 2 of what it keeps
    one.ask("waits", prompt_of(300, 1), 5)
    while not compacted(one, "long"):
        assert one.engine.num_running <= 1 and not one.outputs("waits")
        one.step()
    while "length" not in one.finish_reasons("waits"):
        one.step()
    assert "length" not in one.finish_reasons("long") and not one.engine.scheduler.counts.preemptions
    one.run()
    assert one.tokens("waits") == one.expected(prompt_of(300, 1), 5)


def test_the_next_turn_attaches_the_rows_as_they_were(harness: MakeHarness) -> None:
    one, prompt = harness(wide_rows(), ours=True, share=True), prompt_of(200)
    answer = one.said(prompt, 10, kv_policy=SNAP)
    assert compacted(one, "alone") == [(24, 176)]
    one.ask("next", turn_two := [*prompt, *answer, *prompt_of(9, 1)])
    one.run()
    assert one.outputs("next")[0].cached_tokens == 192, "full pages"
    assert one.tokens("next") == one.expected(turn_two)
    assert one.said(prompt, 10, kv_policy=SNAP) == answer, "it attaches all rows but those that ask"
    assert one.outputs("alone")[-10].cached_tokens == 200 - SNAP["window"]


def test_a_prompt_that_is_not_to_be_shared_is_known_to_no_other(harness: MakeHarness) -> None:
    one, prompt = harness(wide_rows(), ours=True, share=True), prompt_of(200)
    one.said(prompt, 10, kv_policy={**SNAP, "share_prompt": False})
    assert one.prefix.stats().num_tokens == 0
    one.said(prompt, 3, kv_policy={"type": "snapkv", "budget": 300, "share_prompt": False})
    assert one.prefix.stats().num_tokens == 0, "nor where nothing is dropped"


def test_no_request_waits_for_a_prompt_that_is_not_to_be_shared(harness: MakeHarness) -> None:
    one, prompt = harness(wide_rows(), ours=True, share=True, step_tokens=1024), prompt_of(200)
    for name, share_prompt in (("a", False), ("b", True), ("c", True)):
        one.ask(name, prompt, 10, kv_policy={**SNAP, "share_prompt": share_prompt})
    one.step(1)
    assert one.engine.num_running == 2, "b does not wait for a, and c waits for b"
    one.run()
    assert one.tokens("a") == one.tokens("b") == one.tokens("c")


def test_a_compaction_that_finds_no_page_of_its_own_gives_up_sharing(harness: MakeHarness) -> None:
    one = harness(wide_rows(), ours=True, share=True, budget_pages=5)  # 320 rows, all of them the prompt's
    policy = {"type": "snapkv", "budget": 200, "window": 8}
    wanted = harness(wide_rows(), ours=True).said(prompt_of(310), 9, kv_policy=policy)
    assert one.said(prompt_of(310), 9, kv_policy=policy) == wanted
    assert not one.failures()


@pytest.mark.parametrize("after", range(4, 14, 3))
def test_one_that_goes_at_a_compaction_leaves_nothing(harness: MakeHarness, after: int) -> None:
    one = harness(ours=True, share=True)
    one.ask("a", prompt_of(50), 90, kv_policy=HEAVY)
    one.ask("b", prompt_of(40, 1), 30)
    one.step(after)
    one.engine.receive(Abort(request_id="a"))
    one.run()
    assert one.tokens("b") == one.expected(prompt_of(40, 1), 30)
    one.prefix.evict()
    one.cache.drain()
    assert one.cache.stats().num_sequences == 0


def test_a_stream_goes_past_the_positions_of_its_model(harness: MakeHarness) -> None:
    model = tiny_model(max_position_embeddings=64)
    one, prompt = harness(model, ours=True), prompt_of(40)
    tokens = one.said(prompt, 4 * 64 - 40, kv_policy=STREAM)
    assert tokens == Reference(model, STREAM).said(prompt, 4 * 64 - 40)
    one.ask("too long", prompt, 4 * 64 - 39, kv_policy=STREAM)
    one.ask("unbounded", prompt, 100, kv_policy=SNAP)
    one.ask("wide", prompt, 30, kv_policy={"type": "tova", "budget": 60, "every": 9})
    assert one.failures().keys() == {"too long", "unbounded", "wide"}
    assert "lower max_tokens to 24" in one.failures()["wide"]


def test_log_probabilities_of_the_prompt_go_with_a_policy(harness: MakeHarness) -> None:
    one = harness(ours=True, step_tokens=33)
    one.ask("a", prompt_of(70), 40, kv_policy=HEAVY, prompt_logprobs=1, logprobs=2)
    one.ask("b", prompt_of(70), 40, prompt_logprobs=1)
    one.run()
    told: dict[str, list[float]] = {"a": [], "b": []}
    for each in one.sent:
        if isinstance(each, PromptLogprobs):
            told[each.request_id] += each.unpacked()[0]
    assert told["a"] == pytest.approx(told["b"], abs=1e-5) and len(told["a"]) == 69
    assert one.tokens("a") == Reference(one.model, HEAVY).said(prompt_of(70), 40)


def test_a_default_is_for_requests_that_name_none(harness: MakeHarness) -> None:
    one = harness(ours=True, kv_policy="tova:budget=24,every=9")
    assert one.said(prompt_of(50), 20) == Reference(one.model, LAST).said(prompt_of(50), 20)
    assert one.said(prompt_of(50), 20, kv_policy="none") == one.expected(prompt_of(50), 20)
    one.ask("beams", prompt_of(5), beam_width=2)
    assert one.failures() == {"beams": 'kv_policy is not for a beam search, whose beams share rows: send "none"'}
    one.ask("beams without", prompt_of(5), beam_width=2, kv_policy={"type": "none"})
    one.run()


@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp8", "int4"))])
def test_quantised_rows_are_dropped_once(harness: MakeHarness, kind: Kind) -> None:
    """By the rows as they are kept, by which the moved keys are turned too. Two requests are ranked in one step."""
    model, prompts = tiny_model(), {"a": prompt_of(100), "b": prompt_of(70, 1)}
    one = harness(model, ours=True, kv_kind=kind, step_tokens=200)
    one.serve(prompts, 40, kv_policy=SNAP)
    for name, prompt in prompts.items():
        assert compacted(one, name) == [(24, len(prompt) - 24)]
        assert one.tokens(name) == Reference(model, SNAP, kind).said(prompt, 40)


def test_models_whose_rows_cannot_be_dropped_refuse_it(harness: MakeHarness) -> None:
    for one, reason in (
        (harness(windowed(), ours=True), "is for full attention, and this model has sliding windows"),
        (
            harness(ours=True, kv_kind="fp8"),
            "is of type streaming_llm, which compacts as requests generate, and quantised keys would be rounded anew each "
            'time they are turned: use "positions": "original", or snapkv, or leave it out',
        ),
        (harness(), "needs a model whose rotary positions vmmkv knows"),
    ):
        one.ask("a", prompt_of(5), kv_policy=STREAM)
        assert one.failures()["a"].startswith(f"kv_policy {reason}")


@pytest.mark.usefixtures("harness")
def test_what_a_policy_dropped_is_said_with_the_completion(directory: Path) -> None:
    policy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, kv_policy="streaming_llm:window=20,every=3")
    with LLM(directory, device="cpu", kv_budget_bytes=64 * MIB) as llm:
        kept, whole = (llm.generate([list(range(100))], params)[0].outputs[0] for params in (policy, None))
    assert (kept.kept_rows, kept.dropped_rows) == (24, 76 + 2 * 3)
    assert whole.kept_rows is None
