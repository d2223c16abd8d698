"""Writes the table of ``docs/check.md``: ``python -m tests.device_check.rule_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coreml_delegate.device_check import RULES, Rule
from tests.support.generated_sections import with_section

PAGE = Path(__file__).parents[2] / "docs" / "check.md"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| rule | finds | consequence | why | remedy | carried out by |"
    yield "|---|---|---|---|---|---|"
    for rule in RULES:
        sources = ", ".join(f"[{source.title}]({source.url})" for source in rule.sources)
        yield (
            f"| `{rule.name}` | {rule.finds} | {rule.consequence.text} | {rule.reason} {sources} "
            f"| {rule.remedy} | {_carried_out(rule)} |"
        )


def _carried_out(rule: Rule) -> str:
    if rule.rewrite is None:
        return "-"
    option, _, limit = str(rule.rewrite).partition(", ")
    return f"`{option}`{f', {limit}' if limit else ''}"


def page(text: str) -> str:
    """Return the document with the table of today."""
    return with_section(text, "rules", rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
