"""Reader of MIL weight files: the stored bytes of a constant, as views of the file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.weight_file import check_header, read_record
from coreml_delegate.runtime.mil.dtypes import DType, packed_nbytes

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
        check_header(self.name, self.buffer)

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
        record = read_record(self.name, self.buffer, offset)
        stored = _DTYPES.get(record.dtype)
        if stored is not dtype:
            raise BlobFormatError(
                f"{where}: wrong data type",
                got=stored.label if stored else str(record.dtype),
                expected=dtype.label,
            )
        needed = packed_nbytes(dtype, count)
        if record.size != needed or record.start + record.size > len(self.buffer):
            raise BlobFormatError(
                f"{where}: wrong size",
                got=f"{record.size} bytes at {record.start} of {len(self.buffer)}",
                expected=f"{needed} bytes",
            )
        data = np.frombuffer(self.buffer, dtype=np.uint8, count=record.size, offset=record.start)
        data.flags.writeable = False
        return data
