"""Building the shim: the cache, and what is said when it cannot be built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.gates import needs_compiler

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.runtime.program import shim


@needs_compiler
def test_a_build_is_cached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    built = shim.build()
    assert built.parent == tmp_path / "stock-shim"
    assert [path.suffix for path in sorted(built.parent.iterdir())] in ([".so"], [".lock", ".so"])
    # No compiler is needed, or looked for, any more.
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert shim.unavailable_reason() is None
    assert shim.build() == built


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the shim is for Linux")
def test_a_missing_compiler_makes_the_host_unavailable(empty_cache: Path, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(empty_cache))
    reason = r"no C\+\+ compiler was found \(looked for c\+\+, g\+\+, clang\+\+\)"
    assert shim.unavailable_reason() == reason.replace("\\", "")
    with pytest.raises(EngineUnavailableError, match=reason + ".*use the Python host"):
        shim.build()
    monkeypatch.setenv("CXX", "my-compiler -m64")
    assert shim.unavailable_reason() == (
        "the C++ compiler that CXX names was not found: my-compiler -m64"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the shim is for Linux")
def test_a_failing_compiler_is_quoted_and_leaves_nothing(empty_cache: Path, monkeypatch) -> None:
    compiler = empty_cache / "bad-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal: no such header' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        EngineUnavailableError, match=r"got exit code 3:\nfatal: no such header\. Try another"
    ):
        shim.build()
    left = (empty_cache / "cache" / "stock-shim").iterdir()
    assert {path.suffix for path in left} <= {".lock"}


@needs_compiler
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    with pytest.raises(EngineUnavailableError, match="Set COREML_DELEGATE_CACHE to a directory"):
        shim.build()
