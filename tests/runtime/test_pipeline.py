"""Classifiers, and pipelines of ML Programs and non-maximum suppression."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.mil import ct, mb, types
from support.tolerances import ATOL_RTOL

from coreml_delegate import runtime
from coreml_delegate.errors import BlobFormatError, InputError, ProgramError
from coreml_delegate.runtime.pipeline import Pipeline, Suppression

ENGINES = ("openvino", "reference")
SIZE = (1, 3, 4, 5)
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
LABELS: dict[str, list[Any]] = {"text": ["cat", "dog", "eel"], "integers": [7, 2**40, -3]}

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="coremltools has Core ML there")


def _convert(function: Any, *shape: int, **options: Any) -> Any:
    """An fp32 model of a builder function on ``x``."""
    program = mb.program(
        input_specs=[mb.TensorSpec(shape, types.fp32)], opset_version=ct.target.iOS17
    )(function)
    return ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        **options,
    )


@functools.cache
def _classifier(labels: str, layout: str = "RGB") -> Any:
    """Softmax of the scaled means of the three channels of an image."""

    def program(x: Any) -> Any:
        means = mb.reduce_mean(x=x, axes=[2, 3], keep_dims=False)
        return mb.softmax(x=mb.mul(x=means, y=np.float32(0.1)), name="scores")

    color = ct.colorlayout[layout]
    return _convert(
        program,
        *SIZE,
        inputs=[ct.ImageType("x", SIZE, color_layout=color)],
        classifier_config=ct.ClassifierConfig(LABELS[labels], predicted_feature_name="kind"),
    )


def _probabilities(pixels: np.ndarray = PIXELS) -> np.ndarray:
    channels = torch.from_numpy(pixels.astype(np.float32)).mean((0, 1))
    return (channels * 0.1).softmax(0).numpy()


def _check_classes(result: dict[str, Any], labels: list[Any], expected: np.ndarray) -> None:
    assert set(result) == {"kind", "kind_probs"}
    assert result["kind"] == labels[int(expected.argmax())]
    assert list(result["kind_probs"]) == labels
    atol, rtol = ATOL_RTOL["fp32"]
    np.testing.assert_allclose(list(result["kind_probs"].values()), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("labels", LABELS)
def test_classifiers(engine: str, labels: str) -> None:
    converted = _classifier(labels)
    with runtime.patch_coremltools(engine):
        model = ct.models.MLModel(converted.get_spec(), weights_dir=converted.weights_dir)
        _check_classes(model.predict({"x": PICTURE}), LABELS[labels], _probabilities())
    loaded = runtime.load_mlpackage(converted.package_path, engine=engine)
    _check_classes(loaded.predict({"x": PICTURE}), LABELS[labels], _probabilities())
    flipped = PIXELS[..., ::-1].astype(np.float32).transpose(2, 0, 1)[None]
    _check_classes(
        loaded.predict({"x": flipped}), LABELS[labels], _probabilities(PIXELS[..., ::-1])
    )


def test_probabilities_that_are_used_elsewhere_too() -> None:
    """The scores are an input of another op, and an output of their own."""
    spec = _classifier("text").get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    classify = block.operations[-1]
    (bound,) = classify.inputs["probabilities"].arguments
    block.outputs.append(bound.name)
    feature = spec.description.output.add()
    feature.name = bound.name
    feature.type.multiArrayType.dataType = 65568
    with runtime.patch_coremltools("reference"):
        model = ct.models.MLModel(spec, weights_dir=_classifier("text").weights_dir)
        result = model.predict({"x": PICTURE})
    scores = result.pop(bound.name)
    _check_classes(result, LABELS["text"], scores[0])


def test_classifiers_of_other_labels_than_probabilities_are_refused() -> None:
    spec = _classifier("text").get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    (classes,) = block.operations[-1].inputs["classes"].arguments
    del classes.value.immediateValue.list.values[-1]
    with runtime.patch_coremltools(), pytest.warns(RuntimeWarning, match="2 labels, expected one"):
        ct.models.MLModel(spec, weights_dir=_classifier("text").weights_dir)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PICTURE.resize((6, 4)), r"has another size: got 6 x 4 pixels, expected 5 x 4 pixels"),
        (
            PICTURE.convert("L"),
            r"has another mode: got L, expected RGB\. Pass image\.convert\('RGB",
        ),
        (PIXELS, r"has the wrong rank: got 3 \(shape \[4, 5, 3\]\), expected 4"),
    ],
    ids=["size", "mode", "array"],
)
def test_pictures_that_do_not_fit(value: Any, message: str) -> None:
    model = runtime.load_mlpackage(_classifier("text").package_path)
    with pytest.raises(InputError, match=message):
        model.predict({"x": value})


def test_pictures_for_arrays_are_refused() -> None:
    model = runtime.load_mlpackage(_doubled().package_path)
    with pytest.raises(InputError, match="'x' is no image: got a picture of 5 x 4 pixels"):
        model.predict({"x": PICTURE})


# Pipelines


@functools.cache
def _doubled() -> Any:
    return _convert(lambda x: mb.mul(x=x, y=np.float32(2.0), name="y"), *SIZE)


@functools.cache
def _inverted() -> Any:
    """An image of inverted channels, which exceed what pixels are."""
    return _convert(
        lambda y: mb.sub(x=np.float32(300.25), y=y, name="x"),
        *SIZE,
        inputs=[ct.ImageType("y", SIZE)],
        outputs=[ct.ImageType("x")],
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_that_ends_with_a_classifier(engine: str, tmp_path: Path) -> None:
    """Models pass on a picture: 8 bits, and channels in another order."""
    pipeline = ct.utils.make_pipeline(_inverted(), _classifier("text"))
    # coremltools declares what the next model takes.
    spec = pipeline.get_spec()
    (output,) = spec.pipeline.models[0].description.output
    output.type.imageType.colorSpace = output.type.imageType.BGR
    pipeline = ct.models.MLModel(spec, weights_dir=pipeline.weights_dir, skip_model_load=True)
    pipeline.save(str(tmp_path / "a.mlpackage"))
    channels = np.minimum(np.rint(300.25 - PIXELS.astype(np.float32)), 255)[..., ::-1]
    with runtime.patch_coremltools(engine):
        model = ct.models.MLModel(str(tmp_path / "a.mlpackage"))
        _check_classes(model.predict({"y": PICTURE}), LABELS["text"], _probabilities(channels))
    loaded = runtime.load_mlpackage(tmp_path / "a.mlpackage", engine=engine)
    _check_classes(loaded.predict({"y": PICTURE}), LABELS["text"], _probabilities(channels))
    with pytest.raises(InputError, match="unknown input: got x, expected y"):
        loaded.predict({"x": PICTURE})


def _two_values(x: Any) -> Any:
    """Scores [20, 3] and boxes [20, 4] of numbers [20, 7]."""
    return (
        mb.slice_by_size(x=x, begin=[0, 0], size=[20, 3], name="raw_confidence"),
        mb.slice_by_size(x=x, begin=[0, 3], size=[20, 4], name="raw_coordinates"),
    )


def _suppression_spec(*, rows: tuple[int, int] = (0, -1), per_class: bool = True) -> Any:
    """Non-maximum suppression as exports of detectors have it."""
    spec = ct.proto.Model_pb2.Model()
    spec.specificationVersion = 8
    content = spec.nonMaximumSuppression
    for name, width in (("confidence", 3), ("coordinates", 4)):
        for features, prefix in ((spec.description.input, "raw_"), (spec.description.output, "")):
            feature = features.add()
            feature.name = prefix + name
            array = feature.type.multiArrayType
            array.dataType = 65568
        for low, high in (rows, (width, width)):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
        setattr(content, f"{name}InputFeatureName", f"raw_{name}")
        setattr(content, f"{name}OutputFeatureName", name)
    content.iouThreshold, content.confidenceThreshold = 0.45, 0.25
    content.iouThresholdInputFeatureName = "iouThreshold"
    content.confidenceThresholdInputFeatureName = "confidenceThreshold"
    content.pickTop.perClass = per_class
    content.stringClassLabels.vector.extend(LABELS["text"])
    return spec


@functools.cache
def _detector() -> Any:
    return _convert(_two_values, 20, 7)


def _detector_pipeline(suppression: Any) -> Any:
    """The pipeline's specification: thresholds are inputs, though no description says so."""
    spec = _detector().get_spec()
    pipeline = ct.models.pipeline.Pipeline(
        input_features=[
            ("x", ct.models.datatypes.Array(20, 7)),
            ("iouThreshold", ct.models.datatypes.Double()),
            ("confidenceThreshold", ct.models.datatypes.Double()),
        ],
        output_features=["confidence", "coordinates"],
    )
    pipeline.add_model(spec)
    pipeline.add_model(suppression)
    for declared, feature in zip(
        pipeline.spec.description.output, suppression.description.output, strict=True
    ):
        declared.CopyFrom(feature)
    pipeline.spec.specificationVersion = spec.specificationVersion
    return pipeline.spec


