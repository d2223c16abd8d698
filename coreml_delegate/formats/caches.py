"""The folder of all caches, and the software whose change invalidates their entries."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import platformdirs

CACHE_VARIABLE: Final = "COREML_DELEGATE_CACHE"
"""Environment variable that names the folder of all caches."""

HOMELESS: Final = f"this user has no home directory, and {CACHE_VARIABLE} is not set"
"""Reason why caches are off if ``cache_folder`` returns None."""

NAME_A_FOLDER: Final = f"Set {CACHE_VARIABLE} to a directory that can be written."
"""Remedy for a folder of caches that does not exist or cannot be written."""


def cache_folder() -> Path | None:
    """Return the folder of all caches, which need not exist; each cache has a subfolder.

    Returns:
        None if caches are off: the variable is not set, and the user has no home directory, as a
        container's user id without a passwd entry.
    """
    path = os.environ.get(CACHE_VARIABLE)
    if path:
        return Path(path)
    try:
        return platformdirs.user_cache_path("coreml-delegate")
    except RuntimeError:
        return None


@functools.cache
def software(package: str, *distributions: str) -> Mapping[str, str]:
    """Return the software that computes a result: sources, versions, and the kind of machine.

    Args:
        package: The package whose sources are digested.
        distributions: Names of distributions; the version of a missing one is ``none``.
    """
    return {
        package: source_digest(package),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version_of(name) for name in distributions},
    }


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; ``none`` if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def source_digest(*packages: str) -> str:
    """Return a digest of the Python sources of packages, including subpackages.

    Args:
        packages: Full names of the packages.

    Returns:
        32 hexadecimal digits; without installed sources, the digest of empty input.
    """
    digest = hashlib.blake2b(digest_size=16)
    for package in packages:
        for name, source in _sources(importlib.resources.files(package), package):
            digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = f"{prefix}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif entry.name.endswith(".py"):
            yield name, entry
