"""The scalar types of MIL, and their numpy dtypes.

Source: ``DataType`` in coremltools' ``MIL.proto``. Sub-byte integers are packed, least significant
bits first, in immediate values and weight files; unpacked they are ``int8`` or ``uint8``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.weight_file import unpack_integers


@dataclass(frozen=True, slots=True)
class _Info:
    label: str  # as coremltools prints it
    number: int  # in MIL.proto
    bits: int
    numpy: str | None  # None: no array form


class DType(enum.Enum):
    """A MIL scalar type; ``label`` is coremltools' spelling, ``fp16`` or ``uint4``."""

    BOOL = _Info("bool", 1, 8, "bool")
    STRING = _Info("string", 2, 0, None)
    FP16 = _Info("fp16", 10, 16, "float16")
    FP32 = _Info("fp32", 11, 32, "float32")
    FP64 = _Info("fp64", 12, 64, "float64")
    BF16 = _Info("bf16", 13, 16, None)
    INT8 = _Info("int8", 21, 8, "int8")
    INT16 = _Info("int16", 22, 16, "int16")
    INT32 = _Info("int32", 23, 32, "int32")
    INT64 = _Info("int64", 24, 64, "int64")
    INT4 = _Info("int4", 25, 4, "int8")
    UINT8 = _Info("uint8", 31, 8, "uint8")
    UINT16 = _Info("uint16", 32, 16, "uint16")
    UINT32 = _Info("uint32", 33, 32, "uint32")
    UINT64 = _Info("uint64", 34, 64, "uint64")
    UINT4 = _Info("uint4", 35, 4, "uint8")
    UINT2 = _Info("uint2", 36, 2, "uint8")
    UINT1 = _Info("uint1", 37, 1, "uint8")
    UINT6 = _Info("uint6", 38, 6, "uint8")
    UINT3 = _Info("uint3", 39, 3, "uint8")

    @property
    def label(self) -> str:
        """Coremltools' name of the type, for example ``fp16``."""
        return self.value.label

    @property
    def bits(self) -> int:
        """Width of one element in storage, in bits (0 for strings)."""
        return self.value.bits

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating-point type."""
        return self.label.startswith(("fp", "bf"))

    @property
    def is_packed(self) -> bool:
        """Whether several elements share one byte in storage."""
        return 0 < self.bits < 8

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype that holds unpacked elements.

        Raises:
            BlobFormatError: The type has no numpy form (strings, bf16).
        """
        if self.value.numpy is None:
            raise BlobFormatError("MIL type has no numpy form", got=self.label)
        return np.dtype(self.value.numpy)

    @classmethod
    def from_number(cls, number: int) -> DType:
        """Return the type with ``number`` in MIL.proto.

        Raises:
            BlobFormatError: No such type, or a type that no opset uses (fp8).
        """
        try:
            return _BY_NUMBER[number]
        except KeyError:
            raise BlobFormatError("unknown MIL data type", got=str(number)) from None

    @classmethod
    def from_label(cls, label: str) -> DType:
        """Return the type that coremltools calls ``label``, as ``cast`` does in ``dtype``.

        Raises:
            BlobFormatError: No such type.
        """
        try:
            return _BY_LABEL[label]
        except KeyError:
            raise BlobFormatError(
                "unknown MIL dtype name", got=repr(label), expected=", ".join(_BY_LABEL)
            ) from None


_BY_NUMBER = {member.value.number: member for member in DType}
_BY_LABEL = {member.value.label: member for member in DType}


def packed_nbytes(dtype: DType, count: int) -> int:
    """Return the bytes that ``count`` elements of ``dtype`` take in storage."""
    return (dtype.bits * count + 7) // 8


def unpack_bits(packed: NDArray[np.uint8], dtype: DType, count: int) -> NDArray[np.generic]:
    """Unpack ``count`` integers of a packed type to bytes.

    ``packed`` is [ceil(count * bits / 8)], uint8, elements from the least significant bit on.

    Returns:
        [count], int8 for int4, else uint8.
    """
    values = unpack_integers(packed, dtype.bits, count)
    if dtype is DType.INT4:
        return (values.view(np.int8) ^ 8) - np.int8(8)
    return values
