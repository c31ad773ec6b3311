"""Beam search: the search itself, without a model and without memory, and the sequences of its beams.

The search is that of transformers' `generate(num_beams=width, early_stopping=False)`, and gives the same answers:

    live beams ── candidates of each ──> the best `width` that end nothing live on; an end among the best `width` is kept
    score of a finished beam = log-probability of its tokens / (number of its tokens) ** length_penalty

Each live beam has a sequence of its own, which begins with the prompt that all share:

    prompt   | A | A | p..|          A aliased: one extent, `width` slots; p the partial page, a copy for each
    beam 0   | A | A | p..| x | y |
    beam 1   | A | A | p..| x | z |  rows written since are each beam's own, so that they can be overwritten
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from vmmkv_server.engine.answers import NO_NUMBERS
from vmmkv_server.engine.feature import Feature, Need
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.kv_backend import KVBackend, KVSequence, vmmkv_sequence
from vmmkv_server.engine.request import Request, Shape
from vmmkv_server.engine.sampler import NOT_A_NUMBER
from vmmkv_server.engine.step import Chunk, Results, Step
from vmmkv_server.protocol import Beam, FinishReason, Generate
from vmmkv_server.protocol import Beams as Answer
from vmmkv_server.sampling_params import MAX_LENGTH_PENALTY

Candidates = Sequence[tuple[int, float]]
"""Token ids that may come next after some beam, and the log-probability of each alone, the likeliest first."""


class Beams(Feature):
    """Runs the requests with a `beam_width`, each in as many sequences."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._groups: dict[Request, BeamGroup] = {}
        """Searches of the running requests."""

    def need(self, ask: Generate, need: Need) -> Need:
        """A sequence for each beam; of a vocabulary of fewer tokens come fewer live beams."""
        if not (width := ask.params.beam_width):
            return need
        num_sequences = min(width, self._core.limits.vocabulary_size)
        fewer = "tokens or beams" if width > 1 else need.fewer
        return need._replace(num_sequences=num_sequences, each=f" in each of {width} beams", fewer=fewer)

    def shape(self, request: Request, shape: Shape) -> Shape:
        """A slot for each beam."""
        width = request.ask.params.beam_width
        return shape._replace(num_slots=width, samples=False) if width else shape

    def chunks(self, request: Request) -> list[Chunk] | None:
        """Chunks of the live beams, after these have their sequences."""
        if (group := self._groups.get(request)) is None:
            return None
        return group.chunks() if self._core.scheduler.with_room(request, group.arrange) else []

    def sequences(self, request: Request) -> Sequence[KVSequence] | None:
        """Sequences of the live beams."""
        return group.sequences if (group := self._groups.get(request)) else None

    def admitted(self, request: Request) -> None:
        """The search begins at the prompt."""
        if request.ask.params.beam_width:
            self._groups[request] = BeamGroup(request, self._core.memory)

    def results(self, step: Step, results: Results) -> None:
        """Give the candidates of beams to their searches, and send the answers of those that are done."""
        for row, chunk in step.last_chunks() if self._groups else ():
            if not chunk.num_candidates or not chunk.is_live:
                continue
            request, core = chunk.request, self._core
            if results.tokens[row] == NOT_A_NUMBER:
                core.answers.fail([request], NO_NUMBERS)
            elif (found := self._groups[request].take(chunk.sequence, results.logprobs[row].likeliest)) is not None:
                core.answers.counts.generation_tokens += sum(len(beam.token_ids) for beam in found)
                name, cached, queued_us = request.ask.request_id, request.cached, request.queued_us
                core.send(Answer(request_id=name, beams=found, cached=cached, queued_us=queued_us))
                core.scheduler.finish(request)

    def left(self, request: Request) -> None:
        """Give all sequences back but the request's own."""
        if (group := self._groups.get(request)) is not None:
            group.close()
            del self._groups[request]


class Continuation(NamedTuple):
    """A beam of the next step. Several can have one parent, and a parent may have none."""

    parent: int
    """Index of its parent among the live beams of the step before."""
    token: int


