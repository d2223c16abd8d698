"""Where a program loses its numbers: the first NaN, the first overflow, the largest errors.

The program runs twice on the reference engine: once as it is, once with fp32 for every fp16 and
int64 for every int32. The second run takes the first one's path through the control flow and draws
the same random numbers, so that each value has its counterpart and the difference is rounding and
overflow alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coreml_delegate.runtime.engines.base import Array, EngineOptions, State
from coreml_delegate.runtime.engines.reference import REFERENCE, ReferenceFunction
from coreml_delegate.runtime.engines.reference.interpreter import Operands
from coreml_delegate.runtime.mil.location import Location
from coreml_delegate.runtime.mil.program import Constant, Function
from coreml_delegate.runtime.mil.widening import widened, widened_array
from coreml_delegate.runtime.tracing import TracedValue, trace

MIN_SQNR_DB = 20.0
"""Below this ratio of signal to error a value has fewer than four right bits."""


class Fault(enum.Enum):
    """What is wrong with a value."""

    NAN = "NaN"
    OVERFLOW = "infinite, and finite in fp32"
    INFINITE = "infinite, in fp32 as well"
    BEYOND_INT32 = "beyond int32"
    INACCURATE = "inaccurate"


@dataclass(frozen=True, slots=True)
class ValueReport:
    """One value of the program against the same value computed in fp32, or in int64.

    Integers are reported where they leave int32: ``max_abs`` is what int64 makes of them.

    Attributes:
        name: The output's name in the program.
        op_type: MIL op type.
        location: Where the op stands.
        turns: Number of the turn in every loop around the op, outermost first, from 0.
        result: Dtype and shape.
        inputs: Dtype and shape of every operand by parameter name; short ones by value.
        nan: Elements that are NaN.
        infinite: Elements that are infinite.
        max_abs: Largest finite magnitude, 0 if there is none.
        sqnr_db: Signal to error in dB: inf for equal values, -inf where one is finite and the other
            is not.
        fault: What is wrong, or None. NaN, and infinities that fp32 has as well, are faults only
            where no operand has them already.
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
    """Every floating-point value of one run, and integers at fault, in the order of execution.

    Attributes:
        function: Name of the function.
        values: One report per value; an op in a loop has one per turn.
        outputs: What the program computes, by feature name.
    """

    function: str
    values: tuple[ValueReport, ...]
    outputs: Mapping[str, Array]

    @property
    def first_bad(self) -> ValueReport | None:
        """The first value with a fault; infinities that fp32 has as well are none of the format's.

        Masks are written as such infinities, and are no fault of the program.
        """
        return next((v for v in self.values if v.fault not in (None, Fault.INFINITE)), None)

    def first(self, fault: Fault) -> ValueReport | None:
        """The first value with this fault."""
        return next((value for value in self.values if value.fault is fault), None)

    def worst(self, count: int) -> list[ValueReport]:
        """The values of largest error, one turn of an op each, worst first."""
        by_place: dict[tuple[Location, str], ValueReport] = {}
        for value in self.values:
            key = value.location, value.name
            if key not in by_place or value.sqnr_db < by_place[key].sqnr_db:
                by_place[key] = value
        return sorted(by_place.values(), key=lambda value: value.sqnr_db)[:count]

    def __str__(self) -> str:
        bad = self.first_bad
        return f"{self.function}: {bad if bad else f'{len(self.values)} values, none of them bad'}"


def diagnose(
    function: Function,
    compiled: ReferenceFunction,
    inputs: Mapping[str, Array],
    *,
    state: State | None = None,
    min_sqnr_db: float = MIN_SQNR_DB,
) -> Diagnosis:
    """Compare every value of a run with the same value computed in fp32 and int64.

    Holds every intermediate value of one run at a time in memory.

    Args:
        function: The function.
        compiled: The same, compiled.
        inputs: By feature name, of the dtypes of the MIL parameters.
        state: Of any engine; read, and left as it is.
        min_sqnr_db: A value below it, in dB, is inaccurate.

    Raises:
        InputError: The state is not one of this function.
        ExecutionError: An op failed.
    """
    values: list[TracedValue] = []
    path: list[bool] = []

    def record(taken: bool) -> bool:
        path.append(taken)
        return taken

    with torch.random.fork_rng(devices=[]):  # the second run begins where this one did
        outputs = trace(function, compiled, inputs, values.append, state=state, decide=record)
    wide = widened(function)
    comparison = _Comparison(values, min_sqnr_db)
    follow = iter(path)
    trace(
        wide,
        REFERENCE.compile(wide, EngineOptions()),
        {name: widened_array(array) for name, array in inputs.items()},
        comparison.compare,
        state=state,
        decide=lambda _: next(follow),
    )
    return Diagnosis(function.name, tuple(comparison.reports), outputs)


