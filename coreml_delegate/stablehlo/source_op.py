"""``SourceOp``: one operation of a StableHLO program, as the functions that read it see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.graph import Builder, Value
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.stablehlo.attributes import is_tensor, python_value, shape_of
from coreml_delegate.stablehlo.parse import Mlir

if TYPE_CHECKING:
    from coreml_delegate.stablehlo.reader import Frame, Reader

_REQUIRED = object()


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


Operand = Value | Token | Words | tuple[Any, ...]
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
        raise self.refusal(f"operand {index} is no tensor")

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

    def refusal(self, reason: str) -> UnsupportedOperatorError:
        """Return the error that says why this operation cannot be expressed."""
        return UnsupportedOperatorError(f"{self.name} cannot be expressed: {reason}")
