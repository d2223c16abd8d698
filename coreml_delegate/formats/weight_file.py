"""Reader and writer of MIL weight files.

Layout (little endian)::

    header, 64 bytes    u32 count, u32 version (2), zeros
    per weight          64-byte record: u32 0xDEADBEEF, u32 data type, u64 size in bytes,
                        u64 offset of the data, u64 padding in bits (sub-byte types), zeros
                        data, at a multiple of 64 bytes; elements of fewer than 8 bits without
                        gaps, least significant bits first

A MIL value refers to a weight by the offset of its record.

Source: coremltools' ``mlmodel/src/MILBlob/Blob/StorageFormat.hpp``, checked against files written
by ``libmilstoragepython``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob import Buffer, Pieces

ALIGNMENT = 64  # of records and data, in bytes

_HEADER = struct.Struct("<II56x")
_SHORT_HEADER = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQQ32x")
_SENTINEL = 0xDEADBEEF
_VERSION = 2
_NIBBLE = 4  # bits
_PACKED_AT_ONCE = 2**20  # elements, a multiple of 8


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """Type and location of a weight in its file.

    Attributes:
        dtype: The data type's number.
        size: Size in bytes.
        start: Offset of its first byte.
    """

    dtype: int
    size: int
    start: int
    padding: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as stored in a file.

    Attributes:
        dtype: The data type's number.
        padding: Unused bits of its last byte.
    """

    dtype: int
    padding: int
    data: memoryview


def pack_integers(values: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    """Pack integers of fewer than eight bits to their stored form.

    Args:
        values: [count], int8 or uint8.
        bits: Width of an element.

    Returns:
        [ceil(count * bits / 8)].
    """
    packed = [
        _pack(values[start : start + _PACKED_AT_ONCE].view(np.uint8), bits)
        for start in range(0, len(values), _PACKED_AT_ONCE)
    ]
    return np.concatenate([np.empty(0, np.uint8), *packed])


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    digits = np.unpackbits(values[:, None], axis=1, bitorder="little", count=bits)
    return np.packbits(digits.reshape(-1), bitorder="little")


def unpack_integers(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack stored integers of fewer than eight bits to one per byte, unsigned.

    Args:
        packed: [ceil(count * bits / 8)].
        bits: Width of an element.
        count: Number of elements.

    Returns:
        [count].
    """
    if bits == _NIBBLE:
        pairs = np.stack((packed & 0x0F, packed >> _NIBBLE), axis=-1)
        return pairs.reshape(-1)[:count].astype(np.uint8, copy=False)
    digits = np.unpackbits(packed, bitorder="little", count=count * bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (digits.reshape(count, bits) * weights).sum(axis=1, dtype=np.uint8)


def check_header(name: str, buffer: memoryview) -> None:
    """Check that a file is a weight file.

    Raises:
        BlobFormatError: It is too short, or of another version.
    """
    if len(buffer) < _SHORT_HEADER.size:
        raise BlobFormatError("weight file is too short", got=f"{len(buffer)} bytes")
    _, version = _SHORT_HEADER.unpack_from(buffer)
    if version != _VERSION:
        raise BlobFormatError(
            f"weight file {name!r} has another version", got=str(version), expected="2"
        )


def read_record(name: str, buffer: memoryview, offset: int) -> WeightRecord:
    """Read a record; the caller checks that its data lies inside the file.

    Args:
        name: Name of the file, for messages.
        buffer: The whole file.
        offset: Offset of the record in bytes.

    Raises:
        BlobFormatError: There is no record.
    """
    if offset + _RECORD.size > len(buffer):
        raise BlobFormatError(
            f"weight file {name!r} at {offset}: record lies outside the file",
            expected=f"below {len(buffer)}",
        )
    sentinel, dtype, size, start, padding = _RECORD.unpack_from(buffer, offset)
    if sentinel != _SENTINEL:
        raise BlobFormatError(
            f"weight file {name!r} at {offset}: no record here", got=hex(sentinel)
        )
    return WeightRecord(dtype, size, start, padding)


def read_weight(name: str, buffer: memoryview, offset: int) -> StoredWeight:
    """Read a weight, without a copy.

    Raises:
        BlobFormatError: The record or its data lies outside the file.
    """
    record = read_record(name, buffer, offset)
    end = record.start + record.size
    if end > len(buffer):
        raise BlobFormatError(
            f"weight file {name!r} at {offset}: data lies outside the file",
            got=f"{record.size} bytes at {record.start} of {len(buffer)}",
        )
    return StoredWeight(record.dtype, record.padding, buffer[record.start : end])


class WeightFile:
    """A weight file that is complete after each appended weight.

    Args:
        path: The file, which is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        path.write_bytes(_HEADER.pack(0, _VERSION))

    def append(self, weight: StoredWeight) -> int:
        """Append a weight; return the offset of its record in bytes."""
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            gap = -end % ALIGNMENT
            offset = end + gap
            start = offset + _RECORD.size
            size = weight.data.nbytes
            file.write(bytes(gap))
            file.write(_RECORD.pack(_SENTINEL, weight.dtype, size, start, weight.padding))
            file.write(weight.data)
            self._count += 1
            file.seek(0)
            file.write(_HEADER.pack(self._count, _VERSION))
        return offset


def write_weights(weights: Iterable[StoredWeight]) -> tuple[Pieces, list[int]]:
    """Write a weight file.

    Args:
        weights: The weights in the order in which to write them.

    Returns:
        The file, without a copy of the weights' bytes, and the offset of each weight's record in
        bytes.
    """
    parts: list[Buffer] = [b""]
    offsets: list[int] = []
    end = _HEADER.size
    for weight in weights:
        start = end + _RECORD.size
        size = weight.data.nbytes
        gap = -size % ALIGNMENT
        offsets.append(end)
        parts += [
            _RECORD.pack(_SENTINEL, weight.dtype, size, start, weight.padding),
            weight.data,
            bytes(gap),
        ]
        end = start + size + gap
    parts[0] = _HEADER.pack(len(offsets), _VERSION)
    return Pieces(tuple(parts)), offsets
