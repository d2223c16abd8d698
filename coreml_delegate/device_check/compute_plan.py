"""Core ML's compute plan of a model, on a Mac: the preferred processor of each operation.

Core ML ends the process if it loads an mlpackage in place of a compiled model
(apple/coremltools#2757), so the package is always compiled first.

Source: coremltools 9.0, ``coremltools.models.compute_plan``.
"""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coreml_delegate.device_check.records import Consequence, Finding
from coreml_delegate.errors import EngineUnavailableError, ProgramError
from coreml_delegate.options.compile_options import ComputeUnit
from coreml_delegate.patches.third_party import coremltools, wrap_errors

_MACOS = "darwin"


class Processor(enum.Enum):
    """A processor of the device."""

    CPU = "CPU"
    GPU = "GPU"
    NEURAL_ENGINE = "neural engine"


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """An operation in a plan.

    Attributes:
        output: Name of its first output; empty if it has none.
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
            remedy="Run the check on a Mac, or leave --compute-plan out",
        )


def compute_plan(package: Path, unit: ComputeUnit | None) -> tuple[PlannedOp, ...]:
    """Return Core ML's plan of a model on this Mac.

    Args:
        package: Path of an mlpackage.
        unit: The processors that may be used; None for all.

    Returns:
        All operations except constants, in the order of functions and execution; nested operations
        follow their parent.

    Raises:
        EngineUnavailableError: This is not a Mac.
        ProgramError: Core ML does not compile the model, or has no plan for it.
    """
    require_macos()
    ct = coremltools()
    from coremltools.models.compute_plan import MLComputePlan

    with wrap_errors("Core ML has no plan of the model", kind=ProgramError):
        compiled = ct.models.utils.compile_model(str(package))
        try:
            name = (unit or ComputeUnit.ALL).name
            plan: Any = MLComputePlan.load_from_path(compiled, ct.ComputeUnit[name])
            program = plan.model_structure.program
            if program is None:
                raise ProgramError("Core ML's plan has no ML Program", got=package.name)
            return tuple(
                planned
                for name, function in program.functions.items()
                for planned in _planned_ops(plan, name, function.block)
            )
        finally:
            shutil.rmtree(compiled, ignore_errors=True)


def _planned_ops(plan: Any, function: str, block: Any) -> Iterator[PlannedOp]:
    for op in block.operations:
        # Names of operators in a compiled model start with the opset: ``ios17.conv``.
        op_type = op.operator_name.rpartition(".")[2]
        if op_type != "const":
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
    """Pair each operation of a plan with the predictions of the rules."""
    leaving = [
        finding
        for finding in findings
        if finding.rule.consequence is Consequence.LEAVES_NEURAL_ENGINE
        and set(finding.details.delegate.split(", ")) & set(delegate.split(", "))
    ]
    return [
        ComparedOp(op, tuple(f.rule.name for f in leaving if _applies_to(f, op))) for op in planned
    ]


def _applies_to(finding: Finding, op: PlannedOp) -> bool:
    """Whether a finding applies to an operation; a finding without ops applies to its function."""
    details = finding.details
    if details.function not in (None, op.function):
        return False
    outputs = {place.name for place in details.places if place.location is not None}
    return op.output in outputs if outputs else True
