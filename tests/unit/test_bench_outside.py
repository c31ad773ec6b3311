"""What serves without the engine: the same weights, the same answers, times that can be, and nothing kept between runs."""

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import workloads
from bench.serve.checks import distance
from bench.serve.drive import Outcome
from bench.serve.models import ServedModel, model_of
from bench.serve.outside import absent, outside_systems
from bench.serve.outside.batches import Batches
from bench.serve.outside.continuous import ContinuousBatching
from bench.serve.outside.from_vllm import Vllm
from bench.serve.outside.weights import as_transformers, ours, row_bytes
from bench.serve.system import EngineSystem, Limits, Models, System
from bench.serve.turns import Turns
from bench.timing import WrongNumbers
from bench.workloads import Ask, Workload
from vmmkv.units import MIB

CPU = torch.device("cpu")
TINY = model_of("llama-3.1-8b", tiny=True)
LIMITS = Limits(budget_bytes=6 * MIB, max_tokens=256, max_num_seqs=4, max_num_batched_tokens=64)
COMMON: dict[str, Any] = {"seed": 0, "vocabulary": TINY.vocabulary, "max_tokens": LIMITS.max_tokens}
ALONE = workloads.uniform(**COMMON, count=6, prompt=(10, 60), out=(5, 30))
TURNS = workloads.multi_turn(**COMMON, count=3, turns=2, new=(5, 30), out=(5, 20), think_s=0.01)
OUTSIDE = ("transformers DynamicCache", "transformers StaticCache", "transformers continuous batching")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    models = Models(TINY, CPU, seed=0)
    yield models
    models.close()


@pytest.fixture(scope="module")
def systems(models: Models) -> Iterator[dict[str, System]]:
    opened = {system.name: system for system in outside_systems(models, LIMITS)}
    yield opened
    for system in opened.values():
        system.close()


@pytest.fixture(scope="module")
def answers(models: Models) -> dict[str, list[list[int]]]:
    """The engine's."""
    return {workload.name: engine_says(models, workload) for workload in (ALONE, TURNS)}


def engine_says(models: Models, workload: Workload, limits: Limits = LIMITS) -> list[list[int]]:
    with torch.inference_mode():
        engine = EngineSystem("vmmkv", models, limits)
        try:
            return tokens_of(engine.run(workload))
        finally:
            engine.close()


def tokens_of(outcome: Outcome) -> list[list[int]]:
    return [served.tokens for served in outcome.served]


def workload_of(*asks: Ask) -> Workload:
    return Workload(name="some", text="some", asks=asks)


def ask(num_prompt: int, num_out: int, **options: Any) -> Ask:
    rng = np.random.default_rng((num_prompt, num_out))
    return Ask(prompt=rng.integers(0, TINY.vocabulary, num_prompt, dtype=np.int32), num_out=num_out, **options)


# the systems


