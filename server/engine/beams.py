"""Beam search without a model and without memory: log-probabilities in; out, which beams go on from which.

It is the search of transformers' `generate(num_beams=width, early_stopping=False)`, and gives the same sequences:

    live beams ── candidates of each ──> the best `width` that end nothing live on; an end among the best `width` is kept
    score of what has ended = log-probability of its tokens / (number of its tokens) ** length_penalty

Whoever has the model's rows in memory does as `advance` says: beam i of the next step has its parent's rows, and its token
comes next.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vmmkv.server.engine.kv_backend import KV, KVSequence
from vmmkv.server.engine.request import Request, Strand, TokenIds
from vmmkv.server.protocol import Beam, FinishReason
from vmmkv.server.sampling_params import MAX_LENGTH_PENALTY

# -------- beams


class Candidate(NamedTuple):
    """A token that may come next after some beam."""

    log_probability: float
    """Of this token alone, under the model's own distribution."""
    token: int


class Continuation(NamedTuple):
    """A beam of the next step. Several can have one parent, and a parent may have none."""

    parent: int
    """Its place among the live beams of the step before."""
    token: int


class LiveBeam:
    """A beam as its parent and one token more, so that a step costs the same however long the beams are."""

    __slots__ = ("_parent", "log_probability", "num_tokens", "token")

    def __init__(self, parent: "LiveBeam | None", token: int | None, log_probability: float) -> None:
        self._parent = parent
        self.token = token
        """Its last one; None of the beam that all others come from."""
        self.log_probability = log_probability
        """Of all its tokens."""
        self.num_tokens: int = 0 if parent is None else parent.num_tokens + 1

    def tokens(self) -> list[int]:
        """All of them, without the prompt's. Takes a while: for its end, or to compute it anew."""
        return list(self._backwards())[::-1]

    def num_common(self, other: "LiveBeam") -> int:
        """How many first tokens two beams of one search have from one and the same ancestor. Takes as long as they differ."""
        one = self
        while one is not other:
            if one.num_tokens >= other.num_tokens:
                assert one._parent is not None, "these are beams of two searches"
                one = one._parent
            else:
                assert other._parent is not None, "these are beams of two searches"
                other = other._parent
        return one.num_tokens

    def _backwards(self) -> Iterator[int]:
        beam: LiveBeam | None = self
        while beam is not None and beam.token is not None:
            yield beam.token
            beam = beam._parent


class BeamSearch:
    """The search for the continuations of one prompt. Give `advance` the candidates of each live beam until it is `done`.

        search = BeamSearch(width=4, max_new_tokens=100, stop_ids=stop_ids)
        while not search.done:
            for beam, (parent, token) in enumerate(search.advance(candidates_of_each_live_beam)):
                ...  # beam's rows are parent's; compute `token` next
        answers = search.best(2)

    At first one beam is live, the prompt itself; later up to `width`, the likeliest first, all of one length.
    """

    def __init__(
        self, *, width: int, max_new_tokens: int, stop_ids: frozenset[int] = frozenset(), length_penalty: float = 1.0
    ) -> None:
        """`length_penalty` above 0 favours long answers, below 0 short ones; 0 compares log-probabilities as they are.

        Raises: ValueError, naming what may be.
        """
        if width < 1 or max_new_tokens < 1:
            raise ValueError(f"width is {width} and max_new_tokens {max_new_tokens}; both must be at least 1")
        if not -MAX_LENGTH_PENALTY <= length_penalty <= MAX_LENGTH_PENALTY:  # nor is it a number that is none
            limit = f"{MAX_LENGTH_PENALTY:g}"
            raise ValueError(f"length_penalty is {length_penalty}; wanted from -{limit} to {limit}")
        self.live: list[LiveBeam] = [LiveBeam(None, None, 0.0)]
        self.num_candidates = width + len(stop_ids)
        """How many of its likeliest tokens each live beam needs; fewer only if the vocabulary has fewer.

        Stop tokens do not go on, so that this leaves at least `width` that do, even of one beam.
        """
        self._width = width
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._finished: list[Beam] = []
        """The best `width` so far, in order."""

    @property
    def done(self) -> bool:
        """Nothing is live any more: `best` is final."""
        return not self.live

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """One step: the candidates of each live beam, in its order, at least its `num_candidates` likeliest.

        Gives the new live beams, which are none when the search is done. Equally likely ones keep the order given.
        """
        assert not self.done, "this search is done"
        num_tokens = self.live[0].num_tokens + 1
        is_last = num_tokens == self._max_new_tokens
        extensions = [
            (beam.log_probability + log_probability, Continuation(parent, token))
            for parent, (beam, own) in enumerate(zip(self.live, candidates, strict=True))
            for log_probability, token in own
        ]
        extensions.sort(key=lambda extension: -extension[0])
        survivors: list[LiveBeam] = []
        continuations: list[Continuation] = []
        for rank, (log_probability, continuation) in enumerate(extensions):
            parent, token = continuation
            is_stop = token in self._stop_ids
            if is_stop or is_last:
                # One that ends behind `width` better ones is no answer: a beam of its rank would not have lived on either.
                if rank < self._width:
                    kept = self.live[parent].tokens() + ([] if is_stop else [token])
                    self._finish(kept, self._score(log_probability, num_tokens), "stop" if is_stop else "length")
            elif len(survivors) < self._width:
                survivors.append(LiveBeam(self.live[parent], token, log_probability))
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


