"""The tests of ExecuTorch's own Core ML backend, run on this backend in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]


def run_upstream(*arguments: str) -> str:
    """Return the output of ``python -m tests.upstream``, which must succeed."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.upstream", *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
