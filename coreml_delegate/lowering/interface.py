"""The interface of a finished ``.mlpackage``: names, images, class labels and description.

A lowered model has the names of graph nodes. Here its message is edited as coremltools would have
written it for the same declarations: an image is scaled in fp32 before the first cast, a
classifier ends with ``classify``.

Source: coremltools 9.0, ``ImageType`` and ``ClassifierConfig`` of ``convert``, and
``FeatureTypes.proto``.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.added_steps import AddedSteps, Factors
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mil_message import (
    FP32,
    PROBABILITIES,
    FunctionEditor,
    Message,
    MilOp,
    dtype_of,
    rename_keys,
    shape_of,
    with_dtype,
)
from coreml_delegate.formats.mlpackage import MAIN, locate_spec
from coreml_delegate.options.model_interface import (
    ColorLayout,
    ImageFeature,
    ModelInterface,
    feature_name,
)
from coreml_delegate.patches.third_party import feature_types_pb2, model_pb2

logger = logging.getLogger(__name__)

LABEL: Final = "classLabel"
"""Name of a classifier's output with the label, as coremltools calls it."""
PROBABILITIES_BY_LABEL: Final = f"{LABEL}_probs"

_UNBOUNDED: Final = -1


@dataclass(frozen=True, slots=True)
class Ports:
    """The names of a model's inputs and outputs in the program that it was lowered from.

    Attributes:
        inputs: Feature and name of each input, in order.
        outputs: Value and name of each output, in order. A value may be an input, or occur twice.
        shapes: Default shapes of inputs of flexible size, by feature; the smallest if missing. An
            app scales its images to the default.
    """

    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])


def declare_interface(
    files: Mapping[str, Buffer], interface: ModelInterface, ports: Ports | None = None
) -> dict[str, Buffer]:
    """Return the files of an mlpackage with another interface; equal arguments give equal bytes.

    Args:
        files: Content by path; the model has one function.
        interface: The interface.
        ports: Names of inputs and outputs; None for the names of the features.

    Raises:
        OptionError: The interface names an input or output that the model lacks, an image does not
            have the shape of one, or no output has an element for each label.
    """
    path = locate_spec(files)
    spec = model_pb2().Model.FromString(bytes(files[path]))
    _Model(spec, ports).declare(interface)
    return {**files, path: spec.SerializeToString(deterministic=True)}


class _Model:
    """A ``Model`` message while its interface is declared.

    Attributes:
        features: Input, output or state by its name in the program, which Core ML may not take.
    """

    def __init__(self, spec: Message, ports: Ports | None) -> None:
        self._description = spec.description
        self._function = FunctionEditor(spec.mlProgram.functions[MAIN])
        if ports is None:
            ports = Ports(
                [(feature.name, feature.name) for feature in spec.description.input],
                [(feature.name, feature.name) for feature in spec.description.output],
            )
        self._order([feature for feature, _ in ports.inputs])
        self._set_defaults(ports.shapes)
        outputs = self._separate_outputs([value for value, _ in ports.outputs])
        self.features: dict[str, Message] = {}
        for feature, name in zip(
            spec.description.input, (name for _, name in ports.inputs), strict=True
        ):
            self.features[name] = feature
        for feature in spec.description.state:
            self.features[_unique(feature.name, self.features)] = feature
        for feature, (_, name) in zip(outputs, ports.outputs, strict=True):
            self.features[_unique(name, self.features)] = feature
        self._outputs = [feature.name for feature in outputs]
        """Features of the outputs, in the order of the program."""

    def declare(self, interface: ModelInterface) -> None:
        """Edit the message; see ``declare_interface``."""
        images = self._declare_images(interface.images or {})
        softmax: tuple[str, ...] = ()
        outputs: list[str] = []
        labels = cast("Sequence[str] | None", interface.labels)  # a file has been read
        if labels is not None:
            value = self._labelled(labels)
            scores = self._declare_labels(value, labels, softmax=interface.softmax)
            softmax = (scores,) if interface.softmax else ()
            if len(self._outputs) > 1:  # a classifier's labels come first
                outputs = [scores if name == value else name for name in self._outputs]
        self._describe(interface)
        new_names = self._rename(interface.names or {})
        AddedSteps(
            {new_names[name]: factors for name, factors in images.items()},
            tuple(new_names[name] for name in softmax),
            tuple(new_names[name] for name in outputs),
        ).write(self._description.metadata.userDefined)

    @property
    def _inputs(self) -> set[str]:
        return {feature.name for feature in self._description.input}

    def _find(self, name: str, option: str) -> Message:
        """Return the feature of a name that the user has written."""
        by_valid_name = {feature_name(key): key for key in reversed(self.features)}
        key = name if name in self.features else by_valid_name.get(feature_name(name))
        if key is None:
            raise OptionError(
                f"the model has no such input or output for {option}",
                got=repr(name),
                expected=near_matches(name, by_valid_name),
            )
        return self.features[key]

    def _order(self, names: Sequence[str]) -> None:
        """Put the inputs into the order of the program."""
        by_name = {feature.name: feature for feature in self._description.input}
        ordered = [by_name[name] for name in names]
        del self._description.input[:]
        self._description.input.extend(ordered)

    def _set_defaults(self, shapes: Mapping[str, Sequence[int]]) -> None:
        for feature in self._description.input:
            array = feature.type.multiArrayType
            bounds = array.shapeRange.sizeRanges
            if bounds and feature.name in shapes:
                array.shape[:] = shapes[feature.name]

    # Outputs

    def _separate_outputs(self, values: Sequence[str]) -> list[Message]:
        """Put the outputs into the order of the program; a value that is no output becomes one."""
        declared = {feature.name: feature for feature in self._description.output}
        features: list[Message] = []
        types = self._function.types()
        for value in values:
            feature = model_pb2().FeatureDescription()
            if value in declared:
                feature.CopyFrom(declared.pop(value))
            else:
                # In Core ML, an output is not an input, and two outputs are two values.
                feature.name = self._function.append(
                    MilOp.IDENTITY, f"{value}_copy", types[value], x=value
                )
                feature.type.multiArrayType.CopyFrom(_array(types[value]))
            features.append(feature)
        self._set_outputs(features)
        return list(self._description.output)

    def _set_outputs(self, features: Sequence[Message]) -> None:
        del self._description.output[:]
        self._description.output.extend(features)
        self._function.block.outputs[:] = [feature.name for feature in features]

    def _labelled(self, labels: Sequence[str]) -> str:
        """Return the output with an element for each label."""
        types = self._function.types()
        shapes = {
            feature.name: shape_of(types[feature.name]) for feature in self._description.output
        }
        fitting = [
            name
            for name, shape in shapes.items()
            if None not in shape and math.prod(size or 0 for size in shape) == len(labels)
        ]
        if len(fitting) == 1:
            return fitting[0]
        names = {feature.name: name for name, feature in self.features.items()}
        listed = fitting or list(shapes)
        raise OptionError(
            f"{len(listed)} outputs have an element for each label"
            if fitting
            else "no output has an element for each label",
            got=", ".join(f"{names[name]} {list(shapes[name])}" for name in listed)
            + f" for {len(labels)} labels",
            expected="one output",
            remedy="Return one of them from the model" if fitting else None,
        )

    def _declare_labels(self, value: str, labels: Sequence[str], *, softmax: bool) -> str:
        """Return a label and probabilities by label in place of an output.

        Returns:
            The feature of the probabilities.
        """
        function = self._function
        scores = value
        if softmax:
            # In the type that the program computes in: the Neural Engine has no fp32.
            scores = function.without_cast(value)
            type_ = function.types()[scores]
            axis = np.array(_class_dimension(shape_of(type_), len(labels)), np.int32)
            scores = function.append(MilOp.SOFTMAX, f"{value}_softmax", type_, x=scores, axis=axis)
        probabilities = function.cast(scores, FP32)
        if not softmax and not self._is_probability(probabilities):
            logger.warning(
                "the scores of the labels are the model's output as it is, which no softmax "
                "computes; --softmax applies one"
            )
        label, by_label = function.append_classify(
            probabilities, labels, (LABEL, PROBABILITIES_BY_LABEL)
        )
        names = {feature.name: name for name, feature in self.features.items()}
        names |= {label: LABEL, by_label: PROBABILITIES_BY_LABEL}
        features = [model_pb2().FeatureDescription(name=name) for name in (label, by_label)]
        features[0].type.stringType.SetInParent()
        features[1].type.dictionaryType.stringKeyType.SetInParent()
        features += [feature for feature in self._description.output if feature.name != value]
        for feature in self._description.output:
            del self.features[names[feature.name]]
        self._set_outputs(features)
        for feature in self._description.output:
            self.features[_unique(names[feature.name], self.features)] = feature
        self._description.predictedFeatureName = label
        self._description.predictedProbabilitiesName = by_label
        return by_label

    def _is_probability(self, value: str) -> bool:
        """Return whether a softmax or sigmoid computes a value, apart from casts."""
        producer = self._function.producer(value)
        while producer is not None and producer.type in {MilOp.CAST, MilOp.IDENTITY}:
            producer = self._function.producer(producer.inputs["x"].arguments[0].name)
        return producer is not None and producer.type in PROBABILITIES

    # Images

    def _declare_images(
        self, images: Mapping[str, ImageFeature]
    ) -> dict[str, tuple[Factors, Factors]]:
        """Make inputs and outputs images; return scale and bias of the scaled inputs."""
        by_feature = {self._find(name, "--image").name: image for name, image in images.items()}
        scaled: dict[str, tuple[Factors, Factors]] = {}
        for name, feature in self.features.items():
            image = by_feature.get(feature.name)
            if image is None:
                continue
            if feature.type.WhichOneof("Type") == "stateType":
                raise OptionError("a state cannot be an image", got=repr(name))
            if feature.name not in self._inputs:
                self._declare_image_output(feature, image)
                continue
            self._declare_image(feature, image)
            if not image.has_pixels:
                scaled[feature.name] = image.factors
        return scaled

    def _declare_image(self, feature: Message, image: ImageFeature) -> None:
        """Make an input an image, which is scaled in fp32."""
        function, name = self._function, feature.name
        (parameter,) = (value for value in function.message.inputs if value.name == name)
        dtype = dtype_of(parameter.type)
        _set_image(feature, image, shape_of(parameter.type), self._name_of(feature))
        parameter.type.CopyFrom(with_dtype(parameter.type, FP32))
        value = name
        scale, bias = image.factors
        for kind, factors, neutral, suffix in (
            (MilOp.MUL, scale, 1.0, "scaled"),
            (MilOp.ADD, bias, 0.0, "biased"),
        ):
            if factors != (neutral,):
                constant = np.array(factors, np.float32)
                constant = constant[0] if constant.size == 1 else constant.reshape(1, -1, 1, 1)
                value = function.prepend(
                    kind, f"{name}__{suffix}__", parameter.type, x=value, y=np.asarray(constant)
                )
        value = function.cast(value, dtype, in_front=True)
        if value != name:
            function.redirect(name, value)

    def _declare_image_output(self, feature: Message, image: ImageFeature) -> None:
        """Make an output an image, of pixels in fp32."""
        name = self._name_of(feature)
        if not image.has_pixels:
            raise OptionError(
                f"output {name!r} is an image of pixels from 0 to 255, without scale and bias",
                remedy="Scale it in the model",
            )
        old = feature.name
        shape = shape_of(self._function.types()[old])
        _set_image(feature, image, shape, name)
        feature.name = self._function.cast(old, FP32)
        outputs = self._function.block.outputs
        outputs[:] = [feature.name if output == old else output for output in outputs]
        self._outputs = [feature.name if output == old else output for output in self._outputs]

    def _name_of(self, feature: Message) -> str:
        return next(name for name, own in self.features.items() if own.name == feature.name)

    # Names and description

    def _describe(self, interface: ModelInterface) -> None:
        metadata = self._description.metadata
        for key, text in (
            ("author", interface.author),
            ("license", interface.license),
            ("shortDescription", interface.description),
            ("versionString", interface.version),
        ):
            if text is not None:
                setattr(metadata, key, text)
        for name, text in (interface.descriptions or {}).items():
            self._find(name, "--describe").shortDescription = text

    def _rename(self, names: Mapping[str, str]) -> dict[str, str]:
        """Give the features their names; return the new names by feature."""
        user_names = {self._find(old, "--rename").name: new for old, new in names.items()}
        new_names: dict[str, str] = {}
        for name, feature in self.features.items():
            new_names[feature.name] = _unique(feature_name(name), new_names.values())
        new_names |= user_names
        if len(set(new_names.values())) < len(new_names):
            raise OptionError(
                "--rename gives two inputs or outputs one name",
                got=", ".join(user_names.values()),
                expected=f"different names; the model has {', '.join(new_names.values())}",
            )
        renamed = self._function.rename(new_names)
        for feature in self.features.values():
            feature.name = renamed[feature.name]
        description = self._description
        if description.predictedFeatureName:
            description.predictedFeatureName = renamed[description.predictedFeatureName]
            description.predictedProbabilitiesName = renamed[description.predictedProbabilitiesName]
        for key in (input_sizes.METADATA_KEY, fp32_constants.METADATA_KEY):
            rename_keys(description.metadata.userDefined, key, renamed)
        return renamed


