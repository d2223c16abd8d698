"""Rules on types: types that the neural engine does not support, and overflow in fp16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView, operands, tensors
from coreml_delegate.device_check.records import (
    Consequence,
    Details,
    Evidence,
    Place,
    Rewrite,
    Rule,
    each_function,
    obstacle_to_leaving,
    view_details,
)
from coreml_delegate.formats.text import decibels
from coreml_delegate.mil.passes.for_devices import ATTENTIONS, visible_rows_as_factor
from coreml_delegate.partition.grouping.moved_calls import moved_calls
from coreml_delegate.runtime.diagnosis import Fault, ValueReport
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Op, Ref
from coreml_delegate.runtime.precision import Operation, PrecisionMeasurement, describe_auto
from coreml_delegate.targets import ComputeUnit, Device

LARGEST_FP16 = 65504.0
"""The largest finite number of fp16."""

HEADROOM = 0.5
"""The fraction of ``LARGEST_FP16`` from which a magnitude is a risk: doubled, it overflows."""

_LISTED_OPS = 3  # in a remedy or a place
_CAST = "cast"
_SUPPORTED = frozenset({DType.FP16, DType.INT8, DType.INT16, DType.UINT8, DType.UINT16})
# Ops on states, which compute no value.
_STATE_OPS = frozenset({"coreml_update_state", "read_state", "write_state"})


def _computes_only_fp32(view: FunctionView) -> bool:
    types = view.function.computed_in()
    return DType.FP32 in types and DType.FP16 not in types


def _fp32_programs(evidence: Evidence) -> Iterator[Details]:
    for view in (view for model in evidence.models for view in model.views):
        if not _computes_only_fp32(view):
            continue
        got = f"{view.function.computed_in()[DType.FP32]} results in fp32, none in fp16"
        function, remedy = view.function.name, None
        runs = [
            diagnosis
            for delegate, diagnosis in evidence.diagnoses
            if delegate in view.delegate.split(", ") and diagnosis.function == function
        ]
        if runs:
            large = list(_beyond_fp16(view, (value for run in runs for value in run.values)))
            got += f"; on the data {len(large) or 'none'} of them near or beyond what fp16 holds"
            listed = ", ".join(map(str, large[:_LISTED_OPS]))
            more = f" and {len(large) - _LISTED_OPS} more" if len(large) > _LISTED_OPS else ""
            exceptions = f", and keep {listed}{more} in fp32 (keep_fp32)" if large else ""
            remedy = f"Lower in fp16 (--precision float16){exceptions}"
        # Without places: the finding applies to the whole function.
        yield Details(view.delegate, function, got, remedy=remedy)


def _beyond_fp16(view: FunctionView, values: Iterable[ValueReport]) -> Iterator[Place]:
    """Yield the places of fp32 values near or beyond the range of fp16."""
    large = {
        (value.location, value.name): value
        for value in values
        if value.result.startswith(DType.FP32.label)
        and not value.max_abs < HEADROOM * LARGEST_FP16
        and not (value.nan or value.infinite)
    }
    for _, value in sorted(large.items()):
        yield _place_of(view, value)


def _units_in_vain(evidence: Evidence) -> Iterator[Details]:
    for model in evidence.models:
        units = {use.delegate: use.compute_unit for use in model.uses}
        for view in model.views:
            for delegate in view.delegate.split(", "):
                unit = units[delegate]
                if unit is ComputeUnit.CPU_AND_NE and _computes_only_fp32(view):
                    yield Details(delegate, view.function.name, f"{unit.value} and fp32")


def _islands(view: FunctionView) -> Iterator[Details]:
    if _computes_only_fp32(view):
        return
    inside = [
        op
        for op in view.ops
        if op.type != _CAST and any(kind.dtype is DType.FP32 for _, kind in tensors(op.outputs))
    ]
    for island in _connected(view, inside):
        kinds = Counter(op.type for op in island)
        listed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        places = (Place.of(view, op) for op in island)
        yield view_details(view, f"{len(island)} in fp32: {listed}", places)


def _connected(view: FunctionView, ops: Iterable[Op]) -> Iterator[list[Op]]:
    """Yield the connected components of ops, in the order of their first ops."""
    position = {op: number for number, op in enumerate(ops)}
    group: dict[Op, list[Op]] = {}
    for op in position:
        group[op] = [op]
        for binding in operands(op):
            producer = view.producers.get(binding.name) if isinstance(binding, Ref) else None
            if producer in group and group[producer] is not group[op]:
                joined = group[producer] + group[op]
                group.update(dict.fromkeys(joined, joined))
    seen: set[int] = set()
    for op in position:
        if id(group[op]) not in seen:
            seen.add(id(group[op]))
            yield sorted(group[op], key=position.__getitem__)


def _other_types(view: FunctionView) -> Iterator[Details]:
    """Yield the ops that compute in unsupported integers or bools, one finding per type."""
    by_dtype: dict[DType, list[Op]] = {}
    for op in view.ops:
        if op.type == _CAST or op.type in _STATE_OPS:
            continue
        kinds = [kind.dtype for _, kind in tensors(op.outputs)]
        if kinds and not any(kind in _SUPPORTED or kind.is_float for kind in kinds):
            by_dtype.setdefault(kinds[0], []).append(op)
    for dtype, ops in by_dtype.items():
        kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(op.type for op in ops).most_common())
        yield view_details(view, f"{dtype.label}: {kinds}", (Place.of(view, op) for op in ops))


_ROW_CHOICE: Final = {
    "greater": "cast",
    "cast": "reduce_max",
    "reduce_max": "less_equal",
    "less_equal": "select",
}
"""Op -> the op that reads it, in ``select(max(float(mask > -inf)) <= 0, 0, attention)``."""


def _obstacle_to_other_types(view: FunctionView, op: Op) -> str | None:
    """Return why an op stays: it may not leave, and no rewrite replaces it with its attention."""
    return None if _hides_rows(view, op) else obstacle_to_leaving(view, op)


def _hides_rows(view: FunctionView, op: Op) -> bool:
    """Whether an op computes which rows of an attention a mask hides."""
    while op.type in _ROW_CHOICE:
        readers = [
            reader
            for reader in view.users.get(op.outputs[0].name, ())
            if reader.type == _ROW_CHOICE[op.type]
        ]
        if len(readers) != 1:
            return False
        (op,) = readers
    operand = next(iter(op.inputs.get("b", ())), None) if op.type == "select" else None
    producer = view.producers.get(operand.name) if isinstance(operand, Ref) else None
    return producer is not None and producer.type in ATTENTIONS


def _overflows(evidence: Evidence) -> Iterator[Details]:
    def grade(value: ValueReport) -> str | None:
        if value.fault is Fault.OVERFLOW:
            return f"infinite ({value.infinite} elements), and finite in fp32"
        share = value.max_abs / LARGEST_FP16
        if value.infinite or not HEADROOM <= share <= 1:
            return None
        return f"{value.max_abs:.4g}, {share:.0%} of the largest fp16"

    yield from _values(evidence, grade)


def _underflows(evidence: Evidence) -> Iterator[Details]:
    def grade(value: ValueReport) -> str | None:
        if value.fault is not Fault.UNDERFLOW:
            return None
        return f"SQNR {value.sqnr_db:.1f} dB, largest {value.max_abs:.4g}"

    yield from _values(evidence, grade)


def _inexact_outputs(evidence: Evidence) -> Iterator[Details]:
    """Yield a finding for each method whose outputs miss the target on the user's data."""
    views = _views(evidence)
    for program in evidence.measurements:
        measurement = program.measurement
        if measurement.holds:
            continue
        operations = measurement.islands if measurement.is_reached else _lossiest(measurement)
        numbers = {operation.delegate for operation in operations}
        names = [name for n, name in enumerate(program.delegates) if not numbers or n in numbers]
        name, ratio = min(measurement.before_db.items(), key=lambda item: item[1])
        yield Details(
            ", ".join(names),
            None,
            f"{decibels(ratio)} at output {name!r}, less than {measurement.target_db:g} dB",
            tuple(_place_of_operation(views, program.delegates, o) for o in operations),
            remedy=_gain(measurement),
        )


