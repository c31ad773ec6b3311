"""Laws of the engine within one's own process: prompts in, completions out, in order, whatever happens to some of them."""

import json
import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from transformers import BloomConfig, Mamba2Config, PreTrainedConfig, T5Config

from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv import MIB, Pool
from vmmkv.errors import BudgetError, Closed, DriverUnavailable, ForkedProcess, VmmkvError
from vmmkv_server import LLM, ModelUnavailable, RequestOutput, SamplingParams, UnsupportedModel
from vmmkv_server.console import GenerationProgress
from vmmkv_server.engine import loading
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.feature import Feature
from vmmkv_server.engine.runner import Runner
from vmmkv_server.llm import CompletionOutput, GrowingAnswer
from vmmkv_server.protocol import Generate, Output
from vmmkv_server.structured_output.compiler import CompilerUnavailable
from vmmkv_server.tokenizer import Tokenizer

VOCABULARY = 258
"""The bytes, and two special tokens."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "kv_budget_bytes": 64 * MIB}


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LLM]:
    with LLM(directory, **OPTIONS) as one:
        yield one


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, nothing of it is left in the engine."""
    yield
    if "engine" in request.fixturenames:
        one = request.getfixturevalue("engine")
        assert one.snapshot is not None
        scheduler, memory = one.snapshot.scheduler, one.snapshot.memory
        assert (scheduler.requests_running, scheduler.requests_waiting, memory.kv_mapped_bytes) == (0, 0, 0)
        one.loaded.memory.cache.check()


def answers(completions: list[RequestOutput]) -> list[list[int]]:
    """The tokens of each prompt's first answer."""
    return [completion.outputs[0].token_ids for completion in completions]


