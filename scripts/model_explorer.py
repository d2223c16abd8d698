"""Programs as graphs for Model Explorer, with the operations inside Core ML delegates.

The format is Model Explorer's: a collection of graphs; a node names the sources of its inputs and
its namespace, which the page shows as layers.

Source: ai-edge-model-explorer 0.1, ``graph_builder``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.blob_layout import DebugInfo, debug_info_in
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.mil.program import (
    Binding,
    Block,
    Constant,
    Function,
    Op,
    StateType,
    TensorType,
    ValueType,
)
from coreml_delegate.runtime.mil.reader import read_mlpackage
from coreml_delegate.runtime.observation import debug_symbols
from coreml_delegate.runtime.program.plan import (
    DelegateCall,
    IndexList,
    Instruction,
    JumpFalseCall,
    KernelCall,
    MethodInfo,
    MoveCall,
    TensorSpec,
)
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.delegates import CoreMLPartition, partitions_of
from coreml_delegate.scripts.profiles import common_module, modules_by_handle

_MAX_ELEMENTS = 8  # of a constant whose values are shown
_MAX_LETTERS = 200  # of a constant that is no tensor

Port = tuple[str, str]
"""A node's id, and the number of its result."""


@dataclass(slots=True)
class _Node:
    """A node of a graph.

    Attributes:
        id: Unique in its graph.
        label: Its operation, or the name of an input or output.
        namespace: The layers that it lies in, outermost first, joined by slashes.
        sources: Ports that its inputs come from, in order.
    """

    id: str
    label: str
    namespace: str = ""
    sources: list[Port] = field(default_factory=list[Port])
    results: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    graphs: list[str] = field(default_factory=list[str])

    def as_dict(self) -> dict[str, Any]:
        """Return the node in Model Explorer's format."""
        return {
            "id": self.id,
            "label": self.label,
            "namespace": self.namespace,
            "subgraphIds": self.graphs,
            "attrs": _pairs(self.attributes),
            "incomingEdges": [
                {"sourceNodeId": node, "sourceNodeOutputId": port, "targetNodeInputId": str(index)}
                for index, (node, port) in enumerate(self.sources)
            ],
            "outputsMetadata": [
                {"id": str(index), "attrs": _pairs(description)}
                for index, description in enumerate(self.results)
            ],
        }


@dataclass(slots=True)
class _Graph:
    """A graph that nodes are added to.

    Attributes:
        producers: Port that each value comes from.
        inner: Graphs of the blocks of its nodes.
    """

    id: str
    nodes: list[_Node] = field(default_factory=list[_Node])
    producers: dict[object, Port] = field(default_factory=dict[object, Port])
    inner: list[_Graph] = field(default_factory=list["_Graph"])

    def ports(self, values: Iterable[object]) -> list[Port]:
        """Return the ports of the values that a node of the graph produces."""
        return [self.producers[value] for value in values if value in self.producers]

    def all(self) -> Iterator[_Graph]:
        """Yield the graph and, recursively, the graphs of its nodes' blocks."""
        yield self
        for graph in self.inner:
            yield from graph.all()

    def as_dict(self) -> dict[str, Any]:
        """Return the graph in Model Explorer's format."""
        return {"id": self.id, "nodes": [node.as_dict() for node in self.nodes]}


@dataclass(frozen=True, slots=True)
class _Modules:
    """The modules of the original model, as an ETRecord has them.

    Attributes:
        by_handle: Path of the module of each call, by debug handle; empty for the model itself.
        handles: Debug handles of each instruction of the method, by position.
    """

    by_handle: Mapping[int, str]
    handles: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, record: Any) -> _Modules:
        """Read the modules from the result of ``read_etrecord``."""
        listed: Mapping[str, Any] = (record._debug_handle_map or {}).get("forward", {})
        handles = {
            int(position): tuple(numbers) if isinstance(numbers, list | tuple) else (int(numbers),)
            for position, numbers in listed.items()
        }
        return cls(modules_by_handle(record), handles)

    def common(self, handles: Iterable[int]) -> str | None:
        """Return the innermost module that has all of these calls; None if none is known."""
        paths = [self.by_handle[handle] for handle in handles if handle in self.by_handle]
        return common_module(paths) if paths else None


def graphs_of_pte(path: Path, program: PteProgram, etrecord: Any | None = None) -> dict[str, Any]:
    """Return the methods of a ``.pte`` as graphs.

    Args:
        path: The ``.pte``.
        program: Its content.
        etrecord: Result of ``read_etrecord``; nodes then lie in the modules of the model.

    Raises:
        BlobFormatError: A delegate is malformed.
    """
    modules = None if etrecord is None else _Modules.of(etrecord)
    return _collection(path, [_method(program, method, modules) for method in program.methods])


def graphs_of_package(path: Path) -> dict[str, Any]:
    """Return the functions of an mlpackage as graphs.

    Raises:
        BlobFormatError: The folder is no mlpackage, or malformed.
        ProgramError: A file cannot be read.
    """
    graphs: list[_Graph] = []
    for function in read_mlpackage(path).functions.values():
        graph = _Graph(function.name)
        for feature in function.params:
            node = _Node(f"input {feature.name}", feature.name, "inputs")
            node.results.append({"type": _type_text(feature.type)})
            _add(graph, node, [feature.name])
        _add_function(graph, function, "", {}, "")
        results = [graph.producers.get(name) for name in function.block.outputs]
        for name, port in zip(function.block.outputs, results, strict=True):
            _add(graph, _Node(f"output {name}", name, "outputs", [port] if port else []), [])
        graphs.append(graph)
    return _collection(path, graphs)


def _collection(path: Path, graphs: Sequence[_Graph]) -> dict[str, Any]:
    listed = [inner.as_dict() for graph in graphs for inner in graph.all()]
    return {"label": path.name, "graphs": listed}


def _pairs(content: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in content.items()]


def _add(graph: _Graph, node: _Node, values: Iterable[object]) -> None:
    """Add a node that produces ``values``."""
    graph.nodes.append(node)
    for index, value in enumerate(values):
        graph.producers[value] = node.id, str(index)


# Methods of a .pte


def _method(program: PteProgram, method: MethodInfo, modules: _Modules | None) -> _Graph:
    graph = _Graph(method.name)
    own = modules if method.name == "forward" else None
    partitions = {partition.index: partition for partition in partitions_of(program, method)}
    for position, value in enumerate(method.inputs):
        node = _Node(f"input {position}", f"input {position}", "inputs")
        node.results.append({"type": str(method.values[value])})
        _add(graph, node, [value])
    constants = {
        value
        for value, spec in enumerate(method.values)
        if not isinstance(spec, TensorSpec) or spec.is_constant
    }
    defined = {*method.inputs, *constants}
    position = 0
    for chain in method.chains:
        for instruction in chain:
            path = own.common(own.handles.get(position, ())) if own is not None else None
            _add_instruction(graph, method, instruction, position, path, defined, partitions, own)
            position += 1
    for number, value in enumerate(method.outputs):
        node = _Node(f"output {number}", f"output {number}", "outputs", graph.ports([value]))
        _add(graph, node, [])
    return graph


