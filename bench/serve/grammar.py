"""Answers by a grammar: what masks cost beside free text of the same lengths, and what it saves to skip what is forced."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from bench.serve import FREE, JUMPS_GAIN, MASKS_COST
from bench.serve.context import Context
from bench.serve.models import ServedModel
from bench.serve.padding import digest_of, tokenizer_file
from bench.serve.schemas import SCHEMAS
from bench.serve.scripted import Ask, Run, ScriptedEngine, Told
from bench.serve.system import Models
from bench.timing import WrongNumbers
from vmmkv.server.structured_output.compiler import Compilation
from vmmkv.server.structured_output.matcher import Matcher, Vocabulary
from vmmkv.server.structured_output.schema import of_schema
from vmmkv.units import ceil_div

MASKS: Final = "masks"
JUMPS: Final = "jump-forward"

FORCED_SHARE: Final = 0.5
"""Of an answer's tokens: where as much or more is forced, something is promised."""

_PROMPT_TOKENS: Final = 16
_QUICK: Final = ("null", "short string", "enum", "array of objects", "long keys", "tool call", "constant object", "address")
"""Few, of every kind, half of them mostly forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    names: Sequence[str]
    """Of schemas."""
    at_once: tuple[int, ...]
    """Requests that run together."""
    rounds: int
    """Of so many requests, where they run together: who ends makes room for who comes."""
    max_tokens: int
    """Of an answer: text without an end ends here."""

    @classmethod
    def of(cls, *, small: bool) -> "_Sizes":
        if small:
            return cls(names=_QUICK, at_once=(1, 4), rounds=1, max_tokens=24)
        return cls(names=tuple(SCHEMAS), at_once=(1, 64), rounds=4, max_tokens=96)


@dataclass(frozen=True, slots=True)
class _Written:
    """What an answer by one schema says in all runs."""

    grammar: bytes
    told: Told

    @property
    def forced(self) -> float:
        """The share of its tokens that were."""
        return self.told.num_forced / len(self.told.tokens)


def grammar(context: Context) -> None:
    """The corpus with masks and as free text; of what is mostly forced, with that skipped and sampled."""
    with context.guarded(context.name("grammar", "answers by a grammar")):
        context.close()  # its engine has all memory
        file = tokenizer_file(context.settings.tokenizer)
        model = context.model.with_tokenizer(file)
        sizes = _Sizes.of(small=context.settings.quick or not context.settings.on_gpu)
        with closing(Models(model, context.settings.device, context.settings.seed)) as models:
            vocabulary = Vocabulary.load(models.directory, model.vocabulary, sorted(models.source.end_tokens))
            context.progress(f"grammar: {len(sizes.names)} schemas are compiled")
            compiled = _compiled(vocabulary, sizes.names)
            max_tokens = 2 * _PROMPT_TOKENS + sizes.max_tokens
            engine = ScriptedEngine(models, vocabulary, max_tokens=max_tokens, max_num_seqs=max(sizes.at_once))
            with closing(engine):
                _measure(context, engine, model, sizes, vocabulary, compiled, f"tokenizer {digest_of(file)}")


def _measure(
    context: Context,
    engine: ScriptedEngine,
    model: ServedModel,
    sizes: _Sizes,
    vocabulary: Vocabulary,
    compiled: Mapping[str, bytes],
    by: str,
) -> None:
    """`by` is what the workloads say of the tokenizer."""
    draws = random.Random(context.settings.seed)

    def prompt() -> list[int]:
        return draws.choices(range(min(10_001, model.vocabulary)), k=_PROMPT_TOKENS)

    context.progress("grammar: the script is written")
    asks = [Ask(prompt(), of_name, sizes.max_tokens) for of_name in compiled.values()]
    run = engine.run(asks, max(sizes.at_once))
    written = {name: _Written(ask.grammar, told) for name, ask, told in zip(compiled, asks, run.told, strict=True)}
    _check(context, vocabulary, written)
    forced = {name: one for name, one in written.items() if one.forced >= FORCED_SHARE}
    if not forced:
        raise WrongNumbers(f"of no schema {FORCED_SHARE:.0%} of the answer is forced: nothing is known of what that saves")

    def scripted(of: Mapping[str, _Written], at_once: int) -> list[Ask]:
        copies = 1 if at_once == 1 else ceil_div(sizes.rounds * at_once, len(of))
        asks = [Ask(prompt(), one.grammar, sizes.max_tokens, one.told.tokens) for one in of.values() for _ in range(copies)]
        draws.shuffle(asks)
        return asks

    by_grammar = {one.grammar: one.told for one in written.values()}
    for at_once in sizes.at_once:
        asks = scripted(written, at_once)
        masks = [replace(ask, jumps=False) for ask in asks]
        # As many tokens are sampled: the one that ends an answer too.
        free = [Ask(ask.prompt, b"", by_grammar[ask.grammar].num_sampled) for ask in asks]
        runs = _runs(context, engine, at_once, {FREE: free, MASKS: masks})
        _add_masks(context, at_once, len(written), by, runs)
        asks = scripted(forced, at_once)
        runs = _runs(context, engine, at_once, {MASKS: [replace(ask, jumps=False) for ask in asks], JUMPS: asks})
        _add_jumps(context, at_once, len(forced), by, runs)


def _compiled(vocabulary: Vocabulary, names: Sequence[str]) -> dict[str, bytes]:
    compilation = Compilation(vocabulary)
    found = {}
    for name in names:
        asked = of_schema(SCHEMAS[name])
        found[name] = compilation.compile(asked.kind, asked.source)
    return found


def _check(context: Context, vocabulary: Vocabulary, written: Mapping[str, _Written]) -> None:
    """What the script says is what the grammars allow, and JSON where it is whole. Raises: WrongNumbers."""
    import xgrammar

    for name, one in written.items():
        compiled = xgrammar.CompiledGrammar.deserialize_json(one.grammar.decode(), vocabulary.info)
        matcher = Matcher(compiled, vocabulary)
        if not all(matcher.accept(token) for token in one.told.tokens):
            raise WrongNumbers(f"the answer by schema {name!r} is none that its grammar allows")
        if one.told.is_whole:
            text = vocabulary.rust.decode(one.told.tokens)
            try:
                json.loads(text)
            except ValueError as error:
                raise WrongNumbers(f"the answer by schema {name!r} is no JSON: {text!r}") from error
    num_whole = sum(one.told.is_whole for one in written.values())
    num_tokens = sum(len(one.told.tokens) for one in written.values())
    num_forced = sum(one.told.num_forced for one in written.values())
    context.report.say(
        f"checked: {context.model.name} grammar: {len(written)} answers, {num_tokens:,} tokens, all of them allowed, "
        f"{num_forced:,} forced; {num_whole} are whole, and JSON; all runs say the same"
    )


def _runs(context: Context, engine: ScriptedEngine, at_once: int, systems: Mapping[str, Sequence[Ask]]) -> dict[str, list[Run]]:
    """Of each system, by its name, the timed runs; they take turns, in one order and then in the other."""
    runs: dict[str, list[Run]] = {system: [] for system in systems}
    for asks in systems.values():
        engine.run(asks[:at_once], at_once)  # not timed
    for number in range(context.settings.repeat):
        for system in systems if number % 2 == 0 else reversed(list(systems)):
            context.progress(f"grammar, {system}, {at_once} at once, run {number + 1} of {context.settings.repeat}")
            runs[system].append(engine.run(systems[system], at_once))
    return runs


def _add_masks(context: Context, at_once: int, num_schemas: int, by: str, runs: Mapping[str, Sequence[Run]]) -> None:
    # A free answer's last token has been told; that which ends one by a grammar has not, but was sampled at its end.
    sampled = [told.num_sampled for told in runs[MASKS][0].told]
    num_tokens = sum(sampled)
    text = f"masks, {at_once} at once: {len(sampled)} answers by {num_schemas} schemas, {num_tokens} tokens, all sampled"
    name = context.name("grammar", f"{text}, {by}")
    per_token_s: dict[str, list[float]] = {}
    for system, of_system in runs.items():
        per_token_s[system] = [
            (told.ended_s - told.first_s) / (num_sampled - 1)
            for run in of_system
            for told, num_sampled in zip(run.told, sampled, strict=True)
            if num_sampled > 1 and told.first_s is not None
        ]
        context.add(name, "throughput", "tok/s", [num_tokens / run.seconds for run in of_system], system=system)
        context.add(name, "time per output token", "ms", [1e3 * each for each in per_token_s[system]], system=system)
    context.add(name, MASKS_COST, "x", _ratios(per_token_s[MASKS], per_token_s[FREE]), system=MASKS)


def _add_jumps(context: Context, at_once: int, num_schemas: int, by: str, runs: Mapping[str, Sequence[Run]]) -> None:
    jumped = runs[JUMPS][0].told
    num_tokens = sum(len(told.tokens) for told in jumped)
    text = f"jumps, {at_once} at once: {len(jumped)} answers by {num_schemas} schemas, {num_tokens} tokens"
    name = context.name("grammar", f"{text}, half of each or more forced, {by}")
    request_s: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for system, of_system in runs.items():
        request_s[system] = [told.seconds for run in of_system for told in run.told]
        steps[system] = sum(run.num_steps for run in of_system)
        context.add(name, "throughput", "tok/s", [num_tokens / run.seconds for run in of_system], system=system)
        context.add(name, "time per request", "ms", [1e3 * each for each in request_s[system]], system=system)
    figures = (
        ("forced", "%", 100 * sum(told.num_forced for told in jumped) / num_tokens),
        ("steps saved", "%", 100 * (1 - steps[JUMPS] / steps[MASKS])),
    )
    for metric, unit, figure in figures:
        context.add_figure(name, metric, unit, figure, len(jumped), system=JUMPS)
    context.add(name, JUMPS_GAIN, "x", _ratios(request_s[MASKS], request_s[JUMPS]), system=JUMPS)


def _ratios(of: Sequence[float], over: Sequence[float]) -> list[float]:
    """A sample a request of each run, over the same one of the other system; none of tokens that were read back at once."""
    return [one / other for one, other in zip(of, over, strict=True) if other > 0]
