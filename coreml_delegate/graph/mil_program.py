"""From a complete graph to the files of its mlpackage: a MIL function, converted by coremltools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from coreml_delegate.formats.blob import Buffer as Bytes
from coreml_delegate.formats.blob_layout import PACKAGE
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.graph.compose import Composer, Var, cast_bool, cast_storage, storage_shape
from coreml_delegate.graph.fusion import fused_nodes
from coreml_delegate.graph.node import Node, Scope, Value
from coreml_delegate.graph.tensor_types import Dim, Dimension, DType, linear
from coreml_delegate.lowering.build import MilSource, convert_mil
from coreml_delegate.lowering.debug_handles import NumberedCall, absorb_calls
from coreml_delegate.lowering.model_files import model_files
from coreml_delegate.mil.compose import mb
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.precision import Call
from coreml_delegate.targets import Opset


@dataclass(frozen=True, slots=True)
class Graph:
    """A complete graph.

    Attributes:
        scope: Its nodes.
        inputs: Parameters that are inputs, by name.
        outputs: Values that are outputs, by name.
        states: Parameters that are states, by name, each with the value that replaces it.
        dimensions: Ranges of symbolic sizes by name.
    """

    scope: Scope
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    states: Mapping[str, tuple[Value, Value]]
    dimensions: Mapping[str, Dimension]

    @property
    def features(self) -> dict[str, Value]:
        """Inputs of the model: those with elements, as Core ML has no empty tensors."""
        return {name: value for name, value in self.inputs.items() if not value.type.is_empty}


@dataclass(frozen=True, slots=True)
class Package:
    """The mlpackage of a graph.

    Attributes:
        files: Content of the files by relative path.
        calls: The nodes of the outermost scope, by number.
        handles: Numbers of the nodes that an operation computes, by its first output.
        fp32_constants: Constants that fp16 rounds, by name, if they are recorded.
    """

    files: Mapping[str, Bytes]
    calls: Mapping[int, Call]
    handles: Mapping[str, tuple[int, ...]]
    fp32_constants: Constants | None = None


def convert_graph(
    graph: Graph,
    options: CompileOptions,
    opset: Opset,
    in_fp32: frozenset[int] = frozenset(),
    *,
    records_constants: bool = False,
) -> Package:
    """Convert a graph.

    Args:
        graph: The graph; equal graphs have equal numbers of nodes.
        options: How to lower.
        opset: The MIL opset.
        in_fp32: Numbers of the nodes that compute in fp32 in a model in fp16.
        records_constants: Whether to return the constants that fp16 rounds.

    Raises:
        LoweringError: Core ML cannot express the graph.
    """
    composer = Composer(opset, fused_nodes)

    def build() -> MilSource:
        return _program(graph, composer), _keywords(graph)

    with convert_mil(build, options, in_fp32, records_constants=records_constants) as conversion:
        files = model_files(conversion, is_declared=False)
    prefix = f"{PACKAGE}/"
    absorbed = absorb_calls(_numbered_calls(composer.nodes), set(conversion.calls.values()))
    return Package(
        {path.removeprefix(prefix): cast(Bytes, content) for path, content in files.items()},
        {number: _call(number, node) for number, node in composer.nodes.items()},
        {output: absorbed[number] for output, number in conversion.calls.items()},
        conversion.fp32_constants if records_constants else None,
    )


def _call(number: int, node: Node) -> Call:
    """Return a node for a report, named by its operation and number, or as an input."""
    # No parameter has a name with this sign.
    name = node["name"] if node.name == "parameter" else f"{node.name}#{number}"
    return Call(name, node.source)


def _numbered_calls(nodes: Mapping[int, Node]) -> dict[int, NumberedCall]:
    """Return the nodes that compute from others, by number."""
    computing = {number: node for number, node in nodes.items() if node.operands}
    numbers = {node.results[0]: number for number, node in computing.items()}
    users: dict[int, list[int]] = {number: [] for number in computing}
    sources: dict[int, list[int]] = {number: [] for number in computing}
    for number, node in computing.items():
        for first in (value.node.results[0] for value in node.operands):
            if first in numbers:
                sources[number].append(numbers[first])
                users[numbers[first]].append(number)
    return {n: NumberedCall(tuple(users[n]), tuple(sources[n]), ()) for n in computing}


def _program(graph: Graph, composer: Composer) -> Any:
    """Return the MIL program, whose function ``main`` computes the outputs and new states."""
    from coremltools.converters.mil.mil import Function, Program

    target = coremltools().target(int(composer.opset))
    with Function(_placeholders(graph), opset_version=target) as function:
        for name, value in graph.inputs.items():
            feature = function.inputs.get(name)
            with composer.numbered(value.node):
                composer.bind(value, None if feature is None else _from_feature(value, feature))
        for name, (value, _) in graph.states.items():
            with composer.numbered(value.node):
                stored = mb.read_state(input=function.inputs[name])
                composer.bind(value, _from_state(value, stored))
        new_states = {name: after for name, (_, after) in graph.states.items()}
        needed_values = [*graph.outputs.values(), *new_states.values()]
        composer.compose(composer.order(graph.scope, needed_values))
        for name, value in new_states.items():
            with composer.numbered(value.node):
                new_state = _to_state(composer, value)
            mb.coreml_update_state(state=function.inputs[name], value=new_state)
        results = [
            _to_feature(composer, value, name)
            for name, value in graph.outputs.items()
            if not value.type.is_empty
        ]
        function.set_outputs(results)
    program = Program()
    program.add_function("main", function)
    return program


def _keywords(graph: Graph) -> dict[str, Any]:
    """Return keywords of ``coremltools.convert``: types of the inputs if shapes are symbolic."""
    from coremltools.converters.mil.mil import types

    if not graph.dimensions:
        return {}
    ct = coremltools()
    inputs = [
        ct.TensorType(
            name=name,
            shape=ct.Shape(
                [_range(ct, size, graph.dimensions) for size in storage_shape(value.shape) or (1,)]
            ),
            dtype=types.nptype_from_builtin(_feature_dtype(value.dtype)),
        )
        for name, value in graph.features.items()
    ]
    return {"inputs": inputs}


def _placeholders(graph: Graph) -> dict[str, Any]:
    from coremltools.converters.mil.mil import get_new_symbol, types

    symbols: defaultdict[Dim, Any] = defaultdict(get_new_symbol)
    placeholders: dict[str, Any] = {}
    for name, value in graph.features.items():
        sizes = storage_shape(value.shape) or (1,)
        shape = [size if isinstance(size, int) else symbols[size] for size in sizes]
        dtype = _feature_dtype(value.dtype)
        placeholders[name] = mb.placeholder(shape=shape, dtype=dtype, name=name)
    for name, (value, _) in graph.states.items():
        shape = storage_shape(value.type.static_shape) or (1,)
        placeholders[name] = mb.state_tensor_placeholder(shape=shape, dtype=types.fp16)
    return placeholders


def _feature_dtype(dtype: DType) -> Any:
    """Return coremltools' type of an input or output: Core ML has no inputs of bools."""
    from coremltools.converters.mil.mil import types

    return types.int32 if dtype is DType.BOOL else getattr(types, dtype.storage_dtype)


