"""Tokens to text, a token at a time: characters that span tokens, and stop strings that do.

tokens ── TextStream ──> text ── StopStrings ──> text that no stop string can take back
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MAX_PENDING_TOKENS = 16
"""So many tokens without text are bytes that are no character, or special tokens; to wait on costs ever more."""
CONTEXT_TOKENS = 8
"""As many tokens of a prompt as the text of what follows can depend on, with room to spare."""


def decode_all(tokenizer: Tokenizer, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[str]:
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

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
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


def offsets_of(tokenizer: Tokenizer, token_ids: Sequence[int], num_characters: int) -> list[int]:
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
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), context: Sequence[int] = (), min_tokens: int = 0
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
