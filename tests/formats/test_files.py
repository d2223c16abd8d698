"""Files appear whole or not at all; folders: ``test_mlpackage``."""

import errno
import os

import pytest

from coreml_delegate.formats.files import new_file, new_path


def write(path, content, error=None):
    with new_file(path) as file:
        file.write(content)
        if error is not None:
            raise error


def test_a_file_replaces_an_older_one(tmp_path):
    path = tmp_path / "a"
    for content in (b"old", b"new"):
        write(path, content)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyError(), KeyboardInterrupt()])
def test_an_unfinished_file_is_removed_and_the_older_one_stays(error, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write(path, b"new", error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(OSError, match="No space") as caught:
        write(path, b"", OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.filename == str(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits")
def test_permissions_are_those_asked_for(tmp_path):
    with new_file(tmp_path / "a", permissions=0o600) as file:
        file.write(b"1")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_file_written_at_a_path_is_renamed(tmp_path):
    with new_path(tmp_path / "a.so") as path:
        path.write_bytes(b"1")
        path.with_name("a.cpp").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["a.so"]


def test_a_path_that_is_not_written_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), new_path(tmp_path / "a.so"):
        pass
    assert list(tmp_path.iterdir()) == []
