"""Sums of floating-point numbers without rounding, which do not depend on the order of addition.

A finite fp64 number is an integer multiple of 2**-1074, so a sum is one integer in this unit.
Numbers of an array are first added per exponent: significands of 53 bits are split into halves, of
which fp64 adds 2**26 without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_UNIT: Final = 1074  # the smallest positive number is 2**-1074
_BITS: Final = 53  # of a significand
_HALF: Final = 26
_CHUNK: Final = 1 << 24  # numbers added at once: half of the number that fp64 adds exactly
_LOWEST: Final = -1073  # exponent of the smallest positive number by frexp


@dataclass(slots=True)
class ExactSum:
    """The sum of all numbers added so far; equal sums compare equal.

    Attributes:
        units: The sum of the finite numbers, in units of 2**-1074.
        broken: The sum of infinities and NaN; 0 without them.
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
        bins = exponents.astype(np.int64) - _LOWEST
        high, low = significands >> _HALF, significands & ((1 << _HALF) - 1)
        for shift, half in ((_HALF, high), (0, low)):
            sums: Any = np.bincount(bins, weights=half)
            for index in np.flatnonzero(sums).tolist():
                # number = significand * 2**(exponent - 53), and units = number * 2**1074.
                self.units += _shifted(int(sums[index]) << shift, index + _LOWEST - _BITS + _UNIT)


def _shifted(number: int, bits: int) -> int:
    # Exact: significands of numbers below 2**-1022 end in at least -bits zeros.
    return number << bits if bits >= 0 else number >> -bits
