"""Forms of calls: how models of one family write the calls of tools.

    CallForm ── triggers, grammar ──> engine: what it writes follows the tools' schemas
             ── reader ──> parts of the answer

A form is texts around the calls, and one of three ways to write a call between them: a JSON object of name and arguments
(`Objects`), a name and the JSON of arguments (`Named`), or markup (`markup.Markup`). `forms` has a module for each form, and
finds the one of a chat template.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vmmkv_server.structured_output.json_schema import SchemaRefused, SchemaRules
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.structured_output.text import quoted
from vmmkv_server.tools.calls import Tool, Toolset
from vmmkv_server.tools.reading import CallReader, NoCall, Waiting

_NO_FORMAT: Final = (
    "this model begins calls with a special token, which a grammar of text and calls cannot have: leave response_format out, "
    'or send another tool_choice than "auto"'
)


@dataclass(frozen=True, kw_only=True)
class CallForm(ABC):
    """A way to write calls, which models of one family were trained with.

    trigger begin CALL end                                              for each call, or
    trigger open begin CALL end (between begin CALL end)* close         for all calls of an answer
    """

    name: str
    """vLLM's name of its parser, where it has one. Forms of one name differ in white space."""
    trigger: str = ""
    """The text with which calls begin. Empty if it is that of the calls themselves."""
    open: str | None = None
    """Text behind the trigger of several calls. None if each call has the trigger."""
    begin: str = ""
    end: str = ""
    between: str = "\n"
    """Text between two calls; with a trigger for each it stands in front of the second."""
    close: str = ""
    is_first: bool = False
    """Do triggers count at the begin of an answer alone, white space aside?"""
    in_code: bool = False
    """Do triggers count in code blocks of the content too? Those that are special tokens do."""
    prefix: str = ""
    """The trigger, if it is a special token, which no grammar can spell. With `required` it is appended to the prompt, the
    grammar begins behind it, and the reader is fed with it first.
    """
    optional: tuple[str, ...] = ()
    """Texts that the form does not write, and that its reader knows."""

    def repeats(self, toolset: Toolset) -> bool:
        """May text and further calls follow what the grammar of `auto` allows? Else the grammar holds to the answer's end."""
        return self.open is None and not self.is_first and toolset.most_calls is None

    def triggers(self, toolset: Toolset) -> tuple[str, ...]:
        """Texts with which a call begins. The grammar of `auto` begins with them."""
        return (self.trigger,) if self.trigger else tuple(self.begin + self.head(tool) for tool in toolset.callable_tools)

    def grammar(self, toolset: Toolset) -> Grammar:
        """Calls whose arguments follow their tools' schemas: from a trigger on where the answer `is_free`, else all of it.

        Raises: GrammarRefused, naming the tool whose schema is not served; or `response_format`, if text of the `text_schema`
        cannot stand beside calls, or is not served, also where the answer must call.
        """
        if toolset.choice == "auto" and not toolset.is_free and self.prefix:
            raise GrammarRefused(_NO_FORMAT, param="response_format")
        rules = SchemaRules(comma=", ", colon=": ")
        ways = []
        for index, tool in enumerate(toolset.tools):
            if tool in toolset.callable_tools:
                try:
                    ways.append(self.call(rules, tool))
                except SchemaRefused as error:
                    raise GrammarRefused(f"tool {tool.name!r}: {error}", param=f"tools.{index}.function.parameters") from error
        call = rules.rule("call", " | ".join(ways))
        one = f"{quoted(self.begin)} {call} {quoted(self.end)}"
        first = "" if toolset.choice == "required" and self.prefix else quoted(self.trigger)
        if self.open is None:
            further = f"{quoted(self.between + self.trigger)} {one}"
            is_alone = toolset.most_calls == 1 or (toolset.is_free and self.repeats(toolset))
            root = f"{first} {one} {'' if is_alone else f'({further})*'}"
        else:
            further = "" if toolset.most_calls == 1 else f"({quoted(self.between)} {one})*"
            root = f"{first} {quoted(self.open)} {one} {further} {quoted(self.close)}"
        if toolset.text_schema is not None:  # it is read where it has no effect too: clients learn of their mistakes
            try:
                text = rules.of(toolset.text_schema)
            except SchemaRefused as error:
                raise GrammarRefused(str(error), param="response_format.json_schema.schema") from error
            root = f"{root} | {text}" if toolset.choice == "auto" else root
        return Grammar("json", rules.written(root.strip()))

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the form writes them, each given by its name and the JSON of its arguments."""
        each = [f"{self.begin}{self.written(name, arguments)}{self.end}" for name, arguments in calls]
        if self.open is None:
            return self.between.join(f"{self.trigger}{one}" for one in each)
        return f"{self.trigger}{self.open}{self.between.join(each)}{self.close}"

    def kept(self, special: Iterable[str]) -> tuple[str, ...]:
        """Texts that the reader must see, of those of the `special` tokens."""
        written = self.text([("f", '{"x": "", "y": 0}')])
        return tuple(text for text in special if text in written or text in self.optional)

    def reader(self, toolset: Toolset) -> CallReader:
        """A reader of one answer."""
        return _Reader(toolset, self)

    @abstractmethod
    def head(self, tool: Tool) -> str:
        """The begin of a tool's call, with its name."""

    @abstractmethod
    def written(self, name: str, arguments: str) -> str:
        """A call, with the JSON of its arguments."""

    @abstractmethod
    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """GBNF of a tool's calls. Raises: SchemaRefused."""

    @abstractmethod
    def read(self, reader: CallReader) -> Waiting[None]:
        """Read a call. Raises: NoCall, EndOfAnswer."""


