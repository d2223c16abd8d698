"""The Core ML delegates of a ``.pte``: their names, blobs and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.blob import BlobReference, Buffer, unflatten
from coreml_delegate.formats.blob_layout import debug_info_in, models_in
from coreml_delegate.formats.mlpackage import SUFFIX, empty_folders
from coreml_delegate.runtime.delegate import delegate_names, resolve
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID
from coreml_delegate.runtime.program.plan import DelegateInfo, MethodInfo
from coreml_delegate.runtime.program.ptd import open_program
from coreml_delegate.runtime.program.pte import PteProgram


@dataclass(frozen=True, slots=True)
class CoreMLPartition:
    """One Core ML delegate.

    Attributes:
        name: Name for a reader and for files, for example ``forward_0``.
        blob: Its own blob, or the shared one it refers to.
    """

    method: str
    index: int
    name: str
    info: DelegateInfo
    blob: Buffer
    reference: BlobReference | None


@dataclass(frozen=True, slots=True)
class BlobModel:
    """A model inside a blob.

    Attributes:
        suffix: ``.mlpackage``, or ``.mlmodelc`` for a compiled one.
        files: Contents of its files by relative POSIX path.
    """

    suffix: str
    files: Mapping[str, memoryview]

    @property
    def empty_folders(self) -> list[str]:
        """Folders without files that the manifest of an mlpackage lists; Core ML needs them."""
        return empty_folders(self.files) if self.suffix == SUFFIX else []


def open_pte(path: Path, data: Sequence[Path] = ()) -> PteProgram:
    """Open a ``.pte``, with its external data if the files are given.

    Raises:
        BlobFormatError: A file is no ``.pte`` or ``.ptd``, or malformed.
        ProgramError: A file cannot be read, or ``data`` lacks tensors.
    """
    return open_program(path, data) if data else PteProgram.open(path)


def partitions_of(program: PteProgram, method: MethodInfo) -> Iterator[CoreMLPartition]:
    """Yield the Core ML delegates of one method, in order.

    Raises:
        BlobFormatError: A reference leads nowhere.
    """
    for index, name in delegate_names(method).items():
        info = method.delegates[index]
        blob, _ = resolve(info.processed, program.named_data)
        reference = BlobReference.decode(info.processed)
        yield CoreMLPartition(method.name, index, name, info, blob, reference)


def all_partitions(program: PteProgram) -> list[CoreMLPartition]:
    """List the Core ML delegates of all methods.

    Raises:
        ProgramError: There is no Core ML delegate.
        BlobFormatError: A reference leads nowhere.
    """
    partitions = [p for method in program.methods for p in partitions_of(program, method)]
    if not partitions:
        backends = sorted({d.backend_id for method in program.methods for d in method.delegates})
        raise ProgramError(
            f"{Path(program.origin).name} has no Core ML delegate",
            got=f"delegates of {', '.join(backends)}" if backends else "no delegate at all",
        )
    return partitions


def read_etrecord(path: Path, program: PteProgram) -> Any:
    """Read the ETRecord of a program, for ``Inspector``.

    Raises:
        ProgramError: The file cannot be read, is no ETRecord, or belongs to another program.
        BlobFormatError: A delegate of the program is malformed.
    """
    from coreml_delegate.runtime import devtools

    record = devtools.read_etrecord(path)
    if record._delegate_map and not _matches(record, program):
        raise ProgramError(
            f"{path} is the ETRecord of another program",
            got=f"operations that {Path(program.origin).name} does not have, or from other calls",
            expected="the file that export wrote with it",
        )
    return record


def _matches(record: Any, program: PteProgram) -> bool:
    """Whether a program's delegates map operations to calls as in the ETRecord."""
    for name, instructions in record._delegate_map.items():
        method = next((m for m in program.methods if m.name == name), None)
        recorded = [
            delegate["delegate_map"]
            for _, delegate in sorted(instructions.items(), key=lambda item: int(item[0]))
            if delegate["name"] == COREML_BACKEND_ID
        ]
        partitions = [] if method is None else list(partitions_of(program, method))
        if len(partitions) != len(recorded):
            return False
        for partition, expected in zip(partitions, recorded, strict=True):
            info = debug_info_in(unflatten(partition.blob))
            if info is not None and any(
                tuple(info.handles.get(symbol, ())) != tuple(handles)
                for symbol, handles in (expected or {}).items()
            ):
                return False
    return True


def models_of(blob: Buffer) -> list[BlobModel]:
    """List the models of a blob: one, or two if it was written for old and new runtimes.

    Raises:
        BlobFormatError: The bytes are no blob, or it holds no model.
    """
    models = models_in(unflatten(blob))
    return [BlobModel(PurePosixPath(folder).suffix, files) for folder, files in models.items()]
