"""``Composer``: makes a MIL function from a graph, with coremltools' builder.

An operation's ``compose`` function is called with the composer, the node, and one MIL value per
operand, in the storage dtype of its element type (see ``tensor_types``). It returns the MIL value
of the result, or a tuple of values. A value without elements is None, because MIL has no empty
tensors. A value of more than five dimensions is flattened, because Core ML has at most rank 5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import GraphError, UnsupportedOperatorError
from coreml_delegate.graph.node import (
    Closure,
    Compose,
    Node,
    Scope,
    Value,
    as_tuple,
    needed_nodes,
)
from coreml_delegate.graph.tensor_types import Dim, DType, TensorType, linear, simplify
from coreml_delegate.lowering.debug_handles import numbered
from coreml_delegate.mil.compose import mb
from coreml_delegate.targets import Opset

Var = Any
"""A value of coremltools' MIL builder."""

MOST_AXES = 5
"""The highest rank of a tensor in Core ML."""

_INT_MIN = np.int32(-(2**31))


_SIZE_OPS = {sympy.Add: "add", sympy.Mul: "mul", sympy.Max: "maximum", sympy.Min: "minimum"}


class Composer:
    """Writes the MIL function of a graph.

    Args:
        opset: The MIL opset to use.
        order: Returns the nodes that compute values of a scope, in the order to compose them.

    Attributes:
        nodes: The nodes of the outermost scope by number. MIL ops have the number of the node that
            they are composed for; see ``debug_handles``.
    """

    def __init__(
        self, opset: Opset, order: Callable[[Scope, Sequence[Value]], Iterable[Node]] = needed_nodes
    ) -> None:
        self.opset = opset
        self.order = order
        self._vars: dict[Value, Var | None] = {}
        self._sizes: dict[sympy.Symbol, tuple[Var, int, Dim]] = {}
        self.nodes: dict[int, Node] = {}
        self._numbers: dict[Value, int] = {}
        self._depth = 0  # of closures

    # Values

    def bind(self, value: Value, var: Var | None) -> None:
        """Set the MIL value of ``value``, from whose shape its symbolic sizes are then read."""
        self._vars[value] = var
        if var is None or value.rank > MOST_AXES:
            return
        for axis, size in enumerate(value.shape):
            parts = linear(size)
            if parts is not None and parts[0] not in self._sizes:
                self._sizes[parts[0]] = (var, axis, size)

    def var(self, value: Value) -> Var | None:
        """Return the MIL value of ``value``, which has been composed."""
        return self._vars[value]

    def compose(self, nodes: Iterable[Node]) -> None:
        """Compose nodes, in this order."""
        for node in nodes:
            if node.results[0] in self._vars:
                continue
            for value, var in zip(node.results, self._compose_node(node), strict=True):
                self.bind(value, None if value.type.is_empty else var)

    def numbered(self, node: Node) -> AbstractContextManager[None]:
        """Give the MIL ops that a block composes the number of a node.

        The ops of a closure have the number of the node that calls it.
        """
        if self._depth:
            return nullcontext()
        number = self._numbers.setdefault(node.results[0], len(self._numbers) + 1)
        self.nodes.setdefault(number, node)
        return numbered(number)

    def call(self, closure: Closure, arguments: Sequence[Var | None]) -> tuple[Var | None, ...]:
        """Compose a closure's nodes in the current block; return the MIL values of its results."""
        outer_vars = dict(self._vars)
        outer_sizes = dict(self._sizes)
        self._depth += 1
        try:
            for parameter, argument in zip(closure.parameters, arguments, strict=True):
                self.bind(parameter, argument)
            self.compose(self.order(closure.scope, closure.results))
            return tuple(self._vars[result] for result in closure.results)
        finally:
            self._depth -= 1
            # Another call has other arguments, and values of a nested block end with it.
            self._vars, self._sizes = outer_vars, outer_sizes

    def _compose_node(self, node: Node) -> tuple[Var | None, ...]:
        compose = node.record.compose
        if compose is None:
            raise AssertionError(f"{node.name} is made of other operations")
        if all(value.type.is_empty for value in node.results):
            return (None,) * len(node.results)
        with self.numbered(node):
            return self._compose_with(compose, node)

    def _compose_with(self, compose: Compose, node: Node) -> tuple[Var | None, ...]:
        operands = [self._vars[operand] for operand in node.operands]
        if node.record.moves_data:  # hardly any op of MIL moves bools
            pairs = zip(node.operands, operands, strict=True)
            operands = [cast_bool(*pair, "int32") for pair in pairs]
        results = as_tuple(compose(self, node, *operands))
        if not node.record.moves_data:
            return results
        pairs = zip(node.results, results, strict=True)
        return tuple(cast_bool(*pair, "bool") for pair in pairs)

    # Constants and sizes

    def full(self, value: Any, like: TensorType) -> Var:
        """Return a tensor filled with ``value``; its shape may be symbolic."""
        scalar = to_storage(np.asarray(value), like.dtype)[()]
        if like.rank == 0:
            return mb.const(val=scalar)
        if like.is_static:
            return const(np.full(like.static_shape, scalar, like.dtype.storage_numpy))
        return mb.fill(shape=self.shape(storage_shape(like.shape)), value=scalar)

    def size(self, size: Dim) -> Any:
        """Return a size: a number, or an int32 of rank 0 computed from a parameter's shape."""
        return np.int32(size) if isinstance(size, int) else self._expression(sympy.expand(size))

    def vector(self, sizes: Sequence[Dim]) -> Any:
        """Return sizes as an int32 vector: an array, or computed from shapes of parameters."""
        if all(isinstance(size, int) for size in sizes):
            return np.array(sizes, np.int32)
        return join([self.size(size) for size in sizes])

    def shape(self, shape: Sequence[Dim]) -> Any:
        """Return a shape as an argument of ops: a list of ints, or an int32 tensor of rank 1."""
        if all(isinstance(size, int) for size in shape):
            return [int(size) for size in shape]
        return self.vector(shape)

    def _read_size(self, size: sympy.Symbol) -> Var:
        """Return a symbol's size, read from a bound value: ``size = slope * symbol + offset``."""
        if size not in self._sizes:
            raise GraphError(
                f"no available value has a dimension of size {size}",
                remedy="Give a parameter a dimension of that name",
            )
        var, axis, expression = self._sizes[size]
        shape = mb.shape(x=var)
        read_size = mb.gather(x=shape, indices=np.int32(axis), axis=0)
        _, slope, offset = linear(expression) or (None, 1, 0)
        if offset:
            read_size = mb.sub(x=read_size, y=np.int32(offset))
        return mb.floor_div(x=read_size, y=np.int32(slope)) if slope != 1 else read_size

    def _expression(self, size: Any) -> Var:
        if isinstance(size, sympy.Symbol):
            return self._read_size(size)
        if size.is_Integer:
            return mb.const(val=np.int32(int(size)))
        if size.func in _SIZE_OPS:
            op = getattr(mb, _SIZE_OPS[size.func])
            parts = [self._expression(part) for part in size.args]
            return functools.reduce(lambda x, y: op(x=x, y=y), parts)
        if isinstance(size, sympy.floor):
            top, bottom = sympy.fraction(sympy.together(size.args[0]))
            return mb.floor_div(x=self._expression(top), y=self._expression(bottom))
        if isinstance(size, sympy.Mod):
            return mb.mod(x=self._expression(size.args[0]), y=self._expression(size.args[1]))
        if isinstance(size, sympy.Pow) and isinstance(size.args[1], sympy.Integer):
            factors = [self._expression(size.args[0])] * int(size.args[1])
            return functools.reduce(lambda x, y: mb.mul(x=x, y=y), factors)
        raise UnsupportedOperatorError("a size cannot be computed in Core ML", got=str(size))

    # Shapes

    def reshape(self, x: Var, shape: Sequence[Dim]) -> Var:
        """Return a tensor of any rank in another shape, which may have rank 0."""
        shape = storage_shape(shape)
        if tuple(x.shape) == tuple(shape):
            return x
        if not shape:
            if x.rank > 1:
                # coremltools 9 squeezes only one axis of a constant, whatever ``axes`` says.
                x = mb.reshape(x=x, shape=[1])
            return mb.squeeze(x=x, axes=[0]) if x.rank else x
        if x.rank == 0:
            x = mb.expand_dims(x=x, axes=[0])
        unknown = [n for n, size in enumerate(shape) if not isinstance(size, int)]
        if len(unknown) == 1:
            sizes = [-1 if n in unknown else int(size) for n, size in enumerate(shape)]
            return mb.reshape(x=x, shape=sizes)
        return mb.reshape(x=x, shape=self.shape(shape))

    def broadcast(self, x: Var, shape: Sequence[Dim]) -> Var:
        """Broadcast ``x`` to a shape; its sizes are equal or 1, or its rank is 0."""
        if x.rank == 0:
            shape = storage_shape(shape)
        if x.rank < len(shape):
            x = self.reshape(x, (1,) * (len(shape) - x.rank) + tuple(x.shape))
        repeated = [
            have == 1 and want != 1 for have, want in zip(tuple(x.shape), shape, strict=True)
        ]
        if not any(repeated):
            return x
        reps = self.shape([w if r else 1 for w, r in zip(shape, repeated, strict=True)])
        return mb.tile(x=x, reps=reps)


