"""Compiling off the event loop: one child process, a deadline for each grammar, and a cache of what came out.

Namespaces share nothing: nobody finds out by the time that it takes what others have asked. Of each who asks so many may wait.

The child starts when the first grammar is asked for, and takes seconds of a core and hundreds of megabytes to: a server that is
asked for none pays nothing. So that the first who asks does not pay either, `start` can be called before, and timed.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from vmmkv.server.structured_output.schema import Grammar, GrammarRefused, Kind
from vmmkv.server.turns import Turns

if TYPE_CHECKING:
    import xgrammar

    from vmmkv.server.structured_output.matcher import Matcher, Vocabulary

# -------- compile process
# A child process that compiles grammars, one at a time: it can be killed when one takes too long, and threads cannot.
#
#     stdout, once: Started or CannotStart
#     stdin:  length (4 bytes), Job as msgpack ──> stdout: length, Compiled or Refused
#
# It ends when its stdin does, or when a job takes much longer than anybody would wait, whoever should have ended it is gone.
# Its
# memory and its answers are bounded, so that a grammar cannot take the machine's, or the server's.

LENGTH: Final = struct.Struct("<I")
MEMORY_BYTES: Final = 2 << 30
"""Beside what it has when it begins."""
MAX_COMPILED_BYTES: Final = 8 << 20
"""Of one grammar, as it goes to the engine."""
LONGEST_S: Final = 60


class Job(msgspec.Struct, frozen=True):
    """What to compile."""

    kind: Kind
    source: str


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """As the engine can read it."""

    data: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It is no grammar, and why."""

    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """Said first, when jobs can come."""


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """Said in place of Started, before the end."""

    kind: str
    """Of error: for whoever asked."""
    reason: str
    """For the server's log: it may have paths in it."""


