"""The conformance suite passes what is right, and each of its checks catches what is wrong in its way."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.adapters import broken
from vmmkv.adapters import attention
from vmmkv.driver import cuda
from vmmkv.errors import MissingDriver
from vmmkv.memory.pool import Pool
from vmmkv.testing import CheckError, ConformanceError, Report, Result, Worker, conformance
from vmmkv.testing import __main__ as command
from vmmkv.testing.checks import CHECKS, Subject, open_memory
from vmmkv.testing.conformance import markdown
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda:0"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
ON_A_CPU = {"growth between graph replays", "order among streams"} if INTERPRETED else set()

CPU = {"device": "cpu", "heads": 2, "kv_heads": 1}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def nightly(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


def not_passed(report: Report) -> set[str]:
    return {result.check for result in report.results if result.status != "passed"}


def wrong(report: Report) -> set[str]:
    return {result.check for result in report.results if result.status in ("failed", "crashed")}


def report_of_adapter(attention_fn: Callable[..., torch.Tensor], form: str, worker: Worker) -> Report:
    odd = {"heads": 6, "kv_heads": 3, "head_dim": 80}  # K and V of a layer are no power of two
    return conformance(attention_fn, form=form, device=DEVICE, dtype=DTYPE, capturable=False, worker=worker, **odd)


@pytest.mark.parametrize("attention_fn", [decode, nightly(prefill)], ids=["decode", "prefill"])
def test_the_projects_kernels_conform(attention_fn: Callable[..., torch.Tensor], worker: Worker) -> None:
    form = "prefill" if attention_fn is prefill else "decode"
    shape = {"heads": 2, "kv_heads": 1} if INTERPRETED else {"heads": 32, "kv_heads": 8, "head_dim": 128}
    report = conformance(attention_fn, form=form, device=DEVICE, dtype=DTYPE, worker=worker, **shape)
    report.raise_if_failed()
    assert not_passed(report) == ON_A_CPU


@pytest.mark.parametrize(
    ("attention_fn", "form"),
    [(attention.sdpa_decode, "decode"), (attention.sdpa_decode_grouped, "decode"), (attention.sdpa_prefill, "prefill")],
)
def test_the_adapters_of_torch_conform(attention_fn: Callable[..., torch.Tensor], form: str, worker: Worker) -> None:
    report = report_of_adapter(attention_fn, form, worker)
    report.raise_if_failed()
    assert not_passed(report) == {"growth between graph replays", *ON_A_CPU}


@pytest.mark.nightly
def test_flex_attention_conforms_but_for_far_rows_on_a_gpu(worker: Worker) -> None:
    report = report_of_adapter(attention.flex_prefill, "prefill", worker)  # which flex_decode calls
    reasons = {result.check: result.detail for result in report.results if result.status != "passed"}
    if not INTERPRETED:
        assert "elements apart reach past 2**31 elements" in reasons.pop("64-bit token offsets")
    assert reasons.keys() == {"growth between graph replays", *ON_A_CPU}
    assert wrong(report) <= {"64-bit token offsets"}


@pytest.mark.parametrize("guard_tokens", [broken.TILE - 2, broken.TILE - 1])
def test_a_guard_ends_what_is_mapped_to_the_row(guard_tokens: int, worker: Worker) -> None:
    """A kernel that loads whole tiles needs a guard of a tile less a row."""
    options = {**CPU, "guard_tokens": guard_tokens, "checks": ["unmapped past the guard"], "worker": worker}
    (result,) = conformance(broken.loads_whole_tiles, **options).results
    assert result.status == ("passed" if guard_tokens >= broken.TILE - 1 else "crashed")
    if guard_tokens < broken.TILE - 1:
        assert result.detail == "SIGSEGV: it touched memory that is not mapped"


@pytest.mark.parametrize(
    ("attention_fn", "caught_by"),
    [
        (broken.loads_whole_tiles, {"NaN past the length"}),
        (broken.takes_zeros_for_padding, {"stale rows past the length", "NaN past the length"}),
        (broken.scales_keys_in_place, {"aliased prefix", "64-bit token offsets"}),  # which maps few pages many times
        (broken.keeps_the_first_lengths, {"growth between calls"}),
    ],
)
def test_each_mistake_is_caught_where_it_shows_and_nowhere_else(
    attention_fn: Callable[..., torch.Tensor], caught_by: set[str], worker: Worker
) -> None:
    report = conformance(attention_fn, **CPU, guard_tokens=broken.TILE - 1, worker=worker)
    assert wrong(report) == caught_by
    assert not report.passed
    with pytest.raises(ConformanceError, match="is not right") as error:
        report.raise_if_failed()
    assert all(check in str(error.value) for check in caught_by)


@pytest.mark.parametrize(
    ("attention_fn", "check", "detail"),
    [
        (broken.takes_rows_for_contiguous, "strides", "NaN or infinity"),
        (broken.flattens_by_view, "strides", "it raised RuntimeError: view size is not compatible"),
        (broken.sees_one_page, "shuffled pages", "in a sequence of 130 tokens, query 0 of 1"),
        (broken.rotates_keys_in_place, "strides", "it wrote to row 0 of slot 12, which it is only to read"),
        (broken.writes_past_the_length, "stale rows past the length", "which is none of its own"),
        (broken.writes_to_the_next_layer, "strides", "it wrote to row 0 of slot 12"),
        (broken.writes_to_the_next_layer, "64-bit token offsets", "it wrote to row 0 of slot 1,"),
        (broken.returns_float64, "strides", "of torch.float64"),
        (broken.returns_nothing, "strides", "it returned NoneType, no tensor"),
        (functools.partial(broken.says, message="no kernel\nhere"), "aliased prefix", "it raised RuntimeError: no kernel"),
        (broken.ignores_slots, "64-bit slot offsets", "an error of"),
        (broken.reads_a_row_past, "aliased prefix", "an error of"),
    ],
)
def test_a_line_says_what_was_wrong(attention_fn: Callable[..., torch.Tensor], check: str, detail: str, worker: Worker) -> None:
    (result,) = conformance(attention_fn, **CPU, checks=[check], worker=worker).results
    assert result.status == "failed"
    assert detail in result.detail


@pytest.mark.parametrize(
    ("in_slots", "caught_by"),
    [(False, "64-bit token offsets"), (True, "64-bit slot offsets")],
)
def test_an_offset_of_32_bits_is_caught(in_slots: bool, caught_by: str, worker: Worker) -> None:
    attention_fn = functools.partial(broken.int32_offsets, in_slots=in_slots)
    report = conformance(attention_fn, **CPU, checks=["shuffled pages", caught_by], worker=worker)
    assert wrong(report) == {caught_by}


def test_queries_that_see_later_tokens_are_caught(worker: Worker) -> None:
    report = conformance(broken.sees_all_queries_as_last, form="prefill", **CPU, checks=["strides"], worker=worker)
    assert wrong(report) == {"strides"}


def test_what_has_not_run_for_want_of_a_gpu_says_so(worker: Worker) -> None:
    report = conformance(broken.ignores_slots, **CPU, checks=["order among streams"], worker=worker)
    assert str(report).endswith("order among streams  skipped  there are no streams on a CPU")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to test on")
@pytest.mark.parametrize(("waits", "is_waited_for"), [(False, True), (True, False), (True, True)])
def test_work_on_a_stream_without_order_is_caught(waits: bool, is_waited_for: bool, worker: Worker) -> None:
    attention_fn = functools.partial(broken.on_a_stream_of_its_own, waits=waits, is_waited_for=is_waited_for)
    report = conformance(attention_fn, device=DEVICE, dtype=DTYPE, checks=["order among streams"], worker=worker)
    assert wrong(report) == (set() if waits and is_waited_for else {"order among streams"})


def test_a_function_that_ends_the_process_is_no_result(worker: Worker) -> None:
    with pytest.raises(CheckError, match="exited with 7"):
        conformance(broken.exits, **CPU, checks=["strides"], worker=worker)


CALL = """
from vmmkv.adapters.attention import sdpa_decode
from vmmkv.testing import conformance

