"""Find where a program loses its numbers: the first NaN, the first overflow, the largest errors.

The program runs twice on the reference engine: once unchanged, and once with fp32 for every fp16,
int64 for every int32, and the original values of constants that fp16 changed, if the model stores
them. The second run takes the same path through control flow and draws the same random numbers, so
that each value has a counterpart, which differs only by rounding and overflow.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coreml_delegate.runtime.engines.base import Array, EngineOptions, State
from coreml_delegate.runtime.engines.reference import REFERENCE, ReferenceFunction
from coreml_delegate.runtime.engines.reference.interpreter import TracedValue
from coreml_delegate.runtime.engines.reference.values import Value
from coreml_delegate.runtime.mil.location import Location
from coreml_delegate.runtime.mil.program import Constant, Function
from coreml_delegate.runtime.mil.widening import has_rounded_constants, widen_array, widen_function

INACCURATE_BELOW_DB = 20.0
"""Ratio of signal to error below which a value has fewer than four right bits."""


class Fault(enum.Enum):
    """The kinds of faults of a value."""

    NAN = "NaN"
    NAN_GIVEN = "NaN, as in an input or a weight"
    OVERFLOW = "infinite, and finite in fp32"
    INFINITE = "infinite, in fp32 as well"
    BEYOND_INT32 = "beyond int32"
    UNDERFLOW = "underflow"
    INACCURATE = "inaccurate"


@dataclass(frozen=True, slots=True)
class ValueReport:
    """Comparison of one value of the program with the same value computed in fp32 or int64.

    Integers are reported only if they exceed int32; their ``max_abs`` is computed in int64.

    Attributes:
        name: The output's name in the program.
        op_type: MIL op type.
        location: Location of the op.
        turns: Index of the iteration of every loop around the op, outermost first, from 0.
        result: Dtype and shape.
        inputs: Dtype and shape of every operand by parameter name; the value of short operands.
        nan: Number of NaN elements.
        infinite: Number of infinite elements.
        max_abs: Largest finite magnitude; nan or inf if no element is finite.
        sqnr_db: Signal to error in dB: inf for equal values (NaN equals NaN); -inf if one value is
            finite and the other is not.
        fault: The fault, or None. NaN, and infinities that fp32 has as well, are faults only of the
            first op that returns them; NaN from inputs and weights is a fault of the op that reads
            it.
    """

    name: str
    op_type: str
    location: Location
    turns: tuple[int, ...]
    result: str
    inputs: Mapping[str, str]
    nan: int
    infinite: int
    max_abs: float
    sqnr_db: float
    fault: Fault | None

    def __str__(self) -> str:
        turns = f" turn {'.'.join(map(str, self.turns))}" if self.turns else ""
        inputs = ", ".join(f"{name}={value}" for name, value in self.inputs.items())
        fault = f"{self.fault.value}; " if self.fault else ""
        broken = "".join(
            f"{count} {what}, "
            for count, what in ((self.nan, "NaN"), (self.infinite, "inf"))
            if count
        )
        return (
            f"{self.op_type} {self.name!r} at {self.location}{turns}: {fault}{broken}"
            f"SQNR {self.sqnr_db:.1f} dB, max {self.max_abs:.4g}; {self.result} of {inputs}"
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every floating-point value of one run, and faulty integers, in order of execution.

    Attributes:
        function: Name of the function.
        values: One report per value; an op in a loop has one per iteration.
        outputs: Outputs of the program, by feature name.
        has_rounded_constants: Whether both runs use constants rounded to fp16, because the model
            does not store the original values. Then no report includes the error of this rounding.
    """

    function: str
    values: tuple[ValueReport, ...]
    outputs: Mapping[str, Array]
    has_rounded_constants: bool = False

    @property
    def first_bad(self) -> ValueReport | None:
        """The first value with a fault, except infinities that fp32 has as well, as in masks."""
        return next((v for v in self.values if v.fault not in (None, Fault.INFINITE)), None)

    def first(self, fault: Fault) -> ValueReport | None:
        """Return the first value with this fault."""
        return next((value for value in self.values if value.fault is fault), None)

    def worst(self, count: int) -> list[ValueReport]:
        """Return the values with the largest errors, one iteration of each op, worst first."""
        by_location: dict[tuple[Location, str], ValueReport] = {}
        for value in self.values:
            key = value.location, value.name
            if key not in by_location or value.sqnr_db < by_location[key].sqnr_db:
                by_location[key] = value
        return sorted(by_location.values(), key=lambda value: value.sqnr_db)[:count]

    def __str__(self) -> str:
        bad = self.first_bad
        return f"{self.function}: {bad if bad else f'{len(self.values)} values, none of them bad'}"


