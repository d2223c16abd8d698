"""``coreml-delegate cache``, ``--engine-precision``, and users without a home."""

from __future__ import annotations

import json
import sys

import pytest
from support.command import TINY

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.caches import CACHE_VARIABLE, HOMELESS
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE, CacheOptions, EntryCache
from coreml_delegate.runtime.program import shim
from coreml_delegate.scripts.cli import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


def test_caches_are_shown_and_cleared(tmp_path, capsys):
    compiled, converted = tmp_path / "compiled", tmp_path / "converted"
    EntryCache(CacheOptions()).write(bytes(32), {}, bytes(10))
    for n in range(2):
        EntryCache(CacheOptions(converted)).write(bytes([n]) * 32, {}, b"", bytes(5))
    assert main(["cache", "--json"]) == 0
    entry = {"folder": str(compiled), "entries": 1, "bytes": 4096 + 10 + 2, "removed": 0}
    others = {"folder": str(converted), "entries": 2, "bytes": 2 * (4096 + 5 + 2), "removed": 0}
    assert json.loads(capsys.readouterr().out) == {
        "enabled": True,
        "limit_bytes": 2 << 30,
        **entry,
        "conversions": others,
        "native": {"folder": str(tmp_path / "native"), "entries": 0, "bytes": 0, "removed": 0},
    }
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "limit              at most 2.1 GB each",
        "compiled programs  0 entries, 0 B, 1 removed",
        f"                   {compiled}",
        "conversions        0 entries, 0 B, 2 removed",
        f"                   {converted}",
        "without Python     0 entries, 0 B, 0 removed",
        f"                   {tmp_path / 'native'}",
    ]


def test_a_disabled_cache_is_shown(monkeypatch, capsys):
    EntryCache(CacheOptions()).write(bytes(32), {}, b"")
    monkeypatch.setenv(LIMIT_VARIABLE, "off")
    assert main(["cache"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "limit              off"
    assert printed[1].startswith("compiled programs  1 entry, ")


def test_an_invalid_environment_variable_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    assert main(["cache"]) == 1
    assert "COREML_DELEGATE_COMPILED_CACHE is not understood: got 'much'" in capsys.readouterr().err


@pytest.fixture
def homeless(monkeypatch):
    """A user id without a passwd entry, as containers have it, in an environment without HOME."""
    pwd = pytest.importorskip("pwd")

    def unknown(_):
        raise KeyError("no such user")

    for name in (CACHE_VARIABLE, "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems know homes of all users")
@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_has_no_caches(tmp_path, capsys):
    assert CacheOptions.from_environment() is None
    with pytest.raises(OptionError, match=r"no home directory.*Set COREML_DELEGATE_CACHE"):
        CacheOptions()
    assert main(["cache"]) == 0
    assert "this user has no home directory" in capsys.readouterr().out
    program = str(tmp_path / "tiny.pte")
    assert main(["export", *TINY, "-o", program]) == 0
    assert main(["run", program]) == 0
    assert main(["compile", program]) == 1
    assert "Set COREML_DELEGATE_CACHE to a directory" in capsys.readouterr().err
    assert shim.unavailable_reason() == HOMELESS
