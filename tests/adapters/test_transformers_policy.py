"""A PolicyCache: which rows it keeps and when, against kvpress, and against attention that masks the others."""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import pad
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.adapters.models import MODELS, forward, gemma3, generated, ids_of, llama, mistral, prompts
from tests.attending import attending_by
from tests.kernels.cases import DEVICE
from vmmkv import LayoutError, OutOfPages, Pool
from vmmkv.adapters.transformers import PolicyCache, VmmCache, attention
from vmmkv.adapters.transformers.policy import column_sums
from vmmkv.eviction import H2O, TOVA, KVPolicy, SnapKV, StreamingLLM, policies
from vmmkv.units import PAGE_BYTES, ceil_div
from vmmkv_kernels import reference

pytestmark = pytest.mark.filterwarnings("ignore::vmmkv.adapters.transformers.DeclinedWarning")


@pytest.fixture(autouse=True)
def by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton's interpreter, which is slow; that vmmkv's kernels attend as sdpa does is proved elsewhere."""
    monkeypatch.setattr(attention, "plan_of", lambda *_: "a CPU")


POLICIES = [StreamingLLM(window=44), H2O(budget=48, recent=8), SnapKV(budget=48, window=16), TOVA(budget=48)]


KVPRESS = Path(__file__).parents[1] / "fixtures" / "kvpress.safetensors"
"""Made by make_kvpress.py beside it."""


@pytest.mark.parametrize(
    ("press", "policy", "divisor"),
    [
        ("streaming_llm", StreamingLLM(sinks=4, window=28), None),
        ("h2o", H2O(budget=32, recent=0), 3 * torch.arange(96, 0, -1)),  # by query that sees the row
        ("snapkv_unpooled", SnapKV(budget=32, window=16, kernel=1), 3 * 16),
        ("snapkv", SnapKV(budget=32, window=16, kernel=5), 3 * 16),
        ("tova", TOVA(budget=32), 6),  # all heads
    ],
)
def test_scores_and_rows_by_head_are_those_of_kvpress(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, press: str, policy: KVPolicy, divisor: Any
) -> None:
    """Its scores are means over the 3 heads of a kv head; the last rows, which it always keeps, have none."""
    with safe_open(KVPRESS, "pt") as file:
        recorded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        model = LlamaForCausalLM(LlamaConfig(**json.loads(file.metadata()["model"]), attn_implementation="vmmkv")).eval()
    model.load_state_dict(recorded, strict=False)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    ranked: list[torch.Tensor] = []
    highest = policies.highest
    monkeypatch.setattr(policies, "highest", lambda scores_T, *sizes: ranked.append(scores_T) or highest(scores_T, *sizes))
    monkeypatch.setattr(PolicyCache, "attended", lambda self, layer, q, k, *_, **__: seen.append((q, k)))
    with PolicyCache(model.config, pool, policy=policy) as cache:
        forward(model, cache, recorded["ids"])
    count = policy.num_queries(96)
    for layer, (q_BHND, k_BKTD) in enumerate(seen):
        for head in range(2):
            heads, kv_heads = (
                (slice(6), slice(2)) if press == "tova" else (slice(3 * head, 3 * head + 3), slice(head, head + 1))
            )
            scores_T = None
            if count:
                part_BHND = q_BHND[:, heads, 96 - count :]
                scores_T = column_sums(part_BHND, k_BKTD[:, kv_heads], attention.Scoring(None, None, None))[0]
            scores_T = scores_T if divisor is None else scores_T / divisor
            assert policy.keep(96, scores_T).tolist() == recorded[f"{press}.kept"][layer, head].nonzero()[:, 0].tolist()
            if divisor is not None:
                own = slice(96 - count if count < 96 else 96)
                expected_T = recorded[f"{press}.scores"][layer, head]
                torch.testing.assert_close(ranked.pop()[own], expected_T[own], atol=1e-6, rtol=1e-4)


class Masked:
    """One sequence over a cache that drops nothing: a mask hides what the policy drops. It ranks by the model's own weights."""

    def __init__(self, model: Any, policy: KVPolicy) -> None:
        self.model, self.policy, self.cache = model, policy, DynamicCache(config=model.config)
        self.alive = torch.zeros(0, dtype=torch.long)
        self.weights: torch.Tensor
        """[layers and heads, queries, tokens] of all passes; what a query did not see is 0."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        past, num_new = self.cache.get_seq_length(), ids.shape[1]
        self.alive = torch.cat([self.alive, torch.arange(past, past + num_new)])
        seen = torch.zeros(num_new, past + num_new, dtype=torch.bool).index_fill(1, self.alive, True).tril(past)
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        with attending_by(self.model, "eager"), torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, attention_mask=mask, output_attentions=True)
        new = torch.cat(out.attentions).flatten(0, 1)
        self.weights = torch.cat([pad(self.weights, (0, num_new)) if past else new[:, :0], new], dim=1)
        if len(self.alive) > self.policy.budget + (self.policy.budget // 8 if num_new == 1 else 0):
            self.alive = self.alive[self.policy.keep(len(self.alive), self.scores())]
        return out.logits

    def scores(self) -> torch.Tensor:
        """The last queries are scored over the rows that are there; all queries over those that each one saw."""
        num_queries = self.policy.num_queries(len(self.alive))
        if num_queries == len(self.alive):
            return self.weights.sum((0, 1))[self.alive]
        last = self.weights[:, self.weights.shape[1] - num_queries :, self.alive]
        return (last / last.sum(-1, keepdim=True)).sum((0, 1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_logits_are_those_without_the_rows_that_the_policy_drops(pool: Pool, policy: KVPolicy) -> None:
    """Of each sequence its own; in a prompt of two chunks, token by token, and when more tokens come at once."""
    model = llama()
    model.set_attn_implementation("vmmkv")
    masked = [Masked(model, policy) for _ in range(2)]
    with PolicyCache(model.config, pool, policy=policy) as cache:
        position = 0
        for num_new in (40, 30, *[1] * 9, 20, 1):
            ids = ids_of(0, 1, num_tokens=num_new, seed=position)
            expected = torch.cat([each.logits(row[None]) for each, row in zip(masked, ids, strict=True)])
            torch.testing.assert_close(forward(model, cache, ids), expected, atol=1e-4, rtol=1e-3)
            position += num_new
            assert cache.get_seq_length() == position
            for row, each in enumerate(masked):
                kept = each.cache.layers[3].keys[0][:, each.alive]
                torch.testing.assert_close(cache.states(3)[0][row], kept, atol=1e-4, rtol=1e-3)
        cache.check()


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_an_answer_takes_the_memory_of_the_budget(policy: KVPolicy) -> None:
    """Of a prompt of two sequences that fits barely, and of 20 tokens that would not fit behind it."""
    model, pages = MODELS["pages of 32 tokens"](), []
    model.set_attn_implementation("vmmkv")

    def look(*_: Any) -> bool:
        pages.append(pool.used_bytes // PAGE_BYTES)
        return False

    options: dict[str, Any] = {"max_new_tokens": 20, "stopping_criteria": [look]}
    inputs = prompts(96, 96)
    with Pool("cpu", 7 * PAGE_BYTES) as pool:
        with VmmCache(model.config, pool) as cache, pytest.raises(OutOfPages):
            generated(model, cache, inputs, **options)
        pages.clear()
        with PolicyCache(model.config, pool, policy=policy) as cache:
            generated(model, cache, inputs, **options)
            assert pages[0] == 2 * ceil_div(policy.budget, 32)
            assert max(pages) == 2 * ceil_div(policy.budget + policy.budget // 8, 32)
            assert cache.get_seq_length() == 96 + 19
            cache.check()


def test_beams_and_deep_copies_go_on_with_their_scores(pool: Pool) -> None:
    """As one sequence alone: what beams choose, the scores of H2O follow."""
    model, policy = llama(), H2O(budget=48, recent=8)
    model.set_attn_implementation("vmmkv")
    tokens, order = ids_of(0, 1, num_tokens=80), [1, 1, 0]
    with PolicyCache(model.config, pool, policy=policy) as beams, PolicyCache(model.config, pool, policy=policy) as alone:
        forward(model, beams, tokens[:, :70])
        forward(model, beams, tokens[:, 70:73])
        forward(model, alone, tokens[1:, :70])
        forward(model, alone, tokens[1:, 70:73])
        beams.reorder_cache(torch.tensor(order))
        with copy.deepcopy(beams) as other:
            for step in range(73, 80):
                expected = forward(model, alone, tokens[1:, step : step + 1])
                for each in (beams, other):
                    given = forward(model, each, tokens[order, step : step + 1])
                    torch.testing.assert_close(given[:2], expected.expand(2, -1, -1), atol=1e-4, rtol=1e-3)
        assert beams.states(0)[0].shape[2] == alone.states(0)[0].shape[2] < 53
        torch.testing.assert_close(beams.states(2)[0][:2], alone.states(2)[0].expand(2, -1, -1, -1), atol=1e-4, rtol=1e-3)
        beams.check()


def test_layers_with_windows_keep_theirs(pool: Pool) -> None:
    model = gemma3(16)
    model.set_attn_implementation("vmmkv")
    with PolicyCache(model.config, pool, policy=SnapKV(budget=40, window=16)) as cache:
        forward(model, cache, ids_of(0, num_tokens=60))
        assert [cache.states(layer)[0].shape[2] for layer in range(4)] == [15, 15, 15, 40]
        forward(model, cache, ids_of(0, num_tokens=1))
        cache.check()


@pytest.mark.parametrize("policy", [StreamingLLM(window=44), TOVA(budget=48)], ids=str)
def test_with_inv_freq_a_sequence_goes_past_the_positions_of_its_model(pool: Pool, policy: KVPolicy) -> None:
    """As where transformers' own cache has rows dropped by indexing, their keys turned, and is told the positions of rows."""
    model, own = llama(max_position_embeddings=64), DynamicCache()
    inv_freq, num_rows = model.model.rotary_emb.inv_freq, 0
    with PolicyCache(model.config, pool, policy=policy, inv_freq=inv_freq) as cache:
        for step, num_new in enumerate((40, 20, *[1] * 70, 9, 1)):
            ids, positions = ids_of(0, num_tokens=num_new, seed=step), torch.arange(num_rows, num_rows + num_new)[None]
            with attending_by(model, "eager"), torch.inference_mode():
                out = model(ids, past_key_values=own, position_ids=positions, output_attentions=True)
            with attending_by(model, "vmmkv"):
                torch.testing.assert_close(forward(model, cache, ids), out.logits, atol=1e-4, rtol=1e-3)
            num_rows += num_new
            if num_rows > policy.budget + (policy.budget // 8 if num_new == 1 else 0):
                kept = policy.keep(num_rows, torch.cat(out.attentions)[:, :, -1].sum((0, 1)))
                back_T, num_rows = kept - torch.arange(len(kept)), len(kept)
                for layer in own.layers:
                    layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
                    layer.keys = reference.turn(layer.keys[0].transpose(0, 1), back_T, inv_freq).transpose(0, 1)[None]
        assert cache.get_seq_length() == 140 > 2 * 64 and cache.states(0)[0].shape[2] == num_rows
        cache.check()


def test_with_inv_freq_batches_beams_and_deep_copies_go_on(pool: Pool) -> None:
    """Equal prompts, which are kept once, say what one of them says alone."""
    model = llama(max_position_embeddings=64)
    model.set_attn_implementation("vmmkv")
    given: dict[str, Any] = {"policy": StreamingLLM(window=28), "inv_freq": model.model.rotary_emb.inv_freq}
    ids, options = ids_of(0, num_tokens=50), {"max_new_tokens": 80}
    with PolicyCache(model.config, pool, **given) as alone, PolicyCache(model.config, pool, **given) as pair:
        (expected,) = generated(model, alone, {"input_ids": ids}, **options)
        assert generated(model, pair, {"input_ids": ids.expand(2, -1)}, **options) == [expected] * 2
        pair.reorder_cache(torch.tensor([1, 1]))
        with copy.deepcopy(pair) as other:
            for token in expected[-1:] * 9:
                logits, *others = (
                    forward(model, each, torch.full((each.batch_size, 1), token)) for each in (alone, pair, other)
                )
                for given_logits in others:
                    torch.testing.assert_close(given_logits, logits.expand(2, -1, -1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("queries", [1, 5])
def test_scores_by_the_kernel_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    q_BHND, k_BKTD = torch.randn(2, 6, queries, 16, device=DEVICE), torch.randn(2, 3, 40, 16, device=DEVICE)
    scoring = attention.Scoring(0.4, None, 2.0)
    expected_BT = column_sums(q_BHND, k_BKTD, scoring)
    monkeypatch.undo()
    monkeypatch.delattr(reference, "column_sums")
    torch.testing.assert_close(column_sums(q_BHND, k_BKTD, scoring), expected_BT, atol=1e-5, rtol=1e-4)


def test_with_inv_freq_no_query_attends_that_is_not_turned(pool: Pool) -> None:
    """A call that vmmkv's kernels decline is refused, since they turn the queries."""
    model = llama()
    model.set_attn_implementation("vmmkv")
    with PolicyCache(model.config, pool, policy=StreamingLLM(window=28), inv_freq=model.model.rotary_emb.inv_freq) as cache:
        forward(model, cache, ids_of(0, num_tokens=50))
        with torch.inference_mode(), pytest.raises(NotImplementedError, match=r"^foo given to attention: .* without it, or"):
            model(ids_of(0, num_tokens=1), past_key_values=cache, foo=1)


class Uneven(StreamingLLM):
    """Keeps a row more of each sequence that comes."""

    def num_queries(self, num_rows: int) -> int:
        return 1

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        assert scores_T is not None
        return torch.arange(num_rows)[-1 - int(scores_T[0] > scores_T[1]) :]


def test_what_a_policy_cannot_do_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, policy = llama(), SnapKV(budget=48, window=16)
    with PolicyCache(model.config, pool, policy=policy) as cache:
        with pytest.raises(NotImplementedError, match=r'by "vmmkv" alone: model.set_attn_implementation\("vmmkv"\)'):
            forward(model, cache, ids_of(0, num_tokens=9))
        model.set_attn_implementation("vmmkv")
        with pytest.raises(NotImplementedError, match="give prompts of one length, without padding"):
            generated(model, cache, prompts(20, 9))
        cache.reset()
        forward(model, cache, ids_of(0, num_tokens=9))
        for message, call in {
            "crop(-1): this cache has policy=SnapKV(": lambda: cache.crop(-1),
            "compact: this cache": lambda: cache.compact([0]),
            "drafts of tokens: this cache": cache.activate_past_recording,
        }.items():
            with pytest.raises(ValueError, match=re.escape(message)):
                call()
        for of_file in (cache.save, cache.restore):
            with pytest.raises(ValueError, match="nothing of how rows rank"):
                of_file(tmp_path / "saved")
        with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match="leave the model uncompiled"):
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            cache.update(*torch.zeros(2, 1, 2, 1, 32), 0)
        cache.reset()
        with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match=r"^dropout: a PolicyCache needs"):
            patch.setattr(model.model.layers[0].self_attn, "attention_dropout", 0.5)
            patch.setattr(model.model.layers[0].self_attn, "training", True)
            forward(model, cache, ids_of(0, num_tokens=9))
        cache.reset()
        for message in (None, "the last pass did not show its queries"):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=message) if message else nullcontext():
                patch.setattr(PolicyCache, "attended", lambda *_, **__: None)
                forward(model, cache, ids_of(0, num_tokens=9))
    inv_freq = model.model.rotary_emb.inv_freq
    with (
        PolicyCache(model.config, pool, policy=policy, inv_freq=inv_freq[:4]) as cache,
        pytest.raises(LayoutError, match="inv_freq has 4 angles, and heads of 32 want half as many"),
    ):
        forward(model, cache, ids_of(0, num_tokens=9))
    with pytest.raises(ValueError, match="windows in all layers"):
        PolicyCache(mistral(16).config, pool, policy=policy)
    with PolicyCache(model.config, pool, policy=Uneven(window=3)) as cache, pytest.raises(ValueError, match="all have as many"):
        for row in range(9):
            forward(model, cache, ids_of(row, row + 1, num_tokens=9))
            cache.reset()
