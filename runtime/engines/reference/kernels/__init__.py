"""The kernels of the reference engine: one function per version of a MIL op, one module per family.

The annotation of a parameter defines how its argument is passed: ``Tensor`` as a tensor,
``tuple[Tensor, ...]`` as the tensors of a variadic parameter, ``TensorList`` as a list, and any
other annotation as a literal (Python scalars, strings, tuples), constant or computed.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from torch import Tensor

from coreml_delegate.runtime.engines.op_table import OpTable, OpVersion, Schema
from coreml_delegate.runtime.engines.reference.values import TensorList
from coreml_delegate.targets import Opset

Function = TypeVar("Function", bound=Callable[..., Any])

_VARIADIC = "variadic"

Ints = tuple[int, ...]
"""A vector of integers: axes, strides, shapes."""

Bools = tuple[bool, ...]
"""A vector of booleans: masks."""

IntPairs = tuple[tuple[int, int], ...]
"""A matrix of integers with two columns: paddings, crops."""

EachInt = Annotated[tuple[Any, ...], _VARIADIC]
"""A variadic parameter of scalars: one literal per binding."""


class Passing(enum.Enum):
    """How an argument reaches a kernel."""

    TENSOR = enum.auto()
    TENSORS = enum.auto()
    LITERAL = enum.auto()
    LITERALS = enum.auto()
    LIST = enum.auto()

    @property
    def variadic(self) -> bool:
        """Whether the parameter takes any number of bindings."""
        return self in (Passing.TENSORS, Passing.LITERALS)

    @property
    def literal(self) -> bool:
        """Whether the argument is passed as Python values."""
        return self in (Passing.LITERAL, Passing.LITERALS)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel(OpVersion[Passing]):
    """A version of an op; its function returns a value or a tuple of values.

    Attributes:
        widen: Whether fp16 tensors are passed as fp32 and the result is rounded once at the end, as
            by hardware with wide accumulators. Other kernels compute in fp16.
    """

    widen: bool


KERNELS: OpTable[Kernel] = OpTable("kernel", __name__)
"""The ops that the reference engine supports."""


def kernel(
    *op_types: str, since: Opset = Opset.iOS15, widen: bool = False, **fixed: object
) -> Callable[[Function], Function]:
    """Register a function as the kernel of op types that share a schema.

    Args:
        op_types: MIL op types.
        since: First opset with this version of the op.
        widen: See ``Kernel.widen``.
        fixed: See ``OpVersion.fixed``.

    Raises:
        ValueError: The op already has a kernel for that opset.
    """

    def register(function: Function) -> Function:
        schema = Schema.read(function, _passing, fixed)
        for op_type in op_types:
            KERNELS.add(Kernel(op_type, since, function, schema, fixed, widen))
        return function

    return register


Expressions = Mapping[str, tuple[Mapping[str, object], Callable[..., Any]]]
"""Kernels that are one expression of ``x``, a tensor, by op type: annotations of the parameters
after ``x``, and the function."""


def register_expressions(expressions: Expressions, *, widen: bool = False) -> None:
    """Register expressions as kernels; see ``kernel``."""
    for op_type, (parameters, function) in expressions.items():
        function.__annotations__ = {"x": Tensor, **parameters}
        kernel(op_type, widen=widen)(function)


def _passing(hint: Any) -> Passing:
    if hint == EachInt:
        return Passing.LITERALS
    if hint == tuple[Tensor, ...]:
        return Passing.TENSORS
    if hint is TensorList:
        return Passing.LIST
    return Passing.TENSOR if Tensor in (hint, *typing.get_args(hint)) else Passing.LITERAL
