"""Comparison of a program's outputs with the model's over several samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.runtime.diagnosis import is_beyond_int32, ratio_db, signals_and_errors
from coreml_delegate.runtime.exact_sums import ExactSum

_BEST = 5

MIN_CLASSES = 5
"""The fewest elements in a row for its largest to be taken for a class."""


@dataclass(slots=True)
class Hits:
    """Rows whose class is known, and how often it is scored best.

    Attributes:
        rows: Number of rows.
        first: Number of those in which the right class is first.
        in_5: Number of those in which it is among the five best.
    """

    rows: int = 0
    first: int = 0
    in_5: int = 0

    @property
    def top1(self) -> float | None:
        """Share of rows whose right class is first, 0 to 1; None without rows."""
        return self.first / self.rows if self.rows else None

    @property
    def top5(self) -> float | None:
        """Share of rows whose right class is among the five best; None without rows."""
        return self.in_5 / self.rows if self.rows else None

    def add(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Count rows.

        Args:
            scores: [rows, classes].
            labels: [rows], classes.
        """
        self.rows += labels.numel()
        self.first += int((scores.argmax(-1) == labels).sum())
        self.in_5 += _among_best(scores, labels)


@dataclass(slots=True)
class Accuracy:
    """Comparison of one output, accumulated over samples.

    Neither the order of the samples nor how they are cut changes any of it: energies are exact
    sums of squares in fp64, and the others are largest values and counts.

    Attributes:
        signal: Energy of the expected values.
        noise: Energy of the differences; not finite once one of two values is not.
        max_abs_error: Largest absolute difference, 0 between values that both are NaN.
        elements: Number of elements.
        nan: Number of those that are NaN in both.
        compared: Number of those that are neither NaN in both nor 0 in both: they tell a right
            program from one that loses its numbers.
        rows: Number of rows of class scores compared.
        agreeing: Number of rows in which both have the largest value at the same place.
        long_rows: Number of rows of more than five classes.
        agreeing_in_5: Number of those in which the model's first class is among the program's
            five best.
        hits: The program's, in rows whose class is known.
        model_hits: The model's in the same rows.
        beyond_int32: The op at which the model's integers leave int32, in a sample whose outputs
            differ; None if there is none.
    """

    signal: ExactSum = field(default_factory=ExactSum)
    noise: ExactSum = field(default_factory=ExactSum)
    max_abs_error: float = 0.0
    elements: int = 0
    nan: int = 0
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
    def top1_agreement(self) -> float | None:
        """Share of rows that agree on the class, 0 to 1; None for outputs without classes."""
        return self.agreeing / self.rows if self.rows else None

    @property
    def top5_agreement(self) -> float | None:
        """Share of long rows whose class is among the program's five best; None without any."""
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
            expected: Output of the model, any shape and dtype; None equals None only.
            actual: Output of the program, same shape, except that ``[1]`` may stand for a scalar.
            beyond_int32: The op that ``Int32Watch`` found while ``expected`` was computed.
            labels: The right class of each row, [rows], integers; None if they are not known. They
                count for class scores of as many rows.

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
        self.nan += int(nan.sum())
        self.compared += int((~(nan | zero)).sum())
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
        wanted, given = expected.reshape(-1, classes), actual.reshape(-1, classes)
        first = wanted.argmax(-1)
        self.rows += first.numel()
        self.agreeing += int((first == given.argmax(-1)).sum())
        if classes > _BEST:
            self.long_rows += first.numel()
            self.agreeing_in_5 += _among_best(given, first)
        if labels is not None and labels.numel() == first.numel():
            _check_labels(labels, classes)
            self.hits.add(given, labels)
            self.model_hits.add(wanted, labels)


def _among_best(scores: torch.Tensor, classes: torch.Tensor) -> int:
    """Return in how many rows fewer than five scores are above that of the row's class."""
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

    Of control flow it sees the results, not what is computed on the way.

    Attributes:
        first: Name of the first op that returns one, or None.
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