# -------- beam group
# A beam search over the cache: every live beam is a sequence of its own, which begins with the prompt of all.
#
#     prompt   | A | A | p..|          A aliased: one extent, `width` slots; p the partial page, a copy for each
#     beam 0   | A | A | p..| x | y |
#     beam 1   | A | A | p..| x | z |  what was written since is each beam's alone, so that it can be overwritten
#
# At each step the first child of a beam inherits its sequence. The other children take sequences of beams that have no child,
# into which they copy the rows in which the two differ. There are as many sequences as beams from the start: nothing is mapped
# later but what every beam grows by.


@dataclass(frozen=True, eq=False, slots=True)
class BeamStrand:
    """A live beam: its sequence has all its rows, but for its last token's until that is computed."""

    request: Request
    memory: KVSequence
    beam: LiveBeam

    @property
    def num_left(self) -> int:
        """See Strand: its last token, or none."""
        return len(self.request.prompt) + self.beam.num_tokens - self.memory.length

    @property
    def num_candidates(self) -> int:
        """See Strand."""
        return self.request.num_candidates

    def next_tokens(self, count: int) -> TokenIds:
        """See Strand."""
        assert count == 1 and self.beam.token is not None, "a beam has one token to compute"
        return np.array([self.beam.token], np.int32)


class BeamGroup:
    """The search of a request that runs, and the sequences of its beams: its own, and forks of that one.

    Give `take` the candidates of each strand; `arrange` before the next step. If its memory goes so does the group: the search
    gives the same answer again from the prompt.
    """

    def __init__(self, request: Request, cache: KV) -> None:
        ask = request.ask
        self.search = BeamSearch(
            width=ask.beam_width,
            max_new_tokens=ask.max_new_tokens,
            stop_ids=request.stop_ids,
            length_penalty=ask.length_penalty,
        )
        self.strands: Sequence[Strand] = [request]
        """Of the live beams, in the search's order; at first the request's own, which is the prompt."""
        self._request = request
        self._cache = cache
        self._candidates: dict[Strand, list[Candidate]] = {}
        """Of the strands that have been computed in this round."""
        self._continuations: list[Continuation] = []
        """Beams of the next round that have no sequence yet."""
        self._rows_of: dict[KVSequence, LiveBeam] = {request.memory: self.search.live[0]}
        """All sequences, and the last beam of which each had all rows."""

    def take(self, strand: Strand, candidates: list[Candidate]) -> list[Beam] | None:
        """A strand is computed; when all are, the search goes on. Its answers, once it is done."""
        self._candidates[strand] = candidates
        if len(self._candidates) < len(self.strands):
            return None
        for beam, each in zip(self.search.live, self.strands, strict=True):
            self._rows_of[each.memory] = beam
        self._continuations = self.search.advance([self._candidates[each] for each in self.strands])
        self._candidates = {}
        return self.search.best(self._request.ask.beam_width) if self.search.done else None

    def arrange(self) -> None:
        """Give each beam that goes on a sequence with its parent's rows.

        Cost: at the start forks (see `KVCache.fork`); later a copy of the rows that differ for each beam that does not inherit,
        no driver call. If it fails it can be called again. Raises: OutOfPages, DriverError.
        """
        if not self._continuations:
            return
        missing = self._request.num_slots - len(self._rows_of)
        if missing:
            root = self._rows_of[self._request.memory]
            forks = self._cache.fork(self._request.memory, missing, max_tokens=self._request.max_tokens)
            self._rows_of.update((fork, root) for fork in forks)
        sequences, pairs = self._share_out([self.strands[parent].memory for parent, _ in self._continuations])
        if pairs:
            num_common = min(self._rows_of[source].num_common(self._rows_of[target]) for source, target in pairs)
            end = pairs[0][0].length
            for _, target in pairs:
                target.grow(end)  # it is that long already, unless the vocabulary had too few tokens for all beams
            self._cache.copy_rows(pairs, len(self._request.ask.prompt) + num_common, end)
        self.strands = [
            BeamStrand(self._request, sequence, beam) for sequence, beam in zip(sequences, self.search.live, strict=True)
        ]
        self._continuations = []

    def close(self) -> None:
        """Give back all sequences but the request's own. Idempotent."""
        for sequence in self._rows_of:
            if sequence is not self._request.memory:
                sequence.close()

    def _share_out(self, parents: Sequence[KVSequence]) -> tuple[list[KVSequence], list[tuple[KVSequence, KVSequence]]]:
        """A sequence for each child, given its parent's; and from which to which rows must be copied for that."""
        orphans = [sequence for sequence in self._rows_of if sequence not in parents]
        sequences: list[KVSequence] = []
        pairs: list[tuple[KVSequence, KVSequence]] = []
        for parent in parents:
            if parent not in sequences:
                sequences.append(parent)
            else:
                sequences.append(orphans.pop())
                pairs.append((parent, sequences[-1]))
        return sequences, pairs
