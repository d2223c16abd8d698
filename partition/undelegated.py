"""Composite calls in programs whose other calls of the op are kept whole: decomposed one by one.

ExecuTorch decomposes all calls of an op or none. Before lowering, calls that Core ML refuses are
decomposed, so that it takes what it can of their parts, where the user leaves out other calls of
the op. After lowering, the calls are decomposed that no backend took and ExecuTorch has no kernel
for: whether a call goes into a partition is certain only when all partitions are made, because one
may fail to convert or be dropped.

Calls of custom ops that no backend took are checked, for which ExecuTorch needs more than torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch._ops import OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from coreml_delegate.control_flow import PROTECTED
from coreml_delegate.conversion.subgraph import call_of, program_of
from coreml_delegate.errors import LoweringError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import called_target, is_placeholder_op, overload_of, target_name
from coreml_delegate.partition.verdicts.cpu_kernels import cpu_obstacles, has_kernel, is_custom
from coreml_delegate.source_lines import source_of
from coreml_delegate.transforms.compressed_weights import decompose_undelegated_dequantize
from coreml_delegate.transforms.control_flow import restore_control_flow
from coreml_delegate.transforms.recurrent_layers import require_fixed_steps

_PREFIX = "coreml_delegate_literal"
_BRANCH = "coreml_delegate_branch"
_UNDELEGATED = Reason(ReasonCode.USE, "no backend took it")


def decompose_undelegated(program: ExportedProgram, preserved: Collection[OpOverload]) -> None:
    """Replace calls of preserved ops by their decompositions.

    Outside of branches, calls for which ExecuTorch has a kernel stay. In branches another
    partitioner may not have looked, and ExecuTorch ends at an op that one kept there in vain.

    Args:
        program: In edge dialect, lowered; it is changed, the branches of control flow included.
        preserved: The ops that were kept from decomposition.

    Raises:
        UnsupportedOperatorError: See ``require_fixed_steps`` and ``restore_control_flow``.
    """
    # ExecuTorch takes core ops as they are.
    everywhere = {op for op in preserved if torch.Tag.core not in op.tags}
    at_root = {op for op in everywhere if not has_kernel(op)}
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            ops = at_root if module is program.graph_module else everywhere
            calls = [node for node in module.graph.nodes if _is_undelegated(node, ops)]
            if calls:
                for call in calls:
                    if is_placeholder_op(call.target):
                        require_fixed_steps(call, _UNDELEGATED)
                _decompose(calls, module, program, _to_edge)


def decompose_calls(calls: Sequence[Node], program: ExportedProgram) -> None:
    """Replace calls of composite ops by their decompositions.

    Args:
        calls: In graph order.
        program: In ATen dialect; it is changed.
    """
    table = default_decompositions()
    used: dict[Any, Callable[..., Any]] = {call.target: table[call.target] for call in calls}
    _decompose(calls, program.graph_module, program, lambda whole: whole.run_decompositions(used))


def require_out_variants(program: ExportedProgram) -> None:
    """Check that ExecuTorch can lower the calls of custom ops.

    Args:
        program: In edge dialect, lowered.

    Raises:
        LoweringError: A custom op has no out variant; says how to register one.
    """
    graphs = (m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule))
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


def _is_undelegated(node: Node, ops: Collection[OpOverload]) -> bool:
    overload = overload_of(node.target)
    return overload in ops or overload in PROTECTED or is_placeholder_op(node.target)


def _to_edge(whole: ExportedProgram) -> ExportedProgram:
    plain = decompose_undelegated_dequantize(whole, None, veto=lambda _: _UNDELEGATED)
    restore_control_flow(plain, _UNDELEGATED)
    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge(plain, compile_config=config).exported_program()


def _decompose(
    calls: Sequence[Node],
    module: GraphModule,
    program: ExportedProgram,
    lower: Callable[[ExportedProgram], ExportedProgram],
) -> None:
    whole, originals = program_of(calls, program, constants={}, apart=True, to_aten=True)
    arguments = _arguments(whole, originals)
    results = [originals[str(name)] for name in whole.graph_signature.user_outputs]
    parts = lower(whole)
    computed: Any = parts.graph.output_node().args[0]
    places = _places(parts, dict(zip(computed, map(call_of, results), strict=True)))
    copies = dict(_inputs(parts, arguments, places, module))
    for node in parts.graph.nodes:
        if node in places and (node.op == "call_function" or _is_branch(node, parts)):
            if node.op == "get_attr":
                _move_branch(node, parts, module)
            with module.graph.inserting_before(places[node]):
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = _meta(node, places[node])
    is_main = module is program.graph_module
    hook: Any = module
    # The signature names the outputs.
    with (
        hook._set_replace_hook(program.graph_signature.get_replace_hook())
        if is_main
        else nullcontext()
    ):
        for result, node in zip(results, computed, strict=True):
            result.replace_all_uses_with(copies[node])
    for call in reversed(calls):
        for unused in (*call.users, call):
            module.graph.erase_node(unused)
    module.recompile()


def _is_branch(node: Node, program: ExportedProgram) -> bool:
    attribute = getattr(program.graph_module, str(node.target), None)
    return node.op == "get_attr" and isinstance(attribute, GraphModule)


def _move_branch(node: Node, parts: ExportedProgram, module: GraphModule) -> None:
    """Give a module the branch that a node names, under a name that it has not yet."""
    branch = getattr(parts.graph_module, str(node.target))
    node.target = next(n for i in range(10**9) if not hasattr(module, n := f"{_BRANCH}_{i}"))
    module.add_module(str(node.target), branch)


def _arguments(whole: ExportedProgram, originals: Mapping[str, Node]) -> list[Node]:
    """Return the nodes in place of which a program made of calls has inputs, in their order."""
    found = {
        copied: argument
        for call in whole.graph.nodes
        if call.name in originals
        for copied, argument in zip(
            call.all_input_nodes, originals[call.name].all_input_nodes, strict=True
        )
    }
    return [found[node] for node in whole.graph.find_nodes(op="placeholder")]


def _places(parts: ExportedProgram, ends: Mapping[Node, Node]) -> dict[Node, Node]:
    """Return for every node that a result depends on the first call that is to follow it."""
    places = dict(ends)
    for node in reversed(parts.graph.nodes):
        if node in places:
            places.update(dict.fromkeys(node.all_input_nodes, places[node]))
    return places


def _inputs(
    parts: ExportedProgram,
    arguments: Sequence[Node],
    places: Mapping[Node, Node],
    module: GraphModule,
) -> Iterator[tuple[Node, Node]]:
    """Yield the placeholders, each with the node it stands for; literals become attributes."""
    passed = iter(arguments)
    values: dict[str, Any] = {**parts.state_dict, **parts.constants}
    placeholders = parts.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, parts.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            yield node, next(passed)
        elif node in places:
            name = next(n for i in range(10**9) if not hasattr(module, n := f"{_PREFIX}_{i}"))
            module.register_buffer(name, values[str(spec.target)])
            with module.graph.inserting_before(places[node]):
                attribute = module.graph.get_attr(name)
            attribute.meta = _meta(node, places[node])
            yield node, attribute


def _meta(node: Node, call: Node) -> dict[str, Any]:
    """Return the metadata of the call, with the value of the node."""
    origin = {key: value for key, value in call.meta.items() if key != "tensor_meta"}
    return origin | {"val": node.meta.get("val")}
