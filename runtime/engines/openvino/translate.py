"""Translate a MIL function to an OpenVINO model."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.engines.openvino import graph
from coreml_delegate.runtime.engines.openvino.blocks import BlockTranslator
from coreml_delegate.runtime.engines.openvino.row_writes import find_row_writes, split_readers
from coreml_delegate.runtime.engines.openvino.scope import Scope, make_parameter
from coreml_delegate.runtime.engines.openvino.session.state_tensors import Interface, Writes
from coreml_delegate.runtime.engines.openvino.structural_ops import STRUCTURAL
from coreml_delegate.runtime.engines.openvino.values import Value, refusal
from coreml_delegate.runtime.mil.program import Feature, Function, StateType, TensorType
from coreml_delegate.targets import Opset


@dataclass(frozen=True, slots=True)
class Translated:
    """A model, whose weights may share the memory of the function, and the meaning of its ports."""

    model: ov.Model
    interface: Interface


def translate(function: Function, *, exact_nan: bool = False, labelled: bool = False) -> Translated:
    """Translate ``function``.

    With ``labelled``, the names of nodes refer to the ops they come from; see ``labelled_ops``.

    Raises:
        UnsupportedOpError: An op, or a mode or type of it, has no translation.
    """
    translation = _translate_blocks(function, None, exact_nan=exact_nan)
    if labelled:
        _label(function, translation.scope)
    return translation.model()


_LABEL = re.compile(r"op(\d+)\.\d+")


def labelled_ops(names: str) -> tuple[int, ...]:
    """Return the indices of the ops that the labels among names of nodes refer to.

    OpenVINO lists the nodes of a kernel in one text; other names are ignored.
    """
    return tuple(sorted({int(position) for position in _LABEL.findall(names)}))


def _label(function: Function, scope: Scope) -> None:
    """Name every node after the first op that depends on it."""
    for position, op in enumerate(function.block.ops):
        values = (scope.values.get(output.name) for output in op.outputs)
        open_ends = [value.get_node() for value in values if isinstance(value, ov.Output)]
        count = itertools.count()
        while open_ends:
            node = open_ends.pop()
            is_done = _LABEL.fullmatch(node.get_friendly_name())
            if not is_done and node.get_type_name() != "Parameter":
                node.set_friendly_name(f"op{position}.{next(count)}")
                open_ends += [value.get_node() for value in node.input_values()]


def unsupported(function: Function) -> list[str]:
    """Return every reason why ``function`` cannot be translated, each once, in program order."""
    reasons: list[str] = []
    try:
        translation = _translate_blocks(function, reasons)
        if not reasons:
            translation.model()
    except UnsupportedOpError as error:
        # If there are reasons already, placeholder parameters may have caused this error.
        if not reasons:
            reasons.append(str(error))
    return list(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class _Translation:
    """A function whose ops are translated, before it becomes a model.

    Attributes:
        inputs: Input name -> parameter of the model.
        states: State name -> parameter of the model, initial value, type.
        values: Output name -> value.
    """

    function: Function
    scope: Scope
    inputs: dict[str, Any]
    states: dict[str, tuple[Any, Any, TensorType]]
    values: dict[str, Value]

    def model(self) -> Translated:
        """Build the model."""
        named = [
            *self.function.params,
            *(out for op in self.function.block.ops for out in op.outputs),
        ]
        declared = {n.name: n.type for n in named if isinstance(n.type, TensorType)}
        results = [self._result(feature, declared) for feature in self.function.outputs]
        parameters = [*self.inputs.values()]
        writes: list[Writes] = []
        for name in self.states:
            parameter, updates, axes = self._write_state(name)
            parameters.append(parameter)
            results += updates
            writes.append(axes)
        interface = Interface(
            tuple(self.inputs),
            tuple(feature.name for feature in self.function.outputs),
            tuple((name, type_) for name, (_, _, type_) in self.states.items()),
            tuple(writes),
        )
        return Translated(graph.make_model(results, parameters, self.function.name), interface)

    def _write_state(self, name: str) -> tuple[Any, list[Any], Writes]:
        """Return the parameter of a state, the results that update it, and the form of writes."""
        parameter, before, type_ = self.states[name]
        after = self.scope.state(name)
        writes = find_row_writes(before, after)
        if writes is None:
            return parameter, [_make_result(after, type_, name)], None
        state = ov.op.Parameter(graph.element_type(before), parameter.get_partial_shape())
        state.set_friendly_name(name)
        results = [
            result
            for write in writes
            for result in (ops.result(write.indices), _make_result(write.rows, type_, name))
        ]
        graph.output(before).replace(state.output(0))
        split_readers(after)
        return state, results, tuple(write.axis for write in writes)

    def _result(self, feature: Feature, declared: dict[str, TensorType]) -> Any:
        name = feature.name
        if name not in self.values:
            raise refusal("the function does not compute a model output", name)
        # The model description may declare another dtype than the value has.
        type_ = declared.get(name, feature.type)
        return _make_result(self.scope.tensor(self.values[name]), type_, name)


def _translate_blocks(
    function: Function, reasons: list[str] | None, *, exact_nan: bool = False
) -> _Translation:
    scope = Scope()
    inputs: dict[str, Any] = {}
    states: dict[str, tuple[Any, Any, TensorType]] = {}
    for param in function.params:
        if isinstance(param.type, StateType):
            node, value = make_parameter(param.name, param.type.wrapped)
            scope.set_state(param.name, value)
            states[param.name] = (node, value, param.type.wrapped)
        else:
            inputs[param.name], scope.values[param.name] = make_parameter(param.name, param.type)
    translator = BlockTranslator(
        Opset.from_mil_name(function.opset), STRUCTURAL, exact_nan, reasons
    )
    outputs = translator.block(function.block, scope)
    values = dict(zip(function.block.outputs, outputs, strict=True))
    return _Translation(function, scope, inputs, states, values)


def _make_result(value: Any, type_: TensorType, name: str) -> Any:
    if type_.dtype not in graph.INTERFACE_TYPE:
        raise refusal(f"output {name!r} has a type that OpenVINO lacks", type_)
    result = ops.result(graph.convert_to(value, graph.INTERFACE_TYPE[type_.dtype]))
    result.set_friendly_name(name)
    return result
