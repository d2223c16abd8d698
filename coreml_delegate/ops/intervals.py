"""Interval arithmetic on integers.

The result for an interval with an unknown bound is unknown, because int64 may wrap around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of integers, both included.

    Attributes:
        low: None if it is not known.
        high: None if it is not known.
    """

    low: int | None = None
    high: int | None = None

    @classmethod
    def point(cls, number: int) -> Interval:
        """Return the interval of one number."""
        return cls(number, number)

    @property
    def is_known(self) -> bool:
        """Whether both bounds are known."""
        return self.low is not None and self.high is not None

    def contains(self, number: int) -> bool:
        """Whether a number may lie between the bounds."""
        above = self.low is None or self.low <= number
        return above and (self.high is None or number <= self.high)

    def is_within(self, low: int, high: int) -> bool:
        """Whether both bounds are known and lie in ``low .. high``."""
        return (
            self.low is not None and self.high is not None and low <= self.low and self.high <= high
        )

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"

    def __neg__(self) -> Interval:
        return self._at_corners(Interval.point(0), lambda a, _: -a)

    def __add__(self, other: Interval) -> Interval:
        return self._at_corners(other, operator.add)

    def __sub__(self, other: Interval) -> Interval:
        return self._at_corners(other, operator.sub)

    def __mul__(self, other: Interval) -> Interval:
        return self._at_corners(other, operator.mul)

    def __abs__(self) -> Interval:
        return self.maximum(-self).maximum(Interval.point(0)) if self.is_known else UNKNOWN

    def __or__(self, other: Interval) -> Interval:
        """Return the smallest interval that contains both."""
        return Interval(_if_both(min, self.low, other.low), _if_both(max, self.high, other.high))

    def __pow__(self, exponent: int) -> Interval:
        base = self if exponent % 2 else abs(self)
        return base._at_corners(Interval.point(exponent), operator.pow)

    def __floordiv__(self, other: Interval) -> Interval:
        return self._divide(other, operator.floordiv)

    def __mod__(self, other: Interval) -> Interval:
        """Bounds of the remainder that has the sign of the divisor."""
        if other.low is None or other.high is None:
            return UNKNOWN
        if other.low > 0 and self.is_within(0, other.low - 1):
            return self
        return Interval(min(0, other.low + 1), max(0, other.high - 1))

    def truncated_divide(self, other: Interval) -> Interval:
        """Bounds of the quotient, rounded towards zero."""
        return self._divide(other, lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1))

    def truncated_modulo(self, other: Interval) -> Interval:
        """Bounds of the remainder that has the sign of the dividend."""
        largest_divisor = abs(other).high
        if largest_divisor is None:
            return UNKNOWN
        is_positive = self.low is not None and self.low >= 0
        is_negative = self.high is not None and self.high <= 0
        limit = max(0, largest_divisor - 1)
        return Interval(0 if is_positive else -limit, 0 if is_negative else limit)

    def maximum(self, other: Interval) -> Interval:
        """Bounds of the larger of two numbers."""
        return Interval(_if_any(max, self.low, other.low), _if_both(max, self.high, other.high))

    def minimum(self, other: Interval) -> Interval:
        """Bounds of the smaller of two numbers."""
        return Interval(_if_both(min, self.low, other.low), _if_any(min, self.high, other.high))

    def sign(self) -> Interval:
        """Bounds of the sign: -1, 0 or 1."""
        return self.minimum(Interval.point(1)).maximum(Interval.point(-1))

    def bitwise_and(self, other: Interval) -> Interval:
        """Bounds of ``a & b``, which is at most a non-negative operand."""
        positive = [i for i in (self, other) if i.low is not None and i.low >= 0]
        return reduce(Interval.minimum, positive, Interval(0)) if positive else UNKNOWN

    def _divide(self, other: Interval, divide: Callable[[int, int], int]) -> Interval:
        if not other.contains(0):
            return self._at_corners(other, divide)
        # The magnitude of a quotient of integers is at most that of the dividend.
        return abs(self) | -abs(self)

    def _at_corners(self, other: Interval, operate: Callable[[int, int], int]) -> Interval:
        if None in (self.low, self.high, other.low, other.high):
            return UNKNOWN
        corners = [
            operate(a, b)
            for a in (self.low, self.high)
            for b in (other.low, other.high)
            if a is not None and b is not None
        ]
        return Interval(min(corners), max(corners))


UNKNOWN = Interval()


def hull(intervals: Iterable[Interval]) -> Interval:
    """Return the smallest interval that contains all; unknown for no intervals."""
    listed = list(intervals)
    return reduce(lambda a, b: a | b, listed) if listed else UNKNOWN


def product(intervals: Iterable[Interval]) -> Interval:
    """Bounds of the product of one number per interval."""
    return reduce(operator.mul, intervals, Interval.point(1))


_Choice = Callable[[int, int], int]


def _if_both(choose: _Choice, a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else choose(a, b)


def _if_any(choose: _Choice, a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else choose(a, b)
