"""The results of a sweep: records, fronts, the table, the page, and differences."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support.browser import needs_browser, rendered

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.sweeping.fronts import (
    LATENCY,
    SIZE,
    SQNR,
    Earlier,
    columns,
    fronts,
    to_table,
    unbeaten,
)
from coreml_delegate.scripts.sweeping.job_process import Ending, Status
from coreml_delegate.scripts.sweeping.page import to_html
from coreml_delegate.scripts.sweeping.records import (
    PAGE,
    RESULTS,
    Record,
    ResultFolder,
    Row,
    read_results,
    with_latency,
)
from coreml_delegate.scripts.sweeping.sweep_file import Limits, Skipped

HOSTILE = "</script><b>&"


def _row(name: str, size: int, sqnr: float | str, ms: float | None = None, label="net") -> Row:
    coverage = {"partitions": 1, "nodes": 4, "cpu_nodes": 1, "flops": 9, "cpu_flops": 0}
    result = {
        "program_bytes": size,
        "sqnr_db": sqnr,
        "top1_agreement": 0.5,
        "coverage": coverage,
        "missing_kernels": ["aten.cumprod.default"] if label == "lacking" else [],
    }
    latency = None if ms is None else {"median_ms": ms, "runs": 3, "machine": "m"}
    cost = {"seconds": 3.0, "lower_seconds": 1.5}
    record = Record(name, Status.DONE, "", result, cost, latency, Limits())
    return Row(f"{label}[{name}]", label, {"quantize": name}, record)


def _failed(name: str, status=Status.CRASHED) -> Row:
    record = Record(name, status, f"it {HOSTILE}", {}, {"seconds": 1.0}, None, Limits())
    return Row(f"net[{name}]", "net", {"quantize": name}, record)


ROWS = [
    _row("none", 4000, "inf", 3.0),
    _row("int8", 2000, 40.0, 2.0),
    _row("int4", 1000, 20.0, 2.5),
    _row("bad", 3000, 10.0, 1.0),
    _failed("gone"),
]


# Fronts


def test_a_front_is_what_no_pair_beats():
    generator = np.random.default_rng(0)
    for _ in range(200):
        drawn = generator.integers(0, 5, (8, 2)).astype(float)
        points = {n: (cost, gain) for n, (cost, gain) in enumerate(drawn)}
        expected = {
            n
            for n, (cost, gain) in points.items()
            if not any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in drawn)
        }
        assert unbeaten(points) == expected


def test_equal_and_infinite_points_are_on_the_front():
    assert unbeaten({"a": (1, math.inf), "b": (1, math.inf), "c": (2, math.inf)}) == {"a", "b"}
    assert unbeaten({"a": (1, -math.inf), "b": (2, -math.inf)}) == {"a"}


def test_fronts_are_of_one_model():
    other = _row("none", 9000, 5.0, 9.0, label="other")
    assert fronts([*ROWS, other]) == {
        "net[none]": ["size", "latency"],
        "net[int8]": ["size", "latency"],
        "net[int4]": ["size"],
        "net[bad]": ["latency"],
        "net[gone]": [],
        "other[none]": ["size", "latency"],
    }


# Records


def test_a_record_survives_its_file(tmp_path):
    folder = ResultFolder(tmp_path)
    ending = Ending(Status.DONE, "", {"result": {"sqnr_db": "inf"}, "lower_seconds": 2.0}, 3.0)
    record = Record.of("k", ending, Limits(5.0, 7))
    assert record.cost == {"seconds": 3.0, "lower_seconds": 2.0}
    assert folder.find("k") is None
    folder.write(record)
    assert folder.find("k") == record
    timed = with_latency(record, Ending(Status.DONE, "", {"median_ms": 2.0}, 1.0))
    folder.write(timed)
    found = folder.find("k")
    assert found == timed
    assert SQNR.value(found) == math.inf
    assert LATENCY.value(found) == 2.0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["k.json"]


def test_a_latency_that_fails_has_a_reason():
    record = with_latency(ROWS[0].record, Ending(Status.TIMED_OUT, "took long", {}, 1.0))
    assert record.latency == {"reason": "timed out: took long"}
    row = replace(ROWS[0], record=record)
    assert "net[none]: no latency: timed out: took long" in to_table([row])


def test_a_program_that_no_device_loads_is_told():
    table = to_table([_row("none", 4000, 40.0, label="lacking"), ROWS[0]])
    assert "lacking[none]: no device loads it: no kernel for aten.cumprod.default" in table
    assert table.count("no device") == 1


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"schema_version": 0}', '{"schema_version": 1}']
)
def test_a_damaged_record_is_named(text, tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "k.json").write_text(text)
    with pytest.raises(OptionError, match=r"k\.json: .*Remove it"):
        ResultFolder(tmp_path).find("k")


@pytest.mark.parametrize(
    ("status", "then", "now", "stands"),
    [
        (Status.TIMED_OUT, Limits(5), Limits(5), True),
        (Status.TIMED_OUT, Limits(5), Limits(6), False),
        (Status.TIMED_OUT, Limits(5), Limits(), False),
        (Status.OUT_OF_MEMORY, Limits(memory=5), Limits(memory=4), True),
        (Status.OUT_OF_MEMORY, Limits(memory=5), Limits(memory=6), False),
        (Status.OUT_OF_MEMORY, Limits(), Limits(memory=6), True),
        (Status.FAILED, Limits(5), Limits(), True),
        (Status.DONE, Limits(5), Limits(1), True),
    ],
)
def test_a_limit_that_was_raised_lets_a_job_run_again(status, then, now, stands):
    record = replace(_failed("x").record, status=status, limits=then)
    assert record.stands(now) is stands


def test_programs_are_moved_and_dropped(tmp_path):
    made = tmp_path / "made.pte"
    made.write_bytes(b"p")
    folder = ResultFolder(tmp_path / "results")
    folder.keep_program("k", made)
    assert folder.program("k").read_bytes() == b"p"
    assert not made.exists()
    folder.drop_program("k")
    folder.drop_program("k")
    assert list((tmp_path / "results").iterdir()) == []


# Table and page


def test_the_table_has_all_measures_and_reasons():
    table = to_table(ROWS, [Skipped("net[x]", "too old")]).splitlines()
    assert re.split(r"\s{2,}", table[0]) == ["job", *(m.title for m in columns(ROWS)), "front"]
    cells = ["net[int8]", "2.0 kB", "2.000 ms", "40.0 dB", "50.0%", "75.0%", "1", "1", "1.5 s"]
    assert re.split(r"\s{2,}", table[2]) == [*cells, "size, latency"]
    assert "equal" in table[1]
    assert table[-2:] == [f"net[gone]: crashed: it {HOSTILE}", "net[x]: skipped: too old"]


def test_columns_of_classes_appear_with_values():
    labelled = replace(ROWS[0].record, result={**ROWS[0].record.result, "top5_accuracy": 0.25})
    titles = [m.title for m in columns([*ROWS, replace(ROWS[0], record=labelled)])]
    assert set(titles) - {m.title for m in columns(ROWS)} == {"top-5 accuracy"}


def test_differences_from_an_earlier_sweep():
    before = [
        _row("none", 2000, "inf", 2.0),
        _row("int8", 2000, 41.5, 4.0),
        _failed("int4"),
        _row("dropped", 1, 1.0),
    ]
    earlier = Earlier(before)
    measures = columns(ROWS)
    titles = [measure.title for measure in measures]
    size, latency, sqnr = (titles.index(m.title) for m in (SIZE, LATENCY, SQNR))
    told = [earlier.differences(row, measures) for row in ROWS]
    assert (told[0][size], told[0][latency], told[0][sqnr]) == ("+100.0%", "+50.0%", "+0.0 dB")
    assert (told[1][size], told[1][latency], told[1][sqnr]) == ("+0.0%", "-50.0%", "-1.5 dB")
    assert told[2][0] == "was crashed"
    assert told[3][0] == "new"
    assert earlier.removed(ROWS) == ["net[dropped]"]
    assert "net[dropped]: no longer there" in to_table(ROWS, earlier=earlier)
    assert "no longer" not in to_table(ROWS, earlier=Earlier(ROWS))


def test_results_are_read_as_they_were_written(tmp_path):
    ResultFolder(tmp_path).write_results(ROWS, "page")
    assert read_results(tmp_path) == ROWS
    assert (tmp_path / PAGE).read_text() == "page"
    for line in (tmp_path / RESULTS).read_text().splitlines():
        assert json.loads(line)["schema_version"] == 1
    with pytest.raises(OptionError, match=r"no results of a sweep: got .*absent"):
        read_results(tmp_path / "absent")


class _Cells(HTMLParser):
    """The first cells of the rows of the table of jobs, and the circles."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[str] = []
        self.circles: list[dict[str, str | None]] = []
        self.svg = 0
        self._first = False

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "td" and self._first:
            self.jobs.append(given.get("data-order") or "")
        self._first = tag == "tr"
        if tag == "circle":
            self.circles.append(given)
        self.svg += tag == "svg"


