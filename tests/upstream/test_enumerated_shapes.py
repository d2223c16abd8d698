"""The test of enumerated shapes of ExecuTorch's own Core ML backend passes on ours."""

from __future__ import annotations

from support.upstream_runs import run_upstream


def test_enumerated_shapes() -> None:
    output = run_upstream("test_enumerated_shapes.py")
    assert "1 passed" in output
