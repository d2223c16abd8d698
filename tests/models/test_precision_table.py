"""The table of precisions in ``docs/models.md``: what ``auto`` reaches, and with which islands."""

from __future__ import annotations

import statistics

import pytest
from models.architectures import Architecture
from models.measuring import measure_precision
from models.model_table import PAGE
from models.precision_table import MODELS, SECTION, read, rows
from models.rows import Row
from support.generated_sections import with_section
from support.tolerances import SQNR_AUTO, SQNR_FP16_GUARDED, SQNR_FP16_OF_MODELS

PAGE_TEXT = PAGE.read_text("utf-8")
STATED = read(PAGE_TEXT)
CASES = [
    pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.slow)
    for row in MODELS
    if row.name in STATED
]


# Models of other libraries warn of what they do.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", CASES)
def test_auto_reaches_its_target_with_islands_only_where_fp16_misses_it(
    row: Architecture | Row,
) -> None:
    measured = measure_precision(*row.build())
    assert measured.auto_db >= SQNR_FP16_OF_MODELS.get(row.name, SQNR_AUTO)
    if STATED[row.name].islands == 0:
        assert measured.islands == 0
        assert measured.auto_db == measured.fp16_db


def test_the_page_has_the_table_of_precisions() -> None:
    assert list(STATED) == [row.name for row in MODELS if row.name in STATED]
    assert with_section(PAGE_TEXT, SECTION, rows(STATED)) == PAGE_TEXT


def test_the_page_states_what_auto_promises() -> None:
    assert statistics.median(stated.islands for stated in STATED.values()) == 0
    for name, stated in STATED.items():
        assert stated.auto_db >= SQNR_FP16_OF_MODELS.get(name, SQNR_FP16_GUARDED), name
        assert stated.fp16_db < SQNR_FP16_GUARDED or stated.islands == 0, name
