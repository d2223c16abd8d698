"""``MLModel`` of coremltools, predicting through our engines."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tolerances import ATOL_RTOL

from coreml_delegate import runtime
from coreml_delegate.errors import OptionError, UnsupportedOpError
from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.coremltools_patch import FrameworkError, array_to_picture
from coreml_delegate.runtime.mil.program import ColorSpace

with quiet_import():
    import coremltools as ct
    import coremltools.models.model as patched_module
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

ENGINES = ("openvino", "reference")
X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
W = np.arange(12, dtype=np.float32).reshape(4, 3)

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="coremltools has Core ML there")


def _convert(program: Any, **options: Any) -> Any:
    return ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        **options,
    )


def _loaded(converted: Any, **options: Any) -> Any:
    """A converted model, loaded by what serves coremltools now."""
    return ct.models.MLModel(converted.get_spec(), weights_dir=converted.weights_dir, **options)


def _linear(**options: Any) -> Any:
    return _loaded(_converted_linear(), **options)


@functools.cache
def _converted_linear() -> Any:
    @mb.program(input_specs=[mb.TensorSpec(X.shape, types.fp32)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.linear(x=x, weight=W, name="y")

    return _convert(program, skip_model_load=True)


def _accumulator() -> Any:
    return _loaded(_converted_accumulator())


@functools.cache
def _converted_accumulator() -> Any:
    class Accumulator(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total * 2

    with torch.no_grad():
        traced = torch.jit.trace(Accumulator().eval(), torch.zeros(3))
    return ct.convert(
        traced,
        inputs=[ct.TensorType(name="x", shape=(3,))],
        outputs=[ct.TensorType(name="y")],
        states=[ct.StateType(ct.TensorType(shape=(3,), dtype=np.float16), name="total")],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )


def _close(actual: np.ndarray, expected: np.ndarray, dtype: str = "fp32") -> None:
    atol, rtol = ATOL_RTOL[dtype]
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=rtol)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest):
    with runtime.patch_coremltools(request.param):
        yield request.param


def test_predicts_on_the_engine_asked_for(engine: str) -> None:
    model = _linear()
    assert model.__proxy__.model.engine_name == engine
    _close(model.predict({"x": X})["y"], X @ W.T)


@pytest.mark.parametrize("kind", ["list", "torch", "float64", "float16"])
def test_takes_what_coremltools_takes(engine: str, kind: str) -> None:
    make = {
        "list": lambda: X.tolist(),
        "torch": lambda: torch.from_numpy(X.copy()),
        "float64": lambda: X.astype(np.float64),
        "float16": lambda: X.astype(np.float16),
    }[kind]
    _close(_linear().predict({"x": make()})["y"], X @ W.T, "fp16" if kind == "float16" else "fp32")


def test_predicts_batches(engine: str) -> None:
    results = _linear().predict([{"x": X}, {"x": 2 * X}])
    assert [set(result) for result in results] == [{"y"}, {"y"}]
    for result, scale in zip(results, (1, 2), strict=True):
        _close(result["y"], scale * X @ W.T)


@pytest.mark.parametrize("unit", list(ct.ComputeUnit))
def test_accepts_every_compute_unit(unit: Any) -> None:
    with runtime.patch_coremltools("reference"):
        _close(_linear(compute_units=unit).predict({"x": X})["y"], X @ W.T)


def test_keeps_state_across_predictions(engine: str) -> None:
    model = _accumulator()
    state, other = model.make_state(), model.make_state()
    x = np.array([1, 2, 3], dtype=np.float32)
    _close(model.predict({"x": x}, state)["y"], 2 * x, "fp16")
    _close(model.predict({"x": x}, state)["y"], 4 * x, "fp16")
    _close(model.predict({"x": x}, other)["y"], 2 * x, "fp16")
    _close(state.read_state("total"), 2 * x, "fp16")


def test_writes_state(engine: str) -> None:
    model = _accumulator()
    state = model.make_state()
    state.write_state("total", np.full(3, 10, dtype=np.float32))
    _close(model.predict({"x": np.ones(3, dtype=np.float32)}, state)["y"], np.full(3, 22), "fp16")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("totals", np.zeros(3), "no such state: got 'totals', expected total"),
        ("total", np.zeros(4), r"state 'total' has another shape: got \(4,\), expected \(3,\)"),
        ("total", np.zeros(3, complex), "state 'total' has another dtype: got complex128"),
    ],
)
def test_rejects_state_that_does_not_fit(
    engine: str, name: str, value: np.ndarray, message: str
) -> None:
    state = _accumulator().make_state()
    with pytest.raises(RuntimeError, match=message):
        state.write_state(name, value)
    if name == "totals":
        with pytest.raises(RuntimeError, match=message):
            state.read_state(name)


def _scaled(factor: float) -> Any:
    @mb.program(input_specs=[mb.TensorSpec((3,), types.fp32)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.mul(x=x, y=np.float32(factor), name="y")

    return _convert(program)


def test_loads_the_function_asked_for(tmp_path: Path) -> None:
    description = ct.utils.MultiFunctionDescriptor()
    for name, factor in (("double", 2.0), ("triple", 3.0)):
        path = str(tmp_path / f"{name}.mlpackage")
        _scaled(factor).save(path)
        description.add_function(path, "main", name)
    description.default_function_name = "double"
    merged = str(tmp_path / "merged.mlpackage")
    ct.utils.save_multifunction(description, merged)
    x = np.ones(3, dtype=np.float32)
    with runtime.patch_coremltools():
        _close(ct.models.MLModel(merged).predict({"x": x})["y"], 2 * x)
        _close(ct.models.MLModel(merged, function_name="triple").predict({"x": x})["y"], 3 * x)


def test_converts_floats_to_declared_integers(engine: str) -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), types.int32)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.add(x=x, y=np.int32(1), name="y")

    model = _convert(program)
    result = model.predict({"x": np.array([1.0, -2.7, 3.9], dtype=np.float32)})["y"]
    np.testing.assert_array_equal(result, [2, -1, 4])
    extremes = np.array([-(2.0**31), 0, 2.0**31 - 128], dtype=np.float32)
    assert model.predict({"x": extremes})["y"][0] == -(2**31) + 1
    for beyond in (2.0**31, np.nan):
        with pytest.raises(RuntimeError, match="input 'x' has values beyond int32"):
            model.predict({"x": np.full(3, beyond, dtype=np.float32)})


def test_gives_rank_one_for_a_scalar(engine: str) -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), types.fp32)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.reduce_sum(x=x, axes=[0], keep_dims=False, name="y")

    assert _convert(program).predict({"x": np.ones(3, dtype=np.float32)})["y"].tolist() == [3.0]


def test_keeps_the_checks_of_coremltools(engine: str) -> None:
    model = _linear()
    with pytest.raises(KeyError, match='Provided key "z"'):
        model.predict({"z": X})
    with pytest.raises(TypeError, match="must be either a dict or list of dict"):
        model.predict(X)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": X[:, :2]}, r"input 'x' has the wrong size in dimension 1: got 2 .* expected 3 "),
        ({}, "input 'x' is missing"),
        ({"x": X.astype(complex)}, "input 'x' has the wrong dtype: got complex128, expected fp32"),
    ],
)
def test_rejects_inputs_that_do_not_fit(
    engine: str, inputs: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        _linear().predict(inputs)


def _pictures() -> tuple[Any, np.ndarray]:
    """A picture, and its pixels [H, W, C]."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return pytest.importorskip("PIL.Image").fromarray(pixels), pixels


