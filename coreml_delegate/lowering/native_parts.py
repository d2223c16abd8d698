"""Python replacements of coremltools' native modules that write and read files.

Coremltools has wheels for macOS and for Linux on x86-64. On other systems pip builds it from source
without ``libmilstoragepython`` and ``libmodelpackage``, so that it cannot write models. Weight
files are byte-identical, and packages differ only in the identifiers of their items.

Source: coremltools' ``mlmodel/src/MILBlob``; ``formats.weight_file`` and ``formats.mlpackage`` have
the layouts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.formats.files import write_folder
from coreml_delegate.formats.mlpackage import (
    WEIGHTS,
    WEIGHTS_FOLDER,
    assemble,
    locate_spec,
    map_folder,
)
from coreml_delegate.formats.weight_file import (
    StoredWeight,
    WeightFile,
    pack_integers,
    read_weight,
    unpack_integers,
)
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches import patched
from coreml_delegate.patches.third_party import coremltools, model_pb2

_BYTE: Final = 8  # bits
_INT4: Final = 8  # number of the type


class BlobStorageWriter:
    """Writer of a weight file, with the methods that coremltools calls.

    Each takes numbers, [count], and returns the offset of the weight's record in bytes.
    """

    def __init__(self, path: str) -> None:
        self._file = WeightFile(Path(path))

    def _write(self, values: NDArray[Any], *, number: int, bits: int = _BYTE) -> int:
        data: NDArray[Any] = values if bits >= _BYTE else pack_integers(values, bits)
        unused = 0 if bits >= _BYTE else data.nbytes * _BYTE - values.size * bits
        return self._file.append(StoredWeight(number, unused, data.data.cast("B")))

    write_fp16_data = partialmethod(_write, number=1)
    write_float_data = partialmethod(_write, number=2)
    write_uint8_data = partialmethod(_write, number=3)
    write_int8_data = partialmethod(_write, number=4)
    write_int16_data = partialmethod(_write, number=6)
    write_uint16_data = partialmethod(_write, number=7)
    write_int4_data = partialmethod(_write, number=_INT4, bits=4)
    write_uint1_data = partialmethod(_write, number=9, bits=1)
    write_uint2_data = partialmethod(_write, number=10, bits=2)
    write_uint4_data = partialmethod(_write, number=11, bits=4)
    write_uint3_data = partialmethod(_write, number=12, bits=3)
    write_uint6_data = partialmethod(_write, number=13, bits=6)
    write_int32_data = partialmethod(_write, number=14)
    write_uint32_data = partialmethod(_write, number=15)


class BlobStorageReader:
    """Reader of a weight file, with the methods that coremltools calls.

    Each takes the offset of a weight's record in bytes and returns its numbers, [count].
    """

    def __init__(self, path: str) -> None:
        self._name = path
        self._content = memoryview(Path(path).read_bytes())

    def _read(self, offset: int, *, dtype: type[np.generic]) -> NDArray[Any]:
        return np.frombuffer(read_weight(self._name, self._content, offset).data, dtype)

    def _unpack(self, offset: int, *, bits: int) -> NDArray[Any]:
        stored = read_weight(self._name, self._content, offset)
        count = (stored.data.nbytes * _BYTE - stored.padding) // bits
        values = unpack_integers(np.frombuffer(stored.data, np.uint8), bits, count)
        return (values.view(np.int8) ^ 8) - np.int8(8) if stored.dtype == _INT4 else values

    read_fp16_data = partialmethod(_read, dtype=np.uint16)
    read_float_data = partialmethod(_read, dtype=np.float32)
    read_uint8_data = partialmethod(_read, dtype=np.uint8)
    read_int8_data = partialmethod(_read, dtype=np.int8)
    read_int16_data = partialmethod(_read, dtype=np.int16)
    read_uint16_data = partialmethod(_read, dtype=np.uint16)
    read_int4_data = partialmethod(_unpack, bits=4)
    read_uint1_data = partialmethod(_unpack, bits=1)
    read_uint2_data = partialmethod(_unpack, bits=2)
    read_uint4_data = partialmethod(_unpack, bits=4)
    read_uint3_data = partialmethod(_unpack, bits=3)
    read_uint6_data = partialmethod(_unpack, bits=6)
    read_int32_data = partialmethod(_read, dtype=np.int32)
    read_uint32_data = partialmethod(_read, dtype=np.uint32)


def _create_package(
    spec: Any, weights_dir: str | None = None, package_path: str | None = None
) -> str:
    """Write an mlpackage, as ``coremltools.models.utils._create_mlpackage`` does."""
    path = Path(package_path or tempfile.mkdtemp(suffix=".mlpackage"))
    weights = map_folder(Path(weights_dir)) if weights_dir is not None else {}
    files = assemble(spec.SerializeToString(), weights)
    # Coremltools needs the weights folder even without weights.
    write_folder(files, path, folders=[WEIGHTS_FOLDER], overwrite=True)
    return str(path)


def _spec_of(package: Path) -> Path:
    return package / locate_spec(map_folder(package))


def _load_spec(path: str) -> Any:
    """Read the specification of an ``.mlmodel`` or an mlpackage."""
    file = Path(path)
    spec = model_pb2().Model()
    spec.ParseFromString((_spec_of(file) if file.is_dir() else file).read_bytes())
    return spec


def _find_weights(path: str) -> str | None:
    """Return the weights folder of an mlpackage, None if missing."""
    weights = _spec_of(Path(path)).with_name(WEIGHTS)
    return str(weights) if weights.is_dir() else None


@contextmanager
def native_parts() -> Generator[None]:
    """Patch coremltools to write and read files if it was built without its native modules."""
    coremltools()
    missing = [
        native.with_state(replacement)
        for native, replacement in (
            (coremltools_patches.BLOB_WRITER, BlobStorageWriter),
            (coremltools_patches.BLOB_READER, BlobStorageReader),
        )
        if coremltools_patches.is_missing(native)
    ]
    if coremltools_patches.lacks_packages():
        missing += [
            coremltools_patches.CREATE_PACKAGE.with_state(_create_package),
            coremltools_patches.LOAD_SPEC.with_state(_load_spec),
            coremltools_patches.FIND_WEIGHTS.with_state(_find_weights),
        ]
    with patched(*missing):
        yield
