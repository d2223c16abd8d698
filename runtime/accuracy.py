"""Compare the outputs of a program and of its model over several samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.patches.torch import TorchDispatchMode, pytree
from coreml_delegate.runtime.diagnosis import is_beyond_int32, ratio_db, signals_and_errors

_BEST = 5

MIN_CLASSES = 5
"""Least number of elements of a row that counts as class scores."""

_UNIT: Final = 1074  # the smallest positive number is 2**-1074
_BITS: Final = 53  # of a significand
_HALF: Final = 26
_CHUNK: Final = 1 << 24  # numbers added at once: half of the number that fp64 adds exactly
_LOWEST: Final = -1073  # exponent of the smallest positive number by frexp


@dataclass(slots=True)
class ExactSum:
    """The sum of all numbers added so far, without rounding; equal sums compare equal.

    It does not depend on the order of addition. A finite fp64 number is an integer multiple of
    2**-1074, so a sum is one integer in this unit. Numbers of an array are first added per
    exponent: significands of 53 bits are split into halves, of which fp64 adds 2**26 exactly.

    Attributes:
        units: The sum of the finite numbers, in units of 2**-1074.
        broken: The sum of infinities and NaN; 0 without them.
    """

    units: int = 0
    broken: float = 0.0

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Add fp64 numbers of any shape."""
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


