"""``Builder``: makes a graph, operation by operation, and compiles it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compilation import compile_graph
from coreml_delegate.graph.compose import Composer, Var, const, to_storage
from coreml_delegate.graph.emitter import elementwise, operation
from coreml_delegate.graph.executable import Executable, Settings
from coreml_delegate.graph.mil_program import Graph
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.bits import Bits
from coreml_delegate.graph.operations.contraction import Contraction
from coreml_delegate.graph.operations.control import Control
from coreml_delegate.graph.operations.convolution import Convolution
from coreml_delegate.graph.operations.elementwise import Elementwise
from coreml_delegate.graph.operations.indexing import Indexing
from coreml_delegate.graph.operations.quantized import Quantized
from coreml_delegate.graph.operations.reduction import Reduction
from coreml_delegate.graph.operations.shapes import Shapes
from coreml_delegate.graph.operations.slicing import Slicing
from coreml_delegate.graph.operations.sorting import Sorting
from coreml_delegate.graph.operations.windows import Windows
from coreml_delegate.graph.sizes import MOST_KNOWN
from coreml_delegate.graph.tensor_types import (
    ALL,
    Dim,
    Dimension,
    DType,
    TensorType,
    linear,
    simplify,
)
from coreml_delegate.options.lowering_options import MIN_SQNR_DB
from coreml_delegate.targets import Opset

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
# Words of MIL's text: coremltools would rename inputs and outputs of these names.
_RESERVED = frozenset(
    [
        *("any", "bool", "program", "func", "tensor", "list", "dict", "tuple"),
        *("true", "false", "string", "state", "bf16", "fp16", "fp32", "fp64"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    ]
)
_STATE_DTYPES = frozenset(
    {DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.BOOL, DType.UINT8, DType.INT8}
)
"""Element types of states, which are fp16: floats are rounded; wider integers are not exact."""


def is_feature_name(name: str) -> bool:
    """Whether an input or output of a Core ML model can have this name."""
    return _NAME.match(name) is not None and name not in _RESERVED


def check_feature_name(name: str, what: str) -> None:
    """Refuse a name that an input or output of a Core ML model cannot have.

    Raises:
        GraphError: An impossible name.
    """
    if not is_feature_name(name):
        raise GraphError(
            f"not a name for {what}",
            got=repr(name),
            expected="a letter, then letters, digits and underscores, and no word of MIL",
        )


def _compose_constant(_: Composer, node: Node) -> Var:
    return const(node["array"])


def _compose_size(c: Composer, node: Node) -> Var:
    size = c.size(node["size"])
    return const(size) if isinstance(size, np.integer) else size


def _compose_parameter(*_: Any) -> Any:
    raise AssertionError("parameters are bound before anything is composed")


class Builder(
    Bits,
    Contraction,
    Control,
    Convolution,
    Elementwise,
    Indexing,
    Quantized,
    Reduction,
    Shapes,
    Slicing,
    Sorting,
    Windows,
):
    """A graph in the making: parameters, constants, operations, and the outputs to compile.

    Each operation is a method that takes and returns values, and checks its arguments at once.

    Args:
        backend: How the graph is compiled and run.
        name: Name in messages.
    """

    def __init__(self, backend: Settings, name: str = "main") -> None:
        super().__init__()
        self.backend = backend
        self.name = name
        self.parameters: dict[str, Value] = {}
        self.dimensions: dict[str, Dimension] = {}

    @operation(ALL, _compose_parameter)
    def parameter(
        self, name: str, dtype: Any, shape: Sequence[Dim | Dimension | str | None] = ()
    ) -> Value:
        """Return an input of the graph.

        Args:
            name: Also the name of the Core ML input: a letter, then letters, digits and
                underscores, and no word of MIL such as ``state`` or ``int32``.
            dtype: See ``DType.of``.
            shape: A size that is known at run time only is a ``Dimension``, a dimension's name (1
                to 16,384 if it is new), or None for an unnamed dimension; or a linear expression of
                a dimension's symbol, as ``2 * n + 1``.

        Raises:
            GraphError: An impossible or used name, an unknown element type, a negative size.
        """
        check_feature_name(name, "a parameter")
        if name in self.parameters:
            raise GraphError("the graph has a parameter of this name", got=repr(name))
        sizes = tuple(
            self._declared_size(size, f"{name}_{axis}") for axis, size in enumerate(shape)
        )
        scope, self.scope = self.scope, self._outermost()
        try:
            type = TensorType(DType.of(dtype), sizes)
            value: Value = self.emit("parameter", (), type, name=name)
        finally:
            self.scope = scope
        self.parameters[name] = value
        return value

    @elementwise(ALL, _compose_constant)
    def constant(self, array: Any, dtype: Any = None) -> Value:
        """Return a constant.

        Args:
            array: Anything ``numpy.asarray`` takes.
            dtype: Element type to convert to; None for that of ``array``, where Python's floats are
                float32 and Python's ints int32.

        Raises:
            GraphError: No element type for it, or 64-bit integers that 32 bits cannot hold.
        """
        data = np.asarray(array)
        if dtype is None:
            is_python = isinstance(array, int | float | list | tuple)
            kinds = {"i": DType.INT32, "f": DType.FLOAT32}
            python_dtype = kinds.get(data.dtype.kind) if is_python else None
            element = python_dtype or DType.of(data.dtype)
        else:
            element = DType.of(dtype)
        stored = to_storage(data, element)
        elements = _known_sizes(stored, element)
        type = TensorType(element, data.shape)
        return self.emit("constant", (), type, array=stored, elements=elements)

    @operation(ALL, _compose_size)
    def size(self, size: Dim) -> Value:
        """Return a size, which may be an expression of sizes of parameters, as an int32 scalar."""
        return self.emit("size", (), TensorType(DType.INT32, ()), size=size, elements=(size,))

    def compile(
        self,
        outputs: Value | Sequence[Value] | Mapping[str, Value],
        *,
        states: Mapping[Value, Value] | None = None,
        precision_data: Collection[Sequence[Any]] | None = None,
        min_sqnr_db: float = MIN_SQNR_DB,
    ) -> Executable:
        """Compile the graph that computes ``outputs``.

        Args:
            outputs: A value, a sequence of values, or values by name.
            states: Parameters that are states, each with the value that replaces it after a run.
                A state is not an argument of ``run``. It starts with zeros, and is stored as fp16,
                to which floats are rounded.
            precision_data: With precision ``auto`` of the backend, the inputs to measure with: a
                list of samples, each a tuple of the arrays of a call, see ``Executable.run``.
            min_sqnr_db: With precision ``auto``, the ratio of signal to error in dB that every
                floating-point output has to reach; integers and booleans have to be equal.

        Returns:
            The executable. With precision ``auto`` its ``precision`` says which nodes compute in
            fp32, and whether the outputs reach ``min_sqnr_db``; a warning is logged if they do not.

        Raises:
            GraphError: No outputs, or values of another graph.
            InputError: A sample of ``precision_data`` does not fit the graph.
            LoweringError: Core ML cannot express the graph.
            OptionError: Precision ``auto`` without ``precision_data``, or the reverse.
            CoreMLDelegateError: The engine cannot run it.
        """
        named = self._name_outputs(outputs)
        new_values = {} if states is None else dict(states)
        self._check_states(new_values)
        names = {value: name for name, value in self.parameters.items()}
        graph = Graph(
            self.scope,
            inputs={name: value for value, name in names.items() if value not in new_values},
            outputs=named,
            states={names[value]: (value, after) for value, after in new_values.items()},
            dimensions=self.dimensions,
        )
        return compile_graph(graph, self.backend, precision_data, min_sqnr_db)

    def _name_outputs(
        self, outputs: Value | Sequence[Value] | Mapping[str, Value]
    ) -> dict[str, Value]:
        """Return outputs by name, which are checked."""
        if isinstance(outputs, Mapping):
            named = dict(outputs)
        elif isinstance(outputs, Value):
            named = {"output": outputs}
        else:
            prefix = "output"
            while any(name.startswith(f"{prefix}_") for name in self.parameters):
                prefix += "s"
            named = {f"{prefix}_{n}": value for n, value in enumerate(outputs)}
        if not named:
            raise GraphError("nothing to compile", expected="at least one output")
        for name, value in named.items():
            if not isinstance(value, Value) or value.node.scope is not self.scope:
                raise GraphError(f"output {name!r} is not a value of this graph", got=repr(value))
            check_feature_name(name, "an output")
            if name in self.parameters:
                raise GraphError("an output has the name of a parameter", got=repr(name))
        return named

    def _check_states(self, states: Mapping[Value, Value]) -> None:
        opset = self.backend.opset
        if states and opset < Opset.iOS18:
            raise GraphError(
                "Core ML has states since iOS18",
                got=opset.name,
                remedy="Pass target='iOS18' to Backend",
            )
        for before, after in states.items():
            if before not in self.parameters.values():
                raise GraphError("only parameters can be states", got=repr(before))
            if before.type != after.type:
                raise GraphError(
                    "a state is replaced by a value of another type",
                    got=str(after.type),
                    expected=str(before.type),
                )
            is_fixed = before.type.is_static and not before.type.is_empty
            if before.dtype not in _STATE_DTYPES or not is_fixed:
                raise GraphError(
                    "a value of this type cannot be a Core ML state, whose elements are fp16",
                    got=str(before.type),
                    expected="a fixed shape of "
                    + ", ".join(dtype.label for dtype in DType if dtype in _STATE_DTYPES),
                )

    def _outermost(self) -> Any:
        scope = self.scope
        while scope.outer is not None:
            scope = scope.outer
        return scope

    def _declared_size(self, size: Any, name: str) -> Dim:
        if isinstance(size, int | np.integer):
            if size < 0:
                raise GraphError("a size is negative", got=str(size), expected="0 or more")
            return int(size)
        if isinstance(size, sympy.Expr) and not isinstance(size, sympy.Symbol):
            return self._declared_expression(size)
        if isinstance(size, sympy.Symbol):
            size = size.name
        dimension = size if isinstance(size, Dimension) else Dimension(size or name)
        declared = self.dimensions.setdefault(dimension.name, dimension)
        if declared != dimension and not isinstance(size, str):
            raise GraphError(
                f"dimension {dimension.name!r} has two ranges", got=f"{declared} and {dimension}"
            )
        return declared.symbol

    def _declared_expression(self, size: sympy.Expr) -> Dim:
        expression = simplify(size)
        parts = linear(expression)
        if parts is None and not isinstance(expression, int):
            raise GraphError(
                "a size of a parameter is no linear expression of one dimension",
                got=str(size),
                expected="an expression such as 2 * n + 1",
            )
        if parts is not None:
            self._declared_size(parts[0].name, "")
        return expression


def _known_sizes(stored: np.ndarray[Any, Any], dtype: DType) -> tuple[Dim, ...] | None:
    """Return the elements of a small array of integers, which may be a shape; else None."""
    if not dtype.is_integer or stored.ndim > 1 or stored.size > MOST_KNOWN:
        return None
    if dtype in (DType.UINT32, DType.UINT64) and (stored < 0).any():  # stored as signed integers
        return None
    return tuple(int(element) for element in stored.reshape(-1))
