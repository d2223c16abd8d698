"""Read a ``.pte``: the container around the program, and the data that it refers to.

Layout, all little-endian:

    0    uint32    offset of the program's root table
    4    4 bytes   file identifier, ``ET12``
    8    header    optional, see below
    ..             the program's tables (FlatBuffers)
    base           segments: constants, initial values, delegates, named data

    header: "eh00", uint32 header length, uint64 size of the program (this header included),
            uint64 base (offset of the first segment); from length 32 on: uint64 size of all
            segments

A file is mapped, not read, and nothing in it is copied: constants, delegates and named data are
views.

Source: ``schema/program.fbs`` and ``schema/extended_header.h`` of ExecuTorch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.runtime.program.bundle import is_bundle, program_of
from coreml_delegate.runtime.program.decoder import (
    SEGMENT,
    Subsegments,
    decode_method,
    decode_named_data,
    decode_segment,
    decode_subsegments,
)
from coreml_delegate.runtime.program.flatbuffer import (
    U64,
    FlatBuffer,
    Table,
    require_identifier,
    require_index,
    slice_bytes,
)
from coreml_delegate.runtime.program.plan import MethodInfo, TensorSpec

Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"
"""A program: path of a ``.pte``, or its bytes."""

_IDENTIFIER: Final = b"ET12"
_HEADER_MAGIC: Final = b"eh00"
_HEADER: Final = struct.Struct("<4sIQQ")
_HEADER_POSITION: Final = 8
_REMEDY: Final = "Export the program again, or copy the file again if it was transferred."


@dataclass(frozen=True, slots=True)
class _Data:
    """Data outside the plans that plans refer to."""

    segments: tuple[memoryview, ...]
    inline_constants: tuple[memoryview, ...]
    constants: Subsegments | None
    initial_values: tuple[Subsegments, ...]
    named: Mapping[str, memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class PteProgram:
    """A parsed and checked ``.pte``: its methods in file order, and its path or ``<bytes>``."""

    methods: tuple[MethodInfo, ...]
    origin: str
    _data: _Data = field(repr=False)
    _view: memoryview = field(repr=False)
    _external: Callable[[str], memoryview | None] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, source: Source) -> PteProgram:
        """Map (a path) or view (bytes, which must not change afterwards) a program and parse it.

        The program keeps the mapping or the bytes alive.

        Raises:
            BlobFormatError: Not a ``.pte``, or a truncated or corrupt one.
            ProgramError: The file cannot be read.
        """
        view, origin = map_source(source, "the program", "a .pte file")
        with named_errors(origin):
            tables, segments = _split(view)
            data, methods = _decode(FlatBuffer(tables).root(), segments)
            program = cls(methods=methods, origin=origin, _data=data, _view=view)
            for value in (value for method in methods for value in method.values):
                if isinstance(value, TensorSpec):
                    program.tensor_data(value)  # raises an error if the data are not there
        return program

    @property
    def method_names(self) -> tuple[str, ...]:
        """Names of the methods, in file order."""
        return tuple(method.name for method in self.methods)

    @property
    def named_data_keys(self) -> tuple[str, ...]:
        """Keys of the named data, in file order."""
        return tuple(self._data.named)

    def digest(self) -> str:
        """Return the SHA-256 of the file, in hexadecimal; external data are not in it."""
        return hashlib.sha256(self._view).hexdigest()

    @property
    def default_method(self) -> str:
        """Name of the method to run when the caller names none."""
        names = self.method_names
        return names[0] if len(names) == 1 else "forward"

    def method(self, name: str) -> MethodInfo:
        """Return the method called ``name``.

        Raises:
            ProgramError: No such method.
        """
        for method in self.methods:
            if method.name == name:
                return method
        raise ProgramError(
            "program has no such method",
            got=repr(name),
            expected=" or ".join(map(repr, self.method_names)) or "no method at all",
        )

    def named_data(self, key: str) -> memoryview | None:
        """Return the named data of ``key``, as a view; None for an unknown key."""
        data = self._data.named.get(key)
        return self._external(key) if data is None and self._external is not None else data

    def with_external(self, find: Callable[[str], memoryview | None]) -> PteProgram:
        """Return the program with ``find`` as the source of named data that it lacks."""
        return replace(self, _external=find)

    @property
    def external_tensors(self) -> dict[str, TensorSpec]:
        """Tensors stored outside the file, by name."""
        return {
            value.external_key: value
            for method in self.methods
            for value in method.values
            if isinstance(value, TensorSpec) and value.external_key is not None
        }

    def tensor_data(self, spec: TensorSpec) -> memoryview | None:
        """Return the stored bytes of a constant, or the initial value of a mutable tensor.

        Returns:
            ``spec.nbytes`` bytes, as a view; None if the program does not store the tensor.

        Raises:
            BlobFormatError: The reference is invalid.
        """
        if spec.external_key is not None or spec.buffer == 0:
            return None
        if spec.allocation is not None:
            groups = self._data.initial_values
            require_index(spec.mutable_segment, len(groups), "a group of initial values")
            return self._subsegment(groups[spec.mutable_segment], spec)
        if self._data.constants is not None and self._data.constants.offsets:
            return self._subsegment(self._data.constants, spec)
        inline = self._data.inline_constants
        require_index(spec.buffer, len(inline), "a constant")
        return _tensor_slice(inline[spec.buffer], 0, spec)

    def _subsegment(self, group: Subsegments, spec: TensorSpec) -> memoryview:
        require_index(spec.buffer, len(group.offsets), "tensor data")
        segment = _segment(self._data.segments, group.segment)
        return _tensor_slice(segment, group.offsets[spec.buffer], spec)


def holds_program(view: memoryview) -> bool:
    """Whether ``view`` starts as a ``.pte`` or a bundled program does."""
    return bytes(view[4:8]) == _IDENTIFIER or is_bundle(view)


def map_source(source: Source, what: str, expected: str) -> tuple[memoryview, str]:
    """Return the mapped bytes of a file, or ``source`` if it is bytes; and the origin for messages.

    ``what`` describes the file, and ``expected`` the right kind of file, for messages.

    Raises:
        ProgramError: The file cannot be read, or is a model of Core ML by its name.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return memoryview(source).cast("B"), "<bytes>"
    path = Path(source)
    if path.suffix in (".mlmodel", ".mlpackage"):
        raise ProgramError(
            "a model of Core ML is no ExecuTorch program",
            got=str(path),
            expected=expected,
            remedy="Run it with coreml-delegate run, or load it with runtime.load",
        )
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b""), str(path)
            # Copy-on-write: torch requires writable memory, and no write may reach the file.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)), str(path)
    except OSError as error:
        raise ProgramError(
            f"cannot read {what}", got=f"{path} ({error.strerror})", expected=expected
        ) from error


