"""Merging of single-function models into one multifunction model, which stores equal weights once.

Nothing is converted again: in a function only the offsets of its weights change. Two weights are
equal if they have the same type, number of elements and bytes.

Source: coremltools' ``Model.proto`` (``FunctionDescription``) and ``MIL.proto``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.blob import Files, Pieces, chunks_of
from coreml_delegate.formats.blob_layout import PACKAGE, MethodMetadata, metadata_in, models_in
from coreml_delegate.formats.mlpackage import (
    MAIN,
    MODEL_PATH,
    WEIGHT_FILE,
    WEIGHTS,
    assemble,
    locate,
)
from coreml_delegate.formats.weight_file import StoredWeight, read_weight, write_weights
from coreml_delegate.patches.third_party import model_pb2

WeightKey = tuple[int, int, bytes]
"""Data type, padding, and SHA-256 of the bytes: equal for equal weights."""


@dataclass(frozen=True, slots=True)
class FunctionModel:
    """The model of one partition, with a single function.

    Attributes:
        spec: The ``Model`` message.
        names: Names of the partition's arguments.
        weights: The weights in the order of the model's weight file.
        references: The ``BlobFileValue`` messages in ``spec``, each with the key of its weight.
    """

    spec: Any
    names: MethodMetadata
    weights: Mapping[WeightKey, StoredWeight]
    references: tuple[tuple[Any, WeightKey], ...]

    @classmethod
    def of(cls, files: Files) -> FunctionModel:
        """Read the mlpackage in the blob of one partition.

        Args:
            files: The files of the blob; weights are views of their bytes.

        Raises:
            BlobFormatError: A file is missing or malformed.
        """
        joined = {p: b"".join(c.parts) if isinstance(c, Pieces) else c for p, c in files.items()}
        parts = locate(models_in(joined).get(PACKAGE, {}))
        spec: Any = model_pb2().Model.FromString(bytes(parts.spec))
        values = list(_file_values(spec.mlProgram))
        locations = sorted({(v.fileName, v.offset) for v in values})
        stored = {location: _read_weight(parts.weights, *location) for location in locations}
        keys = {location: _weight_key(weight) for location, weight in stored.items()}
        return cls(
            spec=spec,
            names=metadata_in(joined).method(""),
            weights={keys[location]: weight for location, weight in stored.items()},
            references=tuple((v, keys[v.fileName, v.offset]) for v in values),
        )

    @property
    def version(self) -> int:
        """The specification version of the model."""
        return int(self.spec.specificationVersion)


def merge(models: Mapping[str, FunctionModel]) -> Files:
    """Merge models into one.

    Args:
        models: The models by function name; the first is the default function. They cannot be used
            afterwards: their weights get new offsets.

    Returns:
        The files of the mlpackage, which refer to the weights without a copy; equal arguments give
        equal bytes.
    """
    merged = {key: weight for model in models.values() for key, weight in model.weights.items()}
    data, offsets = write_weights(merged.values())
    offset_of = dict(zip(merged, offsets, strict=True))
    for model in models.values():
        for value, key in model.references:
            value.fileName = f"{MODEL_PATH}{WEIGHTS}/{WEIGHT_FILE}"
            value.offset = offset_of[key]
    # Map entries have no order in protobuf; deterministic serialization sorts them.
    spec = _merged_spec(models).SerializeToString(deterministic=True)
    return assemble(spec, {WEIGHT_FILE: data} if merged else {})


def _merged_spec(models: Mapping[str, FunctionModel]) -> Any:
    default, first = next(iter(models.items()))
    spec: Any = model_pb2().Model()
    spec.specificationVersion = max(model.version for model in models.values())
    spec.description.metadata.CopyFrom(first.spec.description.metadata)
    single_sizes = {
        name: input_sizes.read_all(model.spec.description.metadata.userDefined).get(MAIN)
        for name, model in models.items()
    }
    input_sizes.write(spec.description.metadata.userDefined, single_sizes)
    constants = {
        name: fp32_constants.read(model.spec.description.metadata.userDefined, MAIN)
        for name, model in models.items()
    }
    fp32_constants.write(spec.description.metadata.userDefined, constants)
    spec.description.defaultFunctionName = default
    spec.mlProgram.version = first.spec.mlProgram.version
    for key, value in first.spec.mlProgram.attributes.items():
        spec.mlProgram.attributes[key].CopyFrom(value)
    for name, model in models.items():
        single = model.spec.description
        function = spec.description.functions.add(name=name)
        function.input.extend(single.input)
        function.output.extend(single.output)
        function.state.extend(single.state)
        spec.mlProgram.functions[name].CopyFrom(model.spec.mlProgram.functions[MAIN])
    return spec


def _file_values(message: Message) -> Iterator[Any]:
    """Yield every ``BlobFileValue`` inside a message."""
    pending: list[Any] = [message]
    while pending:
        current = pending.pop()
        if current.DESCRIPTOR.name == "BlobFileValue":
            yield current
            continue
        for field, value in current.ListFields():
            kind = field.message_type
            if kind is None:
                continue
            if isinstance(value, Message):
                pending.append(value)
            elif not kind.GetOptions().map_entry:
                pending += value
            elif kind.fields_by_name["value"].message_type is not None:
                pending += value.values()


def _read_weight(files: Mapping[str, memoryview], name: str, offset: int) -> StoredWeight:
    path = name.removeprefix(MODEL_PATH)
    if path not in files:
        raise BlobFormatError("weight file is missing", got=repr(name), expected=", ".join(files))
    return read_weight(path, files[path], offset)


def _weight_key(weight: StoredWeight) -> WeightKey:
    digest = hashlib.sha256()
    for chunk in chunks_of(weight.data):
        digest.update(chunk)
    return weight.dtype, weight.padding, digest.digest()