def _lossiest(measurement: PrecisionMeasurement) -> list[Operation]:
    """Return the operations that lose most, in order of the program."""
    by_loss = sorted(measurement.lossy, key=lambda operation: operation.sqnr_db)[:_LISTED_OPS]
    return [operation for operation in measurement.lossy if operation in by_loss]


def _gain(measurement: PrecisionMeasurement) -> str:
    """Return the remedy for outputs that miss the target, with the ratio that it reaches."""
    if not measurement.is_reached:
        after = decibels(measurement.worst_after_db)
        return f"Lower in fp32 (--precision float32); precision auto reaches {after} only"
    description = describe_auto(len(measurement.islands), measurement.worst_after_db)
    return f"Lower with --precision auto, which {description}"


def _place_of_operation(
    views: Mapping[str, Sequence[FunctionView]], delegates: Sequence[str], operation: Operation
) -> Place:
    for view in views.get(delegates[operation.delegate], ()):
        op = view.producers.get(operation.name)
        if op is not None and op.type == operation.op_type:
            return Place.of(view, op)
    return Place(operation.op_type, operation.name)


def _views(evidence: Evidence) -> dict[str, list[FunctionView]]:
    """Return the functions of each delegate, by its name."""
    views: dict[str, list[FunctionView]] = {}
    for view in (view for model in evidence.models for view in model.views):
        for name in view.delegate.split(", "):
            views.setdefault(name, []).append(view)
    return views


