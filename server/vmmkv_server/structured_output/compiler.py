"""Compiles grammars for one model: a cache and a queue in the HTTP process, and a worker process that runs xgrammar.

    compile ── cached? ── queue ── worker ── fork: COMPILE_S of CPU time, MEMORY_BYTES ──> digest and text, for the engine

Some grammars take xgrammar minutes or gigabytes, in C++ that only a kill interrupts. So a child of the worker compiles each:
the kernel ends the child when its CPU time is over, and the worker, which takes seconds to start, forks the next one at once.
How busy the machine is makes no difference to what is compiled.
"""

import asyncio
import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np

from vmmkv_server.console import die_with_parent
from vmmkv_server.structured_output.matcher import CALL_S, DIGEST_BYTES, Matcher, Vocabulary
from vmmkv_server.structured_output.schema import Grammar, GrammarKind, GrammarRefused
from vmmkv_server.structured_output.text import quoted

if TYPE_CHECKING:
    import xgrammar

T = TypeVar("T")
START_S: Final = 300.0
"""Time to start the worker, by the clock: a busy machine starts it late, and no grammar is to blame."""
COMPILE_S: Final = 5.0
"""CPU time of a grammar, in whole seconds."""
STARVED_S: Final = 120.0
"""Time after which a child without its CPU time is ended, by the clock. The request is told to try again."""
MEMORY_BYTES: Final = 2 << 30
"""Memory that the worker may take for a grammar, beyond that of a ready worker."""
MAX_COMPILED_BYTES: Final = 32 << 20
"""The addresses that `"format": "email"` allows take 7 MB for 151,936 tokens. The engine reads 60 MB a second."""
CACHE_BYTES: Final = 64 << 20
MAX_PENDING: Final = 64
"""Grammars that wait or are being compiled."""

_Key: TypeAlias = tuple[Hashable, Grammar]
"""Namespace and grammar. Namespaces share nothing: the time of an answer would tell what others have asked."""

log = logging.getLogger(__name__)


class CompilerUnavailable(Exception):
    """The worker did not start, or was not let work. The request is not to blame."""


class CompilerBusy(Exception):
    """Too many grammars wait to be compiled."""


class GrammarCompiler:
    """Compiled grammars of one model. Use and close it within one event loop."""

    def __init__(self, model_dir: Path, vocabulary_size: int, end_tokens: Sequence[int]) -> None:
        self._vocabulary = model_dir, vocabulary_size, sorted(end_tokens)
        self._cache: OrderedDict[_Key, bytes | str] = OrderedDict()
        """Compiled grammars, and why others are refused."""
        self._cache_bytes = 0
        self._pending: dict[_Key, asyncio.Task[bytes]] = {}
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[_Worker] | None = None
        """Under way or done; None without a worker."""

    async def start(self) -> "_Worker":
        """Wait until the worker is ready. Starts it if there is none. Raises: CompilerUnavailable."""
        starting = self._starting
        if starting is None or (starting.done() and (starting.exception() or starting.result().has_ended)):
            starting = self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(starting)

    def knows(self, grammar: Grammar, *, namespace: Hashable = None) -> bool:
        """Is the grammar in the cache, so that `compile` needs no worker?"""
        return (namespace, grammar) in self._cache

    async def compile(self, grammar: Grammar, *, namespace: Hashable = None) -> bytes:
        """The compiled grammar, for `Generate.grammar`.

        A caller that is cancelled stops no compilation: others may wait for it, and the cache keeps it.
        Raises: GrammarRefused if it is invalid, too large or too slow; CompilerBusy; CompilerUnavailable.
        """
        key = namespace, grammar
        if key in self._cache:
            self._cache.move_to_end(key)
            known = self._cache[key]
            if isinstance(known, str):
                raise GrammarRefused(known)
            return known
        if key not in self._pending:
            if len(self._pending) >= MAX_PENDING:
                raise CompilerBusy(f"{MAX_PENDING} grammars wait already.")
            task = self._pending[key] = asyncio.create_task(self._compile(key))
            task.add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(self._pending[key])

    async def close(self) -> None:
        """Kill the worker and cancel what waits for it. Idempotent."""
        tasks = [*self._pending.values(), *([] if self._starting is None else [self._starting])]
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, _Worker):
                await asyncio.to_thread(ended.kill, wait=True)
        self._starting = None

    async def _compile(self, key: _Key) -> bytes:
        _, grammar = key
        async with self._turn:
            worker = await self.start()
            try:
                data = await worker.run(
                    STARVED_S + START_S, _in_child, COMPILE_S, STARVED_S, compiled_by_worker, grammar.kind, grammar.source
                )
            except ValueError as error:
                self._keep(key, str(error))
                raise GrammarRefused(str(error)) from error
            except (OSError, BrokenProcessPool) as error:
                log.error("the grammar compiler was not let work: %s", error or type(error).__name__)
                raise CompilerUnavailable("The grammar compiler was not let work; try again later.") from error
        self._keep(key, data)
        return data

    def _keep(self, key: _Key, known: bytes | str) -> None:
        _, grammar = key
        self._cache[key] = known
        self._cache_bytes += len(known) + len(grammar.source)
        while self._cache_bytes > CACHE_BYTES:
            (_, oldest), dropped = self._cache.popitem(last=False)
            self._cache_bytes -= len(dropped) + len(oldest.source)

    async def _start(self) -> "_Worker":
        worker = None
        try:
            worker = _Worker()
            await worker.run(START_S, _load_in_worker, *self._vocabulary)
            return worker
        except TimeoutError:
            kind = reason = f"not within {START_S:g} s"
        except Exception as error:
            kind, reason = type(error).__name__, str(error)
        if worker is not None:
            worker.kill()
        log.error("the grammar compiler did not start: %s", reason)
        raise CompilerUnavailable(f"The grammar compiler did not start ({kind}); the server's log has the details.")


