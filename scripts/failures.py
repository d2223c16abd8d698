"""Messages for a user whose input or machine made a command fail."""

from __future__ import annotations

from typing import Final

from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.patches.third_party import missing_extra

KINDS: Final = (CoreMLDelegateError, OSError, MemoryError, RuntimeError, ModuleNotFoundError)
"""The exceptions that ``message`` may explain."""

_ALLOCATOR: Final = "DefaultCPUAllocator"
"""Part of the message of the ``RuntimeError`` that torch raises if it runs out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether the machine ran out of memory."""
    memory = isinstance(error, MemoryError) or _ALLOCATOR in str(error)
    return memory and not isinstance(error, CoreMLDelegateError)


def message(error: Exception) -> str | None:
    """Return the message for the user; None for an error that may be a bug of this package."""
    if is_out_of_memory(error):
        details = str(error).rpartition(_ALLOCATOR)[2].strip(": ")
        return f"this machine does not have enough memory{f': {details}' if details else ''}"
    if isinstance(error, ModuleNotFoundError):
        error_with_remedy = missing_extra(error)
        return None if error_with_remedy is None else str(error_with_remedy)
    if not isinstance(error, CoreMLDelegateError | OSError):
        return None
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
