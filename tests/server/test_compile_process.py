"""The child that compiles: what it says is whole, is not too much, and ends in time whoever is there."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from tests.server.tiny import byte_tokenizer
from vmmkv.server.structured_output.compiler import LENGTH, MAX_COMPILED_BYTES, Compiled, Job, Refused, Started, _checked

CHILD = """
import os
from vmmkv.server.structured_output import compiler

def compile(compilation, kind, source):
    os.write(1, b"what some library prints")
    while source == "endless":
        pass
    return source.encode()

compiler.Compilation.compile = compile
compiler.main()
"""


def answer(file: BinaryIO) -> Compiled | Refused | Started:
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    return msgspec.msgpack.decode(file.read(length), type=Compiled | Refused | Started)


def test_what_others_print_is_no_answer_and_an_endless_job_ends_the_child(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 258}')
    ends = [int(byte_tokenizer().eos_token_id)]
    options = ["--model", str(tmp_path), "--vocabulary-size", "258", "--end-tokens", str(ends), "--longest-s", "1"]
    command = [sys.executable, "-c", CHILD, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert answer(child.stdout) == Started()
            for source in ("a", "b", "endless"):
                data = msgspec.msgpack.encode(Job("regex", source))
                child.stdin.write(LENGTH.pack(len(data)) + data)
                child.stdin.flush()
                if source != "endless":
                    assert answer(child.stdout) == Compiled(source.encode())
            assert child.wait(30) == -signal.SIGALRM
        finally:
            child.kill()


def test_what_is_too_large_for_the_engine_does_not_leave_the_child() -> None:
    assert _checked(b"x") == Compiled(b"x")
    refused = _checked(bytes(MAX_COMPILED_BYTES + 1))
    assert isinstance(refused, Refused) and str(MAX_COMPILED_BYTES) in refused.reason
