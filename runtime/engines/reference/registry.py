"""Kernels by op type and opset. A kernel's Python signature is the op's schema.

Parameter names and defaults are MIL's. The annotation says how an argument is passed: ``Tensor`` as
a tensor, ``tuple[Tensor, ...]`` as the tensors of a variadic parameter, ``TensorList`` as a list,
anything else as a literal (Python scalars, strings, tuples), whether the program has it as a
constant or computes it.
"""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from torch import Tensor

from coreml_delegate.runtime.engines.reference.values import TensorList
from coreml_delegate.runtime.mil.opset import Opset

Function = TypeVar("Function", bound=Callable[..., Any])

_VARIADIC = "variadic"

Ints = tuple[int, ...]
"""A vector of integers or rank-0 literal vector: axes, strides, shapes."""

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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel."""

    passing: Passing
    optional: bool


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One version of one op.

    Attributes:
        op_type: MIL op type.
        since: First opset with this version.
        function: Takes the op's parameters by keyword; returns a value, or a tuple of them.
        parameters: By name, in the order of the signature.
        widen: Whether fp16 tensors are passed as fp32 and the result is rounded once at the end, as
            hardware with wide accumulators does. The rest computes in fp16 itself.
    """

    op_type: str
    since: Opset
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    widen: bool


_KERNELS: dict[str, dict[Opset, Kernel]] = {}


def kernel(
    *op_types: str, since: Opset = Opset.iOS15, widen: bool = False
) -> Callable[[Function], Function]:
    """Register a function as the kernel of one op type or of several with one schema.

    Args:
        op_types: MIL op types.
        since: First opset whose version of the op this is.
        widen: See ``Kernel.widen``.

    Raises:
        ValueError: The pair of op type and opset is taken.
    """

    def register(function: Function) -> Function:
        parameters = _parameters(function)
        for op_type in op_types:
            versions = _KERNELS.setdefault(op_type, {})
            if since in versions:
                raise ValueError(f"{op_type} of {since.name} has two kernels")
            versions[since] = Kernel(op_type, since, function, parameters, widen)
        return function

    return register


def find(op_type: str, opset: Opset) -> Kernel | None:
    """The newest version of an op that ``opset`` has, or None."""
    versions = [since for since in _KERNELS.get(op_type, {}) if since <= opset]
    return _KERNELS[op_type][max(versions)] if versions else None


def kernels() -> Iterator[Kernel]:
    """Every version of every op, by op type and age."""
    for op_type in sorted(_KERNELS):
        yield from (_KERNELS[op_type][since] for since in sorted(_KERNELS[op_type]))


def _parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: Parameter(
            _passing(hints[name]), optional=parameter.default is not inspect.Parameter.empty
        )
        for name, parameter in inspect.signature(function).parameters.items()
    }


def _passing(hint: Any) -> Passing:
    if hint == EachInt:
        return Passing.LITERALS
    if hint == tuple[Tensor, ...]:
        return Passing.TENSORS
    if hint is TensorList:
        return Passing.LIST
    return Passing.TENSOR if Tensor in (hint, *typing.get_args(hint)) else Passing.LITERAL
