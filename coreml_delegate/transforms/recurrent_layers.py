"""Recurrent layers as ops that ExecuTorch neither unrolls nor traces step by step.

See ``ops.stand_ins``. A call that Core ML refuses becomes the op of ATen again, so that its parts
can be delegated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops import Reason, obstacle
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.stand_ins import ORIGINALS, STAND_INS
from coreml_delegate.targets import Opset


def hold_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with stand-ins for recurrent layers.

    Args:
        program: In ATen dialect; it is not changed.
    """
    targets = {node.target for node in program.graph.nodes}
    table: dict[Any, Any] = {op: own for op, own in STAND_INS.items() if op in targets}
    return program.run_decompositions(table) if table else program


def release_refused_layers(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program``, with the ops of ATen in place of those stand-ins that Core ML refuses.

    Args:
        program: From ``hold_recurrent_layers``, perhaps transformed further; it is changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether Core ML is given the program's constants.
    """
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    for node in program.graph.nodes:
        original = ORIGINALS.get(node.target)
        if original is not None and (veto(node) or obstacle(node, target, constants)):
            node.target = original
    program.graph_module.recompile()
    return program