def const(array: Any, dtype: DType | None = None) -> Var:
    """Return a constant of elements of ``dtype``, or of its storage dtype if that is None."""
    array = np.asarray(array)
    data = array if dtype is None else to_storage(array, dtype)
    if data.ndim > MOST_AXES:
        data = data.reshape(-1)
    if data.ndim == 0:
        return mb.const(val=data[()])
    return mb.const(val=np.ascontiguousarray(data))


def join(parts: Sequence[Any]) -> Var:
    """Concatenate int32 numbers, constant or computed, to a vector."""
    vectors = [
        const(np.array([part], np.int32))
        if isinstance(part, int | np.integer)
        else mb.expand_dims(x=part, axes=[0])
        for part in parts
    ]
    return vectors[0] if len(vectors) == 1 else mb.concat(values=vectors, axis=0)


def convert(x: Var, source: DType, target: DType) -> Var:
    """Convert values to another element type, by StableHLO's rules.

    Floats are rounded towards zero to integers; integers keep their low bits; bool is 0 or 1,
    and every number but 0 is true.
    """
    if source is target or (
        source.storage_dtype == target.storage_dtype
        and not (source.is_integer and target.is_integer)
    ):
        return x
    if target is DType.BOOL:
        return mb.not_equal(x=x, y=source.storage_numpy.type(0))
    if source.is_integer and target.is_integer:
        return wrap(x, target)
    if source.is_integer and target.is_float and source is DType.UINT32:
        return _unsigned_to_float(x, target)
    if source.is_float and target is DType.UINT32:
        return _float_to_unsigned(x, source)
    return wrap(mb.cast(x=x, dtype=target.storage_dtype), target)


