"""The engine as a child process: started, watched, and stopped."""

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from typing import Final, Self

ENGINE_COMMAND: Final = (sys.executable, "-m", "vmmkv.server.engine")
STOP_S: Final = 1.0
"""How long an engine that was asked to finish may take; one that was sent SIGTERM gets as long again. One in a long step is not
waited for: nobody wants what it computes, and the kernel frees what it has.
"""
_PR_SET_PDEATHSIG: Final = 1
_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""What the engine finds if nobody says otherwise: OpenMP threads that spin as they wait make a busy CPU ten times slower."""


class EngineProcess:
    """One engine process. It is in a process group of its own, so that Ctrl-C reaches it only through us, in order."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], *, socket: str, config: str) -> Self:
        """Start `command` with the socket's address to connect to and the configuration as JSON. Raises: OSError."""
        arguments = (*command, "--socket", socket, "--config", config)
        return cls(
            await asyncio.create_subprocess_exec(
                *arguments, stdin=DEVNULL, process_group=0, preexec_fn=die_with_parent(), env=_ENVIRONMENT | os.environ
            )
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait until it ends, and say how, in words."""
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self, ask: Callable[[], None] | None) -> None:
        """End it: `ask` it, if there is a way, then SIGTERM, then SIGKILL. Idempotent."""
        for step in (ask, self._process.terminate):
            if step is None or self._process.returncode is not None:
                continue
            step()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                continue
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def die_with_parent() -> Callable[[], None]:
    """For a child, before it becomes another program: have the kernel end it if this process ends, however that happens.

    Without this an engine whose parent was killed would keep the GPU's memory. Strictly it is the thread that ends: start the
    child in one that lasts.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
