"""The benchmarks run, check before they time, and write rows that can be read again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import append, driver_calls, gpu_clocks, kernels, run, suites
from bench.marks import MARKS
from bench.recorded import newest, read
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers, exact, summarize


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads of torch's that spin would take the cores from what is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(folder: Path, suite: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{suite}.jsonl").read_text().splitlines()]


def measured(tmp_path: Path, suite: str, *options: str) -> list[dict[str, Any]]:
    """The rows of a quick run on the CPU."""
    arguments = (suite, "--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc123", "--seed", "7", *options)
    assert run.main(arguments) == 0
    return rows_of(tmp_path, suite)


def test_what_a_gpus_clocks_were_is_in_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "1980, 3201, 650.10, 61\n1755, 3201, [N/A], 63\n1755, 3201"  # the last is cut off
    command = tmp_path / "nvidia-smi"
    command.write_text(
        f"#!/bin/sh\nprintf '{lines}'\necho \"$@\" > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/asked\nexec sleep 60\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    with gpu_clocks.watched(torch.device("cuda:0"), "serve", "serve tiny") as rows:
        until_s = time.monotonic() + 30
        while not (tmp_path / "asked").exists() and time.monotonic() < until_s:
            time.sleep(0.01)
    assert "--id=GPU-12ab" in (tmp_path / "asked").read_text()
    found = {row.metric: (row.summary.p20, row.summary.p80, row.summary.n, row.unit) for row in rows}
    assert found == {
        "SM clock": (1755, 1980, 2, "MHz"),
        "memory clock": (3201, 3201, 2, "MHz"),
        "power": (650.1, 650.1, 1, "W"),
        "temperature": (61, 63, 2, "°C"),
    }
    assert {(row.suite, row.workload, row.system) for row in rows} == {("serve", "serve tiny: GPU", "GPU")}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_without_a_gpu_or_nvidia_smi_there_are_no_clocks(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    with gpu_clocks.watched(torch.device(device), "serve", "serve tiny") as rows:
        pass
    assert rows == []


def test_a_gpu_of_which_torch_knows_no_uuid_has_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="GPU"))
    with gpu_clocks.watched(torch.device("cuda:0"), "serve", "serve tiny") as rows:
        pass
    assert rows == []


def test_driver_calls_are_timed_alone_and_beside_a_thread(tmp_path: Path) -> None:
    rows = measured(tmp_path, "driver_calls")
    calls = {"reserve", "create", "map", "set_access", "unmap", "release", "fence", "memory", "export_fd", "synchronize"}
    for handle in ("2.0 MiB", "32.0 MiB"):
        for condition in ("alone", "beside a busy thread"):
            timed = {row["metric"] for row in rows if row["workload"] == f"{handle} handle, {condition}"}
            assert calls <= timed


def test_append_takes_its_sizes_from_the_command_line(tmp_path: Path) -> None:
    rows = measured(tmp_path, "append", "--sequences", "3", "--steps", "12", "--work", "sleep")
    assert all(row["workload"].startswith("3 sequences") for row in rows)
    assert {row["n"] for row in rows if row["metric"] == "step"} == {12}


def test_append_refuses_to_report_rows_that_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmmkv.kernels.reference.append", lambda *arguments: None)
    with pytest.raises(WrongNumbers, match="are not what was appended there"):
        append.run(quick(), report_in(tmp_path))
    assert not (tmp_path / "append.jsonl").exists()


def test_a_suite_that_fails_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Settings, report: Report) -> None:
        raise WrongNumbers("two and two are five")

    monkeypatch.setattr(append, "run", fail)
    arguments = ("append", "driver_calls", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert run.main(arguments) == 1
    assert rows_of(tmp_path, "driver_calls")
    printed = capsys.readouterr().out
    assert "two and two are five" in printed
    assert "FAILED: append" in printed
    (row,) = rows_of(tmp_path, "append")
    assert (row["workload"], row["metric"], row["unit"], row["p50"]) == ("append", "failed", "runs", 1)


def test_each_of_many_failures_has_a_row_by_its_note_and_what_has_one_gets_no_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: Settings, report: Report) -> None:
        errors = [WrongNumbers(text) for text in ("one", "two", "three")]
        errors[0].add_note("64x8K: FA3")
        errors[1].add_note("a workload that has its row")
        report.add(Row.failed("append", "a workload that has its row", "vmmkv"))
        raise ExceptionGroup("two ways", [errors[0], ExceptionGroup("deeper", errors[1:])])

    monkeypatch.setattr(append, "run", fail)
    assert run.main(("append", "--device", "cpu", "--out", str(tmp_path))) == 1
    failed = [(row["workload"], row["metric"]) for row in rows_of(tmp_path, "append")]
    assert failed == [("a workload that has its row", "failed"), ("64x8K: FA3", "failed"), ("append", "failed")]


def test_a_suite_that_only_writes_that_it_has_failed_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "run", lambda settings, report: report.add(Row.failed("append", "all", "vmmkv")))
    assert run.main(("append", "--device", "cpu", "--out", str(tmp_path))) == 1
    assert len(rows_of(tmp_path, "append")) == 1


class Counted:
    """Suites that count their runs instead of measuring, and fail as often as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.failing: set[str] = set()
        for module in (append, driver_calls, kernels):
            name = module.__name__.removeprefix("bench.")
            monkeypatch.setattr(module, "run", lambda settings, report, name=name: self.count(name, settings))

    def count(self, name: str, settings: Settings) -> None:
        name = " ".join((name, *settings.parts))
        self.ran.append(name)
        if name in self.failing:
            raise WrongNumbers(name)

    def run(self, out: Path, *arguments: str) -> list[str]:
        """What runs, by suite and part."""
        self.ran.clear()
        run.main(("run", "--device", "cpu", "--out", str(out), *arguments))
        return list(self.ran)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


