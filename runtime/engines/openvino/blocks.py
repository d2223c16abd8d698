"""Translate blocks op by op: fetch the arguments, call the translation, bind the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from coreml_delegate.errors import CoreMLDelegateError, UnsupportedOpError
from coreml_delegate.runtime.engines.op_table import Parameter
from coreml_delegate.runtime.engines.openvino import graph
from coreml_delegate.runtime.engines.openvino.scope import Scope, make_parameter
from coreml_delegate.runtime.engines.openvino.translations import EXACT_NAN, TRANSLATIONS
from coreml_delegate.runtime.engines.openvino.values import Form, TensorList, Value, Weight, refusal
from coreml_delegate.runtime.mil.program import (
    Binding,
    Block,
    Constant,
    ListType,
    NamedType,
    Op,
    TensorType,
)
from coreml_delegate.runtime.op_errors import OpTranslationError, blame, last_line
from coreml_delegate.targets import Opset

# Ops whose results coremltools declares too small: it ignores that the condition broadcasts too.
_WRONGLY_DECLARED = frozenset({"select"})

# Errors that OpenVINO's binding raises for a graph it refuses to build.
_BUILD_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class BlockTranslator:
    """Translates blocks into the graphs of their scopes.

    Attributes:
        structural: Ops that need the scope, by type.
        reasons: Collects the errors. Parameters then replace the values of failed ops, so that one
            pass finds all errors. With None the first error is raised.
        misdeclared: Names of values whose shape differs from the declared shape.
    """

    opset: Opset
    structural: Mapping[str, StructuralOp]
    exact_nan: bool = False
    reasons: list[str] | None = None
    misdeclared: set[str] = field(default_factory=set[str])

    def block(self, block: Block, scope: Scope, inputs: Sequence[Value] = ()) -> list[Value]:
        """Translate a block into the graph of ``scope``, a new scope for the names of the block.

        Returns:
            Values of the block's outputs.

        Raises:
            UnsupportedOpError: An op, or a mode or type of it, has no translation.
        """
        for named, value in zip(block.inputs, inputs, strict=True):
            scope.values[named.name] = value
        for op in block.ops:
            self._op(op, scope)
        return scope.values_of(block.outputs)

    def _op(self, op: Op, scope: Scope) -> None:
        reasons_before = len(self.reasons or ())
        try:
            outputs = self._apply(op, scope)
            self._bind(op, outputs, scope)
        except (CoreMLDelegateError, *_BUILD_ERRORS) as error:
            if self.reasons is None:
                remedy = "Run this program on the reference engine"
                blame(error, OpTranslationError, _describe_failure(op, error), remedy=remedy)
            # If an op of a nested block has failed, this op adds no reason.
            if len(self.reasons) == reasons_before:
                self.reasons.append(_describe_failure(op, error))
            for out in op.outputs:
                _bind_parameter(out, scope)

    def _apply(self, op: Op, scope: Scope) -> tuple[Value, ...]:
        structural = self.structural.get(op.type)
        if structural is not None:
            return structural(self, op, scope)
        version = TRANSLATIONS.get(op.type, self.opset)
        arguments = {**_arguments(op, version.schema.parameters, scope), **version.fixed}
        if EXACT_NAN in version.schema.options:
            arguments[EXACT_NAN] = self.exact_nan
        result = version.function(**arguments)
        return result if isinstance(result, tuple) else (result,)

    def _bind(self, op: Op, outputs: tuple[Value, ...], scope: Scope) -> None:
        if len(outputs) != len(op.outputs):
            raise refusal("number of outputs", len(op.outputs), str(len(outputs)))
        for declared, value in zip(op.outputs, outputs, strict=True):
            is_output = not isinstance(value, Constant | Weight | TensorList)
            scope.values[declared.name] = self._cast(op, declared, value) if is_output else value

    def _cast(self, op: Op, declared: NamedType, value: Any) -> Any:
        """Return a result in the type that its op declares.

        Raises:
            UnsupportedOpError: The shape differs: OpenVINO defines the op differently.
        """
        if not isinstance(declared.type, TensorType):
            raise refusal("result that is no tensor", declared.type)
        value = graph.convert_to(graph.output(value), graph.GRAPH_TYPE[declared.type.dtype])
        shape, expected = value.get_partial_shape(), declared.type.shape
        if (
            expected is not None
            and shape.rank.is_static
            and not _shapes_may_agree(graph.dims(value), expected)
        ):
            # An op that reads a misdeclared value declares wrong shapes itself.
            if op.type not in _WRONGLY_DECLARED and self.misdeclared.isdisjoint(op.references()):
                raise refusal("result shape", list(graph.dims(value)), str(list(expected)))
            self.misdeclared.add(declared.name)
        value.get_node().set_friendly_name(declared.name)
        return value


StructuralOp: TypeAlias = Callable[[BlockTranslator, Op, Scope], tuple[Value, ...]]
"""Translates an op that needs the scope; returns the values of the op's outputs."""


