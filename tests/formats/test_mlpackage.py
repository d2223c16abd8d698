import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.formats.files import new_folder, write_folder
from coreml_delegate.formats.mlpackage import MANIFEST, assemble, locate, map_folder

SPEC, WEIGHTS = b"spec", {"weight.bin": b"w" * 100}


def test_parts_are_found_through_the_manifest():
    parts = locate(assemble(SPEC, WEIGHTS))
    assert bytes(parts.spec) == SPEC
    assert {k: bytes(v) for k, v in parts.weights.items()} == {"weights/weight.bin": b"w" * 100}


def test_a_package_without_weights_has_no_weights_item():
    files = assemble(SPEC, {})
    assert len(json.loads(files[MANIFEST])["itemInfoEntries"]) == 1
    assert locate(files).weights == {}


def test_equal_content_gives_equal_bytes():
    assert assemble(SPEC, WEIGHTS) == assemble(SPEC, WEIGHTS)


def test_coremltools_opens_our_package(tmp_path):
    """libmodelpackage, the library Core ML itself uses, is the judge of the manifest."""
    package = pytest.importorskip("coremltools.libmodelpackage")
    write_folder(assemble(SPEC, WEIGHTS), tmp_path / "m.mlpackage")
    opened = package.ModelPackage(str(tmp_path / "m.mlpackage"))
    root = opened.getRootModel()
    weights = opened.findItemByNameAuthor("weights", "com.apple.CoreML")
    assert package.ModelPackage.isValid(str(tmp_path / "m.mlpackage"))
    assert Path(root.path()).read_bytes() == SPEC
    assert (Path(weights.path()) / "weight.bin").read_bytes() == WEIGHTS["weight.bin"]


def test_written_folder_maps_back(tmp_path):
    files = assemble(SPEC, WEIGHTS)
    write_folder(files, tmp_path / "a" / "m.mlpackage")
    mapped = map_folder(tmp_path / "a" / "m.mlpackage")
    assert {k: bytes(v) for k, v in mapped.items()} == {k: bytes(v) for k, v in files.items()}
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["m.mlpackage"], "no staging is left"


def test_existing_folder_is_replaced_only_with_overwrite(tmp_path):
    target = tmp_path / "m.mlpackage"
    write_folder({"old": b"1"}, target)
    with pytest.raises(ProgramError, match="output exists"):
        write_folder({"new": b"2"}, target)
    assert (target / "old").read_bytes() == b"1"
    write_folder({"new": b"2"}, target, overwrite=True)
    assert [p.name for p in target.iterdir()] == ["new"]


def test_failure_in_the_middle_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_folder({"a": b"1", "b": None}, tmp_path / "m.mlpackage")
    assert list(tmp_path.iterdir()) == []


def test_created_parent_folders_are_removed_after_a_failure(tmp_path):
    (tmp_path / "there").mkdir()
    for parent in ("there", "there/new", "new/deep"):
        with pytest.raises(TypeError):
            write_folder({"b": None}, tmp_path / parent / "m.mlpackage")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_several_folders_appear_together(tmp_path):
    with pytest.raises(KeyError), ExitStack() as folders:  # noqa: PT012 - what is left is tested
        for name in ("a", "b"):
            folders.enter_context(new_folder({"f": b"1"}, tmp_path / "out" / name))
        assert not (tmp_path / "out" / "a").exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "lacks its manifest"),
        (b"", "malformed mlpackage manifest"),
        (b"[]", "malformed mlpackage manifest"),
        (b'{"rootModelIdentifier": "x", "itemInfoEntries": {}}', "malformed mlpackage manifest"),
        (b'{"rootModelIdentifier": "x", "itemInfoEntries": {"x": {"path": 1}}}', "malformed"),
        (b'{"rootModelIdentifier": "x", "itemInfoEntries": {"x": {"path": "y"}}}', "specification"),
    ],
)
def test_broken_manifests_are_refused(manifest, message):
    files = {} if manifest is None else {MANIFEST: manifest}
    with pytest.raises(BlobFormatError, match=message):
        locate(files)


def test_a_missing_folder_is_a_program_error(tmp_path):
    with pytest.raises(ProgramError, match="no such mlpackage"):
        map_folder(tmp_path / "none")
