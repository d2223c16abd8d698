"""The report on a tagged program: its nodes, partitions, mutable buffers and obstacles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes, Shape
from coreml_delegate.dynamic_shapes.symbols import bounds_of, is_unbounded
from coreml_delegate.exported.module_scope import scopes_of
from coreml_delegate.exported.source_lines import source_of
from coreml_delegate.lowering.contract import (
    SEVERAL_INPUTS_OPSET,
    enumerated_inputs,
    tensor_shapes,
)
from coreml_delegate.lowering.debug_handles import HANDLE
from coreml_delegate.lowering.delegation_tags import tag_of
from coreml_delegate.lowering.trial import ProgramTrials
from coreml_delegate.ops import Reason, ReasonCode, flops_of, record_of, required_opset
from coreml_delegate.ops.call import OpCall, target_name
from coreml_delegate.ops.constants import noted_folds, stored_nodes
from coreml_delegate.ops.flops import bytes_of, tensors_of
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.partition.grouping.decision import Decision
from coreml_delegate.partition.grouping.mutable_buffers import (
    mutable_buffers,
    obstacles_to_states,
    states_by_tag,
)
from coreml_delegate.partition.grouping.stages import Group, count_groups
from coreml_delegate.partition.report.delegation import DelegationReport
from coreml_delegate.partition.report.records import (
    BufferReport,
    Coverage,
    FoldReport,
    NodeReport,
    Obstacle,
    PartitionReport,
)
from coreml_delegate.partition.verdicts.cpu_kernels import cpu_obstacles
from coreml_delegate.partition.verdicts.parts import is_part, owning_call
from coreml_delegate.targets import STATE_OPSET, Opset

# Causes of a deployment target.
_REQUESTED = "minimum_deployment_target"
_STATES = "mutable buffers as states"
_NO_INPUTS = "a model without inputs"
_SEVERAL_SHAPES = "enumerated shapes of several inputs"
_SHARED = "weights shared by strategy POSITIONAL"
# Reasons for calls of possible partitions that exceed the user's limits.
_BEYOND_LIMITS = frozenset({ReasonCode.PARTITION_SIZE, ReasonCode.PARTITION_LIMIT})
# A limit or exclusion by the user is one obstacle, for calls of any ops.
_BY_USER = _BEYOND_LIMITS | {ReasonCode.SKIPPED}


def describe(
    program: ExportedProgram,
    decision: Decision,
    options: PartitionerKeywords,
    trials: ProgramTrials,
) -> DelegationReport:
    """Return the report on a program.

    Args:
        program: In edge dialect, tagged, data included.
        decision: Its partitions and refused calls.
        options: The partitioner's.
        trials: The trials of the program.
    """
    constants = stored_nodes(program)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    partitions = _Partitions(
        program,
        options,
        trials,
        inside=constants if options.take_over_constant_data else frozenset(),
        states=states_by_tag(program),
    )
    obstacles_on_cpu = cpu_obstacles(node for node in calls if node in decision.refused)
    return DelegationReport(
        nodes=tuple(_node(node, decision, constants, obstacles_on_cpu.get(node)) for node in calls),
        partitions=tuple(starmap(partitions.describe, decision.partitions.items())),
        obstacles=_obstacles(program.graph, decision),
        first_split=_first_split(program.graph, decision),
        weights=Coverage(
            _total_bytes(n for n in constants if any(tag_of(user) for user in n.users)),
            _total_bytes(n for n in constants if n.users),
        ),
        buffers=tuple(_buffers(program, trials.values, options)),
        folds=tuple(FoldReport(n, *noted) for n, noted in sorted(noted_folds(calls).items())),
    )


# Mutable buffers


def _buffers(
    program: ExportedProgram, values: Mapping[str, torch.Tensor], options: PartitionerKeywords
) -> Iterator[BufferReport]:
    reasons = obstacles_to_states(program, options)
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


# Nodes


def _node(
    node: Node, decision: Decision, constants: Collection[Node], cpu_obstacle: Reason | None
) -> NodeReport:
    scopes = scopes_of(node)
    values = node.all_input_nodes
    return NodeReport(
        name=node.name,
        op=target_name(node.target),
        inputs=tuple(value.name for value in values if value.op == "call_function"),
        arguments=tuple(text for value in values for text in _dtypes_and_shapes(value)),
        results=tuple(_dtypes_and_shapes(node)),
        module=scopes[-1].path if scopes else "",
        module_class=scopes[-1].class_name if scopes else "",
        source=source_of(node),
        partition=tag_of(node),
        reason=decision.refused.get(node),
        flops=flops_of(node),
        weight_bytes=_total_bytes(value for value in values if value in constants),
        cpu_obstacle=cpu_obstacle,
        debug_handle=handle if isinstance(handle := node.meta.get(HANDLE), int) else None,
    )


def _dtypes_and_shapes(node: Node) -> Iterator[str]:
    """Yield dtype and shape of every tensor of a node's value, or the class of another value."""
    value: Any = node.meta.get("val")
    tensors = list(tensors_of(value))
    for tensor in tensors:
        dims = ", ".join(str(size) for size in tensor.shape)
        yield f"{str(tensor.dtype).removeprefix('torch.')}[{dims}]"
    if not tensors and value is not None:
        yield type(value).__name__


