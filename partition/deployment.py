"""The deployment target of a partition, and what demands it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import Node

from coreml_delegate import op_rules
from coreml_delegate.op_rules.rule import target_name
from coreml_delegate.targets import STATE_OPSET, Opset

GIVEN = "minimum_deployment_target"
STATES = "mutable buffers as states"
NO_INPUTS = "a model without inputs"
SHARED = "weights shared by strategy POSITIONAL"

Since = Callable[[Node], Opset]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The oldest systems a partition runs on.

    Attributes:
        target: Opset of the deployment target.
        demanded_by: What needs no less: ``minimum_deployment_target`` if it was given; otherwise op
            targets, each once, in graph order, then what of the boundary does. Empty for iOS15,
            which everything needs.
    """

    target: Opset
    demanded_by: tuple[str, ...]


def deployment_of(
    calls: Iterable[Node],
    *,
    given: Opset | None,
    since: Since,
    has_states: bool,
    has_inputs: bool,
    is_shared: bool = False,
) -> Deployment:
    """The deployment target of one partition.

    Args:
        calls: Of the partition, in graph order.
        given: The one asked for, or None for the oldest that can be.
        since: The oldest opset at which a call was translated.
        has_states: Whether mutable buffers are inside.
        has_inputs: Whether anything enters.
        is_shared: Whether it is to be one model with partitions of other methods.
    """
    if given is not None:
        return Deployment(given, (GIVEN,))
    demands = [(target_name(n.target), max(since(n), op_rules.required_opset([n]))) for n in calls]
    boundary = ((STATES, has_states), (NO_INPUTS, not has_inputs), (SHARED, is_shared))
    demands += [(what, STATE_OPSET) for what, applies in boundary if applies]
    target = max((opset for _, opset in demands), default=Opset.iOS15)
    if target is Opset.iOS15:
        return Deployment(target, ())
    by = dict.fromkeys(what for what, opset in demands if opset is target)
    return Deployment(target, tuple(by))
