"""How rewrites edit a graph.

The rewritten node stays, because the graph signature names outputs: new calls are inserted before
it, and it becomes the last call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from coreml_delegate.ops.call import GETITEM, OpCall, overload_of, target_name
from coreml_delegate.ops.record import Rewrite
from coreml_delegate.patches.executorch import exir_ops
from coreml_delegate.patches.torch import detect_fake_mode, enable_python_dispatcher, schema_of

ATEN: Any = exir_ops.edge.aten


def insert(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call before ``node`` and return it."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    operands = map_arg((args, kwargs), lambda n: n.meta["val"])
    # C++ kernels would specialize symbolic sizes to their hints.
    mode = detect_fake_mode(node.meta["val"])
    with mode if mode is not None else nullcontext(), enable_python_dispatcher():
        new.meta["val"] = overload_of(target)(*operands[0], **operands[1])
    return new


def become(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Turn ``node`` into another call with the same result."""
    node.target, node.args, node.kwargs = target, args, kwargs


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    return dict(OpCall.of(node).arguments)


def set_arguments(node: Node, **changes: Any) -> None:
    """Set arguments of a call; by position if all arguments before them are positional."""
    schema = schema_of(overload_of(node.target)).arguments
    positions = {a.name: n for n, a in enumerate(schema)}
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changes.items():
        position = positions[name]
        if name in kwargs or schema[position].kwarg_only or position > len(args):
            kwargs[name] = value
        else:
            args[position : position + 1] = [value]
    node.args, node.kwargs = tuple(args), kwargs


def only_result(node: Node) -> Node:
    """Return the node of the only used result: the call itself, or its ``getitem``.

    Exported graphs have a ``getitem`` for every result of a call, without users if unused.
    """
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    return next(u for u in node.users if target_name(u.target) == GETITEM and u.users)


def value_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node's result."""
    return node.meta["val"]


def shape_of(node: Node) -> list[Any]:
    """Return the sizes of a node's result, symbols for dynamic dimensions."""
    return list(value_of(node).shape)


def cast(node: Node, value: Any, dtype: torch.dtype) -> Any:
    """``value``, cast before ``node`` if it is a tensor of another dtype; numbers are converted."""
    if isinstance(value, Node):
        if value_of(value).dtype is dtype:
            return value
        return insert(node, ATEN._to_copy.default, value, dtype=dtype)
    return number(value, dtype)


def number(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, converted to float if it is an integer and ``dtype`` is floating."""
    return float(value) if dtype.is_floating_point and type(value) in (int, bool) else value


def truth(node: Node, value: Node) -> Node:
    """Return a bool node, inserted before ``node``: true where ``value`` is not zero."""
    if value_of(value).dtype is torch.bool:
        return value
    return insert(node, ATEN.ne.Scalar, value, 0)


def cast_after(node: Node) -> None:
    """Cast the result to its PyTorch dtype; coremltools may choose another."""
    call = insert(node, node.target, *node.args, **node.kwargs)
    become(node, ATEN._to_copy.default, call, dtype=value_of(node).dtype)


def promote(*names: str) -> Rewrite:
    """Return a rewrite that casts the named arguments to the dtype of the result."""

    def rewrite(node: Node) -> None:
        dtype, arguments = value_of(node).dtype, arguments_of(node)
        set_arguments(node, **{n: cast(node, arguments[n], dtype) for n in names})

    return rewrite


def fill_like(node: Node, like: Node, value: Any) -> Node:
    """Return ``value`` if it is a node, else a tensor like ``like`` that is full of it."""
    return value if isinstance(value, Node) else insert(node, ATEN.full_like.default, like, value)


def positional(*names: str) -> Rewrite:
    """Return a rewrite that passes the named arguments by position, cast to the result's dtype.

    Coremltools overlooks some keywords and defaults, and does not promote numbers.
    """

    def rewrite(node: Node) -> None:
        arguments, dtype = arguments_of(node), value_of(node).dtype
        become(node, node.target, *(cast(node, arguments[n], dtype) for n in names))

    return rewrite


def decompose(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """Return ``program`` with the ops of a table decomposed; unchanged if it calls none of them."""
    targets = {node.target for node in program.graph.nodes}
    present = {op: function for op, function in table.items() if op in targets}
    return program.run_decompositions(present) if present else program


def all_nodes(program: ExportedProgram) -> Iterator[Node]:
    """Yield the nodes of a program's graph and of the graphs of its branches."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def add_constant(
    program: ExportedProgram,
    name: str,
    value: torch.Tensor,
    like: Node,
    *,
    dtype: torch.dtype = torch.float32,
) -> Node:
    """Add a constant to a program, with the metadata of ``like``."""
    constant = value.detach().to(dtype).clone(memory_format=torch.contiguous_format)
    node = add_placeholder(program, name, constant, like)
    program.graph_signature.input_specs.insert(
        0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
    )
    program.constants[name] = constant
    return node


def add_placeholder(program: ExportedProgram, name: str, value: torch.Tensor, like: Node) -> Node:
    """Insert a placeholder before all nodes; the caller inserts its input spec at index 0."""
    start = next(iter(program.graph.nodes))
    with program.graph.inserting_before(start):
        node = program.graph.placeholder(name)
    node.meta = dict(like.meta)
    mode = next(
        (v.fake_mode for n in program.graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode")),
        None,
    )
    node.meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
    return node


def remove_unused(program: ExportedProgram, sources: Collection[Node]) -> None:
    """Remove parameters, buffers and literals among ``sources`` without users."""
    specs = program.graph_signature.input_specs
    state: dict[str, Any] = program.state_dict
    unused = {node.name: node for node in sources if node.op == "placeholder" and not node.users}
    for name in program.graph_signature.user_inputs:
        unused.pop(str(name), None)
    for spec in [spec for spec in specs if spec.arg.name in unused]:
        specs.remove(spec)
        program.graph.erase_node(unused[spec.arg.name])
        state.pop(str(spec.target), None)
        program.constants.pop(str(spec.target), None)


def unite_copies(program: ExportedProgram) -> None:
    """Replace duplicate placeholders of a constant with the first.

    ExecuTorch makes one per use of a constant that several partitions share; coremltools stores
    each, and fails if a buffer occurs twice.
    """
    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    placeholders: dict[str, Node] = {}
    for spec in list(specs):
        node = nodes[spec.arg.name]
        if spec.target is not None and placeholders.setdefault(spec.target, node) is not node:
            node.replace_all_uses_with(placeholders[spec.target])
            program.graph.erase_node(node)
            specs.remove(spec)
