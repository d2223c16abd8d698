"""Weight files as we write them, read by coremltools' native reader."""

import numpy as np
import pytest

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.weight_file import ALIGNMENT, StoredWeight, read_weight, write_weights

FP32, UINT4, INT32 = 2, 11, 14
WEIGHTS = [
    StoredWeight(FP32, 0, memoryview(np.arange(5, dtype=np.float32)).cast("B")),
    # Seven numbers of four bits: the last four bits are unused.
    StoredWeight(UINT4, 4, memoryview(bytes([0x21, 0x43, 0x65, 0x07]))),
    StoredWeight(INT32, 0, memoryview(np.arange(64, dtype=np.int32)).cast("B")),
]


def written(weights):
    pieces, offsets = write_weights(weights)
    return b"".join(pieces.parts), offsets


def test_coremltools_reads_our_weight_files(tmp_path):
    storage = pytest.importorskip("coremltools.libmilstoragepython")
    data, offsets = written(WEIGHTS)
    path = tmp_path / "weight.bin"
    path.write_bytes(data)
    reader = storage._BlobStorageReader(str(path))
    np.testing.assert_array_equal(reader.read_float_data(offsets[0]), np.arange(5))
    np.testing.assert_array_equal(reader.read_uint4_data(offsets[1]), np.arange(1, 8))
    np.testing.assert_array_equal(reader.read_int32_data(offsets[2]), np.arange(64))


def test_coremltools_writes_the_same_bytes(tmp_path):
    storage = pytest.importorskip("coremltools.libmilstoragepython")
    path = tmp_path / "weight.bin"
    writer = storage._BlobStorageWriter(str(path))
    offsets = [
        writer.write_float_data(np.arange(5, dtype=np.float32)),
        writer.write_uint4_data(np.arange(1, 8, dtype=np.uint8)),
        writer.write_int32_data(np.arange(64, dtype=np.int32)),
    ]
    del writer
    data, ours = written(WEIGHTS)
    assert ours == offsets
    # The native writer does not fill up the end.
    native = path.read_bytes()
    assert data[: len(native)] == native
    assert not any(data[len(native) :])


def test_round_trip():
    data, offsets = written(WEIGHTS)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    view = memoryview(data)
    assert [read_weight("w.bin", view, offset) for offset in offsets] == WEIGHTS


def test_data_outside_the_file_is_refused():
    data, (offset, *_) = written(WEIGHTS[:1])
    with pytest.raises(BlobFormatError, match="data lies outside the file: got 20 bytes at 128"):
        read_weight("w.bin", memoryview(data[:140]), offset)