@dataclass(eq=False, slots=True)
class LiveBeam:
    """A beam as its parent and one more token, so that a step costs the same however long the beams are."""

    parent: "LiveBeam | None" = None
    token: int | None = None
    """Last token; None of the root, which has no tokens."""
    log_probability: float = 0.0
    """Log-probability of all its tokens together."""
    num_tokens: int = 0

    def tokens(self) -> list[int]:
        """All tokens of the beam, without the prompt's. Cost: proportional to their number."""
        found, beam = list[int](), self
        while beam.parent is not None:
            assert beam.token is not None, "only the root has no token"
            found.append(beam.token)
            beam = beam.parent
        return found[::-1]

    def num_common(self, other: "LiveBeam") -> int:
        """Number of first tokens that two beams of one search share. Cost: proportional to the number of tokens that differ."""
        one = self
        while one is not other:
            longer = one if one.num_tokens >= other.num_tokens else other
            assert longer.parent is not None, "these are beams of two searches"
            if longer is one:
                one = longer.parent
            else:
                other = longer.parent
        return one.num_tokens


class BeamSearch:
    """The search for the continuations of one prompt. Give `advance` the candidates of each live beam until it is `done`.

        search = BeamSearch(width=4, max_new_tokens=100, stop_ids=stop_ids)
        while not search.done:
            for beam, (parent, token) in enumerate(search.advance(candidates_of_each_live_beam)):
                ...  # beam's rows are its parent's; compute `token` next
        answers = search.best(2)

    At first one beam is live, the prompt itself; later up to `width`, the likeliest first, all of one length.
    """

    def __init__(
        self, *, width: int, max_new_tokens: int, stop_ids: frozenset[int] = frozenset(), length_penalty: float = 1.0
    ) -> None:
        """`length_penalty` above 0 favours long answers, below 0 short ones; 0 compares log-probabilities as they are."""
        assert width >= 1 and max_new_tokens >= 1 and abs(length_penalty) <= MAX_LENGTH_PENALTY, "SamplingParams refuses these"
        self.live: list[LiveBeam] = [LiveBeam()]
        self.num_candidates = width + len(stop_ids)
        """Likeliest tokens that each live beam needs; fewer only if the vocabulary has fewer.

        Stop tokens do not go on; this leaves at least `width` that do, even of one beam.
        """
        self._width = width
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._finished: list[Beam] = []
        """The best `width` so far, in order."""

    @property
    def done(self) -> bool:
        """Is no beam live any more? Then `best` is final."""
        return not self.live

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """One step: the candidates of each live beam, in its order, at least its `num_candidates` likeliest.

        Returns the new live beams; none when the search is done. Equally likely ones keep the order given.
        """
        assert not self.done, "this search is done"
        num_tokens = self.live[0].num_tokens + 1
        is_last = num_tokens == self._max_new_tokens
        extensions = [
            (beam.log_probability + log_probability, Continuation(parent, token))
            for parent, (beam, own) in enumerate(zip(self.live, candidates, strict=True))
            for token, log_probability in own
        ]
        extensions.sort(key=lambda extension: -extension[0])
        survivors: list[LiveBeam] = []
        continuations: list[Continuation] = []
        for rank, (log_probability, continuation) in enumerate(extensions):
            parent, token = continuation
            is_stop = token in self._stop_ids
            if is_stop or is_last:
                # An end behind `width` better extensions is no answer: a beam of its rank would not have lived on either.
                if rank < self._width:
                    kept = self.live[parent].tokens() + ([] if is_stop else [token])
                    self._finish(kept, self._score(log_probability, num_tokens), "stop" if is_stop else "length")
            elif len(survivors) < self._width:
                survivors.append(LiveBeam(self.live[parent], token, log_probability, num_tokens))
                continuations.append(continuation)
        if not survivors or not self._can_improve(survivors[0]):
            survivors, continuations = [], []
        self.live = survivors
        return continuations

    def best(self, count: int) -> list[Beam]:
        """Up to `count` answers, at most `width`, the best first."""
        return self._finished[:count]

    def _score(self, log_probability: float, num_tokens: int) -> float:
        return log_probability / math.pow(num_tokens, self._length_penalty)

    def _finish(self, tokens: list[int], score: float, reason: FinishReason) -> None:
        self._finished.append(Beam(token_ids=tokens, score=score, finish_reason=reason))
        self._finished.sort(key=lambda beam: -beam.score)  # stable: the earlier of two equals stays
        del self._finished[self._width :]

    def _can_improve(self, likeliest: LiveBeam) -> bool:
        """Could a live beam still beat the worst answer, by its score as if it ended here?

        That is a bound for length penalties up to 0, where scores only fall; above, it is the usual guess.
        """
        if len(self._finished) < self._width:
            return True
        return self._score(likeliest.log_probability, likeliest.num_tokens) > self._finished[-1].score


