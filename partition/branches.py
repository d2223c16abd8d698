"""The branches of undelegated control flow, each as a program that is partitioned.

ExecuTorch lowers the partitions of branches like the partitions of the outer program. All operands
of a branch, weights included, are its inputs, so delegates take them as inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.graph_module import get_control_flow_submodules
from torch.export import ExportedProgram, ExportGraphSignature, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import GraphModule, Node

from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.patches.torch import pytree


def branches_of(
    module: GraphModule, owner: ExportedProgram, path: str = ""
) -> Iterator[tuple[str, str, ExportedProgram]]:
    """Yield the branches that ExecuTorch runs, outer branches first.

    Args:
        module: The graph whose control flow has the branches.
        owner: The program.
        path: Path of the graph in the program, with a dot at the end.

    Yields:
        The paths of the call and of the branch, and the branch.
    """
    visited: set[str] = set()
    for name, submodule, call in get_control_flow_submodules(module):
        branch = None if name in visited else _program_of(submodule, owner)
        visited.add(name)
        if branch is not None:
            yield f"{path}{call.name}", f"{path}{name}", branch
            yield from branches_of(submodule, owner, f"{path}{name}.")


def _program_of(module: GraphModule, owner: ExportedProgram) -> ExportedProgram | None:
    """Return a branch as a program that shares its graph; None for values but tensors and sizes.

    Args:
        module: The branch.
        owner: The outer program.
    """
    graph = module.graph
    inputs = [_argument(node) for node in graph.find_nodes(op="placeholder")]
    outputs = [_argument(value) for value in pytree.tree_leaves(graph.output_node().args[0])]
    if None in inputs or None in outputs:
        return None
    input_specs: list[Any] = [InputSpec(InputKind.USER_INPUT, arg, None) for arg in inputs if arg]
    output_specs: list[Any] = [
        OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in outputs if arg
    ]
    in_spec = pytree.tree_structure((tuple(arg.name for arg in inputs if arg), {}))
    out_spec = pytree.tree_structure(tuple(arg.name for arg in outputs if arg))
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    program = ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs, output_specs),
        state_dict={},
        range_constraints=copy.deepcopy(owner.range_constraints),
        module_call_graph=[ModuleCallEntry("", call)],
        constants={},
        verifiers=[owner.verifier],
    )
    graph.owning_module = module
    return program


def _argument(value: Any) -> TensorArgument | SymIntArgument | None:
    traced: Any = value.meta.get("val") if isinstance(value, Node) else None
    if isinstance(traced, torch.Tensor):
        return TensorArgument(name=value.name)
    return SymIntArgument(name=value.name) if isinstance(traced, torch.SymInt) else None


def add_branch(
    report: DelegationReport, branch: DelegationReport, path: str, call: str
) -> DelegationReport:
    """Add the report on a branch; its calls replace the control flow's CPU obstacle."""

    def qualified(name: str) -> str:
        return f"{path}.{name}"

    nodes = [
        replace(node, name=qualified(node.name), inputs=tuple(map(qualified, node.inputs)))
        for node in branch.nodes
    ]
    obstacles = [
        replace(obstacle, nodes=tuple(map(qualified, obstacle.nodes)))
        for obstacle in branch.obstacles
    ]
    outer_nodes = [
        replace(node, cpu_obstacle=None) if node.name == call else node for node in report.nodes
    ]
    return replace(
        report,
        nodes=(*outer_nodes, *nodes),
        partitions=(*report.partitions, *branch.partitions),
        obstacles=(*report.obstacles, *obstacles),
        folds=(*report.folds, *branch.folds),
    )
