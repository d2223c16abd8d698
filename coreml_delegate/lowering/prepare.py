"""Rewrites of a subgraph that coremltools needs before it converts.

The record of an op has its rewrite, if Core ML can express the op, but coremltools translates it
wrongly or not in this form.

Tensors cross the boundary of a delegate in their own dtype. The device runtime, as the runtime of
this project, casts them to and from the dtype of the model's features: fp64 to fp32, integers of 8
and 16 bits to int32. A model has fp16 features from iOS16 on, which take fp16 tensors in place;
before, they are fp32. Inside, such floats do not occur, and such integers are only moved, or cast:
casts wrap values around as in PyTorch.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``multiarray`` conversion, and ``prepareArgs`` of
``ETCoreMLModel``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.symbols import declare_sizes
from coreml_delegate.lowering.states import make_states
from coreml_delegate.opaque_ops.control_flow import PROTECTED, read_branches, write_branches
from coreml_delegate.opaque_ops.recorded_compression import unite_recorded_weights
from coreml_delegate.ops import record_of
from coreml_delegate.ops.boundary import is_row_major
from coreml_delegate.ops.call import BOUNDARY, CAST, NARROW, OpCall, target_name, unwrap_edge_op
from coreml_delegate.ops.constants import mark_stored
from coreml_delegate.ops.edits import ATEN, become, insert, unite_copies, value_of
from coreml_delegate.ops.high_rank import has_high_rank, merge_dimensions
from coreml_delegate.ops.record import OpRecord
from coreml_delegate.targets import STATE_WIDTH, Device, Opset

_HALF_OPSET = Opset.iOS16
"""First opset whose models have fp16 features."""

_DOUBLE = frozenset({torch.float64})
_UNDECLARED = BOUNDARY


def prepare(program: ExportedProgram, target: Opset | None, device: Device | None = None) -> None:
    """Rewrite ``program`` in place, without a change of its results.

    Args:
        program: A subgraph.
        target: Opset to convert to, or None for the oldest.
        device: The device that it is shaped for, or None.

    Raises:
        ContractError: See ``make_states``.
    """
    unite_copies(program)
    unite_recorded_weights(program.graph)
    make_states(program, STATE_WIDTH if device is Device.NEURAL_ENGINE else 1)
    mark_stored(program)
    declare_sizes(program)
    _merge_dimensions(program)
    for node in list(program.graph.nodes):
        record = _record(node)
        if record is not None and record.rewrite is not None:
            record.rewrite(node)
        if unwrap_edge_op(node.target) in PROTECTED:
            _prepare_branches(node, target)
    _retype_floats(program, _UNDECLARED if (target or Opset.iOS15) < _HALF_OPSET else _DOUBLE)
    _set_row_major_strides(program)
    _widen_integers(program)
    # A rewrite may replace the only used result of an op, and leave the op without users.
    program.graph.eliminate_dead_code()
    results: Any = program.graph.output_node().args[0]
    outputs = [node for node in dict.fromkeys(results) if isinstance(node, Node)]
    _separate_outputs(outputs)
    program.graph_module.recompile()


def _prepare_branches(node: Node, target: Opset | None) -> None:
    """Rewrite the branches of a control flow call."""
    text, *arguments = node.args
    branches = read_branches(str(text))
    for branch in branches:
        prepare(branch, target)
        _leave_edge_dialect(branch)
    node.args = (write_branches(branches), *arguments)


def _leave_edge_dialect(branch: ExportedProgram) -> None:
    """Replace edge ops by their ATen overloads: ``torch.export.save`` writes only those."""
    for node in branch.graph.nodes:
        if node.op == "call_function":
            node.target = unwrap_edge_op(node.target)
    branch.graph_module.recompile()


def _merge_dimensions(program: ExportedProgram) -> None:
    """Rewrite calls on tensors of more than five dimensions."""
    for node in list(program.graph.nodes):
        record = _record(node)
        if record is not None and record.merge is not None and has_high_rank(OpCall.of(node)):
            merge_dimensions(node, record.merge)
    program.graph.eliminate_dead_code()


def _record(node: Node) -> OpRecord | None:
    return record_of(target_name(node.target)) if node.op == "call_function" else None


def _separate_outputs(outputs: Collection[Node]) -> None:
    """Insert an identity before each output that would have the name of another feature."""
    named = {node for node in outputs if not _casts_to_half(node) and not _may_be_skipped(node)}
    for output in outputs:
        if output in named:
            continue
        is_half, source = _casts_to_half(output), output.all_input_nodes[0]
        while _may_be_skipped(source):
            source = source.all_input_nodes[0]
        if source in named or (source.op != "call_function" and not is_half):
            _add_identity(output)
        named.add(source)


def _casts_to_half(node: Node) -> bool:
    """Return whether an output is a cast to fp16, which coremltools does not skip.

    In a program in fp16 its value is the value of its argument, so that two such outputs of one
    argument would share a name.
    """
    is_cast = node.op == "call_function" and target_name(node.target) == CAST
    return is_cast and value_of(node).dtype is torch.float16


def _may_be_skipped(node: Node) -> bool:
    """Return whether coremltools may translate the node to its argument, because values are equal.

    The output would then have the name of the argument, and two features would share a name.
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


def _add_identity(node: Node) -> None:
    """Insert an identity after the node that coremltools translates to a named op."""
    dims = value_of(node).dim()
    call = insert(node, node.target, *node.args, **node.kwargs)
    if dims:
        become(node, ATEN.permute_copy.default, call, list(range(dims)))
    else:
        become(node, ATEN.view_copy.default, call, [])


# Dtypes and strides at the boundary


def _retype_floats(program: ExportedProgram, dtypes: Collection[torch.dtype]) -> None:
    """Turn inputs of other float dtypes, and casts to such outputs, into fp32.

    The rules allow these dtypes nowhere else in a subgraph.

    Args:
        program: The subgraph; it is changed.
        dtypes: The dtypes that a model's features cannot have.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
            continue
        if node.op == "placeholder" and node.name in inputs:
            node.meta["val"] = value.to(torch.float32)
        elif node.op == "call_function" and target_name(node.target) == CAST:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            node.meta["val"] = value.to(torch.float32)


def _set_row_major_strides(program: ExportedProgram) -> None:
    """Give row-major inputs the strides of a contiguous tensor.

    Coremltools reads the dim order, which may look transposed if a dimension has size 1.
    """
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in inputs and isinstance(value, torch.Tensor) and is_row_major(value):
            node.meta["val"] = value.new_empty(value.shape)


def _widen_integers(program: ExportedProgram) -> None:
    """Turn integers of 8 and 16 bits into int32; the rules only allow to move and cast them."""
    for node in list(program.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
            continue
        if node.op == "call_function" and target_name(node.target) == CAST:
            _wrap_around(node, node.args[0], torch.iinfo(value.dtype))
        node.meta["val"] = value.to(torch.int32)


def _wrap_around(node: Node, source: Node, limits: torch.iinfo) -> None:
    """Cast to int32 and wrap values around to the narrow range."""
    shifted = insert(node, ATEN._to_copy.default, source, dtype=torch.int32)
    count = limits.max - limits.min + 1
    if limits.min:
        shifted = insert(node, ATEN.sub.Tensor, shifted, limits.min)
    wrapped = insert(node, ATEN.remainder.Scalar, shifted, count)
    if limits.min:
        wrapped = insert(node, ATEN.add.Tensor, wrapped, limits.min)
    become(node, ATEN._to_copy.default, wrapped, dtype=torch.int32)
