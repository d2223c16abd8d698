"""The MIL reader against coremltools' own writers, and against damage."""

from __future__ import annotations

import numpy as np
import pytest
from support.mil import builder_program

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.patches.third_party import coremltools, model_pb2
from coreml_delegate.runtime.mil.dtypes import DType, packed_nbytes, unpack_bits
from coreml_delegate.runtime.mil.program import Constant, Packed, TensorType
from coreml_delegate.runtime.mil.reader import WeightFile, read_mlpackage, read_program
from coreml_delegate.targets import Opset

ct = coremltools()


PACKED = {
    DType.INT4: (-8, 7),
    DType.UINT1: (0, 1),
    DType.UINT2: (0, 3),
    DType.UINT3: (0, 7),
    DType.UINT4: (0, 15),
    DType.UINT6: (0, 63),
}
WHOLE = [
    DType.FP16,
    DType.FP32,
    DType.INT8,
    DType.UINT8,
    DType.INT16,
    DType.UINT16,
    DType.INT32,
    DType.UINT32,
]


def _write(path, dtype, values):
    """The weight file that coremltools' native writer makes of ``values``; its record's offset."""
    storage = pytest.importorskip("coremltools.libmilstoragepython")
    writer = storage._BlobStorageWriter(str(path))
    name = {"fp32": "float", "fp16": "fp16"}.get(dtype.label, dtype.label)
    raw = values.view(np.uint16) if dtype is DType.FP16 else values
    return getattr(writer, f"write_{name}_data")(np.ascontiguousarray(raw))


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_byte_weights(tmp_path, dtype):
    values = np.arange(37).astype(dtype.numpy)
    offset = _write(tmp_path / "w.bin", dtype, values)
    file = WeightFile("w.bin", memoryview((tmp_path / "w.bin").read_bytes()))
    read = file.read(offset, dtype, values.size)
    np.testing.assert_array_equal(read.view(dtype.numpy), values)
    assert not read.flags.writeable


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("count", [1, 7, 8, 64, 101])
def test_packed_weights(tmp_path, dtype, count):
    low, high = PACKED[dtype]
    values = np.random.default_rng(0).integers(low, high, count, endpoint=True).astype(dtype.numpy)
    offset = _write(tmp_path / "w.bin", dtype, values)
    file = WeightFile("w.bin", memoryview((tmp_path / "w.bin").read_bytes()))
    packed = file.read(offset, dtype, count)
    assert packed.nbytes == packed_nbytes(dtype, count)
    np.testing.assert_array_equal(unpack_bits(packed, dtype, count), values)


@pytest.mark.parametrize(
    ("offset", "dtype", "count", "message"),
    [
        (0, DType.FP32, 4, "no record here"),
        (10**9, DType.FP32, 4, "outside the file"),
        (64, DType.FP16, 4, "wrong data type: got fp32, expected fp16"),
        (64, DType.FP32, 5, "wrong size: got 16 bytes"),
    ],
)
def test_weight_records_must_agree_with_the_program(tmp_path, offset, dtype, count, message):
    _write(tmp_path / "w.bin", DType.FP32, np.zeros(4, np.float32))
    file = WeightFile("w.bin", memoryview((tmp_path / "w.bin").read_bytes()))
    with pytest.raises(BlobFormatError, match=message):
        file.read(offset, dtype, count)


def test_other_files_are_no_weights():
    with pytest.raises(BlobFormatError, match="too short"):
        WeightFile("w.bin", memoryview(b"abc"))
    with pytest.raises(BlobFormatError, match="another version"):
        WeightFile("w.bin", memoryview(bytes(64)))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    from coremltools.converters.mil.mil import Builder as mb

    weight = np.arange(4096, dtype=np.float32).reshape(64, 64)

    def function(x):
        return mb.linear(x=mb.cast(x=x, dtype="fp16"), weight=weight.astype(np.float16), name="y")

    program = builder_program(function, {"x": np.zeros((2, 64), np.float32)}, Opset.iOS17)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    path = tmp_path_factory.mktemp("package") / "m.mlpackage"
    model.save(str(path))
    return path, weight


