"""Scopes: the values of a program's names during translation.

A scope sees the values of enclosing scopes, as a MIL block sees those of enclosing blocks. But the
body of a loop or of a branch is an OpenVINO graph of its own: a value of the surrounding graph
enters it through a parameter, which the scope adds when the value is first used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino import graph
from coreml_delegate.runtime.engines.openvino.values import TensorList, Value, Weight, refusal
from coreml_delegate.runtime.mil.program import Binding, Constant, TensorType, ValueType

# Bytes from which on fp16 constants stay fp16 in the graph, followed by a conversion to f32.
_KEEP_FP16_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Capture:
    """A value of the surrounding graph, and the parameter through which a body receives it."""

    outer: Any
    parameter: Any


@dataclass(slots=True, eq=False)
class Scope:
    """The names of one block.

    ``outer`` is the scope of the enclosing block; ``shared`` holds the values of the graph that the
    block is translated into, and is the same object for all scopes of that graph.
    """

    outer: Scope | None = None
    shared: _GraphValues = field(default_factory=lambda: _GraphValues())
    values: dict[str, Value] = field(default_factory=dict[str, Value])

    def nested(self) -> Scope:
        """Return a scope for a nested block that is translated into the same graph."""
        return Scope(self, self.shared)

    def body(self) -> Scope:
        """Return a scope for a nested block that is translated into a separate graph."""
        return Scope(self)

    @property
    def captures(self) -> list[Capture]:
        """The values of the surrounding graph that this graph uses, in the order of first use."""
        return self.shared.captures

    def value(self, binding: Binding) -> Value:
        """Return the value of a binding.

        Raises:
            UnsupportedOpError: The name is in no scope.
        """
        return binding if isinstance(binding, Constant) else self._value_of(binding.name)

    def values_of(self, names: tuple[str, ...]) -> list[Value]:
        """Return the values of several names; raises as ``value`` does."""
        return [self._value_of(name) for name in names]

    def tensor(self, value: Value) -> Any:
        """Return a value as an output of this scope's graph.

        Raises:
            UnsupportedOpError: The value is a list, or a constant that is no tensor.
        """
        if isinstance(value, TensorList):
            raise refusal("list where a tensor is needed", value.elements.get_partial_shape())
        if not isinstance(value, Constant | Weight):
            return value
        nodes = self.shared.nodes
        if value not in nodes:
            nodes[value] = (
                _constant_node(value) if isinstance(value, Constant) else _weight_node(value)
            )
        return nodes[value]

    def state(self, name: str) -> Any:
        """Return the value of a state at this point of the program.

        Raises:
            UnsupportedOpError: No such state.
        """
        states = self.shared.states
        if name not in states:
            surrounding = self._surrounding()
            if surrounding is None:
                raise refusal("state is no parameter of the function", name)
            states[name] = self._capture(surrounding.state(name))
        return states[name]

    def set_state(self, name: str, value: Any) -> None:
        """Replace a state."""
        self.shared.states[name] = value

    def _value_of(self, name: str) -> Value:
        if name not in self.values:
            if self.outer is None:
                raise refusal("use of an undefined value", name)
            value = self.outer._value_of(name)
            if self.outer.shared is self.shared:
                return value
            self.values[name] = self._capture(value)
        return self.values[name]

    def _surrounding(self) -> Scope | None:
        """Return the innermost enclosing scope of another graph; None at the top level."""
        scope = self.outer
        while scope is not None and scope.shared is self.shared:
            scope = scope.outer
        return scope

    def _capture(self, value: Value) -> Value:
        if isinstance(value, Constant | Weight):
            return value
        if isinstance(value, TensorList):
            return TensorList(self._capture(value.elements), value.grows)
        data = graph.constant_data(value)
        if data is not None:
            # Copied rather than passed, so that it is a constant in the body too.
            return ops.constant(np.array(data), dtype=graph.element_type(value)).output(0)
        parameter = ov.op.Parameter(graph.element_type(value), value.get_partial_shape())
        self.captures.append(Capture(value, parameter))
        return parameter.output(0)


@dataclass(slots=True, eq=False)
class _GraphValues:
    """Values shared by the scopes of one graph: constant nodes, states by name, captures."""

    nodes: dict[Constant | Weight, Any] = field(default_factory=dict[Constant | Weight, Any])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    captures: list[Capture] = field(default_factory=list[Capture])


def make_parameter(name: str, type_: ValueType) -> tuple[Any, Any]:
    """Return a parameter of a MIL type, and its value in the element type of the graph.

    Raises:
        UnsupportedOpError: OpenVINO has no such type.
    """
    if not isinstance(type_, TensorType) or type_.dtype not in graph.INTERFACE_TYPE:
        raise refusal(f"value {name!r} has a type that OpenVINO lacks", type_)
    node = ov.op.Parameter(graph.INTERFACE_TYPE[type_.dtype], partial_shape(type_.shape))
    node.set_friendly_name(name)
    return node, graph.convert_to(node.output(0), graph.GRAPH_TYPE[type_.dtype])


def partial_shape(shape: tuple[int | None, ...] | None) -> Any:
    """Return a MIL shape as an OpenVINO shape."""
    if shape is None:
        return ov.PartialShape.dynamic()
    return ov.PartialShape([_open_dimension() if size is None else size for size in shape])


def _open_dimension() -> Any:
    """Return a dimension of unknown size; its symbol lets OpenVINO track which sizes equal it."""
    dimension = ov.Dimension()
    dimension.set_symbol(ov.Symbol())
    return dimension


def _constant_node(constant: Constant) -> Any:
    """Return the node of a constant; it shares the constant's memory where the types agree."""
    data, type_ = constant.data, constant.type
    if not isinstance(data, np.ndarray) or not isinstance(type_, TensorType):
        raise refusal("constant is no tensor", type_)
    graph_type = graph.GRAPH_TYPE[type_.dtype]
    dtype = graph_type.to_dtype()
    if data.dtype == dtype:
        return graph.array_constant(data).output(0)
    if data.dtype == np.float16 and data.nbytes >= _KEEP_FP16_BYTES:
        return graph.widen_constant(graph.array_constant(data), graph_type).output(0)
    return ops.constant(np.asarray(data.astype(dtype), order="C")).output(0)


def _weight_node(weight: Weight) -> Any:
    if weight.node is not None:
        return weight.node()
    data = weight.dense()
    dtype = np.float32 if data.dtype == np.float16 else data.dtype
    return graph.array_constant(np.asarray(data, dtype=dtype, order="C")).output(0)
