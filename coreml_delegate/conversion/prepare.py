"""Rewrites of a subgraph that make it palatable to coremltools, before it converts.

The rewrite of an op stands in its record: where Core ML has the op, perhaps as several, and
coremltools translates it wrongly or not in the form it comes in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.conversion import boundary
from coreml_delegate.conversion.states import make_states
from coreml_delegate.dynamic_shapes.symbols import declare_sizes
from coreml_delegate.ops import record_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import mark_stored
from coreml_delegate.ops.edits import ATEN, become, insert, unite_copies, value_of
from coreml_delegate.ops.record import OpRecord


def prepare(program: ExportedProgram) -> None:
    """Rewrite ``program`` in place; what it computes does not change.

    Raises:
        ContractError: See ``make_states``.
    """
    unite_copies(program)
    make_states(program)
    mark_stored(program)
    declare_sizes(program)
    for node in list(program.graph.nodes):
        record = _record(node)
        if record is not None and record.rewrite is not None:
            record.rewrite(node)
    boundary.retype_floats(program)
    boundary.set_row_major_strides(program)
    boundary.widen_integers(program)
    # Of an op with several results, the one that is used may have been computed by itself.
    program.graph.eliminate_dead_code()
    outputs: Any = program.graph.output_node().args[0]
    for output in dict.fromkeys(outputs):
        if isinstance(output, Node) and _may_vanish(output):
            _keep(output)
    program.graph_module.recompile()


def _record(node: Node) -> OpRecord | None:
    return record_of(target_name(node.target)) if node.op == "call_function" else None


def _may_vanish(node: Node) -> bool:
    """Whether the node may return its argument as it is.

    Coremltools then gives the argument's name to the output, and two features bear one name.
    """
    record = _record(node)
    if record is None or not record.moves_data:
        return False
    if not node.args or not isinstance(node.args[0], Node):
        return False
    result, source = node.meta.get("val"), node.args[0].meta.get("val")
    return (
        isinstance(result, torch.Tensor)
        and isinstance(source, torch.Tensor)
        and list(map(str, result.shape)) == list(map(str, source.shape))
    )


def _keep(node: Node) -> None:
    """Put an identity after the node that coremltools does not take for its argument."""
    dims = value_of(node).dim()
    before = insert(node, node.target, *node.args, **node.kwargs)
    if dims:
        become(node, ATEN.permute_copy.default, before, list(range(dims)))
    else:
        become(node, ATEN.view_copy.default, before, [])
