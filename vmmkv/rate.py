"""Rates that are measured while an engine runs: bytes a second of a tier, tokens a second of prefill."""

from typing import Final

_KEPT: Final = 0.9
"""Weight of the earlier measurements beside a new one."""

_HOPE: Final = 1.01
"""Factor by which the estimate of a bandwidth rises with each request that declines to load from its tier."""


class Rate:
    """Units a second, averaged over about the last ten pieces of work. Time in which pieces overlap counts once."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: the estimate until something is measured."""
        self._first = per_s
        self._hope = 1.0
        self._units = self._took_s = self._until_s = 0.0

    @property
    def measured_per_s(self) -> float:
        """The average."""
        return self._units / self._took_s if self._took_s else self._first

    @property
    def per_s(self) -> float:
        """The estimate: the average, or what is hoped for since."""
        return self._hope * self.measured_per_s

    def add(self, units: float, began_s: float, ended_s: float) -> None:
        """Take a piece of work into the average."""
        self._hope = 1.0
        self._units = _KEPT * self._units + units
        self._took_s = _KEPT * self._took_s + ended_s - min(ended_s, max(began_s, self._until_s))
        self._until_s = ended_s

    def hope(self) -> None:
        """Estimate a little more, until it is measured again."""
        self._hope *= _HOPE
