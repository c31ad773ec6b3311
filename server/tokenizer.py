"""A model's tokenizer and chat template: requests to token ids.

The Rust tokenizer does the work: it is safe to use from several threads while nobody changes it, and it releases
Python's lock, so that a long prompt does not hold up the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import jinja2
from tokenizers import Tokenizer as RustTokenizer

from vmmkv.server.candidate import Echo
from vmmkv.server.detokenize import Detokenizer, offsets_of
from vmmkv.server.schemas import ChatMessage, Prompt
from vmmkv.server.template_schemas import TemplateVariable
from vmmkv.server.token_text import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INLINE_CHARS = 4096
"""Texts of fewer characters together are tokenised in about a millisecond: not worth the way to another thread and back."""
INLINE_ECHO_TOKENS = 256
"""Tokens of prompts that are placed in their text in about a millisecond."""
MESSAGE_CHARS = 64
"""What a message takes beside its content, in the time of so many characters."""


Away: TypeAlias = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""How what takes long is done in a thread: at once, or when its turn comes."""


Variables: TypeAlias = Mapping[str, TemplateVariable]


class PromptError(ValueError):
    """A prompt that cannot be made into tokens of this model."""


class Tokenizer:
    """Text and conversations to token ids of one model, and back."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises: ValueError if the tokenizer has no Rust form."""
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} has no fast form: save the model with a tokenizer.json")
        self._tokenizer = tokenizer
        self.rust: RustTokenizer = tokenizer.backend_tokenizer
        """Safe to share, as long as nobody changes it."""
        # Prompts are never cut or filled up; and a change of these settings during a call in another thread is an error.
        self.rust.no_truncation()
        self.rust.no_padding()
        self.vocab_size = len(tokenizer)
        self.texts = TokenTexts(self.rust)

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """From a local directory; takes seconds. Raises: OSError, ValueError if there is none that can be used."""
        from transformers import AutoTokenizer  # takes seconds to import, and the HTTP server is up meanwhile

        return cls(AutoTokenizer.from_pretrained(model_dir, local_files_only=True))

    async def encode(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True, away: Away = asyncio.to_thread
    ) -> list[list[int]]:
        """See `encode_one`, for several. Does not hold up the event loop. Raises: PromptError; what `away` raises."""

        def encode() -> list[list[int]]:
            return [self.encode_one(prompt, add_special_tokens=add_special_tokens) for prompt in prompts]

        ids: list[list[int]] = encode() if sum(map(len, prompts)) <= INLINE_CHARS else await away(encode)
        return ids

    def encode_one(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt as given to /v1/completions: with the model's own start token where it is text.

        Raises: PromptError for a token id that the model does not have, or what is no text.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt, add_special_tokens=add_special_tokens)
        return self._known(prompt)

    async def encode_chat(
        self, messages: Sequence[ChatMessage], variables: Variables | None = None, *, away: Away = asyncio.to_thread
    ) -> list[int]:
        """The token ids of a conversation in the model's chat template, up to where the assistant is to speak.

        `variables` are what the template may ask for beside what it is always told, which they may not name.

        Raises: PromptError if the model has no template, its template refuses the conversation or fails on it, or a content is
        no text.
        """
        if self._tokenizer.chat_template is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        if sum(MESSAGE_CHARS + len(message.content) for message in messages) <= INLINE_CHARS:
            return self._encode_chat(messages, variables or {})
        ids: list[int] = await away(lambda: self._encode_chat(messages, variables or {}))
        return ids

    def _known(self, token_ids: list[int]) -> list[int]:
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if unknown is not None:
            raise PromptError(f"{unknown} is not a token id of this model: they go from 0 to {self.vocab_size - 1}")
        return token_ids

    def _encode_chat(self, messages: Sequence[ChatMessage], variables: Variables) -> list[int]:
        return self._encode_text(self._render(messages, variables), add_special_tokens=False)

    def detokenizer(self, stops: Sequence[str], context: Sequence[int] = (), *, min_tokens: int = 0) -> Detokenizer:
        """For one choice, which no stop string ends before `min_tokens`. `context` is the prompt, if it continues its text."""
        return Detokenizer(self.rust, stops=stops, context=context, min_tokens=min_tokens)

    def _render(self, messages: Sequence[ChatMessage], variables: Variables) -> str:
        # A developer's message is the newer name of a system message; templates know the older one.
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables)
        except Exception as error:  # a template is a program, and jinja2's sandbox refuses what reaches out of it
            if type(error) is jinja2.TemplateError:  # by `raise_exception`
                raise PromptError(f"the model's chat template refuses this conversation: {error}") from error
            failure = f"{type(error).__name__}: {error}"
            raise PromptError(f"the model's chat template fails on this conversation: {failure}") from error
        assert isinstance(text, str)
        return text

    async def said(
        self, prompts: Sequence[Prompt], *, skip_special_tokens: bool = True, away: Away = asyncio.to_thread
    ) -> list[str]:
        """What prompts say. Does not hold up the event loop. Raises: PromptError."""

        def decode() -> list[str]:
            return [
                prompt
                if isinstance(prompt, str)
                # A batch of one, as in `_encode_text`.
                else self.rust.decode_batch([self._known(prompt)], skip_special_tokens=skip_special_tokens)[0]
                for prompt in prompts
            ]

        texts: list[str] = decode() if sum(map(len, prompts)) <= INLINE_CHARS else await away(decode)
        return texts

    async def echoes(
        self, prompts: Sequence[Prompt], encoded: Sequence[list[int]], *, away: Away = asyncio.to_thread
    ) -> list[Echo]:
        """Prompts, with where each of their tokens stands. Does not hold up the event loop. Raises: PromptError."""

        def place() -> list[Echo]:
            return [
                Echo(text, token_ids, offsets_of(self.rust, token_ids, len(text)))
                for text, token_ids in zip(texts, encoded, strict=True)
            ]

        texts = await self.said(prompts, away=away)
        echoes: list[Echo] = place() if sum(map(len, encoded)) <= INLINE_ECHO_TOKENS else await away(place)
        return echoes

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # JSON can write half of a surrogate pair ("\ud800"), and a str can hold it; UTF-8 and tokenizers cannot.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X}"
            raise PromptError(
                f"it holds {half}, half of a surrogate pair, which is no character; send valid Unicode"
            ) from error
        # A batch of one, for `encode` holds Python's lock all the while: 1.4 s for a million characters.
        ids: list[int] = self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids
