"""Relations between the sizes of a model's inputs, stored in the model's user-defined metadata.

Core ML has a range per dimension, and cannot express that sizes are equal, or that one is twice the
other. The entry ``coreml_delegate.input_sizes``, which Core ML ignores, is a JSON object::

    {function: {input: [size, ...]}}

A size is an integer, or a string with an expression in symbols.
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
    """Store the sizes of inputs.

    Args:
        metadata: User-defined metadata of a model; changed in place.
        functions: Sizes by function and input; functions without sizes are omitted.
    """
    nonempty = {name: sizes for name, sizes in functions.items() if sizes}
    if nonempty:
        metadata[METADATA_KEY] = json.dumps(nonempty, sort_keys=True)
    else:
        metadata.pop(METADATA_KEY, None)


def read_all(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the unparsed sizes that ``write`` stored, by function.

    Raises:
        BlobFormatError: The entry is not a JSON object.
    """
    try:
        content = json.loads(metadata.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise _malformed(str(error)) from error
    if not isinstance(content, dict):
        raise _malformed(repr(content))
    return cast("dict[str, Any]", content)


def read(metadata: Mapping[str, str], function: str) -> dict[str, Sizes]:
    """Return the sizes of a function's inputs; empty if they do not depend on each other.

    Raises:
        BlobFormatError: The entry has another form.
    """
    try:
        return {
            name: tuple(_size(size) for size in sizes)
            for name, sizes in read_all(metadata).get(function, {}).items()
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
