"""Several models merged into one."""

from __future__ import annotations

import pytest

from coreml_delegate.formats.blob import Pieces
from coreml_delegate.formats.blob_layout import PACKAGE, MethodMetadata, identify, in_folder
from coreml_delegate.formats.mlpackage import (
    MAIN,
    MODEL_PATH,
    WEIGHT_FILE,
    WEIGHTS,
    assemble,
    locate,
)
from coreml_delegate.formats.weight_file import StoredWeight, write_weights
from coreml_delegate.lowering.merging import FunctionModel, merge
from coreml_delegate.patches.third_party import model_pb2

_BYTES = memoryview(b"\x21\x03")
_OF_8_BITS = StoredWeight(3, 0, _BYTES)


def of_version(version: int) -> FunctionModel:
    spec = model_pb2().Model()
    spec.specificationVersion = version
    spec.mlProgram.functions[MAIN].opset = f"CoreML{version - 1}"
    names = MethodMetadata(input_names=(), output_names=())
    return FunctionModel(spec=spec, names=names, weights={}, references=())


@pytest.mark.parametrize("versions", [(8, 9), (9, 8)])
def test_the_merged_model_has_the_latest_version(versions: tuple[int, int]) -> None:
    models = dict(zip(("forward", "other"), map(of_version, versions), strict=True))
    files = {
        path: b"".join(content.parts) if hasattr(content, "parts") else content
        for path, content in merge(models).items()
    }
    spec = model_pb2().Model.FromString(bytes(locate(files).spec))
    assert spec.specificationVersion == 9
    assert spec.description.defaultFunctionName == "forward"
    assert sorted(spec.mlProgram.functions) == ["forward", "other"]


def with_weight(weight: StoredWeight) -> FunctionModel:
    """A model whose function refers to a weight, read from the files of a blob."""
    data, (offset,) = write_weights([weight])
    spec = model_pb2().Model()
    spec.specificationVersion = 9
    function = spec.mlProgram.functions[MAIN]
    operation = function.block_specializations["CoreML8"].operations.add()
    value = operation.attributes["val"].blobFileValue
    value.fileName, value.offset = f"{MODEL_PATH}{WEIGHTS}/{WEIGHT_FILE}", offset
    model = in_folder(PACKAGE, assemble(spec.SerializeToString(), {WEIGHT_FILE: data}))
    _, files = identify(model, {"": MethodMetadata(input_names=("x",), output_names=("y",))})
    return FunctionModel.of(files)


@pytest.mark.parametrize(
    ("other", "count"),
    [(StoredWeight(18, 4, _BYTES), 1), (StoredWeight(18, 0, _BYTES), 2), (_OF_8_BITS, 2)],
    ids=["equal", "one more of 4 bits", "of 8 bits"],
)
def test_weights_are_stored_once_if_type_and_size_are_equal_too(
    other: StoredWeight, count: int
) -> None:
    """Three numbers of 4 bits take as many bytes as four, the last of which is 0."""
    files = merge({"a": with_weight(StoredWeight(18, 4, _BYTES)), "b": with_weight(other)})
    (data,) = (content for path, content in files.items() if path.endswith(WEIGHT_FILE))
    whole = b"".join(data.parts) if isinstance(data, Pieces) else bytes(data)
    assert whole.count(bytes(_BYTES)) == count
