"""An engine whose answers follow grammars and say what they are told: the same tokens, with what is forced skipped or sampled.

Random weights name tokens that no tokenizer would make of a text, which would make what is skipped look longer than it is.
So one run writes a script: what is free by the model, what is forced as the tokenizer writes it. In the others each answer's
mask is filled as ever, and then narrowed to the script's next token. All of them say the same, whatever rounding does.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.serve.system import Models
from bench.timing import WrongNumbers
from vmmkv.server.config import ServeConfig
from vmmkv.server.engine.loading import assemble
from vmmkv.server.engine.request import Request
from vmmkv.server.protocol import Abort, Failed, FromEngine, Generate, Outputs
from vmmkv.server.structured_output.manager import StructuredOutputManager
from vmmkv.server.structured_output.matcher import Matcher, Vocabulary, Words


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and what its answer follows: as it was compiled, nothing for free text."""

    prompt: list[int]
    grammar: bytes
    max_tokens: int
    script: list[int] | None = None
    """What the answer is to be; None lets the model say what the grammar leaves open."""
    jumps: bool = True
    """Is what is forced appended without being sampled?"""


@dataclass(slots=True)
class Told:
    """What became of one request; seconds."""

    begun_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    """When its first token was there."""
    ended_s: float = 0.0
    is_whole: bool = False
    """Did it end where its grammar does?"""
    num_forced: int = 0
    """Of its tokens, those that were not sampled."""

    @property
    def num_sampled(self) -> int:
        """With the end token, which a whole answer has and does not tell."""
        return len(self.tokens) + self.is_whole

    @property
    def seconds(self) -> float:
        """From its coming to its end."""
        return self.ended_s - self.begun_s


@dataclass(frozen=True, slots=True)
class Run:
    """Of all requests, in their order."""

    told: list[Told]
    seconds: float
    num_steps: int
    """That the engine has read back."""


class Follower(Matcher):
    """A matcher that follows a script, if there is one, and counts what is forced."""

    script: list[int] | None = None
    jumps: bool = True
    num_forced: int = 0

    def fill(self, words_GW: Words, row: int) -> None:
        """As ever, then narrowed where a step asks."""
        super().fill(words_GW, row)
        if self.script is None or words_GW is self._words:
            return
        words, place = words_GW[row], len(self._tokens)
        if place == len(self.script):
            words &= self._vocabulary.ends
        else:
            word, bit = divmod(self.script[place], 32)
            is_allowed = words[word] & np.uint32(1 << bit).view(np.int32)
            words[:] = 0
            words[word] = is_allowed

    def force(self, at_most: int) -> list[int]:
        """See Matcher.force."""
        tokens = super().force(at_most) if self.jumps else []
        self.num_forced += len(tokens)
        return tokens

    def must_end(self) -> bool:
        """See Matcher.must_end: if it says so, the end token is not sampled either."""
        return self.jumps and super().must_end()


class _ByScript(StructuredOutputManager):
    """Makes followers. Every grammar is kept ready."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(lambda: vocabulary, cache_bytes=1 << 40)
        self._words_of = vocabulary
        self.asks: dict[str, Ask] = {}
        self.followers: dict[str, Follower] = {}

    def matcher_for(self, request: Request, compiled: Any) -> Matcher:
        """A follower of the request's script."""
        ask = self.asks[request.ask.request_id]
        follower = Follower(compiled, self._words_of)
        follower.script, follower.jumps = ask.script, ask.jumps
        self.followers[request.ask.request_id] = follower
        return follower


class ScriptedEngine:
    """The engine over slots, asked for answers by a grammar. Close it."""

    def __init__(self, models: Models, vocabulary: Vocabulary, *, max_tokens: int, max_num_seqs: int) -> None:
        self._said: deque[FromEngine] = deque()
        config = ServeConfig(
            model=models.config.model,
            device=models.config.device,
            load_format="dummy",
            seed=models.config.seed,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            prefix_cache=False,
        )
        self._loaded = assemble(config, models.source, self._said.append)
        self._core: Final[Any] = self._loaded.engine
        self._structured = _ByScript(vocabulary)
        self._core.follow_grammars(self._structured)

    def run(self, asks: Sequence[Ask], at_once: int) -> Run:
        """All of them, greedy; `at_once` of them run, and whoever ends makes room for the next.

        Raises: WrongNumbers if one fails, or says something else than its script.
        """
        self._structured.asks = {str(index): ask for index, ask in enumerate(asks)}
        self._structured.followers = {}
        told: list[Told] = []
        steps, began_s = self._core.num_steps, time.perf_counter()
        num_running = 0
        try:
            while num_running or len(told) < len(asks):
                while num_running < at_once and len(told) < len(asks):
                    self._core.receive(_message(str(len(told)), asks[len(told)]))
                    told.append(Told(time.perf_counter()))
                    num_running += 1
                self._core.step()
                num_running -= self._read(told)
        except BaseException:
            for index in range(len(told)):
                self._core.receive(Abort(request_id=str(index)))
            while self._core.has_work:
                self._core.step()
            raise
        seconds = time.perf_counter() - began_s
        while self._core.has_work:  # what was launched ahead of the last end
            self._core.step()
        self._core.settle()
        self._said.clear()
        for index, (ask, one) in enumerate(zip(asks, told, strict=True)):
            if index_of := self._structured.followers.get(str(index)):
                one.num_forced = index_of.num_forced
            if ask.script is not None and one.tokens != ask.script:
                raise WrongNumbers(f"request {index} was to say {ask.script} and has said {one.tokens}")
        return Run(told, seconds, self._core.num_steps - steps)

    def close(self) -> None:
        """Give its memory back."""
        self._loaded.close()

    def _read(self, told: list[Told]) -> int:
        """Take what the engine has said; how many have ended."""
        now_s, num_ended = time.perf_counter(), 0
        while self._said:
            message = self._said.popleft()
            if isinstance(message, Failed):
                raise WrongNumbers(f"request {message.request_id} failed: {message.message}")
            for output in message.outputs if isinstance(message, Outputs) else ():
                one = told[int(output.request_id)]
                one.tokens += output.token_ids
                if one.first_s is None:
                    one.first_s = now_s
                if output.finish_reason is not None:
                    one.ended_s, one.is_whole = now_s, output.finish_reason == "stop"
                    num_ended += 1
        return num_ended


def _message(name: str, ask: Ask) -> Generate:
    return Generate(
        request_id=name,
        prompt=ask.prompt,
        max_new_tokens=ask.max_tokens,
        temperature=0.0,
        ignore_eos=not ask.grammar,
        grammar=ask.grammar,
    )
