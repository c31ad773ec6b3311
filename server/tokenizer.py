"""A model's tokenizer and chat template: requests to token ids.

The Rust tokenizer does the work: it is safe to use from several threads while nobody changes it, and it releases
Python's lock, so that a long prompt does not hold up the event loop.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import jinja2
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from vmmkv.server.http.schemas import ChatMessage, Prompt, TemplateVariable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# -------- detokenize
# Tokens to text, a token at a time: characters that span tokens, and stop strings that do.
#
# tokens ── TextStream ──> text ── StopStrings ──> text that no stop string can take back


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt with which a text begins, when the Scores of its tokens are wanted too."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]
    """Where each begins in the text, in characters."""


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MAX_PENDING_TOKENS = 16
"""So many tokens without text are bytes that are no character, or special tokens; to wait on costs ever more."""
CONTEXT_TOKENS = 8
"""As many tokens of a prompt as the text of what follows can depend on, with room to spare."""


def decode_all(tokenizer: RustTokenizer, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[str]:
    """The text of each of many answers, given as (the tokens before it, its tokens): on all processors at once.

    The same as of a TextStream for each, but for bytes that are no character.
    """

    def decode(lists: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.decode_batch([list(each) for each in lists], skip_special_tokens=True)

    contexts = [list(context[-CONTEXT_TOKENS:]) for context, _ in answers]
    befores = decode(contexts)
    for index, before in enumerate(befores):
        if before.endswith(REPLACEMENT):
            contexts[index], befores[index] = [], ""
    boths = decode([[*context, *tokens] for context, (_, tokens) in zip(contexts, answers, strict=True)])
    changed = [index for index, (before, both) in enumerate(zip(befores, boths, strict=True)) if not both.startswith(before)]
    texts = [both[len(before) :] for before, both in zip(befores, boths, strict=True)]
    for index, text in zip(changed, decode([answers[index][1] for index in changed]), strict=True):
        texts[index] = text
    return texts


class TextStream:
    """The text of a growing list of tokens, without special tokens, whole characters only.

    With `context`, the tokens before, the text continues theirs: a decoder that drops the space at the start of a text
    keeps it in the middle of one.
    """

    def __init__(self, tokenizer: RustTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream: DecodeStream
        self._recent: list[int]
        """The tokens of the text that came last: what the pending ones are decoded after."""
        self._pending: list[int]
        """Tokens fed that have given no text yet."""
        self._restart(list(context))

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often none."""
        self._pending.append(token_id)
        if len(self._pending) > MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises nothing narrower, when later tokens change the text of earlier ones
            return self.flush()
        if text is None:
            return ""
        self._recent, self._pending = self._pending, []
        return text

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The text of the tokens still pending, with replacement characters for bytes that are no character.

        Further `token_ids` are taken first, at once: the same text as if they were fed, for a small part of the time.
        """
        self._pending += token_ids
        before = self._decode(self._recent)
        both = self._decode(self._recent + self._pending)
        text = both[len(before) :] if both.startswith(before) else self._decode(self._pending)
        self._restart(self._recent + self._pending)
        return text

    def _give_up_waiting(self) -> str:
        """Flush, but for as many tokens as can still be the start of a character."""
        young = self._pending[-MAX_CHARACTER_BYTES:]
        self._pending = self._pending[:-MAX_CHARACTER_BYTES]
        return self.flush() + "".join(self.feed(token_id) for token_id in young)

    def _restart(self, context: list[int]) -> None:
        recent = context[-CONTEXT_TOKENS:]
        # A context that ends within a character would come out again with the first text.
        self._recent = recent if not self._decode(recent).endswith(REPLACEMENT) else []
        self._stream = DecodeStream(ids=self._recent, skip_special_tokens=True)
        self._pending = []

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


def offsets_of(tokenizer: RustTokenizer, token_ids: Sequence[int], num_characters: int) -> list[int]:
    """Where each token begins in their text, in whole characters, as a TextStream gives it.

    At most `num_characters`: a text that was tokenised need not be what its tokens say.
    """
    stream, offsets, end = TextStream(tokenizer), list[int](), 0
    for token_id in token_ids:
        offsets.append(min(end, num_characters))
        end += len(stream.feed(token_id))
    return offsets


class StopStrings:
    """Text up to the stop string that is complete first; what may be the start of one is held back.

    The outcome depends on the text alone, not on the pieces it comes in.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.any = bool(stops)
        """Is there a stop string at all?"""
        self.stopped = False
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0
        """Characters at the start of what is held that no stop string may end in."""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """What can be shown now. Nothing once `stopped`, which is set when a stop string is complete.

        Of text that may not stop, a stop string can begin in it, and does not end in it.
        """
        if self.stopped:
            return ""
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [(start + len(stop), start) for stop in self._stops if (start := self._find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        self._num_passed = max(0, self._num_passed - split)
        return shown

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._num_passed + 1 - len(stop)))

    def flush(self) -> str:
        """At the end of the text: what was held back was no stop string after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a start of `stop`, short of all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Detokenizer:
    """The text of one choice: `feed` its tokens as they come, then `finish`, unless it `stopped` before.

    Stop strings are looked for behind the first `min_tokens` tokens; one may begin in the text of those.
    """

    def __init__(
        self, tokenizer: RustTokenizer, *, stops: Sequence[str] = (), context: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._text = TextStream(tokenizer, context)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens consumed: those after the one that completed a stop string are not counted."""
        self.num_characters = 0
        """Characters that they completed, shown or not."""

    @property
    def stopped(self) -> bool:
        """A stop string was found; the text ends before it."""
        return self._stops.stopped

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now, without a stop string or what may be the start of one."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            text = self._text.feed(token_id)
            self.num_characters += len(text)
            shown.append(self._stops.feed(text, may_stop=self._may_stop))
        return "".join(shown)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The rest of the text, that of these last tokens too: characters left incomplete and text held back.

        Without stop strings the tokens are decoded together, however many.
        """
        if self._stops.any:
            shown = self.feed(token_ids)
            if self.stopped:
                return shown
            return shown + self._stops.feed(self._text.flush(), may_stop=self._may_stop) + self._stops.flush()
        self.num_tokens += len(token_ids)
        text = self._text.flush(token_ids)
        self.num_characters += len(text)
        return text


# -------- token text
# What single tokens are: their bytes, which need not be whole characters, and a text for each.
#
# A token in the middle of a character has no text of its own; it is written as its bytes, `bytes:\xe2\x82`, as OpenAI does.

_SPACE: Final = "▁"
"""What SentencePiece writes for a space."""


class TokenTexts:
    """The tokens of one tokenizer, one at a time. Special tokens are shown here."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = set(_decoder_kinds(tokenizer))
        self._bytes_of_letter = _byte_alphabet() if "ByteLevel" in kinds else None
        self._is_sentencepiece = bool(kinds & {"Metaspace", "ByteFallback"})

    def bytes_of(self, token_id: int) -> bytes | None:
        """Its UTF-8, or a piece of some; None if the tokenizer has no such token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self._bytes_of_letter is not None:
            letters = [self._bytes_of_letter.get(letter) for letter in token]
            return token.encode() if None in letters else bytes(letter for letter in letters if letter is not None)
        if self._is_sentencepiece:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        """Its text; of one that is no whole characters, its bytes in words."""
        data = self.bytes_of(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _decoder_kinds(tokenizer: RustTokenizer) -> Iterator[str]:
    """The types of the steps of its decoder."""
    if tokenizer.decoder is None:
        return
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    for step in state.get("decoders", [state]):
        yield step["type"]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: the printable ones as they are, the others as those from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


# -------- tokenizer

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
