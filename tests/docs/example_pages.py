"""Writes the pages in ``docs/examples``: ``PYTHONPATH=tests python -m tests.docs.example_pages``.

Each is what a command in the documentation writes. Profile and sweep have times of this machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.documents import DOCS, FIRST, blocks, reading

REPORT = DOCS / "examples" / "delegation-report.html"
PROFILE = DOCS / "examples" / "profile.html"
SWEEP = DOCS / "examples" / "sweep.html"


def report(folder: Path) -> str:
    """The delegation report of the first page, without the name of the folder."""
    return _written(FIRST, "net.html", folder)


def profile(folder: Path) -> str:
    """The profile of the page on developer tools."""
    return _written(DOCS / "devtools.md", "profile.html", folder)


def sweep(folder: Path) -> str:
    """The results of the guide to sweeps."""
    return _written(DOCS / "sweep.md", "sweep_sweep/index.html", folder)


def _written(page: Path, name: str, folder: Path) -> str:
    """Return the content of a file in an empty folder once a page is followed so far."""
    path = folder / name
    with reading(folder) as reader:
        for block in blocks(page):
            if block.is_followed:
                reader.follow(block)
            if path.exists():
                return path.read_text("utf-8").replace(f"{folder}/", "")
    raise ValueError(f"{page} writes no {name}")


if __name__ == "__main__":
    for target, make in ((REPORT, report), (PROFILE, profile), (SWEEP, sweep)):
        with tempfile.TemporaryDirectory() as temporary:
            target.write_text(make(Path(temporary)), "utf-8")
