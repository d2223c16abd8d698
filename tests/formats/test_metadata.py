import json

import pytest

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.blob_layout import (
    MethodMetadata,
    ModelMetadata,
    identify,
    metadata_in,
    models_in,
)

ONE = ModelMetadata("id", {"": MethodMetadata(("x",), ("y", "z"))})
TWO = ModelMetadata(
    "id", {"prefill": MethodMetadata(("a",), ("b",)), "decode": MethodMetadata((), ("c",))}
)


@pytest.mark.parametrize("metadata", [ONE, TWO])
def test_round_trip(metadata):
    assert ModelMetadata.decode(metadata.encode()) == metadata


def test_wire_names_of_a_single_method():
    assert json.loads(ONE.encode()) == {
        "identifier": "id",
        "inputNames": ["x"],
        "outputNames": ["y", "z"],
    }


def test_wire_names_of_several_methods():
    assert json.loads(TWO.encode())["methods"]["decode"] == {"inputNames": [], "outputNames": ["c"]}


def test_a_method_is_found_by_name_unless_the_blob_is_not_shared():
    assert ONE.method("forward").input_names == ("x",)
    assert TWO.method("decode").output_names == ("c",)
    with pytest.raises(BlobFormatError, match="no such method: got 'forward'"):
        TWO.method("forward")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"identifier": "", "inputNames": [], "outputNames": ["y"]}',
        b'{"identifier": "i", "inputNames": [], "outputNames": []}',
        b'{"identifier": "i", "inputNames": [1], "outputNames": ["y"]}',
        b'{"identifier": "i", "methods": {}}',
        b'{"identifier": "i", "methods": []}',
    ],
)
def test_malformed_metadata_is_refused(body):
    with pytest.raises(BlobFormatError, match=r"metadata\.json"):
        ModelMetadata.decode(body)


def test_models_are_found_by_their_folder():
    files = {"metadata.json": b"", "model.mlmodelc/a": b"1", "model.mlpackage/b/c": b"2"}
    assert models_in(files) == {"model.mlpackage": {"b/c": b"2"}, "model.mlmodelc": {"a": b"1"}}


def test_a_blob_without_a_model_is_refused():
    with pytest.raises(BlobFormatError, match=r"no model: got a, expected model\.mlpackage or"):
        models_in({"a": b""})


def test_different_models_have_different_identifiers():
    methods = {"": MethodMetadata(("x",), ("y",))}
    names = [identify(model, methods)[0] for model in ({"a": b"1"}, {"a": b"2"}, {"b": b"1"})]
    assert len(set(names)) == 3
    assert metadata_in(identify({"a": b"1"}, methods)[1]).identifier == names[0]
