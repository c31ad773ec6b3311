"""The two forms of an answer, each whole or in chunks."""

import time
from abc import ABC, abstractmethod
from typing import Any

from pydantic import BaseModel

from vmmkv.server.answer_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    FinishReason,
    Usage,
)
from vmmkv.server.generation import TextDelta


class Answer(ABC):
    """The form of one answer; every chunk of a stream has the same id and time."""

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}

    @abstractmethod
    def whole(self, texts: list[str], reasons: list[FinishReason | None], usage: Usage) -> BaseModel:
        """All of it: the text and the finish reason of each choice, in order."""

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
    """Of /v1/completions."""

    def whole(self, texts: list[str], reasons: list[FinishReason | None], usage: Usage) -> Completion:
        """Every choice, in the order of the prompts, those of one prompt side by side."""
        choices = [
            CompletionChoice(index=index, text=text, finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return Completion(**self._head, choices=choices, usage=usage)

    def chunk(self, delta: TextDelta) -> Completion:
        """New text of one choice."""
        choice = CompletionChoice(index=delta.index, text=delta.text, finish_reason=delta.finish_reason)
        return Completion(**self._head, choices=[choice])

    def closing(self, usage: Usage) -> Completion:
        """No choice, only the usage."""
        return Completion(**self._head, choices=[], usage=usage)


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    def whole(self, texts: list[str], reasons: list[FinishReason | None], usage: Usage) -> ChatCompletion:
        """Every reply."""
        choices = [
            ChatChoice(index=index, message=AssistantMessage(content=text), finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return ChatCompletion(**self._head, choices=choices, usage=usage)

    def opening(self, num_choices: int) -> list[BaseModel]:
        """The role of each choice, before any text."""
        role = Delta(role="assistant", content="")
        choices = [ChunkChoice(index=index, delta=role, finish_reason=None) for index in range(num_choices)]
        return [ChatCompletionChunk(**self._head, choices=[choice]) for choice in choices]

    def chunk(self, delta: TextDelta) -> ChatCompletionChunk:
        """New text of one choice."""
        choice = ChunkChoice(index=delta.index, delta=Delta(content=delta.text or None), finish_reason=delta.finish_reason)
        return ChatCompletionChunk(**self._head, choices=[choice])

    def closing(self, usage: Usage) -> ChatCompletionChunk:
        """No choice, only the usage."""
        return ChatCompletionChunk(**self._head, choices=[], usage=usage)
