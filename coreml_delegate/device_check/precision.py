"""Rules on types: what the neural engine does not compute in, and what fp16 does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from coreml_delegate.compile_options import ComputeUnit
from coreml_delegate.device_check import sources
from coreml_delegate.device_check.functions import FunctionView, operands, tensors
from coreml_delegate.device_check.records import (
    Consequence,
    Evidence,
    Found,
    Place,
    Rule,
    each_function,
)
from coreml_delegate.runtime.diagnosis import Fault, ValueReport
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Op, Ref

LARGEST_FP16 = 65504.0
"""The largest finite number of fp16."""

HEADROOM = 0.5
"""The share of ``LARGEST_FP16`` from which a magnitude is a risk: twice as much overflows."""

_NAMED = 3  # ops that a remedy names
_CAST = "cast"
_SUPPORTED = frozenset({DType.FP16, DType.INT8, DType.INT16, DType.UINT8, DType.UINT16})
# Ops whose result has no value to compute: they keep what they take, or move it.
_STATE_OPS = frozenset({"coreml_update_state", "read_state", "write_state"})


def _computes_only_fp32(view: FunctionView) -> bool:
    types = view.function.computed_in()
    return DType.FP32 in types and DType.FP16 not in types


def _fp32_programs(evidence: Evidence) -> Iterator[Found]:
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
            named = ", ".join(map(str, large[:_NAMED]))
            more = f" and {len(large) - _NAMED} more" if len(large) > _NAMED else ""
            keeping = f", and keep {named}{more} in fp32 (keep_fp32)" if large else ""
            remedy = f"Lower in fp16 (--precision float16){keeping}"
        # It is a matter of the whole function, so that no op of it is the place.
        yield Found(view.delegate, function, got, remedy=remedy)


def _beyond_fp16(view: FunctionView, values: Iterable[ValueReport]) -> Iterator[Place]:
    """Yield the ops whose values in fp32 would overflow in fp16, or nearly so, each once."""
    large = {
        (value.location, value.name): value
        for value in values
        if value.result.startswith(DType.FP32.label)
        and not value.max_abs < HEADROOM * LARGEST_FP16
        and not (value.nan or value.infinite)
    }
    for _, value in sorted(large.items()):
        yield _place(view, value)


def _units_in_vain(evidence: Evidence) -> Iterator[Found]:
    for model in evidence.models:
        units = {use.delegate: use.compute_unit for use in model.uses}
        for view in model.views:
            for delegate in view.delegate.split(", "):
                unit = units[delegate]
                if unit is ComputeUnit.CPU_AND_NE and _computes_only_fp32(view):
                    yield Found(delegate, view.function.name, f"{unit.value} and fp32")


def _islands(view: FunctionView) -> Iterator[Found]:
    if _computes_only_fp32(view):
        return
    inside = [op for op in view.ops if op.type != _CAST and _has_result(op, DType.FP32)]
    for island in _connected(view, inside):
        kinds = Counter(op.type for op in island)
        listed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        places = tuple(Place.of(view, op) for op in island)
        yield Found(view.delegate, view.function.name, f"{len(island)} in fp32: {listed}", places)


def _connected(view: FunctionView, ops: Iterable[Op]) -> Iterator[list[Op]]:
    """Yield groups of ops that pass values to one another, in the order of their first ops."""
    position = {op: number for number, op in enumerate(ops)}
    group: dict[Op, list[Op]] = {}
    for op in position:
        group[op] = [op]
        for binding in operands(op):
            maker = view.makers.get(binding.name) if isinstance(binding, Ref) else None
            if maker in group and group[maker] is not group[op]:
                joined = group[maker] + group[op]
                group.update(dict.fromkeys(joined, joined))
    seen: set[int] = set()
    for op in position:
        if id(group[op]) not in seen:
            seen.add(id(group[op]))
            yield sorted(group[op], key=position.__getitem__)


def _has_result(op: Op, dtype: DType) -> bool:
    return any(kind.dtype is dtype for _, kind in tensors(op.outputs))


def _other_types(view: FunctionView) -> Iterator[Found]:
    """Yield the ops that compute in integers or truth values, one finding for each type."""
    found: dict[DType, list[Op]] = {}
    for op in view.ops:
        if op.type == _CAST or op.type in _STATE_OPS:
            continue
        kinds = [kind.dtype for _, kind in tensors(op.outputs)]
        if kinds and not any(kind in _SUPPORTED or kind.is_float for kind in kinds):
            found.setdefault(kinds[0], []).append(op)
    for dtype, ops in found.items():
        kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(op.type for op in ops).most_common())
        places = tuple(Place.of(view, op) for op in ops)
        yield Found(view.delegate, view.function.name, f"{dtype.label}: {kinds}", places)


def _overflows(evidence: Evidence) -> Iterator[Found]:
    def grade(value: ValueReport) -> str | None:
        if value.fault is Fault.OVERFLOW:
            return f"infinite ({value.infinite} elements), and finite in fp32"
        share = value.max_abs / LARGEST_FP16
        if value.infinite or not HEADROOM <= share <= 1:
            return None
        return f"{value.max_abs:.4g}, {share:.0%} of the largest fp16"

    yield from _values(evidence, grade)


def _underflows(evidence: Evidence) -> Iterator[Found]:
    def grade(value: ValueReport) -> str | None:
        if value.fault is not Fault.UNDERFLOW:
            return None
        return f"SQNR {value.sqnr_db:.1f} dB, largest {value.max_abs:.4g}"

    yield from _values(evidence, grade)


def _values(evidence: Evidence, grade: Callable[[ValueReport], str | None]) -> Iterator[Found]:
    """Yield one finding for each op: its worst value over all runs and turns of loops."""
    modules = {
        (name, view.function.name): view
        for model in evidence.models
        for view in model.views
        for name in view.delegate.split(", ")
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
        place = _place(modules.get((delegate, function)), value)
        yield Found(delegate, function, got, (place,))


def _is_worse(value: ValueReport, than: ValueReport) -> bool:
    if value.fault is Fault.OVERFLOW or than.fault is Fault.OVERFLOW:
        return than.fault is not Fault.OVERFLOW
    if value.fault is Fault.UNDERFLOW:
        return value.sqnr_db < than.sqnr_db
    return value.max_abs > than.max_abs


def _place(view: FunctionView | None, value: ValueReport) -> Place:
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
        remedy="Lower in fp16 (--precision float16), with keep_fp32 for what needs fp32",
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
    ),
    Rule(
        name="fp16-overflow",
        finds="values on your data near or beyond the largest number of fp16",
        reason="The neural engine appears to use fp16 for everything; a value beyond 65504 "
        f"becomes infinite there. Found from {HEADROOM:.0%} of it on.",
        consequence=Consequence.LESS_EXACT,
        remedy="Scale the values down before the op, or keep the op in fp32 (keep_fp32)",
        sources=(sources.SIXTEEN_BIT,),
        examine=_overflows,
        neural_engine=False,
    ),
    Rule(
        name="fp16-underflow",
        finds="values on your data that are too small for fp16",
        reason="The neural engine appears to use fp16 for everything; very small numbers become 0.",
        consequence=Consequence.LESS_EXACT,
        remedy="Scale the values up before the op, or keep the op in fp32 (keep_fp32)",
        sources=(sources.SIXTEEN_BIT,),
        examine=_underflows,
        neural_engine=False,
    ),
)