def _cells_of(page: str) -> _Cells:
    parser = _Cells()
    parser.feed(page)
    return parser


def test_the_page_draws_fronts_and_needs_no_network():
    page = to_html(ROWS, title=HOSTILE, earlier=Earlier(ROWS[:2]), compared="old")
    assert HOSTILE not in page
    assert not re.search(r"https?://", page)
    cells = _cells_of(page)
    assert cells.svg == 2
    assert len(cells.circles) == 2 * 4
    best = [circle for circle in cells.circles if circle.get("class") == "best"]
    assert len(best) == 3 + 3
    for circle in cells.circles:
        assert 0 <= float(circle["cx"] or -1) <= 480
        assert 0 <= float(circle["cy"] or -1) <= 288
    assert "Small figures: the difference from old." in page


def test_a_page_without_results_has_no_drawing():
    page = to_html([_failed("a")], title="s")
    assert "<figure" not in page
    assert "Without a result" in page


@pytest.mark.parametrize("sqnr", ["inf", "-inf", 0.0, -3.0, 1e-9])
def test_a_single_job_can_be_drawn(sqnr):
    (circle,) = _cells_of(to_html([_row("a", 1, sqnr)], title="s")).circles
    assert 0 <= float(circle["cy"] or -1) <= 288


@needs_browser
def test_columns_sort_and_unknown_values_come_last(tmp_path):
    file = tmp_path / "page.html"
    file.write_text(to_html(ROWS, title="s"))
    sqnr = 1 + [m.title for m in columns(ROWS)].index("SQNR")
    upwards = ["net[bad]", "net[int4]", "net[int8]", "net[none]"]
    for fragment, order in ((f"sort={sqnr}", upwards), (f"sort={sqnr},descending", upwards[::-1])):
        page = rendered(file, fragment)
        assert _cells_of(page).jobs[:5] == [*order, "net[gone]"]
        assert page.count("aria-sort=") - page.count('getAttribute("aria-sort') >= 1
