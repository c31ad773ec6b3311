"""What is answered over the wire, as pydantic models: OpenAI's completions and chat completions, whole and in chunks."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]

_Sparse = Field(exclude_if=lambda value: value is None)
"""Left out of the answer, rather than null, when there is nothing to say."""


class PromptTokensDetails(BaseModel):
    """Of the prompts' tokens."""

    cached_tokens: int
    """Those that the prefix cache had, so that they were not computed."""


class Usage(BaseModel):
    """Tokens: each prompt's once, however many choices it has, and those of all candidates, returned or not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    """One continuation of one prompt, or of a chunk the text that is new."""

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
