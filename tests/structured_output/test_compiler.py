"""The compiler's worker process: its limits, its end, its replacement; the cache, the queue, and namespaces."""

import asyncio
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import xgrammar

from bench.schemas import SCHEMAS
from tests.server.support import eventually
from tests.server.tiny import byte_tokenizer
from tests.structured_output import in_worker
from vmmkv_server.structured_output import compiler as compiling
from vmmkv_server.structured_output.compiler import (
    MAX_FORCED_BYTES,
    MAX_PENDING,
    Compilation,
    CompilerBusy,
    CompilerUnavailable,
    GrammarCompiler,
    check_ends,
)
from vmmkv_server.structured_output.matcher import Vocabulary
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused, of_choices, of_object, of_schema

pytestmark = pytest.mark.anyio

HUGE = Grammar("regex", "(" * 400 + "[a-z]" + "{1,90}b)" * 400)
"""Short, and more than ten seconds of work."""
VOCABULARY_SIZE, END_TOKENS = 258, [257]


@pytest.fixture(scope="module")
async def compiler(model_dir: Path, anyio_backend: str) -> AsyncIterator[GrammarCompiler]:
    """One for several tests: a worker takes seconds to start."""
    one = GrammarCompiler(model_dir, VOCABULARY_SIZE, END_TOKENS)
    yield one
    await one.close()


async def test_a_grammar_is_compiled_once_by_one_worker_however_often_it_is_asked_for(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(await asyncio.gather(*(compiler.start() for _ in range(4))))) == 1
    monkeypatch.setattr(compiling, "MAX_PENDING", 1)  # a second one would be refused
    same = [asyncio.create_task(compiler.compile(of_object())) for _ in range(10)]
    await asyncio.sleep(0)
    assert not compiler.knows(of_object())
    assert len(set(await asyncio.gather(*same))) == 1 and compiler.knows(of_object())
    assert await compiler.compile(of_object()) == same[0].result()
    assert await compiler.compile(of_choices(["another"])), "none is pending"


async def test_a_cancelled_caller_stops_no_compilation(compiler: GrammarCompiler) -> None:
    worker, gone = await compiler.start(), of_choices(["gone"])
    task = asyncio.create_task(compiler.compile(gone))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await compiler.compile(of_choices(["next"]))
    assert compiler.knows(gone) and await compiler.start() is worker


async def test_namespaces_share_no_grammar(compiler: GrammarCompiler) -> None:
    secret = of_choices(["a secret"])
    await compiler.compile(secret, namespace="one")
    assert compiler.knows(secret, namespace="one")
    assert not compiler.knows(secret, namespace="two") and not compiler.knows(secret)


async def test_the_cache_is_bounded_and_forgets_the_least_recently_used(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (of_choices([f"number {number}"]) for number in range(9))
    size = len(await compiler.compile(first))
    monkeypatch.setattr(compiling, "CACHE_BYTES", 4 * size)
    for other in others:
        await compiler.compile(other)
        await compiler.compile(first)
    assert 2 <= sum(map(compiler.knows, (first, *others))) <= 4
    assert compiler.knows(first) and compiler.knows(others[-1]) and not compiler.knows(others[0])


async def test_the_queue_is_bounded(compiler: GrammarCompiler) -> None:
    asked = [compiler.compile(of_choices([str(number)])) for number in range(MAX_PENDING + 3)]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in ended] == [bytes] * MAX_PENDING + [CompilerBusy] * 3


