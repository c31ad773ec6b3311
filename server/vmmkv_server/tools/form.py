"""Forms of calls: how models of one family write the calls of tools.

    CallForm ── triggers, grammar ──> engine: what it writes follows the tools' schemas
             ── reader ──> parts of the answer

`forms` has one module for each form, and finds the one of a chat template.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from vmmkv_server.structured_output.json_schema import SchemaRefused, SchemaRules
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.structured_output.text import quoted
from vmmkv_server.tools.calls import Tool, Toolset
from vmmkv_server.tools.reading import CallReader


class ToolRefused(GrammarRefused):
    """The schema of a tool's arguments is invalid, or not served."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        """The tool's place among the tools of the request."""


class CallForm(ABC):
    """A way to write calls, which models of one family were trained with."""

    name: ClassVar[str]
    """vLLM's name of its parser, where it has one."""
    is_first: bool = False
    """Do triggers count at the begin of an answer alone, white space aside?"""
    repeats: bool = True
    """May text and further calls follow what the grammar of `auto` allows? Else the grammar holds to the answer's end."""
    prefix: str = ""
    """Text of special tokens in front of the calls, which no grammar can spell. With `required` it is appended to the prompt,
    the grammar begins behind it, and the reader is fed with it first.
    """
    kept: tuple[str, ...] = ()
    """Texts of special tokens that the reader must see."""

    @abstractmethod
    def triggers(self, toolset: Toolset) -> tuple[str, ...]:
        """Texts with which a call begins. The grammar of `auto` begins with them."""

    def grammar(self, toolset: Toolset) -> Grammar:
        """Calls whose arguments follow their tools' schemas: with `required` the whole answer, else from a trigger on.

        Raises: ToolRefused; GrammarRefused if it is too large.
        """
        rules = SchemaRules(comma=", ", colon=": ")
        ways = []
        for index, tool in enumerate(toolset.tools):
            if tool in toolset.callable_tools:
                try:
                    ways.append(self.call(rules, tool))
                except SchemaRefused as error:
                    raise ToolRefused(index, str(error)) from error
        return Grammar("json", rules.written(self.calls(rules.rule("call", " | ".join(ways)), toolset)))

    @abstractmethod
    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """GBNF of a tool's call, from its name on. Raises: SchemaRefused."""

    @abstractmethod
    def calls(self, call: str, toolset: Toolset) -> str:
        """GBNF of all calls that the grammar allows, where `call` is a rule of those of any tool, from its name on."""

    @abstractmethod
    def reader(self, toolset: Toolset) -> CallReader:
        """A reader of one answer."""


def of_arguments(rules: SchemaRules, tool: Tool) -> str:
    """The rule of the JSON object of a tool's arguments. Raises: SchemaRefused."""
    schema = dict(tool.parameters)
    if schema.get("properties") == {} and schema.keys() <= _OF_NOTHING:
        schema["additionalProperties"] = False
    return rules.of(schema, is_object=True)


_OF_NOTHING = frozenset(["type", "properties", "required", "title", "description", "$schema"])
"""Keywords of a schema that has no further properties, if it names none."""


def run(begin: str, call: str, end: str, between: str, toolset: Toolset, *, repeats: bool) -> str:
    """GBNF of a call between two texts, and of further calls where the toolset has them and they are not triggered anew."""
    one = f"{quoted(begin)} {call} {quoted(end)}"
    if toolset.most_calls == 1 or (repeats and toolset.choice == "auto"):
        return one
    return f"{one} ({quoted(between)} {one})*"


class ObjectForm(CallForm):
    """Calls as JSON objects of a name and arguments, each between two texts."""

    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    between: ClassVar[str] = "\n"
    key: ClassVar[str] = "arguments"
    """The key of the arguments."""

    def triggers(self, toolset: Toolset) -> tuple[str, ...]:
        """The tag in front of a call; without one, the object up to a tool's name."""
        if tag := self.begin.strip():
            return (tag,)
        return tuple(f'{{"name": "{tool.name}"' for tool in toolset.callable_tools)

    def call(self, rules: SchemaRules, tool: Tool) -> str:
        """The name, the arguments, and what stands between them."""
        between = f'{tool.name}", "{self.key}": '
        return f"{quoted(between)} {of_arguments(rules, tool)}"

    def calls(self, call: str, toolset: Toolset) -> str:
        """Each call between the two texts of the form."""
        begin, end = f'{self.begin}{{"name": "', f"}}{self.end}"
        return run(begin, call, end, self.between, toolset, repeats=self.repeats)
