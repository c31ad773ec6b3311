"""Readers of answers: text, into parts as it comes. Reasoning comes first, then text and calls.

A form's reader says in straight lines what it expects, in generators that wait for more text by `yield`. Its decisions depend
on the text alone, so the parts are the same however the text is cut into pieces.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias, TypeVar

from vmmkv_server.structured_output.code_blocks import CodeBlocks
from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Part, Reasoning, Toolset
from vmmkv_server.tools.json_text import JsonText, NotJson
from vmmkv_server.tools.reasoning import ReasoningReader

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""A part of a reader: waits for text by `yield`, and returns what it has read."""

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")


class NoCall(Exception):
    """Text that only looks like a call."""


class EndOfAnswer(Exception):
    """The end of the answer, where more text was expected."""


class CallReader(ABC):
    """The text of one answer: `feed` it in any pieces, then `finish`.

    Text that only looks like a call is content, such as one of a tool that is unknown, or of broken JSON. Once a call has
    begun, it stays a call: its arguments end where they are cut off or broken, and what follows is content.
    White space in front of a call, and behind the last one, belongs to the calls. So does the begin of a call that the end of
    the answer cuts off: behind a trigger or a call, or anywhere if the answer must call.
    """

    def __init__(self, toolset: Toolset) -> None:
        self.tools = {tool.name: tool for tool in toolset.callable_tools}
        self._most_calls = toolset.most_calls
        self._must_call = toolset.choice == "required"
        self._num_calls = self._num_whole = 0
        """Calls that have begun, and those of them that are whole."""
        self._text = ""
        self._at = 0
        """Start of the text that is not read yet."""
        self._is_over = False
        self._parts: list[Part] = []
        self._trigger = ""
        """A trigger that is content if no call comes behind it."""
        self._held_from: int | None = None
        """Start of text that is read, and read again if it is no call; None while nothing is held."""
        self._held: list[str] = []
        """Held text of earlier pieces."""
        self._space: list[str] = []
        """White space at the end of the content so far."""
        self._is_behind_call = False
        """Has nothing but white space been shown behind a call?"""
        self._code = CodeBlocks()
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        """The parts that this text completes; neighbours of one kind are one."""
        if self._held_from is not None:
            self._held.append(self._text[self._held_from : self._at])
            self._held_from = 0
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """The last parts, at the end of the answer."""
        self._is_over = True
        next(self._reading, None)
        if not self._is_behind_call and not self._must_call:
            self._put(Content("".join(self._space)))
        self._space = []
        return self._taken()

    def _read(self) -> Waiting[None]:
        try:
            yield from self.read()
            while True:
                self.show(self._text[self._at :])
                self._at = len(self._text)
                yield from self._more()
        except EndOfAnswer:
            pass

    @abstractmethod
    def read(self) -> Waiting[None]:
        """Read the answer; the text behind what it has read is content."""

    # Parts.

    @property
    def may_call(self) -> bool:
        """May there be a further call?"""
        return self._most_calls is None or self._num_calls < self._most_calls

    @property
    def has_whole_calls(self) -> bool:
        """Are there calls so far, all of them whole?"""
        return 0 < self._num_calls == self._num_whole

    def show(self, text: str) -> None:
        """Give out content."""
        if self._must_call and self._is_over:
            return  # the begin of a call, cut off
        self._code.feed(text)
        shown = text.rstrip()
        if shown:
            self._put(Content("".join([*self._space, shown])))
            self._space, self._is_behind_call = [], False
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def begin(self, name: str) -> None:
        """Begin a call: what is held is part of it."""
        self._let_go()
        self._space, self._is_behind_call = [], True
        self._put(CallBegun(self._num_calls, name))
        self._num_calls += 1

    def end(self) -> None:
        """End the last call, which is whole."""
        self._num_whole += 1

    def argue(self, text: str) -> None:
        """Give out more of the arguments of the last call."""
        self._put(CallArguments(self._num_calls - 1, text))

    def _put(self, part: Part) -> None:
        if not isinstance(part, Content | CallArguments) or part.text:
            self._parts.append(part)

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

    # Text.

    def _more(self) -> Waiting[None]:
        """Wait for more text. Raises: EndOfAnswer."""
        if self._is_over:
            raise EndOfAnswer
        yield

    def _take(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], end
        return piece

    def peek(self) -> Waiting[str]:
        """The next character, which is not read. Raises: EndOfAnswer."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def space(self) -> Waiting[None]:
        """Read white space. Raises: EndOfAnswer if nothing comes behind it."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None, "it matches the empty text"
            self._take(match.end())
            if self._at < len(self._text):
                return
            yield from self._more()

    def has(self, *texts: str) -> Waiting[str | None]:
        """Read one of these texts if it comes next, the first of them that does. None if none does, and nothing is read."""
        longest = max(map(len, texts))
        while True:
            rest = self._text[self._at : self._at + longest]
            for text in texts:
                if rest.startswith(text):
                    return self._take(self._at + len(text))
                if text.startswith(rest) and not self._is_over:
                    yield
                    break
            else:
                return None

    def expect(self, *texts: str) -> Waiting[str]:
        """Read one of these texts. Raises: NoCall; EndOfAnswer if the answer ends within one of them."""
        found = yield from self.has(*texts)
        if found is None:
            rest = self._text[self._at :]
            raise EndOfAnswer if self._is_over and any(text.startswith(rest) for text in texts) else NoCall
        return found

    def until(self, texts: Sequence[str], sink: Callable[[str], Any]) -> Waiting[str]:
        """Give the text in front of one of these texts to `sink`, and read it too. Raises: EndOfAnswer behind all text."""
        longest = max(map(len, texts))
        pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        begins = re.compile("|".join(sorted({re.escape(text[:1]) for text in texts})))
        while True:
            end = len(self._text)
            found = pattern.search(self._text, self._at)
            if not self._is_over:
                near = max(self._at, end - longest)
                for match in begins.finditer(self._text, near, end if found is None else found.start() + 1):
                    rest = self._text[match.start() :]
                    if any(len(text) > len(rest) and text.startswith(rest) for text in texts):
                        found, end = None, match.start()
                        break
            if found is not None:
                sink(self._take(found.start()))
                return self._take(found.end())
            sink(self._take(end))
            yield from self._more()

    def json(self, sink: Callable[[str], Any]) -> Waiting[None]:
        """Give the JSON of a value to `sink`. Raises: NoCall behind what is JSON, EndOfAnswer."""
        value = JsonText()
        while not value.is_complete:
            if self._at == len(self._text):
                if self._is_over and value.finish():
                    return
                yield from self._more()
            try:
                end = value.feed(self._text, self._at)
            except NotJson as error:
                sink(self._take(error.at))
                raise NoCall from error
            sink(self._take(end))

    def mark(self, text: str) -> Waiting[None]:
        """Read a text, with any white space before its words. Raises: NoCall, EndOfAnswer."""
        for word in text.split():
            yield from self.space()
            yield from self.expect(word)

    def word(self) -> Waiting[str]:
        """Read letters of a tool's name. Raises: NoCall if there are none; EndOfAnswer."""
        pieces: list[str] = []
        while True:
            match = _NAME.match(self._text, self._at)
            assert match is not None, "it matches the empty text"
            pieces.append(self._take(match.end()))
            if self._at < len(self._text):
                break
            yield from self._more()
        name = "".join(pieces)
        if not name:
            raise NoCall
        return name

    def string(self) -> Waiting[str]:
        """Read a JSON string. Raises: NoCall, EndOfAnswer."""
        if (yield from self.peek()) != '"':
            raise NoCall
        return str(json.loads((yield from self.value())))

    def value(self) -> Waiting[str]:
        """Read the JSON of a value. Raises: NoCall, EndOfAnswer."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return "".join(pieces)

    # Calls.

    def next_trigger(self, triggers: Sequence[str], *, in_code: bool = False) -> Waiting[str]:
        """Show the content in front of a trigger, and read the trigger. Raises: EndOfAnswer.

        A trigger in a code block is content, unless it counts `in_code` too.
        """
        while True:
            trigger = yield from self.until(triggers, self.show)
            if in_code or not self._code.is_open:
                self._trigger = trigger
                return trigger
            self.show(trigger)

    def attempt(self, reading: Waiting[None], *, is_value: bool = False) -> Waiting[bool]:
        """Read a call or what stands around one, or a value in one. Where it is none, nothing is read but the trigger, which
        is shown. Where the end of the answer cuts it off, the text is dropped if it belongs to the calls.
        """
        self._held_from = self._at
        try:
            yield from reading
        except (NoCall, EndOfAnswer) as error:
            if self._held:
                self._text, self._at = "".join([*self._held, self._text[self._held_from :]]), 0
            elif self._held_from is not None:
                self._at = self._held_from
            may_come = not self._trigger or self._trigger not in self._text[self._at :]  # else a call may stand behind
            if isinstance(error, EndOfAnswer) and not is_value and may_come and (self._trigger or self._is_behind_call):
                self._at = len(self._text)
            else:
                self.show(self._trigger)
            return False
        finally:
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Hold no text any more."""
        self._trigger, self._held_from, self._held = "", None, []

    def object_call(self, *, keys: Sequence[str] = ("arguments", "parameters"), needs_arguments: bool = False) -> Waiting[None]:
        """Read a call as a JSON object of a `name`, and arguments by one of the `keys`.

        Raises: NoCall, EndOfAnswer.
        """
        name = arguments = None
        yield from self.expect("{")
        yield from self.space()
        end = yield from self.has("}")
        while end is None:
            key = yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key == "name" and name is None:
                name = yield from self.string()
                if name not in self.tools:
                    raise NoCall
                if arguments is not None:
                    self.begin(name)
                    self.argue(arguments)
            elif key in keys and arguments is None:
                if name is not None and (yield from self.peek()) == "{":
                    arguments = ""
                    self.begin(name)
                    yield from self.json(self.argue)
                else:
                    arguments = _object((yield from self.value()))
                    if name is not None:
                        self.begin(name)
                        self.argue(arguments)
            else:
                yield from self.value()
            yield from self.space()
            end = yield from self.has("}")
            if end is None:
                yield from self.expect(",")
                yield from self.space()
        if name is None or (arguments is None and needs_arguments):
            raise NoCall
        if arguments is None:
            self.begin(name)
            self.argue("{}")