def expected(directory: Path, prompt: list[int], count: int = 8) -> list[int]:
    """transformers' own greedy answer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_completions_come_in_the_order_of_the_prompts(engine: LLM, directory: Path) -> None:
    prompts = [list(range(start, start + length)) for start, length in ((7, 90), (1, 3), (50, 40), (99, 1))]
    completions = engine.generate(prompts, GREEDY)
    assert [completion.prompt_token_ids for completion in completions] == prompts
    assert answers(completions) == [expected(directory, prompt) for prompt in prompts]
    for completion in completions:
        assert completion.error is None
        assert completion.outputs[0].finish_reason == "length"
        assert completion.first_token_s is not None and 0 < completion.first_token_s <= completion.finished_s


def test_texts_and_token_ids_can_be_mixed_and_each_has_its_params(engine: LLM) -> None:
    counts = (3, 8, 8)
    params = (SamplingParams(temperature=0.0, max_tokens=count) for count in counts)
    outputs = engine.generate((prompt for prompt in ([1, 2], "hello", token_ids("hello"))), params)
    assert tuple(len(tokens) for tokens in answers(outputs)) == counts
    _, of_text, of_ids = outputs
    assert of_text.prompt_token_ids == token_ids("hello")
    assert of_text.outputs == of_ids.outputs
    decode = byte_tokenizer().backend_tokenizer.decode
    assert of_text.outputs[0].text == decode(of_text.outputs[0].token_ids)


@pytest.mark.parametrize(
    "prompts",
    [
        (5, 6, 7),
        np.array([5, 6, 7], np.int32),
        torch.tensor([5, 6, 7]),
        [np.array([5, 6, 7])],
        torch.tensor([[5, 6, 7]]),
        [[np.int64(5), 6, np.uint8(7)]],
        range(5, 8),
        (each for each in ([5, 6, 7],)),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_whatever_holds_integers_is_a_prompt(engine: LLM, prompts: Any) -> None:
    (completion,) = engine.generate(prompts, GREEDY)
    assert repr(completion.prompt_token_ids) == "[5, 6, 7]"
    assert completion.outputs == engine.generate([5, 6, 7], GREEDY)[0].outputs


def test_an_empty_list_has_no_completions(engine: LLM) -> None:
    assert engine.generate([]) == []


def test_answers_of_one_prompt_have_the_seeds_that_follow(engine: LLM) -> None:
    (several,) = engine.generate("abc", SamplingParams(n=4, seed=30))
    singles = [engine.generate("abc", SamplingParams(seed=30 + index))[0].outputs[0] for index in range(4)]
    assert several.outputs == singles
    assert len({tuple(output.token_ids) for output in several.outputs}) == 4


def test_without_a_seed_requests_differ_and_a_run_of_the_program_does_not(directory: Path) -> None:
    runs = []
    for refused in ([], ["a", []]):
        with LLM(directory, seed=5, **OPTIONS) as one:
            first = answers(one.generate(["a", "a"]))
            if refused:
                with pytest.raises(ValueError, match="prompt 1"):  # and the seed of prompt 0 is not used up
                    one.generate(refused)
            runs.append(first + answers(one.generate(["a"])))
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) == 3


def test_log_probabilities_are_those_asked_for(engine: LLM) -> None:
    none, alone, with_tops = (
        engine.generate("abc", SamplingParams(temperature=0.0, max_tokens=4, logprobs=count))[0].outputs[0]
        for count in (None, 0, 3)
    )
    assert none.logprobs is None and alone.top_logprobs is None
    assert alone.logprobs == with_tops.logprobs and alone.logprobs is not None and with_tops.top_logprobs is not None
    for token_id, logprob, likeliest in zip(alone.token_ids, alone.logprobs, with_tops.top_logprobs, strict=True):
        assert logprob < 0 and len(likeliest) == 3
        assert next(iter(likeliest)) == token_id and likeliest[token_id] == pytest.approx(logprob)
        assert sorted(likeliest.values(), reverse=True) == list(likeliest.values())


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_ends_an_answer_and_only_that(engine: LLM, n: int) -> None:
    params = SamplingParams(seed=3, n=n, max_tokens=40)
    whole = engine.generate("abc", params)[0].outputs
    stop = whole[0].text[9:11]
    cut = engine.generate("abc", SamplingParams(seed=3, n=n, max_tokens=40, stop=(stop,)))[0].outputs
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.split(stop)[0]
        assert other.token_ids == one.token_ids[: len(other.token_ids)]
        assert other.finish_reason == ("stop" if stop in one.text else "length")
    assert len(cut[0].token_ids) < 40


def test_what_comes_behind_a_stop_string_or_with_an_end_token_is_not_the_answers(directory: Path) -> None:
    def answer(*outputs: Output, stop: str | None = None) -> CompletionOutput:
        own = CompletionOutput(logprobs=[], top_logprobs=[])
        request = Generate(request_id="a", prompt=[97], params=GREEDY)
        detokenizer = None if stop is None else Tokenizer.load(directory).detokenizer((stop,), [])
        growing = GrowingAnswer(request, RequestOutput(prompt_token_ids=[97], outputs=[own]), own, [], detokenizer)
        for output in outputs:
            growing.feed(output)
        return own

    scores, ids = [-1.0, -2.0, -3.0, -4.0], token_ids("abcd")
    tops = tuple(((97, score),) for score in scores)
    several = Output(request_id="a", token_ids=tuple(ids), logprobs=tuple(scores), top_logprobs=tops)
    cut = answer(several, stop="bc")
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("a", ids[:3], "stop")
    assert cut.logprobs == scores[:3] and cut.top_logprobs == [dict(top) for top in tops[:3]]
    ended = answer(msgspec.structs.replace(several, token_ids=tuple(ids[:3]), finish_reason="stop"))
    assert (ended.token_ids, ended.finish_reason, ended.logprobs) == (ids[:3], "stop", scores[:3])
    assert ended.top_logprobs == [dict(top) for top in tops[:3]]


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        (["ok", ""], None, "prompt 1: The prompt has no tokens"),
        (
            [[1], [2, VOCABULARY]],
            None,
            f"prompt 1: Invalid prompt: {VOCABULARY} is not a token id of this model: they go from 0 to 257",
        ),
        ([[-1]], None, "prompt 0: Invalid prompt: -1 is not a token id"),
        ([[1] * 8000], SamplingParams(max_tokens=500), "lower max_tokens to 192"),
        (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
        (["a"], SamplingParams(logit_bias={999: 1.0}), "Invalid logit_bias: 999 is not a token id"),
        (["a"], SamplingParams(stop_token_ids=[1, 999]), "Invalid stop_token_ids: 999 is not a token id"),
        (["\ud800"], None, "half of a surrogate pair"),
        ([50.9], None, "prompt 0: 50.9 is not a token id: these are integers"),
        ([[1, 2], [3, 50.9]], None, "prompt 1: 50.9 is not a token id"),
        ([True], None, "prompt 0: True is not a token id"),
        ([["50"]], None, "prompt 0: '50' is not a token id"),
        ([[[50]]], None, "prompt 0: [50] is not a token id"),
        ([[2**70]], None, f"prompt 0: Invalid prompt: {2**70} is not a token id"),
        (["a", 5], None, "prompt 1: 5 is neither a text nor a list of token ids"),
        ([5, "a"], None, "prompt 0: 'a' is not a token id"),
        ([b"abc"], None, "prompt 0: b'abc' is neither a text"),
        ([{"prompt": "a"}], None, "prompt 0: {'prompt': 'a'} is neither a text"),
        ([torch.ones(1, 2, dtype=torch.int64)], None, "prompt 0: its shape is (1, 2); wanted one dimension"),
        (5, None, "prompts=5: wanted a text, token ids, or a list of those"),
        (None, None, "prompts=None: wanted"),
        (b"abc", None, "prompts=b'abc': wanted"),
        ({"a", "b"}, None, "wanted a text, token ids"),
        (torch.tensor(5), None, "prompts=5: wanted"),
        (torch.tensor([1.5, 2.5]), None, "prompt 0: 1.5 is not a token id"),
        (["a", "b"], [SamplingParams(), None], "prompt 1: its sampling_params are None; wanted SamplingParams"),
        (["a"], {"max_tokens": 5}, "sampling_params={'max_tokens': 5}: wanted SamplingParams, or a list"),
        (["a"], 5, "sampling_params=5: wanted SamplingParams"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(engine: LLM, prompts: Any, params: Any, said: str) -> None:
    before = engine.snapshot
    with pytest.raises(ValueError, match=re.escape(said)):
        engine.generate(prompts, params)
    assert engine.snapshot is before


def test_one_priority_for_each_prompt(engine: LLM) -> None:
    with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
        engine.generate(["a", "b"], priorities=[1])
    for wrong in ("1", 0.5, True, None, 1 << 31):
        with pytest.raises(ValueError, match=r"prompt 1: its priority is .*; wanted an integer"):
            engine.generate(["a", "b"], priorities=[0, wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="priorities=3: wanted a list"):
        engine.generate(["a", "b"], priorities=3)  # type: ignore[arg-type]
    assert len(engine.generate(["a", "b"], GREEDY, priorities=[1, 0])) == 2
    assert len(engine.generate(["a", "b"], GREEDY, priorities=np.array([1, 0]))) == 2


def test_a_request_that_fails_on_its_way_says_so_and_leaves_the_others_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Feature):
        def refusal(self, ask: Generate) -> str | None:
            return "told to fail" if ask.prompt == token_ids("bad") else None

    monkeypatch.setattr("vmmkv_server.engine.engine.FEATURES", (Refusing,))
    with LLM(directory, **OPTIONS) as engine:
        good, bad, last = engine.generate(["good", "bad", "last"], GREEDY)
    assert bad.error == "told to fail"
    assert (bad.outputs[0].token_ids, bad.outputs[0].finish_reason, bad.first_token_s) == ([], None, None)
    assert good.error is None and last.error is None
    assert len(good.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 8


def after_steps(engine: LLM, monkeypatch: pytest.MonkeyPatch, count: int, act: Any) -> list[int]:
    """Have the engine do `act` once, within a step, when it has done so many. Returns a list with the number of its steps."""
    core = engine.loaded.engine
    step, done = core.step, [0]

    def counted() -> None:
        done[0] += 1
        if done[0] == count:
            act()
        step()

    monkeypatch.setattr(core, "step", counted)
    return done


def test_ctrl_c_ends_everything_after_the_step_and_the_engine_can_be_used_again(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs behind itself ignore it
    try:
        done = after_steps(engine, monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[number] for number in range(30)], SamplingParams(max_tokens=500))
        assert done[0] < 10, "those that ran are aborted"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not engine.loaded.engine.has_work
    assert len(answers(engine.generate("abc", GREEDY))[0]) == 8


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGHUP])
def test_a_handler_that_raises_waits_for_the_step_and_leaves_no_sequence(
    engine: LLM, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Alarm(Exception):
        """Like a timeout's. It is no interrupt by its type: within a step it would pass for an error of the request."""

    def ring(*_: object) -> None:
        raise Alarm

    memory = engine.loaded.memory
    attach, before = memory.attach, signal.signal(number, ring)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        attached = attach(*arguments, **options)
        signal.raise_signal(number)
        return attached

    try:
        with monkeypatch.context() as patch, pytest.raises(Alarm):
            patch.setattr(memory, "attach", interrupted)
            engine.generate([[each] for each in range(4)], GREEDY)
        assert signal.getsignal(number) is ring
    finally:
        signal.signal(number, before)
    assert not engine.loaded.engine.has_work and not memory.stats().num_sequences
    assert len(answers(engine.generate("abc", GREEDY))[0]) == 8


