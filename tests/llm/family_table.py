"""Writes the tables of ``docs/llm.md``: ``python -m tests.llm.family_table``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

_TESTS = Path(__file__).parents[1]
if str(_TESTS) not in sys.path:
    sys.path.insert(0, str(_TESTS))

from support.llm_families import FAMILIES, REFUSED  # noqa: E402 - after the path above

PAGE = _TESTS.parent / "docs" / "llm.md"
_START, _END = "<!-- families -->\n", "<!-- end of families -->"


def rows() -> Iterator[str]:
    """Yield the lines of both tables."""
    yield "| `model_type` | models | positions | sliding window | with |"
    yield "|---|---|---|---|---|"
    for name, family in sorted(FAMILIES.items()):
        window = f"{family.window} layers" if family.window else ""
        mark = "\\*" if family.copies else ""
        yield (
            f"| `{name}`{mark} | {family.models} | {family.positions} | {window} | {family.has} |"
        )
    yield ""
    yield "| refused | because of |"
    yield "|---|---|"
    for name, (_, _, reason) in REFUSED.items():
        yield f"| `{name}` | {reason} |"


def page(text: str) -> str:
    """Return the document with the tables of today."""
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    return before + _START + "\n" + "\n".join(rows()) + "\n\n" + _END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
