"""Writes the tables of images: ``PYTHONPATH=tests python -m tests.llm.vision_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coreml_delegate.llm.vision import REFUSED, TEXT_REFUSED
from tests.support.generated_sections import with_section
from tests.support.vision_families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "llm.md"


def rows() -> Iterator[str]:
    """Yield the lines of both tables."""
    yield "| `model_type` | models | tower and projector |"
    yield "|---|---|---|"
    for name, family in FAMILIES.items():
        yield f"| `{name}` | {family.models} | {family.has} |"
    yield ""
    yield "| images not supported | because of | text |"
    yield "|---|---|---|"
    for name, reason in REFUSED.items():
        yield f"| `{name}` | {reason} | {'no' if name in TEXT_REFUSED else 'yes'} |"


def page(text: str) -> str:
    """Return the document with the tables of today."""
    return with_section(text, "vision families", rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
