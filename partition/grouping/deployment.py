"""The deployment target of a partition, and its causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import Node

from coreml_delegate.lowering.enumerated_shapes import SEVERAL_INPUTS_OPSET
from coreml_delegate.ops import record_of, required_opset
from coreml_delegate.ops.call import OpCall, target_name
from coreml_delegate.targets import STATE_OPSET, Opset

REQUESTED = "minimum_deployment_target"
STATES = "mutable buffers as states"
NO_INPUTS = "a model without inputs"
SEVERAL_SHAPES = "enumerated shapes of several inputs"
SHARED = "weights shared by strategy POSITIONAL"

Since = Callable[[Node], Opset]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The oldest systems that a partition runs on.

    Attributes:
        target: Opset of the deployment target.
        demanded_by: The causes: ``minimum_deployment_target`` if requested; otherwise the distinct
            op targets that need it, in graph order, then the properties of the partition that need
            it. Empty for iOS15, the oldest target.
    """

    target: Opset
    demanded_by: tuple[str, ...]


def deployment_of(
    calls: Iterable[Node],
    *,
    requested: Opset | None,
    since: Since,
    has_states: bool,
    has_inputs: bool,
    has_several_shapes: bool = False,
    is_shared: bool = False,
    compression: tuple[Opset, str] | None = None,
) -> Deployment:
    """Return the deployment target of one partition.

    Args:
        calls: The calls of the partition, in graph order.
        requested: The requested target, or None for the oldest possible.
        since: Returns the oldest opset at which a call was translated.
        has_states: Whether mutable buffers are inside.
        has_inputs: Whether it has inputs.
        has_several_shapes: Whether several inputs have enumerated shapes.
        is_shared: Whether it shares a model with partitions of other methods.
        compression: The opset that the compression of its weights needs, and the cause to name.
    """
    if requested is not None:
        return Deployment(requested, (REQUESTED,))
    demands = [(_describe_op(n), max(since(n), required_opset([n]))) for n in calls]
    boundary = ((STATES, has_states), (NO_INPUTS, not has_inputs), (SHARED, is_shared))
    demands += [(cause, STATE_OPSET) for cause, is_present in boundary if is_present]
    if has_several_shapes:
        demands.append((SEVERAL_SHAPES, SEVERAL_INPUTS_OPSET))
    if compression is not None:
        demands.append((compression[1], compression[0]))
    target = max((opset for _, opset in demands), default=Opset.iOS15)
    if target is Opset.iOS15:
        return Deployment(target, ())
    causes = dict.fromkeys(cause for cause, opset in demands if opset is target)
    return Deployment(target, tuple(causes))


def _describe_op(call: Node) -> str:
    """Return the op of a call, with the feature that raises its opset, if any."""
    name = target_name(call.target)
    record = record_of(name)
    demanded = None if record is None else record.demand(OpCall.of(call))
    return name if demanded is None else f"{name} with {demanded[1]}"
