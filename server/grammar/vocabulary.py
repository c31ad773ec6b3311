"""What a grammar must know of a model's tokens: the bytes of each, and which end an answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RustTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_NOT_UTF8: Final = ((0xE0, 0x80, 0x9F), (0xED, 0xA0, 0xBF), (0xF0, 0x80, 0x8F), (0xF4, 0x90, 0xBF))
"""A first byte, and those that make no character with it: overlong forms, halves of surrogate pairs, beyond the last."""


class Vocabulary:
    """The tokens of one model. Both processes make the same one, so that what one has compiled the other can use."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", size: int, end_tokens: Sequence[int]) -> None:
        """`size` is that of the model's logits, which may have more or fewer tokens than the tokenizer.

        Takes half a second for 100,000 tokens. Raises: ValueError if no token ends an answer.
        """
        import xgrammar

        if not end_tokens:
            raise ValueError("this model names no end token, without which an answer by a grammar could not end")
        ends = sorted(end_tokens)
        plain = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=ends)
        encoded = [""] * size
        # Added tokens are marks of the chat template, and no text: a detokenizer leaves them out.
        marks = tokenizer.added_tokens_decoder.keys()
        for token, token_id in tokenizer.get_vocab().items():
            if token_id < size and token_id not in marks:
                encoded[token_id] = token
        self.info: xgrammar.TokenizerInfo = xgrammar.TokenizerInfo(
            encoded, plain.vocab_type, vocab_size=size, stop_token_ids=ends, add_prefix_space=plain.add_prefix_space
        )
        self.rust: RustTokenizer = tokenizer.backend_tokenizer
        self.size = size
        self.num_words = -(-size // 32)
        """int32 words of a mask."""
        self.num_bytes = np.array([len(token) for token in self.info.decoded_vocab], np.int32)
        """Of each token."""
        self.last_bytes = np.array([token[-1] if token else 0 for token in self.info.decoded_vocab], np.uint8)
        """Of each token."""
        self._longer: dict[int, npt.NDArray[np.int32]] = {}
        firsts = np.zeros(32 * self.num_words, np.uint8)
        firsts[:size] = [token[0] if token else 0 for token in self.info.decoded_vocab]
        self.after = {lead: _bits((firsts < low) | (firsts > high)) for lead, low, high in _NOT_UTF8}
        """By the last byte of a text the masks that allow what is UTF-8 behind it, where xgrammar 0.2.8 allows more."""
        self.ends = np.zeros(self.num_words, np.int32)
        """The mask that allows the end tokens alone."""
        for token_id in ends:
            self.ends[token_id // 32] |= np.uint32(1 << (token_id % 32)).view(np.int32)

    def longer(self, num_bytes: int) -> npt.NDArray[np.int32]:
        """The mask that allows the tokens of more bytes than so many."""
        if num_bytes not in self._longer:
            is_longer = np.zeros(32 * self.num_words, np.bool_)
            is_longer[: self.size] = self.num_bytes > num_bytes
            self._longer[num_bytes] = _bits(is_longer)
        return self._longer[num_bytes]

    @classmethod
    def load(cls, model_dir: Path, size: int, end_tokens: Sequence[int]) -> Self:
        """From a directory; takes seconds. Raises: OSError, ValueError; ModuleNotFoundError without xgrammar."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        return cls(tokenizer, size, end_tokens)


def _bits(may: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """A mask, of one truth for each token."""
    words: npt.NDArray[np.int32] = np.packbits(may, bitorder="little").view(np.int32)
    return words
