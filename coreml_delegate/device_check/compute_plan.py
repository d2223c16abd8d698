"""Core ML's compute plan of a model: the preferred processor of each operation.

A plan comes from Core ML on this Mac (``compute_plan``) or from a file (``plan_files``).
``match_plan`` finds its operations in a program, ``compare_plan`` adds the rules' predictions, and
``score_rules`` counts hits and misses.

Core ML ends the process if it loads an mlpackage in place of a compiled model
(apple/coremltools#2757), so the package is always compiled first.

Source: coremltools 9.0, ``coremltools.models.compute_plan``.
"""

from __future__ import annotations

import enum
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from coreml_delegate.device_check.functions import is_stored, is_stored_type
from coreml_delegate.device_check.records import (
    NEURAL_ENGINE,
    CheckedModel,
    Consequence,
    Finding,
    place_name,
)
from coreml_delegate.errors import EngineUnavailableError, ProgramError
from coreml_delegate.patches.third_party import coremltools, wrap_errors
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.mil.location import located_ops
from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.targets import ComputeUnit

_MACOS = "darwin"
_LEAST_MATCHED: Final = 0.9
"""Smallest fraction of operations that a plan shares with its program.

Plans that were published have all operations of their models; two sizes of one architecture share
more than half.
"""


class Processor(enum.Enum):
    """A processor of the device."""

    CPU = "CPU"
    GPU = "GPU"
    NEURAL_ENGINE = "neural engine"


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """An operation in a plan.

    Attributes:
        op_type: MIL op type without its opset, for example ``conv``.
        output: Name of its first output; empty if it has none, or if the plan has no names.
        preferred: The processor that Core ML plans to use; None if unknown.
        supported: The processors that support the operation.
        cost: Estimated fraction of the model's work, from 0 to 1; None if unknown.
    """

    function: str
    op_type: str
    output: str
    preferred: Processor | None
    supported: tuple[Processor, ...]
    cost: float | None

    @property
    def leaves_neural_engine(self) -> bool:
        """Whether Core ML plans another processor."""
        return self.preferred not in (None, Processor.NEURAL_ENGINE)


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """Core ML's plan of a model on one device.

    Attributes:
        operations: All operations except constants and their decompression, in the order of
            functions and execution; nested operations follow their parent.
        compute_unit: The processors that Core ML was allowed to use; None if unknown.
        device: Name of the device or its processor; empty if unknown.
        system: The operating system and its version; empty if unknown.
    """

    operations: tuple[PlannedOp, ...]
    compute_unit: ComputeUnit | None = None
    device: str = ""
    system: str = ""


def require_macos() -> None:
    """Check that this is a Mac.

    Raises:
        EngineUnavailableError: This is not a Mac.
    """
    if sys.platform != _MACOS:
        raise EngineUnavailableError(
            "only Core ML itself has compute plans",
            got=sys.platform,
            expected="macOS 14.4 or later",
            remedy="Run the check on a Mac, or read a Mac's plan with --against",
        )


def compute_plan(package: Path, unit: ComputeUnit | None) -> ComputePlan:
    """Return Core ML's plan of a model on this Mac.

    Args:
        package: Path of an mlpackage.
        unit: The processors that may be used; None for all.

    Raises:
        EngineUnavailableError: This is not a Mac.
        ProgramError: Core ML does not compile the model, or has no plan for it.
    """
    require_macos()
    ct = coremltools()
    from coremltools.models.compute_plan import MLComputePlan

    unit = unit or ComputeUnit.ALL
    with wrap_errors("Core ML has no plan of the model", kind=ProgramError):
        compiled = ct.models.utils.compile_model(str(package))
        try:
            plan: Any = MLComputePlan.load_from_path(compiled, ct.ComputeUnit[unit.name])
            program = plan.model_structure.program
            if program is None:
                raise ProgramError("Core ML's plan has no ML Program", got=package.name)
            operations = tuple(
                planned
                for name, function in program.functions.items()
                for planned in _planned_ops(plan, name, function.block)
            )
        finally:
            shutil.rmtree(compiled, ignore_errors=True)
    return ComputePlan(
        operations, unit, machine.processor() or "", f"macOS {platform.mac_ver()[0]}".strip()
    )


def _planned_ops(plan: Any, function: str, block: Any) -> Iterator[PlannedOp]:
    for op in block.operations:
        op_type = type_of_operator(op.operator_name)
        if not is_stored_type(op_type):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            cost = plan.get_estimated_cost_for_mlprogram_operation(op)
            yield PlannedOp(
                function,
                op_type,
                op.outputs[0].name if op.outputs else "",
                None if usage is None else _processor(usage.preferred_compute_device),
                () if usage is None else tuple(map(_processor, usage.supported_compute_devices)),
                None if cost is None else float(cost.weight),
            )
        for nested in op.blocks:
            yield from _planned_ops(plan, function, nested)


def type_of_operator(name: str) -> str:
    """Return the MIL op type of an operator in a compiled model: ``conv`` for ``ios17.conv``."""
    return name.rpartition(".")[2]


def _processor(device: Any) -> Processor:
    from coremltools.models import compute_device

    kinds = (
        (compute_device.MLCPUComputeDevice, Processor.CPU),
        (compute_device.MLGPUComputeDevice, Processor.GPU),
        (compute_device.MLNeuralEngineComputeDevice, Processor.NEURAL_ENGINE),
    )
    for kind, processor in kinds:
        if isinstance(device, kind):
            return processor
    raise ProgramError("Core ML plans for an unknown processor", got=type(device).__name__)


