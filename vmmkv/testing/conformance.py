"""The conformance suite: the public function, its report, and the child process in which the checks run.

The child is spawned, not forked: it has a CUDA context of its own to lose, and holds no other thread's lock. A fault in it is
reported. A check whose process dies has crashed, and the next check gets a new process, as after any CUDA error.
"""

import contextlib
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final, Literal

import torch

from vmmkv.arguments import whole
from vmmkv.driver.cuda import find_device
from vmmkv.errors import VmmkvError
from vmmkv.lifetime import Closing
from vmmkv.testing.checks import CHECKS, Form, Skip, Subject, Wrong

Status = Literal["passed", "failed", "crashed", "skipped"]
"""Outcome of a check. crashed: its process ended. skipped: the check does not apply, and `detail` says why."""


class ConformanceError(VmmkvError, AssertionError):
    """A kernel is not right on vmmkv memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check."""

    check: str
    status: Status
    detail: str = ""
    """The reason, if the check has not passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all checks of a kernel. `str` makes a table of them."""

    kernel: str
    subject: str
    """Form and guard of the function, and the shapes and device of the test."""
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Has nothing failed or crashed? What was skipped has not."""
        return not self._wrong()

    def raise_if_failed(self) -> None:
        """Raise an error if a check failed or crashed. Raises: ConformanceError with the lines of these checks."""
        if wrong := self._wrong():
            raise ConformanceError("\n".join([f"{self.kernel} ({self.subject}) is not right:", *self._lines(wrong)]))

    def __str__(self) -> str:
        return "\n".join([f"{self.kernel} ({self.subject})", *self._lines(self.results)])

    def _wrong(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.status in ("failed", "crashed"))

    def _lines(self, results: tuple[Result, ...]) -> list[str]:
        width = max((len(result.check) for result in self.results), default=0)
        return [f"  {result.check:{width}}  {result.status:7}  {result.detail}".rstrip() for result in results]


def markdown(reports: list[Report]) -> str:
    """A table with a row for each kernel and a column for each check; below it, why something has not passed."""
    checks = list(dict.fromkeys(result.check for report in reports for result in report.results))
    lines = [_row(["kernel", *checks]), _row(["---"] * (1 + len(checks)))]
    kernels_by_note: dict[str, list[str]] = {}
    for report in reports:
        by_check = {result.check: result for result in report.results}
        lines.append(_row([report.kernel, *(by_check[check].status if check in by_check else "" for check in checks)]))
        for result in report.results:
            if result.status != "passed":
                note = f"{result.check} {result.status}: {result.detail}"
                kernels_by_note.setdefault(note, []).append(report.kernel)
    notes = [f"- {note} ({'; '.join(kernels)})" for note, kernels in kernels_by_note.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_LOSSES: Final = (
    "illegal memory access",
    "launch timed out",
    "device-side assert",
    "hardware stack error",
    "illegal instruction",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
)
"""CUDA's texts of what a kernel does that loses the context; torch, Triton and the driver all cite them."""

_CUDA_ERRORS: Final = ("cuda error", "cuda_error_", "cudaerror", "error [cuda]")
"""Beginnings of CUDA errors in lower case: torch's, the driver's, the runtime's and Triton's."""

_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS)


class CheckError(VmmkvError):
    """A check could not be done, which says nothing about the kernel."""


