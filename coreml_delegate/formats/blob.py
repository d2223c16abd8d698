"""The bytes of a blob: a flattened directory, or a reference to a blob shared by several methods.

Layout of a blob (offsets from its first byte)::

    file bytes, each at a multiple of ALIGNMENT, zero padding between
    JSON trailer, byte-reversed, ending exactly at the last byte

The trailer is ``{"nodes": [node, ...]}`` with every node after its children, the root last, and ::

    {"name": str, "kind": 0 (file) | 1 (directory),
     "dataRegion": {"offset": int, "size": int}, "children": {name: index}}

A partition that shares its model with other methods has, instead of a blob, the four bytes
``CMJR`` and the JSON ``{"version": 1, "key": str, "functionName": str}``; ``key`` names a blob in
the program's named data.

Source: ExecuTorch 1.0 to 1.5, ``backends/apple/coreml/runtime/inmemoryfs`` and ``delegate``.
"""

from __future__ import annotations

import io
import json
import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from coreml_delegate.errors import BlobFormatError

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Pieces:
    """The content of a file as consecutive parts, not necessarily contiguous in memory."""

    parts: tuple[Buffer, ...]


Content = Buffer | Pieces

Files = dict[str, Content]
"""Content of each file of a blob by relative POSIX path; see ``formats.blob_layout``."""

ALIGNMENT = (
    64  # fixed, so that bytes do not depend on the host; 64 keeps weights SIMD-aligned in place
)
TRAILER_LIMIT = 10 * 1024 * 1024  # bytes; the device reader's limit
ROOT_NAME = "lowered_module"
REFERENCE_MAGIC = b"CMJR"
REFERENCE_VERSION = 1

_FILE, _DIRECTORY = 0, 1
_FIRST_TRAILER_CHUNK = 64 * 1024
_CHUNK = 16 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class BlobReference:
    """A ``CMJR`` reference.

    Attributes:
        key: Name of a blob in the program's named data.
        function_name: Core ML function to run.
    """

    key: str
    function_name: str

    def encode(self) -> bytes:
        """Return the bytes of the reference, which replace a blob."""
        body = {
            "functionName": self.function_name,
            "key": self.key,
            "version": REFERENCE_VERSION,
        }
        return REFERENCE_MAGIC + json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: Buffer) -> BlobReference | None:
        """Read a reference, or None when ``data`` does not start with the magic.

        Raises:
            BlobFormatError: The magic is followed by no reference of a known version.
        """
        raw = bytes(memoryview(data)[: len(REFERENCE_MAGIC)])
        if raw != REFERENCE_MAGIC:
            return None
        try:
            body = json.loads(bytes(memoryview(data)[len(REFERENCE_MAGIC) :]))
        except (ValueError, RecursionError) as error:
            raise BlobFormatError("CMJR reference is not JSON", got=str(error)) from error
        fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        key, function = fields.get("key"), fields.get("functionName")
        version = fields.get("version")
        if version != REFERENCE_VERSION:
            raise BlobFormatError(
                "CMJR reference has another version", got=repr(version), expected="1"
            )
        if not (isinstance(key, str) and key and isinstance(function, str) and function):
            raise BlobFormatError(
                "CMJR reference is incomplete", got=repr(fields), expected="key and functionName"
            )
        return cls(key=key, function_name=function)


def pieces_of(content: Content) -> tuple[Buffer, ...]:
    """Return the parts of a file's content, in order."""
    return content.parts if isinstance(content, Pieces) else (content,)


def size_of(content: Content) -> int:
    """Return the size of a file's content in bytes."""
    return sum(memoryview(part).nbytes for part in pieces_of(content))


def chunks_of(content: Content) -> Iterator[memoryview]:
    """Yield the content in chunks, without keeping a mapped file in memory.

    The pages of a mapped file are released after each chunk; later reads load them again.
    """
    for part in pieces_of(content):
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]
            if isinstance(view.obj, mmap.mmap) and sys.platform != "win32":
                view.obj.madvise(mmap.MADV_DONTNEED)