@contextmanager
def named_errors(origin: str) -> Generator[None]:
    """Add the file and a remedy to every format error raised inside."""
    try:
        yield
    except BlobFormatError as error:
        raise BlobFormatError(
            f"{origin}: {error.what}",
            got=error.got,
            expected=error.expected,
            remedy=error.remedy or _REMEDY,
        ) from None


def _split(view: memoryview) -> tuple[memoryview, memoryview]:
    """Check the file identifier, and return tables and segments."""
    if is_bundle(view):
        view = program_of(view)
    require_identifier(view, _IDENTIFIER, "not an ExecuTorch program")
    head = bytes(view[_HEADER_POSITION : _HEADER_POSITION + _HEADER.size])
    if not head.startswith(_HEADER_MAGIC):
        return view, view[:0]
    if len(head) < _HEADER.size:
        raise BlobFormatError("program is truncated", got=f"{len(view)} bytes")
    _, length, program_size, base = _HEADER.unpack(head)
    segments_size = 0
    if length >= _HEADER.size + U64.size:
        position = _HEADER_POSITION + _HEADER.size
        tail = bytes(view[position : position + U64.size])
        segments_size = int.from_bytes(tail, "little")
    end = max(program_size, base + segments_size)
    if program_size < _HEADER_POSITION or end > len(view):
        raise BlobFormatError(
            "program is truncated or its header is corrupt",
            got=f"{len(view)} bytes",
            expected=f"tables of {program_size} bytes and segments up to byte {end}",
        )
    return view[:program_size], view[base:] if base else view[:0]


def _decode(root: Table, area: memoryview) -> tuple[_Data, tuple[MethodInfo, ...]]:
    segments = tuple(
        slice_bytes(area, offset, size, "segment")
        for offset, size in root.tables(4, decode_segment)
    )
    inline = root.tables(3, lambda table: table.raw(0))

    def resolve(location: str, index: int) -> memoryview:
        if location == SEGMENT:
            return _segment(segments, index).toreadonly()
        return inline[require_index(index, len(inline), "inline delegate data")].toreadonly()

    constants = root.table(5)
    data = _Data(
        segments=segments,
        inline_constants=root.tables(2, lambda table: table.raw(0)),
        constants=decode_subsegments(constants) if constants else None,
        initial_values=root.tables(6, decode_subsegments),
        named={
            key: _segment(segments, index).toreadonly()
            for key, index in root.tables(7, decode_named_data)
        },
    )
    methods = root.tables(1, lambda table: decode_method(table, resolve))
    if len({method.name for method in methods}) != len(methods):
        raise BlobFormatError(
            "program has two methods of one name", got=str([method.name for method in methods])
        )
    return data, methods


def _tensor_slice(view: memoryview, offset: int, spec: TensorSpec) -> memoryview:
    return slice_bytes(view, offset, spec.nbytes, f"data of tensor {spec}")


def _segment(segments: tuple[memoryview, ...], index: int) -> memoryview:
    return segments[require_index(index, len(segments), "a segment")]
