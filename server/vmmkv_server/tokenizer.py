"""A model's tokenizer and chat template: prompts to token ids, and tokens to text as they come.

    tokens ── TextStream ──> text ── StopStrings ──> text that no stop string can take back      (both: Detokenizer)

The Rust tokenizer may be used from several threads, and releases Python's lock in batches: a server runs what takes long in
a thread (`http.generation.off_loop`).
"""

import functools
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as shortened
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import jinja2
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models
from tokenizers.decoders import DecodeStream

from vmmkv_server.models import ModelUnavailable, UnsupportedModel, from_directory
from vmmkv_server.sampling_params import Limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | list[int]
"""A text or token ids."""
TemplateVariable: TypeAlias = str | float | bool | None
"""One of JSON's scalars."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES: Final = 4
_MAX_PENDING_TOKENS: Final = 16
"""Most tokens without text: after these, bytes that are no character become replacement characters."""
_CONTEXT_TOKENS: Final = 8
"""Tokens before a text that its decoding can depend on, with room to spare."""
_SPACE: Final = "▁"
"""SentencePiece's space."""
_MESSAGE: Final = 'a message is {"role": ..., "content": text}'


class PromptError(ValueError):
    """A prompt that cannot be made into tokens of this model."""


class TemplateBroken(ValueError):
    """A chat template that is no program: the model's files are at fault, and no conversation can be served."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its answer, with the places of its tokens."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]
    """Start of each token in the text, in characters."""


class Tokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises: ValueError if the tokenizer has no Rust form."""
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} has no fast form: save the model with a tokenizer.json")
        self._tokenizer = tokenizer
        self.rust: RustTokenizer = tokenizer.backend_tokenizer
        """The Rust tokenizer. Threads may share it, since its settings change only here."""
        self.rust.no_truncation()
        self.rust.no_padding()
        self.vocab_size = len(tokenizer)
        self.texts = TokenTexts(self.rust)
        added = self.rust.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._sizes = TokenSizes.of(self.rust)

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Load from a local directory, which takes seconds. A chat template that cannot be compiled is a warning.

        Raises: ModelUnavailable or UnsupportedModel if none can be used.
        """
        from transformers import AutoTokenizer  # takes seconds to import, while the HTTP server is up

        try:
            tokenizer = cls(from_directory(AutoTokenizer, model_dir))
        except Exception as error:  # a broken file makes transformers raise almost anything
            kind = UnsupportedModel if isinstance(error, UnsupportedModel) else ModelUnavailable
            raise kind(f"the tokenizer in {model_dir} cannot be loaded: {error}") from error
        try:
            tokenizer.check_template()
        except TemplateBroken as error:
            name = "chat_template.jinja" if (model_dir / "chat_template.jinja").is_file() else "tokenizer_config.json"
            log.warning("%s (%s): chats are refused until it is mended, completions work", error, model_dir / name)
        return tokenizer

    def encode(
        self, prompt: Prompt, limits: Limits | None = None, wanted: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a prompt; a text gets the model's start token.

        Raises: PromptError for an unknown token id, or a text that is not Unicode; RequestRefused for a text that is so long
        that it can never be within the `limits` with the new tokens that are `wanted`, before it is tokenised.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt, limits, wanted, add_special_tokens=add_special_tokens)
        return self._known(prompt)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, TemplateVariable] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation by the model's chat template, up to the start of the assistant's turn.

        Each message has a `role` and a `content`, both texts; None is the content of an assistant's turn without text. What
        else it has goes to the template as it is, such as `reasoning_content`; so do `tools`, and `variables` such as
        `enable_thinking`.

        Raises: PromptError if a message is none, or there is no template, or it refuses the conversation or fails on it;
        TemplateBroken.
        """
        check_messages(messages)
        if self._tokenizer.chat_template is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        # Templates know the older name of developer messages, and many one system turn, at the beginning.
        turns = list[dict[str, Any]]()
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "developer" and [turn["role"] for turn in turns] == ["system"]:
                turns[0] = {**message, **turns[0], "content": f"{turns[0]['content']}\n\n{content}"}
            else:
                turns.append({**message, "role": "system" if role == "developer" else role})
        self.check_template()
        options = {**(variables or {}), **({} if tools is None else {"tools": list(tools)})}
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # a template is a program, run in jinja2's sandbox
            refused = type(error) is jinja2.TemplateError  # by `raise_exception`
            verb, reason = ("refuses", error) if refused else ("fails on", f"{type(error).__name__}: {error}")
            raise PromptError(f"the model's chat template {verb} this conversation: {reason}") from error
        assert isinstance(text, str)
        return text

    @property
    def template(self) -> str | None:
        """The chat template, the one for tools if there are several; None if there is none."""
        found = self._tokenizer.chat_template
        return found.get("tool_use", found.get("default")) if isinstance(found, dict) else found

    @property
    def special_texts(self) -> Collection[str]:
        """Texts of the special tokens, which answers lack unless they are `kept`."""
        return self._special.values()

    def check_template(self) -> None:
        """Raises: TemplateBroken if there is a chat template that is no program. Cost: transformers keeps compiled ones."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = self._tokenizer.chat_template
        if (used := template.get("default") if isinstance(template, dict) else template) is None:
            return
        try:
            _compile_jinja_template(used)
        except Exception as error:
            where = f"{type(error).__name__}: {error}"
            if isinstance(error, jinja2.TemplateSyntaxError):
                where = f"line {error.lineno}: {error.message}"
            raise TemplateBroken(f"the model's chat template cannot be compiled ({where})") from error

    def text_of(self, prompt: Prompt, *, skip_special_tokens: bool = True) -> str:
        """The text of a prompt. Raises: PromptError."""
        if isinstance(prompt, str):
            return prompt
        # A batch of one releases Python's lock, as in `_encode_text`.
        return self.rust.decode_batch([self._known(prompt)], skip_special_tokens=skip_special_tokens)[0]

    def echo(self, prompt: Prompt, token_ids: Sequence[int]) -> Echo:
        """A prompt with the places of its tokens. Raises: PromptError."""
        text = self.text_of(prompt)
        stream, offsets, end = TextStream(self.rust), list[int](), 0
        for token_id in token_ids:
            offsets.append(min(end, len(text)))  # the tokens of a text can decode to a longer one
            end += len(stream.feed(token_id))
        return Echo(text, token_ids, offsets)

    def detokenizer(
        self, stops: Sequence[str], context: Sequence[int] = (), *, min_tokens: int = 0, kept: Sequence[str] = ()
    ) -> "Detokenizer":
        """A detokenizer for one answer. `context` is the prompt, if the answer continues its text.

        `kept`: texts of special tokens that the answer's text has; the others are left out.
        """
        shown = {token_id: text for token_id, text in self._special.items() if text in kept} if kept else {}
        return Detokenizer(self.rust, stops=stops, context=context, min_tokens=min_tokens, kept=shown)

    def _known(self, token_ids: list[int]) -> list[int]:
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if unknown is not None:
            raise PromptError(f"{unknown} is not a token id of this model: they go from 0 to {self.vocab_size - 1}")
        return token_ids

    def _encode_text(self, text: str, limits: Limits | None, wanted: int | None, *, add_special_tokens: bool) -> list[int]:
        if limits is not None and self._sizes is not None:
            limits.check_least(self._sizes.least_tokens(text, limits.max_tokens), wanted)
        try:  # JSON and str can hold half of a surrogate pair; UTF-8 and tokenizers cannot
            text.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X}"
            raise PromptError(
                f"it holds {half}, half of a surrogate pair, which is no character; send valid Unicode"
            ) from error
        # A batch of one releases Python's lock; `encode` holds it, 1.4 s for a million characters.
        return self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def check_messages(messages: Any) -> None:
    """Raises: PromptError for what is no list of messages, each with a `role` and a `content`."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"{shortened(messages)} is not a list of messages; {_MESSAGE}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"message {index} is {shortened(message)}; {_MESSAGE}")
        for name in ("role", "content"):
            may_be_none = name == "content" and name in message and message.get("role") == "assistant"
            if message.get(name) is None and not may_be_none:
                raise PromptError(f"message {index} has no {name}; {_MESSAGE}")
            if not isinstance(message[name], str | None):
                raise PromptError(f"the {name} of message {index} is {shortened(message[name])}, which is no text; {_MESSAGE}")


