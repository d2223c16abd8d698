"""From a source to a ``.pte``, or to a plan of one, the way every command does it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from executorch.exir import to_edge_transform_and_lower
from torch.export import ExportedProgram

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
        return source.export()


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
