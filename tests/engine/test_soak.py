"""Many requests of every kind on a tiny model and a tiny budget: each ends once, and nothing is left behind."""

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import VOCABULARY, Harness, prompt_of, tiny_model
from vmmkv_kernels.quantise import Kind
from vmmkv_server.engine.feature import Features
from vmmkv_server.protocol import Abort, Beams, Compacted, Failed, Outputs, PromptLogprobs

MAX_TOKENS = 2048
BUDGET_PAGES = 7
PAGE_TOKENS = 128
"""A row is 16 KiB: so sequences cross pages all the time, and one of 896 rows takes the whole budget."""
SLOTS, RUNNING = 20, 8
EOS = frozenset({3, 33})
POLICIES = [
    {"type": "streaming_llm", "sinks": 3, "window": 140, "every": 10},
    {"type": "streaming_llm", "window": 30, "every": 5, "share_prompt": False},
    {"type": "h2o", "budget": 40, "recent": 10, "every": 8},
    {"type": "snapkv", "budget": 150, "window": 10},
    {"type": "tova", "budget": 20, "every": 3},
]
ONCE = [{"type": "snapkv", "budget": budget, "window": 10} for budget in (30, 150)]
"""Policies for quantised rows, which are turned once."""
STAYING = [{**policy, "positions": "original"} for policy in POLICIES]
WAITING = 24
"""Requests that are there at once, at most."""

SIZES = [
    (250, 1, 2),
    *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2000, 0, 2), (2000, None, 2), (500, 2, 0))),
]
"""How many requests, the seed, and the steps in flight; None for another seed each time."""