@pytest.mark.parametrize("engine", ["reference", "openvino"])
@pytest.mark.parametrize("layout", ["RGB", "BGR"])
def test_pictures(engine: str, layout: str) -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((1, 3, 4, 5), types.fp32)], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        return mb.mul(x=x, y=np.float32([2.0, 1.0, -1.0]).reshape(1, 3, 1, 1), name="y")

    picture, pixels = _pictures()
    color = ct.colorlayout[layout]
    with runtime.patch_coremltools(engine):
        model = _convert(
            program, inputs=[ct.ImageType(name="x", shape=(1, 3, 4, 5), color_layout=color)]
        )
        (result,) = model.predict({"x": picture}).values()
        with pytest.raises(TypeError, match="mode=='RGB'"):
            model.predict({"x": picture.convert("L")})
        with pytest.raises(FrameworkError, match=r"'x'.* 6"):
            model.predict({"x": picture.resize((6, 4))})
    channels = pixels if layout == "RGB" else pixels[..., ::-1]
    expected = channels.astype(np.float32) * np.float32([2.0, 1.0, -1.0])
    np.testing.assert_array_equal(result, expected.transpose(2, 0, 1)[None])


def test_picture_outputs() -> None:
    """Values are cut to what a picture has, and rounded."""
    pytest.importorskip("PIL.Image")
    values = np.float32([[-3.0, 1.4], [1.6, 300.0]])
    whole = np.uint8([[0, 1], [2, 255]])
    gray = np.asarray(array_to_picture(values[None, None], ColorSpace.GRAYSCALE))
    np.testing.assert_array_equal(gray, whole)
    exact = np.asarray(array_to_picture(values[None, None], ColorSpace.GRAYSCALE_FLOAT16))
    np.testing.assert_array_equal(exact, values)
    channels = np.stack([values, values + 1.0, values * 0.0])
    for space, order in ((ColorSpace.RGB, slice(None)), (ColorSpace.BGR, slice(None, None, -1))):
        picture = np.asarray(array_to_picture(channels[None], space))
        np.testing.assert_array_equal(picture[..., order][..., 0], whole)


