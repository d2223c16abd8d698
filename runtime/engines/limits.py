"""What a program may take: turns of a loop, elements of a list, and memory.

A few bytes of a program can ask for more memory than the machine has, and on many systems such a
request succeeds and ends the process later. One request may therefore take a quarter of what
is available at that moment, and is refused beyond it.
"""

from __future__ import annotations

import os
from pathlib import Path

from coreml_delegate.errors import ExecutionError, ProgramError

MAX_TURNS = 1 << 20
"""Turns of a loop; on the reference engine, of all loops of one call. Beyond it a program is taken
for endless."""

MAX_LIST = 1 << 20
"""Elements of one list, and of a tensor where Python values are needed. Neither holds data: beyond
it a program is taken for damaged."""

_SHARE = 4
_MEMORY_INFO = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"
# Limit and use of the control group, in bytes: containers see the host's figures in /proc.
_GROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
_UNKNOWN = 4 << 30


def largest_request() -> int:
    """Bytes that one request may take now."""
    return _available() // _SHARE


def require_memory(nbytes: int, what: str) -> None:
    """Refuse ``what`` if its ``nbytes`` are more than one request may take.

    Raises:
        ExecutionError: They are.
    """
    if nbytes > (limit := largest_request()):
        raise ExecutionError(
            f"{what} does not fit into memory",
            got=f"{nbytes} bytes",
            expected=f"at most {limit} bytes, a quarter of what is available",
        )


def require_available_memory(nbytes: int, what: str) -> None:
    """Refuse ``what`` if its ``nbytes`` are more than is available.

    Raises:
        ProgramError: They are more than is available.
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
        free = _from_pages()
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
    _, _, rest = text.partition(_AVAILABLE)
    amount = rest.split(maxsplit=1)[0] if rest else ""
    return int(amount) * 1024 if amount.isdigit() else None


def _from_pages() -> int:
    """Physical memory where free memory cannot be told."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN
