"""Laws of turning tokens into text: as they come, all at once, up to a stop string; and the bytes of single tokens."""

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.tokenizer import Detokenizer, StopStrings, TextStream, TokenSizes, TokenTexts, decode_all

TOKENIZER = byte_tokenizer().backend_tokenizer
IM_START, IM_END = token_ids("<|im_start|><|im_end|>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=8)


@given(letters, letters, stops, st.lists(st.integers(0, 12), max_size=5))
def test_text_ends_before_the_stop_string_complete_first_in_whatever_pieces(
    first: str, then: str, stop: list[str], cuts: list[int]
) -> None:
    """A stop string may begin in `first`, where none may end."""
    matcher = StopStrings(stop)
    shown = "".join(matcher.feed(letter, may_stop=False) for letter in first)
    assert not matcher.stopped
    edges = [0, *sorted(cut % (len(then) + 1) for cut in cuts), len(then)]
    shown += "".join(matcher.feed(then[start:end]) for start, end in itertools.pairwise(edges))
    shown += "" if matcher.stopped else matcher.flush()
    text = first + then
    ends = [size for size in range(len(first) + 1, len(text) + 1) if any(text[:size].endswith(one) for one in stop)]
    assert matcher.stopped == bool(ends)
    cut = text[: ends[0]] if ends else text
    assert shown == cut[: len(cut) - max((len(one) for one in stop if ends and cut.endswith(one)), default=0)]


@given(letters, stops)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    for may_stop in (True, False):
        matcher = StopStrings(stop)
        held = text[len(matcher.feed(text, may_stop=may_stop)) :]
        assert matcher.stopped or not held or any(one.startswith(held) and one != held for one in stop)


def test_text_costs_the_same_however_many_stop_strings_there_are() -> None:
    """Steps of the automaton are counted: two for each character at most."""
    text = "ab" * 500
    for stops in (["abc"], [f"{'ab' * length}{end}" for length in range(1, 40) for end in "cde"]):
        matcher, num_steps = StopStrings(stops), 0

        def count(frame: FrameType, event: str, called: Any) -> None:
            nonlocal num_steps
            num_steps += event == "c_call" and called.__name__ == "get"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            shown = matcher.feed(text)
        finally:
            sys.setprofile(before)
        assert shown and len(text) <= num_steps <= 2 * len(text)


@given(st.text(max_size=20))
def test_text_in_tokens_comes_out_as_it_was(text: str) -> None:
    stream = TextStream(TOKENIZER)
    shown = "".join(stream.feed(token_id) for token_id in token_ids(text)) + stream.flush()
    assert shown == TOKENIZER.decode(token_ids(text))


@given(st.lists(st.integers(0, 257), max_size=60))
def test_any_tokens_give_the_text_of_all_of_them(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    shown = "".join(stream.feed(token_id) for token_id in ids) + stream.flush()
    assert shown == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_character_comes_with_its_last_byte_and_an_incomplete_one_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.feed(token_id) for token_id in token_ids("a€b")] == ["a", "", "", "€", "b"]
    detokenizer = Detokenizer(TOKENIZER)
    assert (detokenizer.feed(token_ids("a€")[:-1]), detokenizer.finish()) == ("a", REPLACEMENT)


@pytest.mark.parametrize("num_special", [1, 15, 16, 17, 40])
def test_special_tokens_are_not_shown_and_text_after_many_is_whole(num_special: int) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [IM_START] * num_special + token_ids("€uro") + [IM_END]
    assert detokenizer.feed(ids) + detokenizer.finish() == "€uro"


def test_bytes_that_never_become_a_character_do_not_hold_text_back_for_ever() -> None:
    stream, continuation = TextStream(TOKENIZER), token_ids("€")[1]
    assert len("".join(stream.feed(continuation) for _ in range(100))) > 80


def test_a_decoder_that_drops_the_first_space_keeps_it_within_a_text() -> None:
    words = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, unk_token="▁Hello"))
    words.decoder = decoders.Metaspace()
    assert (TextStream(words).feed(1), TextStream(words, context=[0]).feed(1)) == ("world", " world")


@pytest.mark.parametrize(
    ("min_tokens", "shown", "num_tokens"),
    [(0, "a", 2), (1, "a", 2), (2, "a.b", 4), (3, "a.b", 4), (4, "a.b.c", 6), (9, "a.b.c.d", 7)],
)
@pytest.mark.parametrize("at_end", [False, True])
def test_no_stop_string_ends_a_text_before_min_tokens_and_none_is_counted_after_it(
    min_tokens: int, shown: str, num_tokens: int, at_end: bool
) -> None:
    detokenizer, ids = Detokenizer(TOKENIZER, stops=["."], min_tokens=min_tokens), token_ids("a.b.c.d")
    text = detokenizer.finish(ids) if at_end else "".join(detokenizer.feed([each]) for each in ids)
    assert (text, detokenizer.num_tokens) == (shown, num_tokens)


def test_a_stop_string_across_the_last_tokens_or_of_a_broken_character_is_found() -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["END"])
    assert detokenizer.feed(token_ids("one E")) + detokenizer.finish(token_ids("ND two")) == "one "
    assert detokenizer.stopped and detokenizer.num_tokens == len("one END") and detokenizer.feed(token_ids("three")) == ""
    broken = Detokenizer(TOKENIZER, stops=[REPLACEMENT])
    assert broken.feed(token_ids("a€")[:-1]) + broken.finish() == "a" and broken.stopped


