"""Pairs of reals, which represent complex numbers in a graph, and arithmetic on them.

A part of a pair is a node, or None for a tensor of zeros: no calls on it are emitted, so that the
transform of a real signal costs half of that of a complex signal. While a call is rewritten, a part
may also be a Python number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from coreml_delegate.ops.call import OpCall
from coreml_delegate.ops.edits import insert, value_of
from coreml_delegate.patches.torch import schema_of

ATEN: Any = torch.ops.aten

Part: TypeAlias = "Node | float | None"

COMPONENTS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.complex32: torch.float16,
        torch.complex64: torch.float32,
        torch.complex128: torch.float64,
    }
)
"""The dtype of the parts of each complex dtype."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex value.

    Attributes:
        real: Real part. If the value is a tuple of tensors, so are its parts.
        imag: Imaginary part.
    """

    real: Part
    imag: Part = None

    @property
    def parts(self) -> tuple[Part, Part]:
        """Real and imaginary part."""
        return self.real, self.imag

    @property
    def node(self) -> Node:
        """The first part that is a node; it has the shape of the value, or broadcasts to it."""
        return next(part for part in self.parts if isinstance(part, Node))

    @classmethod
    def of_number(cls, number: complex) -> Pair:
        """Return a Python number as a pair."""
        if not number or not isinstance(number, complex):
            return cls(number.real)
        return cls(number.real or None, number.imag or None)


class FormError(Exception):
    """A form of a known operator that cannot be rewritten to operators on reals."""

    def __init__(self, text: str, remedy: str | None = None) -> None:
        super().__init__(text)
        self.remedy = remedy


class PairCall:
    """A call on complex numbers, with methods that emit calls on reals in its place.

    Args:
        node: The call.
        pairs: The complex values of the graph before it.
        constant: Adds a constant to the program, given a key, a function that computes the value
            in fp64, and the dtype. Equal keys share a constant.
        constant_value: Returns the value of a node computed only from constants, else None.
    """

    def __init__(
        self,
        node: Node,
        pairs: Mapping[Node, Pair],
        constant: Callable[[tuple[Any, ...], Callable[[], torch.Tensor], torch.dtype], Node],
        constant_value: Callable[[Node], torch.Tensor | None],
    ) -> None:
        self.node = node
        self.pairs = pairs
        self.arguments: dict[str, Any] = dict(OpCall.of(node).arguments)
        self._constant = constant
        self.constant_value = constant_value

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parts of the first complex operand, or else of the result."""
        dtypes = [v.dtype for n in self.node.all_input_nodes if (v := value_of(n)).is_complex()]
        dtype = (dtypes or [value_of(self.node).dtype])[0]
        return COMPONENTS.get(dtype, dtype)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the complex call."""
        if target is not operator.getitem:
            return insert(self.node, target, *args, **kwargs)
        with self.node.graph.inserting_before(self.node):
            item = self.node.graph.call_function(target, args)
        item.meta = {**self.node.meta, "val": args[0].meta["val"][args[1]]}
        return item

    def constant(self, key: tuple[Any, ...], value: Callable[[], torch.Tensor]) -> Node:
        """Return a constant of the program in the dtype of the parts."""
        return self._constant(key, value, self.dtype)

    # Operands

    def pair(self, operand: Any) -> Pair:
        """Return an operand, or the argument of that name, as a pair."""
        value = self.arguments[operand] if isinstance(operand, str) else operand
        if isinstance(value, Node):
            return self.pairs.get(value) or Pair(value)
        return Pair.of_number(value)

    def zeros(self, like: Node) -> Node:
        """Return zeros of the shape and dtype of a node, or of each tensor of a list."""
        return self.emit(ATEN.full_like.default, like, 0.0)

    def as_nodes(self, pair: Pair) -> tuple[Node, Node]:
        """Return both parts as nodes; at least one part is a node already."""
        like = pair.node
        real, imag = (
            part if isinstance(part, Node) else self.emit(ATEN.full_like.default, like, part or 0.0)
            for part in pair.parts
        )
        return real, imag

    def sizes(self, node: Node) -> list[Any]:
        """Return the sizes of a node, ``sym_size`` calls for dynamic sizes."""
        return [
            size if isinstance(size, int) else self.emit(ATEN.sym_size.int, node, dim)
            for dim, size in enumerate(value_of(node).shape)
        ]

    # Arithmetic on parts

    def negate(self, a: Part) -> Part:
        """Return ``-a``."""
        return self.emit(ATEN.neg.default, a) if isinstance(a, Node) else a and -a

    def product(self, a: Part, b: Part) -> Part:
        """Return ``a * b``."""
        if a is None or b is None:
            return None
        if not isinstance(a, Node):
            a, b = b, a
        if not isinstance(a, Node):
            return a * b  # pyright: ignore[reportOperatorIssue] - neither is a node
        if not isinstance(b, Node) and abs(b) == 1:
            return a if b == 1 else self.negate(a)
        return self.emit(ATEN.mul.Tensor, a, b)

    def sum(self, a: Part, b: Part) -> Part:
        """Return ``a + b``."""
        if a is None or b is None:
            return a if b is None else b
        if not isinstance(a, Node):
            a, b = b, a
        numbers: tuple[Any, Any] = a, b
        return self.emit(ATEN.add.Tensor, a, b) if isinstance(a, Node) else sum(numbers)

    def difference(self, a: Part, b: Part) -> Part:
        """Return ``a - b``."""
        if a is None or b is None:
            return a if b is None else self.negate(b)
        if not isinstance(a, Node):
            return self.sum(self.negate(b), a)
        return self.emit(ATEN.sub.Tensor, a, b)

    def quotient(self, a: Part, b: Part) -> Part:
        """Return ``a / b``."""
        if a is None or b == 1:
            return a
        if not isinstance(a, Node):
            return self.product(self.emit(ATEN.reciprocal.default, b), a)
        return self.emit(ATEN.div.Tensor, a, b)

    # Arithmetic on pairs

    def bilinear(self, f: Callable[[Part, Part], Part], a: Pair, b: Pair) -> Pair:
        """Return ``f(a, b)`` of complex values, for a bilinear ``f`` of reals."""

        def product(x: Part, y: Part) -> Part:
            return None if x is None or y is None else f(x, y)

        return Pair(
            self.difference(product(a.real, b.real), product(a.imag, b.imag)),
            self.sum(product(a.real, b.imag), product(a.imag, b.real)),
        )

    def multiply(self, a: Pair, b: Pair) -> Pair:
        """Return ``a * b``."""
        return self.bilinear(self.product, a, b)

    def combine(self, f: Callable[[Part, Part], Part], a: Pair, b: Pair) -> Pair:
        """Return a sum or difference; missing parts become zeros if shapes differ."""
        nodes = [x.node for x in (a, b) if any(isinstance(part, Node) for part in x.parts)]
        if len({tuple(value_of(node).shape) for node in nodes}) > 1:
            a, b = (
                Pair(*self.as_nodes(x)) if x.imag is None or x.real is None else x for x in (a, b)
            )
        return Pair(f(a.real, b.real), f(a.imag, b.imag))

    def negative(self, a: Pair) -> Pair:
        """Return ``-a``."""
        return Pair(self.negate(a.real), self.negate(a.imag))

    def conjugate(self, a: Pair) -> Pair:
        """Return the complex conjugate."""
        return Pair(a.real, self.negate(a.imag))

    def norm(self, a: Pair) -> Part:
        """Return ``|a| ** 2``."""
        return self.sum(self.product(a.real, a.real), self.product(a.imag, a.imag))

    def magnitude(self, a: Pair) -> Node:
        """Return ``|a| = m * sqrt(1 + (n / m) ** 2)``: squares from 256 on would overflow fp16."""
        if a.imag is None or a.real is None:
            return self.emit(ATEN.abs.default, a.node)
        magnitudes = [self.emit(ATEN.abs.default, part) for part in self.as_nodes(a)]
        longer = self.emit(ATEN.maximum.default, *magnitudes)
        ratio = self.quotient(self.emit(ATEN.minimum.default, *magnitudes), self.nonzero(longer))
        root = self.emit(ATEN.sqrt.default, self.sum(self.product(ratio, ratio), 1.0))
        return self.emit(ATEN.mul.Tensor, longer, root)

    def nonzero(self, length: Node) -> Node:
        """Return ``length`` with 1 in place of 0, to divide by."""
        is_zero = self.emit(ATEN.eq.Scalar, length, 0.0)
        one_where_zero = self.emit(ATEN._to_copy.default, is_zero, dtype=value_of(length).dtype)
        return self.emit(ATEN.add.Tensor, length, one_where_zero)

    def divide(self, a: Pair, b: Pair) -> Pair:
        """Return ``a / b``. The divisor is scaled, so that its square does not overflow fp16."""
        if b.imag is None:
            return Pair(*(self.quotient(part, b.real) for part in a.parts))
        if not any(isinstance(part, Node) for part in b.parts):
            inverse = 1 / complex(float(b.real or 0), float(b.imag))  # pyright: ignore[reportArgumentType]
            return self.multiply(a, Pair.of_number(inverse))
        magnitudes = [self.emit(ATEN.abs.default, part) for part in self.as_nodes(b)]
        scale = self.emit(ATEN.maximum.default, *magnitudes)
        real, imag = (self.quotient(part, scale) for part in b.parts)
        scaled = Pair(real, imag)
        inverse = self.quotient(1.0, self.product(self.norm(scaled), scale))
        product = self.multiply(a, self.conjugate(scaled))
        return Pair(*(self.product(part, inverse) for part in product.parts))

    def angle(self, a: Pair) -> Node:
        """Return the angle, from -pi to pi."""
        real, imag = self.as_nodes(a)
        return self.emit(ATEN.atan2.default, imag, real)

    def polar(self, length: Part, angle: Part) -> Pair:
        """Return ``length * exp(1j * angle)``."""
        if angle is None:
            return Pair(length)
        factors = (self.emit(f, angle) for f in (ATEN.cos.default, ATEN.sin.default))
        return Pair(*(self.product(length, factor) for factor in factors))

    def exponential(self, a: Pair) -> Pair:
        """Return ``exp(a)``."""
        length = 1.0 if a.real is None else self.emit(ATEN.exp.default, a.real)
        return self.polar(length, a.imag)

    def power(self, a: Pair, exponent: float) -> Pair:
        """Return the principal value of ``a ** exponent``; powers 1 to 4 are products."""
        if exponent in _PRODUCT_POWERS:
            return reduce(self.multiply, [a] * int(exponent))
        length = self.emit(ATEN.pow.Tensor_Scalar, self.magnitude(a), exponent)
        return self.polar(length, self.emit(ATEN.mul.Tensor, self.angle(a), exponent))

    # Ops applied to each part

    def map_parts(self, target: Any, data: Callable[[str], bool]) -> Pair:
        """Apply an op to each part.

        Args:
            target: The op, with the arguments of the complex call.
            data: Whether the argument of a name has values, not positions or sizes.
        """
        names = [a.name for a in schema_of(target).arguments]
        arguments = dict(zip(names, self.node.args, strict=False)) | dict(self.node.kwargs)
        operands = [v for name, v in arguments.items() if data(name) for v in _flat(v)]
        pairs = [self.pair(v) for v in operands if v is not None]

        def call(part: int) -> Node:
            def replace(name: str, value: Any) -> Any:
                if isinstance(value, torch.dtype):
                    return COMPONENTS.get(value, value)
                if isinstance(value, list | tuple):
                    return [replace(name, v) for v in value]
                if value is None or not data(name):
                    return value
                pair = self.pair(value)
                component = pair.parts[part]
                if component is None:
                    return self.zeros(pair.node) if isinstance(value, Node) else 0.0
                return component

            args = [replace(n, v) for n, v in zip(names, self.node.args, strict=False)]
            kwargs = {n: replace(n, v) for n, v in self.node.kwargs.items()}
            return self.emit(target, *args, **kwargs)

        is_zero = [all(pair.parts[part] is None for pair in pairs) for part in (0, 1)]
        return Pair(*(None if zero else call(part) for part, zero in enumerate(is_zero)))


_PRODUCT_POWERS = frozenset({1, 2, 3, 4})


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
