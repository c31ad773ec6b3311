"""The child process in which checks run, so that a fault there is reported and not suffered.

It is spawned, not forked: it has a CUDA context of its own to lose, and no lock of another thread. A check whose process dies
has crashed, and the next check gets a new process; so it does after any error of CUDA, whatever that one left behind.
"""

import multiprocessing
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

import torch

from vmmkv.errors import VmmkvError
from vmmkv.testing.report import Result
from vmmkv.testing.subject import Subject

TIMEOUT_S: Final = 300.0
"""For one check: many times what an interpreted kernel takes."""

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
"""How errors of CUDA begin, in lower case: torch's, the driver's, the runtime's and Triton's."""

_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS)


class CheckError(VmmkvError):
    """A check could not be done, which says nothing about the kernel."""


class Worker:
    """A process for checks, started with the first one; several suites can share it, which saves seconds each."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

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
            if not connection.poll(TIMEOUT_S):
                self.close()
                return Result(check=check, status="crashed", detail=f"no answer in {TIMEOUT_S:g} s")
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

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

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
    """Can a child process import the script that runs here, as multiprocessing has it do? Raises CheckError."""
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
    """How the check went, or why it could not be done; and whether another process is to do the next."""
    from vmmkv.testing.batch import Wrong
    from vmmkv.testing.checks import CHECKS, Skip

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
