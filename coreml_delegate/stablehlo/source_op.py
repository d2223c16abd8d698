"""``SourceOp``: one operation of a StableHLO program, as the functions that read it see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.graph import Builder, Value
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.stablehlo.attributes import is_tensor, python_value, shape_of
from coreml_delegate.stablehlo.parse import Mlir

if TYPE_CHECKING:
    from coreml_delegate.stablehlo.reader import Frame, Reader

_REQUIRED = object()
_NARROW = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Token:
    """A StableHLO token. Tokens order side effects, of which there are none."""


@dataclass(frozen=True, slots=True)
class Words:
    """Integers of 64 bits as pairs of 32 bits: only a random generator's state needs all of them.

    Attributes:
        pairs: uint32, with a last dimension of 2: low, high.
    """

    pairs: Value


@dataclass(frozen=True, slots=True)
class WideConstant:
    """A constant of integers of 64 bits that 32 bits cannot hold.

    Operations take it whose result does not depend on how far it is beyond 32 bits: a search for
    an extreme starts there, and a bound there bounds nothing.

    Attributes:
        array: int64 or uint64.
    """

    array: NDArray[Any]

    @property
    def is_below(self) -> NDArray[np.bool_]:
        """Whether elements are less than any of 32 bits."""
        return self.array < _NARROW.min

    @property
    def is_above(self) -> NDArray[np.bool_]:
        """Whether elements are greater than any of 32 bits."""
        return self.array > _NARROW.max

    @property
    def clipped(self) -> NDArray[Any]:
        """The elements, those beyond 32 bits replaced by the nearest that is not."""
        least = max(int(np.iinfo(self.array.dtype).min), int(_NARROW.min))
        return self.array.clip(least, int(_NARROW.max))


Operand = Value | Token | Words | WideConstant | tuple[Any, ...]
"""The graph's counterpart of a value of the source; a tuple for a tuple."""

Rule = Callable[["SourceOp"], Operand | Sequence[Operand] | None]
"""Reads one operation: its result, a list of several, or None if it has none."""


class SourceOp:
    """One operation of the source.

    Attributes:
        name: As ``stablehlo.add``.
        builder: What the graph is made with.
        operands: What its operands stand for.
        reader: What reads the program.
    """

    def __init__(self, op: Mlir, operands: Sequence[Operand], reader: Reader, frame: Frame) -> None:
        self.name: str = op.name
        self.builder: Builder = reader.builder
        self.operands = list(operands)
        self.reader = reader
        self._op = op
        self._frame = frame

    # Operands and results

    def value(self, index: int) -> Value:
        """Return an operand that is a tensor.

        Raises:
            UnsupportedOperatorError: It is none, or one of all 64 bits of integers.
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
        """Return an operand for which any number beyond 32 bits on one side may stand.

        Args:
            index: Its position.
            side: ``below`` or ``above``.

        Raises:
            UnsupportedOperatorError: See ``value``; or it is beyond 32 bits on the other side.
        """
        operand = self.operands[index]
        if not isinstance(operand, WideConstant):
            return self.value(index)
        wrong = operand.is_above if side == "below" else operand.is_below
        if wrong.any():
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
        return self.reader.dtype(self._op.results[index].type)

    def spelled_dtype(self, index: int = 0) -> str:
        """Return MLIR's name of a result's element type."""
        return str(self._op.results[index].type.element_type)

    def spelled_operand_dtype(self, index: int = 0) -> str:
        """Return MLIR's name of an operand's element type."""
        return str(self._op.operands[index].type.element_type)

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a result, whose sizes have to be known.

        Raises:
            UnsupportedOperatorError: One is known at run time only.
        """
        sizes = self.sizes(index)
        fixed = tuple(size for size in sizes if size is not None)
        if len(fixed) != len(sizes):
            raise self.refusal("the result's shape has to be fixed")
        return fixed

    def sizes(self, index: int = 0) -> tuple[int | None, ...]:
        """Return the shape of a result, with None for sizes that are known at run time only."""
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
            UnsupportedOperatorError: There is none, and no default.
        """
        if name in self._op.attributes:
            return python_value(self._op.attributes[name])
        if default is _REQUIRED:
            raise self.refusal(f"there is no attribute {name!r}")
        return default

    def raw_attribute(self, name: str) -> Mlir:
        """Return an attribute as MLIR's value."""
        return self._op.attributes[name]

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return an attribute of integers, in an array or a tensor; None if there is none."""
        given = self.attribute(name, None)
        return None if given is None else tuple(int(n) for n in given)

    def pairs(self, name: str) -> list[tuple[int, int]] | None:
        """Return an attribute of pairs of integers, as the padding; None if there is none."""
        given = self.attribute(name, None)
        return None if given is None else [(int(low), int(high)) for low, high in given]

    # Regions

    @property
    def region_count(self) -> int:
        """Number of regions."""
        return len(self._op.regions)

    def region(self, index: int = 0) -> Callable[..., Any]:
        """Return a region as a Python function of values: of a list of values, or of one."""
        region = self._op.regions[index]

        def function(*arguments: Value) -> Any:
            return self.reader.read_region(region, arguments, self._frame)

        return function

    def refusal(self, reason: str, remedy: str | None = None) -> UnsupportedOperatorError:
        """Return the error that says why this operation cannot be expressed."""
        return UnsupportedOperatorError(f"{self.name} cannot be expressed: {reason}", remedy=remedy)


def beyond_32_bits(what: str, constant: WideConstant) -> UnsupportedOperatorError:
    """Return the error about a use of a constant that needs all of its 64 bits."""
    array = constant.array
    return UnsupportedOperatorError(
        f"{what}: {array.dtype} values are beyond 32 bits, the widest integers of Core ML",
        got=f"{array.min()} to {array.max()}",
        expected=f"{_NARROW.min} to {_NARROW.max}; beyond them, the start of a search for an "
        "extreme, or a bound",
        remedy="Write the constant in 32 bits",
    )