class _Reader(CallReader):
    """A reader of a form."""

    def __init__(self, toolset: Toolset, form: CallForm) -> None:
        super().__init__(toolset)
        self._form = form

    def read(self) -> Waiting[None]:
        form = self._form
        while self.may_call and not form.is_first:
            yield from self.next_trigger([form.trigger], in_code=form.in_code)
            if form.open is None:
                if (yield from self.attempt(self._call(form.begin))):
                    yield from self.attempt(self.mark(form.end))
            elif (yield from self._run(form.open + form.begin)):
                yield from self.attempt(self.mark(form.close))
        if form.is_first and self.may_call:
            yield from self._run(form.trigger + form.begin)

    def _run(self, begin: str) -> Waiting[bool]:
        """Read calls in a row, the first of them behind a text. False if it is none."""
        form = self._form
        is_call = is_first = yield from self.attempt(self._call(begin))
        while is_call and (yield from self.attempt(self.mark(form.end))) and self.may_call:
            is_call = yield from self.attempt(self._call(form.between + form.begin))
        return is_first

    def _call(self, begin: str) -> Waiting[None]:
        yield from self.mark(begin)
        yield from self._form.read(self)
        self.end()


@dataclass(frozen=True, kw_only=True)
class Objects(CallForm):
    """Calls as JSON objects of a name and arguments: `{"name": "f", "arguments": {"x": 1}}`."""

    key: str = "arguments"
    """The key of the arguments."""
    needs_arguments: bool = False
    """Is an object without arguments no call?"""

    def head(self, tool: Tool) -> str:
        """The begin of a tool's call, with its name."""
        return f'{{"name": "{tool.name}"'

    def written(self, name: str, arguments: str) -> str:
        """A call, with the JSON of its arguments."""
        return f'{{"name": "{name}", "{self.key}": {arguments}}}'

    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """GBNF of a tool's calls. Raises: SchemaRefused."""
        key = f', "{self.key}": '
        return f'{quoted(self.head(tool) + key)} {of_arguments(rules, tool)} "}}"'

    def read(self, reader: CallReader) -> Waiting[None]:
        """Read a call. Raises: NoCall, EndOfAnswer."""
        yield from reader.space()
        yield from reader.object_call(needs_arguments=self.needs_arguments)


@dataclass(frozen=True, kw_only=True)
class Named(CallForm):
    """Calls as a name and the JSON of arguments, with a text between them: `f<sep>{"x": 1}`."""

    separator: str

    def head(self, tool: Tool) -> str:
        """The begin of a tool's call, with its name."""
        return tool.name

    def written(self, name: str, arguments: str) -> str:
        """A call, with the JSON of its arguments."""
        return f"{name}{self.separator}{arguments}"

    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """GBNF of a tool's calls. Raises: SchemaRefused."""
        return f"{quoted(self.head(tool) + self.separator)} {of_arguments(rules, tool)}"

    def read(self, reader: CallReader) -> Waiting[None]:
        """Read a call. Raises: NoCall, EndOfAnswer."""
        yield from reader.space()
        name = yield from reader.word()
        yield from self.separate(reader)
        yield from reader.space()
        if name not in reader.tools or (yield from reader.peek()) != "{":
            raise NoCall
        reader.begin(name)
        yield from reader.json(reader.argue)

    def separate(self, reader: CallReader) -> Waiting[None]:
        """Read the text between a name and the arguments. Raises: NoCall, EndOfAnswer."""
        yield from reader.mark(self.separator)


def arguments_schema(tool: Tool) -> dict[str, object]:
    """The schema of a tool's arguments. One that names no properties has none, unless it says what others there may be.

    So `{}` and `{"type": "object"}` are functions without arguments, in every form.
    """
    schema = dict(tool.parameters)
    names_any = schema.get("properties") or schema.get("required")
    if not names_any and schema.keys() <= _OF_NOTHING:
        schema["additionalProperties"] = False
    return schema


_OF_NOTHING: Final = frozenset(["type", "properties", "required", "title", "description", "$schema"])
"""Keywords of a schema that says nothing of further properties."""


_OTHER_TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "string"])


def of_arguments(rules: SchemaRules, tool: Tool) -> str:
    """The rule of the JSON object of a tool's arguments. Raises: SchemaRefused."""
    kind = tool.parameters.get("type")
    if isinstance(kind, str) and kind in _OTHER_TYPES:
        raise SchemaRefused(f"the schema has type {kind!r}; arguments are of type 'object'")
    return rules.of(arguments_schema(tool), is_object=True)