class Asked(NamedTuple):
    name: str
    prompt: list[int]
    max_new_tokens: int
    options: dict[str, Any]
    abort_after: int | None
    """Steps, or None if its client stays."""

    @property
    def rows(self) -> int:
        """The most that it may have; the last token is never written."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def refusal(self) -> str | None:
        """How the reason begins for which it can never be served, however large the memory; None if it can be."""
        if self.max_new_tokens < 1:
            return f"max_tokens is {self.max_new_tokens}; wanted at least 1"
        if not self.prompt:
            return "The prompt has no tokens; send at least one."
        if self.rows >= MAX_TOKENS:
            num_tokens = f"{self.rows + 1} tokens, {len(self.prompt)} of prompt and {self.max_new_tokens} new"
            return f"This request is for {num_tokens}, but one request can have {MAX_TOKENS} (the most that"
        if (width := self.options.get("beam_width", 0)) > RUNNING:
            return f"A search of {width} beams needs as many slots, and this server has {RUNNING}: lower beam_width to"
        return None


def requests(chance: random.Random, count: int, policies: list[dict[str, Any]]) -> list[Asked]:
    """What clients ask: prompts with beginnings in common, and one in twenty that cannot be served."""
    stems = [prompt_of(length, length) for length in (40, 130, 200, 330)]
    asked: list[Asked] = []
    while len(asked) < count:
        stem = chance.choice(stems)
        prompt = [
            *stem[: chance.randrange(len(stem) + 1)],
            *(chance.randrange(VOCABULARY) for _ in range(chance.randrange(30))),
        ]
        options: dict[str, Any] = {
            "cache_salt": chance.choice([None, None, "red", "blue"]),
            "priority": chance.choice([0, 0, 0, 1, -1]),
            "ignore_eos": chance.random() < 0.3,
            "stop_token_ids": chance.sample(range(VOCABULARY), chance.choice([0, 0, 3, 40])),
            "logprobs": 0 if chance.random() < 0.1 else None,
        }
        max_new_tokens = chance.choice([1, 2, 5, chance.randrange(1, 20), chance.randrange(1, 60)])
        siblings = chance.choice([1, 1, 1, 2, 4])
        kind = chance.random()
        if kind < 0.02:
            prompt = prompt_of(chance.randrange(BUDGET_PAGES * PAGE_TOKENS + 1, MAX_TOKENS - 100), chance.randrange(99))
        elif kind < 0.03:
            prompt = chance.choice([[], prompt_of(MAX_TOKENS)])
        elif kind < 0.04:
            max_new_tokens = chance.choice([0, -1, MAX_TOKENS])
        elif kind < 0.05:
            max_new_tokens = chance.randrange(600, 900)
        elif kind < 0.09:
            options |= {"beam_width": chance.choice([1, 2, 3, 5, RUNNING + 1]), "length_penalty": chance.random()}
        for _ in range(min(siblings, count - len(asked))):
            sampling = {"temperature": chance.choice([0.0, 0.7, 1.5]), "top_p": chance.choice([0.5, 1.0]), "seed": len(asked)}
            penalties = {"frequency_penalty": 0.5, "logit_bias": {7: -3.0}} if chance.random() < 0.2 else {}
            if "beam_width" in options:  # a beam search samples nothing and has no log-probabilities of single tokens
                sampling, penalties, options["logprobs"] = {}, {}, None
            elif max_new_tokens > 0:
                own = random.Random(len(asked))
                options["min_tokens"] = min(max_new_tokens, own.choice([0, 0, 0, 1, 4, 30]))
                options["prompt_logprobs"] = own.choice([*[None] * 9, 2])
                if own.random() < 0.25 and len(prompt) + max_new_tokens < MAX_TOKENS:  # it may have more than that
                    options["kv_policy"] = own.choice(policies)
            abort_after = chance.randrange(30) if chance.random() < 0.15 else None
            asked.append(Asked(str(len(asked)), prompt, max_new_tokens, options | sampling | penalties, abort_after))
    return asked


@functools.cache
def model() -> Any:
    return tiny_model(
        hidden_size=32, num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=MAX_TOKENS
    )


@pytest.mark.parametrize(("count", "seed", "lookahead"), SIZES)
def test_every_request_ends_once_and_nothing_is_left(count: int, seed: int | None, lookahead: int) -> None:
    soak(count, seed, lookahead)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_same_over_quantised_rows(kind: Kind) -> None:
    soak(500, 1, 2, kv_kind=kind)


def soak(
    count: int,
    seed: int | None,
    lookahead: int,
    *,
    tick: Callable[[], object] = lambda: None,
    kv_kind: Kind | None = None,
    **options: Any,
) -> Features:
    """Serve so many requests, with a `tick` behind each step; the features of the engine, which is closed."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    chance, share = random.Random(seed), count / 2000
    one = Harness(
        model(), ours=True, share=True, lookahead=lookahead, slots=SLOTS, max_sequences=RUNNING, budget_pages=BUDGET_PAGES,
        step_tokens=200, eos_ids=EOS, kv_kind=kv_kind, **options,
    )  # fmt: skip
    asked = requests(chance, count, [*(POLICIES if kv_kind is None else ONCE), *STAYING])
    sent_before_abort = drive(one, asked, chance, tick)
    one.engine.settle()
    one.cache.check()

    scheduler = one.engine.scheduler
    ends = endings(one)
    for each in asked:
        if each.name in sent_before_abort:
            assert sum(ends[each.name].values()) <= 1, "its client may have gone when all was said"
        else:
            assert sum(ends[each.name].values()) == 1, f"{each.name} ended as {ends[each.name]}"
    failures = one.failures()
    for each in (each for each in asked if each.name in failures):
        if each.refusal is not None:
            assert failures[each.name].startswith(each.refusal)
        else:
            assert failures[each.name].startswith("this request can never fit: ") and "budget" in failures[each.name]
            assert each.options.get("beam_width") or each.rows > BUDGET_PAGES * PAGE_TOKENS
    assert {each.name for each in asked if each.refusal is not None} <= failures.keys()
    kinds = Counter(kind for each in ends.values() for kind in each.elements())
    assert min(kinds[kind] for kind in ("stop", "length", "beams", "failed")) > 20 * share
    assert len(sent_before_abort) > 100 * share
    assert scheduler.counts.preemptions > 20 * share, "memory was short"
    assert sum(isinstance(message, Compacted) for message in one.sent) > 100 * share
    assert one.prefix is not None
    assert one.prefix.stats().hit_tokens > 50_000 * share

    assert not (scheduler.waiting or scheduler.running or scheduler.held or one.engine.in_flight)
    assert all(request is None for request in scheduler.table.requests)
    stats = one.cache.stats()
    assert stats.num_sequences == 0 and stats.mapped_bytes == stats.parked_bytes
    one.prefix.evict()
    one.cache.drain()
    for parked in one.cache.parked():
        one.cache.evict(parked)
    one.cache.drain()
    one.cache.check()
    stats = one.cache.stats()
    assert stats.mapped_bytes == stats.pending_reclaim_bytes == stats.pool_used_bytes == 0
    assert stats.pool_held_bytes == 0, "the pool has everything back"
    answered = [each for each in asked if ends[each.name].keys() & {"stop", "length"}]
    for each in chance.sample(answered, max(16, int(40 * share))):
        assert one.tokens(each.name) == tokens_alone(each, kv_kind), each.name
    assert num_scored(one, answered) > 50 * share
    one.close()
    return one.engine.features


