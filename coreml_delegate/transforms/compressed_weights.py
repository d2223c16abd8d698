"""Rewrites of programs with compressed weights that ExecuTorch needs.

ExecuTorch has no kernel for the op that dequantizes weights compressed by ``quantize_``.
Undelegated calls are therefore decomposed into ops with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import OptionError
from coreml_delegate.ops import Reason, ReasonCode, obstacle
from coreml_delegate.ops.call import DECOMPRESS, DEQUANTIZE_AFFINE, target_name
from coreml_delegate.ops.compressed import blocks
from coreml_delegate.ops.constants import is_derived, stored_nodes
from coreml_delegate.ops.edits import arguments_of, become, insert, shape_of, value_of
from coreml_delegate.patches.torch import is_traceable_wrapper_subclass
from coreml_delegate.targets import Opset

_ATEN: Any = torch.ops.aten


def unwrap_tensor_subclasses(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with the inner tensors of tensor subclasses as separate parameters.

    Args:
        program: In ATen dialect; it is not changed.
    """
    if not any(map(is_traceable_wrapper_subclass, program.state_dict.values())):
        return program
    return program.run_decompositions({})


def dequantize_per_use(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with one dequantizing call per use of dequantized weights.

    Each partition that uses them then has the compressed weights as a constant.

    Args:
        program: In ATen dialect, unwrapped; it is not changed.
    """
    if not _reused_calls(program):
        return program
    copied = program.run_decompositions({})
    for node in _reused_calls(copied):
        _, *later_users = node.users
        for user in later_users:
            with node.graph.inserting_before(node):
                copy_of_call = node.graph.node_copy(node)
            user.replace_input_with(node, copy_of_call)
    # The arguments of the copied calls may be dequantized themselves.
    return dequantize_per_use(copied)


def _reused_calls(program: ExportedProgram) -> list[Node]:
    constants = stored_nodes(program)
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return [node for node in calls if len(node.users) > 1 and is_derived(node, constants)]


def decompose_undelegated_dequantize(
    program: ExportedProgram,
    target: Opset | None,
    *,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program`` with every refused ``dequantize_affine`` decomposed into arithmetic.

    Args:
        program: In ATen dialect, unwrapped; it is not changed.
        target: Opset of the deployment target, or None.
        veto: Returns the reason to keep a call out of Core ML, or None.
        constants_inside: Whether the Core ML model has the program's constants.

    Raises:
        OptionError: Core ML refuses a call only because of the deployment target.
    """
    refused = _refused(program, target, veto, constants_inside)
    require_target(refused)
    if not any(target_name(node.target) == DEQUANTIZE_AFFINE for node in refused):
        return program
    copied = program.run_decompositions({})
    for node in _refused(copied, target, veto, constants_inside):
        if target_name(node.target) == DEQUANTIZE_AFFINE:
            _decompose(node)
    copied.graph_module.recompile()
    return copied


def require_target(refused: Mapping[Node, Reason]) -> None:
    """Check that the deployment target is high enough for the weights of the model.

    Args:
        refused: The calls that Core ML refuses, each with the reason.

    Raises:
        OptionError: It is too low; the CPU has no kernel for such weights either.
    """
    too_old = {
        node: reason
        for node, reason in refused.items()
        if target_name(node.target) in DECOMPRESS and reason.code is ReasonCode.OPSET
    }
    if not too_old:
        return
    reasons = dict.fromkeys(f"{reason} ({reason.remedy})" for reason in too_old.values())
    raise OptionError(
        "the deployment target is too low for the model's compressed weights",
        got="; ".join(reasons),
        remedy="Pass compile_specs=CoreMLBackend.generate_compile_specs("
        "minimum_deployment_target=ct.target.iOS18) to CoreMLPartitioner, or no target: the "
        "smallest that the model needs is demanded then",
    )


def _refused(
    program: ExportedProgram,
    target: Opset | None,
    veto: Callable[[Node], Reason | None],
    constants_inside: bool,
) -> dict[Node, Reason]:
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    calls = (n for n in program.graph.nodes if target_name(n.target) in DECOMPRESS)
    verdicts = ((node, veto(node) or obstacle(node, target, constants)) for node in calls)
    return {node: reason for node, reason in verdicts if reason is not None}


def _decompose(node: Node) -> None:
    """Replace a call by ``scale * (input - zero_point)``, with dimensions split into blocks."""
    arguments, shape = arguments_of(node), shape_of(node)
    block_counts = blocks(torch.Size(shape), list(arguments["block_size"]))
    if block_counts is None:
        return  # torch cannot compute such blocks either
    split_shape = [
        n for size, count in zip(shape, block_counts, strict=True) for n in (count, size // count)
    ]
    scale_shape = [n for count in block_counts for n in (count, 1)]

    def floats(name: str, sizes: list[int]) -> Node:
        cast = insert(node, _ATEN._to_copy.default, arguments[name], dtype=torch.float32)
        return insert(node, _ATEN.view.default, cast, sizes)

    values = floats("input", split_shape)
    if arguments["zero_point"] is not None:
        values = insert(node, _ATEN.sub.Tensor, values, floats("zero_point", scale_shape))
    values = insert(node, _ATEN.mul.Tensor, values, floats("scale", scale_shape))
    values = insert(node, _ATEN.view.default, values, shape)
    become(node, _ATEN._to_copy.default, values, dtype=value_of(node).dtype)
