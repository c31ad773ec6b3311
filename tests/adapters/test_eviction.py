"""What the policies cost a real model in perplexity, against figures of kvpress 0.5.5, and that kernel and reference agree.

Two contexts of 1,024 tokens of tests/texts/opticks.txt, at tokens 0 and 4,096. The perplexity is that of the next 256 tokens
but the first, which the whole context still predicts. kvpress chooses rows for each head; so does `of_heads`, with the policy's
own rule for each. One set for all heads and layers is what a sequence keeps. Rows drawn at random have no figure to be held to:
they cost 16 to 38, by whether the draw has the first row, to which all queries attend.
"""

import copy
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import avg_pool1d, cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attending import attending_by
from vmmkv import Pool
from vmmkv.adapters.transformers import PolicyCache, VmmCache, attention
from vmmkv.eviction import H2O, TOVA, KVPolicy, SnapKV, StreamingLLM
from vmmkv_kernels import reference
from vmmkv_kernels.attention.column_sums import column_sums
from vmmkv_kernels.quantise import Kind, dequantise, quantise

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

TEXT = Path(__file__).parents[1] / "texts" / "opticks.txt"
CONTEXT, NEXT = 1024, 256


class Scored:
    """A context that was read: its rows, and of each layer the queries of all its tokens, [layers, N, H, D]."""

    def __init__(self, model: Any, pool: Pool, ids: torch.Tensor) -> None:
        self.model = model
        self.ids, self.next = ids[:CONTEXT], ids[CONTEXT : CONTEXT + NEXT]
        self.queries: list[torch.Tensor] = []
        self.cache = VmmCache(model.config, pool)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def recording(module: Any, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.queries.append(query[0].transpose(0, 1).contiguous())
            return attend(module, query, *arguments, **options)

        ALL_ATTENTION_FUNCTIONS.register("recording", recording)
        with attending_by(model, "recording"), torch.inference_mode():
            model(self.ids[None], past_key_values=self.cache, logits_to_keep=1)
        self.keys = [self.cache.states(layer)[0][0].transpose(0, 1) for layer in range(len(self.queries))]

    def sums(self, layer: int, num_queries: int, heads: slice = slice(None), kv_heads: slice = slice(None)) -> torch.Tensor:
        """[T] how much the last queries attend to each row, over some heads of a layer; by the reference."""
        q_NHD, k_TKD = self.queries[layer][-num_queries:, heads], self.keys[layer][:, kv_heads]
        return reference.column_sums(q_NHD[None], k_TKD[None, None], *place_of(num_queries))[0, 0]

    def one_set(self, policy: KVPolicy) -> torch.Tensor:
        """The rows that a policy keeps by the scores of all heads and layers."""
        num_queries = policy.num_queries(CONTEXT)
        scores = [self.sums(layer, num_queries) for layer in range(len(self.keys))] if num_queries else []
        return policy.keep(CONTEXT, torch.stack(scores).sum(0) if scores else None)

    def losses(self, cache: Any, **options: Any) -> torch.Tensor:
        """Of the next tokens but the first."""
        with torch.inference_mode():
            logits = self.model(self.next[None], past_key_values=cache, **options).logits[0]
        return cross_entropy(logits[:-1], self.next[1:], reduction="none")

    def losses_of(self, policy: KVPolicy, *, turned: bool = False) -> torch.Tensor:
        """After a copy of the cache was compacted; `turned`: with positions in the cache."""
        kept = self.one_set(policy)
        with copy.deepcopy(self.cache) as cache:
            cache.compact(kept)
            if not turned:
                return self.losses(cache)
            inv_freq_R, back_T = self.model.model.rotary_emb.inv_freq, kept - torch.arange(len(kept))
            for layer in range(len(self.keys)):
                keys_KTD = cache.states(layer)[0][0]
                keys_KTD.copy_(reference.turn(keys_KTD.transpose(0, 1), back_T, inv_freq_R).transpose(0, 1))
            return self.losses(cache, position_ids=torch.arange(len(kept), len(kept) + NEXT)[None])

    def losses_of_quantised(self, policy: KVPolicy, kind: Kind, times: int) -> torch.Tensor:
        """With K and V rounded, and keys turned in so many parts, each of which rounds them anew."""
        own, kept = DynamicCache(config=self.model.config), self.one_set(policy)
        inv_freq_R, back_T = self.model.model.rotary_emb.inv_freq, (kept - torch.arange(len(kept))) / times
        for layer in range(len(self.keys)):
            k_TKD, v_TKD = (rounded(states[0][:, kept].transpose(0, 1), kind) for states in self.cache.states(layer))
            for _ in range(times):
                k_TKD = rounded(reference.turn(k_TKD, back_T, inv_freq_R), kind)
            own.update(k_TKD.transpose(0, 1)[None], v_TKD.transpose(0, 1)[None], layer)
        return self.losses(own, position_ids=torch.arange(len(kept), len(kept) + NEXT)[None])

    def losses_of_heads(self, policy: KVPolicy) -> torch.Tensor:
        """With rows that the policy chooses for each kv head as kvpress has them.

        H2O divides by the number of queries that see a row; TOVA adds up all heads of a layer.
        """
        own, num_queries = DynamicCache(config=self.model.config), policy.num_queries(CONTEXT)
        for layer, k_TKD in enumerate(self.keys):
            num_heads, num_kv_heads = self.queries[layer].shape[1], k_TKD.shape[1]
            group, chosen = num_heads // num_kv_heads, []
            for head in range(num_kv_heads):
                heads = slice(head * group, (head + 1) * group), slice(head, head + 1)
                sums_T = self.sums(layer, num_queries, *(() if isinstance(policy, TOVA) else heads))
                chosen.append(policy.keep(CONTEXT, sums_T / torch.arange(CONTEXT, 0, -1) if num_queries == CONTEXT else sums_T))
            rows_KTD = torch.stack(chosen)[:, :, None].expand(-1, -1, k_TKD.shape[2])
            own.update(*(states.gather(2, rows_KTD[None]) for states in self.cache.states(layer)), layer)
        seen = torch.ones(NEXT, own.get_seq_length() + NEXT, dtype=torch.bool).tril(own.get_seq_length())
        return self.losses(own, attention_mask=seen[None, None], position_ids=torch.arange(CONTEXT, CONTEXT + NEXT)[None])


@pytest.fixture(scope="module")
def contexts(smollm2: Path) -> Iterator[list[Scored]]:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(smollm2).encode(TEXT.read_text(encoding="utf-8")))
    with Pool("cpu", 2**30) as pool:
        contexts = [Scored(model, pool, ids[first:]) for first in (0, 4096)]
        yield contexts
        for context in contexts:
            context.keys.clear()
            context.cache.close()


