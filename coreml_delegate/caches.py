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

HOMELESS: Final = f"this user has no home directory, and {CACHE_VARIABLE} is not set"
"""Why caches are off where ``cache_folder`` returns None."""

NAME_A_FOLDER: Final = f"Set {CACHE_VARIABLE} to a directory that can be written."
"""Remedy for a folder of caches that does not exist or cannot be written."""


def cache_folder() -> Path | None:
    """Return the folder of all caches, which need not exist; each has a folder of its own below.

    Returns:
        None where caches are off: the variable is not set, and the user has no home, like a user id
        of a container that has no passwd entry.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    try:
        return platformdirs.user_cache_path("coreml-delegate")
    except RuntimeError:
        return None


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
