"""Recordings: a run of a program as one file, which another machine replays and compares.

Layout, version 1 (November 2026)::

    8 bytes    MAGIC, whose last byte is the version
    8 bytes    size of the header, unsigned, little endian
    header     JSON in UTF-8
    data       tensors and files, contiguous, in the header's order

The header is an object with these keys::

    program    {"name": str, "files": [file, ...]}; "name" is the name of the file or folder, and
               files outside of it are external data
    run        {"engines": {engine: [dtype, ...]}, "host": str, "compute_units": [str, ...]}; no
               dtypes if the recorder does not know them, or if there are integers only
    machine    properties of the machine: {str: str or null}
    versions   versions of its software: {str: str or null}
    calls      [{"method": str, "inputs": [value, ...], "outputs": {name: value}}, ...]
    states     {method: {name: value}}: the states of Core ML models after the last call
    tensors    [{"dtype": str, "shape": [int, ...]}, ...]

A file is ``{"path": str, "size": int, "sha256": str, "stored": bool}``; if it is stored, the data
has its bytes, after all tensors. A value is ``{"tensor": index}``, ``{"float": text}``, or
``{"value": v}`` for an integer, boolean, string or null. Tensors are row-major and little endian;
dtypes have torch's names. Reading a recording executes no code from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import torch

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.formats.blob import Buffer, chunks_of
from coreml_delegate.formats.mlpackage import map_folder
from coreml_delegate.runtime.program.pte import map_source

MAGIC: Final = b"CMLRUN\x00\x01"
"""The first bytes of a recording."""

SUFFIX: Final = ".cmlrun"
"""Suffix of recordings."""

Value: TypeAlias = torch.Tensor | int | float | bool | str | None

_SIZE_BYTES = 8
_HEADER_LIMIT = 64 << 20  # bytes; a call takes about 100
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of the program.

    Attributes:
        path: Relative POSIX path; starts with the program's name, except for external data.
        content: The bytes, or None if the recording does not have them.
    """

    path: str
    size: int
    sha256: str
    content: Buffer | None = None

    @classmethod
    def of(cls, path: str, content: Buffer, *, stored: bool) -> RecordedFile:
        """Return the record of a file, with its content if ``stored``."""
        digest = hashlib.sha256()
        for chunk in chunks_of(content):
            digest.update(chunk)
        size = memoryview(content).nbytes
        return cls(path, size, digest.hexdigest(), content if stored else None)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method: inputs in order, outputs by name, in order."""

    method: str
    inputs: tuple[Value, ...]
    outputs: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Run:
    """The engines and the host of a run.

    Attributes:
        engines: The floating-point types that each engine computed in, by engine name.
        host: Name of the host; empty for a program that needs no host.
        compute_units: Compute units that Core ML was allowed to use.
    """

    engines: Mapping[str, tuple[str, ...]]
    host: str
    compute_units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of a program.

    Attributes:
        program: Name of the program's file or folder.
        machine: Properties of the machine that ran the program.
        versions: Versions of the software on that machine.
        calls: Calls in order; each method starts in its initial state.
        states: States of Core ML models after the last call, by method and name.
    """

    program: str
    files: tuple[RecordedFile, ...]
    run: Run
    machine: Mapping[str, str | None]
    versions: Mapping[str, str | None]
    calls: tuple[Call, ...]
    states: Mapping[str, Mapping[str, torch.Tensor]]

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that were called, in order."""
        return tuple(dict.fromkeys(call.method for call in self.calls))

    @property
    def has_program(self) -> bool:
        """Whether all files of the program are in the recording."""
        return all(file.content is not None for file in self.files)

    def write(self, file: BinaryIO) -> None:
        """Write the recording; equal recordings are written as equal bytes."""
        tensors: list[torch.Tensor] = []
        header = json.dumps(self._header(tensors), ensure_ascii=False, allow_nan=False).encode()
        if len(header) > _HEADER_LIMIT:
            raise ProgramError(
                "the recording has too many calls",
                got=f"a header of {len(header)} bytes",
                expected=f"at most {_HEADER_LIMIT}",
            )
        file.write(MAGIC + len(header).to_bytes(_SIZE_BYTES, "little") + header)
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        for recorded in self.files:
            if recorded.content is not None:
                file.writelines(chunks_of(recorded.content))

    def _header(self, tensors: list[torch.Tensor]) -> dict[str, object]:
        """Return the header, and append the tensors that it refers to."""

        def encode(value: Value) -> dict[str, object]:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return {"tensor": len(tensors) - 1}
            return {"float": repr(value)} if isinstance(value, float) else {"value": value}

        calls = [
            {
                "method": call.method,
                "inputs": [encode(value) for value in call.inputs],
                "outputs": {name: encode(value) for name, value in call.outputs.items()},
            }
            for call in self.calls
        ]
        states = {
            method: {name: encode(value) for name, value in tensors_.items()}
            for method, tensors_ in self.states.items()
        }
        files = [
            {"path": f.path, "size": f.size, "sha256": f.sha256, "stored": f.content is not None}
            for f in self.files
        ]
        return {
            "program": {"name": self.program, "files": files},
            "run": {
                "engines": {name: list(types) for name, types in self.run.engines.items()},
                "host": self.run.host,
                "compute_units": list(self.run.compute_units),
            },
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "calls": calls,
            "states": states,
            "tensors": [
                {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
                for t in tensors
            ],
        }

    @classmethod
    def read(cls, source: Path | bytes) -> Recording:
        """Read a recording; the contents of its files are views of the mapped recording.

        Args:
            source: Path, or the bytes.

        Raises:
            BlobFormatError: Not a recording, or another version, or truncated or corrupt.
            ProgramError: The file cannot be read.
        """
        view, origin = map_source(source, "the recording", f"a {SUFFIX} file")
        header, data = _split(view)
        try:
            return _decode(header, data)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, BlobFormatError):
                raise
            raise BlobFormatError(f"{origin} is a malformed recording", got=repr(error)) from error


def _split(view: memoryview) -> tuple[Any, memoryview]:
    """Return the header and the data of a recording."""
    start = len(MAGIC) + _SIZE_BYTES
    if bytes(view[: len(MAGIC)]) != MAGIC:
        is_other = bytes(view[: len(MAGIC) - 1]) == MAGIC[:-1]
        raise BlobFormatError(
            "recording of another version" if is_other else "not a recording",
            got=repr(bytes(view[: len(MAGIC)])),
            expected=repr(MAGIC),
        )
    size = int.from_bytes(view[len(MAGIC) : start], "little")
    if size > min(_HEADER_LIMIT, len(view) - start):
        raise BlobFormatError("truncated recording", got=f"a header of {size} bytes")
    try:
        return json.loads(bytes(view[start : start + size])), view[start + size :]
    except (ValueError, RecursionError) as error:
        raise BlobFormatError("the recording's header is not JSON", got=str(error)) from error


def _decode(header: Any, data: memoryview) -> Recording:
    regions = _Regions(data)
    tensors = [regions.tensor(entry["dtype"], entry["shape"]) for entry in header["tensors"]]
    program, run = header["program"], header["run"]
    files = tuple(_file(entry, regions) for entry in program["files"])
    regions.require_end()

    def decode(value: Any) -> Value:
        ((kind, content),) = value.items()
        match kind, content:
            case "tensor", int() if 0 <= content < len(tensors):
                return tensors[content]
            case "float", str():
                return float(content)
            case "value", None | bool() | int() | str():
                return content
            case _:
                raise BlobFormatError("a value of the recording is malformed", got=repr(value))

    def tensor(value: Any) -> torch.Tensor:
        decoded = decode(value)
        if not isinstance(decoded, torch.Tensor):
            raise BlobFormatError("a state of the recording is no tensor", got=repr(value))
        return decoded

    calls = tuple(
        Call(
            _text(call["method"]),
            tuple(decode(value) for value in call["inputs"]),
            {name: decode(value) for name, value in call["outputs"].items()},
        )
        for call in header["calls"]
    )
    states = {
        method: {name: tensor(value) for name, value in values.items()}
        for method, values in header["states"].items()
    }
    return Recording(
        program=_relative(program["name"]),
        files=files,
        run=Run(
            {name: tuple(map(_text, types)) for name, types in run["engines"].items()},
            _text(run["host"]),
            tuple(map(_text, run["compute_units"])),
        ),
        machine=_texts(header["machine"]),
        versions=_texts(header["versions"]),
        calls=calls,
        states=states,
    )


class _Regions:
    """The data of a recording, read from start to end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._end = 0

    def take(self, size: int) -> memoryview:
        start, self._end = self._end, self._end + size
        if self._end > len(self._data):
            raise BlobFormatError(
                "truncated recording", got=f"{len(self._data)} bytes of data", expected="more"
            )
        return self._data[start : self._end]

    def tensor(self, name: object, shape: object) -> torch.Tensor:
        dtype = _DTYPES.get(_text(name))
        if dtype is None:
            raise BlobFormatError(
                "a tensor of the recording has an unknown dtype",
                got=repr(name),
                expected=", ".join(_DTYPES),
            )
        if not isinstance(shape, list):
            raise TypeError(f"shape {shape!r}")
        sizes = [_natural(size) for size in shape]  # pyright: ignore[reportUnknownVariableType]
        content = self.take(math.prod(sizes) * dtype.itemsize)
        if dtype is torch.bool and np.frombuffer(content, np.uint8).max(initial=0) > 1:
            raise BlobFormatError("a truth value of the recording is neither 0 nor 1")
        if not content:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(sizes)

    def require_end(self) -> None:
        if self._end != len(self._data):
            raise BlobFormatError(
                "the recording has data that its header does not name",
                got=f"{len(self._data)} bytes",
                expected=str(self._end),
            )


