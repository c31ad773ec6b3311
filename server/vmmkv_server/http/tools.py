"""Tools over HTTP: fields of requests and of their turns, and of the messages and deltas that answer them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from vmmkv_server.http.wire import WireRequest, refusal
from vmmkv_server.tools.calls import (
    MAX_TOOLS,
    CallArguments,
    CallBegun,
    Content,
    InvalidTools,
    Part,
    Reasoning,
    Toolset,
    new_call_id,
    read_choice,
)

MAX_ID_CHARS: Final = 256

# Requests.


class FunctionDefinition(WireRequest):
    """A function of the client's, which the model may ask it to call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; no arguments if it is empty or not given."""
    strict: bool | None = None
    """Must arguments follow the schema? Else calls that the model makes by itself follow it where it is served."""


def refuse_other_types(data: Any) -> Any:
    """A tool, if its type is that of functions, or none is given."""
    if isinstance(data, dict) and data.get("type", "function") != "function":
        raise refusal("type", 'only tools of type "function" are served; the server runs none itself')
    return data


class FunctionTool(WireRequest):
    """A tool of a request."""

    remedies: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "description", "parameters", "strict"), 'send {"type": "function", "function": {"name": ...}}'
    )
    _is_function = model_validator(mode="before")(refuse_other_types)
    type: Literal["function"]
    function: FunctionDefinition


def _as_choice(value: Any) -> Any:
    try:
        read_choice(value)
    except InvalidTools as error:
        raise refusal("", error.reason) from error
    return value


_NAMED: Final = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    str | dict[str, Any],
    BeforeValidator(_as_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
]


class ToolFields(WireRequest):
    """Tools of a conversation."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may ask its client to call."""

    @functools.cached_property
    def toolset(self) -> Toolset | None:
        """The tools that an answer may call, and how; None if it may call none. Raises: InvalidTools."""
        return Toolset.of(self.given_tools())

    def given_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's JSON."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    def tool_conflicts(self) -> Iterator[tuple[str, str]]:
        """Parameters of tools that cannot be served, and why."""
        try:
            _ = self.toolset
        except InvalidTools as error:
            yield error.param, error.reason


class ToolChoiceFields(ToolFields):
    """Tools of a request, and whether and which of them its answer calls."""

    tool_choice: ToolChoice | None = None
    """`auto`, by default: text or calls; `required`: calls; a function: a call of it; `none`: text, and tools are not shown."""
    parallel_tool_calls: bool | None = None
    """May an answer have several calls? By default yes."""

    @functools.cached_property
    def toolset(self) -> Toolset | None:
        """The tools that an answer may call, and how; None if it may call none. Raises: InvalidTools."""
        is_parallel = self.parallel_tool_calls is not False
        return Toolset.of(self.given_tools(), self.tool_choice, is_parallel=is_parallel, text_schema=self.text_schema)

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """The JSON schema that text follows; None for any text."""
        return None


class CalledFunction(WireRequest):
    """The function of a call in a conversation."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str = ""
    """Arguments as the text of a JSON object."""


class ToolCall(WireRequest):
    """A call in a turn of the assistant's. What else clients keep of it, such as its index in a stream, is ignored."""

    model_config = ConfigDict(extra="allow")
    id: Annotated[str, Field(max_length=MAX_ID_CHARS)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


_WITHOUT_TEXT: Final = ("assistant", "tool")
"""Roles of turns that may have no text."""


def _say_which_have_text(schema: dict[str, Any]) -> None:
    """Let the JSON schema of a turn say which turns may be without `content`; that of TurnFields alone has none."""
    content = schema["properties"].get("content")
    if content is None:
        return
    content["anyOf"] = [*content["anyOf"], {"type": "null"}]
    schema["required"] = [name for name in schema["required"] if name != "content"]
    has_text = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
    schema["anyOf"] = [{"properties": {"role": {"enum": [*_WITHOUT_TEXT]}}}, has_text]


class TurnFields(WireRequest):
    """Calls in a turn of a conversation, or the call that it has the result of."""

    model_config = ConfigDict(json_schema_extra=_say_which_have_text)
    tool_calls: list[ToolCall] | None = None
    """Calls that the assistant made."""
    tool_call_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    """The call of which a turn of the role `tool` has the result."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, data: Any) -> Any:
        """A turn of calls alone has no text, a function may return nothing, and clients write an empty list for no calls."""
        if not isinstance(data, dict):
            return data
        has_no_text = data.get("role") in _WITHOUT_TEXT and data.get("content") is None
        has_no_calls = data.get("tool_calls") == []
        return data | ({"content": ""} if has_no_text else {}) | ({"tool_calls": None} if has_no_calls else {})


# Answers.

_Sparse = Field(exclude_if=lambda value: value is None)
"""Field that is left out of the answer, rather than null."""


class AnswerFunction(BaseModel):
    """The function of a call."""

    name: Annotated[str | None, _Sparse] = None
    """Name of the function; in a stream in the first piece alone."""
    arguments: str
    """The text of a JSON object, or its next piece."""


class AnswerCall(BaseModel):
    """A call that the model asks for, or the next piece of one."""

    index: Annotated[int | None, _Sparse] = None
    """Place of the call in the answer; in a stream alone."""
    id: Annotated[str | None, _Sparse] = None
    type: Annotated[Literal["function"] | None, _Sparse] = None
    function: AnswerFunction


class AnswerFields(BaseModel):
    """Parts of an answer, or of a piece of one, beside its text."""

    reasoning_content: Annotated[str | None, _Sparse] = None
    """Text that the model wrote before its answer."""
    reasoning: Annotated[str | None, _Sparse] = None
    """The same, by vLLM's newer name."""
    tool_calls: Annotated[list[AnswerCall] | None, _Sparse] = None


def answer_fields(parts: Sequence[Part], *, is_whole: bool) -> dict[str, Any]:
    """Fields of a message, or of a delta, with these parts: `content`, and those of AnswerFields."""
    content, reasoning = (
        "".join(part.text for part in parts if isinstance(part, kind)) or None for kind in (Content, Reasoning)
    )
    calls = dict[int, AnswerCall]()
    for part in parts:
        if isinstance(part, CallBegun):
            index = None if is_whole else part.index
            function = AnswerFunction(name=part.name, arguments="")
            calls[part.index] = AnswerCall(index=index, id=new_call_id(), type="function", function=function)
        elif isinstance(part, CallArguments):
            if part.index not in calls:
                calls[part.index] = AnswerCall(index=part.index, function=AnswerFunction(arguments=""))
            calls[part.index].function.arguments += part.text
    return {
        "content": content,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "tool_calls": list(calls.values()) or None,
    }
