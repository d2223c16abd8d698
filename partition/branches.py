"""Control flow that stays outside of Core ML: its branches are partitioned, each like a program.

ExecuTorch lowers the partitions of branches as it lowers those of the program around them. What a
branch is called with, weights too, are its inputs there, so delegates take them as inputs.
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
from torch.utils import _pytree as pytree

from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.options import PartitionerOptions
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.partition.run import PartitionedProgram, PartitionRun
from coreml_delegate.partition.verdicts.filters import LeftOut


def partition_whole(
    program: ExportedProgram, options: PartitionerOptions, wide: WideIntegers, left_out: LeftOut
) -> PartitionedProgram:
    """Partition a program and the branches of control flow that stays in it.

    Args:
        program: In edge dialect; it is tagged, the branches included.
        options: The partitioner's.
        wide: See ``PartitionRun``.
        left_out: See there.

    Returns:
        One result. In the report calls of a branch have the names of branch and call.

    Raises:
        CoreMLDelegateError: See ``PartitionRun.partition``.
    """
    whole = PartitionRun(program, options, wide, left_out).partition()
    if options.compiling.enumerated_shapes:  # of the program's inputs, which branches have not
        return whole
    for call, place, branch in _branches(program.graph_module, program, ""):
        prefix = place.replace(".", "_") + "_"
        found = PartitionRun(branch, options, wide, left_out).partition(prefix=prefix)
        whole = PartitionedProgram(
            report=_with_branch(whole.report, found.report, place, call),
            compile_options={**whole.compile_options, **found.compile_options},
            blobs={**whole.blobs, **found.blobs},
        )
    return whole


def _branches(
    module: GraphModule, owner: ExportedProgram, path: str
) -> Iterator[tuple[str, str, ExportedProgram]]:
    """Yield the branches that ExecuTorch runs, outer ones before inner ones.

    Yields:
        The paths of the call and of the branch, and the branch.
    """
    seen: set[str] = set()
    for name, submodule, call in get_control_flow_submodules(module):
        branch = None if name in seen else _program_of(submodule, owner)
        seen.add(name)
        if branch is not None:
            yield f"{path}{call.name}", f"{path}{name}", branch
            yield from _branches(submodule, owner, f"{path}{name}.")


def _program_of(module: GraphModule, owner: ExportedProgram) -> ExportedProgram | None:
    """Return a branch as a program that shares its graph; None if it takes or gives other values.

    Args:
        module: The branch.
        owner: The program around it.
    """
    graph = module.graph
    inputs = [_argument(node) for node in graph.find_nodes(op="placeholder")]
    outputs = [_argument(value) for value in pytree.tree_leaves(graph.output_node().args[0])]
    if None in inputs or None in outputs:
        return None
    taken: list[Any] = [InputSpec(InputKind.USER_INPUT, arg, None) for arg in inputs if arg]
    given: list[Any] = [OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in outputs if arg]
    in_spec = pytree.tree_structure((tuple(arg.name for arg in inputs if arg), {}))
    out_spec = pytree.tree_structure(tuple(arg.name for arg in outputs if arg))
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    program = ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(taken, given),
        state_dict={},
        range_constraints=copy.deepcopy(owner.range_constraints),
        module_call_graph=[ModuleCallEntry("", call)],
        constants={},
        verifiers=[owner.verifier],
    )
    graph.owning_module = module
    return program


def _argument(value: Any) -> TensorArgument | SymIntArgument | None:
    found: Any = value.meta.get("val") if isinstance(value, Node) else None
    if isinstance(found, torch.Tensor):
        return TensorArgument(name=value.name)
    return SymIntArgument(name=value.name) if isinstance(found, torch.SymInt) else None


def _with_branch(
    report: DelegationReport, branch: DelegationReport, place: str, call: str
) -> DelegationReport:
    """Return a report with the calls of a branch, which tell themselves what the CPU lacks."""

    def named(name: str) -> str:
        return f"{place}.{name}"

    nodes = [
        replace(node, name=named(node.name), inputs=tuple(map(named, node.inputs)))
        for node in branch.nodes
    ]
    obstacles = [
        replace(obstacle, nodes=tuple(map(named, obstacle.nodes))) for obstacle in branch.obstacles
    ]
    own = [replace(node, cpu_obstacle=None) if node.name == call else node for node in report.nodes]
    return replace(
        report,
        nodes=(*own, *nodes),
        partitions=(*report.partitions, *branch.partitions),
        obstacles=(*report.obstacles, *obstacles),
        folds=(*report.folds, *branch.folds),
    )