TEXTS = ("", "one", "Grüße, €!", "日本 🙂 \u200d naïve", "a" * 300)


@pytest.mark.parametrize("context", ["", "before", "€", "a long context, longer than what is looked at"])
def test_all_at_once_gives_the_text_that_one_at_a_time_gives_and_no_context(context: str) -> None:
    before, wanted = token_ids(context), []
    for text in TEXTS:
        detokenizer, together = Detokenizer(TOKENIZER, context=before), Detokenizer(TOKENIZER, context=before)
        wanted.append(detokenizer.feed(token_ids(text)) + detokenizer.finish())
        assert together.feed(token_ids(text)[:2]) + together.finish(token_ids(text)[2:]) == wanted[-1]
        assert (together.num_tokens, together.num_characters) == (detokenizer.num_tokens, len(wanted[-1]))
    assert decode_all(TOKENIZER, [(before, token_ids(text)) for text in TEXTS]) == wanted == list(TEXTS)


def test_a_context_cut_within_a_character_is_never_shown_again() -> None:
    cut = token_ids("a€")[:-1]
    detokenizer = Detokenizer(TOKENIZER, context=cut)
    texts = [detokenizer.feed(token_ids("bc")) + detokenizer.finish(), *decode_all(TOKENIZER, [(cut, token_ids("bc"))])]
    assert all("a" not in text and text.endswith("bc") for text in texts)


def sized(**changes: Any) -> Tokenizer:
    """A byte tokenizer, changed."""
    rust = byte_tokenizer().backend_tokenizer
    for name, value in changes.items():
        setattr(rust, name, value)
    return rust


def of_pieces(*, fallback: bool) -> Tokenizer:
    """As in sentencepiece: bytes for what is not in the vocabulary, or one token for any number of such characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if fallback), "▁", "a", "aa", "▁a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("a", "a"), ("▁", "a")]
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return rust


def of_few_bytes() -> Tokenizer:
    """Without tokens for control characters: any number of them is one unknown token."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ā", "Ą", "ĝ", "ñ", "ÿ"})
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<unk>"])}
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return rust


def that_strips() -> Tokenizer:
    rust = sized()
    rust.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return rust


BOUNDED = {
    "bytes": sized(),
    "composed": sized(normalizer=normalizers.NFC()),
    "folded": sized(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "pieces": of_pieces(fallback=True),
    "few bytes": of_few_bytes(),
    "strips": that_strips(),
}
UNBOUNDED = {
    "unknown words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "unknown pieces": of_pieces(fallback=False),
    "removed": sized(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
    "stripped": sized(normalizer=normalizers.Strip()),
    "replaced": sized(normalizer=normalizers.Replace("aa", "")),
    "accents": sized(normalizer=normalizers.StripAccents()),
}


PIECES = [*"aA \n\x00\x04\x1d\u0301\u0323\u1100\u1161\u11a8é€🙂ﬁ\u3000\U00040000", "<|end|>"]


@pytest.mark.parametrize("name", BOUNDED)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_text_has_fewer_tokens_than_its_characters_say(name: str, text: str) -> None:
    sizes = TokenSizes.of(BOUNDED[name])
    assert sizes is not None
    assert sizes.least_tokens(text, enough=0) <= len(BOUNDED[name].encode(text, add_special_tokens=False).ids)


def test_a_long_text_of_a_usual_tokenizer_has_many_tokens() -> None:
    sizes = TokenSizes.of(BOUNDED["bytes"])
    assert sizes is not None and sizes.least_tokens("a" * 12_000, enough=10) == 1000


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_one_token_may_stand_for_any_text_nothing_is_said_of_its_length(name: str) -> None:
    assert TokenSizes.of(UNBOUNDED[name]) is None


class TestSingleTokens:
    texts = TokenTexts(TOKENIZER)

    @pytest.mark.parametrize("text", [bytes(range(256)).decode("latin-1"), "naïve 日本 🙂 \u200d", "a ▁ b\n\t "])
    def test_their_bytes_join_to_the_text(self, text: str) -> None:
        assert b"".join(self.texts.bytes_of(token_id) or b"" for token_id in token_ids(text)).decode() == text

    @pytest.mark.parametrize(
        ("token_id", "data", "text"),
        [(0, b"<unk>", "<unk>"), (1, b" hello", " hello"), (2, b"\xe2", "bytes:\\xe2"), (3, b"\n", "\n"), (4, b"a b", "a b"),
         (5, b"</s>", "</s>"), (6, None, "token_id:6")],
    )  # fmt: skip
    def test_pieces_of_sentencepiece_have_their_spaces_and_bytes(self, token_id: int, data: bytes | None, text: str) -> None:
        vocab = [("<unk>", 0.0), ("▁hello", -1.0), ("<0xE2>", -2.0), ("<0x0A>", -2.0), ("a▁b", -3.0)]
        tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.add_special_tokens([AddedToken("</s>")])
        texts = TokenTexts(tokenizer)
        assert (texts.bytes_of(token_id), texts.text_of(token_id)) == (data, text)

    def test_special_tokens_and_words_are_shown(self) -> None:
        assert self.texts.text_of(IM_START) == "<|im_start|>"
        assert TokenTexts(Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))).text_of(0) == "word"