def _add_instruction(
    graph: _Graph,
    method: MethodInfo,
    instruction: Instruction,
    position: int,
    module: str | None,
    defined: set[int],
    partitions: Mapping[int, CoreMLPartition],
    modules: _Modules | None,
) -> None:
    if isinstance(instruction, MoveCall):
        if instruction.source in graph.producers:
            graph.producers[instruction.target] = graph.producers[instruction.source]
        return
    if isinstance(instruction, JumpFalseCall):
        sources = graph.ports([instruction.condition])
        node = _Node(f"{position}", "jump if false", _layers(module), sources)
        node.attributes["to instruction"] = str(instruction.target)
        _add(graph, node, [])
        return
    if not isinstance(instruction, KernelCall | DelegateCall):
        return
    # Results are values written for the first time and, of a kernel, its last argument too.
    flat = list(dict.fromkeys(_flat(method, instruction.args)))
    results = [value for value in flat if value not in defined]
    if isinstance(instruction, KernelCall):
        last = _flat(method, instruction.args[-1:])
        tensors = (value for value in last if isinstance(method.values[value], TensorSpec))
        results = list(dict.fromkeys([*results, *tensors]))
    operands = [value for value in flat if value not in results]
    defined.update(results)
    if isinstance(instruction, DelegateCall) and instruction.delegate in partitions:
        _add_delegate(graph, partitions[instruction.delegate], position, operands, results, modules)
        return
    if isinstance(instruction, KernelCall):
        label = instruction.operator
    else:
        label = method.delegates[instruction.delegate].backend_id
    node = _Node(f"{position}", label, _layers(module), graph.ports(operands))
    node.results = [{"type": str(method.values[value])} for value in results]
    for number, value in enumerate(operands):
        spec = method.values[value]
        if value not in graph.producers and not isinstance(spec, IndexList):
            node.attributes[f"argument {number}"] = str(spec)
    _add(graph, node, results)


def _flat(method: MethodInfo, values: Iterable[int]) -> Iterator[int]:
    for value in values:
        spec = method.values[value]
        if isinstance(spec, IndexList):
            yield from _flat(method, (item for item in spec.items if item >= 0))
        else:
            yield value


def _add_delegate(
    graph: _Graph,
    partition: CoreMLPartition,
    position: int,
    operands: Sequence[int],
    results: Sequence[int],
    modules: _Modules | None,
) -> None:
    """Add the operations of a delegate, in a layer of their own."""
    layer = f"delegate {partition.index} ({partition.info.backend_id})"
    try:
        program, metadata = read_blob(partition.blob)
    except ProgramError as error:  # a model compiled for devices
        node = _Node(
            f"{position}", layer, "", graph.ports(operands), attributes={"why": error.what}
        )
        _add(graph, node, results)
        return
    reference = partition.reference
    function = program.function(None if reference is None else reference.function_name)
    names = metadata.method(partition.method)
    for name, value in zip(names.input_names, operands, strict=True):
        if value in graph.producers:
            graph.producers[partition.index, name] = graph.producers[value]
    info = debug_info_in(unflatten(partition.blob))
    paths = _module_paths(function, info, modules)
    _add_function(graph, function, layer, paths, f"{position}/", key=partition.index)
    for name, value in zip(names.output_names, results, strict=True):
        port = graph.producers.get((partition.index, name))
        if port is not None:
            graph.producers[value] = port


def _module_paths(
    function: Function, info: DebugInfo | None, modules: _Modules | None
) -> dict[int, str]:
    """Return the known modules of a delegate's ops, by the op's position."""
    if info is None or modules is None:
        return {}
    paths = {
        position: modules.common(info.handles.get(symbol, ()))
        for position, symbol in debug_symbols(function, info).items()
    }
    return {position: path for position, path in paths.items() if path is not None}


# MIL


def _add_function(
    graph: _Graph,
    function: Function,
    layer: str,
    paths: Mapping[int, str],
    prefix: str,
    *,
    key: int | None = None,
) -> None:
    """Add the ops of a function; names of its values are keys, together with ``key`` if given."""
    scope = _Scope(key, {param.name: param.type for param in function.params}, {})
    _add_block(graph, function.block, scope, layer, paths, prefix)


@dataclass(slots=True)
class _Scope:
    """The values in scope of an op.

    Attributes:
        key: Tells them from the values of other functions in the same graph.
    """

    key: int | None
    types: dict[str, ValueType]
    constants: dict[str, Constant]

    def value(self, name: str) -> object:
        """Return the key of a value among the producers of a graph."""
        return name if self.key is None else (self.key, name)


