"""Reader of MIL weight files.

Layout (little endian)::

    header, 64 bytes    u32 count, u32 version (2), zeros
    per blob            64-byte record: u32 0xDEADBEEF, u32 data type, u64 size in bytes,
                        u64 offset of the data, u64 padding in bits (sub-byte types), zeros
                        data, at a multiple of 64 bytes

A MIL value refers to a blob by the offset of its record.

Source: coremltools' ``mlmodel/src/MILBlob/Blob/StorageFormat.hpp``, checked against files written
by ``libmilstoragepython``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.runtime.mil.dtypes import DType, packed_nbytes

_HEADER = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQQ")
_SENTINEL = 0xDEADBEEF
_VERSION = 2
_DTYPES = {
    1: DType.FP16,
    2: DType.FP32,
    3: DType.UINT8,
    4: DType.INT8,
    5: DType.BF16,
    6: DType.INT16,
    7: DType.UINT16,
    8: DType.INT4,
    9: DType.UINT1,
    10: DType.UINT2,
    11: DType.UINT4,
    12: DType.UINT3,
    13: DType.UINT6,
    14: DType.INT32,
    15: DType.UINT32,
}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file in memory or mapped; every read is a view of it."""

    name: str
    buffer: memoryview

    def __post_init__(self) -> None:
        if len(self.buffer) < _HEADER.size:
            raise BlobFormatError("weight file is too short", got=f"{len(self.buffer)} bytes")
        _, version = _HEADER.unpack_from(self.buffer)
        if version != _VERSION:
            raise BlobFormatError(
                f"weight file {self.name!r} has another version", got=str(version), expected="2"
            )

    def read(self, offset: int, dtype: DType, count: int) -> NDArray[np.uint8]:
        """The stored bytes of one blob.

        Args:
            offset: Of the blob's record, in bytes.
            dtype: The type the program declares; must be the stored one.
            count: Number of elements the program declares.

        Returns:
            [nbytes], uint8, a read-only view.

        Raises:
            BlobFormatError: The record or its data lies outside the file, or disagrees.
        """
        where = f"weight file {self.name!r} at {offset}"
        if offset + _RECORD.size > len(self.buffer):
            raise BlobFormatError(
                f"{where}: record lies outside the file", expected=f"below {len(self.buffer)}"
            )
        sentinel, number, size, start, _ = _RECORD.unpack_from(self.buffer, offset)
        if sentinel != _SENTINEL:
            raise BlobFormatError(f"{where}: no record here", got=hex(sentinel))
        stored = _DTYPES.get(number)
        if stored is not dtype:
            raise BlobFormatError(
                f"{where}: wrong data type",
                got=stored.label if stored else str(number),
                expected=dtype.label,
            )
        needed = packed_nbytes(dtype, count)
        if size != needed or start + size > len(self.buffer):
            raise BlobFormatError(
                f"{where}: wrong size",
                got=f"{size} bytes at {start} of {len(self.buffer)}",
                expected=f"{needed} bytes",
            )
        data = np.frombuffer(self.buffer, dtype=np.uint8, count=size, offset=start)
        data.flags.writeable = False
        return data
