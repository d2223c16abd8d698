"""The models of ``docs/models.md``: each is lowered and compared with what its row says."""

from __future__ import annotations

import pytest
from models.measuring import ENGINES, measure
from models.model_table import PAGE, read, rows
from models.rows import ROWS, Row
from support.generated_sections import with_section
from support.tolerances import (
    SQNR_FP16,
    SQNR_FP16_OF_MODELS,
    SQNR_FP32,
    SQNR_FP32_OF_MODELS,
)

from coreml_delegate.options.compile_specs import Precision

PAGE_TEXT = PAGE.read_text("utf-8")
STATED = read(PAGE_TEXT)
CASES = [
    pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.slow) for row in ROWS
]


def _assert_as_stated(row: Row, precision: Precision, floor: float) -> None:
    found, stated = measure(row, [precision], ENGINES), STATED[row.name]
    assert (found.partitions, found.on_cpu) == (stated.partitions, stated.on_cpu)
    assert found.reasons == stated.reasons
    assert min(found.decibels.values()) >= floor, found.decibels


# Models of other libraries warn of what they do.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", CASES)
def test_a_model_is_lowered_as_the_page_says(row: Row) -> None:
    _assert_as_stated(row, Precision.FLOAT32, SQNR_FP32_OF_MODELS.get(row.name, SQNR_FP32))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [row for row in ROWS if not row.picks], ids=lambda row: row.name)
def test_a_model_in_fp16_is_close_to_eager(row: Row) -> None:
    _assert_as_stated(row, Precision.FLOAT16, SQNR_FP16_OF_MODELS.get(row.name, SQNR_FP16))


def test_the_page_has_the_tables_of_its_rows() -> None:
    assert list(STATED) == [row.name for row in ROWS]
    assert with_section(PAGE_TEXT, "models", rows(STATED)) == PAGE_TEXT


def test_the_page_states_what_the_tests_demand() -> None:
    for row in ROWS:
        stated = STATED[row.name]
        for (precision, engine), decibels in stated.decibels.items():
            lower, usual = (
                (SQNR_FP32_OF_MODELS, SQNR_FP32)
                if precision == Precision.FLOAT32.value
                else (SQNR_FP16_OF_MODELS, SQNR_FP16)
            )
            assert decibels >= lower.get(row.name, usual), (row.name, precision, engine)
