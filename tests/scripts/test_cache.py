"""``coreml-delegate cache``, and ``--engine-precision``."""

from __future__ import annotations

import json

import pytest

from coreml_delegate.runtime import Precision
from coreml_delegate.runtime.engines.entry_cache import LIMIT_VARIABLE, CacheOptions, EntryCache
from coreml_delegate.scripts import arguments
from coreml_delegate.scripts.cli import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


def test_engine_precisions_equal_the_enum():
    assert {precision.value for precision in Precision} == set(arguments.ENGINE_PRECISIONS)


def test_cache_is_shown_and_cleared(tmp_path, capsys):
    EntryCache(CacheOptions()).write(bytes(32), {}, bytes(10))
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(tmp_path / "compiled"),
        "enabled": True,
        "limit_bytes": 2 << 30,
        "entries": 1,
        "bytes": 4096 + 10 + 2,
        "removed": 0,
    }
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"folder   {tmp_path / 'compiled'}",
        "limit    at most 2.1 GB",
        "entries  0",
        "size     0 B",
        "removed  1",
    ]


def test_a_disabled_cache_is_shown(tmp_path, monkeypatch, capsys):
    EntryCache(CacheOptions()).write(bytes(32), {}, b"")
    monkeypatch.setenv(LIMIT_VARIABLE, "off")
    assert main(["cache"]) == 0
    printed = capsys.readouterr().out
    assert "limit    off" in printed
    assert "entries  1" in printed


def test_an_invalid_environment_variable_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    assert main(["cache"]) == 1
    assert "COREML_DELEGATE_COMPILED_CACHE is not understood: got 'much'" in capsys.readouterr().err
