"""What Core ML can take: one record per ATen op, a module per family.

Everything that depends on op support derives from ``RULES``: the partitioner's verdicts, the ops kept
from decomposition, the deployment target a graph needs, and the documentation's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from coreml_delegate.op_rules import (
    activation,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    pooling,
    reduction,
    shape,
)
from coreml_delegate.op_rules.rule import GETITEM, OpCall, OpRule, Reason, ReasonCode, target_name
from coreml_delegate.targets import Opset

_FAMILIES = (
    activation,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    pooling,
    reduction,
    shape,
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


def obstacle(node: Node, target: Opset | None) -> Reason | None:
    """Why Core ML cannot take ``node``, or None if it can.

    Args:
        node: Of a graph in ATen or edge dialect, with fake tensors in ``meta["val"]``.
        target: Opset of the deployment target, or None if the newest may be demanded.
    """
    if node.op != "call_function":
        return Reason(ReasonCode.NOT_A_CALL, f"a {node.op} node is not an operation")
    name = target_name(node.target)
    if name == GETITEM:
        return _getitem_obstacle(node, target)
    rule = rule_of(name)
    if rule is None:
        return Reason(ReasonCode.NO_RULE, f"no Core ML translation of {name} is known")
    if target is not None and rule.since > target:
        return Reason(
            ReasonCode.OPSET,
            f"{name} needs {rule.since.name}, the deployment target is {target.name}",
            remedy=f"Raise minimum_deployment_target to {rule.since.name}",
        )
    return rule.obstacle(OpCall.of(node))


def _getitem_obstacle(node: Node, target: Opset | None) -> Reason | None:
    source = node.args[0]
    if not isinstance(source, Node):
        return Reason(ReasonCode.NOT_A_CALL, "getitem of something that is no node")
    reason = obstacle(source, target)
    if reason is None:
        return None
    return Reason(
        reason.code, f"part of {target_name(source.target)}: {reason.text}", issue=reason.issue
    )


def required_opset(nodes: Iterable[Node]) -> Opset:
    """The oldest opset that can express every call among ``nodes`` that has a rule."""
    rules = (rule_of(target_name(n.target)) for n in nodes if n.op == "call_function")
    return max((rule.since for rule in rules if rule is not None), default=Opset.iOS15)


__all__ = ["RULES", "OpRule", "Reason", "ReasonCode", "obstacle", "required_opset", "rule_of"]
