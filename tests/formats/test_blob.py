import json

import pytest

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats import blob
from coreml_delegate.formats.blob import ALIGNMENT, BlobReference, flatten, unflatten

FILES = {
    "metadata.json": b"{}",
    "model.mlpackage/Data/weights/weight.bin": bytes(range(256)) * 3,
    "model.mlpackage/empty": b"",
    "model.mlpackage/é.txt": b"name outside ASCII",
}


def _contents(files):
    return {name: bytes(data) for name, data in files.items()}


def _trailer(data: bytes) -> dict:
    document, _ = json.JSONDecoder().raw_decode(data[::-1].decode("latin-1"))
    return document


def test_round_trip():
    assert _contents(unflatten(flatten(FILES))) == FILES


def test_bytes_do_not_depend_on_insertion_order():
    assert flatten(dict(reversed(FILES.items()))) == flatten(FILES)


def test_trailer_follows_the_device_readers_rules():
    data = flatten(FILES)
    assert data[-1:] == b"{", "no padding after the trailer"
    nodes = _trailer(data)["nodes"]
    for index, node in enumerate(nodes):
        assert set(node) == {"name", "kind", "dataRegion", "children"}
        assert all(child < index for child in node["children"].values())
        assert node["dataRegion"]["offset"] % ALIGNMENT == 0
    assert nodes[-1]["kind"] == 1
    assert nodes[-1]["name"] == blob.ROOT_NAME


def test_views_are_not_copies():
    data = flatten(FILES)
    assert all(view.obj is data and view.readonly for view in unflatten(data).values() if len(view))


def test_executorchs_reader_reads_our_blob(tmp_path):
    native = pytest.importorskip("executorch.backends.apple.coreml.executorchcoreml")
    native.unflatten_directory_contents(flatten(FILES), str(tmp_path))
    root = tmp_path / blob.ROOT_NAME
    read = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert read == FILES


def test_we_read_executorchs_blob(tmp_path):
    native = pytest.importorskip("executorch.backends.apple.coreml.executorchcoreml")
    # Without the empty file: its writer crashes on one.
    files = {name: content for name, content in FILES.items() if content}
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert _contents(unflatten(native.flatten_directory_contents(str(tmp_path)))) == files


def test_zero_padding_after_the_trailer_is_skipped():
    assert _contents(unflatten(flatten(FILES) + bytes(9000))) == FILES


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "a//b", "/a", 'qu"ote', "back\\slash", "new\nline"]
)
def test_unsafe_names_are_refused_on_writing(name):
    with pytest.raises(BlobFormatError, match="unsafe file name"):
        flatten({name: b""})


def test_a_file_cannot_also_be_a_folder():
    with pytest.raises(BlobFormatError, match="also a folder"):
        flatten({"a": b"", "a/b": b""})


def _encode(nodes) -> bytes:
    return bytes(128) + json.dumps({"nodes": nodes}).encode()[::-1]


def _file(name="f", offset=0, size=4):
    return {"name": name, "kind": 0, "dataRegion": {"offset": offset, "size": size}, "children": {}}


def _folder(children, name="root"):
    return {"name": name, "kind": 1, "dataRegion": {"offset": 0, "size": 0}, "children": children}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([_file(offset=120, size=9), _folder({"f": 0})], "outside the blob"),
        ([_file(offset=2**70, size=1), _folder({"f": 0})], "outside the blob"),
        ([_file(), _folder({"f": 7})], "not ordered"),
        ([_folder({"self": 0})], "not ordered"),
        ([_file(), _folder({"a": 0, "b": 0})], "not a tree"),
        ([_file(), _folder({"..": 0})], "unsafe file name"),
        ([_file(), _folder({"a/b": 0})], "unsafe file name"),
        ([_file(offset=-1), _folder({"f": 0})], "malformed node"),
        ([_file(size=True), _folder({"f": 0})], "malformed node"),
        ([{"name": "x"}], "malformed node"),
        ([{**_file(), "kind": 2}], "unknown kind"),
        ([], "no nodes"),
    ],
)
def test_inconsistent_directories_are_refused(nodes, message):
    with pytest.raises(BlobFormatError, match=message):
        unflatten(_encode(nodes))


@pytest.mark.parametrize("data", [b"", bytes(5000), b"no directory", b"}" * 100, b"\xff{"])
def test_bytes_without_a_directory_are_refused(data):
    with pytest.raises(BlobFormatError):
        unflatten(data)


def test_deeply_nested_json_is_refused_not_overflowed():
    with pytest.raises(BlobFormatError, match="not JSON"):
        unflatten((b'{"a":' * 100_000)[::-1])


def test_reference_round_trip():
    reference = BlobReference(key="k", function_name="prefill")
    assert BlobReference.decode(reference.encode()) == reference


def test_a_blob_is_not_a_reference():
    assert BlobReference.decode(flatten(FILES)) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"version":2,"key":"k","functionName":"f"}', b'{"version":1,"key":""}'],
)
def test_malformed_references_are_refused(body):
    with pytest.raises(BlobFormatError, match="CMJR"):
        BlobReference.decode(b"CMJR" + body)