def wrap(x: Var, dtype: DType) -> Var:
    """Wrap int32 values to a narrower integer type of n bits; other types are unchanged.

    Unsigned: ``x mod 2**n``; signed: ``(x + 2**(n-1)) mod 2**n - 2**(n-1)``.
    """
    if not dtype.wraps:
        return x
    span = np.int32(1 << dtype.bits)
    if dtype.is_unsigned:
        return mb.mod(x=x, y=span)
    half = np.int32(1 << (dtype.bits - 1))
    return mb.sub(x=mb.mod(x=mb.add(x=x, y=half), y=span), y=half)


def ordered(x: Var, dtype: DType) -> Var:
    """Map values so that ``<`` of the storage dtype is ``<`` of the element type.

    Only uint32 changes, which is stored as the bits of an int32: ``x - 2**31`` keeps its order.
    """
    return mb.add(x=x, y=_INT_MIN) if dtype is DType.UINT32 else x


def in_order(function: Callable[..., Var], dtype: DType, *values: Var) -> Var:
    """Return a maximum, minimum or clamp of values, which are compared as ``dtype``."""
    return ordered(function(*(ordered(value, dtype) for value in values)), dtype)


def _unsigned_to_float(x: Var, target: DType) -> Var:
    # high * 2**16 + low, where both are unsigned halves.
    high = mb.floor_div(x=x, y=np.int32(1 << 16))
    high = mb.mod(x=high, y=np.int32(1 << 16))
    low = mb.mod(x=x, y=np.int32(1 << 16))
    scaled_high = mb.mul(x=mb.cast(x=high, dtype="fp32"), y=np.float32(1 << 16))
    converted = mb.add(x=scaled_high, y=mb.cast(x=low, dtype="fp32"))
    return cast_storage(converted, "fp32", target.storage_dtype)


def _float_to_unsigned(x: Var, source: DType) -> Var:
    floats = cast_storage(x, source.storage_dtype, "fp32")
    # From 2**31 on: the bits of x - 2**31, with the highest bit set.
    above = mb.greater_equal(x=floats, y=np.float32(2**31))
    reduced = mb.select(cond=above, a=mb.sub(x=floats, y=np.float32(2**31)), b=floats)
    bits = mb.cast(x=reduced, dtype="int32")
    return mb.select(cond=above, a=mb.add(x=bits, y=_INT_MIN), b=bits)


def cast_storage(x: Var, source: str, target: str) -> Var:
    """Cast from one storage dtype to another, without an op if they are equal."""
    return x if source == target else mb.cast(x=x, dtype=target)


def storage_shape(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the shape of a tensor in MIL: flat, [count], if it has more than five axes."""
    if len(shape) <= MOST_AXES:
        return tuple(shape)
    count: Any = 1
    for size in shape:
        count = count * size
    return (simplify(count),)


def cast_bool(value: Value, var: Var | None, dtype: str) -> Var | None:
    """Cast the MIL value of a tensor of bools between bool and int32; leave other values."""
    return mb.cast(x=var, dtype=dtype) if value.dtype is DType.BOOL and var is not None else var


def to_storage(array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Convert an array of an element type, or cast it to this type, to its storage dtype.

    Raises:
        GraphError: Integers of 64 bits that 32 bits cannot hold.
    """
    array = np.asarray(array)
    if dtype.bits == 64 and dtype.is_integer:
        bounds = np.iinfo(np.int32)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise GraphError(
                f"{dtype.label} values are beyond 32 bits, the widest integers of Core ML",
                got=f"{array.min()} to {array.max()}",
                expected=f"{bounds.min} to {bounds.max}",
            )
        return array.astype(np.int32)
    if dtype is DType.UINT32:
        return array.astype(np.uint32).view(np.int32)
    if dtype.is_integer:
        return array.astype(dtype.numpy).astype(np.int32)
    return array.astype(dtype.storage_numpy)


def from_storage(array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Convert an array of the storage dtype to the element type."""
    if dtype is DType.UINT32:
        return np.asarray(array, np.int32, order="C").view(np.uint32)
    return array.astype(dtype.numpy, copy=False)
