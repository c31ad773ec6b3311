"""Answers by a grammar: what masks cost beside free text of the same lengths, what it saves to skip forced tokens, and what it
costs to look for the place at which a grammar begins.

Random weights name tokens that no tokenizer would make of a text, which would make forced text look longer than it is. So one
run writes a script: free places by the model, forced ones as the tokenizer writes them. In the others each answer's mask is
filled as ever, and then narrowed to the script's next token: all runs say the same, whatever rounding does.
"""

import functools
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from bench.harness import WrongNumbers
from bench.schemas import SCHEMAS
from bench.systems import Context
from bench.systems.engine import EngineSystem, Options, params_of
from bench.systems.models import Weights, digest_of, tokenizer_file
from vmmkv.units import ceil_div
from vmmkv_server.engine.features.grammars import Grammars
from vmmkv_server.engine.request import Request
from vmmkv_server.protocol import Gate, Generate
from vmmkv_server.structured_output.compiler import Compilation
from vmmkv_server.structured_output.matcher import Matcher, Vocabulary, Words
from vmmkv_server.structured_output.schema import of_schema

FREE: Final = "free text"
MASKS: Final = "masks"
JUMPS: Final = "jump-forward"
GATED: Final = "text before a call"
COST: Final = f"time per token over {FREE}, by request"
JUMPS_GAIN: Final = "times as fast, by request"
"""Ratios of one request's times, a sample a request: a ratio of totals would be the latest request's."""
FORCED_SHARE: Final = 0.5
"""Of an answer's tokens: where as much or more is forced, jump-forward is measured."""

_BITS: Final = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
_PROMPT_TOKENS: Final = 16
_CALL: Final = "tool call"
"""The schema of calls, and the text with which one begins."""
_GATE: Final = Gate(triggers=('{"name": "',), repeats=True)
_QUICK: Final = ("null", "short string", "enum", "array of objects", "long keys", "tool call", "constant object", "address")
"""Few, of every kind, half of them mostly forced."""


class Scripted(NamedTuple):
    """A request, and what its answer follows: a compiled grammar, or nothing for free text."""

    prompt: list[int]
    grammar: bytes
    max_tokens: int
    script: list[int] | None = None
    """What the answer is to be; None lets the model choose what the grammar leaves open."""
    jumps: bool = True
    """Whether forced tokens are appended without being sampled."""
    gate: Gate | None = None
    """Where the grammar begins."""


@dataclass(slots=True)
class Told:
    """What became of one request; seconds."""

    begun_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    ended_s: float = 0.0
    is_whole: bool = False
    """Whether it ended where its grammar does."""
    num_forced: int = 0
    """Of its tokens, those that were not sampled."""

    @property
    def num_sampled(self) -> int:
        """With the end token, which a whole answer has and does not tell."""
        return len(self.tokens) + self.is_whole

    @property
    def forced_share(self) -> float:
        """Of its tokens."""
        return self.num_forced / len(self.tokens)

    @property
    def seconds(self) -> float:
        """From its coming to its end."""
        return self.ended_s - self.begun_s


class ScriptedRun(NamedTuple):
    """Of all requests, in their order."""

    told: list[Told]
    seconds: float


class Follower(Matcher):
    """A matcher that follows a script, if there is one, and counts forced tokens."""

    script: list[int] | None = None
    jumps: bool = True
    num_forced: int = 0

    def fill(self, words: Words) -> None:
        """See Matcher; then narrowed."""
        super().fill(words)
        if self.script is None:
            return
        place = len(self._tokens)
        if place == len(self.script):
            words &= self._vocabulary.ends
        else:
            word, bit = divmod(self.script[place], 32)
            is_allowed = words[word] & _BITS[bit]
            words.fill(0)
            words[word] = is_allowed

    def force(self, at_most: int) -> list[int]:
        """See Matcher."""
        tokens = super().force(at_most) if self.jumps else []
        self.num_forced += len(tokens)
        return tokens

    def must_end(self) -> bool:
        """See Matcher: if it says so, the end token is not sampled either."""
        return self.jumps and super().must_end()


