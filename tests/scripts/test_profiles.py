"""Profiles: what the events of runs say, the flame chart, the roofline, and the page of them."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.browser import needs_browser, rendered

from coreml_delegate.errors import ProgramError
from coreml_delegate.scripts.profile_page import Span, flame, to_html
from coreml_delegate.scripts.profiles import Operation, Profile, read_profile
from coreml_delegate.scripts.roofline import Machine, draw_roofline, measure_machine

MACHINE = Machine(100e9, 10e9, 2, "f32")
HOSTILE = "</script><b>&\"'"


def operation(name: str, times: tuple[float, ...], module: str | None = "a", **known: Any) -> Any:
    fields: dict[str, Any] = {"delegate": 0, "calls": (name,), "kernel": "k"} | known
    return Operation(name=name, module=module, times=times, **fields)


CONV = operation("conv", (2.0, 2.0), "a.0", fused=("conv", "relu"), flops=4_000_000, bytes=100_000)
RELU = operation("relu", (0.0, 0.0), "a.1", fused=("conv", "relu"), flops=1_000, bytes=10_000)
SINE = operation("sin", (1.0, 3.0), "", delegate=None)
LINEAR = operation("linear", (1.0, 1.0), "b", delegate=1, flops=10, bytes=1000)
PROFILE = Profile((9.0, 11.0), ((3.0, 3.0), (1.5, 1.5)), (CONV, RELU, SINE, LINEAR))


def test_a_module_holds_all_calls_of_an_operation() -> None:
    stacks = [["", "a", "a.0", "a.0.conv"], ["", "a", "a.0", "a.0.norm"]]
    hierarchy = {
        name: {path: (path, "Module") for path in stack}
        for name, stack in zip("xy", stacks, strict=True)
    }

    def event(name: str, times: list[float], **fields: Any) -> Any:
        known = {"delegate_debug_identifier": None, "module_hierarchy": {}}
        known |= {"raw_delegate_debug_metadatas": []} | fields
        return SimpleNamespace(name=name, perf_data=SimpleNamespace(raw=times), **known)

    fused = event("s", [9.0, 1.0, 3.0], delegate_debug_identifier="s", module_hierarchy=hierarchy)
    other = event("t", [9.0, 4.0, 1.0], delegate_debug_identifier="t")
    ends = [event("DELEGATE_CALL", [99.0, 6.0, 8.0]), event("Method::execute", [99.0, 7.0, 9.0])]
    profile = read_profile([[fused, other, *ends]])
    assert profile.operations[0].module == "a.0"
    # The first run does not count; 1 + 4 and 3 + 1.
    assert profile.modules(9) == {"": 4.5, "(no module)": 2.5, "a": 2.0, "a.0": 2.0}
    assert profile.in_kernels(0) == 4.5
    assert profile.total == (7.0, 9.0)
    with pytest.raises(ProgramError, match="differ"):
        read_profile([[fused, *ends], [other, *ends]])


def test_operations_of_a_kernel_are_counted_together() -> None:
    first, second = PROFILE.kernels()
    assert [each.name for each in first.operations] == ["conv", "relu"]
    assert (first.milliseconds, first.flops, first.bytes) == (2.0, 4_001_000, 110_000)
    assert second.operations[0].name == "linear"


def test_unknown_work_stays_unknown() -> None:
    known = operation("x", (1.0,), fused=("x", "y"), flops=1, bytes=1)
    profile = Profile((1.0,), ((1.0,),), (known, operation("y", (0.0,), fused=("x", "y"))))
    (kernel,) = profile.kernels()
    assert kernel.flops is None
    assert not draw_roofline([kernel], MACHINE).points


def test_boxes_of_the_flame_chart_lie_in_each_other() -> None:
    spans = list(flame(PROFILE))
    levels: dict[int, list[Span]] = {}
    for span in spans:
        levels.setdefault(span.level, []).append(span)
    for level, row in levels.items():
        for one, two in itertools.pairwise(row):
            assert one.start + one.milliseconds <= two.start + 1e-9
        for span in row if level else ():
            assert any(
                outer.start <= span.start + 1e-9
                and span.start + span.milliseconds <= outer.start + outer.milliseconds + 1e-9
                for outer in levels[level - 1]
            )
    labels = [(span.label, span.start, span.milliseconds) for span in levels[1]]
    assert labels == [
        ("delegate 0", 0.0, 3.0),
        ("CPU", 3.0, 2.0),
        ("delegate 1", 5.0, 1.5),
        ("the host", 6.5, 3.5),
    ]
    (conv,) = (span for span in spans if span.label == "conv")
    assert conv.level == 4  # the method, the delegate, a, a.0
    assert "computed with relu" in conv.facts
    assert not any(span.label == "relu" for span in spans)


def test_kernels_stand_under_the_roof_they_are_measured_by() -> None:
    conv = PROFILE.kernels()[0]
    (point,) = draw_roofline([conv], MACHINE).points
    assert point.flops_per_second == pytest.approx(4_001_000 / 2e-3)
    assert point.intensity == pytest.approx(4_001_000 / 110_000)
    assert MACHINE.ridge == 10
    assert point.share == pytest.approx(4_001_000 / 2e-3 / 100e9)
    slow = Operation("m", 0, None, (), "k", (1.0,), flops=1_000_000, bytes=1_000_000)
    chart = draw_roofline(Profile((1.0,), ((1.0,),), (CONV, RELU, slow)).kernels(), MACHINE)
    left = next(each for each in chart.points if each.kernel.operations[0].name == "m")
    assert left.share == pytest.approx(1e9 / 10e9)
    # The roof rises to the ridge, and is level from there on; y grows downwards.
    (_, foot), (ridge, knee), (_, end) = chart.roof
    assert foot > knee == end
    assert left.x < ridge < chart.points[0].x
    assert chart.points[0].radius > left.radius


def test_this_machine_is_measured() -> None:
    machine = measure_machine(1, "f32")
    assert machine.threads == 1
    # No CPU is below these, and none of a single thread above.
    assert 1e8 < machine.flops_per_second < 1e13
    assert 1e8 < machine.bytes_per_second < 1e12


class Boxes(HTMLParser):
    """The boxes of a flame chart, by label."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "button":
            self.found.append(dict(attrs))


