"""Writes the tables of ``docs/llm.md``: ``python -m tests.llm.family_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support import encoder_decoder_families as encoder_decoders
from tests.support.generated_sections import with_section
from tests.support.llm_families import FAMILIES, NEURAL_ENGINE, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "llm.md"


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


def encoder_decoder_rows() -> Iterator[str]:
    """Yield the lines of the tables of encoder-decoder models."""
    yield "| `model_type` | models | source | with |"
    yield "|---|---|---|---|"
    for family in encoder_decoders.FAMILIES.values():
        source = "recording" if family.audio or family.samples else "text"
        yield f"| `{family.model_type}` | {family.models} | {source} | {family.has} |"
    yield ""
    yield "| refused | because of |"
    yield "|---|---|"
    for name, (_, _, reason) in encoder_decoders.REFUSED.items():
        yield f"| `{name}` | {reason} |"


def neural_engine_rows() -> Iterator[str]:
    """Yield the line of families with a form for the neural engine."""
    yield ", ".join(f"`{name}`" for name in sorted(NEURAL_ENGINE))


def page(text: str) -> str:
    """Return the document with the tables of today."""
    text = with_section(text, "families", rows())
    text = with_section(text, "neural engine", neural_engine_rows())
    return with_section(text, "encoder-decoders", encoder_decoder_rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
