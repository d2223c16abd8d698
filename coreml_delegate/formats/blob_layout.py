"""The files inside a blob: names, and content of the files that this package defines.

::

    metadata.json      the model's identifier, and the names of each method's arguments
    debug_info.json    optional, for profilers: which operations come from which calls
    model.mlpackage/   the model, see ``formats.mlpackage``; or
    model.mlmodelc/    the model compiled ahead of time

A blob of ExecuTorch's own backend may hold both models. ``formats.blob`` has the layout of a blob's
bytes.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``ModelMetadata`` and ``ModelDebugInfo``, whose JSON
has camelCase keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob import Buffer, Content, Files, chunks_of, size_of

METADATA = "metadata.json"
DEBUG_INFO = "debug_info.json"
PACKAGE = "model.mlpackage"
COMPILED = "model.mlmodelc"

_IDENTIFIER = "coreml_delegate_"
_WITH_VALUE = "debugSymbolsWithValue"
_MAX_RESULTS = 4096
_IDENTIFIER_DIGITS = 32  # hexadecimal, of SHA-256

_Content = TypeVar("_Content", bound=Content)


@dataclass(frozen=True, slots=True)
class MethodMetadata:
    """Names of one method's arguments, in the order the delegate receives them."""

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of one blob.

    Attributes:
        identifier: Key of the device's cache of compiled models: equal exactly for equal models.
        methods: By ExecuTorch method name; an unshared blob has one method with an empty name.
    """

    identifier: str
    methods: Mapping[str, MethodMetadata]

    def method(self, name: str) -> MethodMetadata:
        """Return the metadata of a method.

        Raises:
            BlobFormatError: The blob is shared and has no such method.
        """
        metadata = self.methods.get("") or self.methods.get(name)
        if metadata is None:
            raise BlobFormatError(
                "blob has no such method", got=repr(name), expected=", ".join(self.methods)
            )
        return metadata

    def encode(self) -> bytes:
        """Return the content of ``metadata.json``; equal metadata gives equal bytes."""
        body: dict[str, object] = {"identifier": self.identifier}
        if set(self.methods) == {""}:
            body |= _names(self.methods[""])
        else:
            body["methods"] = {name: _names(method) for name, method in self.methods.items()}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: Buffer) -> ModelMetadata:
        """Read the content of ``metadata.json``.

        Raises:
            BlobFormatError: Not JSON, or a field is missing or of the wrong type.
        """
        try:
            body: Any = json.loads(bytes(data))
            identifier = body["identifier"]
            listed = body.get("methods", {"": body})
            methods = {name: _method(method) for name, method in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BlobFormatError(f"malformed {METADATA}", got=f"{error!r}") from error
        if not isinstance(identifier, str) or not identifier or not methods:
            raise BlobFormatError(
                f"malformed {METADATA}", got=repr(body), expected="an identifier and names"
            )
        return cls(identifier, methods)


OperationPath = Sequence[Mapping[str, str]]
"""Path to an operation: type, output name and operator of each step."""


def debug_symbol(output: str, operator: str) -> str:
    """Return the debug symbol of an operation.

    Args:
        output: Name of its first output.
        operator: Its MIL op type.
    """
    return f"{output}:{operator}"


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """Maps the operations of a model to the calls that they were translated from.

    Attributes:
        version: Version of the format, as coremltools writes it.
        paths: Path of each operation, by debug symbol.
        handles: Debug handles of the calls of each operation, by debug symbol.
        with_value: Number of results of the call of an operation's last handle, by debug symbol,
            for operations that have these results; missing results are empty. Only this package
            writes and reads the field.
    """

    version: Any
    paths: Mapping[str, OperationPath]
    handles: Mapping[str, Sequence[int]]
    with_value: Mapping[str, int] = field(default_factory=dict[str, int])

    def encode(self) -> bytes:
        """Return the content of ``debug_info.json``; equal info gives equal bytes."""
        body: dict[str, object] = {
            "versionInfo": self.version,
            "debugSymbolToOperationPath": dict(self.paths),
            "debugSymbolToHandles": dict(self.handles),
        }
        if self.with_value:
            body[_WITH_VALUE] = dict(self.with_value)
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: Content) -> DebugInfo:
        """Read the content of ``debug_info.json``.

        Raises:
            BlobFormatError: Not JSON, or a field is missing or of the wrong type.
        """
        try:
            body: Any = json.loads(b"".join(chunks_of(data)))
            handles = {
                symbol: tuple(map(int, listed))
                for symbol, listed in body["debugSymbolToHandles"].items()
            }
            paths = {
                symbol: tuple({str(k): str(v) for k, v in step.items()} for step in path)
                for symbol, path in body["debugSymbolToOperationPath"].items()
            }
            values = {str(s): int(count) for s, count in body.get(_WITH_VALUE, {}).items()}
            if not all(0 <= count <= _MAX_RESULTS for count in values.values()):
                raise ValueError("a call with an impossible number of results")
        except (
            *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
            OverflowError,
        ) as error:
            raise BlobFormatError(f"malformed {DEBUG_INFO}", got=f"{error!r}") from error
        return cls(body.get("versionInfo"), paths, handles, values)


def in_folder(folder: str, files: Mapping[str, Content]) -> Files:
    """Return files with their paths below ``folder``."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def identify(model: Files, methods: Mapping[str, MethodMetadata]) -> tuple[str, Files]:
    """Add the metadata to a model.

    Args:
        model: The model's files, in the folder ``PACKAGE`` or ``COMPILED``.
        methods: See ``ModelMetadata``.

    Returns:
        The model's identifier, and the files of its blob; equal arguments give equal bytes.
    """
    digest = hashlib.sha256()
    for name, content in sorted(model.items()):
        digest.update(f"{name}\0{size_of(content)}\0".encode())
        for chunk in chunks_of(content):
            digest.update(chunk)
    identifier = _IDENTIFIER + digest.hexdigest()[:_IDENTIFIER_DIGITS]
    return identifier, {**model, METADATA: ModelMetadata(identifier, methods).encode()}


