"""OpenAI's Responses API, as far as a chat can serve it: nothing is stored, and the only tools are the client's functions.

ResponsesRequest ── chat ──> ChatRequest ── generation.answer ──> TextDelta ── ResponsesForm ──> ResponseObject, or events
"""

import functools
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import to_json

from vmmkv_server.http import errors, generation
from vmmkv_server.http.errors import ApiError, ErrorBody
from vmmkv_server.http.responses import ResponseForm, TextDelta, Usage
from vmmkv_server.http.schemas import ChatRequest, Effort, JsonSchema
from vmmkv_server.http.tools import MAX_ID_CHARS, FunctionDefinition, refuse_other_types
from vmmkv_server.http.wire import Unserved, WireRequest, refusal, without_nulls
from vmmkv_server.tokenizer import TokenTexts
from vmmkv_server.tools.calls import CallBegun, Content, Part, Reasoning, new_call_id


def _as_text(value: Any) -> Any:
    """Text parts, joined with nothing between them. Their other fields, such as `annotations`, are left out."""
    if not isinstance(value, list):
        return value
    for part in value:
        match part:
            case {"type": "input_text" | "output_text" | "reasoning_text", "text": str()}:
                continue
        raise refusal("", 'only parts of the form {"type": "input_text", "text": "..."} are served, or of type output_text')
    return "".join(part["text"] for part in value)


def _as_items(value: Any) -> Any:
    """A text is a message of the user's, and an item without a type a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise refusal("", "it must be a text, or a list of items")
    return [{"type": "message"} | without_nulls(item) if isinstance(item, dict) else item for item in value]


def _as_choice(value: Any) -> Any:
    match value:
        case "none" | "auto" | "required" | {"type": "function", "name": str()}:
            return value
    raise refusal("", 'it must be "none", "auto", "required", or {"type": "function", "name": ...}')


_Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]
PartsText = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[dict[str, Any]])]


class InputItem(WireRequest):
    """An item of the input. Clients send back those of answers as they are; `id` and `status` change nothing."""

    id: _Id | None = None
    status: str | None = None


class InputMessage(InputItem):
    """A turn of text."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsText
    phase: str | None = None


class InputCall(InputItem):
    """A call that the model asked for."""

    type: Literal["function_call"]
    call_id: _Id
    name: str
    arguments: str


