"""From a grammar's source to what a matcher runs on, by xgrammar: in a process that may be killed."""

import json
import re
from collections.abc import Sequence

import xgrammar

from vmmkv.server.grammar.asked import Kind
from vmmkv.server.grammar.vocabulary import Vocabulary


class Compilation:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)

    def compile(self, kind: Kind, source: str) -> bytes:
        """As text, for `CompiledGrammar.deserialize_json`. Raises: ValueError saying what is wrong with it."""
        try:
            return self._compiled(kind, source).serialize_json().encode()
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error

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
