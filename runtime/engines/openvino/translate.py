"""A MIL function as an OpenVINO model, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.errors import CoreMLDelegateError, UnsupportedOpError
from coreml_delegate.runtime.engines.openvino import (
    activation,
    convolution,
    elementwise,
    graph,
    indexing,
    linear,
    normalization,
    pooling,
    reduction,
    registry,
    reshaping,
    resizing,
    slicing,
    weights,
)
from coreml_delegate.runtime.engines.openvino.registry import Form, Weight, refuse
from coreml_delegate.runtime.mil.opset import Opset
from coreml_delegate.runtime.mil.program import (
    Binding,
    Constant,
    Feature,
    Function,
    NamedType,
    Op,
    StateType,
    TensorType,
    ValueType,
)

# Importing a family registers its translations.
FAMILIES = (
    activation,
    convolution,
    elementwise,
    indexing,
    linear,
    normalization,
    pooling,
    reduction,
    reshaping,
    resizing,
    slicing,
    weights,
)

_Value: TypeAlias = Any  # Constant | Weight | ov.Output

# What OpenVINO's binding raises for a graph it refuses to build.
_BUILD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError)

# fp16 constants at least this large stay fp16 in the graph and are widened by it.
_KEEP_FP16_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Translated:
    """A model, and what its ports mean.

    Attributes:
        model: Inputs are ``inputs`` then ``states``; results are ``outputs`` then the new states.
        inputs: Feature names.
        outputs: Feature names.
        states: Name and type of every state tensor.
    """

    model: ov.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[tuple[str, TensorType], ...]


def translate(function: Function) -> Translated:
    """Translate ``function``.

    Raises:
        UnsupportedOpError: An op, or a mode or type of it, has no translation.
    """
    translator = _Translator(function)
    translator.operations()
    return translator.model()


def unsupported(function: Function) -> list[str]:
    """Every reason why ``function`` cannot be translated, each once, in program order."""
    reasons: list[str] = []
    translator = _Translator(function, reasons)
    try:
        translator.operations()
        if not reasons:
            translator.model()
    except UnsupportedOpError as error:
        reasons.append(str(error))
    return list(dict.fromkeys(reasons))


@dataclass(slots=True)
class _Translator:
    """State of one translation.

    ``reasons`` collects errors if it is a list; values that could not be made are then stood in
    for, so that one pass finds all. With None the first error is raised. ``values``, ``types`` and
    ``states`` are by MIL name; a state's value is the one the program has last written.
    """

    function: Function
    reasons: list[str] | None = None
    opset: Opset = field(init=False)
    values: dict[str, _Value] = field(default_factory=dict[str, _Value])
    nodes: dict[Constant | Weight, Any] = field(default_factory=dict[Constant | Weight, Any])
    types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.opset = Opset.from_mil_name(self.function.opset)

    def operations(self) -> None:
        """Translate the parameters and every op."""
        for param in self.function.params:
            self._parameter(param)
        for op in self.function.block.ops:
            self._op(op)

    def model(self) -> Translated:
        """The model of everything translated."""
        outputs = tuple(feature.name for feature in self.function.outputs)
        states = tuple(
            (param.name, param.type.wrapped)
            for param in self.function.params
            if isinstance(param.type, StateType)
        )
        state_names = [name for name, _ in states]
        inputs = tuple(name for name in self.parameters if name not in state_names)
        results = [self._result(feature) for feature in self.function.outputs]
        results += [self._exported(self.states[name], type_, name) for name, type_ in states]
        parameters = [self.parameters[name] for name in (*inputs, *state_names)]
        # The stub binds the constructor to the base class.
        make_model: Any = ov.Model
        return Translated(
            make_model(results, parameters, self.function.name), inputs, outputs, states
        )

    # Interface

    def _parameter(self, param: NamedType) -> None:
        if isinstance(param.type, StateType):
            node, self.states[param.name] = self._stand_in(param.name, param.type.wrapped)
        else:
            node, self.values[param.name] = self._stand_in(param.name, param.type)
        self.parameters[param.name] = node

    def _stand_in(self, name: str, type_: ValueType) -> tuple[Any, Any]:
        """A model input of a MIL type, and its value inside the graph."""
        if not isinstance(type_, TensorType) or type_.dtype not in graph.INTERFACE_TYPE:
            raise refuse(f"value {name!r} has a type OpenVINO cannot hold", type_)
        shape = (
            ov.PartialShape.dynamic()
            if type_.shape is None
            else ov.PartialShape([-1 if dim is None else dim for dim in type_.shape])
        )
        node = ov.op.Parameter(graph.INTERFACE_TYPE[type_.dtype], shape)
        node.set_friendly_name(name)
        return node, graph.converted(node.output(0), graph.GRAPH_TYPE[type_.dtype])

    def _result(self, feature: Feature) -> Any:
        name = feature.name
        if name not in self.values:
            raise refuse("model output is not computed by its function", name)
        # The description may declare another dtype than the value has.
        declared = self.types.get(name, feature.type)
        return self._exported(self._tensor(self.values[name]), declared, name)

    def _exported(self, value: Any, type_: TensorType, name: str) -> Any:
        if type_.dtype not in graph.INTERFACE_TYPE:
            raise refuse(f"output {name!r} has a type OpenVINO cannot hold", type_)
        result = ops.result(graph.converted(value, graph.INTERFACE_TYPE[type_.dtype]))
        result.set_friendly_name(name)
        return result

    # Ops

    def _op(self, op: Op) -> None:
        try:
            outputs = self._apply(op)
            self._bind(op, outputs)
        except (CoreMLDelegateError, *_BUILD_ERRORS) as error:
            reason = _reason(op, error)
            if self.reasons is None:
                raise UnsupportedOpError(
                    reason, remedy="Run this program on the reference engine"
                ) from error
            self.reasons.append(reason)
            for out in op.outputs:
                self._substitute(out)

    def _substitute(self, out: NamedType) -> None:
        try:
            self.values[out.name] = self._stand_in(out.name, out.type)[1]
        except UnsupportedOpError:
            # Lists and the like: later uses of the name report themselves.
            self.values.pop(out.name, None)

    def _apply(self, op: Op) -> tuple[_Value, ...]:
        special = SPECIAL.get(op.type)
        if special is not None:
            return special(self, op)
        entry = registry.find(op.type, self.opset)
        if entry is None:
            raise refuse(f"no translation of this op in {self.opset.name}", op.type)
        result = entry.function(**self._arguments(op, entry))
        return result if isinstance(result, tuple) else (result,)

    def _arguments(self, op: Op, entry: registry.Translation) -> dict[str, Any]:
        given: dict[str, tuple[Binding, ...]] = dict(op.inputs)
        given.update({key: (value,) for key, value in op.attributes.items() if key != "name"})
        arguments: dict[str, Any] = {}
        for parameter in entry.parameters:
            bindings = given.pop(parameter.name, None)
            if bindings is not None:
                arguments[parameter.name] = self._argument(parameter, bindings)
            elif parameter.required:
                raise refuse("required parameter is missing", parameter.name)
        if given:
            raise refuse("unknown parameters", ", ".join(sorted(given)))
        return arguments

    def _argument(self, parameter: registry.Parameter, bindings: tuple[Binding, ...]) -> Any:
        form = parameter.form
        if form is Form.TENSORS:
            return tuple(self._tensor(self._value(binding)) for binding in bindings)
        if form is Form.TENSOR:
            (binding,) = bindings
            return self._tensor(self._value(binding))
        literals = [self._literal(parameter.name, self._value(binding)) for binding in bindings]
        return _READERS[form](literals)

    def _bind(self, op: Op, outputs: tuple[_Value, ...]) -> None:
        if len(outputs) != len(op.outputs):
            raise refuse("number of outputs", len(op.outputs), str(len(outputs)))
        for declared, value in zip(op.outputs, outputs, strict=True):
            if isinstance(declared.type, TensorType):
                self.types[declared.name] = declared.type
            self.values[declared.name] = (
                value if isinstance(value, Constant | Weight) else _checked(declared, value)
            )

    # Values

    def _value(self, binding: Binding) -> _Value:
        if isinstance(binding, Constant):
            return binding
        if binding.name not in self.values:
            raise refuse("use of a value without a place in the graph", binding.name)
        return self.values[binding.name]

    def _literal(self, name: str, value: _Value) -> Any:
        if isinstance(value, Constant):
            return value.data
        if isinstance(value, Weight):
            return value.dense()
        data = graph.known(value)
        if data is None:
            raise refuse(f"parameter {name!r}", "a value computed at run time", "a constant")
        return data

    def _tensor(self, value: _Value) -> Any:
        if not isinstance(value, Constant | Weight):
            return value
        if value not in self.nodes:
            self.nodes[value] = (
                _constant_node(value) if isinstance(value, Constant) else _weight_node(value)
            )
        return self.nodes[value]

    # Special ops

    def const(self, op: Op) -> tuple[_Value, ...]:
        """A constant: its value, made a node where a tensor is wanted."""
        return (op.attributes["val"],)

    def read_state(self, op: Op) -> tuple[_Value, ...]:
        """The state as the program has left it so far."""
        return (self.states[_state_name(op, "input")],)

    def write_state(self, op: Op) -> tuple[_Value, ...]:
        """Replace the state."""
        (binding,) = op.inputs["data"]
        self.states[_state_name(op, "input")] = self._tensor(self._value(binding))
        return ()


SPECIAL: Mapping[str, Callable[[_Translator, Op], tuple[_Value, ...]]] = {
    "const": _Translator.const,
    "read_state": _Translator.read_state,
    "write_state": _Translator.write_state,
}


def _state_name(op: Op, parameter: str) -> str:
    (binding,) = op.inputs[parameter]
    if isinstance(binding, Constant):
        raise refuse("state", "a constant", "a parameter of the function")
    return binding.name


def _flat(literals: list[Any]) -> list[Any]:
    return [item for literal in literals for item in np.asarray(literal).reshape(-1).tolist()]


def _one(literals: list[Any]) -> Any:
    (item,) = _flat(literals)
    return item


_READERS: Mapping[Form, Callable[[list[Any]], Any]] = {
    Form.ARRAY: lambda literals: np.asarray(literals[0]),
    Form.INTS: lambda literals: tuple(int(item) for item in _flat(literals)),
    Form.BOOLS: lambda literals: tuple(bool(item) for item in _flat(literals)),
    Form.INT: lambda literals: int(_one(literals)),
    Form.FLOAT: lambda literals: float(_one(literals)),
    Form.BOOL: lambda literals: bool(_one(literals)),
    Form.STR: lambda literals: str(_one(literals)),
}


def _constant_node(constant: Constant) -> Any:
    """A constant as a value: its memory shared where the types agree, else converted."""
    data, type_ = constant.data, constant.type
    if not isinstance(data, np.ndarray) or not isinstance(type_, TensorType):
        raise refuse("constant is no tensor", type_)
    wanted = graph.GRAPH_TYPE[type_.dtype]
    dtype = wanted.to_dtype()
    if data.dtype == dtype:
        return graph.array_constant(data).output(0)
    if data.dtype == np.float16 and data.nbytes >= _KEEP_FP16_BYTES:
        return ops.convert(graph.array_constant(data), wanted).output(0)
    return ops.constant(np.asarray(data.astype(dtype), order="C")).output(0)


def _weight_node(weight: Weight) -> Any:
    if weight.node is not None:
        return weight.node()
    data = weight.dense()
    dtype = np.float32 if data.dtype == np.float16 else data.dtype
    return graph.array_constant(np.asarray(data, dtype=dtype, order="C")).output(0)


def _checked(declared: NamedType, value: Any) -> Any:
    """A result in the type its op declares.

    Raises:
        UnsupportedOpError: The shape is another: OpenVINO understands the op differently.
    """
    if not isinstance(declared.type, TensorType):
        raise refuse("result that is no tensor", declared.type)
    value = graph.converted(graph.output(value), graph.GRAPH_TYPE[declared.type.dtype])
    shape = value.get_partial_shape()
    expected = declared.type.shape
    if expected is not None and shape.rank.is_static:
        actual = [dim.get_length() if dim.is_static else None for dim in shape]
        if len(actual) != len(expected) or any(
            None not in (a, b) and a != b for a, b in zip(actual, expected, strict=True)
        ):
            raise refuse("result shape", actual, str(list(expected)))
    value.get_node().set_friendly_name(declared.name)
    return value


def _reason(op: Op, error: Exception) -> str:
    """One line: op type, its first output, and what went wrong."""
    text = str(error).strip().splitlines()
    return f"{op.type} (output {op.name!r}): {text[-1] if text else type(error).__name__}"
