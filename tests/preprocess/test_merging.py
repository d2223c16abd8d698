"""Several models merged into one."""

from __future__ import annotations

import pytest

from coreml_delegate.formats.blob_layout import MethodMetadata
from coreml_delegate.formats.mlpackage import MAIN, locate
from coreml_delegate.preprocess.merging import FunctionModel, merge
from coreml_delegate.third_party import model_pb2


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
