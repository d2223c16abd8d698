"""``SourceOp``: an operation of a StableHLO program, the argument of the rules that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.graph import Builder, Value
from coreml_delegate.graph.node import as_tuple
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.stablehlo.attributes import is_tensor, python_value, shape_of
from coreml_delegate.stablehlo.parse import Mlir

_REQUIRED = object()
_NARROW = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Token:
    """A StableHLO token. Tokens order side effects; a Core ML model has no side effects."""


@dataclass(frozen=True, slots=True)
class Words:
    """Integers of 64 bits as pairs of 32 bits, for the state of a random generator.

    Attributes:
        pairs: uint32, with a last dimension of 2: low, high.
    """

    pairs: Value


@dataclass(frozen=True, slots=True)
class WideConstant:
    """A constant of integers of 64 bits that 32 bits cannot hold.

    It is an operand only where the result does not depend on how far it is beyond 32 bits: the
    start of a maximum or minimum, a bound, or an operand of a comparison.

    Attributes:
        array: int64 or uint64.
    """

    array: NDArray[Any]

    @property
    def is_below(self) -> NDArray[np.bool_]:
        """Whether elements are below the range of int32."""
        return self.array < _NARROW.min

    @property
    def is_above(self) -> NDArray[np.bool_]:
        """Whether elements are above the range of int32."""
        return self.array > _NARROW.max

    @property
    def clipped(self) -> NDArray[Any]:
        """The elements clipped to the range of int32."""
        least = max(int(np.iinfo(self.array.dtype).min), int(_NARROW.min))
        return self.array.clip(least, int(_NARROW.max))


Operand = Value | Token | Words | WideConstant | tuple[Any, ...]
"""The graph's counterpart of a value of the source; a Python tuple for a tuple."""

Rule = Callable[["SourceOp"], Operand | Sequence[Operand] | None]
"""Reads one operation; returns its result, a list of results, or None if it has no results."""


@dataclass(frozen=True, slots=True)
class Context:
    """The program around an operation, which all operations of the program share.

    Attributes:
        builder: Makes the graph.
        dtype: Returns the element type of a tensor type; see ``Reader.dtype``.
        resource: Returns the content of a resource of the module; see ``Reader.resource``.
        call: Reads a function of the module inline, and returns its results; see ``Reader.call``.
        broadcasts: The tensor and the dimensions of each value that is a broadcast.
    """

    builder: Builder
    dtype: Callable[[Mlir], DType]
    resource: Callable[[str], bytes]
    call: Callable[[str, Sequence[Operand]], list[Operand]]
    broadcasts: dict[Value, tuple[Value, tuple[int, ...]]] = field(default_factory=dict)


