"""Operations on elements of tensors whose sizes are known at run time only."""

from __future__ import annotations

import numpy as np
import pytest

from coreml_delegate import graph


@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_operations_take_symbolic_sizes(engine: str) -> None:
    builder = graph.Backend(engine).builder()
    x = builder.parameter("x", "uint32", ("n", 3))
    y = builder.parameter("y", "uint32", (1, 3))
    wide = builder.parameter("wide", "uint32", ("n", 1, 1, 1, 3))
    one = builder.constant(1, "uint32")
    outputs = {
        "xor": builder.xor(x, y),
        "of_rank_5": builder.or_(wide, wide),
        "power": builder.power(x, y),
        "chosen": builder.select(builder.less(x, y), x, one),
        "shifted": builder.shift_right_logical(x, y),
        "quotient": builder.divide(x, y),
        "bits": builder.bitcast_convert(x, "float32"),
    }
    executable = builder.compile(outputs)
    random = np.random.default_rng(0)
    for count in (1, 4):
        a = random.integers(0, 1 << 32, (count, 3)).astype(np.uint32)
        b = np.array([[3, 1, 20]], np.uint32)
        found = dict(zip(outputs, executable.run(a, b, a[:, None, None, None]), strict=True))
        expected = {
            "xor": a ^ b,
            "of_rank_5": a[:, None, None, None],
            "power": a**b,
            "chosen": np.where(a < b, a, np.uint32(1)),
            "shifted": a >> b,
            "quotient": a // b,
            "bits": a.view(np.float32),
        }
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)


def test_random_floats_survive_half_precision() -> None:
    builder = graph.Backend("reference", precision="float16").builder()
    bits = builder.parameter("bits", "uint32", (4,))
    exponent = builder.constant(0x3F800000, "uint32")
    mantissa = builder.shift_right_logical(bits, builder.constant(9, "uint32"))
    number = builder.bitcast_convert(builder.or_(mantissa, exponent), "float32")
    given = np.array([0, 0x7FFFFFFF, 0x12345678, 0xC0000000], np.uint32)
    (found,) = builder.compile(number).run(given)
    expected = ((given >> 9) | np.uint32(0x3F800000)).view(np.float32)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
