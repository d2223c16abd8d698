"""The sample of the tests that ``make test`` runs, and the times that it is drawn by.

Of each module, the tests run that fit into a share of the module's time, in the order of checksums
of their names. So the same tests run every time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TIMES = Path(__file__).parent.parent / "times.txt"
"""A line for each test function: the mean of the seconds of its cases, and its name."""

_MODULE_SECONDS, _MODULE_SHARE = 1.2, 0.05
_LONGEST_SECONDS = 15.0
_LEAST_SECONDS = 0.05


def checksum(name: str) -> int:
    """Return a number that depends on nothing but the name."""
    return zlib.crc32(name.encode())


def sample_of(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of the sample.

    If no test of a known time fits, it has the shortest, unless that takes over 15 seconds.
    """
    times = _read_times()
    modules: defaultdict[str, list[tuple[float, pytest.Item]]] = defaultdict(list)
    for item in items:
        function = _function(item.nodeid)
        modules[function.partition("::")[0]].append((times.get(function, 0.0), item))
    chosen: set[pytest.Item] = set()
    for tests in modules.values():
        budget = max(_MODULE_SECONDS, _MODULE_SHARE * sum(seconds for seconds, _ in tests))
        spent = 0.0
        for seconds, item in sorted(tests, key=_by_checksum):
            if spent + seconds <= budget:
                chosen.add(item)
                spent += seconds
        timed = [test for test in tests if 0 < test[0] <= _LONGEST_SECONDS]
        if timed and spent == 0:
            chosen.add(min(timed, key=lambda test: (test[0], *_by_checksum(test)))[1])
    return chosen


def _by_checksum(test: tuple[float, pytest.Item]) -> tuple[int, str]:
    return checksum(test[1].name), test[1].name


class Recorder:
    """A plugin that records the seconds of each test function."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cases: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a test, its fixtures included."""
        function = _function(report.nodeid)
        self._seconds[function] += report.duration
        self._cases[function].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the times; functions that were not run keep theirs."""
        means = {name: total / len(self._cases[name]) for name, total in self._seconds.items()}
        times = sorted((_read_times() | means).items())
        lines = (f"{mean:.2f} {name}\n" for name, mean in times if mean >= _LEAST_SECONDS)
        TIMES.write_text("".join(lines))


def _read_times() -> dict[str, float]:
    lines = TIMES.read_text().splitlines() if TIMES.exists() else []
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


def _function(nodeid: str) -> str:
    """Return the test function of a test, without its case and the group of pytest-xdist."""
    return nodeid.partition("[")[0].partition("@")[0].removeprefix("tests/")
