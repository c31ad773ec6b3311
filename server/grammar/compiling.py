"""From a grammar's source to what a matcher runs on, by xgrammar: in a process that may be killed."""

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import xgrammar

from vmmkv.server.grammar.asked import Kind
from vmmkv.server.grammar.least import check_ends
from vmmkv.server.grammar.matcher import Matcher
from vmmkv.server.grammar.vocabulary import Vocabulary
from vmmkv.server.grammar.watch import CALL_S

TRIED_TOKENS: Final = 64
TRIED_S: Final = 0.5
"""For so many tokens, a hundred times what a grammar takes. A few letters of an ambiguous one can take seconds for each; and no
call may take more than the engine would wait for.
"""
_TOO_SLOW: Final = "it takes too long to follow; make it simpler"
T = TypeVar("T")


class Compilation:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
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

    def _try(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Follow it for some tokens, any of them and then the longest: what is slow where nobody was here the engine finds.

        Raises: ValueError if that takes too long.
        """
        check_ends(compiled.grammar.serialize_json(), lambda pattern: xgrammar.Grammar.from_regex(pattern).serialize_json())
        for wants_long in (False, True):
            numbers, began_s = np.random.default_rng(0), time.thread_time()
            matcher = Matcher(compiled, self._vocabulary)
            for _ in range(TRIED_TOKENS):
                if not self._step(matcher, numbers, wants_long):
                    break
                if time.thread_time() - began_s > TRIED_S:
                    raise ValueError(_TOO_SLOW)

    def _step(self, matcher: Matcher, numbers: np.random.Generator, wants_long: bool) -> bool:
        """A token, if any can come. Raises: ValueError if one call takes too long."""
        vocabulary = self._vocabulary
        _in_time(matcher.forced_text)
        words = _in_time(matcher.mask) & ~vocabulary.ends
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: vocabulary.size])
        if wants_long and len(allowed):
            num_bytes = vocabulary.num_bytes[allowed]
            allowed = allowed[num_bytes == num_bytes.max()]
        return bool(len(allowed)) and _in_time(lambda: matcher.accept(int(numbers.choice(allowed))))

    def _compiled(self, kind: Kind, source: str) -> xgrammar.CompiledGrammar:
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
