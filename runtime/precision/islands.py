"""The operations of a program in fp16 that have to compute in fp32, found by measurement.

The program runs on the reference engine with every operation in fp32, and with some operations in
fp32 and the others in fp16 (``mil.mixed_precision``), as coremltools would make it. The search
returns a set of operations in fp32, the *islands*, with which every output reaches a ratio of
signal to error, and none of which can return to fp16.

Where fp16 loses numbers is measured once per operation, on operands from fp32. Candidates are the
operations that lose most, then the operations that compute their operands, step by step: the sine
of a large angle is lost already by the product before it.

The candidates are reduced by QuickXplain (U. Junker, AAAI 2004), which needs about
``k * log2(n / k)`` runs for ``k`` islands among ``n`` candidates. It prefers operations of less
work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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

MAX_RUNS = 80
"""Most runs of a search; it then returns the smallest set that reaches the target so far."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The operations of one call of the model, or of several calls that are fused.

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
        """Whether fp16 alone reaches the target."""
        return worst(self.before_db) >= self.target_db

    @property
    def is_reached(self) -> bool:
        """Whether the program with islands reaches the target."""
        return worst(self.after_db) >= self.target_db

    @property
    def worst_before_db(self) -> float:
        """The ratio of the worst output in fp16."""
        return worst(self.before_db)

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
    return _measure(Method(source, data, method), samples, min_sqnr_db, search=search)


def measure_model(
    model: Model,
    samples: Sequence[Sample],
    *,
    handles: Mapping[str, Sequence[int]] | None = None,
    min_sqnr_db: float,
    search: bool = True,
) -> PrecisionMeasurement:
    """Measure a Core ML model that computes in fp16.

    Args:
        model: The model, on the reference engine.
        samples: Arrays or tensors in the order of the model's inputs.
        handles: Debug handles of the calls that an operation computes, by its first output.
        min_sqnr_db: See ``measure_method``.
        search: See ``measure_method``.

    Raises:
        CoreMLDelegateError: See ``measure_method``.
    """
    return _measure(SingleModel(model, handles or {}), samples, min_sqnr_db, search=search)


def _measure(
    program: MeasuredProgram, samples: Sequence[Sample], min_sqnr_db: float, *, search: bool
) -> PrecisionMeasurement:
    runs = Runs(program, samples)
    before = runs.accuracy(frozenset())
    if worst(before) >= min_sqnr_db or not search:
        holds = worst(before) >= min_sqnr_db
        return PrecisionMeasurement(min_sqnr_db, before, before, (), (), holds, runs.flops)
    losses = runs.losses()
    chosen, is_minimal = _search(runs, losses, min_sqnr_db)
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


def _search(runs: Runs, losses: Sequence[Loss], min_sqnr_db: float) -> tuple[frozenset[int], bool]:
    """Return units to compute in fp32, and whether none of them can be left out."""
    best: list[frozenset[int]] = []

    def suffices(units: Iterable[int]) -> bool:
        chosen = frozenset(units)
        if runs.count >= MAX_RUNS and chosen not in runs.known:
            raise _OutOfRunsError
        if worst(runs.accuracy(chosen)) < min_sqnr_db:
            return False
        if not best or len(chosen) < len(best[-1]):
            best.append(chosen)
        return True

    try:
        candidates = next(filter(suffices, _candidates(runs, losses, min_sqnr_db)), None)
        if candidates is None:
            return frozenset(), False
        by_work = sorted(candidates, key=lambda unit: (runs.units[unit].flops, unit))
        chosen = _quick_xplain(suffices, (), False, by_work)
        # The errors of two operations may cancel, so the set is checked one by one.
        for unit in sorted(chosen, key=lambda unit: (-runs.units[unit].flops, unit)):
            without = [other for other in chosen if other != unit]
            if suffices(without):
                chosen = without
    except _OutOfRunsError:
        return best[-1] if best else frozenset(), False
    return frozenset(chosen), True


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


def _quick_xplain(
    suffices: Callable[[Iterable[int]], bool],
    background: Sequence[int],
    has_new_background: bool,
    units: Sequence[int],
) -> list[int]:
    """Return a minimal part of ``units`` that suffices together with ``background``."""
    if not units or (has_new_background and suffices(background)):
        return []
    if len(units) == 1:
        return list(units)
    half = len(units) // 2
    first, second = units[:half], units[half:]
    kept = _quick_xplain(suffices, [*background, *first], True, second)
    return [*_quick_xplain(suffices, [*background, *kept], bool(kept), first), *kept]
