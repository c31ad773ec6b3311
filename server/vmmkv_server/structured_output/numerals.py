"""JSON's numbers within bounds, as GBNF. Bounds are exact: no digit of a large integer or of a decimal is lost."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Self

MAX_DIGITS: Final = 400
"""Most digits of a bound: each is a rule."""
_DECIMALS: Final = 6
"""Digits behind the point, where the bounds have no more."""
_EXACT_DIGITS: Final = 15
"""So many are kept by readers that hold numbers as doubles: numbers that differ there stay on their side of a bound."""
INTEGER: Final = '("0" | "-"? [1-9] [0-9]*)'
NUMBER: Final = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9] [0-9]?)?'
"""With exponents of two digits: every reader holds such a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Numbers between two bounds, each of them among the numbers or not. None for no bound."""

    low: Fraction | None = None
    high: Fraction | None = None
    has_low: bool = True
    has_high: bool = True

    @property
    def is_empty(self) -> bool:
        """Is there no number between the bounds?"""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and not (self.has_low and self.has_high))

    def has(self, number: Fraction) -> bool:
        """Is a number between the bounds?"""
        above = self.low is None or self.low < number or (self.low == number and self.has_low)
        return above and (self.high is None or number < self.high or (self.high == number and self.has_high))

    def within(self, other: Self) -> "Interval":
        """The numbers of both."""
        low, has_low = max(((one.low, not one.has_low) for one in (self, other) if one.low is not None), default=(None, False))
        high, has_high = min(((one.high, one.has_high) for one in (self, other) if one.high is not None), default=(None, True))
        return Interval(low=low, high=high, has_low=not has_low, has_high=has_high)

    def is_apart(self, other: Self) -> bool:
        """Do they share no number?"""
        return self.within(other).is_empty

    def of_integers(self) -> "Interval":
        """The same whole numbers, between bounds that are whole numbers too."""
        low = None if self.low is None else math.ceil(self.low) + (self.low.denominator == 1 and not self.has_low)
        high = None if self.high is None else math.floor(self.high) - (self.high.denominator == 1 and not self.has_high)
        return Interval(low=None if low is None else Fraction(low), high=None if high is None else Fraction(high))


def integer_rule(interval: Interval) -> str:
    """The whole numbers of an interval that has some."""
    whole = interval.of_integers()
    low, high = (None if bound is None else int(bound) for bound in (whole.low, whole.high))
    if low is None and high is None:
        return INTEGER
    ways = []
    if low is None or low < 0:
        ways.append(f'"-" {_magnitudes(1 if high is None or high >= 0 else -high, None if low is None else -low)}')
    if high is None or high >= 0:
        ways.append(_magnitudes(max(0, low or 0), high))
    return _one_of(ways)


def _one_of(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"


def _any(minimum: int, maximum: int | None) -> str:
    if maximum == 0:
        return ""
    return f"[0-9]{{{minimum},{'' if maximum is None else maximum}}}"


def _magnitudes(low: int, high: int | None) -> str:
    """Whole numbers from `low`, which is 0 or more."""
    ways = []
    if low == 0:
        ways.append('"0"')
        low = 1
    length = len(str(low))
    while high is None or low <= high:
        if high is None and low == 10 ** (length - 1):
            ways.append(f"[1-9] {_any(length - 1, None)}")
            break
        last = 10**length - 1
        ways.append(_between(str(low), str(last if high is None else min(last, high))))
        low, length = last + 1, length + 1
    return _one_of(ways)


def _between(low: str, high: str) -> str:
    """Numerals from one to another of the same length."""
    if not low:
        return ""
    if low == "0" * len(low) and high == "9" * len(high):
        return _any(len(low), len(low))
    if low[0] == high[0]:
        return f'"{low[0]}" {_between(low[1:], high[1:])}'.rstrip()
    ways, rest = [], len(low) - 1
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        ways.append(f'"{first}" {_between(low[1:], "9" * rest)}')
        first += 1
    if high[1:] != "9" * rest:
        ways.append(f'"{last}" {_between("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}] {_any(rest, rest)}".rstrip())
    return _one_of(ways)


def number_rule(interval: Interval, num_decimals: int | None) -> str | None:
    """The numbers of an interval, with this many decimals at most; if None, as many as its bounds need. None if it has none."""
    if interval == Interval() and num_decimals is None:
        return NUMBER
    bounds = [abs(bound) for bound in (interval.low, interval.high) if bound is not None]
    whole_digits = max((len(str(int(bound))) for bound in bounds), default=1)
    wanted = max((_num_decimals(bound) for bound in bounds), default=0)
    if num_decimals is None:
        num_decimals = max(_DECIMALS, wanted)
    num_decimals = max(0, min(num_decimals, _EXACT_DIGITS - whole_digits))
    below = Interval(
        low=None if interval.high is None else -interval.high,
        high=None if interval.low is None else -interval.low,
        has_low=interval.has_high,
        has_high=interval.has_low,
    )
    ways = [*_fixed(interval, num_decimals, ""), *_fixed(below, num_decimals, '"-" ')]
    return _one_of(ways) if ways else None


def _num_decimals(number: Fraction) -> int:
    digits = 0
    while number.denominator != 1 and digits < _EXACT_DIGITS:
        number, digits = number * 10, digits + 1
    return digits


def _fixed(interval: Interval, num_decimals: int, sign: str) -> list[str]:
    """The numbers of an interval from 0 on, without an exponent."""
    zero = Interval(low=Fraction(0))
    scaled = interval.within(zero)
    if scaled.is_empty:
        return []
    unit = 10**num_decimals
    scaled = Interval(
        low=None if scaled.low is None else scaled.low * unit,
        high=None if scaled.high is None else scaled.high * unit,
        has_low=scaled.has_low,
        has_high=scaled.has_high,
    ).of_integers()
    if scaled.is_empty:
        return []
    assert scaled.low is not None, "it is 0 at least"
    low, high = int(scaled.low), None if scaled.high is None else int(scaled.high)
    first, last = low // unit, None if high is None else high // unit
    nines = unit - 1

    def decimals(from_: int, to: int) -> str:
        return _decimals(str(from_).zfill(num_decimals), str(to).zfill(num_decimals)) if num_decimals else ""

    if last == first:
        assert high is not None, "it has a last one"
        return [f'{sign}"{first}" {decimals(low % unit, high % unit)}']
    ways = []
    inner_first, inner_last = first, last
    if low % unit:
        ways.append(f'{sign}"{first}" {decimals(low % unit, nines)}')
        inner_first += 1
    if high is not None and last is not None and high % unit != nines:
        ways.append(f'{sign}"{last}" {decimals(0, high % unit)}')
        inner_last = last - 1
    if inner_last is None or inner_first <= inner_last:
        ways.append(f"{sign}{_magnitudes(inner_first, inner_last)} {decimals(0, nines)}")
    return ways


def _decimals(low: str, high: str) -> str:
    """A point and digits, from one to another of the same length; zeros at the end may be missing, and nothing is 0."""
    inner = f'"." {_digits(low, high, is_first=True)}'
    return f"({inner})?" if low == "0" * len(low) else inner


def _digits(low: str, high: str, *, is_first: bool = False) -> str:
    """Digits that with zeros behind them are from one to another. None at all, if that is, and they are not the first."""
    length = len(low)
    may_end = low == "0" * length and not is_first
    if low == "0" * length and high == "9" * length:
        return _any(1 if is_first else 0, length)
    ways = []
    for digit in range(int(low[0]), int(high[0]) + 1):
        rest_low = low[1:] if str(digit) == low[0] else "0" * (length - 1)
        rest_high = high[1:] if str(digit) == high[0] else "9" * (length - 1)
        ways.append(f'"{digit}" {_digits(rest_low, rest_high) if rest_low else ""}'.rstrip())
    found = _one_of(ways)
    return f"({found})?" if may_end else found