@dataclass(slots=True)
class Hits:
    """Counts of labelled rows, and of rows with a high score of the right class.

    Attributes:
        rows: Number of rows.
        first: Number of rows in which the right class has the best score.
        in_5: Number of rows in which the right class is among the five best.
    """

    rows: int = 0
    first: int = 0
    in_5: int = 0

    @property
    def top1(self) -> float | None:
        """Share of rows in which the right class is first, 0 to 1; None without rows."""
        return self.first / self.rows if self.rows else None

    @property
    def top5(self) -> float | None:
        """Share of rows in which the right class is among the five best; None without rows."""
        return self.in_5 / self.rows if self.rows else None

    def add(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Count rows of ``scores`` [rows, classes]; ``labels`` [rows] are the right classes."""
        self.rows += labels.numel()
        self.first += int((scores.argmax(-1) == labels).sum())
        self.in_5 += _among_best(scores, labels)


@dataclass(slots=True)
class Accuracy:
    """Comparison of one output, accumulated over samples.

    The result does not depend on the order of samples or on how they are split: energies are exact
    sums of squares in fp64, and the other attributes are maxima and counts.

    Attributes:
        signal: Energy of the expected values.
        noise: Energy of the differences; not finite if only one of two values is finite.
        max_abs_error: Largest absolute difference, 0 between two NaN.
        elements: Number of elements.
        nan: Number of elements that are NaN in both outputs.
        infinite: Number of elements that are the same infinity in both outputs.
        compared: Number of elements that are neither NaN, nor 0, nor the same infinity in both
            outputs; only these distinguish a right program from a program that loses its numbers.
        rows: Number of compared rows of class scores.
        agreeing: Number of rows in which both outputs have the largest value at the same index.
        long_rows: Number of rows of more than five classes.
        agreeing_in_5: Number of long rows in which the model's first class is among the program's
            five best.
        hits: The program's hits in labelled rows.
        model_hits: The model's hits in labelled rows.
        beyond_int32: The op at which the model's integers exceed int32, in a sample with differing
            outputs; None without such an op.
    """

    signal: ExactSum = field(default_factory=ExactSum)
    noise: ExactSum = field(default_factory=ExactSum)
    max_abs_error: float = 0.0
    elements: int = 0
    nan: int = 0
    infinite: int = 0
    compared: int = 0
    rows: int = 0
    agreeing: int = 0
    long_rows: int = 0
    agreeing_in_5: int = 0
    hits: Hits = field(default_factory=Hits)
    model_hits: Hits = field(default_factory=Hits)
    beyond_int32: str | None = None

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation-noise ratio in dB; see ``ratio_db``."""
        return ratio_db(float(self.signal), float(self.noise))

    @property
    def is_compared(self) -> bool:
        """Whether a value was compared, or the places of infinities among zeros, as in a mask."""
        is_mask = not self.nan and 0 < self.infinite < self.elements
        return self.compared > 0 or is_mask

    @property
    def top1_agreement(self) -> float | None:
        """Share of rows that agree on the class, 0 to 1; None for outputs without classes."""
        return self.agreeing / self.rows if self.rows else None

    @property
    def top5_agreement(self) -> float | None:
        """Share of long rows with the class in the program's five best; None without long rows."""
        return self.agreeing_in_5 / self.long_rows if self.long_rows else None

    def add(
        self,
        expected: torch.Tensor | None,
        actual: torch.Tensor | None,
        beyond_int32: str | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        """Compare one sample.

        Args:
            expected: Output of the model, any shape and dtype; None equals only None.
            actual: Output of the program, of the same shape, or ``[1]`` for a scalar.
            beyond_int32: The op that ``Int32Watch`` found while ``expected`` was computed.
            labels: The right class of each row, [rows], integers; None if unknown. Ignored unless
                the output has class scores of as many rows.

        Raises:
            ProgramError: The shapes differ.
        """
        if expected is None and actual is None:
            return
        if expected is None or actual is None:
            raise ProgramError(
                "program and model give outputs of different kinds",
                got=_kind(actual),
                expected=_kind(expected),
            )
        if expected.numel() != actual.numel() or (
            expected.dim() and expected.shape != actual.shape
        ):
            raise ProgramError(
                "program and model give outputs of different shapes",
                got=str(list(actual.shape)),
                expected=str(list(expected.shape)),
            )
        want, got = expected.double().reshape(-1), actual.double().reshape(-1)
        signals, error = signals_and_errors(want, got)
        worst = float(error.abs().max()) if error.numel() else 0.0
        self.max_abs_error = max(self.max_abs_error, math.inf if math.isnan(worst) else worst)
        self.elements += want.numel()
        nan, zero = want.isnan() & got.isnan(), (want == 0) & (got == 0)
        infinite = want.isinf() & (want == got)
        self.nan += int(nan.sum())
        self.infinite += int(infinite.sum())
        self.compared += int((~(nan | zero | infinite)).sum())
        self.signal.add(signals.square().numpy())
        self.noise.add(error.square().numpy())
        if worst:
            self.beyond_int32 = self.beyond_int32 or beyond_int32
        if is_class_scores(expected):
            self._add_classes(expected, actual.reshape(expected.shape), labels)

    def _add_classes(
        self, expected: torch.Tensor, actual: torch.Tensor, labels: torch.Tensor | None
    ) -> None:
        classes = expected.shape[-1]
        model_scores, scores = expected.reshape(-1, classes), actual.reshape(-1, classes)
        first = model_scores.argmax(-1)
        self.rows += first.numel()
        self.agreeing += int((first == scores.argmax(-1)).sum())
        if classes > _BEST:
            self.long_rows += first.numel()
            self.agreeing_in_5 += _among_best(scores, first)
        if labels is not None and labels.numel() == first.numel():
            _check_labels(labels, classes)
            self.hits.add(scores, labels)
            self.model_hits.add(model_scores, labels)


def _among_best(scores: torch.Tensor, classes: torch.Tensor) -> int:
    """Return the number of rows in which fewer than five scores exceed the score of the class."""
    own = scores.gather(-1, classes[:, None])
    return int((((scores > own).sum(-1) < _BEST) & ~own[:, 0].isnan()).sum())


def _check_labels(labels: torch.Tensor, classes: int) -> None:
    worst = labels[(labels < 0) | (labels >= classes)]
    if worst.numel():
        raise InputError(
            "a label is no class of the model",
            got=str(int(worst[0])),
            expected=f"0 to {classes - 1}",
        )


def _kind(output: torch.Tensor | None) -> str:
    return "None" if output is None else f"a tensor or number of shape {list(output.shape)}"


def is_class_scores(tensor: torch.Tensor) -> bool:
    """Whether a tensor looks like scores of classes: floating point, [classes] or [N, classes]."""
    return (
        tensor.dtype.is_floating_point
        and tensor.dim() in (1, 2)
        and tensor.shape[-1] >= MIN_CLASSES
        and tensor.numel() > 0
    )


class Int32Watch(TorchDispatchMode):
    """Watches a running model for integers beyond int32, which Core ML cannot represent.

    It sees only the results of control flow ops, not the ops in their branches and loops.

    Attributes:
        first: Name of the first op that returns such an integer, or None.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the op and check its results."""
        results = func(*args, **(kwargs or {}))
        if self.first is None and any(map(is_beyond_int32, pytree.tree_leaves(results))):
            self.first = str(func)
        return results
