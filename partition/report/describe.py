"""From a tagged program to its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.module_scope import scopes_of
from coreml_delegate.ops import Reason, flops_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.flops import bytes_of, tensors_of
from coreml_delegate.partition.buffers import mutable_buffers, obstacles_to_states, states_of
from coreml_delegate.partition.cpu_kernels import cpu_obstacles
from coreml_delegate.partition.decision import Decision
from coreml_delegate.partition.deployment import Since, deployment_of
from coreml_delegate.partition.grouping import Group
from coreml_delegate.partition.report.flexible import described, listed, ranges_of
from coreml_delegate.partition.report.origin import source_of
from coreml_delegate.partition.report.records import (
    BufferReport,
    Coverage,
    DelegationReport,
    NodeReport,
    PartitionReport,
)
from coreml_delegate.partition.report.splits import first_split, obstacles
from coreml_delegate.partition.tagging import DataOwnership, tag_of
from coreml_delegate.targets import Opset


def describe(
    program: ExportedProgram,
    decision: Decision,
    *,
    ownership: DataOwnership,
    values: Mapping[str, torch.Tensor],
    given: Opset | None,
    since: Since,
    is_shared: bool = False,
    compression: tuple[Opset, str] | None = None,
    enumerated: EnumeratedShapes | None = None,
) -> DelegationReport:
    """Report on a program.

    Args:
        program: In edge dialect, tagged, data included.
        decision: What became of its calls.
        ownership: Which data delegates have inside.
        values: Real values of buffers by name, as far as they are at hand.
        given: Deployment target asked for, or None.
        since: The oldest opset at which a call was translated.
        is_shared: Whether partitions are to share weights with those of other methods.
        compression: What the compression of weights after conversion needs, and what for.
        enumerated: The shapes that the program's inputs are to have, or None.
    """
    constants = stored_nodes(program)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    partitions = _Partitions(
        constants if ownership.constants else frozenset(),
        states_of(program),
        given,
        since,
        is_shared,
        compression,
        program,
        enumerated,
    )
    stuck = cpu_obstacles(node for node in calls if node in decision.refused)
    return DelegationReport(
        nodes=tuple(_node(node, decision, constants, stuck.get(node)) for node in calls),
        partitions=tuple(starmap(partitions.describe, decision.partitions.items())),
        obstacles=obstacles(program.graph, decision),
        first_split=first_split(program.graph, decision),
        weights=Coverage(
            _total(n for n in constants if any(tag_of(user) for user in n.users)),
            _total(n for n in constants if n.users),
        ),
        buffers=tuple(_buffers(program, values, wanted=ownership.mutable_buffers)),
    )


def _buffers(
    program: ExportedProgram, values: Mapping[str, torch.Tensor], *, wanted: bool
) -> Iterator[BufferReport]:
    reasons = obstacles_to_states(program, wanted=wanted)
    for buffer in mutable_buffers(program):
        value: torch.Tensor = buffer.node.meta["val"]
        reason = reasons.get(buffer.name, "")
        yield BufferReport(
            name=buffer.name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(str(size) for size in value.shape),
            nbytes=bytes_of(buffer.node),
            partition=tag_of(buffer.node),
            reason=reason,
            initial=_initial(values.get(buffer.name), is_state=not reason),
        )


def _initial(value: torch.Tensor | None, *, is_state: bool) -> str:
    if value is None:
        return "unknown"
    if not bool(value.any()):
        return "zero"
    return "constant" if is_state else "stored"


def _node(
    node: Node, decision: Decision, constants: Collection[Node], cpu_obstacle: Reason | None
) -> NodeReport:
    scopes = scopes_of(node)
    values = node.all_input_nodes
    return NodeReport(
        name=node.name,
        op=target_name(node.target),
        inputs=tuple(value.name for value in values if value.op == "call_function"),
        arguments=tuple(text for value in values for text in _texts(value)),
        results=tuple(_texts(node)),
        module=scopes[-1].path if scopes else "",
        module_class=scopes[-1].class_name if scopes else "",
        source=source_of(node),
        partition=tag_of(node),
        reason=decision.refused.get(node),
        flops=flops_of(node),
        weight_bytes=_total(value for value in values if value in constants),
        cpu_obstacle=cpu_obstacle,
    )


def _texts(node: Node) -> Iterator[str]:
    """Dtype and shape of every tensor a node gives, the class of anything else."""
    value: Any = node.meta.get("val")
    tensors = list(tensors_of(value))
    for tensor in tensors:
        dims = ", ".join(str(size) for size in tensor.shape)
        yield f"{str(tensor.dtype).removeprefix('torch.')}[{dims}]"
    if not tensors and value is not None:
        yield type(value).__name__


@dataclass(frozen=True, slots=True)
class _Partitions:
    """What describes one partition after the other.

    Attributes:
        inside: Constants that every partition has of its own.
        states: By tag the mutable buffers that a partition keeps, each with its new value.
        given: Deployment target asked for, or None.
        since: The oldest opset at which a call was translated.
        is_shared: Whether partitions are to share weights with those of other methods.
        compression: What the compression of weights after conversion needs, and what for.
        program: The program.
        enumerated: The shapes that its inputs are to have, or None.
    """

    inside: Collection[Node]
    states: Mapping[str, Mapping[Node, Node]]
    given: Opset | None
    since: Since
    is_shared: bool
    compression: tuple[Opset, str] | None
    program: ExportedProgram
    enumerated: EnumeratedShapes | None

    def describe(self, tag: str, group: Group) -> PartitionReport:
        """Sum up one partition."""
        members = set(group)
        values = dict.fromkeys(value for node in group for value in node.all_input_nodes)
        states = self.states.get(tag, {})
        entering = [v for v in values if v not in members | states.keys() and not self._is_data(v)]
        private = set(states.values())
        # The new value of a state is an output of the graph alone, not of the delegate.
        leaving = [
            node
            for node in group
            if not _has_parts(node)
            and any(user not in members for user in node.users)
            and node not in private
        ]
        shapes = {} if self.enumerated is None else listed(entering, self.enumerated)
        deployment = deployment_of(
            group,
            given=self.given,
            since=self.since,
            has_states=bool(states),
            has_inputs=bool(entering),
            has_several_shapes=len(shapes) > 1,
            is_shared=self.is_shared,
            compression=self.compression,
        )
        return PartitionReport(
            tag=tag,
            target=deployment.target.name,
            demanded_by=deployment.demanded_by,
            nodes=len(group),
            ops=tuple(ranked(Counter(target_name(node.target) for node in group))),
            flops=sum(map(flops_of, group)),
            weight_bytes=_total(value for value in values if value in self.inside),
            state_bytes=_total(states),
            inputs=len(entering),
            input_bytes=_total(entering),
            outputs=len(leaving),
            output_bytes=_total(leaving),
            flexible=ranges_of(entering, self.program)
            if self.enumerated is None
            else described(shapes),
        )

    def _is_data(self, value: Node) -> bool:
        return value in self.inside or value.op == "get_attr"


def ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    """Most frequent first, equal ones by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _has_parts(node: Node) -> bool:
    """Whether a call gives several results, which leave a partition one by one."""
    return isinstance(node.meta.get("val"), list | tuple)


def _total(nodes: Iterable[Node]) -> int:
    return sum(bytes_of(node) for node in nodes)
