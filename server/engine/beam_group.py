"""A beam search over the cache: every live beam is a sequence of its own, which begins with the prompt of all.

    prompt   | A | A | p..|          A aliased: one extent, `width` slots; p the partial page, a copy for each
    beam 0   | A | A | p..| x | y |
    beam 1   | A | A | p..| x | z |  what was written since is each beam's alone, so that it can be overwritten

At each step the first child of a beam inherits its sequence. The other children take sequences of beams that have no child,
into which they copy the rows in which the two differ. There are as many sequences as beams from the start: nothing is mapped
later but what every beam grows by.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vmmkv.server.engine.beams import BeamSearch, Candidate, Continuation, LiveBeam
from vmmkv.server.engine.kv import KV, KVSequence
from vmmkv.server.engine.ledger import TokenIds
from vmmkv.server.engine.requests import Request, Strand
from vmmkv.server.protocol import Beam


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
