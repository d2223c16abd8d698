"""A sample of ExecuTorch's cross-backend suite; ``make suite`` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.suite.comparison import compare
from tests.suite.flows import Source
from tests.suite.plugin import FAILURES, Suite, in_sample

_REPOSITORY = Path(__file__).parents[2]
_SAMPLE = 0.008


def _run(results: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.suite", "--results", str(results), *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert results.exists(), finished.stdout + finished.stderr
    return finished.returncode, json.loads(results.read_text())


def test_sample_passes(tmp_path: Path) -> None:
    code, run = _run(
        tmp_path / "run.json",
        *("--files", "operators", "--engine", "reference", "--sample", str(_SAMPLE)),
    )
    failed = {name: c["error"] for name, c in run["cases"].items() if c["outcome"] in FAILURES}
    assert failed == {}
    assert code == 0
    passed = [case for case in run["cases"].values() if case["outcome"] == "passed"]
    assert len(passed) >= 5
    assert sum(sum(case["delegated"].values()) for case in passed) > 0
    # Whatever stays outside has its reason.
    assert all(bool(case["undelegated"]) == bool(case["reasons"]) for case in passed)


def test_larger_samples_hold_smaller_ones() -> None:
    names = [f"operators/test_{n}.py::test" for n in range(1000)]
    small = {name for name in names if in_sample(name, 0.05)}
    assert small <= {name for name in names if in_sample(name, 0.2)}
    assert 20 <= len(small) <= 100
    assert all(in_sample(name, 1.0) for name in names)


@pytest.mark.parametrize(
    ("ours", "upstream", "behind", "ahead"),
    [
        (("passed", 3, 0), ("passed", 3, 0), False, False),
        (("passed", 2, 1), ("passed", 3, 0), True, False),
        # Kept whole, a composite op is one node.
        (("passed", 1, 0), ("passed", 3, 0), False, False),
        (("passed", 3, 0), ("passed", 2, 1), False, True),
        (("passed", 0, 3), ("lower-fail", 0, 0), False, True),
        (("mismatch", 3, 0), ("passed", 3, 0), True, False),
        (("crash", 0, 0), ("crash", 0, 0), False, False),
    ],
)
def test_comparison(
    ours: tuple[str, int, int],
    upstream: tuple[str, int, int],
    behind: bool,
    ahead: bool,
    tmp_path: Path,
) -> None:
    paths = []
    for label, (outcome, inside, outside) in (("ours", ours), ("upstream", upstream)):
        case = {
            "outcome": outcome,
            "delegated": {"aten::add": inside},
            "undelegated": {"aten::sub": outside},
        }
        paths.append(tmp_path / f"{label}.json")
        paths[-1].write_text(json.dumps({"cases": {"operators/test_a.py::test/0": case}}))
    comparison = compare(*paths)
    assert bool(comparison.behind) is behind
    assert bool(comparison.ahead) is ahead
    assert ("behind upstream: 1" in comparison.to_table()) is behind


def test_a_case_of_one_run_alone_is_missing_in_the_other(tmp_path: Path) -> None:
    case = {"outcome": "passed", "delegated": {"aten::add": 1}, "undelegated": {}}
    full, empty = tmp_path / "full.json", tmp_path / "empty.json"
    full.write_text(json.dumps({"cases": {"a": case}}))
    empty.write_text(json.dumps({"cases": {}}))
    assert [pair.name for pair in compare(empty, full).behind] == ["a"]
    assert "1 missing" in compare(empty, full).to_table()
    # That upstream did not run it is no merit of ours.
    assert compare(full, empty).ahead == ()


def test_only_the_tests_that_another_run_missed(tmp_path: Path) -> None:
    outcomes = {"a/0": "passed", "b/0": "passed", "b/1": "mismatch", "c/0": "skipped"}
    outcomes = {f"operators/test_x.py::{name}": got for name, got in outcomes.items()}
    first = tmp_path / "first.json"
    first.write_text(json.dumps({"cases": {n: {"outcome": got} for n, got in outcomes.items()}}))
    options = SimpleNamespace(
        **dict(flow="coreml", source=str(Source.UPSTREAM), engine="auto", sample=1.0, results=None),
        missed=first,
    )
    items = [SimpleNamespace(nodeid=f"/any/operators/test_x.py::{name}") for name in "abcd"]
    dropped: list[Any] = []
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    )
    Suite(options).pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert [item.nodeid[-1] for item in items] == ["b"]
    assert len(dropped) == 3
