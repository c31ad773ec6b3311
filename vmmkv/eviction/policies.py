"""The policies that choose the rows that a sequence keeps.

Legend: T rows of the sequence, in order; K kv heads, D head dim, R = D / 2 angles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from vmmkv.arguments import whole

if TYPE_CHECKING:
    import torch  # where a policy is only named, as on the command line, it is not needed


MARGIN: Final = 8
"""Divisor of the budget: rows are dropped again when there are that many more. A compaction copies the rows it keeps."""
_SNAP_WINDOW: Final = 32


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM:
    """The first `sinks` rows and the last `window`: what a model needs to go on for ever.

    Keys keep their rotation; where a sequence is to pass the length that the model was trained for, positions are those in the
    cache instead: `turn` the keys that have moved, and rotate the next query by `sequence.length`.
    """

    sinks: int = 4
    window: int

    def __post_init__(self) -> None:
        _check("sinks", self.sinks, 0)
        _check("window", self.window, 1)

    @property
    def budget(self) -> int:
        """Most rows that are kept."""
        return self.sinks + self.window

    def num_queries(self, num_rows: int) -> int:
        """Number of last queries to score."""
        return 0

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        """Row numbers to keep, ascending."""
        import torch

        rows_T = torch.arange(num_rows, device=None if scores_T is None else scores_T.device)
        return rows_T[(rows_T < self.sinks) | (rows_T >= num_rows - self.window)]


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O:
    """The last `recent` rows, and of the others those that all queries attend to most: `budget` rows together."""

    budget: int
    recent: int

    def __post_init__(self) -> None:
        _check("budget", self.budget, 1)
        _check("recent", self.recent, 0, self.budget)

    def num_queries(self, num_rows: int) -> int:
        """Number of last queries to score."""
        return num_rows

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        """Row numbers to keep, ascending."""
        return highest(_checked(num_rows, scores_T), self.budget, self.recent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """The last `window` rows, and of the others those that these attend to most: `budget` rows together.

    Scores are averaged over `kernel` neighbours, so that a row is kept with those around it.
    """

    budget: int
    window: int = _SNAP_WINDOW
    kernel: int = 5

    def __post_init__(self) -> None:
        _check("budget", self.budget, 1)
        _check("window", self.window, 1, self.budget, " (the default)" if self.window == _SNAP_WINDOW else "")
        _check("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}: give an odd number, so that a row is the middle of its neighbours")

    def num_queries(self, num_rows: int) -> int:
        """Number of last queries to score."""
        return min(self.window, num_rows)

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        """Row numbers to keep, ascending."""
        from torch.nn.functional import avg_pool1d

        scores_T = _checked(num_rows, scores_T).float().clone()
        before = scores_T[: -self.window]
        if len(before):
            before.copy_(avg_pool1d(before[None], self.kernel, stride=1, padding=self.kernel // 2)[0])
        return highest(scores_T, self.budget, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVA:
    """The last row, and of the others those that the last query attends to most: `budget` rows together."""

    budget: int

    def __post_init__(self) -> None:
        _check("budget", self.budget, 1)

    def num_queries(self, num_rows: int) -> int:
        """Number of last queries to score."""
        return min(1, num_rows)

    def keep(self, num_rows: int, scores_T: torch.Tensor | None = None) -> torch.Tensor:
        """Row numbers to keep, ascending."""
        return highest(_checked(num_rows, scores_T), self.budget, 1)


def turn(keys_TKD: torch.Tensor, back_T: torch.Tensor, inv_freq_R: torch.Tensor) -> torch.Tensor:
    """Rotary keys turned back by so many positions each, as if their tokens had stood there; in the keys' dtype.

    Elements j and j + D / 2 of a head are turned together, as in Llama. `inv_freq_R`: the model's angle for one position.
    """
    import torch

    angles_T1R = back_T.to(keys_TKD.device, torch.float32)[:, None, None] * inv_freq_R.float()
    cos_T1R, sin_T1R = angles_T1R.cos(), angles_T1R.sin()
    low_TKR, high_TKR = keys_TKD.float().chunk(2, dim=-1)
    turned_TKD = torch.cat([low_TKR * cos_T1R + high_TKR * sin_T1R, high_TKR * cos_T1R - low_TKR * sin_T1R], dim=-1)
    return turned_TKD.to(keys_TKD.dtype)


def highest(scores_T: torch.Tensor, budget: int, num_last: int) -> torch.Tensor:
    """The last rows, and before these the ones of the highest scores; of equal ones the first."""
    import torch

    num_before = max(0, len(scores_T) - num_last)
    best = scores_T[:num_before].sort(descending=True, stable=True).indices[: budget - num_last]
    return torch.cat([best.sort().values, torch.arange(num_before, len(scores_T), device=scores_T.device)])


def _checked(num_rows: int, scores_T: torch.Tensor | None) -> torch.Tensor:
    if scores_T is None or scores_T.shape != (num_rows,):
        given = "none" if scores_T is None else f"of shape {tuple(scores_T.shape)}"
        raise ValueError(f"scores_T: {given}; wanted ({num_rows},), the attention of the last queries to each row")
    return scores_T


def _check(name: str, value: int, least: int, budget: int | None = None, said: str = "") -> None:
    if whole(name, value) < least:
        raise ValueError(f"{name}={value}: give {least} or more")
    if budget is not None and value > budget:
        remedy = f"give a budget of {value} or more, or a smaller {name}"
        raise ValueError(f"{name}={value}{said} is more than budget={budget}: {remedy}")
