"""A cache of entries in one folder, by key, with removal of least recently used entries.

Layout of an entry (little endian)::

    header, 4096 bytes  8s magic, u32 version, u32 CRC-32 of all that follows it,
                        u64 size of the file, u64 size of the metadata, 32s key, zeros
    payload             from byte 4096 on, so that a mapped payload starts on a page
    metadata            JSON

An entry is written under a temporary name, renamed, and never changed afterwards: readers see all
of it or nothing. If several processes write one key, the last wins, with the same content. There
are no locks, so that no lock survives a killed process, and network file systems work. Entries are
not flushed to disk: the checksum detects entries damaged by a power failure.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.blob import Content, chunks_of, size_of
from coreml_delegate.formats.caches import HOMELESS, NAME_A_FOLDER, cache_folder
from coreml_delegate.formats.files import UNFINISHED, new_file

_logger = logging.getLogger(__name__)

LIMIT_VARIABLE: Final = "COREML_DELEGATE_COMPILED_CACHE"
"""Environment variable that turns all such caches ``off`` or limits the size of each."""

COMPILED: Final = "compiled"
"""Folder, in the folder of all caches, of programs compiled by engines."""

DEFAULT_LIMIT: Final = 2 << 30
"""Default limit of a cache's total size in bytes."""

_OFF: Final = ("off", "0")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE: Final = re.compile(r"(\d+)([KMG]?)")

_MAGIC: Final = b"CMDENTRY"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQ32s")
_CHECKED_FROM: Final = 16  # after magic, version and checksum
_PAYLOAD: Final = 4096