def test_mlpackage_weights_are_mapped_not_copied(package):
    path, weight = package
    function = read_mlpackage(path).functions["main"]
    constants = [op.attributes["val"] for op in function.block.ops if op.type == "const"]
    stored = next(c for c in constants if c.offset is not None)
    np.testing.assert_array_equal(stored.data, weight.astype(np.float16))
    assert not stored.data.flags.owndata
    assert not stored.data.flags.writeable
    assert function.opset == "CoreML7"
    assert isinstance(function.inputs[0].type, TensorType)


def test_functions_share_the_constants_they_store_once(package):
    model, weights = _model(package)
    model.mlProgram.functions["other"].CopyFrom(model.mlProgram.functions["main"])
    model.description.defaultFunctionName = "main"
    functions = read_program(model.SerializeToString(), weights).functions.values()
    weight, same = (
        next(c for op in f.block.ops for c in op.attributes.values() if c.offset is not None)
        for f in functions
    )
    assert weight is same


def test_packed_constants_are_unpacked_at_every_access_and_not_kept():
    stored = np.array([0x1F, 0x28], np.uint8)  # nibbles 15, 1, 8, 2
    packed = Packed(stored, DType.INT4, (2, 2))
    constant = Constant(TensorType(DType.INT4, (2, 2)), packed)
    np.testing.assert_array_equal(constant.data, np.array([[-1, 1], [-8, 2]], np.int8))
    assert constant.data is not constant.data
    assert constant.stored is stored
    assert constant.nbytes == 2


def _model(package):
    path, _ = package
    spec = next(path.rglob("model.mlmodel")).read_bytes()
    weights = {
        "weights/weight.bin": WeightFile("w", memoryview(next(path.rglob("*.bin")).read_bytes()))
    }
    return model_pb2().Model.FromString(spec), weights


def _block(model):
    function = model.mlProgram.functions["main"]
    return function.block_specializations[function.opset]


def _rename_use(model):
    next(o for o in _block(model).operations if o.type == "linear").inputs["x"].arguments[
        0
    ].name = "no"


def _define_twice(model):
    block = _block(model)
    block.operations.append(block.operations[0])


def _reverse(model):
    operations = list(_block(model).operations)[::-1]
    del _block(model).operations[:]
    _block(model).operations.extend(operations)


def _wrong_opset(model):
    model.mlProgram.functions["main"].opset = "CoreML99"


def _unknown_type(model):
    _block(model).operations[-1].outputs[0].type.tensorType.dataType = 0


def _no_output(model):
    del _block(model).outputs[:]


def _no_functions(model):
    model.mlProgram.functions.clear()


def _weight_shape(model):
    for op in _block(model).operations:
        if op.type == "const" and op.attributes["val"].WhichOneof("value") == "blobFileValue":
            op.attributes["val"].type.tensorType.dimensions[0].constant.size = 1 << 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_rename_use, "not defined before it: got 'no'"),
        (_define_twice, "a value is defined twice"),
        (_reverse, "not defined before it"),
        (_wrong_opset, "no block of its opset"),
        (_unknown_type, "unknown MIL data type"),
        (_no_output, "does not produce the outputs of its description"),
        (_no_functions, "has no function"),
        (_weight_shape, "too large"),
    ],
)
def test_damage_is_named(package, damage, message):
    model, weights = _model(package)
    damage(model)
    with pytest.raises(BlobFormatError, match=message):
        read_program(model.SerializeToString(), weights)


def test_missing_weight_file_is_named(package):
    model, _ = _model(package)
    with pytest.raises(BlobFormatError, match="weight file is missing"):
        read_program(model.SerializeToString(), {})


def test_other_model_types_are_refused():
    model = model_pb2().Model()
    model.specificationVersion = 1
    model.identity.SetInParent()
    with pytest.raises(ProgramError, match="not an ML Program: got identity"):
        read_program(model.SerializeToString(), {})


def test_other_bytes_are_refused():
    with pytest.raises(BlobFormatError, match="does not parse"):
        read_program(b"\xff\xff\xff", {})