def _values(evidence: Evidence, grade: Callable[[ValueReport], str | None]) -> Iterator[Details]:
    """Yield one finding per op: its worst value over all runs and loop iterations."""
    views = {
        (name, view.function.name): view for name, own in _views(evidence).items() for view in own
    }
    worst: dict[tuple[str, str], tuple[ValueReport, str, str]] = {}
    for delegate, diagnosis in evidence.diagnoses:
        for value in diagnosis.values:
            got = grade(value) if value.result.startswith(DType.FP16.label) else None
            key = delegate, f"{value.location} {value.name}"
            if got is None or (key in worst and not _is_worse(value, worst[key][0])):
                continue
            worst[key] = value, got, diagnosis.function
    for (delegate, _), (value, got, function) in sorted(
        worst.items(), key=lambda item: (item[0][0], item[1][0].location)
    ):
        place = _place_of(views.get((delegate, function)), value)
        yield Details(delegate, function, got, (place,))


def _is_worse(value: ValueReport, than: ValueReport) -> bool:
    if value.fault is Fault.OVERFLOW or than.fault is Fault.OVERFLOW:
        return than.fault is not Fault.OVERFLOW
    if value.fault is Fault.UNDERFLOW:
        return value.sqnr_db < than.sqnr_db
    return value.max_abs > than.max_abs


def _place_of(view: FunctionView | None, value: ValueReport) -> Place:
    module = None
    if view is not None:
        ops = (op for op, location in view.locations.items() if location == value.location)
        module = next((view.module_of(op) for op in ops), None)
    return Place(value.op_type, value.name, value.location, module)


RULES = (
    Rule(
        name="fp32-program",
        finds="a program that computes in fp32",
        reason="A model typed float 16 can run on the neural engine, GPU and CPU, one typed "
        "float 32 on GPU and CPU.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Lower in fp16 (--precision float16), with keep_fp32 for the ops that need fp32",
        sources=(sources.TYPED_EXECUTION,),
        examine=_fp32_programs,
    ),
    Rule(
        name="unit-in-vain",
        finds=f"compute unit {ComputeUnit.CPU_AND_NE.value} for a program in fp32",
        reason="CPU_AND_NE leaves the GPU out, and a model typed float 32 does not run on the "
        "neural engine: only the CPU is left.",
        consequence=Consequence.SLOWER,
        remedy="Lower in fp16 (--precision float16), or for --compute-unit all",
        sources=(sources.COMPUTE_UNITS, sources.TYPED_EXECUTION),
        examine=_units_in_vain,
    ),
    Rule(
        name="fp32-island",
        finds="ops in fp32 in a program that computes in fp16",
        reason="The neural engine cannot execute fp32 operations: they run on the GPU or the CPU, "
        "with a transfer before and after.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Leave them out of keep_fp32 if trace shows that fp16 holds their values, or scale "
        "the values",
        sources=(sources.AUTHORING_RULES,),
        examine=each_function(_islands),
    ),
    Rule(
        name="unsupported-type",
        finds="ops that compute in types other than fp16 and integers of 8 and 16 bits",
        reason="The neural engine supports fp16, int8 and int16; ops that it cannot run are "
        "executed elsewhere, with a transfer before and after.",
        consequence=Consequence.LEAVES_NEURAL_ENGINE,
        remedy="Compute indices and masks before the model and pass them in, or have them as "
        "constants",
        sources=(sources.AUTHORING_RULES,),
        examine=each_function(_other_types),
        rewrite=Rewrite(
            (Device.NEURAL_ENGINE,),
            (moved_calls, visible_rows_as_factor),
            "with the attention whose rows a mask hides; others if ExecuTorch has a kernel and it "
            "splits no partition",
            _obstacle_to_other_types,
        ),
    ),
    Rule(
        name="fp16-accuracy",
        finds="outputs that fp16 computes less exactly on your data than --min-sqnr",
        reason="The documented workflow compares a float 16 typed model with the source model on "
        "example inputs, and converts it to float 32 if the accuracy is not sufficient.",
        consequence=Consequence.LESS_EXACT,
        remedy="Lower with --precision auto, which keeps in fp32 the operations that need it",
        sources=(sources.TYPED_EXECUTION,),
        examine=_inexact_outputs,
        neural_engine=False,
    ),
    Rule(
        name="fp16-overflow",
        finds="values on your data near or beyond the largest number of fp16",
        reason="The neural engine appears to use fp16 for everything; a value beyond 65504 "
        f"becomes infinite there. Found from {HEADROOM:.0%} of it on.",
        consequence=Consequence.LESS_EXACT,
        remedy="Scale the values down before the op, or keep the op in fp32 (--precision auto, or "
        "keep_fp32)",
        sources=(sources.SIXTEEN_BIT,),
        examine=_overflows,
        neural_engine=False,
    ),
    Rule(
        name="fp16-underflow",
        finds="values on your data that are too small for fp16",
        reason="The neural engine appears to use fp16 for everything; very small numbers become 0.",
        consequence=Consequence.LESS_EXACT,
        remedy="Scale the values up before the op, or keep the op in fp32 (--precision auto, or "
        "keep_fp32)",
        sources=(sources.SIXTEEN_BIT,),
        examine=_underflows,
        neural_engine=False,
    ),
)
