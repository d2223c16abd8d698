"""Bitwise functions of integers, computed byte by byte in tables of 256 or 65,536 entries."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.graph.compose import Composer, Var, const, wrap
from coreml_delegate.graph.operations.integers import uniform
from coreml_delegate.graph.tensor_types import DType, TensorType
from coreml_delegate.mil.compose import mb

_BYTES = np.arange(256, dtype=np.int64)
_COUNTS = np.array([int(byte).bit_count() for byte in _BYTES], np.int32)
_LENGTHS = np.array([int(byte).bit_length() for byte in _BYTES], np.int32)
# Core ML's highest rank, which leaves no axis for the bytes.
_HIGHEST_RANK = 5


def byte_count(dtype: DType) -> int:
    """Return the number of bytes of an element, at most four, the size of the storage dtype."""
    return min(dtype.bits, 32) // 8


def byte(x: Var, number: int) -> Var:
    """Return byte ``floor(x / 256**number) mod 256`` of int32 values."""
    if number:
        x = mb.floor_div(x=x, y=np.int32(1 << (8 * number)))
    return mb.mod(x=x, y=np.int32(256))


def combine(c: Composer, function: np.ufunc, type: TensorType, x: Var, y: Var) -> Var:
    """Apply a NumPy bitwise function to two tensors of integers."""
    for value, other in ((x, y), (y, x)):
        constant = uniform(other, like=value)
        if constant is not None and value.rank == type.rank:
            return combine_constant(function, type.dtype, value, constant)
    if type.rank >= _HIGHEST_RANK:
        x, y = (mb.reshape(x=c.broadcast(var, type.shape), shape=[-1]) for var in (x, y))
    result = combine_words(function, x, y, byte_count(type.dtype))
    result = wrap(result, type.dtype)
    return c.reshape(result, type.shape) if type.rank >= _HIGHEST_RANK else result


def combine_words(function: np.ufunc, x: Var, y: Var, count: int = 4) -> Var:
    """Apply a NumPy bitwise function to the lowest bytes of int32 values, which broadcast.

    The result is the sum over bytes n of ``table[256 * x_n + y_n] * 256**n``.
    """
    pairs = function(_BYTES[:, None], _BYTES).reshape(-1).astype(np.int32)
    table = mb.const(val=pairs)
    if count == 1:
        return mb.gather(x=table, indices=_pair(byte(x, 0), byte(y, 0)), axis=0)
    rank = max(x.rank, y.rank)
    weights = (1 << (8 * np.arange(count, dtype=np.int64))).astype(np.int32)
    # A new first axis has the bytes.
    weights = weights.reshape(count, *(1,) * rank)
    planes = [mb.mod(x=mb.floor_div(x=var, y=weights), y=np.int32(256)) for var in (x, y)]
    entries = mb.gather(x=table, indices=_pair(*planes), axis=0)
    parts = mb.split(x=mb.mul(x=entries, y=weights), num_splits=count, axis=0)
    result = parts[0]
    for part in parts[1:]:
        result = mb.add(x=result, y=part)
    return mb.squeeze(x=result, axes=[0])


def combine_constant(function: np.ufunc, dtype: DType, x: Var, constant: int) -> Var:
    """Apply a NumPy bitwise function f to integers x and a constant k.

    The result is ``x`` plus the sum over bytes n of ``(f(x_n, k_n) - x_n) * 256**n``.
    """
    count = byte_count(dtype)
    mask = constant & ((1 << (8 * count)) - 1)
    if function is np.bitwise_and and mask.bit_count() == mask.bit_length() < 8 * count - 1:
        # The low bits: the remainder of a division by a power of two.
        return mb.mod(x=x, y=np.int32(mask + 1))
    result = x
    for number in range(count):
        change = function(_BYTES, (mask >> (8 * number)) & 255) - _BYTES
        if change.any():
            scaled = _as_int32(change << (8 * number))
            result = mb.add(x=result, y=_look_up(scaled, x, number))
    return wrap(result, dtype)


def counts(x: Var, dtype: DType) -> Var:
    """Return the number of set bits among the lowest 32."""
    parts = (_look_up(_COUNTS, x, number) for number in range(byte_count(dtype)))
    return functools.reduce(lambda total, part: mb.add(x=total, y=part), parts)


def lengths(x: Var, dtype: DType) -> Var:
    """Return the bit length: the position of the highest set bit among the lowest 32, from 1 on."""
    parts = (
        _look_up(np.where(_BYTES > 0, _LENGTHS + 8 * number, 0).astype(np.int32), x, number)
        for number in range(byte_count(dtype))
    )
    return functools.reduce(lambda total, part: mb.maximum(x=total, y=part), parts)


def _look_up(table: NDArray[np.int32], x: Var, number: int) -> Var:
    """Return ``table[b]`` for byte b of this number of int32 values."""
    return mb.gather(x=const(table), indices=byte(x, number), axis=0)


def _pair(x: Var, y: Var) -> Var:
    return mb.add(x=mb.mul(x=x, y=np.int32(256)), y=y)


def _as_int32(array: NDArray[Any]) -> NDArray[np.int32]:
    return array.astype(np.int64).astype(np.uint32).view(np.int32)
