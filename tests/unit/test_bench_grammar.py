"""What answers by a grammar cost, measured: all runs say the same script, and what is wrong is seen."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from bench.serve.models import model_of
from bench.serve.padding import SOURCE, tokenizer_file
from bench.serve.schemas import SCHEMAS
from bench.serve.scripted import Ask, ScriptedEngine
from bench.serve.system import Models
from bench.timing import WrongNumbers
from vmmkv.server.grammar.asked import of_schema
from vmmkv.server.grammar.compiling import Compilation
from vmmkv.server.grammar.vocabulary import Vocabulary
from vmmkv.server.models import resolve

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def source() -> None:
    """The model whose tokenizer is taken is here: a run fetches nothing."""
    resolve(SOURCE)


@pytest.fixture(scope="module")
def made(source: None) -> Iterator[tuple[ScriptedEngine, Compilation]]:
    model = model_of("llama-3.1-8b", tiny=True).with_tokenizer(tokenizer_file(None))
    with closing(Models(model, torch.device("cpu"), 0)) as models:
        vocabulary = Vocabulary.load(models.directory, model.vocabulary, sorted(models.source.end_tokens))
        with closing(ScriptedEngine(models, vocabulary, max_tokens=64, max_num_seqs=4)) as engine:
            yield engine, Compilation(vocabulary)


def by(compilation: Compilation, name: str) -> Ask:
    asked = of_schema(SCHEMAS[name])
    return Ask(PROMPT, compilation.compile(asked.kind, asked.source), 32)


def test_all_runs_say_the_script_and_only_jumps_save_steps(made: tuple[ScriptedEngine, Compilation]) -> None:
    engine, compilation = made
    ask = by(compilation, "long keys")
    (written,) = engine.run([ask], 1).told
    assert 2 * written.num_forced >= len(written.tokens)
    jumped = engine.run([replace(ask, script=written.tokens)], 1)
    sampled = engine.run([replace(ask, script=written.tokens, jumps=False)], 1)
    assert jumped.told[0].tokens == sampled.told[0].tokens == written.tokens
    assert (jumped.told[0].num_forced, sampled.told[0].num_forced) == (written.num_forced, 0)
    assert jumped.num_steps < sampled.num_steps
    assert sampled.num_steps >= written.num_sampled
    (free,) = engine.run([Ask(PROMPT, b"", written.num_sampled)], 1).told
    assert len(free.tokens) == written.num_sampled


def test_a_free_place_says_what_the_script_says_there(made: tuple[ScriptedEngine, Compilation]) -> None:
    engine, compilation = made
    ask = by(compilation, "boolean")
    (written,) = engine.run([ask], 1).told
    words = {word: compilation._vocabulary.rust.encode(word).ids for word in ("true", "false")}
    other = next(tokens for tokens in words.values() if tokens != written.tokens)
    (told,) = engine.run([replace(ask, script=other)], 1).told
    assert told.tokens == other != written.tokens
    assert told.is_whole


def test_a_script_that_the_grammar_does_not_allow_is_seen(made: tuple[ScriptedEngine, Compilation]) -> None:
    engine, compilation = made
    ask = by(compilation, "boolean")
    (written,) = engine.run([ask], 1).told
    with pytest.raises(WrongNumbers):
        engine.run([replace(ask, script=[*written.tokens[:-1], written.tokens[-1] + 1])], 1)
    assert engine.run([ask], 1).told[0].tokens == written.tokens, "and the engine goes on"
