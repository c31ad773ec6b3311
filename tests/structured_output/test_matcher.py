"""A matcher's masks are those of its tokens alone, whatever it was asked before; and all that is forced is told at once."""

import functools
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer

from bench.suites.serve.schemas import SCHEMAS
from vmmkv_server.structured_output.compiler import Compilation
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
