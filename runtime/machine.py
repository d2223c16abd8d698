"""This machine: whether it has Core ML, and the name of its processor.

Callers use ``machine.has_core_ml``, so that tests replace the function in one place.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

_PROCESSORS: Final = Path("/proc/cpuinfo")
_COMMAND: Final = ("sysctl", "-n", "machdep.cpu.brand_string")


def has_core_ml() -> bool:
    """Whether this is macOS, which includes Core ML."""
    return sys.platform == "darwin"


def processor() -> str | None:
    """Return the system's name of the processor; None if it has no name."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            result = subprocess.run(
                _COMMAND, capture_output=True, text=True, timeout=10, check=True
            )
            return result.stdout.strip()
        for line in _PROCESSORS.read_text().splitlines():  # only Linux has the file
            label, _, name = line.partition(":")
            if label.strip() == "model name":
                return name.strip()
    return platform.processor() or None
