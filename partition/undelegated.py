"""Decomposes single calls of composite ops whose other calls are preserved.

ExecuTorch decomposes all calls of an op or none. If the user excludes some calls of an op, the
calls that Core ML refuses are decomposed before lowering, so that it takes their parts. After
lowering, the calls are decomposed that no backend took and ExecuTorch has no kernel for: partitions
are final only then, because one may fail to convert or be dropped.

Undelegated calls of custom ops are checked for the out variants that ExecuTorch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from coreml_delegate.errors import LoweringError
from coreml_delegate.exported.source_lines import source_of
from coreml_delegate.lowering.subgraph import call_of, program_of
from coreml_delegate.opaque_ops import is_protected, restore_all
from coreml_delegate.opaque_ops.recorded_compression import restore_recorded_weights
from coreml_delegate.opaque_ops.recurrent_layers import require_fixed_steps
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import called_target, is_placeholder_op, overload_of, target_name
from coreml_delegate.partition.verdicts.cpu_kernels import cpu_obstacles, has_kernel, is_custom
from coreml_delegate.patches.torch import OpOverload, replace_in_signature

_PREFIX = "coreml_delegate_literal"
_BRANCH = "coreml_delegate_branch"
_UNDELEGATED = Reason(ReasonCode.USE, "no backend took it")


def decompose_undelegated(program: ExportedProgram, preserved: Collection[OpOverload]) -> None:
    """Replace undelegated calls of preserved ops by their decompositions.

    Outside of branches, calls for which ExecuTorch has a kernel stay. Other partitioners may ignore
    branches, and ExecuTorch fails at a preserved op there.

    Args:
        program: In edge dialect, lowered; it is changed, the branches of control flow included.
        preserved: The ops protected from decomposition.

    Raises:
        UnsupportedOperatorError: See ``require_fixed_steps`` and ``restore_all``.
    """
    # ExecuTorch does not decompose core ops.
    in_branches = {op for op in preserved if torch.Tag.core not in op.tags}
    at_root = {op for op in in_branches if not has_kernel(op)}
    for module in _modules_outside_delegates(program.graph_module):
        restore_recorded_weights(module.graph)
        ops = at_root if module is program.graph_module else in_branches
        calls = [
            node
            for node in module.graph.nodes
            if overload_of(node.target) in ops or is_protected(node)
        ]
        if calls:
            for call in calls:
                if is_placeholder_op(call.target):
                    require_fixed_steps(call, _UNDELEGATED)
            _decompose(calls, module, program, _to_edge)


def _modules_outside_delegates(module: GraphModule) -> Iterator[GraphModule]:
    """Yield a module and the branches in it; the programs of delegates are their backends'."""
    yield module
    children = dict(module.named_children())
    for node in module.graph.nodes:
        branch = children.get(str(node.target)) if node.op == "get_attr" else None
        if isinstance(branch, GraphModule):
            yield from _modules_outside_delegates(branch)


def decompose_calls(calls: Sequence[Node], program: ExportedProgram) -> None:
    """Replace calls of composite ops by their decompositions.

    Args:
        calls: In graph order.
        program: In ATen dialect; it is changed.
    """
    table = default_decompositions()
    decompositions: dict[Any, Callable[..., Any]] = {
        call.target: table[call.target] for call in calls
    }
    _decompose(
        calls,
        program.graph_module,
        program,
        lambda subprogram: subprogram.run_decompositions(decompositions),
    )


def require_out_variants(program: ExportedProgram) -> None:
    """Check that ExecuTorch can lower the calls of custom ops.

    Args:
        program: In edge dialect, lowered.

    Raises:
        LoweringError: A custom op has no out variant; the remedy says how to register it.
    """
    graphs = (module.graph for module in _modules_outside_delegates(program.graph_module))
    calls = [n for graph in graphs for n in graph.nodes if is_custom(overload_of(called_target(n)))]
    for node, reason in cpu_obstacles(calls).items():
        if reason.code is ReasonCode.OUT_VARIANT:
            name, line = target_name(called_target(node)), source_of(node)
            raise LoweringError(
                "ExecuTorch cannot lower a custom operator that no backend took",
                got=f"{name}{f' at {line}' if line else ''}",
                expected="an operator with an out variant",
                remedy=reason.remedy,
            )


