"""Response bodies: OpenAI's completions and chat completions, whole and as chunks of a stream, and those of other routes."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from vmmkv.server.http.generation import Score, TextDelta
from vmmkv.server.tokenizer import TokenTexts

LEAST_LOGPROB: Final = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's number."""

FinishReason = Literal["stop", "length"]

_Sparse = Field(exclude_if=lambda value: value is None)
"""Left out of the answer, rather than null."""


class PromptTokensDetails(BaseModel):
    """Details of the prompts' tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache, so that they were not computed."""


class Usage(BaseModel):
    """Tokens: each prompt's once, however many choices it has, and those of all choices and beams."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, token_counts: tuple[int, int, int]) -> "Usage":
        """From `Generation.token_counts`."""
        prompt_tokens, cached_tokens, completion_tokens = token_counts
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, or of a chunk's. Lists of one length."""

    text_offset: list[int]
    """Where each token begins, in characters of the whole answer."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which comes after nothing."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Of the likeliest tokens at each place, and of the chosen one."""


class TopLogprob(BaseModel):
    """A token that could come at some place, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its UTF-8, which may be a part of a character; null for an id without text."""


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a reply's tokens, or of a chunk's."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(BaseModel):
    """One continuation of one prompt, or its new text in a chunk."""

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
    """One reply to a conversation."""

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
    """New text of a reply; the first one names the role."""

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
    """The served model. `max_model_len`, the tokens of one request, and the `implementation` are known once it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vmmkv"
    max_model_len: int | None = None
    implementation: str | None = None
    """`vmmkv` or `transformers`."""


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


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    """Tokens that one request can have, with its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Memory(BaseModel):
    """The answer of /kv/reset and /kv/resize."""

    freed_bytes: int
    """Bytes that were held and are free now, or the device's again."""
    budget_bytes: int
    pool_tokens: int
    """Tokens of one sequence that the budget holds."""


class ResponseForm(ABC):
    """The form of one answer, whole or as chunks; every chunk of a stream has the same id and time."""

    def __init__(self, id: str, model: str, tokens: TokenTexts) -> None:
        self.id = id
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._tokens = tokens

    @abstractmethod
    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> BaseModel:
        """The whole answer, with each choice as one delta, in order."""

    @abstractmethod
    def opening(self, num_choices: int) -> list[BaseModel]:
        """The chunks before any generated text."""

    @abstractmethod
    def chunk(self, delta: TextDelta) -> BaseModel:
        """New text of one choice."""

    @abstractmethod
    def closing(self, usage: Usage) -> BaseModel:
        """A last chunk, without choices."""


class CompletionForm(ResponseForm):
    """The form of /v1/completions. `echoes` are texts before those of the choices."""

    def __init__(self, id: str, model: str, tokens: TokenTexts, echoes: Sequence[str] = ()) -> None:
        super().__init__(id, model, tokens)
        self._echoes = echoes

    def opening(self, num_choices: int) -> list[BaseModel]:
        """The echoed prompts."""
        return [self.chunk(TextDelta(index, echo, None)) for index, echo in enumerate(self._echoes)]

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> Completion:
        """Every choice, in the order of the prompts, those of one prompt side by side."""
        if self._echoes:
            choices = [
                dataclasses.replace(choice, text=echo + choice.text) for echo, choice in zip(self._echoes, choices, strict=True)
            ]
        return Completion(**self._head, choices=[self._choice(choice) for choice in choices], usage=usage)

    def chunk(self, delta: TextDelta) -> Completion:
        """New text of one choice."""
        return Completion(**self._head, choices=[self._choice(delta)])

    def closing(self, usage: Usage) -> Completion:
        """A last chunk, without choices."""
        return Completion(**self._head, choices=[], usage=usage)

    def _choice(self, delta: TextDelta) -> CompletionChoice:
        scores = delta.all_scores()
        logprobs = None if scores is None else self._logprobs(scores)
        return CompletionChoice(index=delta.index, text=delta.text, logprobs=logprobs, finish_reason=delta.finish_reason)

    def _logprobs(self, scores: Sequence[Score]) -> CompletionLogprobs:
        text_of = self._tokens.text_of
        return CompletionLogprobs(
            text_offset=[score.offset for score in scores],
            token_logprobs=[None if score.logprob is None else _finite(score.logprob) for score in scores],
            tokens=[text_of(score.token_id) for score in scores],
            top_logprobs=[
                None
                if score.logprob is None
                else {
                    text_of(token_id): _finite(logprob)
                    for token_id, logprob in (*score.likeliest, (score.token_id, score.logprob))
                }
                for score in scores
            ],
        )


class ChatForm(ResponseForm):
    """The form of /v1/chat/completions."""

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> ChatCompletion:
        """Every reply."""
        replies = [
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=self._logprobs(choice.scores),
                finish_reason=choice.finish_reason,
            )
            for choice in choices
        ]
        return ChatCompletion(**self._head, choices=replies, usage=usage)

    def opening(self, num_choices: int) -> list[BaseModel]:
        """The role of each choice."""
        role = Delta(role="assistant", content="")
        choices = [ChunkChoice(index=index, delta=role, finish_reason=None) for index in range(num_choices)]
        return [ChatCompletionChunk(**self._head, choices=[choice]) for choice in choices]

    def chunk(self, delta: TextDelta) -> ChatCompletionChunk:
        """New text of one choice."""
        choice = ChunkChoice(
            index=delta.index,
            delta=Delta(content=delta.text or None),
            logprobs=self._logprobs(delta.scores),
            finish_reason=delta.finish_reason,
        )
        return ChatCompletionChunk(**self._head, choices=[choice])

    def closing(self, usage: Usage) -> ChatCompletionChunk:
        """A last chunk, without choices."""
        return ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def _logprobs(self, scores: Sequence[Score] | None) -> ChatLogprobs | None:
        if scores is None:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._named(score.token_id, score.logprob),
                    top_logprobs=[TopLogprob(**self._named(*each)) for each in score.likeliest],
                )
                for score in scores
            ]
        )

    def _named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        assert logprob is not None, "a chat echoes nothing"
        data = self._tokens.bytes_of(token_id)
        text = self._tokens.text_of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN
