"""Read the inputs, outputs and states of a model from its description and the MIL types."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.patches import third_party
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    ColorSpace,
    Feature,
    StateType,
    TensorType,
    ValueType,
)

# ArrayFeatureType.ArrayDataType -> MIL
_ARRAY_DTYPES = {
    "DOUBLE": DType.FP64,
    "FLOAT32": DType.FP32,
    "FLOAT16": DType.FP16,
    "INT32": DType.INT32,
    "INT8": DType.INT8,
}

Features = tuple[Feature, ...]


def read_features(
    name: str, description: Any, types: Mapping[str, ValueType], excluded: Collection[str] = ()
) -> tuple[Features, Features, Features]:
    """Return inputs, outputs and states of the function ``name``, in declaration order.

    ``types`` has the MIL type of every parameter and top-level value; the program does not compute
    the ``excluded`` outputs.

    Raises:
        BlobFormatError: The description lacks the function, or the program lacks a feature.
        ProgramError: A feature is neither a multi-array nor an image.
    """
    scope = description
    if description.functions:
        named = {f.name: f for f in description.functions}
        if name not in named:
            raise BlobFormatError(
                "function is not described", got=name, expected=", ".join(sorted(named))
            )
        scope = named[name]
    return (
        tuple(_feature(f, types, name) for f in scope.input),
        tuple(_feature(f, types, name) for f in scope.output if f.name not in excluded),
        tuple(_feature(f, types, name) for f in scope.state),
    )


def _feature(message: Any, types: Mapping[str, ValueType], function: str) -> Feature:
    if message.name not in types:
        raise BlobFormatError(
            f"function {function!r} does not define a feature of its description",
            got=repr(message.name),
        )
    kind = message.type.WhichOneof("Type")
    if kind == "imageType":
        return _image(message, types[message.name])
    array = message.type.multiArrayType
    if kind == "stateType":
        array = message.type.stateType.arrayType
    elif kind != "multiArrayType":
        raise ProgramError(
            f"feature {message.name!r} is neither a multi-array nor an image",
            got=str(kind),
            expected="multiArrayType or imageType",
            remedy="Convert the model with tensor inputs and outputs (ct.TensorType)",
        )
    declared = types[message.name]
    mil = declared.wrapped if isinstance(declared, StateType) else declared
    if not isinstance(mil, TensorType):
        raise ProgramError(f"feature {message.name!r} is not a tensor", got=str(declared))
    _ = mil.dtype.numpy  # a feature is an array, so this refuses types without a numpy form
    default = array.WhichOneof("defaultOptionalValue")
    return Feature(
        name=message.name,
        type=TensorType(_array_dtype(message.name, array), _shape(array, mil)),
        shapes=tuple(tuple(s.shape) for s in array.enumeratedShapes.shapes),
        bounds=tuple(
            (r.lowerBound, None if r.upperBound < 0 else r.upperBound)
            for r in array.shapeRange.sizeRanges
        ),
        optional=message.type.isOptional,
        default=float(getattr(array, default)) if default else None,
    )


def _image(message: Any, declared: ValueType) -> Feature:
    image = message.type.imageType
    spaces = third_party.feature_types_pb2().ImageFeatureType.ColorSpace
    label = spaces.Name(image.colorSpace) if image.colorSpace in spaces.values() else "unknown"
    if label not in ColorSpace.__members__:
        raise BlobFormatError(
            f"image {message.name!r} has no color space", got=f"{label} ({image.colorSpace})"
        )
    if not isinstance(declared, TensorType) or declared.shape is None or len(declared.shape) != 4:
        raise BlobFormatError(
            f"image {message.name!r} has no pixels", got=str(declared), expected="rank 4"
        )
    _ = declared.dtype.numpy
    leading = tuple(size or 1 for size in declared.shape[:2])
    sizes = image.imageSizeRange
    ranges = (
        (sizes.heightRange, sizes.widthRange)
        if image.WhichOneof("SizeFlexibility") == "imageSizeRange"
        else ()
    )
    default = TensorType(declared.dtype, (*leading, image.height, image.width))
    return Feature(
        name=message.name,
        type=default if None in declared.shape else declared,
        shapes=tuple((*leading, s.height, s.width) for s in image.enumeratedSizes.sizes),
        bounds=(
            *((size, size) for size in leading if ranges),
            *((r.lowerBound, None if r.upperBound < 0 else r.upperBound) for r in ranges),
        ),
        optional=message.type.isOptional,
        color_space=ColorSpace[label],
    )


def _array_dtype(name: str, array: Any) -> DType:
    enum = third_party.feature_types_pb2().ArrayFeatureType.ArrayDataType
    number = array.dataType
    label = enum.Name(number) if number in enum.values() else str(number)
    try:
        return _ARRAY_DTYPES[label]
    except KeyError:
        raise BlobFormatError(
            f"feature {name!r} has an unknown element type",
            got=label,
            expected=", ".join(_ARRAY_DTYPES),
        ) from None


def _shape(array: Any, mil: TensorType) -> tuple[int | None, ...] | None:
    # The description's shape is a default if the MIL type has unknown dimensions, and absent for
    # most outputs; rank 0 is described as [1], or the shape is absent.
    if mil.shape is not None:
        return mil.shape
    return tuple(array.shape) or None
