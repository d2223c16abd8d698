"""The builder knows the elements of integer tensors that hold sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy

from coreml_delegate import graph
from coreml_delegate.graph import Builder

_N = sympy.Symbol("n", integer=True, positive=True)
CASES: dict[str, tuple[Callable[[Builder, Callable[..., Any]], Any], Any]] = {
    "sum": (lambda b, c: b.add(c([1, 2]), c([3])), (4, 5)),
    "difference": (lambda b, c: b.subtract(c([1, 2]), c(3)), (-2, -1)),
    "product": (lambda b, c: b.multiply(c([2]), c([4])), (8,)),
    "quotient": (lambda b, c: b.divide(c([7, 8]), c([2, 2])), (3, 4)),
    "quotient by 0": (lambda b, c: b.divide(c([7]), c([0])), None),
    "quotient of a negative number": (lambda b, c: b.divide(c([-7]), c([2])), None),
    "rest": (lambda b, c: b.remainder(c([7]), c([4])), (3,)),
    "larger": (lambda b, c: b.maximum(c([7, 1]), c([4, 4])), (7, 4)),
    "smaller": (lambda b, c: b.minimum(c(7), c(4)), (4,)),
    "bounded": (lambda b, c: b.clamp(c(0), c([-7, 3, 9]), c(5)), (0, 3, 5)),
    "negated": (lambda b, c: b.negate(c([7])), (-7,)),
    "converted": (lambda b, c: b.convert(c([7]), "int64"), (7,)),
    "wrapped": (lambda b, c: b.convert(c([300]), "uint8"), None),
    "as floats": (lambda b, c: b.convert(c([3]), "float32"), None),
    "a symbol": (lambda b, c: b.add(b.multiply(b.size(_N), c(2)), c(1)), (2 * _N + 1,)),
    "half a symbol": (lambda b, c: b.divide(b.size(_N), c(2)), (sympy.floor(_N / 2),)),
}


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_known(case: str) -> None:
    builder = graph.Backend("reference").builder()
    call, expected = CASES[case]
    assert call(builder, lambda n: builder.constant(n, "int32")).elements == expected
