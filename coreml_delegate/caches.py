"""The folder of all caches, and the digest of sources that invalidates their entries."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import platformdirs

CACHE_VARIABLE: Final = "COREML_DELEGATE_CACHE"
"""Environment variable that names the folder of all caches."""


def cache_folder() -> Path:
    """Return the folder of all caches, which need not exist; each has a folder of its own below."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("coreml-delegate")


@functools.cache
def source_digest(*packages: str) -> str:
    """Return a digest of the Python sources of packages and of all packages below them.

    Args:
        packages: Full names of the packages.

    Returns:
        32 hexadecimal digits; the digest of nothing where sources are not installed.
    """
    total = hashlib.blake2b(digest_size=16)
    for package in packages:
        for name, source in _sources(importlib.resources.files(package), package):
            total.update(name.encode() + b"\0" + source.read_bytes())
    return total.hexdigest()


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = f"{prefix}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif entry.name.endswith(".py"):
            yield name, entry
