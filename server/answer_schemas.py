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


class CompletionLogprobs(BaseModel):
    """Of the tokens of a completion, or of those that a chunk adds. Lists of one length."""

    text_offset: list[int]
    """Where each begins, in characters of the whole answer."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that is echoed, which comes after nothing."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Of the likeliest at each place, and of the one that was chosen."""


class TopLogprob(BaseModel):
    """A token that could come at some place, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its UTF-8, which may be a part of a character; null for an id without text."""


class TokenLogprob(TopLogprob):
    """The token that came, and those that were the likeliest to come."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of a reply, or of those that a chunk adds."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(BaseModel):
    """One continuation of one prompt, or of a chunk the text that is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
    """What is served. Known once the engine is ready: `max_model_len`, the tokens of one request, and whose `implementation`
    of the model it is, `vmmkv` or `transformers`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vmmkv"
    max_model_len: int | None = None
    implementation: str | None = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The answer of /health: 200 when `ok`, else 503 and why."""

    status: Literal["ok", "loading", "draining", "stuck", "dead"]
    reason: str | None = None


class Version(BaseModel):
    """The answer of /version."""

    version: str


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
