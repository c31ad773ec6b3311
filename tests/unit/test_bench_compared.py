"""Systems side by side: driven by arrivals, checked against each other, and what is wrong has no row but that it failed."""

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import serve, workloads
from bench.baselines.block_rows import BlockRows
from bench.serve import compared
from bench.serve.compared_sizes import ComparedSizes, Target
from bench.serve.drive import Drive, Outcome, Served
from bench.serve.models import model_of
from bench.serve.system import Begin, EngineSystem
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers
from bench.workloads import Ask
from tests.unit.test_bench_serve import quick, rows_of
from vmmkv.server.protocol import Abort, Failed, Generate, Output, Outputs


class FakeCore:
    """Answers a token a step to each of at most two requests, the sum of its prompt and so on."""

    def __init__(self, said: deque[Any]) -> None:
        self._said = said
        self.waiting: list[Generate] = []
        self.asked: list[Generate] = []
        self._left: dict[str, int] = {}
        self.most_tokens = 10**9
        self.refuses = ""

    @property
    def has_work(self) -> bool:
        return bool(self._left or self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._left)

    def receive(self, message: Generate | Abort) -> None:
        if isinstance(message, Abort):
            self.waiting = [request for request in self.waiting if request.request_id != message.request_id]
            self._left.pop(message.request_id, None)
            return
        self.asked.append(message)
        if message.request_id == self.refuses:
            self._said.append(Failed(request_id=message.request_id, message="no room"))
        self.waiting.append(message)

    def step(self) -> None:
        while self.waiting and len(self._left) < 2:
            request = self.waiting.pop(0)
            self._left[request.request_id] = min(request.max_new_tokens, self.most_tokens)
        outputs = []
        for name in list(self._left):
            self._left[name] -= 1
            reason = None if self._left[name] else "length"
            outputs.append(Output(request_id=name, token_ids=(7,), finish_reason=reason))
            if reason:
                del self._left[name]
        self._said.append(Outputs(outputs=outputs))

    def settle(self) -> None:
        pass


def ask(num_in: int, num_out: int, **options: Any) -> Ask:
    return Ask(prompt=np.arange(num_in, dtype=np.int32), num_out=num_out, **options)


def drive(*asks: Ask, **changes: Any) -> tuple[Outcome, FakeCore]:
    said: deque[Any] = deque()
    core = changes.pop("core", None) or FakeCore(said)
    said = core._said
    for name, value in changes.items():
        setattr(core, name, value)
    return Drive(core, said, asks).run(), core  # type: ignore[arg-type]


def test_every_request_has_its_tokens_at_ascending_times() -> None:
    outcome, _ = drive(ask(3, 4), ask(5, 1), ask(2, 6))
    assert [len(served.tokens) for served in outcome.served] == [4, 1, 6]
    assert all(served.token_s == sorted(served.token_s) and served.first_s > 0 for served in outcome.served)
    assert outcome.seconds == max(served.token_s[-1] for served in outcome.served)
    assert outcome.served[1].per_token_s is None and outcome.served[2].per_token_s is not None
    assert max(outcome.running) <= 2


def test_nobody_is_asked_before_it_arrives() -> None:
    outcome, core = drive(ask(3, 1, arrival_s=0.05), ask(4, 1), ask(5, 1, arrival_s=0.02))
    assert [len(message.prompt) for message in core.asked] == [4, 5, 3]
    assert [served.arrival_s for served in outcome.served] == [0.05, 0.0, 0.02]
    assert all(served.token_s[0] >= served.arrival_s for served in outcome.served)


def test_a_turn_waits_for_the_one_before_and_holds_what_was_said() -> None:
    second = Ask(prompt=np.array([0, 1, 2, 90, 91, 5, 6], np.int32), num_out=1, after=0, think_s=0.01)
    outcome, core = drive(ask(3, 2), second)
    assert core.asked[1].prompt == [0, 1, 2, 7, 7, 5, 6], "the answer, where the workload had tokens at random"
    assert outcome.served[1].arrival_s == pytest.approx(outcome.served[0].token_s[-1] + 0.01)


def test_a_short_answer_or_a_failure_is_no_outcome() -> None:
    with pytest.raises(WrongNumbers, match="request 1 has 3 tokens of 4"):
        drive(ask(3, 2), ask(3, 4), most_tokens=3)
    core = FakeCore(deque())
    with pytest.raises(WrongNumbers, match="request 1 failed: no room"):
        drive(ask(3, 2), ask(3, 4), ask(3, 50), core=core, refuses="1")
    assert not core.has_work and not core._said, "the next run finds nobody"
    outcome, _ = drive(ask(3, 5), core=core, refuses="")
    assert len(outcome.served[0].tokens) == 5


def test_who_waits_too_long_or_gets_slow_tokens_is_not_good() -> None:
    target = Target(first_s=1.0, per_token_s=0.1)
    served = [
        Served(0.0, [1, 1], [0.5, 0.6]),
        Served(0.0, [1, 1], [1.5, 1.6]),  # its first token is late
        Served(0.0, [1, 1, 1], [0.5, 0.7, 0.9]),  # the others are slow
        Served(2.0, [1], [2.9]),
    ]
    outcome = Outcome(served, 3.0, [])
    assert compared._num_good(outcome, target) == 2
    assert compared._num_tokens(outcome, 0.7) == 4 and compared._num_tokens(outcome, 2.9) == 8


