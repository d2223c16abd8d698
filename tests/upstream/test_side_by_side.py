"""Our backend beside ExecuTorch's own, of the same name, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tolerances import ATOL_RTOL

from tests.upstream.side_by_side import ORDERS

_REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("first", ORDERS)
def test_each_partitioner_keeps_its_backend(first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream.side_by_side", first],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", "tests"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    flows = json.loads(done.stdout[done.stdout.index("{") :])
    assert {name: flow["makers"] for name, flow in flows.items()} == {
        "our partitioner": {"forward": ["ours"]},
        "our to_backend": {"forward": ["ours"]},
        "our specs": {"forward": ["ours"]},
        "our recipe": {"forward": ["ours"]},
        "their partitioner": {"forward": ["theirs"]},
        "their to_backend": {"forward": ["theirs"]},
        "their specs": {"forward": ["theirs"]},
        "their recipe": {"forward": ["theirs"]},
        "both partitioners": {"ours": ["ours"], "theirs": ["theirs"], "forward": ["ours"]},
    }
    atol, _ = ATOL_RTOL["fp32"]
    assert all(flow["error"] < atol for flow in flows.values())
