"""int32 on both engines: exact beyond the integers that f32 holds, wrapping at 32 bits.

The answers are numpy's, computed in int64 and wrapped.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_runs import run
from support.gates import needs_x86
from support.mil import mb

from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE

_LIMITS = np.iinfo(np.int32)
_EDGES = np.array([_LIMITS.max, _LIMITS.min, 1 << 24, (1 << 24) + 1, 3, 1, 0, -1, -(1 << 24) - 1])
_RNG = np.random.default_rng(0)


def _drawn(*shape: int) -> np.ndarray:
    return _RNG.integers(_LIMITS.min, _LIMITS.max, shape, endpoint=True)


_PAIRS = np.stack(np.meshgrid(_EDGES, _EDGES)).reshape(2, -1)
_FIRST = np.concatenate([_PAIRS[0], _drawn(150)])
# Near their partners or anywhere; every rounding of a quotient occurs, and whole ones too.
_SECOND = np.concatenate(
    [
        _PAIRS[1],
        _FIRST[-150:-100] + _RNG.integers(-2, 3, 50),
        _drawn(50),
        _RNG.integers(1, 5000, 50),
    ]
)
_SECOND = np.clip(_SECOND, _LIMITS.min, _LIMITS.max)
_CUBE = _drawn(3, 4, 5)
_SIGNED = np.where(_SECOND == 0, 7, _SECOND)  # nothing is divided by zero


_BINARY = {
    "add": np.add,
    "equal": np.equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "mul": np.multiply,
    "not_equal": np.not_equal,
    "sub": np.subtract,
}
_DIVISIONS = {
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "real_div": lambda x, y: np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)),
}
_UNARY = {"abs": np.abs, "sign": np.sign, "square": np.square}
_REDUCTIONS = {
    "reduce_l1_norm": lambda x, axes: np.abs(x).sum(axes),
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": lambda x, axes: _product(x, axes),
    "reduce_sum": np.sum,
    "reduce_sum_square": lambda x, axes: _wrapped(x * x).sum(axes),
}


def _wrapped(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.int32).astype(np.int64)


def _product(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    for axis in sorted(axes, reverse=True):
        result = np.ones((), np.int64)
        for part in np.moveaxis(x, axis, 0):
            result = _wrapped(result * part)
        x = result
    return x


@pytest.fixture(params=[OPENVINO, REFERENCE], ids=lambda engine: engine.name)
def engine(request):
    return request.param


def _check(engine, function, inputs, expected):
    """The results of ``function`` on int32 ``inputs`` are the int64 ``expected``, wrapped."""
    arrays = {name: array.astype(np.int32) for name, array in inputs.items()}
    (result,) = run(engine, function, arrays)
    np.testing.assert_array_equal(result, np.asarray(expected).astype(np.int32))


@pytest.mark.parametrize("op", _BINARY)
def test_two_operands(engine, op):
    expected = _BINARY[op](_FIRST, _SECOND)
    _check(engine, lambda x, y: getattr(mb, op)(x=x, y=y), {"x": _FIRST, "y": _SECOND}, expected)


@pytest.mark.parametrize("op", _DIVISIONS)
def test_divisions(engine, op):
    expected = _DIVISIONS[op](_FIRST, _SIGNED)
    _check(engine, lambda x, y: getattr(mb, op)(x=x, y=y), {"x": _FIRST, "y": _SIGNED}, expected)


@pytest.mark.parametrize("divisor", [3, -10, 1, -1, 1_000_003])
@pytest.mark.parametrize("op", _DIVISIONS)
def test_divisions_by_constants(engine, op, divisor):
    # Whole quotients: multiplied by a rounded inverse, they would fall short.
    multiples = _FIRST // 2 // divisor * divisor
    dividends = np.concatenate([_FIRST, multiples])
    expected = _DIVISIONS[op](dividends, divisor)
    _check(engine, lambda x: getattr(mb, op)(x=x, y=np.int32(divisor)), {"x": dividends}, expected)


@pytest.mark.parametrize("op", _UNARY)
def test_one_operand(engine, op):
    _check(engine, lambda x: getattr(mb, op)(x=x), {"x": _FIRST}, _UNARY[op](_FIRST))


@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("op", _REDUCTIONS)
def test_reductions(engine, op, axes):
    expected = _REDUCTIONS[op](_CUBE, axes)
    for keep in (False, True):
        shape = [1 if a in axes else n for a, n in enumerate(_CUBE.shape)]

        def reduce(x, keep=keep):
            result = getattr(mb, op)(x=x, axes=list(axes), keep_dims=keep)
            return result if result.rank else mb.expand_dims(x=result, axes=[0])

        _check(
            engine,
            reduce,
            {"x": _CUBE},
            np.reshape(expected, shape if keep else np.shape(expected) or (1,)),
        )


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums(engine, exclusive, reverse):
    ordered = _CUBE[:, ::-1] if reverse else _CUBE
    sums = ordered.cumsum(1) - (ordered if exclusive else 0)
    _check(
        engine,
        lambda x: mb.cumsum(x=x, axis=1, exclusive=exclusive, reverse=reverse),
        {"x": _CUBE},
        sums[:, ::-1] if reverse else sums,
    )


def test_choices(engine):
    def choose(x, y):
        return mb.select(cond=mb.less(x=x, y=y), a=mb.add(x=x, y=y), b=y)

    expected = np.where(_FIRST < _SECOND, _FIRST + _SECOND, _SECOND)
    _check(engine, choose, {"x": _FIRST, "y": _SECOND}, expected)


def test_orders(engine):
    flat = _CUBE.reshape(1, -1)
    _check(engine, lambda x: mb.reduce_argmax(x=x, axis=1), {"x": flat}, flat.argmax(1))
    _check(engine, lambda x: mb.topk(x=x, k=7, axis=1)[0], {"x": flat}, -np.sort(-flat)[:, :7])
    _check(engine, lambda x: mb.argsort(x=x, axis=1, ascending=True), {"x": flat}, np.argsort(flat))


def test_products(engine):
    x, y = _drawn(2, 3, 4), _drawn(4, 5)
    _check(engine, lambda x, y: mb.matmul(x=x, y=y), {"x": x, "y": y}, x @ y)


@pytest.mark.parametrize("mode", ["add", "sub", "mul", "max", "min", "update"])
def test_scatters(engine, mode):
    data, updates = _drawn(6), _drawn(3)
    expected = data.copy()
    changed = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
        "update": lambda _, update: update,
    }[mode]
    expected[[4, 0, 2]] = changed(data[[4, 0, 2]], updates)

    def scatter(x, y):
        places = np.array([4, 0, 2], np.int32)
        return mb.scatter_along_axis(data=x, indices=places, updates=y, axis=0, mode=mode)

    _check(engine, scatter, {"x": data, "y": updates}, expected)


_MOVES = {
    "band_part": (lambda x: mb.band_part(x=x, lower=1, upper=0), lambda x: np.tril(np.triu(x, -1))),
    "concat": (lambda x: mb.concat(values=[x, x], axis=1), lambda x: np.concatenate([x, x], 1)),
    "gather": (
        lambda x: mb.gather(x=x, indices=np.int32([2, 0]), axis=1),
        lambda x: x[:, [2, 0]],
    ),
    "reverse": (lambda x: mb.reverse(x=x, axes=[1]), lambda x: x[:, ::-1]),
    "slice": (
        lambda x: mb.slice_by_index(x=x, begin=[0, 1, 0], end=[3, 4, 5], stride=[1, 2, 2]),
        lambda x: x[:, 1:4:2, ::2],
    ),
    "tile": (lambda x: mb.tile(x=x, reps=[1, 2, 1]), lambda x: np.tile(x, (1, 2, 1))),
    "transpose": (lambda x: mb.transpose(x=x, perm=[2, 0, 1]), lambda x: x.transpose(2, 0, 1)),
}


@pytest.mark.parametrize("move", _MOVES)
def test_moves(engine, move):
    function, expected = _MOVES[move]
    _check(engine, function, {"x": _CUBE}, expected(_CUBE))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrower_integers_wrap(engine, dtype):
    def narrow(x):
        return mb.cast(x=mb.cast(x=x, dtype=dtype), dtype="int32")

    _check(engine, narrow, {"x": _FIRST}, _FIRST.astype(dtype))


@needs_x86
def test_floats_without_a_place_become_the_least_integer(engine):
    x = np.array([3e9, -3e9, 1e20, np.inf, -np.inf, np.nan, 2147483520, -1.9], np.float32)
    (result,) = run(engine, lambda x: mb.cast(x=x, dtype="int32"), {"x": x})
    np.testing.assert_array_equal(result, [_LIMITS.min] * 6 + [2147483520, -1])


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_magnitudes_of_what_is_made_of_constants_and_shapes(engine, dtype):
    x = np.arange(4, dtype=dtype)

    def add_up(x):
        filled = mb.fill_like(ref_tensor=x, value=dtype(-3))
        count = mb.sub(x=mb.shape(x=x), y=np.int32([9]))
        return mb.add(
            x=mb.add(x=x, y=mb.abs(x=filled)),
            y=mb.cast(x=mb.abs(x=count), dtype=np.dtype(dtype).name.replace("float", "fp")),
        )

    (result,) = run(engine, add_up, {"x": x})
    np.testing.assert_array_equal(result, x + 3 + 5)


@pytest.mark.parametrize("op", _DIVISIONS)
def test_divisions_by_a_number_filled_in(engine, op):
    def divide(x):
        return getattr(mb, op)(x=x, y=mb.fill_like(ref_tensor=x, value=np.int32(-3)))

    _check(engine, divide, {"x": _FIRST}, _DIVISIONS[op](_FIRST, -3))