# Partitions


@dataclass(frozen=True, slots=True)
class _Partitions:
    """The data for the reports on the partitions of a program.

    Attributes:
        inside: Constants that partitions contain.
        states: Mutable buffers that are states, with their new values, by tag of the partition.
    """

    program: ExportedProgram
    options: PartitionerKeywords
    trials: ProgramTrials
    inside: Collection[Node]
    states: Mapping[str, Mapping[Node, Node]]

    def describe(self, tag: str, group: Group) -> PartitionReport:
        """Return the report on one partition."""
        members = set(group)
        values = dict.fromkeys(value for node in group for value in node.all_input_nodes)
        states = self.states.get(tag, {})

        def is_data(value: Node) -> bool:
            return value in self.inside or value.op == "get_attr"

        entering = [v for v in values if v not in members | states.keys() and not is_data(v)]
        private = set(states.values())
        # The new value of a state is an output only of the graph, not of the delegate.
        leaving = [
            node
            for node in group
            if not isinstance(node.meta.get("val"), list | tuple)
            and any(user not in members for user in node.users)
            and node not in private
        ]
        compiling = self.options.compiling
        enumerated = compiling.enumerated_shapes
        shapes = {} if enumerated is None else _enumerated_shapes(entering, enumerated)
        target, causes = self._target(
            group,
            {
                _STATES: bool(states),
                _NO_INPUTS: not entering,
                _SHARED: self.options.shares_weights,
                _SEVERAL_SHAPES: len(shapes) > 1,
            },
        )
        counts = Counter(target_name(node.target) for node in group)
        return PartitionReport(
            tag=tag,
            target=target.name,
            demanded_by=causes,
            nodes=len(group),
            ops=tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
            flops=sum(map(flops_of, group)),
            weight_bytes=_total_bytes(value for value in values if value in self.inside),
            state_bytes=_total_bytes(states),
            inputs=len(entering),
            input_bytes=_total_bytes(entering),
            outputs=len(leaving),
            output_bytes=_total_bytes(leaving),
            flexible=tuple(
                _ranges(entering, self.program) if enumerated is None else _choices(shapes)
            ),
        )

    def _target(
        self, calls: Group, properties: Mapping[str, bool]
    ) -> tuple[Opset, tuple[str, ...]]:
        """Return the deployment target of a partition, and its causes.

        Args:
            calls: The calls of the partition, in graph order.
            properties: Whether the partition has each property that may raise the target.

        Returns:
            The causes are ``minimum_deployment_target`` if requested; otherwise the distinct op
            targets that need the target, in graph order, then the properties of the partition.
            There are none for iOS15, the oldest target.
        """
        compiling = self.options.compiling
        if compiling.deployment_target is not None:
            return compiling.deployment_target, (_REQUESTED,)
        demands = [(_describe_op(n), max(self.trials.since(n), required_opset([n]))) for n in calls]
        demands += [
            (cause, SEVERAL_INPUTS_OPSET if cause == _SEVERAL_SHAPES else STATE_OPSET)
            for cause, is_present in properties.items()
            if is_present
        ]
        if compiling.compression_demand is not None:
            opset, cause = compiling.compression_demand
            demands.append((cause, opset))
        target = max((opset for _, opset in demands), default=Opset.iOS15)
        causes = dict.fromkeys(cause for cause, opset in demands if opset is target)
        return target, () if target is Opset.iOS15 else tuple(causes)


