"""Mutable buffers: which become Core ML states, and why others do not.

A state is private to one partition: nothing else reads or writes it, and its new value is no
output. It is fp16, so it can replace a buffer whose values fp16 represents. Every other mutable
buffer stays in ExecuTorch's memory, and is passed in and out.

Source: ``emit/_emitter.py`` of ExecuTorch 1.5, for initial values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.symbols import input_tensors
from coreml_delegate.errors import ContractError
from coreml_delegate.lowering.delegation_tags import set_tag, tag_of
from coreml_delegate.lowering.states import STATE_DTYPES, largest_integer
from coreml_delegate.ops.call import target_name
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.targets import STATE_OPSET, Opset

# Metadata that ExecuTorch's emitter reads, and its InitializedMutableBufferPass sets.
_INITIAL_VALUE_KEY = "et_init_buffer"

NOT_REQUESTED = "take_over_mutable_buffer=False was asked for"
_MIXED = "Core ML fails to load states beside inputs of fixed and of several sizes"
_NEVER_READ = "nothing reads it before it is written"
_NOT_COMPUTED = "its new value is not computed in a partition"


@dataclass(frozen=True, slots=True)
class MutableBuffer:
    """One mutable buffer of a program.

    Attributes:
        name: Its name in the module.
        node: Its placeholder: the value at the start of a run.
        new_value: The value at the end of the run.
    """

    name: str
    node: Node
    new_value: Node


def mutable_buffers(program: ExportedProgram) -> Iterator[MutableBuffer]:
    """Yield the mutable buffers in the order of the placeholders."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    new_values = {name: nodes[value] for value, name in signature.buffers_to_mutate.items()}
    for placeholder, name in signature.inputs_to_buffers.items():
        if name in new_values:
            yield MutableBuffer(name, nodes[placeholder], new_values[name])


def tag_states(program: ExportedProgram) -> None:
    """Assign every buffer that can be a state to the partition that uses it."""
    returned = _count_returns(program)
    for buffer in mutable_buffers(program):
        if _obstacle(buffer, returned) is None:
            set_tag(buffer.node, str(tag_of(buffer.new_value)))


def states_by_tag(program: ExportedProgram) -> dict[str, dict[Node, Node]]:
    """Return the states of each partition, with their new values, by tag."""
    states: dict[str, dict[Node, Node]] = {}
    for buffer in mutable_buffers(program):
        tag = tag_of(buffer.node)
        if tag is not None:
            states.setdefault(tag, {})[buffer.node] = buffer.new_value
    return states


def keep_initial_values(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> None:
    """Let ExecuTorch initialize the buffers outside of partitions with their values.

    By default it initializes every mutable buffer with zero.

    Args:
        program: Tagged, data included.
        values: Real values of buffers by name; a buffer without a value is marked too.
    """
    for buffer in mutable_buffers(program):
        value = values.get(buffer.name)
        if tag_of(buffer.node) is None and (value is None or bool(value.any())):
            buffer.node.meta[_INITIAL_VALUE_KEY] = True


def check_state_target(program: ExportedProgram, target: Opset | None) -> None:
    """Check that the deployment target of a tagged program supports states, if it has any.

    Raises:
        ContractError: The program has states, which the target lacks.
    """
    if target is None or target >= STATE_OPSET:
        return
    states = {node for states_of_tag in states_by_tag(program).values() for node in states_of_tag}
    if states:
        names = sorted(b.name for b in mutable_buffers(program) if b.node in states)
        raise ContractError(
            f"mutable buffers become Core ML states, which need {STATE_OPSET.name}",
            got=f"minimum_deployment_target {target.name} and {', '.join(names)}",
            remedy="Raise it, or set take_over_mutable_buffer=False",
        )


def obstacle_to_all_states(program: ExportedProgram, options: PartitionerKeywords) -> str | None:
    """Return why no mutable buffer of a program becomes a state, or None."""
    if not options.take_over_mutable_buffer:
        return NOT_REQUESTED
    if options.compiling.device is None or options.compiling.enumerated_shapes:
        return None
    shapes = [tensor.shape for tensor in input_tensors(program).values()]
    are_fixed = [all(isinstance(size, int) for size in shape) for shape in shapes]
    return _MIXED if any(are_fixed) and not all(are_fixed) else None


def obstacles_to_states(program: ExportedProgram, options: PartitionerKeywords) -> dict[str, str]:
    """Return why mutable buffers of a tagged program are no states, by name.

    Args:
        program: Tagged, data included.
        options: The partitioner's.
    """
    if (obstacle := obstacle_to_all_states(program, options)) is not None:
        return {buffer.name: obstacle for buffer in mutable_buffers(program)}
    returned = _count_returns(program)
    reasons = ((b.name, _obstacle(b, returned)) for b in mutable_buffers(program))
    return {name: reason for name, reason in reasons if reason is not None}


def _count_returns(program: ExportedProgram) -> Counter[str]:
    results: Any = program.graph.output_node().args[0]
    return Counter(node.name for node in results if isinstance(node, Node))


def _obstacle(buffer: MutableBuffer, returned: Counter[str]) -> str | None:
    """Return why a buffer cannot be a state; None if it can."""
    node, new_value = buffer.node, buffer.new_value
    readers = [user for user in node.users if user.op != "output"]
    if returned[node.name]:
        return "its old value is returned, or becomes that of another buffer"
    if not readers:
        return _NEVER_READ
    if new_value.op == "placeholder":
        return _NOT_COMPUTED
    writers = [user for user in new_value.users if user.op != "output"]
    readers_and_writers = dict.fromkeys([*readers, new_value, *writers])
    return (
        _obstacle_to_privacy(list(readers_and_writers))
        or ("its new value is also returned" if returned[new_value.name] > 1 else None)
        or _unfit_dtype(node)
    )


def _obstacle_to_privacy(readers_and_writers: list[Node]) -> str | None:
    """Return why a buffer is not private to one partition."""
    outside = next((node for node in readers_and_writers if tag_of(node) is None), None)
    if outside is not None:
        return f"{target_name(outside.target)} ({outside.name}), on the CPU, reads or writes it"
    tags = sorted({str(tag_of(node)) for node in readers_and_writers})
    return f"several partitions use it ({', '.join(tags)})" if len(tags) > 1 else None


def _unfit_dtype(node: Node) -> str | None:
    """Return why fp16 does not represent the values of a buffer, or None."""
    dtype = node.meta["val"].dtype
    if dtype in STATE_DTYPES:
        return None
    label = str(dtype).removeprefix("torch.")
    return f"it is {label}: Core ML states are fp16, which has integers up to {largest_integer()}"