@dataclass(frozen=True, slots=True)
class MatchedPlan:
    """A plan with its operations found in a program.

    Attributes:
        plan: The plan; its matched operations have the program's names.
        model: The program.
        matched: Number of matched operations.
        in_program: Number of operations of the program.
    """

    plan: ComputePlan
    model: CheckedModel
    matched: int
    in_program: int


def match_plan(plan: ComputePlan, models: Sequence[CheckedModel]) -> MatchedPlan:
    """Find the model of a plan, and the plan's operations in it.

    Operations are equal by function, type and name of the first output. Operations without a name
    are matched by their order, type by type, if the plan has as many of a type as the program.

    Args:
        plan: The plan of one model.
        models: The models of a program, at least one; the one with the most matches is taken.
    """
    return max((_match(plan, model) for model in models), key=lambda match: match.matched)


def require_same_model(match: MatchedPlan) -> None:
    """Check that a plan from elsewhere is of the model, and for the neural engine.

    Raises:
        ProgramError: It is of another model, or its compute unit excludes the neural engine.
    """
    unit, planned = match.plan.compute_unit, len(match.plan.operations)
    if match.matched < _LEAST_MATCHED * max(planned, match.in_program):
        raise ProgramError(
            "the plan is of another model",
            got=f"{planned - match.matched} of its {planned} operations did not match",
            expected=f"the {match.in_program} operations of {match.model.name}",
            remedy="Pass the plan of exactly this program",
        )
    if unit is not None and unit not in NEURAL_ENGINE:
        raise ProgramError(
            "the plan excludes the neural engine, which the rules are about",
            got=f"compute unit {unit.value}",
            expected=f"{ComputeUnit.ALL.value} or {ComputeUnit.CPU_AND_NE.value}",
        )


def _match(plan: ComputePlan, model: CheckedModel) -> MatchedPlan:
    """Match a plan with a model: operations by name, nameless operations by order."""
    in_program = list(_operations(model.program))
    remaining = Counter(in_program)
    names: dict[int, str] = {}
    nameless: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(plan.operations):
        key = (op.function, op.op_type, op.output)
        if not op.output:
            nameless.setdefault(key[:2], []).append(index)
        elif remaining[key]:
            remaining[key] -= 1
            names[index] = op.output
    unnamed: dict[tuple[str, str], list[str]] = {}
    for function, op_type, name in remaining.elements():
        unnamed.setdefault((function, op_type), []).append(name)
    for kind, indices in nameless.items():
        candidates = unnamed.get(kind, [])
        if len(candidates) == len(indices):
            names.update(zip(indices, candidates, strict=True))
    operations = tuple(
        replace(op, output=names.get(index, op.output)) for index, op in enumerate(plan.operations)
    )
    return MatchedPlan(replace(plan, operations=operations), model, len(names), len(in_program))


def _operations(program: Program) -> Iterator[tuple[str, str, str]]:
    """Yield function, type and name of each operation, in the order of a plan."""
    for name, function in program.functions.items():
        for _, op in located_ops(function):
            if not is_stored(op):
                yield name, op.type, place_name(op)


@dataclass(frozen=True, slots=True)
class ComparedOp:
    """An operation in a plan, with the rules' predictions.

    Attributes:
        predicted: Names of the rules that predict that it leaves the neural engine.
    """

    planned: PlannedOp
    predicted: tuple[str, ...]


def compare_plan(
    planned: Sequence[PlannedOp], findings: Sequence[Finding], delegate: str
) -> list[ComparedOp]:
    """Pair each operation of a plan with the predictions of the rules.

    A finding without operations applies to all operations of its function.
    """
    leaving = [
        (finding, {place.name for place in finding.details.places if place.location is not None})
        for finding in findings
        if finding.rule.consequence is Consequence.LEAVES_NEURAL_ENGINE
        and set(finding.details.delegate.split(", ")) & set(delegate.split(", "))
    ]

    def rules_about(op: PlannedOp) -> Iterator[str]:
        for finding, outputs in leaving:
            is_in_function = finding.details.function in (None, op.function)
            if is_in_function and (not outputs or op.output in outputs):
                yield finding.rule.name

    return [ComparedOp(op, tuple(dict.fromkeys(rules_about(op)))) for op in planned]


@dataclass(frozen=True, slots=True)
class RuleScore:
    """Predictions of one rule beside a plan; operations without a preferred processor do not count.

    Attributes:
        rule: Name of the rule; None for the operations that no rule predicts.
        hits: Operations that run on another processor than the neural engine.
        unsupported: Hits that the neural engine does not support; others it could run.
        misses: Operations that run on the neural engine; without a rule they are no misses.
    """

    rule: str | None
    hits: int
    unsupported: int
    misses: int


def score_rules(compared: Sequence[ComparedOp]) -> list[RuleScore]:
    """Count hits and misses of each rule that predicts anything; the last entry is for no rule."""
    rules = dict.fromkeys(rule for op in compared for rule in op.predicted)
    scores = [_score(rule, (op for op in compared if rule in op.predicted)) for rule in rules]
    return [*scores, _score(None, (op for op in compared if not op.predicted))]


def _score(rule: str | None, compared: Iterable[ComparedOp]) -> RuleScore:
    planned = [op.planned for op in compared if op.planned.preferred is not None]
    hits = [op for op in planned if op.leaves_neural_engine]
    unsupported = sum(Processor.NEURAL_ENGINE not in op.supported for op in hits)
    return RuleScore(rule, len(hits), unsupported, len(planned) - len(hits))
