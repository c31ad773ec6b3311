"""Patterns and formats of JSON strings, as rules over the characters between the quotes.

    pattern ── Pattern.read ──> tree ──> anchored: of whole strings ──> fit: to lengths ──> rule: GBNF over JSON's text

Regular expressions are ECMA-262's with code points, as JSON Schema has them: `\\d` is `[0-9]`, `\\w` is `[A-Za-z0-9_]`, and
`\\D`, `\\W`, `[^\\d]` and `[^\\w]` are all other characters, digits and letters of other scripts among them. Dialects have more
or fewer line breaks and spaces, of which a tree matches only what all do: `.` is no line break of any, `\\s` a space of all,
`\\S` and `[^\\s]` no space of any.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Final, TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, from the first to the last of each range; sorted and apart."""

LAST: Final = 0x10FFFF
MAX_REPETITIONS: Final = 4096
"""Most repetitions of a part of a pattern, of characters or of items: each is a copy of a rule."""
MAX_PATTERN_CHARS: Final = 4096
MAX_BRANCHES: Final = 256
"""Most alternatives of a pattern with anchors in alternatives."""


class PatternRefused(ValueError):
    """A pattern that is no regular expression, or asks for what no grammar can follow."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Series:
    """Parts, one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    branches: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part several times. No maximum if it is None."""

    part: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The begin or the end of the string."""

    is_end: bool


