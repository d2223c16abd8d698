"""Comparison of a program's outputs with the model's over several samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from coreml_delegate.errors import ProgramError
from coreml_delegate.runtime.diagnosis import (
    energy,
    is_beyond_int32,
    ratio_db,
    signal_and_error,
)

MIN_CLASSES = 5
"""The fewest elements in a row for its largest to be taken for a class."""


@dataclass(slots=True)
class Accuracy:
    """Comparison of one output, accumulated over samples.

    Attributes:
        signal: Energy of the expected values.
        noise: Energy of the differences; not finite once one of two values is not.
        max_abs_error: Largest absolute difference, 0 between values that both are NaN.
        nan: Number of elements that are NaN in both.
        rows: Number of rows of class scores compared.
        agreeing: Number of rows in which both have the largest value at the same place.
        beyond_int32: The op at which the model's integers leave int32, in a sample whose outputs
            differ; None if there is none.
    """

    signal: float = 0.0
    noise: float = 0.0
    max_abs_error: float = 0.0
    nan: int = 0
    rows: int = 0
    agreeing: int = 0
    beyond_int32: str | None = None

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation-noise ratio in dB; see ``ratio_db``."""
        return ratio_db(self.signal, self.noise)

    @property
    def top1_agreement(self) -> float | None:
        """Share of rows that agree on the class, 0 to 1; None for outputs without classes."""
        return self.agreeing / self.rows if self.rows else None

    def add(
        self,
        expected: torch.Tensor | None,
        actual: torch.Tensor | None,
        beyond_int32: str | None = None,
    ) -> None:
        """Compare one sample.

        Args:
            expected: Output of the model, any shape and dtype; None equals None only.
            actual: Output of the program, same shape, except that ``[1]`` may stand for a scalar.
            beyond_int32: The op that ``Int32Watch`` found while ``expected`` was computed.

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
        signal, error = signal_and_error(want, got)
        worst = float(error.abs().max()) if error.numel() else 0.0
        self.max_abs_error = max(self.max_abs_error, math.inf if math.isnan(worst) else worst)
        self.nan += int((want.isnan() & got.isnan()).sum())
        self.signal += signal
        self.noise += energy(error)
        if worst:
            self.beyond_int32 = self.beyond_int32 or beyond_int32
        if is_class_scores(expected):
            agree = expected.argmax(-1) == actual.reshape(expected.shape).argmax(-1)
            self.rows += agree.numel()
            self.agreeing += int(agree.sum())


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

    Attributes:
        first: Name of the first op that returns one, or None.
    """

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