def _boxes() -> np.ndarray:
    """20 boxes around 4 places, with scores of 3 classes."""
    rng = np.random.default_rng(1)
    places = rng.uniform(0.2, 0.8, (4, 2)).repeat(5, 0)
    centres = places + rng.uniform(-0.03, 0.03, (20, 2))
    return np.hstack(
        [rng.uniform(0, 0.7, (20, 3)), centres, rng.uniform(0.1, 0.2, (20, 2))]
    ).astype(np.float32)


def _expected(numbers: np.ndarray, iou: float, confidence: float, *, per_class: bool) -> Any:
    """Confidence and coordinates of the boxes that remain, by areas of rectangles."""
    scores, boxes = numbers[:, :3], numbers[:, 3:]

    def overlap(one: int, other: int) -> float:
        low = np.maximum(*(boxes[n, :2] - boxes[n, 2:] / 2 for n in (one, other)))
        high = np.minimum(*(boxes[n, :2] + boxes[n, 2:] / 2 for n in (one, other)))
        shared = np.prod(np.maximum(high - low, 0))
        return shared / (np.prod(boxes[one, 2:]) + np.prod(boxes[other, 2:]) - shared)

    chosen: list[int] = []
    for box in np.argsort(-scores.max(1), kind="stable"):
        rivals = [n for n in chosen if not per_class or scores[n].argmax() == scores[box].argmax()]
        if scores[box].max() >= confidence and all(overlap(box, n) <= iou for n in rivals):
            chosen.append(int(box))
    return scores[chosen], boxes[chosen]


