"""The report's HTML page: complete, self-contained, and interactive in a browser, offline."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.browser import needs_browser, rendered

from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.partition import (
    BufferReport,
    Coverage,
    DelegationReport,
    DeviceFinding,
    NodeReport,
    Obstacle,
    PartitionReport,
    SourceLine,
)
from coreml_delegate.partition.report.drawing import (
    BOX_HEIGHT,
    BOX_WIDTH,
    MANY,
    draw,
    sections,
)

HOSTILE = "</script><script>alert('x')</script><b>&"
REASON = Reason(ReasonCode.NO_RULE, f"no translation of {HOSTILE}", remedy="Write <another> model")


def node(number: int, partition: str | None, *inputs: int, module: str = "net") -> NodeReport:
    return NodeReport(
        name=f"node_{number}",
        op="aten.relu.default" if partition else "aten.asinh.default",
        inputs=tuple(f"node_{i}" for i in inputs),
        arguments=("float32[2]",),
        results=("float32[2]",),
        module=module,
        module_class=f"my.{HOSTILE}",
        source=SourceLine("/me/model.py", 7, "forward", f"y = f(x)  # {HOSTILE}"),
        partition=partition,
        reason=None if partition else REASON,
        flops=2,
        weight_bytes=0,
    )


def report_of(nodes: list[NodeReport]) -> DelegationReport:
    tags = dict.fromkeys(n.partition for n in nodes if n.partition)
    left = [n for n in nodes if not n.delegated]
    return DelegationReport(
        nodes=tuple(nodes),
        partitions=tuple(
            PartitionReport(tag, "iOS15", (), 1, (("aten.relu.default", 1),), 2, 0, 0, 1, 8, 1, 8)
            for tag in tags
        ),
        obstacles=(
            Obstacle(("aten.asinh.default",), (REASON,), tuple(n.name for n in left), 2, 1, 1),
        ),
        first_split=left[0].name,
        weights=Coverage(0, 0),
    )


def chain(length: int) -> DelegationReport:
    """Return a chain of calls: every tenth on the CPU, fifty in each module."""
    return report_of(
        [
            node(
                n,
                None if n % 10 == 5 else f"coreml_{(n + 5) // 10}",
                *([n - 1] if n else []),
                module=f"net.block{n // 50}.part",
            )
            for n in range(length)
        ]
    )


SMALL = report_of([node(0, "coreml_0"), node(1, None, 0), node(2, "coreml_1", 0, 1)])


class Document(HTMLParser):
    """Parses elements with their attributes; fails if tags do not match."""

    VOID = frozenset({"meta", "input", "option", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.elements)


def test_the_page_refers_to_no_other_resource() -> None:
    page = SMALL.to_html()
    for _, attributes in Document(page).elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page


FOUND = DeviceFinding(
    rule="topk",
    consequence="leaves the neural engine",
    delegate="forward_0",
    places=(f"topk 'y' ({HOSTILE})",),
    others=3,
    got="at the end",
    reason="It does.",
    remedy="Leave it out",
    sources=(("A & B", "https://example.org/a?b=1&c=2"),),
)


def test_findings_of_a_check_are_listed() -> None:
    page = SMALL.to_html(device=[FOUND])
    assert page.count("<h2>Before the device</h2>") == 1
    Document(page)
    (row,) = re.findall(r'<table id="device">.*?<tr><td>(.*?)</tr>\n</table>', page, re.DOTALL)
    assert HOSTILE not in row
    assert HOSTILE in html.unescape(row)
    assert "and 3 more" in row
    assert '<a href="https://example.org/a?b=1&amp;c=2" rel="noreferrer">A &amp; B</a>' in row


def test_a_check_that_found_nothing_says_so() -> None:
    assert "None of the documented causes" in SMALL.to_html(device=[])
    assert "Before the device" not in SMALL.to_html()


def test_every_node_is_drawn_and_described() -> None:
    page = SMALL.to_html("A <title>")
    assert "<h1>A &lt;title&gt;</h1>" in page
    anchors = [a["data-for"] for tag, a in Document(page).elements if "data-for" in a]
    assert anchors == ["node-0", "node-1", "node-2"]
    assert Document(page).count("path") == 3
    (data,) = re.findall(r'<script type="application/json" id="details">(.*?)</script>', page)
    details = json.loads(data)
    assert dict(details["node-1"]["facts"])["why not"] == str(REASON)
    assert dict(details["node-1"]["facts"])["remedy"] == "Write <another> model"
    assert "why not" not in dict(details["node-0"]["facts"])


def test_text_of_the_model_is_escaped() -> None:
    page = SMALL.to_html()
    assert Document(page).count("script") == 2
    assert "<b>&" not in page


def test_mutable_buffers_are_listed() -> None:
    assert 'id="buffers"' not in SMALL.to_html()
    state = BufferReport("cache", "float32", ("2", "8"), 64, "coreml_0", "", "constant")
    passed = BufferReport("count", "int64", (), 8, None, f"it is {HOSTILE}", "zero")
    page = dataclasses.replace(SMALL, buffers=(state, passed)).to_html()
    ids = [attributes.get("id") for _, attributes in Document(page).elements]
    assert "buffers" in ids
    assert "<code>float32[2, 8]</code>" in page
    assert "state of coreml_0, kept as float16, at first a constant</td>" in page
    assert (
        f"passed in and out: it is {html.escape(HOSTILE).replace('&#x27;', '&#39;')}</td>" in page
    )


def test_equal_reports_give_equal_pages() -> None:
    assert chain(30).to_html() == chain(30).to_html()


# Drawing


def test_boxes_stand_apart_and_below_the_boxes_they_depend_on() -> None:
    inputs = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["a", "d", "outside"]}
    drawing = draw(inputs)
    boxes = {box.key: box for box in drawing.boxes}
    assert list(boxes) == list(inputs)
    assert all(boxes[e.end].y >= boxes[e.start].y + BOX_HEIGHT for e in drawing.edges)
    assert {(e.start, e.end) for e in drawing.edges} == {
        *(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "e"), ("d", "e"))
    }
    assert boxes["b"].y == boxes["c"].y
    assert abs(boxes["b"].x - boxes["c"].x) >= BOX_WIDTH
    assert all(0 <= b.x <= drawing.width - BOX_WIDTH for b in drawing.boxes)
    assert all(0 <= b.y <= drawing.height - BOX_HEIGHT for b in drawing.boxes)


def test_neighbours_stand_in_the_same_order() -> None:
    inputs = {"a": [], "b": [], "under b": ["b"], "under a": ["a"]}
    boxes = {box.key: box for box in draw(inputs).boxes}
    assert (boxes["a"].x < boxes["b"].x) is (boxes["under a"].x < boxes["under b"].x)


def test_an_empty_graph_is_drawn_without_boxes() -> None:
    assert draw({}).boxes == ()


# Sections


def test_sections_depend_only_on_earlier_sections() -> None:
    long = chain(1000)
    found = sections(long.nodes)
    seen: set[str] = set()
    for section in found:
        names = {n.name for n in section.nodes}
        assert {i for n in section.nodes for i in n.inputs} <= seen | names
        assert {n.partition for n in section.nodes} == {section.partition}
        assert len(names) <= MANY
        seen |= names
    assert seen == {n.name for n in long.nodes}
    assert sum(len(s.nodes) for s in found) == 1000


def test_a_partition_beside_calls_on_the_cpu_is_one_section() -> None:
    nodes = [node(0, "coreml_0"), node(1, None), node(2, "coreml_0", 0), node(3, None, 1, 2)]
    found = [(s.partition, [n.name for n in s.nodes]) for s in sections(nodes)]
    assert found == [
        (None, ["node_1"]),
        ("coreml_0", ["node_0", "node_2"]),
        (None, ["node_3"]),
    ]


def test_long_stretches_are_split_into_sections_by_module() -> None:
    nodes = [
        node(n, "coreml_0", *([n - 1] if n else []), module=f"net.block{n // 50}.part")
        for n in range(200)
    ]
    titles = [(s.title, len(s.nodes)) for s in sections(nodes)]
    assert titles == [(f"net.block{n}", 50) for n in range(4)]


# In a browser


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "small.html"
    path.write_text(SMALL.to_html(), encoding="utf-8")
    return path


@needs_browser
def test_a_click_shows_the_reason(small_page: Path) -> None:
    clicking = small_page.with_name("clicking.html")
    click = "document.querySelector('[data-for=node-1]').dispatchEvent(new MouseEvent('click'))"
    # The browser prints the document when it is idle: the event is over by then.
    page = small_page.read_text("utf-8").replace("</body>", f"<script>{click}</script></body>")
    clicking.write_text(page, encoding="utf-8")
    before = rendered(small_page)
    assert "No node chosen." in before
    after = rendered(clicking)
    chosen = after[after.index('id="chosen"') :]
    assert "<h2>node_1</h2>" in chosen
    assert "no translation of &lt;/script&gt;" in chosen
    assert "<dd>Write &lt;another&gt; model</dd>" in chosen
    assert "/me/model.py:7, in forward" in chosen
    assert 'class="cpu chosen"' in after


@pytest.mark.slow
@needs_browser
def test_the_section_in_the_address_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(chain(2000).to_html(), encoding="utf-8")
    document = rendered(path, "node-1205")
    assert document.count("<details") == len(sections(chain(2000).nodes))
    assert (
        document.count("<details id=") - document.count('open=""')
        == len(sections(chain(2000).nodes)) - 1
    )
    assert "<h2>node_1205</h2>" in document
