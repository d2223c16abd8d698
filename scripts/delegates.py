"""The Core ML delegates of a ``.pte``, with their blobs found and opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.formats.blob import BlobReference, Buffer, unflatten
from coreml_delegate.runtime.delegate import resolve
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID, DelegatePayload
from coreml_delegate.runtime.program.plan import DelegateInfo, MethodInfo
from coreml_delegate.runtime.program.ptd import ExternalData, check_complete
from coreml_delegate.runtime.program.pte import PteProgram

_MODEL_SUFFIXES = (".mlpackage", ".mlmodelc")


@dataclass(frozen=True, slots=True)
class CoreMLPartition:
    """One Core ML delegate.

    Attributes:
        method: Method it belongs to.
        index: Its number among the method's delegates.
        name: For a reader and for file names, for example ``forward_0``.
        info: As the program has it.
        blob: Its own, or the shared one it refers to.
        reference: The reference, if the blob is shared.
    """

    method: str
    index: int
    name: str
    info: DelegateInfo
    blob: Buffer
    reference: BlobReference | None


@dataclass(frozen=True, slots=True)
class BlobModel:
    """The model inside a blob.

    Attributes:
        suffix: ``.mlpackage``, or ``.mlmodelc`` for a compiled one.
        files: Its files: relative POSIX path to content.
    """

    suffix: str
    files: Mapping[str, memoryview]


def partition_names(method: MethodInfo) -> dict[int, str]:
    """Names of the Core ML delegates of one method, by their number among its delegates."""
    return {
        index: f"{method.name}_{index}"
        for index, info in enumerate(method.delegates)
        if info.backend_id == COREML_BACKEND_ID
    }


def open_pte(path: Path, data: Sequence[Path] = ()) -> PteProgram:
    """A ``.pte``, with what it keeps outside where the files are given.

    Args:
        path: The ``.pte``.
        data: Its ``.ptd`` files.

    Raises:
        BlobFormatError: Not a ``.pte`` or ``.ptd``, or a part is malformed.
        ProgramError: A file cannot be read, or tensors are missing in ``data``.
    """
    program = PteProgram.open(path)
    if not data:
        return program
    external = ExternalData.open(data)
    check_complete(program, external)
    return program.with_external(external.get)


def partitions_of(program: PteProgram, method: MethodInfo) -> Iterator[CoreMLPartition]:
    """The Core ML delegates of one method, in order.

    Raises:
        BlobFormatError: A reference that leads nowhere.
    """
    for index, name in partition_names(method).items():
        info = method.delegates[index]
        payload = DelegatePayload(
            backend_id=info.backend_id,
            processed=info.processed,
            compile_specs=info.compile_specs,
            method_name=method.name,
            named_data=program.named_data,
        )
        blob, _ = resolve(payload)
        reference = BlobReference.decode(info.processed)
        yield CoreMLPartition(method.name, index, name, info, blob, reference)


def all_partitions(program: PteProgram) -> list[CoreMLPartition]:
    """The Core ML delegates of every method.

    Raises:
        ProgramError: There is none.
        BlobFormatError: A reference that leads nowhere.
    """
    found = [p for method in program.methods for p in partitions_of(program, method)]
    if not found:
        others = sorted({d.backend_id for method in program.methods for d in method.delegates})
        raise ProgramError(
            f"{Path(program.origin).name} has no Core ML delegate",
            got=f"delegates of {', '.join(others)}" if others else "no delegate at all",
        )
    return found


def models_of(blob: Buffer) -> list[BlobModel]:
    """The models of a blob: one, unless it was written to serve old and new runtimes.

    Raises:
        BlobFormatError: The bytes are no blob, or it holds no model.
    """
    files = unflatten(blob)
    models = [BlobModel(suffix, _below(f"model{suffix}/", files)) for suffix in _MODEL_SUFFIXES]
    found = [model for model in models if model.files]
    if not found:
        raise BlobFormatError(
            "blob holds no model",
            got=", ".join(files) or "no file",
            expected=" or ".join(f"model{suffix}" for suffix in _MODEL_SUFFIXES),
        )
    return found


def _below(folder: str, files: Mapping[str, memoryview]) -> dict[str, memoryview]:
    return {p.removeprefix(folder): data for p, data in files.items() if p.startswith(folder)}
