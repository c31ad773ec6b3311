"""A steady step takes nothing from the host but its launches, and costs the host the same whatever the context."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vmmkv
from tests.engine.conftest import VOCABULARY, Harness, MakeHarness, prompt_of, tiny_model
from vmmkv import KVCache
from vmmkv.memory.mapper import Mapper
from vmmkv_kernels import reference
from vmmkv_server.engine import engine, runner
from vmmkv_server.engine.ranking import Ranked, Ranking
from vmmkv_server.engine.request import Status
from vmmkv_server.engine.uploads import Uploads

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.001},
    "penalised": {"temperature": 0.9, "frequency_penalty": 0.3, "logit_bias": {5: 1.0}},
    "at least": {"temperature": 0.9, "min_tokens": 250, "stop_token_ids": [3, 9]},
}
FROM_THE_HOST = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "Tensor", "scalar_tensor", "pin_memory"}
"""Ways to make a tensor of numbers that the device does not have; `to` and `copy_` between devices are looked for apart."""


class Made(TorchFunctionMode):
    """Counts, by name, what makes tensors from data of the host."""

    def __init__(self, names: Counter[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in FROM_THE_HOST:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Lifted(TorchDispatchMode):
    """Counts what torch itself makes of the host's data: numbers become tensors by `lift_fresh`."""

    def __init__(self, names: Counter[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            self.names["lifted"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What is made from the host's data meanwhile."""
    names: Counter[str] = Counter()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            names[real.__name__] += 1
            return real(*args, **options)

        return count

    with monkeypatch.context() as patch, Made(names), Lifted(names):
        for owner, name in ((torch, "from_numpy"), (Uploads, "into"), (Uploads, "pack")):  # which no mode sees
            patch.setattr(owner, name, counting(getattr(owner, name)))
        yield names


def steady(harness: MakeHarness, sampling: str, **options: Any) -> Harness:
    """A batch in which all decode, and none ends soon."""
    one = harness(ours=True, slots=8, share=True, **options)
    for index in range(5):
        one.ask(str(index), prompt_of(20 + index, index), 300, seed=index, **SAMPLING[sampling])
    for _ in range(10):
        one.engine.step()
    assert len(one.engine.scheduler.running) == 5
    return one


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_steady_step_takes_nothing_from_the_host(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, sampling: str
) -> None:
    one = steady(harness, sampling)
    monkeypatch.setattr(engine, "SNAPSHOT_S", float("inf"))
    uploads = one.runner.uploads.count
    with watched(monkeypatch) as names:
        for _ in range(50):
            one.engine.step()
    assert names == {}
    assert one.runner.uploads.count == uploads
    one.run()


def test_new_requests_of_a_step_take_three_uploads(harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt is one upload, a batch of other rows another; then there are none again."""
    one = steady(harness, "sampled", max_sequences=8)
    before = one.runner.uploads.count
    with watched(monkeypatch) as names:
        for index in range(2):
            one.ask(f"new {index}", prompt_of(9, index), 4, temperature=1.0)
        one.engine.step()
        assert names["pack"] + names["into"] == 2, "how the new ones are sampled, and the step with their prompts"
        for _ in range(2):
            one.engine.step()
            assert names["pack"] + names["into"] == 3, "the slots that decode now"
        assert one.runner.uploads.count == before + 3
    assert names["from_numpy"] >= 3
    with watched(monkeypatch) as names:
        torch.tensor([1, 2])
        torch.as_tensor(np.zeros(2))
    assert names["tensor"] == names["as_tensor"] == 1 and names["lifted"] >= 1
    one.run()


def test_parts_are_packed_into_one_copy_each_aligned() -> None:
    uploads = Uploads(torch.device("cpu"))
    parts: list[Any] = [[1, 2, 3], np.array([4], np.int64), [], [5, 6, 7, 8, 9]]
    packed = uploads.pack(parts)
    assert [each.tolist() for each in packed] == [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]]
    assert all(each.dtype == torch.int32 and each.data_ptr() % 16 == 0 for each in packed if len(each))
    assert len({each.untyped_storage().data_ptr() for each in packed}) == 1
    assert uploads.count == 1
    target = torch.zeros(3, dtype=torch.int32)
    uploads.into(target, np.array([7, 8, 9], np.int32))
    assert target.tolist() == [7, 8, 9] and uploads.count == 2


ROOT = Path(vmmkv.__file__).parents[1]
TOKENS_A_PAGE = 64
SEQUENCES = 3


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of the functions of this project, by file and name, and of all others of Python and of C together."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)) and ".venv" not in path:
            calls[f"{Path(path).name}:{frame.f_code.co_qualname}"] += 1
        else:
            calls["elsewhere"] += event in ("call", "c_call")

    gc.disable()  # its callbacks are no part of a step
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def steady_over_pages(harness: MakeHarness, num_tokens: int, *, share: bool) -> Harness:
    """All decode, with as many tokens and a few, each of them at another place in its page."""
    model = tiny_model(num_key_value_heads=4, head_dim=512)  # a row of 32 KiB
    sizes = {"slots": 2 * SEQUENCES, "max_sequences": SEQUENCES, "budget_pages": 200, "step_tokens": 4096}
    one = harness(model, ours=True, share=share, **sizes)
    for index in range(SEQUENCES):
        prompt = [(7 * index + each) % VOCABULARY for each in range(num_tokens + 5 * index)]
        one.ask(str(index), prompt, 4 * TOKENS_A_PAGE)
    for _ in range(10):
        one.engine.step()
    assert len(one.engine.scheduler.running) == SEQUENCES
    assert all(request.status is Status.DECODING for request in one.engine.scheduler.running)
    return one


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_decode_step_makes_the_same_calls_whatever_the_context(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    # What depends on the clock: how far ahead is mapped, how much of it fits into a step, when a report is due.
    monkeypatch.setattr(engine, "SNAPSHOT_S", float("inf"))
    monkeypatch.setattr(KVCache, "lookahead_tokens", lambda cache, step_us: 2)
    monkeypatch.setattr(Mapper, "pages_within", lambda mapper, budget_us: 100)
    found = []
    for num_tokens in (TOKENS_A_PAGE, 12 * TOKENS_A_PAGE):
        one = steady_over_pages(harness, num_tokens, share=share)
        one.engine.step_us = 1e15  # there is time for whatever there is to do
        before = one.cache.stats().driver_calls
        with counted() as calls:
            for _ in range(TOKENS_A_PAGE):
                one.engine.step()
        after = one.cache.stats().driver_calls
        found.append((calls, {call: after[call] - before.get(call, 0) for call in after}))
        one.run()
        one.close()
    (short_calls, short_driver), (long_calls, long_driver) = found
    assert short_driver == long_driver
    assert short_driver["map"] == SEQUENCES, "pages end while it is counted"
    assert short_calls["engine.py:Engine.step"] == TOKENS_A_PAGE
    assert short_calls == long_calls


def test_rows_are_ranked_by_prefill_s_log_sum_exps_where_each_sequence_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefill` gives none of a sequence of one query."""
    given: list[torch.Tensor | None] = []
    monkeypatch.setattr(reference, "column_sums", lambda *_, lse_LNH, **options: given.append(lse_LNH))
    lse_NH = torch.randn(12, 2)
    for counts in ((3, 2), (3, 1)):
        ranked = [Ranked(lambda sums_T: None, slot, 8, count, 1) for slot, count in enumerate(counts)]
        ranking = Ranking(ranked, {0: 5, 1: 12}, Uploads(torch.device("cpu")))
        ranking.add(torch.zeros(1, 12, 2, 4), torch.zeros(1, 2, 8, 1, 4), None, lse_NH=lse_NH)
    several, beside_one = given
    assert several is not None and torch.equal(several[0], lse_NH[[2, 3, 4, 10, 11]])
    assert beside_one is None


@pytest.mark.parametrize("call", ["capture_begin", "capture_end"])
def test_an_interrupted_capture_leaves_the_current_stream_and_is_reset(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Fences are made on the current stream: on another one they would miss what was launched before."""
    default, capturing = (Mock(device=torch.device("cuda:0")) for _ in range(2))
    current, graph = [default], Mock(**{f"{call}.side_effect": KeyboardInterrupt})
    monkeypatch.setattr(runner, "capture_stream", lambda index: capturing)
    for name in ("current_device", "synchronize", "empty_cache", "_get_device_index"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    one = runner.Runner.__new__(runner.Runner)
    one.cuda_graphs = []
    with pytest.raises(KeyboardInterrupt):
        one.captured(lambda: None, None)
    assert capturing in current and current[-1] is default
    one.close()
    graph.reset.assert_called_once()
