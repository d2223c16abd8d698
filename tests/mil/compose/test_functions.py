"""Functions of floats against NumPy and PyTorch in fp64, in fp32 and in fp16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.engine_runs import run

from coreml_delegate.mil.compose import functions
from coreml_delegate.runtime.engines.base import Engine
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_RANDOM = np.random.default_rng(0)
_MAGNITUDES = np.append(10 ** _RANDOM.uniform(-4, 4.8, 2000), [0, 1, 300, 1500, 65504])
_REAL = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_MODERATE = _REAL[np.abs(_REAL) < 80]
_UNIT = _REAL[np.abs(_REAL) < 1]


def _half_away_from_zero(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def _of_torch(function: Callable) -> Callable:
    return lambda x: function(torch.from_numpy(x)).numpy()


# Composition, expected function, arguments, largest relative errors in fp32 and in fp16.
_FUNCTIONS = (
    (functions.asinh, np.arcsinh, _REAL, 3e-7, 2e-3),
    (functions.acosh, np.arccosh, 1 + _MAGNITUDES, 4e-7, 2e-3),
    (functions.cube_root, np.cbrt, _REAL, 1e-6, 2e-3),
    (functions.round_half_away_from_zero, _half_away_from_zero, _REAL * 0.5, 0, 0),
    # The graph builder computes these in fp32 only.
    (functions.log_plus_one, np.log1p, _REAL[_REAL > -0.99], 5e-7, None),
    (functions.exponential_minus_one, np.expm1, _MODERATE, 1e-6, None),
    (functions.erfc, _of_torch(torch.special.erfc), _REAL[np.abs(_REAL) < 9], 2e-5, None),
    (functions.erf_inv, _of_torch(torch.special.erfinv), _UNIT, 2e-6, None),
)
_CASES = [
    pytest.param(composition, expected, x.astype(dtype), tolerance, id=f"{name}-{dtype.__name__}")
    for composition, expected, x, *tolerances in _FUNCTIONS
    for dtype, tolerance in zip((np.float32, np.float16), tolerances, strict=True)
    if tolerance is not None
    for name in [composition.__name__]
]
pytestmark = pytest.mark.parametrize("engine", [REFERENCE, OPENVINO], ids=lambda e: e.name)


@pytest.mark.parametrize(("composition", "expected", "x", "tolerance"), _CASES)
def test_relative_errors(
    engine: Engine, composition: Callable, expected: Callable, x: np.ndarray, tolerance: float
) -> None:
    exact = expected(x.astype(np.float64))
    (actual,) = run(engine, composition, {"x": x})
    assert actual.dtype == x.dtype
    np.testing.assert_allclose(actual, exact.astype(x.dtype), rtol=tolerance, atol=1e-38)


@pytest.mark.parametrize(
    ("composition", "expected"),
    [(functions.asinh, np.arcsinh), (functions.acosh, np.arccosh), (functions.cube_root, np.cbrt)],
)
def test_infinities_and_nan(engine: Engine, composition: Callable, expected: Callable) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -3, 0.5], np.float32)
    (actual,) = run(engine, composition, {"x": x})
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(actual, expected(x), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_atan2(engine: Engine, dtype: type[np.floating], tolerance: float) -> None:
    sides = np.array([1, 2, 0.5, 0.0, 300, np.inf, 1e-3], dtype)
    sides = np.concatenate([sides, -sides])
    y, x = (array.reshape(-1) for array in np.meshgrid(sides, sides))
    (actual,) = run(engine, functions.atan2, {"y": y, "x": x})
    exact = np.arctan2(y.astype(np.float64), x.astype(np.float64))
    np.testing.assert_allclose(actual, exact, rtol=tolerance, atol=1e-7)


def test_sign_bit_and_infinity(engine: Engine) -> None:
    x = np.array([0.0, -0.0, 2, -2, np.inf, -np.inf, np.nan], np.float32)
    (signs,) = run(engine, functions.sign_bit, {"x": x[:-1]})
    np.testing.assert_array_equal(signs, np.signbit(x[:-1]))
    (infinite,) = run(engine, functions.is_infinite, {"x": x})
    np.testing.assert_array_equal(infinite, np.isinf(x))