def _to_edge(subprogram: ExportedProgram) -> ExportedProgram:
    config = EdgeCompileConfig(_check_ir_validity=False)
    restored = restore_all(subprogram, _UNDELEGATED)
    return to_edge(restored, compile_config=config).exported_program()


def _decompose(
    calls: Sequence[Node],
    module: GraphModule,
    program: ExportedProgram,
    lower: Callable[[ExportedProgram], ExportedProgram],
) -> None:
    subprogram, originals = program_of(calls, program, constants={}, separate=True, to_aten=True)
    arguments = _arguments(subprogram, originals)
    results = [originals[str(name)] for name in subprogram.graph_signature.user_outputs]
    lowered = lower(subprogram)
    outputs: Any = lowered.graph.output_node().args[0]
    first_users = _first_users(lowered, dict(zip(outputs, map(call_of, results), strict=True)))
    copies = dict(_inputs(lowered, arguments, first_users, module))
    for node in lowered.graph.nodes:
        if node in first_users and (node.op == "call_function" or _is_branch(node, lowered)):
            if node.op == "get_attr":
                _move_branch(node, lowered, module)
            with module.graph.inserting_before(first_users[node]):
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = _meta(node, first_users[node])
    is_main = module is program.graph_module
    # Replacing an output has to update the signature.
    with replace_in_signature(module, program) if is_main else nullcontext():
        for result, node in zip(results, outputs, strict=True):
            result.replace_all_uses_with(copies[node])
    for call in reversed(calls):
        for unused in (*call.users, call):
            module.graph.erase_node(unused)
    module.recompile()


def _is_branch(node: Node, program: ExportedProgram) -> bool:
    attribute = getattr(program.graph_module, str(node.target), None)
    return node.op == "get_attr" and isinstance(attribute, GraphModule)


def _move_branch(node: Node, lowered: ExportedProgram, module: GraphModule) -> None:
    """Move the branch that a node refers to into a module, under a new name."""
    branch = getattr(lowered.graph_module, str(node.target))
    node.target = next(n for i in range(10**9) if not hasattr(module, n := f"{_BRANCH}_{i}"))
    module.add_module(str(node.target), branch)


def _arguments(subprogram: ExportedProgram, originals: Mapping[str, Node]) -> list[Node]:
    """Return the arguments of the original calls for the inputs of the subprogram, in order."""
    originals_of_copies = {
        copied: argument
        for call in subprogram.graph.nodes
        if call.name in originals
        for copied, argument in zip(
            call.all_input_nodes, originals[call.name].all_input_nodes, strict=True
        )
    }
    return [originals_of_copies[node] for node in subprogram.graph.find_nodes(op="placeholder")]


def _first_users(lowered: ExportedProgram, calls: Mapping[Node, Node]) -> dict[Node, Node]:
    """Map every node that a result depends on to the first call that needs it."""
    first_users = dict(calls)
    for node in reversed(lowered.graph.nodes):
        if node in first_users:
            first_users.update(dict.fromkeys(node.all_input_nodes, first_users[node]))
    return first_users


def _inputs(
    lowered: ExportedProgram,
    arguments: Sequence[Node],
    first_users: Mapping[Node, Node],
    module: GraphModule,
) -> Iterator[tuple[Node, Node]]:
    """Yield the placeholders with their replacements; literals become attributes."""
    originals = iter(arguments)
    values: dict[str, Any] = {**lowered.state_dict, **lowered.constants}
    placeholders = lowered.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, lowered.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            yield node, next(originals)
        elif node in first_users:
            name = next(n for i in range(10**9) if not hasattr(module, n := f"{_PREFIX}_{i}"))
            module.register_buffer(name, values[str(spec.target)])
            with module.graph.inserting_before(first_users[node]):
                attribute = module.graph.get_attr(name)
            attribute.meta = _meta(node, first_users[node])
            yield node, attribute


def _meta(node: Node, call: Node) -> dict[str, Any]:
    """Return the metadata of the call, with the value of the node."""
    origin = {key: value for key, value in call.meta.items() if key != "tensor_meta"}
    return origin | {"val": node.meta.get("val")}
