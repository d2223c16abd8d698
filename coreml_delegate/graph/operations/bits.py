"""Bitwise logic, shifts, counts of bits, and random bits.

MIL has no bitwise ops: logic looks up pairs of bytes in tables, shifts multiply and divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, const, from_storage, wrap
from coreml_delegate.graph.emitter import Emitter, elementwise, operation
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations import float_bits, shifts, threefry
from coreml_delegate.graph.operations.byte_tables import combine, counts, lengths
from coreml_delegate.graph.tensor_types import ALL, BOOLEANS, INTEGERS, Dim, DType, TensorType
from coreml_delegate.mil.compose import mb

_RANDOM = (DType.UINT8, DType.UINT16, DType.UINT32)


def _logic(function: np.ufunc, of_bools: str) -> Callable[..., Var]:
    """Return a compose function: a NumPy function of integers' bits, or MIL's op for bools."""

    def compose(c: Composer, node: Node, x: Var, y: Var) -> Var:
        if node.type.dtype is DType.BOOL:
            return getattr(mb, of_bools)(x=x, y=y)
        return combine(c, function, node.type, x, y)

    return compose


_compose_any_or = _logic(np.bitwise_or, "logical_or")


def _compose_or(c: Composer, node: Node, x: Var, y: Var) -> Var:
    if shifts.are_disjoint(c, *node.operands):
        return wrap(mb.add(x=x, y=y), node.type.dtype)
    return _compose_any_or(c, node, x, y)


def _compose_not(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    if dtype is DType.BOOL:
        return mb.logical_not(x=x)
    all_bits = (1 << dtype.bits) - 1 if dtype.is_unsigned and dtype.wraps else -1
    return mb.sub(x=np.int32(all_bits), y=x)


def _compose_popcnt(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    count = counts(x, dtype)
    if dtype.bits < 64:
        return count
    # The upper 32 bits repeat the sign bit.
    is_negative = mb.cast(x=mb.less(x=x, y=np.int32(0)), dtype="int32")
    return mb.add(x=count, y=mb.mul(x=is_negative, y=np.int32(32)))


def _compose_count_leading_zeros(_: Composer, node: Node, x: Var) -> Var:
    dtype = node.type.dtype
    count = mb.sub(x=np.int32(dtype.bits), y=lengths(x, dtype))
    if dtype.bits < 64:
        return count
    is_negative = mb.less(x=x, y=np.int32(0))
    return mb.select(cond=is_negative, a=np.int32(0), b=count)


def _compose_bitcast_convert(_: Composer, node: Node, x: Var) -> Var:
    source, target = node.types[0].dtype, node.type.dtype
    if source is target:
        return x
    if x.val is not None and source.bits < 64:
        return const(from_storage(np.asarray(x.val), source).view(target.numpy), target)
    if source.is_float:
        return float_bits.from_float(x, source, target)
    if target.is_float:
        return float_bits.to_float(x, source, target)
    return wrap(x, target)


def _compose_rng_bit_generator(c: Composer, node: Node, state: Var) -> tuple[Var, Var]:
    return threefry.compose(c, state, node.results[1].type)


class Bits(Emitter):
    """Bitwise logic, shifts and counts of bits; shapes as for ``Elementwise``."""

    @elementwise(INTEGERS | BOOLEANS, _logic(np.bitwise_and, "logical_and"))
    def and_(self, x: Value, y: Value) -> Value:
        """Return the bitwise and; of bools, whether both are true."""
        return self.emit_elementwise("and", x, y)

    @elementwise(INTEGERS | BOOLEANS, _compose_or)
    def or_(self, x: Value, y: Value) -> Value:
        """Return the bitwise or; of bools, whether one is true."""
        return self.emit_elementwise("or", x, y)

    @elementwise(INTEGERS | BOOLEANS, _logic(np.bitwise_xor, "logical_xor"))
    def xor(self, x: Value, y: Value) -> Value:
        """Return the bitwise exclusive or; of bools, whether they differ."""
        return self.emit_elementwise("xor", x, y)

    @elementwise(INTEGERS | BOOLEANS, _compose_not)
    def not_(self, x: Value) -> Value:
        """Return the bitwise complement; of bools, whether ``x`` is false."""
        return self.emit_elementwise("not", x)

    @elementwise(INTEGERS, shifts.left)
    def shift_left(self, x: Value, y: Value) -> Value:
        """Return ``x << y``; 0 if ``y`` is negative, or at least the number of bits."""
        return self.emit_elementwise("shift_left", x, y)

    @elementwise(INTEGERS, shifts.right_logical)
    def shift_right_logical(self, x: Value, y: Value) -> Value:
        """Return ``x >> y``, zeros from above; 0 if ``y`` is negative, or at least the width."""
        return self.emit_elementwise("shift_right_logical", x, y)

    @elementwise(INTEGERS, shifts.right_arithmetic)
    def shift_right_arithmetic(self, x: Value, y: Value) -> Value:
        """Return ``x >> y`` with the highest bit repeated."""
        return self.emit_elementwise("shift_right_arithmetic", x, y)

    @elementwise(INTEGERS, _compose_popcnt)
    def popcnt(self, x: Value) -> Value:
        """Return the number of set bits."""
        return self.emit_elementwise("popcnt", x)

    @elementwise(INTEGERS, _compose_count_leading_zeros)
    def count_leading_zeros(self, x: Value) -> Value:
        """Return the number of bits above the highest set bit."""
        return self.emit_elementwise("count_leading_zeros", x)

    @elementwise(ALL, _compose_bitcast_convert)
    def bitcast_convert(self, x: Value, dtype: Any) -> Value:
        """Reinterpret the bits as another element type of the same width.

        float32 and float16 to and from integers is exact, except for the payload of a NaN.
        """
        target = DType.of(dtype)
        _check_bitcast(x.dtype, target)
        return self.emit("bitcast_convert", (x,), x.type.with_dtype(target))

    @operation({DType.UINT32}, _compose_rng_bit_generator)
    def rng_bit_generator(
        self, state: Value, dtype: Any, shape: Sequence[Dim], algorithm: str = "threefry"
    ) -> tuple[Value, Value]:
        """Return the next state, and random bits, equal to XLA's ``THREE_FRY``.

        Args:
            state: uint32 of shape [4]: the low and the high word of the key, then of the counter.
            dtype: ``uint8``, ``uint16`` or ``uint32``.
            shape: Shape of the random bits.
            algorithm: ``threefry``.
        """
        if algorithm != "threefry":
            raise GraphError(
                "rng_bit_generator: no such algorithm",
                got=repr(algorithm),
                expected="threefry; others need products of 64 bits, which Core ML lacks",
            )
        if state.shape != (4,):
            raise GraphError(
                "rng_bit_generator: wrong state", got=str(state.type), expected="uint32[4]"
            )
        element = DType.of(dtype)
        if element not in _RANDOM:
            raise GraphError(
                "rng_bit_generator does not return this element type",
                got=element.label,
                expected=", ".join(label.label for label in _RANDOM),
            )
        bits = TensorType(element, ()).with_shape(shape)
        bits.static_shape  # noqa: B018 - refuses symbolic sizes
        return self.emit("rng_bit_generator", (state,), (state.type, bits))


def _check_bitcast(source: DType, target: DType) -> None:
    if source is target:
        return
    conversion = f"{source.label} as {target.label}"
    if DType.BOOL in (source, target) or source.bits != target.bits:
        raise GraphError(
            "bitcast_convert: widths of element types differ",
            got=conversion,
            expected="types of the same width, and not bool",
        )
    if source.bits == 64 and source.is_float != target.is_float:
        raise GraphError(
            "bitcast_convert: Core ML stores 64-bit types in 32 bits",
            got=conversion,
            expected="types of 32 bits or less",
        )