THREE = ("--suite", "append", "driver_calls", "kernels", "--commit", "abc")


def test_resume_runs_what_failed_or_never_ran_and_nothing_else(tmp_path: Path, counted: Counted) -> None:
    counted.failing = {"append", "kernels quantised"}
    everything = ["append", "driver_calls", *(f"kernels {part}" for part in kernels.PARTS)]
    assert counted.run(tmp_path, *THREE) == everything
    assert counted.run(tmp_path, *THREE, "--resume") == ["append", "kernels quantised"]
    counted.failing = set()
    assert counted.run(tmp_path, *THREE, "--resume") == ["append", "kernels quantised"]
    assert counted.run(tmp_path, *THREE, "--resume") == []
    assert counted.run(tmp_path, *THREE) == everything, "only --resume leaves anything out"


@pytest.mark.parametrize("other", [("--commit", "abd"), ("--seed", "1"), ("--quick",), ("--repeat", "3"), ("--work", "sleep")])
def test_resume_skips_only_what_was_measured_alike(tmp_path: Path, counted: Counted, other: tuple[str, ...]) -> None:
    one = ("--suite", "append", "--commit", "abc", "--resume")
    assert counted.run(tmp_path, *one) == ["append"]
    assert counted.run(tmp_path, *one, *other) == ["append"]
    assert counted.run(tmp_path, *one) == []


