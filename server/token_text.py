"""What single tokens are: their bytes, which need not be whole characters, and a text for each.

A token in the middle of a character has no text of its own; it is written as its bytes, `bytes:\\xe2\\x82`, as OpenAI does.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer

_SPACE: Final = "▁"
"""What SentencePiece writes for a space."""


class TokenTexts:
    """The tokens of one tokenizer, one at a time. Special tokens are shown here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
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


def _decoder_kinds(tokenizer: Tokenizer) -> Iterator[str]:
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