class ScriptedEngine(EngineSystem):
    """The engine over slots, asked for answers by a grammar. Close it."""

    def __init__(self, weights: Weights, vocabulary: Vocabulary, limits: Options) -> None:
        super().__init__(weights, {**limits, "prefix_cache": False})
        self._asks: dict[str, Scripted] = {}
        self._followers: dict[str, Follower] = {}
        grammars: Any = self.loop.features.of(Grammars)
        grammars._vocabulary, grammars.matcher_for = vocabulary, functools.partial(self._follower, vocabulary)
        grammars._cache_bytes = 1 << 40  # every grammar is kept ready

    def _follower(self, vocabulary: Vocabulary, request: Request, compiled: Any) -> Follower:
        """A follower of the request's script."""
        ask = self._asks[request.ask.request_id]
        follower = self._followers[request.ask.request_id] = Follower(compiled, vocabulary)
        follower.script, follower.jumps = ask.script, ask.jumps
        return follower

    def follow(self, asks: Sequence[Scripted], at_once: int) -> ScriptedRun:
        """All of them, greedy; `at_once` of them run, and each that ends makes room for the next.

        Raises: WrongNumbers if one fails, or says something else than its script.
        """
        self._asks = {str(index): ask for index, ask in enumerate(asks)}
        self._followers = {}
        told: list[Told] = []
        loop, began_s = self.loop, time.perf_counter()
        num_running = 0
        try:
            while num_running or len(told) < len(asks):
                while num_running < at_once and len(told) < len(asks):
                    ask = asks[len(told)]
                    params = params_of(ask.max_tokens, ends=bool(ask.grammar))
                    loop.receive(
                        Generate(
                            request_id=str(len(told)), prompt=ask.prompt, params=params, grammar=ask.grammar, gate=ask.gate
                        )
                    )
                    told.append(Told(time.perf_counter()))
                    num_running += 1
                loop.step()
                now_s = time.perf_counter()
                for output in self.outputs():
                    one = told[int(output.request_id)]
                    one.tokens += output.token_ids
                    one.first_s = now_s if one.first_s is None else one.first_s
                    if output.finish_reason is not None:
                        one.ended_s, one.is_whole = now_s, output.finish_reason == "stop"
                        num_running -= 1
            seconds = time.perf_counter() - began_s
        finally:
            self.abort(len(told))  # what was launched ahead of the last end too
        for index, (ask, one) in enumerate(zip(asks, told, strict=True)):
            if follower := self._followers.get(str(index)):
                one.num_forced = follower.num_forced
            if ask.script is not None and one.tokens != ask.script:
                raise WrongNumbers(f"request {index} was to say {ask.script} and has said {one.tokens}")
        return ScriptedRun(told, seconds)


def run(context: Context, part: str) -> None:
    """The corpus with masks and as free text; of mostly forced answers, with forced tokens skipped and sampled."""
    recorder, settings = context.recorder, context.settings
    names, at_once, rounds, max_tokens = (_QUICK, (1, 4), 1, 24) if settings.small else (tuple(SCHEMAS), (1, 64), 4, 96)
    context.close()  # its engine has all memory
    with recorder.guarded(context.name(part, "answers by a grammar"), "vmmkv"), ExitStack() as stack:
        file = tokenizer_file(settings.tokenizer)
        model = context.model.with_tokenizer(file)
        weights = stack.enter_context(closing(Weights(model, settings)))
        vocabulary = Vocabulary.load(weights.directory, model.vocabulary, sorted(weights.source.end_tokens))
        recorder.note(f"grammar: {len(names)} schemas are compiled")
        compilation = Compilation(vocabulary)
        asked = {name: of_schema(SCHEMAS[name]) for name in names}
        compiled = {name: compilation.compile(one.kind, one.source) for name, one in asked.items()}
        limits = {"max_tokens": 2 * _PROMPT_TOKENS + max_tokens, "max_num_seqs": max(at_once)}
        engine = stack.enter_context(closing(ScriptedEngine(weights, vocabulary, limits)))
        draws = random.Random(settings.seed)

        def scripted(grammar: bytes, script: list[int] | None = None) -> Scripted:
            prompt = draws.choices(range(model.prompt_ids), k=_PROMPT_TOKENS)
            return Scripted(prompt, grammar, max_tokens, script)

        recorder.note("grammar: the script is written")
        told = engine.follow([scripted(of_name) for of_name in compiled.values()], max(at_once)).told
        written = dict(zip(compiled.values(), told, strict=True))
        _check(vocabulary, dict(zip(compiled, written.items(), strict=True)))
        forced = {of: told for of, told in written.items() if told.forced_share >= FORCED_SHARE}
        if not forced:
            raise WrongNumbers(f"of no schema {FORCED_SHARE:.0%} of the answer is forced")
        by = f"tokenizer {digest_of(file)}"
        for count in at_once:

            def drawn(of: Mapping[bytes, Told], count: int = count) -> list[Scripted]:
                copies = 1 if count == 1 else ceil_div(rounds * count, len(of))
                asks = [scripted(grammar, told.tokens) for grammar, told in of.items() for _ in range(copies)]
                draws.shuffle(asks)
                return asks

            asks = drawn(written)
            masks = [ask._replace(jumps=False) for ask in asks]
            # As many tokens are sampled: the one that ends an answer too.
            free = [ask._replace(grammar=b"", max_tokens=written[ask.grammar].num_sampled, script=None) for ask in asks]
            gated = [ask._replace(grammar=compiled[_CALL], gate=_GATE) for ask in free]
            runs = _runs(context, engine, count, {FREE: free, MASKS: masks, GATED: gated})
            if any(
                told.num_forced or len(told.tokens) < ask.max_tokens
                for run in runs[GATED]
                for ask, told in zip(gated, run.told, strict=True)
            ):
                raise WrongNumbers("an answer was not free text to its end")
            _add_costs(context, count, len(written), by, runs)
            asks = drawn(forced)
            masks = [ask._replace(jumps=False) for ask in asks]
            _add_jumps(context, count, len(forced), by, _runs(context, engine, count, {MASKS: masks, JUMPS: asks}))


