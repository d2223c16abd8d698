"""Writes the tables of ``docs/graph.md``: ``python -m tests.graph.operation_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coreml_delegate.graph.emitter import OPERATIONS, REFUSED
from coreml_delegate.graph.tensor_types import ALL, BOOLEANS, FLOATS, INTEGERS, NUMBERS, DType
from tests.support.generated_sections import with_section

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"
_GROUPS = {
    frozenset(ALL): "all",
    frozenset(NUMBERS): "numbers",
    frozenset(FLOATS): "floats",
    frozenset(INTEGERS): "integers",
    frozenset(INTEGERS | BOOLEANS): "integers, bool",
    frozenset(BOOLEANS): "bool",
}
_INTERNAL = {"argument", "closure_argument", "size"}


def rows() -> Iterator[str]:
    """Yield the lines of both tables."""
    yield "| operation | element types | result |"
    yield "|---|---|---|"
    for name, record in sorted(OPERATIONS.items()):
        if name in _INTERNAL:
            continue
        listed = ", ".join(dtype.label for dtype in DType if dtype in record.dtypes)
        yield f"| `{name}` | {_GROUPS.get(record.dtypes, listed)} | {record.summary} |"
    yield ""
    yield "| refused | why |"
    yield "|---|---|"
    for name, reason in sorted(REFUSED.items()):
        yield f"| `{name}` | {reason} |"


def page(text: str) -> str:
    """Return the document with the tables of today."""
    return with_section(text, "operations", rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
