"""Element types, dimensions and tensor types of a graph.

Core ML computes with fp32, fp16, int32 and bool. Every other element type is *stored* as one of
these four: narrow integers by int32, whose results are wrapped to their range after each operation;
uint32 by the int32 of the same bits; 64-bit types by the 32-bit type of their kind, checked where
values enter the graph.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError, near_matches


class DType(enum.Enum):
    """The element type of a tensor.

    Attributes:
        label: NumPy's name, for example ``float32``.
        storage_dtype: MIL's name of the dtype that stores the elements, for example ``fp32``.
        short: StableHLO's name, for example ``f32``.
    """

    FLOAT32 = "float32", "fp32", "f32"
    FLOAT16 = "float16", "fp16", "f16"
    FLOAT64 = "float64", "fp32", "f64"
    INT8 = "int8", "int32", "i8"
    INT16 = "int16", "int32", "i16"
    INT32 = "int32", "int32", "i32"
    INT64 = "int64", "int32", "i64"
    UINT8 = "uint8", "int32", "ui8"
    UINT16 = "uint16", "int32", "ui16"
    UINT32 = "uint32", "int32", "ui32"
    UINT64 = "uint64", "int32", "ui64"
    BOOL = "bool", "bool", "i1"

    def __init__(self, label: str, storage_dtype: str, short: str) -> None:
        self.label = label
        self.storage_dtype = storage_dtype
        self.short = short

    @functools.cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return np.dtype(self.label)

    @functools.cached_property
    def storage_numpy(self) -> np.dtype[Any]:
        """The NumPy dtype of the storage dtype."""
        label = {"fp32": "float32", "fp16": "float16"}.get(self.storage_dtype, self.storage_dtype)
        return np.dtype(label)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.numpy.kind == "f"

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers, signed or unsigned; bool is not."""
        return self.numpy.kind in "iu"

    @property
    def is_unsigned(self) -> bool:
        """Whether the elements are unsigned integers."""
        return self.numpy.kind == "u"

    @property
    def bits(self) -> int:
        """Width of an element."""
        return self.numpy.itemsize * 8

    @property
    def wraps(self) -> bool:
        """Whether results of arithmetic on the storage dtype have to be wrapped to the range."""
        return self.is_integer and self.bits < 32

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """Return the element type of a name, a NumPy dtype or a member.

        Args:
            dtype: ``"float32"``, ``"f32"``, ``np.float32``, ``jnp.float32``, ``DType.FLOAT32``.

        Raises:
            GraphError: It is unknown, or Core ML cannot store its elements.
        """
        if isinstance(dtype, DType):
            return dtype
        if isinstance(dtype, str) and dtype in _BY_SHORT:
            return _BY_SHORT[dtype]
        try:
            label = np.dtype(dtype).name
        except TypeError:
            label = str(dtype)
        if label not in _BY_LABEL:
            raise GraphError(
                "no such element type, or Core ML cannot store it",
                got=label,
                expected=near_matches(label, _BY_LABEL),
            )
        return _BY_LABEL[label]


_BY_LABEL = {member.label: member for member in DType}
_BY_SHORT = {member.short: member for member in DType}

FLOATS = frozenset(dtype for dtype in DType if dtype.is_float)
INTEGERS = frozenset(dtype for dtype in DType if dtype.is_integer)
BOOLEANS = frozenset({DType.BOOL})
NUMBERS = FLOATS | INTEGERS
ALL = NUMBERS | BOOLEANS

Dim = int | sympy.Expr
"""A size: a number, or an expression of symbols whose values are known only at run time."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size of parameters that is known only at run time.

    Attributes:
        name: Equal names in one graph stand for equal sizes.
        least: The smallest size, 1 or more.
        most: The largest size, which Core ML requires; by default the neural engine's limit.

    Raises:
        GraphError: The range is empty, or starts below 1.
    """

    name: str
    least: int = 1
    most: int = 16384

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise GraphError(
                f"dimension {self.name!r} has an impossible range",
                got=f"{self.least} to {self.most}",
                expected="1 or more, the least before the most",
            )

    @property
    def symbol(self) -> sympy.Symbol:
        """The symbol that stands for the size in shapes."""
        return sympy.Symbol(self.name, integer=True, positive=True)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape.

    Attributes:
        dtype: Element type.
        shape: Sizes of the dimensions.
    """

    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether every size is a number."""
        return all(isinstance(size, int) for size in self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return 0 in self.shape

    @property
    def count(self) -> int:
        """Number of elements.

        Raises:
            GraphError: A size is known only at run time.
        """
        return int(np.prod(self.static_shape, dtype=np.int64))

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape, with numbers only.

        Raises:
            GraphError: A size is known at run time only.
        """
        sizes = tuple(size for size in self.shape if isinstance(size, int))
        if len(sizes) != len(self.shape):
            raise GraphError("the shape has to be fixed here", got=str(self))
        return sizes

    def with_shape(self, shape: Sequence[Dim]) -> TensorType:
        """Return the same element type with another shape."""
        return TensorType(self.dtype, tuple(simplify(size) for size in shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        """Return the same shape with another element type."""
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype.label}[{sizes}]"


def simplify(size: Any) -> Dim:
    """Expand a size; return an int if it is a number."""
    if isinstance(size, sympy.Expr):
        size = sympy.expand(size)
        return int(size) if size.is_Integer else size
    return int(size)


def product(sizes: Sequence[Dim]) -> Dim:
    """Return the product of sizes."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return simplify(total)


def linear(size: Dim) -> tuple[sympy.Symbol, int, int] | None:
    """Return (symbol, slope, offset) of a size ``slope * symbol + offset``, else None."""
    if not isinstance(size, sympy.Expr) or len(size.free_symbols) != 1:
        return None
    symbol: Any = next(iter(size.free_symbols))
    expression: Any = size
    slope, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    if not (slope.is_Integer and offset.is_Integer and slope > 0):
        return None
    if sympy.expand(slope * symbol + offset - expression) != 0:
        return None
    return symbol, int(slope), int(offset)
