"""Quotients and remainders against NumPy: floats of both precisions, and all edges of int32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.engine_runs import run

from coreml_delegate.mil.compose import division
from coreml_delegate.runtime.engines.base import Engine
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_LIMITS = np.iinfo(np.int32)
_EDGES = np.array([_LIMITS.min, _LIMITS.min + 1, -(1 << 24) - 1, -7, -1, 0, 3, 16777217])
_RANDOM = np.random.default_rng(0)
_DIVISORS = np.array([_LIMITS.min, -(1 << 24) - 1, -3, -2, 1, 2, 7, 49, _LIMITS.max])
_INTEGERS = [array.reshape(-1) for array in np.meshgrid(_EDGES, _DIVISORS)]
_FLOATS = [
    array.reshape(-1)
    for array in np.meshgrid(
        [-7.5, -3.0, -0.5, 0.0, 0.25, 2.5, 49.0, 1000.0], [-2.0, -0.75, 0.5, 3.0, 49.0]
    )
]


def _truncated_quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.trunc(x / y)  # fp64 represents quotients of int32 closely enough to truncate them


_OPERATIONS = (
    (division.floor_divide, np.floor_divide),
    (division.truncate_divide, _truncated_quotient),
    (division.remainder, np.mod),
    (division.fmod, np.fmod),
)
_CASES = [pytest.param(*case, id=case[0].__name__) for case in _OPERATIONS]
pytestmark = pytest.mark.parametrize("engine", [REFERENCE, OPENVINO], ids=lambda e: e.name)


@pytest.mark.parametrize(("composition", "expected"), _CASES)
@pytest.mark.parametrize("constant", [False, True], ids=["variable", "constant"])
def test_integers(
    engine: Engine, composition: Callable, expected: Callable, constant: bool
) -> None:
    x, y = (array.astype(np.int32) for array in _INTEGERS)
    exact = expected(x.astype(np.int64), y.astype(np.int64))
    if constant:
        (actual,) = run(engine, lambda x: composition(x, y), {"x": x})
    else:
        (actual,) = run(engine, composition, {"x": x, "y": y})
    np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize(("composition", "expected"), _CASES)
@pytest.mark.parametrize("divisor", [1, 3, -3, 49])
def test_integers_by_a_number(
    engine: Engine, composition: Callable, expected: Callable, divisor: int
) -> None:
    x = np.append(_EDGES, np.arange(-7, 8)).astype(np.int32)
    (actual,) = run(engine, lambda x: composition(x, divisor), {"x": x})
    np.testing.assert_array_equal(actual, expected(x.astype(np.int64), divisor))


@pytest.mark.parametrize(("composition", "expected"), _CASES)
def test_shapes_are_broadcast(engine: Engine, composition: Callable, expected: Callable) -> None:
    x, y = np.arange(-3, 3, dtype=np.int32).reshape(2, 3, 1), np.array([2, -3], np.int32)
    for first, second in ((x, y), (y, np.where(x == 0, 5, x))):
        exact = expected(first.astype(np.int64), second.astype(np.int64))
        (actual,) = run(engine, composition, {"x": first, "y": second})
        np.testing.assert_array_equal(actual, exact)
        (actual,) = run(engine, lambda x, y=second: composition(x, y), {"x": first})
        np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize(("composition", "expected"), _CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_floats(
    engine: Engine, composition: Callable, expected: Callable, dtype: type[np.floating]
) -> None:
    x, y = (array.astype(dtype) for array in _FLOATS)
    (actual,) = run(engine, composition, {"x": x, "y": y})
    np.testing.assert_allclose(actual, expected(x, y), rtol=1e-6)
    (actual,) = run(engine, lambda x: composition(x, y), {"x": x})
    np.testing.assert_allclose(actual, expected(x, y), rtol=1e-6)


def test_a_finite_number_modulo_infinity_is_the_number(engine: Engine) -> None:
    x = np.array([5, -5, 0, np.inf, np.nan, 5], np.float32)
    y = np.array([np.inf, np.inf, -np.inf, np.inf, 3, np.nan], np.float32)
    for inputs in ({"x": x, "y": y}, {"x": x}):
        (actual,) = run(engine, lambda x, y=y: division.fmod(x, y), inputs)
        np.testing.assert_array_equal(actual, [5, -5, 0, np.nan, np.nan, np.nan])


def test_truncate(engine: Engine) -> None:
    x = np.array([-2.5, -1, -0.5, 0, 0.5, 2.5], np.float32)
    (actual,) = run(engine, division.truncate, {"x": x})
    np.testing.assert_array_equal(actual, np.trunc(x))


def test_quotients_by_one_are_rounded(engine: Engine) -> None:
    """With coremltools' passes, which drop a division by ones: see ``aten.floor_divide``."""
    x = np.array([0.25, 1.25, -1.75], np.float32)
    (actual,) = run(engine, lambda x: division.floor_divide(x, np.ones(3, np.float32)), {"x": x})
    np.testing.assert_array_equal(actual, [0, 1, -2])
