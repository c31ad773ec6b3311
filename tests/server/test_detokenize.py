"""Laws of turning tokens into text as they come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.server.tokenizer import Detokenizer, StopStrings, TextStream, decode_all

TOKENIZER = byte_tokenizer().backend_tokenizer
IM_START, IM_END = token_ids("<|im_start|><|im_end|>")

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(letters, letters, stops)
def test_a_stop_string_may_begin_where_none_ends(first: str, then: str, stop: list[str]) -> None:
    matcher = StopStrings(stop)
    shown = "".join(matcher.feed(letter, may_stop=False) for letter in first)
    assert not matcher.stopped
    shown += "".join(matcher.feed(letter) for letter in then)
    shown += "" if matcher.stopped else matcher.flush()
    text = first + then
    ends = [size for size in range(len(first) + 1, len(text) + 1) if any(text[:size].endswith(one) for one in stop)]
    assert matcher.stopped == bool(ends)
    cut = text[: ends[0]] if ends else text
    assert shown == cut[: len(cut) - max((len(one) for one in stop if ends and cut.endswith(one)), default=0)]


def shown_of(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stop)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return (shown if matcher.stopped else shown + matcher.flush()), matcher.stopped


@given(letters, stops, st.lists(st.integers(0, 12), max_size=5))
def test_stop_strings_do_not_depend_on_the_pieces_the_text_comes_in(text: str, stop: list[str], cuts: list[int]) -> None:
    assert shown_of(in_pieces(text, cuts), stop) == shown_of(list(text), stop)


@given(letters, stops)
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stop: list[str]) -> None:
    shown, stopped = shown_of(list(text), stop)
    ends = [size for size in range(len(text) + 1) if any(text[:size].endswith(one) for one in stop)]
    assert stopped == bool(ends)
    if ends:
        first = text[: ends[0]]
        assert shown == first[: len(first) - max(len(one) for one in stop if first.endswith(one))]
    else:
        assert shown == text


@given(letters, stops)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    matcher = StopStrings(stop)
    shown = matcher.feed(text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert held == "" or any(one.startswith(held) for one in stop)


@given(st.text(max_size=20))
def test_text_in_tokens_comes_out_as_it_was(text: str) -> None:
    stream = TextStream(TOKENIZER)
    shown = "".join(stream.feed(token_id) for token_id in token_ids(text)) + stream.flush()
    assert shown == TOKENIZER.decode(token_ids(text))


@given(st.lists(st.integers(0, 257), max_size=60))
def test_any_tokens_give_the_text_of_all_of_them(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    assert "".join(stream.feed(token_id) for token_id in ids) + stream.flush() == TOKENIZER.decode(
        ids, skip_special_tokens=True
    )


def test_a_character_comes_when_its_last_byte_does() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.feed(token_id) for token_id in token_ids("a€b")] == ["a", "", "", "€", "b"]


def test_an_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed(token_ids("a€")[:-1]) == "a"
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("num_special", [1, 15, 16, 17, 40])
def test_text_after_many_special_tokens_is_whole(num_special: int) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [IM_START] * num_special + token_ids("€uro")
    assert detokenizer.feed(ids) + detokenizer.finish() == "€uro"


def test_bytes_that_never_become_a_character_do_not_hold_text_back_for_ever() -> None:
    continuation = token_ids("€")[1]
    stream = TextStream(TOKENIZER)
    shown = [stream.feed(continuation) for _ in range(100)]
    assert len("".join(shown)) > 80


def test_special_tokens_are_not_shown() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed([IM_START, *token_ids("hi"), IM_END]) + detokenizer.finish() == "hi"


@pytest.mark.parametrize("context", ["Hello", "", "€", "a long context, longer than what is looked at"])
def test_the_context_is_never_shown_again(context: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, context=token_ids(context))
    assert detokenizer.feed(token_ids(" wörld")) + detokenizer.finish() == " wörld"


def test_a_context_cut_within_a_character_is_never_shown_again() -> None:
    detokenizer = Detokenizer(TOKENIZER, context=token_ids("a€")[:-1])
    assert "a" not in detokenizer.feed(token_ids("bc")) + detokenizer.finish()


def test_a_decoder_that_drops_the_first_space_keeps_it_within_a_text() -> None:
    words = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, unk_token="▁Hello"))
    words.decoder = decoders.Metaspace()
    assert TextStream(words).feed(1) == "world"
    assert TextStream(words, context=[0]).feed(1) == " world"


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["END"])
    assert detokenizer.feed(token_ids("one END two")) == "one "
    assert detokenizer.stopped
    assert detokenizer.num_tokens == len("one END")
    assert detokenizer.feed(token_ids("three")) == ""


@pytest.mark.parametrize(
    ("min_tokens", "shown", "num_tokens"),
    [(0, "a", 2), (1, "a", 2), (2, "a.b", 4), (3, "a.b", 4), (4, "a.b.c", 6), (9, "a.b.c.d", 7)],
)
@pytest.mark.parametrize("at_end", [False, True])
def test_no_stop_string_ends_a_text_before_it_has_so_many_tokens(
    min_tokens: int, shown: str, num_tokens: int, at_end: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["."], min_tokens=min_tokens)
    ids = token_ids("a.b.c.d")
    text = detokenizer.finish(ids) if at_end else "".join(detokenizer.feed([each]) for each in ids)
    assert (text, detokenizer.num_tokens) == (shown, num_tokens)


def test_a_stop_string_within_the_last_characters_is_found_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["\N{REPLACEMENT CHARACTER}"])
    assert detokenizer.feed(token_ids("a€")[:-1]) + detokenizer.finish() == "a"
    assert detokenizer.stopped


TEXTS = ("", "one", "Grüße, €!", "日本 🙂 \u200d naïve", "a" * 300)


@pytest.mark.parametrize("context", ["", "before", "€", "a long context, longer than what is looked at"])
def test_all_at_once_gives_the_text_that_one_at_a_time_gives(context: str) -> None:
    before = token_ids(context)
    wanted = []
    for text in TEXTS:
        detokenizer = Detokenizer(TOKENIZER, context=before)
        wanted.append(detokenizer.feed(token_ids(text)) + detokenizer.finish())
        together = Detokenizer(TOKENIZER, context=before)
        assert together.feed(token_ids(text)[:2]) + together.finish(token_ids(text)[2:]) == wanted[-1]
        assert (together.num_tokens, together.num_characters) == (detokenizer.num_tokens, len(wanted[-1]))
    assert decode_all(TOKENIZER, [(before, token_ids(text)) for text in TEXTS]) == wanted == list(TEXTS)


def test_a_context_cut_within_a_character_is_never_shown_again_by_all_at_once() -> None:
    (text,) = decode_all(TOKENIZER, [(token_ids("a€")[:-1], token_ids("bc"))])
    assert "a" not in text and text.endswith("bc")


def test_the_last_tokens_are_searched_for_a_stop_string() -> None:
    detokenizer = Detokenizer(TOKENIZER, stops=["END"])
    assert detokenizer.feed(token_ids("one E")) + detokenizer.finish(token_ids("ND two")) == "one "
    assert detokenizer.stopped
    assert detokenizer.num_tokens == len("one END")
