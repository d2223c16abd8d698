"""ExecuTorch's Inspector, for programs whose delegates have several outputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from executorch.devtools import Inspector as _Inspector
from executorch.devtools import parse_etrecord

from coreml_delegate.errors import ProgramError
from coreml_delegate.runtime.op_errors import first_line

# Warnings about missing values, which the caller did not request, and about Inspector's own code.
_NO_NEWS = ("Output Buffer not found", "Unsupported kwarg encountered", "The given buffer is not w")


class Inspector(_Inspector):
    """``executorch.devtools.Inspector`` that can compare values of delegates with several outputs.

    ExecuTorch 1.5 assumes that every op of a delegate has as many outputs as the delegate, and then
    fails with ``IndexError``. Here an op has one output. ExecuTorch also fails if a graph has the
    ``id`` of a freed graph. No issue is known for either.

    Args:
        args: Arguments of ExecuTorch's Inspector.
        kwargs: Arguments of ExecuTorch's Inspector.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            for message in _NO_NEWS:
                warnings.filterwarnings("ignore", message=message)
            super().__init__(*args, **kwargs)
        for block in self.event_blocks:
            for event in block.events:
                if event.delegate_debug_identifier is not None:
                    event.num_outputs = 1
        if self._etrecord is not None:
            _keep_exported_ancestors(self._etrecord)


def _keep_exported_ancestors(record: Any) -> None:
    """Reduce the ancestors of each edge node to its node in the exported graph.

    ExecuTorch identifies an ancestor by its name and the ``id`` of its graph. Lowering frees
    graphs, whose ids later graphs reuse; the exported graph lives until the record is created.
    """
    if record.export_graph_id is None or isinstance(record.edge_dialect_program, dict):
        return
    for node in record.edge_dialect_program.graph.nodes:
        sources = node.meta.get("from_node")
        while sources and sources[-1].graph_id != record.export_graph_id:
            sources = sources[-1].from_node
        if sources:
            sources[-1].from_node = []
            node.meta["from_node"] = [sources[-1]]


def read_etrecord(path: Path) -> Any:
    """Read an ETRecord, for ``Inspector``.

    Raises:
        ProgramError: The file cannot be read, or is no ETRecord.
    """
    try:
        record = parse_etrecord(str(path))
    except Exception as error:
        raise ProgramError(
            f"{path} is no ETRecord", got=first_line(error), expected="a file of export --etrecord"
        ) from error
    if isinstance(record.edge_dialect_program, dict):
        raise ProgramError(
            f"{path} has several methods, which ExecuTorch's Inspector does not read",
            got=", ".join(record.edge_dialect_program),
        )
    return record
