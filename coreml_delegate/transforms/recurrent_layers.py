"""Placeholder ops for recurrent layers, so that ExecuTorch does not unroll them.

See ``placeholder_ops``. A call that Core ML refuses becomes the ATen op again, so that its parts
can be delegated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.ops import Reason, obstacle
from coreml_delegate.ops.call import is_placeholder_op, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.edits import arguments_of, shape_of
from coreml_delegate.placeholder_ops import ORIGINALS, PLACEHOLDER_OPS
from coreml_delegate.targets import Opset


def protect_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with placeholder ops for recurrent layers.

    Args:
        program: In ATen dialect; it is not changed.
    """
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Any] = {
        op: placeholder for op, placeholder in PLACEHOLDER_OPS.items() if op in targets
    }
    return program.run_decompositions(table) if table else program


def restore_refused_layers(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program``, with ATen ops in place of placeholder ops that Core ML refuses.

    Args:
        program: From ``protect_recurrent_layers``, perhaps transformed further; it is changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.

    Raises:
        UnsupportedOperatorError: See ``require_fixed_steps``.
    """
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_placeholder_op(node.target):
            continue
        reason = veto(node) or obstacle(node, target, constants)
        if reason is not None:
            require_fixed_steps(node, reason)
            node.target = ORIGINALS[node.target]
    program.graph_module.recompile()
    return program


def require_fixed_steps(node: Node, reason: Reason) -> None:
    """Check that a recurrent layer that Core ML does not take can be unrolled.

    Args:
        node: The call.
        reason: Why it stays out of Core ML.

    Raises:
        UnsupportedOperatorError: It has a dynamic number of steps.
    """
    arguments = arguments_of(node)
    steps = shape_of(arguments["input"])[1 if arguments["batch_first"] else 0]
    if not isinstance(steps, int):
        raise UnsupportedOperatorError(
            "a recurrent layer of a dynamic number of steps cannot stay out of Core ML",
            got=f"{target_name(node.target)} of {steps} steps: {reason}",
            remedy="Export it with a fixed number of steps, or let Core ML take it",
        )
