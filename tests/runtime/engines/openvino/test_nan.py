"""NaN and infinities on the OpenVINO engine, against the reference engine and torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_runs import assert_close
from support.mil import build, features, main, mb
from support.op_cases import CASES
from support.op_cases.case import OpCase

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.translations import EXACT_NAN, TRANSLATIONS
from coreml_delegate.runtime.engines.reference import REFERENCE

_UNLIKE = {
    "cast": "integers have no NaN: each engine makes another of it",
    "crop_resize": "boxes of NaN: the reference engine refuses them",
    "non_maximum_suppression": "scores of NaN have no order",
    "quantize": "integers have no NaN: each engine makes another of it",
    "range_1d": "ends at NaN: both refuse it",
    "resample": "coordinates of NaN: each engine takes another place",
    "resize": "a neighbour of NaN whose weight is zero counts on the reference engine alone",
    "resize_bilinear": "a neighbour of NaN whose weight is zero, and an only element's weights",
    "scaled_dot_product_attention": "keys of NaN behind a mask count on this engine alone",
    "sign": "NaN has none in torch, and stays NaN here",
}
"""Ops for which the engines differ where NaN goes in, and why."""

_TRANSLATED = [case for case in CASES if TRANSLATIONS.find(case.op, case.opset) is not None]
# The product of a vector is left to the reference engine.
_WITH_FLOATS = [
    case
    for case in _TRANSLATED
    if case.id != "matmul-vector-iOS18" and case.has_floats and case.op not in _UNLIKE
]
# What makes another kernel of an op is said by strings: modes, activations, directions.
_ONE_OF_A_KIND = list(
    {
        (case.op, *(v for v in case.attributes.values() if isinstance(v, str))): case
        for case in reversed(_WITH_FLOATS)
    }.values()
)
_LOSING = {version.op_type for version in TRANSLATIONS if EXACT_NAN in version.schema.options}


def _with(array: np.ndarray, place: int, value: float) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[place] = value
    return changed


def _nan_inputs(case: OpCase):
    """The inputs of a case with NaN in the first, a middle and the last place of one of them."""
    arrays = case.arrays("fp32")
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            for place in sorted({0, array.size // 2, array.size - 1}):
                yield {**arrays, name: _with(array, place, np.nan)}


@pytest.mark.share(4)
@pytest.mark.parametrize("case", _ONE_OF_A_KIND, ids=lambda case: case.id)
def test_nan_is_where_the_reference_engine_has_it(case):
    options = EngineOptions(exact_nan=case.op in _LOSING)
    function = main(case.program("fp32"))
    compiled = OPENVINO.compile(function, options)
    reference = REFERENCE.compile(function, EngineOptions())
    for arrays in _nan_inputs(case):
        given = features(function, arrays)
        pairs = zip(compiled(given).values(), reference(given).values(), strict=True)
        for actual, expected in pairs:
            np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
            if expected.dtype.kind != "f":
                np.testing.assert_array_equal(actual, expected)


def test_the_ops_that_lose_nan_are_documented():
    text = Path(__file__).parents[4].joinpath("docs", "runtime.md").read_text()
    section = text.split("### NaN\n")[1].split("\n### ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert {op for row in rows for op in row.replace("`", "").replace(",", " ").split()} == _LOSING


# In the company of other ops, where the plugin fuses.


_X = np.array([[np.nan, -np.inf, np.inf, -2.0, 0.5, 8.0, 3.0, -0.25]], np.float32)
_ELEMENTWISE = {
    "clamped_relu": lambda x: mb.clamped_relu(x=x, alpha=np.float32(0.5), beta=np.float32(6)),
    "clip": lambda x: mb.clip(x=x, alpha=np.float32(-1), beta=np.float32(2)),
    "exp": lambda x: mb.exp(x=x),
    "greater": lambda x: mb.cast(x=mb.greater(x=x, y=np.float32(0)), dtype="fp32"),
    "greater_equal": lambda x: mb.cast(x=mb.greater_equal(x=x, y=np.float32(0)), dtype="fp32"),
    "maximum": lambda x: mb.maximum(x=x, y=np.float32(0.75)),
    "maximum-of-both": lambda x: mb.maximum(x=x, y=mb.mul(x=x, y=np.float32(-1))),
    "minimum": lambda x: mb.minimum(x=np.float32(0.75), y=x),
    "relu": lambda x: mb.relu(x=x),
    "relu6": lambda x: mb.relu6(x=x),
    "sigmoid_hard": lambda x: mb.sigmoid_hard(x=x, alpha=np.float32(0.2), beta=np.float32(0.5)),
    "threshold": lambda x: mb.threshold(x=x, alpha=np.float32(0.5)),
}


def _behind_linear(op, x):
    return op(mb.linear(x=x, weight=np.eye(8, dtype=np.float32) * 2, bias=np.ones(8, np.float32)))


def _behind_convolution(op, x):
    image = mb.reshape(x=x, shape=[1, 1, 1, 8])
    return op(mb.conv(x=image, weight=np.full((2, 1, 1, 1), 2, np.float32), pad_type="valid"))


def _among_others(op, x):
    return mb.mul(x=op(mb.add(x=x, y=np.float32(0.25))), y=np.float32(2))


def _in_a_loop(op, x):
    return mb.while_loop(
        _cond=lambda i, t: mb.less(x=i, y=np.int32(2)),
        _body=lambda i, t: (mb.add(x=i, y=np.int32(1)), _behind_linear(op, t)),
        loop_vars=(mb.const(val=np.int32(0)), x),
    )[1]


@pytest.mark.share(3)
@pytest.mark.parametrize("place", [_behind_linear, _behind_convolution, _among_others, _in_a_loop])
@pytest.mark.parametrize("op", _ELEMENTWISE.values(), ids=_ELEMENTWISE)
def test_nan_survives_where_the_plugin_fuses_ops(op, place):
    function = main(build(lambda x: place(op, x), {"x": _X}))
    (expected,) = REFERENCE.compile(function, EngineOptions())({"x": _X}).values()
    (actual,) = OPENVINO.compile(function, EngineOptions(exact_nan=True))({"x": _X}).values()
    assert_close(actual, expected)
    if not any(op.type in _LOSING for op in function.block.walk()):
        (actual,) = OPENVINO.compile(function, EngineOptions())({"x": _X}).values()
        assert_close(actual, expected)


# Numbers beside NaN and infinities.


def _run(function, *arrays, exact=False):
    inputs = {name: array for name, array in zip("xyz", arrays, strict=False)}
    program = main(build(function, inputs))
    results = OPENVINO.compile(program, EngineOptions(exact_nan=exact))(inputs)
    return [results[name] for name in program.block.outputs]


_INF, _MAX = np.inf, np.finfo(np.float32).max
_ROWS = np.array(
    [
        [_MAX, _INF, np.nan, -_INF, -_MAX, 0, 1],
        [_MAX, _INF, 1, -_INF, -_MAX, 0, 2],
        [np.nan, 3, np.nan, 1, 2, np.nan, 0],
        [-_INF, np.nan, -_MAX, _INF, 5, 4, 3],
    ],
    np.float32,
)


@pytest.mark.parametrize("ascending", [True, False])
def test_nan_is_the_largest_of_all_when_sorted(ascending):
    def function(x):
        values, indices = mb.topk(x=x, k=5, axis=-1, ascending=ascending)
        return values, indices, mb.argsort(x=x, axis=-1, ascending=ascending)

    values, indices, order = _run(function, _ROWS)
    expected, places = torch.from_numpy(_ROWS).sort(descending=not ascending, stable=True)
    np.testing.assert_array_equal(values, expected[:, :5])
    np.testing.assert_array_equal(indices, places[:, :5])
    np.testing.assert_array_equal(order, places)


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_nan_is_the_extreme(op):
    (actual,) = _run(lambda x: getattr(mb, f"reduce_{op}")(x=x, axis=-1), _ROWS)
    np.testing.assert_array_equal(actual, getattr(torch, op)(torch.from_numpy(_ROWS), -1))


def test_sums_of_exponentials_of_infinities():
    x = np.array(
        [[-_INF, -_INF, -_INF], [_INF, 1, 2], [-_INF, 1, 2], [np.nan, 1, _INF]], np.float32
    )
    (actual,) = _run(lambda x: mb.reduce_log_sum_exp(x=x, axes=[-1]), x)
    np.testing.assert_allclose(actual, torch.from_numpy(x).logsumexp(-1), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
def test_a_softmax_of_nan_or_infinity_is_nan_throughout(axis):
    x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    x[0, 0], x[1, 3], x[2, 2] = np.nan, _INF, -_INF
    (actual,) = _run(lambda x: mb.softmax(x=x, axis=axis), x)
    assert_close(actual, torch.from_numpy(x).softmax(axis))


def test_scattered_extrema_keep_the_numbers_beside_nan():
    data = np.array([1, -3, np.nan, 5], np.float32)
    updates = np.array([np.nan, -4, 2, 7, np.nan], np.float32)
    indices = np.array([0, 1, 2, 3, 0], np.int32)
    for mode in ("max", "min"):
        reduce = f"a{mode}"
        expected = torch.from_numpy(data).scatter_reduce(
            0, torch.from_numpy(indices).long(), torch.from_numpy(updates), reduce
        )
        (actual,) = _run(
            lambda x, y, mode=mode: mb.scatter(data=x, indices=indices, updates=y, mode=mode),
            data,
            updates,
            exact=True,
        )
        np.testing.assert_array_equal(actual, expected)


# What it costs: forms the plugin has one kernel for stay.


def _kernels(function, x, *, exact=False):
    program = main(build(function, {"x": x}))
    compiled = OPENVINO.compile(program, EngineOptions(exact_nan=exact))
    nodes = compiled.compiled.get_runtime_model().get_ops()
    kinds = Counter(node.get_rt_info()["layerType"].astype(str) for node in nodes)
    return compiled, kinds


def _attention(x, *, reshaped=False, axis=-1):
    shares = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=axis)
    if reshaped:
        shares = mb.reshape(x=shares, shape=[1, 6, 6, 6])
        x = mb.reshape(x=x, shape=[1, 6, 6, 6])
    return mb.matmul(x=shares, y=x)


@pytest.mark.parametrize("reshaped", [False, True])
def test_the_softmax_of_an_attention_needs_no_check_for_nan(reshaped):
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    x[0, 1, 2, 3] = np.nan
    compiled, kinds = _kernels(lambda x: _attention(x, reshaped=reshaped), x)
    assert kinds["Reduce"] == 0
    ((_, actual),) = compiled({"x": x}).items()
    tensor = torch.from_numpy(x)
    expected = (tensor @ tensor.mT).softmax(-1) @ tensor
    assert_close(actual.reshape(x.shape), expected)


def _softmax_in_parts(x, sizes, axis=-1):
    shares = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
    return mb.split(x=shares, split_sizes=sizes, axis=axis)


def _products_with_parts(x):
    """Of six positions, the first four of which may be a cache."""
    values = mb.split(x=x, split_sizes=[4, 2], axis=-2)
    parts = _softmax_in_parts(x, [4, 2])
    return [mb.matmul(x=part, y=value) for part, value in zip(parts, values, strict=True)]


def _attention_in_parts(x):
    cached, new = _products_with_parts(x)
    return mb.add(x=cached, y=new)


def _one_product_of_both_parts(x):
    first, second = _softmax_in_parts(x, [3, 3])
    return mb.add(x=mb.matmul(x=first, y=second, transpose_y=True), y=x)


def _parts_of_rows(x):
    first, second = _softmax_in_parts(x, [3, 3], axis=-2)
    return mb.add(x=mb.matmul(x=first, y=x), y=mb.matmul(x=second, y=x))


def _sums_of_each_part(x):
    first, second = _products_with_parts(x)
    return mb.mul(x=mb.add(x=first, y=x), y=mb.add(x=x, y=second))


def test_the_softmax_of_an_attention_in_parts_needs_no_check_for_nan():
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    x[0, 1, 2, 3], x[1, 1, 5, 0] = np.nan, np.inf
    compiled, kinds = _kernels(_attention_in_parts, x)
    assert kinds["Reduce"] == 0
    ((_, actual),) = compiled({"x": x}).items()
    tensor = torch.from_numpy(x)
    assert_close(actual, (tensor @ tensor.mT).softmax(-1) @ tensor)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            lambda x: mb.concat(values=_products_with_parts(x), axis=-1), id="parts-not-added"
        ),
        pytest.param(_sums_of_each_part, id="parts-in-two-sums"),
        pytest.param(_one_product_of_both_parts, id="one-product-of-both-parts"),
        pytest.param(_parts_of_rows, id="parts-of-rows"),
        pytest.param(lambda x: _attention(x, axis=-2), id="along-another-axis"),
        pytest.param(lambda x: mb.softmax(x=x, axis=-1), id="no-product"),
        pytest.param(
            lambda x: mb.matmul(x=mb.softmax(x=x, axis=-1), y=x, transpose_x=True),
            id="product-over-another-axis",
        ),
    ],
)
def test_any_other_softmax_is_checked_for_nan(function):
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    x[0, 1, 2, 3] = np.nan
    compiled, kinds = _kernels(function, x)
    assert kinds["Reduce"] == 1
    program = main(build(function, {"x": x}))
    (expected,) = REFERENCE.compile(program, EngineOptions())({"x": x}).values()
    assert_close(next(iter(compiled({"x": x}).values())), expected)


@pytest.mark.parametrize(
    ("op", "place"), [("relu", _behind_convolution), ("relu6", _behind_convolution)]
)
def test_an_activation_is_fused_with_its_convolution_unless_exact_nan(op, place):
    def function(x):
        return place(_ELEMENTWISE[op], x)

    _, fused = _kernels(function, _X)
    _, exact = _kernels(function, _X, exact=True)
    assert exact - fused == Counter({"Subgraph": 1})
