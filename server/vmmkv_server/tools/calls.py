"""Tools that a request offers, the calls that an answer makes, and the parts into which its text is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

MAX_TOOLS: Final = 128
"""Most tools of a request; OpenAI's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function of the client's."""

    name: str
    """Letters, digits, `_`, `-` and `.`, 64 at most."""
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it: OpenAI's form, without what was not given."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of a request, and whether and which of them its answer must call."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required"] = "auto"
    """`auto`: the model decides; `required`: at least one call, and no text beside the calls."""
    named: str | None = None
    """With `required`, the one tool that is called, once."""
    is_parallel: bool = True
    """May an answer have several calls?"""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return self.tools if self.named is None else tuple(tool for tool in self.tools if tool.name == self.named)

    @property
    def most_calls(self) -> int | None:
        """The most calls of an answer; None for any number."""
        return None if self.is_parallel and self.named is None else 1


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; its index counts the calls of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces of a call together are one JSON object."""

    index: int
    text: str


Part: TypeAlias = Reasoning | Content | CallBegun | CallArguments
