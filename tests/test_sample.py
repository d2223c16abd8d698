"""The sample of ``make test`` (``support.sample``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import sample


@dataclass(frozen=True)
class Test:
    """The attributes of ``pytest.Item`` that the sample reads."""

    __test__ = False
    nodeid: str

    @property
    def name(self) -> str:
        return self.nodeid.partition("::")[2]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "times.txt"
    monkeypatch.setattr(sample, "TIMES", path)
    return path


def _names(tests: list[Any]) -> list[str]:
    return sorted(test.name for test in sample.sample_of(tests))


def test_a_module_has_the_tests_that_fit_into_its_time(times: Path) -> None:
    times.write_text("0.50 a.py::test_short\n9.00 b.py::test_long\n8.00 b.py::test_less\n")
    short = [Test(f"tests/a.py::test_short[{n}]@group") for n in range(100)]  # 50 s: 5% are 2.5
    long = [Test(f"tests/b.py::test_{name}[{n}]") for name in ("long", "less") for n in range(3)]
    new = [Test(f"tests/b.py::test_new[{n}]") for n in range(5)]
    names = _names([*short, *long, *new])
    assert sum("short" in name for name in names) == 5
    assert sum("long" in name for name in names) == 0
    assert sum("less" in name for name in names) == 1
    assert sum("new" in name for name in names) == 5
    assert _names([*reversed(long), *new, *short]) == names


def test_a_test_that_takes_too_long_is_left_to_the_rest(times: Path) -> None:
    times.write_text("16.00 a.py::test_long\n")
    assert _names([Test("tests/a.py::test_long")]) == []


def test_times_are_means_of_cases(times: Path) -> None:
    times.write_text("3.00 a.py::test_before\n1.00 a.py::test_again\n")
    recorder = sample.Recorder()
    for case, seconds in (("x", 1.0), ("x", 2.0), ("y", 5.0)):
        _report(recorder, f"tests/a.py::test_again[{case}]", seconds)
    _report(recorder, "tests/b.py::test_brief@group", 0.01)
    recorder.pytest_sessionfinish()
    assert times.read_text() == "4.00 a.py::test_again\n3.00 a.py::test_before\n"


def _report(recorder: sample.Recorder, nodeid: str, seconds: float) -> None:
    location = (nodeid, 0, nodeid)
    report = pytest.TestReport(nodeid, location, {}, "passed", None, "call", duration=seconds)
    recorder.pytest_runtest_logreport(report)
