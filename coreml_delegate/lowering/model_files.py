"""A converted model, and its files in a blob."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult

from coreml_delegate.errors import LoweringError
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.blob import Content, Files, flatten
from coreml_delegate.formats.blob_layout import COMPILED, PACKAGE, debug_info_in, in_folder
from coreml_delegate.formats.files import temporary_folder, write_folder
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.formats.mlpackage import MAIN, WEIGHTS, assemble, locate, map_folder
from coreml_delegate.lowering.debug_handles import handle_map
from coreml_delegate.patches.third_party import coremltools, describe_error

_COREMLTOOLS = "com.github.apple.coremltools"
_MAPPED = 16 * 2**20
"""Smallest size in bytes of a file that is mapped, not read, until the blob is assembled."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted subgraph.

    Attributes:
        spec: The ``Model`` message.
        package: The mlpackage on disk, until the block of ``build.convert_program`` or
            ``build.convert_mil`` ends.
        compiled: The mlmodelc on disk, with ``ModelType.COMPILED_MODEL`` only.
        calls: Number of the call that an operation was translated from, by its first output.
        fp32_constants: Constants that fp16 rounds, by name: those that are stored, or all; None if
            the precision is not fp16.
    """

    spec: Any
    package: Path
    compiled: Path | None
    calls: Mapping[str, int] = field(default_factory=dict[str, int])
    fp32_constants: Constants | None = None


def model_files(conversion: Conversion, *, is_declared: bool) -> Files:
    """Return the files of a converted model, with their paths in a blob.

    Args:
        conversion: The converted model.
        is_declared: Whether enumerated shapes were declared after the conversion, so that a
            compiled model has to be compiled again.
    """
    if conversion.compiled is not None and not is_declared:
        return compiled_files(conversion.compiled)
    parts = locate(map_folder(conversion.package, smallest=_MAPPED))
    weights = {name.removeprefix(f"{WEIGHTS}/"): data for name, data in parts.weights.items()}
    metadata = conversion.spec.description.metadata.userDefined
    _drop_build_details(metadata)
    if conversion.fp32_constants is not None:
        fp32_constants.write(metadata, {MAIN: conversion.fp32_constants})
    # Map entries have no order in protobuf; deterministic serialization sorts them.
    spec = conversion.spec.SerializeToString(deterministic=True)
    package = assemble(spec, weights)
    if conversion.compiled is None:
        return in_folder(PACKAGE, package)
    with compile_package(package) as path:
        return compiled_files(path)


def _drop_build_details(metadata: MutableMapping[str, str]) -> None:
    """Remove the conversion date and torch's build (``+cpu`` in ``2.13.0+cpu``) from metadata.

    They would make the bytes, and thus the identifiers, of equal models differ.
    """
    metadata.pop(f"{_COREMLTOOLS}.conversion_date", None)
    source = f"{_COREMLTOOLS}.source"
    if source in metadata:
        metadata[source] = metadata[source].partition("+")[0]


def result_of(files: Files) -> PreprocessResult:
    """Return ExecuTorch's result for a blob, with the debug handles of its debug info."""
    handles = handle_map(debug_info_in(files))
    return PreprocessResult(processed_bytes=flatten(files), debug_handle_map=handles)


# Compilation ahead of time


@contextmanager
def compile_package(package: Mapping[str, Content]) -> Generator[Path]:
    """Compile an mlpackage inside a temporary directory that is always removed.

    Args:
        package: Its files.

    Yields:
        The mlmodelc.

    Raises:
        LoweringError: There is no compiler, or it fails.
    """
    check_compiler()
    with temporary_folder() as folder:
        source, destination = folder / "merged.mlpackage", folder / "merged.mlmodelc"
        write_folder(package, source)
        try:
            coremltools().models.utils.compile_model(str(source), str(destination))
        except Exception as error:
            raise LoweringError(
                "Core ML's compiler fails on the model",
                got=describe_error(error),
            ) from error
        yield destination


def compiled_files(folder: Path) -> Files:
    """Return the files of a compiled model; the folder may be removed afterwards."""
    return in_folder(COMPILED, map_folder(folder, smallest=_MAPPED))


def check_compiler() -> None:
    """Check that this machine can compile ahead of time.

    Raises:
        LoweringError: It cannot.
    """
    if shutil.which("xcrun") is None:
        raise LoweringError(
            "model_type COMPILED_MODEL needs Core ML's compiler, which only macOS has",
            remedy="Use MODEL_TYPE.MODEL (the device compiles at first load), or export on a Mac",
        )
