"""Pipelines: models of a package that run one after the other and pass on values by name.

A pipeline consists of ML Programs and non-maximum suppression, as in exports of detectors, or of
other pipelines. Every ML Program becomes a separate package, with all weight files.

Source: ``Model.proto`` (``Pipeline``) and ``NonMaximumSuppression.proto`` of coremltools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from coreml_delegate.errors import BlobFormatError, InputError, ProgramError
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mlpackage import MAIN, WEIGHTS, assemble, locate, map_package
from coreml_delegate.runtime.engines.base import EngineOptions, State
from coreml_delegate.runtime.engines.input_shapes import check_shape
from coreml_delegate.runtime.engines.reference.kernels.detection import pick_top
from coreml_delegate.runtime.engines.selection import AUTO
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Classifier, Feature, TensorType
from coreml_delegate.runtime.mil.reader import ML_PROGRAM, parse_model, refusal
from coreml_delegate.runtime.model import Model, refuse_unknown, with_labels
from coreml_delegate.runtime.pictures import array_to_picture, is_picture, picture_to_array
from coreml_delegate.runtime.snapshots import Array

_SUPPRESSION = "nonMaximumSuppression"

Files: TypeAlias = Mapping[str, Buffer]
"""An mlpackage: relative POSIX path -> content."""


@dataclass(frozen=True, slots=True)
class Suppression:
    """Non-maximum suppression of boxes, the last model of an object detector.

    Drops boxes whose highest confidence is below the confidence threshold. Of two boxes whose
    intersection over union exceeds the other threshold, drops the box of lower confidence. Returns
    boxes in order of confidence.

    Attributes:
        confidence: Name of the input [boxes, classes].
        coordinates: Name of the input [boxes, 4]: centre x, centre y, width, height.
        iou_threshold: Optional input, a number, with its default; its name may be empty.
        confidence_threshold: Optional input, a number, with its default; its name may be empty.
        output_names: Names of the outputs: confidence and coordinates.
        per_class: Whether a box suppresses only boxes of the same best class.
        fewest: Least number of boxes to return; missing boxes are 0.
        most: Largest number of boxes to return, or None.
    """

    confidence: str
    coordinates: str
    iou_threshold: Feature
    confidence_threshold: Feature
    output_names: tuple[str, str]
    per_class: bool
    fewest: int = 0
    most: int | None = None

    @classmethod
    def read(cls, message: Any) -> Suppression:
        """Read a ``Model`` message of non-maximum suppression.

        Raises:
            BlobFormatError: The outputs declare different numbers of boxes.
        """
        content = message.nonMaximumSuppression
        names = content.confidenceOutputFeatureName, content.coordinatesOutputFeatureName
        ranges = [_rows(o.type.multiArrayType) for o in message.description.output]
        fewest = max((low for low, _ in ranges), default=0)
        most = min((high for _, high in ranges if high is not None), default=None)
        if most is not None and fewest > most:
            raise BlobFormatError(
                "outputs of the non-maximum suppression differ in the number of boxes",
                got=f"at least {fewest} and at most {most}",
            )
        return cls(
            content.confidenceInputFeatureName,
            content.coordinatesInputFeatureName,
            _threshold(content.iouThresholdInputFeatureName, content.iouThreshold),
            _threshold(content.confidenceThresholdInputFeatureName, content.confidenceThreshold),
            names,
            content.pickTop.perClass,
            fewest,
            most,
        )

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The arrays, and the named thresholds."""
        arrays = (
            Feature(self.confidence, TensorType(DType.FP32, (None, None))),
            Feature(self.coordinates, TensorType(DType.FP32, (None, 4))),
        )
        thresholds = (self.iou_threshold, self.confidence_threshold)
        return *arrays, *(feature for feature in thresholds if feature.name)

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """Confidence and coordinates of the remaining boxes."""
        rows = self.fewest if self.fewest == self.most else None
        sizes = zip(self.output_names, (None, 4), strict=True)
        return tuple(Feature(name, TensorType(DType.FP32, (rows, size))) for name, size in sizes)

    @property
    def classifiers(self) -> tuple[Classifier, ...]:
        """Empty: no classifiers."""
        return ()

    def compute(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Suppress boxes; thresholds may be missing among the inputs.

        Raises:
            InputError: A shape does not fit.
        """
        arrays = [np.asarray(inputs[feature.name]) for feature in self.inputs[:2]]
        for feature, array in zip(self.inputs, arrays, strict=False):
            check_shape(feature, array.shape)
        confidence, coordinates = (
            torch.from_numpy(np.ascontiguousarray(array)).float() for array in arrays
        )
        if len(confidence) != len(coordinates) or not confidence.shape[1]:
            raise InputError(
                "the non-maximum suppression gets different numbers of boxes, or no class",
                got=f"{self.confidence} {[*arrays[0].shape]}, "
                f"{self.coordinates} {[*arrays[1].shape]}",
            )
        best, classes = confidence.max(dim=1)
        order = torch.argsort(best, descending=True, stable=True)
        candidates = order[best[order] >= _number(self.confidence_threshold, inputs)]
        groups = classes if self.per_class else None
        iou = _number(self.iou_threshold, inputs)
        chosen = pick_top(coordinates, candidates, iou, groups)[: self.most]
        missing = max(self.fewest - len(chosen), 0)
        return {
            name: np.pad(array[chosen.numpy()], ((0, missing), (0, 0)))
            for name, array in zip(self.output_names, arrays, strict=True)
        }


def _rows(array: Any) -> tuple[int, int | None]:
    """Return the least and the largest number of rows that an array's description allows."""
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "shapeRange" and array.shapeRange.sizeRanges:
        rows = array.shapeRange.sizeRanges[0]
        return rows.lowerBound, None if rows.upperBound < 0 else rows.upperBound
    if kind == "enumeratedShapes" and array.enumeratedShapes.shapes:
        sizes = [shape.shape[0] for shape in array.enumeratedShapes.shapes if shape.shape]
        return min(sizes, default=0), max(sizes, default=None)
    return (array.shape[0], array.shape[0]) if array.shape else (0, None)


def _threshold(name: str, default: float) -> Feature:
    return Feature(name, TensorType(DType.FP64, ()), optional=True, default=default)


def _number(feature: Feature, inputs: Mapping[str, Any]) -> float:
    """Return the value of an optional input, or its default."""
    value = np.asarray(inputs.get(feature.name, feature.default))
    if value.size != 1 or value.dtype.kind not in "fiu":
        raise InputError(
            f"input {feature.name!r} is no number",
            got=f"{value.dtype}{[*value.shape]}",
            expected="one number",
        )
    return float(value.reshape(()))


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A pipeline as read from its package, before compilation.

    A stage that is an ML Program is a separate mlpackage. ``inputs`` and ``outputs`` are names.
    """

    stages: tuple[Files | Suppression | PipelineSpec, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def packages(self) -> Iterator[Files]:
        """Yield the ML Programs, in order."""
        for stage in self.stages:
            if isinstance(stage, PipelineSpec):
                yield from stage.packages()
            elif not isinstance(stage, Suppression):
                yield stage


def read_pipeline(files: Files) -> PipelineSpec | None:
    """Return the pipeline of an mlpackage; None if its model is not a pipeline or suppression.

    Raises:
        BlobFormatError: A part is missing or malformed.
        ProgramError: A model of the pipeline is neither an ML Program nor a suppression.
    """
    parts = locate(files)
    message = parse_model(parts.spec)
    if message.WhichOneof("Type") == _SUPPRESSION:
        return _spec_of(message, [message], {})
    members = _members(message)
    if members is None:
        return None
    prefix = f"{WEIGHTS}/"
    weights = {
        name.removeprefix(prefix): content
        for name, content in parts.weights.items()
        if name.startswith(prefix)
    }
    return _spec_of(message, members, weights)


def _members(message: Any) -> Sequence[Any] | None:
    match message.WhichOneof("Type"):
        case "pipeline":
            return message.pipeline.models
        case "pipelineClassifier":
            return message.pipelineClassifier.pipeline.models
        case "pipelineRegressor":
            return message.pipelineRegressor.pipeline.models
        case _:
            return None


def _spec_of(message: Any, members: Iterable[Any], weights: Mapping[str, Buffer]) -> PipelineSpec:
    return PipelineSpec(
        tuple(_stage_of(number, member, weights) for number, member in enumerate(members, start=1)),
        tuple(feature.name for feature in message.description.input),
        tuple(feature.name for feature in message.description.output),
    )


def _stage_of(
    number: int, message: Any, weights: Mapping[str, Buffer]
) -> Files | Suppression | PipelineSpec:
    kind = message.WhichOneof("Type")
    if kind == ML_PROGRAM:
        return assemble(message.SerializeToString(deterministic=True), weights)
    if kind == _SUPPRESSION:
        return Suppression.read(message)
    members = _members(message)
    if members is None:
        raise refusal(f"model {number} of the pipeline", str(kind))
    return _spec_of(message, members, weights)


class Pipeline:
    """Models that run one after the other.

    Args:
        spec: A pipeline, as read from a package.
        engine: See ``load_mlpackage``, for each ML Program.
        options: How to execute.

    Attributes:
        inputs: The inputs, in declaration order.
        outputs: The outputs, in declaration order.
        input_names: Names of the inputs.
        models: The ML Programs, in order.
        classifiers: The labels of classifiers among the outputs.

    Raises:
        ProgramError: A model has a state.
        BlobFormatError: No model computes an input of a model, or an output of the pipeline.
        CoreMLDelegateError: See ``Model.from_files``.
    """

    function_name = "pipeline"

    def __init__(
        self, spec: PipelineSpec, *, engine: str | None = AUTO, options: EngineOptions | None = None
    ) -> None:
        self.spec = spec
        self.stages = tuple(_stage(stage, engine, options) for stage in spec.stages)
        features = {feature.name: feature for feature in self._free_inputs()}
        self.inputs = tuple(features[name] for name in spec.inputs if name in features)
        self.input_names = tuple(feature.name for feature in self.inputs)
        nested = (s.models if isinstance(s, Pipeline) else (s,) for s in self.stages)
        self.models = tuple(m for stages in nested for m in stages if isinstance(m, Model))
        computed = {f.name: f for stage in self.stages for f in stage.outputs}
        self.classifiers = tuple(
            classifier
            for stage in self.stages
            for classifier in stage.classifiers
            if {classifier.label, classifier.probabilities} & set(spec.outputs)
        )
        labels = [classifier.label for classifier in self.classifiers]
        names = dict.fromkeys((*(c.probabilities for c in self.classifiers), *spec.outputs))
        names = [name for name in names if name not in labels]
        _require("the pipeline returns", names, computed)
        self.outputs = tuple(computed[name] for name in names)

    def _free_inputs(self) -> Iterator[Feature]:
        """Yield the inputs of models that no earlier model computes, each name once."""
        available = set(self.spec.inputs)
        seen: set[str] = set()
        for stage in self.stages:
            required = [feature.name for feature in stage.inputs if not feature.optional]
            _require("a model of the pipeline takes", required, available)
            yield from (f for f in stage.inputs if f.name not in seen)
            seen.update(feature.name for feature in (*stage.inputs, *stage.outputs))
            available.update(feature.name for feature in stage.outputs)

    def param_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Return the dtype of each input, in declaration order."""
        return tuple(feature.type.dtype.numpy for feature in self.inputs)

    def make_state(self) -> None:
        """Return None: a pipeline has no state."""

    def predict(self, inputs: Mapping[str, Any], state: State | None = None) -> dict[str, Any]:
        """Run once; see ``Model.predict``.

        Raises:
            InputError: A name, shape, dtype or picture that the models do not accept, or a state.
            ExecutionError: An op failed.
        """
        return with_labels(self.compute(inputs, state), self.classifiers)

    def compute(self, inputs: Mapping[str, Any], state: State | None = None) -> dict[str, Array]:
        """Run once, and return only tensors; see ``Model.compute``.

        Images are passed between models as pictures, with 8 bits in most color spaces.

        Raises:
            CoreMLDelegateError: See ``predict``.
        """
        if state is not None:
            raise InputError("a pipeline takes no state", got=type(state).__name__)
        refuse_unknown(inputs, self.input_names)
        values = dict(inputs)
        for stage in self.stages:
            names = (feature.name for feature in stage.inputs)
            results = stage.compute({name: values[name] for name in names if name in values})
            values |= {f.name: _passed_on(results[f.name], f) for f in stage.outputs}
        return {
            feature.name: picture_to_array(value, feature) if is_picture(value) else value
            for feature in self.outputs
            for value in (values[feature.name],)
        }


def _passed_on(array: Array, feature: Feature) -> Any:
    return array if feature.color_space is None else array_to_picture(array, feature.color_space)


def _require(what: str, names: Iterable[str], available: Iterable[str]) -> None:
    missing = sorted(set(names) - set(available))
    if missing:
        raise BlobFormatError(
            f"{what} a value that nothing computes before",
            got=", ".join(missing),
            expected=", ".join(sorted(available)),
        )


def _stage(
    spec: Files | Suppression | PipelineSpec, engine: str | None, options: EngineOptions | None
) -> Model | Suppression | Pipeline:
    if isinstance(spec, Suppression):
        return spec
    if isinstance(spec, PipelineSpec):
        return Pipeline(spec, engine=engine, options=options)
    model = Model.from_files(spec, engine=engine, options=options)
    if model.function.states:
        raise ProgramError(
            "a model of the pipeline has a state",
            got=", ".join(feature.name for feature in model.function.states),
            remedy="Run the model on its own",
        )
    return model


def load_mlpackage(
    path: Path | str,
    *,
    function_name: str | None = None,
    engine: str | None = AUTO,
    options: EngineOptions | None = None,
) -> Model | Pipeline:
    """Load an ``.mlpackage`` with an ML Program or a pipeline of ML Programs.

    Args:
        path: The package folder, or an ``.mlmodel`` file; weights are mapped, not read.
        function_name: None for the default function, the only function of a pipeline.
        engine: ``auto`` (the fastest engine that can run the program), ``coreml`` (on macOS),
            ``openvino`` or ``reference``; None for the fastest engine that computes in the
            program's own types.
        options: How to execute.

    Raises:
        ProgramError: No such package or function, or a model of another type.
        BlobFormatError: A part is missing or malformed.
        UnsupportedOpError: The engine lacks an op.
        EngineUnavailableError: The engine cannot be used here.
    """
    files = map_package(Path(path))
    pipeline = read_pipeline(files)
    if pipeline is None:
        return Model.from_files(files, function_name=function_name, engine=engine, options=options)
    if function_name not in (None, MAIN):
        raise ProgramError("a pipeline has no functions", got=repr(function_name))
    return Pipeline(pipeline, engine=engine, options=options)
