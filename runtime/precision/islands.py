"""The operations of a program in fp16 that have to compute in fp32, found by measurement.

The program runs on the reference engine with every operation in fp32, and with some operations in
fp32 and the others in fp16 (``mil.mixed_precision``), as coremltools would make it. The search
returns a set of operations in fp32, the *islands*, with which every output reaches a ratio of
signal to error, and none of which can return to fp16.

Where fp16 loses numbers is measured once per operation, on operands from fp32. Candidates are the
operations that lose most, then the operations that compute their operands, step by step: the sine
of a large angle is lost already by the product before it.

Bisection finds how many of the candidates suffice, worst first. From these, groups of operations
return to fp16, the most work first, as long as the target is reached; the groups halve after a
failure and double after a success. This takes about ``2 * k * log2(n / k)`` runs for ``k`` islands
among ``n`` candidates if ``k`` is small, and ``n`` runs if it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.precision.runs import (
    Loss,
    MeasuredProgram,
    Method,
    Runs,
    Sample,
    SingleModel,
    worst,
)
from coreml_delegate.runtime.program.ptd import Sources
from coreml_delegate.runtime.program.pte import Source


@dataclass(frozen=True, slots=True)
class Operation:
    """The operations of a call of the model, or of several fused calls.

    Attributes:
        op_type: MIL op type of the operation that loses most.
        name: Name of its value.
        handles: Debug handles of the calls; empty if unknown.
        flops: Estimated floating-point operations.
        fp16: The element with the largest error, computed in fp16 from rounded operands.
        fp32: The same element, computed in fp32.
        sqnr_db: Ratio of signal to error of the operation's value on operands from fp32, in dB.
        without_db: Ratio of the worst output if only this island computes in fp16, in dB; nan for
            other operations, and if the search ended before.
        delegate: Number of the program's Core ML delegate that has it.
    """

    op_type: str
    name: str
    handles: tuple[int, ...]
    flops: int
    fp16: float
    fp32: float
    sqnr_db: float
    without_db: float
    delegate: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionMeasurement:
    """Accuracy of a program in fp16, and of the program with islands in fp32.

    Attributes:
        target_db: The ratio that every output has to reach.
        before_db: Ratio of signal to error of each output in fp16, in dB, by name. Integers and
            booleans have inf if all are equal, otherwise -inf.
        after_db: The same with ``islands`` in fp32; with all operations in fp32 if not even that
            reaches the target.
        islands: The operations that have to compute in fp32, in order of the program.
        lossy: The operations whose own values miss the target, in order of the program.
        is_minimal: Whether the target is missed without any one of the islands. False if the search
            ended before that was known, or if nothing reaches the target.
        flops: Estimated floating-point operations of the program's delegates.
    """

    target_db: float
    before_db: Mapping[str, float]
    after_db: Mapping[str, float]
    islands: tuple[Operation, ...]
    lossy: tuple[Operation, ...]
    is_minimal: bool
    flops: int

    @property
    def holds(self) -> bool:
        """Whether fp16 reaches the target without islands."""
        return worst(self.before_db) >= self.target_db

    @property
    def is_reached(self) -> bool:
        """Whether the program with islands reaches the target."""
        return worst(self.after_db) >= self.target_db

    @property
    def worst_after_db(self) -> float:
        """The ratio of the worst output with islands."""
        return worst(self.after_db)


def measure_method(
    source: Source,
    samples: Sequence[Sample],
    *,
    method: str = "forward",
    data: Sources | None = None,
    min_sqnr_db: float,
    search: bool = True,
) -> PrecisionMeasurement:
    """Measure a method of a ``.pte`` whose Core ML delegates compute in fp16.

    Args:
        source: Path of the ``.pte``, or its bytes.
        samples: Inputs, each flattened like the inputs of the method. Every sample starts from the
            initial states.
        method: Name of the method.
        data: See ``load_program``.
        min_sqnr_db: The ratio that every output has to reach.
        search: Whether to search for islands if fp16 misses the target.

    Raises:
        CoreMLDelegateError: The program does not run on the reference engine and the Python host,
            or refuses a sample.
    """
    measurements = Measurements(Method(source, data, method), samples)
    return measurements.measure(min_sqnr_db, search=search)


def measure_model(
    model: Model,
    samples: Sequence[Sample],
    *,
    min_sqnr_db: float,
    search: bool = True,
) -> PrecisionMeasurement:
    """Measure a Core ML model that computes in fp16.

    Args:
        model: The model, on the reference engine.
        samples: Arrays or tensors in the order of the model's inputs.
        min_sqnr_db: See ``measure_method``.
        search: See ``measure_method``.

    Raises:
        CoreMLDelegateError: See ``measure_method``.
    """
    measurements = Measurements(SingleModel(model, {}), samples)
    return measurements.measure(min_sqnr_db, search=search)


class Measurements:
    """Measurements of a program for one or more targets; no set of operations runs twice.

    Args:
        program: The program.
        samples: See ``measure_method``.
    """

    def __init__(self, program: MeasuredProgram, samples: Sequence[Sample]) -> None:
        self._runs = Runs(program, samples)

    @cached_property
    def _losses(self) -> list[Loss]:
        return self._runs.losses()

    def measure(self, min_sqnr_db: float, *, search: bool = True) -> PrecisionMeasurement:
        """Measure the program, and search for islands if fp16 misses the target.

        Args:
            min_sqnr_db: The ratio that every output has to reach.
            search: Whether to search.

        Raises:
            CoreMLDelegateError: See ``measure_method``.
        """
        runs = self._runs
        before = runs.accuracy(frozenset())
        if worst(before) >= min_sqnr_db or not search:
            holds = worst(before) >= min_sqnr_db
            return PrecisionMeasurement(min_sqnr_db, before, before, (), (), holds, runs.flops)
        losses = self._losses
        chosen, is_minimal = _Search(runs, losses, min_sqnr_db).islands()
        operations = [_operation(runs, losses, unit, chosen) for unit in range(len(runs.units))]
        everything = frozenset(range(len(runs.units)))
        return PrecisionMeasurement(
            min_sqnr_db,
            before,
            runs.accuracy(chosen or everything),
            tuple(operations[unit] for unit in sorted(chosen)),
            tuple(o for o in operations if o.sqnr_db < min_sqnr_db),
            is_minimal,
            runs.flops,
        )


def _operation(runs: Runs, losses: Sequence[Loss], unit: int, chosen: frozenset[int]) -> Operation:
    record, loss = runs.units[unit], losses[unit]
    op = record.ops[-1] if loss.op is None else loss.op
    without = runs.known.get(chosen - {unit}) if unit in chosen else None
    return Operation(
        op.type,
        op.outputs[0].name,
        record.handles,
        record.flops,
        loss.fp16,
        loss.fp32,
        loss.sqnr_db,
        math.nan if without is None else worst(without),
        record.delegate,
    )


# The search


class _OutOfRunsError(Exception):
    """The search has no runs left."""


class _Search:
    """A search for the units of a program that have to compute in fp32."""

    def __init__(self, runs: Runs, losses: Sequence[Loss], min_sqnr_db: float) -> None:
        self._runs = runs
        self._losses = losses
        self._target = min_sqnr_db
        self._limit = runs.count + runs.allowed
        self._best: frozenset[int] = frozenset()

    def islands(self) -> tuple[frozenset[int], bool]:
        """Return units to compute in fp32, and whether none of them can return to fp16.

        Without any units, no set reaches the target.
        """
        try:
            sets = _candidates(self._runs, self._losses, self._target)
            candidates = next(filter(self._suffices, sets), None)
            if candidates is None:
                return frozenset(), False
            by_loss = sorted(candidates, key=lambda unit: (self._losses[unit].sqnr_db, unit))
            candidates = frozenset(by_loss[: _shortest_prefix(self._suffices, by_loss)])
            chosen = _reduce(self._suffices, sorted(candidates, key=self._costly_first))
            # A unit was tried in a larger set, and the errors of two units may cancel.
            for unit in sorted(chosen, key=self._costly_first):
                if self._suffices(chosen - {unit}):
                    chosen -= {unit}
        except _OutOfRunsError:
            return self._best, False
        return chosen, True

    def _costly_first(self, unit: int) -> tuple[int, int]:
        return -self._runs.units[unit].flops, unit

    def _suffices(self, units: Iterable[int]) -> bool:
        """Whether the program reaches the target with these units in fp32."""
        chosen = frozenset(units)
        if self._runs.count >= self._limit and chosen not in self._runs.known:
            raise _OutOfRunsError
        if worst(self._runs.accuracy(chosen)) < self._target:
            return False
        if not self._best or len(chosen) < len(self._best):
            self._best = chosen
        return True


def _candidates(runs: Runs, losses: Sequence[Loss], min_sqnr_db: float) -> Iterable[frozenset[int]]:
    """Yield ever larger sets of units that may have to compute in fp32."""
    reached = {unit for unit, loss in enumerate(losses) if loss.sqnr_db < min_sqnr_db}
    border = reached
    while border:
        yield frozenset(reached)
        border = {source for unit in border for source in runs.units[unit].sources} - reached
        reached = reached | border
    by_loss = sorted(range(len(losses)), key=lambda unit: (losses[unit].sqnr_db, unit))
    size = 1
    while size < len(losses):
        yield frozenset({*reached, *by_loss[:size]})
        size *= 2
    yield frozenset(range(len(losses)))


def _shortest_prefix(suffices: Callable[[Iterable[int]], bool], units: Sequence[int]) -> int:
    """Return the length of a prefix that suffices, by bisection; ``units`` suffice."""
    low, high = 0, len(units)
    while low < high:
        middle = (low + high) // 2
        if suffices(units[:middle]):
            high = middle
        else:
            low = middle + 1
    return high


def _reduce(suffices: Callable[[Iterable[int]], bool], units: Sequence[int]) -> frozenset[int]:
    """Return a part of ``units`` that suffices, from which no unit could be removed in its turn.

    Half of the units are removed at once. If the rest does not suffice, half as many are tried, and
    after a success twice as many.
    """
    remaining, size, start = frozenset(units), max(len(units) // 2, 1), 0
    while start < len(units):
        removed = units[start : start + size]
        if suffices(remaining - frozenset(removed)):
            remaining -= frozenset(removed)
            start += len(removed)
            size *= 2
        elif len(removed) == 1:
            start += 1
            size = 1
        else:
            size = len(removed) // 2
    return remaining
