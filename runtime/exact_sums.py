"""Sums of floating-point numbers without rounding, so that no order of adding changes them.

A finite fp64 number is a whole number of 2**-1074. A sum is therefore kept as one integer in this
unit. Numbers of one array are added by their exponents first: significands of 53 bits are cut into
halves, of which fp64 adds 2**26 without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_UNIT: Final = 1074  # the smallest number is 2**-1074
_BITS: Final = 53  # of a significand
_HALF: Final = 26
_CHUNK: Final = 1 << 24  # numbers added at once: half of what fp64 adds without rounding
_LOWEST: Final = -1073  # exponent that frexp gives the smallest number


@dataclass(slots=True)
class ExactSum:
    """The sum of all numbers added so far; equal sums compare equal.

    Attributes:
        units: The sum of the finite ones, in units of 2**-1074.
        broken: Sum of those that are not finite: infinite or NaN, 0 if there are none.
    """

    units: int = 0
    broken: float = 0.0

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Add numbers.

        Args:
            numbers: fp64, any shape.
        """
        flat = numbers.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            self._add_some(flat[start : start + _CHUNK])

    def __float__(self) -> float:
        """Round the sum to the nearest fp64; infinite beyond the largest."""
        if self.broken:
            return self.broken
        try:
            return self.units / (1 << _UNIT)
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf

    def _add_some(self, numbers: NDArray[np.float64]) -> None:
        finite = np.isfinite(numbers)
        if not finite.all():
            with np.errstate(invalid="ignore"):  # infinities of both signs make NaN
                self.broken += float(numbers[~finite].sum())
            numbers = numbers[finite]
        fractions, exponents = np.frexp(numbers)
        significands: NDArray[np.int64] = np.ldexp(fractions, _BITS).astype(np.int64)
        places = exponents.astype(np.int64) - _LOWEST
        high, low = significands >> _HALF, significands & ((1 << _HALF) - 1)
        for shift, half in ((_HALF, high), (0, low)):
            sums: Any = np.bincount(places, weights=half)
            for place in np.flatnonzero(sums).tolist():
                # A number is its significand by 2**(exponent - 53), of which units take 2**1074.
                self.units += _shifted(int(sums[place]) << shift, place + _LOWEST - _BITS + _UNIT)


def _shifted(number: int, bits: int) -> int:
    # Significands of the numbers below 2**-1022 end in as many zeros as they are shifted back.
    return number << bits if bits >= 0 else number >> -bits
