"""From a source to a ``.pte``, the way every command does it."""

from __future__ import annotations

from typing import Any

from executorch.exir import to_edge_transform_and_lower

from coreml_delegate.errors import CoreMLDelegateError, LoweringError
from coreml_delegate.partition import CoreMLPartitioner
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
    with console.step("Exporting with torch.export"):
        exported = source.export()
    try:
        with console.step("Lowering to Core ML"), console.captured():
            return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise LoweringError(
            "ExecuTorch cannot lower the model", got=console.first_line(error)
        ) from error
