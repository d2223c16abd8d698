"""Selections, slices, padding and scans against NumPy, of fixed and of dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.engine_runs import run

from coreml_delegate.mil.compose import Var, mb, movement
from coreml_delegate.runtime.engines.base import Engine
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_DTYPES = (np.float32, np.int32, np.bool_)
pytestmark = pytest.mark.parametrize("engine", [REFERENCE, OPENVINO], ids=lambda e: e.name)
of_each_dtype = pytest.mark.parametrize("dtype", _DTYPES, ids=lambda d: d.__name__)
of_each_form = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def _numbers(dtype: type[np.generic], *shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 5 - 2).astype(dtype)


def _unsized(x: Var) -> Var:
    """Hide the size of the first axis from type inference."""
    elements = mb.cast(x=x, dtype="int32")
    rows = mb.reduce_sum(x=elements, axes=list(range(1, x.rank))) if x.rank > 1 else elements
    ones = mb.add(x=mb.mul(x=rows, y=np.int32(0)), y=np.int32(1))
    positions = mb.squeeze(x=mb.non_zero(x=ones), axes=[1])
    is_bool = x.dtype.__name__ == "bool"
    unsized = mb.gather(x=elements if is_bool else x, indices=positions, axis=0)
    assert not isinstance(unsized.shape[0], int)
    return mb.cast(x=unsized, dtype="bool") if is_bool else unsized


def _run(engine: Engine, function: Callable, dynamic: bool, **inputs: np.ndarray) -> Any:
    def build(**variables: Var) -> Var:
        if dynamic:
            variables = {n: _unsized(x) if inputs[n].ndim else x for n, x in variables.items()}
        # A model has no inputs of rank 0.
        scalars = {n: mb.squeeze(x=variables[n]) for n, array in inputs.items() if not array.ndim}
        return function(**variables | scalars)

    (result,) = run(engine, build, {name: np.atleast_1d(x) for name, x in inputs.items()})
    return result


@of_each_form
@of_each_dtype
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3), (2, 3), (2, 3)],
        [(2, 1), (2, 3), (3,)],
        [(2, 3), (3,), (1,)],
        [(2, 3), (), ()],
        [(2, 2, 3), (2, 3), (3,)],
        [(), (), ()],
        [(1, 3), (3,), (3,)],
    ],
    ids=str,
)
def test_select(
    engine: Engine, shapes: list[tuple[int, ...]], dtype: type[np.generic], dynamic: bool
) -> None:
    condition = _numbers(np.int32, *shapes[0]) % 2 == 0
    x, y = (_numbers(dtype, *shape) for shape in shapes[1:])
    y = np.logical_not(y) if dtype is np.bool_ else y - dtype(7)
    actual = _run(engine, movement.select, dynamic, condition=condition, x=x, y=np.asarray(y))
    expected = np.where(condition, x, y)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)


@of_each_form
def test_broadcast_branches_keep_signs_of_zeros(engine: Engine, dynamic: bool) -> None:
    """OpenVINO 2026.4 computes x - 0, which broadcasts dynamic sizes, as x + 0."""
    condition = np.array([True, False])
    x, y = np.array(-0.0, np.float32), np.array(np.inf, np.float32)
    actual = _run(engine, movement.select, dynamic, condition=condition, x=x, y=y)
    is_kept = not (dynamic and engine is OPENVINO)
    np.testing.assert_array_equal(np.signbit(actual), [is_kept, False])


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_masked_fill(engine: Engine, shape: tuple[int, ...]) -> None:
    condition, x = _numbers(np.int32, 2, 3) > 0, _numbers(np.float32, *shape)
    actual = _run(engine, lambda x, c: movement.masked_fill(x, c, -np.inf), False, x=x, c=condition)
    np.testing.assert_array_equal(actual, np.where(condition, -np.inf, x))


@of_each_form
@of_each_dtype
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "variable"])
@pytest.mark.parametrize(
    "amounts", [[(2, 0), (0, 1)], [(-1, 2), (0, -2)], [(-4, 5), (0, 0)]], ids=str
)
def test_pad(
    engine: Engine,
    amounts: list[tuple[int, int]],
    dtype: type[np.generic],
    constant: bool,
    dynamic: bool,
) -> None:
    constant = constant or dtype is np.bool_
    x, value = _numbers(dtype, 3, 4), np.array(1, dtype)
    widths = [(max(low, 0), max(high, 0)) for low, high in amounts]
    expected = np.pad(x, widths, constant_values=value)
    for axis, (low, high) in enumerate(amounts):
        end = expected.shape[axis] + min(high, 0)
        expected = np.take(expected, range(max(-low, 0), end), axis)
    if constant:
        actual = _run(engine, lambda x: movement.pad(x, amounts, value[()]), dynamic, x=x)
    else:
        actual = _run(engine, lambda x, v: movement.pad(x, amounts, v), dynamic, x=x, v=value)
    assert actual.dtype == dtype or dtype is np.bool_
    np.testing.assert_array_equal(actual, expected)


def test_take(engine: Engine) -> None:
    x = _numbers(np.float32, 4, 5)
    for bounds in ((0, None, 2), (1, 4, 1), (0, -2, 1), (-2, None, 1)):
        actual = _run(engine, lambda x, b=bounds: movement.take(x, 1, *b), False, x=x)
        np.testing.assert_array_equal(actual, x[:, slice(*bounds)])


@of_each_form
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize(
    ("op", "function", "identity"),
    [
        ("mul", np.multiply, 1),
        ("maximum", np.maximum, -(2**31)),
        ("minimum", np.minimum, 2**31 - 1),
    ],
)
def test_scan(
    engine: Engine,
    op: str,
    function: np.ufunc,
    identity: int,
    size: int,
    dtype: type[np.generic],
    reverse: bool,
    dynamic: bool,
) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (2, size)).astype(dtype)

    def build(x: Var) -> Var:
        def combine(first: Var, second: Var) -> Var:
            return getattr(mb, op)(x=first, y=second)

        return movement.scan(x, 1, combine, identity, reverse=reverse)

    step = -1 if reverse else 1
    expected = function.accumulate(x[:, ::step], axis=1)[:, ::step]
    np.testing.assert_array_equal(_run(engine, build, dynamic, x=x), expected)


def test_cumulative_product(engine: Engine) -> None:
    x = _numbers(np.float32, 2, 6)
    for axis in (0, -1):
        actual = _run(engine, lambda x, a=axis: movement.cumulative_product(x, a), False, x=x)
        np.testing.assert_array_equal(actual, np.cumprod(x, axis))
