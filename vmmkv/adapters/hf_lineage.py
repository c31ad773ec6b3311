"""Which sequence each row of a model's batch goes on from, and how many tokens any two sequences have in common.

    sequence 0 | p | p | p | a | b |           the prompt is common to both, and its full pages are shared
    sequence 1 | p | p | p | a | c |           rows from `own_from` on lie in pages of each one's own

A batch that is repeated, selected or reordered changes its parents at once. Memory follows before the next token comes: by
copies of what two sequences do not have in common, where each may write that; else by forks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Sequence `targets[i]` takes the rows of `sources[i]` from `first_token` on. All are read before any is written."""

    sources: list[int]
    targets: list[int]
    first_token: int


@dataclass(frozen=True, eq=False)
class Lineage:
    """The parents of a batch's rows among the sequences there are; it is replaced, not changed."""

    parents: tuple[int, ...]
    """For each row of the batch the sequence that has its tokens."""
    common: npt.NDArray[np.int64]
    """[sequences, sequences] tokens that two have in common from the first on; of no meaning on the diagonal."""
    own_from: int = 0
    """From this token on the rows of no sequence lie in a page that others hold too."""

    @classmethod
    def of_prompts(cls, parents: Sequence[int]) -> "Lineage":
        """New sequences, numbered from 0 without a gap; rows of the batch with the same parent are the same prompt."""
        num_sequences = max(parents) + 1
        return cls(tuple(parents), np.zeros((num_sequences, num_sequences), np.int64))

    @property
    def num_sequences(self) -> int:
        """Sequences that have memory."""
        return len(self.common)

    @functools.cached_property
    def settled(self) -> bool:
        """Is each row of the batch the sequence of its number? Every layer of every pass asks."""
        return self.parents == tuple(range(self.num_sequences))

    @property
    def compact(self) -> bool:
        """Is each sequence a run of rows, and are the runs in order? So a batch begins: equal prompts side by side."""
        return [*dict.fromkeys(self.parents)] == [*range(self.num_sequences)] and [*self.parents] == sorted(self.parents)

    @property
    def leaders(self) -> list[int]:
        """For each sequence the first row of the batch that goes on from it; there is one if it is compact."""
        return [self.parents.index(sequence) for sequence in range(self.num_sequences)]

    def select(self, rows: Sequence[int]) -> "Lineage":
        """The batch of these rows, in this order; a row may be named several times, or not at all."""
        return Lineage(tuple(self.parents[row] for row in rows), self.common, self.own_from)

    def moves(self) -> Moves | None:
        """The copies that settle it, or None if it takes forks: for other sequences, or rows that may not be written."""
        if len(self.parents) != self.num_sequences:
            return None
        targets = [row for row, parent in enumerate(self.parents) if parent != row]
        sources = [self.parents[row] for row in targets]
        first_token = min(int(self.common[pair]) for pair in zip(targets, sources, strict=True))
        return Moves(sources=sources, targets=targets, first_token=first_token) if first_token >= self.own_from else None

    def settle(self, num_tokens: int, *, forked: bool) -> "Lineage":
        """Each row has become the sequence of its number, with `num_tokens` tokens, by copies or as a fork."""
        parents = np.array(self.parents)
        common = self.common[np.ix_(parents, parents)]
        common[parents[:, None] == parents] = num_tokens
        return Lineage(tuple(range(len(parents))), common, num_tokens if forked else self.own_from)

    def share(self, num_tokens: int) -> "Lineage":
        """Somebody else has forked all sequences at `num_tokens` tokens."""
        return Lineage(self.parents, self.common, num_tokens)

    def cut(self, num_tokens: int) -> "Lineage":
        """All sequences have been truncated, and what others hold of the last page exchanged."""
        return Lineage(self.parents, np.minimum(self.common, num_tokens), min(self.own_from, num_tokens))
