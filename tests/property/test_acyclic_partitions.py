"""ExecuTorch can cut the partitions out of any graph, whichever calls are refused.

Partitions could depend on each other in a circle by their calls, and by constants and buffers that
several of them use. So graphs are drawn with all of these, and cut by ExecuTorch's own
``to_backend``; the graph with delegates computes the same as before.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir.backend.backend_api import to_backend, validation_disabled
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import get_lowered_submodules
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._export.verifier import load_verifier
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from coreml_delegate.lowering.delegation_tags import cut_partitions, tag_of
from coreml_delegate.lowering.store import fingerprint
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition.grouping.decision import decide
from coreml_delegate.partition.partitioning import PartitionerOptions
from coreml_delegate.partition.verdicts.parts import refuse_results

pytestmark = pytest.mark.property

ATEN = torch.ops.aten
ELEMENTS = 4
KINDS = {
    "input": InputKind.USER_INPUT,
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "written": InputKind.BUFFER,
    "literal": InputKind.CONSTANT_TENSOR,
}


@dataclass(frozen=True)
class Step:
    """One operation of a program.

    Attributes:
        op: Which.
        sources: Which values it takes, counted back from the latest.
        refused_in: Before which round of confirmation its calls turn out to be refused, or None.
    """

    op: str
    sources: tuple[int, int]
    refused_in: int | None


class Sketch:
    """A program; all its values have as many elements.

    Args:
        kinds: Of its placeholders.
        steps: Its operations.
        returned: Which values it returns, counted back from the latest.
    """

    def __init__(self, kinds: Sequence[str], steps: Sequence[Step], returned: Sequence[int]):
        self.graph, self.root, self.mode = Graph(), nn.Module(), FakeTensorMode()
        self.state: dict[str, torch.Tensor] = {}
        self.literals: dict[str, torch.Tensor] = {}
        self.inputs: list[InputSpec] = []
        self.refused_in: dict[Node, int] = {}
        for n, kind in enumerate(sorted(kinds, key=list(KINDS).index)):
            self.placeholder(kind, f"{kind}_{n}")
        self.values = list(self.graph.nodes)
        written = [v for v in self.values if v.name.startswith("written")]
        for step in steps:
            self.perform(step)
        computed = [v for v in self.values if v.op == "call_function"]
        mutations = list(zip(written, reversed(computed), strict=False))
        results = [self.values[-1 - n % len(self.values)] for n in returned]
        self.graph.output((*(value for _, value in mutations), *results))
        self.graph.eliminate_dead_code()  # ExecuTorch shows partitioners no other
        self.outputs = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), buffer.name)
            for buffer, value in mutations
        ] + [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(v.name), None) for v in results]

    def placeholder(self, kind: str, name: str) -> None:
        node, value = self.graph.placeholder(name), torch.rand(ELEMENTS)
        node.meta["val"] = self.mode.from_tensor(value)
        target = None if kind == "input" else name
        persistent = True if KINDS[kind] is InputKind.BUFFER else None
        spec = InputSpec(KINDS[kind], TensorArgument(name), target, persistent)
        self.inputs.append(spec)
        if kind == "literal":
            self.literals[name] = value
        elif kind != "input":
            self.state[name] = nn.Parameter(value) if kind == "parameter" else value

    def perform(self, step: Step) -> None:
        first = len(self.graph.nodes)
        operands = [self.values[-1 - n % len(self.values)] for n in step.sources]
        self.values.append(OPS[step.op](self, *operands))
        calls = [n for n in list(self.graph.nodes)[first:] if n.op == "call_function"]
        conds = [n for n in calls if n.target is torch.ops.higher_order.cond]
        self.refused_in.update(dict.fromkeys(conds, 0))
        if step.refused_in is not None:
            self.refused_in.update(dict.fromkeys(calls, step.refused_in))

    def call(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        return node

    def relu(self, a: Node, _: Node) -> Node:
        return self.call(ATEN.relu.default, a)

    def sum(self, a: Node, b: Node) -> Node:
        return self.call(ATEN.add.Tensor, a, b)

    def joined(self, a: Node, b: Node) -> Node:
        """Take the operands in a list."""
        return self.call(ATEN.slice_copy.Tensor, self.call(ATEN.cat.default, [a, b]), 0, 2, 6)

    def swapped(self, a: Node, _: Node) -> Node:
        """Split a value into two results and join them in reverse order."""
        pieces = self.call(ATEN.split_copy.Tensor, a, 2)
        one, two = (self.call(operator.getitem, pieces, n) for n in (0, 1))
        return self.call(ATEN.cat.default, [two, one])

    def chosen(self, a: Node, b: Node) -> Node:
        """Choose by control flow, whose branches are graphs of their own."""
        branches = []
        for n in (0, 1):
            graph = Graph()
            values = [graph.placeholder(name) for name in ("a", "b")]
            for value in values:
                value.meta["val"] = a.meta["val"]
            result = graph.call_function(ATEN.relu.default, (values[n],))
            result.meta["val"] = a.meta["val"]
            graph.output((result,))
            name = f"branch_{len(self.root._modules)}"
            self.root.add_module(name, GraphModule({}, graph))
            branches.append(self.graph.get_attr(name))
        condition = self.call(ATEN.any.default, a)
        operands = (condition, *branches, [a, b])
        cond = self.graph.call_function(torch.ops.higher_order.cond, operands)
        cond.meta["val"] = (a.meta["val"],)
        return self.call(operator.getitem, cond, 0)

    def program(self) -> ExportedProgram:
        signature = ExportGraphSignature(self.inputs, self.outputs)
        in_spec = pytree.tree_flatten((tuple(signature.user_inputs), {}))[1]
        out_spec = pytree.tree_flatten(signature.user_outputs)[1]
        return ExportedProgram(
            root=self.root,
            graph=self.graph,
            graph_signature=signature,
            state_dict=dict(self.state),
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
            constants=dict(self.literals),
            verifiers=[load_verifier("ATEN")],
        )


OPS = {
    "relu": Sketch.relu,
    "sum": Sketch.sum,
    "joined": Sketch.joined,
    "swapped": Sketch.swapped,
    "chosen": Sketch.chosen,
}


class CutOut(BackendDetails):
    """A backend that returns the fingerprint of every subgraph; ExecuTorch keeps the graph."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],  # noqa: ARG004 - ExecuTorch passes it
    ) -> PreprocessResult:
        return PreprocessResult(fingerprint(edge_program, CompileOptions()).encode())


