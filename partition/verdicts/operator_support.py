"""Operator support: the calls that stay on the CPU by the rules or by the user's filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.dynamic_shapes.symbols import input_tensors
from coreml_delegate.errors import OptionError
from coreml_delegate.lowering.contract import undetermined
from coreml_delegate.lowering.subgraph import call_of, program_of
from coreml_delegate.lowering.trial import signature_of
from coreml_delegate.ops import Reason, ReasonCode, obstacle, obstacles_in, record_of
from coreml_delegate.ops.call import CASTS, target_name
from coreml_delegate.ops.constants import NOT_FOLDED
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.verdicts.filters import Filters
from coreml_delegate.targets import Opset
from coreml_delegate.transforms.half_precision import NARROW, promote_half_to_fp32


def refused_calls(
    program: ExportedProgram,
    target: Opset | None,
    *,
    filters: Filters,
    wide: WideIntegers,
    values: Mapping[str, torch.Tensor],
    constants_inside: bool,
    enumerated: EnumeratedShapes | None = None,
) -> dict[Node, Reason]:
    """Return the undelegated calls of a program, each with the reason.

    Args:
        program: In ATen or edge dialect.
        target: Opset of the deployment target, or None.
        filters: The user's filters; their reasons take precedence.
        wide: Integers beyond int32, as far as they are known.
        values: Real values of parameters and buffers by name, as far as they are at hand.
        constants_inside: Whether the Core ML model has the program's constants.
        enumerated: The enumerated shapes of the program's inputs, or None.

    Raises:
        OptionError: The enumerated shapes are of another program.
    """
    reasons = _undetermined_calls(program, enumerated) | wide.obstacles(program, values)
    refused = obstacles_in(
        program,
        target,
        constants_inside=constants_inside,
        veto=lambda node: filters.refusal(node) or reasons.get(node),
    )
    return {node: _with_note(node, reason) for node, reason in refused.items()}


def _with_note(node: Node, reason: Reason) -> Reason:
    """Append the note why a call on constants is not folded, if any."""
    note = (node.meta.get("custom") or {}).get(NOT_FOLDED)
    return reason if note is None else replace(reason, text=f"{reason.text}; {note}")


def is_preserved(node: Node) -> bool:
    """Return whether a node is a call of an op that is preserved for Core ML."""
    record = record_of(target_name(node.target)) if node.op == "call_function" else None
    return record is not None and record.preserve


def refused_one_by_one(
    calls: Sequence[Node], program: ExportedProgram, target: Opset | None
) -> set[Node]:
    """Return the calls on constants that Core ML does not take, neither whole nor decomposed.

    Args:
        calls: Calls of a program in ATen dialect, judged one by one; half precision as fp32.
        program: It is not changed.
        target: Opset of the deployment target, or None.
    """
    signatures = {call: signature_of(call, {}, target) for call in calls}
    new = {signature: call for call, signature in signatures.items() if signature not in _REFUSED}
    if new:
        refused = _judge_one_by_one(list(new.values()), program, target)
        _REFUSED.update({signature: call in refused for signature, call in new.items()})
    return {call for call, signature in signatures.items() if _REFUSED[signature]}


_REFUSED: dict[str, bool] = {}
"""Whether Core ML refuses a call on constants, by signature; a cache of the process."""


def _judge_one_by_one(
    calls: Sequence[Node], program: ExportedProgram, target: Opset | None
) -> set[Node]:
    subprogram, originals = program_of(calls, program, constants={}, separate=True, to_aten=True)
    results = [call_of(originals[str(name)]) for name in subprogram.graph_signature.user_outputs]
    subprogram = promote_half_to_fp32(subprogram)
    table = default_decompositions()
    refused = _obstacles_on_constants(subprogram, target)
    for node in subprogram.graph.nodes:
        if is_preserved(node) and node not in refused:
            table.pop(node.target, None)
    subprogram = subprogram.run_decompositions(table)
    refused_nodes = _obstacles_on_constants(subprogram, target)
    for node in subprogram.graph.nodes:
        if not refused_nodes.isdisjoint(node.all_input_nodes):
            refused_nodes.add(node)
    outputs: Any = subprogram.graph.output_node().args[0]
    last = outputs[len(outputs) - len(results) :]  # effect tokens come first
    return {call for call, output in zip(results, last, strict=True) if output in refused_nodes}


def _obstacles_on_constants(program: ExportedProgram, target: Opset | None) -> set[Node]:
    """Return the calls that Core ML refuses if all inputs of the program are constants."""
    constants = frozenset(program.graph.find_nodes(op="placeholder"))
    return {
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and not _promotes(node)
        and obstacle(node, target, constants) is not None
    }


def _promotes(node: Node) -> bool:
    """Return whether a call casts from or to half precision."""
    values = (node, *node.all_input_nodes)
    dtypes = {tensor.dtype for value in values for tensor in tensors_of(value.meta.get("val"))}
    return target_name(node.target) in CASTS and not NARROW.isdisjoint(dtypes)


def _undetermined_calls(
    program: ExportedProgram, enumerated: EnumeratedShapes | None
) -> dict[Node, Reason]:
    """Return the calls with an argument or result of a size that no enumerated shape determines."""
    if enumerated is None:
        return {}
    _check_inputs(program, enumerated)
    reasons: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for value in (*node.all_input_nodes, node):
            sizes = (undetermined(t, enumerated) for t in tensors_of(value.meta.get("val")))
            size = next((size for size in sizes if size is not None), None)
            if size is not None:
                text = f"size {size} of {value.name!r} does not follow from the enumerated shapes"
                reasons[node] = Reason(ReasonCode.SYMBOLIC, text)
                break
    return reasons


def _check_inputs(program: ExportedProgram, enumerated: EnumeratedShapes) -> None:
    """Check that the inputs of a program have the sizes for which shapes are enumerated."""
    tensors = input_tensors(program)
    fixed = all(isinstance(size, int) for tensor in tensors.values() for size in tensor.shape)
    for entry in () if fixed else enumerated.inputs:
        expected = [str(getattr(size, "expression", size)) for size in entry.sizes]
        for name in entry.names:
            # Copying a graph renames inputs with names of Python builtins.
            tensor = tensors.get(name, tensors.get(f"{name}_1"))
            got = None if tensor is None else [str(size) for size in tensor.shape]
            if got != expected:
                raise OptionError(
                    f"enumerated shapes are of another program, by its input {name!r}",
                    got="none" if got is None else f"[{', '.join(got)}]",
                    expected=f"[{', '.join(expected)}]",
                    remedy="Make the compile spec from the program that is lowered",
                )