def main() -> None:
    """Compile until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--end-tokens", required=True, help="as JSON")
    parser.add_argument("--longest-s", type=int, default=LONGEST_S, help="of one job; then this process ends")
    arguments = parser.parse_args()
    # Nobody else writes between two answers, be it from C++.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        from vmmkv.server.structured_output.compiler import Compilation
        from vmmkv.server.structured_output.matcher import Vocabulary

        vocabulary = Vocabulary.load(arguments.model, arguments.vocabulary_size, json.loads(arguments.end_tokens))
        compilation = Compilation(vocabulary)
    except Exception as error:
        _write(answers, CannotStart(type(error).__name__, str(error)))
        return
    in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES,) * 2)
    _write(answers, Started())
    while (job := _read(sys.stdin.buffer)) is not None:
        signal.alarm(arguments.longest_s)  # it ends a process that is in C++ too
        try:
            _write(answers, _checked(compilation.compile(job.kind, job.source)))
        except (ValueError, RuntimeError) as error:
            _write(answers, Refused(str(error)))
        except MemoryError:
            _write(answers, Refused("it takes too much memory to compile"))
        signal.alarm(0)


def _checked(data: bytes) -> Compiled | Refused:
    if len(data) > MAX_COMPILED_BYTES:
        return Refused(f"compiled it takes {len(data)} bytes and may take {MAX_COMPILED_BYTES}")
    return Compiled(data)


def _read(file: BinaryIO) -> Job | None:
    head = file.read(LENGTH.size)
    return msgspec.msgpack.decode(file.read(LENGTH.unpack(head)[0]), type=Job) if len(head) == LENGTH.size else None


def _write(file: BinaryIO, answer: Compiled | Refused | Started | CannotStart) -> None:
    data = msgspec.msgpack.encode(answer)
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


if __name__ == "__main__":
    main()


# -------- compiler

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
            *(sys.executable, "-m", "vmmkv.server.structured_output.compiler", "--model", str(model_dir)),
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


# -------- least
# The shortest text of each rule of a grammar: one that has none never ends, and its forced text would be without end.
#
# xgrammar looks for forced text without a limit: `root ::= "a" root` keeps it for ever, a rule that doubles thirty times for as
# good as that. Both are seen here before they are followed, wherever in the grammar they hide.

MAX_BYTES: Final = 1 << 18
"""Of the shortest text of any rule, or of one of its alternatives: four bytes for each character that a source can have."""

_BYTES, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT, _REGEX = 0, 1, 2, 3, 4, 5, 6, 8, 12
"""Kinds of expressions, as xgrammar 0.2.8 numbers them."""


class _Rules:
    """A grammar as xgrammar writes it in JSON. `of_pattern` gives the rules of a regular expression that stands for a rule."""

    def __init__(self, grammar: str, of_pattern: Callable[[str], str]) -> None:
        read = json.loads(grammar)
        data, starts = read["grammar_expr_data"], read["grammar_expr_indptr"]
        self.expressions: list[tuple[int, list[int]]] = [
            (data[start], data[start + 2 : start + 2 + data[start + 1]]) for start in starts
        ]
        self.names: list[str] = [rule[0] for rule in read["rules"]]
        self.bodies: list[int] = [rule[1] for rule in read["rules"]]
        self.root: int = read["root_rule_id"]
        self.least = [math.inf] * len(self.names)
        """Bytes of the shortest text of each rule."""
        self._of_pattern = of_pattern
        self._patterns: dict[bytes, float] = {}
        users: defaultdict[int, set[int]] = defaultdict(set)
        for rule, body in enumerate(self.bodies):
            for used in self._used(body):
                users[used].add(rule)
        waiting = dict.fromkeys(range(len(self.names)))
        while waiting:
            rule, _ = waiting.popitem()
            least = self.least_of(self.bodies[rule])
            if least < self.least[rule]:
                self.least[rule] = least
                waiting.update(dict.fromkeys(users[rule]))

    def alternatives(self, rule: int) -> Sequence[int]:
        """Expressions, of which a rule is one."""
        kind, parts = self.expressions[self.bodies[rule]]
        return parts if kind == _CHOICES else [self.bodies[rule]]

    def least_of(self, expression: int) -> float:
        """Bytes that an expression has at least, by what is known of the rules."""
        kind, parts = self.expressions[expression]
        if kind == _BYTES:
            return len(parts)
        if kind == _CLASS:
            return 1
        if kind in (_STAR, _EMPTY):
            return 0
        if kind == _RULE:
            return self.least[parts[0]]
        if kind == _SEQUENCE:
            return sum(map(self.least_of, parts))
        if kind == _CHOICES:
            return min(map(self.least_of, parts))
        if kind == _REPEAT:
            return self.least[parts[0]] * parts[1] if parts[1] else 0
        if kind == _REGEX:
            return self._least_of_pattern(bytes(parts[1:]))
        raise ValueError("it has an element that is not served: write it of rules, texts and classes of characters")

    def _least_of_pattern(self, pattern: bytes) -> float:
        if pattern not in self._patterns:
            rules = _Rules(self._of_pattern(pattern.decode()), self._of_pattern)
            self._patterns[pattern] = rules.least[rules.root]
        return self._patterns[pattern]

    def _used(self, expression: int) -> Iterator[int]:
        kind, parts = self.expressions[expression]
        if kind in (_RULE, _REPEAT):
            yield parts[0]
        elif kind in (_SEQUENCE, _CHOICES):
            for part in parts:
                yield from self._used(part)


def check_ends(grammar: str, of_pattern: Callable[[str], str]) -> None:
    """Raises: ValueError, naming a rule that never ends, or only after too much. See `_Rules`."""
    rules = _Rules(grammar, of_pattern)
    for rule, name in enumerate(rules.names):
        longest = max(map(rules.least_of, rules.alternatives(rule)))
        if longest == math.inf:
            raise ValueError(f"what follows in its rule {name} never ends")
        if longest > MAX_BYTES:
            raise ValueError(f"its rule {name} asks for {longest:.0f} bytes at least, and may for {MAX_BYTES}")


# -------- compiling
# From a grammar's source to what a matcher runs on, by xgrammar: in a process that may be killed.

TRIED_TOKENS: Final = 64
TRIED_S: Final = 0.5
"""For so many tokens, a hundred times what a grammar takes. A few letters of an ambiguous one can take seconds for each; and no
call may take more than the engine would wait for.
"""
_TOO_SLOW: Final = "it takes too long to follow; make it simpler"
T = TypeVar("T")


class Compilation:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        import xgrammar

        self._vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)

    def compile(self, kind: Kind, source: str) -> bytes:
        """As text, for `CompiledGrammar.deserialize_json`. Raises: ValueError saying what is wrong with it."""
        try:
            compiled = self._compiled(kind, source)
            self._try(compiled)
            return compiled.serialize_json().encode()
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error

    def _try(self, compiled: "xgrammar.CompiledGrammar") -> None:
        """Follow it for some tokens, any of them and then the longest: what is slow where nobody was here the engine finds.

        Raises: ValueError if that takes too long.
        """
        import xgrammar

        from vmmkv.server.structured_output.matcher import Matcher

        check_ends(compiled.grammar.serialize_json(), lambda pattern: xgrammar.Grammar.from_regex(pattern).serialize_json())
        for wants_long in (False, True):
            numbers, began_s = np.random.default_rng(0), time.thread_time()
            matcher = Matcher(compiled, self._vocabulary)
            for _ in range(TRIED_TOKENS):
                if not self._step(matcher, numbers, wants_long):
                    break
                if time.thread_time() - began_s > TRIED_S:
                    raise ValueError(_TOO_SLOW)

    def _step(self, matcher: "Matcher", numbers: np.random.Generator, wants_long: bool) -> bool:
        """A token, if any can come. Raises: ValueError if one call takes too long."""
        vocabulary = self._vocabulary
        _in_time(matcher.forced_text)
        words = _in_time(matcher.mask) & ~vocabulary.ends
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: vocabulary.size])
        if wants_long and len(allowed):
            num_bytes = vocabulary.num_bytes[allowed]
            allowed = allowed[num_bytes == num_bytes.max()]
        return bool(len(allowed)) and _in_time(lambda: matcher.accept(int(numbers.choice(allowed))))

    def _compiled(self, kind: Kind, source: str) -> "xgrammar.CompiledGrammar":
        compiler = self._compiler
        match kind:
            case "json":
                # Compact: every space that may be anywhere is a choice, and ends what is forced.
                return compiler.compile_json_schema(source, any_whitespace=False, separators=(",", ":"))
            case "regex":
                return compiler.compile_regex(source)
            case "choice":
                return compiler.compile_grammar(f"root ::= {_alternatives(json.loads(source))}")
            case "ebnf":
                return compiler.compile_grammar(source)


def _in_time(call: Callable[[], T]) -> T:
    from vmmkv.server.structured_output.matcher import CALL_S

    began_s = time.thread_time()
    found = call()
    if time.thread_time() - began_s > CALL_S:
        raise ValueError(_TOO_SLOW)
    return found


def _alternatives(choices: Sequence[str]) -> str:
    return " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(one: str) -> str:
    return one if one.isalnum() and one.isascii() else f"\\U{ord(one):08x}"


def _reason(error: RuntimeError) -> str:
    """What xgrammar says, without the time and the line of its source."""
    return re.sub(r"^\[[\d:]+\] \S+\.\w+:\d+: ", "", str(error)).strip().rstrip(".") or "it cannot be compiled"
