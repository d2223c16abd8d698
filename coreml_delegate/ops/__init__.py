"""Records of ATen ops, one per op, in a module per family.

``RECORDS`` has every op that Core ML can take, ``REFUSED`` those that coremltools translates and
that are not delegated all the same, ``COMPOSITES`` those that the quantizer alone meets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops import (
    activation,
    compressed,
    control_flow,
    convolution,
    creation,
    detection,
    elementwise,
    indexing,
    linear,
    linear_algebra,
    logic,
    normalization,
    pooling,
    quantized,
    recurrent,
    reduction,
    resizing,
    shape,
    sizes,
    windows,
)
from coreml_delegate.ops.boundary import boundary_obstacles
from coreml_delegate.ops.call import GETITEM, OpCall, Reason, ReasonCode, called_target, target_name
from coreml_delegate.ops.constants import narrow_constants, stored_nodes
from coreml_delegate.ops.flops import WITHOUT_RECORD, Estimator, unknown
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.ops.quantization import CompositeOp
from coreml_delegate.ops.record import OpRecord
from coreml_delegate.ops.refused import REFUSED
from coreml_delegate.targets import Opset

FAMILIES = (
    activation,
    compressed,
    control_flow,
    convolution,
    creation,
    detection,
    elementwise,
    indexing,
    linear,
    linear_algebra,
    logic,
    normalization,
    pooling,
    quantized,
    recurrent,
    reduction,
    resizing,
    shape,
    sizes,
    windows,
)


def _by_target(records: Iterable[OpRecord]) -> Mapping[str, OpRecord]:
    table: dict[str, OpRecord] = {}
    for record in records:
        if record.target in table:
            raise ImportError(f"two records of {record.target}")
        table[record.target] = record
    return MappingProxyType(dict(sorted(table.items())))


RECORDS: Mapping[str, OpRecord] = _by_target(r for family in FAMILIES for r in family.RECORDS)
"""Every record by target name."""

COMPOSITES: tuple[CompositeOp, ...] = tuple(
    op for family in FAMILIES for op in getattr(family, "COMPOSITES", ())
)
"""The ops that are quantized and decomposed before a partitioner is asked."""

NAMESPACES = frozenset(
    {
        *("aten", "coreml", "coreml_delegate", "dim_order_ops", "llama", "quantized_decomposed"),
        "torchao",
    }
)
"""Namespaces of the operators that programs are made of."""


def record_of(name: str) -> OpRecord | None:
    """The record of a target name; a copying variant has the record of its view."""
    found = RECORDS.get(name)
    if found is None:
        namespace, _, rest = name.partition(".")
        op, _, overload = rest.partition(".")
        if op.endswith("_copy"):
            found = RECORDS.get(f"{namespace}.{op.removesuffix('_copy')}.{overload}")
    return found


def obstacles_in(
    program: ExportedProgram,
    target: Opset | None,
    *,
    constants_inside: bool = True,
    veto: Callable[[Node], Reason | None] | None = None,
) -> dict[Node, Reason]:
    """The calls of a program that Core ML cannot take, each with the reason.

    Args:
        program: In ATen or edge dialect, with fake tensors in ``meta["val"]``.
        target: Opset of the deployment target, or None if the newest may be demanded.
        constants_inside: Whether Core ML is given the program's constants; otherwise they are
            inputs like others.
        veto: Reasons of the caller's own, which come first.
    """
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    around = WideIntegers().obstacles(program)
    if constants_inside:
        around |= narrow_constants(program)

    def own_reason(node: Node) -> Reason | None:
        reason = veto(node) if veto is not None else None
        return reason or obstacle(node, target, constants) or around.get(node)

    found = _with_parts(program, own_reason)
    passed = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
    if not constants_inside:
        passed.update(node.name for node in program.graph.find_nodes(op="placeholder"))
    crossing = boundary_obstacles(program.graph, found, passed)
    return _with_parts(program, lambda node: found.get(node) or crossing.get(node))


def _with_parts(
    program: ExportedProgram, reason_of: Callable[[Node], Reason | None]
) -> dict[Node, Reason]:
    """The calls that have a reason; a result cannot be delegated without the op it is of."""
    found: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        reason = reason_of(node)
        if reason is None and target_name(node.target) == GETITEM and node.args[0] in found:
            reason = part_of(node.args[0], found[node.args[0]])
        if reason is not None:
            found[node] = reason
    return found


def obstacle(node: Node, target: Opset | None, constants: Collection[Node] = ()) -> Reason | None:
    """Why Core ML cannot take a call by itself, or None if it can.

    Args:
        node: Of a graph in ATen or edge dialect, with fake tensors in ``meta["val"]``.
        target: Opset of the deployment target, or None if the newest may be demanded.
        constants: The stored constants of the graph; see ``ops.constants``.
    """
    name = target_name(node.target)
    if name == GETITEM and isinstance(node.args[0], Node):
        reason = obstacle(node.args[0], target, constants)
        return None if reason is None else part_of(node.args[0], reason)
    record = record_of(name)
    if record is None:
        return _without_record(target_name(called_target(node)))
    if target is not None and record.since > target:
        return _too_old(name, record.since, target)
    call = OpCall.of(node, constants)
    reason = record.obstacle(call)
    demanded = record.demand(call) if reason is None and target is not None else None
    if target is not None and demanded is not None and demanded[0] > target:
        return _too_old(f"{name} with {demanded[1]}", demanded[0], target)
    return reason


def _too_old(what: str, needed: Opset, target: Opset) -> Reason:
    return Reason(
        ReasonCode.OPSET,
        f"{what} needs {needed.name}, the deployment target is {target.name}",
        remedy=f"Raise minimum_deployment_target to {needed.name}",
    )


def _without_record(name: str) -> Reason:
    refusal = REFUSED.get(name)
    if refusal is None:
        return Reason(ReasonCode.NO_RULE, f"no Core ML translation of {name} is known")
    return Reason(ReasonCode.NO_RULE, f"{name} is refused: {refusal.text}", refusal.remedy)


def part_of(source: Node, reason: Reason) -> Reason:
    """Why a result of ``source`` cannot be delegated, which itself cannot."""
    text = f"part of {target_name(source.target)}: {reason.text}"
    return Reason(reason.code, text, reason.remedy, reason.issue)


def required_opset(nodes: Iterable[Node]) -> Opset:
    """The oldest opset that can express every call among ``nodes`` that has a record."""
    records = ((record_of(target_name(n.target)), n) for n in nodes if n.op == "call_function")
    found = (record.oldest(OpCall.of(node)) for record, node in records if record is not None)
    return max(found, default=Opset.iOS15)


def flops_of(node: Node) -> int:
    """Estimated operations of one node; 0 for all that is no call of an operator.

    Args:
        node: Of a graph in ATen or edge dialect, with fake tensors in ``meta["val"]``.
    """
    if node.op != "call_function":
        return 0
    name = target_name(node.target)
    namespace, _, rest = name.partition(".")
    if namespace not in NAMESPACES:
        return 0
    record = record_of(name)
    estimate = record.flops if record is not None else _estimator(namespace, rest)
    return estimate(OpCall.of(node))


def _estimator(namespace: str, op: str) -> Estimator:
    """The estimator for an overload without a record: that of another overload, if one has it."""
    name = op.partition(".")[0].removesuffix("_copy")
    siblings = (r for t, r in RECORDS.items() if t.startswith(f"{namespace}.{name}."))
    sibling = next(siblings, None)
    return WITHOUT_RECORD.get(name, unknown) if sibling is None else sibling.flops


__all__ = [
    "COMPOSITES",
    "FAMILIES",
    "NAMESPACES",
    "RECORDS",
    "REFUSED",
    "OpRecord",
    "Reason",
    "ReasonCode",
    "flops_of",
    "obstacle",
    "obstacles_in",
    "record_of",
    "required_opset",
]