async def test_a_slow_grammar_is_refused_by_its_cpu_time_and_the_worker_stays(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await compiler.start()
    monkeypatch.setattr(compiling, "COMPILE_S", 1.0)
    slow = asyncio.create_task(compiler.compile(HUGE))
    waiting = [asyncio.create_task(compiler.compile(of_choices([f"behind {number}"]))) for number in range(3)]
    with pytest.raises(GrammarRefused, match=r"takes more than 1 s of CPU time|too much memory"):
        await slow
    assert all(await asyncio.gather(*waiting))
    assert not worker.has_ended and await compiler.start() is worker
    monkeypatch.setattr(compiling, "compiled_by_worker", in_worker.sleep)
    with pytest.raises(GrammarRefused, match=r"takes more than 1 s of CPU time|too much memory"):
        await compiler.compile(HUGE)  # known: nothing is compiled


async def test_a_grammar_that_waits_for_the_machine_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_S", 1.0)
    monkeypatch.setattr(compiling, "compiled_by_worker", in_worker.sleep)
    assert await compiler.compile(of_choices(["waits"])) == b"1.5"


async def test_no_grammar_is_blamed_for_a_machine_that_gives_no_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await compiler.start()
    monkeypatch.setattr(compiling, "STARVED_S", 0.1)
    monkeypatch.setattr(compiling, "compiled_by_worker", in_worker.sleep)
    with pytest.raises(CompilerUnavailable, match="try again"):
        await compiler.compile(of_choices(["starves"]))
    assert not worker.has_ended


@pytest.mark.nightly
async def test_a_worker_that_was_killed_while_it_waited_is_replaced(compiler: GrammarCompiler) -> None:
    before = multiprocessing.active_children()
    await compiler.close()
    worker = await compiler.start()
    (process,) = set(multiprocessing.active_children()) - set(before)
    process.kill()
    await asyncio.to_thread(process.join)
    assert await compiler.compile(of_choices(["after"])) and await compiler.start() is not worker


@pytest.mark.parametrize("function", [in_worker.crash, in_worker.hoard])
async def test_memory_beyond_the_limit_refuses_the_grammar_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    worker = await compiler.start()
    monkeypatch.setattr(compiling, "compiled_by_worker", function)
    with pytest.raises(GrammarRefused, match="too much memory"):
        await compiler.compile(of_choices([f"large {function.__name__}"]))
    assert not worker.has_ended


def test_a_compiled_grammar_that_is_too_large_for_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(byte_tokenizer(), VOCABULARY_SIZE, END_TOKENS)
    monkeypatch.setattr(compiling, "MAX_COMPILED_BYTES", 100)
    with pytest.raises(ValueError, match="may take 100"):
        Compilation(vocabulary).compile("choice", '["a"]')


def no_process(*arguments: object) -> NoReturn:
    raise FileNotFoundError(2, "/a/path is missing")


@pytest.mark.parametrize(
    ("place", "put", "said", "logged"),
    [
        (f"{compiling.__name__}._load_in_worker", in_worker.fail_to_load, r"\(OSError\)", "/a/path is missing"),
        (f"{compiling.__name__}.START_S", 0.05, r"\(not within 0.05 s\)", "not within 0.05 s"),
        ("multiprocessing.util.spawnv_passfds", no_process, r"\(FileNotFoundError\)", "/a/path is missing"),
    ],
    ids=["vocabulary", "time", "process"],
)
def test_a_compiler_that_cannot_start_tells_no_path_and_leaves_no_process(
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    put: Any,
    said: str,
    logged: str,
) -> None:
    async def law() -> None:
        compiler = GrammarCompiler(model_dir, VOCABULARY_SIZE, END_TOKENS)
        with pytest.raises(CompilerUnavailable, match=f"did not start {said}") as caught:
            await compiler.compile(of_object())
        assert "/a/path" not in str(caught.value)
        await compiler.close()

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(place, put)
    asyncio.run(law())
    assert logged in caplog.text
    assert eventually(lambda: set(multiprocessing.active_children()) <= before)


SCRIPT = """
import asyncio, os, signal
from vmmkv_server.structured_output.compiler import _Worker

print("runs", flush=True)

async def main():
    print(await _Worker().run(60, os.getpid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_the_worker_imports_no_main_script_and_ends_with_a_killed_server(tmp_path: Path) -> None:
    script = tmp_path / "without_a_guard.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ran.returncode == -signal.SIGKILL
    said, pid = ran.stdout.split()
    assert said == "runs"
    assert eventually(lambda: not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text())


CLOSES = """
import asyncio, os
from vmmkv_server.structured_output.compiler import _Worker

async def main():
    worker = _Worker()
    await worker.run(60, os.getpid)
    await asyncio.to_thread(worker.kill, wait=True)

asyncio.run(main())
os._exit(0)  # as the server does
"""


def test_a_closed_worker_leaves_no_semaphore() -> None:
    ran = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr == ""


def rules(kind: str, source: str) -> str:
    made = {
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
        "json": lambda schema: xgrammar.Grammar.from_json_schema(schema, any_whitespace=False),
    }[kind](source)
    return str(made.serialize_json())


DOUBLES = "\n".join(f"r{index} ::= r{index + 1} r{index + 1}" for index in range(30)) + '\nr30 ::= "a"'


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("ebnf", 'root ::= "a" root', "root never ends"),
        ("ebnf", 'root ::= [a-z]+ "0" x | "b"\nx ::= "a" y\ny ::= "b" x', "never ends"),
        ("ebnf", f'root ::= [a-z]+ r0 | "b"\n{DOUBLES}', "bytes at least"),
        ("regex", "(((abc){100}){100}){100}", "bytes at least"),
        ("json", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}', "never ends"),
        ("json", '{"type": "string", "pattern": "^((a{100}){100}){100}$"}', "bytes at least"),
        ("ebnf", "root ::= Token(5)", "not served"),
    ],
)
def test_forced_text_without_an_end_is_refused_wherever_it_hides(kind: str, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_ends(rules(kind, source))


def test_grammars_that_end_are_let_through() -> None:
    sources = [("ebnf", of_schema(schema).source) for schema in SCHEMAS.values()]
    chain = "root ::= r0\n" + "\n".join(f"r{index} ::= r{index + 1} | " + '"b"' for index in range(500)) + '\nr500 ::= "a"'
    sources += [
        ("ebnf", 'root ::= "a"\nunused ::= "b" unused'),
        ("ebnf", 'root ::= "(" root ")" | ""'),
        ("regex", "(abc){4000}"),
        ("ebnf", chain),
    ]
    for kind, source in sources:
        check_ends(rules(kind, source))
    assert MAX_FORCED_BYTES > 3 * 4000


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("ebnf", 'root ::= [a-z]+ "0" x | "b"\nx ::= "a" x', "never ends"),
        ("regex", "((a{0,60}){0,60}){0,10}", "too long to follow"),
    ],
)
def test_a_grammar_that_the_engine_could_not_follow_is_refused(kind: Any, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Compilation(Vocabulary(byte_tokenizer(), VOCABULARY_SIZE, END_TOKENS)).compile(kind, source)
