"""How the sizes of a model's inputs depend on each other, kept in the model's own metadata.

Core ML knows a range for each dimension, and nothing of two that must be equal, or of one
that is twice another. The user-defined entry ``coreml_delegate.input_sizes``, which Core ML passes
over, is a JSON object: by function an object, by input a list of sizes, each an integer or an
expression in symbols.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

from coreml_delegate.dynamic_shapes.expressions import SizeExpression
from coreml_delegate.errors import BlobFormatError, OptionError

METADATA_KEY = "coreml_delegate.input_sizes"

Sizes = tuple[int | SizeExpression, ...]


def write(metadata: MutableMapping[str, str], functions: Mapping[str, Any]) -> None:
    """Store sizes.

    Args:
        metadata: User-defined metadata of a model.
        functions: By function and input the sizes; functions without any are left out.
    """
    given = {name: sizes for name, sizes in functions.items() if sizes}
    if given:
        metadata[METADATA_KEY] = json.dumps(given, sort_keys=True)
    else:
        metadata.pop(METADATA_KEY, None)


def stored(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What ``write`` stored, by function.

    Raises:
        BlobFormatError: It is no JSON object.
    """
    try:
        content = json.loads(metadata.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise _malformed(str(error)) from error
    if not isinstance(content, dict):
        raise _malformed(repr(content))
    return cast("dict[str, Any]", content)


def read(metadata: Mapping[str, str], function: str) -> dict[str, Sizes]:
    """The sizes of a function's inputs; empty where they are free of each other.

    Raises:
        BlobFormatError: The entry has another form.
    """
    try:
        return {
            name: tuple(_size(size) for size in sizes)
            for name, sizes in stored(metadata).get(function, {}).items()
        }
    except (AttributeError, TypeError, OptionError) as error:
        raise _malformed(str(error)) from error


def _size(content: Any) -> int | SizeExpression:
    if type(content) is int:
        return content
    if not isinstance(content, str):
        raise TypeError(f"{content!r} as a size")
    return SizeExpression.parse(content)


def _malformed(got: str) -> BlobFormatError:
    return BlobFormatError(f"malformed metadata {METADATA_KEY}", got=got[:200])
