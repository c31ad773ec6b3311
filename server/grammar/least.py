"""The shortest text of each rule of a grammar: one that has none never ends, and its forced text would be without end.

xgrammar looks for forced text without a limit: `root ::= "a" root` keeps it for ever, a rule that doubles thirty times for as
good as that. Both are seen here before they are followed, wherever in the grammar they hide.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

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
