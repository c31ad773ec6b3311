"""The policies that choose the rows that a sequence keeps.

Legend: T rows of the sequence, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vmmkv.arguments import whole

if TYPE_CHECKING:
    import torch  # where a policy is only named, as on the command line, it is not needed


_SNAP_WINDOW: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM:
    """The first `sinks` rows and the last `window`: what a model needs to go on for ever.

    Keys keep their rotation; where a sequence is to pass the length that the model was trained for, positions are those in the
    cache instead: `vmmkv_kernels.reference.turn` the keys that have moved, and rotate the next query by `sequence.length`.
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
