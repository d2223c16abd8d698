"""The machine that programs run on: whether Core ML is a part of it.

Everything that depends on that asks ``has_core_ml``, by the name of this module, so that tests
replace it in one place.
"""

from __future__ import annotations

import sys


def has_core_ml() -> bool:
    """Return whether this is macOS, of which Core ML is a part."""
    return sys.platform == "darwin"
