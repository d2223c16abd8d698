"""Control flow that goes into Core ML as a whole: see ``control_flow``.

A call of a higher-order op becomes one of our own if Core ML takes every call of its branches. Any
other stays as it is, for ExecuTorch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from coreml_delegate.control_flow import (
    COND,
    PROTECTED,
    SCAN,
    WHILE_LOOP,
    read_branches,
    write_branches,
)
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import BOUNDARY, NARROW, flatten
from coreml_delegate.ops.constants import NO_INPUTS, Inputs, known_values, stored_constants

_logger = logging.getLogger(__name__)
_HIGHER: Any = torch.ops.higher_order
_LIFT: Any = torch.ops.aten.lift_fresh_copy.default

Lowered = ExportedProgram | Reason
"""A branch of which Core ML takes every call, or why it does not."""

LowerBranch = Callable[[ExportedProgram, Inputs], Lowered]
"""Lowers a branch, given the constants among its inputs."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A call of a higher-order op, in parts.

    Attributes:
        graphs: Branches, by their ``get_attr`` nodes.
        arguments: Other arguments, as the op of our own has them.
        inputs: Values that each branch is called with. Of a sequence it is a row.
        rows: How many of them, and where they begin, are rows.
    """

    graphs: tuple[Node, ...]
    arguments: tuple[Any, ...]
    inputs: tuple[Any, ...]
    rows: range = range(0)


def _cond(condition: Any, then: Node, otherwise: Node, operands: Sequence[Any] = ()) -> _Form:
    return _Form((then, otherwise), (condition, list(operands)), tuple(operands))


def _while_loop(
    goes_on: Node, body: Node, carry: Sequence[Any], operands: Sequence[Any] = ()
) -> _Form:
    return _Form((goes_on, body), (list(carry), list(operands)), (*carry, *operands))


def _scan(
    step: Node, carry: Sequence[Any], sequences: Sequence[Any], operands: Sequence[Any] = ()
) -> _Form:
    rows = range(len(carry), len(carry) + len(sequences))
    arguments = (list(carry), list(sequences), list(operands))
    return _Form((step,), arguments, (*carry, *sequences, *operands), rows)


def _map(step: Node, sequences: Sequence[Any], operands: Sequence[Any] = ()) -> _Form:
    return _scan(step, (), sequences, operands)


_FORMS: Mapping[Any, tuple[Any, Callable[..., _Form]]] = MappingProxyType(
    {
        _HIGHER.cond: (COND, _cond),
        _HIGHER.while_loop: (WHILE_LOOP, _while_loop),
        _HIGHER.scan: (SCAN, _scan),
        _HIGHER.map_impl: (SCAN, _map),
    }
)


def protect_control_flow(
    program: ExportedProgram,
    lower: LowerBranch,
    veto: Callable[[Node], Reason | None],
    inputs: Inputs = NO_INPUTS,
) -> ExportedProgram:
    """Return ``program`` with ops of our own for the control flow that Core ML takes.

    Args:
        program: In ATen dialect; it is not changed.
        lower: Lowers a branch.
        veto: Returns the reason to keep a call out of Core ML, or None.
        inputs: Those that are constants, if the program is a branch itself.

    Raises:
        UnsupportedOperatorError: Core ML takes no call of an op that ExecuTorch has not.
    """
    if not any(node.target in _FORMS for node in program.graph.nodes):
        return program
    held: Any = copy.copy(program)
    # A copy of all of it would copy its constants too.
    held._graph_module = GraphModule(program.graph_module, copy.deepcopy(program.graph))
    held._graph_module.meta.update(program.graph_module.meta)
    stored = known_values(held, inputs)
    for node in list(held.graph.nodes):
        if node.target not in _FORMS:
            continue
        reason = veto(node) or _hold(node, held.graph_module, stored, lower)
        if reason is not None:
            _require_executorch(node, reason)
            _logger.info("%s stays out of Core ML: %s", node.name, reason)
    held.graph.eliminate_dead_code()
    held.graph_module.recompile()
    return held


def _hold(
    node: Node,
    module: GraphModule,
    stored: Mapping[Node, torch.Tensor | None],
    lower: LowerBranch,
) -> Reason | None:
    """Make a call one of our own, or return why Core ML does not take it."""
    own, form_of = _FORMS[node.target]
    form = form_of(*node.args, **node.kwargs)
    reason = next(_obstacles(form), None)
    if reason is not None:
        return reason
    constants = {
        n: stored[value]
        for n, value in enumerate(form.inputs)
        if value in stored and n not in form.rows
    }
    branches: list[ExportedProgram] = []
    for graph in form.graphs:
        lowered = lower(_branch(getattr(module, str(graph.target)), form), constants)
        if isinstance(lowered, Reason):
            return Reason(lowered.code, f"in {graph.target}: {lowered.text}", lowered.remedy)
        branches.append(lowered)
    node.args, node.kwargs = (write_branches(branches), *form.arguments), {}
    node.target = own
    node.meta["val"] = list(node.meta["val"])
    for part in list(node.users):
        if not part.meta["val"].dim():
            _reshape_to_scalar(part)
    return None


def _reshape_to_scalar(part: Node) -> None:
    """See ``control_flow``: results of rank 0 have one dimension."""
    with part.graph.inserting_after(part):
        scalar = part.graph.call_function(torch.ops.aten.reshape.default, (part, []))
    scalar.meta = dict(part.meta)
    part.replace_all_uses_with(scalar, lambda user: user is not scalar)


def _obstacles(form: _Form) -> Iterator[Reason]:
    for value in flatten((form.arguments, form.inputs)):
        tensor = value.meta.get("val") if isinstance(value, Node) else value
        if not isinstance(tensor, torch.Tensor):
            yield Reason(
                ReasonCode.ARGUMENT, f"{value} is a number, Core ML's branches take tensors"
            )
        elif not all(isinstance(size, int) for size in tensor.shape):
            yield Reason(ReasonCode.SYMBOLIC, f"sizes of {value} are dynamic")
        elif tensor.dtype in BOUNDARY | NARROW:
            yield Reason(ReasonCode.DTYPE, f"{value} is {tensor.dtype}, cast it before")


def _require_executorch(node: Node, reason: Reason) -> None:
    if node.target in (WHILE_LOOP, _HIGHER.while_loop):
        raise UnsupportedOperatorError(
            "ExecuTorch has no while_loop, so that it cannot stay out of Core ML",
            got=f"{node.name}: {reason}",
            remedy=reason.remedy or "Write the loop with what Core ML takes, or as torch's scan",
        )


def release_control_flow(program: ExportedProgram, reason: Reason) -> None:
    """Make the ops of our own those of torch again.

    Args:
        program: In ATen dialect; it is changed.
        reason: Why they stay out of Core ML.

    Raises:
        UnsupportedOperatorError: ExecuTorch has no such op.
    """
    module = program.graph_module
    for node in list(program.graph.nodes):
        if node.target not in PROTECTED:
            continue
        _require_executorch(node, reason)
        text, *arguments = node.args
        with program.graph.inserting_before(node):
            branches: list[Node] = []
            for branch in read_branches(str(text)):
                release_control_flow(branch, reason)
                name = _add_module(module, node.name, _module_of(branch))
                branches.append(program.graph.get_attr(name))
        if node.target is COND:
            condition, operands = arguments
            node.target, node.args = _HIGHER.cond, (condition, *branches, tuple(operands))
        else:
            carry, sequences, operands = arguments
            node.target = _HIGHER.scan
            node.args = (*branches, carry, sequences, tuple(operands))
    module.recompile()


def _add_module(owner: GraphModule, prefix: str, module: GraphModule) -> str:
    """Add a submodule, and return its name."""
    name = next(n for i in range(10**9) if not hasattr(owner, n := f"{prefix}_branch_{i}"))
    owner.add_module(name, module)
    return name


def _module_of(branch: ExportedProgram) -> GraphModule:
    """Return a module that takes the inputs of a branch alone; its constants are buffers."""
    values = {node.name: value for node, _, value in stored_constants(branch)}
    graph = copy.deepcopy(branch.graph)
    root = torch.nn.Module()
    for name, attribute in branch.graph_module.named_children():
        root.add_module(name, attribute)
    for node in graph.find_nodes(op="placeholder"):
        if node.name in values:
            root.register_buffer(node.name, values[node.name])
            with graph.inserting_before(node):
                attribute = graph.get_attr(node.name)
            with graph.inserting_after(node):
                constant = graph.call_function(_LIFT, (attribute,))
            attribute.meta = constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    return GraphModule(root, graph)


def _branch(module: GraphModule, form: _Form) -> ExportedProgram:
    values = [value.meta["val"] for value in form.inputs]
    inputs = [
        torch.zeros(value.shape[1:] if n in form.rows else value.shape, dtype=value.dtype)
        for n, value in enumerate(values)
    ]
    return torch.export.export(module, tuple(inputs))


def with_constants(branch: ExportedProgram, positions: Collection[int]) -> ExportedProgram:
    """Return a branch some of whose inputs are constants, without their values, to judge it.

    Args:
        branch: It shares its graph with the result.
        positions: Those of the inputs.
    """
    judged: Any = copy.copy(branch)
    judged._graph_signature = copy.deepcopy(branch.graph_signature)
    judged._constants = dict(branch.constants)
    users = [
        spec for spec in judged._graph_signature.input_specs if spec.kind is InputKind.USER_INPUT
    ]
    values = {node.name: node.meta["val"] for node in branch.graph.find_nodes(op="placeholder")}
    for position in positions:
        spec = users[position]
        spec.kind, spec.target = InputKind.CONSTANT_TENSOR, f"operand_{position}"
        judged._constants[spec.target] = values[spec.arg.name]
    return judged