class _Worker:
    """A process that runs one function at a time, and is killed when that takes too long by the clock."""

    def __init__(self) -> None:
        """Raises: OSError if there can be no process."""
        self._executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_worker)
        # A process that is spawned imports `__main__` again: with `LLM`, a script without a guard would run twice.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            self._executor.submit(int)  # starts the process
        finally:
            sys.modules["__main__"] = main
        self._processes = list(self._executor._processes.values())
        self._is_killed = False

    @property
    def has_ended(self) -> bool:
        """Was it killed, by this object or by the system?"""
        return self._is_killed or not all(process.is_alive() for process in self._processes)

    async def run(self, limit_s: float, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the process. Returns or raises its result; raises TimeoutError, BrokenProcessPool."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(self._executor.submit(function, *arguments))
        except (TimeoutError, BrokenProcessPool, asyncio.CancelledError):
            self.kill()
            raise

    def kill(self, *, wait: bool = False) -> None:
        """End it at once. Idempotent. `wait` until its semaphores can be given back."""
        self._is_killed = True
        for process in self._processes:  # before Python 3.14 the executor has no method that does
            process.kill()
        self._executor.shutdown(wait, cancel_futures=True)


_compilation: "Compilation | None" = None
"""In the worker, once it is ready."""


def _prepare_worker() -> None:
    """Leave Ctrl-C to the server, and end with it, also where it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        server = multiprocessing.parent_process()
        assert server is not None, "this process was spawned"
        server.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _load_in_worker(model_dir: Path, vocabulary_size: int, end_tokens: Sequence[int]) -> None:
    global _compilation
    _compilation = Compilation(Vocabulary.load(model_dir, vocabulary_size, end_tokens))


def _in_child(cpu_s: float, starved_s: float, function: Callable[..., bytes], *arguments: object) -> bytes:
    """Run a function in a fork of this process, with limits; returns its result.

    Raises: ValueError, its own or naming the limit that it met; ChildProcessError if the machine gave it no CPU time.
    """
    reader, writer = os.pipe()
    prepare = die_with_parent()
    child = os.fork()
    if not child:
        prepare()
        _work_as_child(writer, math.ceil(cpu_s), function, *arguments)
    os.close(writer)
    sent, until_s = bytearray(), time.monotonic() + starved_s
    with open(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 20)):
                break
            sent += part
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if sent[:1] == _RETURNED and not status:
        return bytes(sent[1:])
    if sent[:1] == _RAISED and not status:
        raise ValueError(sent[1:].decode())
    match os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0:
        case signal.SIGXCPU:
            why = f"it takes more than {math.ceil(cpu_s)} s of CPU time to compile"
            raise ValueError(f"{why}; make it smaller, as by fewer properties or tools")
        case signal.SIGKILL | signal.SIGTERM:
            raise ChildProcessError("the process that compiled was killed")
    raise ValueError("it cannot be compiled: it takes too much memory, or nests too deep")


_RETURNED, _RAISED = b"+", b"-"


def _work_as_child(writer: int, cpu_s: int, function: Callable[..., bytes], *arguments: object) -> NoReturn:
    """Write what a function returns, or the reason of its ValueError, and end."""
    status = 1
    try:
        in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        try:
            sent = _RETURNED + function(*arguments)
        except ValueError as error:
            sent = _RAISED + str(error).encode(errors="replace")
        with open(writer, "wb") as pipe:
            pipe.write(sent)
        status = 0
    finally:
        os._exit(status)


def compiled_by_worker(kind: GrammarKind, source: str) -> bytes:
    """The compiled grammar, in a child of the worker. Raises: ValueError, as `Compilation.compile`."""
    assert _compilation is not None, "it is loaded before anything is compiled"
    try:
        return _compilation.compile(kind, source)
    except MemoryError:
        raise ValueError("it takes too much memory to compile") from None


# What the worker runs.

TRIAL_TOKENS: Final = 64
TRIAL_S: Final = 0.5
"""Time for these tokens: a hundred times that of most grammars. A few letters of an ambiguous one can take seconds each."""
MAX_FORCED_BYTES: Final = 1 << 18
"""Most bytes of the shortest text of any alternative of a rule: four for each character that a source can have."""
_TOO_SLOW: Final = "it takes too long to follow; make it simpler"


class Compilation:
    """xgrammar's compiler for one vocabulary, and checks that the engine can follow what it gives."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)

    def compile(self, kind: GrammarKind, source: str) -> bytes:
        """A digest and text, for `Vocabulary.read`. Raises: ValueError, saying what is wrong with the grammar."""
        try:
            grammar = grammar_read(kind, source)
            check_ends(grammar.serialize_json())
            compiled = self._compiler.compile_grammar(grammar)
            for prefers_long in (False, True):
                self._try(compiled, prefers_long=prefers_long)
            text = with_own_automata(compiled.serialize_json())
            if (size_bytes := DIGEST_BYTES + len(text)) > MAX_COMPILED_BYTES:
                raise ValueError(f"compiled it takes {size_bytes} bytes and may take {MAX_COMPILED_BYTES}")
            return hashlib.sha256(text).digest() + text
        except RuntimeError as error:
            # Without the time and the source line that xgrammar puts in front.
            reason = re.sub(r"^\[[\d:]+\] \S+\.\w+:\d+: ", "", str(error)).strip().rstrip(".")
            raise ValueError(reason or "it cannot be compiled") from error

    def _try(self, compiled: "xgrammar.CompiledGrammar", *, prefers_long: bool) -> None:
        """Follow random tokens, or the longest ones. Raises: ValueError if it is too slow."""
        vocabulary, numbers = self._vocabulary, np.random.default_rng(0)
        matcher, began_s = Matcher(compiled, vocabulary), time.thread_time()
        for _ in range(TRIAL_TOKENS):
            _in_time(matcher.forced_text)
            words = _in_time(matcher.mask) & ~vocabulary.ends
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: vocabulary.size])
            if prefers_long and len(allowed):
                num_bytes = vocabulary.num_bytes[allowed]
                allowed = allowed[num_bytes == num_bytes.max()]
            if not len(allowed) or not _in_time(matcher.accept, int(numbers.choice(allowed))):
                return
            if time.thread_time() - began_s > TRIAL_S:
                raise ValueError(_TOO_SLOW)


