"""Flexible inputs: one static graph for each enumerated shape, one dynamic graph for ranges."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.mil import ct

from coreml_delegate.errors import InputError
from coreml_delegate.formats.mlpackage import map_folder
from coreml_delegate.runtime.engines.input_shapes import check_shape, smallest_shape
from coreml_delegate.runtime.engines.openvino import translate
from coreml_delegate.runtime.engines.openvino.session import static_graphs
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, TensorType
from coreml_delegate.runtime.model import Model

ENGINES = ("openvino", "reference")


class _Softmax(torch.nn.Module):
    def forward(self, x, y):
        return torch.cat([torch.softmax(x, -1), torch.softmax(y, -1)])


def _softmax(shape):
    """Softmax of two tensors of one shape, joined."""
    example = torch.zeros(3, 4)
    converted = ct.convert(
        torch.jit.trace(_Softmax(), (example, example)),
        inputs=[ct.TensorType(name=name, shape=shape) for name in ("x", "y")],
        outputs=[ct.TensorType(name="z")],
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "softmax.mlpackage")
        converted.save(str(path))
        return {name: bytes(data) for name, data in map_folder(path).items()}


@pytest.fixture(scope="module")
def enumerated():
    return _softmax(ct.EnumeratedShapes([list(shape) for shape in SHAPES]))


SHAPES = ((1, 4), (3, 4), (5, 4))


@pytest.fixture
def translations(monkeypatch):
    """Shapes of the functions translated."""
    shapes: list[tuple[int | None, ...]] = []
    original = translate.translate

    def spy(function, **options):
        shapes.append(function.params[0].type.shape)
        return original(function, **options)

    monkeypatch.setattr(translate, "translate", spy)
    return shapes


def _inputs(shape, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name in ("x", "y")}


def _check(model, shape, seed=0):
    inputs = _inputs(shape, seed)
    (actual,) = model.predict(inputs).values()
    powers = [np.exp(inputs[name]) for name in ("x", "y")]
    expected = np.concatenate([p / p.sum(-1, keepdims=True) for p in powers])
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_one_static_graph_for_each_enumerated_shape(enumerated, translations):
    model = Model.from_files(enumerated, engine="openvino")
    assert translations == [SHAPES[0]]  # what cannot be translated is known at once
    for shape in (*SHAPES, *SHAPES[::-1]):
        _check(model, shape)
    assert translations == list(SHAPES)


def test_graphs_used_least_recently_are_dropped(enumerated, translations, monkeypatch):
    monkeypatch.setattr(static_graphs, "_MAX_GRAPHS", 2)
    model = Model.from_files(enumerated, engine="openvino")
    for number in (1, 0, 2, 0, 1):
        _check(model, SHAPES[number])
    assert translations == [SHAPES[number] for number in (0, 1, 2, 1)]


def test_threads_that_bring_a_new_shape_share_its_graph(enumerated, translations):
    model = Model.from_files(enumerated, engine="openvino")
    barrier = threading.Barrier(4)

    def run(seed):
        barrier.wait()
        _check(model, SHAPES[1], seed)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert translations == [SHAPES[0], SHAPES[1]]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shape_that_is_not_enumerated_is_refused(enumerated, engine):
    model = Model.from_files(enumerated, engine=engine)
    message = (
        r"input 'x' has a shape that is not enumerated: got \[2, 4\], "
        r"expected \[1, 4\] \| \[3, 4\] \| \[5, 4\]"
    )
    with pytest.raises(InputError, match=message):
        model.predict(_inputs((2, 4)))
    if engine == "openvino":  # the engine itself refuses it too, for callers that check nothing
        with pytest.raises(InputError, match=message):
            model.compiled(_inputs((2, 4)), None)


def test_ranges_run_on_one_graph(translations):
    model = Model.from_files(_softmax((ct.RangeDim(1, 9, 3), 4)), engine="openvino")
    for rows in (1, 7, 3):
        _check(model, (rows, 4))
    assert translations == [(None, 4)]


_FLOATS = TensorType(DType.FP32, (1, None, 3))


@pytest.mark.parametrize(
    ("feature", "shape", "message"),
    [
        (
            Feature("x", _FLOATS, bounds=((1, 1), (2, 8), (3, 3))),
            (1, 9, 3),
            "input 'x' has the wrong size in dimension 1: got 9 (shape [1, 9, 3]), "
            "expected 2..8 (shape [1, 2..8, 3])",
        ),
        (
            Feature("x", _FLOATS, bounds=((1, 1), (2, None), (3, 3))),
            (1, 1, 3),
            "input 'x' has the wrong size in dimension 1: got 1 (shape [1, 1, 3]), "
            "expected 2.. (shape [1, 2.., 3])",
        ),
        (
            Feature("x", TensorType(DType.FP32, (2, 3))),
            (2, 4),
            "input 'x' has the wrong size in dimension 1: got 4 (shape [2, 4]), "
            "expected 3 (shape [2, 3])",
        ),
        (
            Feature("x", TensorType(DType.FP32, (2, 3))),
            (2, 3, 1),
            "input 'x' has the wrong rank: got 3 (shape [2, 3, 1]), expected 2 (shape [2, 3])",
        ),
    ],
)
def test_a_wrong_shape_is_refused(feature, shape, message):
    with pytest.raises(InputError) as error:
        check_shape(feature, shape)
    assert str(error.value) == message


def test_right_shapes_pass():
    check_shape(Feature("x", TensorType(DType.FP32, None)), (1, 2, 3, 4))
    check_shape(Feature("x", _FLOATS), (1, 1000, 3))
    check_shape(Feature("x", _FLOATS, bounds=((1, 1), (2, 8), (3, 3))), (1, 8, 3))


def test_an_input_left_out_has_the_first_or_smallest_shape():
    assert smallest_shape(Feature("x", _FLOATS, shapes=((1, 5, 3), (1, 2, 3)))) == (1, 5, 3)
    assert smallest_shape(Feature("x", _FLOATS, bounds=((1, 1), (2, 8), (3, 3)))) == (1, 2, 3)
    assert smallest_shape(Feature("x", _FLOATS)) == (1, 1, 3)
