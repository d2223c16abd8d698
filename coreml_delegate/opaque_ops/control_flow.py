"""Control flow with the graphs of its branches as a text argument: protect, restore.

ExecuTorch does not delegate calls with graphs as arguments, and cannot serialize some of them. The
custom ops here take tensors and a text instead, so that they are traced, checked, partitioned and
converted like any other op. The text has the branches in the format of ``torch.export.save``: the
program needs no other data.

A call of a higher-order op is replaced by such an op if Core ML takes every call of its branches.
Other calls stay for ExecuTorch.
"""

from __future__ import annotations

import base64
import copy
import functools
import io
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import BOUNDARY, NARROW, flatten
from coreml_delegate.ops.constants import NO_INPUTS, Inputs, known_values, stored_constants
from coreml_delegate.patches.torch import OpOverload, with_parts

_logger = logging.getLogger(__name__)
_HIGHER: Any = torch.ops.higher_order
_LIFT: Any = torch.ops.aten.lift_fresh_copy.default
_OWN: Any = torch.ops.coreml_delegate
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")

Tensors = Sequence[torch.Tensor]
Branch = Callable[..., Tensors]

_CACHED = 64  # parsed texts: a model has few calls, which are evaluated often


def write_branches(branches: Sequence[ExportedProgram]) -> str:
    """Return the text of branches; equal branches have equal texts.

    Args:
        branches: In ATen dialect; source lines are not written. The last branch defines the types
            of the call's results.
    """
    outputs: Any = branches[-1].graph.output_node().args[0]
    values = [output.meta["val"] for output in outputs]
    results = [[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values]
    return json.dumps({"results": results, "branches": [*map(_write_branch, branches)]})


def read_branches(text: str) -> tuple[ExportedProgram, ...]:
    """Return new copies of the branches of a text."""
    encoded = json.loads(text)["branches"]
    return tuple(torch.export.load(io.BytesIO(base64.b64decode(branch))) for branch in encoded)


@functools.lru_cache(_CACHED)
def results_of(text: str) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return the shapes and dtypes of the last branch's results."""
    results = json.loads(text)["results"]
    return tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in results)