class _Comparison:
    """Takes the values of the fp32 run as they come and lets go of their counterparts."""

    def __init__(self, values: list[TracedValue], min_sqnr_db: float) -> None:
        self._values = values[::-1]
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
            self.reports.append(self._report(narrow, actual.double(), expected.double()))

    def _report(self, value: TracedValue, actual: Tensor, expected: Tensor) -> ValueReport:
        finite = actual.isfinite()
        sqnr = sqnr_db(expected, actual)
        return ValueReport(
            name=value.name,
            op_type=value.op_type,
            location=value.location,
            turns=value.turns,
            result=str(value.declared),
            inputs=value.inputs,
            nan=int(actual.isnan().sum()),
            infinite=int(actual.isinf().sum()),
            max_abs=float(actual[finite].abs().max()) if finite.any() else 0.0,
            sqnr_db=sqnr,
            fault=self._fault(value, actual, expected, sqnr),
        )

    def _fault(
        self, value: TracedValue, actual: Tensor, expected: Tensor, sqnr: float
    ) -> Fault | None:
        operands = value.computed.operands
        if actual.isnan().any():
            return None if _any(operands, torch.isnan, np.isnan) else Fault.NAN
        if (actual.isinf() & expected.isfinite()).any():
            return Fault.OVERFLOW
        if actual.isinf().any():
            return None if _any(operands, torch.isinf, np.isinf) else Fault.INFINITE
        return Fault.INACCURATE if sqnr < self._least else None


def sqnr_db(expected: Tensor, actual: Tensor) -> float:
    """Signal to error in dB, over all elements.

    Args:
        expected: Any shape, fp64.
        actual: Of the same shape, fp64.

    Returns:
        inf for equal values (equal infinities and NaNs included), -inf where one is finite and the
        other is not, or where there is an error and no signal.
    """
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    error = torch.where(equal, 0.0, expected - actual)
    noise = float(error.square().sum())
    if noise == 0:
        return math.inf
    signal = float(torch.where(equal & ~expected.isfinite(), 0.0, expected).square().sum())
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _any(
    operands: Operands, in_tensor: Callable[[Tensor], Tensor], in_array: Callable[[Array], Any]
) -> bool:
    """Whether any floating-point operand has an element of a kind."""
    for value in (value for values in operands.values() for value in values):
        data = value.data if isinstance(value, Constant) else None
        found = False
        if isinstance(value, Tensor) and value.is_floating_point():
            found = bool(in_tensor(value).any())
        elif isinstance(data, np.ndarray) and data.dtype.kind == "f":
            found = bool(in_array(data).any())
        if found:
            return True
    return False


_INT32 = torch.iinfo(torch.int32)


def _leaves_int32(narrow: TracedValue, wide: TracedValue) -> bool:
    """Whether integers are beyond int32, and those that they are computed from are not."""
    if narrow.tensor is None or narrow.tensor.dtype is not torch.int32:
        return False
    operands = (v for values in wide.computed.operands.values() for v in values)
    return is_beyond_int32(wide.tensor) and not any(map(is_beyond_int32, operands))


def is_beyond_int32(value: object) -> bool:
    """Whether a tensor holds integers that int32, the widest integer of Core ML, does not."""
    if not isinstance(value, Tensor) or value.dtype is not torch.int64 or not value.numel():
        return False
    low, high = torch.aminmax(value)
    return int(low) < _INT32.min or int(high) > _INT32.max


def _wrapped(narrow: TracedValue, wide: TracedValue) -> ValueReport:
    """The report on int32 values that have wrapped around."""
    expected, actual = (v.tensor.double() for v in (wide, narrow) if v.tensor is not None)
    return ValueReport(
        name=narrow.name,
        op_type=narrow.op_type,
        location=narrow.location,
        turns=narrow.turns,
        result=str(narrow.declared),
        inputs=narrow.inputs,
        nan=0,
        infinite=0,
        max_abs=float(expected.abs().max()),
        sqnr_db=sqnr_db(expected, actual),
        fault=Fault.BEYOND_INT32,
    )
