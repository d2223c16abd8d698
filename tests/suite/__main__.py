"""Run ExecuTorch's cross-backend suite; ``make suite`` runs all of it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from tests.suite.comparison import compare
from tests.suite.flows import LOWERINGS, Source

PLUGIN = "tests.suite.plugin"
FOLDERS = ("operators", "models")
# torchaudio is no dependency of ours, and none of its models is to be downloaded.
_LEFT_OUT = "test_torchaudio.py"


def suite_folder() -> Path:
    """Where the wheel of executorch has the suite."""
    found = importlib.util.find_spec("executorch.backends.test.suite")
    if found is None or found.origin is None:
        raise SystemExit("executorch is not installed, or has no backends/test/suite")
    return Path(found.origin).parent


def pytest_arguments(options: argparse.Namespace, more: list[str]) -> list[str]:
    """How pytest is to be called: with our plugin, and with no configuration but ours."""
    root = suite_folder()
    arguments = [
        *("-c", os.devnull, "--rootdir", str(root), "--confcutdir", str(root)),
        *("-p", PLUGIN, "-p", "no:cacheprovider", "--disable-warnings", "--tb=no", "-q"),
        *("--flow", options.flow, "--engine", options.engine, "--sample", str(options.sample)),
        *("--source", str(Source.UPSTREAM if options.upstream else Source.OURS)),
        *("--ignore", str(root / "models" / _LEFT_OUT)),
    ]
    if options.jobs:
        # A test may kill its process: it is counted as a crash, and another process goes on.
        arguments += ["-n", str(options.jobs), "--max-worker-restart", "1000"]
    if options.missed is not None:
        arguments += ["--missed", str(options.missed.absolute())]
    if options.results is not None:
        arguments += ["--results", str(options.results.absolute())]
    return arguments + more + [str(root / name) for name in options.files or FOLDERS]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    made.add_argument("--flow", choices=tuple(LOWERINGS), default="coreml")
    made.add_argument("--engine", choices=(*ENGINES, AUTO), default=AUTO)
    made.add_argument("--upstream", action="store_true", help="lower with ExecuTorch's own backend")
    made.add_argument("--sample", type=float, default=1.0, help="share of the tests (0 to 1)")
    made.add_argument(
        "--missed", type=Path, help="results of another run: only the tests that it did not pass"
    )
    made.add_argument("--jobs", type=int, default=0, help="processes; 0 for this one")
    made.add_argument("--results", type=Path, help="JSON file to write")
    made.add_argument("--files", nargs="*", help="relative to the folder of the suite")
    made.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OURS", "UPSTREAM"), help="results of two runs"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the suite or compare two runs; arguments that are not ours go to pytest.

    Returns:
        0 if every case passed that could, or if ours is behind in no case.
    """
    options, more = parser().parse_known_args(argv)
    if options.compare:
        comparison = compare(*options.compare)
        sys.stdout.write(comparison.to_table() + "\n")
        return int(bool(comparison.behind))
    return int(pytest.main(pytest_arguments(options, more)))


if __name__ == "__main__":
    sys.exit(main())
