"""Files from which applications without Python run delegates; ``native_backend.cpp`` reads them.

A file is an entry of the cache ``native`` in the folder of all caches. Its key is a digest of the
delegate and of ``NativeProgram.machine``, which an application computes from the ``.pte``. The
payload, with numbers of 64 bits, little-endian::

    size of the texts, number of pairs, of words of the function, of models
    texts     device, and name and value of each property, each followed by a zero byte
    words     of the function
    models    number of words, offset and size of the content, words
    contents  each aligned to 4096 bytes from the start of the payload
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Final

from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache
from coreml_delegate.runtime.native import VERSION, NativeProgram

FOLDER: Final = "native"
"""Folder of these files, in the folder of all caches."""

# Part of the key, so that files of other versions are not found.
_SCHEMA: Final = f"coreml-delegate native {VERSION}"
_PAGE: Final = 4096


def write_native_file(
    options: CacheOptions, program: NativeProgram, method: str, processed: Buffer
) -> bool:
    """Write the file of a delegate, a function of ``method`` with these bytes in the ``.pte``.

    Returns:
        Whether the file was written; the cache may have no room.
    """
    key = native_file_key(program.machine, method, processed)
    # Other files must not be dropped, because their applications need them.
    return EntryCache(options, drops_others=False).write(key, {"method": method}, *_parts(program))


def native_file_key(machine: str, method: str, processed: Buffer) -> bytes:
    """Return the key, 32 bytes, of a delegate's file; see ``NativeProgram`` for ``machine``."""
    digest = hashlib.blake2b(digest_size=32)
    for text in (_SCHEMA, machine, method):
        digest.update(text.encode() + b"\0")
    digest.update(processed)
    return digest.digest()


def _parts(program: NativeProgram) -> Iterator[bytes]:
    texts = [program.device, *(text for pair in program.config for text in pair)]
    text = b"".join(part.encode() + b"\0" for part in texts)
    text += bytes(-len(text) % 8)
    words = _words(program.words)
    head = _words((len(text), len(program.config), len(program.words), len(program.models)))
    model_bytes = sum(8 * (3 + len(model.words)) for model in program.models)
    end = len(head) + len(text) + len(words) + model_bytes
    models, contents = list[bytes](), list[bytes]()
    for model in program.models:
        padding = -end % _PAGE
        models.append(_words((len(model.words), end + padding, len(model.content), *model.words)))
        contents += [bytes(padding), model.content]
        end += padding + len(model.content)
    yield from (head, text, words, *models, *contents)


def _words(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(words)}q", *words)
