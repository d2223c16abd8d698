"""Rewrites for the neural engine of wide layers and of short last axes of a program.

Calls that the rewrites insert at the ends of a program stay on the CPU, by ExecuTorch's kernels.
The program keeps its inputs and outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Node

from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.edits import arguments_of, insert, value_of
from coreml_delegate.patches.torch import with_parts
from coreml_delegate.targets import LARGEST_DIMENSION, PADDING_THAT_COUNTS, padding_of

KeepOnCpu = Callable[[Node, str], None]
"""Marks a call that stays on the CPU, with the reason."""

_ATEN: Any = torch.ops.aten
_LINEAR = _ATEN.linear.default
_MOVES_SHORT_AXIS = "it moves a short last axis, whose rows the neural engine would pad to 64 bytes"
_JOINS = f"it joins parts of more than {LARGEST_DIMENSION:,} numbers, the neural engine's most"


def shape_for_neural_engine(program: ExportedProgram, keep_on_cpu: KeepOnCpu) -> ExportedProgram:
    """Return a program with wide layers in parts, and without short last axes at its ends.

    Args:
        program: In ATen dialect; it is not changed.
        keep_on_cpu: Called with the inserted calls that stay on the CPU.
    """
    module = copy.deepcopy(program.graph_module)
    signature = copy.deepcopy(program.graph_signature)
    edited: ExportedProgram = with_parts(program, graph_module=module, graph_signature=signature)
    layers = _wide_layers(edited)
    for layer in layers:
        _split(edited, layer, keep_on_cpu)
    widened = [
        *(_widen_input(node, keep_on_cpu) for node in _narrow_inputs(edited)),
        *(_widen_output(edited, n, keep_on_cpu) for n in range(len(signature.output_specs))),
    ]
    if not layers and not any(widened):
        return program
    module.graph.lint()
    module.recompile()
    return edited


# Layers of more outputs than the neural engine has


def _wide_layers(program: ExportedProgram) -> list[Node]:
    """Return the linear layers with stored weights and too many outputs."""
    constants = stored_nodes(program)
    return [
        node
        for node in program.graph.nodes
        if node.target is _LINEAR
        and node.args[1] in constants
        and value_of(node.args[1]).shape[0] > LARGEST_DIMENSION
    ]


def _split(program: ExportedProgram, layer: Node, keep_on_cpu: KeepOnCpu) -> None:
    """Replace a layer by layers of equal numbers of outputs, joined on the CPU."""
    arguments = arguments_of(layer)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    outputs = value_of(weight).shape[0]
    step = math.ceil(outputs / math.ceil(outputs / LARGEST_DIMENSION))
    parts: list[Node] = []
    for start in range(0, outputs, step):
        end = min(start + step, outputs)
        rows = [
            None if tensor is None else insert(layer, _ATEN.slice.Tensor, tensor, 0, start, end)
            for tensor in (weight, bias)
        ]
        parts.append(insert(layer, _LINEAR, x, *rows))
    joined = insert(layer, _ATEN.cat.default, parts, -1)
    keep_on_cpu(joined, _JOINS)
    layer.replace_all_uses_with(joined)
    program.graph_signature.replace_all_uses(layer.name, joined.name)
    program.graph.erase_node(layer)


# Short last axes of inputs and outputs


def _narrow_inputs(program: ExportedProgram) -> list[Node]:
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    inputs = [
        nodes[s.arg.name] for s in specs if s.kind is InputKind.USER_INPUT and s.arg.name in nodes
    ]
    returned = set(program.graph.output_node().all_input_nodes)
    return [node for node in inputs if node.users and node not in returned]


def _order(node: Node) -> list[int] | None:
    """Return the order of axes with the longest axis last; None if the last axis is long enough."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    shape = list(value.shape)
    if not all(isinstance(size, int) for size in shape) or padding_of(shape) < PADDING_THAT_COUNTS:
        return None
    axis = max(range(len(shape)), key=lambda n: shape[n] if shape[n] <= LARGEST_DIMENSION else 0)
    order = [n for n in range(len(shape)) if n != axis] + [axis]
    return order if padding_of([shape[n] for n in order]) < padding_of(shape) else None


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _widen_input(node: Node, keep_on_cpu: KeepOnCpu) -> bool:
    """Let the users of an input read it through two permutations, the first on the CPU.

    Returns:
        Whether its last axis is short.
    """
    order = _order(node)
    if order is None:
        return False
    users = list(node.users)
    first = next(n for n in node.graph.nodes if n.op not in ("placeholder", "get_attr"))
    moved, restored = _permuted_twice(first, node, order)
    keep_on_cpu(moved, _MOVES_SHORT_AXIS)
    for user in users:
        user.replace_input_with(node, restored)
    return True


def _widen_output(program: ExportedProgram, position: int, keep_on_cpu: KeepOnCpu) -> bool:
    """Return an output through two permutations, the second on the CPU.

    Returns:
        Whether its last axis is short.
    """
    spec = program.graph_signature.output_specs[position]
    output = program.graph.output_node()
    results: Any = output.args[0]
    node = results[position]
    if spec.kind is not OutputKind.USER_OUTPUT or not isinstance(node, Node):
        return False
    order = _order(node) if node.op == "call_function" else None
    if order is None:
        return False
    _, restored = _permuted_twice(output, node, order)
    keep_on_cpu(restored, _MOVES_SHORT_AXIS)
    output.args = (tuple(restored if n == position else r for n, r in enumerate(results)),)
    spec.arg = TensorArgument(restored.name)
    return True


def _permuted_twice(before: Node, source: Node, order: list[int]) -> tuple[Node, Node]:
    """Insert a permutation and its inverse, whose result equals the source."""
    anchor = source if source.op == "call_function" else before
    moved = _permute(before, anchor, source, order)
    return moved, _permute(before, anchor, moved, _inverse(order))


def _permute(before: Node, like: Node, source: Node, order: list[int]) -> Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(_ATEN.permute.default, (source, order))
    node.meta = {key: value for key, value in like.meta.items() if key != "custom"}
    node.meta["val"] = value_of(source).permute(order)
    return node