def _object(text: str) -> str:
    """The JSON of arguments, which are an object, null, or a text that is the JSON of one. Raises: NoCall."""
    if text.startswith('"'):
        text = json.loads(text).strip()
        value = JsonText()
        try:
            text.encode()
            if value.feed(text) < len(text) or not value.is_complete:
                raise NoCall
        except (NotJson, UnicodeEncodeError) as error:  # it may have half of a surrogate pair
            raise NoCall from error
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NoCall
    return text


class PartReader:
    """Reads one answer: `feed` it the text as it comes, then `finish`. The parts do not depend on the pieces of the text."""

    def __init__(self, reasoning: ReasoningReader | None = None, calls: CallReader | None = None, *, prefix: str = "") -> None:
        """`prefix`: text that the calls begin with and that the answer lacks, since the prompt has it."""
        self._reasoning = reasoning
        self._calls = calls
        self._prefix = prefix

    @property
    def has_whole_calls(self) -> bool:
        """Has the answer calls so far, all of them whole?"""
        return self._calls is not None and self._calls.has_whole_calls

    @property
    def is_reasoning(self) -> bool | None:
        """Has the reasoning of the answer not ended yet? None if none has begun."""
        return None if self._reasoning is None else self._reasoning.is_open

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if self._reasoning is None:
            return self._read(text)
        reasoning, behind = self._reasoning.feed(text)
        return [*([Reasoning(reasoning)] if reasoning else []), *(self._read(behind) if behind else [])]

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer."""
        parts = list[Part]()
        if self._reasoning is not None:
            reasoning, behind = self._reasoning.finish()
            parts += [*([Reasoning(reasoning)] if reasoning else []), *(self._read(behind) if behind else [])]
        if self._calls is not None:
            parts += self._calls.finish()
        return parts

    def _read(self, text: str) -> list[Part]:
        if self._calls is None:
            return [Content(text)] if text else []
        text, self._prefix = self._prefix + text, ""
        return self._calls.feed(text)


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, where neighbouring texts of one kind and call are one."""
    found: list[Part] = []
    for _, group in groupby(parts, lambda part: (type(part), getattr(part, "index", None))):
        first, *others = group
        if others:
            text = "".join(part.text for part in (first, *others) if not isinstance(part, CallBegun))
            first = CallArguments(first.index, text) if isinstance(first, CallArguments) else Content(text)
        found.append(first)
    return found