def _range(ct: Any, size: Dim, dimensions: Mapping[str, Dimension]) -> Any:
    parts = linear(size)
    if parts is None:
        return size
    symbol, slope, offset = parts
    dimension = dimensions[symbol.name]
    least, most = (slope * count + offset for count in (dimension.least, dimension.most))
    return ct.RangeDim(lower_bound=least, upper_bound=most, default=least)


def _from_feature(value: Value, var: Var) -> Var:
    """Convert an input of the MIL function to the value's storage dtype and rank."""
    if not value.rank:
        var = mb.squeeze(x=var, axes=[0])
    return cast_bool(value, var, "bool")


def _from_state(value: Value, var: Var) -> Var:
    """Convert the fp16 elements of a state to the value's storage dtype and rank."""
    if not value.rank:
        var = mb.squeeze(x=var, axes=[0])
    if value.dtype is DType.BOOL:
        return mb.not_equal(x=var, y=np.float16(0))
    return cast_storage(var, "fp16", value.dtype.storage_dtype)


def _to_state(c: Composer, value: Value) -> Var:
    """Convert a value to a state's elements: fp16, of rank 1 or more."""
    var = c.reshape(c.var(value), value.shape or (1,))
    return cast_storage(var, value.dtype.storage_dtype, "fp16")


def _to_feature(c: Composer, value: Value, name: str) -> Var:
    """Convert a value to an output of this name: bools become int32, rank 0 becomes 1."""
    with c.numbered(value.node):
        var = cast_bool(value, c.var(value), "int32")
        if not value.rank:
            var = mb.expand_dims(x=var, axes=[0])
        # In Core ML, an output is not an input or a constant, and two outputs are two values.
        return mb.identity(x=var, name=name)
