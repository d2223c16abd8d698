"""``metadata.json`` of a blob: the identifier and the names the delegate's arguments go by.

camelCase exists on the wire only. Source: ExecuTorch 1.0 to 1.5, ``ModelMetadata`` of the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob import Buffer

FILE_NAME = "metadata.json"


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
        methods: By ExecuTorch method name; the empty name stands for the only method of a blob
            that is not shared.
    """

    identifier: str
    methods: Mapping[str, MethodMetadata]

    def method(self, name: str) -> MethodMetadata:
        """The metadata of a method.

        Raises:
            BlobFormatError: The blob is shared and has no such method.
        """
        found = self.methods.get("") or self.methods.get(name)
        if found is None:
            raise BlobFormatError(
                "blob has no such method", got=repr(name), expected=", ".join(self.methods)
            )
        return found

    def encode(self) -> bytes:
        """The file's content; equal metadata gives equal bytes."""
        body: dict[str, object] = {"identifier": self.identifier}
        if set(self.methods) == {""}:
            body |= _names(self.methods[""])
        else:
            body["methods"] = {name: _names(method) for name, method in self.methods.items()}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: Buffer) -> ModelMetadata:
        """Read the file's content.

        Raises:
            BlobFormatError: Not JSON, or a field is missing or of the wrong type.
        """
        try:
            body: Any = json.loads(bytes(data))
            identifier = body["identifier"]
            listed = body.get("methods", {"": body})
            methods = {name: _method(method) for name, method in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BlobFormatError(f"malformed {FILE_NAME}", got=f"{error!r}") from error
        if not isinstance(identifier, str) or not identifier or not methods:
            raise BlobFormatError(
                f"malformed {FILE_NAME}", got=repr(body), expected="an identifier and names"
            )
        return cls(identifier, methods)


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