def boxes_of(page: str) -> list[dict[str, str | None]]:
    parser = Boxes()
    parser.feed(page)
    return parser.found


def test_a_page_shows_everything_and_escapes_it() -> None:
    hostile = operation(HOSTILE, (1.0, 1.0), HOSTILE)
    profile = Profile((2.0, 2.0), ((1.5, 1.5),), (hostile, CONV))
    page = to_html(profile, MACHINE, program=HOSTILE, other=PROFILE, other_program="b.pte")
    assert HOSTILE not in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert len(boxes_of(page)) == len(list(flame(profile)))
    assert "Compared with b.pte: 10.000 ms, +8.000 ms" in page
    assert page.count("<circle") == 1


def test_a_page_without_modules_or_work() -> None:
    plain = Operation("x", None, None, (), "", (1.0,))
    page = to_html(Profile((1.0,), (), (plain,)), MACHINE, program="p.pte")
    assert "No kernel of known work" in page
    assert 'id="modules"' not in page


@needs_browser
def test_a_chosen_box_fills_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(to_html(PROFILE, MACHINE, program="p.pte"))
    chosen = next(n for n, span in enumerate(flame(PROFILE)) if span.label == "delegate 1")
    boxes = boxes_of(rendered(file, f"box-{chosen}"))
    assert boxes[chosen]["aria-pressed"] == "true"
    assert "width: 100%" in (boxes[chosen]["style"] or "")
    hidden = [n for n, box in enumerate(boxes) if "hidden" in box]
    names = [span.label for span in flame(PROFILE)]
    assert {"delegate 0", "CPU", "conv", "the host"} <= {names[n] for n in hidden}
    assert names.index("linear") not in hidden
