"""Chats: conversations as the model's template renders them, and how their answers are made and read.

    messages ── ChatFormat.encode ──> ChatPrompt ── token ids, grammar, gate ──> engine
                                                 └─ reader ────────────────────> parts of an answer

Here an answer is text. `tools.chat_format` has answers with calls and reasoning.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from vmmkv_server.protocol import Gate
from vmmkv_server.sampling_params import Limits
from vmmkv_server.structured_output.schema import Grammar
from vmmkv_server.tokenizer import TemplateVariable, Tokenizer

Turn: TypeAlias = Mapping[str, Any]
"""A message of a conversation."""


class AnswerReader(Protocol):
    """Reads one answer: `feed` it the text as it comes, then `finish`."""

    @property
    def has_whole_calls(self) -> bool:
        """Has the answer calls so far, all of them whole?"""

    @property
    def is_reasoning(self) -> bool | None:
        """Has the reasoning of the answer not ended yet? None if none has begun."""

    def feed(self, text: str) -> list[Any]:
        """The parts that are certain now."""

    def finish(self) -> list[Any]:
        """The rest, at the end of the answer."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, and the way to make and read its answer."""

    token_ids: list[int]

    @property
    def may_call(self) -> bool:
        """May the answer have calls? Then `grammar` is its grammar, if it has one."""
        return False

    def grammar(self, namespace: Hashable = None) -> Grammar | None:
        """The grammar of an answer that may call, from its `gate` on; None if it is free. Namespaces share nothing."""
        return None

    @property
    def needs_grammar(self) -> bool:
        """Is a request refused whose grammar is not served? Else its answer is free, and is read all the same."""
        return True

    @property
    def gate(self) -> Gate | None:
        """The place in the answer at which its grammar begins; None for its first text."""
        return None

    @property
    def kept(self) -> tuple[str, ...]:
        """Texts of special tokens that the reader must see."""
        return ()

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends the reasoning; None if there is none, or it is several tokens."""
        return None

    def reader(self) -> AnswerReader | None:
        """A reader of one answer; None if all of it is text."""
        return None


class ChatFormat:
    """The format of one model's chats."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def remark(self) -> str | None:
        """Fact that an operator should know; None for none."""
        return None

    def encode(
        self,
        messages: Sequence[Turn],
        variables: Mapping[str, TemplateVariable] | None = None,
        limits: Limits | None = None,
        wanted: int | None = None,
        *,
        has_grammar: bool = False,
    ) -> ChatPrompt:
        """The prompt of a conversation. `has_grammar`: the text of its answer follows one.

        Raises: PromptError, TemplateBroken, RequestRefused, as `Tokenizer.render_chat` and `Tokenizer.encode`.
        """
        text = self.tokenizer.render_chat(messages, variables)
        return ChatPrompt(self.tokenizer.encode(text, limits, wanted, add_special_tokens=False))
