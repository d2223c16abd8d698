"""Calls of half-precision programs that the rules refuse, and that the CPU computes in half.

A program is promoted to fp32 for Core ML, before it is known which calls Core ML takes. So its
calls are judged promoted and decomposed, as they will be. A call that stays on the CPU in all its
parts is then left in half precision, with its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from executorch.exir import EdgeCompileConfig, to_edge
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import GETITEM, target_name, tensors_of
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.partition.verdicts.cpu_kernels import is_composite, takes_half
from coreml_delegate.partition.verdicts.filters import sources_of
from coreml_delegate.partition.verdicts.operator_support import is_preserved
from coreml_delegate.transforms.half_precision import NARROW


def refused_half_calls(
    program: ExportedProgram,
    promoted: ExportedProgram,
    finished: ExportedProgram,
    refusals: Callable[[ExportedProgram], Mapping[Node, Reason]],
) -> dict[str, Reason]:
    """Return the calls that the rules refuse in fp32 too, and whose CPU kernels take half.

    Args:
        program: In ATen dialect, in half precision.
        promoted: The program in fp32; calls have the same names.
        finished: ``promoted``, as ExecuTorch decomposes it.
        refusals: Returns the calls of a program that the rules or the user refuse.

    Returns:
        The reason to refuse each call, by its name. Calls that the user excludes are not among
        them, nor calls of which Core ML takes a part.
    """
    refused = _refused_whole(refusals(finished))
    half_calls = {node.name for node in program.graph.nodes if _is_half_call(node)}
    names = half_calls & _names_in(promoted.graph, refused)
    if not names:
        return {}
    edge = _decompose(finished, {node.target for node in refused})
    reasons = refusals(edge)
    computed = _calls_on_inputs(edge)
    parts: dict[str, list[Node]] = {name: [] for name in names}
    for node in edge.graph.nodes:
        if node.op != "call_function" or not list(tensors_of(node.meta.get("val"))):
            continue
        for name in names.intersection(_names_in(promoted.graph, [node])):
            parts[name].append(node)
    return {
        name: next(reasons[node] for node in nodes if node in reasons)
        for name, nodes in parts.items()
        if all(map(takes_half, nodes))
        and not reasons.keys().isdisjoint(nodes)
        and all(node in reasons for node in nodes if node in computed)
    }


def _refused_whole(refusals: Mapping[Node, Reason]) -> list[Node]:
    """Return the calls in ATen dialect that the rules refuse.

    Composite calls without a record are not among them: their parts are what Core ML takes.
    """
    return [
        node
        for node, reason in refusals.items()
        if reason.code is not ReasonCode.SKIPPED
        and not (reason.code is ReasonCode.NO_RULE and is_composite(node.target))
    ]


def _is_half_call(node: Node) -> bool:
    if node.op != "call_function" or target_name(node.target) == GETITEM:
        return False
    values = (value.meta.get("val") for value in (node, *node.all_input_nodes))
    return any(tensor.dtype in NARROW for value in values for tensor in tensors_of(value))


def _names_in(graph: Graph, nodes: Iterable[Node]) -> set[str]:
    """Return the names that calls, or the calls that they were decomposed from, have in a graph."""
    names: set[str] = set()
    for node in nodes:
        if node.graph is graph:
            names.add(node.name)
        else:
            names.update(s.name for s in sources_of(node) if s.graph_id == id(graph))
    return names


def _decompose(program: ExportedProgram, targets: Collection[Any]) -> ExportedProgram:
    """Return a program in edge dialect; ops that Core ML has whole stay, except ``targets``."""
    ops = {node.target for node in program.graph.nodes if is_preserved(node)}
    config = EdgeCompileConfig(
        _check_ir_validity=False, preserve_ops=sorted(ops - set(targets), key=str)
    )
    return to_edge(program, compile_config=config).exported_program()


def _calls_on_inputs(program: ExportedProgram) -> set[Node]:
    """Return the calls that do not depend on constants only."""
    constants = set(stored_nodes(program))
    calls: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function":
            is_known = node.all_input_nodes and constants.issuperset(node.all_input_nodes)
            (constants if is_known else calls).add(node)
    return calls
