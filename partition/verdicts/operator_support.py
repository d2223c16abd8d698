"""Operator support: the calls that stay on the CPU by the rules or by the user's filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node

from coreml_delegate.conversion.subgraph import call_of, program_of
from coreml_delegate.conversion.trial import signature_of
from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.dynamic_shapes.symbols import input_tensors
from coreml_delegate.errors import OptionError
from coreml_delegate.ops import Reason, ReasonCode, obstacle, obstacles_in, record_of
from coreml_delegate.ops.call import CASTS, target_name
from coreml_delegate.ops.constants import NOT_FOLDED
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.verdicts.filters import Filters
from coreml_delegate.preprocess.enumerated_shapes import undetermined
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
    """Return the calls of a program that are not delegated, each with the reason.

    Args:
        program: In ATen or edge dialect.
        target: Opset of the deployment target, or None.
        filters: The user's; their reasons come before those of Core ML.
        wide: Integers that Core ML cannot hold, as far as they are known.
        values: Real values of parameters and buffers by name, as far as they are at hand.
        constants_inside: Whether Core ML is given the program's constants.
        enumerated: The shapes that the program's inputs are to have, or None.

    Raises:
        OptionError: The enumerated shapes are of another program.
    """
    unfit = _calls_of_open_size(program, enumerated) | wide.obstacles(program, values)
    refused = obstacles_in(
        program,
        target,
        constants_inside=constants_inside,
        veto=lambda node: filters.refusal(node) or unfit.get(node),
    )
    return {node: _with_note(node, reason) for node, reason in refused.items()}


def _with_note(node: Node, reason: Reason) -> Reason:
    """Return a reason with that for which a call on constants is not folded."""
    note = (node.meta.get("custom") or {}).get(NOT_FOLDED)
    return reason if note is None else replace(reason, text=f"{reason.text}; {note}")


def refused_apart(
    calls: Sequence[Node], program: ExportedProgram, target: Opset | None
) -> set[Node]:
    """Return the calls on constants that Core ML does not take, whole or decomposed.

    Args:
        calls: Calls of a program in ATen dialect, each judged by itself; half precision as fp32.
        program: It is left as it is.
        target: Opset of the deployment target, or None.
    """
    signatures = {call: signature_of(call, {}, target) for call in calls}
    new = {sign: call for call, sign in signatures.items() if sign not in _REFUSED_APART}
    if new:
        refused = _judge_apart(list(new.values()), program, target)
        _REFUSED_APART.update({sign: call in refused for sign, call in new.items()})
    return {call for call, sign in signatures.items() if _REFUSED_APART[sign]}


_REFUSED_APART: dict[str, bool] = {}
"""Whether Core ML does not take a call on constants, by its signature; for this process."""


def _judge_apart(
    calls: Sequence[Node], program: ExportedProgram, target: Opset | None
) -> set[Node]:
    apart, originals = program_of(calls, program, constants={}, apart=True, to_aten=True)
    results = [call_of(originals[str(name)]) for name in apart.graph_signature.user_outputs]
    apart = promote_half_to_fp32(apart)
    table = default_decompositions()
    refused = _obstacles_on_constants(apart, target)
    for node in apart.graph.nodes:
        record = record_of(target_name(node.target)) if node.op == "call_function" else None
        if record is not None and record.preserve and node not in refused:
            table.pop(node.target, None)
    apart = apart.run_decompositions(table)
    blamed = _obstacles_on_constants(apart, target)
    for node in apart.graph.nodes:
        if not blamed.isdisjoint(node.all_input_nodes):
            blamed.add(node)
    outputs: Any = apart.graph.output_node().args[0]
    last = outputs[len(outputs) - len(results) :]  # effect tokens come first
    return {call for call, output in zip(results, last, strict=True) if output in blamed}


def _obstacles_on_constants(program: ExportedProgram, target: Opset | None) -> set[Node]:
    """Return the calls of a program whose inputs count as constants that Core ML refuses."""
    constants = frozenset(program.graph.find_nodes(op="placeholder"))
    return {
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and not _promotes(node)
        and obstacle(node, target, constants) is not None
    }


def _promotes(node: Node) -> bool:
    """Return whether a call casts from or to half precision, at the boundary of a program."""
    values = (node, *node.all_input_nodes)
    dtypes = {tensor.dtype for value in values for tensor in tensors_of(value.meta.get("val"))}
    return target_name(node.target) in CASTS and not NARROW.isdisjoint(dtypes)


def _calls_of_open_size(
    program: ExportedProgram, enumerated: EnumeratedShapes | None
) -> dict[Node, Reason]:
    """Return the calls with an argument or a result whose size the enumerated shapes leave open."""
    if enumerated is None:
        return {}
    _check_inputs(program, enumerated)
    found: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for value in (*node.all_input_nodes, node):
            open_sizes = (undetermined(t, enumerated) for t in tensors_of(value.meta.get("val")))
            size = next((size for size in open_sizes if size is not None), None)
            if size is not None:
                text = f"size {size} of {value.name!r} does not follow from the enumerated shapes"
                found[node] = Reason(ReasonCode.SYMBOLIC, text)
                break
    return found


def _check_inputs(program: ExportedProgram, enumerated: EnumeratedShapes) -> None:
    """Check that the inputs of a program have the sizes for which shapes are enumerated."""
    tensors = input_tensors(program)
    fixed = all(isinstance(size, int) for tensor in tensors.values() for size in tensor.shape)
    for entry in () if fixed else enumerated.inputs:
        expected = [str(getattr(size, "expression", size)) for size in entry.sizes]
        for name in entry.names:
            # Where a graph is rebuilt, torch renames an input called like a Python builtin.
            tensor = tensors.get(name, tensors.get(f"{name}_1"))
            got = None if tensor is None else [str(size) for size in tensor.shape]
            if got != expected:
                raise OptionError(
                    f"enumerated shapes are of another program, by its input {name!r}",
                    got="none" if got is None else f"[{', '.join(got)}]",
                    expected=f"[{', '.join(expected)}]",
                    remedy="Make the compile spec from the program that is lowered",
                )
