"""The table of models for the neural engine in ``docs/models.md``."""

from __future__ import annotations

import pytest
from models.architectures import Architecture
from models.device_table import MODELS, SECTION, measure, read, rows
from models.model_table import PAGE
from models.rows import Row
from support.generated_sections import with_section

PAGE_TEXT = PAGE.read_text("utf-8")
STATED = read(PAGE_TEXT)
QUICK = "BERT, tied weights"
CASES = [
    pytest.param(row, id=row.name, marks=() if row.name == QUICK else pytest.mark.slow)
    for row in MODELS
    if row.name in STATED
]


def test_the_page_has_the_table() -> None:
    assert list(STATED) == [row.name for row in MODELS if row.name in STATED]
    assert with_section(PAGE_TEXT, SECTION, rows(STATED)) == PAGE_TEXT


def test_the_form_for_the_neural_engine_has_no_findings_and_the_same_numbers() -> None:
    for name, programs in STATED.items():
        plain, shaped = programs["plain"], programs["shaped"]
        assert shaped.findings == 0, name
        assert shaped.partitions == plain.partitions, name
        assert plain.db is None or (shaped.db or 0) >= plain.db - 1, name


# Models of other libraries warn of what they do.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", CASES)
def test_a_model_has_its_row(row: Row | Architecture) -> None:
    for who, measured in measure(row, has_upstream=False).items():
        stated = STATED[row.name][who]
        assert measured.findings == stated.findings, who
        assert measured.partitions == stated.partitions, who
        assert who != "shaped" or measured.stay == stated.stay
