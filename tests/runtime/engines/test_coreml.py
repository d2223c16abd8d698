"""The coreml engine against a strict stand-in for coremltools' library, and what that refuses."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support import core_ml
from support.command import leftovers
from support.mil import Opset, builder_program, ct, mb, types
from support.packages import long_accumulator, long_chain_of_rows, package_files

from coreml_delegate.errors import (
    EngineUnavailableError,
    ExecutionError,
    InputError,
    OptionError,
    UnsupportedOpError,
)
from coreml_delegate.formats.files import write_folder
from coreml_delegate.runtime import EngineOptions, load_mlpackage
from coreml_delegate.runtime.engines.coreml import COREML
from coreml_delegate.runtime.engines.selection import engines_here
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, TensorType
from coreml_delegate.runtime.model import Model

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def loaded():
    with core_ml.strict() as found:
        yield found


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _both(x):
    return mb.tanh(x=x, name="b"), mb.exp(x=x, name="a")


def _files(function=_both, opset=Opset.iOS18, **inputs):
    return package_files(builder_program(function, inputs or {"x": X}, opset), opset)


def _model(files=None, **options):
    return Model.from_files(files or _files(), engine="coreml", options=EngineOptions(**options))


def _several(folder):
    """A package of the functions ``double``, the default, and ``triple``."""
    description = ct.utils.MultiFunctionDescriptor()
    for name, factor in (("double", 2), ("triple", 3)):
        files = _files(
            lambda x, factor=factor: mb.mul(x=x, y=np.full(64, factor, np.float32)),
            x=np.zeros(64, np.float32),
        )
        path = folder / f"{name}.mlpackage"
        write_folder(files, path)
        description.add_function(str(path), "main", name)
    description.default_function_name = "double"
    merged = folder / "merged.mlpackage"
    ct.utils.save_multifunction(description, str(merged))
    return merged


# What the stand-in refuses


def _proxied(files, folder, **options):
    path = folder / "a.mlpackage"
    write_folder(files, path)
    return ct.models.MLModel(str(path), **options)


def _read_only():
    array = X.copy()
    array.flags.writeable = False
    return array


_REFUSED_ARRAYS = {
    "int64": (lambda: X.astype(np.int64), "not convertible"),
    "bool": (lambda: X > 0, "not convertible"),
    "uint8": (lambda: X.astype(np.uint8), "not convertible"),
    "read-only": (_read_only, "not convertible"),
    "rank 0": (lambda: np.ones((), np.float32), "not convertible"),
    "float64": (lambda: X.astype(np.float64), "of another type than float64"),
    "int32": (lambda: X.astype(np.int32), "of another type than int32"),
    "transposed": (lambda: np.ascontiguousarray(X.T).T, "Strides"),
    "reversed": (lambda: X[::-1], "Strides"),
    "with steps": (lambda: np.zeros((2, 6), np.float32)[:, ::2], "Strides"),
    "rank 1": (lambda: X.reshape(-1).copy(), "does not match"),
    "another shape": (lambda: X[:1], "does not match"),
    "empty": (lambda: X[:0].copy(), "does not match"),
}


@pytest.mark.parametrize("kind", _REFUSED_ARRAYS)
def test_the_stand_in_refuses_arrays(kind, loaded, tmp_path):
    make, message = _REFUSED_ARRAYS[kind]
    model = _proxied(_files(), tmp_path)
    assert set(model.predict({"x": X.copy()})) == {"a", "b"}
    with pytest.raises(RuntimeError, match=message):
        model.predict({"x": make()})


def test_the_stand_in_refuses_half_precision_arrays(loaded, tmp_path):
    # Before them, MLModel itself makes single precision of these.
    proxy = _proxied(_files(), tmp_path).__proxy__
    with pytest.raises(RuntimeError, match="not convertible"):
        proxy.predict({"x": X.astype(np.float16)}, None)


def test_the_stand_in_refuses_missing_features_and_unknown_ones(loaded, tmp_path):
    model = _proxied(_files(), tmp_path)
    with pytest.raises(RuntimeError, match="Feature x is required but not specified"):
        model.predict({})
    with pytest.raises(KeyError, match="does not match any of the model input name"):
        model.predict({"x": X.copy(), "y": X.copy()})


LISTED = ct.EnumeratedShapes(shapes=[[1, 4], [3, 4]], default=[1, 4])
RANGE = ct.Shape((ct.RangeDim(1, 9), 4))


@functools.cache
def _flexible(shapes):
    """The path of a package without a weight: its folder of weights is empty."""

    @mb.program(
        input_specs=[mb.TensorSpec((ct.RangeDim(1, 9).symbol, 4))],
        opset_version=ct.target.iOS18,
    )
    def program(x):
        return mb.exp(x=x, name="y")

    return ct.convert(
        program,
        inputs=[ct.TensorType("x", shapes)],
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    ).package_path


def test_the_stand_in_refuses_shapes_that_are_not_listed(loaded):
    model = ct.models.MLModel(_flexible(LISTED))
    for rows in (1, 3):
        assert model.predict({"x": np.ones((rows, 4), np.float32)})["y"].shape == (rows, 4)
    with pytest.raises(RuntimeError, match="does not match"):
        model.predict({"x": np.ones((2, 4), np.float32)})


def test_the_stand_in_refuses_sizes_beyond_their_range(loaded):
    model = ct.models.MLModel(_flexible(RANGE))
    assert model.predict({"x": np.ones((9, 4), np.float32)})["y"].shape == (9, 4)
    with pytest.raises(RuntimeError, match="does not match"):
        model.predict({"x": np.ones((10, 4), np.float32)})


def test_the_stand_in_refuses_states_of_other_models(loaded, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = _proxied(long_accumulator(), tmp_path), _proxied(_files(), tmp_path / "other")
    state, x = first.make_state(), np.ones(3, np.float32)
    for model, data, held in (
        (first, {"x": x}, None),
        (first, {"x": x}, second.make_state()),
        (second, {"x": X.copy()}, state),
    ):
        with pytest.raises(RuntimeError, match="not one of this model"):
            model.predict(data, held)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        first.__proxy__.predict({"x": x}, state)  # the MLState, not what it holds
    with pytest.raises(TypeError, match="incompatible function arguments"):
        first.__proxy__.predict([("x", x)], None)
    assert set(first.predict({"x": x}, state)) == {"before", "after"}


def test_the_stand_in_refuses_what_states_do_not_take(loaded, tmp_path):
    state = _proxied(long_accumulator(), tmp_path).make_state()
    name = "total"
    assert state.read_state(name).dtype == np.float32
    for value in (np.ones(3, np.float16), np.ones(3, np.int64), 1.0):
        with pytest.raises(RuntimeError, match="not convertible"):
            state.write_state(name, value)
    with pytest.raises(RuntimeError, match="Cannot transfer"):
        state.write_state(name, np.ones(4, np.float32))
    for use in (state.read_state, lambda n: state.write_state(n, np.ones(3, np.float32))):
        with pytest.raises(RuntimeError, match="No state named other"):
            use("other")


def test_the_stand_in_refuses_unknown_functions_and_old_systems(loaded, tmp_path):
    path = str(_several(tmp_path))
    assert ct.models.MLModel(path, function_name="triple").__proxy__ is not None
    with (
        pytest.warns(RuntimeWarning, match="No function other"),
        pytest.raises(ValueError, match="not found in the model"),
    ):
        ct.models.MLModel(path, function_name="other")
    with core_ml.strict(macos=(14, 0)):
        with pytest.warns(RuntimeWarning, match="can only be set on macOS >= 15"):
            assert ct.models.MLModel(path, function_name="triple").__proxy__ is None
        model = _proxied(long_accumulator(), tmp_path)
        with pytest.raises(RuntimeError, match="Stateful model is only available"):
            model.__proxy__.newState()


def test_the_stand_in_refuses_what_is_no_package(loaded, tmp_path):
    (tmp_path / "a.mlpackage").mkdir()
    for path in (tmp_path / "a.mlpackage", tmp_path / "b"):
        with pytest.raises(RuntimeError, match="Error compiling model"):
            core_ml.Proxy(str(path), "ALL", "", {})
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        core_ml.Proxy(str(tmp_path), "ALL", None, {})
    with pytest.raises(AssertionError):
        core_ml.Proxy(str(tmp_path), "cpu_only", "", {})
    damaged = tmp_path / "damaged.mlpackage"
    write_folder(_files() | {"Data/com.apple.CoreML/model.mlmodel": b"damaged"}, damaged)
    with pytest.raises(RuntimeError, match=r"Error compiling model: .*does not parse"):
        core_ml.Proxy(str(damaged), "ALL", "", {})


# Where the engine is


def test_it_is_unavailable_where_core_ml_is_not():
    assert "coreml" not in engines_here()
    with pytest.raises(EngineUnavailableError, match=r"got Core ML is a part of macOS, expected"):
        _model()
    assert Model.from_files(_files()).engine_name == "openvino"


def test_it_is_unavailable_without_the_library_of_coremltools(loaded, monkeypatch):
    assert COREML.unavailable_reason() is None
    monkeypatch.setattr(core_ml.client, "_MLModelProxy", None)
    assert "libcoremlpython" in str(COREML.unavailable_reason())
    model = Model.from_files(_files())
    assert model.engine_name == "openvino"
    assert "libcoremlpython" in model.rejected_engines["coreml"][0]


def test_it_is_the_default_where_core_ml_is(loaded):
    assert list(engines_here()) == ["coreml", "openvino", "reference"]
    model = Model.from_files(_files())
    assert (model.engine_name, model.rejected_engines) == ("coreml", {})


# What passes


def test_outputs_come_in_order_and_in_the_dtypes_of_the_program(loaded):
    def function(x, h, i):
        return (
            mb.add(x=h, y=np.float16(1), name="b"),
            mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False, name="d"),
            mb.add(x=i, y=np.int32(1), name="a"),
            mb.cast(x=mb.greater(x=x, y=np.float32(0)), dtype="int32", name="c"),
        )

    inputs = {"x": X, "h": X.astype(np.float16), "i": np.arange(3, dtype=np.int32)}
    files = _files(function, **inputs)
    expected = Model.from_files(files, engine="reference").predict(inputs)
    actual = _model(files).predict(inputs)
    assert list(actual) == ["b", "d", "a", "c"] == list(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        assert actual[name].flags.c_contiguous
        assert actual[name].flags.writeable
        np.testing.assert_array_equal(actual[name], array)
    assert actual["b"].dtype == np.float16


_GIVEN = {
    "float64": lambda: X.astype(np.float64),
    "float16": lambda: X.astype(np.float16),
    "read-only": _read_only,
    "broadcast": lambda: np.broadcast_to(np.float32(1), X.shape),
    "transposed": lambda: np.ascontiguousarray(X.T).T,
    "reversed": lambda: X[::-1],
    "with steps": lambda: np.repeat(X, 2, axis=1)[:, ::2],
}


@pytest.mark.parametrize("kind", _GIVEN)
def test_inputs_are_converted(kind, loaded):
    given = _GIVEN[kind]()
    before = given.copy()
    actual = _model().predict({"x": given})
    for name, function in (("a", np.exp), ("b", np.tanh)):
        np.testing.assert_allclose(actual[name], function(given.astype(np.float32)), rtol=1e-6)
    np.testing.assert_array_equal(given, before)


def test_integers_and_truths_are_converted(loaded):
    files = _files(lambda i: mb.mul(x=i, y=np.int32(2), name="y"), i=np.zeros(3, np.int32))
    model = _model(files)
    for given in (np.array([0, 1, 1]) > 0, np.array([0, 1, 1]), np.array([0, 1, 1], np.uint8)):
        np.testing.assert_array_equal(model.predict({"i": given})["y"], [0, 2, 2])
    with pytest.raises(InputError, match="values beyond int32"):
        model.predict({"i": np.array([0, 1, 1 << 40])})


def test_scalars_and_rows_of_one_pass(loaded):
    model = _model(_files(lambda x: mb.exp(x=x, name="y"), x=np.zeros((1, 5), np.float32)))
    # Row-major, though the stride of its only row is another.
    rows = np.lib.stride_tricks.as_strided(np.ones(5, np.float32), (1, 5), (400, 4))
    assert rows.flags.c_contiguous
    np.testing.assert_allclose(model.predict({"x": rows})["y"], np.exp(rows))
    (single,) = (
        _model(_files(lambda x: mb.exp(x=x), x=np.zeros(1, np.float32)))
        .predict({"x": np.float32(1)})
        .values()
    )
    np.testing.assert_allclose(single, [np.e], rtol=1e-6)


def test_an_empty_input_is_refused(loaded):
    function = _model(long_chain_of_rows())
    with pytest.raises(InputError, match="'x' is empty: got shape"):
        function.compiled({"x": np.ones((0, 4), np.float32)}, None)


def test_enumerated_shapes_and_ranges(loaded):
    listed = load_mlpackage(_flexible(LISTED), engine="coreml")
    rows = load_mlpackage(_flexible(RANGE), engine="coreml")
    listed.prepare_shapes()
    for count in (3, 1):
        assert listed.predict({"x": np.ones((count, 4))})["y"].shape == (count, 4)
        assert rows.predict({"x": np.ones((count, 4))})["y"].shape == (count, 4)
    with pytest.raises(InputError, match="not enumerated"):
        listed.predict({"x": np.ones((2, 4))})


# States


def test_states_are_read_written_and_reset(loaded):
    model = _model(long_accumulator())
    state, other = model.make_state(), model.make_state()
    assert state is not None
    assert other is not None
    x = np.array([0.5, 1.0, -2.0], np.float32)
    for turn in range(3):
        results = model.predict({"x": x}, state)
        np.testing.assert_array_equal(results["before"], turn * x)
        np.testing.assert_array_equal(results["after"], (turn + 1) * x)
        assert results["after"].dtype == np.float16
    held = state.snapshot()
    assert {name: (a.dtype, a.shape) for name, a in held.items()} == {
        "total": (np.dtype(np.float16), (3,))
    }
    np.testing.assert_array_equal(held["total"], 3 * x)
    np.testing.assert_array_equal(other.snapshot()["total"], 0)
    other.restore(held)
    np.testing.assert_array_equal(model.predict({"x": x}, other)["before"], 3 * x)
    state.reset()
    np.testing.assert_array_equal(model.predict({"x": x}, state)["before"], 0 * x)
    state.write("total", np.full(3, 7, np.float64))
    np.testing.assert_array_equal(model.predict({"x": x}, state)["before"], np.full(3, 7))


def test_states_that_do_not_fit_are_refused(loaded):
    model = _model(long_accumulator())
    state = model.make_state()
    assert state is not None
    for use, message in (
        (lambda: state.write("other", np.ones(3, np.float16)), "no such state"),
        (lambda: state.write("total", np.ones(4, np.float16)), "another shape"),
        (lambda: state.write("total", np.ones(3, complex)), "another dtype"),
        (lambda: state.restore({}), "lacks states"),
        (lambda: model.predict({"x": np.ones(3)}), "do not fit: got no state"),
        (lambda: _model().predict({"x": X}, state), "expected no state"),
        (lambda: _model(long_accumulator()).predict({"x": np.ones(3)}, state), "do not fit: got"),
    ):
        with pytest.raises(InputError, match=message):
            use()
    assert _model().make_state() is None


def test_a_trace_begins_with_the_state(loaded):
    model = _model(long_accumulator())
    state = model.make_state()
    model.predict({"x": np.ones(3)}, state)
    traced = model.trace({"x": np.ones(3)}, lambda value: None, state)
    np.testing.assert_array_equal(traced["before"], np.ones(3))
    np.testing.assert_array_equal(state.snapshot()["total"], np.ones(3))


# Functions, compute units, packages


def test_functions_have_names_where_there_are_several(loaded, tmp_path):
    path = _several(tmp_path)
    for name, factor in (("triple", 3), (None, 2)):
        model = load_mlpackage(path, function_name=name, engine="coreml")
        (result,) = model.predict({"x": np.ones(64)}).values()
        assert set(result.tolist()) == {factor}
    _model()
    assert loaded.function_names == ["triple", "double", ""]


@pytest.mark.parametrize("unit", ["all", "cpu_and_gpu", "cpu_and_ne", "cpu_only"])
def test_the_compute_unit_is_passed(unit, loaded):
    _model(compute_unit=unit)
    assert loaded.compute_units == [unit.upper()]
    _model()
    assert loaded.compute_units[1:] == ["ALL"]


def test_an_unknown_compute_unit_is_refused():
    with pytest.raises(OptionError, match=r"unknown compute unit: got 'ane', expected all \| cpu"):
        EngineOptions(compute_unit="ane")


def test_functions_of_a_source_share_a_folder_that_is_removed(loaded, temporary):
    path = _several(temporary)
    before = set(temporary.iterdir())
    files = {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }
    models = [
        Model.from_files(files, function_name=name, engine="coreml")
        for name in ("double", "triple")
    ]
    (package,) = set(loaded.paths)
    (folder,) = set(temporary.iterdir()) - before
    assert package.parent == folder
    assert {f.relative_to(package).as_posix() for f in package.rglob("*") if f.is_file()} == set(
        files
    )
    del models[0]
    gc.collect()
    assert folder.exists()
    models.clear()
    gc.collect()
    assert set(temporary.iterdir()) == before


@pytest.mark.slow  # it imports everything again
def test_nothing_is_left_by_a_process_that_ends(temporary):
    program = (
        "import sys\n"
        "from support import core_ml\n"
        "from support.packages import long_accumulator\n"
        "from coreml_delegate.runtime.model import Model\n"
        "with core_ml.strict() as loaded:\n"
        "    model = Model.from_files(long_accumulator(), engine='coreml')\n"
        "    assert loaded.paths[0].exists()\n"
        "    print(loaded.paths[0])\n"
        "    sys.exit(3)\n"
    )
    support = str(Path(core_ml.__file__).parents[1])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": support}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 3, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(temporary)
    assert not leftovers(temporary)


def test_nothing_is_left_by_a_refusal(loaded, temporary):
    with (
        core_ml.strict(newest=8),
        pytest.raises(UnsupportedOpError, match=r"above 8, the newest that"),
    ):
        _model()
    gc.collect()
    assert not list(temporary.iterdir())


def test_nothing_is_left_by_a_full_disk(loaded, temporary, monkeypatch):
    def fail(files, destination, **options):
        Path(destination).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coreml_delegate.runtime.engines.coreml.write_folder", fail)
    with pytest.raises(OSError, match="No space left") as failure:
        _model()
    assert not list(temporary.iterdir())  # while the error is still there, with all its frames
    assert failure.tb is not None


# What Core ML does not give


def test_what_core_ml_does_not_load_runs_on_the_next_engine(caplog):
    with core_ml.strict(newest=8):
        model = Model.from_files(_files())
        assert model.engine_name == "openvino"
        assert "above 8" in model.rejected_engines["coreml"][0]
        assert "does not run on the coreml engine: its specification version" in caplog.text
    message = "Core ML makes no state: got State functionality"
    with core_ml.strict(macos=(14, 0)), pytest.raises(ExecutionError, match=message):
        _model(long_accumulator()).make_state()


def test_a_model_that_core_ml_refuses_is_one_clear_error(loaded, monkeypatch, recwarn):
    def refuse(self, *args):
        raise RuntimeError("{\n    NSLocalizedDescription = no;\n}")

    monkeypatch.setattr(core_ml.client._MLModelProxy, "__init__", refuse)
    with pytest.raises(UnsupportedOpError, match=r"the coreml engine cannot run function 'main'"):
        _model()
    assert not recwarn.list


def test_a_call_that_core_ml_refuses_is_one_clear_error(loaded, monkeypatch):
    def refuse(self, *args):
        raise RuntimeError("{\n    NSLocalizedDescription = no;\n}")

    model = _model()
    monkeypatch.setattr(core_ml.client._MLModelProxy, "predict", refuse)
    with pytest.raises(
        ExecutionError, match=r"fails to run the program: got { NSLocalizedDescription = no; }$"
    ):
        model.predict({"x": X})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "precision='bf16'"),
        ({"exact_nan": True}, "exact_nan=True"),
        ({"dynamic_quantization": True}, "dynamic_quantization=True"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options, message, loaded):
    with pytest.raises(OptionError, match=message):
        _model(**options)
    if "precision" not in options:
        assert Model.from_files(_files(), options=EngineOptions(**options)).engine_name == (
            "openvino"
        )


def test_the_whole_is_timed_and_no_op(loaded):
    model = _model(profiling=True)
    outputs, (kernel,) = model.compiled.profile({"x": X}, None)
    assert set(outputs) == {"a", "b"}
    assert kernel.ops == ()
    assert kernel.nanoseconds > 0
    assert kernel.kernel == "Core ML"


def test_values_inside_are_refused(loaded):
    with pytest.raises(UnsupportedOpError, match=r"not the values inside\. Use engine='openvino'"):
        _model().with_outputs([Feature("a", TensorType(DType.FP32, (2, 3)))])


@functools.cache
def _of_an_image():
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 4, 4), dtype=types.fp32)])
    def program(x):
        return mb.relu(x=x, name="y")

    return ct.convert(
        program,
        inputs=[ct.ImageType("x", (1, 3, 4, 4))],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    ).package_path


def test_images_are_refused(loaded):
    with pytest.raises(UnsupportedOpError, match="'x' is an image"):
        load_mlpackage(_of_an_image(), engine="coreml")
    assert load_mlpackage(_of_an_image()).engine_name == "openvino"


def test_the_stand_in_refuses_arrays_for_images(loaded):
    proxy = ct.models.MLModel(_of_an_image()).__proxy__
    with pytest.raises(RuntimeError, match="Feature x is an image"):
        proxy.predict({"x": np.ones((1, 3, 4, 4), np.float32)}, None)


def test_calls_are_made_in_python(loaded):
    model = _model()
    assert model.native_obstacle() == "Core ML is called in Python"
    assert model.native_call(["x"], ["a", "b"], None) is None
    assert model.native_program(["x"], ["a", "b"]) is None