def _add_block(
    graph: _Graph,
    block: Block,
    scope: _Scope,
    layer: str,
    paths: Mapping[int, str],
    prefix: str,
) -> None:
    for position, op in enumerate(block.ops):
        scope.types.update((out.name, out.type) for out in op.outputs)
        if op.type == "const" and "val" in op.attributes:
            scope.constants[op.outputs[0].name] = op.attributes["val"]
            continue
        node = _Node(f"{prefix}{op.name}", op.type, _layers(paths.get(position), layer))
        node.results = [{"name": o.name, "type": _type_text(o.type)} for o in op.outputs]
        for parameter, bindings in op.inputs.items():
            _add_argument(graph, node, scope, parameter, bindings)
        for name, constant in op.attributes.items():
            if name != "name":
                node.attributes[name] = _constant(constant)
        for number, inner in enumerate(op.blocks):
            node.graphs.append(_inner_graph(graph, inner, scope, f"{node.id} {number}", op))
        _add(graph, node, [scope.value(out.name) for out in op.outputs])


def _add_argument(
    graph: _Graph, node: _Node, scope: _Scope, parameter: str, bindings: Sequence[Binding]
) -> None:
    for number, binding in enumerate(bindings):
        name = parameter if len(bindings) == 1 else f"{parameter} {number}"
        if isinstance(binding, Constant):
            node.attributes[name] = _constant(binding)
            continue
        port = graph.producers.get(scope.value(binding.name))
        if port is not None:
            node.sources.append(port)
        elif binding.name in scope.constants:
            constant = scope.constants[binding.name]
            named = "" if _is_short(constant) else f"{binding.name}: "
            node.attributes[name] = f"{named}{_constant(constant)}"
        else:  # a state, say, or a value of the graph around a block
            node.attributes[name] = f"{binding.name}: {_type_text(scope.types.get(binding.name))}"


def _inner_graph(graph: _Graph, block: Block, scope: _Scope, name: str, op: Op) -> str:
    inner = _Graph(f"{graph.id}/{name}")
    graph.inner.append(inner)
    own = _Scope(None, dict(scope.types), dict(scope.constants))
    for param in block.inputs:
        own.types[param.name] = param.type
        node = _Node(f"input {param.name}", param.name, "inputs")
        node.results.append({"type": _type_text(param.type)})
        _add(inner, node, [param.name])
    _add_block(inner, block, own, "", {}, "")
    for output in block.outputs:
        node = _Node(f"output {output}", output, "outputs", inner.ports([output]))
        node.attributes["of"] = op.type
        _add(inner, node, [])
    return inner.id


def _layers(module: str | None, outer: str = "") -> str:
    parts = [outer] if outer else []
    return "/".join([*parts, *(module.split(".") if module else ())])


def _type_text(type_: ValueType | None) -> str:
    if isinstance(type_, StateType):
        return f"state {type_.wrapped}"
    return str(type_) if isinstance(type_, TensorType) else type(type_).__name__


def _is_short(constant: Constant) -> bool:
    content = constant.content
    return isinstance(content, str) or (
        isinstance(content, np.ndarray | np.generic) and content.size <= _MAX_ELEMENTS
    )


def _constant(constant: Constant) -> str:
    """Describe a constant: its value if it is short, else its type and its stored size."""
    content = constant.content
    if isinstance(content, np.ndarray | np.generic) and content.size <= _MAX_ELEMENTS:
        text = str(content.tolist())
        dtype = constant.type.dtype.label if isinstance(constant.type, TensorType) else ""
        return text if content.ndim == 0 else f"{dtype}{text}"
    if isinstance(constant.type, TensorType) and not isinstance(content, str):
        return f"{constant.type}, {constant.nbytes} B"
    text = str(content)
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."