def test_a_run_of_some_cases_has_their_rows_and_can_be_resumed_at_the_others(tmp_path: Path) -> None:
    options = ("--parts", "closed", "rates", "bursts", "--cases")
    settings = Settings(device=torch.device("cpu"), shape=SHAPES["wide"], quick=True, parts=options[1:4], cases=("chat", "8"))
    wanted = {"wide closed": ("chat",), "wide rates": ("8",), "wide bursts": ("8",)}
    assert {name: piece.cases for name, piece in serve.pieces(settings).items()} == wanted
    of_chat = dataclasses.replace(settings, cases=("chat",))
    assert list(serve.pieces(of_chat)) == ["wide closed"]
    assert set(serve.absent(of_chat)) == {"rates", "bursts"} and not serve.absent(settings)
    turned = dataclasses.replace(settings, cases=("skewed", "chat", "chat"))
    assert serve.pieces(turned)["wide closed"].cases == ("chat", "skewed"), "the same run by whatever order"
    of_another_suite = dataclasses.replace(settings, parts=())
    assert not any(piece.cases for piece in serve.pieces(of_another_suite).values())
    assert quick(tmp_path, *options, "skewed", "8", "--repeat", "1") == 0
    asked = {row["workload"].partition("closed: ")[2].partition(":")[0] or row["workload"] for row in rows_of(tmp_path)}
    assert "skewed" in asked and len(asked) == 3
    assert all(each == "skewed" or ", 8 requests/s, " in each for each in asked)


def test_a_system_that_says_something_else_has_a_row_that_says_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = EngineSystem.begins

    def wrong(self: EngineSystem, prompts: Any, num_tokens: int) -> list[Begin]:
        said = real(self, prompts, num_tokens)
        if self.name != "paged 16":
            return said
        return [
            Begin(each.tokens, [{token: p - place for token, p in at.items()} for place, at in enumerate(each.likeliest)])
            for each in said
        ]

    monkeypatch.setattr(EngineSystem, "begins", wrong)
    assert quick(tmp_path, "--parts", "closed", "rates", "--repeat", "1") == 1
    found = rows_of(tmp_path)
    assert found and {row["metric"] for row in found} == {"failed"}
    assert "first tokens of paged 16 are off by" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["closed", "rates", "bursts"])
def test_blocks_whose_first_key_is_lost_have_a_row_that_says_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """Of each sequence and layer one key of many: most of what is likely stays likely."""
    honest = BlockRows.read

    def read(self: BlockRows, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k_TKD, v_TKD = honest(self, *arguments)
        k_TKD[0] = 0
        return k_TKD, v_TKD

    monkeypatch.setattr(BlockRows, "read", read)
    case = "uniform" if part == "closed" else "8"
    assert quick(tmp_path, "--parts", part, "--cases", case, "--repeat", "1") == 1
    assert [row["metric"] for row in rows_of(tmp_path)] == ["failed"]
    assert "first tokens of paged 16 are off by" in capsys.readouterr().out


def test_an_answer_that_goes_wrong_behind_its_first_tokens_has_a_row_that_says_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = EngineSystem.run

    def run(self: EngineSystem, workload: workloads.Workload) -> Outcome:
        outcome = honest(self, workload)
        if self.name == "static 512":
            outcome.served[1].tokens[-1] += 1
        return outcome

    monkeypatch.setattr(EngineSystem, "run", run)
    assert quick(tmp_path, "--parts", "closed", "rates", "--cases", "uniform", "8", "--repeat", "1") == 1
    assert [row["metric"] for row in rows_of(tmp_path)] == ["failed", "failed"]
    assert "static 512 has other answers than vmmkv has in its first run, to requests [[1]]" in capsys.readouterr().out


def test_every_system_beside_the_first_has_a_row_of_how_far_it_agrees(tmp_path: Path) -> None:
    assert quick(tmp_path, "--parts", "closed", "rates", "bursts", "--cases", "uniform", "8", "--repeat", "2") == 0
    found: dict[str, dict[str, float]] = {}
    for row in rows_of(tmp_path):
        if "vmmkv" in row["metric"]:
            of_workload = found.setdefault(row["workload"], {})
            of_workload[f"{row['system']}: {row['metric']}"] = row["p50"]
    assert len(found) == 3
    for of_workload in found.values():
        assert {name for name, share in of_workload.items() if share == 100} == {
            *("paged 16: same answers as vmmkv", "static 512: same answers as vmmkv")
        }
        assert {name for name, share in of_workload.items() if share <= 0.1} == {
            *("paged 16: first tokens off those of vmmkv by", "static 512: first tokens off those of vmmkv by")
        }


def test_sizes_fit_their_limits() -> None:
    for small in (True, False):
        sizes = ComparedSizes.of(model_of("llama-3.1-8b", tiny=small), 0, small=small, max_num_batched_tokens=None)
        for workload in (*sizes.closed, sizes.open):
            assert all(len(each.prompt) + each.num_out <= sizes.limits.max_tokens for each in workload.asks)
        for rate in sizes.rates:
            arriving = sizes.arriving(rate, 1.0, 0)
            assert len(arriving.asks) >= sizes.least
            assert arriving.asks[-1].arrival_s == max(each.arrival_s for each in arriving.asks) > 0


def test_turns_of_a_conversation_follow_each_other() -> None:
    made = workloads.multi_turn(seed=0, vocabulary=50, count=2, max_tokens=200, turns=2, new=(5, 9), out=(3, 5), think_s=0.0)
    outcome, core = drive(*made.asks)
    assert len(outcome.served) == 4
    for index, each in enumerate(made.asks):
        if each.after is not None:
            message = next(asked for asked in core.asked if asked.request_id == str(index))
            assert len(message.prompt) == len(each.prompt)
            assert outcome.served[index].arrival_s >= outcome.served[each.after].token_s[-1]
