"""The reference engine as a whole: control flow, states, listeners, memory."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch
from support import handmade
from support.mil import TARGETS, build, main, mb, serialized, types

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Constant,
    ListType,
    NamedType,
    Op,
    Ref,
    TensorType,
)
from coreml_delegate.targets import Opset

_X = np.array([1.0, -2.0, 3.0], np.float32)


def _compile(function, inputs, opset=Opset.iOS18):
    return REFERENCE.compile(main(build(function, inputs, opset)), EngineOptions())


# --- control flow ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "expected"), [(1, [2, -4, 6]), (0, [11, 8, 13])])
def test_cond_runs_one_branch_with_values_from_outside(flag, expected):
    def function(x, flag):
        ten = mb.add(x=x, y=np.float32(10))
        return mb.cond(
            pred=mb.cast(x=mb.squeeze(x=flag, axes=[0]), dtype="bool"),
            _true_fn=lambda: mb.mul(x=x, y=np.float32(2)),
            _false_fn=lambda: mb.identity(x=ten),
        )

    inputs = {"x": _X, "flag": np.array([flag], np.int32)}
    (result,) = _compile(function, inputs)(inputs).values()
    np.testing.assert_array_equal(result, expected)


def test_while_loop_keeps_outer_values_alive():
    def function(x, count):
        doubled = mb.add(x=x, y=x)
        _, total = mb.while_loop(
            _cond=lambda i, total: mb.greater(x=i, y=np.int32(0)),
            _body=lambda i, total: (mb.sub(x=i, y=np.int32(1)), mb.add(x=total, y=doubled)),
            loop_vars=(mb.squeeze(x=count, axes=[0]), x),
        )
        return total

    for count in (0, 1, 4):
        inputs = {"x": _X, "count": np.array([count], np.int32)}
        (result,) = _compile(function, inputs)(inputs).values()
        np.testing.assert_array_equal(result, _X * (1 + 2 * count))


def test_nested_control_flow():
    def function(x, count):
        def body(i, total):
            grown = mb.cond(
                pred=mb.equal(x=mb.mod(x=i, y=np.int32(2)), y=np.int32(0)),
                _true_fn=lambda: mb.add(x=total, y=x),
                _false_fn=lambda: mb.mul(x=total, y=np.float32(2)),
            )
            return mb.sub(x=i, y=np.int32(1)), grown

        return mb.while_loop(
            _cond=lambda i, total: mb.greater(x=i, y=np.int32(0)),
            _body=body,
            loop_vars=(mb.squeeze(x=count, axes=[0]), x),
        )[1]

    inputs = {"x": _X, "count": np.array([3], np.int32)}
    (result,) = _compile(function, inputs)(inputs).values()
    np.testing.assert_array_equal(result, (_X * 2 + _X) * 2)


def test_lists():
    def function(x):
        ls = mb.make_list(init_length=2, elem_shape=[3], dtype="fp32")
        ls = mb.list_write(ls=ls, index=1, value=x)
        ls = mb.list_scatter(ls=ls, indices=[2, 0], value=mb.stack(values=[x, x], axis=0))
        length = mb.expand_dims(x=mb.cast(x=mb.list_length(ls=ls), dtype="fp32"), axes=[0])
        return mb.list_read(ls=ls, index=1), mb.list_gather(ls=ls, indices=[0, 2]), length

    read, gathered, length = _compile(function, {"x": _X})({"x": _X}).values()
    np.testing.assert_array_equal(read, _X)
    np.testing.assert_array_equal(gathered, [_X, _X])
    assert length == [3]


def test_classify():
    ops = [
        Op(
            "classify",
            {
                "probabilities": (Ref("x"),),
                "classes": (
                    Constant(ListType(TensorType(DType.STRING, ()), 3), ("ant", "bee", "cat")),
                ),
            },
            (
                NamedType("label", TensorType(DType.STRING, ())),
                NamedType("scores", handmade.FLOATS),
            ),
        )
    ]
    compiled = REFERENCE.compile(handmade.function(ops, ["label", "scores"]), EngineOptions())
    result = compiled({"x": _X})
    assert str(result["label"]) == "cat"
    assert result["scores"][()] == {"ant": 1.0, "bee": -2.0, "cat": 3.0}


@pytest.mark.parametrize("seed", [-1, 7])
def test_random_values_have_their_distribution(seed):
    def function(x):
        shape = [4000]
        return (
            mb.random_uniform(shape=shape, low=np.float32(2), high=np.float32(4), seed=seed),
            mb.random_normal(shape=shape, mean=np.float32(1), stddev=np.float32(3), seed=seed),
            mb.random_bernoulli(shape=shape, prob=np.float32(0.25), seed=seed),
            mb.random_categorical(x=x, mode="probs", size=4000, seed=seed),
        )

    inputs = {"x": np.array([[0.5, 0.0, 0.5]], np.float32)}
    compiled = _compile(function, inputs)
    first, second = (list(compiled(inputs).values()) for _ in range(2))
    uniform, normal, bernoulli, categorical = first
    assert 2 <= uniform.min() < uniform.max() < 4
    assert uniform.mean() == pytest.approx(3, abs=0.1)
    assert (normal.mean(), normal.std()) == pytest.approx((1, 3), abs=0.25)
    assert set(bernoulli) == {0, 1}
    assert bernoulli.mean() == pytest.approx(0.25, abs=0.05)
    assert set(categorical.ravel()) == {0, 2}
    assert (seed != -1) == all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# --- states ---------------------------------------------------------------------------------------


def _accumulator():
    @mb.program(
        input_specs=[
            mb.TensorSpec((3,), dtype=types.fp16),
            mb.StateTensorSpec((3,), dtype=types.fp16),
        ],
        opset_version=TARGETS[Opset.iOS18],
    )
    def program(x, total):
        before = mb.read_state(input=total)
        after = mb.coreml_update_state(state=total, value=mb.add(x=before, y=x))
        return mb.add(x=after, y=before)

    return program


def test_states_persist_and_are_independent():
    compiled = REFERENCE.compile(main(serialized(_accumulator(), Opset.iOS18)), EngineOptions())
    x = _X.astype(np.float16)
    one, other = compiled.make_state(), compiled.make_state()
    for turn in range(3):
        (result,) = compiled({"x": x}, one).values()
        np.testing.assert_array_equal(result, x * (2 * turn + 1))
    np.testing.assert_array_equal(one.snapshot()["total"], 3 * x)
    np.testing.assert_array_equal(other.snapshot()["total"], 0 * x)
    one.snapshot()["total"][:] = 7
    np.testing.assert_array_equal(one.snapshot()["total"], 3 * x)


def test_state_must_fit_the_function():
    stateful = REFERENCE.compile(main(serialized(_accumulator(), Opset.iOS18)), EngineOptions())
    stateless = _compile(lambda x: mb.relu(x=x), {"x": _X})
    assert stateless.make_state() is None
    with pytest.raises(InputError, match="got no state, expected a state of total"):
        stateful({"x": _X.astype(np.float16)})
    with pytest.raises(InputError, match="expected no state"):
        stateless({"x": _X}, stateful.make_state())


# --- values ---------------------------------------------------------------------------------------


def test_fp16_overflows_and_rounds_after_every_op():
    def function(x):
        overflowed = mb.mul(x=x, y=np.float16(60000))
        rounded = mb.sub(x=mb.add(x=x, y=np.float16(2048)), y=np.float16(2048))
        return overflowed, rounded

    x = np.array([1.0, 2.0, 0.75], np.float16)
    overflowed, rounded = _compile(function, {"x": x})({"x": x}).values()
    np.testing.assert_array_equal(overflowed, np.array([60000, np.inf, 44992], np.float16))
    np.testing.assert_array_equal(rounded, np.array([0, 2, 0], np.float16))


def test_products_accumulate_in_fp32_and_round_once():
    x = np.full((1, 4096), 0.1, np.float16)
    weight = np.ones((1, 4096), np.float16)
    (result,) = _compile(lambda x: mb.linear(x=x, weight=weight), {"x": x})({"x": x}).values()
    assert result == np.float16(x.astype(np.float64).sum())


def test_conv_takes_weights_of_another_float_type():
    x = np.ones((1, 2, 4), np.float16)
    weight = np.full((1, 2, 3), 0.1, np.float32)
    (result,) = _compile(lambda x: mb.conv(x=x, weight=weight), {"x": x})({"x": x}).values()
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, np.full((1, 1, 2), 0.6, np.float16))


def test_outputs_own_their_memory():
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    compiled = _compile(lambda x: (mb.identity(x=x), mb.transpose(x=x, perm=[1, 0])), {"x": x})
    same, transposed = compiled({"x": x}).values()
    assert transposed.flags.c_contiguous
    same[:] = -1
    transposed[:] = -1
    np.testing.assert_array_equal(x, np.arange(9).reshape(3, 3))


@pytest.mark.parametrize("layout", ["read-only", "reversed", "transposed"])
def test_inputs_of_any_layout(layout):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"read-only": x.copy(), "reversed": x[::-1, ::-1], "transposed": x.T.copy().T}[layout]
    given.flags.writeable = layout != "read-only"
    compiled = _compile(lambda x: mb.add(x=x, y=np.float32(1)), {"x": x})
    (result,) = compiled({"x": given}).values()
    np.testing.assert_array_equal(result, given + 1)


def test_the_listener_receives_every_value_in_order():
    def function(x):
        return mb.relu(x=mb.add(x=x, y=np.float32(1), name="sum"), name="positive")

    compiled = _compile(function, {"x": _X})
    heard = {}
    compiled.run({"x": _X}, listener=lambda c: heard.update({c.output.name: c.value.numpy()}))
    assert list(heard) == ["sum", "positive"]
    np.testing.assert_array_equal(heard["sum"], _X + 1)


def test_values_are_freed_after_their_last_use():
    def function(x):
        for step in range(4):
            x = mb.add(x=x, y=np.float32(1), name=f"step{step}")
        return x

    alive = weakref.WeakSet()
    most = 0

    def count(computed):
        nonlocal most
        alive.add(computed.value)
        most = max(most, len(alive))

    _compile(function, {"x": _X}).run({"x": _X}, listener=count)
    assert most == 2  # what is computed, and what it is computed of


def test_constants_share_the_weight_memory():
    weight = np.ones((16, 16), np.float32)
    function = main(
        build(lambda x: mb.linear(x=x, weight=weight), {"x": np.ones((1, 16), np.float32)})
    )
    (held,) = [
        o.attributes["val"] for o in function.block.ops if o.outputs[0].type.shape == (16, 16)
    ]
    compiled = REFERENCE.compile(function, EngineOptions())
    (entry,) = compiled._program.block.entries
    assert entry.step.fixed["weight"].data_ptr() == held.data.ctypes.data


def test_calls_from_several_threads():
    compiled = _compile(lambda x: mb.relu(x=mb.mul(x=x, y=np.float32(2))), {"x": _X})
    results = {}

    def call(n):
        for _ in range(20):
            results[n] = next(iter(compiled({"x": _X * n}).values()))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, result in results.items():
        np.testing.assert_array_equal(result, np.maximum(_X * n * 2, 0))


def test_an_infinite_cell_without_peepholes_is_no_nan():
    random = np.random.default_rng(0)
    x, w, r = (random.standard_normal(s).astype(np.float32) for s in ((2, 1, 3), (8, 3), (8, 2)))
    h, c = np.zeros((1, 2), np.float32), np.array([[np.inf, 1]], np.float32)

    def function(x, h, c):
        return mb.lstm(
            x=x, initial_h=h, initial_c=c, weight_ih=w, weight_hh=r, output_sequence=True
        )

    inputs = {"x": x, "h": h, "c": c}
    hidden, _, cell = _compile(function, inputs)(inputs).values()
    cells = torch.nn.LSTM(3, 2, bias=False)
    order = [0, 1, 2, 3, 6, 7, 4, 5]  # torch's output gate comes last
    with torch.no_grad():
        cells.weight_ih_l0.copy_(torch.from_numpy(w[order]))
        cells.weight_hh_l0.copy_(torch.from_numpy(r[order]))
        states = (torch.from_numpy(h[None]), torch.from_numpy(c[None]))
        expected, (_, last) = cells(torch.from_numpy(x), states)
    np.testing.assert_allclose(hidden, expected, rtol=1e-5)
    np.testing.assert_allclose(cell, last[0], rtol=1e-5)
    assert np.isinf(cell[0, 0])


def test_a_call_changes_no_setting_of_torch():
    before = torch.get_num_threads(), torch.is_grad_enabled()
    _compile(lambda x: mb.relu(x=x), {"x": _X})({"x": _X})
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before
    assert not torch.is_inference_mode_enabled()