def metadata_in(files: Mapping[str, Buffer]) -> ModelMetadata:
    """Read the metadata of a blob.

    Args:
        files: The files of the blob, see ``unflatten``.

    Raises:
        BlobFormatError: The metadata is missing or malformed.
    """
    if METADATA not in files:
        raise BlobFormatError("blob lacks its metadata", expected=METADATA)
    return ModelMetadata.decode(files[METADATA])


def debug_info_in(files: Mapping[str, Content]) -> DebugInfo | None:
    """Read the debug info of a blob, None if missing.

    Raises:
        BlobFormatError: It is malformed.
    """
    content = files.get(DEBUG_INFO)
    return None if content is None else DebugInfo.decode(content)


def models_in(files: Mapping[str, _Content]) -> dict[str, dict[str, _Content]]:
    """Return the files of each model of a blob, by the model's folder: ``PACKAGE`` comes first.

    Args:
        files: The files of the blob.

    Raises:
        BlobFormatError: There is no model.
    """
    models = {
        folder: {
            path.removeprefix(f"{folder}/"): content
            for path, content in files.items()
            if path.startswith(f"{folder}/")
        }
        for folder in (PACKAGE, COMPILED)
    }
    nonempty = {folder: content for folder, content in models.items() if content}
    if not nonempty:
        raise BlobFormatError(
            "blob holds no model",
            got=", ".join(files) or "no file",
            expected=f"{PACKAGE} or {COMPILED}",
        )
    return nonempty


def _names(method: MethodMetadata) -> dict[str, object]:
    return {"inputNames": list(method.input_names), "outputNames": list(method.output_names)}


def _method(body: Any) -> MethodMetadata:
    inputs, outputs = body["inputNames"], body["outputNames"]
    for names in (inputs, outputs):
        if not isinstance(names, list) or not all(
            isinstance(name, str) for name in cast("list[object]", names)
        ):
            raise TypeError(f"{names!r} is not a list of names")
    if not outputs:
        raise ValueError("outputNames is empty")
    return MethodMetadata(tuple(inputs), tuple(outputs))
