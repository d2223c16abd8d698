"""Programs in ``channels_last``, with row-major tensors between copies at their inputs and results.

Core ML knows no strides, so a call on a tensor in another order would stay on the CPU, and so would
the calls that follow. Where an input has another order, or a call asks for one, the input is copied
to row-major order, every tensor inside has it, and a result that PyTorch gives in ``channels_last``
is copied to it. The copies at the ends stay on the CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from coreml_delegate.ops.boundary import is_row_major
from coreml_delegate.patches.torch import (
    OpOverload,
    detect_fake_mode,
    drop_pending_sizes,
    schema_of,
    with_parts,
)

logger = logging.getLogger(__name__)

_ATEN: Any = torch.ops.aten
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank
_OF_STRIDES = frozenset({_ATEN.as_strided.default, _ATEN.stride.int})


def keep_row_major(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` with row-major tensors inside, or unchanged if it has only these.

    Args:
        program: In ATen dialect; it is not changed.

    Returns:
        A program with the same interface and equal results. A program with control flow, with
        calls that take strides, that writes to such an input, or that cannot be rewritten is
        returned unchanged.
    """
    inputs = _strided_inputs(program)
    if not inputs and not any(_asks_for_order(node) for node in program.graph.nodes):
        return program
    obstacle = next((node for node in program.graph.nodes if _depends_on_strides(node)), None)
    if obstacle is not None:
        logger.info("the order of dimensions stays as it is because of %s", obstacle.name)
        return program
    try:
        return _rewritten(program, inputs)
    except Exception as error:  # noqa: BLE001 - the program lowers without it, with fewer delegated calls
        logger.warning("the order of dimensions stays as it is: %s", error)
        return program


def _rewritten(program: ExportedProgram, inputs: frozenset[str]) -> ExportedProgram:
    original = program
    if any(_writes(node) for node in program.graph.nodes):
        program = program.run_decompositions({})  # functional: no view has to share memory
        if inputs & set(program.graph_signature.user_inputs_to_mutate.values()):
            return original
    module = copy.deepcopy(program.graph_module)
    # The copy renames nodes with names of Python builtins (``input``); the signature does not.
    for node, copied in zip(program.graph.nodes, module.graph.nodes, strict=True):
        copied.name = node.name
    signature = copy.deepcopy(program.graph_signature)
    edited: ExportedProgram = with_parts(
        program,
        graph_module=module,
        graph_signature=signature,
        state_dict=_values_in_row_major(program.state_dict),
        constants=_values_in_row_major(program.constants),
    )
    formats = [
        _format(node.meta.get("val")) if isinstance(node, Node) else None
        for node in _results(module)
    ]
    _copy_inputs(module, inputs)
    for node in module.graph.nodes:
        if _asks_for_order(node):
            node.args = map_aggregate(node.args, _row_major_format)
            node.kwargs = map_aggregate(node.kwargs, _row_major_format)
        # PyTorch has no view where the dimensions of a row-major tensor are permuted.
        if node.target is _ATEN.view.default:
            node.target = _ATEN.reshape.default
    _propagate(module, inputs)
    _copy_results(edited, formats)
    module.graph.lint()
    module.recompile()
    return edited


def _strided_inputs(program: ExportedProgram) -> frozenset[str]:
    """Return the names of inputs that are not row-major."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    names = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    return frozenset(
        name
        for name in names
        if isinstance(value := values.get(name), torch.Tensor) and not is_row_major(value)
    )


def _asks_for_order(node: Node) -> bool:
    """Whether an argument of a call is ``channels_last``."""
    values = (*node.args, *node.kwargs.values()) if node.op == "call_function" else ()
    return any(isinstance(v, torch.memory_format) and v in _FORMATS.values() for v in values)


def _depends_on_strides(node: Node) -> bool:
    """Whether a node is a call that takes strides, or a branch of control flow."""
    if node.op == "get_attr":
        return isinstance(getattr(node.graph.owning_module, str(node.target), None), GraphModule)
    return node.target in _OF_STRIDES


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _row_major_format(value: Any) -> Any:
    return torch.contiguous_format if value in _FORMATS.values() else value


def _format(value: Any) -> torch.memory_format | None:
    """Return ``channels_last`` if a tensor lies so in memory and is not row-major, too."""
    if not isinstance(value, torch.Tensor) or value.dim() not in _FORMATS or is_row_major(value):
        return None
    # ``is_contiguous`` would fix symbolic sizes.
    return _FORMATS[value.dim()] if is_row_major(value.movedim(1, -1)) else None


def _in_row_major(value: Any) -> Any:
    if _format(value) is None:
        return value
    copied = value.detach().contiguous()
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(copied, value.requires_grad) if is_parameter else copied


def _values_in_row_major(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in row-major order; a tensor with several names stays shared."""
    copied = {id(value): _in_row_major(value) for value in values.values()}
    return {name: copied[id(value)] for name, value in values.items()}


def _copy_inputs(module: GraphModule, names: frozenset[str]) -> None:
    graph = module.graph
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for node in graph.find_nodes(op="placeholder"):
        users = [user for user in node.users if user.op != "output"]
        if node.name in names and users:
            with graph.inserting_before(first):
                copied = _copy(node, torch.contiguous_format, users[0])
            for user in users:
                user.replace_input_with(node, copied)


def _copy(node: Node, order: torch.memory_format, like: Node) -> Node:
    """Insert a copy of a tensor, with the source lines and modules of another call."""
    copied = node.graph.call_function(_ATEN.clone.default, (node,), {"memory_format": order})
    copied.meta = {key: value for key, value in like.meta.items() if key != "custom"}
    copied.meta["val"] = node.meta["val"].clone(memory_format=order)
    return copied


def _propagate(module: GraphModule, inputs: frozenset[str]) -> None:
    """Recompute the value of every node."""
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [
        node.meta["val"] if node.name in inputs else _in_row_major(node.meta["val"])
        for node in placeholders
    ]
    mode = detect_fake_mode(values)
    drop_pending_sizes(mode)
    for node in module.graph.nodes:
        node.meta.pop("tensor_meta", None)
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)


def _results(module: GraphModule) -> tuple[Any, ...]:
    results: Any = module.graph.output_node().args[0]
    return tuple(node for node in results)


def _copy_results(program: ExportedProgram, orders: list[torch.memory_format | None]) -> None:
    """Copy results to the orders that they had."""
    output, specs = program.graph.output_node(), program.graph_signature.output_specs
    results = list(_results(program.graph_module))
    for n, (node, spec, order) in enumerate(zip(results, specs, orders, strict=True)):
        if order is not None and spec.kind is OutputKind.USER_OUTPUT and node.op != "placeholder":
            with program.graph.inserting_before(output):
                results[n] = _copy(node, order, node)
            spec.arg = TensorArgument(results[n].name)
    output.args = (tuple(results),)
    output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in results)