def rounded(x_TKD: torch.Tensor, kind: Kind) -> torch.Tensor:
    return dequantise(*quantise(x_TKD.contiguous(), kind))


def perplexity(losses: list[torch.Tensor]) -> float:
    return math.exp(torch.cat(losses).mean().item())


def place_of(num_queries: int) -> list[torch.Tensor]:
    """Of the last queries of the context: their starts, the length and the slot."""
    return [torch.tensor(each, dtype=torch.int32) for each in ([0, num_queries], [CONTEXT], [0])]


class Groups(SnapKV):
    """SnapKV by groups of 16 rows, as where memory comes in blocks."""

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        assert scores_T is not None
        scores_T = avg_pool1d(scores_T[None, : -self.window], self.kernel, stride=1, padding=self.kernel // 2)[0]
        best = scores_T.view(-1, 16).sum(1).topk((self.budget - self.window) // 16).indices.sort().values
        rows_T = (best[:, None] * 16 + torch.arange(16)).flatten()
        return torch.cat([rows_T, torch.arange(num_rows - self.window, num_rows)])


SETS = [
    (SnapKV(budget=512), False, 15.03),
    (SnapKV(budget=256), False, 15.93),
    (Groups(budget=512), False, 15.43),
    (Groups(budget=256), False, 16.34),
    (SnapKV(budget=512), True, 14.98),
    (SnapKV(budget=256), True, 15.66),
    (TOVA(budget=256), True, 15.81),
    (H2O(budget=256, recent=128), True, 16.17),
    (StreamingLLM(window=508), True, 15.32),
    (StreamingLLM(window=252), True, 16.71),
    (StreamingLLM(window=508), False, 15.41),
    (StreamingLLM(window=252), False, 16.82),
    (StreamingLLM(sinks=0, window=512), False, 26.19),
    (StreamingLLM(sinks=0, window=256), False, 36.22),
    (StreamingLLM(window=CONTEXT), False, 14.76),  # everything
]


@pytest.mark.parametrize(("policy", "turned", "expected"), SETS, ids=str)
def test_the_perplexity_of_a_compacted_cache(contexts: list[Scored], policy: KVPolicy, turned: bool, expected: float) -> None:
    assert perplexity([context.losses_of(policy, turned=turned) for context in contexts]) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "times", "expected"),
    [("int8", 1, 15.66), ("fp8", 1, 15.64), ("int4", 1, 16.67), ("fp8", 8, 15.79), ("fp8", 32, 23.98)],
)
def test_quantised_keys_may_be_turned_once(contexts: list[Scored], kind: Kind, times: int, expected: float) -> None:
    """As a compaction turns them; unquantised ones have 15.66. What rounds them again and again takes them apart."""
    losses = [context.losses_of_quantised(SnapKV(budget=256), kind, times) for context in contexts]
    assert perplexity(losses) == pytest.approx(expected, abs=0.05 if times == 1 else 0.5)