def flatten(files: Mapping[str, Content]) -> bytes:
    """Pack files into a blob; equal content gives equal bytes.

    Args:
        files: Relative POSIX path to content.

    Raises:
        BlobFormatError: The device reader cannot read a name, or a trailer of this size.
    """
    layout = _Layout()
    layout.directory(_tree(files), ROOT_NAME)
    trailer = json.dumps(
        {"nodes": layout.nodes}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    if len(trailer) > TRAILER_LIMIT:
        raise BlobFormatError(
            "blob has too many files",
            got=f"a trailer of {len(trailer)} bytes",
            expected=f"at most {TRAILER_LIMIT}",
        )
    contents = (*layout.contents, trailer[::-1])
    # Allocate the final size first: weights may be gigabytes, and growing memory copies them.
    blob = io.BytesIO()
    blob.seek(sum(map(size_of, contents)) - 1)
    blob.write(b"\0")
    blob.seek(0)
    for content in contents:
        for chunk in chunks_of(content):
            blob.write(chunk)
    return blob.getvalue()


def unflatten(blob: Buffer) -> dict[str, memoryview]:
    """Read a blob.

    Args:
        blob: The bytes; the result has views of them, no copies.

    Returns:
        Relative POSIX path to content, sorted by path.

    Raises:
        BlobFormatError: The bytes are not a blob, or their directory is inconsistent or unsafe.
    """
    view = memoryview(blob).cast("B").toreadonly()
    nodes, data_end = _read_trailer(view)
    files: dict[str, memoryview] = {}
    visited: set[int] = set()
    pending = [("", len(nodes) - 1)]
    while pending:
        path, index = pending.pop()
        if index in visited:
            raise BlobFormatError("blob directory is not a tree", got=f"node {index} twice")
        visited.add(index)
        node = nodes[index]
        if node.kind == _FILE:
            if node.offset + node.size > data_end:
                raise BlobFormatError(
                    "file lies outside the blob",
                    got=f"{path!r} at {node.offset} + {node.size} bytes",
                    expected=f"at most {data_end}",
                )
            files[path] = view[node.offset : node.offset + node.size]
            continue
        for name, child in node.children.items():
            _check_name(name)
            if child >= index:
                raise BlobFormatError(
                    "blob directory is not ordered", got=f"child {child} of node {index}"
                )
            pending.append((f"{path}/{name}" if path else name, child))
    return dict(sorted(files.items()))


@dataclass(frozen=True, slots=True)
class _Node:
    kind: int
    offset: int
    size: int
    children: Mapping[str, int]


def _tree(files: Mapping[str, Content]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in sorted(files):
        *folders, name = path.split("/")
        level = root
        for part in [*folders, name]:
            _check_name(part)
        for folder in folders:
            level = level.setdefault(folder, {})
            if not isinstance(level, dict):
                raise BlobFormatError("a file is also a folder", got=repr(path))
        if name in level:
            raise BlobFormatError("a file is also a folder", got=repr(path))
        level[name] = files[path]
    return root


class _Layout:
    """File contents with padding, in order, and the nodes that describe them."""

    def __init__(self) -> None:
        self.contents: list[Content] = []
        self.nodes: list[dict[str, object]] = []
        self._end = 0

    def directory(self, folder: dict[str, Any], name: str) -> int:
        """Append a folder depth first and return the index of its node."""
        children: dict[str, int] = {}
        for child, content in sorted(folder.items()):
            if isinstance(content, dict):
                children[child] = self.directory(cast("dict[str, Any]", content), child)
            else:
                children[child] = self._file(content, child)
        return self._node(name, _DIRECTORY, 0, 0, children)

    def _file(self, content: Content, name: str) -> int:
        size = size_of(content)
        padding = -self._end % ALIGNMENT
        offset = self._end + padding
        self.contents += [bytes(padding), content]
        self._end = offset + size
        return self._node(name, _FILE, offset, size, {})

    def _node(self, name: str, kind: int, offset: int, size: int, children: dict[str, int]) -> int:
        region = {"offset": offset, "size": size}
        self.nodes.append({"children": children, "dataRegion": region, "kind": kind, "name": name})
        return len(self.nodes) - 1


def _check_name(name: str) -> None:
    # The reader detects escaped quotes only within 512-byte chunks: no escape is safe.
    unsafe = name in ("", ".", "..") or any(c in '/"\\' or ord(c) < 32 for c in name)
    if unsafe:
        raise BlobFormatError(
            "unsafe file name in blob", got=repr(name), expected="no quote, slash, '.' or '..'"
        )


def _read_trailer(view: memoryview) -> tuple[list[_Node], int]:
    end = len(view)
    while end and not any(view[max(0, end - 4096) : end]):
        end = max(0, end - 4096)
    while end and view[end - 1] == 0:
        end -= 1
    if not end or view[end - 1] != ord("{"):
        raise BlobFormatError(
            "not a Core ML blob",
            got=f"{len(view)} bytes without a directory at the end",
            expected="a flattened directory",
        )
    decoder = json.JSONDecoder()
    size = _FIRST_TRAILER_CHUNK
    while True:
        chunk = bytes(view[max(0, end - size) : end])[::-1]
        try:
            # latin-1 maps bytes to characters one to one, so the length found is in bytes.
            _, length = decoder.raw_decode(chunk.decode("latin-1"))
            document = json.loads(chunk[:length].decode("utf-8"))
            break
        except (ValueError, RecursionError) as error:
            if size >= min(end, TRAILER_LIMIT):
                raise BlobFormatError("blob directory is not JSON", got=str(error)) from error
            size *= 4
    listed = cast("dict[str, Any]", document).get("nodes") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not listed:
        raise BlobFormatError("blob directory has no nodes", expected='{"nodes": [...]}')
    return [_parse_node(node) for node in cast("list[Any]", listed)], end - length


def _parse_node(node: Any) -> _Node:
    try:
        region = node["dataRegion"]
        children = node["children"]
        parsed = _Node(
            kind=_natural(node["kind"]),
            offset=_natural(region["offset"]),
            size=_natural(region["size"]),
            children={name: _natural(index) for name, index in children.items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BlobFormatError("malformed node in blob directory", got=repr(node)[:200]) from error
    if parsed.kind not in (_FILE, _DIRECTORY):
        raise BlobFormatError("unknown kind of node in blob directory", got=str(parsed.kind))
    return parsed


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value
