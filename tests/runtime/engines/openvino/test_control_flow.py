"""Branches, loops, lists and states in them on the OpenVINO engine, against Python."""

from __future__ import annotations

import numpy as np
import pytest
from support import handmade, mil
from support.engine_runs import run
from support.mil import ct, mb, types

from coreml_delegate.errors import ExecutionError, UnsupportedOpError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.reader import read_program

_X = np.array([1.0, -2.0, 3.0], np.float32)


def _compile(function, inputs):
    return OPENVINO.compile(mil.main(mil.build(function, inputs)), EngineOptions())


def _count(number):
    return np.array([number], np.int32)


def _scalar(x):
    return mb.squeeze(x=x, axes=[0])


def _repeat(count, body, *variables):
    """``count`` times ``body`` on the variables."""
    return mb.while_loop(
        _cond=lambda i, *_: mb.less(x=i, y=count),
        _body=lambda i, *rest: (mb.add(x=i, y=np.int32(1)), *body(i, *rest)),
        loop_vars=(mb.const(val=np.int32(0)), *variables),
    )[1:]


# --- branches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "expected"), [(1, [2, -4, 6]), (0, [11, 8, 13])])
def test_cond_runs_one_branch_with_values_from_outside(flag, expected):
    def function(x, flag):
        ten = mb.add(x=x, y=np.float32(10))
        return mb.cond(
            pred=mb.cast(x=flag, dtype="bool"),
            _true_fn=lambda: mb.mul(x=x, y=np.float32(2)),
            _false_fn=lambda: mb.identity(x=ten),
        )

    (result,) = run(OPENVINO, function, {"x": _X, "flag": _count(flag)})
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("flag", [True, False])
def test_a_constant_condition_chooses_the_branch_at_compile_time(flag):
    def function(x):
        return mb.cond(
            pred=flag,
            _true_fn=lambda: (mb.mul(x=x, y=np.float32(2)), mb.identity(x=x)),
            _false_fn=lambda: (mb.identity(x=x), mb.mul(x=x, y=np.float32(2))),
        )

    main = mil.main(mil.build(function, {"x": _X}))
    compiled = OPENVINO.compile(main, EngineOptions())
    found = compiled({"x": _X})
    first, second = (found[name] for name in main.block.outputs)
    np.testing.assert_array_equal(first, _X * (2 if flag else 1))
    np.testing.assert_array_equal(second, _X * (1 if flag else 2))
    kinds = {node.get_type_name() for node in compiled.compiled.get_runtime_model().get_ops()}
    assert "If" not in kinds


def test_branches_of_several_outputs_and_of_run_time_shapes():
    def function(x, flag):
        return mb.cond(
            pred=mb.cast(x=_scalar(flag), dtype="bool"),
            _true_fn=lambda: (mb.non_zero(x=x), mb.const(val=np.array([7, 8], np.int32))),
            _false_fn=lambda: (
                mb.non_zero(x=mb.sub(x=x, y=np.float32(1))),
                mb.shape(x=mb.stack(values=[x, x], axis=0)),
            ),
        )

    compiled = _compile(function, {"x": _X, "flag": _count(0)})
    for flag, *expected in ((1, [[0], [1], [2]], [7, 8]), (0, [[1], [2]], [2, 3])):
        results = compiled({"x": _X, "flag": _count(flag)}).values()
        for result, answer in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, answer)


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4])
def test_while_loop_with_a_run_time_count_and_outer_values(count):
    def function(x, count):
        doubled = mb.add(x=x, y=x)
        (total,) = _repeat(_scalar(count), lambda i, total: (mb.add(x=total, y=doubled),), x)
        return total

    (result,) = run(OPENVINO, function, {"x": _X, "count": _count(count)})
    np.testing.assert_array_equal(result, _X * (1 + 2 * count))


def test_while_loop_until_a_computed_condition():
    def function(x):
        def small(value):
            return mb.less(x=mb.reduce_sum(x=mb.abs(x=value), axes=[0]), y=np.float32(100))

        return mb.while_loop(
            _cond=small, _body=lambda value: mb.mul(x=value, y=np.float32(2)), loop_vars=(x,)
        )

    (result,) = run(OPENVINO, function, {"x": _X})
    np.testing.assert_array_equal(result, _X * 32)


def test_constants_as_initial_variables_and_weights_inside():
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 16

    x = np.linspace(-1, 1, 64, dtype=np.float32)

    def function(x, count):
        start = mb.const(val=np.ones((1, 64), np.float32))
        (state,) = _repeat(
            _scalar(count),
            lambda i, h: (mb.tanh(x=mb.add(x=mb.linear(x=h, weight=weight), y=x)),),
            start,
        )
        return state

    (result,) = run(OPENVINO, function, {"x": x, "count": _count(3)})
    expected = np.ones((1, 64), np.float32)
    for _ in range(3):
        expected = np.tanh(expected @ weight.T + x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_nested_loops_and_branches():
    def function(x, count):
        outer = _scalar(count)

        def inner(i, total):
            return (
                mb.cond(
                    pred=mb.equal(x=mb.mod(x=i, y=np.int32(2)), y=np.int32(0)),
                    _true_fn=lambda: mb.add(x=total, y=x),
                    _false_fn=lambda: mb.mul(x=total, y=np.float32(2)),
                ),
            )

        def body(i, total):
            return _repeat(mb.add(x=i, y=np.int32(1)), inner, total)

        return _repeat(outer, body, x)[0]

    expected = _X.copy()
    for i in range(3):
        for j in range(i + 1):
            expected = expected + _X if j % 2 == 0 else expected * 2
    (result,) = run(OPENVINO, function, {"x": _X, "count": _count(3)})
    np.testing.assert_array_equal(result, expected)


def test_a_loop_variable_may_grow():
    def function(x, count):
        return _repeat(_scalar(count), lambda i, grown: (mb.concat(values=[grown, x], axis=0),), x)

    compiled = _compile(function, {"x": _X, "count": _count(1)})
    for count in (0, 1, 5, 2):
        (result,) = compiled({"x": _X, "count": _count(count)}).values()
        np.testing.assert_array_equal(result, np.tile(_X, count + 1))


def test_loop_variables_may_swap():
    def function(x, y, count):
        return _repeat(_scalar(count), lambda i, a, b: (b, mb.add(x=a, y=b)), x, y)

    y = np.array([1, 1, 1], np.float32)
    results = run(OPENVINO, function, {"x": _X, "y": y, "count": _count(5)})
    a, b = _X, y
    for _ in range(5):
        a, b = b, a + b
    np.testing.assert_array_equal(results[0], a)
    np.testing.assert_array_equal(results[1], b)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_loop_variables_may_swap_with_nothing_computed_before(turns):
    """The plugin replaces variables in place, one after another."""

    def function(x, y, flag):
        flags = mb.cast(x=flag, dtype="bool")
        others = mb.logical_not(x=flags)

        def body(_, u, v, s, t):
            rows = mb.reshape(x=mb.expand_dims(x=v, axes=[0]), shape=[3])
            return rows, u, mb.identity(x=t), mb.identity(x=s)

        *found, s, t = _repeat(np.int32(turns), body, x, y, flags, others)
        return (*found, mb.cast(x=s, dtype="int32"), mb.cast(x=t, dtype="int32"))

    arrays = [_X, _X * 10], [np.array([1, 0], np.int32), np.array([0, 1], np.int32)]
    given = {"x": _X, "y": _X * 10, "flag": arrays[1][0]}
    found = run(OPENVINO, function, given)
    expected = [array for pair in arrays for array in (pair[::-1] if turns % 2 else pair)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loop_whose_condition_is_constantly_false_has_no_turn():
    def function(x):
        return mb.while_loop(
            _cond=lambda _: mb.const(val=False),
            _body=lambda v: mb.mul(x=v, y=np.float32(2)),
            loop_vars=(mb.identity(x=x),),
        )

    (result,) = run(OPENVINO, function, {"x": _X})
    np.testing.assert_array_equal(result, _X)


def test_an_unsupported_op_in_a_block_is_reported_once_by_name():
    def refused(value, name):
        return mb.resize(x=value, shape=[3], resized_dims=np.uint32(1), name=name)

    def function(x, count):
        start = mb.cast(x=mb.expand_dims(x=x, axes=[0]), dtype="int32")

        def body(i, total):
            return (
                mb.cond(
                    pred=mb.less(x=i, y=np.int32(1)),
                    _true_fn=lambda: refused(total, "deep"),
                    _false_fn=lambda: mb.add(x=total, y=start),
                ),
            )

        (total,) = _repeat(_scalar(count), body, start)
        return refused(total, "outside")

    main = mil.main(mil.build(function, {"x": _X, "count": _count(1)}))
    reasons = OPENVINO.unsupported(main)
    assert [reason.split(":")[0] for reason in reasons] == [
        "resize (output 'deep')",
        "resize (output 'outside')",
    ]
    with pytest.raises(UnsupportedOpError, match=r"^resize \(output 'deep'\).*reference engine$"):
        OPENVINO.compile(main, EngineOptions())


def test_a_list_in_place_of_a_tensor_is_refused():
    ops = [
        handmade.op("make_list", "ls", elem_shape=handmade.constant([3], DType.INT32)),
        handmade.op("relu", "y", x="ls"),
        handmade.op("list_length", "n", ls="x"),
    ]
    main = handmade.function(ops, ["y"])
    first, second = OPENVINO.unsupported(main)
    assert first.startswith("relu (output 'y'): list where a tensor is needed")
    assert second.startswith("list_length (output 'n'): parameter 'ls': got a tensor")


# --- lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
def test_list_ops_equal_the_reference_engine(dynamic):
    def function(x):
        ls = mb.make_list(init_length=3, dynamic_length=dynamic, elem_shape=[3], dtype="fp32")
        ls = mb.list_write(ls=ls, index=1, value=x)
        ls = mb.list_scatter(ls=ls, indices=[2, 0], value=mb.stack(values=[x, x], axis=0))
        length = mb.cast(x=mb.list_length(ls=ls), dtype="fp32")
        return (
            mb.list_read(ls=ls, index=1),
            mb.list_gather(ls=ls, indices=[0, 2]),
            mb.expand_dims(x=length, axes=[0]),
        )

    read, gathered, length = run(OPENVINO, function, {"x": _X})
    np.testing.assert_array_equal(read, _X)
    np.testing.assert_array_equal(gathered, [_X, _X])
    assert length == [3]


@pytest.mark.parametrize("shape", [[3], ["unknown"]])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_list_grows_in_a_loop(shape, length):
    def function(x, count):
        ls = mb.make_list(init_length=length, elem_shape=shape, dtype="fp32")

        def body(i, ls):
            value = mb.mul(x=x, y=mb.cast(x=i, dtype="fp32"))
            return (mb.list_write(ls=ls, index=i, value=value),)

        (ls,) = _repeat(_scalar(count), body, ls)
        total = mb.list_length(ls=ls)
        everything = mb.range_1d(end=total, start=np.int32(0), step=np.int32(1))
        return mb.list_gather(ls=ls, indices=everything), mb.expand_dims(x=total, axes=[0])

    compiled = _compile(function, {"x": _X, "count": _count(1)})
    for count in (4, 1, 2):
        held, total = compiled({"x": _X, "count": _count(count)}).values()
        expected = np.zeros((max(length, count), 3), np.float32)
        expected[:count] = np.arange(count)[:, None] * _X
        assert total == [len(expected)]
        np.testing.assert_array_equal(held, expected)


def test_a_list_of_run_time_length_and_integers():
    def function(x, count):
        ls = mb.make_list(
            init_length=_scalar(count), dynamic_length=False, elem_shape=[2], dtype="int32"
        )
        ls = mb.list_write(ls=ls, index=mb.sub(x=_scalar(count), y=np.int32(1)), value=x)
        return mb.list_read(ls=ls, index=0), mb.expand_dims(x=mb.list_length(ls=ls), axes=[0])

    compiled = _compile(function, {"x": np.array([5, 6], np.int32), "count": _count(1)})
    for count, first in ((1, [5, 6]), (4, [0, 0])):
        read, length = compiled({"x": np.array([5, 6], np.int32), "count": _count(count)}).values()
        np.testing.assert_array_equal(read, first)
        assert length == [count]


def test_writing_beyond_a_fixed_length_fails():
    def function(x, at):
        ls = mb.make_list(init_length=2, dynamic_length=False, elem_shape=[3], dtype="fp32")
        return mb.list_read(ls=mb.list_write(ls=ls, index=_scalar(at), value=x), index=0)

    compiled = _compile(function, {"x": _X, "at": _count(0)})
    with pytest.raises(ExecutionError, match="OpenVINO failed"):
        compiled({"x": _X, "at": _count(2)})


def test_a_list_from_a_branch_and_around_it():
    def function(x, flag):
        ls = mb.make_list(init_length=1, elem_shape=[3], dtype="fp32")
        chosen = mb.cond(
            pred=mb.cast(x=_scalar(flag), dtype="bool"),
            _true_fn=lambda: mb.list_write(ls=ls, index=2, value=x),
            _false_fn=lambda: mb.list_write(ls=ls, index=0, value=x),
        )
        return mb.expand_dims(x=mb.list_length(ls=chosen), axes=[0]), mb.list_read(
            ls=chosen, index=0
        )

    compiled = _compile(function, {"x": _X, "flag": _count(1)})
    for flag, length, first in ((1, 3, [0, 0, 0]), (0, 1, _X)):
        total, read = compiled({"x": _X, "flag": _count(flag)}).values()
        assert total == [length]
        np.testing.assert_array_equal(read, first)


# --- states ---------------------------------------------------------------------------------------


def _stateful(function):
    @mb.program(
        input_specs=[
            mb.TensorSpec((2,), dtype=types.fp16),
            mb.TensorSpec((1,), dtype=types.int32),
            mb.StateTensorSpec((2,), dtype=types.fp16),
            mb.StateTensorSpec((2,), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x, count, total, seen):
        return function(x, _scalar(count), total, seen)

    message = mil.load(program, weights_dir="", specification_version=9)
    return OPENVINO.compile(
        mil.main(read_program(message.SerializeToString(), {})), EngineOptions()
    )


def test_states_written_in_a_loop():
    def function(x, count, total, seen):
        def body(i, value):
            grown = mb.add(x=mb.read_state(input=total), y=mb.add(x=x, y=mb.read_state(input=seen)))
            mb.coreml_update_state(state=total, value=grown)
            return (mb.add(x=value, y=grown),)

        (result,) = _repeat(count, body, x)
        return mb.add(x=result, y=mb.read_state(input=total))

    compiled = _stateful(function)
    state = compiled.make_state()
    x = np.array([1, 2], np.float16)
    expected = np.zeros(2, np.float16)
    for count in (3, 0, 2):
        result = x.copy()
        for _ in range(count):
            expected = expected + x
            result = result + expected
        (found,) = compiled({"x": x, "count": _count(count)}, state).values()
        np.testing.assert_array_equal(found, result + expected)
        np.testing.assert_array_equal(state.snapshot()["total"], expected)
        np.testing.assert_array_equal(state.snapshot()["seen"], [0, 0])


def test_states_written_in_one_branch():
    def function(x, count, total, seen):
        def true():
            mb.coreml_update_state(state=total, value=mb.add(x=x, y=mb.read_state(input=total)))
            return mb.identity(x=x)

        def false():
            mb.coreml_update_state(state=seen, value=x)
            return mb.read_state(input=total)

        return mb.cond(pred=mb.greater(x=count, y=np.int32(0)), _true_fn=true, _false_fn=false)

    compiled = _stateful(function)
    state = compiled.make_state()
    x = np.array([1, 2], np.float16)
    for count, result, total, seen in (
        (1, x, x, x * 0),
        (1, x, 2 * x, x * 0),
        (0, 2 * x, 2 * x, x),
    ):
        (found,) = compiled({"x": x, "count": _count(count)}, state).values()
        np.testing.assert_array_equal(found, result)
        np.testing.assert_array_equal(state.snapshot()["total"], total)
        np.testing.assert_array_equal(state.snapshot()["seen"], seen)
