"""KVPolicy: the protocol of what chooses the rows that a sequence keeps. `vmmkv.eviction` has policies.

Legend: T rows of the sequence, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch  # where a policy is only named, as on the command line, it is not needed

MARGIN: Final = 8
"""Divisor of the budget: rows are dropped again when there are that many more. A compaction copies the rows it keeps."""


class KVPolicy(Protocol):
    """A policy that chooses the rows to keep, once for all layers and heads."""

    @property
    def budget(self) -> int:
        """Most rows that are kept."""

    def num_queries(self, num_rows: int) -> int:
        """Number of last queries that scores are summed over, of a sequence of so many rows; 0 if there are no scores.

        If these are not all queries, their own rows are among those that are kept.
        """

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers of the rows to keep, in ascending order: int64, on the scores' device. All rows if they fit.

        `scores_T`: [num_rows] how much these queries attend to each row, summed over queries, heads and layers.
        Raises: ValueError for scores that are missing, or of another shape.
        """


def scores_all(policy: KVPolicy) -> bool:
    """Does a policy score all queries there have been, not the last ones alone? Scores are kept beyond a compaction then."""
    return policy.num_queries(policy.budget + 1) > policy.budget
