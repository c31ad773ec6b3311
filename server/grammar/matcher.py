"""Where one answer stands in its grammar: what may come next, and what must."""

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vmmkv.server.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

_CONTEXT_TOKENS: Final = 8
"""Of the answer, before what is forced: tokenised with it, so that it comes in the tokens that the model knows it by."""

Words = npt.NDArray[np.int32]
"""A bit for each token of the vocabulary, the lowest of the first word for token 0: may it come next?"""


class Matcher:
    """One answer's way through its grammar; it knows all tokens that were accepted, and nothing of where they came from."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocabulary: Vocabulary) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._words = np.zeros((1, vocabulary.num_words), np.int32)
        self._tokens: list[int] = []
        self._num_masked = -1
        """`_words` is what may come behind so many of the tokens; -1: behind none."""

    def accept(self, token: int) -> bool:
        """A token has come; False if the grammar does not allow it, and then nothing has changed."""
        if not self._matcher.accept_token(token):
            return False
        self._tokens.append(token)
        return True

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self._vocabulary.num_words

    def fill(self, words_GW: Words, row: int) -> None:
        """What may come next, into a row of C-contiguous masks. Microseconds; within a string, tens or hundreds of them."""
        if self._num_masked == len(self._tokens):
            words_GW[row] = self._words[0]
        else:
            self._fill(words_GW, row)

    def _fill(self, words_GW: Words, row: int) -> None:
        if not self._matcher.fill_next_token_bitmask(words_GW, row):
            words_GW[row] = -1  # all is allowed, and xgrammar may have left the mask as it was
        if (
            self._tokens
            and (after := self._vocabulary.after.get(int(self._vocabulary.last_bytes[self._tokens[-1]]))) is not None
        ):
            words_GW[row] &= after

    def mask(self) -> Words:
        """What may come next; a view that the next call writes over."""
        if self._num_masked != len(self._tokens):
            self._fill(self._words, 0)
            self._num_masked = len(self._tokens)
        words: Words = self._words[0]
        return words

    def must_end(self) -> bool:
        """Is the answer whole, and can nothing be added to it?"""
        return bool(self._matcher.is_completed()) and not (self.mask() & ~self._vocabulary.ends).any()

    def force(self, at_most: int) -> list[int]:
        """Accept the tokens that must come next, at most so many; none if there are not two, for one is no shorter way.

        They are what the tokenizer makes of the text, behind the last tokens if it keeps those as they are; the model has
        computed them already. A last one that could be the beginning of a longer one is left to the model.
        """
        if at_most < 2 or (len(text := self.forced_text()) < 2 and text.isascii()):
            return []
        tokens = self._accepted(self._tokenised(text)[:at_most])
        if tokens and len(tokens) < at_most and self._could_be_longer(tokens[-1]):
            self._take_back(1)
            tokens.pop()
        if len(tokens) == 1:
            self._take_back(1)
            return []
        return tokens

    def forced_text(self) -> str:
        """What must come next, whole characters of it."""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:
            # Forced bytes can begin or end within a character: what comes before the first such place is text.
            return bytes(error.object[: error.start]).decode()

    def _tokenised(self, text: str) -> list[int]:
        rust = self._vocabulary.rust
        if context := self._tokens[-_CONTEXT_TOKENS:]:
            together: list[int] = rust.encode(rust.decode(context) + text, add_special_tokens=False).ids
            if together[: len(context)] == context:
                return together[len(context) :]
        alone: list[int] = rust.encode(text, add_special_tokens=False).ids
        return alone

    def _accepted(self, tokens: list[int]) -> list[int]:
        """As many as the grammar accepts: all of them, unless the tokenizer changes the text that it is given."""
        return list(itertools.takewhile(self.accept, tokens))

    def _could_be_longer(self, last: int) -> bool:
        """Could a longer token stand where the last one stands? What comes behind the forced text would decide."""
        self._take_back(1)
        could_be = bool((self.mask() & self._vocabulary.longer(int(self._vocabulary.num_bytes[last]))).any())
        assert self.accept(last), "it was accepted before"
        return could_be

    def _take_back(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._tokens[len(self._tokens) - count :]
        if len(self._tokens) < self._num_masked:
            self._num_masked = -1  # other tokens may come in their place
