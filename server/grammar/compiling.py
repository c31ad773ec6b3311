"""From a grammar's source to what a matcher runs on, by xgrammar: in a process that may be killed."""

import json
import re
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import xgrammar

from vmmkv.server.grammar.asked import Kind
from vmmkv.server.grammar.matcher import Matcher
from vmmkv.server.grammar.vocabulary import Vocabulary

TRIED_TOKENS: Final = 64
TRIED_S: Final = 0.5
"""For so many tokens, a hundred times what a grammar takes. A few letters of an ambiguous one can take seconds for each."""


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
        """Follow it for some tokens: in the engine everybody would wait for it. Raises: ValueError if that takes too long."""
        vocabulary, numbers, began_s = self._vocabulary, np.random.default_rng(0), time.thread_time()
        matcher = Matcher(compiled, vocabulary)
        for _ in range(TRIED_TOKENS):
            words = matcher.mask() & ~vocabulary.ends
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: vocabulary.size])
            if not len(allowed) or not matcher.accept(int(numbers.choice(allowed))):
                return
            if time.thread_time() - began_s > TRIED_S:
                raise ValueError("it takes too long to follow; make it simpler")

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


def _alternatives(choices: Sequence[str]) -> str:
    return " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(one: str) -> str:
    return one if one.isalnum() and one.isascii() else f"\\U{ord(one):08x}"


def _reason(error: RuntimeError) -> str:
    """What xgrammar says, without the time and the line of its source."""
    return re.sub(r"^\[[\d:]+\] \S+\.\w+:\d+: ", "", str(error)).strip().rstrip(".") or "it cannot be compiled"
