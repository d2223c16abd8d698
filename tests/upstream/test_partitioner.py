"""Tests of ExecuTorch's own Core ML backend, of its partitioner and of shapes, pass on ours."""

from __future__ import annotations

import pytest
from support.upstream_runs import run_upstream

# A vision transformer takes as long as all the others together.
_LEFT_TO_THE_SUITE = "test_vit_skip_conv"


@pytest.mark.slow
def test_partitioner_and_enumerated_shapes() -> None:
    files = ("test_coreml_partitioner.py", "test_enumerated_shapes.py")
    output = run_upstream(f"-k=not {_LEFT_TO_THE_SUITE}", *files)
    assert "10 passed" in output
    assert "2 xfailed" in output
