"""What answers by a grammar cost, measured: all runs say the same script, and what is wrong is seen."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.serve import FREE, JUMPS_GAIN, MASKS_COST
from bench.serve.context import Context
from bench.serve.grammar import JUMPS, MASKS, _add_jumps, _add_masks
from bench.serve.models import model_of
from bench.serve.padding import SOURCE, tokenizer_file
from bench.serve.schemas import SCHEMAS
from bench.serve.scripted import Ask, Run, ScriptedEngine, Told
from bench.serve.system import Models
from bench.settings import SHAPES, Settings
from bench.timing import WrongNumbers
from vmmkv.server.models import resolve
from vmmkv.server.structured_output.compiler import Compilation
from vmmkv.server.structured_output.matcher import Vocabulary
from vmmkv.server.structured_output.schema import of_schema

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


@pytest.fixture
def context(tmp_path: Path) -> Context:
    device = torch.device("cpu")
    provenance = Provenance.collect(device, seed=0, quick=True, commit="abc123")
    settings = Settings(device=device, shape=SHAPES["llama-3.1-8b"], quick=True)
    return Context(settings, Report(RowFile(tmp_path, provenance)), settings.shape)


def told_in(seconds: Sequence[float]) -> Run:
    """Of answers of eleven tokens: the first is there after 1 s, the last so much later."""
    told = [Told(begun_s=0.0, tokens=[7] * 11, first_s=1.0, ended_s=1.0 + each) for each in seconds]
    return Run(told, sum(seconds), 11 * len(told))


def row_of(context: Context, metric: str) -> Row:
    (row,) = (row for row in context.report.rows if row.metric == metric)
    return row


def test_a_mask_is_held_against_the_same_request_of_free_text_whoever_was_late(context: Context) -> None:
    free, by_masks = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.2, 3.6, 500.0, 7.0]
    _add_masks(context, 1, 5, "some", {FREE: [told_in(free)] * 2, MASKS: [told_in(by_masks)] * 2})
    row = row_of(context, MASKS_COST)
    assert (row.system, row.unit, row.summary.n) == (MASKS, "x", 10), "a sample a request and run"
    assert [row.summary.p20, row.summary.p50, row.summary.p80] == pytest.approx([1.0, 1.2, 1.4])
    assert row.summary.p99 == 125


def test_tokens_that_were_read_back_at_once_have_no_ratio(context: Context) -> None:
    _add_masks(context, 1, 2, "some", {FREE: [told_in([0.0, 2.0])], MASKS: [told_in([1.0, 3.0])]})
    assert row_of(context, MASKS_COST).summary.n == 1


def test_a_jump_is_held_against_the_same_request_sampled(context: Context) -> None:
    sampled, jumped = [1.0, 3.0, 5.0, 7.0, 900.0], [1.0, 1.0, 1.0, 1.0, 1.0]
    _add_jumps(context, 1, 5, "some", {MASKS: [told_in(sampled)], JUMPS: [told_in(jumped)]})
    row = row_of(context, JUMPS_GAIN)
    assert (row.system, row.unit, row.summary.n) == (JUMPS, "x", 5)
    assert [row.summary.p20, row.summary.p50, row.summary.p80] == pytest.approx([1.0, 3.0, 4.0])
