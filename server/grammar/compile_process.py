"""A child process that compiles grammars, one at a time: it can be killed when one takes too long, and threads cannot.

    stdin:  length (4 bytes), Job as msgpack ──> stdout: length, Compiled or Refused

It ends when its stdin does. Its memory is bounded, so that a grammar cannot take the machine's.
"""

import argparse
import json
import resource
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from vmmkv.server.grammar.asked import Kind

LENGTH: Final = struct.Struct("<I")
MEMORY_BYTES: Final = 2 << 30
"""Beside what it has when it begins."""


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


def main() -> None:
    """Compile until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--end-tokens", required=True, help="as JSON")
    arguments = parser.parse_args()
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # nobody else writes between two answers
    try:
        from vmmkv.server.grammar.compiling import Compilation
        from vmmkv.server.grammar.vocabulary import Vocabulary

        vocabulary = Vocabulary.load(arguments.model, arguments.vocabulary_size, json.loads(arguments.end_tokens))
        compilation = Compilation(vocabulary)
    except Exception as error:
        _write(answers, Refused(f"grammars cannot be compiled here: {error}"))
        return
    in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES,) * 2)
    _write(answers, Started())
    while (job := _read(sys.stdin.buffer)) is not None:
        try:
            _write(answers, Compiled(compilation.compile(job.kind, job.source)))
        except (ValueError, RuntimeError) as error:
            _write(answers, Refused(str(error)))
        except MemoryError:
            _write(answers, Refused("it takes too much memory to compile"))


def _read(file: BinaryIO) -> Job | None:
    head = file.read(LENGTH.size)
    return msgspec.msgpack.decode(file.read(LENGTH.unpack(head)[0]), type=Job) if len(head) == LENGTH.size else None


def _write(file: BinaryIO, answer: Compiled | Refused | Started) -> None:
    data = msgspec.msgpack.encode(answer)
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


if __name__ == "__main__":
    main()
