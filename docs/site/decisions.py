"""The list of decisions, from the first lines of their pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "adr"


def pages() -> list[Path]:
    """Return the files of all decisions, by number."""
    return sorted(_FOLDER.glob("[0-9]*.md"))


def index() -> str:
    """Return the page that lists all decisions."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Decisions"
    yield ""
    yield "Each page has one decision, its reasons, and its price. The newest come first."
    yield ""
    yield "| | decision |"
    yield "|---:|---|"
    for page in reversed(pages()):
        heading = page.read_text("utf-8").partition("\n")[0]
        match = re.fullmatch(r"# (\d+)\. (.+)", heading)
        if match is None:
            raise ValueError(f"{page} begins with no number and title: {heading!r}")
        yield f"| {match[1]} | [{match[2]}]({page.name}) |"