HEADS = [
    (H2O(budget=512, recent=0), 14.92),
    (H2O(budget=256, recent=0), 15.32),
    (TOVA(budget=512), 15.04),
    (TOVA(budget=256), 15.53),
    (SnapKV(budget=512), 15.06),
    (SnapKV(budget=256), 15.55),
]


@pytest.mark.parametrize(("policy", "expected"), HEADS, ids=str)
def test_the_perplexity_of_rows_chosen_by_head_is_that_of_kvpress(
    contexts: list[Scored], policy: KVPolicy, expected: float
) -> None:
    assert perplexity([context.losses_of_heads(policy) for context in contexts]) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("policy", [H2O(budget=256, recent=128), TOVA(budget=512)], ids=str)
def test_one_set_of_rows_is_worth_more_than_the_newest_ones(contexts: list[Scored], policy: KVPolicy) -> None:
    assert perplexity([context.losses_of(policy) for context in contexts]) < 17


@pytest.mark.parametrize("policy", [SnapKV(budget=256), TOVA(budget=256)], ids=str)
def test_the_kernel_keeps_the_rows_that_the_reference_keeps(contexts: list[Scored], policy: KVPolicy) -> None:
    context, num_queries = contexts[0], policy.num_queries(CONTEXT)
    out = torch.zeros(1, 1, CONTEXT)
    for layer, k_TKD in enumerate(context.keys):
        q_NHD = context.queries[layer][-num_queries:]
        column_sums(q_NHD[None], k_TKD[None, None], *place_of(num_queries), out=out)
    assert torch.equal(policy.keep(CONTEXT, out[0, 0]), context.one_set(policy))


@pytest.mark.parametrize(
    ("policy", "finds"), [(None, True), (SnapKV(budget=384), True), (StreamingLLM(sinks=4, window=380), False)], ids=str
)
@pytest.mark.filterwarnings("ignore::vmmkv.adapters.transformers.DeclinedWarning")
def test_the_needle_that_streaming_llm_loses_snapkv_keeps(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, policy: KVPolicy | None, finds: bool
) -> None:
    """600 tokens before the question, with budgets of 384. Each digit has a probability over 0.7 where the needle is kept."""
    monkeypatch.setattr(attention, "plan_of", lambda *_: "a CPU")  # Triton's interpreter would take minutes
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="vmmkv").eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    hay = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[4096:4996]
    text = f"{tokenizer.decode(hay[:300])}\n\nThe magic number of the castle is 48213.\n\n{tokenizer.decode(hay[300:])}"
    ids = tokenizer(f"{text}\n\nThe magic number of the castle is", return_tensors="pt")
    make = VmmCache if policy is None else functools.partial(PolicyCache, policy=policy)
    with Pool("cpu", 2**30) as pool, make(model.config, pool) as cache:
        answer = model.generate(**ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    said = tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
    assert (said == " 48213") == finds, said