def decode(*tensors):
    return sdpa_decode(*tensors)

"""
RUN = "conformance({function}, device='cpu', checks=['strides']).raise_if_failed()"


@pytest.mark.parametrize(
    ("how", "function", "guarded", "said"),
    [
        nightly("stdin", "sdpa_decode", True, r"CheckError: strides: .* <stdin> is no file: write the script to a file"),
        nightly("command", "decode", True, r"CheckError: strides: .* at the top of a module, or of the file that is run"),
        nightly("command", "sdpa_decode", True, None),
        ("file", "decode", True, None),
        nightly("file", "decode", False, r'CheckError: strides: the child .* exited with 1 .* `if __name__ == "__main__":`'),
    ],
)
def test_a_script_that_a_child_process_cannot_import_is_told_what_works(
    how: str, function: str, guarded: bool, said: str | None, tmp_path: Path
) -> None:
    guard = 'if __name__ == "__main__":\n    ' if guarded else ""
    script, path = CALL + guard + RUN.format(function=function) + "\n", tmp_path / "script.py"
    path.write_text(script)
    arguments = {"stdin": ["-"], "command": ["-c", script], "file": [str(path)]}[how]
    given = {"input": script} if how == "stdin" else {"stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, *arguments], **given, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (said is None), done.stderr
    if said is not None:
        assert re.search(said, done.stderr.splitlines()[-1])
        assert how != "stdin" or "FileNotFoundError" not in done.stderr  # no child has been started


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_here_is_said_before_any_check(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(cuda, "load_bindings", lambda: None)
    monkeypatch.setattr(cuda, "start", Mock(side_effect=MissingDriver("there is none")))
    with pytest.raises(MissingDriver, match=r"^there is none$"), Worker() as own:
        conformance(attention.sdpa_decode, device=device, worker=own)
    assert own.pid is None


@pytest.mark.parametrize(
    ("message", "status", "is_replaced"),
    [
        ("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA", "crashed", True),
        nightly("Triton Error [CUDA]: an illegal instruction was encountered", "crashed", True),
        nightly("map: CUDA_ERROR_INVALID_PC (invalid program counter)", "crashed", True),
        nightly("CUDA error: the launch timed out and was terminated", "crashed", True),
        nightly("CUDA error: operation not supported on global/shared address space", "crashed", True),
        nightly("CUDA error: uncorrectable ECC error encountered", "failed", True),
        nightly("Triton Error [CUDA]: invalid argument", "failed", True),
        ("head_dim 64 is not supported", "failed", False),
    ],
)
def test_no_check_follows_an_error_of_cuda_in_its_process(message: str, status: str, is_replaced: bool, worker: Worker) -> None:
    options = {**CPU, "checks": ["aliased prefix"], "worker": worker}
    assert conformance(attention.sdpa_decode, **options).passed
    pid = worker.pid
    (result,) = conformance(functools.partial(broken.says, message=message), **options).results
    assert result.status == status
    assert (worker.pid != pid) == is_replaced
    assert result.detail.startswith("the CUDA context is lost: " if status == "crashed" else "it raised RuntimeError: ")


def test_a_check_that_gives_no_answer_is_ended() -> None:
    with Worker(timeout_s=0.2) as own:
        (result,) = conformance(broken.hangs, **CPU, checks=["strides"], worker=own).results
    assert (result.status, result.detail) == ("crashed", "no answer in 0.2 s")


def test_a_partial_can_be_tested_and_a_lambda_is_refused(worker: Worker) -> None:
    partial = functools.partial(decode, scale=64**-0.5)
    if INTERPRETED:
        assert conformance(partial, **CPU, dtype=DTYPE, checks=["strides"], worker=worker).passed
    with pytest.raises(ValueError, match="at the top of a module"):
        conformance(lambda *tensors: tensors[0], **CPU, worker=worker)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checks": ["speed"]}, "there are strides"),
        ({"form": "both"}, "decode or prefill"),
        ({"dtype": torch.int8}, "torch.float16"),
        ({"heads": 3, "kv_heads": 2}, "a multiple of kv_heads"),
        ({"guard_tokens": -1}, "at least 0"),
        ({"device": "meta"}, "'cpu' and 'cuda:0'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conformance(attention.sdpa_decode, **{"device": "cpu", **options})


def subject() -> Subject:
    return Subject(
        attention_fn=attention.sdpa_decode, form="decode", device=torch.device("cpu"), dtype=torch.float32, heads=2,
        kv_heads=1, head_dim=64, guard_tokens=0, error_ratio=2.0, error_floor=1e-5, capturable=False,
    )  # fmt: skip


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_pages_of_the_shuffled_check_are_shuffled(shuffled: bool) -> None:
    with open_memory(subject(), slots=1, shuffled=shuffled) as memory:
        sequence = memory.cache.open()
        for num_tokens in range(memory.page_rows, 9 * memory.page_rows, memory.page_rows):
            memory.write(sequence, num_tokens, past=0.0)
        (arena,) = memory.cache.slots.memory.arenas
        handles = [int(mapping.extent.handle) for mapping in arena.spans[sequence.slot].live()]  # by address
    assert len(handles) == 8
    assert (handles == sorted(handles)) is not shuffled


def test_a_check_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Pool] = []
    opened = Pool.__init__
    monkeypatch.setattr(Pool, "__init__", lambda self, *args, **options: (made.append(self), opened(self, *args, **options))[1])
    CHECKS["aliased prefix"](subject())
    (pool,) = made
    assert pool.closed
    assert pool.created_bytes == 0


def test_a_table_has_a_row_for_each_kernel_and_says_what_has_not_passed() -> None:
    results = (Result(check="strides", status="passed"), Result(check="growth", status="failed", detail="NaN"))
    reports = [Report(kernel=name, subject="decode", results=results) for name in ("first", "second")]
    lines = markdown(reports).splitlines()
    assert lines[:2] == ["| kernel | strides | growth |", "| --- | --- | --- |"]
    assert lines[2] == "| first | passed | failed |"
    assert lines[-1] == "- growth failed: NaN (first; second)"
    assert str(reports[0]).splitlines()[2] == "  growth   failed   NaN"


@pytest.mark.nightly
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU it takes bfloat16 and all of the GPU's kernels")
def test_the_command_prints_the_table_of_what_is_at_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = command.every_kernel()
    absent = [kernel for kernel in kernels if kernel.missing(torch.device("cpu"))]
    assert {kernel.library for kernel in absent} == {"flash_attn", "flash_attn_interface", "flashinfer"}
    monkeypatch.setattr(command, "every_kernel", lambda: (kernels[2], *absent))
    assert command.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert "| SDPA, decode | passed |" in "\n".join(printed)
    assert "- FlashAttention-2, decode: flash_attn is not installed" in printed