def test_resume_skips_nothing_where_the_commit_does_not_say_what_ran(
    tmp_path: Path, counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--suite", "append", "--commit", "abc-changed", "--resume")
    assert counted.run(tmp_path, *one) == counted.run(tmp_path, *one) == ["append"]
    assert "nothing is skipped: the commit is abc-changed" in capsys.readouterr().out


def test_a_mark_that_a_killed_run_cut_off_is_none_and_spoils_no_other(tmp_path: Path, counted: Counted) -> None:
    assert counted.run(tmp_path, *THREE[:3], *THREE[4:]) == ["append", "driver_calls"]
    marks = tmp_path / MARKS
    marks.write_bytes(marks.read_bytes()[:-20])
    assert counted.run(tmp_path, *THREE[:3], *THREE[4:], "--resume") == ["driver_calls"]
    assert counted.run(tmp_path, *THREE[:3], *THREE[4:], "--resume") == []


def test_a_row_that_a_killed_run_cut_off_is_said_and_spoils_no_other(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    for number in range(3):
        report.add(Row(suite="append", workload="w", system=f"s{number}", metric="m", unit="us", summary=exact(number, 1)))
        if number == 1:
            path = tmp_path / "append.jsonl"
            path.write_bytes(path.read_bytes()[:-9])
    reading = read([tmp_path])
    assert [one.row.system for one in reading.rows] == ["s0", "s2"]
    assert reading.cut == (f"{path}:2",)


@pytest.fixture
def harmless_sigterm() -> Iterator[None]:
    """Who runs the tests is not ended by one that nobody takes."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("what", ["Ctrl-C", "SIGTERM"])
@pytest.mark.usefixtures("harmless_sigterm")
def test_ctrl_c_or_sigterm_keeps_what_has_finished_and_says_how_to_go_on(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    ended: list[str] = []

    def interrupt(settings: Settings, report: Report) -> None:
        try:
            if what == "Ctrl-C":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        finally:
            if what == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)  # as `timeout` does
            ended.append(what)

    def measure(settings: Settings, report: Report) -> None:
        report.add(Row(suite="append", workload="w", system="measured", metric="m", unit="us", summary=exact(1, 1)))

    arguments = ("run", "--device", "cpu", "--out", str(tmp_path), *THREE)
    with monkeypatch.context() as patch:
        patch.setattr(append, "run", measure)
        patch.setattr(driver_calls, "run", interrupt)
        assert run.main(arguments) == 130
    assert ended == [what], "the ending was broken off"
    printed = capsys.readouterr().out
    assert "measured" in printed
    assert "1 rows appended" in printed
    assert printed.endswith(f"stopped by {what}; continue with --resume\n")
    assert counted.run(tmp_path, *THREE, "--resume") == ["driver_calls", *(f"kernels {part}" for part in kernels.PARTS)]


def test_resume_says_so_where_nothing_has_finished_alike(
    tmp_path: Path, counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--suite", "append", "--resume", "--commit")
    for commit, said in (("abc", True), ("abc", False), ("abd", True)):
        counted.run(tmp_path, *one, commit)
        assert ("--resume: nothing of this has finished in" in capsys.readouterr().out) is said


def test_rows_that_are_read_are_those_that_were_written_and_the_newest_stand(tmp_path: Path) -> None:
    first = report_in(tmp_path)
    row = Row(suite="append", workload="w", system="s", metric="m", unit="us", summary=exact(1.5, 9), bound=2.0)
    first.add(row)
    (one,) = read([tmp_path]).rows
    assert (one.row, one.provenance) == (row, first.file.provenance)
    report_in(tmp_path).add(Row(suite="append", workload="w", system="s", metric="m", unit="us", summary=exact(2.5, 9)))
    assert [one.row.summary.p50 for one in newest(read([tmp_path]).rows)] == [2.5]
    with pytest.raises(ValueError, match=r"no row of commit ffff in .*; there are abc123"):
        read([tmp_path], "ffff")
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        read([tmp_path / "nowhere"])


def test_a_line_that_is_no_row_is_refused_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"suite": "append"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:1: no row: it has no workload"):
        read([tmp_path])


def test_rows_are_appended_and_stay(tmp_path: Path) -> None:
    first = measured(tmp_path, "driver_calls")
    assert run.main(("driver_calls", "--quick", "--device", "cpu", "--out", str(tmp_path))) == 0
    rows = rows_of(tmp_path, "driver_calls")
    assert rows[: len(first)] == first
    assert len(rows) == 2 * len(first)


def test_no_table_is_upset_by_what_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suite in suites.SUITES:
        report = report_in(tmp_path)
        for workload in (
            suite,
            f"{suite} part",
            "llama-3.1-8b decode 64x8K: FA3, cudaMalloc",
            "4 requests of 1 + 1 tokens, cold: none",
        ):
            report.add(Row.failed(suite, workload, "-"))
        suites.print_tables(suite, report)
        assert suite in capsys.readouterr().out


def test_progress_is_on_stderr_and_results_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.report._LOG_EVERY_S", 0.0)
    report = report_in(tmp_path)
    with report.progress("append", 2) as begin:
        for name in ("one", "two"):
            begin(name)
            report.say(f"said of {name}")
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["said of one", "said of two"]
    assert printed.err.splitlines() == ["append: 1/2 one", "append: 2/2 two"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["append", "--help"]])
def test_help_has_suites_and_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments == ["--help"]:
        assert run.main(arguments) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            run.main(arguments)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*suites.SUITES, *suites.GROUPS, "python -m bench compare", "examples:"))


def test_help_says_what_needs_a_gpu_and_where_flash_attention_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "on a GPU alone" in printed and "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" in printed
    assert all(name in printed.partition("on a GPU alone")[2] for name in suites.SUITES)


def as_module(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = as_module(stdout=nobody)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("package", ["torch", "matplotlib"])
def test_ctrl_c_while_something_is_loaded_is_one_line(tmp_path: Path, package: str) -> None:
    """What is loaded with the command line, and what is loaded with a command."""
    (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt")
    done = as_module("report", stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")


def test_without_a_suite_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    printed = capsys.readouterr().out
    assert all(suite in printed for suite in run.SUITES)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (["all"], suites.ALL),
        (["quality", "all"], tuple(run.SUITES)),
        (["quality", "append", "quality"], ("quality", "append")),
        (["alloc"], ("driver_calls", "append", "elastic")),
        (["append", "alloc"], ("append", "driver_calls", "elastic")),
    ],
)
def test_names_and_groups_stand_for_suites_and_all_leaves_quality_out(named: list[str], wanted: tuple[str, ...]) -> None:
    assert tuple(suites.chosen(named)) == wanted


def test_run_without_a_suite_runs_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run, "_succeeds", lambda name, piece, settings, report: ran.append(name) or True)
    assert run.main(["run", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert tuple(dict.fromkeys(ran)) == suites.ALL


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["apend"], "no command or suite apend; commands: run, report, compare, table; suites: driver_calls"),
        (["append", "apend"], "no suite apend; there are"),
        (["run", "waste"], "--suite waste"),
        (["run", "--quick", "wast"], "no suite wast; there are"),
        (["append", "--stesp", "3"], "unrecognized arguments: --stesp 3"),
        (["append", "--steps", "0"], "--steps 0: at least 1"),
        (["serve", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0: at least 1"),
        (["append", "--seed", "-1"], "--seed -1: at least 0"),
        (["append", "--sequences", "1000000"], "--sequences 1000000: at most 65,536"),
        (["append", "--out", "/dev/null/x"], "--out /dev/null/x cannot be written to"),
        (["append", "--out", __file__], "it is no folder"),
        (["append", "--device", ""], "there are cpu, cuda, cuda:N, and auto"),
        (["append", "--device", "cpu:1"], "there are cpu, cuda, cuda:N, and auto"),
        (["append", "--device", "nowhere"], "nowhere"),
        (["kernels", "--parts", "deocde"], "no part deocde; kernels has decode"),
        (["all", "--device", "cpu", "--cases", "64x8K"], "no case 64x8K on a CPU: decode has 2x96"),
        (["kernels", "--fa3", "nowhere.so"], "nowhere.so: no such file"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    printed = capsys.readouterr().err
    assert complaint in printed
    assert printed.startswith("python -m bench") and printed.count("\n") == 1


def test_percentiles_are_samples() -> None:
    summary = summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (summary.p20, summary.p50, summary.p80, summary.p99, summary.n) == (1.0, 3.0, 4.0, 5.0, 5)
    assert exact(3, 10).p99 == 3
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_the_shape_of_llama_has_the_rows_of_the_design() -> None:
    assert SHAPES["llama-3.1-8b"].layout.row_bytes == 128 * 1024
    assert SHAPES["smollm2-135m"].layout.row_bytes == 22.5 * 1024


def quick() -> Settings:
    return Settings(device=torch.device("cpu"), shape=SHAPES["wide"], quick=True)


def report_in(folder: Path) -> Report:
    return Report(RowFile(folder, Provenance.collect(torch.device("cpu"), seed=0, quick=True, commit="abc123")))


def test_a_report_without_what_draws_says_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run._COMMANDS, "report", "bench.page_that_is_not")
    assert run.main(["report"]) == 1
    assert "pip install -e '.[bench]'" in capsys.readouterr().err
