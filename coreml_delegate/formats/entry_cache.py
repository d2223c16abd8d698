"""A cache of entries in one folder: found by key, the least recently used dropped first.

Layout of an entry (little endian)::

    header, 4096 bytes  8s magic, u32 version, u32 CRC-32 of all that follows it,
                        u64 size of the file, u64 size of the metadata, 32s key, zeros
    payload             from byte 4096 on, so that a mapped payload starts on a page
    metadata            JSON

An entry is written under a temporary name and renamed, and never changed afterwards: readers see
all of it or nothing. If several processes write one key, the last one wins, with the same content.
Nothing is locked, so that no lock survives a killed process, and network file systems work. Nothing
is flushed to disk: the checksum finds entries that a power failure damaged.
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

from coreml_delegate.caches import HOMELESS, NAME_A_FOLDER, cache_folder
from coreml_delegate.errors import OptionError
from coreml_delegate.formats.blob import Content, chunks_of, size_of
from coreml_delegate.formats.files import UNFINISHED, new_file

_logger = logging.getLogger(__name__)

LIMIT_VARIABLE: Final = "COREML_DELEGATE_COMPILED_CACHE"
"""Environment variable that turns every such cache ``off`` or says how large each may grow."""

COMPILED: Final = "compiled"
"""Folder of the programs that engines have compiled, in the folder of all caches."""

DEFAULT_LIMIT: Final = 2 << 30
"""Bytes that the entries of one cache may have together, unless the variable says otherwise."""

_OFF: Final = ("off", "0")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE: Final = re.compile(r"(\d+)([KMG]?)")

_MAGIC: Final = b"CMDENTRY"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQ32s")
_CHECKED_FROM: Final = 16  # behind magic, version and checksum
_PAYLOAD: Final = 4096
_KEY_BYTES: Final = 32

_SUFFIX: Final = ".entry"
# Unfinished files of killed writers are removed at this age, in seconds; no writer takes so long.
_ABANDONED: Final = 3600.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where a cache is and how large it may grow.

    Attributes:
        folder: By default ``compiled`` in the folder of all caches of this package.
        limit_bytes: Of all entries together; the least recently used go first.
    """

    folder: Path = field(default_factory=lambda: _folder_below_caches(COMPILED))
    limit_bytes: int = DEFAULT_LIMIT

    @classmethod
    def from_environment(cls, name: str = COMPILED) -> CacheOptions | None:
        """Read ``COREML_DELEGATE_COMPILED_CACHE``: ``off``, or a limit such as ``500M``.

        Args:
            name: Of the cache's folder, in the folder of all caches.

        Returns:
            The options, or None for no cache, also where the user has no home.

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
    """Return the bytes that text such as 500000000, 500M or 2G says; None for other text."""
    size = _SIZE.fullmatch(text.upper())
    return None if size is None else int(size[1]) * _UNITS[size[2]]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that was read: metadata, and the payload, a writable copy-on-write mapping."""

    metadata: dict[str, Any]
    payload: memoryview


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the cache: size in bytes, and when it was last used in ns since the epoch."""

    path: Path
    size: int
    used: int


class _DamagedError(Exception):
    """A file is damaged, or no entry; the message says why."""


class EntryCache:
    """The cache in one folder; the module describes its files.

    Args:
        options: Where it is, and how large it may grow.
        drops_others: Whether an entry is made room for by dropping others; if not, one that does
            not fit in is not written.
    """

    def __init__(self, options: CacheOptions, *, drops_others: bool = True) -> None:
        self._drops_others = drops_others
        self._folder = options.folder
        self._limit = options.limit_bytes

    def read(self, key: bytes) -> Entry | None:
        """Return the entry of a key, its checksum verified; None if there is none.

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
        """Write an entry, dropping others to make room. If that is impossible, write nothing.

        Args:
            key: 32 bytes.
            metadata: For JSON.
            payload: Its parts, one after another.

        Returns:
            Whether the entry has been written.
        """
        described = json.dumps(metadata, sort_keys=True).encode()
        size = _PAYLOAD + sum(map(size_of, payload)) + len(described)
        if size > self._limit:
            _logger.debug("not cached: %d bytes exceed the limit of %d", size, self._limit)
            return False
        head = struct.pack("<QQ32s", size, len(described), key)
        rest = head.ljust(_PAYLOAD - _CHECKED_FROM, b"\0")
        checksum = zlib.crc32(rest)
        for chunk in _chunks(payload):
            checksum = zlib.crc32(chunk, checksum)
        checksum = zlib.crc32(described, checksum)
        start = struct.pack("<8sII", _MAGIC, _VERSION, checksum)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep_unfinished(self._folder)
            if not self._make_room(size, key):
                _logger.debug("not cached: there is no room for %d bytes", size)
                return False
            with new_file(self._path(key), permissions=0o600) as file:
                file.writelines(itertools.chain((start, rest), _chunks(payload), (described,)))
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
            How many entries were dropped.
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
        """Drop entries until one of this size and key fits in, if that is allowed."""
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
    magic, version, checksum, size, described, stored_key = _HEADER.unpack_from(content)
    if (magic, version) != (_MAGIC, _VERSION):
        raise _DamagedError("it is no entry of this version")
    if size != content.nbytes or described > size - _PAYLOAD:
        raise _DamagedError(f"{content.nbytes} bytes are there of {size}")
    if zlib.crc32(content[_CHECKED_FROM:]) != checksum:
        raise _DamagedError("its checksum is wrong")
    if stored_key != key:
        raise _DamagedError("it belongs to another program")
    end = size - described
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
    """Remove, once in a process, the unfinished files of killed writers."""
    now = time.time()
    for path in _list_files(folder, UNFINISHED):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > _ABANDONED:
                path.unlink()


@functools.cache
def _log_unusable(folder: Path, verb: str, reason: str) -> None:
    """Log once that nothing is kept."""
    _logger.warning(
        "the cache is not used: cannot %s %s (%s); %s=off silences this",
        verb,
        folder,
        reason,
        LIMIT_VARIABLE,
    )