class BeamGroup:
    """The search of a running request, and the sequences of its beams: the request's own, and forks of it.

    `arrange` and `chunks` are called before a step, and `take` when candidates have been read back. The first child of a beam
    inherits its sequence. Other children take sequences of beams without a child. Rows that differ are copied there. A search
    that is preempted begins again from the prompt, and gives the same answer.
    """

    def __init__(self, request: Request, memory: KVBackend) -> None:
        assert memory.cache is not None, "a baseline has no forks"
        ask = request.ask
        self.search = BeamSearch(
            width=ask.params.beam_width,
            max_new_tokens=ask.params.max_tokens,
            stop_ids=request.stop_ids,
            length_penalty=ask.params.length_penalty,
        )
        self.sequences: list[KVSequence] = [request.memory]
        """Sequences of the live beams, in the search's order."""
        self._request = request
        self._cache: Final = memory.cache
        self._candidates: dict[KVSequence, Candidates] = {}
        """Candidates of the beams that have been computed in this round."""
        self._continuations: list[Continuation] = []
        """Beams of the next round that have no sequence yet."""
        self._rows_of: dict[KVSequence, LiveBeam] = {request.memory: self.search.live[0]}
        """All sequences, and the last beam of which each had all rows."""

    def chunks(self) -> list[Chunk]:
        """The rest of the prompt, and then the last token of each live beam that has no row yet."""
        request, count = self._request, self.search.num_candidates
        if self.search.live[0].token is None:
            return [Chunk.own(request, count)]
        found = []
        for beam, sequence in zip(self.search.live, self.sequences, strict=True):
            if sequence.length < len(request.prompt) + beam.num_tokens:
                assert beam.token is not None, "only the root has no token"
                token = np.array([beam.token], np.int32)
                found.append(Chunk(request, sequence, sequence.length, token, num_candidates=count, is_own=False))
        return found

    def take(self, sequence: KVSequence, candidates: Candidates) -> list[Beam] | None:
        """A beam has been computed; when all have, the search advances. Returns the answers once it is done."""
        self._candidates[sequence] = candidates
        if len(self._candidates) < len(self.sequences):
            return None
        self._rows_of.update(zip(self.sequences, self.search.live, strict=True))
        self._continuations = self.search.advance([self._candidates[each] for each in self.sequences])
        self._candidates = {}
        return self.search.best(self._request.ask.params.beam_width) if self.search.done else None

    def arrange(self) -> None:
        """Give each beam that goes on a sequence with its parent's rows.

        Cost: forks in the first round (see `KVCache.fork`); later a copy of the rows that differ for each beam that does not
        inherit, no driver call. If it fails it can be called again. Raises: OutOfPages, DriverError.
        """
        if not self._continuations:
            return
        missing = self._request.shape.num_slots - len(self._rows_of)
        if missing:
            root = self._rows_of[self._request.memory]
            forks = self._cache.fork(vmmkv_sequence(self._request.memory), missing, max_tokens=self._request.max_tokens)
            self._rows_of.update((fork, root) for fork in forks)
        sequences, pairs = self._assign([self.sequences[parent] for parent, _ in self._continuations])
        if pairs:
            num_common = min(self._rows_of[source].num_common(self._rows_of[target]) for source, target in pairs)
            end = pairs[0][0].length
            for _, target in pairs:
                target.grow(end)  # it is that long already, unless the vocabulary had too few tokens for all beams
            copies = [(vmmkv_sequence(source), vmmkv_sequence(target)) for source, target in pairs]
            self._cache.copy_rows(copies, len(self._request.ask.prompt) + num_common, end)
        self.sequences = sequences
        self._continuations = []

    def close(self) -> None:
        """Give back all sequences but the request's own. Idempotent."""
        for sequence in self._rows_of:
            if sequence is not self._request.memory:
                sequence.close()

    def _assign(self, parents: Sequence[KVSequence]) -> tuple[list[KVSequence], list[tuple[KVSequence, KVSequence]]]:
        """A sequence for each child, given its parent's; and from which to which rows must be copied for that."""
        free = [sequence for sequence in self._rows_of if sequence not in parents]
        sequences: list[KVSequence] = []
        pairs: list[tuple[KVSequence, KVSequence]] = []
        for parent in parents:
            if parent not in sequences:
                sequences.append(parent)
            else:
                sequences.append(free.pop())
                pairs.append((parent, sequences[-1]))
        return sequences, pairs
