"""A sample of coremltools' op tests on each engine; ``make conformance`` runs all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parents[2]
_SAMPLE = 0.002
_EXPECTED = int(0.5 * _SAMPLE * 10_000)  # half of the sample reaches a prediction, or more


def _run(results: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.conformance", "--results", str(results), *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert results.exists(), finished.stdout + finished.stderr
    return finished.returncode, json.loads(results.read_text())


def _ending(run: dict[str, Any], *outcomes: str) -> dict[str, str]:
    return {
        test: found["reason"]
        for test, found in run["tests"].items()
        if found["outcome"] in outcomes
    }


@pytest.mark.share(2)
@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_sample_passes(engine: str, tmp_path: Path) -> None:
    code, run = _run(tmp_path / "run.json", "--engine", engine, "--sample", str(_SAMPLE))
    assert _ending(run, "failed", "error") == {}
    assert code == 0
    passed, unsupported = _ending(run, "passed"), _ending(run, "unsupported")
    assert len(passed) + len(unsupported) >= _EXPECTED
    assert all(run["tests"][test]["engine"] == engine for test in passed)
    assert all(f"the {engine} engine cannot run" in reason for reason in unsupported.values())
    if engine == "reference":
        assert unsupported == {}


@pytest.mark.slow
def test_wrong_predictions_are_noticed(tmp_path: Path) -> None:
    code, run = _run(
        tmp_path / "run.json",
        *("-p", "support.wrong_predictions", "--engine", "reference"),
        *("--files", "iOS17/test_quantization.py", "--sample", "0.01"),
    )
    assert code == pytest.ExitCode.TESTS_FAILED
    assert _ending(run, "passed") == {}
    assert len(_ending(run, "failed")) >= 1
    reached = {test: found["reached"] for test, found in run["tests"].items()}
    assert all(reached[test] for test in _ending(run, "failed"))
