"""Sizes as expressions: what is read from text evaluates as sympy and torch say."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod

from coreml_delegate.dynamic_shapes.expressions import SizeExpression
from coreml_delegate.errors import OptionError

pytestmark = pytest.mark.property

SYMBOLS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in range(3)]
LEAVES = st.sampled_from(SYMBOLS) | st.integers(1, 9).map(sympy.Integer)


def combined(parts: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
    return st.one_of(
        st.builds(lambda a, b: a + b, parts, parts),
        st.builds(lambda a, b: a - b, parts, parts),
        st.builds(lambda a, b: a * b, parts, parts),
        st.builds(lambda a, n: FloorDiv(a, sympy.Integer(n)), parts, st.integers(1, 5)),
        st.builds(lambda a, n: Mod(a * a, sympy.Integer(n)), parts, st.integers(1, 5)),
        st.builds(lambda a, n: CleanDiv(n * a, sympy.Integer(n)), parts, st.integers(1, 5)),
        st.builds(Max, parts, parts),
        st.builds(Min, parts, parts),
    )


EXPRESSIONS = st.recursive(LEAVES, combined, max_leaves=8)
# Building expressions takes sympy longer than evaluating them, and on a busy machine very long.
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
VALUES = st.tuples(*[st.integers(1, 50)] * len(SYMBOLS))


@QUICK
@given(EXPRESSIONS, VALUES)
def test_values_are_those_of_sympy(expression, values):
    expected = expression.xreplace(dict(zip(SYMBOLS, map(sympy.Integer, values), strict=True)))
    named = dict(zip(map(str, SYMBOLS), values, strict=True))
    parsed = SizeExpression.parse(str(expression))
    assert parsed.evaluate(named) == int(expected)
    assert parsed.symbols == {str(symbol) for symbol in expression.free_symbols}


@QUICK
@given(st.integers(1, 20), st.integers(-20, 20), st.integers(1, 100))
def test_linear_expressions_are_solved(factor, constant, value):
    expression = SizeExpression.parse(f"{factor}*s0 + {constant}")
    assert expression.is_solvable
    assert expression.solve(factor * value + constant) == value
    if factor > 1:
        assert expression.solve(factor * value + constant + 1) is None


@QUICK
@given(st.text(max_size=40))
def test_any_other_text_raises_only_our_error(text):
    try:
        expression = SizeExpression.parse(text)
        expression.evaluate(dict.fromkeys(expression.symbols, 7))
    except OptionError:
        pass


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "s0.real", "s0 if s0 else 1", "f(s0)", "1 < s0", "'s0'", "s0[0]", "True"],
)
def test_other_syntax_is_refused(text):
    with pytest.raises(OptionError, match="not an expression of a size"):
        SizeExpression.parse(text)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("s0 // (s0 - 4)", "modulo by zero|division"),
        ("s0 / 3", "not an integer"),
        ("10 ** 40", "a power of 40"),
        ("9000000000000000000 * s0", "beyond 64 bits"),
    ],
)
def test_an_expression_without_a_value_is_an_error(text, got):
    with pytest.raises(OptionError, match=got):
        SizeExpression.parse(text).evaluate({"s0": 4})
