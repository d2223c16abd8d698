"""Tapping values, and finding the op that loses the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.mil import TARGETS, build, builder_program, mb, serialized, types
from support.packages import package_files
from support.tolerances import sqnr_db as independent_sqnr

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.diagnosis import Fault, energy, ratio_db, signal_and_error
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.location import Location, describe_op, location_of
from coreml_delegate.runtime.mil.program import Function, Program, TensorType
from coreml_delegate.runtime.mil.widening import widen_function
from coreml_delegate.runtime.model import Model
from coreml_delegate.targets import Opset

ENGINES = ["reference", "openvino"]
_X = np.full((1, 8), 300, np.float16)


def rms_norm(x):
    """The square of 300 is beyond fp16; its root is not."""
    mean = mb.reduce_mean(x=mb.square(x=x, name="sq"), axes=[-1], keep_dims=True, name="mean")
    return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-3)), name="y")


def growing(x, n):
    """16 times as much with every turn."""
    return mb.while_loop(
        _cond=lambda i, t: mb.less(x=i, y=np.int32(5)),
        _body=lambda i, t: (
            mb.add(x=i, y=np.int32(1), name="next"),
            mb.mul(x=t, y=np.float16(16), name="grow"),
        ),
        loop_vars=(mb.squeeze(x=n, axes=[0]), x),
    )[1]


def model(function, inputs, engine="reference"):
    return Model(build(function, inputs), engine=engine)


def state_program() -> Program:
    @mb.program(
        input_specs=[
            mb.TensorSpec((2, 3), types.fp16),
            mb.StateTensorSpec((2, 3), types.fp16),
        ],
        opset_version=TARGETS[Opset.iOS18],
    )
    def accumulate(x, held):
        total = mb.add(x=mb.read_state(input=held), y=x, name="total")
        return mb.coreml_update_state(state=held, value=total, name="kept")

    return serialized(accumulate, Opset.iOS18)


# --- tracing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_every_value_is_traced_with_its_place(engine):
    values = []
    traced = model(rms_norm, {"x": _X}, engine)
    outputs = traced.trace({"x": _X / 300}, values.append)
    assert values[0].name == "sq"
    assert [v.op_type for v in values] == ["square", "reduce_mean", "rsqrt", "mul"]
    assert [v.location.index for v in values] == sorted(v.location.index for v in values)
    assert values[0].inputs == {"x": "float16[1, 8]"}
    np.testing.assert_array_equal(values[0].array, np.ones((1, 8), np.float16))
    np.testing.assert_array_equal(values[-1].array, outputs["y"])
    assert values[-1].array.dtype == np.float16


def test_models_of_the_same_bytes_are_traced():
    """They share what is compiled while both are there."""
    files = package_files(builder_program(rms_norm, {"x": _X}, Opset.iOS18))
    first, second = (Model.from_files(files, engine="reference") for _ in range(2))
    places = []
    for each in (first, second):
        values = []
        each.trace({"x": _X}, values.append)
        places.append([(value.name, value.location) for value in values])
        assert each.diagnose({"x": _X}).first_bad.name == "sq"
    assert places[0] == places[1]


def test_every_iteration_of_a_loop_is_traced():
    inputs = {"x": np.ones((1, 2), np.float16), "n": np.array([2], np.int32)}
    values = []
    model(growing, inputs).trace(inputs, values.append)
    turns = [(v.turns, float(v.array[0, 0])) for v in values if v.name == "grow"]
    assert turns == [((0,), 16.0), ((1,), 256.0), ((2,), 4096.0)]
    (place,) = {v.location for v in values if v.name == "grow"}
    assert place.path[0][1] == 1  # the second block of the loop
    assert str(place) == f"main op {place.path[0][0]} block 1 op {place.index}"


def test_tracing_leaves_the_state_as_it_is():
    traced = Model(state_program(), engine="openvino")
    state = traced.make_state()
    x = np.ones((2, 3), np.float16)
    traced.predict({"x": x}, state)
    for _ in range(2):  # as often as one likes
        values = {}
        traced.trace({"x": x}, lambda v, to=values: to.update({v.name: v.array}), state)
        np.testing.assert_array_equal(values["total"], np.full((2, 3), 2))
    (held,) = state.snapshot().values()
    np.testing.assert_array_equal(held, x)


def test_inputs_are_checked_as_for_predict():
    traced = model(rms_norm, {"x": _X})
    with pytest.raises(InputError, match="unknown input: got z, expected x"):
        traced.trace({"z": _X}, lambda value: None)
    with pytest.raises(InputError, match=r"input 'x' has the wrong size in dimension 1"):
        traced.diagnose({"x": _X[:, :3]})
    stateful = Model(state_program(), engine="reference")
    with pytest.raises(InputError, match="function and state do not fit: got no state"):
        stateful.trace({"x": np.ones((2, 3), np.float16)}, lambda value: None)


# --- places ---------------------------------------------------------------------------------------


def test_places_sort_in_program_order_and_name_the_op():
    inputs = {"x": _X, "n": np.zeros(1, np.int32)}
    function = model(growing, inputs).function
    (loop,) = (op for op in function.block.ops if op.type == "while_loop")
    (grow,) = (op for op in loop.blocks[1].ops if op.outputs[0].name == "grow")
    outer, inner = location_of(function, loop), location_of(function, grow)
    assert outer < inner
    assert inner == Location("main", ((outer.index, 1),), inner.index)
    assert describe_op(function, grow) == f"mul 'grow' at {inner}"
    other = model(rms_norm, {"x": _X}).function
    with pytest.raises(LookupError, match="not an op of main"):
        location_of(other, grow)


# --- widening -------------------------------------------------------------------------------------


def dtypes(function: Function) -> set[DType]:
    named = [output for op in function.block.walk() for output in op.outputs]
    return {n.type.dtype for n in [*named, *function.params] if isinstance(n.type, TensorType)}


def test_the_widened_program_computes_in_fp32():
    def function(x):
        return mb.cast(x=mb.cast(x=rms_norm(x), dtype="fp32"), dtype="fp16")

    narrow = model(function, {"x": _X})
    wide = widen_function(narrow.function)
    assert DType.FP16 in dtypes(narrow.function)
    assert DType.FP16 not in dtypes(wide)
    assert [op.type for op in wide.block.walk()] == [op.type for op in narrow.function.block.walk()]
    program = Program(9, {"main": wide}, "main", {})
    (result,) = Model(program, engine="reference").predict({"x": _X.astype(np.float32)}).values()
    np.testing.assert_allclose(result, np.ones((1, 8)), rtol=1e-5)


# --- diagnosis ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overflowing_norm_names_the_square(engine):
    diagnosis = model(rms_norm, {"x": _X}, engine).diagnose({"x": _X})
    bad = diagnosis.first_bad
    assert (bad.name, bad.op_type, bad.fault) == ("sq", "square", Fault.OVERFLOW)
    assert (bad.infinite, bad.nan, bad.sqnr_db) == (8, 0, -np.inf)
    assert bad.inputs == {"x": "float16[1, 8]"}
    assert str(diagnosis) == f"main: {bad}"
    assert str(bad).startswith("square 'sq' at main op 0: infinite, and finite in fp32; 8 inf")


@pytest.mark.parametrize("engine", ENGINES)
def test_integers_beyond_int32_are_named_where_they_come_to_be(engine):
    def function(x):
        total = mb.reduce_sum(x=mb.mul(x=x, y=x, name="square"), axes=[0], keep_dims=True, name="t")
        return mb.add(x=mb.mod(x=total, y=np.int32(7), name="rest"), y=mb.sub(x=x, y=x))

    x = np.array([70000, 3], np.int32)
    traced = model(function, {"x": x}, engine)
    diagnosis = traced.diagnose({"x": x})
    (bad,) = diagnosis.values  # what is computed of it goes without saying
    assert (bad.name, bad.op_type, bad.fault) == ("square", "mul", Fault.BEYOND_INT32)
    assert bad.max_abs == 4.9e9
    assert "mul 'square' at main op 0: beyond int32; SQNR" in str(diagnosis)
    assert not traced.diagnose({"x": x // 1000}).values


def test_a_softmax_without_its_maximum_names_the_exponential_then_the_quotient():
    def function(x):
        exponential = mb.exp(x=x, name="e")
        total = mb.reduce_sum(x=exponential, axes=[-1], keep_dims=True)
        return mb.real_div(x=exponential, y=total, name="y")

    x = np.array([[12.0, 1.0, 0.0]], np.float16)
    diagnosis = model(function, {"x": x}).diagnose({"x": x})
    assert diagnosis.first_bad.name == "e"
    assert diagnosis.first(Fault.NAN).name == "y"
    assert diagnosis.first(Fault.INFINITE) is None


def test_masks_are_no_fault():
    mask = np.array([[0, -np.inf, 0]], np.float16)

    def function(x):
        return mb.softmax(x=mb.add(x=x, y=mask, name="masked"), axis=-1)

    x = np.ones((1, 3), np.float16)
    diagnosis = model(function, {"x": x}).diagnose({"x": x})
    assert diagnosis.first_bad is None
    assert str(diagnosis) == "main: 2 values, none of them bad"


def test_an_infinity_that_fp32_has_too_is_another_fault():
    x = np.array([0.0, 1.0], np.float16)
    diagnosis = model(lambda x: mb.log(x=x, epsilon=np.float16(0)), {"x": x}).diagnose({"x": x})
    assert diagnosis.first_bad is None
    assert diagnosis.first(Fault.INFINITE).op_type == "log"


def test_cancellation_is_inaccurate_and_leads_the_worst():
    def function(x):
        near = mb.add(x=x, y=np.float16(1000), name="near")
        return mb.mul(x=mb.sub(x=near, y=np.float16(1000), name="lost"), y=np.float16(2), name="y")

    x = np.array([0.1, 0.2, 0.3], np.float16)
    diagnosis = model(function, {"x": x}).diagnose({"x": x}, min_sqnr_db=30)
    assert diagnosis.first_bad.name == "lost"
    assert diagnosis.first_bad.fault is Fault.INACCURATE
    assert [value.name for value in diagnosis.worst(2)] == ["lost", "y"]
    rounded = (x + np.float16(1000)) - np.float16(1000)
    assert diagnosis.first_bad.sqnr_db == pytest.approx(independent_sqnr(x, rounded), abs=1e-6)


@pytest.mark.parametrize(
    ("x", "factor", "fault"),
    [
        pytest.param(1e-4, 1e-3, Fault.UNDERFLOW, id="few-bits-left"),
        pytest.param(1e-4, 1e-4, Fault.UNDERFLOW, id="nothing-left"),
        pytest.param(1e-4, 1e-1, None, id="small-and-accurate"),
    ],
)
def test_underflow_is_another_fault_than_inaccuracy(x, factor, fault):
    values = np.array([1.0, 1.3, -1.7], np.float16) * np.float16(x)
    product = model(lambda x: mb.mul(x=x, y=np.float16(factor), name="y"), {"x": values})
    diagnosis = product.diagnose({"x": values})
    (y,) = diagnosis.values
    assert y.fault is fault
    assert diagnosis.first_bad is (y if fault else None)


def test_what_follows_from_underflow_is_inaccurate():
    def function(x):
        return mb.mul(x=mb.square(x=x, name="sq"), y=np.float16(60000), name="y")

    x = np.full((1, 4), 1e-4, np.float16)
    diagnosis = model(function, {"x": x}).diagnose({"x": x})
    assert [value.fault for value in diagnosis.values] == [Fault.UNDERFLOW, Fault.INACCURATE]


def test_fp32_values_do_not_underflow():
    def function(x):
        wide = mb.cast(x=mb.square(x=x, name="sq"), dtype="fp32", name="wide")
        return mb.cast(x=wide, dtype="fp16", name="y")

    x = np.full((1, 4), 1e-4, np.float16)
    faults = {v.name: v.fault for v in model(function, {"x": x}).diagnose({"x": x}).values}
    assert faults["wide"] is Fault.INACCURATE


_NANS = np.full((1, 3), np.nan, np.float16)


@pytest.mark.parametrize("where", ["input", "constant"])
def test_nan_from_outside_is_a_fault_where_it_enters(where):
    def function(x):
        y = mb.add(x=x, y=_NANS if where == "constant" else np.float16(1), name="entered")
        return mb.mul(x=y, y=np.float16(2), name="passed")

    x = _NANS if where == "input" else np.ones_like(_NANS)
    diagnosis = model(function, {"x": x}).diagnose({"x": x})
    assert [value.fault for value in diagnosis.values] == [Fault.NAN_GIVEN, None]
    assert diagnosis.first_bad.name == "entered"
    for value in diagnosis.values:
        assert (value.nan, value.sqnr_db) == (3, np.inf)
        assert np.isnan(value.max_abs)
    assert "3 NaN, SQNR inf dB, max nan" in str(diagnosis)


def test_nan_of_both_runs_is_no_error_beside_it():
    def function(x):
        return mb.sqrt(x=mb.sub(x=x, y=np.float16(1), name="less"), name="y")

    x = np.array([0.0, 5.0, 17.0], np.float16)
    y = model(function, {"x": x}).diagnose({"x": x}).values[-1]
    assert (y.fault, y.nan, y.sqnr_db, y.max_abs) == (Fault.NAN, 1, np.inf, 4.0)


@pytest.mark.parametrize(
    ("values", "largest"),
    [([np.inf, -2.0], 2.0), ([np.inf, -np.inf], np.inf), ([np.nan, np.inf], np.nan)],
)
def test_the_largest_magnitude_is_finite_if_one_is(values, largest):
    x = np.array(values, np.float16)
    (y,) = model(lambda x: mb.abs(x=x), {"x": x}).diagnose({"x": x}).values
    np.testing.assert_equal(y.max_abs, largest)


def test_the_iteration_of_a_loop_is_named_and_fp32_takes_the_same_path():
    inputs = {"x": _X, "n": np.zeros(1, np.int32)}
    diagnosis = model(growing, inputs).diagnose(inputs)
    assert (diagnosis.first_bad.name, diagnosis.first_bad.turns) == ("grow", (1,))
    assert "turn 1:" in str(diagnosis.first_bad)
    assert [value.turns for value in diagnosis.values if value.name == "grow"] == [
        (turn,) for turn in range(5)
    ]
    assert len(diagnosis.worst(100)) == len({v.location for v in diagnosis.values})


def test_both_runs_take_the_same_path_if_rounding_changes_a_condition():
    def function(x):
        # 2049 rounds to 2048 in fp16, so fp32 would take the other branch.
        total = mb.reduce_sum(x=x, axes=[0], keep_dims=False, name="total")
        return mb.cond(
            pred=mb.greater(x=mb.add(x=total, y=np.float16(1)), y=np.float16(2048)),
            _true_fn=lambda: mb.mul(x=x, y=np.float16(2), name="large"),
            _false_fn=lambda: mb.add(x=x, y=np.float16(1), name="small"),
        )

    x = np.array([1024.0, 1024.0], np.float16)
    names = [value.name for value in model(function, {"x": x}).diagnose({"x": x}).values]
    assert "small" in names
    assert "large" not in names


def test_random_values_are_the_same_in_both_runs():
    def function(x):
        noise = mb.random_normal(shape=[4], mean=np.float16(0), stddev=np.float16(1), name="noise")
        return mb.add(x=x, y=noise)

    x = np.ones(4, np.float16)
    diagnosis = model(function, {"x": x}).diagnose({"x": x})
    assert diagnosis.first_bad is None
    assert min(value.sqnr_db for value in diagnosis.values) > 50


def test_states_are_diagnosed():
    traced = Model(state_program(), engine="openvino")
    state = traced.make_state()
    (name,) = state.snapshot()
    state.write(name, np.full((2, 3), 65000, np.float16))
    diagnosis = traced.diagnose({"x": np.full((2, 3), 1000, np.float16)}, state)
    assert diagnosis.first_bad.name == "total"
    np.testing.assert_array_equal(state.snapshot()[name], np.full((2, 3), 65000, np.float16))


def test_the_function_asked_for_is_diagnosed():
    program = build(rms_norm, {"x": _X})
    (function,) = program.functions.values()
    other = build(lambda x: mb.relu(x=x, name="y"), {"x": _X}).functions["main"]
    several = Program(9, {"norm": function, "plain": other}, "plain", {})
    assert Model(several, function_name="norm").diagnose({"x": _X}).first_bad.name == "sq"
    assert Model(several).diagnose({"x": _X}).first_bad is None


@pytest.mark.parametrize(
    ("expected", "actual", "ratio"),
    [
        ([1.0, 2.0], [1.0, 2.0], np.inf),
        ([np.inf, np.nan], [np.inf, np.nan], np.inf),
        ([1.0, np.inf], [1.0, 2.0], -np.inf),
        ([1.0, 2.0], [1.0, np.nan], -np.inf),
        ([0.0], [1.0], -np.inf),
        ([10.0, 0.0], [10.0, 1.0], 20.0),
        ([10.0, np.inf], [9.0, np.inf], 20.0),
        ([], [], np.inf),
    ],
)
def test_sqnr(expected, actual, ratio):
    signal, error = signal_and_error(
        *(torch.tensor(values, dtype=torch.float64) for values in (expected, actual))
    )
    assert ratio_db(signal, energy(error)) == pytest.approx(ratio)