def test_gray_pictures() -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((1, 1, 4, 5), types.fp32)], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        return mb.add(x=x, y=1.0, name="y")

    picture, _ = _pictures()
    gray = picture.convert("L")
    with runtime.patch_coremltools():
        model = _convert(
            program,
            inputs=[
                ct.ImageType(name="x", shape=(1, 1, 4, 5), color_layout=ct.colorlayout.GRAYSCALE)
            ],
        )
        (result,) = model.predict({"x": gray}).values()
    np.testing.assert_array_equal(result[0, 0], np.asarray(gray) + 1.0)


def test_names_what_the_engine_lacks() -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), types.int32)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.resize(x=x, shape=[5], resized_dims=np.uint32(1), name="y")

    with runtime.patch_coremltools("openvino"):
        with pytest.warns(RuntimeWarning, match="the openvino engine cannot run function 'main'"):
            model = _convert(program)
        with pytest.raises(FrameworkError, match="interpolation of integers") as caught:
            model.predict({"x": np.ones(3, dtype=np.int32)})
    assert isinstance(caught.value.__cause__, UnsupportedOpError)


def test_a_model_that_is_not_loaded_does_not_predict(engine: str) -> None:
    model = _linear(skip_model_load=True)
    assert model.__proxy__ is None
    with pytest.raises(Exception, match="Cannot make predictions"):
        model.predict({"x": X})


def test_a_stateless_model_has_no_state(engine: str) -> None:
    with pytest.raises(RuntimeError, match="function has no state: got 'main'"):
        _linear().make_state()


def test_measures_load_and_prediction(engine: str) -> None:
    model = _linear()
    assert model.load_duration_in_nano_seconds > 0
    assert model.last_predict_duration_in_nano_seconds is None
    model.predict([{"x": X}, {"x": X}])
    assert model.last_predict_duration_in_nano_seconds > 0


def test_says_what_only_core_ml_has(engine: str) -> None:
    model = _linear()
    with pytest.raises(RuntimeError, match="compute devices exist only where Core ML"):
        ct.models.MLModel.get_available_compute_devices()
    for ask in (
        model.get_compiled_model_path,
        lambda: patched_module.MLModelAsset.from_path("m.mlmodelc"),
        lambda: patched_module.MLModelAsset.from_memory(b""),
    ):
        with pytest.raises(RuntimeError, match="compiled models"):
            ask()


def _patched() -> dict[str, Any]:
    return {n: vars(patched_module)[n] for n in ("_MLModelProxy", "_is_macos", "_macos_version")}


def test_is_undone_without_trace() -> None:
    before = _patched()
    patch = runtime.patch_coremltools()
    model = _linear()
    patch.undo()
    patch.undo()
    assert _patched() == before
    _close(model.predict({"x": X})["y"], X @ W.T)  # loaded under the patch
    assert _linear().__proxy__ is None


def test_is_undone_by_an_exception() -> None:
    before = _patched()
    with pytest.raises(ZeroDivisionError), runtime.patch_coremltools():
        raise ZeroDivisionError
    assert _patched() == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_may_be_nested_and_undone_in_any_order(order: tuple[int, ...]) -> None:
    before = _patched()
    engines = ["reference", "openvino", "reference"]
    patches = [runtime.patch_coremltools(engine) for engine in engines]
    active = dict(enumerate(engines))
    for index in order:
        assert vars(patched_module)["_MLModelProxy"].engine == active[max(active)]
        patches[index].undo()
        del active[index]
    assert _patched() == before


def test_the_context_may_be_entered_again() -> None:
    patch = runtime.patch_coremltools("reference")
    for _ in range(2):
        with patch:
            assert vars(patched_module)["_MLModelProxy"].engine == "reference"
        assert vars(patched_module)["_MLModelProxy"] is None


def test_does_nothing_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _patched()
    monkeypatch.setattr(machine, "has_core_ml", lambda: True)
    with runtime.patch_coremltools():
        assert _patched() == before
    assert _patched() == before


def test_rejects_an_unknown_engine() -> None:
    before = _patched()
    with pytest.raises(OptionError, match=r"unknown engine: got 'ane', expected auto \| coreml"):
        runtime.patch_coremltools("ane")
    assert _patched() == before
