"""A child process that compiles grammars, one at a time: it can be killed when one takes too long, and threads cannot.

    stdout, once: Started or CannotStart
    stdin:  length (4 bytes), Job as msgpack ──> stdout: length, Compiled or Refused

It ends when its stdin does, or when a job takes much longer than anybody would wait, whoever should have ended it is gone. Its
memory and its answers are bounded, so that a grammar cannot take the machine's, or the server's.
"""

import argparse
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from vmmkv.server.grammar.asked import Kind

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
        from vmmkv.server.grammar.compiling import Compilation
        from vmmkv.server.grammar.vocabulary import Vocabulary

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
