"""Types, attributes and locations of MLIR as Python values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.stablehlo.parse import QUANTIZED, Mlir

_DTYPES = MappingProxyType({dtype.short: dtype for dtype in DType})
_SIGNED = re.compile(r"s(i\d+)\Z")
_REASONS = (
    (re.compile(r"complex"), "Core ML has no complex numbers"),
    (re.compile(r"f8|f6|f4|tf32"), "Core ML has no floats of 8 bits or fewer"),
    (re.compile(r"u?i[24]\Z"), "Core ML computes with no integers of 4 bits or fewer"),
    (re.compile(r"!quant"), QUANTIZED),
)
BFLOAT16 = "bf16"
"""MLIR's name of the element type."""

_FILE = re.compile(r'"([^"]*)":(\d+):\d+')
_NAME = re.compile(r'loc\("([^"]*)"\(')


def element_type(spelled: str, *, bfloat16_as_float32: bool) -> DType:
    """Return the element type for MLIR's name of it, for example ``ui8``.

    Raises:
        UnsupportedOperatorError: Core ML cannot store its elements.
    """
    spelled = _SIGNED.sub(r"\1", spelled)
    if spelled in _DTYPES:
        return _DTYPES[spelled]
    if spelled == BFLOAT16:
        if bfloat16_as_float32:
            return DType.FLOAT32
        raise UnsupportedOperatorError(
            "element type bf16: Core ML has no bfloat16",
            remedy="Pass bfloat16='float32' to read it as float32",
        )
    reasons = [reason for pattern, reason in _REASONS if pattern.match(spelled)]
    raise UnsupportedOperatorError(
        f"element type {spelled}: {reasons[0] if reasons else 'Core ML cannot store it'}"
    )


def is_tensor(type: Mlir) -> bool:
    """Whether a type is a tensor type, not a token or a tuple."""
    return str(type).startswith("tensor<")


def shape_of(type: Mlir) -> tuple[int | None, ...]:
    """Return the sizes of a tensor type; None for symbolic sizes.

    Raises:
        UnsupportedOperatorError: Its rank is unknown.
    """
    if not type.has_rank:
        raise UnsupportedOperatorError("the rank of a tensor is not known", got=str(type))
    return tuple(
        None if type.is_dynamic_dim(axis) else int(type.get_dim_size(axis))
        for axis in range(type.rank)
    )


def python_value(attribute: Mlir) -> Any:
    """Return an attribute as a Python value.

    Numbers, bools and strings, in lists and dictionaries too; tensors as NumPy arrays; names of
    functions without ``@``; members of StableHLO's enumerations, and all other attributes, as text.
    """
    kind = type(attribute).__name__
    if kind in ("BoolAttr", "IntegerAttr", "FloatAttr", "StringAttr", "FlatSymbolRefAttr"):
        return attribute.value
    if kind == "DictAttr":
        return {entry.name: python_value(entry.attr) for entry in attribute}
    if kind == "ArrayAttr":
        return [python_value(element) for element in attribute]
    if kind.startswith("Dense") and kind.endswith("ArrayAttr"):
        return list(attribute)
    if kind in ("DenseIntElementsAttr", "DenseFPElementsAttr"):
        return tensor_value(attribute)
    if kind == "UnitAttr":
        return True
    text = str(attribute)
    member = re.fullmatch(r"#\w+<\w+ (\w+)>", text)  # as #stablehlo<comparison_direction EQ>
    return member.group(1) if member else text


def tensor_value(attribute: Mlir) -> NDArray[Any]:
    """Return a dense tensor; bf16 as float32, and equal elements as a broadcast view."""
    shape = tuple(attribute.type.shape)
    spelled = str(attribute.type.element_type)
    if attribute.is_splat and int(np.prod(shape)):
        element = attribute.get_splat_value().value
        dtype = np.float32 if spelled == BFLOAT16 else _DTYPES[_SIGNED.sub(r"\1", spelled)].numpy
        return np.broadcast_to(np.array(element).astype(dtype), shape)
    if spelled == BFLOAT16:
        return _bfloat16_values(str(attribute)).reshape(shape)
    return np.array(attribute)


def _bfloat16_values(text: str) -> NDArray[np.float32]:
    """Parse a printed tensor: numbers, hex bits of each element, or hex bits of all in a string."""
    body = text[text.index("<") + 1 : text.rindex("> :")]
    if body.startswith('"0x'):
        bits = np.frombuffer(bytes.fromhex(body[3:-1]), np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    elements = [
        np.uint32(int(token, 16) << 16).view(np.float32) if "0x" in token else np.float32(token)
        for token in re.findall(r"[^\[\],\s]+", body)
    ]
    return np.array(elements, np.float32)


def resources(text: str) -> dict[str, bytes]:
    """Return the resources of a printed module by name, without the 4 bytes of their alignment."""
    entries = re.finditer(r'([\w.$-]+|"[^"\n]*"): "0x([0-9A-Fa-f]*)"', text.rpartition("{-#")[2])
    return {e.group(1).strip('"'): bytes.fromhex(e.group(2))[4:] for e in entries}


def resource_array(key: str, content: bytes, dtype: DType, shape: Sequence[int]) -> NDArray[Any]:
    """Return the tensor in a resource, little-endian and row-major.

    Raises:
        UnsupportedOperatorError: The resource has another size.
    """
    width = np.dtype(dtype.numpy).itemsize
    count = int(np.prod(shape, dtype=np.int64))
    if len(content) == width and count != 1:
        content *= count
    if len(content) != width * count:
        raise UnsupportedOperatorError(
            f"resource {key!r} has another size than its type",
            got=f"{len(content)} bytes",
            expected=str(width * count),
        )
    return np.frombuffer(content, dtype.numpy).reshape(shape)


def describe_location(location: Mlir) -> str:
    """Return a location for a message: name and line, if known."""
    text = str(location)
    name, file = _NAME.search(text), _FILE.search(text)
    parts: list[str] = []
    if name:
        parts.append(name.group(1).removesuffix(":"))
    if file:
        path, line = file.groups()
        parts.append(f"line {line}" if path in ("-", "") else f"{path.rpartition('/')[2]}:{line}")
    if not parts:
        plain = re.fullmatch(r'loc\("([^"]*)"\)', text)
        parts = [plain.group(1)] if plain else []
    return ", ".join(parts)


def argument_name(location: Mlir) -> str | None:
    """Return the name that a location gives an argument, or None."""
    name = getattr(location, "name_str", None)
    return name if isinstance(name, str) and name else None