def grammar_read(kind: GrammarKind, source: str) -> "xgrammar.Grammar":
    """A grammar as xgrammar reads it. Raises: RuntimeError, saying what is wrong with it."""
    import xgrammar

    match kind:
        case "regex":
            return xgrammar.Grammar.from_regex(source)
        case "choice":
            return xgrammar.Grammar.from_ebnf("root ::= " + " | ".join(map(quoted, json.loads(source))))
        case _:
            return xgrammar.Grammar.from_ebnf(source)


def with_own_automata(compiled: str) -> bytes:
    """A compiled grammar in xgrammar's JSON form, where each rule has the states of its own automaton alone.

    xgrammar 0.2.8 writes the states of all rules with each: 36 MB for the 220 rules of a schema of 25 KB. Here the states of
    each rule are numbered from 0, in the keys of its masks too.
    """
    whole = msgspec.json.decode(compiled, type=dict[str, msgspec.Raw])
    grammar = msgspec.json.decode(whole["grammar"], type=dict[str, msgspec.Raw])
    every = msgspec.json.decode(grammar["complete_fsm"], type=_States)
    rules = msgspec.json.decode(grammar["per_rule_fsms"], type=list[_OfRule])
    masks = msgspec.json.decode(whole["adaptive_token_mask_cache"], type=list[tuple[list[int], msgspec.Raw]])
    numbers = []
    for rule in rules:
        automaton = rule.automaton
        own, number = every.of(automaton.start)
        numbers.append(number)
        automaton.states = msgspec.Raw(msgspec.json.encode(own))
        automaton.start, automaton.ends = number[automaton.start], [number[end] for end in automaton.ends if end in number]
    for key, _ in masks:
        key[_STATE_OF_KEY] = numbers[key[_RULE_OF_KEY]][key[_STATE_OF_KEY]]
    grammar["per_rule_fsms"] = msgspec.Raw(msgspec.json.encode(rules))
    whole["grammar"] = msgspec.Raw(msgspec.json.encode(grammar))
    whole["adaptive_token_mask_cache"] = msgspec.Raw(msgspec.json.encode(masks))
    return msgspec.json.encode(whole)


