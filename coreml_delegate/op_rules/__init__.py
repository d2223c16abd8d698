"""What Core ML can take: one record per ATen op, a module per family.

Everything that depends on op support derives from ``RULES``: the partitioner's verdicts, the ops
kept from decomposition, the deployment target a graph needs, and the documentation's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.op_rules import (
    activation,
    compressed,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    pooling,
    quantized,
    reduction,
    sampling,
    shape,
    sizes,
)
from coreml_delegate.op_rules.constants import constant_nodes, narrow_constants
from coreml_delegate.op_rules.integer_ranges import WideIntegers
from coreml_delegate.op_rules.layouts import layout_obstacles
from coreml_delegate.op_rules.refused import REFUSED
from coreml_delegate.op_rules.rule import GETITEM, OpCall, OpRule, Reason, ReasonCode, target_name
from coreml_delegate.targets import Opset

_FAMILIES = (
    activation,
    compressed,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    pooling,
    quantized,
    reduction,
    sampling,
    shape,
    sizes,
)


def _collect(rules: Iterable[OpRule]) -> dict[str, OpRule]:
    table: dict[str, OpRule] = {}
    for rule in rules:
        if rule.target in table:
            raise ImportError(f"two rules for {rule.target}")
        table[rule.target] = rule
    return dict(sorted(table.items()))


RULES: Mapping[str, OpRule] = _collect(rule for family in _FAMILIES for rule in family.RULES)
"""Every rule by target name."""


def rule_of(name: str) -> OpRule | None:
    """The rule of a target name; a copying variant has the rule of its view."""
    found = RULES.get(name)
    if found is None:
        namespace, _, rest = name.partition(".")
        op, _, overload = rest.partition(".")
        if op.endswith("_copy"):
            found = RULES.get(f"{namespace}.{op.removesuffix('_copy')}.{overload}")
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
    constants = constant_nodes(program) if constants_inside else frozenset[Node]()
    around = WideIntegers().obstacles(program)
    if constants_inside:
        around |= narrow_constants(program)

    def own_reason(node: Node) -> Reason | None:
        reason = veto(node) if veto is not None else None
        return reason or obstacle(node, target, constants) or around.get(node)

    found = _with_parts(program, own_reason)
    layouts = layout_obstacles(program, found)
    return _with_parts(program, lambda node: found.get(node) or layouts.get(node))


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
        constants: The nodes whose values are known when the model is converted.
    """
    name = target_name(node.target)
    if name == GETITEM and isinstance(node.args[0], Node):
        reason = obstacle(node.args[0], target, constants)
        return None if reason is None else part_of(node.args[0], reason)
    rule = rule_of(name)
    if rule is None:
        return _without_rule(name)
    if target is not None and rule.since > target:
        return _too_old(name, rule.since, target)
    call = OpCall.of(node, constants)
    reason = rule.obstacle(call)
    demanded = rule.demand(call) if reason is None and target is not None else None
    if target is not None and demanded is not None and demanded[0] > target:
        return _too_old(f"{name} with {demanded[1]}", demanded[0], target)
    return reason


def _too_old(what: str, needed: Opset, target: Opset) -> Reason:
    return Reason(
        ReasonCode.OPSET,
        f"{what} needs {needed.name}, the deployment target is {target.name}",
        remedy=f"Raise minimum_deployment_target to {needed.name}",
    )


def _without_rule(name: str) -> Reason:
    refusal = REFUSED.get(name)
    if refusal is None:
        return Reason(ReasonCode.NO_RULE, f"no Core ML translation of {name} is known")
    return Reason(ReasonCode.NO_RULE, f"{name} is refused: {refusal.text}")


def part_of(source: Node, reason: Reason) -> Reason:
    """Why a result of ``source`` cannot be delegated, which itself cannot."""
    text = f"part of {target_name(source.target)}: {reason.text}"
    return Reason(reason.code, text, reason.remedy, reason.issue)


def required_opset(nodes: Iterable[Node]) -> Opset:
    """The oldest opset that can express every call among ``nodes`` that has a rule."""
    rules = ((rule_of(target_name(n.target)), n) for n in nodes if n.op == "call_function")
    found = (rule.oldest(OpCall.of(node)) for rule, node in rules if rule is not None)
    return max(found, default=Opset.iOS15)


__all__ = [
    "REFUSED",
    "RULES",
    "OpRule",
    "Reason",
    "ReasonCode",
    "obstacle",
    "obstacles_in",
    "required_opset",
    "rule_of",
]