def _arguments(op: Op, parameters: Mapping[str, Parameter[Form]], scope: Scope) -> dict[str, Any]:
    bound: dict[str, tuple[Binding, ...]] = dict(op.inputs)
    bound.update({key: (value,) for key, value in op.attributes.items() if key != "name"})
    arguments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        bindings = bound.pop(name, None)
        if bindings is not None:
            values = [scope.value(binding) for binding in bindings]
            arguments[name] = _argument(name, parameter.form, values, scope)
        elif parameter.required:
            raise refusal("required parameter is missing", name)
    if bound:
        raise refusal("unknown parameters", ", ".join(sorted(bound)))
    return arguments


def _argument(name: str, form: Form, values: list[Value], scope: Scope) -> Any:
    if form is Form.TENSORS:
        return tuple(scope.tensor(value) for value in values)
    if form is Form.TENSOR:
        (value,) = values
        return scope.tensor(value)
    if form is Form.LIST:
        (value,) = values
        if not isinstance(value, TensorList):
            raise refusal(f"parameter {name!r}", "a tensor", "a list")
        return value
    if form is Form.INTEGERS:
        (value,) = values
        return value.content if isinstance(value, Constant) else read_literal(name, value)
    literals = [read_literal(name, value) for value in values]
    return _READERS[form](literals)


def read_literal(name: str, value: Value) -> Any:
    """Return the content of a value that is known at compile time.

    Raises:
        UnsupportedOpError: The value is computed at run time; names the parameter.
    """
    if isinstance(value, Constant):
        return value.data
    if isinstance(value, Weight):
        return value.dense()
    data = None if isinstance(value, TensorList) else graph.constant_data(value)
    if data is None:
        raise refusal(f"parameter {name!r}", "a value computed at run time", "a constant")
    return data


def _bind_parameter(out: NamedType, scope: Scope) -> None:
    try:
        if isinstance(out.type, ListType) and isinstance(out.type.element, TensorType):
            element = out.type.element
            packed = TensorType(element.dtype, (None, *(element.shape or ())))
            elements = make_parameter(out.name, packed)[1]
            scope.values[out.name] = TensorList(elements, grows=True)
        else:
            scope.values[out.name] = make_parameter(out.name, out.type)[1]
    except UnsupportedOpError:
        # Labels have no tensor type; later uses of the name are reported on their own.
        scope.values.pop(out.name, None)


def _shapes_may_agree(actual: Sequence[int | None], declared: Sequence[int | None]) -> bool:
    """Whether two shapes can be equal; None is any size."""
    return len(actual) == len(declared) and all(
        None in (one, other) or one == other for one, other in zip(actual, declared, strict=True)
    )


def _flatten(literals: list[Any]) -> list[Any]:
    return [item for literal in literals for item in np.asarray(literal).reshape(-1).tolist()]


def _single(literals: list[Any]) -> Any:
    (item,) = _flatten(literals)
    return item


_READERS: Mapping[Form, Callable[[list[Any]], Any]] = {
    Form.ARRAY: lambda literals: np.asarray(literals[0]),
    Form.INTS: lambda literals: tuple(int(item) for item in _flatten(literals)),
    Form.BOOLS: lambda literals: tuple(bool(item) for item in _flatten(literals)),
    Form.SIZES: lambda literals: tuple(
        None if isinstance(item, str) else int(item) for item in _flatten(literals)
    ),
    Form.INT: lambda literals: int(_single(literals)),
    Form.FLOAT: lambda literals: float(_single(literals)),
    Form.BOOL: lambda literals: bool(_single(literals)),
    Form.STR: lambda literals: str(_single(literals)),
}


def _describe_failure(op: Op, error: Exception) -> str:
    """Return one line: op type, its first output, and the error."""
    return f"{op.type} (output {op.name!r}): {last_line(error)}"
