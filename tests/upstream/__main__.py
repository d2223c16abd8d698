"""Run the tests of ExecuTorch's own Core ML backend on ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

PLUGIN = "tests.upstream.plugin"


def tests_folder() -> Path:
    """Where the wheel of executorch has the tests."""
    found = importlib.util.find_spec("executorch")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("executorch is not installed")
    (root,) = found.submodule_search_locations
    return Path(root) / "backends" / "apple" / "coreml" / "test"


def main(argv: list[str]) -> int:
    """Run the files named, or all; options go to pytest.

    Returns:
        The exit code of pytest.
    """
    root = tests_folder()
    options = [argument for argument in argv if argument.startswith("-")]
    named = [argument for argument in argv if not argument.startswith("-")]
    files = named or sorted(path.name for path in root.glob("test_*.py"))
    return int(
        pytest.main(
            [
                *("-c", os.devnull, "--rootdir", str(root), "--confcutdir", str(root)),
                *("-p", PLUGIN, "-p", "no:cacheprovider", "--disable-warnings", "-q"),
                # torch traces itself at DEBUG; its records would bury every failure report.
                "--log-level=WARNING",
                *options,
                *(str(root / name) for name in files),
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