def drive(one: Harness, asked: list[Asked], chance: random.Random, tick: Callable[[], object]) -> dict[str, int]:
    """Let them come in bursts, and some go; what each of those had been sent when it went."""
    coming = asked[::-1]
    leaving: dict[str, int] = {}
    gone: dict[str, int] = {}
    step = 0
    scheduler = one.engine.scheduler
    while coming or one.engine.has_work:
        while coming and len(scheduler.waiting) < WAITING and chance.random() < 0.6:
            each = coming.pop()
            one.ask(each.name, each.prompt, each.max_new_tokens, **each.options)
            if each.abort_after is not None and each.refusal is None:
                leaving[each.name] = step + each.abort_after
        for name in [name for name, due in leaving.items() if due <= step]:
            del leaving[name]
            if scheduler.find(name) is not None:
                gone[name] = len(one.sent)
            one.engine.receive(Abort(request_id=name))
        one.engine.step()
        tick()
        step += 1
        if step % 50 == 0:
            one.cache.check()
            one.check_table()
        assert step < 200_000, "no request gets anywhere"
    for name, num_sent in gone.items():
        for message in one.sent[num_sent:]:
            names = [each.request_id for each in message.outputs] if isinstance(message, Outputs) else []
            assert name not in names and getattr(message, "request_id", None) != name, "an output came after the abort"
    return gone


def endings(one: Harness) -> dict[str, Counter[str]]:
    """Of each request how it ended, and how often."""
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    for message in one.sent:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    assert not ends[output.request_id], f"{output.request_id} had more outputs after its end"
                    ends[output.request_id].update([output.finish_reason] if output.finish_reason else [])
            case Beams(request_id=name):
                ends[name]["beams"] += 1
            case Failed(request_id=name):
                ends[name]["failed"] += 1
    return ends


def num_scored(one: Harness, answered: list[Asked]) -> int:
    """Answered requests for log-probabilities of their prompts. Each got one for each token but the first."""
    told = Counter[str]()
    for message in one.sent:
        if isinstance(message, PromptLogprobs):
            told[message.request_id] += len(message.logprobs) // 4
    scored = [each for each in answered if each.options.get("prompt_logprobs")]
    assert all(told[each.name] == len(each.prompt) - 1 for each in scored)
    return len(scored)


def tokens_alone(each: Asked, kv_kind: Kind | None) -> list[int]:
    """What it is told in an engine of its own, which knows nothing and has enough."""
    one = Harness(model(), ours=True, lookahead=0, slots=1, budget_pages=20, eos_ids=EOS, kv_kind=kv_kind)
    tokens = one.said(each.prompt, each.max_new_tokens, **each.options)
    one.close()
    return tokens
