"""Files with the caches of a language model after a prompt.

A file is in the format ``safetensors``: the caches by name, the tensor ``tokens`` [n], int64, and
texts in the header: the format and its version, the SHA-256 of the program, the adapter, and the
SHA-256 of all of these. The caches have the dtypes in which the program holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coreml_delegate.errors import InputError
from coreml_delegate.formats.files import new_file
from coreml_delegate.patches.third_party import import_optional
from coreml_delegate.runtime.snapshots import Array

_FORMAT, _VERSION = "coreml-delegate prompt cache", "1"
_TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class PromptCache:
    """The caches of a program after some tokens.

    Attributes:
        program: SHA-256 of the program's file, in hexadecimal.
        adapter: Name of the adapter; empty for the base model.
        tokens: The tokens.
        caches: The caches by name.
    """

    program: str
    adapter: str
    tokens: tuple[int, ...]
    caches: Mapping[str, Array]

    def write(self, path: Path) -> None:
        """Write the file; it appears as a whole, in the place of a file of that name.

        Raises:
            OSError: The folder cannot be written.
        """
        tensors = {**self.caches, _TOKENS: np.array(self.tokens, dtype=np.int64)}
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "program": self.program,
            "adapter": self.adapter,
            "content": self._digest(),
        }
        content: bytes = import_optional("safetensors.numpy").save(tensors, header)
        with new_file(path) as file:
            file.write(content)

    @classmethod
    def read(cls, path: Path) -> PromptCache:
        """Read a file.

        Raises:
            InputError: It is no such file, of another version, or damaged.
            OSError: It cannot be read.
        """
        safetensors = import_optional("safetensors")
        try:
            with safetensors.safe_open(path, "np") as file:
                header: dict[str, str] = file.metadata() or {}
                names = file.keys()  # the file is no mapping
                tensors = {name: file.get_tensor(name) for name in names}
        except safetensors.SafetensorError as error:
            raise _unusable(path, str(error)) from error
        if header.get("format") != _FORMAT:
            raise _unusable(path, "a file of another kind")
        if header.get("version") != _VERSION:
            raise _unusable(path, f"version {header.get('version')}")
        tokens = tensors.pop(_TOKENS, np.zeros(0, dtype=np.int64)).flatten().tolist()
        program, adapter = header.get("program", ""), header.get("adapter", "")
        result = cls(program, adapter, tuple(map(int, tokens)), tensors)
        if header.get("content") != result._digest():
            raise _unusable(path, "content that has changed")
        return result

    def _digest(self) -> str:
        total = hashlib.sha256(f"{self.program} {self.adapter} {self.tokens}\n".encode())
        for name, values in sorted(self.caches.items()):
            array = np.ascontiguousarray(values)
            total.update(f"{name} {array.dtype} {array.shape}\n".encode())
            total.update(array.data)
        return total.hexdigest()


def _unusable(path: Path, got: str) -> InputError:
    return InputError(
        f"{path} is no prompt cache that can be read",
        got=got,
        expected=f"a file that generate --prompt-cache wrote, version {_VERSION}",
        remedy="Remove it, or name another file",
    )
