"""Tools that a request offers, the calls that an answer makes, and the parts into which its text is read."""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self, TypeAlias

MAX_TOOLS: Final = 128
"""Most tools of a request; OpenAI's."""
TOOL_NAME: Final = r"[A-Za-z0-9_.-]{1,64}"
"""Pattern of a tool's name."""


class InvalidTools(ValueError):
    """Tools, or a choice among them, that cannot be served."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param
        """The parameter at fault, such as `tools.0.function.name`."""
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function of the client's."""

    name: str
    """Letters, digits, `_`, `-` and `.`, 64 at most."""
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object. One that is empty or not given is that of no arguments."""
    is_strict: bool = False
    """Must arguments follow the schema? Else calls that the model makes by itself follow it where it is served."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it: OpenAI's JSON, without what was not given."""
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
    text_schema: Mapping[str, Any] | None = None
    """With `auto`, the JSON schema of an answer that calls nothing; None if that is any text."""

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise InvalidTools("tools", f"there are {len(names)}, and may be {MAX_TOOLS}")
        for index, name in enumerate(names):
            if not re.fullmatch(TOOL_NAME, name):
                raise InvalidTools(
                    f"tools.{index}.function.name", f"{name!r} is not 1 to 64 letters, digits and signs '_', '-', '.'"
                )
            if name in names[:index]:
                raise InvalidTools(f"tools.{index}.function.name", f"{name!r} is the name of another tool; give each its own")
        if self.choice == "required" and not names:
            raise InvalidTools("tool_choice", "there are no tools to call: send tools, or leave it out")
        if self.named is not None and self.named not in names:
            raise InvalidTools("tool_choice", f"{self.named!r} is none of the tools, which are {', '.join(names)}")

    @classmethod
    def of(
        cls,
        tools: Sequence[Any] | None,
        choice: Any = None,
        *,
        is_parallel: bool = True,
        text_schema: Mapping[str, Any] | None = None,
    ) -> Self | None:
        """Tools and a choice in OpenAI's JSON; None if there is no tool that may be called. Raises: InvalidTools."""
        read = tuple(_tool(index, each) for index, each in enumerate(tools or ()))
        kind, named = read_choice(choice)
        toolset = cls(
            tools=read,
            choice="required" if kind == "required" else "auto",
            named=named,
            is_parallel=is_parallel,
            text_schema=text_schema,
        )
        return toolset if read and kind != "none" else None

    @property
    def digest(self) -> bytes:
        """Digest of all that a grammar of the calls depends on: schemas with their order, and how the tools are called."""
        tools = [(tool.name, dict(tool.parameters)) for tool in self.tools]
        asked = tools, self.choice, self.named, self.is_parallel, self.text_schema
        return hashlib.sha256(json.dumps(asked, default=repr).encode()).digest()

    @property
    def is_free(self) -> bool:
        """May an answer have any text? Then its grammar begins where a call does."""
        return self.choice == "auto" and self.text_schema is None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return self.tools if self.named is None else tuple(tool for tool in self.tools if tool.name == self.named)

    @property
    def most_calls(self) -> int | None:
        """The most calls of an answer; None for any number."""
        return None if self.is_parallel and self.named is None else 1


def read_choice(choice: Any) -> tuple[Literal["none", "auto", "required"], str | None]:
    """A choice in OpenAI's JSON, and the one tool that it names; None is `auto`. Raises: InvalidTools."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
    wanted = 'it must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    raise InvalidTools("tool_choice", wanted)


def _tool(index: int, given: Any) -> Tool:
    """Raises: InvalidTools."""
    match given:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            description, parameters, strict = rest.get("description"), rest.get("parameters"), rest.get("strict")
        case _:
            wanted = 'it must be {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            raise InvalidTools(f"tools.{index}", wanted)
    if unknown := sorted(map(str, rest.keys() - {"description", "parameters", "strict"})):
        raise InvalidTools(f"tools.{index}.function", f"{unknown[0]!r} is none of name, description, parameters and strict")
    if not isinstance(description, str | None):
        raise InvalidTools(f"tools.{index}.function.description", "it must be a text")
    if not isinstance(parameters, Mapping | None):
        raise InvalidTools(f"tools.{index}.function.parameters", "it must be a JSON schema of an object")
    if not isinstance(strict, bool | None):
        raise InvalidTools(f"tools.{index}.function.strict", "it must be true or false")
    tool = Tool(name=name, description=description, is_strict=bool(strict))
    return replace(tool, parameters=parameters) if parameters else tool


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


def new_call_id() -> str:
    """A name for a call, as OpenAI writes them."""
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))


_ID_LETTERS: Final = string.ascii_letters + string.digits


@dataclass(slots=True, kw_only=True)
class Call:
    """A call in an answer."""

    name: str
    arguments: str = ""
    """The text of a JSON object; a part of it if the answer was cut off."""
    id: str = field(default_factory=new_call_id)


Part: TypeAlias = Reasoning | Content | CallBegun | CallArguments