def test_all_that_can_run_are_there_and_the_others_have_a_reason(systems: dict[str, System]) -> None:
    assert tuple(systems) == OUTSIDE
    reasons = absent(torch.device("cpu"))
    assert reasons["vLLM"] == "the package vllm is not installed"
    assert "in the suite kernels" in reasons["vLLM over FlashInfer"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("workload", [ALONE, TURNS], ids=lambda workload: workload.name)
def test_answers_are_those_of_the_engine(
    systems: dict[str, System], answers: dict[str, list[list[int]]], name: str, workload: Workload
) -> None:
    with torch.inference_mode():  # in which the parts open systems and run them
        outcome = systems[name].run(workload)
    assert tokens_of(outcome) == answers[workload.name]
    for served, asked in zip(outcome.served, workload.asks, strict=True):
        assert len(served.tokens) == len(served.token_s) == asked.num_out
        assert served.arrival_s <= served.token_s[0]
        assert served.token_s == sorted(served.token_s)
        if asked.after is not None:
            assert served.arrival_s == pytest.approx(outcome.served[asked.after].token_s[-1] + asked.think_s)
    assert outcome.seconds == max(served.token_s[-1] for served in outcome.served)
    assert 1 <= min(outcome.running) <= max(outcome.running) <= LIMITS.max_num_seqs


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_second_turn_holds_the_answer_of_the_first(systems: dict[str, System], name: str) -> None:
    first, second = TURNS.asks[0], TURNS.asks[3]
    assert second.after == 0
    said = tokens_of(systems[name].run(TURNS))
    so_far = np.concatenate((first.prompt, np.array(said[0], np.int32)))
    whole = replace(second, prompt=np.concatenate((so_far, second.prompt[len(so_far) :])), after=None)
    placeholder = replace(second, after=None)
    alone = tokens_of(systems[name].run(workload_of(whole, placeholder)))
    assert said[3] == alone[0] != alone[1]


@pytest.mark.parametrize("name", OUTSIDE)
def test_likeliest_first_tokens_are_those_of_the_engine(systems: dict[str, System], models: Models, name: str) -> None:
    prompts, others = ([each.prompt for each in ALONE.asks[span]] for span in (slice(0, 3), slice(3, 6)))
    with torch.inference_mode():
        engine = EngineSystem("vmmkv", models, LIMITS)
        wanted = engine.likeliest(prompts)
        engine.close()
        found, wrong = systems[name].likeliest(prompts), systems[name].likeliest(others)
    assert [max(one, key=lambda token: one[token]) for one in found] == [
        max(one, key=lambda token: one[token]) for one in wanted
    ]
    assert distance(wanted, found) < 1e-4
    assert distance(wanted, wrong) > 0.1


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_token_ends_an_answer(answers: dict[str, list[list[int]]], name: str) -> None:
    said = answers[ALONE.name][0]
    models = Models(ServedModel(name="ends early", config={**TINY.config, "eos_token_id": said[1]}), CPU, seed=0)
    (system,) = (each for each in outside_systems(models, LIMITS) if each.name == name)
    assert tokens_of(system.run(workload_of(ALONE.asks[0]))) == [said]
    models.close()


@pytest.mark.parametrize("name", OUTSIDE[1:])
def test_nothing_is_kept_behind_a_run(models: Models, name: str) -> None:
    (system,) = (each for each in outside_systems(models, LIMITS) if each.name == name)
    before = live_bytes()
    system.likeliest([ALONE.asks[0].prompt])
    system.run(ALONE)
    assert live_bytes() < before + MIB, "caches have more"


def live_bytes() -> int:
    gc.collect()
    return sum(each.untyped_storage().nbytes() for each in gc.get_objects() if type(each) is torch.Tensor)


# weights


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-0.6b", "smollm2-135m"])
def test_weights_are_the_engines_own_memory_and_no_copy(shape: str) -> None:
    models = Models(model_of(shape, tiny=True), CPU, seed=0)
    model, (config, weights) = as_transformers(models), ours(models)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(parameters[name].data_ptr() == weights[name].data_ptr() for name in weights)
    assert (model.lm_head.weight.data_ptr() == parameters["model.embed_tokens.weight"].data_ptr()) == config.tied
    workload = workload_of(*ALONE.asks[:2])
    assert tokens_of(Batches("DynamicCache", model, LIMITS).run(workload)) == engine_says(models, workload)
    models.close()


# limits


def test_a_static_cache_is_never_overrun_by_padding(models: Models) -> None:
    """Each fits into 256 tokens; side by side, the long prompt and the long answer do not."""
    workload = workload_of(ask(200, 20), ask(20, 200))
    outcome = Batches("StaticCache", as_transformers(models), LIMITS).run(workload)
    assert tokens_of(outcome) == engine_says(models, workload)
    assert outcome.running == [1] * 220
    assert Batches("DynamicCache", as_transformers(models), LIMITS).run(workload).running == [2] * 20 + [1] * 180


@pytest.mark.parametrize(("num_rows", "most"), [(4 * 50, 4), (3 * 50, 3), (3 * 50 - 1, 2), (50, 1)])
def test_as_many_are_in_a_batch_as_the_budget_holds(models: Models, num_rows: int, most: int) -> None:
    model = as_transformers(models)
    limits = replace(LIMITS, budget_bytes=num_rows * row_bytes(model), max_tokens=50)
    workload = workload_of(*(ask(40, 10) for _ in range(5)))
    for system in (Batches("DynamicCache", model, limits), Batches("StaticCache", model, limits)):
        outcome = system.run(workload)
        assert outcome.running == [most] * (5 // most * 10) + [5 % most] * (10 if 5 % most else 0)


def test_what_does_not_fit_is_refused_with_what_would(models: Models) -> None:
    model = as_transformers(models)
    small = replace(LIMITS, budget_bytes=255 * row_bytes(model))
    with pytest.raises(ValueError, match=r"a block of 256 tokens takes 512\.0 KiB, and the budget is 510\.0 KiB; raise"):
        ContinuousBatching(model, small)
    for system in (Batches("DynamicCache", model, small), Batches("StaticCache", model, small)):
        with pytest.raises(
            ValueError, match=r"request 0 of 256 tokens does not fit into max_tokens=256 and a budget of 510\.0 KiB"
        ):
            system.run(workload_of(ask(200, 56)))
    with pytest.raises(ValueError, match="request 0 of 257 tokens does not fit into max_tokens=256"):
        Batches("StaticCache", model, LIMITS).run(workload_of(ask(200, 57)))


def test_requests_that_give_way_to_others_lose_no_token(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    evicted: list[int] = []
    original = OffloadingManager.offload_requests
    monkeypatch.setattr(OffloadingManager, "offload_requests", lambda self: evicted.append(original(self)) or evicted[-1])
    limits = replace(LIMITS, max_tokens=512, max_num_batched_tokens=256)
    workload = workload_of(*(ask(200 + index, 70) for index in range(4)))
    wanted = engine_says(models, workload, limits)
    model = as_transformers(models)
    outcome = ContinuousBatching(model, replace(limits, budget_bytes=4 * 256 * row_bytes(model))).run(workload)
    assert sum(evicted), "four blocks hold two of them"
    assert tokens_of(outcome) == wanted
    assert all(len(served.token_s) == 70 for served in outcome.served)


def test_a_server_that_fails_is_no_result(systems: dict[str, System], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    def fail(*_: object) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", fail)
    with pytest.raises(WrongNumbers, match="no memory is left"):
        systems["transformers continuous batching"].run(ALONE)


# turns


def test_a_turn_comes_when_the_one_before_has_ended_and_somebody_has_thought() -> None:
    turns = Turns((ask(4, 2, arrival_s=1.0), ask(8, 1, after=0, think_s=0.5), ask(3, 1)))
    assert turns.arrived(0.9) == [2]
    assert turns.next_s == 1.0
    assert turns.arrived(1.0) == [0]
    assert turns.next_s is None
    turns.served[0].tokens, turns.served[0].token_s = [7, 9], [2.0, 3.0]
    turns.end(0)
    assert turns.next_s == 3.5
    assert turns.arrived(3.4) == []
    assert turns.arrived(3.5) == [1]
    assert turns.prompts[1] == [*turns.asks[0].prompt, 7, 9, *turns.asks[1].prompt[6:]]
    assert turns.served[1].arrival_s == 3.5
    assert turns.num_unfinished == 2


def test_an_answer_of_another_length_is_refused() -> None:
    turns = Turns((ask(4, 2),))
    turns.served[0].tokens = [1, 2, 3]
    with pytest.raises(WrongNumbers, match="request 0 has 3 tokens of 2"):
        turns.end(0)


# vLLM: what it is given, and the loop around it. It is played by transformers, since it is not installed


class PlayedLLM:
    def __init__(self, folder: str, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.options, self.num_forgotten = options, 0
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._running: dict[str, tuple[list[int], list[int], int]] = {}
        self.llm_engine = SimpleNamespace(
            add_request=lambda name, prompt, params: self._running.update(
                {name: (prompt["prompt_token_ids"], [], params["max_tokens"])}
            ),
            has_unfinished_requests=lambda: bool(self._running),
            step=self._step,
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def reset_prefix_cache(self) -> None:
        self.num_forgotten += 1

    def _step(self) -> list[Any]:
        outputs = []
        for name, (prompt, said, num_out) in list(self._running.items()):
            with torch.no_grad():
                said.append(int(self._model(torch.tensor([prompt + said])).logits[0, -1].argmax()))
            ended = len(said) == num_out
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tuple(said))], finished=ended))
            if ended:
                del self._running[name]
        return outputs


def test_vllm_is_given_the_engines_weights_and_limits(
    models: Models, answers: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0", LLM=PlayedLLM, SamplingParams=dict))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**37))
    system = Vllm(models, LIMITS)
    llm = system._llm
    assert tokens_of(system.run(TURNS)) == answers[TURNS.name]
    assert llm.num_forgotten == 1
    limits = {"kv_cache_memory_bytes": 6 * MIB, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    assert {name: llm.options[name] for name in limits} == limits
    assert 0 < llm.options["gpu_memory_utilization"] < 1
    assert set(llm.options) == {*limits, "gpu_memory_utilization", "skip_tokenizer_init"}, (
        "what is set is named in its docstring"
    )
    system.close()
    system.close()
