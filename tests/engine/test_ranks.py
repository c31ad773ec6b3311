"""Laws of tensor parallelism: the tokens of one rank whatever their number, one page map on all, and an end if one fails.

The other ranks are threads here, with the same code, sockets and collectives as processes, which take seconds to start.
"""

import ctypes
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.engine.conftest import tiny_model, wide_rows
from tests.engine.decoder_models import model_of, small
from tests.server.tiny import byte_tokenizer
from tests.structured_output.grammars import SIZE, compiled
from vmmkv import MIB, BudgetError, DriverError
from vmmkv.units import ceil_div
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine import ranks, worker
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.models import transformers as transformers_model
from vmmkv_server.engine.ranks import Peer, RankFailed, Ranks
from vmmkv_server.engine.step import Readback, Step
from vmmkv_server.engine.worker import Worker
from vmmkv_server.models import UnsupportedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_budget_bytes": 64 * MIB}


class Threads:
    """Ranks as threads of this process. They end with their channels."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.errors: list[Exception] = []
        self.timeout_s = 30.0
        self.channels: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def start(self, config: EngineConfig, device: torch.device) -> Ranks:
        store, peers = HashStore(), []
        for rank in range(1, config.tensor_parallel_size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers.append(Peer(rank, ours))
            self.channels.append(theirs)
            self.workers.append(worker.load(config, rank, theirs, store, self.timeout_s))
            self._threads.append(threading.Thread(target=self._run, args=(self.workers[-1], theirs)))
            self._threads[-1].start()
        return Ranks(peers, store, timeout_s=self.timeout_s)

    def _run(self, one: Worker, channel: socket.socket) -> None:
        with channel:
            try:
                one.run()
            except Exception as error:
                self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    one = Threads()
    monkeypatch.setattr(Ranks, "start", one.start)
    yield one
    one.join()


def check(llm: LLM, threads: Threads) -> None:
    """All ranks have the pages and the limits of rank 0."""
    loaded = llm.loaded
    cache: Any = loaded.memory.cache
    cache.check()
    if loaded.ranks is not None:
        loaded.ranks.ask_memory()  # all that was sent has been done
        own = cache.pool.driver.over.mapped_pages()
        for one in threads.workers:
            assert one.limit is not None
            assert one.driver.mapped_pages() == own
            assert torch.equal(one.limit, cache.limit)


def checked(llm: LLM, threads: Threads) -> LLM:
    """The laws are checked after each step."""
    engine = llm.loaded.engine
    step = engine.step

    def checked_step() -> None:
        step()
        check(llm, threads)

    engine.step = checked_step  # type: ignore[method-assign]
    return llm


def saved(model: Any, path: Path) -> Path:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # transformers begins with zeroes
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def everything(llm: LLM) -> list[Any]:
    """Answers by way of prefix hits, several samples of a prompt, beams, scores of a prompt and penalties."""
    shared = [token % 251 for token in range(40)]
    asked = [
        (shared, GREEDY),
        ([*shared, 7], GREEDY),
        ([*shared, 7, 8], SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=6)),
        ([3, 1, 4], SamplingParams(temperature=0.0, beam_width=3, max_tokens=5)),
        ([2, 7], SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.3, logit_bias={9: 2.0})),
        ([5] * 20, SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2)),
    ]
    found: list[Any] = []
    for prompts in ([shared], [prompt for prompt, _ in asked]):
        params = [GREEDY] if len(prompts) == 1 else [each for _, each in asked]
        for output in llm.generate(prompts, params):
            assert output.error is None, output.error
            found.append([each.token_ids for each in output.outputs])
            found.append([round(each or 0.0, 2) for each in output.prompt_logprobs or ()])
    return found


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (2, {"attention_bias": True, "mlp_bias": True, "intermediate_size": 104}),  # each has one of two KV heads
        (4, {"tie_word_embeddings": True}),  # and half of its queries
        (2, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),  # the second has one of three
        pytest.param(
            4, {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}, marks=pytest.mark.nightly
        ),  # the last has none of five
    ],
)
def test_tokens_are_those_of_one_rank_and_all_ranks_have_one_page_map(
    num_ranks: int, changes: dict[str, Any], tmp_path: Path, threads: Threads
) -> None:
    path = saved(tiny_model(vocab_size=258, **changes), tmp_path)
    with LLM(path, **OPTIONS) as one:
        expected = everything(one)
    with LLM(path, tensor_parallel_size=num_ranks, **OPTIONS) as several:
        assert everything(checked(several, threads)) == expected


def planned(kind: Any, num_ranks: int, *, nightly: bool = True, **changes: Any) -> Any:
    """A model that transformers has a plan for. By default it has two KV heads, each of two queries."""
    return pytest.param(
        num_ranks, kind, changes, id=f"{kind.model_type} over {num_ranks}", marks=[pytest.mark.nightly] * nightly
    )


THREE_OF_SIX = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 100}
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("num_ranks", "kind", "changes"),
    [
        planned(hf.Gemma3TextConfig, 2, nightly=False, head_dim=16, sliding_window=16, attention_bias=True, **THREE_OF_SIX),
        planned(hf.Phi3Config, 2, nightly=False, num_key_value_heads=1),  # q, k and v in one: joined; both have the KV head
        planned(hf.MixtralConfig, 3, nightly=False, num_local_experts=4, num_hidden_layers=2),  # the third has no head
        planned(hf.Phi3Config, 4),
        planned(hf.LlamaConfig, 4, attention_bias=True, mlp_bias=True),
        planned(hf.MistralConfig, 2, head_dim=16, sliding_window=16),
        planned(hf.Qwen2Config, 2, tie_word_embeddings=True),
        planned(hf.Qwen3Config, 2, head_dim=16, **THREE_OF_SIX),
        planned(hf.GemmaConfig, 2, head_dim=16),
        planned(hf.Gemma2Config, 4, head_dim=16, sliding_window=16, attn_logit_softcapping=None),
        planned(hf.PhiConfig, 2),  # all with biases
        planned(hf.GPTNeoXConfig, 3, num_key_value_heads=4),  # heads of q, k and v in one
        planned(hf.Olmo2Config, 2, **THREE_OF_SIX),  # norms over all heads: joined
        planned(hf.Glm4Config, 2, head_dim=16),
        planned(hf.CohereConfig, 2),
        planned(hf.Starcoder2Config, 2),
        planned(hf.GraniteConfig, 2),
        planned(hf.Qwen3MoeConfig, 2, head_dim=16, num_experts=4, **EXPERTS),
        planned(hf.Qwen2MoeConfig, 2, num_experts=4, shared_expert_intermediate_size=40, **EXPERTS),
        planned(hf.Glm4MoeConfig, 4, head_dim=16, n_routed_experts=4, first_k_dense_replace=1, **EXPERTS),
    ],
)
def test_models_of_transformers_have_the_tokens_of_one_rank(
    num_ranks: int, kind: Any, changes: dict[str, Any], tmp_path: Path, threads: Threads
) -> None:
    model_of(small(kind, vocab_size=258, **changes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with LLM(tmp_path, model_impl="transformers", **OPTIONS) as one:
        expected = everything(one)
    with LLM(tmp_path, model_impl="transformers", tensor_parallel_size=num_ranks, **OPTIONS) as several:
        assert several.ready.implementation == "transformers"
        assert everything(checked(several, threads)) == expected


@pytest.mark.parametrize("model_impl", ["vmmkv", pytest.param("transformers", marks=pytest.mark.nightly)])
def test_preempted_requests_have_the_tokens_of_one_rank(model_impl: str, tmp_path: Path, threads: Threads) -> None:
    path = saved(wide_rows(vocab_size=258, eos_token_id=257, max_position_embeddings=512), tmp_path)
    found = []
    for num_ranks, num_pages in ((1, 6), (2, 3)):  # a page has 64 rows of one rank, and 128 of one of two
        options = OPTIONS | {
            "kv_budget_bytes": num_pages * 2 * MIB,
            "tensor_parallel_size": num_ranks,
            "model_impl": model_impl,
        }
        with LLM(path, **options) as llm:
            long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
            outputs = checked(llm, threads).generate([[seed] * 60 for seed in range(1, 4)], long)
            assert llm.snapshot is not None and llm.snapshot.scheduler.preemptions
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_prefixes_come_back_from_the_host_with_the_rows_of_all_ranks(
    tmp_path: Path, threads: Threads, slow_prefill: None
) -> None:
    path = saved(wide_rows(vocab_size=258, max_position_embeddings=1024), tmp_path)
    prompts = [[(seed + 7 * token) % 251 for token in range(400 + seed)] for seed in range(3)]
    with LLM(path, **OPTIONS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, GREEDY)]
    options = OPTIONS | {"kv_budget_bytes": 12 * MIB, "kv_host_budget_bytes": 64 * MIB}  # the device has room for one
    with LLM(path, tensor_parallel_size=2, **options) as llm:
        for _ in range(2):
            outputs = checked(llm, threads).generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(output.cached_tokens_details.get("host", 0) for output in outputs) > 300
        (tier,) = llm.loaded.memory.prefixes.transfers.mover.tiers  # type: ignore[union-attr]
        (other,) = threads.workers
        assert other.host_memory is not None and len(other.host_memory) == tier.budget_bytes
        assert other.host_memory.count_nonzero() > 0
        assert other.host_memory.numpy().tobytes() != ctypes.string_at(tier.address, tier.budget_bytes), (
            "each has its own heads"
        )


def test_host_memory_that_a_rank_does_not_get_ends_the_start(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "host_memory", Mock(side_effect=BudgetError("64 MiB cannot be had")))
    monkeypatch.setattr(ranks, "LAST_WORDS_S", 0.2)
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with pytest.raises(RankFailed, match="rank 1: BudgetError: 64 MiB cannot be had"):
        LLM(path, tensor_parallel_size=2, kv_host_budget_bytes=64 * MIB, **OPTIONS)


def test_an_answer_by_a_grammar_has_the_tokens_of_one_rank(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = AsyncMock(compile=AsyncMock(side_effect=compiled))  # not in a process of its own, which takes a while
    monkeypatch.setattr("vmmkv_server.llm.GrammarCompiler", lambda *_: here)
    path = saved(tiny_model(vocab_size=SIZE, eos_token_id=257), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs={"regex": "[a-e]{3,9}fgh(ij)+"})
    found = []
    for num_ranks in (1, 2):
        with LLM(path, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            (output,) = checked(llm, threads).generate([[3]], params)
            found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert "fgh" in found[1].text


@pytest.fixture
def llm(tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(ranks, "LAST_WORDS_S", 0.2)
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as one:
        yield one


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_rows_have_the_scores_of_one_rank(tmp_path: Path, threads: Threads, kind: str) -> None:
    path = saved(tiny_model(vocab_size=258), tmp_path)
    params, found = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), []
    for num_ranks in (1, 2):
        with LLM(path, tensor_parallel_size=num_ranks, kv_cache_dtype=kind, **OPTIONS) as llm:
            (output,) = checked(llm, threads).generate([list(range(150))], params)
            found.append(torch.tensor(output.prompt_logprobs[1:]))  # type: ignore[index]
    assert torch.allclose(*found, atol=0.02), (found[0] - found[1]).abs().max()


@torch.inference_mode()
def test_no_rows_are_dropped_by_a_policy(llm: LLM) -> None:
    with pytest.raises(ValueError, match="kv_policy is for a model on one device"):
        llm.generate([[1]], SamplingParams(kv_policy="tova:budget=9"))


@torch.inference_mode()
def test_rows_that_are_copied_and_pages_that_are_exchanged_are_so_on_all_ranks(llm: LLM, threads: Threads) -> None:
    cache: Any = llm.loaded.memory.cache
    (other,) = threads.workers
    sequence = cache.open()
    sequence.grow(6000)  # a page, and a part of one
    sequence.advance(6000)
    check(llm, threads)
    k_STKD = other.rows.views[1][0]  # type: ignore[union-attr]
    k_STKD[sequence.slot, :6000].normal_()
    written = k_STKD[sequence.slot, :6000].clone()
    (fork,) = cache.fork(sequence)
    check(llm, threads)
    assert torch.equal(k_STKD[fork.slot, :6000], written)
    fork.truncate(100)  # within the page that both have
    check(llm, threads)
    assert torch.equal(k_STKD[fork.slot, :100], written[:100])
    k_STKD[fork.slot, :100].zero_()
    assert torch.equal(k_STKD[sequence.slot, :6000], written)
    fork.close()
    sequence.close()


def ends(llm: LLM, reason: str) -> None:
    """Both what runs and what comes later is refused, at once, and says why."""
    for num_prompts in (3, 1):
        with pytest.raises(RankFailed, match=reason):
            llm.generate([[1, 2, 3]] * num_prompts, GREEDY)
    assert re.search(f"to be closed: .*{reason}", repr(llm))
    llm.close()


def test_a_rank_whose_driver_fails_ends_the_engine_and_says_why(llm: LLM, threads: Threads) -> None:
    def refuse(*_: int) -> None:
        raise DriverError("map: no more addresses", call="map", code="ENOMEM")

    threads.workers[0].driver.map = refuse  # type: ignore[method-assign]
    ends(llm, "rank 1: DriverError: map: no more addresses")
    threads.join()  # the rank raises behind what it says
    assert [type(error) for error in threads.errors] == [DriverError]


def test_a_rank_that_is_late_ends_the_engine(llm: LLM, threads: Threads) -> None:
    goes_on = threading.Event()
    assert threads.workers[0].model is not None
    threads.workers[0].model.forward = lambda *_: goes_on.wait(60)  # type: ignore[method-assign, assignment, return-value]
    collectives = llm.loaded.ranks.collectives  # type: ignore[union-attr]
    collectives.group._set_default_timeout(timedelta(seconds=0.5))
    try:
        ends(llm, "a rank failed, or was late: ")
    finally:
        goes_on.set()


def test_a_device_that_waits_for_a_rank_for_too_long_ends_the_engine(llm: LLM) -> None:
    several = llm.loaded.ranks
    assert several is not None
    several.timeout_s = 0.1
    fence = llm.loaded.memory.cache.pool.driver.fence()  # type: ignore[attr-defined]
    for is_done in (False, True):  # in the end by itself, which counts for nothing
        with pytest.raises(RankFailed, match=r"the ranks have waited for one another for 0\.1 s"):
            several.wait_for(lambda: is_done)  # noqa: B023 - called at once
    fence.wait()  # memory is given back all the same
    ends(llm, "waited for one another")


def test_stores_behind_a_step_that_waits_for_a_rank_do_not_keep_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core, several = llm.loaded.engine, llm.loaded.ranks
    assert several is not None
    several.timeout_s = 0.1
    readback = Readback(torch.zeros(0, dtype=torch.int32), done=Mock(**{"query.return_value": False}))
    none, polls = np.zeros(0, np.int64), iter(range(30_000))
    core.in_flight.append(Step(none, none, none, [], readback=readback))
    with monkeypatch.context() as patch, pytest.raises(RankFailed, match="the ranks have waited for one another"):
        patch.setattr(core, "poll_tiers", lambda: next(polls, None) is not None)
        core.read()
    assert next(polls, None) is not None
    ends(llm, "waited for one another")


def test_a_rank_that_ends_between_requests_is_seen(llm: LLM, threads: Threads) -> None:
    several = llm.loaded.ranks
    assert several is not None
    several.check()
    threads.channels[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        several.check()
    ends(llm, "rank 1 has ended")


def test_an_error_in_a_pass_of_rank_0_ends_all_ranks(llm: LLM, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.loaded.ranks.collectives, "sum", Mock(side_effect=RuntimeError("out of memory")))  # type: ignore[union-attr]
    ends(llm, "out of memory")


def test_an_interrupt_in_a_pass_of_rank_0_ends_all_ranks(llm: LLM, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.loaded.ranks.collectives, "sum", Mock(side_effect=KeyboardInterrupt))  # type: ignore[union-attr]
    ranks = llm.loaded.ranks
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], GREEDY)
    assert ranks is not None and ranks.are_ended
    with pytest.raises(EngineDied, match="interrupted within a step"):
        llm.generate([[1, 2, 3]], GREEDY)
    llm.close()


def test_a_call_that_fails_on_rank_0_fails_one_request_and_no_rank_repeats_it(llm: LLM, threads: Threads) -> None:
    driver: Any = llm.loaded.memory.cache.pool.driver.over  # type: ignore[attr-defined]
    map_, driver.map = driver.map, Mock(side_effect=DriverError("map: no", call="map", code="ENOMEM"))
    (output,) = checked(llm, threads).generate([[1] * 50], GREEDY)
    assert "map: no" in (output.error or "")
    driver.map = map_
    (output,) = llm.generate([[1] * 50], GREEDY)
    assert output.error is None


def test_a_rank_that_cannot_load_its_part_ends_the_start(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "choose_dtype", Mock(side_effect=ValueError("it has no such type")))
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with pytest.raises(ValueError, match="no such type"):
        LLM(path, tensor_parallel_size=2, **OPTIONS)


def test_ranks_are_processes_and_one_that_is_killed_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with LLM(path, **OPTIONS) as one:
        (expected,) = one.generate([[1, 2, 3]], GREEDY)
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as several:
        (found,) = several.generate([[1, 2, 3]], GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert not list(folder.glob("vmmkv-ranks-*")), "a process that is killed would leave it"
        (peer,) = several.loaded.ranks.peers  # type: ignore[union-attr]
        assert peer.process is not None and peer.process.poll() is None
        peer.process.kill()
        ends(several, "rank 1 has ended with exit code -9")


@pytest.mark.nightly
@pytest.mark.parametrize(("num_ranks", "model_impl"), [(2, "vmmkv"), (4, "vmmkv"), (2, "transformers")])
def test_smollm2_has_the_tokens_of_one_rank_in_processes(num_ranks: int, model_impl: str, smollm2: Path) -> None:
    """Nine query heads over three KV heads: they do not divide, and are filled up."""
    shared = "Once upon a time there was a fox who lived in a wood by the sea. " * 8
    schema = {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
    asked = [
        (shared + "The fox", GREEDY),
        (shared + "One day", GREEDY),
        (shared, SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=8)),
        ("The capital of France is", SamplingParams(temperature=0.0, beam_width=3, max_tokens=8)),
        ("A fox as JSON:", SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=schema)),
        # Of these three begin. When they have grown to 135 tokens, of 409 in all, one is preempted.
        *[
            (list(range(first, first + 120)), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
            for first in (0, 1000, 2000, 3000)
        ],
    ]
    found = []
    for count in (1, num_ranks):
        options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_tokens": 400}
        options["kv_budget_bytes"] = 3 * ceil_div(3, count) * 2 * MIB  # 409 tokens
        with LLM(smollm2, tensor_parallel_size=count, model_impl=model_impl, **options) as llm:  # type: ignore[arg-type]
            llm.generate([shared], GREEDY)
            outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            assert outputs[0].cached_tokens > 50
            assert llm.snapshot is not None and llm.snapshot.scheduler.preemptions
            found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 0}, "at least 1 device"),
        (
            {"tensor_parallel_size": 2, "kv_holder": "/tmp/holder"},
            "^kv_holder does not work with tensor_parallel_size=2: leave one of them out; kv_host_budget_bytes works with it$",
        ),
        ({"tensor_parallel_size": 2, "kv_store": "redis://a"}, "^kv_store does not work with tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "kv_policy": "snapkv:budget=256"}, "^kv_policy does not work with tensor_parallel_size=2"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


def test_more_ranks_than_heads_are_refused_before_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.Ranks, "start", Mock(side_effect=AssertionError("it starts")))
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=5: .* this model has 4 of them; lower it to 4 or less"):
        LLM(path, tensor_parallel_size=5, **OPTIONS)


@pytest.mark.usefixtures("capsys", "threads")
def test_a_start_away_from_a_terminal_logs_each_stage_as_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tiny_model(vocab_size=258), tmp_path)
    stages = ["loading weights", "meeting the other ranks", "preparing the cache", "warming up"]
    with caplog.at_level("INFO", "vmmkv_server.llm"), LLM(path, tensor_parallel_size=2, **OPTIONS):
        assert [record.getMessage() for record in caplog.records][:4] == [f"{path}: {stage}" for stage in stages]


def test_a_model_without_a_plan_is_refused(tmp_path: Path, threads: Threads) -> None:
    path = saved(model_of(small(hf.GPT2Config, vocab_size=258, num_key_value_heads=4)), tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"tensor_parallel_size=2 does not go with GPT2LMHeadModel; use 1: .* its attention"
    ):
        LLM(path, tensor_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize(
    ("part", "style", "said"),
    [
        (
            "layers.*.mlp.down_proj",
            "mla_kv_a_proj",
            r"layers\.0\.mlp\.down_proj, a Linear, by 'mla_kv_a_proj'; known are colwise",
        ),
        ("layers.*.input_layernorm", "colwise", r"layers\.0\.input_layernorm, a LlamaRMSNorm, by 'colwise'; known are colwise"),
    ],
)
def test_a_plan_with_a_style_that_is_not_known_is_refused(
    part: str, style: str, said: str, tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = hf.LlamaConfig.base_model_tp_plan
    monkeypatch.setattr(hf.LlamaConfig, "base_model_tp_plan", plan | {part: style})
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM; use 1: .*{said}"):
        LLM(path, tensor_parallel_size=2, model_impl="transformers", **OPTIONS)


def test_what_a_model_asks_for_and_is_not_done_is_said_by_ranks_too(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "INERT_ARGUMENTS", frozenset())
    path = saved(model_of(small(hf.Gemma2Config, vocab_size=258, head_dim=16)), tmp_path)
    with pytest.raises(RankFailed, match=r"rank 1: UnsupportedModel: Gemma2Attention asks for .*, which vmmkv does not do yet"):
        LLM(path, tensor_parallel_size=2, **OPTIONS)
