"""Build the C++ shim that registers a backend with the stock ExecuTorch runtime, on first use.

The shim depends on the class layouts of the installed ``executorch`` wheel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import sys
from pathlib import Path
from typing import Final

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.runtime import native
from coreml_delegate.runtime.cpp_libraries import CppLibrary

_PACKAGE: Final = "coreml_delegate.runtime.program"
_SOURCE: Final = "coreml_shim.cpp"
_HEADER: Final = "delegate_calls.h"
_FLAGS: Final = (
    # Makes the wheel's headers use their generated macros.
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    # The wheel is built with it, and the layout of contexts in the headers depends on it.
    "-DET_EVENT_TRACER_ENABLED",
)


def executorch_root() -> Path | None:
    """Return the folder of the installed ``executorch``, without importing it; None if absent."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def library_path(root: Path) -> Path:
    """Return the wheel's shared runtime library, with which backends are registered."""
    return root / "lib" / "libexecutorch.so"


def unavailable_reason() -> str | None:
    """Return the reason why the shim cannot be built on this machine, or None if it can."""
    root = executorch_root()
    if root is None:
        return "the executorch package is not installed"
    if sys.platform != "linux" or not library_path(root).is_file():
        return f"the executorch package for {sys.platform} has no shared runtime library"
    return _shim_for(root).unavailable_reason()


def build() -> Path:
    """Return the shim; build it on the first use with this ``executorch``.

    Returns:
        Path of the shared library.

    Raises:
        EngineUnavailableError: There is no compiler, or it fails (with its last lines of output).
    """
    reason = unavailable_reason()
    root = executorch_root()
    if reason is not None or root is None:
        raise EngineUnavailableError(
            "the stock runtime cannot run Core ML delegates here",
            got=reason,
            remedy="Install a C++ compiler or set CXX, or use the Python host.",
        )
    return _shim_for(root).build()


def _shim_for(root: Path) -> CppLibrary:
    headers = root / "include"
    library = library_path(root).stat()
    sources = importlib.resources.files(_PACKAGE)
    return CppLibrary(
        name="coreml_shim",
        folder="stock-shim",
        source=sources.joinpath(_SOURCE).read_bytes(),
        headers={
            _HEADER: sources.joinpath(_HEADER).read_bytes(),
            native.HEADER: native.header(),
        },
        flags=(
            *_FLAGS,
            f"-I{headers}",
            f"-I{headers / 'executorch/runtime/core/portable_type/c10'}",
        ),
        libraries=(f"-L{root / 'lib'}", "-lexecutorch"),
        depends_on=(
            importlib.metadata.version("executorch"),
            library.st_size,
            library.st_mtime_ns,
        ),
    )