_SUFFIX: Final = ".entry"
# Age at which unfinished files of killed writers are removed; no writer takes so long.
_ABANDONED_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Folder and size limit of a cache.

    Attributes:
        folder: By default ``compiled`` in the folder of all caches of this package.
        limit_bytes: Of all entries; the least recently used are removed first.
    """

    folder: Path = field(default_factory=lambda: _folder_below_caches(COMPILED))
    limit_bytes: int = DEFAULT_LIMIT

    @classmethod
    def from_environment(cls, name: str = COMPILED) -> CacheOptions | None:
        """Read ``COREML_DELEGATE_COMPILED_CACHE``: ``off``, or a limit such as ``500M``.

        Args:
            name: Of the cache's folder, in the folder of all caches.

        Returns:
            The options, or None for no cache, also if the user has no home folder.

        Raises:
            OptionError: The value is neither.
        """
        value = os.environ.get(LIMIT_VARIABLE, "").strip()
        caches = cache_folder()
        if caches is None:
            return None
        folder = caches / name
        if not value:
            return cls(folder)
        if value.lower() in _OFF:
            return None
        size = parse_size(value)
        if size is None:
            raise OptionError(
                f"{LIMIT_VARIABLE} is not understood",
                got=repr(value),
                expected="off, or bytes such as 500000000, 500M or 2G",
            )
        return cls(folder, size)


def _folder_below_caches(name: str) -> Path:
    caches = cache_folder()
    if caches is None:
        raise OptionError("caches are off", got=HOMELESS, remedy=NAME_A_FOLDER)
    return caches / name


def parse_size(text: str) -> int | None:
    """Parse a size in bytes: 500000000, 500M or 2G; None for other text."""
    size = _SIZE.fullmatch(text.upper())
    return None if size is None else int(size[1]) * _UNITS[size[2]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A read entry: metadata and payload, the latter a writable copy-on-write mapping."""

    metadata: dict[str, Any]
    payload: memoryview


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the cache: size in bytes, and time of last use in ns since the epoch."""

    path: Path
    size: int
    used: int


class _DamagedError(Exception):
    """A file is damaged, or no cache entry; the message says why."""


class EntryCache:
    """A cache in one folder; see the module for its files.

    Args:
        options: Folder and size limit.
        drops_others: Whether other entries are dropped to make room; if not, an entry that does
            not fit is not written.
    """

    def __init__(self, options: CacheOptions, *, drops_others: bool = True) -> None:
        self._drops_others = drops_others
        self._folder = options.folder
        self._limit = options.limit_bytes

    def read(self, key: bytes) -> Entry | None:
        """Return the entry of a key, with verified checksum, or None if missing or damaged.

        Args:
            key: 32 bytes.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            entry = _parse(memoryview(content), key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _log_unusable(self._folder, "read", error.strerror or str(error))
            return None
        except (ValueError, _DamagedError) as error:  # mmap refuses an empty file
            self.reject(key, str(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return entry

    def reject(self, key: bytes, reason: str) -> None:
        """Drop an entry that cannot be used."""
        path = self._path(key)
        _logger.warning("cache entry %s is made again: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()

    def write(self, key: bytes, metadata: dict[str, Any], *payload: Content) -> bool:
        """Write an entry, and drop other entries to make room; without room, write nothing.

        Args:
            key: 32 bytes.
            metadata: For JSON.
            payload: Its parts, one after another.

        Returns:
            Whether the entry has been written.
        """
        metadata_bytes = json.dumps(metadata, sort_keys=True).encode()
        size = _PAYLOAD + sum(map(size_of, payload)) + len(metadata_bytes)
        if size > self._limit:
            _logger.debug("not cached: %d bytes exceed the limit of %d", size, self._limit)
            return False
        head = struct.pack("<QQ32s", size, len(metadata_bytes), key)
        header_rest = head.ljust(_PAYLOAD - _CHECKED_FROM, b"\0")
        checksum = zlib.crc32(header_rest)
        for chunk in _chunks(payload):
            checksum = zlib.crc32(chunk, checksum)
        checksum = zlib.crc32(metadata_bytes, checksum)
        header_start = struct.pack("<8sII", _MAGIC, _VERSION, checksum)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep_unfinished(self._folder)
            if not self._make_room(size, key):
                _logger.debug("not cached: there is no room for %d bytes", size)
                return False
            with new_file(self._path(key), permissions=0o600) as file:
                file.writelines(
                    itertools.chain(
                        (header_start, header_rest), _chunks(payload), (metadata_bytes,)
                    )
                )
        except OSError as error:
            _log_unusable(self._folder, "write", error.strerror or str(error))
            return False
        return True

    def files(self) -> list[EntryFile]:
        """Return the files of all entries, the least recently used first."""
        return sorted(self._files(), key=lambda file: file.used)

    def clear(self) -> int:
        """Drop every entry, and the unfinished files of writers.

        Returns:
            Number of dropped entries.
        """
        dropped = sum(_try_unlink(file.path) for file in self._files())
        for path in _list_files(self._folder, UNFINISHED):
            _try_unlink(path)
        return dropped

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _files(self) -> Iterator[EntryFile]:
        for path in _list_files(self._folder, _SUFFIX):
            with contextlib.suppress(OSError):  # dropped meanwhile by another process
                status = path.stat()
                yield EntryFile(path, status.st_size, status.st_mtime_ns)

    def _make_room(self, size: int, key: bytes) -> bool:
        """Drop entries until an entry of this size and key fits; return whether it does."""
        files = [file for file in self.files() if file.path != self._path(key)]
        excess = sum(file.size for file in files) + size - self._limit
        if not self._drops_others:
            return excess <= 0
        for file in files:
            if excess <= 0:
                break
            _try_unlink(file.path)
            excess -= file.size
        return True


def _chunks(payload: Iterable[Content]) -> Iterator[memoryview]:
    return (chunk for content in payload for chunk in chunks_of(content))


def _parse(content: memoryview, key: bytes) -> Entry:
    if content.nbytes < _PAYLOAD:
        raise _DamagedError(f"{content.nbytes} bytes are no entry")
    magic, version, checksum, size, metadata_size, stored_key = _HEADER.unpack_from(content)
    if (magic, version) != (_MAGIC, _VERSION):
        raise _DamagedError("it is no entry of this version")
    if size != content.nbytes or metadata_size > size - _PAYLOAD:
        raise _DamagedError(f"{content.nbytes} bytes are there of {size}")
    if zlib.crc32(content[_CHECKED_FROM:]) != checksum:
        raise _DamagedError("its checksum is wrong")
    if stored_key != key:
        raise _DamagedError("it belongs to another program")
    end = size - metadata_size
    return Entry(json.loads(bytes(content[end:])), content[_PAYLOAD:end])


def _list_files(folder: Path, suffix: str) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix == suffix]
    except OSError:  # no such folder: no entries
        return []


def _try_unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


@functools.cache
def _sweep_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed writers, once per process."""
    now = time.time()
    for path in _list_files(folder, UNFINISHED):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()


@functools.cache
def _log_unusable(folder: Path, verb: str, reason: str) -> None:
    """Log once that a cache folder is not usable."""
    _logger.warning(
        "the cache is not used: cannot %s %s (%s); %s=off silences this",
        verb,
        folder,
        reason,
        LIMIT_VARIABLE,
    )
