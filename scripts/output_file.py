"""Output files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from coreml_delegate.errors import OptionError, naming
from coreml_delegate.scripts import interruption


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output path before the work that would be lost.

    Raises:
        OptionError: Its folder does not exist, it is no regular file, or it exists and ``force`` is
            false.
    """
    if not path.parent.is_dir():
        raise OptionError("no such folder for the output", got=str(path.parent))
    if path.exists() and not path.is_file():
        raise OptionError("output is not a regular file", got=str(path))
    if path.exists() and not force:
        raise OptionError("output exists", got=str(path), remedy="Pass --force to replace it")


@contextmanager
def new_file(path: Path, *, force: bool) -> Generator[BinaryIO]:
    """A file to write that takes the name ``path`` when the block ends without an exception.

    Args:
        path: Final name; the unfinished file lies in the same folder under a temporary name.
        force: Replace a file that is already there.

    Raises:
        OptionError: See ``check_output``.
    """
    check_output(path, force=force)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path), staging.open("xb") as file:
            yield file
        interruption.check()
        check_output(path, force=force)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
