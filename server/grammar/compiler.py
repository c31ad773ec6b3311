"""Compiling off the event loop: one child process, a deadline for each grammar, and a cache of what came out.

Namespaces share nothing: nobody finds out by the time that it takes what others have asked. Of each who asks so many may wait.

The child starts when the first grammar is asked for, and takes seconds of a core and hundreds of megabytes to: a server that is
asked for none pays nothing. So that the first who asks does not pay either, `start` can be called before, and timed.
"""

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from vmmkv.server.grammar.asked import Grammar, GrammarRefused
from vmmkv.server.grammar.compile_process import LENGTH, CannotStart, Compiled, Job, Refused, Started
from vmmkv.server.turns import Turns

COMPILE_S: Final = 5.0
START_S: Final = 60.0
CACHE_BYTES: Final = 64 << 20
MAX_WAITING: Final = 64
"""Grammars that wait to be compiled."""

_Key: TypeAlias = tuple[Hashable, Grammar]
"""Namespace, and what was asked for."""
_Answer: TypeAlias = Compiled | Refused | Started | CannotStart

log = logging.getLogger(__name__)


class CompilerUnavailable(Exception):
    """The child did not start: whoever asked is not to blame."""


class GrammarCompiler:
    """Compiled grammars of one model. Use and close it within one event loop."""

    def __init__(
        self,
        model_dir: Path,
        vocabulary_size: int,
        end_tokens: Sequence[int],
        *,
        compile_s: float = COMPILE_S,
        shared: bool = False,
    ) -> None:
        """`shared`: there are several who ask, each with a share of those that wait."""
        self._command = [
            *(sys.executable, "-m", "vmmkv.server.grammar.compile_process", "--model", str(model_dir)),
            *("--vocabulary-size", str(vocabulary_size), "--end-tokens", json.dumps(sorted(end_tokens))),
        ]
        self._compile_s = compile_s
        self._cache: OrderedDict[_Key, bytes] = OrderedDict()
        self._cache_bytes = 0
        self._turns = Turns("grammars", at_once=1, most=MAX_WAITING, shared=shared)
        self._coming: dict[_Key, asyncio.Task[bytes]] = {}
        self._starting: asyncio.Task[Process] | None = None
        """Under way, or done: the child that there is, or was."""

    async def start(self) -> Process:
        """The child, when jobs can come; at once if it runs. Raises: CompilerUnavailable."""
        starting = self._starting
        if starting is not None and starting.done() and (starting.exception() or starting.result().returncode is not None):
            starting = None
        if starting is None:
            starting = self._starting = asyncio.create_task(self._started())
        return await asyncio.shield(starting)

    def knows(self, grammar: Grammar, *, namespace: Hashable = None) -> bool:
        """Would `compile` do without the child?"""
        return (namespace, grammar) in self._cache

    async def compile(self, grammar: Grammar, *, namespace: Hashable = None, owner: Hashable = None) -> bytes:
        """For `Generate.grammar`. `owner` is who waits if many do. Raises: GrammarRefused if it is none or takes too long;
        ShareFull, QueueFull; CompilerUnavailable."""
        key = namespace, grammar
        if (known := self._cached(key)) is not None:
            return known
        if key not in self._coming:
            task = self._coming[key] = asyncio.create_task(self._make(key, owner))
            task.add_done_callback(lambda done: self._made(key, done))
        # Who asked may go away; others may have asked for the same, and to stop halfway would cost the child.
        return await asyncio.shield(self._coming[key])

    async def close(self) -> None:
        """End the child, and what waits for it. Idempotent."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()  # it kills the child if that has not started
            (process,) = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(process, BaseException):
                await _kill(process)

    async def _make(self, key: _Key, owner: Hashable) -> bytes:
        await self._turns.begin(owner)
        try:
            data = await self._ask(key[1])
        finally:
            self._turns.end(owner)
        self._keep(key, data)
        return data

    def _made(self, key: _Key, task: "asyncio.Task[bytes]") -> None:
        del self._coming[key]
        if not task.cancelled():
            task.exception()  # has been looked at, also where nobody waits any more

    def _cached(self, key: _Key) -> bytes | None:
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
        return known

    def _keep(self, key: _Key, data: bytes) -> None:
        self._cache[key] = data
        self._cache_bytes += len(data) + len(key[1].source)
        while self._cache_bytes > CACHE_BYTES:
            (_, old), dropped = self._cache.popitem(last=False)
            self._cache_bytes -= len(dropped) + len(old.source)

    async def _ask(self, grammar: Grammar) -> bytes:
        process = await self.start()
        data = msgspec.msgpack.encode(Job(grammar.kind, grammar.source))
        try:
            assert process.stdin is not None
            process.stdin.write(LENGTH.pack(len(data)) + data)
            async with asyncio.timeout(self._compile_s):
                answer = await _answer(process)
        except TimeoutError as error:
            await _kill(process)
            raise GrammarRefused(f"it takes more than {self._compile_s:g} s to compile; make it simpler") from error
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            await _kill(process)
            raise GrammarRefused("it cannot be compiled: it takes too much memory, or nests too deep") from error
        if isinstance(answer, Compiled):
            return answer.data
        raise GrammarRefused(answer.reason if isinstance(answer, Refused) else "the compiler answered out of turn")

    async def _started(self) -> Process:
        process: Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
            async with asyncio.timeout(START_S):
                answer = await _answer(process)
            if isinstance(answer, Started):
                return process
            assert isinstance(answer, CannotStart), "it has no job yet"
            what, why = answer.kind, answer.reason
        except TimeoutError:
            what = why = f"not within {START_S:g} s"
        except asyncio.IncompleteReadError:
            assert process is not None, "it was read from"
            what = why = f"it ended with {await process.wait()}"
        except (OSError, msgspec.DecodeError) as error:  # no process, or one whose library writes where it should answer
            what, why = type(error).__name__, str(error)
        except BaseException:
            if process is not None:
                await _kill(process)
            raise
        if process is not None:
            await _kill(process)
        log.error("the grammar compiler did not start: %s", why)
        raise CompilerUnavailable(f"The grammar compiler did not start ({what}); the server's log has the details.")


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _answer(process: Process) -> _Answer:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    answer: _Answer = msgspec.msgpack.decode(await process.stdout.readexactly(length), type=_Answer)
    return answer