_RULE_OF_KEY, _STATE_OF_KEY = 0, 2
"""Places in a mask's key of the rule, and of the state of its automaton."""


class _Edges(msgspec.Struct, gc=False):
    data_: list[tuple[int, int, int]]
    """Edges of all states, in order: first and last byte, and the state to which they lead. Bytes below 0 name a rule."""
    indptr_: list[int]
    """First edge of each state, and at the end the number of edges."""


class _States(msgspec.Struct):
    """States of automata, as xgrammar 0.2.8 writes them."""

    edges: _Edges
    edge_aux_data: msgspec.Raw
    edge_num: int

    def of(self, start: int) -> "tuple[_States, dict[int, int]]":
        """The states that can be reached from one, and their new numbers by the old ones."""
        edges, starts = self.edges.data_, self.edges.indptr_
        own, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            targets = {target for _, _, target in edges[starts[state] : starts[state + 1]]} - own
            own |= targets
            waiting += targets
        number = {state: index for index, state in enumerate(sorted(own))}
        kept = _Edges([], [0])
        for state in number:
            kept.data_ += [(low, high, number[target]) for low, high, target in edges[starts[state] : starts[state + 1]]]
            kept.indptr_.append(len(kept.data_))
        return _States(kept, self.edge_aux_data, len(kept.data_)), number


class _Automaton(msgspec.Struct, array_like=True):
    states: msgspec.Raw
    start: int
    ends: list[int]
    is_dfa: msgspec.Raw
    edge_num: msgspec.Raw


class _OfRule(msgspec.Struct, array_like=True):
    automaton: _Automaton
    num_nodes: msgspec.Raw
    num_edges: msgspec.Raw


def _in_time(call: Callable[..., T], *arguments: object) -> T:
    """Raises: ValueError if a call takes longer than the engine would wait for it."""
    began_s = time.thread_time()
    found = call(*arguments)
    if time.thread_time() - began_s > CALL_S:
        raise ValueError(_TOO_SLOW)
    return found