@pytest.mark.parametrize("place", ["a sequence that no request has", "slots that the device alone has", "a parked slot"])
def test_an_interrupt_within_a_step_ends_the_engine_and_close_gives_all_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As a second Ctrl-C is."""
    with LLM(directory, **OPTIONS) as engine:
        core, pool = engine.loaded.engine, engine.loaded.memory.cache.pool
        holder, name = {
            "a sequence that no request has": (core.memory.cache.slots, "open"),
            "slots that the device alone has": (core.runner.uploads, "into"),
            "a parked slot": (core.memory.prefixes, "park"),
        }[place]
        call = getattr(holder, name)

        def interrupted(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(holder, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate("abc", GREEDY)
        with pytest.raises(EngineDied, match="must be closed: it was interrupted within a step"):
            engine.generate("abc", GREEDY)
        with pytest.raises(EngineDied, match="an interrupt came within a step"):
            core.step()
    assert not pool.created_bytes


def test_an_error_of_a_step_reaches_the_caller_and_the_engine_can_be_used_again(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    after_steps(engine, monkeypatch, 2, fail)
    with pytest.raises(ZeroDivisionError):
        engine.generate(["a", "b"], SamplingParams(max_tokens=500))
    assert len(answers(engine.generate("abc", GREEDY))[0]) == 8


def test_one_thread_generates_at_a_time(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []

    def intrude() -> None:
        for call in (lambda: engine.generate("b"), engine.close):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    def other_thread() -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    after_steps(engine, monkeypatch, 2, other_thread)
    assert engine.generate("a", GREEDY)[0].error is None
    assert len(errors) == 2
    assert all("another thread" in str(error) for error in errors)


def test_it_works_in_a_thread_that_gets_no_signals(engine: LLM) -> None:
    got: list[list[RequestOutput]] = []
    thread = threading.Thread(target=lambda: got.append(engine.generate("abc", GREEDY)))
    thread.start()
    thread.join()
    assert answers(got[0]) == answers(engine.generate("abc", GREEDY))


def test_progress_is_shown_when_asked_for_and_not_else(engine: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    engine.generate(["a", "b"], GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "2 of 2 requests" in shown and "tok/s out" in shown


def test_progress_counts_the_prompt_tokens_that_were_computed(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(GenerationProgress, "update", lambda _, done, prompt, new, **at_end: counted.append(prompt))
    prompt = [(7 * token + 113) % 251 for token in range(2100)]  # a page of 2,048 tokens, and a rest, unlike other tests'
    for num_computed in (2100, 1):  # the second time in the slot that has them
        engine.generate([prompt], GREEDY)
        assert counted[-1] == num_computed


def test_what_a_tier_lacks_is_stored_when_an_llm_ends(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "kv_disk": tmp_path / "kv", "kv_disk_budget_bytes": 64 * MIB}
    prompt = [token % 251 for token in range(4500)]  # two pages of 2,048 tokens, and a rest
    with LLM(directory, **options) as one, monkeypatch.context() as patch:
        patch.setattr(one.loaded.engine, "poll_tiers", lambda *_: True)
        one.generate([prompt], GREEDY)
    with LLM(directory, **options) as one:
        assert sum(tier.held_bytes for tier in one.loaded.memory.prefixes.stats().tiers) == 4 * MIB


def test_inference_mode_around_a_call_binds_no_later_one(directory: Path) -> None:
    penalised = SamplingParams(temperature=0.0, max_tokens=4, presence_penalty=0.5)
    with torch.inference_mode():
        one = LLM(directory, **OPTIONS)
        one.generate([[token, 2, 3] for token in range(1, 9)], penalised)  # which makes the state of penalties grow
    assert [answer.error for answer in one.generate([[1, 2, 3]] * 2, penalised)] == [None, None]
    one.close()


def test_no_call_hangs_in_a_child_made_by_fork(engine: LLM, directory: Path) -> None:
    grammar = SamplingParams(temperature=0.0, max_tokens=2, structured_outputs={"choice": ["ab", "cd"]})
    with pytest.raises(CompilerUnavailable):  # this model names no end token; from now on it has a thread for grammars
        engine.generate([[1, 2]], grammar)
    child = os.fork()
    if not child:
        num_refused = 0
        try:
            for call in (
                lambda: engine.generate([[1, 2]], grammar),
                lambda: engine.ready,
                lambda: LLM(directory, **OPTIONS),
                engine.close,
            ):
                try:
                    call()
                except ForkedProcess:
                    num_refused += 1
        finally:
            os._exit(num_refused)
    killer = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    killer.start()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    assert os.waitstatus_to_exitcode(status) == 3, "close changes nothing"
    assert len(engine.generate([[1, 2]], GREEDY)) == 1


def test_after_close_nothing_is_left_and_nothing_works(directory: Path) -> None:
    one = LLM(directory, **OPTIONS)
    calls = one.loaded.memory.cache.pool.driver.calls
    assert repr(one) == f"<LLM of {directory} on cpu: 0 of 8 sequences running, 64.0 MiB of 64.0 MiB free>"
    one.generate("a" * 100, GREEDY)
    assert "64.0 MiB of 64.0 MiB free" not in repr(one), "the prefix cache keeps it"
    one.close()
    assert repr(one) == f"<LLM of {directory}, closed>"
    one.close()
    assert calls["create"] == calls["release"] and calls["map"] == calls["unmap"]
    with pytest.raises(Closed, match="closed"):
        one.generate("abc")
    with pytest.raises(Closed):
        _ = one.ready


@pytest.mark.parametrize("name", ["prefilled", "prepare", "settle"])
def test_an_interrupt_of_a_start_leaves_no_memory_taken(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pools: list[Pool] = []
    runners: list[weakref.ref[Runner]] = []
    close = Mock()

    def interrupted(engine: Engine, *_: Any, **__: Any) -> None:
        pools.append(engine.memory.cache.pool)
        runners.append(weakref.ref(engine.runner))
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, name, interrupted)
    monkeypatch.setattr(Runner, "close", close)
    with pytest.raises(KeyboardInterrupt) as kept:
        LLM(directory, **OPTIONS)
    assert pools[0].closed and close.called
    assert runners[0]() is None, kept


def test_a_directory_without_a_tokenizer_takes_token_ids_alone(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    with LLM(tmp_path, **OPTIONS) as one:
        (completion,) = one.generate([[1, 2, 3]], GREEDY)
        assert completion.outputs[0].token_ids == expected(directory, [1, 2, 3])
        assert completion.outputs[0].text == ""
        with pytest.raises(ValueError, match="no tokenizer: give token ids"):
            one.generate("abc")
        with pytest.raises(ValueError, match="use stop_token_ids"):
            one.generate([1], SamplingParams(stop=("a",)))


@pytest.mark.parametrize("model_impl", ["vmmkv", "transformers"])
def test_random_weights_need_a_configuration_alone_and_are_those_of_the_seed(
    directory: Path, tmp_path: Path, model_impl: str
) -> None:
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ModelUnavailable, match="safetensors"):
        LLM(tmp_path, **OPTIONS)
    got = []
    for seed in (1, 1, 2):
        with LLM(tmp_path, load_format="dummy", model_impl=model_impl, seed=seed, **OPTIONS) as one:
            assert one.ready.implementation == model_impl
            got.append(answers(one.generate([[1, 2, 3], [4, 5]], GREEDY)))
    assert got[0] == got[1] != got[2]


def test_options_that_cannot_be_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(BudgetError, match=r"a budget of 1048576\.0 TiB is more than this machine.* in all; lower kv_budget"):
        LLM(directory, device="cpu", kv_budget_bytes=2**60)
    for wrong in ("int8", torch.int8):
        with pytest.raises(ValueError, match=r"dtype='int8' is not known; use one of auto, float32, bfloat16, float16"):
            LLM(directory, dtype=wrong)


def test_more_tokens_than_the_models_positions_are_refused_before_weights(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"max_tokens=99999 is more than this model's positions reach, \d+$"):
        LLM(directory, **(OPTIONS | {"max_tokens": 99_999}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            Mamba2Config(hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32),
            "a model of type mamba2 cannot be served",
        ),
        (T5Config(d_model=64, num_layers=2), r"\(t5\) is an encoder and a decoder"),
        (BloomConfig(hidden_size=64, n_layer=2, n_head=4), "BloomForCausalLM has an attention of its own"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_an_unsupported_model(
    config: PreTrainedConfig, said: str, tmp_path: Path
) -> None:
    config.vocab_size = VOCABULARY
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=said) as error:
        LLM(tmp_path, load_format="dummy", **OPTIONS)
    assert isinstance(error.value, VmmkvError) and isinstance(error.value, ValueError)


def test_before_other_ranks_start_a_model_is_refused_as_on_one(tmp_path: Path) -> None:
    T5Config(d_model=64, num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"a model of type t5 cannot be served: .* is an encoder and a decoder"):
        LLM(tmp_path, load_format="dummy", tensor_parallel_size=2, **OPTIONS)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UnsupportedModel, match=r"the model in .* cannot be served: .*unheard_of"):
        LLM(tmp_path, load_format="dummy", tensor_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_never_runs(
    file: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked whether it may run"))
    model, ran = shutil.copytree(directory, tmp_path / "model"), tmp_path / "ran"
    (model / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import GPT2Tokenizer, LlamaConfig\n")
    code = {"AutoConfig": "custom.LlamaConfig", "AutoTokenizer": [None, "custom.GPT2Tokenizer"]}

    def change(name: str, **fields: Any) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | fields))

    change(file, auto_map=code)
    with LLM(model, **OPTIONS) as one:  # transformers has classes of its own for both
        assert answers(one.generate([[1, 2, 3]], GREEDY)) == [expected(directory, [1, 2, 3])]
    change("config.json", model_type="unheard_of")
    change("tokenizer_config.json", tokenizer_class="UnheardOfTokenizer")
    with pytest.raises(UnsupportedModel, match=r"model needs code of its own \(custom\.py\), and vmmkv runs no code"):
        LLM(model, **OPTIONS)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("kv_budget", r"no option kv_budget; did you mean kv_budget_bytes\?"),
        ("max_num_sequences", r"no option max_num_sequences; did you mean max_num_seqs"),
        ("port", "no option port; it has model, device, dtype, max_num_seqs"),
        ("max_model_len", r"no option max_model_len; did you mean max_tokens\?"),
        ("top_logprobs", "LLM has no option top_logprobs; it has model, device, dtype, max_num_seqs"),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_the_nearest(option: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        LLM("nothing", **{option: 1})


@pytest.mark.parametrize("device", ["cuda", "cuda:64"])
def test_a_gpu_that_there_is_not_is_said_before_anything_is_loaded(directory: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DriverUnavailable, match=f"device='{device}': torch sees .* here.*; use .*cpu or auto"):
        LLM(directory, device=device)


def test_without_a_terminal_nothing_is_printed_and_a_dtype_may_be_torchs(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(directory, dtype=torch.bfloat16, **OPTIONS) as one:
        assert one.ready.dtype == "bfloat16"
        one.generate("abc", GREEDY)
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
def test_a_small_model_answers_in_sensible_english(smollm2: Path) -> None:
    with LLM(smollm2, device="cpu", max_num_seqs=8, kv_budget_bytes=256 * MIB) as one:
        chat = "<|im_start|>user\nWhat is the capital of {}?<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(temperature=0.0, max_tokens=24)
        completions = one.generate([chat.format(country) for country in ("France", "Italy")], params)
    assert "Paris" in completions[0].outputs[0].text and "Rome" in completions[1].outputs[0].text
    assert completions[0].outputs[0].finish_reason == "stop"


HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_is_the_models_template_and_its_answer_alone(engine: LLM) -> None:
    prompt = token_ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    (one,) = engine.chat(HELLO, GREEDY)
    assert one.prompt_token_ids == prompt
    assert one.outputs[0].token_ids == engine.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert [each.outputs for each in engine.chat([HELLO, HELLO], GREEDY)] == [one.outputs] * 2


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "assistant", "content": "a"}], "prompt 0: the model's chat template refuses"),
        ("hello", "messages='hello': wanted a list of messages"),
        (HELLO[0], "wanted a list of messages"),
        (["hello"], "prompt 0: 'hello' is not a list of messages; a message is {"),
        ([HELLO, [{"role": "user"}]], 'prompt 1: message 0 has no content; a message is {"role": ..., "content": text}'),
        ([*HELLO, {"content": "a"}], "prompt 0: message 1 has no role"),
        ([*HELLO, {"role": "user", "content": None}], "prompt 0: message 1 has no content"),
        ([*HELLO, "hello"], "prompt 0: message 1 is 'hello'; a message is"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "which is no text; a message is"),
    ],
)
def test_what_is_no_conversation_is_refused_with_what_is_one(engine: LLM, messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        engine.chat(messages)
