"""Programs from an mlpackage, wherever its files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mlpackage import locate, map_folder
from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.runtime.mil.reader import read_program
from coreml_delegate.runtime.mil.weights import WeightFile


def read_files(files: Mapping[str, Buffer]) -> Program:
    """Read the program of an mlpackage given as files.

    Args:
        files: Relative POSIX path to content; constants are views of it.

    Raises:
        BlobFormatError: Any part is missing or malformed.
        ProgramError: The model is not an ML Program.
    """
    parts = locate(files)
    weights = {
        path: WeightFile(path, content)
        for path, content in parts.weights.items()
        if path.endswith(".bin")
    }
    return read_program(parts.spec, weights)


def read_mlpackage(path: Path | str) -> Program:
    """Read the program of an ``.mlpackage`` folder; its weights stay mapped, not read.

    Raises:
        ProgramError: No such folder, or the model is not an ML Program.
        BlobFormatError: Any part is missing or malformed.
    """
    return read_files(map_folder(Path(path)))
