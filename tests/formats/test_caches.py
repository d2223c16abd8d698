"""Digests of sources: a change anywhere below a package makes another one."""

import sys
from pathlib import Path

import pytest

from coreml_delegate.formats.caches import source_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "digested"
    (folder / "inner").mkdir(parents=True)
    for name in ("__init__.py", "outer.py", "inner/__init__.py", "inner/deep.py"):
        (folder / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "digested", raising=False)
    return folder


def _digest() -> str:
    source_digest.cache_clear()
    return source_digest("digested")


@pytest.mark.parametrize("changed", ["outer.py", "inner/deep.py"])
def test_a_changed_module_changes_the_digest(package: Path, changed: str) -> None:
    before = _digest()
    assert _digest() == before
    (package / changed).write_text("answer = 42\n")
    assert _digest() != before


def test_a_module_that_moves_changes_the_digest(package: Path) -> None:
    before = _digest()
    (package / "outer.py").rename(package / "inner" / "outer.py")
    assert _digest() != before


def test_other_files_do_not_change_the_digest(package: Path) -> None:
    before = _digest()
    (package / "inner" / "notes.txt").write_text("read by nobody")
    assert _digest() == before
