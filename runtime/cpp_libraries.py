"""Compile small C++ libraries on this machine, on first use, and cache them.

They are not shipped as binaries, because they depend on the libraries of other installed wheels.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import filelock

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.formats.caches import HOMELESS, NAME_A_FOLDER, cache_folder
from coreml_delegate.formats.files import new_path

_logger = logging.getLogger(__name__)

_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_ERROR_LINES: Final = 12


def find_compiler() -> list[str] | None:
    """Return the C++ compiler as the start of a command line: $CXX, or the first on the path."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        return command if command and shutil.which(command[0]) else None
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [compiler] if compiler else None


@dataclass(frozen=True, slots=True)
class CppLibrary:
    """A library of one source file and its headers.

    Attributes:
        name: Name of the file in the cache, without digest and suffix.
        folder: Name of the cache's folder in the folder of all caches.
        source: Content of the source file.
        headers: Content of the headers by file name.
        flags: Compiler flags before the source: definitions and header folders.
        libraries: Linker arguments.
        depends_on: Versions and sizes of dependencies; a change rebuilds the library.
    """

    name: str
    folder: str
    source: bytes
    headers: Mapping[str, bytes]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    depends_on: tuple[object, ...]

    @property
    def path(self) -> Path | None:
        """Path of the library, whether or not it is built; None if caches are off."""
        caches = cache_folder()
        if caches is None:
            return None
        machine = (platform.machine(), platform.platform())
        sources = (self.source.hex(), *(text.hex() for text in self.headers.values()))
        parts = (*sources, *self.depends_on, *_FLAGS, *self.flags, *machine)
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]
        return caches / self.folder / f"{self.name}-{digest}.so"

    def unavailable_reason(self) -> str | None:
        """Return the reason why the library cannot be built, or None if it can or is built."""
        path = self.path
        if path is None:
            return HOMELESS
        if path.is_file() or find_compiler() is not None:
            return None
        named = os.environ.get("CXX")
        return (
            f"the C++ compiler that CXX names was not found: {named}"
            if named
            else f"no C++ compiler was found (looked for {', '.join(_COMPILERS)})"
        )

    def build(self) -> Path:
        """Return the path of the library; build it on first use.

        Raises:
            EngineUnavailableError: The compiler fails (with its last lines of output), or the cache
                cannot be written.
        """
        target = self.path
        if target is None:
            raise EngineUnavailableError(
                f"{self.name} cannot be built", got=HOMELESS, remedy=NAME_A_FOLDER
            )
        if target.is_file():
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with filelock.FileLock(target.with_suffix(".lock")):
                if not target.is_file():
                    self._compile(find_compiler() or [], target)
        except OSError as error:
            raise EngineUnavailableError(
                "cannot write the cache directory",
                got=f"{target.parent} ({error.strerror})",
                remedy=NAME_A_FOLDER,
            ) from error
        return target

    def _compile(self, compiler: list[str], target: Path) -> None:
        with new_path(target) as output:
            source = output.with_name(f"{self.name}.cpp")
            source.write_bytes(self.source)
            for name, text in self.headers.items():
                output.with_name(name).write_bytes(text)
            command = [*compiler, *_FLAGS, *self.flags, str(source), *self.libraries]
            command += ["-o", str(output)]
            _logger.debug("building %s: %s", self.name, shlex.join(command))
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                lines = result.stderr.strip().splitlines()[-_ERROR_LINES:]
                raise EngineUnavailableError(
                    f"{compiler[0]} failed to build {self.name}",
                    got=f"exit code {result.returncode}:\n" + "\n".join(lines),
                    remedy="Try another compiler (set CXX).",
                )
