"""Bits of floating-point numbers by exact arithmetic, as MIL has no op to reinterpret them.

A float is ``mantissa * 2**exponent`` with a mantissa in [1, 2); its bits are
``(exponent + bias) * 2**mantissa_bits + (mantissa - 1) * 2**mantissa_bits``. Both formats are
computed in fp32, where every step here is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coreml_delegate.graph.compose import Composer, Var, cast_storage, const, wrap
from coreml_delegate.graph.node import Node
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.functions import sign_bit


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        exponent_bits: Bits of the exponent.
        mantissa_bits: Bits of the mantissa, without the leading one.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        """The bias of the exponent field."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def unit(self) -> np.int32:
        """The bits of the smallest normal number: an exponent field of 1."""
        return np.int32(1 << self.mantissa_bits)


FORMATS = {DType.FLOAT32: Format(8, 23), DType.FLOAT16: Format(5, 10)}
"""Formats by element type."""


def from_float(x: Var, source: DType, target: DType) -> Var:
    """Return the bits of floats as integers of equal width."""
    layout = FORMATS[source]
    floats = cast_storage(x, source.storage_dtype, "fp32")
    magnitude = mb.abs(x=floats)
    is_finite = mb.less(x=magnitude, y=np.float32(np.inf))
    finite = mb.select(cond=is_finite, a=magnitude, b=np.float32(1))
    mantissa, exponent = _split(finite, layout.least_exponent)
    # A subnormal number has the exponent field 0, and a mantissa below 1.
    field = mb.mul(x=mb.sub(x=exponent, y=np.int32(layout.least_exponent)), y=layout.unit)
    scaled = mb.mul(x=mantissa, y=np.float32(layout.unit))
    bits = mb.add(x=field, y=mb.cast(x=scaled, dtype="int32"))
    infinity = np.int32(((1 << layout.exponent_bits) - 1) << layout.mantissa_bits)
    is_nan = mb.not_equal(x=floats, y=floats)
    quiet = mb.mul(x=mb.cast(x=is_nan, dtype="int32"), y=np.int32(layout.unit >> 1))
    bits = mb.select(cond=is_finite, a=bits, b=mb.add(x=quiet, y=infinity))
    sign_bit_value = np.int32(-(1 << (layout.exponent_bits + layout.mantissa_bits)))
    sign = mb.cast(x=sign_bit(floats), dtype="int32")
    bits = mb.add(x=bits, y=mb.mul(x=sign, y=sign_bit_value))
    return wrap(bits, target)


def to_float(x: Var, source: DType, target: DType) -> Var:
    """Return floats from integers of equal width that have their bits."""
    layout = FORMATS[target]
    x = wrap(x, DType.INT16) if source is DType.UINT16 else x
    is_negative = mb.less(x=x, y=np.int32(0))
    highest = np.int32(-(1 << (layout.exponent_bits + layout.mantissa_bits)))
    magnitude_bits = mb.select(cond=is_negative, a=mb.sub(x=x, y=highest), b=x)
    field = mb.floor_div(x=magnitude_bits, y=layout.unit)
    fraction = mb.mod(x=magnitude_bits, y=layout.unit)
    special_field = (1 << layout.exponent_bits) - 1
    first, second = _powers(np.maximum(np.arange(special_field + 1), 1) - layout.bias)
    first[special_field] = np.inf
    value = _mantissa(field, fraction, layout.mantissa_bits)
    for factors in (first, second):
        factor = mb.gather(x=const(factors), indices=field, axis=0)
        value = mb.mul(x=value, y=factor)
    is_nan = mb.logical_and(
        x=mb.equal(x=field, y=np.int32(special_field)), y=mb.greater(x=fraction, y=np.int32(0))
    )
    value = mb.select(cond=is_nan, a=np.float32(np.nan), b=value)
    negated = mb.mul(x=value, y=np.float32(-1))
    value = mb.select(cond=is_negative, a=negated, b=value)
    return cast_storage(value, "fp32", target.storage_dtype)


