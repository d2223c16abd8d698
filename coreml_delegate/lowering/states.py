"""Mutable buffers as Core ML states, which are fp16, of rank 1 or more, and initially zero.

A buffer of another dtype is cast at reads and writes; a scalar becomes a tensor of shape [1]. If a
buffer does not start at zero, its subgraph gets a further state, which is zero until the first run
has ended. As long as it is zero, reads return the initial values, which are constants of the model.

Source: apple/coremltools#2826, ``TorchConverter`` of coremltools 9.0; ExecuTorch 1.0 to 1.5, Core
ML runtime: it creates ``MLState`` once per loaded handle, and never writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Node

from coreml_delegate.errors import ContractError
from coreml_delegate.ops.call import CASTS, target_name
from coreml_delegate.ops.constants import state_value
from coreml_delegate.ops.edits import ATEN, add_constant, add_placeholder, insert

STATE_DTYPES = frozenset({torch.float16, torch.float32, torch.bool, torch.uint8, torch.int8})
"""Dtypes that a state can hold: integers exactly, floats rounded to fp16."""

STARTED = "coreml_delegate_started"
"""Name of the state that is zero in the first run only."""

_INITIAL = "coreml_delegate_initial"


def largest_integer() -> int:
    """Return the integer up to which fp16 represents every integer."""
    return round(2 / torch.finfo(torch.float16).eps)


def initial_value(program: ExportedProgram, name: str) -> torch.Tensor | None:
    """Return the initial value of a buffer; None for zeros, with which a state starts."""
    value = state_value(program, name)
    return value if value is not None and bool(value.any()) else None


def make_states(program: ExportedProgram, multiple: int = 1) -> None:
    """Rewrite a subgraph, in place, so that coremltools turns its mutable buffers into states.

    Args:
        program: The subgraph.
        multiple: States are filled up with zeros to a last dimension that is a multiple of it.

    Raises:
        ContractError: A mutable buffer has a dtype that fp16 cannot represent.
    """
    buffers = list(_buffers(program))
    if not buffers:
        return
    first = next(n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr"))
    nonzero = [b for b in buffers if initial_value(program, b.name) is not None]
    started = _add_started_state(program, first, multiple) if nonzero else None
    for buffer in buffers:
        _check_dtype(buffer)
        _rewrite_reads(program, buffer, first, started)
        _rewrite_write(program, buffer)
        if missing := -buffer.node.meta["val"].shape[-1] % multiple:
            _widen(program, buffer, missing, first)
    program.graph_module.recompile()


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A mutable buffer of a subgraph, with its entries in signature and graph."""

    name: str
    node: Node
    mutation: OutputSpec
    dtype: torch.dtype


def _buffers(program: ExportedProgram) -> Iterator[_Buffer]:
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    mutations = {
        s.target: s for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION
    }
    for spec in list(signature.input_specs):
        if spec.kind is InputKind.BUFFER and spec.target in mutations:
            node = nodes[spec.arg.name]
            yield _Buffer(str(spec.target), node, mutations[spec.target], node.meta["val"].dtype)


def _check_dtype(buffer: _Buffer) -> None:
    if buffer.dtype not in STATE_DTYPES:
        raise ContractError(
            f"mutable buffer {buffer.name!r} cannot be a Core ML state",
            got=str(buffer.dtype),
            expected=f"values that fp16 represents (integers up to {largest_integer()})",
            remedy="Lower with CoreMLPartitioner, which passes it in and out, or make it float32",
        )


def _rewrite_reads(
    program: ExportedProgram, buffer: _Buffer, first: Node, started: Node | None
) -> None:
    """Replace reads of the buffer by reads of the state, cast and with the initial value."""
    node, users = buffer.node, list(buffer.node.users)
    shape = list(node.meta["val"].shape)
    initial = initial_value(program, buffer.name)
    state_dtype = torch.float32
    node.meta["val"] = node.meta["val"].to(state_dtype).reshape(shape or [1])
    _replace(program, buffer.name, lambda value: value.to(state_dtype).reshape(shape or [1]))
    value = node
    if initial is not None and started is not None:
        initial = initial.reshape(node.meta["val"].shape)
        constant = add_constant(program, f"{_INITIAL}_{node.name}", initial, node)
        value = insert(first, ATEN.where.self, started, value, constant)
    if not shape:
        value = insert(first, ATEN.view_copy.default, value, [])
    if buffer.dtype is torch.bool:
        value = insert(first, ATEN.ne.Scalar, value, 0)
    elif not buffer.dtype.is_floating_point:
        value = insert(first, ATEN._to_copy.default, value, dtype=buffer.dtype)
    if value is not node:
        for user in users:
            user.replace_input_with(node, value)


