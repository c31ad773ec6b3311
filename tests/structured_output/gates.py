"""Gates, grammars for them, and answers that a model which knows nothing gives by them."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from tests.engine.conftest import Harness
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.protocol import Gate
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.matcher import Matcher, Vocabulary

PARTS = ("<a", "a>", "<a>", ">b", "<a>b<", "b<", "\n\n", "a>bé", "<S>", "\n```\n<")
"""Tokens beside those of single bytes; `<S>` is special."""
SIZE = 272


@functools.cache
def vocabulary() -> Vocabulary:
    """One with several ways to write a text, in which texts begin and end within tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(part, special=part == "<S>") for part in PARTS])
    return Vocabulary(tokenizer, SIZE, [int(tokenizer.eos_token_id)])


def part(text: str) -> int:
    return vocabulary().token_bytes.index(text.encode(), 258)


BIAS = {part(each): 8.0 for each in PARTS} | dict.fromkeys(token_ids("<a>b! "), 8.0)
"""So that a model that knows nothing writes texts that are looked for, and little else."""

GRAMMARS = {
    "free": 'root ::= "<a>" [ab]{1,4} "!"',
    "forced": 'root ::= "<a>" "abba" [ab]{0,3} "!!"',
    "whole": 'root ::= "<a>"',
    "special": 'root ::= ("<S>" | "<a>") "b" [ab]{1,9} "!"',
}
GATES = {
    "once": Gate(triggers=("<a>",)),
    "again": Gate(triggers=("<a>",), repeats=True),
    "several": Gate(triggers=("<a>b", "<a>", "<S>"), repeats=True),
    "first": Gate(triggers=("<a>", "<S>"), is_first=True),
    "first again": Gate(triggers=("<a>",), is_first=True, repeats=True),
    "behind": Gate(behind=">b", triggers=("<a>",), repeats=True),
    "first behind": Gate(behind="b<", triggers=("<a>",), is_first=True),
    "only behind": Gate(behind="a>b"),
    "not in code": Gate(triggers=("<a>b", "<a>"), repeats=True, in_code=False),
    "behind, not in code": Gate(behind=">b", triggers=("<a>",), in_code=False),
}


@functools.cache
def compiled(source: str) -> bytes:
    return Compilation(vocabulary()).compile("ebnf", source)


class Replay:
    """What a gate says of an answer, found by comparing all of its text behind each token."""

    def __init__(self, gate: Gate, names: Sequence[bytes]) -> None:
        self.gate, self.names, self.text = gate, names, b""
        self.begin, self.waits = 0, bool(gate.behind)
        self.content = b""
        """Free text before `begin`."""

    def restart(self, free: int) -> None:
        """A grammar that began there has ended with the text."""
        self.content, self.begin = self.content + self.text[self.begin : free], len(self.text)

    def found(self, token: int) -> list[bytes]:
        """The texts that the grammar may begin with, behind one more token."""
        before = len(self.text)
        self.text += self.names[token]
        if self.waits:
            behind = self.gate.behind.encode()
            place = self.text.find(behind, self.begin)
            if place < 0:
                return []
            self.waits, self.begin = False, place + len(behind)
            if not self.gate.triggers:
                return [self.text[self.begin :], b""]
        found = []
        for start in range(self.begin, len(self.text)):
            triggers = [each.encode() for each in self.gate.triggers if self.text.startswith(each.encode(), start)]
            is_first = not self.text[self.begin : start].strip()
            is_code = not self.gate.in_code and (self.content + self.text[self.begin : start]).count(b"\n```\n") % 2
            if any(start + len(each) > before for each in triggers) and (is_first or not self.gate.is_first) and not is_code:
                found.append(self.text[start:])
        return found


def assert_follows(one: Harness, name: str, gate: Gate, words: Vocabulary, data: bytes) -> tuple[int, int]:
    """The answer begins its grammar where the gate says, and follows it. Returns its free tokens, and how often it began."""
    replay, matcher, num_free, num_begun, begins = Replay(gate, words.token_bytes), None, None, 0, 0
    tokens, grammar = one.tokens(name), words.read(data)
    for index, token in enumerate(tokens):
        is_last = index == len(tokens) - 1
        if matcher is None:
            found = replay.found(token)
            fresh = Matcher(grammar, words)
            begun = next((each for each in found if fresh.begin(each, [])), None)
            if begun is not None:
                matcher, num_begun, begins = fresh, num_begun + 1, len(replay.text) - len(begun)
                num_free = index + 1 if num_free is None else num_free
        else:
            replay.text += words.token_bytes[token]
            assert matcher.accept(token), (name, index, words.rust.decode(tokens))
        if matcher is not None and matcher.must_end():
            assert gate.repeats or is_last or one.logprobs(name)
            if gate.repeats:
                matcher = None
                replay.restart(begins)
    if one.finish_reasons(name)[-1] == "stop" and matcher is not None:
        assert matcher.must_end() or matcher.accept(words.info.stop_token_ids[0])
    return len(tokens) if num_free is None else num_free, num_begun


def ask(one: Harness, name: str, seed: int, max_tokens: int = 30, prompt: str = "?", **options: Any) -> None:
    options = {"temperature": 1.0, "seed": seed, "logit_bias": BIAS} | options
    one.ask(name, token_ids(prompt), max_tokens, **options)


ASKED = {
    f"{gate} {grammar} {seed}": (GATES[gate], GRAMMARS[grammar], seed)
    for seed, (gate, grammar, _) in enumerate(itertools.product(GATES, GRAMMARS, range(2)))
}
Answers = Mapping[str, tuple[list[int], str | None]]


def ask_all(one: Harness, **options: Any) -> Answers:
    for name, (gate, source, seed) in ASKED.items():
        ask(one, name, seed, grammar=compiled(source), gate=gate, **options)
    one.run()
    assert one.failures() == {}
    assert not one.engine.scheduler.table.constrained.any()
    return {name: (one.tokens(name), one.finish_reasons(name)[-1]) for name in ASKED}