def check_ends(grammar: str) -> None:
    """Refuse a grammar, in xgrammar's JSON form, with a rule that never ends, or only after too much text.

    xgrammar looks for forced text without a limit: it follows `root ::= "a" root` for ever, and a rule that doubles thirty
    times for hours. Raises: ValueError naming the rule.
    """
    for name, longest in _Rules(grammar).longest_alternatives():
        if longest == math.inf:
            raise ValueError(f"what follows in its rule {name} never ends")
        if longest > MAX_FORCED_BYTES:
            raise ValueError(f"its rule {name} asks for {longest:.0f} bytes at least, and may for {MAX_FORCED_BYTES}")


_BYTES, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT, _REGEX = 0, 1, 2, 3, 4, 5, 6, 8, 12
"""Kinds of expressions, as xgrammar 0.2.8 numbers them."""


class _Rules:
    """The rules of a grammar, with the bytes of the shortest text of each. Infinite for a rule that never ends."""

    def __init__(self, grammar: str) -> None:
        read = json.loads(grammar)
        data, starts = read["grammar_expr_data"], read["grammar_expr_indptr"]
        self._expressions: list[tuple[int, list[int]]] = [
            (data[start], data[start + 2 : start + 2 + data[start + 1]]) for start in starts
        ]
        self._rules: list[tuple[str, int]] = [(name, body) for name, body, *_ in read["rules"]]
        self._min_bytes = [math.inf] * len(self._rules)
        self._patterns: dict[bytes, float] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        """By rule, those whose shortest text depends on it."""
        self._uses: defaultdict[int, set[int]] = defaultdict(set)
        """The other way round."""
        waiting = dict.fromkeys(range(len(self._rules)))
        while waiting:  # to the fixed point, the last rules first: a shorter rule may shorten those that use it
            rule, _ = waiting.popitem()
            min_bytes = self._min_bytes_of(self._rules[rule][1], rule)
            if min_bytes < self._min_bytes[rule]:
                self._min_bytes[rule] = min_bytes
                waiting.update(dict.fromkeys(self._users[rule]))
        self._root: int = read["root_rule_id"]
        self.root_min_bytes = self._min_bytes[self._root]

    def longest_alternatives(self) -> Iterator[tuple[str, float]]:
        """For each rule in use its name, and the shortest text of the alternative for which that is longest, in bytes."""
        used, waiting = {self._root}, [self._root]
        while waiting:
            more = self._uses[waiting.pop()] - used
            used |= more
            waiting += more
        for rule in sorted(used):
            name, body = self._rules[rule]
            kind, parts = self._expressions[body]
            yield name, max(self._min_bytes_of(each, rule) for each in (parts if kind == _CHOICES else [body]))

    def _min_bytes_of(self, expression: int, user: int) -> float:
        """Fewest bytes of an expression of the rule `user`."""
        kind, parts = self._expressions[expression]
        if kind == _BYTES:
            return len(parts)
        if kind == _CLASS:
            return 1
        if kind in (_STAR, _EMPTY):
            return 0
        if kind in (_RULE, _REPEAT):
            self._users[parts[0]].add(user)
            self._uses[user].add(parts[0])
            count = 1 if kind == _RULE else parts[1]
            return self._min_bytes[parts[0]] * count if count else 0
        if kind == _SEQUENCE:
            return sum(self._min_bytes_of(part, user) for part in parts)
        if kind == _CHOICES:
            return min(self._min_bytes_of(part, user) for part in parts)
        if kind == _REGEX:
            return self._min_bytes_of_pattern(bytes(parts[1:]))
        raise ValueError("it has an element that is not served: write it of rules, texts and classes of characters")

    def _min_bytes_of_pattern(self, pattern: bytes) -> float:
        import xgrammar

        if pattern not in self._patterns:
            self._patterns[pattern] = _Rules(xgrammar.Grammar.from_regex(pattern.decode()).serialize_json()).root_min_bytes
        return self._patterns[pattern]
