"""Limits on a program's resources: iterations of loops, elements of lists, memory.

A few bytes of a program can ask for more memory than the machine has. On many systems such a
request succeeds, and the process is killed later. Therefore a request for more than a quarter of
the memory that is available at that moment is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

from coreml_delegate.errors import ExecutionError, ProgramError

MAX_TURNS = 1 << 20
"""Iterations of a loop; on the reference engine, of all loops of one call. More iterations count as
an endless loop."""

MAX_LIST = 1 << 20
"""Elements of one list, and of a tensor where Python values are needed. Neither contains bulk data,
so a program with more counts as damaged."""

MAX_COMPUTED = 1 << 30
"""Bytes of a constant that a translation creates, and of a tensor with computed sizes on an engine
that cannot check free memory before it allocates the tensor. Programs for devices have no tensor so
large."""

_SHARE = 4
_MEMORY_INFO = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
# Limit and use of the control group, in bytes; in containers /proc shows the host's memory.
_GROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
_UNKNOWN = 4 << 30


def largest_request() -> int:
    """Return the number of bytes that one request may take now."""
    return _available() // _SHARE


def require_memory(nbytes: int, what: str) -> None:
    """Refuse ``what`` if its ``nbytes`` exceed ``largest_request``.

    Raises:
        ExecutionError: ``nbytes`` are more than a quarter of the available memory.
    """
    if nbytes > (limit := largest_request()):
        raise ExecutionError(
            f"{what} does not fit into memory",
            got=f"{nbytes} bytes",
            expected=f"at most {limit} bytes, a quarter of what is available",
        )


def require_constant(count: int, what: str) -> None:
    """Refuse ``what``, a constant of ``count`` numbers that a translation creates, if too large.

    Raises:
        ExecutionError: The numbers take more than ``MAX_COMPUTED`` at 8 bytes each.
    """
    if 8 * count > MAX_COMPUTED:
        raise ExecutionError(
            f"{what} is too large", got=f"{8 * count} bytes", expected=f"at most {MAX_COMPUTED}"
        )


def require_available_memory(nbytes: int, what: str) -> None:
    """Refuse ``what`` if its ``nbytes`` exceed the available memory.

    Raises:
        ProgramError: ``nbytes`` are more than the available memory.
    """
    if nbytes > (limit := _available()):
        raise ProgramError(
            f"{what} does not fit into memory",
            got=f"{nbytes} bytes",
            expected=f"at most {limit} bytes, which are available",
        )


def _available() -> int:
    free = _from_memory_info()
    if free is None:
        free = _physical_memory()
    try:
        most, used = (int(path.read_text()) for path in _GROUP)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free
    return min(free, max(most - used, 0))


def _from_memory_info() -> int | None:
    try:
        text = _MEMORY_INFO.read_text()
    except OSError:
        return None
    _, _, fields = text.partition(_AVAILABLE)
    amount = fields.split(maxsplit=1)[0] if fields else ""
    return int(amount) * 1024 if amount.isdigit() else None


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN
