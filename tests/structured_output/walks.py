"""Random walks under grammars of a vocabulary of single bytes."""

import contextlib
import functools
import random

import numpy as np
import xgrammar

END = 256
MAX_STEPS = 400


@functools.cache
def compiler() -> xgrammar.GrammarCompiler:
    """Of a vocabulary of single bytes."""
    tokens = [bytes([byte]) for byte in range(END)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def of_source(source: str) -> xgrammar.CompiledGrammar:
    return compiler().compile_grammar(source)


def allows(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.is_completed()


def answer(grammar: xgrammar.CompiledGrammar, seed: int, *, tag: bytes = b"", max_steps: int = MAX_STEPS) -> str | None:
    """A text of the grammar, of random bytes, but often those that end something: a value of JSON, or a text by a tag.

    None if it has no end soon, or if the bytes are no UTF-8.
    """
    matcher, draws, text = xgrammar.GrammarMatcher(grammar), random.Random(seed), bytearray()
    words = np.empty((1, -(-(END + 1) // 32)), np.int32)
    for _ in range(max_steps):
        matcher.fill_next_token_bitmask(words, 0)
        may = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: END + 1]).tolist()
        assert may, f"a dead end behind {bytes(text)!r}"
        so_far = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
        next_of_tag = tag[so_far : so_far + 1]
        ends = [byte for byte in may if byte in (next_of_tag if so_far else (*b'"]},', END, *next_of_tag))]
        is_ending = draws.random() < (0.9 if so_far else 0.3)
        byte = draws.choice(ends if ends and is_ending else [b for b in may if b < 128 or b == END] or may)
        if byte == END:
            with contextlib.suppress(UnicodeDecodeError):
                return text.decode()
            return None
        assert matcher.accept_token(byte)
        text.append(byte)
    return None