def _rewrite_write(program: ExportedProgram, buffer: _Buffer) -> None:
    """Cast and reshape the buffer's new value to the state's dtype and shape."""
    output = program.graph.output_node()
    value = _new_value(program, buffer)
    new: Any = value
    if buffer.dtype is torch.float16 and _is_cast_of_fp32(value):
        new = value.args[0]  # Core ML rounds it itself
    elif buffer.dtype is not torch.float32:
        new = insert(output, ATEN._to_copy.default, new, dtype=torch.float32)
    if not value.meta["val"].dim():
        new = insert(output, ATEN.view_copy.default, new, [1])
    if new is not value:
        _set_new_value(program, buffer, new)


def _widen(program: ExportedProgram, buffer: _Buffer, count: int, first: Node) -> None:
    """Fill a state up with zeros at the end of its last dimension."""
    node, users = buffer.node, list(buffer.node.users)
    width = node.meta["val"].shape[-1]
    pad = torch.nn.functional.pad
    node.meta["val"] = node.meta["val"].new_empty((*node.meta["val"].shape[:-1], width + count))
    _replace(program, buffer.name, lambda value: pad(value, (0, count)))
    start = next(user for user in node.graph.nodes if user in users or user is first)
    narrowed = insert(start, ATEN.slice_copy.Tensor, node, -1, 0, width)
    for user in users:
        user.replace_input_with(node, narrowed)
    output, value = program.graph.output_node(), _new_value(program, buffer)
    padded = insert(output, ATEN.constant_pad_nd.default, value, [0, count])
    _set_new_value(program, buffer, padded)


def _new_value(program: ExportedProgram, buffer: _Buffer) -> Node:
    """Return the result that a run writes to the buffer."""
    return next(n for n in program.graph.nodes if n.name == buffer.mutation.arg.name)


def _set_new_value(program: ExportedProgram, buffer: _Buffer, value: Node) -> None:
    """Let a run write another result to the buffer."""
    output = program.graph.output_node()
    old_results: Any = output.args[0]
    position = program.graph_signature.output_specs.index(buffer.mutation)
    output.args = ((*old_results[:position], value, *old_results[position + 1 :]),)
    buffer.mutation.arg = TensorArgument(value.name)


def _is_cast_of_fp32(value: Node) -> bool:
    source = value.args[0] if value.args else None
    is_cast = value.op == "call_function" and target_name(value.target) in CASTS
    return is_cast and isinstance(source, Node) and source.meta["val"].dtype is torch.float32


def _add_started_state(program: ExportedProgram, first: Node, width: int) -> Node:
    """Add a state that every run sets to 1, and return the call that tests it."""
    value = torch.zeros(width)
    # Coremltools has one namespace for states and values.
    node = add_placeholder(program, f"b_{STARTED}", value, first)
    signature = program.graph_signature
    signature.input_specs.insert(
        0, InputSpec(InputKind.BUFFER, TensorArgument(node.name), STARTED, persistent=True)
    )
    program.state_dict[STARTED] = value
    output = program.graph.output_node()
    one = insert(output, ATEN.full.default, [width], 1.0, dtype=torch.float32)
    results: Any = output.args[0]
    output.args = ((one, *results),)
    signature.output_specs.insert(
        0, OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(one.name), STARTED)
    )
    element = node if width == 1 else insert(first, ATEN.slice_copy.Tensor, node, 0, 0, 1)
    return insert(first, ATEN.ne.Scalar, element, 0)


def _replace(
    program: ExportedProgram, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    state: dict[str, Any] = program.state_dict
    constants: dict[str, Any] = program.constants
    tensors: MutableMapping[str, Any] = state if name in state else constants
    tensors[name] = change(tensors[name].detach())