def _write_branch(branch: ExportedProgram) -> str:
    for node in branch.graph.nodes:
        # torch's metadata has line numbers of generated code, which differ between processes.
        node.meta = {
            key: value for key, value in node.meta.items() if key in ("val", "tensor_meta")
        }
    stripped: Any = copy.copy(branch)
    stripped.example_inputs = None  # they include weights, if weights are operands
    buffer = io.BytesIO()
    torch.export.save(stripped, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.lru_cache(_CACHED)
def _branches(text: str) -> tuple[Branch, ...]:
    return tuple(_as_function(branch) for branch in read_branches(text))


def _as_function(branch: ExportedProgram) -> Branch:
    module = branch.module()

    def call(*arguments: torch.Tensor) -> Tensors:
        result = module(*arguments)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    return call


# Results must not alias arguments. ExecuTorch's verifier takes the length of the first of several
# results, so a result of rank 0 gets one dimension.


def _without_alias(result: torch.Tensor) -> torch.Tensor:
    return result.clone() if result.dim() else result.reshape(1).clone()


def _empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty(tuple(shape) or (1,), dtype=dtype)


def _cond(branches: str, condition: torch.Tensor, operands: Tensors) -> Tensors:
    then, otherwise = _branches(branches)
    chosen = then if condition.item() else otherwise
    return [*map(_without_alias, chosen(*operands))]


def _while_loop(branches: str, carry: Tensors, operands: Tensors) -> Tensors:
    condition, body = _branches(branches)
    while condition(*carry, *operands)[0].item():
        carry = body(*carry, *operands)
    return [*map(_without_alias, carry)]


def _scan(branches: str, carry: Tensors, sequences: Tensors, operands: Tensors) -> Tensors:
    (step,) = _branches(branches)
    rows: list[Tensors] = []
    for index in range(sequences[0].shape[0]):
        results = step(*carry, *(sequence[index] for sequence in sequences), *operands)
        carry, row = results[: len(carry)], results[len(carry) :]
        rows.append(row)
    last = [*map(_without_alias, carry)]
    return last + [torch.stack(list(column)) for column in zip(*rows, strict=True)]


def _cond_shapes(branches: str, condition: torch.Tensor, operands: Tensors) -> Tensors:
    del operands
    return [_empty(condition, *result) for result in results_of(branches)]


def _while_loop_shapes(branches: str, carry: Tensors, operands: Tensors) -> Tensors:
    del branches, operands
    return [_empty(value, value.shape, value.dtype) for value in carry]


def _scan_shapes(branches: str, carry: Tensors, sequences: Tensors, operands: Tensors) -> Tensors:
    del operands
    count, like = sequences[0].shape[0], sequences[0]
    rows = results_of(branches)[len(carry) :]
    return [
        *(_empty(value, value.shape, value.dtype) for value in carry),
        *(_empty(like, (count, *size), dtype) for size, dtype in rows),
    ]


def _define(schema: str, compute: Any, shapes: Any) -> OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(_OWN, name).default


COND = _define(
    "cond(str branches, Tensor condition, Tensor[] operands) -> Tensor[]", _cond, _cond_shapes
)
"""Branches: for true and for false; both take the operands. All ops here return a result of rank 0
with shape [1]."""

WHILE_LOOP = _define(
    "while_loop(str branches, Tensor[] carry, Tensor[] operands) -> Tensor[]",
    _while_loop,
    _while_loop_shapes,
)
"""Branches: the condition and the body; both take the carry and the operands. The body returns the
next carry."""

SCAN = _define(
    "scan(str branches, Tensor[] carry, Tensor[] sequences, Tensor[] operands) -> Tensor[]",
    _scan,
    _scan_shapes,
)
"""Branch: takes the carry, a row of each sequence and the operands; returns the next carry and a
row of each stacked result. Results: the last carry and the stacked results."""

PROTECTED = frozenset({COND, WHILE_LOOP, SCAN})
"""All ops of this module, which are protected from decomposition during partitioning."""


# Protecting and restoring calls

Lowered = ExportedProgram | Reason
"""A branch that Core ML takes with every call, or the reason why not."""

LowerBranch = Callable[[ExportedProgram, Inputs], Lowered]
"""Lowers a branch, given the constants among its inputs."""


@dataclass(frozen=True, slots=True)
class _CallParts:
    """The parts of a call of a higher-order op.

    Attributes:
        graphs: ``get_attr`` nodes of the branches.
        arguments: Other arguments, as the placeholder op takes them.
        inputs: Inputs of each branch; a sequence stands for its rows.
        rows: Positions of the sequences among the inputs.
    """

    graphs: tuple[Node, ...]
    arguments: tuple[Any, ...]
    inputs: tuple[Any, ...]
    rows: range = range(0)


def _cond_parts(
    condition: Any, then: Node, otherwise: Node, operands: Sequence[Any] = ()
) -> _CallParts:
    return _CallParts((then, otherwise), (condition, list(operands)), tuple(operands))


def _while_loop_parts(
    goes_on: Node, body: Node, carry: Sequence[Any], operands: Sequence[Any] = ()
) -> _CallParts:
    return _CallParts((goes_on, body), (list(carry), list(operands)), (*carry, *operands))


def _scan_parts(
    step: Node, carry: Sequence[Any], sequences: Sequence[Any], operands: Sequence[Any] = ()
) -> _CallParts:
    rows = range(len(carry), len(carry) + len(sequences))
    arguments = (list(carry), list(sequences), list(operands))
    return _CallParts((step,), arguments, (*carry, *sequences, *operands), rows)


def _map_parts(step: Node, sequences: Sequence[Any], operands: Sequence[Any] = ()) -> _CallParts:
    return _scan_parts(step, (), sequences, operands)


_HIGHER_ORDER_OPS: Mapping[Any, tuple[Any, Callable[..., _CallParts]]] = MappingProxyType(
    {
        _HIGHER.cond: (COND, _cond_parts),
        _HIGHER.while_loop: (WHILE_LOOP, _while_loop_parts),
        _HIGHER.scan: (SCAN, _scan_parts),
        _HIGHER.map_impl: (SCAN, _map_parts),
    }
)


def protect_control_flow(
    program: ExportedProgram,
    lower: LowerBranch,
    veto: Callable[[Node], Reason | None],
    inputs: Inputs = NO_INPUTS,
) -> ExportedProgram:
    """Return ``program`` with placeholder ops for the control flow that Core ML takes.

    Args:
        program: In ATen dialect; it is not changed.
        lower: Lowers a branch.
        veto: Returns the reason to keep a call out of Core ML, or None.
        inputs: The constant inputs, if the program is a branch itself.

    Raises:
        UnsupportedOperatorError: Core ML refuses a call of an op that ExecuTorch lacks.
    """
    if not any(node.target in _HIGHER_ORDER_OPS for node in program.graph.nodes):
        return program
    # A deep copy of the program would copy its constants too.
    module = GraphModule(program.graph_module, copy.deepcopy(program.graph))
    module.meta.update(program.graph_module.meta)
    copied = with_parts(program, graph_module=module)
    stored = known_values(copied, inputs)
    for node in list(copied.graph.nodes):
        if node.target not in _HIGHER_ORDER_OPS:
            continue
        reason = veto(node) or _protect_call(node, copied.graph_module, stored, lower)
        if reason is not None:
            _require_executorch(node, reason)
            _logger.info("%s stays out of Core ML: %s", node.name, reason)
    copied.graph.eliminate_dead_code()
    copied.graph_module.recompile()
    return copied


def _protect_call(
    node: Node,
    module: GraphModule,
    stored: Mapping[Node, torch.Tensor | None],
    lower: LowerBranch,
) -> Reason | None:
    """Replace a call by its placeholder op, or return why Core ML refuses it."""
    own_op, read_parts = _HIGHER_ORDER_OPS[node.target]
    parts = read_parts(*node.args, **node.kwargs)
    reason = next(_obstacles(parts), None)
    if reason is not None:
        return reason
    constants = {
        n: stored[value]
        for n, value in enumerate(parts.inputs)
        if value in stored and n not in parts.rows
    }
    branches: list[ExportedProgram] = []
    for graph in parts.graphs:
        lowered = lower(_export_branch(getattr(module, str(graph.target)), parts), constants)
        if isinstance(lowered, Reason):
            return Reason(lowered.code, f"in {graph.target}: {lowered.text}", lowered.remedy)
        branches.append(lowered)
    node.args, node.kwargs = (write_branches(branches), *parts.arguments), {}
    node.target = own_op
    node.meta["val"] = list(node.meta["val"])
    for item in list(node.users):
        if not item.meta["val"].dim():
            _reshape_to_scalar(item)
    return None


def _reshape_to_scalar(result: Node) -> None:
    """Reshape to rank 0: results of rank 0 have shape [1] here."""
    with result.graph.inserting_after(result):
        scalar = result.graph.call_function(torch.ops.aten.reshape.default, (result, []))
    scalar.meta = dict(result.meta)
    result.replace_all_uses_with(scalar, lambda user: user is not scalar)


def _obstacles(parts: _CallParts) -> Iterator[Reason]:
    for value in flatten((parts.arguments, parts.inputs)):
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
            remedy=reason.remedy
            or "Write the loop with ops that Core ML takes, or as torch's scan",
        )


