"""Records of ATen ops, one per op, in a module per family.

``RECORDS`` has every op that Core ML can take, ``REFUSED`` the ops that coremltools translates but
that are not delegated, ``COMPOSITES`` the ops that only the quantizer sees.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops import mil_ops
from coreml_delegate.ops.boundary import boundary_obstacles
from coreml_delegate.ops.call import GETITEM, OpCall, Reason, ReasonCode, called_target, target_name
from coreml_delegate.ops.constants import narrow_constants, stored_nodes
from coreml_delegate.ops.flops import WITHOUT_RECORD, Estimator, unknown
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.ops.quantization import CompositeOp
from coreml_delegate.ops.record import OpRecord
from coreml_delegate.ops.refused import REFUSED
from coreml_delegate.targets import Opset

_MODULES = (
    importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)
)
FAMILIES: tuple[Any, ...] = tuple(module for module in _MODULES if hasattr(module, "RECORDS"))
"""The modules of this package that have records."""


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
"""The ops that are quantized and then decomposed, before the partitioner runs."""

NAMESPACES = frozenset(
    {
        *("aten", "coreml", "coreml_delegate", "dim_order_ops", "llama", "quantized_decomposed"),
        "torchao",
    }
)
"""Namespaces of the operators that programs are made of."""


def record_of(name: str) -> OpRecord | None:
    """Return the record of a target name; a ``_copy`` variant has the record of its view."""
    record = RECORDS.get(name)
    if record is None:
        namespace, _, qualified = name.partition(".")
        op, _, overload = qualified.partition(".")
        if op.endswith("_copy"):
            record = RECORDS.get(f"{namespace}.{op.removesuffix('_copy')}.{overload}")
    return record


@cache
def translations() -> Mapping[str, Callable[[Any, Any], None]]:
    """Return our translations of torch ops, by coremltools' names for the ops.

    Each takes coremltools' context and the node.
    """
    by_record = {
        mil_ops.kind_of(target): mil_ops.translation_of(record.translation)
        for target, record in RECORDS.items()
        if record.translation is not None
    }
    return {**by_record, **mil_ops.TRANSLATIONS}


def obstacles_in(
    program: ExportedProgram,
    target: Opset | None,
    *,
    constants_inside: bool = True,
    veto: Callable[[Node], Reason | None] | None = None,
) -> dict[Node, Reason]:
    """Return the calls of a program that Core ML cannot take, each with the reason.

    Args:
        program: In ATen or edge dialect, with fake tensors in ``meta["val"]``.
        target: Opset of the deployment target, or None if the newest may be demanded.
        constants_inside: Whether the Core ML model has the program's constants; otherwise they are
            inputs.
        veto: Returns the caller's own reason to refuse a call, or None; it takes precedence.
    """
    constants = stored_nodes(program) if constants_inside else frozenset[Node]()
    range_reasons = WideIntegers().obstacles(program)
    if constants_inside:
        range_reasons |= narrow_constants(program)

    def own_reason(node: Node) -> Reason | None:
        reason = veto(node) if veto is not None else None
        return reason or obstacle(node, target, constants) or range_reasons.get(node)

    refused = _refuse_with_parts(program, own_reason)
    inputs = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
    if not constants_inside:
        inputs.update(node.name for node in program.graph.find_nodes(op="placeholder"))
    crossing = boundary_obstacles(program.graph, refused, inputs)
    return _refuse_with_parts(program, lambda node: refused.get(node) or crossing.get(node))


def _refuse_with_parts(
    program: ExportedProgram, reason_of: Callable[[Node], Reason | None]
) -> dict[Node, Reason]:
    """Return refused calls with reasons; a ``getitem`` is refused with its multi-result op."""
    reasons: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if target_name(node.target) == GETITEM else None
        if isinstance(source, Node) and source in reasons:
            reason = part_of(source, reasons[source])
        else:
            reason = reason_of(node)
        if reason is not None:
            reasons[node] = reason
    return reasons


def obstacle(node: Node, target: Opset | None, constants: Collection[Node] = ()) -> Reason | None:
    """Return why Core ML cannot take a call, regardless of its neighbours, or None if it can.

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


def _too_old(subject: str, required: Opset, target: Opset) -> Reason:
    return Reason(
        ReasonCode.OPSET,
        f"{subject} needs {required.name}, the deployment target is {target.name}",
        remedy=f"Raise minimum_deployment_target to {required.name}",
    )


def _without_record(name: str) -> Reason:
    refusal = REFUSED.get(name)
    if refusal is None:
        return Reason(ReasonCode.NO_RULE, f"no Core ML translation of {name} is known")
    return Reason(ReasonCode.NO_RULE, f"{name} is refused: {refusal.text}", refusal.remedy)


def part_of(source: Node, reason: Reason) -> Reason:
    """Return the reason to refuse a result of ``source``, which is refused for ``reason``."""
    text = f"part of {target_name(source.target)}: {reason.text}"
    return Reason(reason.code, text, reason.remedy)


def required_opset(nodes: Iterable[Node]) -> Opset:
    """Return the oldest opset that can express all calls among ``nodes`` that have a record."""
    records = ((record_of(target_name(n.target)), n) for n in nodes if n.op == "call_function")
    opsets = (record.oldest(OpCall.of(node)) for record, node in records if record is not None)
    return max(opsets, default=Opset.iOS15)


def flops_of(node: Node) -> int:
    """Return the estimated operations of a node, 0 if it calls no operator.

    Args:
        node: Of a graph in ATen or edge dialect, with fake tensors in ``meta["val"]``.
    """
    if node.op != "call_function":
        return 0
    name = target_name(node.target)
    namespace, _, op = name.partition(".")
    if namespace not in NAMESPACES:
        return 0
    record = record_of(name)
    estimate = record.flops if record is not None else _estimator(namespace, op)
    return estimate(OpCall.of(node))


def _estimator(namespace: str, op: str) -> Estimator:
    """Return an estimator for an op without a record, by preference of another overload."""
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
    "translations",
]
