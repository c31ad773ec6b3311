"""Single tokens have the bytes that they stand for, in every kind of tokenizer."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.tokenizer import TokenTexts

BYTES = TokenTexts(byte_tokenizer().backend_tokenizer)


def sentencepiece() -> Tokenizer:
    vocab = [("<unk>", 0.0), ("▁hello", -1.0), ("<0xE2>", -2.0), ("<0x0A>", -2.0), ("a▁b", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return tokenizer


def test_every_byte_is_a_token_of_itself() -> None:
    texts = bytes(range(256)).decode("latin-1")
    for letter in texts:
        assert b"".join(BYTES.bytes_of(token_id) or b"" for token_id in token_ids(letter)) == letter.encode()


def test_tokens_join_to_their_text() -> None:
    for text in ("naïve 日本 🙂 \u200d", "a ▁ b\n\t "):
        assert b"".join(BYTES.bytes_of(token_id) or b"" for token_id in token_ids(text)).decode() == text


@pytest.mark.parametrize(
    ("token_id", "data", "text"),
    [
        (0, b"<unk>", "<unk>"),
        (1, b" hello", " hello"),
        (2, b"\xe2", "bytes:\\xe2"),
        (3, b"\n", "\n"),
        (4, b"a b", "a b"),
        (5, b"</s>", "</s>"),
        (6, None, "token_id:6"),
    ],
)
def test_pieces_of_sentencepiece_have_their_spaces_and_bytes(token_id: int, data: bytes | None, text: str) -> None:
    texts = TokenTexts(sentencepiece())
    assert (texts.bytes_of(token_id), texts.text_of(token_id)) == (data, text)


def test_special_tokens_are_shown() -> None:
    assert BYTES.text_of(256) == "<|im_start|>"


def test_without_a_decoder_tokens_are_words() -> None:
    assert TokenTexts(Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))).text_of(0) == "word"
