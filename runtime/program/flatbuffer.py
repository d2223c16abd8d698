"""A bounds-checked reader of FlatBuffers tables.

The generated readers of ExecuTorch trust every offset, which is right for bytes that the same
process has written and wrong for other files: a flipped bit sends them outside the buffer, or into
a vector of four billion elements. This reader checks every access and bounds the total work by the
size of the buffer.

Layout, all little-endian: the buffer starts with the offset of its root table (``uint32``) and a
four-byte file identifier. A table starts with the signed distance back to its vtable (``int32``);
the vtable holds its own size and the table's (``uint16`` each), then one ``uint16`` per field: the
field's offset in the table, 0 if the field is absent and has its default. Scalars are stored in
place; strings, vectors and tables are stored as the ``uint32`` distance from the field to the
object. Vectors and strings start with their length (``uint32``).

Source: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeVar

from coreml_delegate.errors import BlobFormatError

T = TypeVar("T")

# Layouts of scalars.
I8: Final = struct.Struct("<b")
U8: Final = struct.Struct("<B")
BOOL: Final = struct.Struct("<?")
I32: Final = struct.Struct("<i")
U32: Final = struct.Struct("<I")
I64: Final = struct.Struct("<q")
U64: Final = struct.Struct("<Q")
F64: Final = struct.Struct("<d")
_VOFFSET: Final = struct.Struct("<H")
_VTABLE_HEADER: Final = 4  # bytes before the first field: vtable size, table size

# Reading every object once costs about one unit per byte. Writers may share strings and vtables, so
# a small multiple is allowed; more means that the same bytes are read again and again.
_WORK_PER_BYTE: Final = 8
_WORK_FLOOR: Final = 4096


def require_index(index: int, count: int, what: str) -> int:
    """Return ``index``, which refers to one of ``count`` items.

    Raises:
        BlobFormatError: There is no such item.
    """
    if not 0 <= index < count:
        raise BlobFormatError(
            f"program refers to {what} that it does not have",
            got=f"index {index}",
            expected=f"0..{count - 1}" if count else "none at all",
        )
    return index


def slice_bytes(view: memoryview, offset: int, size: int, what: str) -> memoryview:
    """Return ``size`` bytes of a file from ``offset`` on.

    Raises:
        BlobFormatError: The file is shorter.
    """
    if offset + size > len(view):
        raise BlobFormatError(
            f"{what} lies outside the file",
            got=f"bytes {offset}..{offset + size}",
            expected=f"within {len(view)} bytes",
        )
    return view[offset : offset + size]


def require_identifier(view: memoryview, identifier: bytes, what: str) -> None:
    """Check the file identifier.

    Raises:
        BlobFormatError: The file has another identifier; the message starts with ``what``.
    """
    got = bytes(view[4:8])
    if got != identifier:
        raise BlobFormatError(
            what, got=f"file identifier {got!r} in {len(view)} bytes", expected=repr(identifier)
        )


class FlatBuffer:
    """Checked access to the bytes of one FlatBuffers buffer, from its root offset on."""

    __slots__ = ("_data", "_size", "_work")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._size = len(data)
        self._work = _WORK_FLOOR + _WORK_PER_BYTE * self._size

    def root(self) -> Table:
        """Return the root table.

        Raises:
            BlobFormatError: The buffer is too short, or the root offset is outside of it.
        """
        return Table(self, int(self.scalar(U32, 0)))

    def scalar(self, layout: struct.Struct, position: int) -> int | float | bool:
        """Return the scalar of ``layout`` at byte ``position``."""
        self.check(position, layout.size)
        return layout.unpack_from(self._data, position)[0]

    def follow(self, position: int) -> int:
        """Return the absolute position of the object that the offset at ``position`` refers to."""
        return position + int(self.scalar(U32, position))

    def bytes_at(self, position: int, size: int) -> memoryview:
        """Return a view of ``size`` bytes at ``position``."""
        self.check(position, size)
        return self._data[position : position + size]

    def check(self, position: int, size: int) -> None:
        """Refuse an access outside the buffer, or beyond the bound on the total work."""
        if position < 0 or size < 0 or position + size > self._size:
            raise BlobFormatError(
                "program data is truncated or corrupt",
                got=f"a reference to bytes {position}..{position + size}",
                expected=f"a reference within {self._size} bytes",
            )
        self._work -= size
        if self._work < 0:
            raise BlobFormatError(
                "program data is corrupt", got="objects that overlap without bound"
            )


class Table:
    """One table; fields are addressed by their index in the schema, in declaration order.

    A union takes two indices: its type, then its value.
    """

    __slots__ = ("_buffer", "_fields", "_position", "_vtable")

    def __init__(self, buffer: FlatBuffer, position: int) -> None:
        self._buffer = buffer
        self._position = position
        self._vtable = position - int(buffer.scalar(I32, position))
        size = int(buffer.scalar(_VOFFSET, self._vtable))
        self._fields = max(size - _VTABLE_HEADER, 0) // _VOFFSET.size

    def _field(self, index: int) -> int | None:
        """Return the absolute position of field ``index``, None if it is absent."""
        if index >= self._fields:
            return None
        slot = self._vtable + _VTABLE_HEADER + index * _VOFFSET.size
        offset = int(self._buffer.scalar(_VOFFSET, slot))
        return self._position + offset if offset else None

    def _vector(self, index: int, element_size: int) -> tuple[int, int]:
        """Return position of the first element, and length, of the vector in field ``index``."""
        field = self._field(index)
        if field is None:
            return 0, 0
        start = self._buffer.follow(field)
        length = int(self._buffer.scalar(U32, start))
        self._buffer.check(start + U32.size, length * element_size)
        return start + U32.size, length

    def integer(self, index: int, layout: struct.Struct, default: int = 0) -> int:
        """Return an integer or enum field."""
        field = self._field(index)
        return default if field is None else int(self._buffer.scalar(layout, field))

    def real(self, index: int, layout: struct.Struct) -> float:
        """Return a floating-point field, 0.0 by default."""
        field = self._field(index)
        return 0.0 if field is None else float(self._buffer.scalar(layout, field))

    def table(self, index: int) -> Table | None:
        """Return a table field, None if absent."""
        field = self._field(index)
        return None if field is None else Table(self._buffer, self._buffer.follow(field))

    def text(self, index: int) -> str | None:
        """Return a string field, None if absent.

        Raises:
            BlobFormatError: The bytes are not UTF-8.
        """
        if self._field(index) is None:
            return None
        raw = bytes(self.raw(index))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise BlobFormatError(
                "program data is corrupt", got=repr(raw[:40]), expected="a UTF-8 string"
            ) from None

    def raw(self, index: int) -> memoryview:
        """Return a vector of bytes (or the bytes of a string), as a view; empty if absent."""
        start, length = self._vector(index, 1)
        return self._buffer.bytes_at(start, length)

    def scalars(self, index: int, layout: struct.Struct) -> tuple[int | float | bool, ...]:
        """Return a vector of scalars; empty if absent."""
        start, length = self._vector(index, layout.size)
        view = self._buffer.bytes_at(start, length * layout.size)
        return tuple(value for (value,) in layout.iter_unpack(view))

    def integers(self, index: int, layout: struct.Struct) -> tuple[int, ...]:
        """Return a vector of integers; empty if absent."""
        return tuple(int(value) for value in self.scalars(index, layout))

    def tables(self, index: int, decode: Callable[[Table], T]) -> tuple[T, ...]:
        """Return a vector of tables, each decoded by ``decode``; empty if absent."""
        start, length = self._vector(index, U32.size)
        follow = self._buffer.follow
        return tuple(
            decode(Table(self._buffer, follow(start + i * U32.size))) for i in range(length)
        )