class InputResult(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: PartsText


class InputReasoning(InputItem):
    """Reasoning of an earlier answer, for the chat template. Summaries are not read."""

    type: Literal["reasoning"]
    content: PartsText | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


_Item: TypeAlias = Annotated[InputMessage | InputCall | InputResult | InputReasoning, Field(discriminator="type")]


class FlatTool(FunctionDefinition):
    """A function of the client's, as this API writes it."""

    remedies: ClassVar[Mapping[str, str]] = {"function": 'send {"type": "function", "name": ...}'}
    _is_function = model_validator(mode="before")(refuse_other_types)
    type: Literal["function"]


class TextFormat(JsonSchema):
    """The form of the answer's text: any, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # type: ignore[assignment]


class TextOptions(WireRequest):
    """Options of the answer's text."""

    unserved: ClassVar[Unserved] = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class ReasoningOptions(WireRequest):
    """Options of the reasoning."""

    unserved: ClassVar[Unserved] = {"summary": (), "generate_summary": ()}
    effort: Effort | None = None


_OF_CHATS: Final = (
    "messages", "tools", "tool_choice", "response_format", "structured_outputs", "max_tokens", "max_completion_tokens", "n",
    "logprobs", "top_logprobs", "stream_options", "use_beam_search", "beam_width", "length_penalty", "kv_transfer_params",
    "reasoning_effort",
)  # fmt: skip
"""Fields of chats that have another form here, or no place in the answer."""
_SHARED: Final = {name: field for name, field in ChatRequest.model_fields.items() if name not in _OF_CHATS}
_FIELDS: Final = _SHARED | {"max_output_tokens": ChatRequest.model_fields["max_completion_tokens"]}
_TYPED: Final[dict[str, Any]] = {name: (field.annotation, field) for name, field in _FIELDS.items()}
_SharedFields: Any = create_model("_SharedFields", __base__=WireRequest, **_TYPED)


class ResponsesRequest(_SharedFields):  # type: ignore[misc]
    """POST /v1/responses: parameters that chats have too, and those below."""

    unserved: ClassVar[Unserved] = {
        **dict.fromkeys(("store", "background"), (False,)),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation"), ()),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is sent as it is
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "send max_output_tokens"),
        "messages": "send input",
        "reasoning_effort": "send reasoning",
        "response_format": "send text",
    }
    input: Annotated[list[_Item], Field(min_length=1), BeforeValidator(_as_items, json_schema_input_type=str | list[_Item])]
    instructions: str | None = None
    """A system message in front of the input."""
    tools: list[FlatTool] | None = None
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_as_choice)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    def chat(self) -> ChatRequest:
        """The chat that this asks for. Raises: ValidationError, naming fields of the chat."""
        body: dict[str, Any] = self.model_dump(include=set(_SHARED), exclude_unset=True)
        body |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens, "tool_choice": self.tool_choice}
        functions = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools or ()]
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        if isinstance(self.tool_choice, dict):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice["name"]}}
        schema = self.text_format()
        kind = schema.pop("type")
        body["response_format"] = {"type": kind, "json_schema": schema if schema or kind == "json_schema" else None}
        body["stream_options"] = {"include_usage": True} if self.stream else None
        body["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        return ChatRequest.model_validate(body)

    def text_format(self) -> dict[str, Any]:
        """The form of the text, as it was given."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)

    def _messages(self) -> list[dict[str, Any]]:
        """The turns of the conversation. Neighbouring items that may be of one answer are one turn."""
        turns = list[dict[str, Any]]()
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case InputMessage(role="assistant"):
                    turn = _assistants(turns, "content")
                    turn["content"] = turn.get("content", "") + item.content
                case InputMessage():
                    is_further = item.role == "system" and bool(self.instructions)  # templates take one system turn
                    turns.append({"role": "developer" if is_further else item.role, "content": item.content})
                case InputReasoning() if item.content:
                    turn = _assistants(turns, "reasoning_content", "content")
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + item.content
                case InputCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    calls = _assistants(turns).setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "type": "function", "function": function})
                case InputResult():
                    turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        return turns


def _assistants(turns: list[dict[str, Any]], *others: str) -> dict[str, Any]:
    """The last turn if it is the assistant's, and has calls without a result yet or none of the `others`; else a new one."""
    last = turns[-1] if turns else {"role": None}
    if last["role"] != "assistant" or ("tool_calls" not in last and last.keys() & set(others)):
        turns.append({"role": "assistant"})
    return turns[-1]


class ResponseObject(BaseModel):
    """The answer of /v1/responses. The request's parameters stand beside these fields, as given or with their defaults."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[dict[str, Any]]
    """Items of type `reasoning`, `message` and `function_call`."""
    usage: dict[str, Any] | None = None
    store: Literal[False] = False


_KINDS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "message": ("msg", {"type": "output_text", "annotations": [], "logprobs": []}, {"content_index": 0, "logprobs": []}),
    "reasoning": ("rs", {"type": "reasoning_text"}, {"content_index": 0}),
    "function_call": ("fc", {"type": "function_call_arguments"}, {}),
}
"""By an item's type: begin of its id, its part without text, and fields that events of its text have."""


class ResponsesForm(ResponseForm):
    """The form of /v1/responses: items of output, which a stream tells in typed events."""

    id_prefix = "resp"
    stream_end = ""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, model: str, tokens: TokenTexts) -> None:
        super().__init__(model, tokens)
        self.id = self.id.replace("-", "_")
        given = {"instructions": body.instructions, "metadata": body.metadata or {}, "user": body.user}
        given |= {"tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]}
        given |= {"tool_choice": body.tool_choice or "auto", "parallel_tool_calls": chat.parallel_tool_calls is not False}
        given |= {"text": {"format": body.text_format()}, "max_output_tokens": body.max_output_tokens}
        given |= {"temperature": chat.params.temperature, "top_p": chat.params.top_p}
        as_utf8 = json.dumps(given, ensure_ascii=False).encode(errors="replace")  # a client's text may have half a pair
        self._given = json.loads(as_utf8, parse_constant=lambda _: None)
        self._items: list[dict[str, Any]] = []
        self._part, self._beside = dict[str, Any](), dict[str, Any]()
        """The last item's part without text, and fields that events of its text have."""
        self._pieces: list[str] = []
        """Text of the last item while that is in progress."""
        self._status = "completed"
        self._num_events = 0

    def opening(self, num_choices: int) -> list[TextDelta]:
        """An empty delta, with which the first events are sent."""
        return [TextDelta(0, "", None)]

    def events(self, deltas: Sequence[TextDelta], usage: Usage | None) -> str:
        """Events of new text; with a usage, that of the end."""
        begun = () if self._num_events else ("created", "in_progress")
        told = [self._event(kind, response=self._response("in_progress")) for kind in begun]
        for delta in deltas:
            told += self._read(delta)
        if usage is not None:
            told.append(self._event(self._status, response=self._response(self._status, usage)))
        return "".join(told)

    def error_events(self, error: ErrorBody) -> str:
        """The answer as one that failed."""
        failed = self._response("failed", error={"code": "server_error", "message": error.error.message})
        return self._event("failed", response=failed)

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> ResponseObject:
        """The answer."""
        self.events(deltas, usage)
        return self._response(self._status, usage)

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, str] | None = None) -> ResponseObject:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {"id": self.id, "created_at": self._head["created"], "model": self._head["model"], "status": status}
        tail: dict[str, Any] = {"error": error, "incomplete_details": why, "usage": usage and _renamed_usage(usage)}
        return ResponseObject(**head, **tail, output=self._items, **self._given)

    def _read(self, delta: TextDelta) -> Iterator[str]:
        """Take new text; yields its events."""
        parts: Sequence[Part] = [Content(delta.text)] if delta.parts is None and delta.text else delta.parts or ()
        for part in parts:
            kind = self._items[-1]["type"] if self._items else None
            if isinstance(part, CallBegun):
                yield from self._begin("function_call", call_id=new_call_id(), name=part.name, arguments="")
                continue
            if isinstance(part, Content) and kind != "message":
                yield from self._begin("message", role="assistant", content=[])
            elif isinstance(part, Reasoning) and kind != "reasoning":
                yield from self._begin("reasoning", summary=[], content=[])
            self._pieces.append(part.text)
            yield self._event(f"{self._part['type']}.delta", **self._beside, delta=part.text)
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            if not self._items:
                yield from self._begin("message", role="assistant", content=[])
            is_cut_call = self._items[-1]["type"] == "function_call" and not delta.has_whole_calls  # by a stop string
            yield from self._end("incomplete" if is_cut_call else self._status)

    def _begin(self, kind: str, **fields: Any) -> Iterator[str]:
        """Begin an item, which ends the one before."""
        if self._items:
            yield from self._end("completed")
        prefix, self._part, self._beside = _KINDS[kind]
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields})
        yield self._event("output_item.added", item=self._items[-1])
        if kind != "function_call":
            yield self._event("content_part.added", content_index=0, part=self._part | {"text": ""})

    def _end(self, status: str) -> Iterator[str]:
        """End the last item."""
        item, text = self._items[-1], "".join(self._pieces)
        self._pieces, item["status"] = [], status
        has_parts = item["type"] != "function_call"
        item |= {"content": [self._part | {"text": text}]} if has_parts else {"arguments": text}
        yield self._event(f"{self._part['type']}.done", **self._beside, **{"text" if has_parts else "arguments": text})
        if has_parts:
            yield self._event("content_part.done", content_index=0, part=item["content"][0])
        yield self._event("output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> str:
        """Event of the answer, if it has a `response`, or of the last item."""
        if "response" not in fields:
            fields |= {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        data = to_json({"type": f"response.{kind}", "sequence_number": self._num_events, **fields}).decode()
        self._num_events += 1
        return f"event: response.{kind}\ndata: {data}\n\n"


def _renamed_usage(usage: Usage) -> dict[str, Any]:
    """Tokens in the names of this API. Writes to a cache cost nothing."""
    details = usage.completion_tokens_details
    cached = {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0}
    reasoning = {"reasoning_tokens": 0 if details is None else details.reasoning_tokens}
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens}
    return {**counts, "input_tokens_details": cached, "output_tokens_details": reasoning}


_NAMES: Final = (
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\bmax(_completion)?_tokens\b", "max_output_tokens"),
    (r"\b(invalid_)?messages\b", r"\1input"),
    (r"\b(tools\.\d+)\.function\b", r"\1"),
)
"""Names of chats, and those of this API."""


def _renamed(error: ApiError | ValidationError) -> ApiError:
    """An error of the chat, in the names of this API."""
    if isinstance(error, ValidationError):
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        error = errors.from_exception(RequestValidationError(found))
    fields = error.body.error.model_dump()
    for pattern, name in _NAMES:
        fields |= {field: value and re.sub(pattern, name, value) for field, value in fields.items()}
    return ApiError(error.status, headers=error.headers, **fields)


def routes(service: generation.Service) -> APIRouter:
    """The route of this API."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=ResponseObject, responses={200: {"content": {"text/event-stream": {}}}})
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        """The next items of a conversation. Nothing is stored."""
        try:
            chat = body.chat()
            return await generation.answer(service, request, chat, functools.partial(ResponsesForm, body, chat))
        except (ApiError, ValidationError) as error:
            raise _renamed(error) from error

    return router
