"""The place in an answer at which its grammar begins, where text before it is free.

    answer       | thoughts </think> | some text | <tool_call>{"name": ... </tool_call> | more text
                 |<---- free ------------------->|<- by the grammar ------------------->|<- free
    looked for   | `behind`          | `triggers`                                       | `triggers`

A grammar begins at a trigger, whose text it spells. Few tokens can complete a text that is looked for. So one look into a mask
says of most that nothing has come, and only behind the others is the answer's text compared.
"""

from collections.abc import Sequence

from vmmkv_server.protocol import Gate
from vmmkv_server.structured_output.code_blocks import CodeBlocks
from vmmkv_server.structured_output.matcher import Vocabulary, Words


class GateSearch:
    """Looks for the place in one answer at which its grammar begins."""

    def __init__(self, gate: Gate, vocabulary: Vocabulary) -> None:
        """Cost: milliseconds for texts that the vocabulary has not been asked for."""
        self._is_first, self.repeats, self._bytes = gate.is_first, gate.repeats, vocabulary.token_bytes
        self._behind = (gate.behind.encode(),) if gate.behind else ()
        """The text that triggers are looked for behind, until it has come."""
        self._triggers = tuple(trigger.encode() for trigger in gate.triggers)
        self._masks = {texts: vocabulary.completing(texts) for texts in (self._behind, self._triggers, ())}
        self._begin = self._skipped = 0
        """Tokens before the text in which is looked, and bytes of the next one."""
        self._code = None if gate.in_code else CodeBlocks()
        """The code blocks of the free text up to the last trigger; None if triggers count in them too."""
        self._num_read, self._unread = 0, b""
        """Tokens whose text `_code` has been given, and the rest of it, from the last trigger on."""

    @property
    def completing(self) -> Words:
        """The mask of the tokens that may complete a text which is looked for. Behind any other `found` gives nothing."""
        return self._masks[self._behind or self._triggers]

    def found(self, tokens: Sequence[int]) -> list[bytes]:
        """The texts that the grammar may begin with, the longest first: each goes to the end of the answer's last token.

        Empty if no text that is looked for ends in that token. To be called for each token that `completing` has, in order.
        """
        if self._behind:
            (behind,) = self._behind
            text, num_before = self._text(tokens, len(behind))
            place = text.find(behind, max(0, num_before + 1 - len(behind)))
            if place < 0:
                return []
            rest = text[place + len(behind) :]
            self._begin, self._skipped = len(tokens) - 1, len(self._bytes[tokens[-1]]) - len(rest)
            self._behind = ()
            self._num_read, self._unread = len(tokens), rest
            if not self._triggers:
                return [rest, b""]  # the rest of a token, such as a line's end, may be none of the grammar's
        return self._found(tokens) if self._triggers else []

    def restart(self, num_tokens: int) -> None:
        """Look for triggers behind the first `num_tokens` of the answer, with which a grammar has ended."""
        self._begin, self._skipped = num_tokens, 0
        self._num_read, self._unread = num_tokens, b""

    def _found(self, tokens: Sequence[int]) -> list[bytes]:
        """The texts from each trigger on that ends in the last token."""
        text, num_before = self._text(tokens, None if self._is_first else max(map(len, self._triggers)))
        starts = set[int]()
        for trigger in self._triggers:
            start = text.find(trigger, max(0, num_before + 1 - len(trigger)))
            while start >= 0:
                starts.add(start)
                start = text.find(trigger, start + 1)
        if self._is_first:
            first = text.lstrip()
            starts &= {len(text) - len(first)}
            if not starts and not any(trigger.startswith(first) for trigger in self._triggers):
                self._triggers = ()  # other text has come
        return [text[start:] for start in sorted(starts) if not self._is_in_code(tokens, text[start:])]

    def _is_in_code(self, tokens: Sequence[int], end: bytes) -> bool:
        """Does the `end` of the text, which begins with a trigger, stand in a code block? To be asked in the order of triggers.

        Cost: as the text since the last trigger.
        """
        if self._code is None:
            return False
        text = self._unread + b"".join(self._bytes[token] for token in tokens[self._num_read :])
        self._code.feed(text.removesuffix(end).decode(errors="replace"))
        self._num_read, self._unread = len(tokens), end
        return self._code.is_open

    def _text(self, tokens: Sequence[int], num_wanted: int | None) -> tuple[bytes, int]:
        """The text up to the answer's last token, and how many bytes of it are before that token: `num_wanted` or more if there
        are so many, or all if None.
        """
        num_last = len(self._bytes[tokens[-1]])
        parts, num_before, index = list[bytes](), -num_last, len(tokens)
        while index > self._begin and (num_wanted is None or num_before < num_wanted):
            index -= 1
            parts.append(self._bytes[tokens[index]])
            num_before += len(parts[-1])
        text = b"".join(reversed(parts))[self._skipped if index == self._begin else 0 :]
        return text, max(0, len(text) - num_last)
