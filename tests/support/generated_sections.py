"""Sections of documents that commands write, between two comments."""

from __future__ import annotations

from collections.abc import Iterable


def with_section(text: str, name: str, lines: Iterable[str]) -> str:
    """Return the document with new lines in the named section.

    Args:
        text: The document, with ``<!-- NAME -->`` and ``<!-- end of NAME -->``.
        name: The section's name.
        lines: Its content.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, after_start = text.partition(start)
    _, _, after = after_start.partition(end)
    return before + start + "\n" + "\n".join(lines) + "\n\n" + end + after