def _file(entry: Any, regions: _Regions) -> RecordedFile:
    path, size = _relative(entry["path"]), _natural(entry["size"])
    digest, is_stored = _text(entry["sha256"]), entry["stored"]
    if not isinstance(is_stored, bool):
        raise TypeError(f"stored {is_stored!r}")
    content = regions.take(size) if is_stored else None
    if content is not None and hashlib.sha256(content).hexdigest() != digest:
        raise BlobFormatError(f"file {path!r} of the recording is damaged", expected=digest)
    return RecordedFile(path, size, digest, content)


def _relative(path: object) -> str:
    """Return a path if it stays below the folder that it is joined to.

    Raises:
        BlobFormatError: The path is absolute, or may leave the folder.
    """
    text = _text(path)
    parts = text.split("/")
    unsafe = any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts)
    if unsafe or "\0" in text:
        raise BlobFormatError("unsafe path in a recording", got=repr(text))
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _texts(values: Any) -> dict[str, str | None]:
    return {name: None if value is None else _text(value) for name, value in values.items()}


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


def files_of(path: Path, data: Sequence[Path]) -> Iterator[tuple[str, Buffer]]:
    """Yield the files of a program, a file or folder, and of its external data.

    Each has its path in a recording.

    Raises:
        ProgramError: A file cannot be read, or external data has the program's name.
    """
    if path.is_dir():
        yield from ((f"{path.name}/{name}", file) for name, file in map_folder(path).items())
    else:
        yield path.name, map_source(path, "the program", "a program")[0]
    names = [path.name, *(file.name for file in data)]
    for file in data:
        if names.count(file.name) > 1:
            raise ProgramError("two files have the same name", got=file.name)
        yield file.name, map_source(file, "the external data", "a .ptd file")[0]


def write_files(recording: Recording, folder: Path) -> tuple[Path, list[Path]]:
    """Write the program of a recording to an empty folder.

    Returns:
        Path of the program, and paths of its external data.
    """
    data: list[Path] = []
    for file in recording.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as output:
            output.writelines(chunks_of(file.content or b""))
        if file.path != recording.program and not file.path.startswith(f"{recording.program}/"):
            data.append(target)
    return folder / recording.program, data
