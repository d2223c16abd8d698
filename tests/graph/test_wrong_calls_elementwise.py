"""Wrong arguments of operations on elements, comparisons, bits and normalization are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coreml_delegate import graph
from coreml_delegate.errors import GraphError
from coreml_delegate.graph import Builder


def _statistics(x: Callable[..., Any], *counts: int) -> tuple[Any, Any, Any, Any]:
    first, second, third, fourth = (x("float32", count) for count in counts)
    return first, second, third, fourth


CALLS: dict[str, tuple[Callable[[Builder, Callable[..., Any]], Any], str]] = {
    "operands of different types": (
        lambda b, x: b.add(x("float32"), x("int32")),
        r"add: element types of operands differ: got float32 and int32",
    ),
    "operands of different shapes": (
        lambda b, x: b.multiply(x("float32", 2, 3), x("float32", 3)),
        r"multiply: shapes of operands differ",
    ),
    "operands of other sizes": (
        lambda b, x: b.atan2(x("float32", 2, 3), x("float32", 2, 4)),
        r"atan2: shapes of operands differ",
    ),
    "a tanh of integers": (
        lambda b, x: b.tanh(x("int32")),
        r"tanh does not take this element type: got int32, expected float32, float16, float64",
    ),
    "a difference of bools": (
        lambda b, x: b.subtract(x("bool"), x("bool")),
        r"subtract does not take this element type: got bool",
    ),
    "a clamp by other types": (
        lambda b, x: b.clamp(x("int32"), x("float32"), x("float32")),
        r"clamp: element types of operands differ",
    ),
    "a predicate of integers": (
        lambda b, x: b.select(x("int32"), x("float32"), x("float32")),
        r"select does not take this element type: got int32, expected bool",
    ),
    "a choice of two types": (
        lambda b, x: b.select(x("bool"), x("float32"), x("int32")),
        r"select: element types of operands differ",
    ),
    "a predicate of another shape": (
        lambda b, x: b.select(x("bool", 3), x("float32", 2), x("float32", 2)),
        r"select: shapes of operands differ",
    ),
    "a conversion to complex numbers": (
        lambda b, x: b.convert(x("float32"), "complex64"),
        r"no such element type",
    ),
    "a format without exponents": (
        lambda b, x: b.reduce_precision(x("float32"), 0, 3),
        r"no such floating-point format: got 0 exponent bits, 3 mantissa bits",
    ),
    "a direction that there is not": (
        lambda b, x: b.compare(x("float32"), x("float32"), "LEQ"),
        r"compare: no such direction: got 'LEQ'",
    ),
    "a comparison of two types": (
        lambda b, x: b.less(x("float32"), x("float16")),
        r"compare: element types of operands differ",
    ),
    "bits of floats": (
        lambda b, x: b.and_(x("float32"), x("float32")),
        r"and does not take this element type: got float32",
    ),
    "a shift of bools": (
        lambda b, x: b.shift_left(x("bool"), x("bool")),
        r"shift_left does not take this element type: got bool",
    ),
    "a bitcast to another width": (
        lambda b, x: b.bitcast_convert(x("float32"), "int16"),
        r"bitcast_convert: widths of element types differ: got float32 as int16",
    ),
    "a bitcast of bools": (
        lambda b, x: b.bitcast_convert(x("bool"), "int8"),
        r"bitcast_convert: widths of element types differ",
    ),
    "a bitcast of 64 bits": (
        lambda b, x: b.bitcast_convert(x("float64"), "int64"),
        r"Core ML stores 64-bit types in 32 bits: got float64 as int64",
    ),
    "an algorithm that there is not": (
        lambda b, x: b.rng_bit_generator(x("uint32", 4), "uint32", (2,), "philox"),
        r"rng_bit_generator: no such algorithm: got 'philox'",
    ),
    "a state of another shape": (
        lambda b, x: b.rng_bit_generator(x("uint32", 2), "uint32", (2,)),
        r"rng_bit_generator: wrong state: got uint32\[2\], expected uint32\[4\]",
    ),
    "random floats": (
        lambda b, x: b.rng_bit_generator(x("uint32", 4), "float32", (2,)),
        r"rng_bit_generator does not return this element type: got float32",
    ),
    "random bits of unknown number": (
        lambda b, x: b.rng_bit_generator(x("uint32", 4), "uint32", x("int8", "n").shape),
        r"the shape has to be fixed here",
    ),
    "a statistic per other features": (
        lambda b, x: b.batch_norm_inference(x("float32", 2, 3, 4), *_statistics(x, 3, 3, 3, 4)),
        r"batch_norm_inference: wrong shape of a statistic: got float32\[4\], expected \[3\]",
    ),
    "an axis that there is not": (
        lambda b, x: b.batch_norm_inference(
            x("float32", 3), *_statistics(x, 3, 3, 3, 3), feature_index=1
        ),
        r"no such feature axis: got 1, expected -1 to 0",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_are_refused(case: str) -> None:
    call, message = CALLS[case]
    builder = graph.Backend("reference").builder()

    def parameter(dtype: str, *shape: int | str) -> Any:
        return builder.parameter(f"x{len(builder.parameters)}", dtype, shape)

    with pytest.raises(GraphError, match=message):
        call(builder, parameter)