def _check(vocabulary: Vocabulary, written: Mapping[str, tuple[bytes, Told]]) -> None:
    """The script is what the grammars allow, and JSON where it is whole. Raises: WrongNumbers."""
    for name, (grammar, told) in written.items():
        matcher = Matcher(vocabulary.read(grammar), vocabulary)
        if not all(matcher.accept(token) for token in told.tokens):
            raise WrongNumbers(f"the answer by schema {name!r} is none that its grammar allows")
        if told.is_whole:
            text = vocabulary.rust.decode(told.tokens)
            try:
                json.loads(text)
            except ValueError as error:
                raise WrongNumbers(f"the answer by schema {name!r} is no JSON: {text!r}") from error


def _runs(
    context: Context, engine: ScriptedEngine, at_once: int, systems: Mapping[str, Sequence[Scripted]]
) -> dict[str, list[ScriptedRun]]:
    """The timed runs of each system; they take turns, in one order and then in the other."""
    runs: dict[str, list[ScriptedRun]] = {system: [] for system in systems}
    for asks in systems.values():
        engine.follow(asks[:at_once], at_once)  # not timed
    for number in range(context.settings.repeat):
        for system in systems if number % 2 == 0 else reversed(list(systems)):
            context.recorder.note(f"grammar, {system}, {at_once} at once, run {number + 1} of {context.settings.repeat}")
            runs[system].append(engine.follow(systems[system], at_once))
    return runs


def _add_costs(context: Context, at_once: int, num_schemas: int, by: str, runs: Mapping[str, Sequence[ScriptedRun]]) -> None:
    """Rows of the cost of masks, and of a gate that never opens."""
    # A free answer's last token has been told; the one that ends an answer by a grammar has not, but was sampled.
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
        context.recorder.samples(name, system, "throughput", "tok/s", [num_tokens / run.seconds for run in of_system])
        context.recorder.samples(name, system, "time per output token", "ms", [1e3 * each for each in per_token_s[system]])
    for system in (MASKS, GATED):
        context.recorder.samples(name, system, COST, "x", _ratios(per_token_s[system], per_token_s[FREE]))


def _add_jumps(context: Context, at_once: int, num_schemas: int, by: str, runs: Mapping[str, Sequence[ScriptedRun]]) -> None:
    recorder, jumped = context.recorder, runs[JUMPS][0].told
    num_tokens = sum(len(told.tokens) for told in jumped)
    text = f"jumps, {at_once} at once: {len(jumped)} answers by {num_schemas} schemas, {num_tokens} tokens"
    name = context.name("grammar", f"{text}, half of each or more forced, {by}")
    request_s = {system: [told.seconds for run in of for told in run.told] for system, of in runs.items()}
    for system, of_system in runs.items():
        recorder.samples(name, system, "throughput", "tok/s", [num_tokens / run.seconds for run in of_system])
    recorder.samples(name, JUMPS, JUMPS_GAIN, "x", _ratios(request_s[MASKS], request_s[JUMPS]))


def _ratios(of: Sequence[float], over: Sequence[float]) -> list[float]:
    """A sample a request of each run; none of tokens that were read back at once."""
    return [one / other for one, other in zip(of, over, strict=True) if other > 0]
