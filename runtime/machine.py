"""Whether the machine has Core ML.

Callers use ``machine.has_core_ml``, so that tests replace the function in one place.
"""

from __future__ import annotations

import sys


def has_core_ml() -> bool:
    """Whether this is macOS, which includes Core ML."""
    return sys.platform == "darwin"
