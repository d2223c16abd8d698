"""Sizes that are known at run time only are compared: operands that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import mil
from support.damage import native_arguments
from support.engine_runs import assert_close
from support.gates import needs_compiler
from support.mil import mb

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.translate import translate
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.program import Function, TensorType
from coreml_delegate.runtime.native import NATIVE_RUN, NativeInterface
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)


def _values(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float16)


def _places(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def _gru(x: Any, h: Any, *, reset_after: bool) -> Any:
    return mb.gru(
        x=x,
        initial_h=h,
        weight_ih=_values(12, 8),
        weight_hh=_values(12, 4),
        bias=_values(12),
        reset_after=reset_after,
    )


_Shapes = Mapping[str, tuple[int, ...]]

# Shapes of inputs, the op, and the input and axis that may have any size.
CASES: dict[str, tuple[_Shapes, Callable[..., Any], str, int]] = {
    "linear": (
        {"x": (3, 8)},
        lambda x: mb.linear(x=x, weight=_values(64, 8), bias=_values(64)),
        *("x", 1),
    ),
    "matmul": ({"x": (3, 8)}, lambda x: mb.matmul(x=x, y=_values(8, 64)), "x", 1),
    "matmul, transposed": (
        {"x": (8, 3)},
        lambda x: mb.matmul(x=x, y=_values(8, 64), transpose_x=True),
        *("x", 0),
    ),
    "matmul of inputs": (
        {"x": (3, 8), "y": (8, 5)},
        lambda x, y: mb.matmul(x=x, y=y),
        *("y", 0),
    ),
    "attention, width of queries": (
        {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)},
        lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v),
        *("q", 3),
    ),
    "attention, number of keys": (
        {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)},
        lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v),
        *("k", 2),
    ),
    "attention by products": (
        {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)},
        lambda q, k, v: mb.matmul(
            x=mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1), y=v
        ),
        *("v", 2),
    ),
    "gru, kernel": (
        {"x": (5, 2, 8), "h": (2, 4)},
        lambda x, h: _gru(x, h, reset_after=True),
        *("x", 2),
    ),
    "gru, loop": (
        {"x": (5, 2, 8), "h": (2, 4)},
        lambda x, h: _gru(x, h, reset_after=False),
        *("x", 2),
    ),
    "gru, batch": (
        {"x": (5, 2, 8), "h": (2, 4)},
        lambda x, h: _gru(x, h, reset_after=False),
        *("x", 1),
    ),
    "gru, state": (
        {"x": (5, 2, 8), "h": (2, 4)},
        lambda x, h: _gru(x, h, reset_after=False),
        *("h", 1),
    ),
    "scatter, data": (
        {"x": (3, 8)},
        lambda x: mb.scatter(
            data=x, indices=_places(1), updates=_values(1, 8), axis=0, mode="update"
        ),
        *("x", 1),
    ),
    "scatter, updates": (
        {"u": (2, 8)},
        lambda u: mb.scatter(
            data=_values(3, 8), indices=np.array([2, 0], np.int32), updates=u, axis=0, mode="add"
        ),
        *("u", 1),
    ),
    "scatter, number of updates": (
        {"u": (2, 8)},
        lambda u: mb.scatter(
            data=_values(3, 8), indices=np.array([2, 0], np.int32), updates=u, axis=0, mode="update"
        ),
        *("u", 0),
    ),
    "batch_norm": (
        {"x": (2, 3, 4, 4)},
        lambda x: mb.batch_norm(x=x, mean=_values(3), variance=np.abs(_values(3))),
        *("x", 1),
    ),
    "instance_norm": (
        {"x": (2, 3, 4, 4)},
        lambda x: mb.instance_norm(x=x, gamma=_values(3), beta=_values(3)),
        *("x", 1),
    ),
    "layer_norm": (
        {"x": (2, 3, 4)},
        lambda x: mb.layer_norm(x=x, axes=[1, 2], gamma=_values(3, 4)),
        *("x", 2),
    ),
    "slice_update": (
        {"x": (4, 8), "u": (2, 8)},
        lambda x, u: mb.slice_update(
            x=x,
            update=u,
            begin=[1, 0],
            end=[3, 0],
            begin_mask=[False, True],
            end_mask=[False, True],
        ),
        *("u", 1),
    ),
}


def _with_any_size(function: Function, name: str, axis: int) -> Function:
    """The function, with an input that declares no size along an axis."""

    def opened(value: Any) -> Any:
        if value.name != name:
            return value
        sizes = list(value.type.shape)
        sizes[axis] = None
        return replace(value, type=replace(value.type, shape=tuple(sizes)))

    return replace(
        function,
        params=tuple(map(opened, function.params)),
        inputs=tuple(map(opened, function.inputs)),
    )


def _opened(case: str) -> tuple[Function, dict[str, np.ndarray]]:
    shapes, make, name, axis = CASES[case]
    arrays = {key: _values(*shape) for key, shape in shapes.items()}
    function = mil.main(mil.build(make, arrays, Opset.iOS18))
    assert all(isinstance(feature.type, TensorType) for feature in function.inputs)
    return _with_any_size(function, name, axis), arrays


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_unlike_sizes_are_refused(case: str, threads: int) -> None:
    function, arrays = _opened(case)
    _, _, name, axis = CASES[case]
    compiled = OPENVINO.compile(function, EngineOptions(threads=threads))
    expected = REFERENCE.compile(function, EngineOptions())(arrays)
    for size in (1, arrays[name].shape[axis] - 1, arrays[name].shape[axis] + 1):
        shape = list(arrays[name].shape)
        shape[axis] = size
        with pytest.raises(ExecutionError, match="sizes that do not fit together"):
            compiled({**arrays, name: _values(*shape)})
        for key, result in compiled(arrays).items():
            assert_close(result, expected[key], "fp16")


def test_indices_of_more_sizes_than_the_data_are_refused() -> None:
    arrays = {"x": _values(3, 8)}
    built = mil.build(
        lambda x: mb.scatter_along_axis(
            data=x, indices=_places(2, 8), updates=_values(2, 8), axis=0, mode="update"
        ),
        arrays,
        Opset.iOS18,
    )
    compiled = OPENVINO.compile(_with_any_size(mil.main(built), "x", 1), EngineOptions())
    for width in (1, 7):
        with pytest.raises(ExecutionError, match="indices of a scatter exceed the tensor"):
            compiled({"x": _values(3, width)})
    (wider,) = compiled({"x": np.zeros((3, 9), np.float16)}).values()
    assert wider.shape == (3, 9)
    assert not wider[:, 8].any()


def _reshaped() -> Function:
    """A function of [*, 8] values that takes 24 of them."""
    arrays = {"x": _values(3, 8)}
    built = mil.build(lambda x: mb.reshape(x=mb.relu(x=x), shape=[4, 6]), arrays, Opset.iOS18)
    return _with_any_size(mil.main(built), "x", 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_that_failed_leaves_the_next_alone(threads: int) -> None:
    compiled = OPENVINO.compile(_reshaped(), EngineOptions(threads=threads))
    right = _values(3, 8)
    for rows in (2, 4, 2):
        with pytest.raises(ExecutionError, match="OpenVINO failed to run"):
            compiled({"x": _values(rows, 8)})
        (result,) = compiled({"x": right}).values()
        assert_close(result, np.maximum(right, 0).reshape(4, 6), "fp16")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_a_native_call_that_failed_leaves_the_next_alone(threads: int) -> None:
    function = _reshaped()
    compiled = OPENVINO.compile(function, EngineOptions(threads=threads))
    names = tuple(feature.name for feature in function.outputs)
    call = compiled.native_call(NativeInterface(("x",), names, (None,)), None)
    assert call is not None

    def run(rows: int) -> tuple[int, np.ndarray]:
        x, result = np.full((rows, 8), rows, np.float16), np.zeros((4, 6), np.float16)
        arguments = native_arguments(x, result)
        return NATIVE_RUN(call.run)(call.model, arguments, len(arguments), None, None), result

    for rows in (2, 4, 2):
        assert run(rows)[0] != 0
        code, result = run(3)
        assert code == 0
        assert (result == 3).all()


def test_calls_of_threads_are_right_beside_failing_ones() -> None:
    compiled = OPENVINO.compile(_reshaped(), EngineOptions(threads=1))

    def call(number: int) -> bool:
        if number % 3 == 0:
            with pytest.raises(ExecutionError):
                compiled({"x": np.ones((2, 8), np.float16)})
            return True
        x = np.full((3, 8), number, np.float16)
        (result,) = compiled({"x": x}).values()
        return bool((result == number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(60)))


def test_sizes_of_one_source_are_not_compared() -> None:
    """Attention over a sequence of any length adds no operation for a comparison."""

    def attention(x: Any) -> Any:
        heads = mb.transpose(x=mb.reshape(x=x, shape=[1, -1, 2, 4]), perm=[0, 2, 1, 3])
        keys, values = mb.mul(x=heads, y=np.float16(2)), mb.add(x=heads, y=np.float16(1))
        return mb.scaled_dot_product_attention(query=heads, key=keys, value=values)

    function = mil.main(mil.build(attention, {"x": _values(1, 5, 8)}, Opset.iOS18))

    def reshapes(each: Function) -> int:
        nodes = translate(each).model.get_ops()
        return sum(node.get_type_name() == "Reshape" for node in nodes)

    assert reshapes(_with_any_size(function, "x", 1)) == reshapes(function)
