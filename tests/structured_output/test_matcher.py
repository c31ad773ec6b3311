"""A matcher's masks are those of its tokens alone, whatever it was asked before; and all that is forced is told at once."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xgrammar
from tokenizers import AddedToken
from transformers import AutoTokenizer

from bench.schemas import SCHEMAS
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv_server.structured_output import text
from vmmkv_server.structured_output.compiler import Compilation, grammar_read, with_own_automata
from vmmkv_server.structured_output.matcher import Matcher, Vocabulary
from vmmkv_server.structured_output.schema import of_schema

MAX_TOKENS = 60


@functools.cache
def vocabulary(model_dir: Path) -> Vocabulary:
    """One with several ways to write a text."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return Vocabulary.load(model_dir, len(tokenizer), [int(tokenizer.eos_token_id)])


def filled(matcher: Matcher) -> npt.NDArray[np.int32]:
    words_GW = np.full((3, len(matcher.mask())), 0x5A5A5A5A, np.int32)
    matcher.fill(words_GW[1])
    assert (words_GW[[0, 2]] == 0x5A5A5A5A).all()
    row: npt.NDArray[np.int32] = words_GW[1]
    return row


@pytest.mark.parametrize("name", ["tool call", "unicode constant", "long keys"])
def test_masks_depend_on_the_tokens_alone_and_forcing_is_complete(smollm2: Path, name: str) -> None:
    words = vocabulary(smollm2)
    grammar = of_schema(SCHEMAS[name])
    data = Compilation(words).compile(grammar.kind, grammar.source)
    compiled = words.read(data)
    num_forced = 0
    for seed in range(4):
        draws = random.Random(seed)
        matcher, tokens = Matcher(compiled, words), list[int]()
        while len(tokens) < MAX_TOKENS:
            if forced := matcher.force(MAX_TOKENS - len(tokens)):
                tokens += forced
                num_forced += len(forced)
                assert matcher.force(MAX_TOKENS - len(tokens)) == []
            fresh = Matcher(compiled, words)
            assert all(fresh.accept(token) for token in tokens)
            if draws.random() < 0.5:
                assert matcher.must_end() == fresh.must_end()
            assert (filled(matcher) == filled(fresh)).all()
            may = np.flatnonzero(np.unpackbits(filled(matcher).view(np.uint8), bitorder="little")[: words.size])
            token = int(draws.choice(may))
            assert matcher.accept(token)
            tokens.append(token)
            if token == words.info.stop_token_ids[0]:
                break
    assert num_forced > 5


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("json", of_schema(schema).source) for schema in SCHEMAS.values()),
        ("regex", r"((a|bc){2,200}\.?){3}"),
        ("ebnf", 'root ::= "(" root ")" | [^()]{130,}\nunused ::= root'),
        ("choice", '["one","only","\U0001f600"]'),
    ],
)
def test_what_an_engine_reads_allows_what_was_compiled(kind: Any, source: str) -> None:
    """Without the copies of the states of all rules that xgrammar writes with each of them."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"</s>"], vocab_size=257, stop_token_ids=[256])
    whole = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar_read(kind, source))
    data = with_own_automata(whole.serialize_json())
    written = json.loads(data)["grammar"]
    num_edges = sum(len(states["edges"]["data_"]) for (states, *_), *_ in written["per_rule_fsms"])
    assert num_edges <= len(written["complete_fsm"]["edges"]["data_"])
    read = xgrammar.CompiledGrammar.deserialize_json(data.decode(), info)
    for seed in range(3):
        draws, words = random.Random(seed), np.empty((2, 9), np.int32)
        matchers = list(map(xgrammar.GrammarMatcher, (whole, read)))
        for _ in range(MAX_TOKENS):
            for row, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(words, row)
            assert (words[0] == words[1]).all()
            token = draws.choice(np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little")[:257]).tolist())
            assert all(matcher.accept_token(token) for matcher in matchers)
            if token == 256:
                break


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({"maxLength": 33}, marks=pytest.mark.nightly),
        pytest.param({"maxLength": 90}, marks=pytest.mark.nightly),
        {"minLength": 40, "maxLength": 75},
        pytest.param({"minLength": 60}, marks=pytest.mark.nightly),
        pytest.param({"pattern": r"^\S{0,70}$"}, marks=pytest.mark.nightly),
        {"pattern": "^[^a-m]{5,50}x.{0,40}$"},
    ],
)
def test_a_long_count_allows_the_tokens_that_a_step_for_each_character_does(
    smollm2: Path, bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = vocabulary(smollm2)
    sources = [of_schema({"type": "string", **bounds}).source]
    monkeypatch.setattr(text, "RUN", 1000)
    sources.append(of_schema({"type": "string", **bounds}).source)
    one, other = (words.read(Compilation(words).compile("json", source)) for source in sources)
    has_quote = np.array([b'"' in token for token in words.info.decoded_vocab])
    for seed in range(6):
        numbers, matchers = np.random.default_rng(seed), [Matcher(one, words), Matcher(other, words)]
        for _ in range(MAX_TOKENS):
            assert matchers[0].forced_text() == matchers[1].forced_text()
            may, wanted = (np.unpackbits(matcher.mask().view(np.uint8), bitorder="little") for matcher in matchers)
            assert (may == wanted).all()
            allowed = np.flatnonzero(may[: words.size])
            going_on = allowed[~has_quote[allowed]]
            token = int(numbers.choice(going_on if len(going_on) and seed else allowed))
            assert all(matcher.accept(token) for matcher in matchers)
            if token == words.info.stop_token_ids[0]:
                break


@pytest.mark.parametrize("expression", ["onz[a-z]*", "thq[a-z]*", "erx[a-z]*"])
def test_a_mask_of_tokens_that_were_taken_back_is_forgotten(smollm2: Path, expression: str) -> None:
    """What is forced has two tokens, and the last could be longer; another comes in the place of the first."""
    words = vocabulary(smollm2)
    data = Compilation(words).compile("regex", expression)
    matcher, fresh = (Matcher(words.read(data), words) for _ in range(2))
    assert matcher.force(20) == []
    (letter,) = words.rust.encode(expression[0], add_special_tokens=False).ids
    assert matcher.accept(letter) and fresh.accept(letter)
    assert (filled(matcher) == filled(fresh)).all()


def test_added_tokens_that_a_detokenizer_shows_are_spelled_in_grammars() -> None:
    """By their own text, whatever letters stand for bytes. Special tokens and those that end an answer are not."""
    contents, size = ("<call>", "<｜call▁é｜> x", "<special>", "<end>"), 270
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(content, special=content == "<special>") for content in contents])
    ids = dict(zip(contents, tokenizer.convert_tokens_to_ids([*contents]), strict=True))
    words = Vocabulary(tokenizer, size, [ids["<end>"]])
    compiled = words.read(Compilation(words).compile("ebnf", "root ::= " + " | ".join(map(text.quoted, contents))))
    may = np.unpackbits(filled(Matcher(compiled, words)).view(np.uint8), bitorder="little")
    assert {*np.flatnonzero(may).tolist()} == {*token_ids("<"), ids["<call>"], ids["<｜call▁é｜> x"]}
    for content in contents:
        for spelled in ([ids[content]] if content in contents[:2] else [], token_ids(content)):
            matcher = Matcher(compiled, words)
            assert all(matcher.accept(token) for token in spelled)
            assert matcher.must_end() == bool(spelled)
    assert not any(Matcher(compiled, words).accept(ids[content]) for content in contents[2:])
