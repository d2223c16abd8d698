"""Random values.

A seed of -1 selects OpenVINO's generator, whose state changes with every call. With any other seed
every op and every call returns the same values: element i is a hash of i and the seed, so no state
is needed. Implementations of MIL agree only on the distribution.

Source: coremltools' MIL op reference, ``random``; the mixing function is the finalizer of
MurmurHash3 with the constants of C. Wellons' search ("Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    f32,
    ints,
    rank,
    require_room,
    scalar,
    shape_of,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal

_UNSEEDED = -1
_MASK = 0xFFFFFFFF
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # (shift, factor), in order
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: keeps neighbouring seeds apart
_FRACTION_BITS = 24  # of a float in [0, 1) with even spacing


@translation("random_uniform")
def random_uniform(
    shape: Tensor, low: float = 0.0, high: float = 1.0, seed: int = _UNSEEDED
) -> Result:
    """Values uniformly distributed over [low, high)."""
    if low == high:
        return ops.broadcast(ops.constant(np.float32(low)), require_room(shape, shape))
    if low > high:
        mirrored = _uniform(shape, seed, 0.0, low - high)
        return ops.subtract(scalar(low, mirrored), mirrored)
    return _uniform(shape, seed, low, high)


@translation("random_normal")
def random_normal(
    shape: Tensor, mean: float = 0.0, stddev: float = 1.0, seed: int = _UNSEEDED
) -> Result:
    """Normally distributed values, by the Box-Muller transform."""
    pairs = _uniform(ops.concat([ints((2,)), shape], 0), seed)
    first, second = (ops.gather(pairs, ints(row), ints(0)) for row in (0, 1))
    # 1 - u lies in (0, 1], where the logarithm is finite.
    squared = ops.multiply(ops.log(ops.subtract(scalar(1, first), first)), scalar(-2, first))
    angle = ops.multiply(second, scalar(2 * math.pi, second))
    values = ops.multiply(ops.sqrt(squared), ops.cos(angle))
    return ops.add(ops.multiply(values, scalar(stddev, values)), scalar(mean, values))


@translation("random_bernoulli")
def random_bernoulli(shape: Tensor, prob: float = 0.5, seed: int = _UNSEEDED) -> Result:
    """1 with probability ``prob``, else 0."""
    values = _uniform(shape, seed)
    return f32(ops.less(values, scalar(prob, values)))


@translation("random_categorical")
def random_categorical(
    x: Tensor, mode: str = "logits", size: int = 1, seed: int = _UNSEEDED
) -> Result:
    """``size`` draws with replacement per distribution along the last dimension of ``x``.

    A draw is the number of classes whose cumulative probability is at most a uniform value.
    """
    if mode not in ("logits", "probs"):
        raise refusal("random_categorical mode", mode, "logits or probs")
    total = rank(x)
    shares = ops.softmax(x, total - 1) if mode == "logits" else x
    cumulative = ops.cum_sum(shares, ints(total - 1))
    last = ops.gather(cumulative, ints((-1,)), ints(total - 1))
    leading = ops.gather(shape_of(x), ints(list(range(total - 1))), ints(0))
    values = ops.multiply(_uniform(ops.concat([leading, ints((size,))], 0), seed), last)
    # [..., size, 1] against [..., 1, classes - 1]; not the last bound, which rounding may lower.
    bounds = ops.unsqueeze(
        ops.slice(cumulative, ints((0,)), ints((-1,)), ints((1,)), ints((-1,))), ints(-2)
    )
    is_passed = ops.greater_equal(ops.unsqueeze(values, ints(-1)), bounds)
    return ops.reduce_sum(f32(is_passed), ints((-1,)), False)


def _uniform(shape: Tensor, seed: int, low: float = 0.0, high: float = 1.0) -> Any:
    """Return values uniformly distributed over [low, high), where ``low < high``."""
    shape = require_room(shape, shape)
    if seed == _UNSEEDED:
        bounds = (ops.constant(np.float32(bound)) for bound in (low, high))
        values = ops.random_uniform(shape, *bounds, "f32", 0, 0)
        # OpenVINO 2026.4 moves factors and summands into the bounds, and then fails if they are
        # equal or reversed: values * -2, values * 0, values + 1e9. It does not look past a clamp.
        return ops.clamp(values, low, high)
    count = ops.reduce_prod(shape, ints(0), False)
    indices = ops.range(ints(0), count, ints(1), "i32")
    bits = _mix(ops.bitwise_xor(_mix(indices), _word(_mix_seed(seed))))
    fraction = ops.multiply(
        f32(_shift_right(bits, 32 - _FRACTION_BITS)), ops.constant(np.float32(2.0**-_FRACTION_BITS))
    )
    values = ops.add(ops.multiply(fraction, scalar(high - low, fraction)), scalar(low, fraction))
    return ops.reshape(values, shape, special_zero=False)


def _mix(words: Any) -> Any:
    """Apply a bijection of 32-bit words in which every result bit depends on every input bit."""
    for shift, factor in _MIX:
        words = ops.bitwise_xor(words, _shift_right(words, shift))
        if factor != 1:
            words = ops.multiply(words, _word(factor))
    return words


def _mix_seed(seed: int) -> int:
    word = (seed * _GOLDEN + 1) & _MASK
    for shift, factor in _MIX:
        word = ((word ^ (word >> shift)) * factor) & _MASK
    return word


def _shift_right(words: Any, count: int) -> Any:
    """Return unsigned ``words >> count``, although the graph's integers are signed."""
    return ops.bitwise_and(ops.bitwise_right_shift(words, ints(count)), _word(_MASK >> count))


def _word(bits: int) -> Any:
    return ops.constant(np.uint32(bits).astype(np.int32))
