"""What goes over the wire, as pydantic models: OpenAI's completions and chat completions, as far as they are served.

A parameter of OpenAI's that is not served is refused, unless it has the value that asks for nothing (`n=1`,
`tools=[]`): a client that sets it would else get something other than it asked for and never know.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

FinishReason = Literal["stop", "length"]
Prompt = str | list[int]
MAX_PROMPTS = 128
"""Of one request; each is a sequence of the engine and a choice of the answer."""
MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 64


_Sparse = Field(exclude_if=lambda value: value is None)
"""Left out of the answer, rather than null, when there is nothing to say."""


class _Request(BaseModel):
    """Strict (no `"5"` for 5), closed to unknown fields, and plain about those of OpenAI's that it does not serve."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The names refused, each with the values that ask for nothing, besides null."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unserved.keys() & data.keys():
            value, neutral = data[name], cls.unserved[name]
            # Types are compared too: completions' logprobs=0 asks for something, and 0 == False.
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                wanted = f"leave it out or send {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "The parameter '{param}' is not supported by this server; {wanted}.",
                    {"param": name, "wanted": wanted},
                )
        return {name: value for name, value in data.items() if name not in cls.unserved}


def _as_prompts(value: Any) -> list[Prompt]:
    """A list of prompts from any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError(
                "prompt",
                "it has {given} prompts and a request may have {limit}; send the others in further requests",
                {"given": len(value), "limit": MAX_PROMPTS},
            )
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "it must be a string, a list of strings, a list of token ids or a list of such lists, and not empty"
    )


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _as_list(value: Any) -> Any:
    """`stop` may be one string or none."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Text parts joined with nothing between them, so that what the client wrote is what the template gets."""
    if not isinstance(value, list):
        return value
    for part in value:
        if (
            not isinstance(part, dict)
            or part.keys() != {"type", "text"}
            or part["type"] != "text"
            or not isinstance(part["text"], str)
        ):
            raise PydanticCustomError("content", 'only parts of the form {{"type": "text", "text": "..."}} are served')
    return "".join(part["text"] for part in value)


class StreamOptions(_Request):
    """How a stream ends."""

    unserved = {"include_obfuscation": (False,)}
    include_usage: bool | None = None


class GenerationRequest(_Request):
    """What completions and chat completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=MAX_STOP_STRINGS)
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Not OpenAI's: go on past the model's end token, for benchmarks."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    """Not OpenAI's: token ids that end the answer, as the model's own end tokens do."""

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only for stream=true", {"param": "stream_options"})
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_UNSERVED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "user": (),
}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: each prompt is a choice of the answer."""

    unserved = _UNSERVED_BY_BOTH | {"best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}
    prompt: Annotated[list[Prompt], PlainValidator(_as_prompts)]


class ChatMessage(_Request):
    """One turn of a conversation."""

    unserved = {
        "name": (),
        "refusal": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "audio": (),
        "annotations": ([],),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unserved = _UNSERVED_BY_BOTH | {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "web_search_options": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "chat_template": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "max_tokens", "max_tokens and max_completion_tokens mean the same: send one", {"param": "max_tokens"}
            )
        return self


class Usage(BaseModel):
    """Tokens counted over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """The text of one prompt, or of a chunk the text that is new."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, _Sparse] = None


class AssistantMessage(BaseModel):
    """A whole reply."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The reply to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds; the first names the role."""

    role: Annotated[Literal["assistant"] | None, _Sparse] = None
    content: Annotated[str | None, _Sparse] = None


class ChunkChoice(BaseModel):
    """A choice within a chunk."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Annotated[Usage | None, _Sparse] = None


class Model(BaseModel):
    """What is served; `max_model_len` is the tokens of one request, known once the engine is ready."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vmmkv"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The answer of /health: 200 when `ok`, else 503 and why."""

    status: Literal["ok", "loading", "dead"]
    reason: str | None = None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