def diagnose(
    function: Function,
    compiled: ReferenceFunction,
    inputs: Mapping[str, Array],
    *,
    state: State | None = None,
    min_sqnr_db: float = INACCURATE_BELOW_DB,
) -> Diagnosis:
    """Compare every value of a run with the same value computed in fp32 and int64.

    Keeps all intermediate values of one run in memory.

    Args:
        function: The function.
        compiled: The same function, compiled.
        inputs: Arrays by feature name, in the dtypes of the MIL parameters.
        state: State of any engine, which is not changed.
        min_sqnr_db: Ratio in dB below which a value is inaccurate.

    Raises:
        InputError: The state does not belong to this function.
        ExecutionError: An op failed.
    """
    values: list[TracedValue] = []
    path: list[bool] = []

    def record(condition: bool) -> bool:
        path.append(condition)
        return condition

    with torch.random.fork_rng(devices=[]):  # both runs start from the same generator state
        outputs = compiled.run(
            inputs, compiled.copy_state(state), listener=values.append, decide=record
        )
    wide = widen_function(function)
    comparison = _Comparison(values, _inputs_and_constants(function), min_sqnr_db)
    follow = iter(path)
    widened = REFERENCE.compile(wide, EngineOptions())
    widened.run(
        {name: widen_array(array) for name, array in inputs.items()},
        widened.copy_state(state),
        listener=comparison.compare,
        decide=lambda _: next(follow),
    )
    return Diagnosis(
        function.name, tuple(comparison.reports), outputs, has_rounded_constants(function)
    )


class _Comparison:
    """Compares each value of the widened run when it is computed, and frees its counterpart."""

    def __init__(
        self, values: list[TracedValue], sources: Collection[str], min_sqnr_db: float
    ) -> None:
        self._values = values[::-1]
        self._sources = sources
        self._least = min_sqnr_db
        self.reports: list[ValueReport] = []

    def compare(self, wide: TracedValue) -> None:
        narrow = self._values.pop()
        if _leaves_int32(narrow, wide):
            self.reports.append(_wrapped(narrow, wide))
        expected, actual = wide.tensor, narrow.tensor
        if expected is None or actual is None or not actual.is_floating_point():
            return
        if expected.shape == actual.shape:
            self.reports.append(self._report(narrow, actual, expected.double()))

    def _report(self, value: TracedValue, narrow: Tensor, expected: Tensor) -> ValueReport:
        actual = narrow.double()
        signal, error = signal_and_error(expected, actual)
        sqnr = ratio_db(signal, energy(error))
        return _value_report(
            value,
            nan=int(actual.isnan().sum()),
            infinite=int(actual.isinf().sum()),
            max_abs=_largest(actual),
            sqnr_db=sqnr,
            fault=self._fault(value, actual, expected)
            if not actual.isfinite().all()
            else _loss(narrow.dtype, signal, error, self._least),
        )

    def _fault(self, value: TracedValue, actual: Tensor, expected: Tensor) -> Fault | None:
        """Return the fault of a value that is not finite."""
        if actual.isnan().any():
            return self._nan(value)
        if (actual.isinf() & expected.isfinite()).any():
            return Fault.OVERFLOW
        is_passed_on = any(
            _any(operands, torch.isinf, np.isinf) for operands in value.operands.values()
        )
        return None if is_passed_on else Fault.INFINITE

    def _nan(self, value: TracedValue) -> Fault | None:
        """Return the fault of NaN that is new, or from inputs or weights; None if passed on."""
        sources = [
            name
            for name, operands in value.operands.items()
            if _any(operands, torch.isnan, np.isnan)
        ]
        if not sources:
            return Fault.NAN
        bindings = (binding for name in sources for binding in value.op.inputs.get(name, ()))
        is_source = all(isinstance(b, Constant) or b.name in self._sources for b in bindings)
        return Fault.NAN_GIVEN if is_source else None


