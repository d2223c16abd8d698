"""Atomic writing of files and folders.

Each is written under a temporary name in the target folder, and renamed at the end. On an error or
interrupt the temporary file is removed and an existing target does not change. Data is not flushed
to disk: a power failure may lose or truncate the latest files.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from coreml_delegate.errors import ProgramError, naming
from coreml_delegate.formats.blob import Content, chunks_of

UNFINISHED: Final = ".unfinished"
"""Suffix of a file that is being written; it only survives if the process is killed."""


@contextmanager
def new_file(path: Path, *, permissions: int = 0o666) -> Generator[BinaryIO]:
    """Open a file that takes the name ``path`` when the block ends without an exception.

    Args:
        path: Final name; a file of that name is replaced.
        permissions: Mode bits of the file, before the umask is applied.

    Raises:
        OSError: The folder cannot be written; ``filename`` is set.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, permissions)

    try:
        with naming(path), open(unfinished, "xb", opener=create) as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_path(path: Path) -> Generator[Path]:
    """Yield a path for another program to write; the file is renamed to ``path`` at the end.

    It is in a separate temporary folder beside ``path``, which is removed with its content.

    Raises:
        OSError: The folder of ``path`` cannot be written, or no file was written.
    """
    with temporary_folder(path) as folder:
        unfinished = folder / path.name
        yield unfinished
        os.replace(unfinished, path)


def write_folder(
    files: Mapping[str, Content],
    destination: Path,
    *,
    folders: Iterable[str] = (),
    overwrite: bool = False,
) -> None:
    """Write files below a new folder; see ``new_folder``.

    Raises:
        ProgramError: ``destination`` exists and ``overwrite`` is false.
        OSError: The parent folder cannot be written.
    """
    with new_folder(files, destination, folders=folders, overwrite=overwrite):
        pass


@contextmanager
def new_folder(
    files: Mapping[str, Content],
    destination: Path,
    *,
    folders: Iterable[str] = (),
    overwrite: bool = False,
) -> Generator[None]:
    """Write files below a folder that appears when the block ends without an exception.

    Several folders appear together if their blocks are nested. Parent folders are created, and
    removed again after an exception.

    Args:
        files: Relative POSIX path to content.
        destination: The folder to create.
        folders: Relative POSIX paths of folders inside that exist even without files.
        overwrite: Replace a folder that is already there.

    Raises:
        ProgramError: ``destination`` exists and ``overwrite`` is false.
        OSError: The parent folder cannot be written.
    """
    require_absent(destination, overwrite=overwrite)
    with ExitStack() as undoing, naming(destination):
        undoing.enter_context(provisional_folder(destination.parent))
        temporary = undoing.enter_context(temporary_folder(destination))
        complete = temporary / "new"
        complete.mkdir()
        for name, content in files.items():
            target = complete / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(chunks_of(content))
        for name in folders:
            (complete / name).mkdir(parents=True, exist_ok=True)
        yield
        if destination.exists():
            os.replace(destination, temporary / "old")
        os.replace(complete, destination)


def require_absent(destination: Path, *, overwrite: bool) -> None:
    """Check that an output does not exist, or may be replaced.

    Raises:
        ProgramError: ``destination`` exists and ``overwrite`` is false.
    """
    if destination.exists() and not overwrite:
        raise ProgramError(
            "output exists", got=str(destination), remedy="Pass overwrite=True to replace it"
        )


@contextmanager
def provisional_folder(folder: Path) -> Generator[None]:
    """Create a folder and its parents; at the end remove the created folders if empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # it is not empty, or was not created
                path.rmdir()


@contextmanager
def temporary_folder(target: Path | None = None) -> Generator[Path]:
    """Create a folder that is always removed.

    Args:
        target: Create it beside this path, on the same file system, so that a move is a rename.
    """
    prefix, parent = (f".{target.name}.", target.parent) if target else ("coreml-delegate-", None)
    with tempfile.TemporaryDirectory("", prefix, parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