def _mantissa(field: Var, fraction: Var, bits: int) -> Var:
    """Return ``(field > 0) + fraction * 2**-bits``, the mantissa in [0, 2).

    It is summed from two parts of at most 12 bits: a graph in fp16 loses only the lower part.
    """
    low_bits = max(bits - 11, 0)
    high = mb.floor_div(x=fraction, y=np.int32(1 << low_bits)) if low_bits else fraction
    scaled = mb.mul(x=mb.cast(x=high, dtype="fp32"), y=np.float32(2.0 ** (low_bits - bits)))
    is_normal = mb.cast(x=mb.greater(x=field, y=np.int32(0)), dtype="fp32")
    result = mb.add(x=is_normal, y=scaled)
    if low_bits:
        low = mb.cast(x=mb.mod(x=fraction, y=np.int32(1 << low_bits)), dtype="fp32")
        result = mb.add(x=result, y=mb.mul(x=low, y=np.float32(2.0**-bits)))
    return result


def compose_reduce_precision(_: Composer, node: Node, x: Var) -> Var:
    """Compose the rounding of floats to a narrower format: the mantissa, then the range."""
    layout = Format(node["exponent_bits"], node["mantissa_bits"])
    dtype = node.type.dtype
    source_format = FORMATS.get(dtype, FORMATS[DType.FLOAT32])
    keeps_range = layout.exponent_bits >= source_format.exponent_bits
    if keeps_range and layout.mantissa_bits >= source_format.mantissa_bits:
        return x
    floats = cast_storage(x, dtype.storage_dtype, "fp32")
    is_finite = mb.less(x=mb.abs(x=floats), y=np.float32(np.inf))
    finite = mb.select(cond=is_finite, a=mb.abs(x=floats), b=np.float32(1))
    mantissa, exponent = _split(finite, source_format.least_exponent)
    scale = np.float32(2.0 ** min(layout.mantissa_bits, source_format.mantissa_bits))
    rounded = mb.round(x=mb.mul(x=mantissa, y=scale))
    result = _times_power(mb.mul(x=rounded, y=1 / scale), exponent, source_format.least_exponent)
    if not keeps_range:
        result = _limit_range(result, layout)
    signed = mb.mul(x=result, y=mb.sign(x=floats))
    result = mb.select(cond=is_finite, a=signed, b=floats)
    return cast_storage(result, "fp32", dtype.storage_dtype)


def _limit_range(x: Var, layout: Format) -> Var:
    """Replace rounded numbers outside of a format: 0 below its smallest normal, else infinity."""
    too_large = np.float32(math.ldexp(1.0, layout.bias + 1))
    is_large = mb.greater_equal(x=x, y=too_large)
    x = mb.select(cond=is_large, a=np.float32(np.inf), b=x)
    is_small = mb.less(x=x, y=np.float32(math.ldexp(1.0, layout.least_exponent)))
    return mb.select(cond=is_small, a=np.float32(0), b=x)


def _powers(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two factors of each power of two, both normal even if the power is subnormal."""
    half = exponents // 2
    return np.exp2(half).astype(np.float32), np.exp2(exponents - half).astype(np.float32)


def _times_power(x: Var, exponent: Var, least: int, *, sign: int = 1) -> Var:
    """Return ``x * 2**(sign * exponent)`` for fp32 and int32 exponents of ``least`` to 127."""
    index = mb.sub(x=exponent, y=np.int32(least))
    for factors in _powers(sign * np.arange(least, 128)):
        x = mb.mul(x=x, y=mb.gather(x=const(factors), indices=index, axis=0))
    return x


def _split(x: Var, least: int) -> tuple[Var, Var]:
    """Return positive fp32 as a mantissa in [1, 2) and an int32 exponent.

    The mantissa is below 1 where the exponent would be below ``least``.
    """
    logarithm = mb.log(x=x, epsilon=np.float32(0))
    estimate = mb.floor(x=mb.mul(x=logarithm, y=np.float32(1 / math.log(2))))
    bounded = mb.minimum(x=mb.maximum(x=estimate, y=np.float32(least)), y=np.float32(127))
    exponent = mb.cast(x=bounded, dtype="int32")
    mantissa = _times_power(x, exponent, least, sign=-1)
    # The logarithm is not exact, so the estimate may be off by one.
    is_high = mb.greater_equal(x=mantissa, y=np.float32(2))
    is_low = mb.logical_and(
        x=mb.less(x=mantissa, y=np.float32(1)), y=mb.greater(x=exponent, y=np.int32(least))
    )
    factor = mb.add(x=mb.cast(x=is_low, dtype="fp32"), y=np.float32(1))
    factor = mb.select(cond=is_high, a=np.float32(0.5), b=factor)
    change = mb.sub(x=mb.cast(x=is_high, dtype="int32"), y=mb.cast(x=is_low, dtype="int32"))
    return mb.mul(x=mantissa, y=factor), mb.add(x=exponent, y=change)
