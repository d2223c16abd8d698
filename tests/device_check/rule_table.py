"""Writes the table of ``docs/check.md``: ``python -m tests.device_check.rule_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coreml_delegate.device_check import RULES

PAGE = Path(__file__).parents[2] / "docs" / "check.md"
_START, _END = "<!-- rules -->\n", "<!-- end of rules -->"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| rule | finds | consequence | why | remedy |"
    yield "|---|---|---|---|---|"
    for rule in RULES:
        sources = ", ".join(f"[{source.title}]({source.url})" for source in rule.sources)
        yield (
            f"| `{rule.name}` | {rule.finds} | {rule.consequence.text} | {rule.reason} {sources} "
            f"| {rule.remedy} |"
        )


def page(text: str) -> str:
    """Return the document with the table of today."""
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    return before + _START + "\n" + "\n".join(rows()) + "\n\n" + _END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
