"""Values of a running program, and their conversion from and to arrays and constants.

A tensor of the program is a torch tensor of its *storage* dtype: the same dtype where torch
computes in it, a wider signed integer for the unsigned integers that torch can only store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.engines.limits import MAX_LIST
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Constant,
    Literal,
    TensorType,
    ValueType,
    writable_alias,
)

# Unsigned integers that torch can only store -> the signed integer that computes their values.
_WIDENED = {DType.UINT16: torch.int32, DType.UINT32: torch.int64, DType.UINT64: torch.int64}
# MIL dtype -> torch dtype of its values, except for strings.
_STORAGE_DTYPES = {
    **{
        dtype: getattr(torch, dtype.numpy.name)
        for dtype in DType
        if dtype not in (DType.STRING, DType.BF16)
    },
    DType.BF16: torch.bfloat16,
    **_WIDENED,
}


class TensorList(tuple["Tensor | None", ...]):
    """An immutable MIL list, with None for unwritten elements."""

    __slots__ = ()

    def replaced(self, indices: Iterable[int], values: Iterable[Tensor]) -> TensorList:
        """Return a list with ``values`` at ``indices``, extended if necessary."""
        items: list[Tensor | None] = list(self)
        for index, value in zip(indices, values, strict=True):
            if not 0 <= index < MAX_LIST:
                raise IndexError(f"list index {index} is outside of [0, {MAX_LIST})")
            items.extend([None] * (index + 1 - len(items)))
            items[index] = value
        return TensorList(items)


Value: TypeAlias = "Tensor | TensorList | str | dict[Any, Any]"
"""A value of a running program; only ``classify`` returns strings and dicts."""


def array_to_tensor(array: NDArray[np.generic], dtype: DType) -> Tensor:
    """Return a tensor on the memory of ``array`` if its layout allows, else on a copy.

    ``array`` has the numpy dtype of ``dtype`` and any strides, and may be read-only.

    Returns:
        A tensor of the same shape and the storage dtype, which must not be written to.
    """
    storage = storage_dtype(dtype)
    if dtype in _WIDENED:
        return torch.from_numpy(array.astype(np.int64)).to(storage)
    dense = np.asarray(array, order="C")
    return torch.from_numpy(dense if dense.flags.writeable else writable_alias(dense))


def constant_to_tensor(constant: Constant) -> Tensor:
    """Return a constant as a tensor that shares its memory.

    Raises:
        UnsupportedOpError: The constant is no tensor of numbers.
    """
    if not isinstance(constant.type, TensorType) or not isinstance(constant.data, np.ndarray):
        raise UnsupportedOpError("constant is not a tensor of numbers", got=str(constant.type))
    return array_to_tensor(constant.data, constant.type.dtype)


def to_literal(value: Constant | Tensor) -> Any:
    """Return a value as Python scalars, strings and nested tuples, the form of attributes."""
    if not isinstance(value, Tensor):
        return _literal(value.data)
    if value.numel() > MAX_LIST:
        raise ValueError(f"{describe(value)} where at most {MAX_LIST} numbers are possible")
    return _to_tuple(value.tolist())


def value_to_array(value: Value, declared: ValueType) -> NDArray[np.generic]:
    """Return a value as a new array, in the dtype that the program declares.

    Strings become arrays of numpy strings; a dict becomes a rank-0 object array.
    """
    if isinstance(value, Tensor) and isinstance(declared, TensorType):
        return np.array(value.numpy(), dtype=declared.dtype.numpy, order="C")
    boxed = np.empty((), dtype=object)
    boxed[()] = list(value) if isinstance(value, TensorList) else value
    return boxed.astype(str) if isinstance(value, str) else boxed


def cast_to_declared(value: Any, declared: ValueType) -> Value:
    """Return a kernel's result in the dtype that the program declares.

    Kernels may compute in a wider dtype of the same kind (fp32 for fp16, int64 for indices); the
    result is rounded here, once per op.

    Raises:
        TypeError: The kind of the result's dtype differs from the declared kind.
    """
    if not isinstance(value, Tensor) or not isinstance(declared, TensorType):
        return cast("Value", value)
    storage = storage_dtype(declared.dtype)
    if value.dtype == storage:
        return value
    if _kind(value.dtype) != _kind(storage):
        raise TypeError(f"computed {describe(value)} where the program declares {declared}")
    return value.to(storage)


def storage_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype of values of ``dtype``.

    Raises:
        UnsupportedOpError: ``dtype`` is a string.
    """
    try:
        return _STORAGE_DTYPES[dtype]
    except KeyError:
        raise UnsupportedOpError("MIL dtype has no tensor form", got=dtype.label) from None


def widen_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as fp32 if it is fp16 or bf16, else unchanged."""
    return tensor.float() if tensor.dtype in _NARROW_FLOATS else tensor


def describe(value: object) -> str:
    """Return a value's dtype and shape for a message, for example ``float16[1, 3]``."""
    if isinstance(value, Tensor):
        dims = ", ".join(str(d) for d in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{dims}]"
    if isinstance(value, TensorList):
        return f"list[{len(value)}]"
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        if any(isinstance(item, Tensor) for item in items):
            return "(" + ", ".join(describe(item) for item in items) + ")"
    text = repr(value)
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


def describe_operand(values: tuple[Value | Constant | None, ...]) -> str:
    """Describe the argument of one parameter for a message; several values if it is variadic."""
    described = [describe(_shorten(value)) for value in values]
    return described[0] if len(described) == 1 else f"({', '.join(described)})"


_NARROW_FLOATS = {torch.float16, torch.bfloat16}
_MAX_REPR = 80
_MAX_SHOWN = 8


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _shorten(value: Value | Constant | None) -> object:
    if not isinstance(value, Constant):
        return value
    data = value.data
    # Short vectors are attributes such as strides and axes, whose values matter more than shapes.
    if isinstance(data, np.ndarray) and (data.ndim > 1 or data.size > _MAX_SHOWN):
        return _PlainText(str(value.type))
    return _literal(data)


class _PlainText(str):
    """Text that appears without quotes in a message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _literal(data: Literal) -> Any:
    if isinstance(data, np.ndarray):
        return _to_tuple(data.tolist())
    if isinstance(data, tuple):
        return tuple(_literal(item) for item in data)
    return data


def _to_tuple(value: Any) -> Any:
    return tuple(_to_tuple(item) for item in value) if isinstance(value, list) else value