class SourceOp:
    """An operation of the source.

    Attributes:
        name: Full name, such as ``stablehlo.add``.
        builder: Makes the graph.
        operands: The graph's counterparts of the operands.
        context: The program around it.

    Args:
        op: The operation.
        operands: As attribute.
        context: As attribute.
        read_region: Reads one of its regions inline with arguments, and returns its results.
    """

    def __init__(
        self,
        op: Mlir,
        operands: Sequence[Operand],
        context: Context,
        read_region: Callable[[Mlir, Sequence[Value]], list[Operand]],
    ) -> None:
        self.name: str = op.name
        self.builder = context.builder
        self.operands = list(operands)
        self.context = context
        self._op = op
        self._read_region = read_region

    def build(self, method: str, *arguments: Any, **keywords: Any) -> list[Operand]:
        """Call an operation of the builder by its name, and return its results."""
        return list(as_tuple(getattr(self.builder, method)(*arguments, **keywords)))

    # Operands and results

    def value(self, index: int) -> Value:
        """Return an operand, which has to be a tensor.

        Raises:
            UnsupportedOperatorError: It is not a tensor, or integers that need 64 bits.
        """
        operand = self.operands[index]
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Words):
            raise self.refusal("Core ML has no integers of 64 bits")
        if isinstance(operand, WideConstant):
            raise beyond_32_bits(self.name, operand)
        raise self.refusal(f"operand {index} is no tensor")

    def value_clipped(self, index: int, side: str) -> Value:
        """Return an operand; a constant beyond 32 bits on one side, below or above, is clipped.

        Raises:
            UnsupportedOperatorError: See ``value``; or it is beyond 32 bits on the other side.
        """
        operand = self.operands[index]
        if not isinstance(operand, WideConstant):
            return self.value(index)
        is_beyond_other_side = operand.is_above if side == "below" else operand.is_below
        if is_beyond_other_side.any():
            raise beyond_32_bits(self.name, operand)
        return self.builder.constant(operand.clipped)

    @property
    def values(self) -> list[Value]:
        """The operands, which are all tensors."""
        return [self.value(index) for index in range(len(self.operands))]

    @property
    def result_count(self) -> int:
        """Number of results."""
        return len(self._op.results)

    def dtype(self, index: int = 0) -> DType:
        """Return the element type of a result."""
        return self.context.dtype(self._op.results[index].type)

    def spelled_dtype(self, index: int = 0) -> str:
        """Return MLIR's name of a result's element type."""
        return str(self._op.results[index].type.element_type)

    def spelled_operand_dtype(self, index: int = 0) -> str:
        """Return MLIR's name of an operand's element type."""
        return str(self._op.operands[index].type.element_type)

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a result, which has to be fixed.

        Raises:
            UnsupportedOperatorError: A size is known only at run time.
        """
        sizes = self.sizes(index)
        fixed = tuple(size for size in sizes if size is not None)
        if len(fixed) != len(sizes):
            raise self.refusal("the result's shape has to be fixed")
        return fixed

    def sizes(self, index: int = 0) -> tuple[int | None, ...]:
        """Return the shape of a result, with None for symbolic sizes."""
        type = self._op.results[index].type
        return shape_of(type) if is_tensor(type) else ()

    def constant(self, array: NDArray[Any], dtype: DType) -> Value | WideConstant:
        """Return a constant; see ``WideConstant`` for integers that 32 bits cannot hold."""
        if dtype in (DType.INT64, DType.UINT64):
            wide = WideConstant(array)
            if (wide.is_below | wide.is_above).any():
                return wide
        return self.builder.constant(array, dtype)

    # Attributes

    def attribute(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an attribute as a Python value; see ``python_value``.

        Raises:
            UnsupportedOperatorError: There is no such attribute, and no default.
        """
        if name in self._op.attributes:
            return python_value(self._op.attributes[name])
        if default is _REQUIRED:
            raise self.refusal(f"there is no attribute {name!r}")
        return default

    def raw_attribute(self, name: str) -> Mlir:
        """Return an attribute as MLIR's value."""
        return self._op.attributes[name]

    def argument(self, name: str) -> Any:
        """Return an attribute as an argument of the builder: lists as tuples of ints, or None."""
        value = self.attribute(name, None)
        return tuple(int(n) for n in value) if isinstance(value, list | np.ndarray) else value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute of integers, in an array or a tensor; empty without the attribute."""
        return self.argument(name) or ()

    def pairs(self, name: str) -> list[tuple[int, int]] | None:
        """Return an attribute of integer pairs, for example padding; None without it."""
        numbers = self.attribute(name, None)
        return None if numbers is None else [(int(low), int(high)) for low, high in numbers]

    @property
    def regions(self) -> list[Callable[..., Any]]:
        """The regions as Python functions that take values, and return a list of results."""
        return [
            lambda *arguments, region=region: self._read_region(region, arguments)
            for region in self._op.regions
        ]

    def refusal(self, reason: str, remedy: str | None = None) -> UnsupportedOperatorError:
        """Return the error for an operation that cannot be expressed, with the reason."""
        return UnsupportedOperatorError(f"{self.name} cannot be expressed: {reason}", remedy=remedy)


def calling(method: str, *attributes: str) -> Rule:
    """Return a rule that calls an operation of the builder with the operands, then attributes."""

    def rule(source: SourceOp) -> list[Operand]:
        arguments = [source.argument(name) for name in attributes]
        return source.build(method, *source.values, *arguments)

    return rule


def beyond_32_bits(what: str, constant: WideConstant) -> UnsupportedOperatorError:
    """Return the error for an operation that needs all 64 bits of a constant."""
    array = constant.array
    return UnsupportedOperatorError(
        f"{what}: {array.dtype} values are beyond 32 bits, the widest integers of Core ML",
        got=f"{array.min()} to {array.max()}",
        expected=f"{_NARROW.min} to {_NARROW.max}; or beyond, the start of a maximum or minimum, "
        "or a bound",
        remedy="Write the constant in 32 bits",
    )
