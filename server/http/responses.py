"""The two forms of an answer, each whole or in chunks."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel

from vmmkv.server.http.generation import Score, TextDelta
from vmmkv.server.http.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from vmmkv.server.tokenizer import TokenTexts

LEAST_LOGPROB: Final = -9999.0
"""In place of minus infinity, which JSON cannot say; OpenAI's number."""


class Answer(ABC):
    """The form of one answer; every chunk of a stream has the same id and time. `tokens` name tokens by their text."""

    def __init__(self, id: str, model: str, tokens: TokenTexts) -> None:
        self.id = id
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._tokens = tokens

    @abstractmethod
    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> BaseModel:
        """All of it: each choice as if it had come at once, in order."""

    def opening(self, num_choices: int) -> list[BaseModel]:
        """The chunks before any text."""
        return []

    @abstractmethod
    def chunk(self, delta: TextDelta) -> BaseModel:
        """New text of one choice."""

    @abstractmethod
    def closing(self, usage: Usage) -> BaseModel:
        """The last chunk, without choices, for who asked for the usage."""


class CompletionAnswer(Answer):
    """Of /v1/completions. `echoes` are what the text of each choice begins with, if anything that its candidate has not."""

    def __init__(self, id: str, model: str, tokens: TokenTexts, echoes: Sequence[str] | None = None) -> None:
        super().__init__(id, model, tokens)
        self._echoes = echoes

    def opening(self, num_choices: int) -> list[BaseModel]:
        """What is echoed."""
        return [self.chunk(TextDelta(index, echo, None)) for index, echo in enumerate(self._echoes or ())]

    def whole(self, choices: Sequence[TextDelta], usage: Usage) -> Completion:
        """Every choice, in the order of the prompts, those of one prompt side by side."""
        if self._echoes is not None:
            choices = [
                dataclasses.replace(choice, text=echo + choice.text) for echo, choice in zip(self._echoes, choices, strict=True)
            ]
        return Completion(**self._head, choices=[self._choice(choice) for choice in choices], usage=usage)

    def chunk(self, delta: TextDelta) -> Completion:
        """New text of one choice."""
        return Completion(**self._head, choices=[self._choice(delta)])

    def closing(self, usage: Usage) -> Completion:
        """No choice, only the usage."""
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


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

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
        """The role of each choice, before any text."""
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
        """No choice, only the usage."""
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
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for what is no number