def restore_control_flow(program: ExportedProgram, reason: Reason) -> None:
    """Replace placeholder ops by the higher-order ops of torch.

    Raises:
        UnsupportedOperatorError: ExecuTorch lacks the op.
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
                restore_control_flow(branch, reason)
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
    """Return a branch as a module without lifted inputs: its constants are buffers."""
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


def _export_branch(module: GraphModule, parts: _CallParts) -> ExportedProgram:
    values = [value.meta["val"] for value in parts.inputs]
    inputs = [
        torch.zeros(value.shape[1:] if n in parts.rows else value.shape, dtype=value.dtype)
        for n, value in enumerate(values)
    ]
    return torch.export.export(module, tuple(inputs))


def with_constants(branch: ExportedProgram, positions: Collection[int]) -> ExportedProgram:
    """Return a branch whose inputs at ``positions`` are constants without values, to judge calls.

    Args:
        branch: It shares its graph with the result.
        positions: Positions of the constant inputs.
    """
    signature, constants = copy.deepcopy(branch.graph_signature), dict(branch.constants)
    users = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in branch.graph.find_nodes(op="placeholder")}
    for position in positions:
        spec = users[position]
        spec.kind, spec.target = InputKind.CONSTANT_TENSOR, f"operand_{position}"
        constants[spec.target] = values[spec.arg.name]
    return with_parts(branch, graph_signature=signature, constants=constants)
