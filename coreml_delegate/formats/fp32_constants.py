"""fp32 values of constants that fp16 rounds.

Constants that lose much are stored in the model's user-defined metadata.

A model in fp16 has rounded constants: 1e-12 becomes a multiple of 6e-8, and 1 - 1e-7 is 1. The
entry ``coreml_delegate.fp32_constants``, which Core ML ignores, is a JSON object::

    {function: {constant: value}}

A value is a nested list, or one number if all elements are equal. Tools that measure the error of
fp16 use these values. A model of another precision does not have the entry.

Weights would take more memory than the model, so no blob has them. While precision ``auto``
measures a partition, they are files beside those of its blob: ``fp32_constants/NAME``, the elements
in fp32, without a shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob import Buffer, Files

METADATA_KEY = "coreml_delegate.fp32_constants"

Constants = Mapping[str, NDArray[np.float32]]

_FOLDER = "fp32_constants/"

_FEW = 16  # elements; storing a larger constant could take as much memory as the constant
_MANY = 4096
_NORMAL = np.finfo(np.float16).smallest_normal


def as_lost(constant: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return a constant to store if fp16 rounds it, as one number if all elements are equal.

    Large constants, as weights, are stored only if they are subnormal in fp16, with fewer than 11
    bits. Constants beyond fp16 mean infinity and are not stored.

    Args:
        constant: Any shape.

    Returns:
        The constant, or its only number with shape []; None if it need not be stored.
    """
    if _is_uniform(constant):
        constant = constant.ravel()[0]
    elif constant.size > _MANY:
        return None
    if not is_rounded(constant):
        return None
    is_small = constant.size <= _FEW or bool(np.abs(constant).max() < _NORMAL)
    return constant if is_small else None


def is_rounded(constant: NDArray[np.float32]) -> bool:
    """Whether fp16 rounds a constant, and has no infinity in it."""
    with np.errstate(over="ignore"):
        rounded = constant.astype(np.float16)
    return not np.isinf(rounded).any() and not np.array_equal(rounded, constant, equal_nan=True)


def _is_uniform(constant: NDArray[np.float32]) -> bool:
    if not constant.size or constant.flat[0] != constant.flat[-1]:
        return False
    return bool((constant == constant.flat[0]).all())


def write(metadata: MutableMapping[str, str], functions: Mapping[str, Constants | None]) -> None:
    """Store the constants that fp16 loses.

    Args:
        metadata: User-defined metadata of a model; changed in place.
        functions: Constants by function and name, of which ``as_lost`` selects those to store; None
            for functions that are not in fp16.
    """
    stored = {
        function: {
            name: lost.tolist()
            for name, value in constants.items()
            if (lost := as_lost(value)) is not None
        }
        for function, constants in functions.items()
        if constants is not None
    }
    if stored:
        metadata[METADATA_KEY] = json.dumps(stored, sort_keys=True)
    else:
        metadata.pop(METADATA_KEY, None)


def read(metadata: Mapping[str, str], function: str) -> Constants | None:
    """Return the constants of a function; None if the model has no entry.

    Raises:
        BlobFormatError: The entry has another form.
    """
    if METADATA_KEY not in metadata:
        return None
    try:
        content: Any = json.loads(metadata[METADATA_KEY]).get(function)
        if content is None:
            return None
        return {name: np.array(value, np.float32) for name, value in content.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise BlobFormatError(f"malformed metadata {METADATA_KEY}", got=str(error)[:200]) from error


def as_files(constants: Constants) -> Files:
    """Return constants as further files of a blob, in place of metadata by ``write``."""
    return {
        f"{_FOLDER}{name}": np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        for name, value in constants.items()
        if as_lost(value) is None
    }


def split(files: Files) -> tuple[Files, Constants]:
    """Return the files of a blob, and the constants beside them, of rank 1."""
    constants = {
        path.removeprefix(_FOLDER): np.frombuffer(cast(Buffer, content), np.float32)
        for path, content in files.items()
        if path.startswith(_FOLDER)
    }
    return {path: files[path] for path in files if not path.startswith(_FOLDER)}, constants
