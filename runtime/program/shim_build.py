"""Build the C++ shim that registers a backend with the stock ExecuTorch runtime.

The shim is compiled on first use, in a few seconds, and cached. It is not shipped as a binary,
because it depends on the class layouts of the installed ``executorch`` wheel.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import filelock

from coreml_delegate.caches import CACHE_VARIABLE, cache_folder
from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.formats.files import new_path

_logger = logging.getLogger(__name__)

_PACKAGE: Final = "coreml_delegate.runtime.program"
_SOURCE: Final = "coreml_shim.cpp"
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # The wheel's headers need this one to find their generated macros ...
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    # ... and the layout of their contexts depends on this one, which the wheel is built with.
    "-DET_EVENT_TRACER_ENABLED",
)
_ERROR_LINES: Final = 12


def executorch_root() -> Path | None:
    """Directory of the installed ``executorch`` package, without importing it; None if absent."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def library_path(root: Path) -> Path:
    """The wheel's shared runtime library, under which backends register."""
    return root / "lib" / "libexecutorch.so"


def find_compiler() -> list[str] | None:
    """Return the C++ compiler as the start of a command line: $CXX, else the first on the path."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        return command if command and shutil.which(command[0]) else None
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [found] if found else None


def unavailable_reason() -> str | None:
    """Return why the shim can be neither found nor built on this machine; None if it can."""
    root = executorch_root()
    if root is None:
        return "the executorch package is not installed"
    if sys.platform != "linux" or not library_path(root).is_file():
        return f"the executorch package for {sys.platform} has no shared runtime library"
    if not _library_in_cache(root).is_file() and find_compiler() is None:
        named = os.environ.get("CXX")
        return (
            f"the C++ compiler that CXX names was not found: {named}"
            if named
            else f"no C++ compiler was found (looked for {', '.join(_COMPILERS)})"
        )
    return None


def build() -> Path:
    """Return the shim; build it if this is its first use with this ``executorch``.

    Returns:
        Path of the shared library.

    Raises:
        EngineUnavailableError: There is no compiler, or it fails; the message has its last lines.
    """
    reason = unavailable_reason()
    root = executorch_root()
    if reason is not None or root is None:
        raise EngineUnavailableError(
            "the stock runtime cannot run Core ML delegates here",
            got=reason,
            remedy="Install a C++ compiler or set CXX, or use the Python host.",
        )
    target = _library_in_cache(root)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with filelock.FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                _compile(find_compiler() or [], root, target)
    except OSError as error:
        raise EngineUnavailableError(
            "cannot write the cache directory",
            got=f"{target.parent} ({error.strerror})",
            remedy=f"Set {CACHE_VARIABLE} to a directory that can be written.",
        ) from error
    return target


def _source() -> bytes:
    return importlib.resources.files(_PACKAGE).joinpath(_SOURCE).read_bytes()


def _library_in_cache(root: Path) -> Path:
    """Return the path of the shim for the installed wheel, built or not."""
    library = library_path(root).stat()
    parts = (
        _source().hex(),
        importlib.metadata.version("executorch"),
        library.st_size,
        library.st_mtime_ns,
        *_FLAGS,
        platform.machine(),
        platform.platform(),
    )
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]
    return cache_folder() / "stock-shim" / f"coreml_shim-{digest}.so"


def _compile(compiler: list[str], root: Path, target: Path) -> None:
    """Compile the shim to ``target``."""
    with new_path(target) as output:
        source = output.with_name(_SOURCE)
        source.write_bytes(_source())
        headers = root / "include"
        command = [
            *compiler,
            *_FLAGS,
            f"-I{headers}",
            f"-I{headers / 'executorch/runtime/core/portable_type/c10'}",
            str(source),
            f"-L{root / 'lib'}",
            "-lexecutorch",
            "-o",
            str(output),
        ]
        _logger.debug("building the runtime shim: %s", shlex.join(command))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines()[-_ERROR_LINES:]
            raise EngineUnavailableError(
                f"{compiler[0]} failed to build the runtime shim",
                got=f"exit code {result.returncode}:\n" + "\n".join(lines),
                remedy="Try another compiler (set CXX), or use the Python host.",
            )