def _describe_op(call: Node) -> str:
    """Return the op of a call, with the feature that raises its opset, if any."""
    name = target_name(call.target)
    record = record_of(name)
    demanded = None if record is None else record.demand(OpCall.of(call))
    return name if demanded is None else f"{name} with {demanded[1]}"


def _total_bytes(nodes: Iterable[Node]) -> int:
    return sum(bytes_of(node) for node in nodes)


# Shapes of dynamic inputs


def _ranges(entering: Iterable[Node], program: ExportedProgram) -> Iterator[tuple[str, str]]:
    """Yield the dynamic inputs with the ranges of their dimensions."""
    for node, tensor in _with_open_sizes(entering):
        yield node.name, f"[{', '.join(_range(size, program) for size in tensor.shape)}]"


def _range(size: int | torch.SymInt, program: ExportedProgram) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    low, high = bounds_of(size, program.range_constraints)
    origin = "" if not is_unbounded(size, program.range_constraints) else " (of the example)"
    return f"{low}..{high}{origin}"


def _enumerated_shapes(
    entering: Iterable[Node], enumerated: EnumeratedShapes
) -> dict[str, tuple[Shape, ...]]:
    """Return the enumerated shapes of inputs by name."""
    bindings = enumerated.bindings()
    return enumerated_inputs(
        {node.name: tensor_shapes(node.name, t, bindings) for node, t in _with_open_sizes(entering)}
    )


def _choices(shapes: Mapping[str, tuple[Shape, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the inputs with their enumerated shapes as text."""
    for name, choices in shapes.items():
        yield name, " | ".join(str(list(shape)) for shape in choices)


def _with_open_sizes(entering: Iterable[Node]) -> Iterator[tuple[Node, torch.Tensor]]:
    for node in entering:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(
            isinstance(s, torch.SymInt) for s in value.shape
        ):
            yield node, value


# Obstacles


def _first_split(graph: Graph, decision: Decision) -> str | None:
    """Return the first node on the CPU, in graph order, on a path between delegated nodes."""
    delegated = {node for group in decision.partitions.values() for node in group}
    after: set[Node] = set()
    for node in graph.nodes:
        if any(n in delegated or n in after for n in node.all_input_nodes):
            after.add(node)
    before: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(n in delegated or n in before for n in node.users):
            before.add(node)
    between = (n for n in graph.nodes if n in decision.refused and n in after and n in before)
    return next((node.name for node in between), None)


def _obstacles(graph: Graph, decision: Decision) -> tuple[Obstacle, ...]:
    """Return the obstacles to delegation, most rewarding first."""
    grouped: dict[tuple[str, ReasonCode], list[Node]] = {}
    for node in graph.nodes:
        if node in decision.refused:
            # A part of a refused call has the reason of the call.
            source = owning_call(node)
            reason = decision.refused[source]
            is_by_user = reason.code in _BY_USER
            kind = reason.text if is_by_user else target_name(source.target)
            grouped.setdefault((kind, reason.code), []).append(node)
    base_refused = decision.refused.keys() - {
        node for node, reason in decision.refused.items() if reason.code in _BEYOND_LIMITS
    }
    count = count_groups(graph, base_refused)
    obstacles = [
        _obstacle(nodes, decision, count_groups(graph, base_refused - set(nodes)), count)
        for nodes in grouped.values()
    ]
    return tuple(sorted(obstacles, key=lambda o: (-o.partitions_merged, -o.flops, o.ops, o.code)))


def _obstacle(nodes: list[Node], decision: Decision, if_supported: int, count: int) -> Obstacle:
    calls = [node for node in nodes if not is_part(node)]
    return Obstacle(
        ops=tuple(dict.fromkeys(target_name(node.target) for node in calls)),
        reasons=tuple(dict.fromkeys(decision.refused[node] for node in calls)),
        nodes=tuple(node.name for node in calls),
        flops=sum(map(flops_of, calls)),
        partitions_if_lifted=if_supported,
        partitions_merged=count - if_supported,
    )
