"""Run coremltools' op tests on an engine; ``make conformance`` runs all of them on each.

``--files`` also takes tests of its PyTorch frontend, ``test_torch_quantization_ops.py`` for one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from coreml_delegate.runtime.engines.selection import AUTO, ENGINES

PLUGIN = "tests.conformance.plugin"
FILES = (".", "test_torch_stateful_model.py")
"""Files that are run by default: all op tests, and the frontend's tests of states."""


def tests_folder() -> Path:
    """Where the wheel of coremltools has its op tests."""
    found = importlib.util.find_spec("coremltools")
    if found is None or found.origin is None:
        raise SystemExit("coremltools is not installed")
    return Path(found.origin).parent / "converters" / "mil" / "mil" / "ops" / "tests"


def file_of(name: str) -> Path:
    """A test file: in the folder of the op tests, or else in that of the PyTorch frontend's."""
    root = tests_folder()
    of_frontend = root.parents[2] / "frontend" / "torch" / "test" / name
    return of_frontend if of_frontend.is_file() else root / name


def pytest_arguments(options: argparse.Namespace, more: list[str]) -> list[str]:
    """How pytest is to be called: with our plugin, and with no configuration but ours."""
    root = tests_folder()
    arguments = [
        *("-c", os.devnull, "--rootdir", str(root), "--confcutdir", str(root)),
        *("-p", PLUGIN, "-p", "no:cacheprovider", "--disable-warnings", "--tb=short", "-q"),
        *("--engine", options.engine, "--sample", str(options.sample)),
    ]
    if options.results is not None:
        arguments += ["--results", str(options.results.absolute())]
    return arguments + more + [str(file_of(name)) for name in options.files or FILES]


def main(argv: list[str] | None = None) -> int:
    """Run the tests; arguments that are not ours go to pytest.

    Returns:
        The exit code of pytest: 0 if every test passed that could.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--engine", choices=(*ENGINES, AUTO), default=AUTO)
    parser.add_argument("--sample", type=float, default=1.0, help="share of the tests (0 to 1)")
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument(
        "--files",
        nargs="*",
        help="relative to the folder of the op tests, or of the PyTorch frontend's "
        f"(default: {' '.join(FILES)})",
    )
    options, more = parser.parse_known_args(argv)
    return int(pytest.main(pytest_arguments(options, more)))


if __name__ == "__main__":
    sys.exit(main())