class Worker(Closing):
    """A process for checks, started with the first one; several suites can share it, which saves seconds each."""

    def __init__(self, timeout_s: float = 300.0) -> None:
        """`timeout_s`: for one check; the default is many times what an interpreted kernel takes."""
        self._timeout_s = timeout_s
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process; None before the first check, and after one that spoils its process."""
        return None if self._process is None else self._process.pid

    def run(self, check: str, subject: Subject) -> Result:
        """Do one check. Raises: CheckError if it could not be done; ValueError if the function cannot be sent to a process."""
        try:
            payload = pickle.dumps((check, subject))
        except Exception as error:
            raise ValueError(
                f"{subject.name} cannot be sent to a child process ({error}): give a function at the top of a module, or a "
                f"functools.partial of one"
            ) from error
        if self._connection is None:
            _check_script(check)
        connection = self._connected()
        try:
            connection.send_bytes(payload)
            if not connection.poll(self._timeout_s):
                self.close()
                return Result(check=check, status="crashed", detail=f"no answer in {self._timeout_s:g} s")
            answer, is_spent = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return self._after_death(check)
        if is_spent:
            self.close()
        if isinstance(answer, str):
            raise CheckError(f"{check}: {answer}")
        assert isinstance(answer, Result)
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _connected(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()  # so that its death ends the pipe
        return self._connection

    def _after_death(self, check: str) -> Result:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        self.close()
        if code >= 0:
            raise CheckError(
                f"{check}: the child process exited with {code} before it answered. A script that calls this is to do so under "
                f'`if __name__ == "__main__":`, since the child imports it'
            )
        name = signal.Signals(-code).name
        why = ": it touched memory that is not mapped" if -code in _FAULTS else ""
        return Result(check=check, status="crashed", detail=f"{name}{why}")


def _check_script(check: str) -> None:
    """Check that a child process can import the script that runs here, as multiprocessing makes it do. Raises: CheckError."""
    script = sys.modules["__main__"]
    path = getattr(script, "__file__", None)
    if getattr(script, "__spec__", None) is None and path is not None and not Path(path).exists():
        raise CheckError(
            f"{check}: the child process would import the script that runs here, and {path} is no file: write the script to a "
            f'file, which calls this under `if __name__ == "__main__":`, and run that'
        )


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)  # on a CPU the checks are so small that threads only wait for one another
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        connection.send(_answer(payload))


def _answer(payload: bytes) -> tuple[Result | str, bool]:
    """The result of a check, or the reason why it could not be done; and whether the next check needs a new process."""
    try:
        check, subject = pickle.loads(payload)
    except Exception as error:
        where = "it is to be at the top of a module, or of the file that is run"
        return f"the child process cannot import the attention function: {error!r}; {where}", False
    try:
        CHECKS[check](subject)
    except Skip as reason:
        return Result(check=check, status="skipped", detail=str(reason)), False
    except Exception as error:
        said = _said(error)
        if loss := next((loss for loss in _LOSSES if loss in said), None):
            return Result(check=check, status="crashed", detail=f"the CUDA context is lost: {loss}"), True
        is_spent = any(beginning in said.lower() for beginning in _CUDA_ERRORS)
        if not isinstance(error, Wrong):
            return repr(error), is_spent
        return Result(check=check, status="failed", detail=str(error)), is_spent
    return Result(check=check, status="passed"), False


def _said(error: BaseException | None) -> str:
    """The messages of an error and of what it came from: what is closed after a loss fails too."""
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__context__
    return "\n".join(messages)


def conformance(
    attention_fn: Callable[..., torch.Tensor],
    *,
    form: Form = "decode",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    guard_tokens: int = 0,
    error_ratio: float = 2.0,
    error_floor: float = 1e-5,
    capturable: bool = True,
    checks: Iterable[str] | None = None,
    worker: Worker | None = None,
) -> Report:
    """Run an attention function over vmmkv's memory in all the ways that such memory differs from a plain tensor.

    form: "decode" calls `attention_fn(q_BHD, k_STKD, v_STKD, lengths_B, slots_B)`, "prefill"
    `attention_fn(q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)`, causal. Sequence b has the rows
    [0, lengths_B[b]) of slot slots_B[b], its queries' own among them; in prefill its last tokens are the queries
    [query_starts[b], query_starts[b + 1]). Lengths are at least 1; indices are int32 on the device; q is contiguous; K and V
    are strided views of all slots, of which most is not mapped. It returns a new tensor of q's shape and dtype, and writes
    nothing to the cache. It must be at the top of a module: the checks run in a child process. That imports the script that
    calls this, which so is to be a file, and to do it under `if __name__ == "__main__":`.

    device: "cuda:0" if there is one, else "cpu". dtype: bfloat16 on a GPU, float32 on a CPU. guard_tokens: rows past each
    length that it may load (whole tiles), which then are mapped; their values must not matter. The error may be `error_ratio`
    times that of torch in the same dtype, plus `error_floor` (the rule of FlashAttention's tests). capturable: False for a
    function that reads lengths on the host. checks: names of `vmmkv.testing.checks.CHECKS`, all by default. worker: the
    process to run in, one of its own by default.

    Cost: a process, and seconds; some 200 MiB of memory. Raises: ValueError, TypeError; DriverUnavailable if there is no such
    GPU; CheckError if a check could not be done, as when the device has no memory. What the function does wrong is raised by
    the report's `raise_if_failed` alone.
    """
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        device = find_device(device)
    names = tuple(CHECKS if checks is None else checks)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"checks={unknown}: there are {', '.join(CHECKS)}")
    subject = Subject(
        attention_fn=attention_fn,
        form=form,
        device=device,
        dtype=dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16),
        heads=whole("heads", heads),
        kv_heads=whole("kv_heads", kv_heads),
        head_dim=whole("head_dim", head_dim),
        guard_tokens=whole("guard_tokens", guard_tokens),
        error_ratio=error_ratio,
        error_floor=error_floor,
        capturable=capturable,
    )
    with Worker() if worker is None else contextlib.nullcontext(worker) as own:
        results = tuple(own.run(name, subject) for name in names)
    return Report(kernel=subject.name, subject=str(subject), results=results)
