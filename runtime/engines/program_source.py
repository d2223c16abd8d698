"""The bytes that a program was read from, which identify it.

Identifiers inside programs are not used: other exporters choose them at random or may repeat them,
and a wrong match would run the wrong program.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mlpackage import locate

# Bytes per piece. A hash of one buffer runs on one core, so threads hash pieces.
_PIECE = 4 << 20
_DIGEST_BYTES = 16


class ProgramSource:
    """Specification and weight files of a program, in memory or mapped.

    Args:
        spec: The serialized ``Model`` message.
        weights: Weight files by path relative to the specification.
        files: All files of the mlpackage by relative POSIX path, if known.
    """

    def __init__(
        self, spec: Buffer, weights: Mapping[str, Buffer], files: Mapping[str, Buffer] | None = None
    ) -> None:
        self.files = dict(files or {})
        self.spec = memoryview(spec)
        self._weights = {name: memoryview(data) for name, data in sorted(weights.items())}

    @classmethod
    def of_files(cls, files: Mapping[str, Buffer]) -> ProgramSource:
        """Return the source in the files of an mlpackage.

        Raises:
            BlobFormatError: The manifest is malformed, or a part is missing.
        """
        parts = locate(files)
        return cls(parts.spec, parts.weights, files)

    @functools.cached_property
    def spec_digest(self) -> bytes:
        """Digest of the specification, which has everything but the weights."""
        return _digest(self.spec)

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest of specification and weights, unique to a program. Reads all weights."""
        total = _hash(self.spec_digest)
        for name, data in self._weights.items():
            encoded = name.encode()
            total.update(len(encoded).to_bytes(8, "little") + encoded)
            total.update(data.nbytes.to_bytes(8, "little") + _digest(data))
        return total.digest()

    @property
    def address(self) -> tuple[object, ...]:
        """A key that is equal for sources at the same address in memory while both are alive."""
        views = (np.frombuffer(data, np.uint8) for data in self._weights.values() if data.nbytes)
        return self.spec_digest, *((view.ctypes.data, view.nbytes) for view in views)


def _hash(data: Buffer = b"") -> hashlib.blake2b:
    # The fastest of hashlib's collision-resistant digests here: 0.7 GB/s a core.
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def _digest(data: memoryview) -> bytes:
    pieces = [data[start : start + _PIECE] for start in range(0, data.nbytes, _PIECE)]
    if len(pieces) < 2:
        return _hash(data).digest()
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
        leaves = pool.map(lambda piece: _hash(piece).digest(), pieces)
        return _hash(b"".join(leaves)).digest()