def _class_dimension(shape: Sequence[int | None], count: int) -> int:
    """Return the dimension of the classes in scores of ``count`` elements.

    Raises:
        OptionError: Several dimensions have them.
    """
    if count not in shape:
        raise OptionError(
            "softmax needs the classes in one dimension",
            got=str(list(shape)),
            expected=f"a dimension of {count}",
            remedy="Reshape the scores in the model",
        )
    return shape.index(count)


def _array(type_: Message) -> Message:
    """Return the description of a tensor as a multi-array."""
    array = feature_types_pb2().ArrayFeatureType()
    array.dataType = array.ArrayDataType.Value(dtype_of(type_))
    shape = shape_of(type_)
    array.shape.extend(() if None in shape else shape)
    return array


def _set_image(
    feature: Message, image: ImageFeature, shape: Sequence[int | None], name: str
) -> None:
    """Declare a feature as an image, of the sizes that it has as an array.

    Args:
        feature: An input or output.
        image: Its channels.
        shape: Shape of the tensor.
        name: Name of the feature in the program, for messages.

    Raises:
        OptionError: The tensor does not have the shape of such an image.
    """
    layout = ColorLayout(image.layout)
    if tuple(shape[:2]) != (1, layout.channels) or len(shape) != 4:
        raise OptionError(
            f"{name!r} does not have the shape of an image with layout {layout.value}",
            got=str([size or "any" for size in shape]),
            expected=f"[1, {layout.channels}, height, width]",
        )
    array = feature_types_pb2().ArrayFeatureType()
    array.CopyFrom(feature.type.multiArrayType)
    message = feature.type.imageType  # it replaces the array
    message.colorSpace = message.ColorSpace.Value(layout.name)
    if None not in shape:
        message.height, message.width = shape[2:]
        return
    if not array.shape:
        # Core ML finds no image in an output of open size whose default is not 1, and whose range
        # ends (coremltools 9.0, ``get_func_output``).
        message.height = message.width = 1
        for size in (message.imageSizeRange.heightRange, message.imageSizeRange.widthRange):
            size.lowerBound, size.upperBound = 1, _UNBOUNDED
        return
    message.height, message.width = array.shape[2:]
    if array.WhichOneof("ShapeFlexibility") == "enumeratedShapes":
        for enumerated in array.enumeratedShapes.shapes:
            height, width = enumerated.shape[2:]
            message.enumeratedSizes.sizes.add(height=height, width=width)
        return
    sizes = message.imageSizeRange
    for size, bounds in zip(
        (sizes.heightRange, sizes.widthRange), array.shapeRange.sizeRanges[2:], strict=True
    ):
        size.lowerBound, size.upperBound = bounds.lowerBound, bounds.upperBound


def _unique(name: str, names: Iterable[str]) -> str:
    """Return ``name``, with ``_out`` or a number if ``names`` have it already."""
    existing = set(names)
    numbered = (f"{name}_{number}" for number in itertools.count())
    candidates = itertools.chain((name, f"{name}_out"), numbered)
    return next(candidate for candidate in candidates if candidate not in existing)