class Drawn(Partitioner):
    """A partitioner whose verdicts are given by the names of calls."""

    def __init__(self, refused_in: Mapping[str, int], options: PartitionerOptions) -> None:
        super().__init__()
        self._refused_in = refused_in
        self._options = options
        self._round = 0
        self.confirmed: list[str] = []

    def refused(self, program: ExportedProgram) -> dict[Node, Reason]:
        """Return the calls refused in this round."""
        reason = Reason(ReasonCode.SKIPPED, "drawn")
        nodes = [n for n in program.graph.nodes if self._refused_in.get(n.name, 9) <= self._round]
        return refuse_results(dict.fromkeys(nodes, reason))

    def confirm(self, program: ExportedProgram, tags: Sequence[str]) -> dict[Node, Reason]:
        self._round += 1
        inside = self._options.take_over_constant_data
        subgraphs = cut_partitions(program, tags, program.state_dict, constants_inside=inside)
        self.confirmed = [fingerprint(part, CompileOptions()) for part in subgraphs.values()]
        return {n: r for n, r in self.refused(program).items() if tag_of(n) in tags}

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        decision = decide(
            exported_program,
            self.refused(exported_program),
            self._options,
            confirm=self.confirm,
        )
        delegation = DelegationSpec(CutOut.__name__, [])
        return PartitionResult(exported_program, dict.fromkeys(decision.partitions, delegation))


class Evaluation(Interpreter):
    """An interpreter of graphs, delegates included."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not executorch_call_delegate:
            return super().call_function(target, args, kwargs)
        lowered, *given = args
        # What it writes to buffers of its own is no result, wherever it stands among them.
        return returned(lowered.original_module, given)


def evaluated(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all results of a program's graph."""
    held, passed = {**program.state_dict, **program.constants}, iter(inputs)
    given = [
        next(passed) if spec.target is None else held[spec.target]
        for spec in program.graph_signature.input_specs
    ]
    with torch.no_grad():
        return list(Evaluation(program.graph_module).run(*given))


def returned(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results that a program gives to its user."""
    specs = program.graph_signature.output_specs
    pairs = zip(specs, evaluated(program, inputs), strict=True)
    return [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]


REFUSED_IN = st.sampled_from((None, None, None, 0, 0, 1, 2))
STEPS = st.builds(
    Step, st.sampled_from(list(OPS)), st.tuples(*[st.integers(0, 15)] * 2), REFUSED_IN
)
SKETCHES = st.builds(
    Sketch,
    st.lists(st.sampled_from(list(KINDS)), max_size=6).map(lambda kinds: ["input", *kinds]),
    st.lists(STEPS, min_size=1, max_size=30),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
OPTIONS = st.builds(
    PartitionerOptions,
    min_partition_nodes=st.integers(1, 2),
    max_partitions=st.none() | st.integers(1, 3),
    take_over_constant_data=st.sampled_from((True, True, False)),
    take_over_mutable_buffer=st.booleans(),
)


_WRITES_FIRST = Sketch(
    ["input", "written", "written"],
    [Step("relu", (0, 0), None), Step("relu", (0, 0), None), Step("relu", (13, 0), None)],
    [0],
)


@settings(deadline=None, max_examples=50)
@given(SKETCHES, OPTIONS)
@example(_WRITES_FIRST, PartitionerOptions())
def test_partitions_can_be_cut_out(sketch: Sketch, options: PartitionerOptions) -> None:
    refused_in = {node.name: n for node, n in sketch.refused_in.items()}
    partitioner = Drawn(refused_in, options)
    program = sketch.program()
    inputs = [torch.rand(ELEMENTS) - 0.5 for spec in sketch.inputs if spec.target is None]
    expected = returned(program, inputs)
    with validation_disabled():  # which compares graphs in exponential time
        cut = to_backend(program, partitioner)
    cut.graph.lint()
    lowered = [module for _, module, _ in get_lowered_submodules(cut.graph_module)]
    assert sorted(m.processed_bytes.decode() for m in lowered) == sorted(partitioner.confirmed)
    torch.testing.assert_close(returned(cut, inputs), expected)