class Detokenizer:
    """The text of one answer: `feed` its tokens, then `finish`, unless it has `stopped`.

    A stop string may begin within the first `min_tokens` tokens, and not end there.
    """

    def __init__(
        self,
        tokenizer: RustTokenizer,
        *,
        stops: Sequence[str] = (),
        context: Sequence[int] = (),
        min_tokens: int = 0,
        kept: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`kept`: special tokens that the text has, with their texts."""
        self._text = KeepingTextStream(tokenizer, context, kept) if kept else TextStream(tokenizer, context)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens taken, up to the one that completed a stop string."""
        self.num_characters = 0
        """Characters of these tokens, shown or not."""

    @property
    def stopped(self) -> bool:
        """Was a stop string found? The text ends before it."""
        return self._stops.stopped

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now: without a stop string, or the possible start of one."""
        shown: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            text = self._text.feed(token_id)
            self.num_characters += len(text)
            shown.append(self._stops.feed(text, may_stop=self.num_tokens > self._min_tokens))
        return "".join(shown)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The rest of the text, with these last tokens, incomplete characters and text held back."""
        if self._stops.any:
            shown = self.feed(token_ids)
            if not self.stopped:
                shown += self._stops.feed(self._text.flush(), may_stop=self.num_tokens > self._min_tokens) + self._stops.flush()
            return shown
        self.num_tokens += len(token_ids)
        text = self._text.flush(token_ids)
        self.num_characters += len(text)
        return text


class TextStream:
    """The text of a growing list of tokens, in whole characters, without special tokens.

    The text continues that of `context`: some decoders drop a space at the start of a text.
    """

    def __init__(self, tokenizer: RustTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream: DecodeStream
        self._recent: list[int]
        """The tokens of the last text, as context of the pending ones."""
        self._pending: list[int]
        """Tokens without text yet."""
        self._restart(list(context))

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often none."""
        self._pending.append(token_id)
        if len(self._pending) > _MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # later tokens changed the text of earlier ones; tokenizers has no narrower error
            return self.flush()
        if text is None:
            return ""
        self._recent, self._pending = self._pending, []
        return text

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The text of the pending tokens and of `token_ids`, with replacement characters for bytes that are no character.

        Much faster than to feed the tokens one by one.
        """
        self._pending += token_ids
        before = self._decode(self._recent)
        both = self._decode(self._recent + self._pending)
        text = both[len(before) :] if both.startswith(before) else self._decode(self._pending)
        self._restart(self._recent + self._pending)
        return text

    def _give_up_waiting(self) -> str:
        """Flush all but the tokens that can still be the start of a character."""
        young = self._pending[-_MAX_CHARACTER_BYTES:]
        self._pending = self._pending[:-_MAX_CHARACTER_BYTES]
        return self.flush() + "".join(self.feed(token_id) for token_id in young)

    def _restart(self, context: list[int]) -> None:
        recent = context[-_CONTEXT_TOKENS:]
        # A context that ends within a character would come again with the first text.
        self._recent = recent if not self._decode(recent).endswith(_REPLACEMENT) else []
        self._stream = DecodeStream(ids=self._recent, skip_special_tokens=True)
        self._pending = []

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


class KeepingTextStream(TextStream):
    """A TextStream with the texts of some special tokens."""

    def __init__(self, tokenizer: RustTokenizer, context: Sequence[int], kept: Mapping[int, str]) -> None:
        super().__init__(tokenizer, context)
        self._kept = kept

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often none."""
        return super().flush() + self._kept[token_id] if token_id in self._kept else super().feed(token_id)

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """The text of the pending tokens and of `token_ids`."""
        return "".join(map(self.feed, token_ids)) + super().flush()


class StopStrings:
    """Text up to the stop string that is complete first. Holds back the possible start of one.

    The result does not depend on how the text is cut into pieces.

    Cost: a step of an automaton for each character, however many stop strings there are.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.any = bool(stops)
        self.stopped = False
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be shown now; empty once `stopped`. Without `may_stop` no stop string may end in this text."""
        if self.stopped:
            return ""
        automaton, state, num_before = self._automaton, self._state, len(self._held)
        self._held += text
        for end, letter in enumerate(text, num_before + 1):
            state = automaton.step(state, letter)
            if may_stop and automaton.complete[state]:
                self.stopped = True
                shown, self._held = self._held[: end - automaton.complete[state]], ""
                return shown
        self._state = state
        split = len(self._held) - automaton.incomplete[state]
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def flush(self) -> str:
        """The held text, at the end of the text."""
        shown, self._held = self._held, ""
        return shown


class _Automaton:
    """The automaton of Aho and Corasick: a state is the longest start of a stop string at the end of the text so far.

    Cost: about a microsecond and some hundred bytes for each character of the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """The state of the next shorter start at the end of the text."""
        self.complete = [0]
        """Characters of the longest stop string that ends in each state; 0 if none does."""
        self.incomplete = [0]
        """Characters of the longest start of a stop string that is not yet whole, in each state."""
        for stop in stops:
            state = 0
            for letter in stop:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    for column in (self._shorter, self.complete, self.incomplete):
                        column.append(0)
                state = self._next[state][letter]
            self.complete[state] = len(stop)
        states, size = [0], 0
        while states:  # by size: shorter ones are known
            size += 1
            found = [(state, letter, longer) for state in states for letter, longer in self._next[state].items()]
            for state, letter, longer in found:
                shorter = self._shorter[longer] = self.step(self._shorter[state], letter) if state else 0
                self.complete[longer] = self.complete[longer] or self.complete[shorter]
                self.incomplete[longer] = size if self._next[longer] else self.incomplete[shorter]
            states = [longer for _, _, longer in found]

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while (longer := self._next[state].get(letter)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return longer


@functools.lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """The automaton that all choices of a request share."""
    return _Automaton(stops)


def decode_all(tokenizer: RustTokenizer, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[str]:
    """The text of each answer, given as (context, tokens), on all processors at once.

    As by a TextStream for each, but for bytes that are no character.
    """

    def decode(lists: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.decode_batch([list(each) for each in lists], skip_special_tokens=True)

    contexts = [list(context[-_CONTEXT_TOKENS:]) for context, _ in answers]
    befores = decode(contexts)
    for index, before in enumerate(befores):
        if before.endswith(_REPLACEMENT):
            contexts[index], befores[index] = [], ""
    boths = decode([[*context, *tokens] for context, (_, tokens) in zip(contexts, answers, strict=True)])
    changed = [index for index, (before, both) in enumerate(zip(befores, boths, strict=True)) if not both.startswith(before)]
    texts = [both[len(before) :] for before, both in zip(befores, boths, strict=True)]
    for index, text in zip(changed, decode([answers[index][1] for index in changed]), strict=True):
        texts[index] = text
    return texts


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Lower bound on the tokens of a text: a tokenizer takes hundreds of bytes of memory for each byte of a text."""

    most: int
    """Most characters of a text that one token can stand for."""
    lost: str
    """Characters that may leave no token."""

    @classmethod
    def of(cls, tokenizer: RustTokenizer) -> Self | None:
        """The bounds of a tokenizer; None if any number of characters can become one token, as unknown words can."""
        normal, split, model = _steps(tokenizer.normalizer), _steps(tokenizer.pre_tokenizer), tokenizer.model
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        kinds = {step["type"] for step in (*normal, *split)}
        if not isinstance(model, models.BPE) or not all(map(_keeps_all, normal)) or not all(map(_cuts_only, split)):
            return None
        lost = ""
        if "ByteLevel" in kinds:
            missing = {byte for letter, byte in _byte_alphabet().items() if letter not in vocabulary}
            if missing & set(range(0x80, 0xC0)):  # part of each character beyond ASCII
                return None
            lost = "".join(chr(byte) for byte in missing if byte < 0x80)
        elif not model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
            return None
        if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
            lost += "".join(filter(str.isspace, map(chr, range(0x3001))))
        composed = _MOST_COMPOSED if kinds & {"NFC", "NFKC"} else 1
        return cls(composed * max(map(len, vocabulary)), lost)

    def least_tokens(self, text: str, enough: int) -> int:
        """Lower bound on the tokens of a text. Lost characters are counted only if it may be more than `enough`."""
        if len(text) <= enough * self.most:
            return -(-len(text) // self.most)
        return -(-(len(text) - sum(map(text.count, self.lost))) // self.most)


_MOST_COMPOSED: Final = 4
"""Characters that Unicode composes to one: a letter and three marks."""


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, those of sequences among them."""

    def each(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
        inner = next((step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step), None)
        yield from [step] if inner is None else chain.from_iterable(map(each, inner))

    return [] if part is None else list(each(json.loads(part.__getstate__())))


def _keeps_all(step: dict[str, Any]) -> bool:
    """Does a step of a normalizer keep all characters, but for composing them?"""
    if step["type"] == "Replace":
        return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
    return step["type"] in {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel"}


def _cuts_only(step: dict[str, Any]) -> bool:
    """Does a step before the model keep all characters?"""
    return step.get("behavior", "Removed" if step["type"] not in _KEEP_ALL else None) != "Removed"


_KEEP_ALL: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})


class TokenTexts:
    """The bytes and the text of single tokens, special ones included.

    A part of a character is written as its bytes, `bytes:\\xe2\\x82`, as OpenAI does.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = {step["type"] for step in _steps(tokenizer.decoder)}
        self._bytes_of_letter = _byte_alphabet() if "ByteLevel" in kinds else None
        self._is_sentencepiece = bool(kinds & {"Metaspace", "ByteFallback"})

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes of a token in UTF-8, perhaps a part of a character's; None if there is no such token."""
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
        """Text of a token, or its bytes if these are no whole characters."""
        data = self.bytes_of(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_alphabet() -> dict[str, int]:
    """The byte of each letter of byte-level BPE: printable bytes stand for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
