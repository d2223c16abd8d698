"""Where this project keeps what it can make again: the one folder all its caches lie in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import platformdirs

CACHE_VARIABLE: Final = "COREML_DELEGATE_CACHE"
"""Environment variable that names the folder."""


def cache_folder() -> Path:
    """The folder; it need not exist. Each cache has a folder of its own below it."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("coreml-delegate")
