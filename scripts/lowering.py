"""From a source to a ``.pte``, or to a plan of one, the way every command does it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from executorch.exir import to_edge_transform_and_lower
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument

from coreml_delegate.errors import CoreMLDelegateError, LoweringError
from coreml_delegate.partition import CoreMLPartitioner, DelegationReport
from coreml_delegate.scripts import console
from coreml_delegate.scripts.source import Source


def lower(source: Source, partitioner: CoreMLPartitioner) -> Any:
    """Lower a model; the partitioner keeps the report.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: Our part of the lowering refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    exported = _exported(source)
    with _blaming_executorch("Lowering to Core ML"):
        return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()


def plan(source: Source, partitioner: CoreMLPartitioner) -> DelegationReport:
    """What lowering a model would report.

    Raises:
        CoreMLDelegateError: Our part of the lowering refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    exported = _exported(source)
    with _blaming_executorch("Planning"):
        return partitioner.plan(exported)


def _exported(source: Source) -> ExportedProgram:
    with console.step("Exporting with torch.export"):
        program = source.export()
    _check_outputs(program)
    return program


def _check_outputs(program: ExportedProgram) -> None:
    """Refuse what ExecuTorch cannot emit, of which it says nothing that helps."""
    outputs = [spec.arg for spec in program.graph_signature.output_specs]
    constants = [arg.value for arg in outputs if isinstance(arg, ConstantArgument)]
    if texts := [value for value in constants if isinstance(value, str)]:
        raise LoweringError(
            "the model returns text, which no .pte can",
            got=", ".join(map(repr, texts)),
            expected="tensors, numbers and None",
            remedy="Leave it out of what forward returns",
        )
    if not any(isinstance(arg, TensorArgument) for arg in outputs):
        raise LoweringError(
            "the model returns no tensor, and ExecuTorch lowers no such program",
            got=", ".join(map(repr, constants)) or f"{len(outputs)} outputs",
            expected="a tensor among the outputs, or an input or buffer that is written",
        )


@contextmanager
def _blaming_executorch(step: str) -> Generator[None]:
    try:
        with console.step(step), console.captured():
            yield
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise LoweringError(
            "ExecuTorch cannot lower the model", got=console.first_line(error)
        ) from error