Node: TypeAlias = Characters | Series | Choice | Repeat | Anchor


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def _complement(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for first, last in ranges:
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return (*found, (low, LAST)) if low <= LAST else tuple(found)


def _common(one: Ranges, other: Ranges) -> Ranges:
    return _complement(_joined((*_complement(one), *_complement(other))))


def _of(text: str) -> Ranges:
    return _joined((ord(character), ord(character)) for character in text)


ANY: Final = Characters(((0, LAST),))
ANYTHING: Final = Repeat(ANY, 0, None)
_DOT: Final = Characters(_complement(_of("\n\r\u2028\u2029")))
_BLANK: Final = ((32, 32),)
_DIGIT: Final = ((48, 57),)
_WORD: Final = _joined([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE: Final = _joined(
    [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
     (0x205F, 0x205F), (0x3000, 0x3000)]
)  # fmt: skip
_SPACE_OF_SOME: Final = _joined([*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)])
"""Spaces of any dialect."""
_CLASSES: Final[Mapping[str, tuple[Ranges, Ranges]]] = {
    "d": (_DIGIT, _DIGIT),
    "w": (_WORD, _WORD),
    "s": (_SPACE, _SPACE_OF_SOME),
    "D": (_complement(_DIGIT),) * 2,
    "W": (_complement(_WORD),) * 2,
    "S": (_complement(_SPACE_OF_SOME), _complement(_SPACE)),
}
"""Classes by their letter: characters of the class in all dialects, and in any."""
_CONTROLS: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_COUNTS: Final = re.compile(r"\{([0-9]+)(,([0-9]+)?)?\}")
_COUNTS_OF_SOME: Final = re.compile(r"\{,[0-9]+\}")
"""From 0 in some dialects, and text in others."""
_GROUP: Final = re.compile(r"\?(:|<[A-Za-z_]\w*>)")
_CODE: Final = re.compile(r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([dD][89abAB]..)\\u([dD][c-fC-F]..)|u([0-9a-fA-F]{4})")


class _Reader:
    """A recursive-descent reader of one regular expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternRefused("a ) closes nothing")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > 64:
            raise PatternRefused("it is nested more than 64 levels deep")
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._peek() not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        counts = _COUNTS.match(self._text, self._at)
        if counts is not None:
            self._at = counts.end()
            low = int(counts[1])
            high = low if counts[2] is None else None if counts[3] is None else int(counts[3])
        elif self._peek() and self._peek() in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._peek()]
            self._at += 1
        else:
            return part
        if isinstance(part, Anchor):
            raise PatternRefused("it repeats an anchor")
        if high is not None and high < low:
            raise PatternRefused(f"it repeats {low} to {high} times")
        if max(low, high or 0) > MAX_REPETITIONS:
            raise PatternRefused(f"it repeats something {max(low, high or 0)} times, and {MAX_REPETITIONS} are served")
        self._takes("?")  # lazy: the same strings
        if self._peek() == "+":
            raise PatternRefused("possessive repetitions are not served")
        if (self._peek() and self._peek() in "*?") or _COUNTS.match(self._text, self._at):
            raise PatternRefused("it repeats a repetition; put that into a group")
        return Repeat(part, low, high)

    def _atom(self) -> Node:
        if self._takes("("):
            if self._peek() == "?":
                group = _GROUP.match(self._text, self._at)
                if group is None:
                    kind = {"=": "lookahead", "!": "lookahead", "<": "lookbehind"}.get(self._text[self._at + 1 : self._at + 2])
                    raise PatternRefused(f"{kind or 'that kind of group'} is not served")
                self._at = group.end()
            node = self._choice()
            if not self._takes(")"):
                raise PatternRefused("a ( is not closed")
            return node
        if self._takes("["):
            return self._set()
        if self._takes("^"):
            return Anchor(is_end=False)
        if self._takes("$"):
            return Anchor(is_end=True)
        if self._takes("."):
            return _DOT
        if self._takes("\\"):
            return Characters(self._escaped(is_narrow=True, in_set=False))
        character = self._peek()
        if character in "*+?":
            raise PatternRefused(f"{character} repeats nothing")
        if (counts := _COUNTS_OF_SOME.match(self._text, self._at)) is not None:
            raise PatternRefused(f"{counts[0]} has no first number; write {counts[0].replace(',', '0,')}")
        self._at += 1
        return Characters(_of(character))

    def _escaped(self, *, is_narrow: bool, in_set: bool) -> Ranges:
        if (code := _CODE.match(self._text, self._at)) is not None:
            self._at = code.end()
            if code[3] is not None:
                return _of(chr(0x10000 + ((int(code[3], 16) & 0x3FF) << 10) + (int(code[4], 16) & 0x3FF)))
            number = int(code[1] or code[2] or code[5], 16)
            if number > LAST:
                raise PatternRefused(f"U+{number:X} is no character")
            return ((number, number),)
        character = self._peek()
        self._at += 1
        if character in _CLASSES and character:
            return _CLASSES[character][0 if is_narrow else 1]
        if character in _CONTROLS and character:
            return _of(_CONTROLS[character])
        if character == "0" and not self._peek().isdigit():
            return ((0, 0),)
        if character == "b" and in_set:
            return ((8, 8),)
        if not character or character.isalnum():
            raise PatternRefused(f"\\{character} is not served")
        return _of(character)

    def _set(self) -> Node:
        is_negated = self._takes("^")
        found: list[tuple[int, int]] = []
        while not self._takes("]"):
            if self._at >= len(self._text):
                raise PatternRefused("a [ is not closed")
            first = self._member(is_narrow=not is_negated)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(is_narrow=not is_negated)
                (low, same), (high, end) = first[0], last[-1]
                if len(first) != 1 or len(last) != 1 or low != same or high != end or low > high:
                    raise PatternRefused("a range of characters has no order")
                found.append((low, high))
            else:
                found += first
        ranges = _joined(found)
        ranges = _complement(ranges) if is_negated else ranges
        if not found or not ranges:  # in some dialects a ] at the begin is one of the set
            raise PatternRefused("a set is empty")
        return Characters(ranges)

    def _member(self, *, is_narrow: bool) -> Ranges:
        if self._takes("\\"):
            return self._escaped(is_narrow=is_narrow, in_set=True)
        character = self._peek()
        if (character == "[" and self._text[self._at + 1 : self._at + 2] in (":", "[")) or self._text.startswith(
            ("&&", "--"), self._at
        ):
            raise PatternRefused("sets of sets are not served")
        self._at += 1
        return _of(character)


@cache
def read(pattern: str) -> Node:
    """The tree of a pattern that a string holds anywhere, as one of whole strings. Raises: PatternRefused."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternRefused(f"it has {len(pattern)} characters and may have {MAX_PATTERN_CHARS}")
    return _whole(_Reader(pattern).read())


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Series | Choice):
        return any(map(_has_anchor, node.parts if isinstance(node, Series) else node.branches))
    return isinstance(node, Anchor) or (isinstance(node, Repeat) and _has_anchor(node.part))


def _whole(node: Node) -> Node:
    branches = []
    for parts in _branches(node):
        begins, ends = 0, len(parts)
        while begins < ends and parts[begins] == Anchor(is_end=False):
            begins += 1
        while ends > begins and parts[ends - 1] == Anchor(is_end=True):
            ends -= 1
        inner = parts[begins:ends]
        if any(map(_has_anchor, inner)):
            raise PatternRefused("^ and $ are served at the begin and the end")
        if not begins:
            inner = [ANYTHING, *(inner[1:] if inner and _is_skipped(inner[0]) else inner)]
        if ends == len(parts):
            inner = [*(inner[:-1] if inner and _is_skipped(inner[-1]) else inner), ANYTHING]
        branches.append(inner[0] if len(inner) == 1 else Series(tuple(inner)))
    return branches[0] if len(branches) == 1 else Choice(tuple(branches))


def _is_skipped(node: Node) -> bool:
    """Beside ANYTHING: it adds nothing."""
    return isinstance(node, Repeat) and not node.minimum and isinstance(node.part, Characters)


def _branches(node: Node) -> list[list[Node]]:
    """Alternatives of a node, as far down as they have anchors."""
    if isinstance(node, Choice):
        found = [parts for branch in node.branches for parts in _branches(branch)]
    elif isinstance(node, Series):
        found = [[]]
        for part in node.parts:
            ways = _branches(part) if _has_anchor(part) and not isinstance(part, Anchor) else [[part]]
            found = [[*before, *way] for before in found for way in ways]
            if len(found) > MAX_BRANCHES:
                break
    elif isinstance(node, Repeat) and _has_anchor(node):
        if (node.minimum, node.maximum) != (0, 1):
            raise PatternRefused("^ and $ are served at the begin and the end")
        found = [[], *_branches(node.part)]
    else:
        found = [[node]]
    if len(found) > MAX_BRANCHES:
        raise PatternRefused(f"its anchors stand in more than {MAX_BRANCHES} alternatives")
    return found


def matches(node: Node, text: str, count: Callable[[int], None] = lambda num_places: None) -> bool:
    """Is the whole text one of the pattern's? Takes time in proportion to both, and to counts.

    `count` is told of the places in the text from which a part of the pattern is tried, and may raise.
    """
    return len(text) in _ends(node, text, frozenset([0]), count)


def _ends(node: Node, text: str, starts: frozenset[int], count: Callable[[int], None]) -> frozenset[int]:
    count(1 + len(starts))
    if isinstance(node, Characters):
        return frozenset(
            start + 1
            for start in starts
            if start < len(text) and any(low <= ord(text[start]) <= high for low, high in node.ranges)
        )
    if isinstance(node, Choice):
        return frozenset[int]().union(*(_ends(branch, text, starts, count) for branch in node.branches))
    if isinstance(node, Series):
        for part in node.parts:
            starts = _ends(part, text, starts, count)
        return starts
    assert isinstance(node, Repeat), "anchors are gone"
    found, times = starts if not node.minimum else frozenset[int](), 0
    while starts and (node.maximum is None or times < node.maximum):
        starts, times = _ends(node.part, text, starts, count), times + 1
        if times >= node.minimum:
            if starts <= found:
                break
            found |= starts
            count(len(found) // 8)  # it is copied
    return found


def lengths(node: Node) -> tuple[int, float]:
    """The characters of its shortest and longest strings."""
    if isinstance(node, Characters):
        return 1, 1
    if isinstance(node, Choice):
        each = [lengths(branch) for branch in node.branches]
        return min(low for low, _ in each), max(high for _, high in each)
    if isinstance(node, Series):
        each = [lengths(part) for part in node.parts]
        return sum(low for low, _ in each), sum(high for _, high in each)
    assert isinstance(node, Repeat), "anchors are gone"
    low, high = lengths(node.part)
    return node.minimum * low, 0 if not high else high * (inf if node.maximum is None else node.maximum)


def fit(node: Node, minimum: int, maximum: float) -> Node | None:
    """A pattern of strings of this one with these lengths: of all, if one part at most is repeated. None if it finds none."""
    low, high = lengths(node)
    if minimum <= low and high <= maximum:
        return node
    if isinstance(node, Choice):
        fitted = [one for branch in node.branches if (one := fit(branch, minimum, maximum)) is not None]
        return (fitted[0] if len(fitted) == 1 else Choice(tuple(fitted))) if fitted else None
    parts = list(node.parts) if isinstance(node, Series) else [node]
    if len(parts) == 1 and isinstance(node, Series):
        return fit(parts[0], minimum, maximum)
    # The last of the longest repetitions takes what the others leave; others without an end are cut to their shortest.
    free = [index for index, part in enumerate(parts) if isinstance(part, Repeat) and _unit(part)]
    if not free:
        return None
    taker = max(free, key=lambda index: (lengths(parts[index])[1], index))
    for index in free:
        part = parts[index]
        assert isinstance(part, Repeat)
        if index != taker and part.maximum is None and maximum < inf:
            parts[index] = Repeat(part.part, part.minimum, part.minimum)
    part = parts[taker]
    assert isinstance(part, Repeat)
    others = [lengths(other) for index, other in enumerate(parts) if index != taker]
    unit, others_low, others_high = _unit(part), sum(low for low, _ in others), sum(high for _, high in others)
    most = inf if maximum == inf else (maximum - others_high) // unit
    least = max(part.minimum, -((others_low - minimum) // unit))
    most = min(most, inf if part.maximum is None else part.maximum)
    if most != most or most < least or least > MAX_REPETITIONS:
        return None
    parts[taker] = Repeat(part.part, int(least), None if most == inf else int(most))
    return parts[0] if len(parts) == 1 else Series(tuple(parts))


def _unit(part: Repeat) -> int:
    """The characters of what it repeats; 0 if they differ."""
    low, high = lengths(part.part)
    return low if low == high else 0


# As GBNF.

_PLAIN: Final = _complement(_joined([(0, 0x1F), (34, 34), (92, 92), (0xD800, 0xDFFF)]))
"""Characters of a JSON string that stand for themselves."""
_SCALARS: Final = ((0, 0xD7FF), (0xE000, LAST))
"""All characters: without halves of surrogate pairs."""
_SHORT: Final[Mapping[int, str]] = {34: '"', 92: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
UNESCAPED: Final = r'[^"\\\x00-\x1f]'
"""The same class without `^` takes a thousand times as long to mask."""
CHARACTERS: Final = rf'"\"" | {UNESCAPED} characters | "\\" escape characters (= [,}}\]:])'
"""Any number of characters and the quote behind them; what may follow it makes masks cheap."""
ESCAPE: Final = r'["\\/bfnrt] | "u" ([0-9a-cefA-CEF] [0-9a-fA-F] | [dD] [0-7]) [0-9a-fA-F]{2}'
"""Numbered ones too, but for halves of characters."""
MAX_NESTED_REPETITIONS: Final = 100
"""Most repetitions of a character that JSON may escape, at the end of a group that is repeated itself."""
RUN: Final = 32
"""Characters of one run. Tokens that are longer than half of it are tried one by one."""
_NO_TOKEN: Final = r'(= "\x00")'
"""Behind a rule: no token reaches beyond it. In fact any may, but those are left to other rules."""


def is_plain(character: str) -> bool:
    """Does it stand for itself in a JSON string?"""
    return any(low <= ord(character) <= high for low, high in _PLAIN)


def quoted(text: str) -> str:
    """A text as GBNF."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    return character if character.isalnum() and character.isascii() else _code(character)


class Rules:
    """Writes strings of patterns as JSON has them. `make` gives the name of a rule with this body; it may be there.

    Where a character can be an escape, each repetition of it is a *step*: a rule that ends with the next one. A group that is
    repeated instead takes a hundred times as long to mask: no token of several characters is known to fit before it is tried.

    A step takes 10 ms to compile, for 49,152 tokens. So of more than RUN characters only the last are steps, and those before
    them are written three times, to be followed side by side. That takes 0.6 s for any number of them, and masks take as long
    as those of strings without a limit.

        one by one     a rule for a character, which ends behind it: exact, but tokens of several are tried
        in runs        rules of RUN steps, which end behind them: tokens within a run are known to fit
        in other runs  which begin and end half a run later, so that always one of both has half a run left
    """

    def __init__(self, make: Callable[[str, str], str], add: Callable[[str, str], object]) -> None:
        self._make = make
        self._add = add
        self._loops: dict[tuple[str, ...], str] = {}

    def string(self, node: Node) -> str:
        """GBNF of the whole string. Raises: PatternRefused if JSON has none of them."""
        return f"{_QUOTE} {self._before(node, _QUOTE, _ways)}"

    def markup(self, node: Node, tag: str, end: str) -> str:
        """GBNF of the string as it is, without quotes and escapes, with `tag` or `end` behind it.

        `tag` begins with a character that it has once, and closes a string that may be anything else. Other strings have
        `end` behind them, which holds the tag, and lack that character. Raises: PatternRefused if there are none of them.
        """
        if node == ANYTHING:
            return self._until(tag)
        others = _common(_SCALARS, _complement(_of(tag[0])))

        def ways(ranges: Ranges) -> tuple[str, ...]:
            if not (kept := _common(ranges, others)):
                raise PatternRefused(f"it asks for {tag[0]}, which is served in no string of this form that has a pattern")
            return (_class(kept),)

        return self._before(node, quoted(end), ways)

    def _before(self, node: Node, then: str, ways: Callable[[Ranges], Sequence[str]]) -> str:
        """GBNF of a node with `then` behind it: the name of a rule, or one text. `ways` writes one character."""
        if isinstance(node, Characters):
            return _one_of([f"{way} {then}" for way in ways(node.ranges)])
        if isinstance(node, Choice):
            then = self._named(then)
            return _one_of([self._before(branch, then, ways) for branch in node.branches])
        if isinstance(node, Series):
            for part in reversed(node.parts):
                then = self._before(part, self._named(then), ways)
            return then or '""'
        assert isinstance(node, Repeat), "anchors are gone"
        if isinstance(node.part, Characters) and len(ways(node.part.ranges)) > 1:
            return self._repeated(node.part.ranges, node.minimum, node.maximum, self._named(then))
        if node.maximum == 0:
            return then or '""'
        return f"({self._before(node.part, '', ways).rstrip()}){_counts(node.minimum, node.maximum)} {then}"

    def _until(self, tag: str) -> str:
        """The name of a rule of any text up to a tag, with the tag. The tag begins with a character that it has once."""
        key = ("", tag)
        if key not in self._loops:
            states = [f"until{len(self._loops) * 100 + index}" for index in range(len(tag))]
            self._loops[key] = states[0]
            others = [f"{quoted(tag[0])} {states[1]}", f"[^{_code(tag[0])}] {states[0]}"]
            for index, state in enumerate(states):  # characters of the tag so far
                if index:
                    behind = states[index + 1] if index + 1 < len(tag) else ""
                    others = [
                        f"{quoted(tag[index])} {behind}".rstrip(),
                        f"{quoted(tag[0])} {states[1]}",
                        f"[^{_code(tag[0])}{_code(tag[index])}] {states[0]}",
                    ]
                self._add(state, " | ".join(others))
        return self._loops[key]

    def _repeated(self, ranges: Ranges, minimum: int, maximum: int | None, then: str) -> str:
        """A character of a set several times, of which some ways to write it are escapes."""
        counted = minimum if maximum is None else min(maximum, MAX_REPETITIONS)
        if not then:
            if counted > MAX_NESTED_REPETITIONS:
                raise PatternRefused(
                    f"it counts {counted} characters within a group that is repeated, and {MAX_NESTED_REPETITIONS} are served "
                    "there of those that JSON may escape; leave the count out, and send max_tokens"
                )
            return f"{_one_of(_ways(ranges))}{_counts(minimum, maximum)}"

        def rest(at: int) -> str:
            """GBNF behind so many characters, of which the last are steps."""
            return self._steps(_ways(ranges), max(0, minimum - at), None if maximum is None else counted - at, then)

        head = counted - RUN
        if head <= 0:
            return rest(0)
        exact = self._one_by_one(ranges, min(minimum, head), head, then, rest(head))
        runs = [f"{self._runs(ranges, end)} {rest(end)}" for end in (head, head + RUN // 2)]
        return self._make("counted", " | ".join([exact, *runs]))

    def _steps(self, ways: Sequence[str], minimum: int, maximum: int | None, then: str) -> str:
        """A step for each character."""
        if maximum is None:
            rest = self._any_number(ways, then)
        else:
            rest = then
            for _ in range(maximum - minimum):
                rest = self._make("upto", " | ".join([then, *(f"{way} {rest}" for way in ways)]))
        for _ in range(minimum):
            rest = self._make("text", " | ".join(f"{way} {rest}" for way in ways))
        return rest

    def _one_by_one(self, ranges: Ranges, minimum: int, maximum: int, early: str, rest: str) -> str:
        """So many characters and the `rest`, or fewer and `early`."""
        # With a rule in it: xgrammar writes one without into those that have it.
        one = self._make("one", " | ".join([*_plain(ranges), self._make("escape", " | ".join(_escapes(ranges)))]))

        def times(count: int) -> str:
            parts = [one] * (count % RUN)
            return " ".join([*[self._make("many", " ".join([one] * RUN))] * (count // RUN), *parts])

        def upto(count: int) -> str:
            """At most so many, and `early`."""
            found = early
            for _ in range(count):
                found = self._make("upto", f"{early} | {one} {found}")
            return found

        whole, first = divmod(maximum - minimum, RUN)
        for count in [RUN] * whole + [first] * bool(first):  # from the end, which all maxima share
            rest = self._make("upto", f"{upto(count - 1)} | {times(count)} {rest}")
        return f"{times(minimum)} {rest}".lstrip()

    def _runs(self, ranges: Ranges, count: int) -> str:
        """So many characters: first what is no whole run, so that all runs end where the last one does."""
        # A mask is stored as the tokens that fit, which other rules need not try, if a thousand begin with other characters.
        blank, others = (_plain(_common(ranges, each)) for each in (_BLANK, _complement(_BLANK)))
        rest, runs = "", [""]
        for _ in range(min(count, RUN)):
            ways = [f"{way} {rest}".rstrip() for way in (*others, *_escapes(ranges))]
            ways += [self._make("blank", f"{way} {rest} {_NO_TOKEN}") for way in blank]
            rest = self._make("run", f"{' | '.join(ways)} {_NO_TOKEN}")
            runs.append(rest)
        return " ".join([runs[count % RUN], *[rest] * (count // RUN)]).lstrip()

    def _any_number(self, ways: Sequence[str], then: str) -> str:
        if ways == _ways(ANY.ranges) and then == _QUOTE:
            self._add("characters", CHARACTERS)
            self._add("escape", ESCAPE)
            return "characters"
        key = (*ways, then)
        if key not in self._loops:
            name = self._loops[key] = f"loop{len(self._loops)}"
            self._add(name, " | ".join([then, *(f"{way} {name}" for way in ways)]))
        return self._loops[key]

    def _named(self, then: str) -> str:
        return then if " " not in then else self._make("text", then)


def _counts(minimum: int, maximum: int | None) -> str:
    if maximum is None and minimum < 2:
        return "+" if minimum else "*"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


_QUOTE: Final = r'"\""'


def _one_of(ways: Sequence[str]) -> str:
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"


@cache
def _ways(ranges: Ranges) -> tuple[str, ...]:
    """The ways in which JSON writes characters. Raises: PatternRefused if there are none."""
    if ways := (*_plain(ranges), *_escapes(ranges)):
        return ways
    raise PatternRefused("it asks for half of a surrogate pair, which is no character")


@cache
def _plain(ranges: Ranges) -> tuple[str, ...]:
    """Characters of the ranges that stand for themselves, in one class; none if there are none."""
    if ranges == ANY.ranges:
        return (UNESCAPED,)
    plain = _common(ranges, _PLAIN)
    return (_class(plain),) if plain else ()


def _class(ranges: Ranges) -> str:
    """A class of characters."""
    is_negated = ranges[-1][1] == LAST
    written = "".join(
        _code(chr(low)) if low == high else f"{_code(chr(low))}-{_code(chr(high))}"
        for low, high in (_common(_complement(ranges), _SCALARS) if is_negated else ranges)
    )
    return f"[{'^' if is_negated else ''}{written}]"


def _code(character: str) -> str:
    """A character as an escape of GBNF."""
    return f"\\U{ord(character):08x}"


@cache
def _escapes(ranges: Ranges) -> tuple[str, ...]:
    """Escapes of the characters of the ranges."""
    if ranges == ANY.ranges:
        return (r'"\\" ["\\/bfnrt]',)
    ways = []
    codes = [code for low, high in ranges for code in range(low, min(high, 92) + 1) if code < 32 or code in _SHORT]
    if short := "".join(f"\\U{ord(_SHORT[code]):08x}" for code in codes if code in _SHORT):
        ways.append(rf'"\\" [{short}]')
    if ranges[-1][1] != LAST:  # a set of nearly all is not meant for these
        ways += [quoted(f"\\u{code:04x}") for code in codes if code not in _SHORT]
    return tuple(ways)


# Formats.

_DAY: Final = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
# From the year 0000, which is a leap year, to 9999, as in RFC 3339.
_DATE: Final = (
    f"([0-9]{{4}}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-{_DAY})|{_LEAP_YEAR}-02-29)"
)
_HOURS: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[a-z0-9]{1,16}(-[a-z0-9]{1,15}){0,2}"
_HOST: Final = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_EMAIL: Final = rf"[a-z0-9_+-]{{1,32}}(\.[a-z0-9_+-]{{1,16}})?@({_LABEL}\.){{1,3}}[a-z]{{2,10}}"
_HEX: Final = "[0-9a-f]{1,4}"
_PATH: Final = r"(/([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)*"
_BEHIND: Final = r"([a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*"
_URI: Final = rf"[a-z][a-z0-9+.-]*://{_HOST}(:[0-9]{{1,4}})?{_PATH}(\?{_BEHIND})?(#{_BEHIND})?"
_REFERENCE: Final = rf"({_URI}|(/[a-zA-Z0-9._~-]+)+(\?{_BEHIND})?(#{_BEHIND})?|#{_BEHIND})"
_SPAN: Final = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_POINTER: Final = "(/([ -.0-}]|~[01])*)*"

FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)({_SPAN})?|{_SPAN})",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"(({_HEX}:){{7}}{_HEX}|({_HEX}(:{_HEX}){{0,2}})?::({_HEX}(:{_HEX}){{0,3}})?)",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": _REFERENCE,
    "base64": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
"""Common values of the formats that JSON Schema defines. It calls all others annotations, but for UNSERVED_FORMATS."""
UNSERVED_FORMATS: Final = frozenset(["regex"])


@cache
def of_format(name: str) -> Node:
    """The tree of a served format."""
    return read(f"^({FORMATS[name]})$")