@pytest.mark.parametrize("per_class", [True, False])
def test_a_detector_with_suppression(per_class: bool, tmp_path: Path) -> None:
    numbers = _boxes()
    spec = _detector_pipeline(_suppression_spec(per_class=per_class))
    counts: set[int] = set()
    with runtime.patch_coremltools():
        model = ct.models.MLModel(spec, weights_dir=_detector().weights_dir)
        for thresholds in ({}, {"iouThreshold": 0.1}, {"confidenceThreshold": 0.6}):
            iou = thresholds.get("iouThreshold", 0.45)
            least = thresholds.get("confidenceThreshold", 0.25)
            scores, boxes = _expected(numbers, iou, least, per_class=per_class)
            result = model.predict({"x": numbers, **thresholds})
            np.testing.assert_array_equal(result["confidence"], scores)
            np.testing.assert_array_equal(result["coordinates"], boxes)
            counts.add(len(boxes))
        model.save(str(tmp_path / "a.mlpackage"))
        with pytest.raises(RuntimeError, match="'iouThreshold' is no number: got float64"):
            model.predict({"x": numbers, "iouThreshold": [0.1, 0.2]})
    assert len(counts) == 3
    loaded = runtime.load_mlpackage(tmp_path / "a.mlpackage")
    assert isinstance(loaded, Pipeline)
    assert loaded.input_names == ("x", "iouThreshold", "confidenceThreshold")
    scores, _ = _expected(numbers, 1.0, 0.0, per_class=per_class)
    result = loaded.predict({"x": numbers, "iouThreshold": 1, "confidenceThreshold": 0})
    np.testing.assert_array_equal(result["confidence"], scores)
    assert len(scores) == 20


@pytest.mark.parametrize(("rows", "count"), [((9, 9), 9), ((2, 3), 3), ((0, 4), 4), ((30, -1), 30)])
def test_the_number_of_boxes_is_as_described(rows: tuple[int, int], count: int) -> None:
    numbers = _boxes()
    suppression = Suppression.read(_suppression_spec(rows=rows))
    result = suppression.compute(
        {"raw_confidence": numbers[:, :3], "raw_coordinates": numbers[:, 3:]}
    )
    for actual, expected in zip(
        result.values(), _expected(numbers, 0.45, 0.25, per_class=True), strict=True
    ):
        padded = np.zeros((count, actual.shape[1]), np.float32)
        padded[: len(expected)] = expected[:count]
        np.testing.assert_array_equal(actual, padded)


def test_no_box_is_confident() -> None:
    result = Suppression.read(_suppression_spec()).compute(
        {"raw_confidence": np.zeros((5, 3)), "raw_coordinates": np.ones((5, 4))}
    )
    assert [array.shape for array in result.values()] == [(0, 3), (0, 4)]


def test_pipelines_of_values_that_nothing_computes_are_refused() -> None:
    spec = _detector_pipeline(_suppression_spec())
    spec.pipeline.models[1].nonMaximumSuppression.confidenceInputFeatureName = "other"
    with runtime.patch_coremltools():
        with pytest.warns(RuntimeWarning, match="before: got other"):
            model = ct.models.MLModel(spec, weights_dir=_detector().weights_dir)
        with pytest.raises(RuntimeError) as caught:
            model.predict({"x": _boxes()})
    assert isinstance(caught.value.__cause__, BlobFormatError)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("neuralNetworkClassifier", "a neural network of the format before .* convert_to='mlpro"),
        ("treeEnsembleRegressor", "decision trees, .* hummingbird-ml"),
        ("wordTagger", "a text model of Create ML"),
        ("scaler", "a step of preprocessing"),
        ("customModel", "another type"),
    ],
)
@pytest.mark.parametrize("in_pipeline", [False, True])
def test_other_models_say_what_they_are(
    kind: str, message: str, in_pipeline: bool, tmp_path: Path
) -> None:
    message = f"is not an ML Program: got {kind}, {message}"
    spec = ct.proto.Model_pb2.Model()
    model = spec.pipeline.models.add() if in_pipeline else spec
    getattr(model, kind).SetInParent()
    path = tmp_path / "a.mlmodel"
    path.write_bytes(spec.SerializeToString())
    with pytest.raises(
        ProgramError, match=("model 1 of the pipeline " if in_pipeline else "") + message
    ):
        runtime.load_mlpackage(path)
    with runtime.patch_coremltools(), pytest.warns(RuntimeWarning, match=message):
        ct.models.MLModel(str(path))
