"""Our backend beside ExecuTorch's own, of the same name, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tolerances import ATOL_RTOL

from tests.upstream.side_by_side import ORDERS

_REPOSITORY = Path(__file__).parents[2]

# On one worker, so that each order runs once.
pytestmark = [pytest.mark.xdist_group("side-by-side"), pytest.mark.slow]


@pytest.fixture(scope="module", params=ORDERS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Output of ``tests.upstream.side_by_side``, by the backend that is imported first."""
    return _output_of("side_by_side", request.param)


def _output_of(module: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.upstream.{module}", *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", "tests"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_each_partitioner_keeps_its_backend(found: dict[str, Any]) -> None:
    assert {name: flow["makers"] for name, flow in found["flows"].items()} == {
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
    assert all(flow["error"] < atol for flow in found["flows"].values())


def test_every_public_name_of_theirs_is_ours_too(found: dict[str, Any]) -> None:
    ours, theirs = (found["names"][who] for who in ("ours", "theirs"))
    assert len(theirs) > 20
    # Ours may take more.
    assert {n: (ours[n] or [])[: len(p)] if p else ours[n] for n, p in theirs.items()} == theirs


def test_both_give_the_same_for_the_same_arguments(found: dict[str, Any]) -> None:
    ours, theirs = (found["results"][who] for who in ("ours", "theirs"))
    functions = {name for name, parameters in found["names"]["theirs"].items() if parameters}
    lowering = {name for name in functions if name.startswith(("preprocess", "copy_"))}
    assert set(theirs) == functions - lowering | {"preprocess_model"}
    assert ours == theirs


def test_beside_another_partitioner_both_leave_the_same_to_it() -> None:
    for kind, by_class in _output_of("beside_others").items():
        assert by_class["ours"] == by_class["theirs"], kind
