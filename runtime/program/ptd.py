"""Read ``.ptd`` files: tensors and named data of a program stored outside the ``.pte``.

Layout, all little-endian:

    0    uint32    offset of the root table, from the start of the file
    4    4 bytes   file identifier, ``FT01``
    8    header    "FH01", uint32 header length, then uint64 each: offset and size of the tables,
                   offset of the first segment, size of all segments
    ..             tables (FlatBuffers) and segments

A file is mapped, not read, and nothing in it is copied.

Source: ``extension/flat_tensor/serialize/flat_tensor.fbs`` and ``flat_tensor_header.h`` of
ExecuTorch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, cast

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.runtime.program.decoder import decode_named_data, decode_segment
from coreml_delegate.runtime.program.flatbuffer import (
    FlatBuffer,
    require_identifier,
    require_index,
    slice_bytes,
)
from coreml_delegate.runtime.program.pte import PteProgram, Source, map_source, named_errors

Sources: TypeAlias = "Source | Sequence[Source]"
"""One or several ``.ptd`` files, as paths or bytes."""

_IDENTIFIER: Final = b"FT01"
_MAGIC: Final = b"FH01"
_HEADER: Final = struct.Struct("<4sIQQQQ")
_HEADER_POSITION: Final = 8
_REMEDY: Final = "Pass the .ptd files that were written with this .pte as data (--data)"


def read_external_data(sources: Sources) -> dict[str, memoryview]:
    """Map (a path) or view (bytes, which must not change afterwards) ``.ptd`` files.

    Returns:
        All data in the files, by key, as views.

    Raises:
        BlobFormatError: Not a ``.ptd``, or a truncated or corrupt one.
        ProgramError: A file cannot be read, or two files have different data under one key.
    """
    entries: dict[str, memoryview] = {}
    for number, source in enumerate(list_sources(sources), start=1):
        view, origin = map_source(source, "external data", "a .ptd file")
        with named_errors(origin):
            content = _parse(view)
        for key, data in content.items():
            if entries.setdefault(key, data) != data:
                raise ProgramError(
                    "files of external data disagree",
                    got=f"two values of {key!r}, one in {origin} (file {number})",
                )
    return entries


def list_sources(sources: Sources) -> list[Source]:
    """Return one or several sources as a list."""
    if isinstance(sources, str | bytes | bytearray | memoryview) or not isinstance(
        sources, Sequence
    ):
        return [cast("Source", sources)]
    return [*sources]


def open_program(source: Source, data: Sources | None = None) -> PteProgram:
    """Open a ``.pte`` with its external data.

    Raises:
        BlobFormatError: A file is no ``.pte`` or ``.ptd``, or malformed.
        ProgramError: A file cannot be read, or ``data`` lacks tensors.
    """
    program = PteProgram.open(source)
    external = None if data is None else read_external_data(data)
    _check_complete(program, external)
    return program if external is None else program.with_external(external.get)


def _check_complete(program: PteProgram, data: Mapping[str, memoryview] | None) -> None:
    """Check that every external tensor of a program is in its external data.

    Raises:
        ProgramError: Tensors are missing, or have the wrong size; lists them all.
    """
    problems = [
        f"{key} ({'no data' if content is None else f'{content.nbytes} bytes'} for {spec})"
        for key, spec in program.external_tensors.items()
        if (content := None if data is None else data.get(key)) is None
        or content.nbytes < spec.nbytes
    ]
    if problems:
        raise ProgramError(
            f"the program keeps {len(problems)} tensor(s) outside the .pte that are not in its "
            "external data"
            if data is not None
            else f"the program keeps {len(problems)} tensor(s) outside the .pte",
            got=", ".join(problems[:5]) + (" and others" if len(problems) > 5 else ""),
            remedy=_REMEDY,
        )


def _parse(view: memoryview) -> dict[str, memoryview]:
    require_identifier(view, _IDENTIFIER, "not a file of external data")
    head = bytes(view[_HEADER_POSITION : _HEADER_POSITION + _HEADER.size])
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise BlobFormatError("external data lacks its header", got=f"{len(view)} bytes")
    _, _, tables, tables_size, base, size = _HEADER.unpack(head)
    if max(tables + tables_size, base + size) > len(view):
        raise BlobFormatError(
            "external data is truncated or its header is corrupt",
            got=f"{len(view)} bytes",
            expected=f"at least {max(tables + tables_size, base + size)} bytes",
        )
    root = FlatBuffer(view[: tables + tables_size]).root()
    area = view[base : base + size]
    segments = root.tables(1, decode_segment)

    def segment(number: int) -> memoryview:
        offset, size = segments[require_index(number, len(segments), "a segment")]
        return slice_bytes(area, offset, size, "segment").toreadonly()

    return {key: segment(number) for key, number in root.tables(2, decode_named_data)}