def _value_report(value: TracedValue, **measured: Any) -> ValueReport:
    return ValueReport(
        name=value.name,
        op_type=value.op_type,
        location=value.location,
        turns=value.turns,
        result=str(value.declared),
        inputs=value.inputs,
        **measured,
    )


def _inputs_and_constants(function: Function) -> set[str]:
    """Return the names of a function's inputs and constants."""
    constants = (op for op in function.block.walk() if op.type.startswith("const"))
    return {param.name for param in function.params} | {
        output.name for op in constants for output in op.outputs
    }


def _largest(actual: Tensor) -> float:
    """Return the largest finite magnitude; nan or inf if no element is finite."""
    magnitudes = actual.abs()
    finite = magnitudes[magnitudes.isfinite()]
    some = finite if finite.numel() else magnitudes
    return float(some.max()) if some.numel() else 0.0


def _loss(dtype: torch.dtype, signal: float, error: Tensor, min_sqnr_db: float) -> Fault | None:
    """Return the fault of a finite value, or None.

    ``dtype`` is the value's dtype in the program, ``signal`` the energy of the expected value, and
    ``error`` has the error of each element.
    """
    if ratio_db(signal, energy(error)) >= min_sqnr_db:
        return None
    limits = torch.finfo(dtype)
    # The distance between numbers next to zero; smaller errors are underflow.
    step = limits.smallest_normal * limits.eps
    large = error[~(error.abs() <= step)]
    return Fault.UNDERFLOW if ratio_db(signal, energy(large)) >= min_sqnr_db else Fault.INACCURATE


def signal_and_error(expected: Tensor, actual: Tensor) -> tuple[float, Tensor]:
    """Return the energy of the signal and the errors; see ``signals_and_errors``."""
    signals, errors = signals_and_errors(expected, actual)
    return energy(signals), errors


def signals_and_errors(expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signal and the error of each element of fp64 tensors of one shape.

    Both are 0 where both values are NaN, or the same infinity.
    """
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    errors = torch.where(equal, 0.0, expected - actual)
    return torch.where(equal & ~expected.isfinite(), 0.0, expected), errors


def energy(values: Tensor) -> float:
    """Return the sum of the squares."""
    return float(values.square().sum())


def ratio_db(signal: float, noise: float) -> float:
    """Return the ratio of the energies of signal and errors in dB.

    Returns:
        inf for no error; -inf if the error is not finite, or if there is an error and no signal.
    """
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _any(
    operands: Sequence[Value | Constant | None],
    in_tensor: Callable[[Tensor], Tensor],
    in_array: Callable[[Array], Any],
) -> bool:
    """Whether any floating-point operand has an element for which the test is true."""
    for value in operands:
        data = value.data if isinstance(value, Constant) else None
        is_true = False
        if isinstance(value, Tensor) and value.is_floating_point():
            is_true = bool(in_tensor(value).any())
        elif isinstance(data, np.ndarray) and data.dtype.kind == "f":
            is_true = bool(in_array(data).any())
        if is_true:
            return True
    return False


_INT32 = torch.iinfo(torch.int32)


def _leaves_int32(narrow: TracedValue, wide: TracedValue) -> bool:
    """Whether integers exceed int32 although the operands do not."""
    if narrow.tensor is None or narrow.tensor.dtype is not torch.int32:
        return False
    operands = (v for values in wide.operands.values() for v in values)
    return is_beyond_int32(wide.tensor) and not any(map(is_beyond_int32, operands))


def is_beyond_int32(value: object) -> bool:
    """Whether a tensor has integers beyond int32, the widest integer of Core ML."""
    if not isinstance(value, Tensor) or value.dtype is not torch.int64 or not value.numel():
        return False
    low, high = torch.aminmax(value)
    return int(low) < _INT32.min or int(high) > _INT32.max


def _wrapped(narrow: TracedValue, wide: TracedValue) -> ValueReport:
    """Return the report on int32 values that have wrapped around."""
    expected, actual = (v.tensor.double() for v in (wide, narrow) if v.tensor is not None)
    signal, error = signal_and_error(expected, actual)
    return _value_report(
        narrow,
        nan=0,
        infinite=0,
        max_abs=float(expected.abs().max()),
        sqnr_db=ratio_db(signal, energy(error)),
        fault=Fault.BEYOND_INT32,
    )
